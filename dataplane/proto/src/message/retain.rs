//! Pins that a [`RetainItem`] sets or ends.

use super::items::RetainItem;
use super::priority::ObjectPriority;
use crate::digest::Digest;
use crate::limits::Limits;

/// Pin of a [`RetainItem`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Retaining {
    /// Soft pin of an object.
    Soft,
    /// The object joins the retention of this number.
    Object(u64),
    /// The objects of the group join the retention of this number, which is the group's.
    Group(u64),
    /// All objects of the retention of this number.
    All(u64),
    /// Priority of an object, from now on.
    Priority(ObjectPriority),
}

impl RetainItem {
    /// Returns the item for a pin of this duration: with a digest of the object, or of a slot of the shard.
    #[must_use]
    pub const fn of(what: Retaining, digest: Digest, tenant: u32, duration_ms: u32) -> Self {
        let (what, number) = match what {
            Retaining::Soft => (1, 0),
            Retaining::Object(number) => (2, number),
            Retaining::Group(number) => (3, number),
            Retaining::All(number) => (4, number),
            Retaining::Priority(priority) => (5, priority.bits() as u64),
        };
        Self { digest, number, tenant, duration_ms, what }
    }

    /// Returns what is pinned; `None` if this version does not know it, or the duration exceeds the limit. A retention
    /// begins with a duration, and ends as a whole.
    #[must_use]
    pub const fn retaining(&self) -> Option<Retaining> {
        let (is_end, number) = (self.duration_ms == 0, self.number);
        match self.what {
            _ if self.duration_ms > Limits::SOFT_PIN_MS => None,
            1 => Some(Retaining::Soft),
            2 if !is_end => Some(Retaining::Object(number)),
            3 if !is_end => Some(Retaining::Group(number)),
            4 => Some(Retaining::All(number)),
            5 if is_end && number <= u8::MAX as u64 => match ObjectPriority::from_bits(number.to_le_bytes()[0]) {
                Some(priority) => Some(Retaining::Priority(priority)),
                None => None,
            },
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_say_what_they_were_made_of_and_others_say_nothing() {
        let item = |what, duration_ms| RetainItem::of(what, Digest(1), 2, duration_ms);
        for what in [Retaining::Soft, Retaining::Object(7), Retaining::Group(8), Retaining::All(9)] {
            assert_eq!(item(what, Limits::SOFT_PIN_MS).retaining(), Some(what));
            assert_eq!(item(what, Limits::SOFT_PIN_MS + 1).retaining(), None);
        }
        assert_eq!(item(Retaining::Object(7), 0).retaining(), None);
        assert_eq!(item(Retaining::Group(7), 0).retaining(), None);
        assert_eq!(item(Retaining::All(7), 0).retaining(), Some(Retaining::All(7)));
        let lowest = item(Retaining::Priority(ObjectPriority::LOWEST), 0);
        assert_eq!(lowest.retaining(), Some(Retaining::Priority(ObjectPriority::LOWEST)));
        assert_eq!(RetainItem { duration_ms: 1, ..lowest }.retaining(), None, "it has no end");
        for number in [5, 0xfb, 0x1fc, u64::MAX] {
            assert_eq!(RetainItem { number, ..lowest }.retaining(), None, "priority {number:#x}");
        }
        assert_eq!(RetainItem { what: 6, ..item(Retaining::Soft, 1) }.retaining(), None);
    }
}

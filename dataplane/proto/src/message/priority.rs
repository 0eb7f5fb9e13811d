//! Priority of an object: its rank among the objects of its tenant when memory is needed.

use core::fmt;

/// Priority of an object, from -4 to 4; 0 unless its put names another. Within a tenant, objects of a lower priority
/// are evicted before those of a higher one, as far as the rule of the store's eviction says.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct ObjectPriority(i8);

/// Error of a number that is no priority of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PriorityOutOfRange {
    /// The number.
    pub number: i64,
}

impl ObjectPriority {
    /// Lowest priority.
    pub const LOWEST: Self = Self(-4);
    /// Priority of an object whose put names none.
    pub const NORMAL: Self = Self(0);
    /// Highest priority.
    pub const HIGHEST: Self = Self(4);
    /// Number of priorities.
    pub const COUNT: usize = 9;

    /// Returns the priority with this number.
    ///
    /// # Errors
    /// The number is below -4 or above 4.
    pub const fn new(number: i64) -> Result<Self, PriorityOutOfRange> {
        match number {
            -4..=4 => Ok(Self(number.to_le_bytes()[0].cast_signed())),
            _ => Err(PriorityOutOfRange { number }),
        }
    }

    /// Returns its number.
    #[must_use]
    pub const fn number(self) -> i8 {
        self.0
    }

    /// Returns the byte that stands for it: two's complement, so that 0 is the priority of an object without one.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0.cast_unsigned()
    }

    /// Returns the priority that a byte stands for; `None` if there is none.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Option<Self> {
        match bits.cast_signed() {
            number @ -4..=4 => Some(Self(number)),
            _ => None,
        }
    }

    /// Returns the four bits that stand for it where there is no room for a byte.
    #[must_use]
    pub const fn nibble(self) -> u8 {
        self.bits() & 0xf
    }

    /// Returns the priority that four bits stand for; the normal one if there is none.
    #[must_use]
    pub const fn from_nibble(nibble: u8) -> Self {
        match Self::from_bits(((nibble << 4).cast_signed() >> 4).cast_unsigned()) {
            Some(priority) => priority,
            None => Self::NORMAL,
        }
    }
}

impl fmt::Display for ObjectPriority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Display for PriorityOutOfRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the priority of an object is from -4 to 4, not {}", self.number)
    }
}

impl core::error::Error for PriorityOutOfRange {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_are_nine_numbers_and_their_bits_say_which() {
        let all: Vec<_> = (-4..=4).filter_map(|number| ObjectPriority::new(number).ok()).collect();
        assert_eq!(all.len(), ObjectPriority::COUNT);
        assert!(all.is_sorted() && all[0] == ObjectPriority::LOWEST && all[8] == ObjectPriority::HIGHEST);
        for priority in all {
            assert_eq!(ObjectPriority::from_bits(priority.bits()), Some(priority));
            assert_eq!(ObjectPriority::from_nibble(priority.nibble()), priority);
        }
        assert_eq!((ObjectPriority::default(), ObjectPriority::NORMAL.bits()), (ObjectPriority::NORMAL, 0));
        assert_eq!((5..=0xfb).filter_map(ObjectPriority::from_bits).count(), 0);
        for number in [-5, 5, 252, i64::MIN, i64::MAX] {
            let refused = ObjectPriority::new(number).expect_err("it is out of range");
            assert_eq!(refused.to_string(), format!("the priority of an object is from -4 to 4, not {number}"));
        }
    }
}

//! Deadlines of a member that leaves while slots migrate: [`MovesWait`].
//!
//! A member that leaves in order repeats [`Input::PrepareLeave`] until no migration to it or from it is in progress.
//! Objects that their new owners have not fetched are lost when the member ends, and objects that it has not fetched
//! are lost with their former owner. The wait is bounded by progress and in total, because a failed peer must not keep
//! a process from ending.
//!
//! [`Input::PrepareLeave`]: crate::Input::PrepareLeave

use bincode::{Decode, Encode};

/// Time that a leaving member waits for a first reply of the control plane, in nanoseconds: a map that moves slots to
/// it may be in flight.
pub const FIRST_ANSWER_NS: u64 = 1_000_000_000;

/// Slots and objects that remain to be migrated, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovesLeft {
    /// Slots that this member still serves, by the map that it follows: puts in them are acknowledged here.
    pub owned: u64,
    /// Slots that their new owners may not have fetched yet.
    pub leaving: u64,
    /// Slots that this member has not fetched yet.
    pub coming: u64,
    /// Objects of this member, some of them in slots that leave it.
    pub objects: u64,
    /// Objects that this member has imported so far.
    pub imported: u64,
    /// An SSD is still being recovered: peers cannot list yet what leaves, so the lack of progress means nothing.
    pub recovering: bool,
}

impl MovesLeft {
    /// Returns true if a drain of this member is complete: it serves no slot, so nothing is put here any more, and it
    /// has no objects. A member without objects that still serves slots is not drained: the next put would be lost with
    /// it.
    #[must_use]
    pub const fn is_drained(&self) -> bool {
        self.owned == 0 && self.coming == 0 && self.objects == 0 && !self.recovering
    }
}

/// Migrations that are not finished, as the control plane knows them: its reply to
/// [`Input::PrepareLeave`](crate::Input::PrepareLeave).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Moves {
    /// Other owners that may not have fetched everything that migrated to them.
    pub unsettled: u32,
    /// True if slots have moved by a map that the member has not reported to follow.
    pub behind: bool,
    /// True if the member is draining.
    pub draining: bool,
}

/// Deadlines of a member that leaves while slots migrate; all times are nanoseconds of one monotonic clock.
#[derive(Debug)]
pub struct MovesWait {
    begun_ns: u64,
    patience_ns: u64,
    most_ns: u64,
    /// Time of the last progress, or of the first observation of remaining slots.
    progress_ns: u64,
    /// Slots and objects that remained at that time.
    last: MovesLeft,
}

impl MovesWait {
    /// Creates a wait that begins now, ends after `patience_ns` without progress, and after `most_ns` in total.
    #[must_use]
    pub fn new(now_ns: u64, patience_ns: u64, most_ns: u64) -> Self {
        Self { begun_ns: now_ns, patience_ns, most_ns, progress_ns: now_ns, last: MovesLeft::default() }
    }

    /// Returns the number of slots that remain to be migrated, once the wait is over, because nothing remains or a
    /// deadline has passed; `None` while the member has to wait.
    pub fn is_over(&mut self, left: MovesLeft, news: Option<Moves>, now_ns: u64) -> Option<u64> {
        let leaving = if news.is_some_and(|news| news.unsettled == 0) { 0 } else { left.leaving };
        let left = MovesLeft { leaving, ..left };
        let (last, slots) = (self.last, left.leaving + left.coming);
        let begins = last.leaving + last.coming == 0 && slots > 0;
        let fewer = left.leaving < last.leaving || left.coming < last.coming || left.objects < last.objects;
        if begins || fewer || left.imported > last.imported || left.recovering && slots > 0 {
            (self.last, self.progress_ns) = (left, now_ns);
        }
        let waited_ns = now_ns.saturating_sub(self.begun_ns);
        // A map that moves slots may be in flight. A control plane that does not reply at once may still do so.
        let behind = news.map_or(waited_ns < FIRST_ANSWER_NS, |news| news.behind);
        let is_late = now_ns.saturating_sub(self.progress_ns) >= self.patience_ns || waited_ns >= self.most_ns;
        (slots == 0 && !behind || is_late).then_some(slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_member_without_objects_is_drained_once_it_serves_no_slot() {
        let drained = MovesLeft::default();
        assert!(drained.is_drained());
        assert!(!MovesLeft { owned: 1, ..drained }.is_drained(), "the next put is acknowledged here");
        assert!(!MovesLeft { objects: 1, ..drained }.is_drained());
        assert!(!MovesLeft { coming: 1, ..drained }.is_drained(), "objects may still arrive");
        assert!(!MovesLeft { recovering: true, ..drained }.is_drained(), "its SSD may have objects");
        // Reports of new owners are waited for afterwards, with a deadline of their own.
        assert!(MovesLeft { leaving: 1, imported: 1, ..drained }.is_drained());
    }

    #[test]
    fn departure_waits_for_migrations_and_maps_while_there_is_progress() {
        let news = |unsettled, behind| Some(Moves { unsettled, behind, draining: false });
        let leaving = |leaving, objects| MovesLeft { leaving, objects, ..MovesLeft::default() };
        let coming = |coming, imported| MovesLeft { coming, imported, ..MovesLeft::default() };
        let new = || MovesWait::new(7, 5_000 * MS, 20_000 * MS);
        let at = |ms: u64| 7 + ms * MS;
        // No slots are to migrate.
        assert_eq!(new().is_over(leaving(0, 9), news(0, false), at(1)), Some(0));
        // A map that it has not received gave it slots. They migrate object by object, for longer than the patience.
        let mut wait = new();
        assert_eq!(wait.is_over(coming(0, 0), news(0, true), at(900)), None);
        for second in 1..15 {
            assert_eq!(wait.is_over(coming(70, second), news(0, true), at(1000 * second)), None, "{second}");
        }
        assert_eq!(wait.is_over(coming(0, 20), news(0, true), at(15_000)), None, "the control plane has no report yet");
        assert_eq!(wait.is_over(coming(0, 20), news(0, false), at(15_200)), Some(0));
        // New owners have fetched what left, despite the count here; otherwise the member waits, object by object.
        assert_eq!(new().is_over(leaving(9, 9), news(0, false), at(1)), Some(0));
        let mut wait = new();
        for second in 0..9 {
            assert_eq!(wait.is_over(leaving(100, 900 - second), news(1, false), at(1000 * second)), None);
        }
        assert_eq!(wait.is_over(leaving(100, 892), news(1, false), at(12_999)), None);
        assert_eq!(wait.is_over(leaving(100, 892), news(1, false), at(13_000)), Some(100), "no progress");
        let mut wait = new();
        for second in 0..20 {
            assert_eq!(wait.is_over(coming(8, second), news(1, false), at(1000 * second)), None);
        }
        assert_eq!(wait.is_over(coming(8, 20), news(1, false), at(20_000)), Some(8), "the longest wait");
        // A member that hands over serves meanwhile, and its new owners may be slow: it waits for the whole time.
        let mut wait = MovesWait::new(7, 20_000 * MS, 20_000 * MS);
        for second in 0..20 {
            assert_eq!(wait.is_over(leaving(100, 900), news(1, false), at(1000 * second)), None);
        }
        assert_eq!(wait.is_over(leaving(100, 900), news(1, false), at(20_000)), Some(100));
        // Peers wait for the recovery of an SSD here, within the longest wait.
        let recovering = |recovering| MovesLeft { recovering, ..leaving(8, 3) };
        let mut wait = new();
        for second in 1..12 {
            assert_eq!(wait.is_over(recovering(true), news(1, false), at(1000 * second)), None);
        }
        assert_eq!(wait.is_over(recovering(false), news(1, false), at(15_999)), None);
        assert_eq!(wait.is_over(recovering(false), news(1, false), at(16_000)), Some(8));
        // Without an answer a map may still be in flight, for a moment.
        let mut wait = new();
        assert_eq!(wait.is_over(coming(0, 0), None, at(999)), None);
        assert_eq!(wait.is_over(coming(0, 0), None, at(1000)), Some(0));
    }
}

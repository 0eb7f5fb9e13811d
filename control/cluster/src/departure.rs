//! Deadlines of a member that leaves while slots move: [`MovesWait`].
//!
//! A member that leaves in order sends [`Input::PrepareLeave`] until nothing moves to it or from it any more. What it
//! has not given away is lost to others when it ends, and what it has not fetched is gone with its former owner. The
//! wait is bounded by progress and in all, since a peer that has failed must not keep a process from ending.
//!
//! [`Input::PrepareLeave`]: crate::Input::PrepareLeave

/// How long a member that leaves waits for a first answer of the control plane, in nanoseconds: a map that moves slots
/// to it may be on its way.
pub const FIRST_ANSWER_NS: u64 = 1_000_000_000;

/// Slots and objects that are left to move, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovesLeft {
    /// Slots that others may not have yet.
    pub leaving: u64,
    /// Slots that are not here yet.
    pub coming: u64,
    /// Objects here, of which others take those of slots that leave.
    pub objects: u64,
    /// Objects that were taken over so far.
    pub imported: u64,
    /// An SSD is still being recovered: others cannot list yet what leaves, so the lack of progress means nothing.
    pub recovering: bool,
}

/// The control plane's last answer to [`Input::PrepareLeave`](crate::Input::PrepareLeave).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovesNews {
    /// Other owners that may not have all yet that moved to them.
    pub unsettled: u64,
    /// Slots have moved by a map that the member has not said to follow.
    pub behind: bool,
}

/// Deadlines of a member that leaves while slots move; all times are nanoseconds of one monotonic clock.
#[derive(Debug)]
pub struct MovesWait {
    begun_ns: u64,
    patience_ns: u64,
    most_ns: u64,
    /// When something moved last, or was seen to be left first.
    progress_ns: u64,
    /// The slots and objects that were left then.
    last: MovesLeft,
}

impl MovesWait {
    /// A wait that begins now, goes on for `patience_ns` without progress, and for `most_ns` in all.
    #[must_use]
    pub fn new(now_ns: u64, patience_ns: u64, most_ns: u64) -> Self {
        Self { begun_ns: now_ns, patience_ns, most_ns, progress_ns: now_ns, last: MovesLeft::default() }
    }

    /// The number of slots that are still to move, once the member need not wait for them, or not any longer; nothing
    /// while the wait goes on.
    pub fn is_over(&mut self, left: MovesLeft, news: Option<MovesNews>, now_ns: u64) -> Option<u64> {
        let leaving = if news.is_some_and(|news| news.unsettled == 0) { 0 } else { left.leaving };
        let left = MovesLeft { leaving, ..left };
        let (last, slots) = (self.last, left.leaving + left.coming);
        let begins = last.leaving + last.coming == 0 && slots > 0;
        let fewer = left.leaving < last.leaving || left.coming < last.coming || left.objects < last.objects;
        if begins || fewer || left.imported > last.imported || left.recovering && slots > 0 {
            (self.last, self.progress_ns) = (left, now_ns);
        }
        let waited_ns = now_ns.saturating_sub(self.begun_ns);
        // A map that moves slots may not have come here yet. A control plane that does not answer at once may do so.
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
    fn a_departure_waits_for_moves_for_maps_to_come_and_no_longer_than_for_progress() {
        let news = |unsettled, behind| Some(MovesNews { unsettled, behind });
        let leaving = |leaving, objects| MovesLeft { leaving, objects, ..MovesLeft::default() };
        let coming = |coming, imported| MovesLeft { coming, imported, ..MovesLeft::default() };
        let new = || MovesWait::new(7, 5_000 * MS, 20_000 * MS);
        let at = |ms: u64| 7 + ms * MS;
        // Nobody moves anything.
        assert_eq!(new().is_over(leaving(0, 9), news(0, false), at(1)), Some(0));
        // A map gave it slots that it has not heard of. They come, object by object, longer than the patience.
        let mut wait = new();
        assert_eq!(wait.is_over(coming(0, 0), news(0, true), at(900)), None);
        for second in 1..15 {
            assert_eq!(wait.is_over(coming(70, second), news(0, true), at(1000 * second)), None, "{second}");
        }
        assert_eq!(wait.is_over(coming(0, 20), news(0, true), at(15_000)), None, "the control plane does not know");
        assert_eq!(wait.is_over(coming(0, 20), news(0, false), at(15_200)), Some(0));
        // Others have what left, whatever is counted here; where they have not, it is waited for, object by object.
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
        // Others wait for the recovery of an SSD here, within the longest wait.
        let recovering = |recovering| MovesLeft { recovering, ..leaving(8, 3) };
        let mut wait = new();
        for second in 1..12 {
            assert_eq!(wait.is_over(recovering(true), news(1, false), at(1000 * second)), None);
        }
        assert_eq!(wait.is_over(recovering(false), news(1, false), at(15_999)), None);
        assert_eq!(wait.is_over(recovering(false), news(1, false), at(16_000)), Some(8));
        // Without an answer a map may still be on its way, for a moment.
        let mut wait = new();
        assert_eq!(wait.is_over(coming(0, 0), None, at(999)), None);
        assert_eq!(wait.is_over(coming(0, 0), None, at(1000)), Some(0));
    }
}

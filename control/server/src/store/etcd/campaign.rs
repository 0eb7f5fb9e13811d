//! When a standby may take over: pure, fed with what it sees and when.

use std::time::Duration;

use super::{LOOK, SILENCE};

/// Looks that are further apart than this say nothing of the time between: etcd may have been away for everybody.
const GAP: Duration = LOOK.saturating_mul(3);

/// What a look at the leader's key leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Somebody leads.
    Wait,
    /// Nobody leads.
    Vacant,
    /// Whoever set the key in this revision is silent.
    Silent(i64),
}

/// Watches the leader's key.
#[derive(Debug, Default)]
pub(super) struct Campaign {
    /// The revision that was seen, and for how long it has been seen without a gap.
    seen: Option<(i64, Duration)>,
    /// When it was looked last, since any beginning.
    looked: Option<Duration>,
}

impl Campaign {
    /// At `now`, the key was found as it was set in this revision, or there was none.
    pub(super) fn saw(&mut self, now: Duration, modified: Option<i64>) -> Verdict {
        let since = self.looked.replace(now).map(|looked| now.saturating_sub(looked));
        let Some(modified) = modified else {
            self.seen = None;
            return Verdict::Vacant;
        };
        let silent = match (self.seen, since) {
            (Some((seen, silent)), Some(since)) if seen == modified && since <= GAP => silent + since,
            _ => Duration::ZERO,
        };
        self.seen = Some((modified, silent));
        if silent >= SILENCE { Verdict::Silent(modified) } else { Verdict::Wait }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn only_a_leader_that_was_seen_silent_all_the_time_is_taken_over_from() {
        let mut campaign = Campaign::default();
        assert_eq!(campaign.saw(MS, None), Verdict::Vacant);
        // It beats.
        for n in 0..40 {
            assert_eq!(campaign.saw((10 + 150 * n) * MS, Some(1 + i64::from(n) / 2)), Verdict::Wait);
        }
        // It stops, and that takes as long as it is to take.
        let mut at = 6_000 * MS;
        let mut looks = 0;
        while campaign.saw(at, Some(99)) == Verdict::Wait {
            (at, looks) = (at + 150 * MS, looks + 1);
        }
        assert_eq!((looks, campaign.saw(at, Some(99))), (8, Verdict::Silent(99)));
        // etcd was away for a minute: that the key did not change meanwhile says nothing.
        let mut campaign = Campaign::default();
        assert_eq!(campaign.saw(MS, Some(7)), Verdict::Wait);
        assert_eq!(campaign.saw(60_000 * MS, Some(7)), Verdict::Wait);
        assert_eq!(campaign.saw(60_150 * MS, Some(7)), Verdict::Wait);
        assert_eq!(campaign.saw(60_300 * MS, Some(8)), Verdict::Wait);
    }
}

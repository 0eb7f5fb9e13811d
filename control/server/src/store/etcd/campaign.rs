//! Takeover rule of a standby: pure, fed with its observations of the leader's key and their times.

use std::time::Duration;

use super::{LOOK, SILENCE};

/// Longest gap between two reads that count as continuous: over a longer one, etcd may have been unreachable for the
/// leader too.
const GAP: Duration = LOOK.saturating_mul(3);

/// Result of reading the leader's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// A leader is alive.
    Wait,
    /// There is no leader.
    Vacant,
    /// The leader that set the key in this revision is silent.
    Silent(i64),
}

/// Observer of the leader's key.
#[derive(Debug, Default)]
pub(super) struct Campaign {
    /// The revision last read, and the time for which it has been read without a gap.
    seen: Option<(i64, Duration)>,
    /// Time of the last read.
    looked: Option<Duration>,
}

impl Campaign {
    /// Records that at `now` the key was read with this revision, or was absent.
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
    fn takeover_needs_continuous_observation_of_a_silent_leader() {
        let mut campaign = Campaign::default();
        assert_eq!(campaign.saw(MS, None), Verdict::Vacant);
        // It rewrites the key.
        for n in 0..40 {
            assert_eq!(campaign.saw((10 + 150 * n) * MS, Some(1 + i64::from(n) / 2)), Verdict::Wait);
        }
        // It stops; the takeover comes after `SILENCE`.
        let mut at = 6_000 * MS;
        let mut looks = 0;
        while campaign.saw(at, Some(99)) == Verdict::Wait {
            (at, looks) = (at + 150 * MS, looks + 1);
        }
        assert_eq!((looks, campaign.saw(at, Some(99))), (8, Verdict::Silent(99)));
        // etcd was unreachable for a minute: the unchanged key is no evidence.
        let mut campaign = Campaign::default();
        assert_eq!(campaign.saw(MS, Some(7)), Verdict::Wait);
        assert_eq!(campaign.saw(60_000 * MS, Some(7)), Verdict::Wait);
        assert_eq!(campaign.saw(60_150 * MS, Some(7)), Verdict::Wait);
        assert_eq!(campaign.saw(60_300 * MS, Some(8)), Verdict::Wait);
    }
}

//! Which records of a segment that is reclaimed are written again. Data in, decision out.

/// What is known of a live record when its segment is reclaimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Candidate {
    /// Bytes that the record takes on the device.
    pub(crate) record_bytes: u64,
    /// Hits since it was written or written again, counted up to [`crate::MAX_HITS`].
    pub(crate) hits: u8,
    /// Whether a caller wants it kept.
    pub(crate) pinned: bool,
    /// How many more bytes of this segment may be written again.
    pub(crate) budget_bytes: u64,
}

/// What becomes of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// It is appended once more.
    Reinsert,
    /// It goes.
    Drop,
}

/// Reinserts what is pinned or was hit often enough, while the budget lasts; pinned records may use all of it, hot ones
/// leave a quarter of the whole budget to them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReclaimPolicy {
    /// So many hits make a record hot. 0: everything is.
    pub(crate) hot_hits: u8,
    /// The budget of a whole segment.
    pub(crate) budget_bytes: u64,
}

impl ReclaimPolicy {
    /// What becomes of `candidate`.
    pub(crate) const fn decide(&self, candidate: &Candidate) -> Verdict {
        let reserved = if candidate.pinned { 0 } else { self.budget_bytes / 4 };
        let wanted = candidate.pinned || candidate.hits >= self.hot_hits;
        if wanted && candidate.record_bytes + reserved <= candidate.budget_bytes {
            Verdict::Reinsert
        } else {
            Verdict::Drop
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_and_pinned_stay_within_the_budget() {
        let policy = ReclaimPolicy { hot_hits: 2, budget_bytes: 400 };
        let decide = |hits, pinned, budget_bytes| {
            let candidate = Candidate { record_bytes: 100, hits, pinned, budget_bytes };
            policy.decide(&candidate) == Verdict::Reinsert
        };
        assert!(decide(2, false, 400) && decide(2, false, 200) && decide(0, true, 100));
        assert!(!decide(1, false, 400), "cold");
        assert!(!decide(3, false, 199), "the rest is for pinned ones");
        assert!(!decide(3, true, 99), "no budget");
    }
}

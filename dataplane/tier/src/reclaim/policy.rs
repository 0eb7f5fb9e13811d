//! Policy of reclaim: the records of a segment that are rewritten. Data in, decision out.

/// Properties of a live record whose segment is being reclaimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Candidate {
    /// Bytes that the record takes on the device.
    pub(crate) record_bytes: u64,
    /// Hits since it was last written, counted up to [`crate::MAX_HITS`].
    pub(crate) hits: u8,
    /// True if a caller pinned the object.
    pub(crate) pinned: bool,
    /// True if the tenant has a limit and is within its share of the device.
    pub(crate) within_share: bool,
    /// Bytes of this segment that may still be rewritten.
    pub(crate) budget_bytes: u64,
}

/// Decision on a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// The record is appended again.
    Reinsert,
    /// The record is evicted.
    Drop,
}

/// Policy that rewrites records that are pinned or were hit often enough, while the budget lasts; pinned records may
/// use all of it, hot ones leave a quarter of the whole budget to them. Records of tenants within their shares are
/// rewritten whatever the budget: other tenants' writes do not evict them. What a turn may take of the log bounds them
/// all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReclaimPolicy {
    /// Hits that make a record hot. 0: every record is hot.
    pub(crate) hot_hits: u8,
    /// Budget of a whole segment.
    pub(crate) budget_bytes: u64,
}

impl ReclaimPolicy {
    /// Decides on `candidate`.
    pub(crate) const fn decide(&self, candidate: &Candidate) -> Verdict {
        if candidate.within_share {
            return Verdict::Reinsert;
        }
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
            let candidate = Candidate { record_bytes: 100, hits, pinned, within_share: false, budget_bytes };
            policy.decide(&candidate) == Verdict::Reinsert
        };
        assert!(decide(2, false, 400) && decide(2, false, 200) && decide(0, true, 100));
        assert!(!decide(1, false, 400), "cold");
        assert!(!decide(3, false, 199), "the rest is for pinned ones");
        assert!(!decide(3, true, 99), "no budget");
        let of_share = Candidate { record_bytes: 100, hits: 0, pinned: false, within_share: true, budget_bytes: 0 };
        assert_eq!(policy.decide(&of_share), Verdict::Reinsert, "other tenants do not evict it");
    }
}

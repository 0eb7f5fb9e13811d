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
    /// True if the live records of the whole segment fit into its budget.
    pub(crate) mostly_dead: bool,
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
/// use all of it, hot ones leave a quarter of the whole budget to them. A segment that is mostly dead keeps its cold
/// records, too: replaced and removed objects make the room that the log needs, and live ones need not go for it (the
/// cleaning of log-structured file systems, Rosenblum and Ousterhout 1991). Records of tenants within their shares are
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
    /// Returns true for a segment whose live records all fit into the budget.
    pub(crate) const fn is_mostly_dead(&self, live_bytes: u64) -> bool {
        live_bytes <= self.budget_bytes - self.budget_bytes / 4
    }

    /// Decides on `candidate`.
    pub(crate) const fn decide(&self, candidate: &Candidate) -> Verdict {
        if candidate.within_share {
            return Verdict::Reinsert;
        }
        let reserved = if candidate.pinned { 0 } else { self.budget_bytes / 4 };
        let wanted = candidate.pinned || candidate.mostly_dead || candidate.hits >= self.hot_hits;
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

    /// Returns a cold record of a tenant within its share, for which no budget is left.
    const fn of_share() -> Candidate {
        Candidate { record_bytes: 100, hits: 0, pinned: false, within_share: true, mostly_dead: false, budget_bytes: 0 }
    }

    #[test]
    fn hot_and_pinned_stay_within_the_budget() {
        let policy = ReclaimPolicy { hot_hits: 2, budget_bytes: 400 };
        let decide = |hits, pinned, budget_bytes| {
            let plain = Candidate { within_share: false, mostly_dead: false, ..of_share() };
            policy.decide(&Candidate { hits, pinned, budget_bytes, ..plain }) == Verdict::Reinsert
        };
        assert!(decide(2, false, 400) && decide(2, false, 200) && decide(0, true, 100));
        assert!(!decide(1, false, 400), "cold");
        assert!(!decide(3, false, 199), "the rest is for pinned ones");
        assert!(!decide(3, true, 99), "no budget");
        assert_eq!(policy.decide(&of_share()), Verdict::Reinsert, "other tenants do not evict it");
    }

    #[test]
    fn cold_records_of_a_mostly_dead_segment_stay_within_the_budget() {
        let policy = ReclaimPolicy { hot_hits: 2, budget_bytes: 400 };
        assert!(policy.is_mostly_dead(300) && !policy.is_mostly_dead(301));
        let cold = Candidate { within_share: false, mostly_dead: true, ..of_share() };
        let decide = |budget_bytes| policy.decide(&Candidate { budget_bytes, ..cold });
        assert_eq!((decide(200), decide(199)), (Verdict::Reinsert, Verdict::Drop));
    }
}

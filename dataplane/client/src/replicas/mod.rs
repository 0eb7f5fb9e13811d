//! Replica reads: hedging and failover of gets to the replica owner, and spreading gets over both owners.
//!
//! A get is sent to the replica owner if its owner is unreachable (*failover*) or silent for the hedging delay
//! ([`hedge_ns`](crate::Config::hedge_ns); *hedge*), within its deadline and its budget of attempts. Any reply of the
//! replica owner other than the object itself decides nothing: the get then goes back to the owner, and only there. An
//! owner that is merely slow keeps its connection; its late reply is dropped.
//!
//! The hedging delay follows from the slowest of the peer's gets. A connection on which any other request is answered
//! meanwhile is not silent. Hedged gets whose owner answered after all are charged to a budget, which limits the added
//! requests to a few percent where an owner is slow but alive.
//!
//! A get of a whole object that both owners are known to have ([`leases`]) goes to the one that is estimated to
//! complete it first, or to either at random if the estimates are similar. This is limited to whole objects: a replica
//! has a version of its own, and a caller that reads one object by several requests detects by the version whether it
//! has changed.

mod leases;

use kvplane_proto::digest::Digest;
use kvplane_proto::rng::mix64;

use leases::Leases;

/// Most ratio of the estimates of two owners at which they are chosen at random.
const ALIKE: f64 = 2.0;
/// Budget of hedged gets whose owner answered after all, in thousandths of a get.
const EARLY_MOST_MILLI: i64 = 64_000;
/// Budget that each answered get adds, in thousandths of a get: 2 in 100.
const EARLY_EARNED_MILLI: i64 = 20;

/// State of replica reads: leases, and the hedging budget.
pub(crate) struct Replicas {
    /// Leases on objects that both owners have.
    leases: Leases,
    /// State of the random choice between two similar owners.
    turns: u64,
    /// Remaining hedging budget, in thousandths of a get.
    early_milli: i64,
}

impl Replicas {
    pub(crate) fn new() -> Self {
        Self { leases: Leases::default(), turns: 0, early_milli: EARLY_MOST_MILLI }
    }

    /// Ends all leases, as owners may have changed.
    pub(crate) fn end_leases(&mut self) {
        self.leases.end();
    }

    /// Returns true if there is a lease to get the object from the replica owner.
    pub(crate) fn holds(&self, digest: Digest, now_ns: u64) -> bool {
        self.leases.holds(digest, now_ns)
    }

    /// Records the owner's reply for an object: whether it has a replica. The request was sent at `sent_ns`.
    pub(crate) fn told(&mut self, digest: Digest, is_replicated: bool, sent_ns: u64, now_ns: u64) {
        self.leases.told(digest, is_replicated, sent_ns, now_ns);
    }

    /// Records that the replica owner did not have an object, or could not tell.
    pub(crate) fn missed(&mut self, digest: Digest, now_ns: u64) {
        self.leases.missed(digest, now_ns);
    }

    /// Returns true if a get goes to the replica owner, given the estimated times of both owners: the faster one, or
    /// either at random if they are similar.
    pub(crate) fn choose(&mut self, owner_ns: f64, replica_ns: f64, client: u64) -> bool {
        let alike = owner_ns.max(replica_ns) <= owner_ns.min(replica_ns) * ALIKE;
        if alike {
            self.turns = mix64(self.turns ^ client);
        }
        if alike { self.turns & 1 == 1 } else { replica_ns < owner_ns }
    }

    /// Charges the budget for so many hedged gets whose owner answered after all.
    pub(crate) const fn left_early(&mut self, gets: usize) {
        self.early_milli -= 1000 * gets as i64;
    }

    /// Credits the budget for a get that its owner answered.
    pub(crate) fn answered(&mut self) {
        self.early_milli = (self.early_milli + EARLY_EARNED_MILLI).min(EARLY_MOST_MILLI);
    }

    /// Returns true if the budget allows to hedge gets.
    pub(crate) const fn may_hedge(&self) -> bool {
        self.early_milli > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hedged_gets_use_up_the_budget_that_others_have_earned() {
        let mut replicas = Replicas::new();
        replicas.answered();
        replicas.left_early(63);
        assert!(replicas.may_hedge());
        replicas.left_early(1);
        assert!(!replicas.may_hedge(), "the budget is bounded, however many gets were answered");
        replicas.answered();
        assert!(replicas.may_hedge());
    }

    #[test]
    fn the_faster_owner_is_chosen_and_similar_ones_at_random() {
        let mut replicas = Replicas::new();
        assert!(replicas.choose(3.0, 1.0, 7) && !replicas.choose(1.0, 3.0, 7));
        let to_replica = (0..1000).filter(|_| replicas.choose(1.0, 1.5, 7)).count();
        assert!((400..600).contains(&to_replica), "{to_replica}");
    }
}

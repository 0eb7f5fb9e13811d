//! Replica reads: hedging and failover of gets to replica owners, and spreading gets over all owners.
//!
//! A get is sent to the first replica owner if its owner is unreachable (*failover*) or silent for the hedging delay
//! ([`hedge_ns`](crate::Config::hedge_ns); *hedge*), within its deadline and its budget of attempts. Any reply of a
//! replica owner other than the object itself decides nothing: the get then goes to the next replica owner, and from
//! the last one back to the owner, and only there. An owner that is merely slow keeps its connection; its late reply is
//! dropped.
//!
//! The hedging delay follows from the slowest of the peer's gets. A connection on which any other request is answered
//! meanwhile is not silent. Hedged gets whose owner answered after all are charged to a budget, which limits the added
//! requests to a few percent where an owner is slow but alive.
//!
//! A get of a whole object that several owners are known to have ([`leases`]) goes to the one that is estimated to
//! complete it first, or at random to one of those whose estimates are similar. This is limited to whole objects: a
//! replica has a version of its own, and a caller that reads one object by several requests detects by the version
//! whether it has changed.

mod leases;

use kvplane_proto::digest::Digest;
use kvplane_proto::map::ReplicaSet;
use kvplane_proto::rng::mix64;

use leases::Leases;

/// Most ratio of an owner's estimate to the least one at which it takes part in the random choice.
const ALIKE: f64 = 2.0;
/// Budget of hedged gets whose owner answered after all, in thousandths of a get.
const EARLY_MOST_MILLI: i64 = 64_000;
/// Budget that each answered get adds, in thousandths of a get: 2 in 100.
const EARLY_EARNED_MILLI: i64 = 20;

/// State of replica reads: leases, and the hedging budget.
pub(crate) struct Replicas {
    /// Leases on objects that replica owners have.
    leases: Leases,
    /// State of the random choice between similar owners.
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

    /// Returns the replica owners that there is a lease to get the object from.
    pub(crate) fn held(&self, digest: Digest, now_ns: u64) -> ReplicaSet {
        self.leases.held(digest, now_ns)
    }

    /// Records the owner's reply for an object: the replica owners that have it. The request was sent at `sent_ns`.
    pub(crate) fn told(&mut self, digest: Digest, replicas: ReplicaSet, sent_ns: u64, now_ns: u64) {
        self.leases.told(digest, replicas, sent_ns, now_ns);
    }

    /// Records that a replica owner did not have an object, or could not tell.
    pub(crate) fn missed(&mut self, digest: Digest, number: usize, now_ns: u64) {
        self.leases.missed(digest, number, now_ns);
    }

    /// Returns the owner that a get goes to, of those with these estimated times: the fastest one, or one at random of
    /// those that are similar to it.
    ///
    /// # Panics
    /// If there is none.
    pub(crate) fn choose(&mut self, estimates_ns: &[f64], client: u64) -> usize {
        let least_ns = estimates_ns.iter().copied().fold(f64::INFINITY, f64::min);
        let similar = || (0..estimates_ns.len()).filter(|owner| estimates_ns[*owner] <= least_ns * ALIKE);
        let count = similar().count();
        if count > 1 {
            self.turns = mix64(self.turns ^ client);
        }
        let chosen = if count > 1 { self.turns as usize % count } else { 0 };
        similar().nth(chosen).expect("the fastest one is similar to itself")
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
        assert_eq!([replicas.choose(&[3.0, 1.0], 7), replicas.choose(&[1.0, 3.0], 7)], [1, 0]);
        let to_replica = (0..1000).filter(|_| replicas.choose(&[1.0, 1.5], 7) == 1).count();
        assert!((400..600).contains(&to_replica), "{to_replica}");
        let mut counts = [0; 4];
        (0..3000).for_each(|_| counts[replicas.choose(&[1.5, 9.0, 1.0, 2.0], 7)] += 1);
        let similar = [counts[0], counts[2], counts[3]];
        assert!(counts[1] == 0 && similar.into_iter().all(|count| (850..1150).contains(&count)), "{counts:?}");
    }
}

//! Replica owners: which gets ask them instead of the owners, and how many may.
//!
//! A get whose owner cannot be reached, or says nothing for so long ([`hedge_ns`](crate::Config::hedge_ns)), asks the
//! replica owner for its replica, within its deadline and its attempts. Whatever that says but the object itself
//! decides nothing: then the owner is asked again, and only it. An owner that is only slow keeps its connection: what
//! it answers after all is let go.
//!
//! How long that is follows from the slowest of the peer's gets. A connection on which anything else is answered
//! meanwhile is not silent. Gets that were answered after all by the owner that they had left cost a budget, which
//! keeps the requests that this adds to a few in a hundred where an owner is slow but alive.
//!
//! A get of a whole object that both are known to have ([`leases`]) goes to the one that is likely to have it done
//! first, or to either by chance where that is about the same. Only whole objects: a replica has a version of its own,
//! and who reads one object by several requests tells by the version whether it is still the same.

mod leases;

use kvplane_proto::digest::Digest;
use kvplane_proto::rng::mix64;

use leases::Leases;

/// Two owners that would take as long, to this factor, take turns.
const ALIKE: f64 = 2.0;
/// Gets that may turn out to have left an owner too early, before others have earned more of them; in thousandths.
const EARLY_MOST_MILLI: i64 = 64_000;
/// Budget that each get earns: 2 in 100.
const EARLY_EARNED_MILLI: i64 = 20;

/// What is known of replicas, and how early gets may leave their owners.
pub(crate) struct Replicas {
    /// Objects that both owners have.
    leases: Leases,
    /// Turns taken between two that are as good.
    turns: u64,
    /// What is left of the budget of gets that left their owners too early, in thousandths of a get.
    early_milli: i64,
}

impl Replicas {
    pub(crate) fn new() -> Self {
        Self { leases: Leases::default(), turns: 0, early_milli: EARLY_MOST_MILLI }
    }

    /// Owners may have changed: nothing is known of replicas any more.
    pub(crate) fn end_leases(&mut self) {
        self.leases.end();
    }

    /// Whether gets of an object may go to the replica owner.
    pub(crate) fn holds(&self, digest: Digest, now_ns: u64) -> bool {
        self.leases.holds(digest, now_ns)
    }

    /// The owner gave an object and said whether it has a replica; it was asked at `sent_ns`.
    pub(crate) fn told(&mut self, digest: Digest, is_replicated: bool, sent_ns: u64, now_ns: u64) {
        self.leases.told(digest, is_replicated, sent_ns, now_ns);
    }

    /// The replica owner did not have an object, or could not say.
    pub(crate) fn missed(&mut self, digest: Digest, now_ns: u64) {
        self.leases.missed(digest, now_ns);
    }

    /// Whether a get goes to the replica owner, where the owner and it would take so long: to the faster one, or to
    /// either where that is about the same.
    pub(crate) fn choose(&mut self, owner_ns: f64, replica_ns: f64, client: u64) -> bool {
        let alike = owner_ns.max(replica_ns) <= owner_ns.min(replica_ns) * ALIKE;
        if alike {
            self.turns = mix64(self.turns ^ client);
        }
        if alike { self.turns & 1 == 1 } else { replica_ns < owner_ns }
    }

    /// Owners have answered so many gets that had left them.
    pub(crate) const fn left_early(&mut self, gets: usize) {
        self.early_milli -= 1000 * gets as i64;
    }

    /// A get was answered by its owner.
    pub(crate) fn answered(&mut self) {
        self.early_milli = (self.early_milli + EARLY_EARNED_MILLI).min(EARLY_MOST_MILLI);
    }

    /// Whether gets may leave owners that are silent.
    pub(crate) const fn may_hedge(&self) -> bool {
        self.early_milli > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gets_that_left_too_early_use_up_what_others_have_earned() {
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
    fn the_faster_owner_is_asked_and_equals_take_turns() {
        let mut replicas = Replicas::new();
        assert!(replicas.choose(3.0, 1.0, 7) && !replicas.choose(1.0, 3.0, 7));
        let to_replica = (0..1000).filter(|_| replicas.choose(1.0, 1.5, 7)).count();
        assert!((400..600).contains(&to_replica), "{to_replica}");
    }
}

//! Leases on replicas: the gets that may be sent to replica owners instead of the owner.
//!
//! The owner reports in its reply which replica owners have the object too. That is a *lease*: for
//! [`Limits::COPY_LEASE_NS`] from when the request was sent, new gets may be served by these replicas. During the lease
//! a replica is never older than the state that the owner has acknowledged: the owner has a replica dropped before it
//! acknowledges the removal of its object. If it cannot reach the replica owner any more, because that is another shard
//! now, it waits until all leases have expired ([`Limits::COPY_LAPSE_NS`]). Only the owner renews a lease, so a replica
//! for which it no longer vouches is read for that long at most.
//!
//! The table is direct-mapped by digest: hot objects stay in it, and cold ones do not matter.

use kvplane_proto::digest::Digest;
use kvplane_proto::limits::Limits;
use kvplane_proto::map::ReplicaSet;

/// Number of entries. A power of two.
const PLACES: usize = 4096;
/// Backoff after a replica owner did not have an object: it may evict replicas without notifying the owner.
const MISSED_NS: u64 = 1_000_000_000;

/// Lease of the latest object of an entry.
#[derive(Clone, Copy)]
struct Lease {
    digest: Digest,
    /// Replica owners that have it, and those among them that did not have it.
    replicas: ReplicaSet,
    missed: ReplicaSet,
    until_ns: u64,
    /// Time of the owner's last reply, for any object of this entry, that there is no replica.
    plain_ns: u64,
    /// Time before which those that did not have it are not tried.
    missed_until_ns: u64,
}

/// Leases on replicas. The table is allocated with the first object that has a replica.
#[derive(Default)]
pub(crate) struct Leases {
    places: Vec<Lease>,
}

const fn place(digest: Digest) -> usize {
    digest.0 as usize % PLACES
}

impl Leases {
    /// Records the owner's reply for an object: the replica owners that have it. The request was sent at `sent_ns`.
    pub(crate) fn told(&mut self, digest: Digest, replicas: ReplicaSet, sent_ns: u64, now_ns: u64) {
        if self.places.is_empty() {
            if !replicas.is_empty() {
                let (none, digest) = (ReplicaSet::NONE, Digest(0));
                let (until_ns, missed_until_ns) = (0, 0);
                let lease = Lease { digest, replicas: none, missed: none, until_ns, plain_ns: now_ns, missed_until_ns };
                self.places = vec![lease; PLACES];
            }
            return;
        }
        let lease = &mut self.places[place(digest)];
        if replicas.is_empty() {
            lease.plain_ns = now_ns;
            if lease.digest == digest {
                lease.until_ns = 0;
            }
            return;
        }
        // A reply that was overtaken by a later one may be about a version that was replaced since.
        if sent_ns <= lease.plain_ns {
            return;
        }
        let until_ns = sent_ns.saturating_add(Limits::COPY_LEASE_NS);
        if lease.digest == digest {
            // The reply to the latest request names the replica owners.
            if until_ns >= lease.until_ns {
                (lease.until_ns, lease.replicas) = (until_ns, replicas);
            }
        } else if lease.until_ns <= now_ns && lease.missed_until_ns <= now_ns {
            let missed = ReplicaSet::NONE;
            *lease = Lease { digest, replicas, missed, until_ns, missed_until_ns: 0, ..*lease };
        }
    }

    /// Returns the replica owners that there is a lease to get the object from.
    pub(crate) fn held(&self, digest: Digest, now_ns: u64) -> ReplicaSet {
        let lease = self.places.get(place(digest)).filter(|lease| lease.digest == digest && now_ns < lease.until_ns);
        let Some(lease) = lease else { return ReplicaSet::NONE };
        let rests = |number: usize| now_ns < lease.missed_until_ns && lease.missed.has(number);
        ReplicaSet::of(|number| lease.replicas.has(number) && !rests(number))
    }

    /// Records that a replica owner did not have the object, or could not tell.
    pub(crate) fn missed(&mut self, digest: Digest, number: usize, now_ns: u64) {
        let lease = self.places.get_mut(place(digest)).filter(|lease| lease.digest == digest);
        if let Some(lease) = lease {
            let before = if lease.missed_until_ns > now_ns { lease.missed } else { ReplicaSet::NONE };
            lease.missed = before.with(number);
            lease.missed_until_ns = now_ns.saturating_add(MISSED_NS);
        }
    }

    /// Ends all leases, as owners may have changed.
    pub(crate) fn end(&mut self) {
        self.places.iter_mut().for_each(|lease| (lease.until_ns, lease.missed_until_ns) = (0, 0));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_lease_begins_with_its_request_and_expires() {
        let (mut leases, digest) = (Leases::default(), Digest::of(b"", b"hot"));
        leases.told(digest, ReplicaSet::FIRST, 0, MS);
        assert!(leases.held(digest, MS).is_empty(), "replies before the table was allocated are not recorded");
        leases.told(digest, ReplicaSet::FIRST, 2 * MS, 60 * MS);
        assert!(!leases.held(digest, 61 * MS).is_empty());
        assert!(!leases.held(digest, 2 * MS + Limits::COPY_LEASE_NS - 1).is_empty());
        assert!(leases.held(digest, 2 * MS + Limits::COPY_LEASE_NS).is_empty());
        assert!(leases.held(Digest::of(b"", b"other"), 61 * MS).is_empty());
    }

    #[test]
    fn replies_to_requests_sent_before_the_lease_ended_are_ignored() {
        let (mut leases, digest) = (Leases::default(), Digest::of(b"", b"hot"));
        leases.told(digest, ReplicaSet::FIRST, 0, MS);
        leases.told(digest, ReplicaSet::FIRST, 2 * MS, 3 * MS);
        // The object is replaced; then an older reply arrives over another connection.
        leases.told(digest, ReplicaSet::NONE, 4 * MS, 6 * MS);
        assert!(leases.held(digest, 6 * MS).is_empty());
        leases.told(digest, ReplicaSet::FIRST, 5 * MS, 7 * MS);
        assert!(leases.held(digest, 7 * MS).is_empty());
        leases.told(digest, ReplicaSet::FIRST, 8 * MS, 9 * MS);
        assert!(!leases.held(digest, 9 * MS).is_empty());
        leases.missed(digest, 0, 10 * MS);
        assert!(leases.held(digest, 10 * MS).is_empty());
        leases.told(digest, ReplicaSet::FIRST, 20 * MS, 21 * MS);
        assert!(leases.held(digest, 21 * MS).is_empty(), "it may have been evicted there, and the first does not know");
        leases.end();
        leases.told(digest, ReplicaSet::FIRST, 30 * MS, 31 * MS);
        assert!(!leases.held(digest, 31 * MS).is_empty());
    }

    proptest! {
        /// For any order of replies: a lease is held only if its request was sent less than a lease ago, and after
        /// the owner's last reply that there is no replica.
        #[test]
        fn leases_follow_from_replies_of_the_owner_only(
            said in prop::collection::vec((0u64..3, any::<bool>(), 0u64..300, 0u64..100), 1..60),
        ) {
            let mut leases = Leases::default();
            let key = |key: u64| Digest(u128::from(key) << 64);
            let (mut now_ns, mut good, mut plain_ns) = (0, [0u64; 3], [0u64; 3]);
            for (number, copied, ago_ms, pass_ms) in said {
                now_ns += pass_ms * MS;
                let (at, sent_ns) = (number as usize, now_ns.saturating_sub(ago_ms * MS));
                leases.told(key(number), if copied { ReplicaSet::FIRST } else { ReplicaSet::NONE }, sent_ns, now_ns);
                match copied {
                    true if sent_ns > plain_ns[at] => good[at] = good[at].max(sent_ns),
                    true => {}
                    false => (good[at], plain_ns[at]) = (0, now_ns),
                }
                for (at, good_ns) in (0..).zip(good) {
                    let may = good_ns > 0 && now_ns < good_ns + Limits::COPY_LEASE_NS;
                    prop_assert!(may || leases.held(key(at), now_ns).is_empty());
                }
            }
        }
    }
}

//! Leases on replicas: the gets that may be sent to the replica owner instead of the owner.
//!
//! The owner reports in its reply that the replica owner has the object too (flag `REPLICATED`). That is a *lease*: for
//! [`Limits::COPY_LEASE_NS`] from when the request was sent, new gets may be served by the replica. During the lease
//! the replica is never older than the state that the owner has acknowledged: the owner has a replica dropped before it
//! acknowledges the removal of its object. If it cannot reach the replica owner any more, because that is another shard
//! now, it waits until all leases have expired ([`Limits::COPY_LAPSE_NS`]). Only the owner renews a lease, so a replica
//! for which it no longer vouches is read for that long at most.
//!
//! The table is direct-mapped by digest: hot objects stay in it, and cold ones do not matter.

use kvplane_proto::digest::Digest;
use kvplane_proto::limits::Limits;

/// Number of entries. A power of two.
const PLACES: usize = 4096;
/// Backoff after the replica owner did not have an object: it may evict replicas without notifying the owner.
const MISSED_NS: u64 = 1_000_000_000;

/// Lease of the latest object of an entry.
#[derive(Clone, Copy)]
struct Lease {
    digest: Digest,
    until_ns: u64,
    /// Time of the owner's last reply, for any object of this entry, that there is no replica.
    plain_ns: u64,
    /// Time before which the replica owner is not tried.
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
    /// Records the owner's reply for an object: whether it has a replica. The request was sent at `sent_ns`.
    pub(crate) fn told(&mut self, digest: Digest, copied: bool, sent_ns: u64, now_ns: u64) {
        if self.places.is_empty() {
            if copied {
                let none = Lease { digest: Digest(0), until_ns: 0, plain_ns: now_ns, missed_until_ns: 0 };
                self.places = vec![none; PLACES];
            }
            return;
        }
        let lease = &mut self.places[place(digest)];
        if !copied {
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
        if lease.digest == digest {
            lease.until_ns = lease.until_ns.max(sent_ns.saturating_add(Limits::COPY_LEASE_NS));
        } else if lease.until_ns <= now_ns && lease.missed_until_ns <= now_ns {
            let until_ns = sent_ns.saturating_add(Limits::COPY_LEASE_NS);
            *lease = Lease { digest, until_ns, missed_until_ns: 0, ..*lease };
        }
    }

    /// Returns true if there is a lease to get the object from the replica owner.
    pub(crate) fn holds(&self, digest: Digest, now_ns: u64) -> bool {
        let lease = self.places.get(place(digest)).filter(|lease| lease.digest == digest);
        lease.is_some_and(|lease| now_ns < lease.until_ns && lease.missed_until_ns <= now_ns)
    }

    /// Records that the replica owner did not have the object, or could not tell.
    pub(crate) fn missed(&mut self, digest: Digest, now_ns: u64) {
        let lease = self.places.get_mut(place(digest)).filter(|lease| lease.digest == digest);
        if let Some(lease) = lease {
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
        leases.told(digest, true, 0, MS);
        assert!(!leases.holds(digest, MS), "replies before the table was allocated are not recorded");
        leases.told(digest, true, 2 * MS, 60 * MS);
        assert!(leases.holds(digest, 61 * MS));
        assert!(leases.holds(digest, 2 * MS + Limits::COPY_LEASE_NS - 1));
        assert!(!leases.holds(digest, 2 * MS + Limits::COPY_LEASE_NS));
        assert!(!leases.holds(Digest::of(b"", b"other"), 61 * MS));
    }

    #[test]
    fn replies_to_requests_sent_before_the_lease_ended_are_ignored() {
        let (mut leases, digest) = (Leases::default(), Digest::of(b"", b"hot"));
        leases.told(digest, true, 0, MS);
        leases.told(digest, true, 2 * MS, 3 * MS);
        // The object is replaced; then an older reply arrives over another connection.
        leases.told(digest, false, 4 * MS, 6 * MS);
        assert!(!leases.holds(digest, 6 * MS));
        leases.told(digest, true, 5 * MS, 7 * MS);
        assert!(!leases.holds(digest, 7 * MS));
        leases.told(digest, true, 8 * MS, 9 * MS);
        assert!(leases.holds(digest, 9 * MS));
        leases.missed(digest, 10 * MS);
        assert!(!leases.holds(digest, 10 * MS));
        leases.told(digest, true, 20 * MS, 21 * MS);
        assert!(!leases.holds(digest, 21 * MS), "it may have been evicted there, and the first does not know");
        leases.end();
        leases.told(digest, true, 30 * MS, 31 * MS);
        assert!(leases.holds(digest, 31 * MS));
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
                leases.told(key(number), copied, sent_ns, now_ns);
                match copied {
                    true if sent_ns > plain_ns[at] => good[at] = good[at].max(sent_ns),
                    true => {}
                    false => (good[at], plain_ns[at]) = (0, now_ns),
                }
                for (at, good_ns) in (0..).zip(good) {
                    let may = good_ns > 0 && now_ns < good_ns + Limits::COPY_LEASE_NS;
                    prop_assert!(may || !leases.holds(key(at), now_ns));
                }
            }
        }
    }
}

//! Objects that are known to have a replica: which gets may ask the replica owner instead of the owner.
//!
//! The owner says with an object that the replica owner has it too (flag `REPLICATED`). That is a *lease*: for
//! [`Limits::COPY_LEASE_NS`] from when it was asked, gets that begin may be served by the replica. In that time the
//! replica is not older than what the owner has acknowledged: it has replicas dropped before it acknowledges that their
//! objects are gone, and where it cannot ask for that any more, as the replica owner is another now, it waits until all
//! leases are over ([`Limits::COPY_LAPSE_NS`]). Nothing renews a lease but the owner, so a replica that it no longer
//! vouches for is read for that long at most.
//!
//! The table has a place for each remainder of digests: what is asked for often stays in it, and what is not does not
//! matter.

use kvplane_proto::digest::Digest;
use kvplane_proto::limits::Limits;

/// Places. A power of two.
const PLACES: usize = 4096;
/// How long the replica owner is left alone with an object that it turned out not to have: it may evict replicas
/// without saying so.
const MISSED_NS: u64 = 1_000_000_000;

/// What is known of the latest object of a place.
#[derive(Clone, Copy)]
struct Lease {
    digest: Digest,
    until_ns: u64,
    /// When the owner last said, of any object of this place, that it has no replica.
    plain_ns: u64,
    /// The replica owner is not asked before.
    missed_until_ns: u64,
}

/// Leases on copies. Nothing is allocated before the first object that has a copy.
#[derive(Default)]
pub(crate) struct Leases {
    places: Vec<Lease>,
}

const fn place(digest: Digest) -> usize {
    digest.0 as usize % PLACES
}

impl Leases {
    /// The owner gave an object and said whether it has a replica; it was asked at `sent_ns`.
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
        // An answer that was overtaken by a later one may be about what has been replaced since.
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

    /// Whether the replica owner may be asked for an object.
    pub(crate) fn holds(&self, digest: Digest, now_ns: u64) -> bool {
        let lease = self.places.get(place(digest)).filter(|lease| lease.digest == digest);
        lease.is_some_and(|lease| now_ns < lease.until_ns && lease.missed_until_ns <= now_ns)
    }

    /// The replica owner did not have it, or could not say.
    pub(crate) fn missed(&mut self, digest: Digest, now_ns: u64) {
        let lease = self.places.get_mut(place(digest)).filter(|lease| lease.digest == digest);
        if let Some(lease) = lease {
            lease.missed_until_ns = now_ns.saturating_add(MISSED_NS);
        }
    }

    /// Owners may have changed: nothing is known any more.
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
    fn a_lease_begins_with_the_question_and_ends_by_itself() {
        let (mut leases, digest) = (Leases::default(), Digest::of(b"", b"hot"));
        leases.told(digest, true, 0, MS);
        assert!(!leases.holds(digest, MS), "nobody knows what was said before there was a table");
        leases.told(digest, true, 2 * MS, 60 * MS);
        assert!(leases.holds(digest, 61 * MS));
        assert!(leases.holds(digest, 2 * MS + Limits::COPY_LEASE_NS - 1));
        assert!(!leases.holds(digest, 2 * MS + Limits::COPY_LEASE_NS));
        assert!(!leases.holds(Digest::of(b"", b"other"), 61 * MS));
    }

    #[test]
    fn what_was_asked_before_the_last_answer_without_a_copy_says_nothing() {
        let (mut leases, digest) = (Leases::default(), Digest::of(b"", b"hot"));
        leases.told(digest, true, 0, MS);
        leases.told(digest, true, 2 * MS, 3 * MS);
        // It was replaced: then an answer from before that comes over another connection.
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
        /// Whatever comes in whatever order: who holds a lease asked the owner less than a lease ago, and after
        /// the last time that it said there is no copy.
        #[test]
        fn nobody_holds_what_was_not_said(
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

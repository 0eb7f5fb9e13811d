//! Prefetch: a client that asks whether objects exist often reads them next, and may request that they be prefetched.
//!
//! Objects that were prefetched and not read yet are bounded by a part of the pool; those that are not read in time are
//! dropped from memory again. A get that comes before the read has ended joins it, so that no object is read twice.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::frame::Header;
use kvplane_proto::{Digest, FrameFlags};

use crate::service::tiering::policy::TierPolicy;

/// Default time for which a prefetched object stays without being read.
const UNUSED_NS: u64 = 10_000_000_000;
/// Longest time that a client may request.
const UNUSED_MOST_NS: u64 = 60_000_000_000;
/// Most objects that were prefetched and not read yet.
const OBJECTS_MOST: usize = 65_536;

/// Account of prefetched objects.
#[derive(Debug)]
pub(super) struct PrefetchAccount {
    most_bytes: u64,
    bytes: u64,
    /// Objects not read yet: their bytes, and the time at which they expire.
    objects: BTreeMap<Digest, (u64, u64)>,
    order: BTreeSet<(u64, Digest)>,
}

impl PrefetchAccount {
    pub(super) fn new(most_bytes: u64) -> Self {
        Self { most_bytes, bytes: 0, objects: BTreeMap::new(), order: BTreeSet::new() }
    }

    /// Removes an object from the account; false if it is not on it.
    pub(super) fn take(&mut self, digest: Digest) -> bool {
        let Some((bytes, until_ns)) = self.objects.remove(&digest) else { return false };
        self.bytes -= bytes;
        self.order.remove(&(until_ns, digest));
        true
    }

    /// Returns true if an object that takes this many bytes may be added.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.bytes.saturating_add(bytes) <= self.most_bytes && self.objects.len() < OBJECTS_MOST
    }

    /// Adds an object that is being read.
    pub(super) fn add(&mut self, digest: Digest, bytes: u64, until_ns: u64) {
        self.bytes += bytes;
        self.objects.insert(digest, (bytes, until_ns));
        self.order.insert((until_ns, digest));
    }

    /// Extends the time of an object for another request, if that is later; false if it is not on the account.
    pub(super) fn extend(&mut self, digest: Digest, until_ns: u64) -> bool {
        let Some((_, until)) = self.objects.get_mut(&digest) else { return false };
        if until_ns > *until {
            self.order.remove(&(*until, digest));
            self.order.insert((until_ns, digest));
            *until = until_ns;
        }
        true
    }

    /// Returns the time at which an object expires, if it is on the account.
    pub(super) fn until_ns(&self, digest: Digest) -> Option<u64> {
        self.objects.get(&digest).map(|(_, until_ns)| *until_ns)
    }

    /// Expires an object whose memory is not free yet: it stays on the account, without a time.
    pub(super) fn expire(&mut self, digest: Digest) {
        if let Some((_, until_ns)) = self.objects.get(&digest) {
            self.order.remove(&(*until_ns, digest));
        }
    }

    /// Returns an object whose time has passed.
    pub(super) fn due(&self, now_ns: u64) -> Option<Digest> {
        self.order.first().filter(|(until_ns, _)| *until_ns <= now_ns).map(|(_, digest)| *digest)
    }

    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.order.first().map(|(until_ns, _)| *until_ns)
    }
}

/// Returns the time until which the objects of an exists request are to be prefetched; `None` if not. The request may
/// ask for it, and for how long.
pub(in crate::service) fn wanted_until_ns(policy: &TierPolicy, header: &Header, now_ns: u64) -> Option<u64> {
    let said = header.flags.has(FrameFlags::PREFETCH);
    if policy.prefetch_percent == 0 || !(said || policy.prefetch_on_exists) {
        return None;
    }
    let wanted_ns = match u64::from(header.deadline_us) * 1000 {
        wanted_ns @ 1.. if said => wanted_ns.min(UNUSED_MOST_NS),
        _ => UNUSED_NS,
    };
    Some(now_ns.saturating_add(wanted_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quota_is_strict_and_the_latest_expiry_counts() {
        let mut prefetched = PrefetchAccount::new(100);
        prefetched.add(Digest(1), 60, 10);
        assert!(prefetched.has_room(40) && !prefetched.has_room(41));
        prefetched.add(Digest(2), 40, 5);
        assert!(!prefetched.has_room(1));
        assert!(prefetched.extend(Digest(2), 20) && prefetched.extend(Digest(2), 7));
        assert!(!prefetched.extend(Digest(3), 7), "nobody reads it");
        assert_eq!(prefetched.poll_timeout(), Some(10));
        assert_eq!((prefetched.due(9), prefetched.due(10)), (None, Some(Digest(1))));
        assert!(prefetched.take(Digest(1)) && !prefetched.take(Digest(1)));
        assert_eq!((prefetched.poll_timeout(), prefetched.has_room(60)), (Some(20), true));
        prefetched.expire(Digest(2));
        assert_eq!((prefetched.poll_timeout(), prefetched.has_room(61)), (None, false), "it is being read");
        assert!(prefetched.extend(Digest(2), 30));
        assert_eq!(prefetched.poll_timeout(), Some(30));
        prefetched.expire(Digest(2));
        assert!(prefetched.take(Digest(2)));
        assert_eq!((prefetched.poll_timeout(), prefetched.bytes), (None, 0));
    }
}

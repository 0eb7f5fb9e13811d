//! Replies that wait for the replica of a version.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;

use crate::service::shard::deferrals::DeferredItem;

/// Longest wait of a reply for a replica owner: to remove a replica, or to accept one.
pub(super) const WAIT_NS: u64 = 1_000_000_000;

/// Earliest of several times. It does not follow those that are given up: it may be earlier than the earliest left.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Earliest(Option<u64>);

impl Earliest {
    pub(super) const fn of(time_ns: Option<u64>) -> Self {
        Self(time_ns)
    }

    /// Adds a time.
    pub(super) fn note(&mut self, time_ns: u64) {
        self.0 = Some(self.0.map_or(time_ns, |earliest_ns| earliest_ns.min(time_ns)));
    }

    pub(super) const fn time_ns(self) -> Option<u64> {
        self.0
    }
}

/// Reply that waits for the replica of a version.
#[derive(Clone, Copy, Debug)]
struct CopyWait {
    version: Version,
    item: DeferredItem,
    until_ns: u64,
}

/// Replies that wait for replicas.
#[derive(Debug, Default)]
pub(super) struct Waits {
    copies: BTreeMap<Digest, Vec<CopyWait>>,
    /// Time at which a reply times out.
    due: Earliest,
}

impl Waits {
    /// Makes a reply wait for the replica of a version, until `until_ns` at most.
    pub(super) fn add(&mut self, digest: Digest, version: Version, item: DeferredItem, until_ns: u64) {
        self.copies.entry(digest).or_default().push(CopyWait { version, item, until_ns });
        self.due.note(until_ns);
    }

    /// Ends the waits for the replica of a version, and of earlier ones. Returns the replies that waited, each with
    /// true if it waited for this version.
    pub(super) fn end(&mut self, digest: Digest, version: Version) -> Vec<(DeferredItem, bool)> {
        let Some(waiting) = self.copies.get_mut(&digest) else { return Vec::new() };
        let over = waiting.extract_if(.., |wait| wait.version <= version);
        let over = over.map(|wait| (wait.item, wait.version == version)).collect();
        if waiting.is_empty() {
            self.copies.remove(&digest);
        }
        over
    }

    /// Ends the waits that have timed out, and returns their replies.
    pub(super) fn expire(&mut self, now_ns: u64) -> Vec<DeferredItem> {
        let mut over = Vec::new();
        self.copies.retain(|_, waiting| {
            over.extend(waiting.extract_if(.., |wait| wait.until_ns <= now_ns).map(|wait| wait.item));
            !waiting.is_empty()
        });
        self.due = Earliest::of(self.copies.values().flatten().map(|wait| wait.until_ns).min());
        over
    }

    /// Returns the time at which a reply times out.
    pub(super) const fn poll_timeout(&self) -> Option<u64> {
        self.due.time_ns()
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, RequestId, ShardId};

    use super::*;
    use crate::service::shard::Shard;
    use crate::service::shard::deferrals::Replies;
    use crate::service::types::{Identity, PeerKey};
    use crate::store::Store;

    #[test]
    fn a_reply_waits_for_its_version_or_until_it_times_out() {
        let (cluster, segment_name) = ("test".to_owned(), String::new());
        let (node, incarnation, shard) = (NodeId(1), Incarnation(1), ShardId(0));
        let mut shard = Shard::new(Identity { cluster, node, incarnation, shard, segment_name }, Store::empty());
        let peer = PeerKey { index: 0, generation: 1 };
        let item = shard.defer(peer, RequestId::from_bits(1), Replies::Found(vec![false; 3], Vec::new()), 3);
        let (mut waits, object) = (Waits::default(), Digest(1));
        for (at, (version, until_ns)) in [(2, 100), (3, 90), (4, 95)].into_iter().enumerate() {
            waits.add(object, Version(version), item(at), until_ns);
        }
        assert_eq!(waits.poll_timeout(), Some(90));
        assert_eq!(waits.end(Digest(2), Version(9)), []);
        assert_eq!(waits.end(object, Version(3)), [(item(0), false), (item(1), true)]);
        assert_eq!((waits.expire(94), waits.poll_timeout()), (Vec::new(), Some(95)));
        assert_eq!((waits.expire(95), waits.poll_timeout()), (vec![item(2)], None));
    }
}

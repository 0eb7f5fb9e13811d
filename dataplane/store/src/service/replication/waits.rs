//! Replies that wait for replicas of a version.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::map::ShardKey;

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

/// Reply that waits for replicas of a version.
#[derive(Clone, Copy, Debug)]
struct CopyWait {
    version: Version,
    item: DeferredItem,
    until_ns: u64,
}

/// Replies that wait for replicas of one object, and the replica owners that were tried without success meanwhile.
#[derive(Debug, Default)]
struct ObjectWaits {
    waits: Vec<CopyWait>,
    failed: Vec<(Version, ShardKey)>,
}

/// Reply whose wait has timed out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LateReply {
    pub(super) digest: Digest,
    pub(super) version: Version,
    pub(super) item: DeferredItem,
}

/// Replies that wait for replicas.
#[derive(Debug, Default)]
pub(super) struct Waits {
    objects: BTreeMap<Digest, ObjectWaits>,
    /// Time at which a reply times out.
    due: Earliest,
}

impl Waits {
    /// Makes a reply wait for replicas of a version, until `until_ns` at most.
    pub(super) fn add(&mut self, digest: Digest, version: Version, item: DeferredItem, until_ns: u64) {
        self.objects.entry(digest).or_default().waits.push(CopyWait { version, item, until_ns });
        self.due.note(until_ns);
    }

    /// Returns true if a reply waits for replicas of an object.
    pub(super) fn has(&self, digest: Digest) -> bool {
        self.objects.contains_key(&digest)
    }

    /// Records that a replica owner did not take a version while replies wait for it.
    pub(super) fn note_failed(&mut self, digest: Digest, version: Version, owner: ShardKey) {
        if let Some(object) = self.objects.get_mut(&digest) {
            object.failed.push((version, owner));
        }
    }

    /// Returns true if a replica owner did not take a version while replies waited for it.
    pub(super) fn has_failed(&self, digest: Digest, version: Version, owner: ShardKey) -> bool {
        self.objects.get(&digest).is_some_and(|object| object.failed.contains(&(version, owner)))
    }

    /// Ends the waits for replicas of a version if `is_over`, and those for earlier ones in any case. Returns the
    /// replies that waited, each with true if it waited for this version.
    pub(super) fn end(&mut self, digest: Digest, version: Version, is_over: bool) -> Vec<(DeferredItem, bool)> {
        let Some(object) = self.objects.get_mut(&digest) else { return Vec::new() };
        let ends = |wait: &mut CopyWait| wait.version < version || is_over && wait.version == version;
        let over = object.waits.extract_if(.., ends);
        let over = over.map(|wait| (wait.item, wait.version == version)).collect();
        if object.waits.is_empty() {
            self.objects.remove(&digest);
        }
        over
    }

    /// Ends the waits that have timed out, and returns their replies.
    pub(super) fn expire(&mut self, now_ns: u64) -> Vec<LateReply> {
        let mut over = Vec::new();
        self.objects.retain(|digest, object| {
            let late = object.waits.extract_if(.., |wait| wait.until_ns <= now_ns);
            over.extend(late.map(|wait| LateReply { digest: *digest, version: wait.version, item: wait.item }));
            !object.waits.is_empty()
        });
        self.due = Earliest::of(self.objects.values().flat_map(|object| &object.waits).map(|wait| wait.until_ns).min());
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
        assert_eq!(waits.end(Digest(2), Version(9), true), []);
        assert_eq!(waits.end(object, Version(3), false), [(item(0), false)], "the version still waits");
        let owner = shard.ownership.key();
        waits.note_failed(object, Version(3), owner);
        assert_eq!([3, 4].map(|version| waits.has_failed(object, Version(version), owner)), [true, false]);
        assert_eq!(waits.end(object, Version(3), true), [(item(1), true)]);
        assert_eq!((waits.expire(94), waits.poll_timeout()), (Vec::new(), Some(95)));
        let late = LateReply { digest: object, version: Version(4), item: item(2) };
        assert_eq!((waits.expire(95), waits.poll_timeout(), waits.has(object)), (vec![late], None, false));
    }
}

//! Replies that wait for a replica owner: to remove a replica, or to accept one.

use std::collections::BTreeMap;

use kvplane_proto::ids::Version;
use kvplane_proto::{Digest, FrameFlags, ItemFlags, Status};

use super::Replication;
use crate::service::shard::Shard;
use crate::service::shard::context::RequestContext;
use crate::service::shard::deferrals::{DeferredItem, Replies};
use crate::{ObjectView, Replica};

/// Longest wait of a reply for a replica owner.
const WAIT_NS: u64 = 1_000_000_000;

/// Conditions at the replica owner that a reply waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::service) struct CopyWaits {
    pub(in crate::service) drop: bool,
    pub(in crate::service) copy: bool,
}

impl CopyWaits {
    /// Returns how many times the reply's item is settled.
    pub(in crate::service) fn count(self) -> usize {
        usize::from(self.drop) + usize::from(self.copy)
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
    /// Earliest time at which a reply, for a replica or for its removal, times out; 0 if none waits.
    due_ns: u64,
}

impl Waits {
    /// Records a wait that ends at this time.
    pub(super) const fn due(&mut self, until_ns: u64) {
        if self.due_ns == 0 || until_ns < self.due_ns {
            self.due_ns = until_ns;
        }
    }
}

impl Replication {
    /// Returns the conditions that the reply of a put waits for.
    pub(in crate::service) fn waits_of(&mut self, shard: &mut Shard, digest: Digest) -> CopyWaits {
        self.note_orphans(shard);
        let possible = shard.replicas.has_owner(digest);
        let copy =
            possible && shard.store.as_ref().is_some_and(|store| store.objects().replica(digest) == Replica::Awaited);
        CopyWaits { drop: self.owes(digest), copy }
    }

    /// Acts on a commit: the object is replicated next if it is to be. `told` is settled once for each condition that
    /// is waited for.
    pub(in crate::service) fn replicate(
        &mut self,
        shard: &mut Shard,
        digest: Digest,
        version: Version,
        waits: CopyWaits,
        told: Option<DeferredItem>,
    ) {
        if let (true, Some(item)) = (waits.drop, told) {
            self.wait_for_drop(shard, digest, item);
        }
        let possible = shard.replicas.has_owner(digest);
        let replica = shard.store.as_ref().map_or(Replica::None, |store| store.objects().replica(digest));
        if !possible || !replica.is_owed_a_copy() {
            return;
        }
        if let (true, Some(item)) = (waits.copy, told) {
            let until_ns = shard.now_ns.saturating_add(WAIT_NS);
            self.waits.copies.entry(digest).or_default().push(CopyWait { version, item, until_ns });
            self.waits.due(until_ns);
        }
        if !self.pushes.add(digest, version) {
            self.walk_again(shard);
            self.end_wait(shard, digest, version, false);
        }
    }

    /// Makes a reply wait until a replica is removed.
    pub(in crate::service) fn wait_for_drop(&mut self, shard: &mut Shard, digest: Digest, item: DeferredItem) {
        let until_ns = shard.now_ns.saturating_add(WAIT_NS);
        if self.owed.wait(digest, item, until_ns) {
            self.waits.due(until_ns);
        } else {
            self.refuse_waiter(shard, item, Status::Busy);
        }
    }

    /// Returns the indexes of those objects of a removal whose replicas have to be removed first.
    pub(in crate::service) fn owed_among(&mut self, shard: &mut Shard, digests: &[Digest]) -> Vec<usize> {
        if !self.owes_any(shard) {
            return Vec::new();
        }
        (0..digests.len()).filter(|at| self.owes(digests[*at])).collect()
    }

    pub(super) fn refuse_waiter(&mut self, shard: &mut Shard, item: DeferredItem, why: Status) {
        self.counters.refused += 1;
        shard.settle(item, |replies, item| match replies {
            Replies::Put(status, ..) | Replies::Bits(_, status) | Replies::Copies(_, status) => *status = why,
            Replies::Commits(_, replies) => replies[item].status = why,
            Replies::Lookups(_) | Replies::Found(..) | Replies::Sizes(_) => {}
        });
    }

    /// Ends the waits for the replica of a version, and of earlier ones: it is known now whether the replica exists.
    pub(super) fn end_wait(&mut self, shard: &mut Shard, digest: Digest, version: Version, there: bool) {
        let Some(waiting) = self.waits.copies.get_mut(&digest) else { return };
        let (over, later) = core::mem::take(waiting).into_iter().partition(|wait| wait.version <= version);
        *waiting = later;
        if waiting.is_empty() {
            self.waits.copies.remove(&digest);
        }
        let over: Vec<CopyWait> = over;
        for wait in over {
            let here = there && wait.version == version;
            shard.settle(wait.item, |replies, item| match replies {
                Replies::Put(_, _, is_replicated) if here => *is_replicated = true,
                Replies::Commits(_, replies) if here => replies[item].flags = ItemFlags::REPLICATED,
                _ => {}
            });
        }
    }

    /// Grants a client that wants one a lease on the replica of an object: true if the replica owner certainly has a
    /// replica, and was the replica owner already in the client's map.
    pub(in crate::service) fn grant_lease(
        &mut self,
        shard: &Shard,
        context: &RequestContext,
        digest: Digest,
        object: &ObjectView,
    ) -> bool {
        let wants = context.flags.has(FrameFlags::REPLICA_LEASE);
        let known = object.copied && wants && context.epoch >= shard.replicas.since();
        let there = known
            && shard.replicas.has_owner(digest)
            && shard.ownership.owns(digest)
            && !self.pushes.has(digest)
            && !self.owes(digest);
        if there {
            self.leased_ns = shard.now_ns;
        }
        there
    }

    /// Times out replies that have waited for a replica owner for too long.
    pub(in crate::service) fn expire_waits(&mut self, shard: &mut Shard) {
        let now_ns = shard.now_ns;
        if self.waits.due_ns == 0 || self.waits.due_ns > now_ns {
            return;
        }
        let ended = self.owed.expire(now_ns);
        let mut over = ended.lapsed;
        self.waits.copies.retain(|_, waiting| {
            over.extend(waiting.extract_if(.., |wait| wait.until_ns <= now_ns).map(|wait| wait.item));
            !waiting.is_empty()
        });
        let copies = self.waits.copies.values().flatten().map(|wait| wait.until_ns);
        self.waits.due_ns = copies.chain(self.owed.poll_timeout()).min().unwrap_or(0);
        ended.refused.into_iter().for_each(|item| self.refuse_waiter(shard, item, Status::Busy));
        over.into_iter().for_each(|item| shard.settle(item, |_, _| {}));
    }

    /// Returns the time of the next action.
    pub(in crate::service) fn poll_timeout(&self, shard: &Shard) -> Option<u64> {
        let now_ns = shard.now_ns;
        if shard.replicas.is_alone() && self.waits.due_ns == 0 {
            return None;
        }
        let due = (self.waits.due_ns > 0).then_some(self.waits.due_ns);
        let busy = self.owed.len() > 0 || !self.pushes.is_idle();
        let retries = if busy { self.owners.poll_timeout(now_ns) } else { None };
        let walks = [self.walk.poll_timeout(now_ns), self.ssd_walk.poll_timeout(now_ns)];
        [due, retries, self.wishes.poll_timeout(now_ns)].into_iter().chain(walks).flatten().min()
    }
}

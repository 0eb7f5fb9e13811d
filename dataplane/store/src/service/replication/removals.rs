//! Removals of replicas that have to be done before a request for their objects is acknowledged: the requests to
//! replica owners, the replies that wait for them, and clients' leases on replicas of former replica owners.

use std::collections::BTreeMap;

use kvplane_proto::ids::{Slot, Version};
use kvplane_proto::map::{ReplicaSet, ShardKey};
use kvplane_proto::{Digest, Limits, Status};

use super::outstanding::{OutstandingRemovals, all_of};
use super::owners::ReplicaOwners;
use super::waits::{Earliest, WAIT_NS};
use crate::service::fetches::{Fetch, FetchDone, Want};
use crate::service::shard::Shard;
use crate::service::shard::deferrals::DeferredItem;

/// Removals of replicas at replica owners.
#[derive(Debug, Default)]
pub(in crate::service) struct ReplicaRemovals {
    outstanding: OutstandingRemovals,
    /// Requests that replica owners have not answered yet.
    calls: BTreeMap<u64, RemovalCall>,
    /// Time at which the last lease on a replica was granted; 0 for never.
    leased_ns: u64,
    /// Time at which a reply that waits for a removal times out.
    due: Earliest,
    counters: RemovalCounters,
}

/// Counters of removals of replicas.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RemovalCounters {
    /// Removals that replica owners acknowledged.
    pub(super) done: u64,
    /// Replies that failed because a replica owner did not acknowledge a removal in time.
    pub(super) refused: u64,
}

/// Removal request that a replica owner has not answered yet.
#[derive(Debug)]
struct RemovalCall {
    owner: ShardKey,
    digests: Vec<Digest>,
}

impl ReplicaRemovals {
    pub(super) const fn counters(&self) -> RemovalCounters {
        self.counters
    }

    /// Returns the number of outstanding removals.
    pub(super) fn len(&self) -> usize {
        self.outstanding.len()
    }

    /// Records the outstanding removals of objects that are gone. To be called before any request is acknowledged.
    pub(in crate::service) fn note_orphans(&mut self, shard: &mut Shard) {
        if !shard.store.objects().has_orphans() {
            return;
        }
        for (digest, at) in shard.store.objects_mut().take_orphans() {
            self.add_at(shard, digest, at);
        }
        self.outstanding.bound();
    }

    /// Records that these replica owners may have a replica that has to be removed.
    fn add_at(&mut self, shard: &Shard, digest: Digest, at: ReplicaSet) {
        let owners = shard.replicas.owners_of(digest.slot());
        at.iter().filter_map(|number| owners.get(number)).for_each(|owner| self.outstanding.add(digest, *owner, None));
    }

    /// Returns true if a replica owner may have a replica that has to be removed before a request for its object is
    /// acknowledged.
    pub(in crate::service) fn is_outstanding(&self, digest: Digest) -> bool {
        self.outstanding.has(digest)
    }

    /// Returns true if a replica of an object has to be removed at this replica owner before another is sent there.
    pub(super) fn is_outstanding_at(&self, digest: Digest, owner: ShardKey) -> bool {
        self.outstanding.has_at(digest, owner)
    }

    /// Returns true if another version of an object than this one may have a replica that has to be removed, at any
    /// replica owner.
    pub(super) fn has_other(&self, digest: Digest, version: Version) -> bool {
        self.outstanding.has_other(digest, version)
    }

    /// Returns true if any removal of a replica is outstanding.
    pub(in crate::service) fn owes_any(&mut self, shard: &mut Shard) -> bool {
        self.note_orphans(shard);
        self.outstanding.len() > 0
    }

    /// Returns the indexes of those objects of a removal whose replicas have to be removed first.
    pub(in crate::service) fn outstanding_among(&mut self, shard: &mut Shard, digests: &[Digest]) -> Vec<usize> {
        let objects = shard.store.objects_mut();
        if !objects.detached().is_empty() {
            digests.iter().for_each(|digest| objects.orphan_detached(*digest));
        }
        if !self.owes_any(shard) {
            return Vec::new();
        }
        (0..digests.len()).filter(|at| self.is_outstanding(digests[*at])).collect()
    }

    /// Records that a replica owner may have a replica of this version, and of no other, that has to be removed.
    pub(super) fn add(&mut self, digest: Digest, version: Version, owner: ShardKey) {
        self.outstanding.add(digest, owner, Some(version));
    }

    /// Returns the outstanding removals, each with a replica owner that has to acknowledge it.
    pub(super) fn all(&self) -> impl Iterator<Item = (Digest, ShardKey)> + '_ {
        self.outstanding.all()
    }

    /// Replaces replica owners by their successors, which have what they had.
    pub(super) fn succeed(&mut self, successors: &BTreeMap<ShardKey, ShardKey>) {
        self.outstanding.succeed(successors);
    }

    /// Records that a replica owner may have a replica, of any version, that has to be removed.
    pub(super) fn add_any(&mut self, digest: Digest, owner: ShardKey) {
        self.outstanding.add(digest, owner, None);
    }

    /// Allows requests to replica owners at once, after a change.
    pub(super) const fn wake(&mut self) {
        self.outstanding.wake();
    }

    /// Merges removals if there are too many.
    pub(super) fn bound(&mut self) {
        self.outstanding.bound();
    }

    /// Stops the replication of an object of this shard: the replicas that replica owners may have are to be removed.
    pub(in crate::service) fn give_up(&mut self, shard: &mut Shard, digest: Digest) {
        let at = shard.store.objects_mut().want_no_copy(digest);
        self.add_at(shard, digest, at);
        shard.store.objects_mut().orphan_detached(digest);
        self.note_orphans(shard);
    }

    /// Makes a reply wait until the replicas are removed.
    pub(in crate::service) fn wait(&mut self, shard: &mut Shard, digest: Digest, item: DeferredItem) {
        let until_ns = shard.now_ns.saturating_add(WAIT_NS);
        if self.outstanding.wait(digest, item, until_ns) {
            self.due.note(until_ns);
        } else {
            self.refuse(shard, item, Status::Busy);
        }
    }

    fn refuse(&mut self, shard: &mut Shard, item: DeferredItem, why: Status) {
        self.counters.refused += 1;
        shard.settle(item, |replies, item| replies.fail_change(item, why));
    }

    /// Records that a lease on a replica is granted now.
    pub(super) const fn note_lease(&mut self, now_ns: u64) {
        self.leased_ns = now_ns;
    }

    /// Delays acknowledgements for an object whose former replica owner may have a replica, until all clients' leases
    /// on it have expired.
    pub(super) fn lapse(&mut self, shard: &mut Shard, digest: Digest, waiters: Vec<(DeferredItem, u64)>) {
        let until_ns = self.leased_ns.saturating_add(Limits::COPY_LAPSE_NS);
        if self.leased_ns == 0 || until_ns <= shard.now_ns {
            waiters.into_iter().for_each(|(item, _)| shard.settle(item, |_, _| {}));
            return;
        }
        self.outstanding.lapse(digest, until_ns, waiters);
        self.due.note(until_ns);
    }

    /// Returns the outstanding removals in the slots for which `pick` returns true.
    pub(super) fn of_slots(&self, pick: impl Fn(Slot) -> bool) -> Vec<Digest> {
        self.outstanding.of_slots(pick)
    }

    /// Ends these removals at former replica owners, as their slots have other replica owners now, or none. If maps
    /// were `missed`, or this shard does not own a slot any more, the replies that wait fail.
    pub(super) fn end_former(
        &mut self,
        shard: &mut Shard,
        removals: Vec<Digest>,
        missed: bool,
        owns: &dyn Fn(Slot) -> bool,
    ) {
        for digest in removals {
            let slot = digest.slot();
            let owned = owns(slot);
            let is_owner = |owner: ShardKey| owned && shard.replicas.number_of(slot, owner).is_some();
            let (had_former, has_present) = self.outstanding.forget_former(digest, is_owner);
            if has_present {
                // The others still have to acknowledge.
                if had_former {
                    self.lapse(shard, digest, Vec::new());
                }
                continue;
            }
            let waiters = self.outstanding.end(digest);
            // The slot's present owner may have inherited the replica.
            if missed || !owned {
                waiters.into_iter().for_each(|(item, _)| self.refuse(shard, item, Status::WrongOwner));
                if owned {
                    self.lapse(shard, digest, Vec::new());
                }
            } else {
                self.lapse(shard, digest, waiters);
            }
        }
        if missed {
            let late = self.outstanding.take_waiters();
            late.into_iter().for_each(|item| self.refuse(shard, item, Status::WrongOwner));
        }
    }

    /// Returns the next request to a replica owner. The removal of a replica waits while a replica of the object is in
    /// flight there, that of all replicas in a slot while any of the slot is.
    pub(super) fn poll(
        &mut self,
        shard: &mut Shard,
        owners: &mut ReplicaOwners,
        is_sending: impl Fn(Digest, ShardKey) -> bool,
        is_sending_in: impl Fn(Slot, ShardKey) -> bool,
    ) -> Option<Fetch> {
        let now_ns = shard.now_ns;
        if !self.outstanding.is_due(now_ns) {
            return None;
        }
        let token = shard.new_fetch_token();
        let may_ask = |digest: Digest, owner: ShardKey| {
            // For a whole slot, no replica in it may be in flight to that owner.
            let sending = match digest == all_of(digest.slot()) {
                true => is_sending_in(digest.slot(), owner),
                false => is_sending(digest, owner),
            };
            !sending && owners.may_drop(owner, now_ns)
        };
        let Some((owner, digests)) = self.outstanding.next(token, may_ask) else {
            self.outstanding.rest(owners.poll_timeout(now_ns).unwrap_or(u64::MAX));
            return None;
        };
        owners.begin_drop(owner);
        self.calls.insert(token, RemovalCall { owner, digests: digests.clone() });
        Some(Fetch { token, source: owner, want: Want::DropCopies(digests) })
    }

    /// Handles the answer to a request, or the failure to get one. Returns false if it belongs to no request of this
    /// component.
    pub(super) fn fetched(
        &mut self,
        shard: &mut Shard,
        owners: &mut ReplicaOwners,
        token: u64,
        done: &FetchDone,
    ) -> bool {
        let Some(RemovalCall { owner, digests }) = self.calls.remove(&token) else { return false };
        let gone: &[bool] = if let FetchDone::CopiesDropped(gone) = done { gone } else { &[] };
        self.outstanding.wake();
        owners.end_drop(owner);
        if gone.contains(&true) {
            owners.answered(owner);
        } else {
            owners.not_answered(owner, shard.now_ns);
        }
        for (at, digest) in digests.iter().enumerate() {
            let is_gone = gone.get(at) == Some(&true);
            if let Some(waiters) = self.outstanding.answered(*digest, token, is_gone, shard.now_ns) {
                self.counters.done += 1;
                waiters.into_iter().for_each(|(item, _)| shard.settle(item, |_, _| {}));
            }
        }
        true
    }

    /// Ends the waits that have timed out.
    pub(super) fn expire(&mut self, shard: &mut Shard) {
        let ended = self.outstanding.expire(shard.now_ns);
        self.due = Earliest::of(self.outstanding.poll_timeout());
        ended.refused.into_iter().for_each(|item| self.refuse(shard, item, Status::Busy));
        ended.lapsed.into_iter().for_each(|item| shard.settle(item, |_, _| {}));
    }

    /// Returns the time at which a wait times out.
    pub(super) const fn poll_timeout(&self) -> Option<u64> {
        self.due.time_ns()
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, RequestId, ShardId};

    use super::*;
    use crate::service::shard::deferrals::{PutReply, Replies};
    use crate::service::types::{Identity, Output, Path, PeerKey};
    use crate::store::Store;

    const PEER: PeerKey = PeerKey { index: 0, generation: 1 };
    const OBJECT: Digest = Digest(1);

    fn shard() -> Shard {
        let (cluster, segment_name) = ("test".to_owned(), String::new());
        let (node, incarnation, shard) = (NodeId(1), Incarnation(1), ShardId(0));
        let mut shard = Shard::new(Identity { cluster, node, incarnation, shard, segment_name }, Store::empty());
        shard.sessions.join(PEER, Path::Stream, 0);
        shard.now_ns = 1000;
        shard
    }

    fn put(shard: &mut Shard) -> DeferredItem {
        shard.defer(PEER, RequestId::from_bits(1), Replies::Put(PutReply::of(Version(1), false)), 1)(0)
    }

    fn status(shard: &mut Shard) -> Option<Status> {
        let Output::Frame { header, .. } = shard.answers.poll(0)? else { panic!("no reply") };
        Some(header.status)
    }

    #[test]
    fn a_reply_waits_until_the_leases_on_a_former_owners_replica_have_expired() {
        let (mut shard, mut removals) = (shard(), ReplicaRemovals::default());
        removals.lapse(&mut shard, OBJECT, Vec::new());
        assert!(!removals.is_outstanding(OBJECT), "no lease was granted");
        removals.note_lease(shard.now_ns);
        removals.lapse(&mut shard, OBJECT, Vec::new());
        let item = put(&mut shard);
        removals.wait(&mut shard, OBJECT, item);
        let until_ns = shard.now_ns + Limits::COPY_LAPSE_NS;
        assert_eq!((removals.is_outstanding(OBJECT), removals.poll_timeout()), (true, Some(until_ns)));
        shard.now_ns = until_ns;
        removals.expire(&mut shard);
        assert_eq!((status(&mut shard), removals.counters().refused), (Some(Status::Ok), 0));
        assert_eq!((removals.is_outstanding(OBJECT), removals.poll_timeout()), (false, None));
    }

    #[test]
    fn a_reply_is_refused_when_the_replica_owner_does_not_acknowledge_in_time() {
        let (mut shard, mut removals) = (shard(), ReplicaRemovals::default());
        removals.add(OBJECT, Version(1), shard.ownership.key());
        let item = put(&mut shard);
        removals.wait(&mut shard, OBJECT, item);
        shard.now_ns = removals.poll_timeout().expect("a reply waits");
        removals.expire(&mut shard);
        assert_eq!((status(&mut shard), removals.counters().refused), (Some(Status::Busy), 1));
        assert!(removals.is_outstanding(OBJECT), "the removal is outstanding still");
    }
}

//! Replicas that are written at replica owners: those in flight, those to be sent next, and the replies that wait for
//! them.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::ids::{PinId, Slot, Version};
use kvplane_proto::map::ShardKey;
use kvplane_proto::message::{ObjectPriority, Part, PutItem, PutOptions};
use kvplane_proto::{Digest, ItemFlags, Status};

use super::owners::ReplicaOwners;
use super::removals::ReplicaRemovals;
use super::waits::{WAIT_NS, Waits};
use super::walks::Walk;
use crate::entry::Entry;
use crate::service::device_moves::{is_on_device, recall};
use crate::service::fetches::{Fetch, FetchDone, Want};
use crate::service::local::LocalStore;
use crate::service::shard::Shard;
use crate::service::shard::deferrals::{DeferredItem, Replies};
use crate::service::shard::tail::{TailHead, tail_within};
use crate::service::types::{Memory, MemoryExtent, PoolBytes};

/// Most objects queued to be replicated; the walk finds the others.
pub(super) const QUEUE_MOST: usize = 4096;
/// Most objects, and their bytes, in flight to replica owners. One object may be larger.
const PUSHES_MOST: usize = 32;
const PUSH_BYTES_MOST: u64 = 64 << 20;
/// Queued objects that are tried until one can be sent.
const TURNS: usize = 64;

/// Replica in flight to the replica owner.
#[derive(Debug)]
struct Push {
    owner: ShardKey,
    version: Version,
    pin: PinId,
    bytes: u64,
    /// True if owners have changed meanwhile.
    void: bool,
}

/// Replicas in flight, and those to be sent next.
#[derive(Debug, Default)]
pub(super) struct Pushes {
    sent: BTreeMap<Digest, Push>,
    bytes: u64,
    queue: VecDeque<(Digest, Version)>,
    /// Objects of the requests that replica owners have not answered yet.
    calls: BTreeMap<u64, Digest>,
    /// Replies that wait for replicas.
    waits: Waits,
    counters: PushCounters,
}

/// Counters of replicas by their outcome.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PushCounters {
    /// Replicas that replica owners accepted, and their bytes.
    pub(super) made: u64,
    pub(super) made_bytes: u64,
    /// Replicas that replica owners did not accept, or not in time.
    pub(super) failed: u64,
}

impl Pushes {
    pub(super) const fn counters(&self) -> PushCounters {
        self.counters
    }

    /// Returns true if none is queued.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns true if fewer objects than the most are in flight.
    pub(super) fn has_room(&self) -> bool {
        self.sent.len() < PUSHES_MOST
    }

    /// Returns true if no more may be sent at the moment.
    fn is_full(&self) -> bool {
        !self.has_room() || self.bytes >= PUSH_BYTES_MOST
    }

    /// Enqueues an object to be replicated; false if the queue is full.
    pub(super) fn add(&mut self, digest: Digest, version: Version) -> bool {
        let has_room = self.queue.len() < QUEUE_MOST;
        if has_room {
            self.queue.push_back((digest, version));
        }
        has_room
    }

    /// Enqueues objects that were found to lack a replica.
    pub(super) fn extend(&mut self, found: impl IntoIterator<Item = (Digest, Version)>) {
        self.queue.extend(found);
    }

    /// Returns true if a replica of an object is in flight.
    pub(super) fn has(&self, digest: Digest) -> bool {
        self.sent.contains_key(&digest)
    }

    /// Returns true if a replica of any object in a slot is in flight.
    pub(super) fn has_in(&self, slot: Slot) -> bool {
        self.sent.keys().any(|digest| digest.slot() == slot)
    }

    /// Returns true if a replica of this version is in flight.
    pub(super) fn is_sending(&self, digest: Digest, version: Version) -> bool {
        self.sent.get(&digest).is_some_and(|push| push.version == version)
    }

    /// Marks replicas in flight as void in the slots for which `pick` returns true, because their owners have changed.
    pub(super) fn void(&mut self, pick: impl Fn(Slot) -> bool) {
        self.sent.iter_mut().for_each(|(digest, push)| push.void |= pick(digest.slot()));
    }

    /// Returns the objects whose replicas are in flight since before owners changed.
    pub(super) fn voided(&self) -> Vec<Digest> {
        self.sent.iter().filter(|(_, push)| push.void).map(|(digest, _)| *digest).collect()
    }

    /// Makes a reply wait for the replica of a version.
    pub(super) fn wait(&mut self, digest: Digest, version: Version, item: DeferredItem, now_ns: u64) {
        self.waits.add(digest, version, item, now_ns.saturating_add(WAIT_NS));
    }

    /// Ends the waits for the replica of a version, and of earlier ones: it is known now whether the replica exists.
    pub(super) fn end_wait(&mut self, shard: &mut Shard, digest: Digest, version: Version, there: bool) {
        for (item, is_version) in self.waits.end(digest, version) {
            let here = there && is_version;
            shard.settle(item, |replies, item| match replies {
                Replies::Put(_, _, is_replicated) if here => *is_replicated = true,
                Replies::Commits(_, replies) if here => replies[item].flags = ItemFlags::REPLICATED,
                _ => {}
            });
        }
    }

    /// Ends the waits that have timed out.
    pub(super) fn expire(&mut self, shard: &mut Shard) {
        self.waits.expire(shard.now_ns).into_iter().for_each(|item| shard.settle(item, |_, _| {}));
    }

    /// Returns the time at which a wait times out.
    pub(super) const fn poll_timeout(&self) -> Option<u64> {
        self.waits.poll_timeout()
    }

    /// Returns the next request to a replica owner. Objects whose replicas cannot be sent now are left to the walk.
    pub(super) fn poll(
        &mut self,
        local: &mut LocalStore,
        removals: &ReplicaRemovals,
        owners: &ReplicaOwners,
        walk: &mut Walk,
    ) -> Option<Fetch> {
        for _ in 0..TURNS {
            let (digest, version) = *self.queue.front().filter(|_| !self.is_full())?;
            self.queue.pop_front();
            let shard = &mut local.shard;
            let owner = shard.replicas.owner(digest.slot());
            let Some(owner) = owner.filter(|_| shard.ownership.owns(digest)) else {
                self.end_wait(shard, digest, version, false);
                continue;
            };
            if owners.rests(owner, shard.now_ns) {
                // The replica owner is in backoff; the walk finds its objects again.
                self.end_wait(shard, digest, version, false);
                walk.repeat(shard);
                continue;
            }
            if self.has(digest) || removals.is_outstanding(digest) {
                // Sent once the replica in flight, or the outstanding removal, is done.
                self.queue.push_back((digest, version));
                continue;
            }
            match self.push(local, walk, digest, version, owner) {
                Some(fetch) => return Some(fetch),
                None => self.end_wait(&mut local.shard, digest, version, false),
            }
        }
        None
    }

    /// Sends an object to the replica owner, if it still has this version and no replica.
    fn push(
        &mut self,
        local: &mut LocalStore,
        walk: &mut Walk,
        digest: Digest,
        version: Version,
        owner: ShardKey,
    ) -> Option<Fetch> {
        // An object that was just read from the SSD has its name only there.
        let lacks_tail = lacks_tail(local, digest);
        let shard = &mut local.shard;
        let store = &mut shard.store;
        let there = store.peek(digest).is_some_and(|object| object.version == version);
        if !there || !store.objects().replica(digest).is_owed_a_copy() || store.objects().is_copied(digest) {
            return None;
        }
        if is_on_device(local, digest) {
            // It is sent from memory: the walk finds it again there.
            let _ = recall(local, digest, None);
            walk.repeat(&local.shard);
            return None;
        }
        let shard = &mut local.shard;
        let store = &mut shard.store;
        let Some((pin, object)) = (!lacks_tail).then(|| store.hold(digest)).flatten() else {
            walk.repeat(shard);
            return None;
        };
        // From now on the replica owner may have a replica.
        store.objects_mut().note_copy(digest, version, true);
        let bytes = object.extent.bytes;
        self.sent.insert(digest, Push { owner, version, pin, bytes, void: false });
        self.bytes += bytes;
        let extent = MemoryExtent { memory: Memory::Pool, offset: object.extent.offset, bytes };
        let tail_at = object.has_tail.then_some(object.tail_at);
        let token = shard.new_fetch_token();
        self.calls.insert(token, digest);
        let (is_head, priority) = (object.is_head, object.priority);
        let want = Want::Copy { digest, extent, tail_at, is_head, priority, version };
        Some(Fetch { token, source: owner, want })
    }

    /// Handles the answer to a request, or the failure to get one. Returns false if it belongs to no request of this
    /// component.
    pub(super) fn fetched(
        &mut self,
        shard: &mut Shard,
        removals: &mut ReplicaRemovals,
        owners: &mut ReplicaOwners,
        walk: &mut Walk,
        token: u64,
        done: &FetchDone,
    ) -> bool {
        let Some(digest) = self.calls.remove(&token) else { return false };
        let Some(Push { owner, version, pin, bytes, void }) = self.sent.remove(&digest) else { return true };
        self.bytes -= bytes;
        removals.wake();
        let store = &mut shard.store;
        let live = store.pinned(pin).is_some_and(Entry::is_live);
        store.unpin(pin).expect("a pin that the shard holds");
        match done {
            FetchDone::Copied if !void => {
                self.counters.made += 1;
                self.counters.made_bytes += bytes;
                owners.answered(owner);
                self.end_wait(shard, digest, version, live);
            }
            FetchDone::Failed(status) if !void => {
                self.counters.failed += 1;
                // Only these refusals prove that the replica owner has no replica.
                let refused = matches!(status, Status::NoSpace | Status::TooLarge | Status::QuotaExceeded);
                if live {
                    store.objects_mut().note_copy(digest, version, false);
                    if !refused {
                        removals.add(digest);
                    }
                }
                if refused {
                    owners.answered(owner);
                } else {
                    owners.not_answered(owner, shard.now_ns);
                }
                walk.repeat(shard);
                self.end_wait(shard, digest, version, false);
            }
            _ => {
                self.end_wait(shard, digest, version, false);
                walk.repeat(shard);
            }
        }
        true
    }
}

/// Returns the put of a replica, with the options and the name of the object's tail, if it has one. Neither the stripe
/// head flag nor the priority depends on the tail.
#[must_use]
pub fn copy_of(
    digest: Digest,
    bytes: u64,
    is_head: bool,
    tail_at: Option<u64>,
    priority: ObjectPriority,
    pool: &dyn PoolBytes,
) -> (PutItem, Vec<u8>, Vec<u8>) {
    let part = if is_head { Part::Head } else { Part::None };
    let item = PutItem::plain(digest, bytes).with_options(&PutOptions { part, priority, ..PutOptions::default() });
    let plain = (item, Vec::new(), Vec::new());
    let Some(at) = tail_at else { return plain };
    let tail = tail_within(at, pool.bytes(), |at, into| pool.read(at, into));
    // A process that has mapped the pool may have corrupted it.
    let Some((head, name)) = TailHead::split(&tail) else { return plain };
    let part = match (is_head, head.options.part) {
        (true, _) => Part::Head,
        (false, Part::Stripe) => Part::Stripe,
        (false, _) => Part::None,
    };
    let options = PutOptions { soft_pin_ms: 0, part, priority, ..head.options };
    if head.key_bytes == 0 {
        return (plain.0.with_options(&options), Vec::new(), Vec::new());
    }
    // A tail with another name belongs to another object.
    let own = name.digest() == digest;
    if own { (PutItem::named(&name, bytes, &options), name.tenant.to_vec(), name.key.to_vec()) } else { plain }
}

/// Returns true if an object is in memory and its name so far on the SSD only.
fn lacks_tail(local: &LocalStore, digest: Digest) -> bool {
    let named = || local.on_ssd(digest).is_some_and(|view| view.key_bytes > 0);
    local.shard.peek(digest).is_some_and(|object| !object.has_tail) && named()
}

//! Replicas that are written at replica owners: those in flight, those to be sent next, and the replies that wait for
//! them.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::ids::{Incarnation, NodeId, PinId, ShardId, Slot, Version};
use kvplane_proto::map::{ReplicaSet, ShardKey};
use kvplane_proto::message::{ObjectPriority, Part, PutItem, PutOptions};
use kvplane_proto::{Digest, Status};

use super::owners::ReplicaOwners;
use super::removals::ReplicaRemovals;
use super::waits::{LateReply, WAIT_NS, Waits};
use super::walks::Walk;
use crate::entry::Entry;
use crate::service::device_moves::{is_on_device, recall};
use crate::service::fetches::{Fetch, FetchDone, Want};
use crate::service::local::LocalStore;
use crate::service::shard::Shard;
use crate::service::shard::deferrals::DeferredItem;
use crate::service::shard::effects::Effect;
use crate::service::shard::tail::{TailHead, tail_within};
use crate::service::types::{Memory, MemoryExtent, PoolBytes};

/// Most objects queued to be replicated; the walk finds the others.
pub(super) const QUEUE_MOST: usize = 4096;
/// Most objects, and their bytes, in flight to replica owners. One object may be larger.
const PUSHES_MOST: usize = 32;
const PUSH_BYTES_MOST: u64 = 64 << 20;
/// Queued objects that are tried until one can be sent.
const TURNS: usize = 64;

/// Replica in flight to a replica owner.
#[derive(Debug)]
struct Push {
    version: Version,
    pin: PinId,
    bytes: u64,
    /// True if owners have changed meanwhile.
    void: bool,
}

/// Object to be replicated.
#[derive(Clone, Copy, Debug)]
struct QueuedPush {
    digest: Digest,
    version: Version,
    /// Replica owners to which it was sent since it was enqueued. One that has refused it does not get it again before
    /// the walk, with its pauses, finds the object.
    sent_to: ReplicaSet,
}

/// Replicas in flight, and those to be sent next.
#[derive(Debug, Default)]
pub(super) struct Pushes {
    sent: BTreeMap<(Digest, ShardKey), Push>,
    bytes: u64,
    /// Objects to be replicated; each stays in the queue until it was sent to all replica owners that are to have it.
    queue: VecDeque<QueuedPush>,
    /// Objects and replica owners of the requests that replica owners have not answered yet.
    calls: BTreeMap<u64, (Digest, ShardKey)>,
    /// Objects for whose replicas replies wait, and of which other versions are to be removed first at replica owners
    /// that are in backoff.
    held: Vec<(Digest, Version)>,
    /// Replies that wait for replicas.
    waits: Waits,
    counters: PushCounters,
}

/// Next step in replicating an object.
enum NextPush {
    /// It is sent to this replica owner, which has this number.
    To(usize, ShardKey),
    /// It is sent once the replica in flight to a replica owner, or the outstanding removal there, is done.
    Later,
    /// It is sent once other versions have been removed at replica owners of which some are in backoff.
    Held,
    /// It is sent to no other replica owner now. With true if some that is to have it is in backoff.
    Nowhere(bool),
}

impl QueuedPush {
    const fn new(digest: Digest, version: Version) -> Self {
        Self { digest, version, sent_to: ReplicaSet::NONE }
    }
}

/// Least shard in the order of keys.
const LEAST: ShardKey = ShardKey { node: NodeId(0), incarnation: Incarnation(0), shard: ShardId(0) };

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
            self.queue.push_back(QueuedPush::new(digest, version));
        }
        has_room
    }

    /// Enqueues objects that were found to lack a replica.
    pub(super) fn extend(&mut self, found: impl IntoIterator<Item = (Digest, Version)>) {
        self.queue.extend(found.into_iter().map(|(digest, version)| QueuedPush::new(digest, version)));
    }

    /// Returns the replicas of an object that are in flight.
    fn sent_of(&self, digest: Digest) -> impl Iterator<Item = (ShardKey, &Push)> {
        let sent = self.sent.range((digest, LEAST)..);
        sent.take_while(move |((sent, _), _)| *sent == digest).map(|((_, owner), push)| (*owner, push))
    }

    /// Returns true if a replica of an object is in flight to this replica owner.
    pub(super) fn has_at(&self, digest: Digest, owner: ShardKey) -> bool {
        self.sent.contains_key(&(digest, owner))
    }

    /// Returns true if a replica of any object in a slot is in flight to this replica owner.
    pub(super) fn has_in(&self, slot: Slot, owner: ShardKey) -> bool {
        self.sent.keys().any(|(digest, to)| digest.slot() == slot && *to == owner)
    }

    /// Returns true if a replica of this version is in flight.
    pub(super) fn is_sending(&self, digest: Digest, version: Version) -> bool {
        self.sent_of(digest).any(|(_, push)| push.version == version)
    }

    /// Returns the objects whose replicas are in flight, each with its version and the replica owner.
    pub(super) fn in_flight(&self) -> impl Iterator<Item = (Digest, Version, ShardKey)> + '_ {
        self.sent.iter().map(|((digest, owner), push)| (*digest, push.version, *owner))
    }

    /// Marks replicas in flight as void in the slots and to the replica owners for which `pick` returns true, because
    /// owners have changed.
    pub(super) fn void(&mut self, pick: impl Fn(Slot, ShardKey) -> bool) {
        self.sent.iter_mut().for_each(|((digest, owner), push)| push.void |= pick(digest.slot(), *owner));
    }

    /// Returns the objects whose replicas are in flight since before owners changed, each with its version and the
    /// replica owner.
    pub(super) fn voided(&self) -> Vec<(Digest, Version, ShardKey)> {
        let void = self.sent.iter().filter(|(_, push)| push.void);
        void.map(|((digest, owner), push)| (*digest, push.version, *owner)).collect()
    }

    /// Enqueues the objects again of which no other version is to be removed any more.
    pub(super) fn resume(&mut self, removals: &ReplicaRemovals) {
        let (waits, queue) = (&self.waits, &mut self.queue);
        self.held.retain(|(digest, version)| {
            let is_held = removals.has_other(*digest, *version);
            if !is_held {
                queue.push_front(QueuedPush::new(*digest, *version));
            }
            is_held && waits.has(*digest)
        });
    }

    /// Makes a reply wait for replicas of a version.
    pub(super) fn wait(&mut self, digest: Digest, version: Version, item: DeferredItem, now_ns: u64) {
        self.waits.add(digest, version, item, now_ns.saturating_add(WAIT_NS));
    }

    /// Returns the replica owners that have acknowledged a replica of this version.
    fn confirmed(&self, shard: &Shard, digest: Digest, version: Version) -> ReplicaSet {
        if shard.peek(digest).is_none_or(|object| object.version != version) {
            return ReplicaSet::NONE;
        }
        let owners = shard.replicas.owners_of(digest.slot());
        let at = shard.store.objects().copies(digest).at;
        let is_confirmed = |number: usize| owners.get(number).is_some_and(|owner| !self.has_at(digest, *owner));
        ReplicaSet::of(|number| at.has(number) && is_confirmed(number))
    }

    /// Ends the waits for replicas of a version if there are as many as they wait for, or if `is_over`: no more are
    /// sent now. Ends those for earlier versions in any case.
    pub(super) fn end_wait(&mut self, shard: &mut Shard, digest: Digest, version: Version, is_over: bool) {
        if !self.waits.has(digest) {
            return;
        }
        let there = self.confirmed(shard, digest, version);
        let copies = shard.store.objects().copies(digest);
        let wanted = shard.replicas.possible(digest, copies).min(copies.awaited.into());
        let is_over = is_over || there.count() >= wanted.max(1);
        for (item, is_version) in self.waits.end(digest, version, is_over) {
            shard.settle(item, |replies, item| {
                if is_version {
                    replies.set_replicas(item, there);
                }
            });
        }
    }

    /// Ends the waits that have timed out: the answer names the replicas that there are by now.
    pub(super) fn expire(&mut self, shard: &mut Shard) {
        for LateReply { digest, version, item } in self.waits.expire(shard.now_ns) {
            let there = self.confirmed(shard, digest, version);
            shard.settle(item, |replies, item| replies.set_replicas(item, there));
        }
    }

    /// Returns the time at which a reply times out.
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
            let mut queued = *self.queue.front().filter(|_| !self.is_full())?;
            self.queue.pop_front();
            let QueuedPush { digest, version, .. } = queued;
            match self.next_push(&local.shard, removals, owners, queued) {
                NextPush::To(number, owner) => {
                    if let Some(fetch) = self.push(local, walk, digest, version, owner) {
                        // The other replica owners are next.
                        queued.sent_to = queued.sent_to.with(number);
                        self.queue.push_front(queued);
                        return Some(fetch);
                    }
                    self.end_wait(&mut local.shard, digest, version, true);
                }
                NextPush::Later => self.queue.push_back(queued),
                NextPush::Held => {
                    if self.waits.has(digest) && self.held.len() < QUEUE_MOST {
                        self.held.push((digest, version));
                    }
                    walk.repeat(&local.shard);
                }
                NextPush::Nowhere(rests) => {
                    if rests {
                        // A replica owner is in backoff; the walk finds its objects again.
                        walk.repeat(&local.shard);
                    }
                    let is_over = !self.is_sending(digest, version);
                    self.end_wait(&mut local.shard, digest, version, is_over);
                }
            }
        }
        None
    }

    /// Returns the next step in replicating this version of an object: the first replica owners of its slot get as many
    /// replicas as the object is to have. In place of those that cannot be reached, others get one for the time being.
    fn next_push(
        &self,
        shard: &Shard,
        removals: &ReplicaRemovals,
        owners: &ReplicaOwners,
        queued: QueuedPush,
    ) -> NextPush {
        let QueuedPush { digest, version, sent_to } = queued;
        let objects = shard.store.objects();
        let is_owed = objects.replica(digest).is_owed_a_copy() && shard.ownership.owns(digest);
        let is_version = shard.peek(digest).is_some_and(|object| object.version == version);
        let copies = objects.copies(digest);
        if !is_owed || !is_version || !shard.replicas.lacks(digest, copies) {
            return NextPush::Nowhere(false);
        }
        if removals.has_other(digest, version) {
            let owners_of = shard.replicas.owners_of(digest.slot());
            let mut removed_at = owners_of.iter().filter(|owner| removals.is_outstanding_at(digest, **owner));
            let rests = removed_at.any(|owner| owners.rests(*owner, shard.now_ns));
            return if rests { NextPush::Held } else { NextPush::Later };
        }
        let (mut rests, mut is_later) = (false, false);
        let possible = shard.replicas.possible(digest, copies);
        for (number, owner) in shard.replicas.owners_of(digest.slot()).iter().enumerate() {
            if number >= possible && copies.at.count() >= possible {
                break;
            }
            let is_tried = sent_to.has(number) || self.waits.has_failed(digest, version, *owner);
            if copies.at.has(number) || is_tried {
                continue;
            }
            if owners.rests(*owner, shard.now_ns) {
                rests = true;
            } else if self.has_at(digest, *owner) || removals.is_outstanding_at(digest, *owner) {
                is_later = true;
            } else {
                return NextPush::To(number, *owner);
            }
        }
        if is_later { NextPush::Later } else { NextPush::Nowhere(rests) }
    }

    /// Sends an object to a replica owner, if it can be sent now.
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
        if is_on_device(local, digest) {
            // It is sent from memory: the walk finds it again there.
            let _ = recall(local, digest, None);
            walk.repeat(&local.shard);
            return None;
        }
        let shard = &mut local.shard;
        let number = shard.replicas.number_of(digest.slot(), owner)?;
        let store = &mut shard.store;
        let Some((pin, object)) = (!lacks_tail).then(|| store.hold(digest)).flatten() else {
            walk.repeat(shard);
            return None;
        };
        // From now on the replica owner may have a replica.
        store.objects_mut().note_copy(digest, version, number, true);
        let bytes = object.extent.bytes;
        self.sent.insert((digest, owner), Push { version, pin, bytes, void: false });
        self.bytes += bytes;
        let extent = MemoryExtent { memory: Memory::Pool, offset: object.extent.offset, bytes };
        let tail_at = object.has_tail.then_some(object.tail_at);
        let token = shard.new_fetch_token();
        self.calls.insert(token, (digest, owner));
        let (is_head, priority, replicas) = (object.is_head, object.priority, object.copies.replicas());
        let checksum = object.checksum;
        let want = Want::Copy { digest, extent, tail_at, is_head, priority, replicas, version, checksum };
        Some(Fetch { token, source: owner, want })
    }

    /// Gives up the replicas of an object at replica owners that had it in place of others, once these have it.
    fn give_up_surplus(&self, shard: &mut Shard, removals: &mut ReplicaRemovals, digest: Digest, version: Version) {
        let copies = shard.store.objects().copies(digest);
        let surplus = copies.at.minus(shard.replicas.destinations(digest, copies));
        if surplus.is_empty() || shard.replicas.lacks(digest, copies) || self.sent_of(digest).next().is_some() {
            return;
        }
        for number in surplus.iter() {
            let owner = shard.replicas.owners_of(digest.slot()).get(number).copied();
            if let Some(owner) = owner.filter(|_| shard.store.objects_mut().note_copy(digest, version, number, false)) {
                removals.add(digest, version, owner);
            }
        }
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
        let Some((digest, owner)) = self.calls.remove(&token) else { return false };
        let Some(Push { version, pin, bytes, void }) = self.sent.remove(&(digest, owner)) else { return true };
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
                self.give_up_surplus(shard, removals, digest, version);
                if !shard.replicas.lacks(digest, shard.store.objects().copies(digest)) {
                    shard.effects.note(Effect::Replicated(digest));
                }
            }
            FetchDone::Failed(status) if !void => {
                self.counters.failed += 1;
                self.waits.note_failed(digest, version, owner);
                if *status == Status::Corrupt {
                    shard.effects.note(Effect::Suspect(digest));
                }
                // Only these refusals prove that the replica owner has no replica.
                let refused = matches!(status, Status::NoSpace | Status::TooLarge | Status::QuotaExceeded);
                if live && let Some(number) = shard.replicas.number_of(digest.slot(), owner) {
                    store.objects_mut().note_copy(digest, version, number, false);
                    if !refused {
                        removals.add(digest, version, owner);
                    }
                }
                if refused || *status == Status::Corrupt {
                    owners.answered(owner);
                } else {
                    owners.not_answered(owner, shard.now_ns);
                }
                walk.repeat(shard);
            }
            _ => walk.repeat(shard),
        }
        self.end_wait(shard, digest, version, false);
        if self.waits.has(digest) && !self.is_sending(digest, version) {
            // Another replica owner may take it; if none does, the wait is over.
            self.queue.push_front(QueuedPush::new(digest, version));
        }
        true
    }
}

/// Returns the put of a replica, with the options and the name of the object's tail, if it has one. The stripe head
/// flag, the priority and the number of replicas do not depend on the tail.
#[must_use]
pub fn copy_of(
    digest: Digest,
    bytes: u64,
    is_head: bool,
    tail_at: Option<u64>,
    priority: ObjectPriority,
    replicas: u8,
    pool: &dyn PoolBytes,
) -> (PutItem, Vec<u8>, Vec<u8>) {
    let part = if is_head { Part::Head } else { Part::None };
    let options = PutOptions { part, priority, replicas, ..PutOptions::default() };
    let item = PutItem::plain(digest, bytes).with_options(&options);
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
    let options = PutOptions { soft_pin_ms: 0, part, priority, replicas, ..head.options };
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

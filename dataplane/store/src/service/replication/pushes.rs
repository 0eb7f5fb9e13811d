//! Requests to replica owners: replicas to be written, and those to be removed.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::ids::{PinId, Slot, Version};
use kvplane_proto::map::ShardKey;
use kvplane_proto::message::{Part, PutItem, PutOptions};
use kvplane_proto::{Digest, Status};

use super::Replication;
use super::owed::all_of;
use crate::entry::Entry;
use crate::service::fetches::{Fetch, FetchDone, Want};
use crate::service::local::LocalStore;
use crate::service::shard::Shard;
use crate::service::shard::tail::{TailHead, tail_within};
use crate::service::types::{Memory, Place, PoolBytes};

/// Most objects queued to be replicated; the walk finds the others.
pub(super) const QUEUE_MOST: usize = 4096;
/// Most objects, and their bytes, in flight to replica owners. One object may be larger.
const PUSHES_MOST: usize = 32;
const PUSH_BYTES_MOST: u64 = 64 << 20;
/// Queued objects that are tried until one can be sent.
const TURNS: usize = 64;

/// Request that a replica owner has not answered yet.
#[derive(Debug)]
pub(super) enum Call {
    Copy(Digest),
    Drop { owner: ShardKey, digests: Vec<Digest> },
}

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
}

impl Pushes {
    /// Returns true if none is queued.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns true if no more may be sent at the moment.
    fn is_full(&self) -> bool {
        self.sent.len() >= PUSHES_MOST || self.bytes >= PUSH_BYTES_MOST
    }

    /// Enqueues an object to be replicated; false if the queue is full.
    pub(super) fn add(&mut self, digest: Digest, version: Version) -> bool {
        let has_room = self.queue.len() < QUEUE_MOST;
        if has_room {
            self.queue.push_back((digest, version));
        }
        has_room
    }

    /// Returns true if a replica of an object is in flight.
    pub(super) fn has(&self, digest: Digest) -> bool {
        self.sent.contains_key(&digest)
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
}

/// Returns the put of a replica, with the options and the name of the object's tail, if it has one. The stripe head
/// flag does not depend on the tail.
#[must_use]
pub fn copy_of(
    digest: Digest,
    bytes: u64,
    is_head: bool,
    tail_at: Option<u64>,
    pool: &dyn PoolBytes,
) -> (PutItem, Vec<u8>, Vec<u8>) {
    let part = if is_head { Part::Head } else { Part::None };
    let item = PutItem::plain(digest, bytes).with_options(&PutOptions { part, ..PutOptions::default() });
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
    let options = PutOptions { soft_pin_ms: 0, part, ..head.options };
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

impl Replication {
    /// Returns the next request to a replica owner, within the rate of background work.
    pub(in crate::service) fn poll(&mut self, local: &mut LocalStore, bytes_per_s: u64) -> Option<Fetch> {
        if local.shard.replicas.is_alone() {
            return None;
        }
        self.note_orphans(&mut local.shard);
        self.next_drop(&mut local.shard).or_else(|| self.next_push(local)).or_else(|| {
            if self.pushes.is_idle() {
                self.pushes.queue.extend(self.wishes.next(&local.shard, bytes_per_s));
            }
            if self.pushes.is_idle() && self.pushes.sent.len() < PUSHES_MOST {
                self.pushes.queue.extend(self.walk.step(&local.shard, bytes_per_s));
            }
            if self.pushes.is_idle() {
                self.ssd_walk.step(local, bytes_per_s);
            }
            self.next_push(local)
        })
    }

    /// Handles the answer of a replica owner, or the failure to get one. Returns false if it belongs to no request of
    /// this component.
    pub(in crate::service) fn fetched(&mut self, shard: &mut Shard, token: u64, done: &FetchDone) -> bool {
        match self.calls.remove(&token) {
            Some(Call::Copy(digest)) => self.pushed(shard, digest, done),
            Some(Call::Drop { owner, digests }) => self.dropped(shard, token, owner, &digests, done),
            None => return false,
        }
        true
    }

    fn next_drop(&mut self, shard: &mut Shard) -> Option<Fetch> {
        let now_ns = shard.now_ns;
        if !self.owed.is_due(now_ns) {
            return None;
        }
        let token = shard.new_fetch_token();
        let (pushes, owners) = (&self.pushes, &self.owners);
        let may_ask = |digest: Digest, owner: ShardKey| {
            // For a whole slot, no replica in it may be in flight.
            let sending = match digest == all_of(digest.slot()) {
                true => pushes.sent.keys().any(|push| push.slot() == digest.slot()),
                false => pushes.has(digest),
            };
            !sending && owners.may_drop(owner, now_ns)
        };
        let Some((owner, digests)) = self.owed.next(token, |slot| shard.replicas.owner(slot), may_ask) else {
            self.owed.rest(self.owners.poll_timeout(now_ns).unwrap_or(u64::MAX));
            return None;
        };
        self.owners.begin_drop(owner);
        self.calls.insert(token, Call::Drop { owner, digests: digests.clone() });
        Some(Fetch { token, source: owner, want: Want::DropCopies(digests) })
    }

    fn next_push(&mut self, local: &mut LocalStore) -> Option<Fetch> {
        for _ in 0..TURNS {
            let (digest, version) = *self.pushes.queue.front().filter(|_| !self.pushes.is_full())?;
            let shard = &mut local.shard;
            let owner = shard.replicas.owner(digest.slot());
            let Some(owner) = owner.filter(|_| shard.ownership.owns(digest)) else {
                self.pushes.queue.pop_front();
                self.end_wait(shard, digest, version, false);
                continue;
            };
            if self.owners.rests(owner, shard.now_ns) {
                // The replica owner is in backoff; the walk finds its objects again.
                self.pushes.queue.pop_front();
                self.end_wait(shard, digest, version, false);
                self.walk_again(shard);
                continue;
            }
            self.pushes.queue.pop_front();
            if self.pushes.has(digest) || self.owes(digest) {
                // Sent once the replica in flight, or the owed removal, is done.
                self.pushes.queue.push_back((digest, version));
                continue;
            }
            match self.push(local, digest, version, owner) {
                Some(fetch) => return Some(fetch),
                None => self.end_wait(&mut local.shard, digest, version, false),
            }
        }
        None
    }

    /// Sends an object to the replica owner, if it still has this version and no replica.
    fn push(&mut self, local: &mut LocalStore, digest: Digest, version: Version, owner: ShardKey) -> Option<Fetch> {
        // An object that was just read from the SSD has its name only there.
        let lacks_tail = lacks_tail(local, digest);
        let shard = &mut local.shard;
        let store = shard.store.as_mut()?;
        let there = store.peek(digest).is_some_and(|object| object.version == version);
        if !there || !store.objects().replica(digest).is_owed_a_copy() || store.objects().is_copied(digest) {
            return None;
        }
        let Some((pin, object)) = (!lacks_tail).then(|| store.hold(digest)).flatten() else {
            self.walk_again(shard);
            return None;
        };
        // From now on the replica owner may have a replica.
        store.objects_mut().note_copy(digest, version, true);
        let bytes = object.extent.bytes;
        self.pushes.sent.insert(digest, Push { owner, version, pin, bytes, void: false });
        self.pushes.bytes += bytes;
        let place = Place { memory: Memory::Pool, offset: object.extent.offset, bytes };
        let tail_at = object.has_tail.then_some(object.tail_at);
        let token = shard.new_fetch_token();
        self.calls.insert(token, Call::Copy(digest));
        let want = Want::Copy { digest, place, tail_at, is_head: object.is_head, version };
        Some(Fetch { token, source: owner, want })
    }

    /// Handles the outcome of a replica's write.
    fn pushed(&mut self, shard: &mut Shard, digest: Digest, done: &FetchDone) {
        let Some(Push { owner, version, pin, bytes, void }) = self.pushes.sent.remove(&digest) else { return };
        self.pushes.bytes -= bytes;
        self.owed.wake();
        let Some(store) = &mut shard.store else { return };
        let live = store.pinned(pin).is_some_and(Entry::is_live);
        store.unpin(pin).expect("a pin that the shard holds");
        match done {
            FetchDone::Copied if !void => {
                self.counters.made += 1;
                self.counters.made_bytes += bytes;
                self.owners.answered(owner);
                self.end_wait(shard, digest, version, live);
            }
            FetchDone::Failed(status) if !void => {
                self.counters.failed += 1;
                // Only these refusals prove that the replica owner has no replica.
                let refused = matches!(status, Status::NoSpace | Status::TooLarge | Status::QuotaExceeded);
                if live {
                    store.objects_mut().note_copy(digest, version, false);
                    if !refused {
                        self.owed.owe(digest);
                    }
                }
                if refused {
                    self.owners.answered(owner);
                } else {
                    self.owners.not_answered(owner, shard.now_ns);
                }
                self.walk_again(shard);
                self.end_wait(shard, digest, version, false);
            }
            _ => {
                self.end_wait(shard, digest, version, false);
                self.walk_again(shard);
            }
        }
    }

    /// Handles the outcome of a removal request.
    fn dropped(&mut self, shard: &mut Shard, token: u64, owner: ShardKey, digests: &[Digest], done: &FetchDone) {
        let gone: &[bool] = if let FetchDone::CopiesDropped(gone) = done { gone } else { &[] };
        self.owed.wake();
        self.owners.end_drop(owner);
        if gone.contains(&true) {
            self.owners.answered(owner);
        } else {
            self.owners.not_answered(owner, shard.now_ns);
        }
        for (at, digest) in digests.iter().enumerate() {
            // The answer does not concern slots with another replica owner.
            if shard.replicas.owner(digest.slot()) != Some(owner) {
                continue;
            }
            let is_gone = gone.get(at) == Some(&true);
            if let Some(waiters) = self.owed.answered(*digest, token, is_gone, shard.now_ns) {
                self.counters.dropped += 1;
                waiters.into_iter().for_each(|(item, _)| shard.settle(item, |_, _| {}));
            }
        }
    }
}

//! Core state of a shard: its slots, its connections, its objects in memory, and outgoing replies.
//!
//! Everything else of the service builds on a [`Shard`] and gets it as an argument: the tier, migration, replication,
//! and the requests that use them. The shard knows nothing of these.

pub(super) mod answers;
pub(super) mod context;
pub(super) mod deferrals;
pub(super) mod effects;
pub(in crate::service) mod exports;
mod ownership;
mod replica_slots;
pub(super) mod rights;
pub(super) mod sessions;
pub(in crate::service) mod slot_table;
pub(super) mod stream_read;
pub(super) mod tail;
pub(super) mod timing;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, PinId, RequestId, ReservationId, Version};
use kvplane_proto::map::ReplicaSet;
use kvplane_proto::message::{Kind, LookupReply, ObjectName, Operation};
use kvplane_proto::rng::mix64;
use kvplane_proto::{Digest, Status};
use kvplane_tier::SlotSet;

use self::answers::Answers;
use self::deferrals::{Deferrals, DeferredItem, Replies, lookup_of, no_lookup};
use self::effects::{Effect, Effects};
pub(super) use self::exports::Exports;
pub(super) use self::ownership::Ownership;
pub(super) use self::replica_slots::{Relation, ReplicaOwnersBySlot, ReplicaSlots};
use self::sessions::{PendingPayload, Sessions};
use self::stream_read::{ReadSpan, Reader, StreamRead};
use self::tail::{TailHead, tail_within};
use self::timing::TimedTenant;
use super::types::{
    CloseReason, Extents, Hold, Identity, Memory, MemoryExtent, Output, PeerKey, PoolBytes, ServiceCounters, TailWrite,
};
use crate::store::Store;
use crate::{ObjectView, StoreConfig};

/// Fewest look-ups for which warming the cache pays.
const WARMED: usize = 4;

/// Part of the pool, as a divisor, that is kept free of objects read from the SSD only to be replicated.
const FREE_PART: u64 = 8;

/// Core state of a shard, without tier, migration and replication.
pub(super) struct Shard {
    pub(super) ownership: Ownership,
    /// Slots that were lost, whose objects are kept for their new owners.
    pub(super) exports: Exports,
    /// Slots whose objects are replicated: as owner, and as replica owner.
    pub(super) replicas: ReplicaSlots,
    pub(super) sessions: Sessions,
    pub(super) answers: Answers,
    /// Deferred replies.
    pub(super) deferrals: Deferrals,
    /// Objects in memory; without a pool where the shard has segments only.
    pub(super) store: Store,
    pub(super) tenants: TenantRules,
    /// Notifications for the components above.
    pub(super) effects: Effects,
    pub(super) counters: ServiceCounters,
    /// Number of requests to other shards so far; the source of their tokens.
    fetches: u64,
    /// Current time, in nanoseconds.
    pub(super) now_ns: u64,
}

/// Rules by which objects are charged to tenants.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TenantRules {
    /// True where tenants that were never configured may not put.
    pub(super) is_strict: bool,
    /// True where there is an SSD: an object read from it is charged to the default tenant until its tail was read.
    pub(super) has_ssd: bool,
}

impl Shard {
    /// Creates a shard that serves no slots yet.
    pub(super) fn new(identity: Identity, store: Store) -> Self {
        let (config, pool_bytes) = (store.config(), store.config().host_bytes());
        let &StoreConfig { max_pins, max_reservations, .. } = config;
        Self {
            ownership: Ownership::new(identity),
            exports: Exports::default(),
            replicas: ReplicaSlots::default(),
            sessions: Sessions::new(pool_bytes, max_pins, max_reservations),
            answers: Answers::new(),
            deferrals: Deferrals::default(),
            store,
            tenants: TenantRules::default(),
            effects: Effects::default(),
            counters: ServiceCounters::default(),
            fetches: 0,
            now_ns: 0,
        }
    }

    /// Returns the number that identifies the order in which this incarnation of the shard walks its objects; never 0.
    pub(super) fn walk_tag(&self) -> u64 {
        mix64(self.store.config().hash_seed ^ mix64(self.ownership.identity().incarnation.0)) | 1
    }

    /// Returns the names of those of these objects that are in memory with a name: index in `digests`, tenant and key.
    pub(super) fn names_of(&self, digests: &[Digest], pool: &dyn PoolBytes) -> Vec<(usize, Vec<u8>, Vec<u8>)> {
        let mut names = Vec::new();
        for (at, digest) in digests.iter().enumerate() {
            let Some(view) = self.peek(*digest).filter(|view| view.has_tail) else { continue };
            let tail = tail_within(view.tail_at, pool.bytes(), |at, into| pool.read(at, into));
            // A process that has mapped the pool may have corrupted it.
            if let Some((head, name)) = TailHead::split(&tail)
                && head.key_bytes > 0
                && name.digest() == *digest
            {
                names.push((at, name.tenant.to_vec(), name.key.to_vec()));
            }
        }
        names
    }

    /// Advances the time.
    pub(super) fn tick(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.store.tick(now_ns);
    }

    /// Returns a token that no request to another shard has had so far.
    pub(super) const fn new_fetch_token(&mut self) -> u64 {
        self.fetches += 1;
        self.fetches
    }

    /// Closes a connection from this side.
    pub(super) fn close(&mut self, peer: PeerKey, reason: CloseReason) {
        self.sessions.close(&mut self.answers.outputs, peer, reason);
    }

    /// Expects the payload of a peer's request.
    pub(super) fn expect_payload(&mut self, peer: PeerKey, pending: PendingPayload) {
        self.sessions.get_mut(peer).expect("a session that was just looked up").pending = Some(pending);
    }

    /// Answers with a failure; for `WrongOwner` the argument is this shard's epoch, by which the peer finds whose map
    /// is older.
    pub(super) fn refuse(&mut self, peer: PeerKey, operation: Operation, request: RequestId, status: Status) {
        let argument = if status == Status::WrongOwner { self.ownership.epoch().0 } else { 0 };
        self.answers.status(peer, operation, request, status, argument);
    }

    /// Enqueues the tail of a reservation's object for the host to write.
    pub(super) fn write_tail(&mut self, reservation: ReservationId, tail: &TailHead, name: &ObjectName<'_>) {
        self.answers.write_tail(reservation, |bytes| tail.encode(name, bytes));
    }

    /// Returns the next tail to be written to the pool, of a reservation that still holds its memory. The tail of an
    /// ended reservation would damage the object that has the memory by now.
    pub(super) fn poll_tail(&mut self) -> Option<TailWrite> {
        while let Some((reservation, bytes)) = self.answers.next_tail() {
            if let Some(reserved) = self.store.reserved(reservation) {
                return Some(TailWrite { offset: self.store.pool().tail_at(reserved), bytes });
            }
        }
        None
    }

    /// Prefetches the cache lines that many look-ups need at once: one after the other, each look-up would miss the
    /// cache twice.
    pub(super) fn warm(&self, digests: impl ExactSizeIterator<Item = Digest>) {
        if digests.len() >= WARMED {
            let mut there = 0u32;
            self.store.objects().exist(digests, |_, here| there += u32::from(here));
            // Keeps the compiler from removing the look-ups.
            core::hint::black_box(there);
        }
    }

    /// Returns an object in memory. Does not count as an access.
    pub(super) fn peek(&self, digest: Digest) -> Option<ObjectView> {
        self.store.peek(digest)
    }

    /// Drops an object from memory, unless it has another version by now.
    pub(super) fn drop_version(&mut self, digest: Digest, version: Version) {
        if self.peek(digest).is_some_and(|object| object.version == version) {
            self.store.drop_copy(digest);
        }
    }

    /// Aborts a reservation that was taken back from its peer and that no I/O writes any more.
    pub(super) fn abort(&mut self, reservation: ReservationId) {
        let store = &mut self.store;
        store.abort(reservation).expect("a session's reservation is held");
    }

    /// Releases a pin that a session, or a reply, held.
    pub(super) fn unpin(&mut self, pin: PinId) {
        self.store.unpin(pin).expect("a reply's pin was released twice");
    }

    /// Returns the bytes of memory that may be filled with objects only to replicate them; the rest stays free.
    pub(super) fn free_for_replicas(&self) -> u64 {
        let store = &self.store;
        store.stats().free_bytes.saturating_sub(store.config().pool_bytes / FREE_PART)
    }

    /// Returns true if an object in memory lacks a replica, which is sent from there.
    pub(super) fn lacks_replica(&self, digest: Digest) -> bool {
        let objects = self.store.objects();
        self.store.exists(digest)
            && objects.replica(digest).is_owed_a_copy()
            && self.ownership.owns(digest)
            && self.replicas.lacks(digest, objects.copies(digest))
    }

    /// Serves these slots and no others, by the map of this epoch.
    pub(super) fn serve_slots(&mut self, epoch: Epoch, slots: &SlotSet) {
        let gains = self.ownership.gains(slots);
        self.ownership.serve(epoch, slots);
        if gains {
            self.effects.note(Effect::SlotsServed);
        }
    }

    /// Counts a get of this many bytes of an object.
    #[inline]
    pub(super) fn note_get(&mut self, digest: Digest, bytes: u64) {
        self.answers.timed.popular.asked(digest, bytes, self.now_ns);
    }

    /// Attributes the next reply to the tenant of this object.
    pub(super) fn about(&mut self, object: &ObjectView) {
        if !self.store.tenants().has_others() {
            return;
        }
        let unknown = object.tenant == 0 && !object.has_tail && self.tenants.has_ssd;
        self.answers.outputs.whose =
            Some(if unknown { TimedTenant::Unknown } else { TimedTenant::Tenant(object.tenant) });
    }

    /// Attributes the next reply to the tenant of an object that was just committed.
    pub(super) fn about_made(&mut self, digest: Digest) {
        if self.store.tenants().has_others()
            && let Some(made) = self.peek(digest)
        {
            self.answers.outputs.whose = Some(TimedTenant::Tenant(made.tenant));
        }
    }

    /// Answers a get from the pool; `hold` is released when the bytes were sent.
    pub(super) fn answer_get(&mut self, read: &StreamRead, hold: Hold, object: &ObjectView, replicas: ReplicaSet) {
        let (offset, checksum) = match read.wanted {
            ReadSpan::Whole { .. } => (0, object.checksum),
            // The host computes the checksum of the range that it sends.
            ReadSpan::Range { offset, .. } => (offset, 0),
        };
        let bytes = read.wanted.bytes_of(object.extent.bytes);
        let memory = if object.is_on_device { Memory::DevicePool } else { Memory::Pool };
        self.counters.device_gets += u64::from(object.is_on_device);
        let extent = MemoryExtent { memory, offset: object.extent.offset + offset, bytes };
        let mut header = Header::reply(Kind::Reply(read.wanted.operation()), read.request, Status::Ok)
            .with_payload(extent.bytes, Some(checksum))
            .with_argument(object.version.0);
        header.flags = header.flags.with_replicas(replicas);
        let payload = Some((Extents::One(extent), hold));
        self.about(object);
        self.answers.outputs.push_back(Output::Frame { peer: read.peer, header, body: 0..0, payload });
    }

    /// Defers a reply until this many of its items are settled. Returns a function from an item's index to its handle.
    pub(super) fn defer(
        &mut self,
        peer: PeerKey,
        request: RequestId,
        replies: Replies,
        left: usize,
    ) -> impl Fn(usize) -> DeferredItem + use<> {
        self.deferrals.add(&mut self.answers.outputs, peer, request, replies, left, self.now_ns)
    }

    /// Settles an item of a reply: `change` enters the result. The reply is sent with the last item.
    pub(super) fn settle(&mut self, at: DeferredItem, change: impl FnOnce(&mut Replies, usize)) {
        let Some(deferred) = self.deferrals.settle(&mut self.answers.outputs, at, change) else { return };
        if self.sessions.get(deferred.peer).is_some() {
            deferred.send(&mut self.answers, self.now_ns);
        }
    }

    /// Settles a look-up of a deferred reply.
    pub(super) fn settle_lookup(&mut self, at: DeferredItem, reply: LookupReply) {
        self.settle(at, |replies, item| replies.set_lookup(item, reply));
    }

    /// Fails a put whose reply is deferred.
    pub(super) fn refuse_put(&mut self, at: DeferredItem, why: Status) {
        self.settle(at, |replies, item| replies.fail_put(item, why));
    }

    /// Returns the peer of a waiting get, if its connection is still open.
    pub(super) fn peer_of_reader(&self, reader: Reader) -> Option<PeerKey> {
        let peer = match reader {
            Reader::Stream(read) => Some(read.peer),
            Reader::Shared { item, .. } => self.deferrals.peer_of(item),
        };
        peer.filter(|peer| self.sessions.get(*peer).is_some())
    }

    /// Answers a waiting get with a status instead of the object.
    pub(super) fn turn_away(&mut self, reader: Reader, status: Status) {
        match reader {
            Reader::Stream(read) if self.sessions.get(read.peer).is_some() => {
                self.refuse(read.peer, read.wanted.operation(), read.request, status);
            }
            Reader::Stream(_) => {}
            Reader::Shared { item, .. } => self.settle_lookup(item, no_lookup(status)),
        }
    }

    /// Answers a get that waited for an object with the object, if it is in memory now. `tenant_of` returns the
    /// object's tenant, as far as it is known.
    pub(super) fn serve(&mut self, digest: Digest, reader: Reader, tenant_of: impl FnOnce(&Self) -> Option<u32>) {
        let here = self.peer_of_reader(reader);
        // The object may have been replaced by one of another tenant while it was read.
        let own = here.and_then(|peer| self.sessions.get(peer)?.pass.tenant);
        let foreign = own.is_some_and(|own| tenant_of(self).is_some_and(|tenant| tenant != own));
        let held = if here.is_some() && self.store.exists(digest) && !foreign {
            self.store.hold(digest).ok_or(Status::Busy)
        } else {
            Err(Status::NotFound)
        };
        let held = match (held, reader) {
            // Its recall was refused, or it has moved on again: peers cannot map the device pool.
            (Ok((pin, object)), Reader::Shared { .. }) if object.is_on_device => {
                self.unpin(pin);
                Err(Status::Busy)
            }
            (held, _) => held,
        };
        if let Ok((_, object)) = &held {
            let bytes = object.extent.bytes;
            self.counters.get_bytes += bytes;
            self.note_get(digest, bytes);
            self.answers.outputs.concerns(digest, bytes);
        }
        match (reader, held) {
            (Reader::Stream(read), Ok((pin, object))) => {
                // The object may have been replaced by one of another length while it was read.
                match read.check(object.extent.bytes, object.is_head) {
                    Ok(()) => self.answer_get(&read, Hold::Pin(pin), &object, ReplicaSet::NONE),
                    Err(status) => {
                        self.unpin(pin);
                        let operation = read.wanted.operation();
                        self.answers.status(read.peer, operation, read.request, status, object.extent.bytes);
                    }
                }
            }
            (Reader::Stream(read), Err(status)) if here.is_some() => {
                self.answers.status(read.peer, read.wanted.operation(), read.request, status, 0);
            }
            (Reader::Stream(..), Err(_)) => {}
            (Reader::Shared { item, all: false }, Ok((pin, object))) if object.is_head => {
                self.unpin(pin);
                self.settle_lookup(item, no_lookup(Status::Striped));
            }
            (Reader::Shared { item, .. }, Ok((pin, object))) => {
                self.sessions.lend_pin(here.expect("pinned for a connected peer"), pin);
                self.about(&object);
                self.settle_lookup(item, lookup_of(pin, &object, ReplicaSet::NONE));
            }
            (Reader::Shared { item, .. }, Err(status)) => self.settle_lookup(item, no_lookup(status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::deferrals::PutReply;
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
    use kvplane_proto::message::Bitmap;

    use super::*;
    use crate::service::types::Path;

    const PEER: PeerKey = PeerKey { index: 0, generation: 1 };

    fn shard() -> Shard {
        let (cluster, segment_name) = ("test".to_owned(), String::new());
        let (node, incarnation, shard) = (NodeId(1), Incarnation(1), ShardId(0));
        let mut shard = Shard::new(Identity { cluster, node, incarnation, shard, segment_name }, Store::empty());
        shard.sessions.join(PEER, Path::Stream, 0);
        shard
    }

    #[test]
    fn a_reply_is_sent_with_the_last_of_its_items() {
        let mut shard = shard();
        let found = Replies::Found(vec![true, false, false], Vec::new());
        let item_at = shard.defer(PEER, RequestId::from_bits(7), found, 2);
        shard.settle(item_at(2), |replies, item| {
            let Replies::Found(bits, _) = replies else { panic!("another answer") };
            bits[item] = true;
        });
        assert_eq!(shard.answers.poll(0), None, "one of its items is not known");
        shard.settle(item_at(1), |_, _| {});
        let Some(Output::Frame { peer, header, body, .. }) = shard.answers.poll(0) else { panic!("no answer") };
        assert_eq!((peer, header.request, header.status), (PEER, RequestId::from_bits(7), Status::Ok));
        let mut expected = Vec::new();
        Bitmap::encode([true, false, true], &mut expected);
        assert_eq!(shard.answers.bytes(body), expected);
        shard.settle(item_at(1), |_, _| panic!("it has left"));
    }

    #[test]
    fn a_failed_put_is_refused_and_a_reply_to_a_gone_peer_is_dropped() {
        let mut shard = shard();
        let put = || Replies::Put(PutReply::of(Version(3), false));
        let item = shard.defer(PEER, RequestId::from_bits(1), put(), 1)(0);
        shard.refuse_put(item, Status::NoSpace);
        let Some(Output::Frame { header, .. }) = shard.answers.poll(0) else { panic!("no answer") };
        assert_eq!((header.status, header.argument), (Status::NoSpace, 0));
        let item = shard.defer(PEER, RequestId::from_bits(2), put(), 1)(0);
        shard.sessions.leave(PEER);
        shard.settle(item, |_, _| {});
        assert_eq!(shard.answers.poll(0), None);
    }
}

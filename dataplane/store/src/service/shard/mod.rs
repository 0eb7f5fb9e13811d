//! A shard by itself: its slots, its connections, its objects in memory, and the answers on their way to its peers.
//!
//! Everything else of the service builds on a [`Shard`] and gets it as an argument: the SSD under it, what moves
//! between shards, and the requests that use all of these. The shard knows nothing of them.

pub(super) mod answers;
pub(super) mod context;
pub(super) mod deferrals;
pub(super) mod effects;
mod exports;
mod ownership;
mod replica_slots;
pub(super) mod rights;
pub(super) mod sessions;
pub(super) mod stream_read;
pub(super) mod tail;
pub(super) mod timing;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, PinId, RequestId, ReservationId, Version};
use kvplane_proto::message::{Kind, ObjectName, Operation};
use kvplane_proto::rng::mix64;
use kvplane_proto::{Digest, FrameFlags, Status};
use kvplane_tier::SlotSet;

use self::answers::Answers;
use self::deferrals::Deferrals;
use self::effects::{Effect, Effects};
pub(super) use self::exports::Exports;
pub(super) use self::ownership::Ownership;
pub(super) use self::replica_slots::{Relation, ReplicaSlots};
use self::sessions::{PendingPayload, Sessions};
use self::stream_read::{ReadSpan, StreamRead};
use self::tail::{TailHead, tail_within};
use self::timing::Whose;
use super::types::{
    CloseReason, Hold, Identity, Memory, Output, PeerKey, Place, Places, PoolBytes, ServiceCounters, TailWrite,
};
use crate::ObjectView;
use crate::store::Store;

/// Fewer look-ups than this are as soon done one by one.
const WARMED: usize = 4;

/// The part of the pool that stays free of what is read for its replica only.
const FREE_PART: u64 = 8;

/// A shard without what surrounds it.
pub(super) struct Shard {
    pub(super) ownership: Ownership,
    /// Slots that left, whose objects are kept for their new owners.
    pub(super) exports: Exports,
    /// Slots whose objects another shard has too.
    pub(super) replicas: ReplicaSlots,
    pub(super) sessions: Sessions,
    pub(super) answers: Answers,
    /// Answers that wait.
    pub(super) deferrals: Deferrals,
    /// The objects in memory; none where the shard has segments only.
    pub(super) store: Option<Store>,
    pub(super) tenants: TenantRules,
    /// What the components above have to do.
    pub(super) effects: Effects,
    pub(super) counters: ServiceCounters,
    /// Questions to other shards so far.
    fetches: u64,
    /// What time it is.
    pub(super) now_ns: u64,
}

/// How objects are charged to tenants.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TenantRules {
    /// Tenants that were never set may not put.
    pub(super) is_strict: bool,
    /// There is an SSD: until its tail was read, what came from there is charged to the default tenant.
    pub(super) has_ssd: bool,
}

impl Shard {
    /// A shard that serves no slots yet.
    pub(super) fn new(identity: Identity, store: Option<Store>) -> Self {
        let (pool_bytes, pins, reservations) = store.as_ref().map_or((0, 0, 0), |store| {
            let config = store.config();
            (config.pool_bytes, config.max_pins, config.max_reservations)
        });
        Self {
            ownership: Ownership::new(identity),
            exports: Exports::default(),
            replicas: ReplicaSlots::default(),
            sessions: Sessions::new(pool_bytes, pins, reservations),
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

    /// Names the order in which this incarnation of the shard walks its objects; never 0.
    pub(super) fn walk_tag(&self) -> u64 {
        let seed = self.store.as_ref().map_or(0, |store| store.config().hash_seed);
        mix64(seed ^ mix64(self.ownership.identity().incarnation.0)) | 1
    }

    /// The names of these objects: of each that has one behind it in memory its place here, its tenant and its key.
    pub(super) fn names_of(&self, digests: &[Digest], pool: &dyn PoolBytes) -> Vec<(usize, Vec<u8>, Vec<u8>)> {
        let mut names = Vec::new();
        for (at, digest) in digests.iter().enumerate() {
            let Some(view) = self.peek(*digest).filter(|view| view.has_tail) else { continue };
            let tail = tail_within(view.tail_at, pool.bytes(), |at, into| pool.read(at, into));
            // Whoever has mapped the pool may have spoilt it.
            if let Some((head, name)) = TailHead::split(&tail)
                && head.key_bytes > 0
                && name.digest() == *digest
            {
                names.push((at, name.tenant.to_vec(), name.key.to_vec()));
            }
        }
        names
    }

    /// Lets time pass.
    pub(super) fn tick(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        if let Some(store) = &mut self.store {
            store.tick(now_ns);
        }
    }

    /// A token that no question to another shard had so far.
    pub(super) const fn new_fetch_token(&mut self) -> u64 {
        self.fetches += 1;
        self.fetches
    }

    /// Closes a connection from our side.
    pub(super) fn close(&mut self, peer: PeerKey, reason: CloseReason) {
        self.sessions.close(&mut self.answers.outputs, peer, reason);
    }

    /// The payload of a peer's request is on its way.
    pub(super) fn expect_payload(&mut self, peer: PeerKey, pending: PendingPayload) {
        self.sessions.get_mut(peer).expect("a session that was just looked up").pending = Some(pending);
    }

    /// Answers with a failure; the map's epoch says which of two maps is older.
    pub(super) fn refuse(&mut self, peer: PeerKey, operation: Operation, request: RequestId, status: Status) {
        let argument = if status == Status::WrongOwner { self.ownership.epoch().0 } else { 0 };
        self.answers.status(peer, operation, request, status, argument);
    }

    /// Has the host write the tail of the object that this reservation is for.
    pub(super) fn write_tail(&mut self, reservation: ReservationId, tail: &TailHead, name: &ObjectName<'_>) {
        self.answers.write_tail(reservation, |bytes| tail.encode(name, bytes));
    }

    /// The next tail to be written to the pool: of a reservation that still holds its room. A tail of a reservation
    /// that has ended would damage whichever object has the room now.
    pub(super) fn poll_tail(&mut self) -> Option<TailWrite> {
        while let Some((reservation, bytes)) = self.answers.next_tail() {
            if let Some(offset) = self.store.as_ref().and_then(|store| store.reserved_tail(reservation)) {
                return Some(TailWrite { offset, bytes });
            }
        }
        None
    }

    /// Has the memory that looking up many objects waits for come together, as each look-up by itself waits twice.
    pub(super) fn warm(&self, digests: impl ExactSizeIterator<Item = Digest>) {
        if digests.len() >= WARMED
            && let Some(store) = &self.store
        {
            let mut there = 0u32;
            store.exist(digests, |_, here| there += u32::from(here));
            // Or nobody would need to have looked.
            core::hint::black_box(there);
        }
    }

    /// True where an object, or a replica of one, is in memory.
    pub(super) fn has(&self, digest: Digest) -> bool {
        self.store.as_ref().is_some_and(|store| store.exists(digest))
    }

    /// An object in memory. Not an access.
    pub(super) fn peek(&self, digest: Digest) -> Option<ObjectView> {
        self.store.as_ref()?.peek(digest)
    }

    /// Drops an object from memory, unless it is another version by now.
    pub(super) fn drop_version(&mut self, digest: Digest, version: Version) {
        if let Some(store) = &mut self.store
            && store.peek(digest).is_some_and(|object| object.version == version)
        {
            store.drop_copy(digest);
        }
    }

    /// Frees a reservation that was taken back from its peer and that nobody writes any more.
    pub(super) fn abort(&mut self, reservation: ReservationId) {
        let store = self.store.as_mut().expect("a reservation is of a store");
        store.abort(reservation).expect("a session's reservation is held");
    }

    /// Releases a pin that a session, or an answer, held.
    pub(super) fn unpin(&mut self, pin: PinId) {
        let released = self.store.as_mut().map(|store| store.unpin(pin));
        assert_eq!(released, Some(Ok(())), "an answer's pin was let go twice");
    }

    /// Memory that may be filled with objects for the sake of their replicas; the rest stays free.
    pub(super) fn free_for_replicas(&self) -> u64 {
        let Some(store) = &self.store else { return 0 };
        store.stats().free_bytes.saturating_sub(store.config().pool_bytes / FREE_PART)
    }

    /// True for an object from the SSD that stays in memory, as its replica would leave together with it.
    pub(super) fn stays_for_replica(&self, digest: Digest) -> bool {
        let Some(store) = self.store.as_ref().filter(|store| store.exists(digest)) else { return false };
        store.replica(digest).is_owed_a_copy()
            && self.ownership.owns(digest)
            && self.replicas.has_owner(digest)
            && self.free_for_replicas() > 0
    }

    /// Serves these slots and no others, by the map of this epoch.
    pub(super) fn serve_slots(&mut self, epoch: Epoch, slots: &SlotSet) {
        let gains = self.ownership.gains(slots);
        self.ownership.serve(epoch, slots);
        if gains {
            self.effects.note(Effect::SlotsServed);
        }
    }

    /// A get asked for so many bytes of an object.
    #[inline]
    pub(super) fn note_get(&mut self, digest: Digest, bytes: u64) {
        self.answers.timed.popular.asked(digest, bytes, self.now_ns);
    }

    /// The next answer is about this object.
    pub(super) fn about(&mut self, object: &ObjectView) {
        if !self.store.as_ref().is_some_and(Store::has_tenants) {
            return;
        }
        let unknown = object.tenant == 0 && !object.has_tail && self.tenants.has_ssd;
        self.answers.outputs.whose = Some(if unknown { Whose::Unknown } else { Whose::Tenant(object.tenant) });
    }

    /// The next answer is about an object that was just made.
    pub(super) fn about_made(&mut self, digest: Digest) {
        let made = self.store.as_ref().filter(|store| store.has_tenants()).and_then(|store| store.peek(digest));
        if let Some(made) = made {
            self.answers.outputs.whose = Some(Whose::Tenant(made.tenant));
        }
    }

    /// Answers a get from the pool; `hold` goes back when the bytes have left.
    pub(super) fn answer_get(&mut self, read: &StreamRead, hold: Hold, object: &ObjectView, is_replicated: bool) {
        let (offset, checksum) = match read.wanted {
            ReadSpan::Whole { .. } => (0, object.checksum),
            // The host sums up what it sends.
            ReadSpan::Range { offset, .. } => (offset, 0),
        };
        let bytes = read.wanted.bytes_of(object.extent.bytes);
        let place = Place { memory: Memory::Pool, offset: object.extent.offset + offset, bytes };
        let mut header = Header::reply(Kind::Reply(read.wanted.operation()), read.request, Status::Ok)
            .with_payload(place.bytes, Some(checksum))
            .with_argument(object.version.0);
        header.flags = header.flags.with(FrameFlags::REPLICATED, is_replicated);
        let payload = Some((Places::One(place), hold));
        self.about(object);
        self.answers.outputs.push_back(Output::Frame { peer: read.peer, header, body: 0..0, payload });
    }
}

//! The answering side of the data path, without I/O: frames come in from peers, answers and places for payloads go out.
//!
//! One [`Service`] belongs to one shard. It serves two things: objects of the shard's [`Store`], and *segments*,
//! registered memory that peers read and write by offset. A storage node has both, an embedded client only segments.
//!
//! The host owns connections and memory. It reports each connection ([`Service::peer_joined`]), each frame
//! ([`Service::request`]), each payload that has arrived ([`Service::payload_done`]) and each payload that has left
//! ([`Service::sent`]), and drains [`Service::poll_output`].
//!
//! Invariants: whatever a peer holds (pins, reservations, a payload under way) comes back when the host says that the
//! peer is gone and its I/O has ended. A put is answered only after its whole payload was taken, also when it fails.
//! An object's bytes arrive in a fresh extent: a late writer reaches nothing that anybody reads. When a peer has said
//! that a connection of its own is over, nothing of that is carried out any more.

mod acks;
mod answers;
mod claims;
mod context;
mod copies;
mod deferred;
mod drafts;
mod follow;
mod gate;
mod held;
mod keys;
mod moves;
mod objects;
mod ranges;
mod rights;
mod rooms;
mod segments;
mod session;
mod sessions;
mod shared;
mod stream_read;
mod tail;
mod tenants;
mod tiered;
mod timing;
mod types;

#[cfg(test)]
mod tests;

pub use copies::{CopyCounters, Wished, copy_of};
use std::collections::BTreeMap;

use answers::Answers;
use context::RequestContext;
use deferred::Deferrals;
pub use drafts::TicketId;
use drafts::Tickets;
pub use follow::SnapshotPage;
pub use keys::PoolBytes;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, SLOTS, Slot};
use kvplane_proto::map::SlotOwners;
pub use kvplane_proto::message::PutAck;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::{Digest, FrameFlags, Limits, Status};
pub use moves::{Fetch, FetchDone, FetchLimits, MoveCounters, Want};
use segments::SegmentTable;
use session::Pending;
use sessions::Sessions;
pub use tail::{TAIL_HEAD_BYTES, TAIL_MOST, TailHead};
pub use tiered::{Admission, TierCounters, TierOrder, TierPolicy, TierSnapshot, Voided, WritePolicy};
pub use timing::{
    HOT_KEPT, HotObject, HotObjects, Leaving, OperationTimes, SLOW_AFTER_NS, SLOW_KEPT, ServiceTimes, SlowOperation,
    TENANTS_TIMED, TenantOperation, TenantTimes, Timing, Whose,
};
pub use types::{
    CloseReason, Hold, Identity, Memory, Output, Path, PayloadTo, PeerKey, Place, Places, RegisterError, SegmentInfo,
    ServiceCounters, Standing, TailWrite,
};

use crate::drafts::Drafts;
use crate::store::Store;

/// The answering side of one shard. Single-threaded; owned by the shard's loop.
pub struct Service {
    identity: Identity,
    epoch: Epoch,
    acks: acks::Acks,
    /// Who is let in, where tickets are wanted.
    gate: Option<Box<gate::Gate>>,
    /// The lives of nodes by the newest map.
    lives: BTreeMap<u64, u64>,
    /// One bit for each slot that this shard owns.
    owned: Box<[u64; SLOTS / 64]>,
    store: Option<Store>,
    /// Whether only tenants that are known may put.
    strict_tenants: bool,
    /// The SSD under the store.
    tiered: Option<Box<tiered::Tiered>>,
    /// Slots on their way to other owners, or from them.
    moves: moves::Moves,
    /// Objects that two owners have.
    copies: copies::Copies,
    /// Answers that wait.
    deferrals: Deferrals,
    /// Requests that wait until it is known whose the objects are.
    claims: claims::Claims,
    segments: SegmentTable,
    /// Lists under way.
    lists: keys::Lists,
    sessions: Sessions,
    answers: Answers,
    /// Objects that are written in ranges, who uses which ranges, and which sessions those are.
    drafts: Drafts,
    tickets: Tickets,
    counters: ServiceCounters,
    now_ns: u64,
}

impl Service {
    /// A service that owns no slots and no segments yet.
    ///
    /// # Panics
    /// When a name is over the limit: better now than when a peer asks for it.
    #[must_use]
    pub fn new(identity: Identity, store: Option<Store>) -> Self {
        for name in [&identity.cluster, &identity.segment_name] {
            let (bytes, limit) = (name.len(), Limits::NAME_BYTES);
            assert!(bytes <= limit, "a name of {bytes} bytes is over the limit of {limit}: {name}");
        }
        let (pins, reservations) =
            store.as_ref().map_or((0, 0), |store| (store.config().max_pins, store.config().max_reservations));
        let life = identity.node.0 ^ identity.incarnation.0.rotate_left(32);
        Self {
            identity,
            epoch: Epoch(0),
            acks: acks::Acks::default(),
            gate: None,
            lives: BTreeMap::new(),
            owned: Box::new([0; SLOTS / 64]),
            store,
            strict_tenants: false,
            tiered: None,
            moves: moves::Moves::new(),
            copies: copies::Copies::default(),
            deferrals: Deferrals::default(),
            claims: claims::Claims::default(),
            segments: SegmentTable::new((life ^ life >> 32) as u32),
            lists: keys::Lists::default(),
            sessions: Sessions::new(pins, reservations),
            answers: Answers::new(),
            drafts: Drafts::default(),
            tickets: Tickets::default(),
            counters: ServiceCounters::default(),
            now_ns: 0,
        }
    }

    /// Serves these slots from now on, by a map of which nothing else is known. See [`Self::own`].
    pub fn set_owned(&mut self, epoch: Epoch, owned: impl Fn(u16) -> bool) {
        self.own(epoch, Standing { state: 0, since: epoch, kept: Epoch(0) }, owned);
    }

    /// Serves these slots from now on; those that are new, with a tier, as soon as that is written down. Objects of
    /// slots that left are removed: if the slot comes back later, what was here may be older than what was written
    /// elsewhere meanwhile.
    pub fn own(&mut self, epoch: Epoch, standing: Standing, owned: impl Fn(u16) -> bool) {
        self.change_owners(epoch, standing, &owned, None);
    }

    /// Serves the slots that a map of this state of the control plane gives to this shard. As [`Self::own`], but what
    /// moved goes along: objects of slots that left stay for their new owners to fetch, and what was in slots that came
    /// is fetched from their former ones: see [`Self::poll_fetch`].
    pub fn follow(&mut self, state: u64, owners: &SlotOwners) {
        let me = self.key();
        let standing = Standing { state, since: owners.since, kept: owners.kept };
        let owned = |slot| owners.owner(Slot(slot)) == Some(me);
        self.change_owners(owners.epoch, standing, &owned, Some(owners));
        if self.gate.is_some() {
            self.lives = owners.lives().map(|(node, life)| (node.0, life.0)).collect();
            self.end_former_lives();
        }
    }

    fn change_owners(
        &mut self,
        epoch: Epoch,
        standing: Standing,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        let heard = self.heard_epoch();
        if epoch < heard {
            return;
        }
        self.restore_owned(epoch, standing);
        // In an epoch that was missed, a slot may have been another's and come back: nothing from before it is to be
        // trusted, unless no slot has changed hands since, or only once, and in the way that the map tells.
        let told = owners.is_some_and(|owners| owners.from <= heard);
        let missed = heard != Epoch(0) && epoch.0 > heard.0 + 1 && standing.since > heard && !told;
        if let (true, Some(store)) = (missed, &mut self.store) {
            self.counters.dropped_objects += store.remove_all();
        }
        self.change_copies(epoch, heard, missed, owners);
        let owners_kept = owners.filter(|_| !missed);
        // One that has nothing any more was away, or its node is: what an SSD has is kept to be compared.
        let idle = !(0..SLOTS as u16).any(owned);
        let mut lost = self.end_exports(owners_kept);
        // A slot that goes on before it is served is lost like one that was: an SSD may have its objects.
        let pending = self.pending_slots();
        for slot in 0..SLOTS {
            let (word, bit) = (slot / 64, 1u64 << (slot % 64));
            let had = self.owned[word] & bit != 0;
            if (had || pending.has(Slot(slot as u16))) && (missed || !owned(slot as u16)) {
                lost = true;
                self.owned[word] &= !bit;
                let kept = had || self.is_doubted(Slot(slot as u16));
                self.lose_slot(slot, kept && (missed || idle), owners_kept);
            }
        }
        if let (true, false, Some(store)) = (lost, missed, &mut self.store) {
            let (owned, exports) = (&self.owned, &self.moves.exports);
            let copies = &self.copies;
            let kept = |digest: Digest| owns(owned, digest) || exports.has(digest) || copies.keeps(digest.slot());
            self.counters.dropped_objects += store.retain(kept);
        }
        if lost {
            self.refuse_void_puts();
            self.end_void_drafts();
        }
        self.change_imports(heard, missed, owned, owners);
        self.serve_owned(epoch, &owned);
    }

    /// The next thing for the host to do. Read a frame's [`Self::body`] and [`Self::places`] before asking again.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.answers.assert_tails_written();
        self.carry_out_claimed();
        self.answers.poll(self.now_ns)
    }

    /// The body of an [`Output::Frame`]; valid until `poll_output` has returned `None`.
    #[must_use]
    pub fn body(&self, range: core::ops::Range<usize>) -> &[u8] {
        self.answers.bytes(range)
    }

    /// Where a payload lies, or goes, that is in several places; valid until `poll_output` has returned `None`.
    #[must_use]
    pub fn places(&self, range: core::ops::Range<usize>) -> &[Place] {
        self.answers.places(range)
    }

    /// When [`Self::handle_timeout`] wants to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let own = [self.sessions.poll_timeout(), self.drafts.poll_timeout()];
        let work = [self.tier_timeout(), self.moves_timeout(), self.copies_timeout(), self.gate_timeout()];
        own.into_iter().chain(work).chain([self.claims.poll_timeout()]).flatten().min()
    }

    /// What happened so far.
    #[must_use]
    pub const fn counters(&self) -> &ServiceCounters {
        &self.counters
    }

    /// The objects, for their statistics.
    #[must_use]
    pub const fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// A request arrived. Says where its payload goes; write what [`Self::poll_tail`] has to the pool, then call
    /// [`Self::payload_done`] when the payload is there, also for `Discard`.
    pub fn request(&mut self, peer: PeerKey, header: &Header, body: &[u8], now_ns: u64) -> PayloadTo {
        self.answers.assert_tails_written();
        self.tick(now_ns);
        self.answers.outputs.arrived(now_ns);
        let Some(session) = self.session(peer) else { return PayloadTo::Discard };
        (session.arrived_ns, session.payload_bytes) = (now_ns, header.payload_bytes);
        self.counters.requests += 1;
        if let Kind::Request(operation) = header.kind {
            self.answers.timed.asked(operation, header.items);
        }
        match self.dispatch(peer, header, body) {
            Ok(to) => to,
            Err(reason) => {
                self.close(peer, reason);
                PayloadTo::Discard
            }
        }
    }

    fn dispatch(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let Kind::Request(operation) = header.kind else { return Err(CloseReason::Malformed("a reply")) };
        let session = self.session(peer).expect("a session that was just looked up");
        if session.pending.is_some() {
            return Err(CloseReason::Malformed("a request within a payload"));
        }
        let takes_payload = matches!(operation, Operation::Put | Operation::Write | Operation::WriteMany)
            || operation == Operation::Fill && session.path == Path::Stream;
        if header.payload_bytes > 0 && !takes_payload {
            return Err(CloseReason::Malformed("a payload where none belongs"));
        }
        if operation == Operation::Hello {
            return self.hello(peer, header, body);
        }
        if operation == Operation::Prove {
            return self.prove(peer, header, body);
        }
        if !session.greeted {
            return Err(CloseReason::NotGreeted);
        }
        let context = RequestContext::new(peer, session, header);
        if !self.may_change(peer, operation, header) {
            return Ok(PayloadTo::Discard);
        }
        self.claim_and_carry_out(&context, header, body)
    }

    /// Does what a peer that may ask for it asks for.
    fn carry_out(&mut self, context: &RequestContext, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let Kind::Request(operation) = header.kind else { return Err(CloseReason::Malformed("a reply")) };
        let peer = context.peer;
        let path = self.session(peer).expect("a session that was just looked up").path;
        match (operation, path) {
            (Operation::Exists, _) => self.exists(context, header, body),
            (Operation::Size, _) => self.size(context, header, body),
            (Operation::Remove, _) if context.flags.has(FrameFlags::REPLICATE) => {
                self.drop_copies(context, header, body)
            }
            (Operation::Remove, _) => self.remove(context, header, body),
            (Operation::RemoveCopy, _) => self.remove_copies(context, header, body),
            (Operation::Fence, _) => self.fence(peer, header, body),
            (Operation::OpenSegment, _) => self.open_segment(peer, header, body),
            (Operation::List, _) => self.list(context, header, body),
            (Operation::Get, Path::Stream) => self.get(context, header, body),
            (Operation::GetRange, Path::Stream) => self.get_ranges(context, header, body),
            (Operation::Put, _) | (Operation::Write, Path::Stream) if header.payload_bytes == 0 => {
                // A caller's mistake, not a broken peer's.
                self.answer(peer, operation, header, Status::Empty);
                Ok(PayloadTo::Discard)
            }
            (Operation::Put, _) => self.put(context, header, body),
            (Operation::Read, Path::Stream) => self.read(peer, header, body),
            (Operation::Write, Path::Stream) => self.write(peer, header, body),
            (Operation::ReadMany, Path::Stream) => self.read_many(peer, header, body),
            (Operation::WriteMany, Path::Stream) => self.write_many(peer, header, body),
            (Operation::Lookup, Path::Shared) => self.lookup(context, header, body),
            (Operation::Reserve, Path::Shared) => self.reserve(context, header, body),
            (Operation::Commit, Path::Shared) => self.commit(peer, header, body),
            (Operation::Abort, Path::Shared) => self.abort(peer, header, body),
            (Operation::Release, Path::Shared) => self.release(peer, header, body),
            (Operation::Begin, _) => self.begin(context, header, body),
            (Operation::Fill, path) => self.fill_on(path, context, header, body),
            (Operation::Seal, _) => self.seal(peer, header, body),
            (Operation::Discard, _) => self.discard(peer, header, body),
            (Operation::Peek, Path::Shared) => self.peek(context, header, body),
            _ => {
                self.answer(peer, operation, header, Status::Unsupported);
                Ok(PayloadTo::Discard)
            }
        }
    }

    /// The payload of the last request has arrived where it was sent; `checksum` is what its bytes sum to, where
    /// computed.
    pub fn payload_done(&mut self, peer: PeerKey, checksum: Option<u64>, now_ns: u64) {
        self.answers.assert_tails_written();
        self.tick(now_ns);
        let Some(session) = self.session(peer) else { return };
        let (arrived_ns, bytes) = (session.arrived_ns, session.payload_bytes);
        let Some(pending) = session.pending.take() else { return };
        self.answers.outputs.received(arrived_ns, bytes, now_ns);
        match pending {
            Pending::Refused { request, operation, status: Status::WrongOwner, .. } => {
                self.refuse(peer, operation, request, Status::WrongOwner);
            }
            Pending::Refused { request, operation, status, argument } => {
                self.answer_id(peer, operation, request, status, argument);
            }
            Pending::Put { request, reservation, expected } => {
                self.finish_put(peer, request, reservation, expected, checksum);
            }
            Pending::Fill { request, ticket, expected } => {
                self.finish_fill(peer, request, ticket, expected, checksum);
            }
            Pending::Write { request, segment, expected } => {
                self.segments.release(segment, &mut self.answers.outputs);
                self.finish_write(peer, Operation::Write, request, expected.is_none() || expected == checksum);
            }
            Pending::WriteMany { request, segments, expected } => {
                self.release_many(segments);
                self.finish_write(peer, Operation::WriteMany, request, expected.is_none() || expected == checksum);
            }
        }
    }

    fn finish_write(&mut self, peer: PeerKey, operation: Operation, request: kvplane_proto::RequestId, good: bool) {
        let status = if good { Status::Ok } else { Status::Corrupt };
        self.counters.corrupt += u64::from(!good);
        self.answer_id(peer, operation, request, status, 0);
    }

    /// The payload of an answer has left, or never will: what held its memory is let go.
    pub fn sent(&mut self, hold: Hold) {
        match hold {
            Hold::Pin(pin) => {
                let released = self.store.as_mut().map(|store| store.unpin(pin));
                assert_eq!(released, Some(Ok(())), "an answer's pin was let go twice");
            }
            Hold::Segment { segment, read } => self.segments.finish_read(segment, read, &mut self.answers.outputs),
            Hold::Segments { read } => self.finish_read_many(read),
            Hold::Ticket(ticket) => drop(self.end_ticket(ticket, None)),
        }
    }

    /// Deadlines of greetings and reservations.
    pub fn handle_timeout(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.answers.outputs.arrived(now_ns);
        while let Some(peer) = self.sessions.take_silent(now_ns) {
            self.close(peer, CloseReason::NotGreeted);
        }
        while let Some((reservation, peer, path)) = self.sessions.take_overdue(now_ns) {
            self.expire(reservation, peer, path);
        }
        self.expire_drafts();
        self.end_tickets();
        self.expire_claims();
        self.expire_copy_waits();
    }
}

fn owns(owned: &[u64; SLOTS / 64], digest: Digest) -> bool {
    let slot = usize::from(digest.slot().0);
    owned[slot / 64] & (1 << (slot % 64)) != 0
}

const _: () = assert!(Limits::HELLO_NS < Limits::RESERVATION_NS);

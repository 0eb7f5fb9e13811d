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
mod follow;
mod keys;
mod moves;
mod objects;
mod owners;
mod ownership;
mod put_sessions;
mod rights;
mod rooms;
mod segments;
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

use answers::Answers;
use context::RequestContext;
pub use copies::{CopyCounters, ReplicaProgress, copy_of};
use deferred::Deferrals;
pub use follow::SnapshotPage;
pub use keys::PoolBytes;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{ReservationId, SegmentId};
pub use kvplane_proto::message::PutAck;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::{FrameFlags, Limits, Status};
use kvplane_ticket::{Challenges, TicketKey};
pub use moves::{Fetch, FetchDone, FetchLimits, MoveCounters, Want};
use ownership::Ownership;
use put_sessions::PutSessions;
pub use put_sessions::TicketId;
pub use segments::Segments;
use sessions::{PendingPayload, SessionCounters, Sessions};
pub use tail::{TAIL_HEAD_BYTES, TAIL_MOST, TailHead};
use tenants::Tenancy;
pub use tiered::{Admission, TierCounters, TierOrder, TierPolicy, TierSnapshot, VoidCause, WritePolicy};
pub use timing::{
    HOT_KEPT, HotObject, HotObjects, LeavingPayload, OperationTimes, SLOW_AFTER_NS, SLOW_KEPT, ServiceTimes,
    SlowOperation, TENANTS_TIMED, TenantOperation, TenantTimes, Timing, Whose,
};
pub use types::{
    CloseReason, Hold, Identity, MapStanding, Memory, Output, Path, PayloadTo, PeerKey, Place, Places, RegisterError,
    SegmentInfo, ServiceCounters, TailWrite,
};

use crate::store::Store;

/// The answering side of one shard. Single-threaded; owned by the shard's loop.
pub struct Service {
    ownership: Ownership,
    acks: acks::Acks,
    store: Option<Store>,
    /// The SSD under the store.
    tiered: Option<Box<tiered::Tiering>>,
    /// Slots on their way to other owners, or from them.
    moves: moves::Moves,
    /// Objects that two owners have.
    copies: copies::Copies,
    /// Answers that wait.
    deferrals: Deferrals,
    tenancy: Tenancy,
    segments: Segments,
    /// Lists under way.
    lists: keys::Lists,
    sessions: Sessions,
    answers: Answers,
    /// Objects that are written in ranges, who uses which ranges, and which sessions those are.
    put_sessions: PutSessions,
    counters: ServiceCounters,
    now_ns: u64,
}

impl Service {
    /// A service that owns no slots and no segments yet.
    ///
    /// # Panics
    /// When a name is over the limit: better now than when a peer asks for it.
    #[must_use]
    pub fn new(mut identity: Identity, store: Option<Store>) -> Self {
        for name in [&identity.cluster, &identity.segment_name] {
            let (bytes, limit) = (name.len(), Limits::NAME_BYTES);
            assert!(bytes <= limit, "a name of {bytes} bytes is over the limit of {limit}: {name}");
        }
        let (pool_bytes, pins, reservations) = store.as_ref().map_or((0, 0, 0), |store| {
            let config = store.config();
            (config.pool_bytes, config.max_pins, config.max_reservations)
        });
        let incarnation = identity.node.0 ^ identity.incarnation.0.rotate_left(32);
        let name = core::mem::take(&mut identity.segment_name);
        Self {
            ownership: Ownership::new(identity),
            acks: acks::Acks::default(),
            store,
            tiered: None,
            moves: moves::Moves::new(),
            copies: copies::Copies::default(),
            deferrals: Deferrals::default(),
            tenancy: Tenancy::default(),
            segments: Segments::new(name, (incarnation ^ incarnation >> 32) as u32),
            lists: keys::Lists::default(),
            sessions: Sessions::new(pool_bytes, pins, reservations),
            answers: Answers::new(),
            put_sessions: PutSessions::default(),
            counters: ServiceCounters::default(),
            now_ns: 0,
        }
    }

    /// A connection was accepted.
    ///
    /// # Panics
    /// When the position is taken: the host reports a connection's end before it reuses its index.
    pub fn peer_joined(&mut self, peer: PeerKey, path: Path, now_ns: u64) {
        self.now_ns = now_ns;
        self.sessions.join(peer, path, now_ns);
    }

    /// A connection is gone and its I/O has ended: everything that it held comes back.
    ///
    /// For shared memory this means that the peer's process is dead or has unmapped the pool; the socket's end says so,
    /// because the kernel closes it after the process's memory is gone.
    pub fn peer_gone(&mut self, peer: PeerKey, now_ns: u64) {
        self.now_ns = now_ns;
        self.answers.outputs.arrived(now_ns);
        let Some(mut departed) = self.sessions.leave(peer) else { return };
        if let Some(pending) = departed.session.pending.take() {
            self.segments.end_write(pending, &mut self.answers.outputs);
        }
        for ticket in departed.tickets {
            self.end_ticket(ticket, None);
        }
        let Some(store) = &mut self.store else { return };
        for pin in departed.pins {
            store.unpin(pin).expect("a session's pin is held");
        }
        for reservation in departed.reservations {
            store.abort(reservation).expect("a session's reservation is held");
        }
    }

    /// A put has not completed in time.
    fn expire(&mut self, reservation: ReservationId, peer: PeerKey, path: Path) {
        self.counters.expired += 1;
        match path {
            // Only our own receive writes there, so ending the connection frees it.
            Path::Stream => self.sessions.close(&mut self.answers.outputs, peer, CloseReason::PutDeadline),
            Path::Shared => {
                let store = self.store.as_mut().expect("a reservation is of a store");
                store.expire(reservation);
            }
        }
    }

    /// Requires tickets of connections from now on, and challenges clients with these.
    pub fn want_tickets(&mut self, challenges: Challenges) {
        self.sessions.want_tickets(challenges);
    }

    /// Takes the keys that the control plane has at this ticket time of its own, in seconds.
    pub fn learn_keys(&mut self, keys: Vec<TicketKey>, seconds: u64, now_ns: u64) {
        self.sessions.learn_keys(keys, seconds, now_ns);
    }

    /// True for a connection that was welcomed: until then nothing is kept for it.
    #[must_use]
    pub fn is_welcome(&self, peer: PeerKey) -> bool {
        self.sessions.is_welcome(peer)
    }

    /// True where an RDMA connection may be agreed upon on this connection.
    #[must_use]
    pub fn may_carry(&self, peer: PeerKey) -> bool {
        self.sessions.may_carry(peer)
    }

    /// Binds a connection to one tenant, as if a ticket said so: for a host that knows by itself whose it is.
    pub fn bind(&mut self, peer: PeerKey, tenant: u32) {
        if let Some(session) = self.sessions.get_mut(peer) {
            session.pass.tenant = Some(tenant);
        }
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
        let own = [self.sessions.poll_timeout(), self.put_sessions.poll_timeout()];
        let work = [self.tier_timeout(), self.moves_timeout(), self.copies_timeout()];
        own.into_iter().chain(work).chain([self.tenancy.claims.poll_timeout()]).flatten().min()
    }

    /// What happened so far.
    #[must_use]
    pub const fn counters(&self) -> ServiceCounters {
        let (read_bytes, write_bytes) = self.segments.bytes();
        let &SessionCounters { greeted, closed, strangers, tickets_ended, unauthorized } = self.sessions.counters();
        let unauthorized = self.counters.unauthorized + unauthorized;
        let connections = ServiceCounters { greeted, closed, strangers, tickets_ended, unauthorized, ..self.counters };
        ServiceCounters { read_bytes, write_bytes, ..connections }
    }

    /// The registered memory.
    #[must_use]
    pub const fn segments(&self) -> &Segments {
        &self.segments
    }

    /// The registered memory, to register more or to use some by address.
    pub const fn segments_mut(&mut self) -> &mut Segments {
        &mut self.segments
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
        let Some(session) = self.sessions.get_mut(peer) else { return PayloadTo::Discard };
        (session.arrived_ns, session.payload_bytes) = (now_ns, header.payload_bytes);
        self.counters.requests += 1;
        if let Kind::Request(operation) = header.kind {
            self.answers.timed.asked(operation, header.items);
        }
        match self.dispatch(peer, header, body) {
            Ok(to) => to,
            Err(reason) => {
                self.sessions.close(&mut self.answers.outputs, peer, reason);
                PayloadTo::Discard
            }
        }
    }

    fn dispatch(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let Kind::Request(operation) = header.kind else { return Err(CloseReason::Malformed("a reply")) };
        let session = self.sessions.get_mut(peer).expect("a session that was just looked up");
        if session.pending.is_some() {
            return Err(CloseReason::Malformed("a request within a payload"));
        }
        let takes_payload = matches!(operation, Operation::Put | Operation::Write | Operation::WriteMany)
            || operation == Operation::Fill && session.path == Path::Stream;
        if header.payload_bytes > 0 && !takes_payload {
            return Err(CloseReason::Malformed("a payload where none belongs"));
        }
        if operation == Operation::Hello {
            let greeted = self.sessions.hello(&mut self.answers, &self.ownership, peer, header, body);
            return greeted.map(|()| PayloadTo::Discard);
        }
        if operation == Operation::Prove {
            let (answers, from) = (&mut self.answers, (peer, self.now_ns));
            let proved = self.sessions.prove(answers, &self.ownership, from, header, body);
            return proved.map(|()| PayloadTo::Discard);
        }
        if !session.greeted {
            return Err(CloseReason::NotGreeted);
        }
        let context = RequestContext::new(peer, session, header);
        if !self.sessions.may_change(&mut self.answers, peer, operation, header) {
            return Ok(PayloadTo::Discard);
        }
        self.claim_and_carry_out(&context, header, body)
    }

    /// Does what a peer that may ask for it asks for.
    fn carry_out(&mut self, context: &RequestContext, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let Kind::Request(operation) = header.kind else { return Err(CloseReason::Malformed("a reply")) };
        let peer = context.peer;
        let path = self.sessions.get_mut(peer).expect("a session that was just looked up").path;
        match (operation, path) {
            (Operation::Exists, _) => self.exists(context, header, body),
            (Operation::Size, _) => self.size(context, header, body),
            (Operation::Remove, _) if context.flags.has(FrameFlags::REPLICATE) => {
                self.drop_copies(context, header, body)
            }
            (Operation::Remove, _) => self.remove(context, header, body),
            (Operation::RemoveCopy, _) => self.remove_copies(context, header, body),
            (Operation::Fence, _) => {
                self.sessions.fence(&mut self.answers, peer, header, body).map(|()| PayloadTo::Discard)
            }
            (Operation::OpenSegment, _) => {
                self.segments.open(&mut self.answers, peer, header, body);
                Ok(PayloadTo::Discard)
            }
            (Operation::List, _) => self.list(context, header, body),
            (Operation::Get, Path::Stream) => self.get(context, header, body),
            (Operation::GetRange, Path::Stream) => self.get_ranges(context, header, body),
            (Operation::Put, _) | (Operation::Write, Path::Stream) if header.payload_bytes == 0 => {
                // A caller's mistake, not a broken peer's.
                self.answers.answer(peer, operation, header, Status::Empty);
                Ok(PayloadTo::Discard)
            }
            (Operation::Put, _) => self.put(context, header, body),
            (Operation::Read, Path::Stream) => {
                self.segments.read(&mut self.answers, peer, header, body).map(|()| PayloadTo::Discard)
            }
            (Operation::ReadMany, Path::Stream) => {
                self.segments.read_many(&mut self.answers, peer, header, body).map(|()| PayloadTo::Discard)
            }
            (Operation::Write, Path::Stream) => {
                let write = self.segments.write(header, body)?;
                Ok(self.expect_payload(peer, write.pending, write.to))
            }
            (Operation::WriteMany, Path::Stream) => {
                let write = self.segments.write_many(&mut self.answers, header, body)?;
                Ok(self.expect_payload(peer, write.pending, write.to))
            }
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
                self.answers.answer(peer, operation, header, Status::Unsupported);
                Ok(PayloadTo::Discard)
            }
        }
    }

    /// The payload of a peer's request is on its way.
    fn expect_payload(&mut self, peer: PeerKey, pending: PendingPayload, to: PayloadTo) -> PayloadTo {
        self.sessions.get_mut(peer).expect("a session that was just looked up").pending = Some(pending);
        to
    }

    /// The payload of the last request has arrived where it was sent; `checksum` is what its bytes sum to, where
    /// computed.
    pub fn payload_done(&mut self, peer: PeerKey, checksum: Option<u64>, now_ns: u64) {
        self.answers.assert_tails_written();
        self.tick(now_ns);
        let Some(session) = self.sessions.get_mut(peer) else { return };
        let (arrived_ns, bytes) = (session.arrived_ns, session.payload_bytes);
        let Some(pending) = session.pending.take() else { return };
        self.answers.outputs.received(arrived_ns, bytes, now_ns);
        match pending {
            PendingPayload::Refused { request, operation, status: Status::WrongOwner, .. } => {
                self.refuse(peer, operation, request, Status::WrongOwner);
            }
            PendingPayload::Refused { request, operation, status, argument } => {
                self.answers.status(peer, operation, request, status, argument);
            }
            PendingPayload::Put { request, reservation, expected } => {
                self.finish_put(peer, request, reservation, expected, checksum);
            }
            PendingPayload::Fill { request, ticket, expected } => {
                self.finish_fill(peer, request, ticket, expected, checksum);
            }
            pending @ (PendingPayload::Write { .. } | PendingPayload::WriteMany { .. }) => {
                let is_good = self.segments.finish_write(&mut self.answers, peer, pending, checksum);
                self.counters.corrupt += u64::from(!is_good);
            }
        }
    }

    /// The payload of an answer has left, or never will: what held its memory is let go.
    pub fn sent(&mut self, hold: Hold) {
        match hold {
            Hold::Pin(pin) => {
                let released = self.store.as_mut().map(|store| store.unpin(pin));
                assert_eq!(released, Some(Ok(())), "an answer's pin was let go twice");
            }
            Hold::Segment { segment, read } => self.segments.finish_read(segment, read, &mut self.answers.outputs),
            Hold::Segments { read } => self.segments.finish_read_many(read, &mut self.answers.outputs),
            Hold::Ticket(ticket) => drop(self.end_ticket(ticket, None)),
        }
    }

    /// Takes memory from peers; [`Output::Unregistered`] says when nothing uses it any more. A stale id is answered at
    /// once.
    pub fn unregister(&mut self, segment: SegmentId) {
        self.segments.unregister(segment, &mut self.answers.outputs);
    }

    /// Ends a use that [`Segments::acquire_by_address`] began. All I/O on the range has ended.
    ///
    /// # Panics
    /// When the segment is not in use.
    pub fn release_by_address(&mut self, segment: SegmentId) {
        self.segments.release(segment, &mut self.answers.outputs);
    }

    /// Closes the connections that still write or read a segment whose unregistering takes too long.
    pub fn evict_users(&mut self, segment: SegmentId) {
        let writers = self.sessions.select(|session| match &session.pending {
            Some(PendingPayload::Write { segment: used, .. }) => *used == segment,
            Some(PendingPayload::WriteMany { segments, .. }) => segments.contains(&segment),
            _ => false,
        });
        let users: Vec<PeerKey> = writers.into_iter().chain(self.segments.readers(segment)).collect();
        for peer in users {
            self.sessions.close(&mut self.answers.outputs, peer, CloseReason::SegmentGone);
        }
    }

    /// The memory that the payload of this peer's write was to go to turned out to be gone: the payload is thrown away,
    /// and the write refused when it has come.
    pub fn refuse_payload(&mut self, peer: PeerKey) {
        let Some(session) = self.sessions.get_mut(peer) else { return };
        if let Some(pending) = session.pending.take() {
            session.pending = Some(self.segments.refuse_write(&mut self.answers, pending));
        }
    }

    /// The memory that this answer was to carry turned out to be gone: the read is refused instead.
    pub fn refuse_read(&mut self, peer: PeerKey, answer: &Header, hold: Hold) {
        self.sent(hold);
        if let Kind::Reply(operation) = answer.kind {
            self.answers.status(peer, operation, answer.request, Status::OutOfRange, 0);
        }
    }

    /// Deadlines of greetings and reservations.
    pub fn handle_timeout(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.answers.outputs.arrived(now_ns);
        while let Some(peer) = self.sessions.take_silent(now_ns) {
            self.sessions.close(&mut self.answers.outputs, peer, CloseReason::NotGreeted);
        }
        while let Some((reservation, peer, path)) = self.sessions.take_overdue(now_ns) {
            self.expire(reservation, peer, path);
        }
        self.expire_drafts();
        self.sessions.end_tickets(&mut self.answers.outputs, now_ns);
        self.expire_claims();
        self.expire_copy_waits();
    }
}

const _: () = assert!(Limits::HELLO_NS < Limits::RESERVATION_NS);

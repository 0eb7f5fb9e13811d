//! One peer's connection: its greeting, and what it holds.

use kvplane_proto::Status;
use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::{Incarnation, NodeId, RequestId, ReservationId, SegmentId};
use kvplane_proto::message::{Hello, IdItem, Operation, Welcome};

use super::Service;
use super::drafts::TicketId;
use super::gate::{Greeted, Pass};
use super::held::List;
use super::types::{CloseReason, Output, Path, PayloadTo, PeerKey};

/// A payload under way.
pub(super) enum Pending {
    /// It is read and forgotten; then this is answered.
    Refused { request: RequestId, operation: Operation, status: Status, argument: u64 },
    /// It goes into this reservation.
    Put { request: RequestId, reservation: ReservationId, expected: u64 },
    /// It goes into a range of a draft.
    Fill { request: RequestId, ticket: TicketId, expected: u64 },
    /// It goes into this segment.
    Write { request: RequestId, segment: SegmentId, expected: Option<u64> },
    /// It goes into these segments.
    WriteMany { request: RequestId, segments: Vec<SegmentId>, expected: Option<u64> },
}

pub(super) struct Session {
    pub(super) generation: u32,
    pub(super) path: Path,
    pub(super) greeted: bool,
    /// Who greeted, and as which of its connections.
    pub(super) client: u64,
    connection: u64,
    /// It is the new owner of what was ours, and asks for that only.
    pub(super) fetches: bool,
    /// It has brought copies as the first owner of their slots.
    pub(super) copies: bool,
    pub(super) closing: bool,
    /// What it was challenged with, where tickets are wanted.
    pub(super) asked: Option<Box<Greeted>>,
    pub(super) pass: Pass,
    pub(super) pending: Option<Pending>,
    /// When its last request came, and how long the payload is that comes with it.
    pub(super) arrived_ns: u64,
    pub(super) payload_bytes: u64,
    /// Pins lent over shared memory.
    pub(super) pins: List,
    /// Reservations lent over shared memory, or the one whose payload is under way.
    pub(super) reservations: List,
    /// Ranges of drafts that it fills or reads.
    pub(super) tickets: List,
}

impl Session {
    /// A connection that has not said hello yet.
    pub(super) const fn new(generation: u32, path: Path, now_ns: u64) -> Self {
        Self {
            generation,
            path,
            greeted: false,
            client: 0,
            connection: 0,
            fetches: false,
            copies: false,
            closing: false,
            asked: None,
            pass: Pass::ALL,
            pending: None,
            arrived_ns: now_ns,
            payload_bytes: 0,
            pins: List::new(),
            reservations: List::new(),
            tickets: List::new(),
        }
    }

    /// Notes the client of a connection, which may send requests from now on.
    pub(super) const fn greet(&mut self, client: u64, connection: u64, fetches: bool) {
        self.greeted = true;
        (self.client, self.connection, self.fetches) = (client, connection, fetches);
    }
}

impl Service {
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
        self.forget_ticket(peer.index, &departed.session.pass);
        match departed.session.pending.take() {
            Some(Pending::Write { segment, .. }) => self.segments.release(segment, &mut self.answers.outputs),
            Some(Pending::WriteMany { segments, .. }) => self.release_many(segments),
            Some(Pending::Refused { .. } | Pending::Put { .. } | Pending::Fill { .. }) | None => {}
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

    pub(super) fn session(&mut self, peer: PeerKey) -> Option<&mut Session> {
        self.sessions.get_mut(peer)
    }

    pub(super) fn close(&mut self, peer: PeerKey, reason: CloseReason) {
        if let Some(session) = self.sessions.close(peer) {
            let pass = session.pass;
            self.forget_ticket(peer.index, &pass);
            self.counters.closed += 1;
            self.answers.outputs.push_back(Output::Close { peer, reason });
        }
    }

    pub(super) fn hello(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let hello = Hello::decode(body).map_err(|_| CloseReason::Malformed("a torn hello"))?;
        let session = self.session(peer).expect("a session that was just looked up");
        if session.greeted {
            return Err(CloseReason::Malformed("a second hello"));
        }
        if let Some(status) = self.refusal(&hello) {
            self.answer(peer, Operation::Hello, header, status);
            return Err(CloseReason::Refused(status));
        }
        if self.challenge(peer, header, &hello)? {
            return Ok(PayloadTo::Discard);
        }
        self.sessions.greet(peer, hello.client, hello.connection, hello.fetches);
        self.counters.greeted += 1;
        let welcome = self.welcome_body();
        self.answers.items(peer, Operation::Hello, header.request, 1, |body| body.extend_from_slice(&welcome));
        Ok(PayloadTo::Discard)
    }

    /// Who we are, as those are told who are let in.
    pub(super) fn welcome_body(&self) -> Vec<u8> {
        let welcome = Welcome {
            version: VERSION,
            node: self.identity.node,
            incarnation: self.identity.incarnation,
            shard: self.identity.shard,
            epoch: self.epoch,
            pool_bytes: self.store.as_ref().map_or(0, |store| store.config().pool_bytes),
        };
        welcome.encode()
    }

    /// The peer says that other connections of its own are over: they are closed before anything that it asks next is
    /// looked at, and what they have brought and was not carried out never is. One that is not there is over already,
    /// as nothing is asked before the welcome: nothing has to be remembered of it.
    pub(super) fn fence(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let mut named: Vec<u64> = Self::items::<IdItem>(header, body)?.map(|item| item.id).collect();
        named.sort_unstable();
        let session = self.session(peer).expect("a session that was just looked up");
        let (client, own) = (session.client, session.connection);
        if named.binary_search(&own).is_ok() {
            return Err(CloseReason::Malformed("a fence of its own connection"));
        }
        let over = self.sessions.select(|session| {
            session.greeted && session.client == client && named.binary_search(&session.connection).is_ok()
        });
        for peer in over {
            self.close(peer, CloseReason::Fenced);
        }
        self.answer(peer, Operation::Fence, header, Status::Ok);
        Ok(PayloadTo::Discard)
    }

    fn refusal(&self, hello: &Hello) -> Option<Status> {
        let me = &self.identity;
        if hello.version_min > VERSION || hello.version_max < VERSION || hello.cluster != me.cluster {
            return Some(Status::Incompatible);
        }
        let other_node = hello.node != NodeId(0) && hello.node != me.node;
        let other_life = hello.incarnation != Incarnation(0) && hello.incarnation != me.incarnation;
        let other_shard = hello.node != NodeId(0) && hello.shard != me.shard;
        (other_node || other_life || other_shard).then_some(Status::WrongOwner)
    }

    /// A put has not completed in time.
    pub(super) fn expire(&mut self, reservation: ReservationId, peer: PeerKey, path: Path) {
        self.counters.expired += 1;
        match path {
            // Only our own receive writes there, so ending the connection frees it.
            Path::Stream => self.close(peer, CloseReason::PutDeadline),
            Path::Shared => {
                let store = self.store.as_mut().expect("a reservation is of a store");
                store.expire(reservation);
            }
        }
    }
}

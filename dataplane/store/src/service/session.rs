//! One peer's connection: its greeting, and what it holds.

use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::{Incarnation, NodeId, PinId, RequestId, ReservationId, SegmentId};
use kvplane_proto::message::{Hello, Kind, Operation, Welcome};
use kvplane_proto::{Limits, Status};

use super::Service;
use super::types::{CloseReason, Output, Path, PayloadTo, PeerKey};

/// A payload under way.
pub(super) enum Pending {
    /// It is read and forgotten; then this is answered.
    Refused { request: RequestId, operation: Operation, status: Status },
    /// It goes into this reservation.
    Put { request: RequestId, reservation: ReservationId, expected: Option<u64> },
    /// It goes into this segment.
    Write { request: RequestId, segment: SegmentId, expected: Option<u64> },
}

pub(super) struct Session {
    pub(super) generation: u32,
    pub(super) path: Path,
    pub(super) greeted: bool,
    pub(super) closing: bool,
    pub(super) pending: Option<Pending>,
    /// Pins lent over shared memory.
    pub(super) pins: Vec<PinId>,
    /// Reservations lent over shared memory, or the one whose payload is under way.
    pub(super) reservations: Vec<ReservationId>,
}

impl Service {
    /// A connection was accepted.
    ///
    /// # Panics
    /// When the position is taken: the host reports a connection's end before it reuses its index.
    pub fn peer_joined(&mut self, peer: PeerKey, path: Path, now_ns: u64) {
        self.now_ns = now_ns;
        let index = peer.index as usize;
        if self.sessions.len() <= index {
            self.sessions.resize_with(index + 1, || None);
        }
        assert!(self.sessions[index].is_none(), "connection {index} joined twice");
        self.sessions[index] = Some(Session {
            generation: peer.generation,
            path,
            greeted: false,
            closing: false,
            pending: None,
            pins: Vec::new(),
            reservations: Vec::new(),
        });
        self.greeting.push_back((now_ns + Limits::HELLO_NS, peer));
    }

    /// A connection is gone and its I/O has ended: everything that it held comes back.
    ///
    /// For shared memory this means that the peer's process is dead or has unmapped the pool; the socket's end says so, because
    /// the kernel closes it after the process's memory is gone.
    pub fn peer_gone(&mut self, peer: PeerKey, now_ns: u64) {
        self.now_ns = now_ns;
        if self.session(peer).is_none() {
            return;
        }
        let Some(session) = self.sessions[peer.index as usize].take() else { return };
        if let Some(Pending::Write { segment, .. }) = session.pending {
            self.segments.release(segment, &mut self.outputs);
        }
        if let Some(store) = &mut self.store {
            for pin in session.pins {
                store.unpin(pin).expect("a session's pin is held");
            }
            for reservation in session.reservations {
                store.abort(reservation).expect("a session's reservation is held");
            }
        }
    }

    pub(super) fn session(&mut self, peer: PeerKey) -> Option<&mut Session> {
        let session = self.sessions.get_mut(peer.index as usize)?.as_mut()?;
        (session.generation == peer.generation && !session.closing).then_some(session)
    }

    pub(super) fn close(&mut self, peer: PeerKey, reason: CloseReason) {
        // Still in the table, so that what it holds comes back only when its I/O has ended.
        if let Some(session) = self.session(peer) {
            session.closing = true;
            self.counters.closed += 1;
            self.outputs.push_back(Output::Close { peer, reason });
        }
    }

    pub(super) fn hello(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let hello = Hello::decode(body).map_err(|_| CloseReason::Malformed("a torn hello"))?;
        let session = self.session(peer).expect("a session that was just looked up");
        if session.greeted || header.payload_bytes > 0 {
            return Err(CloseReason::Malformed("a second hello"));
        }
        if let Some(status) = self.refusal(&hello) {
            self.answer(peer, Operation::Hello, header, status);
            return Err(CloseReason::Refused(status));
        }
        self.session(peer).expect("a session that was just looked up").greeted = true;
        self.counters.greeted += 1;
        let welcome = Welcome {
            version: VERSION,
            node: self.identity.node,
            incarnation: self.identity.incarnation,
            shard: self.identity.shard,
            epoch: self.epoch,
            pool_bytes: self.store.as_ref().map_or(0, |store| store.config().pool_bytes),
        };
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&welcome.encode());
        let body = start..self.bytes.len();
        let header = Header::reply(Kind::Reply(Operation::Hello), header.request, Status::Ok)
            .with_body(&self.bytes[body.clone()], 1);
        self.outputs.push_back(Output::Frame { peer, header, body, payload: None });
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

    /// Remembers a pin that a peer holds over shared memory.
    pub(super) fn lend_pin(&mut self, peer: PeerKey, pin: PinId) {
        let index = pin.index as usize;
        if self.pin_position.len() <= index {
            self.pin_position.resize(index + 1, u32::MAX);
        }
        let session = self.session(peer).expect("a session that was just looked up");
        session.pins.push(pin);
        let position = session.pins.len() as u32 - 1;
        self.pin_position[index] = position;
    }

    /// Takes a lent pin back; false when this peer does not hold it.
    pub(super) fn take_pin(&mut self, peer: PeerKey, pin: PinId) -> bool {
        let Some(&position) = self.pin_position.get(pin.index as usize) else { return false };
        let session = self.session(peer).expect("a session that was just looked up");
        if session.pins.get(position as usize) != Some(&pin) {
            return false;
        }
        session.pins.swap_remove(position as usize);
        if let Some(&moved) = session.pins.get(position as usize) {
            self.pin_position[moved.index as usize] = position;
        }
        true
    }

    /// Takes a reservation back from a peer; false when it does not hold it.
    pub(super) fn take_reservation(&mut self, peer: PeerKey, reservation: ReservationId) -> bool {
        let session = self.session(peer).expect("a session that was just looked up");
        // Few at a time, newest last: the search from the end is short.
        let Some(position) = session.reservations.iter().rposition(|&held| held == reservation) else { return false };
        session.reservations.swap_remove(position);
        true
    }

    pub(super) fn holds_reservation(&mut self, peer: PeerKey, reservation: ReservationId) -> bool {
        self.session(peer).is_some_and(|session| session.reservations.contains(&reservation))
    }

    /// A reservation's deadline passed.
    pub(super) fn expire(&mut self, peer: PeerKey, reservation: ReservationId) {
        if !self.holds_reservation(peer, reservation) {
            return;
        }
        self.counters.expired += 1;
        let path = self.session(peer).map(|session| session.path);
        if path == Some(Path::Stream) {
            // Only our own receive writes there, so ending the connection frees it.
            self.close(peer, CloseReason::PutDeadline);
        } else if let Some(store) = &mut self.store {
            store.expire(reservation);
        }
    }
}

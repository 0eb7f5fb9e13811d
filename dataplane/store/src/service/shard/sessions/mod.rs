//! Connections of a shard: their clients, the rights that their tickets give, and the pins, reservations and ranges of
//! put sessions that each holds.
//!
//! Sessions know nothing of objects. Every handle that a session holds is lent to it here and taken back here; a
//! session that leaves returns the handles that it still held.

mod gate;
mod handshake;
mod held;
mod pass;
mod session;

use gate::Gate;
use held::{Deadlines, Handles};
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{PinId, ReservationId};
use kvplane_proto::message::Operation;
use kvplane_proto::{Limits, Status};
use kvplane_ticket::{Challenges, Rights, Role, TicketKey};
use session::Greeting;
pub(in crate::service) use session::{PendingPayload, Session};

use super::answers::Answers;
use super::ownership::Ownership;
use super::timing::Outputs;
use crate::service::types::{CloseReason, Output, Path, PeerKey, TicketId};

/// All connections, by index. The store's limits bound the number of handles that they hold.
pub(in crate::service) struct Sessions {
    sessions: Vec<Option<Session>>,
    /// Deadlines of handshakes, by the connection's index.
    greeting: Deadlines,
    /// Deadlines of puts, by their reservation's index.
    put_deadlines: Deadlines,
    pins: Handles,
    reservations: Handles,
    tickets: Handles,
    /// Tickets of connections, where they are required.
    gate: Option<Box<Gate>>,
    /// Length of the pool, in bytes, as stated in a welcome.
    pool_bytes: u64,
    counters: SessionCounters,
}

/// Counters of connections by their outcome.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::service) struct SessionCounters {
    /// Connections that were welcomed.
    pub(in crate::service) greeted: u64,
    /// Connections closed from this side.
    pub(in crate::service) closed: u64,
    /// Connections refused for lack of a valid ticket.
    pub(in crate::service) unauthenticated: u64,
    /// Connections closed because their tickets expired.
    pub(in crate::service) tickets_ended: u64,
    /// Requests that the peer's ticket does not allow.
    pub(in crate::service) unauthorized: u64,
}

/// Session that has ended, and all handles that it held.
pub(in crate::service) struct DepartedSession {
    /// The session, with nothing lent to it any more.
    pub(in crate::service) session: Session,
    pub(in crate::service) pins: Vec<PinId>,
    pub(in crate::service) reservations: Vec<ReservationId>,
    pub(in crate::service) tickets: Vec<TicketId>,
}

impl Sessions {
    /// Creates a table without connections, for a pool of this length, with capacity for this many pins and
    /// reservations.
    pub(in crate::service) fn new(pool_bytes: u64, pins: u32, reservations: u32) -> Self {
        Self {
            sessions: Vec::new(),
            greeting: Deadlines::new(0),
            put_deadlines: Deadlines::new(reservations),
            pins: Handles::new(pins),
            reservations: Handles::new(reservations),
            tickets: Handles::new(0),
            gate: None,
            pool_bytes,
            counters: SessionCounters::default(),
        }
    }

    /// Adds an accepted connection, which has to greet within the handshake deadline.
    ///
    /// # Panics
    /// If the index is in use: the host reports a connection's end before it reuses its index.
    pub(in crate::service) fn join(&mut self, peer: PeerKey, path: Path, now_ns: u64) {
        let index = peer.index as usize;
        if self.sessions.len() <= index {
            self.sessions.resize_with(index + 1, || None);
        }
        assert!(self.sessions[index].is_none(), "connection {index} joined twice");
        self.sessions[index] = Some(Session::new(peer.generation, path, now_ns));
        self.greeting.set(peer.index, now_ns.saturating_add(Limits::HELLO_NS));
    }

    /// Removes a connection that is gone and whose I/O has ended, also one that was being closed.
    pub(in crate::service) fn leave(&mut self, peer: PeerKey) -> Option<DepartedSession> {
        let entry = self.sessions.get_mut(peer.index as usize)?;
        let mut session = entry.take_if(|session| session.generation == peer.generation)?;
        self.greeting.cancel(peer.index);
        if let Some(gate) = &mut self.gate {
            gate.forget(peer.index, &session.pass);
        }
        let (mut pins, mut reservations, mut tickets) = (Vec::new(), Vec::new(), Vec::new());
        while let Some((index, generation)) = self.tickets.take_first(&mut session.tickets) {
            tickets.push(TicketId { index, generation });
        }
        while let Some((index, generation)) = self.pins.take_first(&mut session.pins) {
            pins.push(PinId { index, generation });
        }
        while let Some((index, generation)) = self.reservations.take_first(&mut session.reservations) {
            self.put_deadlines.cancel(index);
            reservations.push(ReservationId { index, generation });
        }
        Some(DepartedSession { session, pins, reservations, tickets })
    }

    /// Returns a peer's session, unless it is being closed.
    pub(in crate::service) fn get(&self, peer: PeerKey) -> Option<&Session> {
        let session = self.sessions.get(peer.index as usize)?.as_ref()?;
        (session.generation == peer.generation && !session.closing).then_some(session)
    }

    /// Like [`Self::get`], mutable.
    pub(in crate::service) fn get_mut(&mut self, peer: PeerKey) -> Option<&mut Session> {
        let session = self.sessions.get_mut(peer.index as usize)?.as_mut()?;
        (session.generation == peer.generation && !session.closing).then_some(session)
    }

    /// Returns the session at an index and its key, also one that is being closed.
    pub(in crate::service) fn at(&self, index: u32) -> Option<(PeerKey, &Session)> {
        let session = self.sessions.get(index as usize)?.as_ref()?;
        Some((PeerKey { index, generation: session.generation }, session))
    }

    /// Returns the sessions for which `pick` returns true, including those that are being closed.
    pub(in crate::service) fn select(&self, pick: impl Fn(&Session) -> bool) -> Vec<PeerKey> {
        let all = self.sessions.iter().enumerate();
        let picked = all.filter_map(|(index, session)| {
            let session = session.as_ref().filter(|session| pick(session))?;
            Some(PeerKey { index: index as u32, generation: session.generation })
        });
        picked.collect()
    }

    /// Returns true if a peer that maps the pool holds pins, reservations or ranges.
    pub(in crate::service) fn lend_pool(&self) -> bool {
        let shared = self.sessions.iter().flatten().filter(|session| session.path == Path::Shared);
        shared.into_iter().any(Session::holds_any)
    }

    /// Records the client of a connection, which may send requests from now on.
    pub(in crate::service) fn greet(&mut self, peer: PeerKey, greeting: Greeting) {
        if let Some(session) = self.get_mut(peer) {
            session.greet(greeting);
            self.greeting.cancel(peer.index);
            self.counters.greeted += 1;
        }
    }

    /// Requires tickets from now on, and challenges clients with these challenges.
    pub(in crate::service) fn want_tickets(&mut self, challenges: Challenges) {
        self.gate = Some(Box::new(Gate::new(challenges)));
    }

    /// Installs the keys of the control plane, as of this ticket time in seconds.
    pub(in crate::service) fn learn_keys(&mut self, keys: Vec<TicketKey>, seconds: u64, now_ns: u64) {
        if let Some(gate) = &mut self.gate {
            gate.learn_keys(keys, seconds, now_ns);
        }
    }

    /// Returns true if connections need tickets.
    pub(in crate::service) const fn needs_tickets(&self) -> bool {
        self.gate.is_some()
    }

    /// Returns true if a connection was welcomed; the shard keeps no state for it before.
    pub(in crate::service) fn is_welcome(&self, peer: PeerKey) -> bool {
        self.get(peer).is_some_and(|session| session.greeted)
    }

    /// Returns true if an RDMA connection may be negotiated on this connection.
    pub(in crate::service) fn may_carry(&self, peer: PeerKey) -> bool {
        self.gate.is_none() || self.is_welcome(peer)
    }

    /// Returns true if a connection has the right to an operation; a request without that right is answered here.
    pub(in crate::service) fn may_change(
        &mut self,
        answers: &mut Answers,
        peer: PeerKey,
        operation: Operation,
        header: &Header,
    ) -> bool {
        let changes = matches!(
            operation,
            Operation::Put
                | Operation::Remove
                | Operation::RemoveCopy
                | Operation::Retain
                | Operation::Write
                | Operation::WriteMany
                | Operation::Reserve
                | Operation::Commit
                | Operation::Begin
                | Operation::Fill
                | Operation::Seal
                | Operation::Discard
        );
        let session = find(&mut self.sessions, peer);
        if !changes || session.pass.rights.has(Rights::WRITE) {
            return true;
        }
        self.counters.unauthorized += 1;
        let status = Status::Unauthorized;
        if header.payload_bytes > 0 {
            session.pending = Some(PendingPayload::Refused { request: header.request, operation, status, argument: 0 });
        } else {
            answers.answer(peer, operation, header, status);
        }
        false
    }

    /// Closes the connections whose tickets have ended without being renewed.
    pub(in crate::service) fn end_tickets(&mut self, outputs: &mut Outputs, now_ns: u64) {
        while let Some(gate) = &mut self.gate
            && let Some(index) = gate.take_due(now_ns)
        {
            let session = self.sessions.get_mut(index as usize).and_then(Option::as_mut);
            let Some(session) = session.filter(|session| !session.closing) else { continue };
            if gate.has_ended(index, &mut session.pass, now_ns) {
                let peer = PeerKey { index, generation: session.generation };
                self.counters.tickets_ended += 1;
                self.close(outputs, peer, CloseReason::TicketEnded);
            }
        }
    }

    /// Closes the connections of nodes' incarnations that have ended by the newest map.
    pub(in crate::service) fn end_former_incarnations(&mut self, outputs: &mut Outputs, shard: &Ownership) {
        let over = self.select(|session| {
            let ticket = session.pass.ticket().filter(|ticket| ticket.role == Role::Node);
            ticket.is_some_and(|ticket| shard.is_over(ticket.holder, ticket.incarnation))
        });
        over.into_iter().for_each(|peer| self.close(outputs, peer, CloseReason::Refused(Status::Stale)));
    }

    /// Closes a connection from this side: it stays in the table, so that its handles are released only when its I/O
    /// has ended. Does nothing if there is no such connection or it is being closed already.
    pub(in crate::service) fn close(&mut self, outputs: &mut Outputs, peer: PeerKey, reason: CloseReason) {
        let Some(session) = self.get_mut(peer) else { return };
        session.closing = true;
        let pass = session.pass;
        if let Some(gate) = &mut self.gate {
            gate.forget(peer.index, &pass);
        }
        self.greeting.cancel(peer.index);
        self.counters.closed += 1;
        outputs.push_back(Output::Close { peer, reason });
    }

    /// Records a pin that a peer holds over shared memory.
    pub(in crate::service) fn lend_pin(&mut self, peer: PeerKey, pin: PinId) {
        let session = find(&mut self.sessions, peer);
        self.pins.lend(&mut session.pins, peer.index, pin.index, pin.generation);
    }

    /// Takes a lent pin back; false if this peer does not hold it.
    pub(in crate::service) fn take_pin(&mut self, peer: PeerKey, pin: PinId) -> bool {
        let session = find(&mut self.sessions, peer);
        self.pins.take(&mut session.pins, peer.index, pin.index, pin.generation)
    }

    /// Records a reservation that a peer holds, and its deadline.
    pub(in crate::service) fn lend_reservation(&mut self, peer: PeerKey, reservation: ReservationId, until_ns: u64) {
        let ReservationId { index, generation } = reservation;
        let session = find(&mut self.sessions, peer);
        self.reservations.lend(&mut session.reservations, peer.index, index, generation);
        self.put_deadlines.set(index, until_ns);
    }

    /// Takes a reservation back from a peer; false if the peer does not hold it.
    pub(in crate::service) fn take_reservation(&mut self, peer: PeerKey, reservation: ReservationId) -> bool {
        let ReservationId { index, generation } = reservation;
        let session = find(&mut self.sessions, peer);
        let held = self.reservations.take(&mut session.reservations, peer.index, index, generation);
        if held {
            self.put_deadlines.cancel(index);
        }
        held
    }

    /// Records the ticket of a range of a put session that a peer fills or reads.
    pub(in crate::service) fn lend_ticket(&mut self, peer: PeerKey, ticket: TicketId) {
        let session = find(&mut self.sessions, peer);
        self.tickets.lend(&mut session.tickets, peer.index, ticket.index, ticket.generation);
    }

    /// Takes a ticket back; false if this peer does not hold it.
    pub(in crate::service) fn take_ticket(&mut self, peer: PeerKey, ticket: TicketId) -> bool {
        let session = find(&mut self.sessions, peer);
        self.tickets.take(&mut session.tickets, peer.index, ticket.index, ticket.generation)
    }

    /// Returns the earliest deadline of a handshake, a put or a ticket.
    pub(in crate::service) fn poll_timeout(&self) -> Option<u64> {
        let ticket_ns = self.gate.as_ref().and_then(|gate| gate.poll_timeout());
        [self.greeting.next_ns(), self.put_deadlines.next_ns(), ticket_ns].into_iter().flatten().min()
    }

    pub(in crate::service) const fn counters(&self) -> &SessionCounters {
        &self.counters
    }

    /// Returns the session of a peer whose request is being carried out.
    fn find(&mut self, peer: PeerKey) -> &mut Session {
        find(&mut self.sessions, peer)
    }

    /// Returns a connection whose handshake deadline has passed.
    pub(in crate::service) fn take_silent(&mut self, now_ns: u64) -> Option<PeerKey> {
        let index = self.greeting.take_due(now_ns)?;
        Some(self.at(index).expect("only an existing connection has a deadline").0)
    }

    /// Returns a reservation whose deadline has passed, its holder, and the holder's path. The holder keeps it.
    pub(in crate::service) fn take_overdue(&mut self, now_ns: u64) -> Option<(ReservationId, PeerKey, Path)> {
        let index = self.put_deadlines.take_due(now_ns)?;
        let (at, generation) = self.reservations.holder(index).expect("only a reservation that is held has a deadline");
        let (peer, session) = self.at(at).expect("a reservation's holder exists");
        Some((ReservationId { index, generation }, peer, session.path))
    }
}

/// Returns the session of a peer whose request is being carried out.
fn find(sessions: &mut [Option<Session>], peer: PeerKey) -> &mut Session {
    let session = sessions.get_mut(peer.index as usize).and_then(Option::as_mut);
    session
        .filter(|session| session.generation == peer.generation && !session.closing)
        .expect("a session that was just looked up")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PeerKey = PeerKey { index: 3, generation: 7 };
    const GREETING: Greeting = Greeting { client: 1, connection: 1, fetches: false };

    fn joined() -> Sessions {
        let mut sessions = Sessions::new(0, 8, 8);
        sessions.join(PEER, Path::Shared, 100);
        sessions
    }

    #[test]
    fn a_session_that_leaves_returns_its_handles() {
        let mut sessions = joined();
        sessions.greet(PEER, GREETING);
        let pins = [0, 1, 2].map(|index| PinId { index, generation: 5 });
        pins.into_iter().for_each(|pin| sessions.lend_pin(PEER, pin));
        assert!(sessions.take_pin(PEER, pins[1]));
        assert!(!sessions.take_pin(PEER, pins[1]), "it is back already");
        let reservation = ReservationId { index: 4, generation: 1 };
        sessions.lend_reservation(PEER, reservation, 900);
        let ticket = TicketId { index: 2, generation: 9 };
        sessions.lend_ticket(PEER, ticket);
        let departed = sessions.leave(PEER).expect("it is there");
        assert_eq!(departed.pins, [pins[0], pins[2]]);
        assert_eq!(departed.reservations, [reservation]);
        assert_eq!(departed.tickets, [ticket]);
        assert_eq!(sessions.poll_timeout(), None, "its put has no deadline any more");
        assert!(sessions.leave(PEER).is_none());
        sessions.join(PeerKey { generation: 8, ..PEER }, Path::Stream, 0);
        assert!(sessions.get(PEER).is_none(), "another connection has its place");
    }

    #[test]
    fn a_closing_session_keeps_its_handles_until_it_leaves() {
        let mut sessions = joined();
        sessions.greet(PEER, GREETING);
        let reservation = ReservationId { index: 0, generation: 1 };
        sessions.lend_reservation(PEER, reservation, 900);
        let mut outputs = Outputs::default();
        sessions.close(&mut outputs, PEER, CloseReason::Fenced);
        sessions.close(&mut outputs, PEER, CloseReason::Fenced);
        assert!(sessions.get(PEER).is_none());
        assert_eq!(sessions.counters().closed, 1);
        assert_eq!(sessions.select(|session| session.closing), [PEER]);
        assert_eq!(sessions.take_overdue(900), Some((reservation, PEER, Path::Shared)));
        assert_eq!(sessions.leave(PEER).expect("it is in the table").reservations, [reservation]);
    }

    #[test]
    fn connections_and_puts_expire_at_their_deadlines() {
        let mut sessions = joined();
        let until_ns = 100 + Limits::HELLO_NS;
        assert_eq!(sessions.poll_timeout(), Some(until_ns));
        assert_eq!(sessions.take_silent(until_ns - 1), None);
        assert_eq!(sessions.take_silent(until_ns), Some(PEER));
        let mut sessions = joined();
        sessions.greet(PEER, GREETING);
        assert_eq!((sessions.take_silent(u64::MAX), sessions.poll_timeout()), (None, None));
        let [first, second] = [0, 1].map(|index| ReservationId { index, generation: 1 });
        sessions.lend_reservation(PEER, first, 500);
        sessions.lend_reservation(PEER, second, 600);
        assert!(sessions.take_reservation(PEER, first));
        assert_eq!(sessions.take_overdue(599), None);
        assert_eq!(sessions.take_overdue(600), Some((second, PEER, Path::Shared)));
    }
}

//! One connection: its client, what it may do, and what it holds.

use kvplane_proto::Status;
use kvplane_proto::ids::{RequestId, ReservationId, SegmentId};
use kvplane_proto::message::{Hello, Operation};

use super::gate::{ChallengedHello, Pass};
use super::held::List;
use crate::service::types::{Path, TicketId};

/// A payload in flight.
pub(in crate::service) enum PendingPayload {
    /// It is read and forgotten; then this is answered.
    Refused { request: RequestId, operation: Operation, status: Status, argument: u64 },
    /// It goes into this reservation.
    Put { request: RequestId, reservation: ReservationId, expected: u64 },
    /// It goes into a range of a put session.
    Fill { request: RequestId, ticket: TicketId, expected: u64 },
    /// It goes into this segment.
    Write { request: RequestId, segment: SegmentId, expected: Option<u64> },
    /// It goes into these segments.
    WriteMany { request: RequestId, segments: Vec<SegmentId>, expected: Option<u64> },
}

/// What a connection said of itself when it greeted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) struct Greeting {
    pub(in crate::service) client: u64,
    /// Its number among the connections of its client.
    pub(super) connection: u64,
    /// It is the new owner of what was ours, and asks for that only.
    pub(in crate::service) fetches: bool,
}

impl Greeting {
    pub(super) const fn of(hello: &Hello) -> Self {
        Self { client: hello.client, connection: hello.connection, fetches: hello.fetches }
    }
}

pub(in crate::service) struct Session {
    pub(in crate::service) generation: u32,
    pub(in crate::service) path: Path,
    pub(in crate::service) greeted: bool,
    pub(in crate::service) greeting: Greeting,
    /// It has brought copies as the owner of their slots.
    pub(in crate::service) copies: bool,
    pub(in crate::service) closing: bool,
    /// The challenge that it was given, where tickets are required.
    pub(super) challenged: Option<Box<ChallengedHello>>,
    pub(in crate::service) pass: Pass,
    pub(in crate::service) pending: Option<PendingPayload>,
    /// When its last request came, and how long the payload is that comes with it.
    pub(in crate::service) arrived_ns: u64,
    pub(in crate::service) payload_bytes: u64,
    /// Pins lent over shared memory.
    pub(super) pins: List,
    /// Reservations lent over shared memory, or the one whose payload is in flight.
    pub(super) reservations: List,
    /// Ranges of put sessions that it fills or reads.
    pub(super) tickets: List,
}

impl Session {
    /// A connection that has not said hello yet.
    pub(super) const fn new(generation: u32, path: Path, now_ns: u64) -> Self {
        Self {
            generation,
            path,
            greeted: false,
            greeting: Greeting { client: 0, connection: 0, fetches: false },
            copies: false,
            closing: false,
            challenged: None,
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
    pub(super) const fn greet(&mut self, greeting: Greeting) {
        (self.greeted, self.greeting) = (true, greeting);
    }
}

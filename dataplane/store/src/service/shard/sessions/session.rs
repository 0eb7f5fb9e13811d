//! One connection: its client, its rights, and the handles that it holds.

use kvplane_proto::Status;
use kvplane_proto::ids::{RequestId, ReservationId, SegmentId};
use kvplane_proto::message::{Hello, Operation};

use super::held::List;
use super::pass::{ChallengedHello, Pass};
use crate::service::types::{Path, TicketId};

/// Payload in flight.
#[derive(Debug)]
pub(in crate::service) enum PendingPayload {
    /// Discarded when received; then the request is answered with this status.
    Refused { request: RequestId, operation: Operation, status: Status, argument: u64 },
    /// Received into this reservation; the reply may name replica owners beyond the first if `names_owners`.
    Put { request: RequestId, reservation: ReservationId, expected: u64, names_owners: bool },
    /// Received into a range of a put session.
    Fill { request: RequestId, ticket: TicketId, expected: u64 },
    /// Received into this segment.
    Write { request: RequestId, segment: SegmentId, expected: Option<u64> },
    /// Received into these segments.
    WriteMany { request: RequestId, segments: Vec<SegmentId>, expected: Option<u64> },
}

impl PendingPayload {
    /// Returns true for a write whose bytes, of this checksum, are those that the peer has sent.
    pub(in crate::service) fn is_good_write(&self, checksum: Option<u64>) -> bool {
        match self {
            Self::Write { expected, .. } | Self::WriteMany { expected, .. } => {
                expected.is_none() || *expected == checksum
            }
            Self::Refused { .. } | Self::Put { .. } | Self::Fill { .. } => false,
        }
    }
}

/// Facts that a client states of its connection in the greeting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) struct Greeting {
    pub(in crate::service) client: u64,
    /// Number of the connection among those of its client.
    pub(super) connection: u64,
    /// True if the peer is the new owner of slots that this shard had, and fetches their objects only.
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
    /// True once the peer, as the owner of their slots, has written replicas here.
    pub(in crate::service) copies: bool,
    pub(in crate::service) closing: bool,
    /// Challenge that was sent to the client, where tickets are required.
    pub(super) challenged: Option<Box<ChallengedHello>>,
    pub(in crate::service) pass: Pass,
    pub(in crate::service) pending: Option<PendingPayload>,
    /// Time at which the last request was received, and the length of its payload.
    pub(in crate::service) arrived_ns: u64,
    pub(in crate::service) payload_bytes: u64,
    /// Pins lent over shared memory.
    pub(super) pins: List,
    /// Reservations lent over shared memory, or the one whose payload is in flight.
    pub(super) reservations: List,
    /// Ranges of put sessions that the peer fills or reads.
    pub(super) tickets: List,
}

impl Session {
    /// Creates the session of a connection that has not greeted yet.
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

    /// Returns true if handles are lent to the session.
    pub(super) const fn holds_any(&self) -> bool {
        !self.pins.is_empty() || !self.reservations.is_empty() || !self.tickets.is_empty()
    }

    /// Records the client of a connection, which may send requests from now on.
    pub(super) const fn greet(&mut self, greeting: Greeting) {
        (self.greeted, self.greeting) = (true, greeting);
    }
}

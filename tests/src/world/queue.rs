//! Event queue, ordered by virtual time; the schedule's random stream orders events of one instant.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::rc::Rc;

use kvplane_client::LaneId;
use kvplane_cluster::{Input, Rejection, Reply};
use kvplane_proto::ids::BatchId;
use kvplane_proto::map::ClusterMap;
use kvplane_proto::tenants::TenantSsdLease;

use crate::world::cluster::handover::Turn;
use crate::world::cluster::quotas::SsdReport;
use crate::world::cluster::tickets::TicketNews;
use crate::world::faults::Party;
use crate::world::network::Way;

/// Event at a time. References to mortal parties carry the incarnation that is meant.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A client's timer: client, incarnation.
    ClientTimer(usize, u32),
    /// A service's timer: incarnation of a shard.
    ServiceTimer(usize),
    /// A sender moves the next piece.
    Pump(u32, Way),
    /// The next piece in flight arrives.
    Deliver(u32, Way),
    /// A connection reaches the shard.
    Accept(u32),
    /// The client learns that it is connected.
    Connected(u32),
    /// The client learns that its connection was refused: client, incarnation, lane.
    Refused(usize, u32, LaneId),
    /// The I/O of a lane that the client reset has ended.
    ResetDone(u32),
    /// The next piece of a client's copy: client, incarnation.
    CopyChunk(usize, u32),
    /// A dead client's copy continues to write: [`crate::world::scenario::Mischief::LateWriter`].
    GhostChunk(usize),
    /// A client's user acts: client, incarnation.
    Act(usize, u32),
    /// A client's user cancels a batch.
    Cancel(usize, u32, BatchId),
    /// A client polls the map: client, incarnation.
    PollMap(usize, u32),
    /// A node's agent sends to the control plane: node, incarnation.
    Agent(usize, u64),
    /// The control plane's timer: its incarnation.
    ControlTimer(u32),
    /// A message reaches the control plane.
    ToControl(Rc<Message>),
    /// A message from the control plane arrives.
    FromControl(Party, Rc<Message>),
    /// A disk carries an operation out: incarnation of its shard, operation.
    Disk(usize, u64),
    /// A shard's disk could not be opened: its incarnation.
    TierRefused(usize),
    /// A device copies the next piece: incarnation of its shard, copy.
    DevicePiece(usize, u32),
    /// A host notices the end of a device's copy: incarnation of its shard, copy.
    DeviceCopied(usize, u32),
    /// A lost device writes to a pool: incarnation of its shard, offset, bytes.
    DeviceGarbage(usize, u64, u64),
    /// A tail is written too late: incarnation of a shard, offset, bytes. See
    /// [`crate::world::scenario::Mischief::LateTails`].
    LateTail(usize, u64, Rc<[u8]>),
    /// A fault is injected.
    Fault,
    /// A node restarts.
    StartNode(usize),
    /// A client restarts.
    StartClient(usize),
    /// The control plane restarts.
    StartControl,
    /// A node recovers its speed.
    Recover(usize),
    /// A node begins to leave: node, incarnation, and true if it drains.
    BeginLeave(usize, u64, bool),
    /// A leaving node checks if it may end: node, incarnation.
    Leave(usize, u64),
    /// A node that has left ends: node, incarnation.
    Depart(usize, u64),
    /// A process of a handover has its turn: node, handover.
    Handover(usize, u32, Turn),
    /// A report of a complete import comes again: its number.
    ReportAgain(usize),
}

/// Message to or from the control plane.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    /// Input of a node: node, incarnation.
    Node(usize, u64, Input),
    /// Request for the newest map.
    Fetch(Party),
    /// Reply to a node's incarnation.
    Answer(u64, Result<Reply, Rejection>),
    /// Published map.
    Map(Rc<ClusterMap>),
    /// Ticket, and for a node the keys.
    Tickets(Rc<TicketNews>),
    /// Use of a shard's SSD by tenants.
    Ssd(Box<SsdReport>),
    /// Leases of SSD bytes: incarnation of a shard, its call.
    SsdLeases(usize, u64, Vec<TenantSsdLease>),
}

struct Entry {
    at_ns: u64,
    tie: u64,
    sequence: u64,
    event: Event,
}

impl Entry {
    const fn key(&self) -> (u64, u64, u64) {
        (self.at_ns, self.tie, self.sequence)
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

/// Pending events.
#[derive(Default)]
pub(crate) struct Queue {
    heap: BinaryHeap<Entry>,
    sequence: u64,
}

impl Queue {
    pub(crate) fn push(&mut self, at_ns: u64, tie: u64, event: Event) {
        self.sequence += 1;
        self.heap.push(Entry { at_ns, tie, sequence: self.sequence, event });
    }

    /// Returns the next event, unless it is later than `until_ns`.
    pub(crate) fn pop(&mut self, until_ns: u64) -> Option<(u64, Event)> {
        if self.heap.peek()?.at_ns > until_ns {
            return None;
        }
        let entry = self.heap.pop()?;
        Some((entry.at_ns, entry.event))
    }
}

impl Event {
    /// Returns true for routine messages of the control plane, which would drown the rest of a trace.
    pub(crate) fn is_chatter(&self) -> bool {
        match self {
            Self::ControlTimer(_) | Self::Agent(..) | Self::PollMap(..) => true,
            Self::ToControl(message) | Self::FromControl(_, message) => match &**message {
                Message::Node(_, _, input) => matches!(input, Input::Heartbeat { .. }),
                Message::Answer(_, answer) => matches!(answer, Ok(Reply::Alive { .. })),
                Message::Fetch(_) | Message::Map(_) | Message::Tickets(_) | Message::Ssd(_) => true,
                Message::SsdLeases(..) => true,
            },
            _ => false,
        }
    }

    /// Returns the event as numbers, for the trace's hash.
    pub(crate) fn words(&self) -> (u64, u64, u64) {
        match self {
            Self::ClientTimer(client, incarnation) => (1, *client as u64, u64::from(*incarnation)),
            Self::ServiceTimer(incarnation) => (2, *incarnation as u64, 0),
            Self::Pump(connection, way) => (3, u64::from(*connection), *way as u64),
            Self::Deliver(connection, way) => (4, u64::from(*connection), *way as u64),
            Self::Accept(connection) => (5, u64::from(*connection), 0),
            Self::Connected(connection) => (6, u64::from(*connection), 0),
            Self::Refused(client, incarnation, lane) => {
                (7, *client as u64, u64::from(*incarnation) << 16 ^ u64::from(lane.index))
            }
            Self::ResetDone(connection) => (8, u64::from(*connection), 0),
            Self::CopyChunk(client, incarnation) => (9, *client as u64, u64::from(*incarnation)),
            Self::GhostChunk(client) => (10, *client as u64, 0),
            Self::Act(client, incarnation) => (11, *client as u64, u64::from(*incarnation)),
            Self::Cancel(client, _, batch) => (12, *client as u64, u64::from(batch.index)),
            Self::PollMap(client, incarnation) => (13, *client as u64, u64::from(*incarnation)),
            Self::Agent(node, incarnation) => (14, *node as u64, *incarnation),
            Self::ControlTimer(incarnation) => (15, u64::from(*incarnation), 0),
            Self::ToControl(message) => (16, message.word(), 0),
            Self::FromControl(party, message) => (17, message.word(), party.word()),
            Self::Fault => (18, 0, 0),
            Self::StartNode(node) => (19, *node as u64, 0),
            Self::StartClient(client) => (20, *client as u64, 0),
            Self::StartControl => (21, 0, 0),
            Self::Recover(node) => (22, *node as u64, 0),
            Self::Depart(node, incarnation) => (23, *node as u64, *incarnation),
            Self::Disk(incarnation, op) => (24, *incarnation as u64, *op),
            Self::TierRefused(incarnation) => (25, *incarnation as u64, 0),
            Self::Leave(node, incarnation) => (26, *node as u64, *incarnation),
            Self::BeginLeave(node, incarnation, drains) => (28, *node as u64, *incarnation << 1 | u64::from(*drains)),
            Self::LateTail(incarnation, offset, _) => (27, *incarnation as u64, *offset),
            Self::DevicePiece(incarnation, copy) => (29, *incarnation as u64, u64::from(*copy)),
            Self::DeviceCopied(incarnation, copy) => (30, *incarnation as u64, u64::from(*copy)),
            Self::DeviceGarbage(incarnation, offset, _) => (31, *incarnation as u64, *offset),
            Self::Handover(node, number, turn) => (32, *node as u64, u64::from(*number) << 12 ^ turn.word()),
            Self::ReportAgain(number) => (33, *number as u64, 0),
        }
    }
}

impl Message {
    fn word(&self) -> u64 {
        match self {
            Self::Node(node, incarnation, _) => 1 ^ (*node as u64) << 8 ^ incarnation << 16,
            Self::Fetch(party) => 2 ^ party.word() << 8,
            Self::Answer(incarnation, answer) => 3 ^ incarnation << 8 ^ u64::from(answer.is_ok()) << 20,
            Self::Map(map) => 4 ^ map.epoch.0 << 8,
            Self::Tickets(_) => 5,
            Self::Ssd(report) => 6 ^ (report.incarnation as u64) << 8,
            Self::SsdLeases(incarnation, call, _) => 7 ^ (*incarnation as u64) << 8 ^ call << 24,
        }
    }
}

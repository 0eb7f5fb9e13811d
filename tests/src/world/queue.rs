//! What will happen, ordered by virtual time; events of one instant come in an order that the schedule's stream draws.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::rc::Rc;

use kvplane_cluster::{Input, Rejection, Reply};
use kvplane_proto::client::LaneId;
use kvplane_proto::ids::BatchId;
use kvplane_proto::map::ClusterMap;

use super::faults::Party;
use super::network::Way;

/// Something that happens at a time. Names of things that can die carry the life they mean.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A client's timer: client, life.
    ClientTimer(usize, u32),
    /// A service's timer: life of a shard.
    ServiceTimer(usize),
    /// A sender moves the next piece.
    Pump(u32, Way),
    /// The next piece in flight arrives.
    Deliver(u32, Way),
    /// A connection reaches the shard.
    Accept(u32),
    /// The client learns that it is connected.
    Connected(u32),
    /// The client learns that it is not: client, life, lane.
    Refused(usize, u32, LaneId),
    /// The I/O of a lane that the client reset has ended.
    ResetDone(u32),
    /// The next piece of a client's copy: client, life.
    CopyChunk(usize, u32),
    /// A dead client's copy writes on: [`super::scenario::Mischief::LateWriter`].
    GhostChunk(usize),
    /// A client's user acts: client, life.
    Act(usize, u32),
    /// A client's user withdraws a batch.
    Cancel(usize, u32, BatchId),
    /// A client asks for the map, as it does from time to time: client, life.
    PollMap(usize, u32),
    /// A node's agent speaks to the control plane: node, incarnation.
    Agent(usize, u64),
    /// The control plane's timer: its life.
    ControlTimer(u32),
    /// A message reaches the control plane.
    ToControl(Rc<Message>),
    /// A message from the control plane arrives.
    FromControl(Party, Rc<Message>),
    /// Something goes wrong.
    Fault,
    /// A node starts again.
    StartNode(usize),
    /// A client starts again.
    StartClient(usize),
    /// The control plane starts again.
    StartControl,
    /// A node is as fast as before.
    Recover(usize),
    /// A node that has left goes: node, incarnation.
    Depart(usize, u64),
}

/// A message to or from the control plane.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    /// A node speaks: node, incarnation.
    Node(usize, u64, Input),
    /// Somebody wants the newest map.
    Fetch(Party),
    /// The answer to a node's life.
    Answer(u64, Result<Reply, Rejection>),
    /// A map.
    Map(Rc<ClusterMap>),
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

/// The events to come.
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

    /// The next event, unless it is later than `until_ns`.
    pub(crate) fn pop(&mut self, until_ns: u64) -> Option<(u64, Event)> {
        if self.heap.peek()?.at_ns > until_ns {
            return None;
        }
        let entry = self.heap.pop()?;
        Some((entry.at_ns, entry.event))
    }
}

//! The requesting side of the data path, without I/O: batches of requests go in, frames and copies come out.
//!
//! A [`Batch`](BatchId) is validated as a whole, split into *tasks* (one for each request) and *slices* (one for each
//! object, several for a large range of a segment; requests that touch each other share slices). A slice is routed to
//! the owner of its key, waits there for its turn, is bound to a *lane* (connection) of the *rail* that will have it
//! done first, retried on another within its budget, and completed once. A batch completes when its last task does.
//!
//! The host feeds [`Client`] frames, connection events, finished copies and time, and drains [`Client::poll_output`].
//!
//! Quiescence: a task is complete only when nothing can touch its memory any more. A reply to a put comes after the
//! whole payload was taken; a slice whose deadline passes while it is on the wire completes only after its lane was
//! reset and the host has said that all I/O of the lane has ended ([`Client::lane_gone`]).
//!
//! Order: what a peer has received on a lane that was lost, and not carried out, it never carries out after anything
//! that was asked later: it is told first that the lane is over (`fences`).
//!
//! Not here: sockets, memory (only [`Local`] names it), clocks (`now_ns` is an argument), and the choice of
//! transport, which the host reports when a lane is connected.

#![forbid(unsafe_code)]

mod asks;
mod bulk;
mod dispatch;
mod drafts;
mod fences;
mod flush;
mod free_list;
mod gather;
mod intake;
mod lane;
mod leases;
mod make;
mod metrics;
mod near;
mod options;
mod outbox;
mod path;
mod peers;
mod proof;
mod puts;
mod recover;
mod reply;
mod route;
pub mod sched;
mod second;
mod sources;
mod submit;
mod table;
mod timers;
mod types;
mod waiting;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

pub use bulk::{Copies, RowCopy};
use dispatch::{Group, RailEntry};
pub use drafts::PeerIncarnation;
use fences::Fences;
use free_list::FreeList;
use lane::Lane;
pub use lane::{Endpoint, EndpointEvent};
pub use metrics::{Counters, Failovers, RailCounts, RailMetrics, SlowOperation};
pub use near::{Near, Nearness, NodeCounts, Place};
pub use options::{Intent, RailAddress, RailDevices, SubmitOptions};
use outbox::Outbox;
pub use path::{Path, PeerKind, Transport, Via};
pub use proof::Carrier;
pub use puts::PutBook;
pub use sources::Sources;
use table::{Batch, NOWHERE, Slice, Table, Wire};
pub use table::{SliceEvent, SliceState};
use timers::Timers;
pub use types::{
    Config, DeviceCopy, LaneId, Local, Output, PayloadTo, PeerAddress, PeerId, Request, SegmentTarget, SliceId,
    SubmitError, TaskResult,
};

use kvplane_proto::ids::{BatchId, Epoch, SLOTS, Slot};
use kvplane_proto::map::{ClusterMap, OwnerTable};
use kvplane_proto::message::Operation;
use kvplane_ticket::Credential;

use crate::sched::RetryBudget;

/// The asking side of the data path. Single-threaded; owned by one host loop.
pub struct Client {
    config: Config,
    /// What shards are shown that want a ticket, and how many proofs were made.
    credential: Option<Arc<Credential>>,
    proofs: u64,
    map: Option<(ClusterMap, OwnerTable)>,
    peers: FreeList<Peer>,
    peer_index: BTreeMap<PeerAddress, PeerId>,
    /// Incarnations of peers so far.
    incarnations: u32,
    /// What peers were to be told when they were left, oldest first.
    left_fences: VecDeque<(PeerAddress, Fences)>,
    lanes: FreeList<Lane>,
    rails: FreeList<RailEntry>,
    /// How near our devices are to our memory, and where each buffer of the host's is.
    near: Near,
    places: Vec<Place>,
    timers: Timers,
    /// Lanes that are on their way to be used.
    coming: u32,
    batches: Table<Batch>,
    /// Those of the batch that is being submitted.
    stretches: Vec<intake::Stretch>,
    /// What the next batch asks of many objects at once.
    asking: asks::ExistenceBatch,
    /// Runs of slices that were bound together so far, by lane.
    runs: u64,
    slices: Table<Slice>,
    wires: Table<Wire>,
    outbox: Outbox,
    /// Lanes with something to send.
    dirty: VecDeque<u32>,
    /// Groups with something that waits and may have room now: peer, and number.
    dirty_groups: VecDeque<(u32, u8)>,
    early: second::Earliness,
    /// Objects that both owners have, and turns taken between two that are as good.
    leases: leases::Leases,
    turns: u64,
    /// Who keeps copies of each slot, whatever a map says.
    seconds: Option<Vec<Option<PeerId>>>,
    /// Whom to ask for each slot, whatever a map says, and the epoch to ask by.
    sources: Option<(Epoch, Vec<Option<PeerId>>)>,
    /// Peers of the map's owners, found on first use: one row for each member.
    owner_peers: Vec<Vec<Option<PeerId>>>,
    /// Segments' descriptions that nobody has taken yet.
    descriptions: BTreeMap<BatchId, Vec<u8>>,
    counters: Counters,
    books: metrics::Books,
    /// When a newer map was last asked for, since the last one came.
    map_wanted_ns: Option<u64>,
    /// The latest time that an input brought.
    now_ns: u64,
}

/// A shard that requests go to, and its paths in the order of preference: shared memory, if any, first.
struct Peer {
    address: PeerAddress,
    groups: Vec<Group>,
    /// Tells it from all others that had its place or have the same address.
    incarnation: PeerIncarnation,
    /// How near its devices are to its memory, where it told.
    near: Near,
    retries: RetryBudget,
    fences: Fences,
    /// Estimated 99th percentile of the time of its gets; 0 before the first.
    tail_ns: u64,
    /// The caller knows its id: it stays for good. Others come and go with the maps.
    pinned: bool,
    /// Not in the map any more: its place is free when its last lane is gone.
    departed: bool,
}

impl Client {
    /// A client that knows nobody yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            credential: None,
            proofs: 0,
            map: None,
            peers: FreeList::new(),
            peer_index: BTreeMap::new(),
            incarnations: 0,
            left_fences: VecDeque::new(),
            lanes: FreeList::new(),
            rails: FreeList::new(),
            near: Near::default(),
            places: Vec::new(),
            timers: Timers::default(),
            coming: 0,
            batches: Table::new(),
            stretches: Vec::new(),
            asking: asks::ExistenceBatch::new(),
            runs: 0,
            slices: Table::new(),
            wires: Table::new(),
            outbox: Outbox::default(),
            dirty: VecDeque::new(),
            dirty_groups: VecDeque::new(),
            early: second::Earliness::new(),
            leases: leases::Leases::default(),
            turns: 0,
            seconds: None,
            sources: None,
            owner_peers: Vec::new(),
            descriptions: BTreeMap::new(),
            counters: Counters::default(),
            books: metrics::Books::default(),
            map_wanted_ns: None,
            now_ns: 0,
        }
    }

    /// Routes by `map` from now on, unless a newer one is in use.
    pub fn set_map(&mut self, map: ClusterMap, now_ns: u64) {
        self.now_ns = now_ns;
        if self.map.as_ref().is_some_and(|(old, _)| old.epoch >= map.epoch) {
            return;
        }
        let owners = OwnerTable::compute(&map);
        self.owner_peers = map.members.iter().map(|member| vec![None; member.shards.len()]).collect();
        self.map = Some((map, owners));
        self.map_wanted_ns = None;
        self.leases.end();
        self.leave_departed();
        self.unpark(u64::MAX);
    }

    /// Routes by `map` from now on, whatever the epoch of the one in use: it is of another state of the control plane,
    /// whose epochs say nothing about those of the first.
    pub fn adopt_map(&mut self, map: ClusterMap, now_ns: u64) {
        self.map = None;
        self.set_map(map, now_ns);
    }

    /// Asks these peers for the objects of each slot from now on, by the map of this epoch; nobody where there is none.
    /// For who asks former owners: a map is not used.
    pub fn set_sources(&mut self, epoch: Epoch, source: impl Fn(Slot) -> Option<PeerId>, now_ns: u64) {
        self.now_ns = now_ns;
        self.sources = Some((epoch, (0..SLOTS as u16).map(|slot| source(Slot(slot))).collect()));
        self.unpark(u64::MAX);
    }

    /// Epoch of the map in use; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        if let Some((epoch, _)) = &self.sources {
            return *epoch;
        }
        self.map.as_ref().map_or(Epoch(0), |(map, _)| map.epoch)
    }

    /// The next thing for the host to do. Ask for a frame's [`Self::body`] and [`Self::payload`] before
    /// draining further.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outbox.recycle();
        // A flush may send a slice to another lane, which is then flushed in its turn.
        while self.outbox.is_empty() && !(self.dirty.is_empty() && self.dirty_groups.is_empty()) {
            self.flush_dirty();
        }
        self.outbox.pop()
    }

    /// Whether there is something for the host to do that was decided already.
    #[must_use]
    pub fn has_output(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// The body of an [`Output::Send`]; valid until `poll_output` has returned `None`.
    #[must_use]
    pub fn body(&self, range: core::ops::Range<usize>) -> &[u8] {
        self.outbox.body(range)
    }

    /// The memory of an [`Output::Send`]'s payload, in order; valid as long as its body.
    #[must_use]
    pub fn payload(&self, range: core::ops::Range<usize>) -> &[Local] {
        self.outbox.payload(range)
    }

    /// Where the payload of the answer to this request goes, if it is one range: a host may have it put there.
    #[must_use]
    pub fn answer_memory(&self, request: kvplane_proto::ids::RequestId) -> Option<Local> {
        let wire = self.wires.get(request.index, request.generation)?;
        match (wire.operation, &wire.slices[..]) {
            (Operation::Get | Operation::GetRange | Operation::Read, &[slice]) if slice != NOWHERE => {
                self.slices.peek(slice).request.local()
            }
            _ => None,
        }
    }

    /// When [`Self::handle_timeout`] wants to be called, in the host's nanoseconds; to be asked when `poll_output` has
    /// returned `None`.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        self.timers.next_ns()
    }

    /// Whether `batch` has completed. A batch that was released counts as complete.
    #[must_use]
    pub fn is_complete(&self, batch: BatchId) -> bool {
        is_complete(&self.batches, batch)
    }

    /// The results of a complete batch, in the order of its requests; empty for a stale id.
    #[must_use]
    pub fn results(&self, batch: BatchId) -> &[TaskResult] {
        self.batches.get(batch.index, batch.generation).map_or(&[], |batch| &batch.results)
    }

    /// A task that has ended since the last call, by its batch and position, where [`Config::report_tasks`] asks for
    /// it. Nothing touches its memory any more. To be drained before its batch is released.
    pub fn poll_finished(&mut self) -> Option<(BatchId, u32, TaskResult)> {
        while let Some((batch, task)) = self.outbox.take_report() {
            if let Some(entry) = self.batches.get(batch.index, batch.generation) {
                return Some((batch, task, entry.results[task as usize]));
            }
        }
        None
    }

    /// Forgets a complete batch.
    ///
    /// # Panics
    /// When the batch is not complete: its memory may still be in use.
    pub fn release(&mut self, batch: BatchId) {
        if let Some(entry) = self.batches.get(batch.index, batch.generation) {
            assert_eq!(entry.remaining, 0, "a batch was released before it was complete");
            let freed = self.batches.remove(batch.index, Batch::new());
            if freed.is_worth_keeping() {
                self.batches.recycle(freed);
            }
            self.descriptions.remove(&batch);
        }
    }

    /// The encoded [`SegmentDescriptor`](kvplane_proto::message::SegmentDescriptor) that answered a
    /// [`Request::OpenSegment`] of this batch; the last one's, where there were several. To be taken before the batch
    /// is released.
    pub fn take_description(&mut self, batch: BatchId) -> Option<Vec<u8>> {
        self.descriptions.remove(&batch)
    }

    /// What happened so far.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether connections are on their way: somebody has to look after those even where no batch is open, or they are
    /// never there when one is.
    #[must_use]
    pub const fn is_connecting(&self) -> bool {
        self.coming > 0
    }

    /// Batches that are not yet released.
    #[must_use]
    pub fn open_batches(&self) -> usize {
        self.batches.len()
    }
}

/// True for a batch of which nothing is left to do, and for one that was released.
fn is_complete(batches: &Table<Batch>, batch: BatchId) -> bool {
    batches.get(batch.index, batch.generation).is_none_or(|batch| batch.remaining == 0)
}

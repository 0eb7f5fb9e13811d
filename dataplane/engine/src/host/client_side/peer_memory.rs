//! Device memory of peers on this host, mapped here: the initiator's devices copy from and to it, without the peer and
//! without pinned memory in between.
//!
//! The peer gives a handle of a segment's memory over the connection of shared memory, to a process of its own user,
//! and only if peers may write the segment, as no mapping of a device is read-only. Each batch requests the memory of
//! its segments anew; the peer checks each time that it is still the allocation that was registered, and answers with
//! its buffer id, by which the mapping is found again. So memory that was freed, and perhaps allocated anew at the same
//! address, is not copied from or to: the requests are staged then, and the peer fails them. While copies are in
//! flight, their segments are held in the connection's fence.
//!
//! A mapping ends when the segment is unregistered, the connection ends, or this process has no buffer on the device
//! any more. If the peer does not share a segment, or it cannot be mapped, its requests are staged.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Weak};

use kvplane_client::{Client, PeerId, Request, SegmentTarget};
use kvplane_proto::{SegmentId, Status};
use kvplane_sys::cpu;
use kvplane_sys::device::{
    CopyQueue, CopyTicket, Device, DeviceCopy, DeviceError, DeviceId, DeviceMemory, DeviceRange, SharedAllocation,
    StreamHandle,
};
use kvplane_transport::shm::{HoldError, MemoryRequest, SegmentHold, SegmentMemory, ShareError};
use kvplane_transport::{ConnectionId, Shm};

use super::lanes::LaneLinks;
use crate::host::reactor::links::Link;
use crate::host::reports::PeerMemoryCounters;
use crate::staging::AllocationChecks;

/// Period of the sweep of mappings whose segments are gone.
const SWEEP_NS: u64 = 1_000_000_000;

/// Most requests for handles in flight: few enough for the socket's buffer.
const REQUESTS_MOST: usize = 64;

/// Connection and segment.
type Key = (ConnectionId, SegmentId);

/// Knowledge of a segment's memory.
enum Knowledge {
    /// None yet: the peer has not answered.
    Nothing,
    /// The peer shares it.
    Shared(Box<SharedAllocation>),
    /// The peer does not share it, or did not answer in time.
    Refused,
}

/// Segment of device memory.
struct PeerSegment {
    knowledge: Knowledge,
    /// Mappings by the device that has access; `None` if it could not be mapped for it.
    mappings: Vec<(DeviceId, Option<Arc<DeviceMemory>>)>,
    /// Hold of copies in flight.
    hold: Weak<SegmentHold>,
    /// Last batch that uses it.
    wanted: u64,
    /// Last batch that the request in flight is made for.
    requested: Option<u64>,
    /// Last batch that the peer has confirmed the memory for.
    confirmed: u64,
}

impl PeerSegment {
    const fn new() -> Self {
        Self {
            knowledge: Knowledge::Nothing,
            mappings: Vec::new(),
            hold: Weak::new(),
            wanted: 0,
            requested: None,
            confirmed: 0,
        }
    }
}

/// Copies in flight of one piece, and what they hold.
struct InFlight {
    ticket: CopyTicket,
    token: usize,
    bytes: u64,
    write: bool,
    /// Held while the copies are in flight. An engine of a lost device may write for as long as it likes: then they
    /// are never released.
    holds: Vec<Arc<SegmentHold>>,
}

/// Copies of one device.
struct PeerQueue {
    queue: CopyQueue,
    in_flight: VecDeque<InFlight>,
    /// True once the device is lost: nothing is copied any more.
    lost: bool,
    /// True if it is to be closed when nothing is in flight.
    closing: bool,
}

/// Memory of this process at one end of a request.
pub(crate) enum OwnSide<'a> {
    /// Memory of a device, which makes the copy.
    Device(&'a Arc<Device>),
    /// Memory of the host: the peer's device makes the copy, if it is one of these.
    Host(&'a [Arc<Device>]),
}

/// Path of a request between memory of this process and a segment.
pub(crate) enum PeerPath {
    /// By requests to the peer.
    Requests,
    /// Not known yet: the peer has not answered.
    Unknown,
    /// By copies from or to the mapped memory.
    Mapped(PeerRange),
}

/// Mapped range of a segment.
pub(crate) struct PeerRange {
    /// Device that makes the copies.
    pub(crate) device: Arc<Device>,
    /// Memory.
    pub(crate) range: DeviceRange,
    /// Hold of the segment.
    pub(crate) hold: Arc<SegmentHold>,
}

/// Copies of a piece between memory of this process and mapped memory, all of one device and in one direction.
pub(crate) struct PeerCopies {
    /// Device.
    pub(crate) device: Arc<Device>,
    /// Copies.
    pub(crate) copies: Vec<DeviceCopy>,
    /// Holds of their segments.
    pub(crate) holds: Vec<Arc<SegmentHold>>,
    /// True if they write to the peer.
    pub(crate) write: bool,
}

/// Mappings of one host.
#[derive(Default)]
pub(crate) struct PeerMappings {
    entries: HashMap<Key, PeerSegment>,
    queues: BTreeMap<DeviceId, PeerQueue>,
    to_request: VecDeque<Key>,
    /// Number of batches so far.
    batches: u64,
    /// Pieces whose copies are done, or have failed.
    done: VecDeque<(usize, Result<(), Status>)>,
    problem: Option<String>,
    counters: PeerMemoryCounters,
    sweep_at_ns: u64,
}

impl PeerMappings {
    /// Returns the counters.
    pub(super) const fn counters(&self) -> PeerMemoryCounters {
        self.counters
    }

    /// Counts the mappings, after a change.
    fn count_mappings(&mut self) {
        let mapped = self.entries.values().flat_map(|entry| &entry.mappings).filter(|(_, memory)| memory.is_some());
        self.counters.mappings = mapped.count() as u64;
    }

    /// Drops the mappings of a connection that has ended. Copies in flight hold theirs.
    pub(super) fn forget(&mut self, id: ConnectionId) {
        self.entries.retain(|(of, _), _| *of != id);
        self.count_mappings();
    }

    /// Periodically drops mappings whose segments are gone.
    pub(super) fn sweep(&mut self, shm: &Shm, now_ns: u64) {
        if self.entries.is_empty() || now_ns < self.sweep_at_ns {
            return;
        }
        self.sweep_at_ns = now_ns.saturating_add(SWEEP_NS);
        self.entries.retain(|&(id, segment), _| shm.extent(id, segment).is_some());
        self.count_mappings();
    }

    /// Takes the answer to a request.
    pub(super) fn take_answer(&mut self, key: Key, memory: Result<SegmentMemory, ShareError>) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let Some(requested) = entry.requested.take() else { return };
        match memory {
            Ok(SegmentMemory::Device(shared)) => {
                if !matches!(&entry.knowledge, Knowledge::Shared(known) if is_same(known, &shared)) {
                    entry.mappings.clear();
                    entry.knowledge = Knowledge::Shared(shared);
                }
                entry.confirmed = requested;
            }
            Ok(SegmentMemory::Known) if matches!(entry.knowledge, Knowledge::Shared(_)) => entry.confirmed = requested,
            other => {
                entry.mappings.clear();
                entry.knowledge = Knowledge::Refused;
                self.counters.refused += 1;
                if let Err(why @ (ShareError::Late | ShareError::TooLarge { .. } | ShareError::Map(_))) = other {
                    self.problem = Some(why.to_string());
                }
            }
        }
        if entry.wanted > entry.confirmed && !matches!(entry.knowledge, Knowledge::Refused) {
            self.to_request.push_back(key);
        }
        self.count_mappings();
    }

    /// Has a segment's memory confirmed for a batch.
    fn want(&mut self, key: Key, batch: u64) {
        let entry = self.entries.entry(key).or_insert_with(PeerSegment::new);
        if entry.wanted >= batch || matches!(entry.knowledge, Knowledge::Refused) {
            return;
        }
        let is_queued = entry.requested.is_some() || entry.wanted > entry.confirmed;
        entry.wanted = batch;
        if !is_queued {
            self.to_request.push_back(key);
        }
    }

    /// Sends requests for memory, up to the limit of those in flight.
    fn send_requests(&mut self, shm: &mut Shm) {
        if self.to_request.is_empty() {
            return;
        }
        // A batch may begin long after the host's last round.
        let now_ns = cpu::monotonic_ns();
        let in_flight = self.entries.values().filter(|entry| entry.requested.is_some()).count();
        for _ in in_flight..REQUESTS_MOST {
            let Some(key) = self.to_request.pop_front() else { return };
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            let known = match &entry.knowledge {
                Knowledge::Shared(shared) => shared.buffer_id,
                Knowledge::Nothing | Knowledge::Refused => 0,
            };
            match shm.ask_segment(key.0, key.1, MemoryRequest::Device { known }, now_ns) {
                Ok(()) => entry.requested = Some(entry.wanted),
                Err(error) => {
                    entry.knowledge = Knowledge::Refused;
                    self.counters.refused += 1;
                    self.problem = Some(error.to_string());
                }
            }
        }
    }

    /// Returns the mapping of a segment for a device, which maps it if need be.
    fn mapping(&mut self, key: Key, device: &Arc<Device>) -> Option<(Arc<DeviceMemory>, u64)> {
        let entry = self.entries.get_mut(&key)?;
        let Knowledge::Shared(shared) = &entry.knowledge else { return None };
        let known = entry.mappings.iter().find(|(of, _)| *of == device.id());
        let memory = match known {
            Some((_, memory)) => memory.clone(),
            None => {
                let mapped = DeviceMemory::map(device, shared);
                if let Err(error) = &mapped {
                    self.counters.refused += 1;
                    self.problem = Some(error.to_string());
                }
                let memory = mapped.ok();
                entry.mappings.push((device.id(), memory.clone()));
                self.counters.mappings += u64::from(memory.is_some());
                memory
            }
        };
        Some((memory?, shared.offset))
    }

    /// Returns the queue of a device.
    fn queue(&mut self, device: &Arc<Device>) -> Result<&mut PeerQueue, DeviceError> {
        let queue = match self.queues.entry(device.id()) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let queue = CopyQueue::new(device)?;
                let (in_flight, lost, closing) = (VecDeque::new(), false, false);
                entry.insert(PeerQueue { queue, in_flight, lost, closing })
            }
        };
        queue.closing = false;
        Ok(queue)
    }

    fn copy(&mut self, token: usize, copies: PeerCopies) -> Result<(), DeviceError> {
        let PeerCopies { device, copies, holds, write } = copies;
        AllocationChecks::all(copies.iter().flat_map(DeviceCopy::ranges).map(DeviceRange::memory))?;
        let bytes: u64 = copies.iter().filter_map(|copy| copy.ranges().next()).map(DeviceRange::bytes).sum();
        let queue = self.queue(&device)?;
        let ticket = match queue.queue.copy(copies) {
            Ok(ticket) => ticket,
            Err(error) => {
                queue.lost |= error.is_lost();
                if error.is_lost() {
                    std::mem::forget(holds);
                }
                return Err(error);
            }
        };
        queue.in_flight.push_back(InFlight { ticket, token, bytes, write, holds });
        self.counters.batches += 1;
        Ok(())
    }

    fn poll(&mut self) {
        let Self { queues, done, problem, counters, .. } = self;
        queues.retain(|_, queue| {
            if !queue.in_flight.is_empty() {
                match queue.queue.poll() {
                    Ok(open) => {
                        let ended = queue.in_flight.partition_point(|one| one.ticket < open);
                        for InFlight { token, bytes, write, .. } in queue.in_flight.drain(..ended) {
                            *(if write { &mut counters.written_bytes } else { &mut counters.read_bytes }) += bytes;
                            done.push_back((token, Ok(())));
                        }
                    }
                    Err(error) => {
                        queue.lost |= error.is_lost();
                        *problem = Some(error.to_string());
                        if queue.lost {
                            done.extend(queue.in_flight.drain(..).map(|one| {
                                std::mem::forget(one.holds);
                                (one.token, Err(Status::DeviceFailed))
                            }));
                        }
                    }
                }
            }
            !queue.closing || !queue.in_flight.is_empty()
        });
    }
}

/// Returns true if two answers are about one allocation, and one place in it.
fn is_same(known: &SharedAllocation, shared: &SharedAllocation) -> bool {
    let of = |one: &SharedAllocation| (one.process, one.buffer_id, one.bytes, one.offset);
    known.buffer_id != 0 && of(known) == of(shared)
}

/// Device memory of peers, with the connections of its host.
pub(crate) struct PeerMemory<'a> {
    pub(super) mappings: &'a mut PeerMappings,
    pub(super) client: &'a Client,
    pub(super) lanes: &'a LaneLinks,
    pub(super) shm: &'a mut Shm,
}

impl PeerMemory<'_> {
    /// Returns the segment of device memory that a request reads or writes, if its peer is on this host.
    fn segment_of(&self, request: &Request) -> Option<(Key, SegmentTarget)> {
        let (Request::Read(target, _) | Request::Write(target, _)) = request else { return None };
        if target.shareable {
            return None;
        }
        let key = (self.connection(target.peer)?, target.segment);
        let extent = self.shm.extent(key.0, key.1).filter(|extent| !extent.direct)?;
        let end = target.offset.checked_add(request.local()?.bytes)?;
        (end <= extent.bytes).then_some((key, *target))
    }

    fn connection(&self, peer: PeerId) -> Option<ConnectionId> {
        match self.lanes.get(self.client.metrics().shared_lane(peer)?) {
            Some(Link::Shm(id)) => Some(id),
            _ => None,
        }
    }

    /// Returns true if one of these requests is about device memory of a peer on this host.
    pub(crate) fn concerns(&self, requests: &[Request]) -> bool {
        requests.iter().any(|request| self.segment_of(request).is_some())
    }

    /// Begins a batch: requests the memory of its segments. Returns the number of the batch; `None` if it names no
    /// device memory of a peer on this host.
    pub(crate) fn begin_batch(&mut self, requests: &[Request]) -> Option<u64> {
        let batch = self.mappings.batches + 1;
        let mut last = None;
        for request in requests {
            let Some((key, _)) = self.segment_of(request) else { continue };
            if last != Some(key) {
                self.mappings.want(key, batch);
                last = Some(key);
            }
        }
        last?;
        self.mappings.batches = batch;
        self.mappings.send_requests(self.shm);
        Some(batch)
    }

    /// Makes later copies of a device wait for everything that a caller has enqueued on its stream so far.
    ///
    /// # Errors
    /// If the device is lost, or the stream is not of its family.
    pub(crate) fn wait_for(&mut self, device: &Arc<Device>, stream: StreamHandle) -> Result<(), DeviceError> {
        let queue = self.mappings.queue(device)?;
        queue.queue.wait_for(stream).inspect_err(|error| queue.lost |= error.is_lost())
    }

    /// Returns the path of a request of a batch.
    pub(crate) fn path(&mut self, request: &Request, own: &OwnSide<'_>, batch: u64) -> PeerPath {
        let Some((key, target)) = self.segment_of(request) else { return PeerPath::Requests };
        let bytes = request.local().map_or(0, |local| local.bytes);
        self.mappings.want(key, batch);
        self.mappings.send_requests(self.shm);
        let Some(entry) = self.mappings.entries.get(&key) else { return PeerPath::Requests };
        let shared = match &entry.knowledge {
            Knowledge::Refused => return PeerPath::Requests,
            Knowledge::Shared(shared) if entry.confirmed >= batch => shared,
            Knowledge::Shared(_) | Knowledge::Nothing => return PeerPath::Unknown,
        };
        let device = match own {
            OwnSide::Device(device) => Some(*device),
            OwnSide::Host(devices) => {
                let is_same = |device: &&Arc<Device>| {
                    device.id().family == shared.family && device.info().pci_number() == shared.pci && shared.pci != 0
                };
                devices.iter().find(is_same)
            }
        };
        let Some(device) = device.filter(|device| device.id().family == shared.family) else {
            return PeerPath::Requests;
        };
        if self.mappings.queues.get(&device.id()).is_some_and(|queue| queue.lost) {
            return PeerPath::Requests;
        }
        let Some((memory, offset)) = self.mappings.mapping(key, device) else { return PeerPath::Requests };
        let at = offset.saturating_add(target.offset);
        if at.checked_add(bytes).is_none_or(|end| end > memory.bytes()) {
            return PeerPath::Requests;
        }
        match self.hold(key) {
            Ok(hold) => {
                let range = DeviceRange::new(&memory, at, bytes);
                PeerPath::Mapped(PeerRange { device: Arc::clone(device), range, hold })
            }
            Err(HoldError::Busy) => PeerPath::Unknown,
            // The peer says what has become of it.
            Err(HoldError::Gone) => PeerPath::Requests,
        }
    }

    fn hold(&mut self, key: Key) -> Result<Arc<SegmentHold>, HoldError> {
        let entry = self.mappings.entries.get_mut(&key).ok_or(HoldError::Gone)?;
        if let Some(hold) = entry.hold.upgrade() {
            // New copies begin only while the segment is live.
            return self.shm.extent(key.0, key.1).map(|_| hold).ok_or(HoldError::Gone);
        }
        let hold = Arc::new(self.shm.hold(key.0, key.1)?);
        entry.hold = Arc::downgrade(&hold);
        Ok(hold)
    }

    /// Begins the copies of a piece. Their end is returned by [`Self::poll_done`].
    pub(crate) fn copy(&mut self, token: usize, copies: PeerCopies) {
        if let Err(error) = self.mappings.copy(token, copies) {
            self.mappings.problem = Some(error.to_string());
            self.mappings.done.push_back((token, Err(Status::DeviceFailed)));
        }
    }

    /// Sends requests that had to wait, and looks for copies that are done.
    pub(crate) fn poll(&mut self) {
        self.mappings.send_requests(self.shm);
        self.mappings.poll();
    }

    /// Returns a piece whose copies are done, or have failed.
    pub(crate) fn poll_done(&mut self) -> Option<(usize, Result<(), Status>)> {
        self.mappings.done.pop_front()
    }

    /// Returns and clears the text of the last error.
    pub(crate) const fn take_problem(&mut self) -> Option<String> {
        self.mappings.problem.take()
    }

    /// Returns true if copies are in flight, or their end was not taken yet: no event announces it.
    pub(crate) fn is_busy(&self) -> bool {
        !self.mappings.done.is_empty() || self.mappings.queues.values().any(|queue| !queue.in_flight.is_empty())
    }

    /// Ends the mappings for a device on which this process has no buffer any more.
    pub(crate) fn close_device(&mut self, device: DeviceId) {
        for entry in self.mappings.entries.values_mut() {
            entry.mappings.retain(|(of, _)| *of != device);
        }
        self.mappings.count_mappings();
        if let Some(queue) = self.mappings.queues.get_mut(&device) {
            queue.closing = true;
        }
        self.mappings.poll();
    }
}

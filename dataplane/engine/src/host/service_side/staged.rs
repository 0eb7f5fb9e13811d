//! Segments of device memory, and the device pool: payloads of requests for them pass through pinned memory.
//!
//! The payload of a read is copied from the device before its answer is sent; that of a write is received into a chunk,
//! copied to the device, and answered then. Requests for which there is no chunk wait in their order: an answer in a
//! queue, the payload of a write in its connection, which is not read meanwhile.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use kvplane_proto::frame::Header;
use kvplane_proto::{SegmentId, Status};
use kvplane_store::service::{DetachedWrite, Hold, Memory, MemoryExtent, PeerKey};
use kvplane_sys::device::{Device, DeviceCopy, DeviceError, DeviceId, DeviceMemory, DeviceRange};
use kvplane_sys::{IoBuf, Region};
use kvplane_transport::{Pieces, Target};

use super::memory::ServedMemory;
use crate::host::reactor::links::Link;
use crate::staging::{ALIGN_BYTES, Chunk, Stage, StagingCounters};

/// Time that a request waits for a chunk before it is refused as `Busy`, in nanoseconds: less than half of the time
/// after which a client takes a lane for stalled.
const WAIT_NS: u64 = 40_000_000;

/// Time after which a connection that keeps a chunk, because it neither sends nor takes its payload, is closed if
/// others wait for chunks, in nanoseconds.
const HOLD_NS: u64 = 1_000_000_000;

/// Most requests that wait for chunks.
const WAITING_MOST: usize = 4096;

/// Answer to a read, without its payload.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) peer: PeerKey,
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) hold: Hold,
}

/// Payload of a write that a connection is about to send.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) link: Link,
    /// True to compute the payload's checksum.
    pub(super) checksum: bool,
}

/// Request without chunks.
#[derive(Debug)]
pub(super) enum Request {
    Read(Answer),
    Write(Arrival),
}

impl Request {
    /// Returns the connection of its peer.
    fn link(&self) -> Link {
        match self {
            Self::Read(answer) => Link::of_peer(answer.peer),
            Self::Write(arrival) => arrival.link,
        }
    }
}

/// Request whose copies or payload wait for chunks.
struct WaitingRequest {
    request: Request,
    extents: Vec<MemoryExtent>,
    /// Devices of the extents.
    devices: Vec<DeviceId>,
    until_ns: u64,
}

/// Layout of a request's payload in chunks.
struct Layout {
    chunks: Vec<(DeviceId, Chunk)>,
    /// Payload in the host's memory, in order.
    payload: Vec<IoBuf>,
    /// Copies that have not begun: of a read, from the devices; of a write, to them.
    copies: Vec<(DeviceId, DeviceCopy)>,
}

/// Request with chunks.
struct StagedRequest {
    step: Step,
    link: Link,
    /// Time at which its step began that depends on the peer.
    since_ns: u64,
    layout: Layout,
    /// Devices whose copies are in flight.
    copying: usize,
    status: Status,
}

/// Step of a request with chunks.
enum Step {
    /// The payload of a read is copied from devices.
    Reading(Answer),
    /// The payload of an answer is being sent.
    Sending,
    /// The payload of a write is being received.
    Receiving,
    /// The payload of a write is copied to devices.
    Writing(DetachedWrite),
}

/// Reason why a request gets no chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoChunks {
    /// None are free at present.
    NotNow,
    /// The payload is too long, or its chunk cannot be pinned.
    Never(Status),
}

/// Next step of a request for the host.
pub(super) enum Next {
    /// Send this answer with this payload; [`DeviceSegments::sent`] is called with the number afterwards.
    Send(Answer, Pieces, u32),
    /// Refuse this read.
    RefuseRead(Answer, Status),
    /// Answer this write.
    Answer(DetachedWrite, Status),
    /// Receive the payload of this connection's last frame.
    Receive(Link, Target),
    /// Refuse the write of this connection's last frame.
    RefuseWrite(Link, Status),
    /// Close this connection, which keeps a chunk that others wait for.
    Close(Link),
}

impl Next {
    /// Returns true if it is about the payload that a connection sends.
    fn is_of_payload(&self, link: Link) -> bool {
        matches!(self, Self::Receive(of, _) | Self::RefuseWrite(of, _) if *of == link)
    }
}

/// Segments of device memory and the device pool, and requests for them.
#[derive(Default)]
pub(super) struct DeviceSegments {
    memory: HashMap<SegmentId, Arc<DeviceMemory>>,
    /// Device pool of the service's store, if there is one.
    pool: Option<Arc<DeviceMemory>>,
    stages: BTreeMap<DeviceId, Stage<usize>>,
    /// Counters of stages that were closed.
    closed: BTreeMap<DeviceId, StagingCounters>,
    requests: slab::Slab<StagedRequest>,
    waiting: VecDeque<WaitingRequest>,
    /// Request whose payload each connection is sending.
    arriving: Vec<(Link, usize)>,
    next: VecDeque<Next>,
}

impl DeviceSegments {
    /// Returns true if no segment was added, or all were removed and their requests are over.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.stages.is_empty()
    }

    /// Opens the stage of a device, unless it is open. Returns its region if it was not.
    ///
    /// # Errors
    /// If the host has too little memory to pin, or the device is lost.
    pub(super) fn open_stage(&mut self, device: &Arc<Device>) -> Result<Option<Arc<Region>>, DeviceError> {
        if self.stages.contains_key(&device.id()) {
            return Ok(None);
        }
        let stage = Stage::open(device)?;
        let region = Arc::clone(stage.region());
        self.stages.insert(device.id(), stage);
        Ok(Some(region))
    }

    /// Adds a segment; the stage of its device is open.
    pub(super) fn add(&mut self, segment: SegmentId, memory: Arc<DeviceMemory>) {
        self.memory.insert(segment, memory);
    }

    /// Sets the device pool; the stage of its device is open.
    pub(super) fn set_pool(&mut self, pool: Arc<DeviceMemory>) {
        self.pool = Some(pool);
    }

    /// Removes a segment, which no request uses.
    pub(super) fn remove(&mut self, segment: SegmentId) {
        self.memory.remove(&segment);
    }

    /// Closes the stages of devices without segments and requests, and passes the region of each to `forget`.
    pub(super) fn close_unused(&mut self, mut forget: impl FnMut(&Arc<Region>)) {
        let Self { stages, memory, pool, closed, .. } = self;
        stages.retain(|id, stage| {
            let is_used = !stage.is_idle() || memory.values().chain(&*pool).any(|memory| memory.device().id() == *id);
            if !is_used {
                forget(stage.region());
                stage.take_retired(true).iter().for_each(&mut forget);
                closed.entry(*id).or_default().add(stage.counters());
            }
            is_used
        });
    }

    /// Returns true if one of these extents is in a segment of device memory, or in the device pool.
    #[inline]
    pub(super) fn concern(&self, extents: &[MemoryExtent]) -> bool {
        !self.stages.is_empty() && extents.iter().any(|extent| self.memory_of(extent).is_some())
    }

    /// Returns the memory of a segment of a device.
    pub(super) fn memory(&self, segment: SegmentId) -> Option<&Arc<DeviceMemory>> {
        self.memory.get(&segment)
    }

    fn memory_of(&self, extent: &MemoryExtent) -> Option<&Arc<DeviceMemory>> {
        match extent.memory {
            Memory::Pool => None,
            Memory::DevicePool => self.pool.as_ref(),
            Memory::Segment(segment) => self.memory.get(&segment),
        }
    }

    /// Returns true if no more requests may wait: a peer's further reads are refused at once.
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= WAITING_MOST
    }

    /// Takes a request for these extents. Its next step is returned by [`Self::poll_next`], at once for a write that
    /// gets chunks or never will.
    pub(super) fn take(&mut self, request: Request, extents: &[MemoryExtent], served: &ServedMemory, now_ns: u64) {
        let devices = self.devices_of(extents);
        let is_behind = self.waiting.iter().any(|other| other.devices.iter().any(|id| devices.contains(id)));
        let laid_out = if is_behind { Err(NoChunks::NotNow) } else { self.lay_out(&request, extents, served) };
        match laid_out {
            Ok(layout) => self.begin(request, layout, now_ns),
            Err(NoChunks::NotNow) if self.is_full() => self.refuse(request, Status::Busy),
            Err(NoChunks::NotNow) => {
                let until_ns = now_ns.saturating_add(WAIT_NS);
                self.waiting.push_back(WaitingRequest { request, extents: extents.to_vec(), devices, until_ns });
            }
            Err(NoChunks::Never(status)) => self.refuse(request, status),
        }
    }

    /// Returns the devices of extents, in order.
    fn devices_of(&self, extents: &[MemoryExtent]) -> Vec<DeviceId> {
        let devices = extents.iter().filter_map(|extent| Some(self.memory_of(extent)?.device().id()));
        let mut devices: Vec<DeviceId> = devices.collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// Takes chunks for the extents of device memory, and lays out the payload.
    fn lay_out(
        &mut self,
        request: &Request,
        extents: &[MemoryExtent],
        served: &ServedMemory,
    ) -> Result<Layout, NoChunks> {
        let mut needed: BTreeMap<DeviceId, u64> = BTreeMap::new();
        for memory_and_extent in extents.iter().filter_map(|extent| Some((self.memory_of(extent)?, extent))) {
            let (memory, extent) = memory_and_extent;
            let bytes = needed.entry(memory.device().id()).or_default();
            *bytes = (*bytes + extent.bytes).next_multiple_of(ALIGN_BYTES);
        }
        let mut chunks: Vec<(DeviceId, Chunk)> = Vec::new();
        for (&id, &bytes) in &needed {
            let stage = self.stages.get_mut(&id).expect("a device with segments has a stage");
            let missing = match stage.take(bytes as usize) {
                Ok(Some(chunk)) => {
                    chunks.push((id, chunk));
                    continue;
                }
                Ok(None) => NoChunks::NotNow,
                Err(status) => NoChunks::Never(status),
            };
            self.release(chunks);
            return Err(missing);
        }
        let (mut payload, mut copies) = (Vec::new(), Vec::new());
        let mut used: BTreeMap<DeviceId, u64> = BTreeMap::new();
        for extent in extents {
            let Some(memory) = self.memory_of(extent) else {
                payload.push(served.of(*extent));
                continue;
            };
            let id = memory.device().id();
            let at = used.entry(id).or_default();
            let chunk = chunks.iter().find(|(of, _)| *of == id).map(|(_, chunk)| chunk);
            let chunk = chunk.expect("each device of the extents has a chunk");
            let host = chunk.slice(*at as usize, extent.bytes as usize);
            *at = (*at + extent.bytes).next_multiple_of(ALIGN_BYTES);
            payload.push(host.clone());
            let range = DeviceRange::new(memory, extent.offset, extent.bytes);
            let copy = match request {
                Request::Read(_) => DeviceCopy::ToHost { from: range, to: host },
                Request::Write(_) => DeviceCopy::ToDevice { from: host, to: range },
            };
            copies.push((id, copy));
        }
        Ok(Layout { chunks, payload, copies })
    }

    fn release(&mut self, chunks: Vec<(DeviceId, Chunk)>) {
        for (id, chunk) in chunks {
            if let Some(stage) = self.stages.get_mut(&id) {
                stage.release(chunk);
            }
        }
    }

    fn begin(&mut self, request: Request, layout: Layout, now_ns: u64) {
        let link = request.link();
        let staged =
            StagedRequest { step: Step::Receiving, link, since_ns: now_ns, layout, copying: 0, status: Status::Ok };
        let key = self.requests.insert(staged);
        match request {
            Request::Read(answer) => {
                self.requests[key].step = Step::Reading(answer);
                self.copy(key);
            }
            Request::Write(Arrival { checksum, .. }) => {
                let target = match &self.requests[key].layout.payload[..] {
                    [buffer] => Target::Memory { buffer: buffer.clone(), checksum },
                    buffers => Target::Scatter { buffers: buffers.to_vec(), checksum },
                };
                self.arriving.push((link, key));
                self.next.push_back(Next::Receive(link, target));
            }
        }
    }

    fn refuse(&mut self, request: Request, status: Status) {
        self.next.push_back(match request {
            Request::Read(answer) => Next::RefuseRead(answer, status),
            Request::Write(Arrival { link, .. }) => Next::RefuseWrite(link, status),
        });
    }

    /// Starts the copies of a request.
    fn copy(&mut self, key: usize) {
        let mut by_device: BTreeMap<DeviceId, Vec<DeviceCopy>> = BTreeMap::new();
        for (id, copy) in std::mem::take(&mut self.requests[key].layout.copies) {
            by_device.entry(id).or_default().push(copy);
        }
        self.requests[key].copying = by_device.len();
        for (id, copies) in by_device {
            self.stages.get_mut(&id).expect("the stage of a chunk in use").copy(key, copies);
        }
    }

    /// Returns true if a connection is sending a payload into chunks.
    #[inline]
    pub(super) fn is_receiving(&self, link: Link) -> bool {
        self.arriving.iter().any(|(other, _)| *other == link)
    }

    /// Handles the end of a payload that a connection has sent. `write` answers the request when the payload is at its
    /// destination; `None` if the request was answered already.
    pub(super) fn received(&mut self, link: Link, write: Option<DetachedWrite>) {
        let Some(position) = self.arriving.iter().position(|(other, _)| *other == link) else { return };
        let (_, key) = self.arriving.swap_remove(position);
        match write {
            Some(write) => {
                self.requests[key].step = Step::Writing(write);
                self.copy(key);
            }
            None => self.end(key),
        }
    }

    /// Handles the end of a connection, none of whose I/O is in flight any more. Returns the holds of its answers that
    /// wait for chunks.
    pub(super) fn gone(&mut self, link: Link) -> Vec<Hold> {
        self.received(link, None);
        let all = std::mem::take(&mut self.waiting).into_iter();
        let (gone, waiting): (VecDeque<_>, VecDeque<_>) = all.partition(|one| one.request.link() == link);
        self.waiting = waiting;
        let holds = |one: WaitingRequest| match one.request {
            Request::Read(answer) => Some(answer.hold),
            Request::Write(_) => None,
        };
        gone.into_iter().filter_map(holds).collect()
    }

    /// Releases the chunks of an answer whose payload has left, or never will.
    pub(super) fn sent(&mut self, number: u32) {
        self.end(number as usize);
    }

    fn end(&mut self, key: usize) {
        let staged = self.requests.remove(key);
        self.release(staged.layout.chunks);
    }

    /// Takes copies that are done, and gives free chunks to waiting requests. Returns true if there is a next step of
    /// any request.
    pub(super) fn poll(&mut self, served: &ServedMemory, now_ns: u64) -> bool {
        let mut copied = Vec::new();
        for stage in self.stages.values_mut() {
            if stage.poll(now_ns) {
                copied.extend(std::iter::from_fn(|| stage.poll_done()));
            }
        }
        for (key, result) in copied {
            self.copied(key, result, now_ns);
        }
        self.serve_waiting(served, now_ns);
        !self.next.is_empty()
    }

    /// Gives free chunks to waiting requests in their order, which holds among those of a device.
    fn serve_waiting(&mut self, served: &ServedMemory, now_ns: u64) {
        let (mut left, mut blocked, mut is_late) = (VecDeque::new(), BTreeSet::new(), false);
        for waiting in std::mem::take(&mut self.waiting) {
            let is_behind = waiting.devices.iter().any(|id| blocked.contains(id));
            let laid_out = if is_behind {
                Err(NoChunks::NotNow)
            } else {
                self.lay_out(&waiting.request, &waiting.extents, served)
            };
            match laid_out {
                Ok(layout) => self.begin(waiting.request, layout, now_ns),
                Err(NoChunks::Never(status)) => self.refuse(waiting.request, status),
                Err(NoChunks::NotNow) if waiting.until_ns <= now_ns => {
                    is_late = true;
                    self.refuse(waiting.request, Status::Busy);
                }
                Err(NoChunks::NotNow) => {
                    blocked.extend(waiting.devices.iter().copied());
                    left.push_back(waiting);
                }
            }
        }
        self.waiting = left;
        if is_late {
            self.close_slowest(now_ns);
        }
    }

    /// Closes the connection that has kept a chunk longest without taking or sending its payload, if it is long.
    fn close_slowest(&mut self, now_ns: u64) {
        let depends = |staged: &&StagedRequest| matches!(staged.step, Step::Sending | Step::Receiving);
        let staged = self.requests.iter().map(|(_, staged)| staged).filter(depends);
        if let Some(slowest) = staged.min_by_key(|staged| staged.since_ns)
            && slowest.since_ns.saturating_add(HOLD_NS) <= now_ns
        {
            self.next.push_back(Next::Close(slowest.link));
        }
    }

    fn copied(&mut self, key: usize, result: Result<(), Status>, now_ns: u64) {
        let staged = &mut self.requests[key];
        staged.copying -= 1;
        if let Err(status) = result {
            staged.status = status;
        }
        if staged.copying > 0 {
            return;
        }
        let status = staged.status;
        staged.since_ns = now_ns;
        match std::mem::replace(&mut staged.step, Step::Sending) {
            Step::Reading(answer) if status == Status::Ok => {
                let payload = std::mem::take(&mut staged.layout.payload);
                self.next.push_back(Next::Send(answer, payload.into(), key as u32));
            }
            Step::Reading(answer) => {
                self.next.push_back(Next::RefuseRead(answer, status));
                self.end(key);
            }
            Step::Writing(write) => {
                self.next.push_back(Next::Answer(write, status));
                self.end(key);
            }
            Step::Sending | Step::Receiving => unreachable!("only reads and writes copy"),
        }
    }

    /// Returns the target of a connection's payload, or the status that refuses it; `None` if it waits for chunks. To
    /// be called right after [`Self::take`].
    pub(super) fn take_target(&mut self, link: Link) -> Option<Result<Target, Status>> {
        match self.next.pop_back_if(|next| next.is_of_payload(link))? {
            Next::Receive(_, target) => Some(Ok(target)),
            Next::RefuseWrite(_, status) => Some(Err(status)),
            Next::Send(..) | Next::RefuseRead(..) | Next::Answer(..) | Next::Close(_) => None,
        }
    }

    /// Returns the next step of a request.
    pub(super) fn poll_next(&mut self) -> Option<Next> {
        self.next.pop_front()
    }

    /// Submits the copies of this round. Returns the text of the last error, if there was one.
    pub(super) fn flush(&mut self, now_ns: u64) -> Option<String> {
        let mut problem = None;
        for stage in self.stages.values_mut() {
            stage.flush(now_ns);
            problem = stage.take_problem().or(problem);
        }
        problem
    }

    /// Returns true if copies are in flight: no event announces their end.
    pub(super) fn must_be_polled(&self) -> bool {
        self.stages.values().any(Stage::is_busy)
    }

    /// Returns the time at which the first waiting request is refused.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.waiting.iter().map(|waiting| waiting.until_ns).min()
    }

    /// Returns the counters of each device that had segments.
    pub(super) fn counters(&self) -> BTreeMap<DeviceId, StagingCounters> {
        let mut counters = self.closed.clone();
        for (id, stage) in &self.stages {
            counters.entry(*id).or_default().add(stage.counters());
        }
        counters
    }
}

//! Stage of one device.

use std::collections::VecDeque;
use std::sync::Arc;

use kvplane_proto::Status;
use kvplane_sys::device::{
    CopyQueue, CopyTicket, Device, DeviceCopy, DeviceError, DeviceRange, PinnedRegion, StreamHandle,
};
use kvplane_sys::{HugePages, IoBuf, Region, RegionOptions};

use super::allocation_checks::AllocationChecks;
use super::pace::Pace;
use super::pages::{PageRun, Pages};

/// Pinned memory of one stage in bytes. Enough for the copies of 0.3 ms in both directions at 25 GB/s, which covers the
/// round trip to a peer.
pub(crate) const STAGE_BYTES: usize = 16 << 20;

/// Bytes of copies from which on a batch takes no further request.
const APART_BYTES: u64 = 256 << 10;

/// Longest chunk in bytes: of one object, or of one payload.
pub(crate) const CHUNK_BYTES: usize = 1 << 30;

/// Counters of the staged copies of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingCounters {
    /// Bytes copied from the device.
    pub to_host_bytes: u64,
    /// Bytes copied to the device.
    pub to_device_bytes: u64,
    /// Batches of copies, each one call of the driver where it can.
    pub batches: u64,
    /// Requests whose copies failed.
    pub failed: u64,
    /// Most bytes of pinned memory that one thread had in use at one time.
    pub most_used_bytes: u64,
}

impl StagingCounters {
    /// Adds the counters of another stage, or of the same device's earlier one.
    pub const fn add(&mut self, other: &Self) {
        let Self { to_host_bytes, to_device_bytes, batches, failed, most_used_bytes } = *other;
        self.to_host_bytes += to_host_bytes;
        self.to_device_bytes += to_device_bytes;
        self.batches += batches;
        self.failed += failed;
        if self.most_used_bytes < most_used_bytes {
            self.most_used_bytes = most_used_bytes;
        }
    }
}

/// Direction of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    ToHost,
    ToDevice,
}

impl Direction {
    const fn of(copy: &DeviceCopy) -> Self {
        match copy {
            DeviceCopy::ToHost { .. } => Self::ToHost,
            DeviceCopy::ToDevice { .. } | DeviceCopy::Between { .. } => Self::ToDevice,
        }
    }
}

/// Batch of copies in flight.
struct Flight<T> {
    ticket: CopyTicket,
    requests: Vec<T>,
    bytes: u64,
}

/// Copies of one direction. `T` names the request that copies belong to.
struct Lane<T> {
    queue: CopyQueue,
    /// Copies that the next flush submits, with the request of each group and the group's number of copies.
    pending: Vec<DeviceCopy>,
    groups: Vec<(T, usize)>,
    in_flight: VecDeque<Flight<T>>,
    pace: Pace,
}

impl<T> Lane<T> {
    fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        let queue = CopyQueue::new(device)?;
        Ok(Self { queue, pending: Vec::new(), groups: Vec::new(), in_flight: VecDeque::new(), pace: Pace::new() })
    }

    /// Returns true if copies in flight should be done by now.
    fn is_due(&self, now_ns: u64) -> bool {
        !self.in_flight.is_empty() && self.pace.is_due(now_ns)
    }

    fn push(&mut self, flight: Flight<T>, now_ns: u64) {
        if self.in_flight.is_empty() {
            self.pace.begin(flight.bytes, now_ns);
        }
        self.in_flight.push_back(flight);
    }

    /// Removes the batches below the first one that is not done, and returns their requests.
    fn take_done(&mut self, open: CopyTicket, now_ns: u64) -> Vec<T> {
        let count = self.in_flight.partition_point(|flight| flight.ticket < open);
        self.pace.polled(count > 0, now_ns);
        let done: Vec<Flight<T>> = self.in_flight.drain(..count).collect();
        if let (Some(next), false) = (self.in_flight.front(), done.is_empty()) {
            self.pace.begin(next.bytes, now_ns);
        }
        done.into_iter().flat_map(|flight| flight.requests).collect()
    }

    fn is_busy(&self) -> bool {
        !self.groups.is_empty() || !self.in_flight.is_empty()
    }
}

/// Part of a stage's memory in use, which is returned by [`Stage::release`].
#[derive(Debug)]
#[must_use]
pub(crate) struct Chunk {
    memory: IoBuf,
    /// Pages of the stage's region; `None` if the chunk is its long one.
    run: Option<PageRun>,
}

impl Chunk {
    /// Returns the length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    /// Returns a range of the chunk.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(crate) fn slice(&self, from: usize, bytes: usize) -> IoBuf {
        self.memory.slice(from, bytes)
    }
}

/// Pinned memory of a chunk that does not fit the stage's region: kept for the next one.
struct LongChunk {
    pinned: PinnedRegion,
    in_use: bool,
}

/// Pinned memory and copies of one device. One thread uses it at a time.
pub(crate) struct Stage<T> {
    device: Arc<Device>,
    // Before the pinned memory, so that their drop has waited for the copies when the pinning ends.
    to_host: Lane<T>,
    to_device: Lane<T>,
    pinned: PinnedRegion,
    pages: Pages,
    long: Option<LongChunk>,
    /// Regions that are not used any more, for the transports to forget.
    retired: Vec<Arc<Region>>,
    /// Requests whose copies are done, or have failed.
    done: VecDeque<(T, Result<(), Status>)>,
    counters: StagingCounters,
    problem: Option<String>,
    /// True once the device is lost: nothing is copied any more, and its chunks are not used again.
    lost: bool,
}

impl<T> Stage<T> {
    /// Allocates and pins the memory, and creates the queues.
    ///
    /// # Errors
    /// If the host or the device has too little memory, or the device is lost.
    pub(crate) fn open(device: &Arc<Device>) -> Result<Self, DeviceError> {
        let pinned = pin(device, STAGE_BYTES)?;
        Ok(Self {
            device: Arc::clone(device),
            pages: Pages::new(pinned.region().bytes()),
            pinned,
            long: None,
            retired: Vec::new(),
            to_host: Lane::new(device)?,
            to_device: Lane::new(device)?,
            done: VecDeque::new(),
            counters: StagingCounters::default(),
            problem: None,
            lost: false,
        })
    }

    /// Returns the region of all chunks but the long one.
    pub(crate) fn region(&self) -> &Arc<Region> {
        self.pinned.region()
    }

    /// Returns the counters.
    pub(crate) const fn counters(&self) -> &StagingCounters {
        &self.counters
    }

    /// Takes a chunk of the region of at least this many bytes; `None` if there is none at present.
    ///
    /// # Errors
    /// `TooLarge` if it is longer than the region; `DeviceFailed` if the device is lost.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<Option<Chunk>, Status> {
        if self.lost {
            return Err(Status::DeviceFailed);
        }
        if bytes > self.pages.bytes() {
            return Err(Status::TooLarge);
        }
        let run = self.pages.take(bytes);
        self.note_use();
        Ok(run.map(|run| Chunk { memory: IoBuf::new(Arc::clone(self.region()), run.offset(), bytes), run: Some(run) }))
    }

    /// Takes a chunk of any length; `None` if there is none at present. One that is longer than the region is pinned
    /// for it, which takes as long as pinning, and there is one at a time.
    ///
    /// # Errors
    /// `TooLarge` if it is longer than [`CHUNK_BYTES`]; `DeviceFailed` if it cannot be pinned, or the device is lost.
    pub(crate) fn take_long(&mut self, bytes: usize) -> Result<Option<Chunk>, Status> {
        if bytes <= self.pages.bytes() || self.lost {
            return self.take(bytes);
        }
        if bytes > CHUNK_BYTES {
            return Err(Status::TooLarge);
        }
        let long = match self.long.take() {
            Some(long) if long.in_use || long.pinned.region().bytes() >= bytes => long,
            short => match pin(&self.device, bytes.next_power_of_two()) {
                Ok(pinned) => {
                    self.retired.extend(short.map(|short| Arc::clone(short.pinned.region())));
                    LongChunk { pinned, in_use: false }
                }
                Err(error) => {
                    self.long = short;
                    self.note(&error);
                    return Err(Status::DeviceFailed);
                }
            },
        };
        let long = self.long.insert(long);
        if std::mem::replace(&mut long.in_use, true) {
            return Ok(None);
        }
        let chunk = Chunk { memory: IoBuf::new(Arc::clone(long.pinned.region()), 0, bytes), run: None };
        self.note_use();
        Ok(Some(chunk))
    }

    /// Returns true if a chunk of this many bytes is not of the stage's region.
    pub(crate) fn is_long(&self, bytes: usize) -> bool {
        bytes > self.pages.bytes()
    }

    fn note_use(&mut self) {
        let long = self.long.as_ref().filter(|long| long.in_use).map_or(0, |long| long.pinned.region().bytes());
        let used = (self.pages.used_bytes() + long) as u64;
        self.counters.most_used_bytes = self.counters.most_used_bytes.max(used);
    }

    /// Returns a chunk, which nothing accesses any more.
    pub(crate) fn release(&mut self, chunk: Chunk) {
        // The engines of a lost device may still write to its chunks.
        if self.lost {
            return;
        }
        match (chunk.run, &mut self.long) {
            (Some(run), _) => self.pages.release(run),
            (None, Some(long)) => long.in_use = false,
            (None, None) => {}
        }
    }

    /// Returns the regions that are not used any more, for the transports to forget; of a stage that is closed, all.
    pub(crate) fn take_retired(&mut self, closed: bool) -> Vec<Arc<Region>> {
        let mut retired = std::mem::take(&mut self.retired);
        if closed {
            retired.extend(self.long.iter().map(|long| Arc::clone(long.pinned.region())));
        }
        retired
    }

    /// Makes later copies in one direction wait, on the device, for everything that a caller has enqueued on its stream
    /// so far.
    ///
    /// # Errors
    /// If the stream is not of this device, or the device is lost.
    pub(crate) fn wait_for(&mut self, stream: StreamHandle, is_sent: bool) -> Result<(), DeviceError> {
        let direction = if is_sent { Direction::ToHost } else { Direction::ToDevice };
        self.lane(direction).queue.wait_for(stream).inspect_err(|error| self.note(error))
    }

    /// Adds copies of a request between the device and chunks, all of one direction, to those that [`Self::flush`]
    /// submits. Their end is returned by [`Self::poll_done`].
    ///
    /// # Panics
    /// If there are none.
    pub(crate) fn copy(&mut self, token: T, copies: impl IntoIterator<Item = DeviceCopy>) {
        match self.copy_past(token, copies) {
            (Direction::ToHost, bytes) => self.counters.to_host_bytes += bytes,
            (Direction::ToDevice, bytes) => self.counters.to_device_bytes += bytes,
        }
    }

    /// Adds copies like [`Self::copy`], in order with those, but of other pinned memory than chunks: their bytes are
    /// not counted as staged. Returns the direction, and the number of bytes.
    ///
    /// # Panics
    /// If there are none.
    pub(crate) fn copy_past(&mut self, token: T, copies: impl IntoIterator<Item = DeviceCopy>) -> (Direction, u64) {
        let mut copies = copies.into_iter();
        let first = copies.next().expect("a request has copies");
        let direction = Direction::of(&first);
        let bytes: u64 = {
            let lane = self.lane(direction);
            let before = lane.pending.len();
            lane.pending.push(first);
            lane.pending.extend(copies);
            let added = &lane.pending[before..];
            debug_assert!(added.iter().all(|copy| Direction::of(copy) == direction), "copies of one direction");
            let bytes = added.iter().map(bytes_of).sum();
            let count = added.len();
            lane.groups.push((token, count));
            bytes
        };
        (direction, bytes)
    }

    /// Adds a request without copies, which [`Self::flush`] submits: its end is that of everything before it, also of
    /// what [`Self::wait_for`] waits for.
    pub(crate) fn mark(&mut self, token: T, is_sent: bool) {
        let direction = if is_sent { Direction::ToHost } else { Direction::ToDevice };
        self.lane(direction).groups.push((token, 0));
    }

    const fn lane(&mut self, direction: Direction) -> &mut Lane<T> {
        match direction {
            Direction::ToHost => &mut self.to_host,
            Direction::ToDevice => &mut self.to_device,
        }
    }

    /// Submits the copies that were added, in batches of one direction.
    pub(crate) fn flush(&mut self, now_ns: u64) {
        if self.to_host.groups.is_empty() && self.to_device.groups.is_empty() {
            return;
        }
        let device = Arc::clone(&self.device);
        device.hold(|| {
            for direction in [Direction::ToHost, Direction::ToDevice] {
                if !self.lane(direction).groups.is_empty() {
                    self.submit(direction, now_ns);
                }
            }
        });
    }

    fn submit(&mut self, direction: Direction, now_ns: u64) {
        let lost = self.lost;
        let lane = self.lane(direction);
        let (pending, groups) = (std::mem::take(&mut lane.pending), std::mem::take(&mut lane.groups));
        if lost {
            groups.into_iter().for_each(|(token, _)| self.fail(token));
            return;
        }
        let (mut copies, mut tokens, mut bytes) = (Vec::new(), Vec::new(), 0);
        let (mut pending, mut checks) = (pending.into_iter(), AllocationChecks::default());
        for (token, count) in groups {
            let group: Vec<DeviceCopy> = pending.by_ref().take(count).collect();
            if group.iter().flat_map(DeviceCopy::ranges).all(|range| checks.is_good(range.memory())) {
                bytes += group.iter().map(bytes_of).sum::<u64>();
                copies.extend(group);
                tokens.push(token);
            } else {
                self.fail(token);
            }
            // Requests with long copies get an event each, so that they go on before the copies of the next are done.
            if bytes >= APART_BYTES {
                let (copies, tokens) = (std::mem::take(&mut copies), std::mem::take(&mut tokens));
                self.enqueue(direction, copies, tokens, now_ns);
                bytes = 0;
            }
        }
        self.problem = checks.take_problem().map(|error| error.to_string()).or(self.problem.take());
        self.enqueue(direction, copies, tokens, now_ns);
    }

    /// Enqueues the copies of these requests as one batch.
    fn enqueue(&mut self, direction: Direction, copies: Vec<DeviceCopy>, requests: Vec<T>, now_ns: u64) {
        if requests.is_empty() {
            return;
        }
        if self.lost {
            requests.into_iter().for_each(|token| self.fail(token));
            return;
        }
        let bytes = copies.iter().map(bytes_of).sum();
        let lane = self.lane(direction);
        match lane.queue.copy(copies) {
            Ok(ticket) => {
                lane.push(Flight { ticket, requests, bytes }, now_ns);
                self.counters.batches += 1;
            }
            Err(error) => {
                self.note(&error);
                requests.into_iter().for_each(|token| self.fail(token));
            }
        }
    }

    fn fail(&mut self, token: T) {
        self.counters.failed += 1;
        self.done.push_back((token, Err(Status::DeviceFailed)));
    }

    fn note(&mut self, error: &DeviceError) {
        self.lost |= error.is_lost();
        self.problem = Some(error.to_string());
    }

    /// Looks for copies that are done, when some should be. Returns true if there are any for [`Self::poll_done`].
    pub(crate) fn poll(&mut self, now_ns: u64) -> bool {
        if self.to_host.is_due(now_ns) || self.to_device.is_due(now_ns) {
            let device = Arc::clone(&self.device);
            device.hold(|| {
                self.look(Direction::ToHost, now_ns);
                self.look(Direction::ToDevice, now_ns);
            });
        }
        !self.done.is_empty()
    }

    fn look(&mut self, direction: Direction, now_ns: u64) {
        let lane = self.lane(direction);
        if !lane.is_due(now_ns) {
            return;
        }
        match lane.queue.poll() {
            Ok(open) => {
                let done = lane.take_done(open, now_ns);
                self.done.extend(done.into_iter().map(|token| (token, Ok(()))));
            }
            Err(error) => {
                self.note(&error);
                if self.lost {
                    let lost: Vec<Flight<T>> = self.lane(direction).in_flight.drain(..).collect();
                    lost.into_iter().flat_map(|flight| flight.requests).for_each(|token| self.fail(token));
                }
            }
        }
    }

    /// Returns a request whose copies are done, or have failed.
    pub(crate) fn poll_done(&mut self) -> Option<(T, Result<(), Status>)> {
        self.done.pop_front()
    }

    /// Returns and clears the text of the last error.
    pub(crate) const fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }

    /// Returns true if copies are in flight or about to be, or their end was not taken yet: the thread must not park.
    pub(crate) fn is_busy(&self) -> bool {
        self.to_host.is_busy() || self.to_device.is_busy() || !self.done.is_empty()
    }

    /// Returns true if the device is lost: nothing is copied any more.
    pub(crate) const fn is_lost(&self) -> bool {
        self.lost
    }

    /// Returns true if no chunk is in use and no copy in flight.
    pub(crate) fn is_idle(&self) -> bool {
        let in_use = !self.pages.is_empty() || self.long.as_ref().is_some_and(|long| long.in_use);
        !self.is_busy() && (self.lost || !in_use)
    }
}

/// Returns the length of a copy in bytes.
fn bytes_of(copy: &DeviceCopy) -> u64 {
    copy.ranges().next().map_or(0, DeviceRange::bytes)
}

/// Allocates memory near a device, and pins it.
fn pin(device: &Arc<Device>, bytes: usize) -> Result<PinnedRegion, DeviceError> {
    let options = RegionOptions {
        numa_node: device.info().host_node,
        huge: HugePages::Try,
        prefault: true,
        ..RegionOptions::new("kvplane-staging", bytes)
    };
    let region = Region::allocate(&options);
    let region = region.map_err(|_| DeviceError::OutOfMemory { id: device.id(), call: "mmap" })?;
    PinnedRegion::new(device, region)
}

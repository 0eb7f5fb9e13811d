//! Initiator: a host that its caller's thread drives. Requests are sent, and their answers taken, on the thread that
//! submits them.
//!
//! No thread is between the caller and the socket, so a small request costs no wake-up but the caller's own. Threads
//! that submit requests in parallel have an initiator each.
//!
//! Memory of a device is staged: see [`Initiator::set_device_buffer`].
//!
//! Quiescence: [`Initiator::wait`] returns when no driver or device accesses the batch's memory any more, whatever the
//! outcome.

mod reads;
mod staged;
mod stages;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{
    Batches, Client, ClientMetrics, Config, Local, Near, PeerAddress, PeerId, PutBook, Request, SubmitError,
    SubmitOptions, TaskResult,
};
use kvplane_proto::map::ClusterMap;
use kvplane_proto::{BatchId, Digest};
use kvplane_sys::device::{DeviceError, DeviceId, DeviceMemory, StreamHandle};
use kvplane_sys::{Doorbell, Region, cpu};
use kvplane_ticket::Credential;

use crate::buffers::FIRST_BUFFER;
use crate::host::{ClientHost, HostConfig, HostCounters};
use crate::pacing::{Pacer, Pacing};
use crate::staging::{MemoryRange, StagedMemory, StagingCounters};
use staged::StagedBatches;

/// Reason why pieces of memory cannot be one buffer.
#[derive(Debug)]
pub enum PiecesError {
    /// They are of several devices.
    SeveralDevices {
        /// One of them.
        device: DeviceId,
    },
    /// A device rejects them.
    Device(DeviceError),
}

impl fmt::Display for PiecesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SeveralDevices { device } => {
                write!(
                    f,
                    "the pieces of a batch are on {device} and on other devices: submit those of each by themselves"
                )
            }
            Self::Device(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for PiecesError {}

/// Sends requests to shards, from one thread.
pub struct Initiator {
    host: ClientHost,
    pacer: Pacer,
    staged: StagedBatches,
    /// Complete batches that were taken from the host and not returned yet.
    done: VecDeque<BatchId>,
}

impl Initiator {
    /// Creates an initiator without peers or a cluster map.
    ///
    /// # Errors
    /// If the kernel refuses a poller.
    pub fn new(client: Config, host: &HostConfig, pacing: Pacing) -> io::Result<Self> {
        let host = ClientHost::new(host, Client::new(client))?;
        let pacer = Pacer::new(pacing, cpu::preemptions);
        Ok(Self { host, pacer, staged: StagedBatches::default(), done: VecDeque::new() })
    }

    /// Watches a doorbell that wakes a parked [`Self::round`].
    ///
    /// # Errors
    /// If the kernel refuses to watch the doorbell.
    pub fn watch(&mut self, doorbell: Doorbell) -> io::Result<()> {
        self.host.watch_mailbox(doorbell)
    }

    /// Sets the ticket for shards that require one.
    pub fn set_credential(&mut self, credential: Arc<Credential>) {
        self.host.client().set_credential(credential, cpu::monotonic_ns());
    }

    /// Routes by this map from now on.
    pub fn set_map(&mut self, map: ClusterMap) {
        self.host.client().set_map(map, cpu::monotonic_ns());
    }

    /// Adopts a map of another cluster state, whose epochs cannot be compared with those before.
    pub fn adopt_map(&mut self, map: ClusterMap) {
        self.host.client().adopt_map(map, cpu::monotonic_ns());
    }

    /// Returns true once if a newer map is needed.
    pub const fn take_map_wanted(&mut self) -> bool {
        self.host.take_map_wanted()
    }

    /// Opens a shard as a peer, to read and write its segments.
    pub fn open_peer(&mut self, address: PeerAddress) -> PeerId {
        self.host.client().open_peer(address)
    }

    /// Opens a peer that has published the distances of its devices from its memory.
    pub fn open_peer_near(&mut self, address: PeerAddress, near: Near) -> PeerId {
        self.host.client().open_peer_near(address, near)
    }

    /// Closes a peer; see [`Client::close_peer`]. Returns false if the peer is not open.
    pub fn close_peer(&mut self, peer: PeerId) -> bool {
        self.host.client().close_peer(peer, cpu::monotonic_ns())
    }

    /// Registers memory as a buffer for requests, and returns its index.
    pub fn add_buffer(&mut self, region: Arc<Region>) -> u32 {
        let buffer = self.host.vacant(|index| self.staged.has(index));
        self.host.set_buffer(buffer, region, "*");
        buffer
    }

    /// Registers memory as the buffer of this index, replacing the former one, which no open batch may use. `location`
    /// is the memory's location (`cpu:0`); for `*` it comes from the kernel.
    pub fn set_buffer(&mut self, buffer: u32, region: Arc<Region>, location: &str) {
        self.host.set_buffer(buffer, region, location);
    }

    /// Registers memory of a device as the buffer of this index, which has none. RDMA devices that accept it access it
    /// directly; for all other transports and for objects, its bytes pass through pinned memory of the host.
    ///
    /// # Errors
    /// If the device is lost, or the host has too little memory to pin.
    ///
    /// # Panics
    /// If the index is below [`FIRST_BUFFER`].
    pub fn set_device_buffer(&mut self, buffer: u32, memory: Arc<DeviceMemory>) -> Result<(), DeviceError> {
        assert!(buffer >= FIRST_BUFFER, "buffer {buffer} is the initiator's own");
        self.staged.set_buffer(&mut self.host, buffer, memory)
    }

    /// Unregisters memory. No open batch may use it.
    pub fn remove_buffer(&mut self, buffer: u32) {
        self.host.remove_buffer(buffer);
        self.staged.remove_buffer(&mut self.host, buffer);
    }

    /// Registers memory of a device as a buffer, and returns its index: see [`Self::set_device_buffer`].
    ///
    /// # Errors
    /// Errors of [`Self::set_device_buffer`].
    pub fn add_device_buffer(&mut self, memory: Arc<DeviceMemory>) -> Result<u32, DeviceError> {
        let buffer = self.host.vacant(|index| self.staged.has(index));
        self.staged.set_buffer(&mut self.host, buffer, memory)?;
        Ok(buffer)
    }

    /// Registers many pieces of memory as one contiguous buffer, for requests about objects. Pieces of device memory
    /// are in buffers of one device.
    ///
    /// # Errors
    /// If they are of several devices, or a device is lost.
    pub fn add_parts(&mut self, pieces: Vec<MemoryRange>) -> Result<u32, PiecesError> {
        let Some(device) = pieces.iter().find_map(MemoryRange::device).map(Arc::clone) else {
            let host = pieces.into_iter().filter_map(|piece| match piece {
                MemoryRange::Host(buffer) => Some(buffer),
                MemoryRange::Device(_) => None,
            });
            return Ok(self.host.add_parts(host.collect()));
        };
        let id = device.id();
        let pieces = StagedMemory::join(device, pieces).ok_or(PiecesError::SeveralDevices { device: id })?;
        self.staged.add_pieces(&mut self.host, pieces).map_err(PiecesError::Device)
    }

    /// Unregisters a buffer of pieces. No open batch may use it.
    pub fn remove_parts(&mut self, buffer: u32) {
        self.host.remove_parts(buffer);
        self.staged.remove_buffer(&mut self.host, buffer);
    }

    /// Returns the memory of a range; `None` if the buffer is not registered, or the range is not inside.
    #[must_use]
    pub fn memory(&self, local: Local) -> Option<MemoryRange> {
        self.staged.memory(local).or_else(|| self.host.buffer(local).map(MemoryRange::Host))
    }

    /// Returns the host, for its files, counters and own segments.
    pub const fn host(&mut self) -> &mut ClientHost {
        &mut self.host
    }

    /// Submits a batch.
    ///
    /// # Errors
    /// If a request is malformed; then nothing was submitted.
    pub fn submit(&mut self, requests: &[Request], deadline: Duration) -> Result<BatchId, SubmitError> {
        self.submit_puts(requests, &PutBook::new(), deadline)
    }

    /// Submits existence checks of these objects: see [`Client::submit_asks`].
    ///
    /// # Errors
    /// If there are none, or too many; then nothing was submitted.
    pub fn submit_asks(&mut self, digests: &[Digest], deadline: Duration) -> Result<BatchId, SubmitError> {
        let now_ns = cpu::monotonic_ns();
        let deadline_ns = now_ns.saturating_add(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX));
        self.host.client().submit_asks(digests, deadline_ns, now_ns)
    }

    /// Submits a batch, with a book that has the options of its puts.
    ///
    /// # Errors
    /// If a request is malformed; then nothing was submitted.
    pub fn submit_puts(
        &mut self,
        requests: &[Request],
        puts: &PutBook,
        deadline: Duration,
    ) -> Result<BatchId, SubmitError> {
        let now_ns = cpu::monotonic_ns();
        let deadline_ns = now_ns.saturating_add(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX));
        let options = SubmitOptions::until(deadline_ns);
        if self.staged.concern(&mut self.host, requests) {
            return self.staged.submit(&mut self.host, requests, puts, &options, None);
        }
        self.host.client().submit_puts(requests, puts, &options, now_ns)
    }

    /// Submits a batch with options; times are those of [`cpu::monotonic_ns`]. Copies from and to devices wait, on the
    /// device, for what the caller has enqueued on `stream` so far; for `None`, on the stream of callers that name
    /// none.
    ///
    /// # Errors
    /// If a request is malformed; then nothing was submitted.
    pub fn submit_after(
        &mut self,
        requests: &[Request],
        options: &SubmitOptions,
        stream: Option<StreamHandle>,
    ) -> Result<BatchId, SubmitError> {
        if self.staged.concern(&mut self.host, requests) {
            return self.staged.submit(&mut self.host, requests, &PutBook::new(), options, stream);
        }
        self.host.client().submit_puts(requests, &PutBook::new(), options, cpu::monotonic_ns())
    }

    /// Returns the client's metrics: peers, rails and counters.
    pub const fn books(&mut self) -> ClientMetrics<'_> {
        self.host.client().metrics()
    }

    /// Returns a task that has completed since the last call: see [`Client::poll_finished`].
    pub fn poll_finished(&mut self) -> Option<(BatchId, u32, TaskResult)> {
        if !self.staged.is_active() {
            return self.host.client().poll_finished();
        }
        self.staged.poll_finished().or_else(|| {
            std::iter::from_fn(|| self.host.client().poll_finished()).find(|(batch, ..)| !self.staged.carries(*batch))
        })
    }

    /// Advances the staged batches. Returns true if they made progress.
    fn drive_staged(&mut self) -> bool {
        if !self.staged.is_active() {
            return false;
        }
        while let Some(batch) = self.host.poll_done() {
            if !self.staged.take_carried(&mut self.host, batch) {
                self.done.push_back(batch);
            }
        }
        let now_ns = self.host.now_ns();
        self.staged.drive(&mut self.host, now_ns)
    }

    /// Runs a round, and waits for work if it made no progress: at most `longest`, and not if `pending` returns true,
    /// as the caller has work.
    ///
    /// # Errors
    /// If the poller fails.
    pub fn round(&mut self, longest: Duration, pending: impl FnOnce() -> bool) -> io::Result<()> {
        if self.poll()? {
            self.pacer.busy(self.host.now_ns());
        } else if self.pacer.idle(self.host.now_ns()) && !self.staged.must_be_polled() {
            let deadline = self.staged.poll_timeout().map(|at_ns| at_ns.saturating_sub(self.host.now_ns()));
            self.host.park(deadline.map_or(longest, |left_ns| longest.min(Duration::from_nanos(left_ns))), pending)?;
        } else {
            cpu::pause();
        }
        Ok(())
    }

    /// Runs a round that never waits: for callers with a loop of their own.
    ///
    /// # Errors
    /// If the poller fails.
    pub fn poll(&mut self) -> io::Result<bool> {
        let progress = self.host.poll()?;
        if !self.drive_staged() {
            return Ok(progress);
        }
        // What the staged batches have submitted leaves at once.
        self.host.poll()?;
        Ok(true)
    }

    /// Returns true if a batch has completed.
    pub fn is_complete(&mut self, batch: BatchId) -> bool {
        if StagedBatches::is_staged(batch) {
            return self.staged.is_complete(batch);
        }
        self.host.client().batches().is_complete(batch)
    }

    /// Waits for a batch to complete. Its deadline bounds the wait.
    ///
    /// # Errors
    /// If the poller fails.
    pub fn wait(&mut self, batch: BatchId) -> io::Result<()> {
        while !self.is_complete(batch) {
            self.round(Duration::from_secs(1), || false)?;
        }
        while self.poll_done().is_some() {}
        Ok(())
    }

    /// Returns a batch that has completed since the last call, for callers with several open batches.
    pub fn poll_done(&mut self) -> Option<BatchId> {
        let known = self.done.pop_front().or_else(|| self.staged.poll_done());
        // Those that carry out staged batches are taken in a round, before the ends of tasks are polled.
        if known.is_none() && !self.staged.is_active() { self.host.poll_done() } else { known }
    }

    /// Returns the results of a complete batch.
    pub fn results(&mut self, batch: BatchId) -> &[TaskResult] {
        if StagedBatches::is_staged(batch) {
            return self.staged.results(batch);
        }
        self.host.client().batches().results(batch)
    }

    /// Returns the batches that are not released yet, for what a complete [`Self::submit_asks`] has found. Staged ones
    /// are not among them.
    #[must_use]
    pub fn batches(&mut self) -> &Batches {
        self.host.client().batches()
    }

    /// Returns a shard's description of its segment, in answer to [`Request::OpenSegment`].
    pub fn take_description(&mut self, batch: BatchId) -> Option<Vec<u8>> {
        self.host.client().take_description(batch)
    }

    /// Releases a complete batch.
    pub fn release(&mut self, batch: BatchId) {
        if StagedBatches::is_staged(batch) {
            return self.staged.release(batch);
        }
        self.host.client().release(batch);
    }

    /// Cancels a batch; it completes soon.
    pub fn cancel(&mut self, batch: BatchId) {
        let now_ns = cpu::monotonic_ns();
        if StagedBatches::is_staged(batch) {
            return self.staged.cancel(&mut self.host, batch, now_ns);
        }
        self.host.client().cancel(batch, now_ns);
    }

    /// Returns true if this id is of a batch of device memory: the indices of such ids are not dense.
    #[must_use]
    pub const fn is_staged(batch: BatchId) -> bool {
        StagedBatches::is_staged(batch)
    }

    /// Returns the counters of the copies from and to each device that had a buffer.
    #[must_use]
    pub fn staging(&self) -> BTreeMap<DeviceId, StagingCounters> {
        self.staged.counters()
    }

    /// Returns the names of the open RDMA devices, by their numbers: see
    /// [`RailMetrics::devices`](kvplane_client::RailMetrics::devices).
    #[must_use]
    pub fn device_names(&self) -> Vec<String> {
        self.host.rdma_names().map(str::to_owned).collect()
    }

    /// Returns the counters of the host.
    #[must_use]
    pub const fn host_counters(&self) -> &HostCounters {
        self.host.counters()
    }

    /// Returns the text of the last unexpected end of a connection.
    #[must_use]
    pub fn last_problem(&self) -> Option<&str> {
        self.host.last_problem()
    }
}

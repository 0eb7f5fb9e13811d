//! Initiator: a host that its caller's thread drives. Requests are sent, and their answers taken, on the thread that
//! submits them.
//!
//! No thread is between the caller and the socket, so a small request costs no wake-up but the caller's own. Threads
//! that submit requests in parallel have an initiator each.
//!
//! Quiescence: [`Initiator::wait`] returns when no driver or device accesses the batch's memory any more, whatever the
//! outcome.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{
    Client, ClientMetrics, Config, Local, Near, PeerAddress, PeerId, PutBook, Request, SubmitError, SubmitOptions,
    TaskResult,
};
use kvplane_proto::map::ClusterMap;
use kvplane_proto::{BatchId, Digest, SegmentId, Status};
use kvplane_sys::{Doorbell, IoBuf, Region, cpu};
use kvplane_ticket::Credential;

use crate::host::{ClientHost, HostConfig, HostCounters};
use crate::pacing::{Pacer, Pacing};

/// Sends requests to shards, from one thread.
pub struct Initiator {
    host: ClientHost,
    pacer: Pacer,
}

impl Initiator {
    /// Creates an initiator without peers or a cluster map.
    ///
    /// # Errors
    /// If the kernel refuses a poller.
    pub fn new(client: Config, host: &HostConfig, pacing: Pacing) -> io::Result<Self> {
        let host = ClientHost::new(host, Client::new(client))?;
        Ok(Self { host, pacer: Pacer::new(pacing, cpu::preemptions) })
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
        self.host.add_buffer(region)
    }

    /// Registers memory as the buffer of this index, replacing the former one, which no open batch may use. `location`
    /// is the memory's location (`cpu:0`); for `*` it comes from the kernel.
    pub fn set_buffer(&mut self, buffer: u32, region: Arc<Region>, location: &str) {
        self.host.set_buffer(buffer, region, location);
    }

    /// Unregisters memory. No open batch may use it.
    pub fn remove_buffer(&mut self, buffer: u32) {
        self.host.remove_buffer(buffer);
    }

    /// Registers many pieces of memory as one contiguous buffer, for requests about objects.
    pub fn add_parts(&mut self, pieces: Vec<IoBuf>) -> u32 {
        self.host.add_parts(pieces)
    }

    /// Unregisters a buffer of pieces. No open batch may use it.
    pub fn remove_parts(&mut self, buffer: u32) {
        self.host.remove_parts(buffer);
    }

    /// Returns the memory of a range; `None` if the buffer is not registered, or the range is not inside.
    #[must_use]
    pub fn buffer(&self, local: Local) -> Option<IoBuf> {
        self.host.buffer(local)
    }

    /// Registers memory as a segment for requests to [`PeerAddress::local`].
    pub fn add_segment(&mut self, segment: SegmentId, region: Arc<Region>) {
        self.host.add_segment(segment, region);
    }

    /// Unregisters a segment; later requests for it fail with `Stale`.
    pub fn remove_segment(&mut self, segment: SegmentId) {
        self.host.remove_segment(segment);
    }

    /// Returns the host, for its files and counters.
    pub const fn host(&mut self) -> &mut ClientHost {
        &mut self.host
    }

    /// Submits a batch.
    ///
    /// # Errors
    /// If a request is malformed; then nothing was submitted.
    pub fn submit(&mut self, requests: &[Request], deadline: Duration) -> Result<BatchId, SubmitError> {
        let now_ns = cpu::monotonic_ns();
        let deadline_ns = now_ns.saturating_add(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX));
        self.host.client().submit(requests, deadline_ns, now_ns)
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
        self.host.client().submit_puts(requests, puts, &SubmitOptions::until(deadline_ns), now_ns)
    }

    /// Submits a batch with options; times are those of [`cpu::monotonic_ns`].
    ///
    /// # Errors
    /// If a request is malformed; then nothing was submitted.
    pub fn submit_with(&mut self, requests: &[Request], options: &SubmitOptions) -> Result<BatchId, SubmitError> {
        self.host.client().submit_puts(requests, &PutBook::new(), options, cpu::monotonic_ns())
    }

    /// Returns the client's metrics: peers, rails and counters.
    pub const fn books(&mut self) -> ClientMetrics<'_> {
        self.host.client().metrics()
    }

    /// Returns a task that has completed since the last call: see [`Client::poll_finished`].
    pub fn poll_finished(&mut self) -> Option<(BatchId, u32, TaskResult)> {
        self.host.client().poll_finished()
    }

    /// Runs a round, and waits for work if it made no progress: at most `longest`, and not if `pending` returns true,
    /// as the caller has work.
    ///
    /// # Errors
    /// If the poller fails.
    pub fn round(&mut self, longest: Duration, pending: impl FnOnce() -> bool) -> io::Result<()> {
        if self.host.poll()? {
            self.pacer.busy(self.host.now_ns());
        } else if self.pacer.idle(self.host.now_ns()) {
            self.host.park(longest, pending)?;
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
        self.host.poll()
    }

    /// Returns true if a batch has completed.
    pub fn is_complete(&mut self, batch: BatchId) -> bool {
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
        while self.host.poll_done().is_some() {}
        Ok(())
    }

    /// Returns a batch that has completed since the last call, for callers with several open batches.
    pub fn poll_done(&mut self) -> Option<BatchId> {
        self.host.poll_done()
    }

    /// Returns the results of a complete batch.
    pub fn results(&mut self, batch: BatchId) -> &[TaskResult] {
        self.host.client().batches().results(batch)
    }

    /// Returns which objects of a complete [`Self::submit_asks`] exist: see
    /// [`Batches::found`](kvplane_client::Batches::found).
    pub fn found(&mut self, batch: BatchId) -> &[bool] {
        self.host.client().batches().found(batch)
    }

    /// Returns those objects that are stripe heads: see [`Batches::found_heads`](kvplane_client::Batches::found_heads).
    pub fn found_heads(&mut self, batch: BatchId) -> &[usize] {
        self.host.client().batches().found_heads(batch)
    }

    /// Returns those objects whose check no peer answered: see
    /// [`Batches::unanswered`](kvplane_client::Batches::unanswered).
    pub fn unanswered(&mut self, batch: BatchId) -> Vec<(usize, Status)> {
        self.host.client().batches().unanswered(batch)
    }

    /// Returns a shard's description of its segment, in answer to [`Request::OpenSegment`].
    pub fn take_description(&mut self, batch: BatchId) -> Option<Vec<u8>> {
        self.host.client().take_description(batch)
    }

    /// Releases a complete batch.
    pub fn release(&mut self, batch: BatchId) {
        self.host.client().release(batch);
    }

    /// Cancels a batch; it completes soon.
    pub fn cancel(&mut self, batch: BatchId) {
        self.host.client().cancel(batch, cpu::monotonic_ns());
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

    /// Returns the counters of injected faults.
    #[must_use]
    pub fn faults(&self) -> kvplane_transport::FaultCounters {
        self.host.faults()
    }

    /// Returns the text of the last unexpected end of a connection.
    #[must_use]
    pub fn last_problem(&self) -> Option<&str> {
        self.host.last_problem()
    }
}

//! A host that its caller's thread drives: requests are sent, and their answers taken, on the thread that submits them.
//!
//! No thread is between the caller and the socket, so a small request costs no wake-up but the caller's own. Several
//! threads that submit requests have an initiator each.
//!
//! Quiescence: [`Initiator::wait`] returns when nothing touches the batch's memory any more, whatever the outcome.

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
    /// An initiator that knows nobody yet.
    ///
    /// # Errors
    /// When the kernel gives no poller.
    pub fn new(client: Config, host: &HostConfig, pacing: Pacing) -> io::Result<Self> {
        let host = ClientHost::new(host, Client::new(client))?;
        Ok(Self { host, pacer: Pacer::new(pacing, cpu::preemptions) })
    }

    /// Wakes a parked [`Self::round`] when this doorbell rings.
    ///
    /// # Errors
    /// When the kernel does not let it be watched.
    pub fn watch(&mut self, doorbell: Doorbell) -> io::Result<()> {
        self.host.watch_mailbox(doorbell)
    }

    /// Proves this ticket to shards that want one, from now on.
    pub fn set_credential(&mut self, credential: Arc<Credential>) {
        self.host.client().set_credential(credential, cpu::monotonic_ns());
    }

    /// Routes by this map from now on.
    pub fn set_map(&mut self, map: ClusterMap) {
        self.host.client().set_map(map, cpu::monotonic_ns());
    }

    /// Routes by a map of another state of the control plane, whose epochs do not compare with those before.
    pub fn adopt_map(&mut self, map: ClusterMap) {
        self.host.client().adopt_map(map, cpu::monotonic_ns());
    }

    /// Whether a newer map is wanted; said once.
    pub const fn take_map_wanted(&mut self) -> bool {
        self.host.take_map_wanted()
    }

    /// A shard to read and write segments of.
    pub fn open_peer(&mut self, address: PeerAddress) -> PeerId {
        self.host.client().open_peer(address)
    }

    /// The same for a peer that told how near its devices are to its memory.
    pub fn open_peer_near(&mut self, address: PeerAddress, near: Near) -> PeerId {
        self.host.client().open_peer_near(address, near)
    }

    /// Leaves a peer; see [`Client::close_peer`]. False for one that is not open.
    pub fn close_peer(&mut self, peer: PeerId) -> bool {
        self.host.client().close_peer(peer, cpu::monotonic_ns())
    }

    /// Gives memory a name for requests.
    pub fn add_buffer(&mut self, region: Arc<Region>) -> u32 {
        self.host.add_buffer(region)
    }

    /// Gives memory this name for requests, in place of what had it. No open batch may use that.
    /// `location` is where the memory is (`cpu:0`); for `*` the kernel says.
    pub fn set_buffer(&mut self, buffer: u32, region: Arc<Region>, location: &str) {
        self.host.set_buffer(buffer, region, location);
    }

    /// Forgets memory. No open batch may use it.
    pub fn remove_buffer(&mut self, buffer: u32) {
        self.host.remove_buffer(buffer);
    }

    /// Gives many pieces of memory one name, under which they lie in a row, for requests about objects.
    pub fn add_parts(&mut self, pieces: Vec<IoBuf>) -> u32 {
        self.host.add_parts(pieces)
    }

    /// Forgets memory in parts. No open batch may use it.
    pub fn remove_parts(&mut self, buffer: u32) {
        self.host.remove_parts(buffer);
    }

    /// The memory of a range; `None` when its name is nobody's, or it is not inside.
    #[must_use]
    pub fn buffer(&self, local: Local) -> Option<IoBuf> {
        self.host.buffer(local)
    }

    /// Lets requests to [`PeerAddress::local`] use this memory under this id.
    pub fn add_segment(&mut self, segment: SegmentId, region: Arc<Region>) {
        self.host.add_segment(segment, region);
    }

    /// Forgets it; later requests for it are answered `Stale`.
    pub fn remove_segment(&mut self, segment: SegmentId) {
        self.host.remove_segment(segment);
    }

    /// The host, for what only it knows: files, counters.
    pub const fn host(&mut self) -> &mut ClientHost {
        &mut self.host
    }

    /// Starts a batch.
    ///
    /// # Errors
    /// When a request is malformed; then nothing was done.
    pub fn submit(&mut self, requests: &[Request], deadline: Duration) -> Result<BatchId, SubmitError> {
        let now_ns = cpu::monotonic_ns();
        let deadline_ns = now_ns.saturating_add(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX));
        self.host.client().submit(requests, deadline_ns, now_ns)
    }

    /// Asks which of these objects are there: see [`Client::submit_asks`].
    ///
    /// # Errors
    /// When there are none, or too many; then nothing was done.
    pub fn submit_asks(&mut self, digests: &[Digest], deadline: Duration) -> Result<BatchId, SubmitError> {
        let now_ns = cpu::monotonic_ns();
        let deadline_ns = now_ns.saturating_add(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX));
        self.host.client().submit_asks(digests, deadline_ns, now_ns)
    }

    /// As [`Self::submit`], with a book in which puts say more about their objects.
    ///
    /// # Errors
    /// When a request is malformed; then nothing was done.
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

    /// Starts a batch with more to say about it; times are those of [`cpu::monotonic_ns`].
    ///
    /// # Errors
    /// When a request is malformed; then nothing was done.
    pub fn submit_with(&mut self, requests: &[Request], options: &SubmitOptions) -> Result<BatchId, SubmitError> {
        self.host.client().submit_puts(requests, &PutBook::new(), options, cpu::monotonic_ns())
    }

    /// What the client knows of its peers and rails, and what it counted.
    pub const fn books(&mut self) -> ClientMetrics<'_> {
        self.host.client().metrics()
    }

    /// A task that has ended since the last call: see [`Client::poll_finished`].
    pub fn poll_finished(&mut self) -> Option<(BatchId, u32, TaskResult)> {
        self.host.client().poll_finished()
    }

    /// Does what there is to do, and waits for more to do if there was nothing: at most `longest`, and not when
    /// `pending` says that the caller has something.
    ///
    /// # Errors
    /// When the poller fails.
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

    /// One round that never waits: for callers with a loop of their own.
    ///
    /// # Errors
    /// When the poller fails.
    pub fn poll(&mut self) -> io::Result<bool> {
        self.host.poll()
    }

    /// Whether a batch has completed.
    pub fn is_complete(&mut self, batch: BatchId) -> bool {
        self.host.client().batches().is_complete(batch)
    }

    /// Waits for a batch to complete. Its deadline bounds the wait.
    ///
    /// # Errors
    /// When the poller fails.
    pub fn wait(&mut self, batch: BatchId) -> io::Result<()> {
        while !self.is_complete(batch) {
            self.round(Duration::from_secs(1), || false)?;
        }
        while self.host.poll_done().is_some() {}
        Ok(())
    }

    /// A batch that has completed since the last call, for callers who have several open.
    pub fn poll_done(&mut self) -> Option<BatchId> {
        self.host.poll_done()
    }

    /// The results of a complete batch.
    pub fn results(&mut self, batch: BatchId) -> &[TaskResult] {
        self.host.client().batches().results(batch)
    }

    /// Which objects of a complete [`Self::submit_asks`] are there: see
    /// [`Batches::found`](kvplane_client::Batches::found).
    pub fn found(&mut self, batch: BatchId) -> &[bool] {
        self.host.client().batches().found(batch)
    }

    /// Those of them that name stripes: see [`Batches::found_heads`](kvplane_client::Batches::found_heads).
    pub fn found_heads(&mut self, batch: BatchId) -> &[usize] {
        self.host.client().batches().found_heads(batch)
    }

    /// Those of them that nobody answered for: see [`Batches::unanswered`](kvplane_client::Batches::unanswered).
    pub fn unanswered(&mut self, batch: BatchId) -> Vec<(usize, Status)> {
        self.host.client().batches().unanswered(batch)
    }

    /// What a shard told about its segment, in answer to [`Request::OpenSegment`].
    pub fn take_description(&mut self, batch: BatchId) -> Option<Vec<u8>> {
        self.host.client().take_description(batch)
    }

    /// Forgets a complete batch.
    pub fn release(&mut self, batch: BatchId) {
        self.host.client().release(batch);
    }

    /// Withdraws a batch; it completes soon.
    pub fn cancel(&mut self, batch: BatchId) {
        self.host.client().cancel(batch, cpu::monotonic_ns());
    }

    /// The names of the RDMA devices that are open, by their numbers: see
    /// [`RailMetrics::devices`](kvplane_client::RailMetrics::devices).
    #[must_use]
    pub fn device_names(&self) -> Vec<String> {
        self.host.rdma_names().map(str::to_owned).collect()
    }

    /// What its host counted.
    #[must_use]
    pub const fn host_counters(&self) -> &HostCounters {
        self.host.counters()
    }

    /// Faults made by plan so far.
    #[must_use]
    pub fn faults(&self) -> kvplane_transport::FaultCounters {
        self.host.faults()
    }

    /// The last end of a connection that this host did not want, in words.
    #[must_use]
    pub fn last_problem(&self) -> Option<&str> {
        self.host.last_problem()
    }
}

//! Requester: sends batches of requests to the shards and waits for the replies on the caller's thread.
//!
//! It follows the cluster map and the ticket of its control link, reports nodes that do not answer, and cancels a batch
//! when the wait for it is interrupted.

mod silence;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{Config, PutBook, Request, TaskResult};
use kvplane_engine::{Buffer, DeviceBuffer, HostConfig, Initiator, Region, cpu};
use kvplane_proto::map::ClusterMap;
use kvplane_proto::message::PageQuery;
use kvplane_proto::{BatchId, Digest, Limits, NodeId, Status};
use kvplane_sys::device::DeviceMemory;
use kvplane_sys::interrupt;
use kvplane_sys::random::random_u64;
use kvplane_transfer::{Metrics, RdmaUse};

use super::config::ClientConfig;
use super::outcome::Put;
use super::owners::Owners;
use crate::error::{ArgumentError, Error};
use crate::link::ControlLink;
use silence::Reports;

/// Longest sleep of one poll round.
const ROUND: Duration = Duration::from_millis(50);
/// Interval at which a waiting client checks for a newer map.
const MAP_LOOK: Duration = Duration::from_millis(5);

/// Most objects of one existence request. Shards look up the first ones of a longer list while the rest is prepared.
const TOGETHER: usize = Limits::QUESTIONS_PER_FRAME;

/// Answers about the existence of many objects, which are known by their positions.
pub(super) struct Answers {
    /// For each digest, whether there is an object.
    pub(super) found: Vec<bool>,
    /// Stripe heads among them.
    pub(super) heads: Vec<usize>,
    /// Digests without an answer, with the reason.
    pub(super) unanswered: Vec<(usize, Status)>,
}

/// Connection to a cluster: the initiator that moves the bytes, and the control link whose map it follows.
pub(crate) struct Requester {
    initiator: Initiator,
    link: ControlLink,
    /// Deadline of each batch.
    deadline: Duration,
    seen_map: u64,
    seen_ticket: u64,
    /// Cluster state that the map in use belongs to.
    state: u64,
    /// Owners as last computed, with the generation of their map.
    owners: Option<(u64, Arc<Owners>)>,
    reports: Reports,
}

impl Requester {
    /// Creates a requester on a control link, with a ticket for a tenant.
    pub(super) fn new(config: &ClientConfig, link: ControlLink, tenant: &str) -> Result<Self, Error> {
        if !config.shared_memory && !config.tcp && config.rdma.mode != RdmaUse::Require {
            return Err(ArgumentError::NoPath.into());
        }
        link.hold_ticket(tenant)?;
        let seen_map = link.map_generation();
        let first = link.state_map().ok_or(Error::NoMap)?;
        let client = Config {
            cluster: config.control.cluster().to_owned(),
            client: random_u64()?,
            // Without a boot id, no node counts as local to this host.
            host: cpu::boot_id().unwrap_or_default(),
            lanes: config.lanes,
            shared: config.shared_memory,
            // Objects are copied through the mapped pool of their shard, or streamed over TCP. CMA (the kernel's
            // copies between processes) serves segments, which a client of the store does not use.
            cma: false,
            stream: config.tcp && config.rdma.mode != RdmaUse::Require,
            hedge_ns: config.hedge.as_nanos().min(u64::MAX.into()) as u64,
            spread: config.spread,
            ..Config::default()
        };
        let (rdma, tls) = (config.rdma.devices()?, link.keychain(config.data_tls)?);
        let unacknowledged = Duration::from_nanos(Limits::UNACKNOWLEDGED_NS);
        let host =
            HostConfig { verify_shared: config.verify_shared, rdma, tls, unacknowledged, ..HostConfig::default() };
        let mut initiator = Initiator::new(client, &host, config.pacing)?;
        initiator.set_map((*first.map).clone());
        let (deadline, state, reports) = (config.deadline, first.state, Reports::default());
        let mut requester = Self { initiator, link, deadline, seen_map, seen_ticket: 0, state, owners: None, reports };
        requester.follow_map();
        Ok(requester)
    }

    pub(super) const fn link(&self) -> &ControlLink {
        &self.link
    }

    pub(crate) const fn initiator(&mut self) -> &mut Initiator {
        &mut self.initiator
    }

    pub(super) const fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Sets the deadline of later batches; returns the former one.
    pub(super) const fn replace_deadline(&mut self, deadline: Duration) -> Duration {
        core::mem::replace(&mut self.deadline, deadline)
    }

    pub(super) fn register(&mut self, region: Arc<Region>) -> Buffer {
        let index = self.initiator.add_buffer(Arc::clone(&region));
        Buffer::new(region, index)
    }

    pub(super) fn register_device(&mut self, memory: Arc<DeviceMemory>) -> Result<DeviceBuffer, Error> {
        let index = self.initiator.add_device_buffer(Arc::clone(&memory)).map_err(kvplane_transfer::Error::Device)?;
        Ok(DeviceBuffer::new(memory, index))
    }

    #[allow(clippy::needless_pass_by_value, reason = "the buffer is of no use afterwards")]
    pub(super) fn unregister_device(&mut self, buffer: DeviceBuffer) {
        self.initiator.remove_buffer(buffer.index());
    }

    #[allow(clippy::needless_pass_by_value, reason = "the buffer is of no use afterwards")]
    pub(super) fn unregister(&mut self, buffer: Buffer) {
        self.initiator.remove_buffer(buffer.index());
    }

    pub(super) fn metrics(&mut self) -> Metrics {
        let mut metrics = Metrics::default();
        let devices = self.initiator.device_names();
        metrics.add(0, self.initiator.books(), &devices, &|_| String::new());
        metrics.staging = self.initiator.staging();
        metrics.pool_reads = self.initiator.host_counters().pool_reads;
        metrics
    }

    /// Switches to the newest map and ticket.
    pub(crate) fn follow_map(&mut self) {
        let ticket = self.link.ticket_generation();
        if ticket != self.seen_ticket
            && let Some(credential) = self.link.credential()
        {
            self.seen_ticket = ticket;
            self.initiator.set_credential(credential);
        }
        let generation = self.link.map_generation();
        if generation != self.seen_map
            && let Some(known) = self.link.state_map()
        {
            self.seen_map = generation;
            let map = (*known.map).clone();
            // A control plane that lost its state numbers epochs from the start. The old map is used until nodes
            // join the new state.
            if self.state == known.state {
                self.initiator.set_map(map);
            } else if !map.members.is_empty() {
                self.state = known.state;
                self.initiator.adopt_map(map);
            }
        }
    }

    /// Returns the newest map.
    pub(super) fn map(&self) -> Result<Arc<ClusterMap>, Error> {
        self.link.map().ok_or(Error::NoMap)
    }

    /// Returns the owners by the newest map, computed once for each.
    pub(super) fn owners(&mut self) -> Result<Arc<Owners>, Error> {
        let generation = self.link.map_generation();
        if let Some((_, owners)) = self.owners.as_ref().filter(|(of, _)| *of == generation) {
            return Ok(Arc::clone(owners));
        }
        let owners = Arc::new(Owners::of(self.map()?));
        self.owners = Some((generation, Arc::clone(&owners)));
        Ok(owners)
    }

    /// Returns the nodes that this client is better off without for now: they are suspect, or have owed replies for so
    /// long that they are reported to the control plane.
    pub(super) fn silent_nodes(&mut self) -> HashSet<NodeId> {
        let books = self.initiator.books();
        books.suspect_nodes().chain(silence::unresponsive(books).map(|(node, _)| node)).collect()
    }

    /// Submits a batch without waiting for it.
    pub(crate) fn submit(&mut self, requests: &[Request], puts: &PutBook) -> Result<BatchId, Error> {
        self.prepare()?;
        Ok(self.initiator.submit_puts(requests, puts, self.deadline)?)
    }

    /// Runs puts of a book as one batch and returns their results in order.
    pub(super) fn run_puts(&mut self, requests: &[Request], puts: &PutBook) -> Result<Vec<TaskResult>, Error> {
        let batch = self.submit(requests, puts)?;
        self.wait(batch)?;
        Ok(self.take_results(batch))
    }

    /// Runs requests as one batch and returns their results in order.
    pub(super) fn run(&mut self, requests: &[Request]) -> Result<Vec<TaskResult>, Error> {
        self.prepare()?;
        let batch = self.initiator.submit(requests, self.deadline)?;
        self.wait(batch)?;
        Ok(self.take_results(batch))
    }

    pub(super) fn run_one(&mut self, request: Request) -> Result<TaskResult, Error> {
        self.prepare()?;
        let batch = self.initiator.submit(&[request], self.deadline)?;
        self.wait(batch)?;
        let result = self.initiator.results(batch)[0];
        self.initiator.release(batch);
        Ok(result)
    }

    /// Requests a page of the objects of the shard that owns a digest: the status, and the page as it is encoded.
    pub(super) fn list(&mut self, digest: Digest, from: PageQuery) -> Result<(Status, Option<Vec<u8>>), Error> {
        let batch = self.initiator.submit(&[Request::List(digest, from)], self.deadline)?;
        self.wait(batch)?;
        let status = self.initiator.results(batch)[0].status;
        let body = self.initiator.take_description(batch);
        self.initiator.release(batch);
        Ok((status, body))
    }

    /// Queries the existence of `count` objects. Each owner gets one request for every 32,768 of them, and replies with
    /// one bit for each.
    pub(super) fn ask(&mut self, count: usize, mut digest: impl FnMut(usize) -> Digest) -> Result<Answers, Error> {
        self.prepare()?;
        let (mut open, mut refused, mut digests) = (Vec::new(), None, Vec::with_capacity(TOGETHER.min(count)));
        for from in (0..count).step_by(TOGETHER) {
            digests.clear();
            digests.extend((from..count.min(from + TOGETHER)).map(&mut digest));
            match self.initiator.submit_asks(&digests, self.deadline) {
                Ok(batch) => open.push((from, batch)),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
            self.initiator.poll()?;
        }
        let mut answers = Answers { found: Vec::with_capacity(count), heads: Vec::new(), unanswered: Vec::new() };
        for (from, batch) in open {
            self.wait(batch)?;
            answers.found.extend_from_slice(self.initiator.batches().found(batch));
            answers.heads.extend(self.initiator.batches().found_heads(batch).iter().map(|at| from + at));
            let unanswered = self.initiator.batches().unanswered(batch).into_iter();
            answers.unanswered.extend(unanswered.map(|(at, status)| (from + at, status)));
            self.initiator.release(batch);
        }
        match refused {
            Some(error) => Err(error.into()),
            None => Ok(answers),
        }
    }

    /// Prepares a submission: switches to the newest map, and fails once the caller's waits were interrupted.
    fn prepare(&mut self) -> Result<(), Error> {
        self.follow_map();
        if interrupt::is_ended() { Err(Error::interrupted()) } else { Ok(()) }
    }

    /// Waits until a batch is complete.
    fn wait(&mut self, batch: BatchId) -> Result<(), Error> {
        let mut withdrawn = false;
        while !self.initiator.is_complete(batch) {
            self.round()?;
            self.reports.send(&mut self.initiator, &self.link);
            if !withdrawn && interrupt::ended() {
                // The batch completes when nothing accesses its memory any more.
                self.initiator.cancel(batch);
                withdrawn = true;
            }
        }
        self.forget_completions();
        Ok(())
    }

    /// Runs one poll round of all batches in flight, and follows the map.
    pub(super) fn round(&mut self) -> Result<(), Error> {
        // After failures, a newer map may be all that a batch waits for.
        let longest = if self.initiator.take_map_wanted() {
            self.link.probe();
            MAP_LOOK.min(ROUND)
        } else {
            ROUND
        };
        self.initiator.round(longest, || false)?;
        self.follow_map();
        Ok(())
    }

    /// Returns the results of a complete batch and releases it.
    pub(super) fn take_results(&mut self, batch: BatchId) -> Vec<TaskResult> {
        let results = self.initiator.results(batch).to_vec();
        self.initiator.release(batch);
        results
    }

    /// Drops the reports of completions: callers that wait for a batch ask for its state instead.
    pub(super) fn forget_completions(&mut self) {
        while self.initiator.poll_done().is_some() {}
    }

    /// Returns the error of an operation that failed with this status.
    pub(super) fn problem(&self, what: String, status: Status) -> Error {
        let cause = match status {
            Status::Unreachable | Status::DeadlineExceeded | Status::Incompatible => {
                self.initiator.last_problem().map(str::to_owned)
            }
            Status::TicketEnded => self.link.holder().why_ended(),
            _ => None,
        };
        Error::Status { what, status, cause }
    }

    /// Returns whether the object of a reply exists.
    pub(super) fn present(&self, result: TaskResult, what: &str) -> Result<bool, Error> {
        match result.status {
            Status::Ok => Ok(true),
            Status::NotFound => Ok(false),
            status => Err(self.problem(what.to_owned(), status)),
        }
    }

    /// Returns the outcome of a put of `bytes`.
    pub(super) fn stored(&self, result: TaskResult, bytes: u64) -> Result<Put, Error> {
        match result.status {
            Status::Ok => Ok(Put::Stored(result.version)),
            Status::Exists => Ok(Put::Exists),
            status => Err(self.problem(format!("put of {bytes} bytes"), status)),
        }
    }
}

//! Engine: its start and its end, and the calls of its users.

pub(crate) mod explain;
mod obstacle;
mod plan;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvplane_engine::{HostConfig, Listen, Pacing, Shard, ShardConfig, ShardHandle, ShardSnapshot, cpu};
use kvplane_mooncake::{Native, NativeRails, Notice};
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_proto::{Limits, Status, Version};
use kvplane_store::service::Identity;
use kvplane_sys::device::Backing;
use kvplane_sys::random::random_u64;
use kvplane_ticket::{Challenges, Credential, TicketKey};

use crate::batch::request::{ScatterRequest, SubmitOptions, TransferRequest, check_overlap};
use crate::batch::{Batch, State};
use crate::config::{self, TransferEngineConfig, directory_of, socket_path};
use crate::directory::notices::NoticeSender;
use crate::directory::{self, Directory};
use crate::driver::Work;
use crate::driver::initiators::Initiators;
use crate::error::{ArgumentError, Error};
use crate::lock;
use crate::memory::{Memory, RegisterOptions};
use crate::metrics::{self, Exposition, Metrics};
use crate::rails;
use crate::segment::table::TableLock;
use crate::segment::{SegmentHandle, SegmentInfo};
use crate::segments::Segments;
use crate::session::Session;
use explain::{Explainer, Explanation};
use plan::{Obstacle, Plan, late, too_many};

/// Transfer engine: registers memory, and moves bytes between it and the memory of peers. Any thread may use it.
///
/// The calls that most programs need are its own; the others are at its [segments](Self::segments) and its
/// [directory](Self::directory).
///
/// Dropping it cancels transfers in flight, waits until nothing accesses their memory any more, and stops serving.
pub struct TransferEngine {
    config: TransferEngineConfig,
    shard: Arc<ShardHandle>,
    directory: Arc<Directory>,
    notices: Arc<NoticeSender>,
    memory: Memory,
    segments: Segments,
    initiators: Arc<Initiators>,
    /// State that a metrics scrape keeps for the next one.
    exposition: Mutex<Exposition>,
}

impl core::fmt::Debug for TransferEngine {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("TransferEngine").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// Returns the rails to announce: the devices that the serving thread has opened.
fn told_rails(host: &HostConfig, shard: &ShardHandle) -> Result<Option<NativeRails>, Error> {
    let Some(devices) = &host.rdma else { return Ok(None) };
    let names: Vec<String> = shard.snapshot()?.rdma.into_iter().map(|device| device.name).collect();
    Ok(rails::near::told(&devices.near, &names))
}

/// Attempt to submit a batch; another one follows if the description of a segment is outdated.
struct Attempt<'a> {
    options: &'a SubmitOptions,
    /// Time of the submission.
    start_ns: u64,
    deadline_ns: u64,
    /// Segments whose description was renewed meanwhile.
    refreshed: &'a [SegmentHandle],
}

impl TransferEngine {
    /// Starts an engine.
    ///
    /// # Errors
    /// When the port is taken or the kernel refuses a resource; the error names it and the next step.
    pub fn start(config: TransferEngineConfig) -> Result<Self, Error> {
        Self::start_with(config, None)
    }

    /// Starts an engine that serves only peers which prove a ticket, on any address: without a handshake port, and
    /// without one for stock engines, because their protocols have no tickets. No peer is admitted before
    /// [`Self::learn_keys`].
    ///
    /// # Errors
    /// Errors of [`Self::start`].
    pub fn start_guarded(config: TransferEngineConfig, challenges: Challenges) -> Result<Self, Error> {
        let config = TransferEngineConfig { stock_peers: false, native: true, ..config };
        Self::start_with(config, Some(challenges))
    }

    fn start_with(mut config: TransferEngineConfig, tickets: Option<Challenges>) -> Result<Self, Error> {
        let guarded = tickets.is_some();
        config.check(guarded)?;
        config.rdma.heed(&config.environment);
        let listening = if guarded { None } else { Some(directory::listen(&config)?) };
        let sockets = directory_of(&config)?;
        let unique = random_u64()?.max(1);
        let host = config::host(&config)?;
        let shard = Shard::start(ShardConfig {
            identity: Identity {
                cluster: config.cluster.clone(),
                node: NodeId(unique),
                incarnation: Incarnation(1),
                shard: ShardId(0),
                segment_name: String::new(),
            },
            core: config.core,
            pacing: config.pacing,
            listen: Listen {
                tcp: SocketAddr::new(config.listen.ip(), config.data_port),
                shm: None,
                mooncake: config.stock_peers.then(|| SocketAddr::new(config.listen.ip(), config.stock_data_port)),
                handed: None,
            },
            pool: None,
            store: None,
            first_version: Version(1),
            host: HostConfig { tickets, ..host.clone() },
        });
        // The name of the socket contains the port, which is known once the listener is bound.
        let shard = shard?;
        let socket = config.shared_memory.then(|| socket_path(&sockets, shard.address()));
        if let Some(socket) = &socket {
            shard.listen_shm(socket.clone())?;
        }
        let native = Native {
            tcp: Some(SocketAddr::new(config.announced(), shard.address().port())),
            shm: socket.map(|socket| socket.display().to_string()).unwrap_or_default(),
            host: cpu::boot_id().unwrap_or_default(),
            pid: std::process::id(),
            incarnation: unique,
            regions: Vec::new(),
            rails: told_rails(&host, &shard)?,
            other: serde_json::Map::new(),
        };
        let near = host.rdma.as_ref().map(|devices| Arc::clone(&devices.near)).unwrap_or_default();
        let rdma = host.rdma.is_some();
        let directory = Arc::new(Directory::start(&config, listening, native, shard.mooncake(), near, rdma)?);
        Self::with(config, Arc::new(shard), directory, &host)
    }

    /// Creates the engine around its serving thread and its directory.
    fn with(
        config: TransferEngineConfig,
        shard: Arc<ShardHandle>,
        directory: Arc<Directory>,
        host: &HostConfig,
    ) -> Result<Self, Error> {
        let table = TableLock::default();
        let departures = table.read().peers.departures().clone();
        let initiators = Arc::new(Initiators::start(&config, host, directory.paths().stock(), &departures)?);
        Ok(Self {
            notices: Arc::new(NoticeSender::new(Arc::clone(&directory))),
            memory: Memory::new(&config, &shard, &directory, &initiators),
            segments: Segments::new(table, config.files, &directory, &initiators),
            config,
            shard,
            directory,
            initiators,
            exposition: Mutex::default(),
        })
    }

    /// Passes on the keys that verify tickets, the control plane's ticket time in seconds that they came with, and this
    /// engine's own ticket.
    ///
    /// # Errors
    /// When the serving thread does not accept them.
    pub fn learn_keys(&self, keys: Vec<TicketKey>, seconds: u64, credential: &Arc<Credential>) -> Result<(), Error> {
        self.shard.learn_keys(keys, seconds)?;
        self.initiators.set_credential(credential);
        // Wakes connections that wait for a newer ticket.
        self.initiators.settle();
        Ok(())
    }

    /// Returns the name by which peers open its segment: peer to peer, the address of its handshake daemon, `ip:port`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.directory.name()
    }

    /// Returns the directory: what is published under the engine's name, and the lookup of its peers.
    #[must_use]
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Returns the open segments, for what goes beyond opening and closing them.
    #[must_use]
    pub const fn segments(&self) -> &Segments {
        &self.segments
    }

    /// Returns the initiators.
    #[cfg(test)]
    pub(crate) fn initiators(&self) -> &Initiators {
        &self.initiators
    }

    /// Registers memory of the host or of a device: transfers can use it as source and destination, and peers can
    /// access it if the options permit. The bytes of a device pass through pinned memory of the host on both sides.
    ///
    /// # Errors
    /// When it overlaps registered memory, the limit of regions is reached, the location is malformed or not that of
    /// the memory, or a device refuses.
    pub fn register(&self, memory: impl Into<Backing>, options: &RegisterOptions) -> Result<(), Error> {
        self.memory.register(&[memory.into()], options)
    }

    /// Registers several pieces of memory, or none of them when one is rejected.
    ///
    /// # Errors
    /// Errors of [`Self::register`].
    pub fn register_batch(
        &self,
        memory: &[impl Into<Backing> + Clone],
        options: &RegisterOptions,
    ) -> Result<(), Error> {
        let memory: Vec<Backing> = memory.iter().cloned().map(Into::into).collect();
        self.memory.register(&memory, options)
    }

    /// Unregisters the memory at this address. Returns when neither peers nor local transfers use it any more; the wait
    /// is bounded by the transfers' deadlines and by
    /// [`TransferEngineConfig::quiet_deadline`](crate::TransferEngineConfig::quiet_deadline).
    ///
    /// # Errors
    /// When nothing is registered there. When peers still use the memory after that deadline, or the serving thread
    /// does not answer; the error names them and the next step: the memory must not be freed then. No new transfer uses
    /// it, and it cannot be registered again, until this was called again and has succeeded.
    pub fn unregister(&self, address: u64) -> Result<(), Error> {
        self.memory.unregister(&[address])
    }

    /// Unregisters several regions, or none when nothing is registered at one of the addresses.
    ///
    /// # Errors
    /// Errors of [`Self::unregister`].
    pub fn unregister_batch(&self, addresses: &[u64]) -> Result<(), Error> {
        self.memory.unregister(addresses)
    }

    /// Announces this engine's memory over RDMA from now on, to stock Mooncake engines, which use one protocol for each
    /// segment. `matrix` assigns devices to memory in Mooncake's form: `{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}`; `None`
    /// assigns all devices to all memory.
    ///
    /// As with TCP, anyone who reaches the handshake port and the device can access the memory: there is no
    /// authentication.
    ///
    /// # Errors
    /// When stock engines are not served, no device is usable, or the matrix is malformed or names a device that does
    /// not exist.
    pub fn announce_rdma(&self, matrix: Option<&str>) -> Result<(), Error> {
        self.memory.announce_rdma(matrix)
    }

    /// Opens the segment of the engine with this name; this engine's own is [`SegmentHandle::LOCAL`]. The handle of an
    /// open segment is returned again, without a request to its owner.
    ///
    /// `file:///path` opens a file of this host, whose addresses are offsets in it. Options follow a `?`, separated by
    /// `&`: `create=SIZE` creates a missing file with this length, `readonly` rejects writes, `buffered` goes through
    /// the page cache even where direct I/O would work. The length of the segment is that at the time of opening.
    ///
    /// # Errors
    /// When the name is no address, or no engine answers there; when the file cannot be opened, or is open for writing
    /// with other options.
    pub fn open_segment(&self, name: &str) -> Result<SegmentHandle, Error> {
        self.segments.open(name)
    }

    /// Closes a segment once; the last close forgets it. Batches in flight are not affected.
    ///
    /// # Errors
    /// When the handle is not open.
    pub fn close_segment(&self, handle: SegmentHandle) -> Result<(), Error> {
        self.segments.close(handle)
    }

    /// Returns the description of a segment, without a request to its owner.
    ///
    /// # Errors
    /// When the handle is not open.
    pub fn segment_info(&self, handle: SegmentHandle) -> Result<SegmentInfo, Error> {
        if handle == SegmentHandle::LOCAL {
            return Ok(SegmentInfo { name: self.name().to_owned(), buffers: self.memory.buffers(), file: None });
        }
        self.segments.info(handle)
    }

    /// Delivers a notice to the owner of a segment, which reads it with [`Self::take_notices`]. Returns when it was
    /// accepted.
    ///
    /// # Errors
    /// When the handle is not open, or the notice was not accepted.
    pub fn notify(&self, handle: SegmentHandle, notice: &Notice) -> Result<(), Error> {
        let name = self.segments.name_of(handle)?;
        let (directory, notice) = (Arc::clone(&self.directory), notice.clone());
        directory::aside(move || directory.notify(&name, &notice))
    }

    /// Returns the notices that peers delivered here, oldest first, and removes them. The number of waiting notices is
    /// limited; further ones are refused, which their senders learn.
    #[must_use]
    pub fn take_notices(&self) -> Vec<Notice> {
        self.directory.publication().take_notices()
    }

    /// Creates a session, the fast path of a single thread.
    ///
    /// # Errors
    /// When the kernel refuses an io_uring.
    pub fn session(&self) -> Result<Session, Error> {
        self.session_with(self.config.pacing)
    }

    /// Like [`Self::session`], with a strategy of waiting that differs from the serving thread's.
    ///
    /// # Errors
    /// When the kernel refuses an io_uring.
    pub fn session_with(&self, pacing: Pacing) -> Result<Session, Error> {
        let config = TransferEngineConfig { pacing, ..self.config.clone() };
        Session::new(&config, Arc::clone(&self.directory))
    }

    /// Returns all transports to the engine of this name, and which is chosen. Requests the peer's descriptor, opens
    /// its segment, and probes the usable transports. For the name of a file, describes how it would be read and
    /// written.
    ///
    /// # Errors
    /// When no engine answers under this name, or there is no such file.
    pub fn explain(&self, name: &str) -> Result<Explanation, Error> {
        let (config, directory, segments, initiators) =
            (&self.config, &*self.directory, &self.segments, &*self.initiators);
        Explainer { config, directory, segments, initiators }.explain(name)
    }

    /// Returns the counters so far. Interrupts each initiator for a moment.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let (notices_sent, notices_failed) = self.notices.counts();
        let leaked_bytes = kvplane_sys::ring::leaked().bytes;
        let mut metrics = Metrics { notices_sent, notices_failed, leaked_bytes, ..Metrics::default() };
        self.initiators.add_to(&mut metrics, self.name());
        metrics
    }

    /// Returns the counters as Prometheus text: counters and histograms by peer, transport and rail. A limited number
    /// of peers has series of its own, the rest is combined under the peer `other`. Interrupts each initiator for a
    /// moment, and queries the serving thread.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let metrics = self.metrics();
        let shown = lock(&self.exposition).scrape(&metrics);
        // If the serving thread has ended, its metrics are missing.
        metrics::text(&metrics, &shown, self.snapshot().ok().as_ref())
    }

    /// Returns a snapshot of the serving thread.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn snapshot(&self) -> Result<ShardSnapshot, Error> {
        Ok(self.shard.snapshot()?)
    }

    /// Starts transfers as one batch; validated as a whole before any has an effect. Requests may name different
    /// segments. A batch without requests is complete at once.
    ///
    /// Transfers within local memory are complete when this returns.
    ///
    /// # Errors
    /// When a request is malformed or outside of registered memory, which the error names, or a limit of transfers in
    /// flight is reached.
    pub fn submit(&self, requests: &[TransferRequest], options: &SubmitOptions) -> Result<Batch, Error> {
        self.submit_tasks(requests, None, requests.len(), options)
    }

    /// Starts sets of ranges as one batch, with one task and one result for each set.
    ///
    /// # Errors
    /// Errors of [`Self::submit`]; requests are counted over all sets.
    pub fn submit_scatter(&self, requests: &[ScatterRequest<'_>], options: &SubmitOptions) -> Result<Batch, Error> {
        let ranges = requests.iter().try_fold(0u64, |sum, one| sum.checked_add(one.count()));
        let ranges = ranges.unwrap_or(u64::MAX);
        if ranges > Limits::BATCH_REQUESTS as u64 {
            return Err(too_many(ranges));
        }
        let (mut flat, mut owners) = (Vec::with_capacity(ranges as usize), Vec::with_capacity(ranges as usize));
        for (task, request) in requests.iter().enumerate() {
            if !request.expand(&mut flat) {
                return Err(ArgumentError::RangesTooLong { request: task }.into());
            }
            owners.resize(flat.len(), task as u32);
        }
        self.submit_tasks(&flat, Some(&owners), requests.len(), options)
    }

    fn submit_tasks(
        &self,
        requests: &[TransferRequest],
        owners: Option<&[u32]>,
        tasks: usize,
        options: &SubmitOptions,
    ) -> Result<Batch, Error> {
        if requests.len().max(tasks) > Limits::BATCH_REQUESTS {
            return Err(too_many(requests.len().max(tasks) as u64));
        }
        let start_ns = cpu::monotonic_ns();
        let timeout = options.deadline.unwrap_or(self.config.deadline);
        let deadline_ns = start_ns.saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        let mut refreshed = Vec::new();
        loop {
            match self.try_submit(
                requests,
                owners,
                tasks,
                &Attempt { options, start_ns, deadline_ns, refreshed: &refreshed },
            ) {
                Ok(batch) => return Ok(batch),
                Err(Obstacle::Error(error)) => return Err(error),
                Err(Obstacle::Refresh(handles)) => {
                    let left_ns = deadline_ns.saturating_sub(cpu::monotonic_ns());
                    if left_ns == 0 {
                        return Err(late(&self.segments.name_of(handles[0])?));
                    }
                    self.segments.refresh_these(&handles, Duration::from_nanos(left_ns))?;
                    refreshed.extend(handles);
                }
            }
        }
    }

    fn try_submit(
        &self,
        requests: &[TransferRequest],
        owners: Option<&[u32]>,
        tasks: usize,
        attempt: &Attempt<'_>,
    ) -> Result<Batch, Obstacle> {
        let Attempt { options, start_ns, deadline_ns, refreshed } = *attempt;
        let (driver, state, work, copies) = {
            // Held until the batch is registered as a user of its buffers.
            let map = self.memory.read();
            let mut plan = Plan::of(requests, owners, &map, |handle| self.segments.get(handle), refreshed)?;
            let driver = if plan.needs_first() { self.initiators.first() } else { self.initiators.of_thread() };
            check_overlap(requests)?;
            plan.divide(tasks, self.config.slice_bytes)?;
            plan.parts.background = options.background;
            if let Some(notice) = &options.notice {
                let reserve = |target| self.notices.reserve(&self.segments.name_of(target)?, notice);
                let notices: Result<Vec<_>, Error> = options.notice_to.of(requests).into_iter().map(reserve).collect();
                plan.parts.notices = Some((Arc::clone(&self.notices), notices?));
            }
            if !plan.requests.is_empty() {
                driver.admit(plan.parts.slices)?;
            }
            let state = Arc::new(State::new(self.initiators.next_batch(), plan.parts));
            (
                driver,
                state,
                Work {
                    requests: plan.requests,
                    options: options.of_client(start_ns, deadline_ns),
                    stream: options.stream,
                },
                plan.copies,
            )
        };
        state.end_empty();
        let problem = driver.copies.carry_out(&copies, start_ns, work.stream, |number, result| {
            let (status, bytes) = result.map_or_else(|status| (status, 0), |bytes| (Status::Ok, bytes));
            state.part_ended((work.requests.len() + number) as u32, status, bytes);
        });
        match work.requests.is_empty() {
            true => state.finish(problem.as_deref()),
            false => driver.submit(&state, work),
        }
        Ok(Batch::new(state, Arc::clone(driver)))
    }
}

impl Drop for TransferEngine {
    fn drop(&mut self) {
        self.initiators.stop();
        // Stopped explicitly, not by the drop of the last handle: a handshake may hold one for a moment.
        self.shard.stop();
    }
}

//! Host with a service, for a shard: its connections, the memory and the SSD tier of its store, and a client that
//! fetches for it.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use kvplane_client::Client;
use kvplane_proto::map::SlotOwners;
use kvplane_proto::{Digest, SegmentId};
use kvplane_store::service::{ScrubPace, Service, Tiering};
use kvplane_sys::device::{Device, DeviceError, DeviceId, DeviceMemory};
use kvplane_sys::{Doorbell, Region, cpu};
use kvplane_transport::mooncake::ServerCounters;
use kvplane_transport::shm::hang_up;
use kvplane_transport::{ConnectionId, Event, FaultCounters, Input, Rdma, Target};

use super::config::HostConfig;
use super::device_pool::DevicePool;
use super::fetch::Fetcher;
use super::reactor::Reactor;
use super::reactor::connections::{Connections, LentPayload, OfferAnswer};
use super::reactor::links::{Link, Role};
use super::reactor::pass::{Arrival, Pass};
use super::reports::{HostCounters, Reports};
use super::service_side::ServiceSide;
use super::service_side::served::DeviceSnapshot;
use super::shared::SharedStore;
use super::tier::{STEP, TierDevice, TierOpenError};
use crate::staging::StagingCounters;

/// Host with a service.
pub struct ShardHost {
    reactor: Reactor,
    reports: Reports,
    service: ServiceSide,
    /// SSD tier of the service's store.
    tier: Option<TierDevice>,
    /// Shared tier of the service's store.
    shared: Option<SharedStore>,
    /// Device pool of the service's store.
    device_pool: Option<DevicePool>,
    /// Client that fetches objects from former owners of the shard's slots.
    fetcher: Option<Fetcher>,
}

impl ShardHost {
    /// Creates a host for this service, without connections. `pool` is the memory of the service's store: without it,
    /// there is neither a tier nor a client that fetches. `device_pool` is the device pool of the store, if it has one.
    ///
    /// # Errors
    /// If the kernel refuses a poller, the tier's device is unsuitable, or no memory can be pinned for the device pool.
    pub fn new(
        config: &HostConfig,
        mut service: Service,
        pool: Option<&Arc<Region>>,
        device_pool: Option<DevicePool>,
    ) -> io::Result<Self> {
        service.control().set_slow_after(config.slow_after_ns);
        let pace = ScrubPace { bytes_per_s: config.memory_scrub_bytes_per_s, ..ScrubPace::default() };
        service.control().set_memory_scrub(pace, cpu::monotonic_ns());
        if let Some(challenges) = &config.tickets {
            service.control().want_tickets(challenges.clone());
        }
        let mut connections = config.connections(pool.cloned())?;
        connections.tcp.limit_unauthenticated(config.unauthenticated);
        let mut service = ServiceSide::new(service, &mut connections, pool.cloned(), config.mooncake);
        if let Some(device_pool) = &device_pool {
            let memory = device_pool.memory();
            service.open_device(&mut connections, memory.device(), Some(memory)).map_err(io::Error::other)?;
        }
        let (mut tier, mut shared, mut fetcher) = (None, None, None);
        if let Some(pool) = pool {
            shared = config.shared.as_ref().map(|setup| SharedStore::new(setup, service.service(), pool));
            if let Some(setup) = &config.tier {
                tier = Some(TierDevice::new(setup, service.service(), pool, &connections.poller)?);
            }
            if let Some(fetch) = &config.fetch {
                let service = service.service();
                fetcher = Some(Fetcher::new(fetch, &mut connections, service, pool, config.verify_shared)?);
            }
        }
        let (reactor, reports) = (Reactor::new(connections), Reports::default());
        Ok(Self { reactor, reports, service, tier, shared, device_pool, fetcher })
    }

    /// Serves peers that connect to these listeners.
    ///
    /// # Errors
    /// If the kernel refuses to watch a listener.
    pub fn listen(&mut self, tcp: TcpListener, shm: Option<UnixListener>) -> io::Result<()> {
        self.reactor.connections.listen_tcp(tcp)?;
        match shm {
            Some(listener) => self.listen_shm(listener),
            None => Ok(()),
        }
    }

    /// Serves peers on this host that connect to this listener.
    ///
    /// # Errors
    /// If the kernel refuses to watch the listener.
    pub fn listen_shm(&mut self, listener: UnixListener) -> io::Result<()> {
        self.reactor.connections.listen_shm(listener)
    }

    /// Serves registered memory to stock Mooncake engines that connect to this listener, without any authentication.
    ///
    /// # Errors
    /// If the kernel refuses to watch the listener.
    pub fn listen_mooncake(&mut self, listener: TcpListener) -> io::Result<()> {
        self.service.listen_stock(&self.reactor.connections, listener)
    }

    /// Watches a doorbell that wakes the host.
    ///
    /// # Errors
    /// If the kernel refuses to watch the doorbell.
    pub fn watch_mailbox(&mut self, doorbell: Doorbell) -> io::Result<()> {
        if let Some(shared) = &mut self.shared {
            shared.open(doorbell.clone());
        }
        self.reactor.watch_mailbox(doorbell)
    }

    /// Runs one round. Returns true if it made progress.
    ///
    /// # Errors
    /// If the poller fails: the host cannot continue.
    pub fn poll(&mut self) -> io::Result<bool> {
        let something_came = self.reactor.look(|token| self.service.stock_ready(token))?;
        if let (Some(absence), Some(fetcher)) = (self.reactor.begin_round(something_came), &mut self.fetcher) {
            fetcher.side().note_absence(&absence);
        }
        // Arrivals come before answers, so that the answers to them leave in this round.
        let mut progress = self.take_arrivals();
        progress |= self.serve_devices();
        // Requests are answered before this host fetches from others.
        progress |= self.serve_store()?;
        progress |= self.serve_fetches();
        // Timers come after everything that could have ended or begun a wait.
        self.run_timers();
        self.service.release_unused(&mut self.reactor.connections, &mut self.reports);
        // Sends come last, as all of the above fills queues: frames that were queued in this round leave together.
        progress |= self.send_all();
        Ok(self.reactor.end_round(progress, something_came, &mut self.reports.counters))
    }

    /// Takes arrivals from the drivers: completions and events of connections first, as they free room that payloads
    /// need.
    fn take_arrivals(&mut self) -> bool {
        let now_ns = self.reactor.now_ns();
        let mut progress = self.reactor.connections.rdma.poll(now_ns);
        progress |= self.take_events(now_ns);
        // Answers on streams are queued at once, so that the limit on queued answers holds between two frames.
        progress |= self.take_inputs(Reactor::next_tcp, true);
        progress |= self.take_inputs(Reactor::next_rdma, true);
        progress |= self.take_inputs(Reactor::next_shm, false);
        progress
    }

    /// Drains the service's answers, then runs the tier and the device pool, which work on their results, then one step
    /// of each list, and of the checks of objects in memory.
    fn serve_store(&mut self) -> io::Result<bool> {
        let mut progress = self.drain_service();
        progress |= self.drive_tier(self.reactor.now_ns())?;
        if let Some(shared) = &mut self.shared {
            progress |= shared.drive(self.service.service(), self.reactor.now_ns());
        }
        if let Some(device_pool) = &mut self.device_pool {
            progress |= device_pool.drive(self.service.service(), self.reactor.now_ns());
        }
        progress |= self.service.drive_pool(self.reactor.now_ns());
        Ok(progress)
    }

    /// Takes copies between devices and pinned memory that are done: answers with their payloads leave, and writes are
    /// answered.
    fn serve_devices(&mut self) -> bool {
        let now_ns = self.reactor.now_ns();
        self.service.serve_devices(&mut self.reactor.connections, &mut self.reports, now_ns)
    }

    /// Handles completed fetches and submits the next ones; then serves stock engines.
    fn serve_fetches(&mut self) -> bool {
        let now_ns = self.reactor.now_ns();
        let mut progress = false;
        if let Some(fetcher) = &mut self.fetcher {
            progress |= fetcher.drive(&mut self.service, &mut self.reports, now_ns);
        }
        progress |= self.service.serve_stock(&self.reactor.connections, now_ns);
        progress
    }

    fn run_timers(&mut self) {
        let now_ns = self.reactor.now_ns();
        self.reactor.connections.expire(now_ns);
        self.service.run_timers(now_ns);
        if let Some(fetcher) = &mut self.fetcher {
            fetcher.side().run_timers(now_ns);
        }
    }

    /// Drains answers and fetches into the drivers, and has each driver send its queue.
    fn send_all(&mut self) -> bool {
        let now_ns = self.reactor.now_ns();
        let mut progress = self.drain_service();
        if let Some(fetcher) = &mut self.fetcher {
            progress |= fetcher.side().drain(&mut self.reactor, &mut self.reports, now_ns);
        }
        // Copies of requests that came in this round, in one batch.
        self.service.flush_devices(&mut self.reports, now_ns);
        self.reactor.connections.flush();
        self.service.round_over();
        progress
    }

    fn take_events(&mut self, now_ns: u64) -> bool {
        let mut progress = false;
        while let Some(event) = self.reactor.connections.tcp.poll_event() {
            progress = true;
            self.event(event, Link::Tcp, now_ns);
        }
        while let Some(event) = self.reactor.connections.shm.poll_event() {
            progress = true;
            self.event(event, Link::Shm, now_ns);
        }
        while let Some(event) = self.reactor.connections.rdma.poll_event() {
            progress = true;
            self.event(event, Link::Rdma, self.reactor.now_ns());
        }
        if let Some(problem) = self.reactor.connections.rdma.take_problem() {
            self.reports.problem(problem);
        }
        self.service.offer_segments(&mut self.reactor.connections);
        progress
    }

    fn event(&mut self, event: Event, link: fn(ConnectionId) -> Link, now_ns: u64) {
        let connections = &mut self.reactor.connections;
        match event {
            Event::Accepted(id) => {
                self.reports.counters.accepted += 1;
                self.service.accepted(connections, link(id), now_ns);
            }
            Event::Connected(id) => {
                if let Some(fetcher) = &mut self.fetcher {
                    fetcher.side().connected(connections, link(id), now_ns);
                }
            }
            Event::Sent(hold) => match (connections.take_back(hold), &mut self.fetcher) {
                (LentPayload::Answer(hold, leaving), _) => self.service.payload_left(hold, &leaving, now_ns),
                (LentPayload::Staged(hold, leaving, number), _) => {
                    self.service.staged_left(hold, &leaving, number, now_ns);
                }
                (LentPayload::Upload(request), Some(fetcher)) => fetcher.side().upload_over(request),
                (LentPayload::Upload(_), None) => {}
            },
            Event::Gone(id, why) => {
                let link = link(id);
                let role = connections.gone(link);
                self.reports.connection_ended(&why, now_ns);
                if role == Role::Served {
                    self.service.gone(link, now_ns);
                }
                if let Some(fetcher) = &mut self.fetcher {
                    fetcher.side().gone(link, role, &why, now_ns);
                }
            }
        }
    }

    /// Takes arrivals on the connections of one driver; `drains`: answers are passed to the drivers in between.
    /// Inlined, so that the driver is known at the call site: this runs for every frame.
    #[inline(always)]
    fn take_inputs(&mut self, next: fn(&mut Reactor, &mut Pass) -> Option<Arrival>, drains: bool) -> bool {
        let mut progress = false;
        let mut pass = self.reactor.begin_pass();
        while let Some(arrival) = next(&mut self.reactor, &mut pass) {
            progress = true;
            self.take_input(&arrival, pass.body());
            if drains {
                self.drain_service();
            }
        }
        progress
    }

    fn take_input(&mut self, arrival: &Arrival, body: &[u8]) {
        match &arrival.input {
            Input::Wait => {}
            Input::Payload(checksum) => self.payload_done(arrival.link, *checksum, arrival.now_ns),
            Input::Frame(header) => {
                let Self { reactor, reports, service, fetcher, .. } = self;
                let (connections, link, now_ns) = (&mut reactor.connections, arrival.link, arrival.now_ns);
                let target = match (connections.role(link), fetcher) {
                    (Role::Served, _) => service.take_frame(connections, link, header, body, now_ns),
                    (Role::Carrier(id), fetcher) => {
                        let answer = connections.take_offer_answer(id, header, body);
                        if matches!(answer, OfferAnswer::Broken) {
                            reports.broken();
                        }
                        if let Some(fetcher) = fetcher {
                            fetcher.side().offer_answered(&answer, now_ns);
                        }
                        Some(Target::Discard)
                    }
                    (_, Some(fetcher)) => {
                        Some(fetcher.side().take_frame(connections, reports, link, header, body, now_ns))
                    }
                    (_, None) => Some(Target::Discard),
                };
                if header.payload_bytes > 0
                    && let Some(target) = target
                    && let Some(Input::Payload(checksum)) = connections.receive_payload(link, target)
                {
                    self.payload_done(link, checksum, now_ns);
                }
            }
        }
    }

    fn payload_done(&mut self, link: Link, checksum: Option<u64>, now_ns: u64) {
        if self.reactor.connections.role(link) == Role::Served {
            self.service.payload_done(link, checksum, now_ns);
        } else if let Some(fetcher) = &mut self.fetcher {
            fetcher.side().payload_done(&mut self.reactor.connections, link, checksum, now_ns);
        }
    }

    #[inline]
    fn drain_service(&mut self) -> bool {
        let now_ns = self.reactor.now_ns();
        self.service.drain(&mut self.reactor.connections, &mut self.reports, now_ns)
    }

    fn drive_tier(&mut self, now_ns: u64) -> io::Result<bool> {
        match &mut self.tier {
            Some(tier) => tier.drive(self.service.service(), &mut self.reports, now_ns),
            None => Ok(false),
        }
    }

    /// Returns the time of the current round: at most a few empty rounds old.
    #[must_use]
    pub const fn now_ns(&self) -> u64 {
        self.reactor.now_ns()
    }

    /// Waits for the next event, at most `longest`. `pending` is called after the host has announced its sleep, and
    /// returns true if the mailbox is not empty.
    ///
    /// # Errors
    /// If the poller fails.
    pub fn park(&mut self, longest: Duration, pending: impl FnOnce() -> bool) -> io::Result<()> {
        let device_is_polled = self.tier.as_ref().is_some_and(TierDevice::must_be_polled)
            || self.device_pool.as_ref().is_some_and(DevicePool::must_be_polled)
            || self.service.must_be_polled();
        if device_is_polled || self.reactor.connections.have_work() || self.service.stock_server().has_work() {
            cpu::pause();
            return Ok(());
        }
        let longest = longest.min(self.service.longest_park(self.reactor.now_ns()));
        let (timeout, shared) = (self.poll_timeout(), &self.shared);
        let is_ready = || shared.as_ref().is_some_and(SharedStore::is_ready);
        let slept = self.reactor.park(longest, timeout, || !pending() && !is_ready())?;
        self.reports.counters.parks += u64::from(slept);
        Ok(())
    }

    fn poll_timeout(&self) -> Option<u64> {
        let fetches = self.fetcher.as_ref().and_then(|fetcher| fetcher.side_ref().poll_timeout());
        [self.service.poll_timeout(), fetches].into_iter().flatten().min()
    }

    /// Waits until the tier's device is open, at most `longest`; without a tier, not at all. Recovery continues after
    /// that.
    ///
    /// # Errors
    /// If the device belongs to another owner, is damaged, or does not answer: the text gives the next step.
    pub fn open_tier(&mut self, longest: Duration) -> Result<(), TierOpenError> {
        let until = Instant::now() + longest;
        while let Some(tier) = &mut self.tier {
            let service = self.service.service();
            let driven = tier.drive(service, &mut self.reports, cpu::monotonic_ns());
            driven.map_err(|source| TierOpenError::Device { path: tier.path_buf(), source })?;
            if tier.take_opening(service, &self.reports)?.is_some() {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(TierOpenError::Silent { path: tier.path_buf(), waited: longest });
            }
            self.wait_for_device().map_err(TierOpenError::Wait)?;
        }
        Ok(())
    }

    /// Flushes pending writes of the tier, at most for `longest`, after what waits for the shared tier was uploaded, at
    /// most for `uploads`. Returns true if all are written to the tier.
    pub fn close_tier(&mut self, longest: Duration, uploads: Duration) -> bool {
        if let Some(shared) = &mut self.shared {
            shared.close(self.service.service(), uploads);
        }
        let until = Instant::now() + longest;
        while self.tier.is_some() {
            if self.service.service().tier_mut().is_none_or(Tiering::close) {
                return true;
            }
            let went_on = self.drive_tier(cpu::monotonic_ns());
            if went_on.is_err() || Instant::now() >= until || self.wait_for_device().is_err() {
                return false;
            }
        }
        true
    }

    fn wait_for_device(&mut self) -> io::Result<()> {
        let busy = self.tier.as_ref().is_some_and(TierDevice::must_be_polled);
        let step = if busy { Duration::ZERO } else { STEP.min(self.reactor.until_timer(self.poll_timeout())) };
        // Other readiness is found again: only edges of connections are lost, and connections are tried before the host
        // parks.
        self.reactor.wait(step)
    }

    /// Returns the device of the tier, if there is one.
    pub const fn tier(&mut self) -> Option<&mut TierDevice> {
        self.tier.as_mut()
    }

    /// Returns the service.
    pub const fn service(&mut self) -> &mut Service {
        self.service.service()
    }

    /// Returns the client that fetches, if there is one.
    pub fn client(&mut self) -> Option<&mut Client> {
        Some(self.fetcher.as_mut()?.side().client())
    }

    /// Returns the names of these objects: see [`kvplane_store::service::Inspection::names_of`].
    #[must_use]
    pub fn names_of(&self, digests: &[Digest]) -> Vec<(usize, Vec<u8>, Vec<u8>)> {
        self.service.names_of(digests)
    }

    /// Serves the slots that a map of this cluster state gives to this shard, and fetches the objects of slots that it
    /// gained.
    pub fn follow_owners(&mut self, state: u64, owners: &SlotOwners) {
        let now_ns = self.reactor.now_ns();
        let service = self.service.service();
        service.follow(state, owners);
        if let Some(fetcher) = &mut self.fetcher {
            fetcher.follow(service, owners, now_ns);
        }
    }

    /// Sets the subscriber that is notified of new events of the service's objects.
    pub fn follow(&mut self, subscriber: Option<SyncSender<()>>) {
        self.service.follow(subscriber);
    }

    /// Notifies the subscriber if there are new events.
    pub(crate) fn notify_subscriber(&mut self) {
        self.service.notify_subscriber();
    }

    /// Returns the memory that peers may use.
    pub const fn segments(&mut self) -> ServedSegments<'_> {
        let Self { reactor, reports, service, .. } = self;
        ServedSegments { connections: &mut reactor.connections, reports, service }
    }

    /// Returns the RDMA driver, for handshakes with stock engines.
    pub const fn rdma(&mut self) -> &mut Rdma {
        &mut self.reactor.connections.rdma
    }

    /// Returns the counters of this host.
    #[must_use]
    pub const fn counters(&self) -> &HostCounters {
        &self.reports.counters
    }

    /// Returns the counters of injected faults.
    #[must_use]
    pub fn faults(&self) -> FaultCounters {
        self.reactor.connections.tcp.counters()
    }

    /// Returns the counters of requests of stock engines.
    #[must_use]
    pub const fn stock_served(&self) -> &ServerCounters {
        self.service.stock_server().counters()
    }

    /// Returns the open RDMA devices, with counters of payloads that they moved for peers.
    #[must_use]
    pub fn rdma_snapshot(&self) -> Vec<DeviceSnapshot> {
        self.service.rdma_snapshot(&self.reactor.connections)
    }

    /// Returns the counters of the copies from and to each device that had segments.
    #[must_use]
    pub fn staging(&self) -> BTreeMap<DeviceId, StagingCounters> {
        self.service.staging()
    }

    /// Returns the number of open connections of all drivers.
    #[must_use]
    pub const fn connections(&self) -> usize {
        self.reactor.connections.open() + self.service.stock_server().open()
    }
}

/// Ends all accesses of the pool, at most within `longest`: reads from the SSD into it, and those of peers on this
/// host, which are hung up on. Returns true if none is left: a peer that has let go of the pool writes to it no more.
/// The host serves no request any more.
pub(crate) fn end_accesses(host: &mut ShardHost, longest: Duration) -> bool {
    hang_up(&host.reactor.connections.shm);
    let until = Instant::now() + longest;
    while host.service.service().inspect().lends_pool() || host.tier.as_ref().is_some_and(TierDevice::uses_pool) {
        let is_over = Instant::now() >= until;
        let waited = host.wait_for_device();
        let looked = waited.and_then(|()| host.reactor.look(|token| host.service.stock_ready(token)));
        if is_over || looked.is_err() || host.drive_tier(cpu::monotonic_ns()).is_err() {
            return false;
        }
        host.take_events(cpu::monotonic_ns());
    }
    true
}

/// Registered memory of a host, and its users.
pub struct ServedSegments<'a> {
    connections: &'a mut Connections,
    reports: &'a mut Reports,
    service: &'a mut ServiceSide,
}

impl ServedSegments<'_> {
    /// Sets the memory of a registered segment, which peers may use under this id.
    pub fn add(&mut self, segment: SegmentId, region: Arc<Region>) {
        self.service.add_segment(self.connections, segment, region);
    }

    /// Prepares for segments of a device's memory: pins memory that their payloads pass through.
    ///
    /// # Errors
    /// If the host has too little memory, or the device is lost.
    pub fn open_device(&mut self, device: &Arc<Device>) -> Result<(), DeviceError> {
        self.service.open_device(self.connections, device, None)
    }

    /// Sets the memory of a registered segment, which is a device's, prepared for by [`Self::open_device`].
    pub fn add_device(&mut self, segment: SegmentId, memory: Arc<DeviceMemory>) {
        self.service.add_device_segment(self.connections, segment, memory);
    }

    /// Unregisters a segment. [`Self::poll_unregistered`] returns it when it is no longer in use; if it is unregistered
    /// again, it is returned again.
    pub fn unregister(&mut self, segment: SegmentId) {
        self.service.unregister(self.connections, segment);
    }

    /// Returns a segment that is no longer in use.
    pub fn poll_unregistered(&mut self) -> Option<SegmentId> {
        self.reports.take_free()
    }

    /// Returns the processes on this host that are copying from or to a segment; 0 for one that is not visible from
    /// here.
    pub fn users(&mut self, segment: SegmentId) -> Vec<i32> {
        self.connections.shm.users(segment)
    }

    /// Closes the connections that still use a segment whose unregistering takes too long.
    pub fn evict_users(&mut self, segment: SegmentId) {
        self.service.evict_users(self.connections, segment);
    }
}

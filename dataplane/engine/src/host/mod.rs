//! One part of the dataplane: its poller and drivers, the service that answers peers, the client that asks them.
//!
//! A storage node's shard has a service with a store; an embedded client has a client, and a service when it
//! registers memory. The host owns all real memory and gives the pure cores only names for it: a pool, segments by
//! id, buffers by index.
//!
//! One [`Host::poll`] is a round: readiness, frames, outputs, timers, sends. Nothing in it blocks. [`Host::park`] waits
//! for the next event. A host that spins asks the poller now and then only, as long as there is something better to
//! look at: rings in shared memory, or the one or two connections that were active last.
//!
//! Thread affinity: none; one thread at a time, whichever waits.

mod config;
mod copies;
mod fetch;
mod files;
mod foreign;
mod inbound;
mod memory;
mod near;
mod notices;
mod outbound;
mod parts;
mod rdma;
mod roles;
mod rounds;
mod same_host;
mod stock;
mod tier;
mod view;

use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

pub use config::{HostConfig, HostCounters};
pub use fetch::FetchConfig;
use fetch::FetchWork;
pub use foreign::{Handshake, StockAnswer, StockEngines};
use kvplane_client::{Client, LaneId};
use kvplane_store::service::Service;
use kvplane_sys::{Doorbell, Interest, Poller, Readiness, Region, cpu};
use kvplane_transport::mooncake::{Lanes, Server};
use kvplane_transport::{ConnectionId, Event, Fault, Shm, Source, Token};
use memory::Regions;
pub use near::{DeviceSnapshot, NearDevices, PlaceName, node_of_region};
use notices::Notices;
pub use rdma::RdmaDevices;
use roles::{LentPayload, Link, Roles, Uploads};
use rounds::Rounds;
use same_host::SameHost;
use tier::TierWork;
pub use tier::{PART_LEAST_BYTES, TierNotice, TierSetup};

/// Frames taken from one connection in one round, so that none starves the others.
const FRAMES_PER_ROUND: usize = 128;
/// Nobody looked for so long: what has a deadline could not meet it.
const AWAY_NS: u64 = kvplane_proto::Limits::STALL_NS / 4;
/// The longest park; bounds what a lost doorbell could cost.
const PARK_LONGEST: Duration = Duration::from_millis(500);

/// The same while peers are waited for that copy from our memory or to it: they ring no bell. And when they were waited
/// for in vain.
const PARK_WAITING: Duration = Duration::from_micros(100);
const PARK_WAITING_LONG: Duration = Duration::from_millis(10);

/// One part of the dataplane.
pub struct Host {
    poller: Poller,
    tcp: Fault,
    shm: Shm,
    /// To stock engines.
    stock_lanes: Lanes,
    /// From stock engines.
    stock_server: Server,
    service: Option<Service>,
    client: Option<Client>,
    verify_shared: bool,
    regions: Regions,
    same_host: SameHost,
    roles: Roles,
    lanes: Vec<Option<(LaneId, Link)>>,
    file_work: files::FileWork,
    rdma_work: rdma::RdmaWork,
    foreign_work: Option<foreign::ForeignWork>,
    tier_work: Option<TierWork>,
    fetch_work: Option<FetchWork>,
    lent: slab::Slab<LentPayload>,
    uploads: Uploads,
    readiness: Vec<Readiness>,
    scratch: Vec<u8>,
    mailbox: Option<Doorbell>,
    /// Who follows the objects' events, and the number of the next when it was last told.
    follower: Option<(SyncSender<()>, u64)>,
    notices: Notices,
    counters: HostCounters,
    rounds: Rounds,
}

/// The pool, as lists read names from it.
struct PoolView<'a>(&'a Region);

impl kvplane_store::service::PoolBytes for PoolView<'_> {
    fn read(&self, offset: u64, into: &mut [u8]) {
        self.0.copy_out(offset as usize, into);
    }

    fn bytes(&self) -> u64 {
        self.0.bytes() as u64
    }
}

impl Host {
    /// A host with what it serves and what it asks. `pool` is the memory behind the service's store.
    ///
    /// # Errors
    /// When the kernel gives no poller, or the tier cannot be on its device.
    pub fn new(
        config: &HostConfig,
        mut service: Option<Service>,
        client: Option<Client>,
        pool: Option<Arc<Region>>,
    ) -> io::Result<Self> {
        let fetch = config.fetch.as_ref().filter(|_| service.is_some() && pool.is_some() && client.is_none());
        let (poller, mut client) = (Poller::new()?, client.or_else(|| fetch.map(FetchConfig::client)));
        if let Some(service) = &mut service {
            set_up(service, config);
        }
        let mut rdma_work = rdma::RdmaWork::new(config.rdma.as_ref(), &poller);
        if let Some(pool) = &pool {
            rdma_work.register_pool(pool);
        }
        if let Some(client) = &mut client {
            client.set_rdma(rdma_work.speeds(), rdma_work.table.clone());
        }
        let stock = config.stock.as_ref();
        let foreign_work = stock.map(|(engines, number)| foreign::ForeignWork::new(engines, &poller, *number));
        let tier_work = match (&config.tier, &mut service, &pool) {
            (Some(setup), Some(service), Some(pool)) => Some(TierWork::new(setup, service, pool, &poller)?),
            _ => None,
        };
        let mut host = Self {
            poller,
            tcp: Fault::new(config.fault.as_ref(), config.zero_copy),
            shm: Shm::new(pool.clone()),
            stock_lanes: Lanes::new(),
            stock_server: Server::new(config.mooncake),
            service,
            client,
            verify_shared: config.verify_shared,
            regions: Regions::new(pool),
            same_host: SameHost::default(),
            roles: Roles::default(),
            lanes: Vec::new(),
            file_work: files::FileWork::default(),
            rdma_work,
            foreign_work: foreign_work.transpose()?,
            tier_work,
            fetch_work: None,
            lent: slab::Slab::new(),
            uploads: Uploads::default(),
            readiness: Vec::new(),
            scratch: Vec::new(),
            mailbox: None,
            follower: None,
            notices: Notices::default(),
            counters: HostCounters::default(),
            rounds: Rounds::new(cpu::monotonic_ns()),
        };
        host.set_up_tcp(config);
        host.begin_fetches(fetch);
        Ok(host)
    }

    /// Serves peers that connect here.
    ///
    /// # Errors
    /// When the kernel does not let it be watched.
    pub fn listen(&mut self, tcp: TcpListener, shm: Option<UnixListener>) -> io::Result<()> {
        self.tcp.listen(&self.poller, tcp)?;
        match shm {
            Some(listener) => self.listen_shm(listener),
            None => Ok(()),
        }
    }

    /// Serves peers on this host that connect here.
    ///
    /// # Errors
    /// When the kernel does not let it be watched.
    pub fn listen_shm(&mut self, listener: UnixListener) -> io::Result<()> {
        self.shm.listen(&self.poller, listener)
    }

    /// Serves registered memory to stock Mooncake engines that connect here, without any authentication.
    ///
    /// # Errors
    /// When the kernel does not let it be watched.
    pub fn listen_mooncake(&mut self, listener: TcpListener) -> io::Result<()> {
        self.stock_server.listen(&self.poller, listener)
    }

    /// Wakes the host when this doorbell rings.
    ///
    /// # Errors
    /// When the kernel does not let it be watched.
    pub fn watch_mailbox(&mut self, doorbell: Doorbell) -> io::Result<()> {
        let token = Token { source: Source::Mailbox, index: 0, generation: 0 };
        self.poller.add(doorbell.fd(), token.to_bits(), Interest::ReadableEdge)?;
        self.mailbox = Some(doorbell);
        Ok(())
    }

    /// One round. Whether it did anything.
    ///
    /// # Errors
    /// When the poller fails: the host cannot go on.
    pub fn poll(&mut self) -> io::Result<bool> {
        let something_came = self.look()?;
        if self.rounds.begin(something_came) {
            self.read_clock();
        }
        // Before anything is answered: what has come is taken, so that answers to it leave in this round.
        let mut progress = self.take_arrivals()?;
        // Before lanes are served: what was requested is answered first, then what this host asks of others.
        progress |= self.serve_store()?;
        progress |= self.serve_lanes();
        // After all that could have ended or begun a wait.
        self.run_timers(self.rounds.now_ns());
        if self.same_host.is_waiting() {
            self.see_off();
        }
        // Last, as all of the above fills queues: a frame that was queued now leaves with its neighbours.
        progress |= self.send_all()?;
        let moved_bytes = self.tcp.take_moved_bytes();
        progress |= moved_bytes > 0;
        self.rounds.end(progress, moved_bytes);
        self.count_round(progress, something_came);
        Ok(progress)
    }

    /// Takes what drivers have: completions and events of connections first, as payloads need room that they free.
    fn take_arrivals(&mut self) -> io::Result<bool> {
        let now_ns = self.rounds.now_ns();
        let mut progress = self.rdma_work.driver.poll(now_ns);
        progress |= self.take_events(now_ns);
        progress |= self.take_tcp();
        progress |= self.take_rdma();
        progress |= self.take_shm();
        progress |= self.take_files()?;
        Ok(progress)
    }

    /// Answers of the service, then the tier, which works on what those left behind, then one step of each list.
    fn serve_store(&mut self) -> io::Result<bool> {
        let mut progress = self.drain_service();
        progress |= self.drive_tier(self.rounds.now_ns())?;
        if let (Some(service), Some(pool)) = (&mut self.service, &self.regions.pool) {
            progress |= service.drive_lists(&PoolView(pool));
        }
        Ok(progress)
    }

    /// Serves connections on which this host sends requests, and those with stock engines in both directions.
    fn serve_lanes(&mut self) -> bool {
        let mut progress = self.take_stock_lanes();
        let now_ns = self.rounds.now_ns();
        progress |= self.drive_fetches(now_ns);
        progress |= self.serve_stock(now_ns);
        progress
    }

    /// Gives the client's outputs to the drivers, and has each driver send what was queued.
    fn send_all(&mut self) -> io::Result<bool> {
        let now_ns = self.rounds.now_ns();
        let mut progress = self.drain_outputs(now_ns);
        self.tcp.flush(&self.poller);
        self.shm.flush(&self.poller);
        self.rdma_work.driver.flush();
        self.flush_files()?;
        progress |= self.stock_lanes.flush(&self.poller, now_ns);
        if let Some(service) = &mut self.service {
            service.round_over(cpu::monotonic_ns);
        }
        Ok(progress)
    }

    fn count_round(&mut self, progress: bool, something_came: bool) {
        self.counters.busy_rounds += u64::from(progress);
        if progress || something_came {
            self.counters.zero_copy = *self.tcp.zero_copy();
            self.counters.crowded_out = self.tcp.strangers().1;
        }
    }

    /// Reads the clock for a round. Whose thread drives us may have been busy with something else.
    fn read_clock(&mut self) {
        let now_ns = cpu::monotonic_ns();
        let since_ns = self.rounds.read(now_ns);
        if now_ns.saturating_sub(since_ns) >= AWAY_NS
            && let Some(client) = &mut self.client
        {
            client.was_away(since_ns, now_ns);
        }
    }

    /// When what is being taken has come.
    fn arrival_ns(&mut self) -> u64 {
        self.rounds.arrival_ns(self.tcp.moved_bytes(), cpu::monotonic_ns)
    }

    /// Finds out what there is to do: asks the poller, or names the connections that are worth trying. True if
    /// something is ready.
    fn look(&mut self) -> io::Result<bool> {
        if self.readiness.is_empty() {
            let Self { rounds, tcp, shm, rdma_work, .. } = self;
            if rounds.takes_look(|| tcp.try_active() || shm.open() > 0 || rdma_work.driver.open() > 0) {
                self.poller.wait(Duration::ZERO, &mut self.readiness)?;
            }
        }
        let is_ready = !self.readiness.is_empty();
        let mut readiness = core::mem::take(&mut self.readiness);
        for one in readiness.drain(..) {
            self.ready(&one);
        }
        self.readiness = readiness;
        Ok(is_ready)
    }

    fn ready(&mut self, readiness: &Readiness) {
        let Some(token) = Token::from_bits(readiness.token) else { return };
        match token.source {
            // It has done its work: the host is awake.
            Source::Mailbox | Source::StockAnswers => {}
            Source::TcpListener | Source::TcpConnection => self.tcp.ready(&self.poller, token, readiness),
            // What has ended is taken in this round.
            Source::Files | Source::Tier => {}
            Source::RdmaCompletions | Source::RdmaEvents => self.rdma_work.driver.ready(token),
            Source::ShmListener | Source::ShmSocket | Source::ShmDoorbell => {
                self.shm.ready(&self.poller, token, readiness);
            }
            Source::MooncakeListener | Source::MooncakeServed => self.stock_server.ready(token),
            Source::MooncakeLane => self.stock_lanes.ready(token, readiness.readable, readiness.writable),
        }
    }

    fn take_events(&mut self, now_ns: u64) -> bool {
        let mut progress = false;
        while let Some(event) = self.tcp.poll_event() {
            progress = true;
            self.event(event, Link::Tcp, now_ns);
        }
        while let Some(event) = self.shm.poll_event() {
            progress = true;
            self.event(event, Link::Shm, now_ns);
        }
        progress |= self.take_rdma_events();
        // Copies that have ended have read the clock.
        let now_ns = self.rounds.now_ns();
        while let Some((id, segment)) = self.shm.poll_wanted() {
            // A segment that is being unregistered is not given out any more.
            let info = self.service.as_ref().and_then(|service| service.inspect().segments().info(segment));
            let info = info.filter(|info| info.remote_accessible && info.shareable);
            let region = self.segment(segment).filter(|_| info.is_some()).cloned();
            let writable = info.is_some_and(|info| info.writable);
            self.shm.offer_segment(&self.poller, (id, segment), region.as_ref(), writable);
        }
        progress |= self.take_mapped(now_ns);
        progress | self.take_stock_events(now_ns)
    }

    fn event(&mut self, event: Event, link: fn(ConnectionId) -> Link, now_ns: u64) {
        match event {
            Event::Accepted(id) => self.accepted(link(id), now_ns),
            Event::Connected(id) => self.connected(link(id), now_ns),
            Event::Sent(hold) => self.sent(hold),
            Event::Gone(id, why) => self.gone(link(id), &why, now_ns),
        }
    }

    fn run_timers(&mut self, now_ns: u64) {
        self.sweep_mapped(now_ns);
        if self.shm.poll_timeout().is_some_and(|at_ns| at_ns <= now_ns) {
            self.shm.expire(&self.poller, now_ns);
        }
        if let Some(service) = &mut self.service
            && service.poll_timeout().is_some_and(|at_ns| at_ns <= now_ns)
        {
            service.handle_timeout(now_ns);
        }
        if let Some(client) = &mut self.client
            && client.poll_timeout().is_some_and(|at_ns| at_ns <= now_ns)
        {
            client.handle_timeout(now_ns);
        }
    }

    /// The time of the present round: at most a few empty rounds old.
    #[must_use]
    pub const fn now_ns(&self) -> u64 {
        self.rounds.now_ns()
    }

    /// Waits for the next event, at most `longest`. `pending` is asked once more after sleep was announced: whether
    /// somebody put something into the mailbox.
    ///
    /// # Errors
    /// When the poller fails.
    pub fn park(&mut self, longest: Duration, pending: impl FnOnce() -> bool) -> io::Result<()> {
        let must_go_on = self.shm.is_overflowing() || self.tier_must_be_polled();
        if must_go_on || self.stock_lanes.has_work() || self.stock_server.has_work() {
            cpu::pause();
            return Ok(());
        }
        if let Some(mailbox) = &self.mailbox {
            mailbox.prepare_sleep();
        }
        self.shm.prepare_sleep();
        // A device that cannot be armed is gone, and says so by an event.
        let rdma_sleeps = self.rdma_work.driver.prepare_sleep().unwrap_or(true);
        let foreign_sleeps = self.foreign_work.as_ref().is_none_or(foreign::ForeignWork::prepare_sleep);
        if rdma_sleeps && foreign_sleeps && !pending() && self.shm.next_ready(0).is_none() {
            let most = match (self.same_host.is_waiting(), self.same_host.is_close(self.rounds.now_ns())) {
                _ if self.rdma_work.driver.is_closing() => PARK_WAITING,
                (true, true) => PARK_WAITING,
                (true, false) => PARK_WAITING_LONG,
                (false, _) => PARK_LONGEST,
            };
            let timeout = self.until_timer().min(longest).min(most);
            self.counters.parks += 1;
            self.poller.wait(timeout, &mut self.readiness)?;
            self.rounds.read(cpu::monotonic_ns());
        }
        self.rounds.wake();
        self.shm.awake();
        if let Some(work) = &self.foreign_work {
            work.awake();
        }
        if let Some(mailbox) = &self.mailbox {
            mailbox.awake();
        }
        Ok(())
    }

    fn until_timer(&self) -> Duration {
        let service = self.service.as_ref().and_then(Service::poll_timeout);
        let client = self.client.as_ref().and_then(Client::poll_timeout);
        let stock = [self.stock_lanes.poll_timeout(), self.stock_server.poll_timeout()];
        match [service, client, self.tcp.poll_timeout(), self.shm.poll_timeout()]
            .into_iter()
            .chain(stock)
            .flatten()
            .min()
        {
            Some(at_ns) => Duration::from_nanos(at_ns.saturating_sub(cpu::monotonic_ns())),
            None => PARK_LONGEST,
        }
    }
}

fn set_up(service: &mut Service, config: &HostConfig) {
    service.control().set_slow_after(config.slow_after_ns);
    if let Some(challenges) = &config.tickets {
        service.control().want_tickets(challenges.clone());
    }
}

/// Whichever thread waits may drive it.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Host>();
};

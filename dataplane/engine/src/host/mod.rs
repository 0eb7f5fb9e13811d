//! One thread's part of the dataplane: its ring and drivers, the service that answers peers, the client that asks them.
//!
//! A storage node's shard has a service with a store; an embedded client has a client, and a service when it
//! registers memory. The host owns all real memory and gives the pure cores only names for it: a pool, segments by
//! id, buffers by index.
//!
//! One [`Host::poll`] is a round: completions, frames, outputs, timers, sends. Nothing in it blocks, except setting
//! up a shared-memory connection as a client. [`Host::park`] waits for the next event.
//!
//! Thread affinity: made and used on one thread.

mod copies;
mod inbound;
mod outbound;
mod roles;
mod same_host;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use kvplane_proto::client::{Client, LaneId};
use kvplane_proto::{BatchId, SegmentId};
use kvplane_store::service::Service;
use kvplane_sys::{Completion, Doorbell, Region, Ring, cpu};
use kvplane_transport::shm::Extent;
use kvplane_transport::{ConnectionId, Event, Fault, FaultCounters, FaultPlan, Shm, Source, Token};
use roles::{Lent, Link, Roles, Uploads};
use same_host::SameHost;

/// Frames taken from one connection in one round, so that none starves the others.
const FRAMES_PER_ROUND: usize = 128;
/// Empty rounds after which the clock is read again.
const ROUNDS_PER_CLOCK: u32 = 16;
/// The longest park; bounds what a lost doorbell could cost.
const PARK_LONGEST: Duration = Duration::from_millis(500);

/// The same while peers are waited for that copy from our memory or to it: they ring no bell.
const PARK_WAITING: Duration = Duration::from_micros(100);

/// Settings of a host.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Entries of the ring's submission queue.
    pub ring_entries: u32,
    /// Whether copies over shared memory are summed up and checked.
    pub verify_shared: bool,
    /// Faults to make on TCP connections, for drills and tests.
    pub fault: Option<FaultPlan>,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self { ring_entries: 1024, verify_shared: true, fault: None }
    }
}

/// What a host counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostCounters {
    /// Rounds that did something.
    pub busy_rounds: u64,
    /// Parks.
    pub parks: u64,
    /// Frames that broke the protocol, ours or a peer's view of it.
    pub broken: u64,
    /// Connections accepted.
    pub accepted: u64,
    /// Segments' bytes that this host copied through mappings of its peers' memory.
    pub map_bytes: u64,
    /// The same by the kernel, between processes.
    pub cma_bytes: u64,
    /// The same within this process.
    pub local_bytes: u64,
}

/// One thread's part of the dataplane.
pub struct Host {
    ring: Ring,
    tcp: Fault,
    shm: Shm,
    service: Option<Service>,
    client: Option<Client>,
    verify_shared: bool,
    pool: Option<Arc<Region>>,
    /// Memory of registered segments by position, each with its id's generation.
    segments: Vec<Option<(u32, Arc<Region>)>>,
    buffers: Vec<Option<Arc<Region>>>,
    mapped: BTreeMap<(ConnectionId, SegmentId), Arc<Region>>,
    same_host: SameHost,
    roles: Roles,
    lanes: Vec<Option<(LaneId, Link)>>,
    lent: slab::Slab<Lent>,
    uploads: Uploads,
    completions: Vec<Completion>,
    scratch: Vec<u8>,
    mailbox: Option<Doorbell>,
    done: VecDeque<BatchId>,
    unregistered: Vec<SegmentId>,
    map_wanted: bool,
    last_problem: Option<String>,
    counters: HostCounters,
    now_ns: u64,
    rounds_since_clock: u32,
}

impl Host {
    /// A host with what it serves and what it asks. `pool` is the memory behind the service's store.
    ///
    /// # Errors
    /// When no ring can be had: says why and what to do.
    pub fn new(
        config: &HostConfig,
        service: Option<Service>,
        client: Option<Client>,
        pool: Option<Arc<Region>>,
    ) -> io::Result<Self> {
        Ok(Self {
            ring: Ring::new(config.ring_entries)?,
            tcp: Fault::new(config.fault.as_ref()),
            shm: Shm::new(pool.clone()),
            service,
            client,
            verify_shared: config.verify_shared,
            pool,
            segments: Vec::new(),
            buffers: Vec::new(),
            mapped: BTreeMap::new(),
            same_host: SameHost::default(),
            roles: Roles::default(),
            lanes: Vec::new(),
            lent: slab::Slab::new(),
            uploads: Uploads::default(),
            completions: Vec::with_capacity(256),
            scratch: Vec::new(),
            mailbox: None,
            done: VecDeque::new(),
            unregistered: Vec::new(),
            map_wanted: false,
            last_problem: None,
            counters: HostCounters::default(),
            now_ns: cpu::monotonic_ns(),
            rounds_since_clock: 0,
        })
    }

    /// Serves peers that connect here.
    ///
    /// # Errors
    /// When the ring has no room.
    pub fn listen(&mut self, tcp: TcpListener, shm: Option<UnixListener>) -> io::Result<()> {
        self.tcp.listen(&mut self.ring, tcp)?;
        match shm {
            Some(listener) => self.listen_shm(listener),
            None => Ok(()),
        }
    }

    /// Serves peers on this host that connect here.
    ///
    /// # Errors
    /// When the ring has no room.
    pub fn listen_shm(&mut self, listener: UnixListener) -> io::Result<()> {
        self.shm.listen(&mut self.ring, listener)
    }

    /// Wakes the host when this doorbell rings.
    ///
    /// # Errors
    /// When the ring has no room.
    pub fn watch_mailbox(&mut self, doorbell: Doorbell) -> io::Result<()> {
        let token = Token { source: Source::Mailbox, index: 0, generation: 0 };
        self.ring.poll_readable(doorbell.fd(), token.to_bits()).map_err(io::Error::other)?;
        self.mailbox = Some(doorbell);
        Ok(())
    }

    /// One round. Whether it did anything.
    ///
    /// # Errors
    /// When the ring fails: the host cannot go on.
    pub fn poll(&mut self) -> io::Result<bool> {
        self.ring.poll(&mut self.completions)?;
        let mut progress = !self.completions.is_empty();
        let mut completions = core::mem::take(&mut self.completions);
        for completion in completions.drain(..) {
            self.complete(&completion);
        }
        self.completions = completions;
        // Spinning, the clock is read now and then only: what comes is seen sooner the shorter an empty round is.
        if progress || self.rounds_since_clock >= ROUNDS_PER_CLOCK {
            self.now_ns = cpu::monotonic_ns();
            self.rounds_since_clock = 0;
        }
        self.rounds_since_clock += 1;
        let now_ns = self.now_ns;
        self.take_events(now_ns);
        progress |= self.take_tcp(now_ns);
        progress |= self.take_shm(now_ns);
        self.run_timers(now_ns);
        if self.same_host.is_waiting() {
            self.see_off();
        }
        progress |= self.drain_outputs(now_ns);
        self.tcp.flush(&mut self.ring);
        self.shm.flush();
        self.counters.busy_rounds += u64::from(progress);
        Ok(progress)
    }

    fn complete(&mut self, completion: &Completion) {
        let Some(token) = Token::from_bits(completion.token) else { return };
        match token.source {
            Source::Mailbox => {
                let Some(doorbell) = &self.mailbox else { return };
                doorbell.drain();
                if !completion.more {
                    // A full ring leaves the mailbox to the longest park.
                    let _ = self.ring.poll_readable(doorbell.fd(), completion.token);
                }
            }
            Source::TcpListener | Source::TcpConnect | Source::TcpReceive | Source::TcpSend => {
                self.tcp.complete(&mut self.ring, token, completion);
            }
            Source::ShmListener | Source::ShmSocket | Source::ShmDoorbell => {
                self.shm.complete(&mut self.ring, token, completion);
            }
        }
    }

    fn take_events(&mut self, now_ns: u64) {
        while let Some(event) = self.tcp.poll_event() {
            self.event(event, Link::Tcp, now_ns);
        }
        while let Some(event) = self.shm.poll_event() {
            self.event(event, Link::Shm, now_ns);
        }
        while let Some((id, segment)) = self.shm.poll_wanted() {
            // A segment that is being unregistered is not given out any more.
            let info = self.service.as_ref().and_then(|service| service.segment_info(segment));
            let info = info.filter(|info| info.remote_accessible && info.shareable);
            let region = self.segment(segment).filter(|_| info.is_some()).cloned();
            let writable = info.is_some_and(|info| info.writable);
            self.shm.offer_segment(&mut self.ring, id, region.as_ref(), writable);
        }
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
        self.now_ns
    }

    /// Waits for the next event, at most `longest`. `pending` is asked once more after sleep was announced: whether
    /// somebody put something into the mailbox.
    ///
    /// # Errors
    /// When the ring fails.
    pub fn park(&mut self, longest: Duration, pending: impl FnOnce() -> bool) -> io::Result<()> {
        if self.shm.is_overflowing() {
            cpu::pause();
            return Ok(());
        }
        if let Some(mailbox) = &self.mailbox {
            mailbox.prepare_sleep();
        }
        self.shm.prepare_sleep();
        if !pending() && self.shm.next_ready(0).is_none() {
            let most = if self.same_host.is_waiting() { PARK_WAITING } else { PARK_LONGEST };
            let timeout = self.until_timer().min(longest).min(most);
            self.counters.parks += 1;
            self.ring.wait(timeout, &mut self.completions)?;
        }
        self.rounds_since_clock = ROUNDS_PER_CLOCK;
        self.shm.awake();
        if let Some(mailbox) = &self.mailbox {
            mailbox.awake();
        }
        Ok(())
    }

    fn until_timer(&self) -> Duration {
        let service = self.service.as_ref().and_then(Service::poll_timeout);
        let client = self.client.as_ref().and_then(Client::poll_timeout);
        match [service, client, self.tcp.poll_timeout()].into_iter().flatten().min() {
            Some(at_ns) => Duration::from_nanos(at_ns.saturating_sub(cpu::monotonic_ns())),
            None => PARK_LONGEST,
        }
    }

    /// The answering side.
    pub const fn service(&mut self) -> Option<&mut Service> {
        self.service.as_mut()
    }

    /// The asking side.
    pub const fn client(&mut self) -> Option<&mut Client> {
        self.client.as_mut()
    }

    /// Gives caller's memory a name for requests.
    pub fn add_buffer(&mut self, region: Arc<Region>) -> u32 {
        let index = self.buffers.iter().position(Option::is_none).unwrap_or_else(|| {
            self.buffers.push(None);
            self.buffers.len() - 1
        });
        self.buffers[index] = Some(region);
        index as u32
    }

    /// Forgets caller's memory. No open batch may use it.
    pub fn remove_buffer(&mut self, buffer: u32) {
        if let Some(entry) = self.buffers.get_mut(buffer as usize) {
            *entry = None;
        }
    }

    /// Memory that peers may use under this id.
    pub fn add_segment(&mut self, segment: SegmentId, region: Arc<Region>) {
        let index = segment.index as usize;
        if self.segments.len() <= index {
            self.segments.resize(index + 1, None);
        }
        // A host without a service has its segments to itself.
        let info = self.service.as_ref().and_then(|service| service.segment_info(segment));
        if let Some(info) = info.filter(|info| info.remote_accessible) {
            let bytes = info.bytes.min(region.bytes() as u64);
            let writable = info.writable && region.writable();
            self.shm.publish(segment, &Extent { address: region.address(), bytes, writable });
        }
        self.segments[index] = Some((segment.generation, region));
    }

    /// Forgets memory that was only for this process's own requests. A stale id is ignored.
    pub fn remove_segment(&mut self, segment: SegmentId) {
        if let Some(entry) = self.segments.get_mut(segment.index as usize) {
            entry.take_if(|(generation, _)| *generation == segment.generation);
        }
    }

    /// The memory of a segment; `None` for a stale id.
    fn segment(&self, segment: SegmentId) -> Option<&Arc<Region>> {
        let (generation, region) = self.segments.get(segment.index as usize)?.as_ref()?;
        (*generation == segment.generation).then_some(region)
    }

    /// A batch that has completed since the last call.
    pub fn poll_done(&mut self) -> Option<BatchId> {
        self.done.pop_front()
    }

    /// A segment that nothing uses any more.
    pub fn poll_unregistered(&mut self) -> Option<SegmentId> {
        self.unregistered.pop()
    }

    /// Whether a newer cluster map is wanted; asked once.
    pub const fn take_map_wanted(&mut self) -> bool {
        core::mem::replace(&mut self.map_wanted, false)
    }

    /// The last connection's end that was not of our asking, in words.
    #[must_use]
    pub fn last_problem(&self) -> Option<&str> {
        self.last_problem.as_deref()
    }

    /// What happened so far.
    #[must_use]
    pub const fn counters(&self) -> &HostCounters {
        &self.counters
    }

    /// Faults made by plan so far.
    #[must_use]
    pub fn faults(&self) -> FaultCounters {
        self.tcp.counters()
    }

    /// Connections open, by either driver.
    #[must_use]
    pub const fn connections(&self) -> usize {
        self.tcp.open() + self.shm.open()
    }
}

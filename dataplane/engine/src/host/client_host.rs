//! A host with a client, for a process that sends requests: its connections, files, and the memory that they use.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{Client, Local};
use kvplane_proto::{BatchId, SegmentId};
use kvplane_sys::{DirectFile, Doorbell, FileOptions, IoBuf, Region, cpu};
use kvplane_transport::{CloseCause, ConnectionId, Event, FaultCounters, Input, RdmaCounters, Target};

use super::client_side::ClientSide;
use super::client_side::files::HostFiles;
use super::config::HostConfig;
use super::reactor::Reactor;
use super::reactor::connections::{LentPayload, OfferAnswer};
use super::reactor::links::{Link, Role};
use super::reactor::pass::{Arrival, Pass};
use super::reports::{HostCounters, Reports};

/// A host with a client.
pub struct ClientHost {
    reactor: Reactor,
    reports: Reports,
    client: ClientSide,
}

impl ClientHost {
    /// A host for this client, without connections.
    ///
    /// # Errors
    /// When the kernel gives no poller.
    pub fn new(config: &HostConfig, client: Client) -> io::Result<Self> {
        let reactor = Reactor::new(config.connections(None)?);
        let client = ClientSide::new(client, &reactor.connections, config.stock.as_ref(), config.verify_shared)?;
        Ok(Self { reactor, reports: Reports::default(), client })
    }

    /// Wakes the host when this doorbell rings.
    ///
    /// # Errors
    /// When the kernel does not let it be watched.
    pub fn watch_mailbox(&mut self, doorbell: Doorbell) -> io::Result<()> {
        self.reactor.watch_mailbox(doorbell)
    }

    /// One round. Whether it did anything.
    ///
    /// # Errors
    /// When the poller fails: the host cannot go on.
    pub fn poll(&mut self) -> io::Result<bool> {
        let something_came = self.reactor.look(|_| {})?;
        if let Some(absence) = self.reactor.begin_round(something_came) {
            self.client.was_away(&absence);
        }
        // Before anything is sent: what has come is taken, so that what follows from it leaves in this round.
        let mut progress = self.take_arrivals()?;
        progress |= self.take_stock_lanes();
        // After all that could have ended or begun a wait.
        self.run_timers();
        // Last, as all of the above fills queues: a frame that was queued now leaves with its neighbours.
        progress |= self.send_all()?;
        Ok(self.reactor.end_round(progress, something_came, &mut self.reports.counters))
    }

    /// Takes what drivers have: completions and events of connections first, as payloads need room that they free.
    fn take_arrivals(&mut self) -> io::Result<bool> {
        let now_ns = self.reactor.now_ns();
        let mut progress = self.reactor.connections.rdma.poll(now_ns);
        progress |= self.take_events(now_ns);
        progress |= self.take_inputs(Reactor::next_tcp);
        progress |= self.take_inputs(Reactor::next_rdma);
        progress |= self.take_inputs(Reactor::next_shm);
        progress |= self.client.take_files(&mut self.reactor, &mut self.reports)?;
        Ok(progress)
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
        progress |= self.take_rdma_events();
        // Copies that have ended have read the clock.
        let now_ns = self.reactor.now_ns();
        while let Some((id, segment)) = self.reactor.connections.shm.poll_wanted() {
            // A host without a service has its segments to itself.
            self.reactor.connections.offer_segment(id, segment, None, false);
        }
        progress |= self.client.take_mapped(&mut self.reactor, &mut self.reports, now_ns);
        progress | self.take_stock_events(now_ns)
    }

    fn take_rdma_events(&mut self) -> bool {
        let Self { reactor, reports, client } = self;
        let mut progress = client.take_stock_answers(&mut reactor.connections);
        progress |= client.take_device_copies(reactor, reports);
        while let Some(event) = self.reactor.connections.rdma.poll_event() {
            progress = true;
            // A connection's end comes after the last of its copies.
            self.client.take_device_copies(&mut self.reactor, &mut self.reports);
            self.event(event, Link::Rdma, self.reactor.now_ns());
        }
        if let Some(problem) = self.reactor.connections.rdma.take_problem() {
            self.reports.problem(problem);
        }
        progress
    }

    fn take_stock_events(&mut self, now_ns: u64) -> bool {
        let mut progress = false;
        while let Some(event) = self.reactor.connections.stock_lanes.poll_event() {
            progress = true;
            self.event(event, Link::Mooncake, now_ns);
        }
        progress
    }

    fn event(&mut self, event: Event, link: fn(ConnectionId) -> Link, now_ns: u64) {
        match event {
            // Nobody is served here.
            Event::Accepted(id) => {
                self.reports.counters.accepted += 1;
                self.reactor.connections.close(link(id), CloseCause::Closed);
            }
            Event::Connected(id) => self.client.connected(&mut self.reactor.connections, link(id), now_ns),
            Event::Sent(hold) => match self.reactor.connections.take_back(hold) {
                LentPayload::Upload(request) => self.client.upload_over(request),
                LentPayload::Answer(..) => unreachable!("nobody is answered here"),
            },
            Event::Gone(id, why) => {
                let link = link(id);
                let role = self.reactor.connections.gone(link);
                self.reports.connection_ended(&why, now_ns);
                self.client.gone(link, role, &why, now_ns);
            }
        }
    }

    /// Takes what connections of one driver bring. Inlined, so that the driver is known where it is called: this runs
    /// for every frame.
    #[inline(always)]
    fn take_inputs(&mut self, next: fn(&mut Reactor, &mut Pass) -> Option<Arrival>) -> bool {
        let mut progress = false;
        let mut pass = self.reactor.begin_pass();
        while let Some(arrival) = next(&mut self.reactor, &mut pass) {
            progress = true;
            self.take_input(&arrival, pass.body());
        }
        progress
    }

    /// Takes what lanes to stock engines bring.
    fn take_stock_lanes(&mut self) -> bool {
        let mut progress = false;
        let mut pass = self.reactor.begin_pass();
        while let Some(arrival) = self.reactor.next_stock(&mut pass) {
            // The request's memory is back before its answer is looked at.
            self.take_stock_events(arrival.now_ns);
            progress |= !matches!(arrival.input, Input::Wait);
            self.take_input(&arrival, pass.body());
        }
        progress
    }

    fn take_input(&mut self, arrival: &Arrival, body: &[u8]) {
        let Self { reactor, reports, client } = self;
        let (connections, link, now_ns) = (&mut reactor.connections, arrival.link, arrival.now_ns);
        match &arrival.input {
            Input::Wait => {}
            Input::Payload(checksum) => client.payload_done(connections, link, *checksum, now_ns),
            Input::Frame(header) => {
                let target = match connections.role(link) {
                    Role::Carrier(id) => {
                        let answer = connections.take_offer_answer(id, header, body);
                        if matches!(answer, OfferAnswer::Broken) {
                            reports.broken();
                        }
                        client.offer_answered(&answer, now_ns);
                        Target::Discard
                    }
                    _ => client.take_frame(connections, reports, link, header, body, now_ns),
                };
                if header.payload_bytes > 0
                    && let Some(Input::Payload(checksum)) = connections.receive_payload(link, target)
                {
                    client.payload_done(connections, link, checksum, now_ns);
                }
            }
        }
    }

    fn run_timers(&mut self) {
        let now_ns = self.reactor.now_ns();
        self.client.sweep(&self.reactor.connections, now_ns);
        self.reactor.connections.expire(now_ns);
        self.client.run_timers(now_ns);
    }

    /// Gives the client's outputs to the drivers, and has each driver send what was queued.
    fn send_all(&mut self) -> io::Result<bool> {
        let now_ns = self.reactor.now_ns();
        let mut progress = self.client.drain(&mut self.reactor, &mut self.reports, now_ns);
        self.reactor.connections.flush();
        self.client.files().flush()?;
        progress |= self.reactor.connections.flush_stock(now_ns);
        Ok(progress)
    }

    /// The time of the present round: at most a few empty rounds old.
    #[must_use]
    pub const fn now_ns(&self) -> u64 {
        self.reactor.now_ns()
    }

    /// Waits for the next event, at most `longest`. `pending` says, after sleep was announced, whether somebody put
    /// something into the mailbox.
    ///
    /// # Errors
    /// When the poller fails.
    pub fn park(&mut self, longest: Duration, pending: impl FnOnce() -> bool) -> io::Result<()> {
        if self.reactor.connections.have_work() {
            cpu::pause();
            return Ok(());
        }
        let may_sleep = self.client.prepare_sleep();
        let slept = self.reactor.park(longest, self.client.poll_timeout(), || may_sleep && !pending())?;
        self.reports.counters.parks += u64::from(slept);
        self.client.awake();
        Ok(())
    }

    /// The client.
    pub const fn client(&mut self) -> &mut Client {
        self.client.client()
    }

    /// A batch that has completed since the last call.
    pub fn poll_done(&mut self) -> Option<BatchId> {
        self.reports.take_done()
    }

    /// Whether a newer cluster map is wanted; said once.
    pub const fn take_map_wanted(&mut self) -> bool {
        self.reports.take_map_wanted()
    }

    /// The last end of a connection that this host did not want, in words.
    #[must_use]
    pub fn last_problem(&self) -> Option<&str> {
        self.reports.last_problem()
    }

    /// What happened so far.
    #[must_use]
    pub const fn counters(&self) -> &HostCounters {
        &self.reports.counters
    }

    /// Faults made by plan so far.
    #[must_use]
    pub fn faults(&self) -> FaultCounters {
        self.reactor.connections.tcp.counters()
    }

    /// Connections open, by any driver.
    #[must_use]
    pub const fn connections(&self) -> usize {
        self.reactor.connections.open()
    }

    /// Gives caller's memory a name for requests. Where it is, the kernel says.
    pub fn add_buffer(&mut self, region: Arc<Region>) -> u32 {
        self.client.add_buffer(&mut self.reactor.connections, region)
    }

    /// Gives caller's memory this name for requests, in place of what had it. No open batch may use that. `location` is
    /// where the memory is (`cpu:0`); for `*` the kernel says.
    pub fn set_buffer(&mut self, buffer: u32, region: Arc<Region>, location: &str) {
        self.client.set_buffer(&mut self.reactor.connections, buffer, region, location);
    }

    /// Forgets caller's memory. No open batch may use it.
    pub fn remove_buffer(&mut self, buffer: u32) {
        self.client.remove_buffer(&mut self.reactor.connections, buffer);
    }

    /// Gives many pieces of caller's memory one name, under which they lie in a row. For objects: requests for ranges
    /// of segments name regions. The name is of use until [`Self::remove_parts`].
    pub fn add_parts(&mut self, pieces: Vec<IoBuf>) -> u32 {
        self.client.buffers_mut().add_parts(pieces)
    }

    /// Forgets memory in parts. No open batch may use it.
    pub fn remove_parts(&mut self, buffer: u32) {
        self.client.buffers_mut().remove_parts(buffer);
    }

    /// The memory of a range of a region; `None` when its name is nobody's, or it is not inside.
    #[must_use]
    pub fn buffer(&self, local: Local) -> Option<IoBuf> {
        self.client.buffers().inside(local)
    }

    /// Lets this process's own requests use memory under this id.
    pub fn add_segment(&mut self, segment: SegmentId, region: Arc<Region>) {
        self.client.segments().set(segment, region);
    }

    /// Forgets it. A stale id is ignored.
    pub fn remove_segment(&mut self, segment: SegmentId) {
        self.client.segments().take(segment);
    }

    /// Opens a file, to be read and written as a segment.
    ///
    /// # Errors
    /// When it cannot be opened: names it and says why.
    pub fn open_file(&mut self, path: &Path, options: FileOptions) -> io::Result<SegmentId> {
        self.client.files().open(path, options, &self.reactor.connections.poller)
    }

    /// The same for a file that is open already. One that is written with direct I/O must be in one host only: hosts do
    /// not keep each other's writes of parts of a block apart.
    ///
    /// # Errors
    /// When too many files are open, or the kernel gives no ring.
    pub fn add_file(&mut self, file: Arc<DirectFile>) -> io::Result<SegmentId> {
        self.client.files().add(file, &self.reactor.connections.poller)
    }

    /// The files that are open.
    pub const fn files(&mut self) -> &mut HostFiles {
        self.client.files()
    }

    /// RDMA devices that are open: name, bits per second (0 when down or not known), and why it is not used, if so.
    pub fn rdma_devices(&self) -> impl Iterator<Item = (&str, u64, Option<String>)> {
        self.reactor.connections.rdma.devices()
    }

    /// The names of the RDMA devices that are open, by their numbers: see
    /// [`RailMetrics::devices`](kvplane_client::RailMetrics::devices).
    pub fn rdma_names(&self) -> impl Iterator<Item = &str> {
        self.reactor.connections.rdma.device_names()
    }

    /// Why RDMA devices were not opened.
    #[must_use]
    pub fn rdma_problems(&self) -> &[String] {
        self.reactor.connections.devices.problems()
    }

    /// What the RDMA driver counted.
    #[must_use]
    pub const fn rdma_counters(&self) -> &RdmaCounters {
        self.reactor.connections.rdma.counters()
    }
}

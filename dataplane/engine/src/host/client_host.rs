//! Host with a client, for a process that sends requests: its connections, files, and the memory that they use.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{Client, Local};
use kvplane_proto::{BatchId, SegmentId};
use kvplane_sys::device::Backing;
use kvplane_sys::{DirectFile, Doorbell, FileOptions, IoBuf, Region, cpu};
use kvplane_transport::shm::SegmentOffer;
use kvplane_transport::{CloseCause, ConnectionId, Event, FaultCounters, Input, Rdma, Target};

use super::client_side::ClientSide;
use super::client_side::files::HostFiles;
use super::client_side::same_host::SameHost;
use super::config::HostConfig;
use super::reactor::Reactor;
use super::reactor::connections::{LentPayload, OfferAnswer};
use super::reactor::links::{Link, Role};
use super::reactor::pass::{Arrival, Pass};
use super::reports::{HostCounters, Reports};

/// Host with a client.
pub struct ClientHost {
    reactor: Reactor,
    reports: Reports,
    client: ClientSide,
}

impl ClientHost {
    /// Creates a host for this client, without connections.
    ///
    /// # Errors
    /// If the kernel refuses a poller.
    pub fn new(config: &HostConfig, client: Client) -> io::Result<Self> {
        let reactor = Reactor::new(config.connections(None)?);
        let client = ClientSide::new(client, &reactor.connections, config.stock.as_ref(), config.verify_shared)?;
        Ok(Self { reactor, reports: Reports::default(), client })
    }

    /// Watches a doorbell that wakes the host.
    ///
    /// # Errors
    /// If the kernel refuses to watch the doorbell.
    pub fn watch_mailbox(&mut self, doorbell: Doorbell) -> io::Result<()> {
        self.reactor.watch_mailbox(doorbell)
    }

    /// Runs one round. Returns true if it made progress.
    ///
    /// # Errors
    /// If the poller fails: the host cannot continue.
    pub fn poll(&mut self) -> io::Result<bool> {
        let something_came = self.reactor.look(|_| {})?;
        if let Some(absence) = self.reactor.begin_round(something_came) {
            self.client.note_absence(&absence);
        }
        // Arrivals come before sends, so that replies to them leave in this round.
        let mut progress = self.take_arrivals()?;
        progress |= self.take_stock_lanes();
        // Timers come after everything that could have ended or begun a wait.
        self.run_timers();
        // Sends come last, as all of the above fills queues: frames that were queued in this round leave together.
        progress |= self.send_all()?;
        Ok(self.reactor.end_round(progress, something_came, &mut self.reports.counters))
    }

    /// Takes arrivals from the drivers: completions and events of connections first, as they free room that payloads
    /// need.
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
        // Completed copies have advanced the clock.
        let now_ns = self.reactor.now_ns();
        while let Some((id, segment, _)) = self.reactor.connections.shm.poll_wanted() {
            // A host without a service has its segments to itself.
            self.reactor.connections.offer_segment(id, segment, &SegmentOffer::None);
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
            // A connection's end is handled after the last of its copies.
            self.client.take_device_copies(&mut self.reactor, &mut self.reports);
            self.event(event, Link::Rdma, self.reactor.now_ns());
        }
        if let Some(problem) = self.reactor.connections.rdma.take_problem() {
            self.reports.problem(problem);
        }
        progress
    }

    #[inline]
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
            // A client host serves no peers.
            Event::Accepted(id) => {
                self.reports.counters.accepted += 1;
                self.reactor.connections.close(link(id), CloseCause::Closed);
            }
            Event::Connected(id) => self.client.connected(&mut self.reactor.connections, link(id), now_ns),
            Event::Sent(hold) => match self.reactor.connections.take_back(hold) {
                LentPayload::Upload(request) => self.client.upload_over(request),
                LentPayload::Answer(..) | LentPayload::Staged(..) => unreachable!("a client host sends no answers"),
            },
            Event::Gone(id, why) => {
                let link = link(id);
                let role = self.reactor.connections.gone(link);
                self.reports.connection_ended(&why, now_ns);
                self.client.gone(link, role, &why, now_ns);
            }
        }
    }

    /// Takes arrivals on the connections of one driver. Inlined, so that the driver is known at the call site: this
    /// runs for every frame.
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

    /// Takes arrivals on lanes to stock engines.
    fn take_stock_lanes(&mut self) -> bool {
        let mut progress = false;
        let mut pass = self.reactor.begin_pass();
        while let Some(arrival) = self.reactor.next_stock(&mut pass) {
            // The request's memory is returned before its answer is handled.
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
        self.client.sweep(&self.reactor.connections, &mut self.reports, now_ns);
        self.reactor.connections.expire(now_ns);
        self.client.run_timers(now_ns);
    }

    /// Drains the client's outputs into the drivers, and has each driver send its queue.
    fn send_all(&mut self) -> io::Result<bool> {
        let now_ns = self.reactor.now_ns();
        let mut progress = self.client.drain(&mut self.reactor, &mut self.reports, now_ns);
        self.reactor.connections.flush();
        self.client.files().flush()?;
        progress |= self.reactor.connections.flush_stock(now_ns);
        Ok(progress)
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
        if self.reactor.connections.have_work() || self.same_host().peer_memory().is_busy() {
            cpu::pause();
            return Ok(());
        }
        let may_sleep = self.client.prepare_sleep();
        let slept = self.reactor.park(longest, self.client.poll_timeout(), || may_sleep && !pending())?;
        self.reports.counters.parks += u64::from(slept);
        self.client.awake();
        Ok(())
    }

    /// Returns the client.
    pub const fn client(&mut self) -> &mut Client {
        self.client.client()
    }

    /// Returns a batch that has completed since the last call.
    pub fn poll_done(&mut self) -> Option<BatchId> {
        self.reports.take_done()
    }

    /// Returns true once if a newer cluster map is needed.
    pub const fn take_map_wanted(&mut self) -> bool {
        self.reports.take_map_wanted()
    }

    /// Has the RDMA devices forget memory that no buffer has any more.
    pub(crate) fn forget(&mut self, region: &Arc<Region>) {
        self.reactor.connections.rdma.forget(region);
    }

    /// Records an error for [`Self::last_problem`].
    pub(crate) fn note_problem(&mut self, problem: &str) {
        self.reports.problem(problem.to_owned());
    }

    /// Returns the text of the last unexpected end of a connection.
    #[must_use]
    pub fn last_problem(&self) -> Option<&str> {
        self.reports.last_problem()
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

    /// Returns the number of open connections of all drivers.
    #[must_use]
    pub const fn connections(&self) -> usize {
        self.reactor.connections.open()
    }

    /// Returns the first free index for a buffer, which is not `taken` otherwise.
    pub(crate) fn vacant(&self, taken: impl Fn(u32) -> bool) -> u32 {
        self.client.buffers().vacant(taken)
    }

    /// Returns what copy engines reach on this host, for copies without staging.
    pub(crate) const fn same_host(&mut self) -> SameHost<'_> {
        SameHost::new(&mut self.client, &mut self.reactor)
    }

    /// Registers the caller's memory as the buffer of this index, replacing the former one, which no open batch may
    /// use. `location` is the memory's location (`cpu:0`); for `*` it comes from the kernel.
    ///
    /// Memory of a device is registered with the RDMA devices, and used by requests if all of them accept it.
    pub fn set_buffer(&mut self, buffer: u32, memory: impl Into<Backing>, location: &str) {
        self.client.set_buffer(&mut self.reactor.connections, buffer, memory.into(), location);
    }

    /// Unregisters the caller's memory. No open batch may use it.
    pub fn remove_buffer(&mut self, buffer: u32) {
        self.client.remove_buffer(&mut self.reactor.connections, buffer);
    }

    /// Registers many pieces of the caller's memory as one buffer, in which they are contiguous. For objects only:
    /// requests for ranges of segments need regions. The buffer is valid until [`Self::remove_parts`].
    pub fn add_parts(&mut self, pieces: Vec<IoBuf>) -> u32 {
        self.client.buffers_mut().add_parts(pieces)
    }

    /// Unregisters a buffer of pieces. No open batch may use it.
    pub fn remove_parts(&mut self, buffer: u32) {
        self.client.buffers_mut().remove_parts(buffer);
    }

    /// Returns the memory of a range of a region; `None` if the buffer is not registered, or the range is not inside.
    #[must_use]
    pub fn buffer(&self, local: Local) -> Option<IoBuf> {
        self.client.buffers().inside(local)
    }

    /// Registers memory as a segment that this process's own requests use.
    pub fn add_segment(&mut self, segment: SegmentId, region: Arc<Region>) {
        self.client.segments().set(segment, region);
    }

    /// Unregisters a segment. A stale id is ignored.
    pub fn remove_segment(&mut self, segment: SegmentId) {
        self.client.segments().take(segment);
    }

    /// Opens a file, to be read and written as a segment.
    ///
    /// # Errors
    /// If the file cannot be opened: the error has its path and the reason.
    pub fn open_file(&mut self, path: &Path, options: FileOptions) -> io::Result<SegmentId> {
        self.client.files().open(path, options, &self.reactor.connections.poller)
    }

    /// Adds a file that is open already, to be read and written as a segment. A file that is written with direct I/O
    /// must be in one host only: hosts do not serialize their writes to parts of one block.
    ///
    /// # Errors
    /// If too many files are open, or the kernel refuses a ring.
    pub fn add_file(&mut self, file: Arc<DirectFile>) -> io::Result<SegmentId> {
        self.client.files().add(file, &self.reactor.connections.poller)
    }

    /// Returns the open files.
    pub const fn files(&mut self) -> &mut HostFiles {
        self.client.files()
    }

    /// Returns the open RDMA devices: name, bits per second (0 if down or unknown), and the reason why a device is not
    /// used, if there is one.
    pub fn rdma_devices(&self) -> impl Iterator<Item = (&str, u64, Option<String>)> {
        self.reactor.connections.rdma.devices()
    }

    /// Returns the names of the open RDMA devices, by their numbers: see
    /// [`RailMetrics::devices`](kvplane_client::RailMetrics::devices).
    pub fn rdma_names(&self) -> impl Iterator<Item = &str> {
        self.reactor.connections.rdma.device_names()
    }

    /// Returns the reasons why RDMA devices were not opened.
    #[must_use]
    pub fn rdma_problems(&self) -> &[String] {
        self.reactor.connections.devices.problems()
    }

    /// Returns the RDMA driver, for its counters and registrations.
    #[must_use]
    pub const fn rdma(&self) -> &Rdma {
        &self.reactor.connections.rdma
    }
}

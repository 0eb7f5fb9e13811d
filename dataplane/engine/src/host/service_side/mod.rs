//! Service's side of a host: requests of peers, their answers, and the memory that they name.
//!
//! A request arrives as a frame: [`ServiceSide::take_frame`] → [`Service::request`], which names the memory that its
//! payload goes to; its end is [`ServiceSide::payload_done`]. Answers are the service's outputs: [`ServiceSide::drain`]
//! → a driver; when their payloads have left, [`ServiceSide::payload_left`] releases what the service holds for them.
//!
//! [`ServiceSide`] owns the service, the memory that it names, and the server for stock engines. It knows neither the
//! SSD tier of the store ([`super::tier`]) nor the client of a shard ([`super::fetch`]).

mod event_notifier;
mod leaving;
pub(crate) mod memory;
pub(crate) mod served;
mod shared_devices;
mod staged;
mod stock;

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::{Digest, SegmentId, Status};
use kvplane_store::service::{
    CloseReason, Extents, Hold, LeavingPayload, MemoryExtent, Output, PayloadTo, PeerKey, Service,
};
use kvplane_sys::device::{Device, DeviceError, DeviceId, DeviceMemory};
use kvplane_sys::{IoBuf, Region, cpu};
use kvplane_transport::mooncake::{Server, ServerOptions};
use kvplane_transport::shm::{Extent, MemoryRequest, SegmentOffer};
use kvplane_transport::{CloseCause, OutgoingPayload, Pieces, Target, Token};

use self::event_notifier::EventNotifier;
use self::leaving::LeavingSegments;
use self::memory::{PoolView, ServedMemory};
use self::served::{DeviceSnapshot, ServedPayloads};
use self::shared_devices::SharedDevices;
use self::staged::{Answer, Arrival, DeviceSegments, Next, Request};
use self::stock::RegisteredRanges;
use super::reactor::connections::{Connections, LentPayload};
use super::reactor::links::{Link, Role};
use super::reports::Reports;
use crate::staging::StagingCounters;

/// Service and its resources in a host.
pub(crate) struct ServiceSide {
    service: Service,
    memory: ServedMemory,
    devices: DeviceSegments,
    shared_devices: SharedDevices,
    /// Server for stock engines, which send their requests over TCP in a protocol of their own.
    stock_server: Server,
    leaving: LeavingSegments,
    served: ServedPayloads,
    event_notifier: EventNotifier,
}

impl ServiceSide {
    /// Creates the service's side over these connections. `pool` is the memory of its store.
    pub(crate) fn new(
        service: Service,
        connections: &mut Connections,
        pool: Option<Arc<Region>>,
        stock: ServerOptions,
    ) -> Self {
        Self {
            service,
            stock_server: Server::new(stock),
            leaving: LeavingSegments::default(),
            served: ServedPayloads::new(connections, pool.as_ref()),
            event_notifier: EventNotifier::default(),
            devices: DeviceSegments::default(),
            shared_devices: SharedDevices::default(),
            memory: ServedMemory::new(pool),
        }
    }

    /// Returns the service.
    pub(crate) const fn service(&mut self) -> &mut Service {
        &mut self.service
    }

    /// Returns the memory of the store.
    pub(crate) const fn pool(&self) -> Option<&Arc<Region>> {
        self.memory.pool.as_ref()
    }

    /// Returns the server for stock engines.
    pub(crate) const fn stock_server(&self) -> &Server {
        &self.stock_server
    }

    /// Serves stock engines that connect to this listener.
    pub(crate) fn listen_stock(&mut self, connections: &Connections, listener: TcpListener) -> io::Result<()> {
        self.stock_server.listen(&connections.poller, listener)
    }

    /// Handles readiness of a connection of a stock engine.
    pub(crate) fn stock_ready(&mut self, token: Token) {
        self.stock_server.ready(token);
    }

    /// Returns the names of these objects: see [`kvplane_store::service::Inspection::names_of`].
    pub(crate) fn names_of(&self, digests: &[Digest]) -> Vec<(usize, Vec<u8>, Vec<u8>)> {
        match &self.memory.pool {
            Some(pool) => self.service.inspect().names_of(digests, &PoolView(pool)),
            None => Vec::new(),
        }
    }

    /// Returns the open RDMA devices, with counters of payloads that they moved for peers.
    pub(crate) fn rdma_snapshot(&self, connections: &Connections) -> Vec<DeviceSnapshot> {
        self.served.snapshot(&connections.rdma)
    }

    /// Handles a peer that has connected.
    pub(crate) fn accepted(&mut self, connections: &mut Connections, link: Link, now_ns: u64) {
        connections.set_role(link, Role::Served);
        self.service.peer_joined(link.peer(), link.path(), now_ns);
    }

    /// Handles the end of a peer's connection.
    pub(crate) fn gone(&mut self, link: Link, now_ns: u64) {
        if !self.devices.is_empty() {
            self.devices.gone(link).into_iter().for_each(|hold| self.service.sent(hold));
        }
        self.service.peer_gone(link.peer(), now_ns);
    }

    /// Releases the payload of an answer, which has left, or never will.
    pub(crate) fn payload_left(&mut self, hold: Hold, leaving: &LeavingPayload, now_ns: u64) {
        self.service.left(leaving, hold, now_ns);
        self.service.sent(hold);
    }

    /// Releases the payload of an answer that was staged under this number: see [`Self::payload_left`].
    pub(crate) fn staged_left(&mut self, hold: Hold, leaving: &LeavingPayload, number: u32, now_ns: u64) {
        self.payload_left(hold, leaving, now_ns);
        self.devices.sent(number);
    }

    /// Takes a peer's frame; returns the target of its payload. `None`: the target is not known yet, and the connection
    /// waits for it.
    pub(crate) fn take_frame(
        &mut self,
        connections: &mut Connections,
        link: Link,
        header: &Header,
        body: &[u8],
        now_ns: u64,
    ) -> Option<Target> {
        if header.kind == Kind::Request(Operation::Rdma) {
            self.answer_offer(connections, link, header, body, now_ns);
            return Some(Target::Discard);
        }
        let to = self.service.request(link.peer(), header, body, now_ns);
        // Before the payload, which over shared memory has arrived already, and ends the reservation.
        self.write_tails();
        if let (Kind::Request(Operation::Hello | Operation::Prove), Link::Tcp(id)) = (header.kind, link)
            && self.service.inspect().is_welcome(link.peer())
        {
            connections.tcp.trust(id);
        }
        let checksum = header.checksum().is_some();
        if self.devices.concern(target_extents(&self.service, &to)) {
            let extents = target_extents(&self.service, &to).to_vec();
            return self.receive_staged(Arrival { link, checksum }, &extents, now_ns);
        }
        let target = match to {
            PayloadTo::Discard => Target::Discard,
            PayloadTo::Extent(extent) => Target::Memory { buffer: self.memory.of(extent), checksum },
            PayloadTo::Extents(range) => {
                Target::Scatter { buffers: self.memory.all(self.service.extents(range)), checksum }
            }
        };
        let target = self.target_there(link, target);
        if let (Link::Rdma(id), Some(buffer)) = (link, target.first())
            && header.payload_bytes > 0
        {
            self.served.count(&connections.rdma, &connections.devices, id, buffer.region());
        }
        Some(target)
    }

    /// Returns the target of a payload for device memory; `None` if it waits for pinned memory.
    fn receive_staged(&mut self, arrival: Arrival, extents: &[MemoryExtent], now_ns: u64) -> Option<Target> {
        let link = arrival.link;
        if matches!(link, Link::Shm(_)) {
            // A payload over shared memory cannot wait; no client of ours sends one.
            self.service.writes().refuse(link.peer(), Status::Unsupported);
            return Some(Target::Discard);
        }
        self.devices.take(Request::Write(arrival), extents, &self.memory, now_ns);
        match self.devices.take_target(link)? {
            Ok(target) => Some(self.target_there(link, target)),
            Err(status) => {
                self.service.writes().refuse(link.peer(), status);
                Some(Target::Discard)
            }
        }
    }

    /// Carries out the next steps of requests for device memory. Returns true if there were any.
    #[inline]
    pub(crate) fn serve_devices(&mut self, connections: &mut Connections, reports: &mut Reports, now_ns: u64) -> bool {
        if self.devices.is_empty() {
            return false;
        }
        let progress = self.devices.poll(&self.memory, now_ns);
        while let Some(next) = self.devices.poll_next() {
            match next {
                Next::Send(Answer { peer, header, hold, .. }, buffers, number)
                    if !IoBuf::all_mapped(buffers.as_slice()) =>
                {
                    self.service.refuse_read(peer, &header, hold, Status::OutOfRange);
                    self.devices.sent(number);
                }
                Next::Send(answer, buffers, number) => {
                    let Answer { peer, header, body, hold } = answer;
                    let leaving = self.service.leaving(&header, now_ns);
                    let hold = connections.lend(LentPayload::Staged(hold, leaving, number));
                    let payload = OutgoingPayload { buffers, hold: Some(hold) };
                    connections.send(Link::of_peer(peer), &header, &body, Some(payload));
                }
                Next::RefuseRead(Answer { peer, header, hold: hold @ Hold::Pin(_), .. }, Status::DeviceFailed) => {
                    // The object was in the device pool.
                    let status = self.service.device_moves().lose_read(hold);
                    self.service.refuse_read(peer, &header, hold, status);
                }
                Next::RefuseRead(Answer { peer, header, hold, .. }, status) => {
                    self.service.refuse_read(peer, &header, hold, status);
                }
                Next::Answer(write, status) => self.service.writes().complete(write, status, now_ns),
                Next::Receive(link, target) => {
                    let target = self.target_there(link, target);
                    connections.receive_late(link, target);
                }
                Next::RefuseWrite(link, status) => {
                    self.service.writes().refuse(link.peer(), status);
                    connections.receive_late(link, Target::Discard);
                }
                Next::Close(link) => connections.close(link, CloseCause::Closed),
            }
        }
        self.flush_devices(reports, now_ns);
        self.devices.close_unused(|region| connections.rdma.forget(region));
        progress
    }

    /// Submits the copies of requests for device memory.
    pub(crate) fn flush_devices(&mut self, reports: &mut Reports, now_ns: u64) {
        if let Some(problem) = self.devices.flush(now_ns) {
            reports.problem(problem);
        }
    }

    /// Returns true if copies of device memory are in flight: no event announces their end.
    pub(crate) fn must_be_polled(&self) -> bool {
        self.devices.must_be_polled()
    }

    /// Returns the counters of the copies from and to each device that had segments.
    pub(crate) fn staging(&self) -> BTreeMap<DeviceId, StagingCounters> {
        self.devices.counters()
    }

    /// Handles the completion of the payload of a peer's last frame.
    pub(crate) fn payload_done(&mut self, link: Link, checksum: Option<u64>, now_ns: u64) {
        if self.devices.is_receiving(link) {
            let write = self.service.writes().detach(link.peer(), checksum, now_ns);
            self.devices.received(link, write);
            return;
        }
        self.service.payload_done(link.peer(), checksum, now_ns);
    }

    /// Returns the target of a peer's payload, unless its memory was freed without being unregistered: then the payload
    /// is discarded and the peer gets an error. Touching that memory would kill the process.
    fn target_there(&mut self, link: Link, target: Target) -> Target {
        let there = match &target {
            Target::Discard => true,
            Target::Memory { buffer, .. } => buffer.is_mapped(),
            Target::Scatter { buffers, .. } => IoBuf::all_mapped(buffers),
        };
        if there {
            return target;
        }
        self.service.writes().refuse(link.peer(), Status::OutOfRange);
        // If it was to pass through chunks, they are free again, and the service answers its end.
        self.devices.received(link, None);
        Target::Discard
    }

    /// Handles a peer's offer of an RDMA connection: this connection then only carries the offer.
    fn answer_offer(&mut self, connections: &mut Connections, link: Link, header: &Header, body: &[u8], now_ns: u64) {
        let Link::Tcp(carrier) = link else {
            connections.close(link, CloseCause::Closed);
            return;
        };
        let may = self.service.inspect().may_carry(link.peer());
        self.service.peer_gone(link.peer(), now_ns);
        connections.tcp.trust(carrier);
        connections.answer_offer(carrier, header, body, may);
    }

    /// Answers peers on this host that request the memory of segments.
    pub(crate) fn offer_segments(&mut self, connections: &mut Connections) {
        while let Some((id, segment, wanted)) = connections.shm.poll_wanted() {
            // A segment that is being unregistered is not offered any more.
            let info = self.service.inspect().segments().info(segment).filter(|info| info.remote_accessible);
            let offer = match (info, wanted) {
                (Some(info), MemoryRequest::Region) if info.shareable => {
                    let offer = |region| SegmentOffer::Region { region, writable: info.writable };
                    self.memory.segments.get(segment).map(offer)
                }
                // A device's mapping can be written: who may only read sends requests.
                (Some(info), MemoryRequest::Device { known }) if info.writable => {
                    let is_welcome = self.service.inspect().is_welcome(Link::Shm(id).peer());
                    let memory = self.devices.memory(segment).filter(|_| is_welcome);
                    memory.and_then(|memory| self.shared_devices.offer(segment, memory, known))
                }
                _ => None,
            };
            connections.offer_segment(id, segment, &offer.unwrap_or(SegmentOffer::None));
        }
    }

    /// Sends the service's answers, and closes connections at its request. Returns true if there was any output.
    #[inline]
    pub(crate) fn drain(&mut self, connections: &mut Connections, reports: &mut Reports, now_ns: u64) -> bool {
        let mut progress = false;
        self.write_tails();
        while let Some(output) = self.service.poll_output() {
            progress = true;
            self.output(connections, reports, output, now_ns);
        }
        progress
    }

    /// Writes the tails of objects for which the service has just reserved memory.
    #[inline]
    pub(crate) fn write_tails(&mut self) {
        let Some(pool) = &self.memory.pool else { return };
        while let Some(tail) = self.service.poll_tail() {
            pool.copy_in(tail.offset as usize, self.service.body(tail.bytes));
        }
    }

    fn output(&mut self, connections: &mut Connections, reports: &mut Reports, output: Output, now_ns: u64) {
        match output {
            Output::Frame { peer, header, body, payload: Some((extents, hold)) }
                if self.devices.concern(source_extents(&self.service, &extents)) =>
            {
                if self.devices.is_full() {
                    return self.service.refuse_read(peer, &header, hold, Status::Busy);
                }
                let answer = Answer { peer, header, body: self.service.body(body).to_vec(), hold };
                let extents = source_extents(&self.service, &extents).to_vec();
                self.devices.take(Request::Read(answer), &extents, &self.memory, now_ns);
            }
            Output::Frame { peer, header, body, payload } => {
                let payload = payload.map(|(extents, hold)| {
                    let buffers: Pieces = match extents {
                        Extents::One(extent) => self.memory.of(extent).into(),
                        Extents::Many(range) => self.memory.all(self.service.extents(range)).into(),
                    };
                    (buffers, hold)
                });
                // The memory was freed without being unregistered: touching it would kill the process.
                if let Some((buffers, hold)) = &payload
                    && !IoBuf::all_mapped(buffers.as_slice())
                {
                    self.service.refuse_read(peer, &header, *hold, Status::OutOfRange);
                    return;
                }
                let payload = payload.map(|(buffers, hold)| {
                    let leaving = self.service.leaving(&header, now_ns);
                    OutgoingPayload { buffers, hold: Some(connections.lend(LentPayload::Answer(hold, leaving))) }
                });
                let link = Link::of_peer(peer);
                if let Link::Rdma(id) = link
                    && let Some(buffer) = payload.as_ref().and_then(|payload| payload.buffers.as_slice().first())
                {
                    self.served.count(&connections.rdma, &connections.devices, id, buffer.region());
                }
                connections.send(link, &header, self.service.body(body), payload);
            }
            Output::Close { peer, reason } => {
                if reason != CloseReason::Fenced {
                    reports.broken();
                    reports.problem(reason.to_string());
                }
                close(connections, peer, &reason);
            }
            Output::Unregistered { segment } => self.segment_left(connections, reports, segment, now_ns),
        }
    }

    /// Advances lists of keys, and checks of objects in memory, by one step each. Returns true if there were any.
    #[inline]
    pub(crate) fn drive_pool(&mut self, now_ns: u64) -> bool {
        self.memory.pool.as_ref().is_some_and(|pool| self.service.drive_pool(&PoolView(pool), now_ns))
    }

    /// Serves stock engines. Returns true if it made progress.
    #[inline]
    pub(crate) fn serve_stock(&mut self, connections: &Connections, now_ns: u64) -> bool {
        let mut ranges = RegisteredRanges { service: &mut self.service, segments: &self.memory.segments };
        self.stock_server.drive(&connections.poller, &mut ranges, now_ns)
    }

    /// Sets the memory of a registered segment, which peers may use from now on.
    pub(crate) fn add_segment(&mut self, connections: &mut Connections, segment: SegmentId, region: Arc<Region>) {
        if let Some(info) = self.service.inspect().segments().info(segment).filter(|info| info.remote_accessible) {
            let bytes = info.bytes.min(region.bytes() as u64);
            let writable = info.writable && region.writable();
            let extent = Extent { address: region.address(), bytes, writable, direct: true };
            connections.shm.publish(segment, &extent);
            connections.rdma.publish(segment, &Arc::clone(&region).into(), bytes, writable);
        }
        self.memory.segments.set(segment, region);
    }

    /// Prepares for the memory of a device: for that of segments, or of the store's device pool, if it is given.
    ///
    /// # Errors
    /// If the host has too little memory to pin, or the device is lost.
    pub(crate) fn open_device(
        &mut self,
        connections: &mut Connections,
        device: &Arc<Device>,
        pool: Option<&Arc<DeviceMemory>>,
    ) -> Result<(), DeviceError> {
        if let Some(region) = self.devices.open_stage(device)? {
            connections.rdma.register(&region);
        }
        if let Some(pool) = pool {
            self.devices.set_pool(Arc::clone(pool));
        }
        Ok(())
    }

    /// Sets the memory of a registered segment, which is a device's: peers on this host access it by a handle of its
    /// driver. [`Self::open_device`] has prepared for it.
    pub(crate) fn add_device_segment(
        &mut self,
        connections: &mut Connections,
        segment: SegmentId,
        memory: Arc<DeviceMemory>,
    ) {
        if let Some(info) = self.service.inspect().segments().info(segment).filter(|info| info.remote_accessible) {
            let extent = Extent { address: 0, bytes: info.bytes, writable: info.writable, direct: false };
            connections.shm.publish(segment, &extent);
            connections.rdma.publish(segment, &Arc::clone(&memory).into(), info.bytes, info.writable);
        }
        self.devices.add(segment, memory);
    }

    /// Unregisters a segment. [`Reports::take_free`] returns it when it is no longer in use; if it is unregistered
    /// again, it is returned again.
    pub(crate) fn unregister(&mut self, connections: &Connections, segment: SegmentId) {
        // Retracted at once, even if a request on a stream has to end first.
        connections.shm.retract(segment);
        self.service.unregister(segment);
    }

    /// Handles a segment that the service has released: peers start no more copies, and those in flight are waited for.
    fn segment_left(&mut self, connections: &mut Connections, reports: &mut Reports, segment: SegmentId, now_ns: u64) {
        connections.shm.retract(segment);
        // From here on the devices admit no access.
        connections.rdma.retract(segment);
        let region = self.memory.segments.take(segment);
        self.devices.remove(segment);
        self.shared_devices.remove(segment);
        if let Some(region) = region.as_ref().filter(|region| !self.memory.has(region)) {
            connections.rdma.forget(region);
        }
        self.leaving.add(segment, region, now_ns);
        self.release_unused(connections, reports);
    }

    /// Reports the segments that no peer is using any more.
    #[inline]
    pub(crate) fn release_unused(&mut self, connections: &mut Connections, reports: &mut Reports) {
        self.leaving.release_unused(&mut connections.shm, |segment| reports.segment_free(segment));
    }

    /// Closes the connections that still use a segment whose unregistering takes too long.
    pub(crate) fn evict_users(&mut self, connections: &Connections, segment: SegmentId) {
        self.service.evict_users(segment);
        let mut ranges = RegisteredRanges { service: &mut self.service, segments: &self.memory.segments };
        self.stock_server.close_users(&connections.poller, &mut ranges, segment.to_bits());
    }

    /// Sets the subscriber that is notified of new events of the service's objects.
    pub(crate) fn follow(&mut self, subscriber: Option<SyncSender<()>>) {
        self.event_notifier.set(subscriber);
    }

    /// Notifies the subscriber if there are new events.
    pub(crate) fn notify_subscriber(&mut self) {
        self.event_notifier.notify(|| self.service.inspect().next_event());
    }

    /// Runs the service's timers that are due.
    pub(crate) fn run_timers(&mut self, now_ns: u64) {
        if self.service.poll_timeout().is_some_and(|at_ns| at_ns <= now_ns) {
            self.service.handle_timeout(now_ns);
        }
    }

    /// Returns the time of the next timer.
    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        let timeouts = [self.service.poll_timeout(), self.stock_server.poll_timeout(), self.devices.poll_timeout()];
        timeouts.into_iter().flatten().min()
    }

    /// Returns how long the host may park while peers use unregistered segments.
    pub(crate) fn longest_park(&self, now_ns: u64) -> Duration {
        self.leaving.longest_park(now_ns)
    }

    /// Ends a round.
    pub(crate) fn round_over(&mut self) {
        self.service.round_over(cpu::monotonic_ns);
    }
}

/// Returns the extents that a request's payload goes to.
fn target_extents<'a>(service: &'a Service, to: &'a PayloadTo) -> &'a [MemoryExtent] {
    match to {
        PayloadTo::Discard => &[],
        PayloadTo::Extent(extent) => std::slice::from_ref(extent),
        PayloadTo::Extents(range) => service.extents(range.clone()),
    }
}

/// Returns the extents of a reply's payload.
fn source_extents<'a>(service: &'a Service, extents: &'a Extents) -> &'a [MemoryExtent] {
    match extents {
        Extents::One(extent) => std::slice::from_ref(extent),
        Extents::Many(range) => service.extents(range.clone()),
    }
}

/// Closes a peer's connection: after the answers that give the reason, unless it is closed because the peer does not
/// read them.
fn close(connections: &mut Connections, peer: PeerKey, reason: &CloseReason) {
    let link = Link::of_peer(peer);
    let heard = matches!(reason, CloseReason::Refused(_) | CloseReason::Malformed(_));
    if heard || matches!(link, Link::Shm(_)) {
        connections.close_after_sending(link, CloseCause::Closed);
    } else {
        connections.close(link, CloseCause::Closed);
    }
}

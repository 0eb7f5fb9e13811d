//! RDMA in a host: which devices, how connections come about, and copies that the devices make.
//!
//! A connection is talked about on a TCP connection of its own to the peer's data port: our half of it is a request
//! there, the peer's half the answer. After that the TCP connection says nothing more, but when it ends the peer is
//! gone.

use std::collections::HashMap;
use std::sync::Arc;

use kvplane_client::{Carrier, Client, DeviceCopy, LaneId, Near, NodeCounts, Place, RowCopy, SliceId};
use kvplane_proto::frame::Header;
use kvplane_proto::message::{GetItem, Kind, Operation, RangeItem, ReadItem, decode_items};
use kvplane_proto::{Limits, RequestId, Status};
use kvplane_sys::verbs::Verbs;
use kvplane_sys::{Poller, Region};
use kvplane_transport::{CloseCause, ConnectionId, CopyCompletions, Rdma, RdmaCopy, RdmaCounters, RdmaOptions};

use super::Host;
use super::inbound::Inputs;
use super::near::{NearDevices, node_of_region};
use super::parts::Buffers;
use super::roles::{Link, Role};

/// Copies that go from the client to a device in one piece: few enough to stay in the cache.
const ROW: usize = 64;

/// RDMA devices for a host.
#[derive(Clone, Debug)]
pub struct RdmaDevices {
    /// Where they come from.
    pub verbs: Verbs,
    /// Names of those to use, in the order of their numbers; empty for all.
    pub names: Vec<String>,
    /// How many of the first of them peers are given; the others stand in when none of those works. 0: all.
    pub preferred: u16,
    /// How near they are to this machine's memory.
    pub near: Arc<NearDevices>,
    /// Settings of the driver.
    pub options: RdmaOptions,
}

/// The RDMA driver of a host, and who waits for what of it.
pub(super) struct RdmaWork {
    pub(super) driver: Rdma,
    /// The TCP connection that each RDMA connection came from.
    carriers: HashMap<ConnectionId, ConnectionId>,
    /// Copies that are over, for the moment.
    copied: CopyCompletions,
    /// Copies on their way from the client to a device, for the moment.
    row: Box<[RowCopy]>,
    /// Why devices are not used.
    problems: Vec<String>,
    pub(super) near: Arc<NearDevices>,
    /// The same by the numbers of the devices that are open.
    pub(super) table: Near,
    /// The service's memory, and where it is.
    pool: Option<(Arc<Region>, Place)>,
    /// Payloads moved for peers, by device.
    pub(super) served: Vec<NodeCounts>,
}

impl RdmaWork {
    pub(super) fn new(devices: Option<&RdmaDevices>, poller: &Poller) -> Self {
        let driver = Rdma::new(devices.map(|devices| devices.options).unwrap_or_default());
        let near = devices.map(|devices| Arc::clone(&devices.near)).unwrap_or_default();
        let mut work = Self {
            driver,
            carriers: HashMap::new(),
            copied: CopyCompletions::default(),
            row: vec![RowCopy::default(); ROW].into(),
            problems: Vec::new(),
            near,
            table: Near::default(),
            pool: None,
            served: Vec::new(),
        };
        if let Some(devices) = devices {
            work.open(devices, poller);
            work.driver.prefer(devices.preferred.into());
        }
        work.table = work.near.table(work.driver.device_names());
        work.served.resize(work.driver.device_names().count(), NodeCounts::default());
        work
    }

    /// Registers the service's memory, and finds out where it is.
    pub(super) fn register_pool(&mut self, pool: &Arc<Region>) {
        self.driver.register(pool);
        let node = node_of_region(pool).filter(|_| !self.served.is_empty());
        let place = node.map_or(Place::UNKNOWN, |node| self.near.place_of_node(node));
        self.pool = Some((Arc::clone(pool), place));
    }

    /// A payload moves between a region and the peer of this connection.
    pub(super) fn count_served(&mut self, id: ConnectionId, region: &Arc<Region>) {
        let (Some((device, _)), Some((pool, place))) = (self.driver.rail(id), &self.pool) else { return };
        let place = if Arc::ptr_eq(pool, region) { *place } else { Place::UNKNOWN };
        let same_node = self.table.of(device as u16, place).same_node;
        if let Some(counts) = self.served.get_mut(device) {
            counts.count(same_node);
        }
    }

    fn open(&mut self, devices: &RdmaDevices, poller: &Poller) {
        let found = if devices.names.is_empty() {
            devices.verbs.devices().map(|found| found.into_iter().map(Ok).collect())
        } else {
            Ok(devices.names.iter().map(|name| devices.verbs.device(name)).collect::<Vec<_>>())
        };
        match found {
            Ok(found) if found.is_empty() => self.problems.push("there is no RDMA device".to_owned()),
            Ok(found) => {
                for device in found {
                    let opened = device
                        .map_err(|error| error.to_string())
                        .and_then(|device| self.driver.add_device(poller, &device).map_err(|error| error.to_string()));
                    self.problems.extend(opened.err());
                }
            }
            Err(error) => self.problems.push(error.to_string()),
        }
    }

    /// The TCP connection of this one is gone.
    pub(super) fn leave_carrier(&mut self, id: ConnectionId) {
        self.carriers.remove(&id);
    }

    /// Bytes per second of each device, 0 where that is not known.
    pub(super) fn speeds(&self) -> Vec<u64> {
        self.driver.devices().map(|(_, bits_per_second, _)| bits_per_second / 8).collect()
    }
}

/// Offers the memory that the answers to a request go to.
pub(super) fn expect_answers(
    driver: &mut Rdma,
    id: ConnectionId,
    client: &Client,
    buffers: &Buffers,
    header: &Header,
    body: &[u8],
) {
    let mut expect = |request: RequestId| {
        if let Some(local) = client.answer_memory(request) {
            driver.expect_answer(id, request, buffers.pieces(local));
        }
    };
    match header.kind {
        Kind::Request(Operation::Get) => {
            decode_items::<GetItem>(body, header.items).into_iter().flatten().for_each(|item| expect(item.request));
        }
        Kind::Request(Operation::GetRange) => {
            decode_items::<RangeItem>(body, header.items).into_iter().flatten().for_each(|item| expect(item.request));
        }
        Kind::Request(Operation::Read) => {
            decode_items::<ReadItem>(body, header.items).into_iter().flatten().for_each(|item| expect(item.request));
        }
        _ => {}
    }
}

/// Bits of a copy's token that are its slice's position; above them is its generation.
const INDEX_BITS: u32 = 28;
const _: () = assert!(Limits::OPEN_SLICES <= 1 << (INDEX_BITS - 1), "a batch may add slices beyond the limit");

fn token_of(slice: SliceId) -> u64 {
    u64::from(slice.generation) << INDEX_BITS | u64::from(slice.index)
}

const fn slice_of(token: u64) -> SliceId {
    SliceId { index: token as u32 & ((1 << INDEX_BITS) - 1), generation: (token >> INDEX_BITS) as u32 }
}

/// A copy in the words of the driver.
///
/// # Panics
/// When the buffer was removed while a batch used it.
#[inline]
fn on_device<'a>(buffers: &'a Buffers, copy: &DeviceCopy) -> RdmaCopy<'a> {
    let DeviceCopy { slice, segment, offset, local, write } = *copy;
    let region = buffers.region(local.buffer);
    let region = region.expect("memory stays registered while a batch uses it");
    let (at, bytes) = (local.offset as usize, local.bytes as usize);
    RdmaCopy { token: token_of(slice), segment, offset, region, at, bytes, write }
}

/// A copy that has the rest in common with another.
#[inline]
fn of_row<'a>(head: &RdmaCopy<'a>, copy: &RowCopy) -> RdmaCopy<'a> {
    RdmaCopy {
        token: token_of(copy.slice),
        offset: copy.offset,
        at: copy.at as usize,
        bytes: copy.bytes as usize,
        ..*head
    }
}

impl Host {
    /// The TCP connection for a lane over RDMA is there: says who we are, where the peer wants to know, before it makes
    /// anything for us.
    pub(super) fn greet_carrier(&mut self, carrier: ConnectionId, lane: LaneId) {
        let Some(client) = &self.client else { return };
        let step = client.carrier_connected(lane);
        self.go_on_with_carrier(carrier, lane, step);
    }

    /// The peer has answered to that.
    pub(super) fn take_carrier_frame(&mut self, link: Link, lane: LaneId, header: &Header, body: &[u8]) {
        let (Link::Tcp(carrier), Some(client)) = (link, &mut self.client) else { return };
        let step = client.carrier_frame(lane, header, body);
        self.go_on_with_carrier(carrier, lane, step);
    }

    fn go_on_with_carrier(&mut self, carrier: ConnectionId, lane: LaneId, step: Carrier) {
        match step {
            Carrier::Go => self.offer_rdma(carrier, lane),
            Carrier::Send(header, body) => {
                self.tcp.send(carrier, &header, &body, None);
            }
            Carrier::Refused(status, why) => {
                if let Some(client) = &mut self.client {
                    client.refused(lane, status);
                }
                self.close(Link::Tcp(carrier), CloseCause::Setup(why));
            }
        }
    }

    /// Makes an offer on the TCP connection for a lane over RDMA.
    fn offer_rdma(&mut self, carrier: ConnectionId, lane: LaneId) {
        let devices = self.client.as_ref().and_then(|client| client.rail_of(lane)).and_then(|rail| rail.rdma);
        let (own, peer) = devices.map_or((0, 0), |devices| (devices.own, devices.peer));
        let (id, offer) = match self.rdma_work.driver.offer(usize::from(own), peer) {
            Ok(offered) => offered,
            Err(error) => {
                self.close(Link::Tcp(carrier), CloseCause::Setup(error.to_string()));
                return;
            }
        };
        self.roles.set(Link::Tcp(carrier), Role::Carrier(id));
        self.roles.set(Link::Rdma(id), Role::Lane(lane, None));
        self.rdma_work.carriers.insert(id, carrier);
        if let Some(entry) = self.lanes.get_mut(lane.index as usize) {
            *entry = Some((lane, Link::Rdma(id)));
        }
        let header = Header::request(Kind::Request(Operation::Rdma), RequestId::default()).with_body(&offer, 1);
        self.tcp.send(carrier, &header, &offer, None);
    }

    /// A peer offers an RDMA connection: from now on it is talked about on this one.
    pub(super) fn answer_rdma(&mut self, link: Link, header: &Header, body: &[u8], now_ns: u64) {
        let Link::Tcp(carrier) = link else {
            self.close(link, CloseCause::Closed);
            return;
        };
        // Nothing is made for a stranger.
        let may = self.service.as_ref().is_some_and(|service| service.inspect().may_carry(link.peer()));
        if let Some(service) = &mut self.service {
            service.peer_gone(link.peer(), now_ns);
        }
        self.tcp.trust(carrier);
        let (accepted, answer) = match may {
            true => self.rdma_work.driver.accept(body),
            false => (None, Rdma::refusal(Status::Prove)),
        };
        let status = Rdma::answer_status(&answer);
        let reply = Header::reply(Kind::Reply(Operation::Rdma), header.request, status).with_body(&answer, 1);
        self.tcp.send(carrier, &reply, &answer, None);
        match accepted {
            Some(id) => {
                self.roles.set(link, Role::Carrier(id));
                self.rdma_work.carriers.insert(id, carrier);
            }
            None => {
                self.roles.set(link, Role::None);
                self.tcp.close_after_sending(carrier, CloseCause::Closed);
            }
        }
    }

    /// The peer has answered our offer.
    pub(super) fn take_rdma_answer(&mut self, id: ConnectionId, header: &Header, body: &[u8], now_ns: u64) {
        if header.kind != Kind::Reply(Operation::Rdma) {
            self.counters.broken += 1;
            self.close(Link::Rdma(id), CloseCause::Closed);
            return;
        }
        if let (Status::Unsupported, Role::Lane(lane, _)) = (header.status, self.roles.get(Link::Rdma(id)))
            && let Some(client) = &mut self.client
        {
            client.path_refused(lane, "the peer has no RDMA device", now_ns);
        }
        if let (Status::Prove, Role::Lane(lane, _)) = (header.status, self.roles.get(Link::Rdma(id)))
            && let Some(client) = &mut self.client
        {
            client.refused(lane, header.status);
        }
        self.rdma_work.driver.complete(id, body);
    }

    /// An RDMA connection is gone: what it came from is of no use.
    pub(super) fn carried_gone(&mut self, id: ConnectionId) {
        // Gone before, its place may be another's by now.
        if let Some(carrier) = self.rdma_work.carriers.remove(&id)
            && self.roles.get(Link::Tcp(carrier)) == Role::Carrier(id)
        {
            self.roles.set(Link::Tcp(carrier), Role::None);
            self.tcp.close(carrier, CloseCause::Closed);
        }
    }

    /// Gives the device a copy, and those that the client has for the same lane right behind it: in rows, first all of
    /// a row from the client, then all of it to the device, as doing both for each takes more values than registers.
    // By itself: what else an output may be needs registers that the copies use.
    #[inline(never)]
    pub(super) fn start_rdma_copies(&mut self, lane: LaneId, first: DeviceCopy) {
        // Where the lane is gone, whoever waited for the copies knows it.
        let (Some(Link::Rdma(id)), Some(client)) = (self.link_of(lane), &mut self.client) else { return };
        let RdmaWork { driver, row, .. } = &mut self.rdma_work;
        let mut next = Some(first);
        while let Some(first) = next {
            let head = on_device(&self.regions.buffers, &first);
            let Some(mut copies) = client.copies(lane) else {
                driver.copy_many(id, [head]);
                return;
            };
            let alike = copies.alike(&first, row);
            driver.copy_all(id, head, row[..alike].iter().map(|copy| of_row(&head, copy)));
            next = copies.next();
        }
    }

    pub(super) fn take_rdma_events(&mut self) -> bool {
        let mut progress = self.take_foreign_answers();
        progress |= self.take_rdma_copies();
        while let Some(event) = self.rdma_work.driver.poll_event() {
            progress = true;
            // A connection's end comes after the last of its copies.
            self.take_rdma_copies();
            self.event(event, Link::Rdma, self.rounds.now_ns());
        }
        if let Some(problem) = self.rdma_work.driver.take_problem() {
            self.notices.problem(problem);
        }
        progress
    }

    fn take_rdma_copies(&mut self) -> bool {
        let mut copied = core::mem::take(&mut self.rdma_work.copied);
        self.rdma_work.driver.take_copied(&mut copied);
        let progress = !copied.is_empty();
        for (connection, outcome, tokens) in copied.runs() {
            let now_ns = self.arrival_ns();
            let lane = self.roles.get(Link::Rdma(connection));
            let (Role::Lane(lane, _), Some(client)) = (lane, &mut self.client) else { continue };
            let slices = tokens.iter().map(|&token| slice_of(token));
            match outcome {
                Ok(()) => {
                    self.counters.rdma_copies += tokens.len() as u64;
                    client.all_copied(lane, slices, now_ns);
                }
                // What a failed connection leaves undone is told by its end.
                Err(Status::Unreachable) => {}
                Err(status) => slices.for_each(|slice| client.copied(lane, slice, Err(status), now_ns)),
            }
        }
        copied.clear();
        self.rdma_work.copied = copied;
        progress
    }

    pub(super) fn take_rdma(&mut self) -> bool {
        self.take_inputs(&Inputs {
            link: Link::Rdma,
            next: |host| host.rdma_work.driver.next_ready(),
            input: |host, id, scratch| host.rdma_work.driver.input(id, scratch),
            again: |host, id| host.rdma_work.driver.ready_again(id),
        })
    }

    /// Unpins memory that has no name any more.
    pub(super) fn forget_rdma(&mut self, region: &Arc<Region>) {
        let mut held = self.regions.buffers.regions().chain(self.regions.segments.regions());
        if !held.any(|held| Arc::ptr_eq(held, region)) {
            self.rdma_work.driver.forget(region);
        }
    }

    /// RDMA devices that are open: name, bits per second (0 when down or not known), and why it is not used, if so.
    pub fn rdma_devices(&self) -> impl Iterator<Item = (&str, u64, Option<String>)> {
        self.rdma_work.driver.devices()
    }

    /// The names of the RDMA devices that are open, by their numbers.
    pub fn rdma_names(&self) -> impl Iterator<Item = &str> {
        self.rdma_work.driver.device_names()
    }

    /// Why RDMA devices were not opened.
    #[must_use]
    pub fn rdma_problems(&self) -> &[String] {
        &self.rdma_work.problems
    }

    /// What the RDMA driver counted.
    #[must_use]
    pub const fn rdma_counters(&self) -> &RdmaCounters {
        self.rdma_work.driver.counters()
    }
}

//! Test rig: a host, its network and its peers in one. Takes the client's outputs and replies as an honest peer would,
//! or lets a test reply by hand. Objects have a length, a version and a checksum, but no bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use kvplane_proto::digest::Digest;
use kvplane_proto::flags::ItemFlags;
use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::{BatchId, Epoch, Incarnation, NodeId, PinId, ReservationId, ShardId, Version};
use kvplane_proto::map::{ClusterMap, Member, ReplicaSet, ShardAddress};
use kvplane_proto::message::{
    Bitmap, CommitItem, CommitReply, DigestItem, GetItem, IdItem, Item, Kind, ListReply, LookupReply, ObjectName,
    Operation, PutItem, PutOptions, RangeItem, ReserveReply, SizeReply, Welcome, WriteItem, decode_items, decode_puts,
};
use kvplane_proto::status::Status;

use super::answers::{check_range, descriptor, many, read, single};
use crate::LaneEvent;
use crate::network::Network;
use crate::tables::NOWHERE;
use crate::{
    Client, Config, LaneId, Local, Output, Path, PayloadTo, PeerAddress, PeerId, PutBook, Request, SliceId, Via,
};

pub(super) const SECOND_NS: u64 = 1_000_000_000;

/// Length of the only region of [`descriptor`].
pub(super) const SEGMENT_BYTES: u64 = 1 << 30;

impl Client {
    /// Returns the peers, rails and lanes.
    pub(crate) const fn network(&self) -> &Network {
        &self.router.traffic.network
    }
}

/// A frame that the client has sent.
#[derive(Clone, Debug)]
pub(super) struct SentFrame {
    pub(super) lane: LaneId,
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) payload: Vec<Local>,
}

impl SentFrame {
    pub(super) fn operation(&self) -> Operation {
        match self.header.kind {
            Kind::Request(operation) => operation,
            Kind::Reply(operation) => panic!("the client sent a reply to {operation:?}"),
        }
    }

    pub(super) fn items<T: Item>(&self) -> Vec<T> {
        decode_items(&self.body, self.header.items).expect("a well-formed body").collect()
    }

    pub(super) fn puts(&self) -> Vec<PutItem> {
        let puts = decode_puts(&self.body, self.header.items).expect("a well-formed body");
        puts.map(|(item, name)| {
            if item.key_bytes == 0 {
                assert_eq!(item, PutItem::plain(item.digest, item.bytes));
            } else {
                assert_eq!((name.digest(), item.options()), (item.digest, wishes(item.digest)));
            }
            item
        })
        .collect()
    }
}

/// A frame for the client, with the checksum of its payload.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) lane: LaneId,
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) sum: u64,
}

/// An output of the client.
#[derive(Clone, Debug)]
pub(super) enum ClientOutput {
    Connect { lane: LaneId, path: Path },
    Frame(SentFrame),
    Copy { lane: LaneId, slice: SliceId, local: Local, sum: u64 },
    Reset(LaneId),
    Done(BatchId),
    WantMap,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Object {
    pub(super) bytes: u64,
    pub(super) version: u64,
    /// True if the owner reports that the replica owner has the object too.
    pub(super) replicas: ReplicaSet,
}

impl Object {
    pub(super) const fn new(bytes: u64, version: u64) -> Self {
        Self { bytes, version, replicas: ReplicaSet::NONE }
    }

    pub(super) const fn replicated(bytes: u64, version: u64) -> Self {
        Self { replicas: ReplicaSet::FIRST, ..Self::new(bytes, version) }
    }
}

pub(super) struct Rig {
    pub(super) client: Client,
    pub(super) now_ns: u64,
    pub(super) objects: BTreeMap<Digest, Object>,
    pub(super) addresses: BTreeMap<LaneId, PeerAddress>,
    pub(super) pins: BTreeSet<(LaneId, u64)>,
    pub(super) reservations: BTreeMap<(LaneId, u64), PutItem>,
    pub(super) done: Vec<BatchId>,
    pub(super) maps_wanted: usize,
    /// True if the kernel copies between this process and the peers.
    pub(super) cma: bool,
    /// Ways in which segments were copied, in order; `None` for a file transfer.
    pub(super) ways: Vec<Option<Via>>,
    next: u32,
}

/// Returns the checksum of every object under this digest.
pub(super) fn sum_of(digest: Digest) -> u64 {
    digest.low() ^ 0x5555
}

pub(super) fn digest(number: u64) -> Digest {
    Digest::of(b"test", &number.to_le_bytes())
}

pub(super) fn push_name(book: &mut PutBook, number: u64, bytes: u64) -> u32 {
    let key = number.to_le_bytes();
    let name = ObjectName { tenant: b"test", key: &key };
    book.push(PutItem::named(&name, bytes, &wishes(digest(number))), &name)
}

fn wishes(digest: Digest) -> PutOptions {
    let bits = digest.low();
    PutOptions {
        tenant: bits as u32,
        group: bits >> 7,
        soft_pin_ms: bits as u32 & 0xffff,
        hard_pin: bits & 1 != 0,
        data_type: bits as u8,
        replace: bits & 2 != 0,
        ..PutOptions::default()
    }
}

pub(super) fn local(buffer: u32, offset: u64, bytes: u64) -> Local {
    Local { buffer, offset, bytes }
}

pub(super) fn stream_config() -> Config {
    Config { cluster: "test".into(), client: 7, shared: false, cma: false, ..Config::default() }
}

pub(super) fn shared_config() -> Config {
    Config { cluster: "test".into(), client: 7, host: "here".into(), ..Config::default() }
}

/// Returns a map with the members `1..=members` of one shard each, all on this host, in incarnation `incarnation`.
pub(crate) fn map(epoch: u64, members: u64, incarnation: u64) -> ClusterMap {
    let members = (1..=members)
        .map(|node| Member {
            node: NodeId(node),
            incarnation: Incarnation(incarnation),
            weight: 1,
            failure_domain: format!("rack-{node}"),
            host: "here".into(),
            shards: vec![ShardAddress {
                tcp: SocketAddr::from(([127, 0, 0, 1], 1000 + node as u16)),
                shm: Some(format!("/run/{node}.sock")),
            }],
        })
        .collect();
    ClusterMap { epoch: Epoch(epoch), replicas: 1, members, former: None }
}

impl Rig {
    /// Creates a client with a map of `members` members.
    pub(super) fn new(config: Config, members: u64) -> Self {
        let mut client = Client::new(config);
        client.set_map(map(1, members, 1), 0);
        Self {
            client,
            now_ns: 1,
            objects: BTreeMap::new(),
            addresses: BTreeMap::new(),
            pins: BTreeSet::new(),
            reservations: BTreeMap::new(),
            done: Vec::new(),
            maps_wanted: 0,
            cma: false,
            ways: Vec::new(),
            next: 0,
        }
    }

    pub(super) fn with_objects(mut self, objects: &[(u64, u64)]) -> Self {
        for &(number, bytes) in objects {
            self.objects.insert(digest(number), Object::new(bytes, number + 1));
        }
        self
    }

    /// Opens a peer outside the map that serves a segment.
    pub(super) fn segment_peer(&mut self, shm: bool) -> PeerId {
        self.client.open_peer(PeerAddress {
            kind: crate::PeerKind::Native,
            node: NodeId(50),
            incarnation: Incarnation(5),
            shard: ShardId(0),
            tcp: SocketAddr::from(([127, 0, 0, 1], 50)),
            shm: shm.then(|| "/run/50.sock".into()),
        })
    }

    pub(super) fn submit(&mut self, requests: &[Request]) -> BatchId {
        self.client.submit(requests, self.now_ns + 10 * SECOND_NS, self.now_ns).expect("a valid batch")
    }

    /// Returns all outputs of the client, in order.
    pub(super) fn drain(&mut self) -> Vec<ClientOutput> {
        let mut seen = Vec::new();
        while let Some(output) = self.client.poll_output() {
            seen.push(match output {
                Output::Connect { lane, address, path } => {
                    self.addresses.insert(lane, address);
                    ClientOutput::Connect { lane, path }
                }
                Output::Send { lane, header, body, payload } => {
                    let body = self.client.outbox().body(body).to_vec();
                    let payload = self.client.outbox().payload(payload).to_vec();
                    assert_eq!(payload.iter().map(|local| local.bytes).sum::<u64>(), header.payload_bytes);
                    header.check_body(&body).expect("the checksum of its own body");
                    assert_eq!(Header::decode(&header.encode()), Ok(header));
                    ClientOutput::Frame(SentFrame { lane, header, body, payload })
                }
                Output::CopyOut { lane, slice, local, checksum, .. } => {
                    ClientOutput::Copy { lane, slice, local, sum: checksum.unwrap_or(0) }
                }
                Output::CopyIn { lane, slice, local, .. } => ClientOutput::Copy { lane, slice, local, sum: 1 },
                Output::CopySegment { lane, slice, local, via, .. } => {
                    self.ways.push(Some(via));
                    ClientOutput::Copy { lane, slice, local, sum: 1 }
                }
                Output::FileTransfer { lane, slice, local, .. } => {
                    self.ways.push(None);
                    ClientOutput::Copy { lane, slice, local, sum: 1 }
                }
                Output::Reset { lane } => ClientOutput::Reset(lane),
                Output::Done { batch } => ClientOutput::Done(batch),
                Output::WantMap => ClientOutput::WantMap,
            });
        }
        seen
    }

    /// Returns the frames that the client sends; connections are established with their handshakes.
    pub(super) fn frames(&mut self) -> Vec<SentFrame> {
        let mut frames = Vec::new();
        loop {
            let seen = self.drain();
            if seen.is_empty() {
                return frames;
            }
            for seen in seen {
                match seen {
                    ClientOutput::Frame(sent) if sent.operation() != Operation::Hello => frames.push(sent),
                    other => self.act(other),
                }
            }
        }
    }

    /// Serves honestly until no output is left at this time.
    pub(super) fn run(&mut self) {
        loop {
            let seen = self.drain();
            if seen.is_empty() {
                return;
            }
            seen.into_iter().for_each(|seen| self.act(seen));
        }
    }

    /// Lets time pass, and serves honestly, until the client has no timer before `until_ns`.
    pub(super) fn run_until(&mut self, until_ns: u64) {
        self.run();
        while let Some(at_ns) = self.client.poll_timeout().filter(|&at_ns| at_ns <= until_ns) {
            self.now_ns = self.now_ns.max(at_ns);
            self.client.handle_timeout(self.now_ns);
            self.run();
        }
    }

    /// Acts on the client's outputs until there are none, and ends every copy with an error. Returns the number of
    /// copies.
    pub(super) fn fail_copies(&mut self, status: Status) -> usize {
        let mut count = 0;
        loop {
            let seen = self.drain();
            if seen.is_empty() {
                return count;
            }
            for seen in seen {
                match seen {
                    ClientOutput::Copy { lane, slice, .. } => {
                        count += 1;
                        self.client.copied(lane, slice, Err(status), self.now_ns);
                    }
                    other => self.act(other),
                }
            }
        }
    }

    pub(super) fn act(&mut self, seen: ClientOutput) {
        match seen {
            ClientOutput::Connect { lane, path } => {
                self.client.connected(lane, self.now_ns);
                if path == Path::Shared {
                    self.client.lane_event(lane, LaneEvent::CmaAllowed(self.cma), self.now_ns);
                }
            }
            ClientOutput::Frame(sent) => {
                for reply in self.answers(&sent) {
                    self.deliver(&reply);
                }
            }
            ClientOutput::Copy { lane, slice, sum, .. } => {
                self.client.copied(lane, slice, Ok(sum), self.now_ns);
            }
            ClientOutput::Reset(lane) => self.lose(lane),
            ClientOutput::Done(batch) => self.done.push(batch),
            ClientOutput::WantMap => self.maps_wanted += 1,
        }
    }

    pub(super) fn lose(&mut self, lane: LaneId) {
        self.pins.retain(|held| held.0 != lane);
        self.reservations.retain(|held, _| held.0 != lane);
        self.client.lane_gone(lane, self.now_ns);
    }

    /// Delivers a frame and its payload to the client.
    pub(super) fn deliver(&mut self, reply: &Reply) {
        if let Some((slice, locals)) = self.receive(reply) {
            assert_eq!(locals.iter().map(|local| local.bytes).sum::<u64>(), reply.header.payload_bytes);
            self.client.payload_done(slice, Some(reply.sum), self.now_ns);
        }
    }

    /// Delivers a frame without its payload to the client.
    pub(super) fn place(&mut self, reply: &Reply) -> PayloadTo {
        self.client.frame(reply.lane, &reply.header, &reply.body, self.now_ns)
    }

    /// Delivers a frame without its payload. Returns the slice and the destination of the payload.
    pub(super) fn receive(&mut self, reply: &Reply) -> Option<(SliceId, Vec<Local>)> {
        match self.place(reply) {
            PayloadTo::Discard => None,
            PayloadTo::Local { slice, local } => Some((slice, vec![local])),
            PayloadTo::Scatter { slice } => Some((slice, self.client.scatter(slice).to_vec())),
        }
    }

    fn id(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// Returns the replies of an honest peer.
    pub(super) fn answers(&mut self, sent: &SentFrame) -> Vec<Reply> {
        let operation = sent.operation();
        let mut body = Vec::new();
        match operation {
            Operation::Hello => body = self.welcome(sent.lane).encode(),
            Operation::OpenSegment => body = descriptor().encode(),
            Operation::Exists => {
                let there = sent.items::<DigestItem>().into_iter().map(|item| self.objects.contains_key(&item.digest));
                Bitmap::encode(there, &mut body);
            }
            Operation::Remove => {
                let items = sent.items::<DigestItem>();
                let there: Vec<bool> = items.iter().map(|item| self.objects.remove(&item.digest).is_some()).collect();
                Bitmap::encode(there, &mut body);
            }
            Operation::Size => sent.items::<DigestItem>().iter().for_each(|item| self.size(item).encode(&mut body)),
            Operation::Lookup => {
                sent.items().iter().for_each(|item| self.lookup(sent.lane, item).encode(&mut body));
            }
            Operation::Reserve => {
                sent.puts().iter().for_each(|item| self.reserve(sent.lane, item).encode(&mut body));
            }
            Operation::Commit => sent.items().iter().for_each(|item| self.commit(sent.lane, item).encode(&mut body)),
            Operation::List => {
                ListReply { walk: 1, next: 0, items: 0 }.encode(&mut body);
            }
            Operation::GetRange => return sent.items().iter().map(|item| self.get_range(sent.lane, item)).collect(),
            Operation::Rdma => unreachable!("drivers talk about connections, clients do not"),
            Operation::Prove => unreachable!("tickets are not required here"),
            Operation::Release | Operation::Abort => {
                for item in sent.items::<IdItem>() {
                    let held = (sent.lane, item.id);
                    assert!(self.pins.remove(&held) || self.reservations.remove(&held).is_some(), "given back twice");
                }
                return Vec::new();
            }
            Operation::Fence => {}
            Operation::Get => return sent.items().iter().map(|item| self.get(sent.lane, item)).collect(),
            Operation::Read => return sent.items().iter().map(|item| read(sent.lane, item)).collect(),
            Operation::Put => return vec![self.put(sent)],
            Operation::Write => return vec![single(sent, check_range(&sent.items::<WriteItem>()[0], sent), 0)],
            Operation::ReadMany | Operation::WriteMany => return vec![many(sent)],
            // Put sessions and replicas are tested against the service.
            Operation::Begin | Operation::Fill | Operation::Seal | Operation::Discard => unreachable!("{operation:?}"),
            Operation::Peek | Operation::RemoveCopy | Operation::Retain => unreachable!("{operation:?}"),
            // Of meshes.
            Operation::Mesh | Operation::MeshFrame => unreachable!("{operation:?}"),
        }
        let items = sent.header.items.max(1) as usize;
        let header = Header::reply(Kind::Reply(operation), sent.header.request, Status::Ok).with_body(&body, items);
        vec![Reply { lane: sent.lane, header, body, sum: 0 }]
    }

    pub(super) fn welcome(&self, lane: LaneId) -> Welcome {
        let address = &self.addresses[&lane];
        Welcome {
            version: VERSION,
            node: address.node,
            incarnation: address.incarnation,
            shard: address.shard,
            epoch: Epoch(1),
            pool_bytes: 1 << 30,
        }
    }

    fn size(&self, item: &DigestItem) -> SizeReply {
        self.objects.get(&item.digest).map_or(SizeReply { status: Status::NotFound, bytes: 0 }, |object| SizeReply {
            status: Status::Ok,
            bytes: object.bytes,
        })
    }

    fn get(&mut self, lane: LaneId, item: &GetItem) -> Reply {
        let reply = |status| Header::reply(Kind::Reply(Operation::Get), item.request, status);
        let sum = sum_of(item.digest);
        let header = match self.objects.get(&item.digest) {
            None => reply(Status::NotFound),
            Some(object) if object.bytes > item.capacity_bytes => {
                reply(Status::BufferTooSmall).with_argument(object.bytes)
            }
            Some(object) => found(reply(Status::Ok), object, object.bytes, sum),
        };
        Reply { lane, header, body: Vec::new(), sum }
    }

    fn get_range(&self, lane: LaneId, item: &RangeItem) -> Reply {
        let reply = |status| Header::reply(Kind::Reply(Operation::GetRange), item.request, status);
        let sum = sum_of(item.digest);
        let header = match self.objects.get(&item.digest) {
            None => reply(Status::NotFound),
            Some(object) if item.offset + item.bytes > object.bytes => {
                reply(Status::OutOfRange).with_argument(object.bytes)
            }
            Some(object) => found(reply(Status::Ok), object, item.bytes, sum),
        };
        Reply { lane, header, body: Vec::new(), sum }
    }

    fn put(&mut self, sent: &SentFrame) -> Reply {
        let item = sent.puts()[0];
        if self.objects.contains_key(&item.digest) && !item.options().replace {
            return single(sent, Status::Exists, 0);
        }
        let object = Object::new(sent.header.payload_bytes, 77);
        self.objects.insert(item.digest, object);
        single(sent, Status::Ok, object.version)
    }

    fn lookup(&mut self, lane: LaneId, item: &DigestItem) -> LookupReply {
        let mut reply = LookupReply {
            status: Status::NotFound,
            pin: PinId::default(),
            offset: 0,
            bytes: 0,
            version: Version(0),
            checksum: 0,
            flags: ItemFlags::NONE,
        };
        if let Some(&object) = self.objects.get(&item.digest) {
            reply.status = Status::Ok;
            reply.pin = PinId { index: self.id(), generation: 1 };
            (reply.bytes, reply.version, reply.checksum) = (object.bytes, Version(object.version), sum_of(item.digest));
            reply.flags = ItemFlags::of_replicas(object.replicas);
            self.pins.insert((lane, reply.pin.to_bits()));
        }
        reply
    }

    fn reserve(&mut self, lane: LaneId, item: &PutItem) -> ReserveReply {
        if self.objects.contains_key(&item.digest) && !item.options().replace {
            return ReserveReply { status: Status::Exists, reservation: ReservationId::default(), offset: 0 };
        }
        let reservation = ReservationId { index: self.id(), generation: 2 };
        self.reservations.insert((lane, reservation.to_bits()), *item);
        ReserveReply { status: Status::Ok, reservation, offset: 4096 }
    }

    fn commit(&mut self, lane: LaneId, item: &CommitItem) -> CommitReply {
        let reserved = self.reservations.remove(&(lane, item.reservation.to_bits())).expect("a reservation it holds");
        self.objects.insert(reserved.digest, Object::new(reserved.bytes, 78));
        CommitReply { status: Status::Ok, version: Version(78), flags: ItemFlags::NONE }
    }

    /// Releases a complete batch and returns its results.
    pub(super) fn finish(&mut self, batch: BatchId) -> Vec<(Status, u64, u64)> {
        let times = self.done.iter().filter(|&&done| done == batch).count();
        assert_eq!(times, 1, "a batch completes exactly once");
        assert!(self.client.batches().is_complete(batch));
        let results = self.client.batches().results(batch).iter().map(|r| (r.status, r.bytes, r.version.0)).collect();
        self.client.release(batch);
        results
    }

    /// Asserts that no state is left behind.
    pub(super) fn assert_empty(&mut self) {
        assert!(self.drain().is_empty());
        assert_eq!(self.client.batches().len(), 0, "batches");
        assert_eq!(self.client.router.traffic.slices.len(), 0, "slices");
        assert_eq!(
            (self.client.router.traffic.wires.len(), self.client.network().host.timers.counts()[3]),
            (0, 0),
            "wires and hedges"
        );
        for lane in self.client.network().lanes.iter() {
            assert_eq!(
                (lane.load.bound_bytes, lane.load.sent_bytes, lane.load.outstanding, lane.load.flying),
                (0, 0, 0, 0)
            );
            assert!(lane.list.first == NOWHERE && lane.list.last == NOWHERE);
            assert!(
                lane.connection.settlements.releases.is_empty()
                    && lane.connection.settlements.aborts.is_empty()
                    && lane.connection.settlements.commits.is_empty()
            );
        }
        assert!(self.client.network().peers.iter().all(|(_, peer)| peer.groups.iter().all(|group| group.is_empty())));
        assert!(self.client.network().rails.iter().all(|rail| rail.rail.inflight_bytes() == (0, 0)));
        assert!(self.pins.is_empty(), "pins: {:?}", self.pins);
        assert!(self.reservations.is_empty(), "reservations: {:?}", self.reservations);
        assert!(self.client.batches().has_no_descriptions());
    }
}

/// Returns the reply with so many bytes of an object.
fn found(reply: Header, object: &Object, bytes: u64, sum: u64) -> Header {
    let mut header = reply.with_payload(bytes, Some(sum)).with_argument(object.version);
    header.flags = header.flags.with_replicas(object.replicas);
    header
}

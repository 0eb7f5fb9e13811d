//! Host for tests: makes frames as a peer would, and reads the service's outputs.

use kvplane_proto::frame::{HEADER_BYTES, Header, VERSION};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, RequestId, ReservationId, SegmentId, ShardId, Version};
use kvplane_proto::map::{Member, ShardAddress};
use kvplane_proto::message::{
    Bitmap, CommitItem, CommitReply, DigestItem, GetItem, Hello, IdItem, Item, Kind, LookupReply, Operation, PutItem,
    ReserveReply, decode_items, encode_items,
};
use kvplane_proto::{Digest, PinId, Status};

use crate::service::{
    CloseReason, Extents, Hold, Identity, Memory, MemoryExtent, Output, Path, PayloadTo, PeerKey, PoolBytes,
    PoolMemory, SegmentInfo, Service,
};
use crate::{Store, StoreConfig};

/// Checksum that peers state for every object.
pub(super) const CHECKSUM: u64 = 0x1234_5678_9abc_def0;
/// Length of the pool of [`Rig::new`].
pub(super) const POOL_BYTES: u64 = 8192;

/// Reply, with its body copied out of the service.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) peer: PeerKey,
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    /// First extent of its payload: the whole payload, except for gathered reads.
    pub(super) payload: Option<(MemoryExtent, Hold)>,
    pub(super) extents: Vec<MemoryExtent>,
}

/// Output of the service.
#[derive(Clone, Debug)]
pub(super) enum ServiceOutput {
    Answer(Answer),
    Close(PeerKey, CloseReason),
    Unregistered(SegmentId),
    /// Offset in the pool, and the bytes.
    Tail(u64, Vec<u8>),
}

pub(super) struct Rig {
    pub(super) service: Service,
    pub(super) now_ns: u64,
    pub(super) last_request: u32,
    joined: u32,
}

pub(super) fn config(pool_bytes: u64) -> StoreConfig {
    StoreConfig { max_objects: 64, max_object_bytes: pool_bytes, ..StoreConfig::for_pool(pool_bytes) }
}

pub(super) fn identity() -> Identity {
    Identity {
        cluster: "test".to_owned(),
        node: NodeId(7),
        incarnation: Incarnation(3),
        shard: ShardId(2),
        segment_name: "here".to_owned(),
    }
}

pub(super) fn hello() -> Hello {
    Hello {
        version_min: VERSION,
        version_max: VERSION,
        client: 99,
        connection: 0,
        node: NodeId(7),
        incarnation: Incarnation(3),
        shard: ShardId(2),
        lane: 0,
        fetches: false,
        cluster: "test".to_owned(),
    }
}

/// Returns the digest of a test object; each is in its own slot.
pub(super) fn digest(key: u8) -> Digest {
    Digest(u128::from(key) << 114 | 5)
}

pub(super) fn segment_info(address: u64, bytes: u64) -> SegmentInfo {
    SegmentInfo { address, bytes, writable: true, shareable: false, remote_accessible: true }
}

pub(super) fn body_of<T: Item>(items: impl IntoIterator<Item = T>) -> Vec<u8> {
    let mut body = Vec::new();
    encode_items(items, &mut body);
    body
}

pub(super) fn digests(keys: impl IntoIterator<Item = u8>) -> Vec<u8> {
    body_of(keys.into_iter().map(|key| DigestItem { digest: digest(key) }))
}

impl Answer {
    pub(super) fn status(&self) -> Status {
        self.header.status
    }

    pub(super) fn items<T: Item>(&self) -> Vec<T> {
        decode_items(&self.body, self.header.items).expect("the answer's body is what its header says").collect()
    }

    pub(super) fn bits(&self) -> Vec<bool> {
        let bitmaps = Bitmap::decode_two(&self.body, self.header.items);
        let (bitmap, _) = bitmaps.expect("the answer's body is a bitmap, or two");
        (0..bitmap.len()).map(|index| bitmap.get(index)).collect()
    }
}

impl Rig {
    /// Creates a service with a small store that owns every slot.
    pub(super) fn new() -> Self {
        Self::with(config(POOL_BYTES))
    }

    pub(super) fn with(config: StoreConfig) -> Self {
        let store = Store::new(config, Version(1)).expect("the test's limits are valid");
        let mut service = Service::new(identity(), store);
        service.set_owned(Epoch(5), |_| true);
        Self { service, now_ns: 1_000, last_request: 0, joined: 0 }
    }

    /// Opens a connection that has not greeted.
    pub(super) fn connect(&mut self, path: Path) -> PeerKey {
        let peer = PeerKey { index: self.joined, generation: self.joined * 3 + 1 };
        self.joined += 1;
        self.service.peer_joined(peer, path, self.now_ns);
        peer
    }

    /// Opens a connection that was welcomed.
    pub(super) fn join(&mut self, path: Path) -> PeerKey {
        let peer = self.connect(path);
        self.ask(peer, Operation::Hello, &hello().encode(), 1);
        assert_eq!(self.answer().status(), Status::Ok);
        peer
    }

    /// Opens a connection that was welcomed, with this number among those of the client.
    pub(super) fn join_as(&mut self, path: Path, client: u64, connection: u64) -> PeerKey {
        let peer = self.connect(path);
        let hello = Hello { client, connection, ..hello() };
        self.ask(peer, Operation::Hello, &hello.encode(), 1);
        assert_eq!(self.answer().status(), Status::Ok);
        peer
    }

    pub(super) fn next_request(&mut self) -> RequestId {
        self.last_request += 1;
        RequestId { index: self.last_request, generation: 1 }
    }

    /// Sends a request without a payload.
    pub(super) fn ask(&mut self, peer: PeerKey, operation: Operation, body: &[u8], items: usize) {
        let header = Header::request(Kind::Request(operation), self.next_request()).with_body(body, items);
        let to = self.service.request(peer, &header, body, self.now_ns);
        assert_eq!(to, PayloadTo::Discard, "there is no payload");
    }

    /// Sends a request with a payload of which no byte was received yet.
    pub(super) fn offer(&mut self, peer: PeerKey, operation: Operation, body: &[u8], bytes: u64) -> PayloadTo {
        self.offer_many(peer, operation, body, 1, bytes)
    }

    /// Like [`Self::offer`], with a body of several items.
    pub(super) fn offer_many(
        &mut self,
        peer: PeerKey,
        operation: Operation,
        body: &[u8],
        items: usize,
        bytes: u64,
    ) -> PayloadTo {
        let header = Header::request(Kind::Request(operation), self.next_request())
            .with_body(body, items)
            .with_payload(bytes, Some(CHECKSUM));
        self.service.request(peer, &header, body, self.now_ns)
    }

    pub(super) fn begin_put(&mut self, peer: PeerKey, key: u8, bytes: u64) -> PayloadTo {
        self.offer(peer, Operation::Put, &body_of([PutItem::plain(digest(key), bytes)]), bytes)
    }

    /// Completes the payload.
    pub(super) fn done(&mut self, peer: PeerKey) {
        self.service.payload_done(peer, Some(CHECKSUM), self.now_ns);
    }

    /// Puts an object over a stream.
    pub(super) fn put(&mut self, peer: PeerKey, key: u8, bytes: u64) -> Answer {
        self.begin_put(peer, key, bytes);
        assert!(self.drain().is_empty(), "a put is answered after its payload");
        self.done(peer);
        self.answer()
    }

    pub(super) fn get(&mut self, peer: PeerKey, key: u8) -> Answer {
        let request = self.next_request();
        let item = GetItem { digest: digest(key), request, capacity_bytes: u64::MAX };
        self.ask(peer, Operation::Get, &body_of([item]), 1);
        let answer = self.answer();
        assert_eq!(answer.header.request, request);
        answer
    }

    pub(super) fn exists(&mut self, peer: PeerKey, key: u8) -> bool {
        self.ask(peer, Operation::Exists, &digests([key]), 1);
        self.answer().bits()[0]
    }

    pub(super) fn lookup(&mut self, peer: PeerKey, key: u8) -> LookupReply {
        self.ask(peer, Operation::Lookup, &digests([key]), 1);
        self.answer().items()[0]
    }

    pub(super) fn reserve(&mut self, peer: PeerKey, key: u8, bytes: u64) -> ReserveReply {
        self.ask(peer, Operation::Reserve, &body_of([PutItem::plain(digest(key), bytes)]), 1);
        self.answer().items()[0]
    }

    /// Sends a commit; the caller takes its reply.
    pub(super) fn send_commit(&mut self, peer: PeerKey, reservation: ReservationId) {
        self.ask(peer, Operation::Commit, &body_of([CommitItem { reservation, checksum: CHECKSUM }]), 1);
    }

    pub(super) fn commit(&mut self, peer: PeerKey, reservation: ReservationId) -> CommitReply {
        self.send_commit(peer, reservation);
        self.answer().items()[0]
    }

    pub(super) fn abort(&mut self, peer: PeerKey, reservation: ReservationId) {
        self.ask(peer, Operation::Abort, &body_of([IdItem { id: reservation.to_bits() }]), 1);
    }

    pub(super) fn release(&mut self, peer: PeerKey, pin: PinId) {
        self.ask(peer, Operation::Release, &body_of([IdItem { id: pin.to_bits() }]), 1);
    }

    pub(super) fn gone(&mut self, peer: PeerKey) {
        self.service.peer_gone(peer, self.now_ns);
    }

    /// Advances the time, and expires deadlines.
    pub(super) fn pass(&mut self, ns: u64) {
        self.now_ns += ns;
        self.service.handle_timeout(self.now_ns);
        assert!(self.service.poll_timeout().is_none_or(|at_ns| at_ns > self.now_ns), "what is due was done");
    }

    /// Returns the tails that the host has to write.
    pub(super) fn tails(&mut self) -> Vec<ServiceOutput> {
        let mut tails = Vec::new();
        while let Some(tail) = self.service.poll_tail() {
            tails.push(ServiceOutput::Tail(tail.offset, self.service.body(tail.bytes).to_vec()));
        }
        tails
    }

    /// Returns all outputs of the service.
    pub(super) fn drain(&mut self) -> Vec<ServiceOutput> {
        let mut all = self.tails();
        while let Some(output) = self.service.poll_output() {
            all.push(match output {
                Output::Frame { peer, header, body, payload } => {
                    let body = self.service.body(body).to_vec();
                    let wire: [u8; HEADER_BYTES] = header.encode();
                    assert_eq!(Header::decode(&wire), Ok(header), "the peer can read the header");
                    assert_eq!(body.len(), header.body_bytes as usize);
                    assert_eq!(header.check_body(&body), Ok(()));
                    let extents = match &payload {
                        None => Vec::new(),
                        Some((Extents::One(extent), _)) => vec![*extent],
                        Some((Extents::Many(range), _)) => self.service.extents(range.clone()).to_vec(),
                    };
                    assert_eq!(extents.iter().map(|extent| extent.bytes).sum::<u64>(), header.payload_bytes);
                    let payload = payload.map(|(_, hold)| (extents[0], hold));
                    ServiceOutput::Answer(Answer { peer, header, body, payload, extents })
                }
                Output::Close { peer, reason } => ServiceOutput::Close(peer, reason),
                Output::Unregistered { segment } => ServiceOutput::Unregistered(segment),
            });
        }
        all
    }

    /// Returns the only output of the service, which must be a reply.
    pub(super) fn answer(&mut self) -> Answer {
        match <[ServiceOutput; 1]>::try_from(self.drain()) {
            Ok([ServiceOutput::Answer(answer)]) => answer,
            other => panic!("one answer was due, not {other:?}"),
        }
    }

    /// Returns the reason of the only output, which must close this connection.
    pub(super) fn closed(&mut self, peer: PeerKey) -> CloseReason {
        match <[ServiceOutput; 1]>::try_from(self.drain()) {
            Ok([ServiceOutput::Close(closed, reason)]) if closed == peer => reason,
            other => panic!("the end of {peer:?} was due, not {other:?}"),
        }
    }

    pub(super) fn assert_malformed(&mut self, peer: PeerKey) {
        let reason = self.closed(peer);
        assert!(matches!(reason, CloseReason::Malformed(_)), "{reason}");
    }

    pub(super) fn assert_quiet(&mut self) {
        let said = self.drain();
        assert!(said.is_empty(), "nothing was due, not {said:?}");
    }

    pub(super) fn store(&self) -> &Store {
        self.service.store()
    }

    /// Returns the numbers of pins and reservations held.
    pub(super) fn pins_and_reservations(&self) -> (u64, u64) {
        let stats = self.store().stats();
        (stats.pins, stats.reservations)
    }

    /// Asserts that no handle is held.
    pub(super) fn assert_idle(&self) {
        self.store().check();
        assert_eq!(self.pins_and_reservations(), (0, 0), "pins and reservations");
        assert_eq!(self.service.segments.users(), 0, "users of segments");
        assert_eq!(self.service.objects.shard().sessions.poll_timeout(), None, "a put's deadline");
    }
}

/// Returns the extent of the pool that a payload goes to.
pub(super) fn pool_place(to: PayloadTo) -> MemoryExtent {
    match to {
        PayloadTo::Extent(extent) if extent.memory == Memory::Pool => extent,
        other => panic!("a extent in the pool was due, not {other:?}"),
    }
}

/// Memory of the pool.
#[derive(Debug)]
pub(super) struct Pool(pub(super) Vec<u8>);

impl PoolBytes for Pool {
    fn read(&self, offset: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.0[offset as usize..][..into.len()]);
    }

    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }
}

impl PoolMemory for Pool {
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.0[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
}

/// Returns a member with one shard, in a failure domain of its own.
pub(super) fn member(node: u64, incarnation: u64) -> Member {
    let address = ShardAddress { tcp: ([127, 0, 0, 1], 7000 + node as u16).into(), shm: None };
    Member {
        node: NodeId(node),
        incarnation: Incarnation(incarnation),
        weight: 10,
        failure_domain: format!("rack-{node}"),
        host: String::new(),
        shards: vec![address],
    }
}

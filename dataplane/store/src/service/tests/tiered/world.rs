//! Simulated service with an SSD: memory, a device that carries out operations in any order, and the replies that
//! callers got.

mod named;
mod restarts;

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, NodeId, ShardId, Version};
use kvplane_proto::message::{
    Bitmap, GetItem, Hello, Item, Kind, Operation, Part, PutAck, PutItem, PutOptions, decode_items,
};
use kvplane_proto::rng::Rng;
use kvplane_proto::{FrameFlags, RequestId, Status};
use kvplane_tier::{Action, BlockOp, Fault, Identity, OpenOptions, Tier, TierConfig};

use super::super::rig::{body_of, digest, digests, hello, identity};
use super::memory::{HostMemory, Pool};
use crate::service::{Extents, MapStanding, Output, Path, PayloadTo, PeerKey, Service, TierPolicy, WritePolicy};
use crate::service::{Tiering, tenant_of_tail};
use crate::{Store, StoreConfig};

pub(super) const DEVICE_BYTES: usize = 64 << 20;
const POOL_BYTES: u64 = 256 << 10;
const SEGMENTS_AT: u64 = 65_536;
pub(super) const KEYS: u64 = 12;
/// Most concurrent reads of the tier.
pub(super) const READS: u32 = 8;
pub(super) const PEER: PeerKey = PeerKey { index: 0, generation: 1 };

/// Permitted contents of a key: puts by number, or no object.
pub(super) type May = BTreeSet<Option<u64>>;

enum OpenRequest {
    /// `promised`: the reply promises that the object is on the SSD.
    Put {
        key: u8,
        put: u64,
        promised: bool,
    },
    /// `all`: stripe heads are requested as such.
    Get {
        key: u8,
        seen: May,
        all: bool,
    },
    Remove {
        key: u8,
    },
    /// Sent by the test, which checks the reply itself.
    Other,
}

/// Reply: its body, and the bytes of an object that came with it.
pub(super) struct ReceivedAnswer {
    pub(super) status: Status,
    pub(super) body: Vec<u8>,
    pub(super) bytes: Option<Vec<u8>>,
}

impl ReceivedAnswer {
    /// Returns its only item.
    pub(super) fn item<T: Item>(&self) -> T {
        decode_items(&self.body, 1).and_then(|mut items| items.next()).expect("one item")
    }
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) service: Service,
    pub(super) memory: HostMemory,
    device: Vec<u8>,
    ops: Vec<BlockOp>,
    policy: TierPolicy,
    pub(super) now_ns: u64,
    incarnation: u64,
    pub(super) epoch: u64,
    /// Epoch in which slots changed hands last.
    pub(super) steady: u64,
    /// Cluster state.
    pub(super) state: u64,
    requests: u32,
    puts: u64,
    asked: BTreeMap<u32, OpenRequest>,
    answered: Option<ReceivedAnswer>,
    pub(super) may: BTreeMap<u8, May>,
    pub(super) lost_slots: BTreeSet<u8>,
    /// Keys whose last put was acknowledged from memory.
    volatile: BTreeSet<u8>,
    /// Probability that an operation of the device fails, in percent.
    pub(super) faults: u64,
    /// Range that cannot be read, from the start of each segment.
    pub(super) unreadable: core::ops::Range<u64>,
    /// True if the device takes no writes.
    pub(super) read_only: bool,
    /// Number of the next writes of records that fail.
    pub(super) failing_writes: u32,
    /// True if the device completes no operation.
    pub(super) stopped: bool,
    /// True if memory may drop objects that the device did not take.
    pub(super) forgets: bool,
    /// Status of the last put.
    pub(super) last_put: Status,
    pub(super) got: u64,
    /// Number of replies that distinguished a stripe head from a plain object.
    pub(super) striped: u64,
    pub(super) ssd_hits: u64,
}

/// Returns true if a put is of a stripe head.
const fn is_head(put: u64) -> bool {
    put % 4 == 3
}

pub(super) fn bytes_of(put: u64) -> Vec<u8> {
    let bytes = [700, 4096, 30_000, 40_000, 70_001][put as usize % 5];
    (0..bytes)
        .map(|at: u64| ((put * 1009 + at / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (at % 8 * 8)) as u8)
        .collect()
}

fn service(device: &[u8], incarnation: u64, policy: TierPolicy) -> (Service, HostMemory) {
    let config = TierConfig {
        max_reads: READS,
        groups: 4,
        scan_buffers: 2,
        max_waiters: 16,
        ..TierConfig::for_device(device.len() as u64, 4096)
    };
    let staging = vec![0; config.staging_bytes() as usize];
    let owner = Identity { cluster: 1, node: NodeId(1), shard: ShardId(0) };
    let (format_blank, expected_uuid) = (Some(9), None);
    let options = OpenOptions { identity: owner, expected_uuid, format_blank, tenant_of: tenant_of_tail };
    let tier = Tier::open(config, options).expect("a tier");
    let limits = StoreConfig { unit_bytes: 4096, max_pins: 64, ..StoreConfig::for_pool(POOL_BYTES) };
    let store = Store::new(limits, Version(incarnation << 32)).expect("a store");
    let mut service = Service::new(identity(), store);
    service.attach_tier(tier, policy);
    (service, HostMemory { pool: vec![0; POOL_BYTES as usize], staging })
}

impl World {
    pub(super) fn new(seed: u64, policy: TierPolicy) -> Self {
        Self::on(DEVICE_BYTES, seed, policy)
    }

    pub(super) fn on(device_bytes: usize, seed: u64, policy: TierPolicy) -> Self {
        let device = vec![0; device_bytes];
        let (service, memory) = service(&device, 1, policy);
        let mut world = Self {
            rng: Rng::new(seed, "tiered"),
            service,
            memory,
            device,
            ops: Vec::new(),
            policy,
            now_ns: 1,
            incarnation: 1,
            epoch: 1,
            steady: 1,
            state: 1,
            requests: 0,
            puts: 0,
            asked: BTreeMap::new(),
            answered: None,
            may: (0..KEYS as u8).map(|key| (key, May::from([None]))).collect(),
            lost_slots: BTreeSet::new(),
            volatile: BTreeSet::new(),
            faults: 0,
            unreadable: 0..0,
            read_only: false,
            failing_writes: 0,
            stopped: false,
            forgets: false,
            last_put: Status::Ok,
            got: 0,
            striped: 0,
            ssd_hits: 0,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        // The device first: its ownership note is evaluated with the first map.
        self.settle();
        self.own();
        self.join(PEER, Path::Stream);
        self.settle();
    }

    pub(super) fn own(&mut self) {
        let lost: BTreeSet<u16> = self.lost_slots.iter().map(|key| digest(*key).slot().0).collect();
        self.epoch += 1;
        // No other shard had the other slots meanwhile: slots are lost and regained one by one here, and no map is
        // missed.
        let standing = MapStanding { state: self.state, since: Epoch(self.steady), kept: Epoch(0) };
        self.service.own(Epoch(self.epoch), standing, |slot| !lost.contains(&slot));
    }

    pub(super) fn next_request(&mut self) -> RequestId {
        self.requests += 1;
        RequestId { index: self.requests, generation: 1 }
    }

    /// Damages every byte of a range of the device.
    pub(super) fn spoil(&mut self, range: core::ops::Range<u64>) {
        self.device[range.start as usize..range.end as usize].iter_mut().for_each(|byte| *byte ^= 0xa5);
    }

    /// Damages a byte of the newest record of an object with these bytes.
    pub(super) fn spoil_record(&mut self, bytes: &[u8]) {
        let is_here = |at: &usize| self.device[*at..].starts_with(bytes);
        let at = (0..self.device.len()).step_by(8).rev().find(is_here).expect("a record of it") as u64;
        self.spoil(at + 99..at + 100);
    }

    /// Expects the answer to a request that the test sends itself.
    pub(super) fn expect(&mut self, request: RequestId) {
        self.asked.insert(request.index, OpenRequest::Other);
    }

    fn is_unreadable(&self, op: &BlockOp) -> bool {
        let tier = self.service.inspect().tier().expect("a tier").snapshot();
        let first = op.offset.checked_sub(SEGMENTS_AT).map(|at| at % tier.segment_bytes);
        let holds = |at: u64| self.unreadable.start < at + u64::from(op.bytes) && at < self.unreadable.end;
        op.action == Action::Read && first.is_some_and(holds)
    }

    fn carry_out(&mut self, op: &BlockOp) -> Result<u32, Fault> {
        if self.is_unreadable(op) || self.read_only && matches!(op.action, Action::Write { .. }) {
            return Err(Fault::Io);
        }
        if self.failing_writes > 0 && matches!(op.action, Action::Write { .. }) && op.bytes > 4096 {
            self.failing_writes -= 1;
            return Err(Fault::Io);
        }
        if self.rng.below(100) < self.faults {
            return if self.rng.below(2) == 0 { Err(Fault::Io) } else { Ok(op.bytes / 2) };
        }
        let mut at = op.offset as usize;
        for piece in op.pieces.as_slice() {
            let extent = &mut self.device[at..at + piece.bytes as usize];
            match op.action {
                Action::Read => self.memory.of_mut(*piece).copy_from_slice(extent),
                Action::Write { .. } => extent.copy_from_slice(self.memory.of(*piece)),
                Action::Flush => {}
            }
            at += piece.bytes as usize;
        }
        Ok(op.bytes)
    }

    /// Lets the tier work, and completes one operation. Returns true if there was any progress.
    pub(super) fn step(&mut self) -> bool {
        self.now_ns += 1_000_000;
        let mut started = Vec::new();
        let mut progress = self.service.drive_tier(self.now_ns, &mut self.memory, &mut |op| started.push(op));
        self.ops.extend(started);
        if !self.ops.is_empty() && !self.stopped {
            progress = true;
            let op = self.ops.swap_remove(self.rng.below(self.ops.len() as u64) as usize);
            let result = self.carry_out(&op);
            let tier = self.service.tier_mut().expect("a tier");
            tier.completed(self.now_ns, op.id, result, &mut self.memory);
        }
        progress |= self.service.drive_pool(&Pool(&self.memory.pool), self.now_ns);
        self.hear();
        progress
    }

    pub(super) fn settle(&mut self) {
        for _ in 0..100_000 {
            if !self.step() && self.asked.is_empty() {
                return;
            }
        }
        panic!("{} requests are never answered", self.asked.len());
    }

    pub(super) fn now_may(&mut self, key: u8, state: Option<u64>) {
        self.may.get_mut(&key).expect("a key").insert(state);
        for asked in self.asked.values_mut() {
            if let OpenRequest::Get { key: of, seen, .. } = asked
                && *of == key
            {
                seen.insert(state);
            }
        }
    }

    fn is_changing(&self, key: u8) -> bool {
        self.asked.values().any(|asked| match asked {
            OpenRequest::Put { key: of, .. } | OpenRequest::Remove { key: of } => *of == key,
            OpenRequest::Get { .. } | OpenRequest::Other => false,
        })
    }

    /// Returns the reply to a request of one item.
    pub(super) fn answer<T: Item>(
        &mut self,
        (peer, operation, flags): (PeerKey, Operation, FrameFlags),
        item: impl Fn(RequestId) -> T,
    ) -> ReceivedAnswer {
        let request = self.next_request();
        let body = body_of([item(request)]);
        let mut header = Header::request(Kind::Request(operation), request).with_body(&body, 1);
        header.flags |= flags;
        self.asked.insert(request.index, OpenRequest::Other);
        self.service.request(peer, &header, &body, self.now_ns);
        self.settle();
        self.answered.take().expect("it was answered")
    }

    /// Opens a connection that is welcomed.
    pub(super) fn join(&mut self, peer: PeerKey, path: Path) {
        self.join_with(peer, path, &hello());
    }

    pub(super) fn join_with(&mut self, peer: PeerKey, path: Path, hello: &Hello) {
        self.service.peer_joined(peer, path, self.now_ns);
        let hello = hello.encode();
        let header = Header::request(Kind::Request(Operation::Hello), self.next_request()).with_body(&hello, 1);
        self.service.request(peer, &header, &hello, self.now_ns);
    }

    fn act(&mut self) {
        let key = self.rng.below(KEYS) as u8;
        match self.rng.below(10) {
            0..=3 if !self.is_changing(key) => self.put(key),
            4 if !self.is_changing(key) => self.remove(key),
            5 => drop(self.ask(Operation::Exists, FrameFlags::NONE, &digests([key]))),
            _ => self.get(key),
        }
        self.hear();
    }

    pub(super) fn get(&mut self, key: u8) {
        let request = self.next_request();
        let item = GetItem { digest: digest(key), request, capacity_bytes: u64::MAX };
        let body = body_of([item]);
        let mut header = Header::request(Kind::Request(Operation::Get), request).with_body(&body, 1);
        let all = self.rng.below(2) == 0;
        header.flags = header.flags.with(FrameFlags::HEADS, all);
        self.asked.insert(request.index, OpenRequest::Get { key, seen: self.may[&key].clone(), all });
        self.service.request(PEER, &header, &body, self.now_ns);
    }

    pub(super) fn ask(&mut self, operation: Operation, flags: FrameFlags, body: &[u8]) -> u32 {
        let request = self.next_request();
        let mut header = Header::request(Kind::Request(operation), request).with_body(body, 1);
        header.flags |= flags;
        self.service.request(PEER, &header, body, self.now_ns);
        request.index
    }

    pub(super) fn put(&mut self, key: u8) {
        let (group, replace) = (self.rng.below(2), self.rng.below(3) == 0);
        let acks = [None, None, Some(PutAck::Memory), Some(PutAck::Buffered), Some(PutAck::Durable)];
        let ack = acks[self.rng.below(5) as usize];
        self.put_with(key, &PutOptions { group, replace, ack, ..PutOptions::default() });
    }

    pub(super) fn put_with(&mut self, key: u8, options: &PutOptions) {
        self.puts += 1;
        let (put, bytes) = (self.puts, bytes_of(self.puts));
        let promised = options.ack.unwrap_or(self.policy.ack) != PutAck::Memory;
        if !promised {
            self.volatile.insert(key);
        }
        let part = if is_head(put) { Part::Head } else { Part::None };
        let item = PutItem::plain(digest(key), bytes.len() as u64).with_options(&PutOptions { part, ..*options });
        let (request, body, sum) = (self.next_request(), body_of([item]), payload_checksum(&bytes));
        self.now_may(key, Some(put));
        self.asked.insert(request.index, OpenRequest::Put { key, put, promised });
        let header = Header::request(Kind::Request(Operation::Put), request)
            .with_body(&body, 1)
            .with_payload(bytes.len() as u64, Some(sum));
        let to = self.service.request(PEER, &header, &body, self.now_ns);
        self.write_tails();
        match to {
            PayloadTo::Extent(extent) => {
                assert!(extent.offset.is_multiple_of(4096), "as direct I/O wants it");
                self.memory.pool[extent.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            PayloadTo::Discard => {}
            PayloadTo::Extents(_) => panic!("an object is in one extent"),
        }
        self.service.payload_done(PEER, Some(sum), self.now_ns);
    }

    pub(super) fn remove(&mut self, key: u8) {
        self.now_may(key, None);
        let request = self.ask(Operation::Remove, FrameFlags::HEADS, &digests([key]));
        self.asked.insert(request, OpenRequest::Remove { key });
    }

    /// Writes tails to the memory that the service has reserved for them.
    fn write_tails(&mut self) {
        while let Some(tail) = self.service.poll_tail() {
            let bytes = self.service.body(tail.bytes);
            self.memory.pool[tail.offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    pub(super) fn hear(&mut self) {
        self.write_tails();
        while let Some(output) = self.service.poll_output() {
            let Output::Frame { header, payload, body, .. } = output else { panic!("not {output:?}") };
            if let Some(asked) = self.asked.remove(&header.request.index) {
                let body = self.service.body(body).to_vec();
                let bytes = payload.as_ref().map(|(extents, _)| match extents {
                    Extents::One(extent) => {
                        self.memory.pool[extent.offset as usize..][..extent.bytes as usize].to_vec()
                    }
                    Extents::Many(_) => panic!("an object is in one extent"),
                });
                self.check(asked, &header, &body, bytes);
            }
            if let Some((_, hold)) = payload {
                self.service.sent(hold);
            }
        }
    }

    fn check(&mut self, asked: OpenRequest, header: &Header, body: &[u8], bytes: Option<Vec<u8>>) {
        if let OpenRequest::Put { .. } = asked {
            self.last_put = header.status;
        }
        match asked {
            OpenRequest::Other => {
                self.answered = Some(ReceivedAnswer { status: header.status, body: body.to_vec(), bytes });
            }
            OpenRequest::Put { key, put, promised } => match header.status {
                Status::Ok if !self.lost_slots.contains(&key) => {
                    self.only(key, &[Some(put)]);
                    if promised {
                        self.volatile.remove(&key);
                    }
                }
                Status::Ok => {}
                // The object never existed, or is gone again; a failure to write it may be found later.
                Status::Exists | Status::WrongOwner | Status::Busy if self.faults == 0 => {
                    self.may.get_mut(&key).expect("a key").remove(&Some(put));
                }
                _ => self.now_may(key, None),
            },
            OpenRequest::Remove { key } => {
                assert!(header.status != Status::Ok || Bitmap::decode_two(body, header.items).is_some());
                if header.status == Status::Ok && self.faults == 0 {
                    self.only(key, &[None]);
                }
            }
            OpenRequest::Get { key, mut seen, all } => {
                let selective = matches!(self.policy.write, WritePolicy::Selective { .. });
                let unwritten = self.volatile.contains(&key) && selective;
                if self.faults > 0 || self.forgets || unwritten {
                    seen.insert(None);
                }
                match (header.status, bytes) {
                    (Status::Ok, Some(bytes)) => {
                        assert_eq!(header.checksum(), Some(payload_checksum(&bytes)));
                        let found = seen.iter().flatten().find(|put| bytes_of(**put) == bytes);
                        assert!(all || found.is_none_or(|put| !is_head(*put)), "key {key}: it names stripes");
                        assert!(found.is_some(), "key {key}: none of {seen:?}");
                        self.got += 1;
                    }
                    (Status::Striped, None) => {
                        assert!(!all && seen.iter().flatten().any(|put| is_head(*put)), "key {key}: {seen:?}");
                        self.striped += 1;
                    }
                    (Status::NotFound, None) => assert!(seen.contains(&None), "key {key} is lost: {seen:?}"),
                    (Status::Busy | Status::WrongOwner, None) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    fn only(&mut self, key: u8, states: &[Option<u64>]) {
        states.iter().for_each(|state| self.now_may(key, *state));
        self.may.insert(key, states.iter().copied().collect());
    }

    pub(super) fn lose_or_regain(&mut self) {
        let key = self.rng.below(KEYS) as u8;
        if !self.lost_slots.remove(&key) {
            self.lost_slots.insert(key);
            // Puts in flight may have been committed before or after.
            let under_way =
                self.asked.values().any(|asked| matches!(asked, OpenRequest::Put { key: of, .. } if *of == key));
            if under_way { self.now_may(key, None) } else { self.only(key, &[None]) }
        }
        self.steady = self.epoch + 1;
        self.own();
        // Regained before the loss was acted on.
        if self.rng.below(2) == 0 && self.lost_slots.remove(&key) {
            self.steady = self.epoch + 1;
            self.own();
        }
    }

    pub(super) fn run(&mut self, steps: u32) {
        for _ in 0..steps {
            self.act();
            for _ in 0..self.rng.below(6) {
                self.step();
            }
        }
    }

    pub(super) fn end(&mut self) {
        self.settle();
        while !self.service.tier_mut().is_none_or(Tiering::close) {
            self.step();
        }
        let snapshot = self.service.inspect().tier().expect("a tier").snapshot();
        self.ssd_hits += snapshot.counters.hits;
        assert_eq!((snapshot.backlog, snapshot.backlog_bytes, snapshot.reading), (0, 0, 0));
        let store = self.service.store();
        store.check();
        assert_eq!((store.stats().pins, store.stats().reservations), (0, 0));
    }
}

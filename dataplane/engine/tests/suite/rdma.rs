//! Tests of a shard and an initiator with two RDMA devices each, and of requests when devices fail.

use crate::support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_client::{Config, Local, Path, PeerAddress, PeerId, Request, SegmentTarget};
use kvplane_engine::{
    HostConfig, HugePages, Initiator, Pacing, RdmaDevices, Region, RegionOptions, Shard, ShardConfig, ShardHandle,
};
use kvplane_proto::rng::mix64;
use kvplane_proto::{BatchId, SegmentId, Status};
use kvplane_soft_verbs::{Loopback, SoftPort};
use kvplane_store::service::SegmentInfo;
use kvplane_transport::RdmaOptions;

const DEADLINE: Duration = Duration::from_secs(30);
const BYTES: u64 = 16 << 20;

struct Bed {
    fabric: Loopback,
    shard: ShardHandle,
    initiator: Initiator,
    memory: Arc<Region>,
    buffer: u32,
    theirs: Arc<Region>,
    segment: SegmentId,
    peer: PeerId,
}

fn region(name: &str) -> Arc<Region> {
    let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new(name, BYTES as usize) };
    Region::allocate(&options).expect("memory")
}

fn host(fabric: &Loopback, names: [&str; 2]) -> HostConfig {
    let names = names.into_iter().map(str::to_owned).collect();
    let devices = RdmaDevices {
        verbs: fabric.verbs(),
        names,
        preferred: 0,
        near: Arc::default(),
        options: RdmaOptions::default(),
    };
    HostConfig { rdma: Some(devices), ..HostConfig::default() }
}

/// Creates a bed in which the initiator has the devices 0 and 1 of the fabric, the shard 2 and 3, if any.
fn bed(shard_has_devices: bool) -> Bed {
    let fabric = Loopback::new(&[SoftPort::default(); 4]);
    let shard = Shard::start(ShardConfig {
        host: if shard_has_devices { host(&fabric, ["loop2", "loop3"]) } else { HostConfig::default() },
        ..support::config()
    })
    .expect("a shard on loopback");
    let theirs = region("theirs");
    let info = SegmentInfo {
        address: theirs.address(),
        bytes: BYTES,
        writable: true,
        shareable: false,
        remote_accessible: true,
    };
    let segment = shard.register(info, Arc::clone(&theirs)).expect("a free range");
    // Little is posted ahead, so that one rail is never enough for all slices.
    let config = Config { cluster: "test".to_owned(), post_ahead_ns: 50_000, ..Config::default() };
    let mut initiator = Initiator::new(config, &host(&fabric, ["loop0", "loop1"]), Pacing::Park).expect("an initiator");
    let memory = region("ours");
    let buffer = initiator.add_buffer(Arc::clone(&memory));
    let peer = initiator.open_peer(PeerAddress::native(shard.address(), None));
    Bed { fabric, shard, initiator, memory, buffer, theirs, segment, peer }
}

fn pattern(seed: u64, at: u64) -> u8 {
    mix64(seed ^ mix64(at / 8)).to_le_bytes()[(at % 8) as usize]
}

fn fill(region: &Region, seed: u64) {
    region.fill_with(0, BYTES as usize, &mut |at, part| {
        part.iter_mut().enumerate().for_each(|(i, byte)| *byte = pattern(seed, at + i as u64));
    });
}

fn check(region: &Region, seed: u64) {
    region.read_with(0, BYTES as usize, &mut |at, part| {
        for (i, &byte) in part.iter().enumerate() {
            assert_eq!(byte, pattern(seed, at + i as u64), "byte {}", at + i as u64);
        }
    });
}

impl Bed {
    fn whole(&self, write: bool) -> Request {
        let target = SegmentTarget {
            peer: self.peer,
            segment: self.segment,
            offset: 0,
            shareable: false,
            place: kvplane_client::Place::UNKNOWN,
        };
        let local = Local { buffer: self.buffer, offset: 0, bytes: BYTES };
        if write { Request::Write(target, local) } else { Request::Read(target, local) }
    }

    fn start(&mut self, write: bool) -> BatchId {
        let request = self.whole(write);
        self.initiator.submit(&[request], DEADLINE).expect("a valid batch")
    }

    fn end(&mut self, batch: BatchId) -> Status {
        self.initiator.wait(batch).expect("a working host");
        let status = self.initiator.results(batch)[0].status;
        self.initiator.release(batch);
        // Filling and comparing take longer than the deadline of a handshake: connections in progress are completed
        // first.
        let until = Instant::now() + Duration::from_millis(50);
        while Instant::now() < until {
            self.initiator.poll().expect("a working host");
        }
        status
    }

    fn round_trip(&mut self, seed: u64) {
        fill(&self.memory, seed);
        let batch = self.start(true);
        assert_eq!(self.end(batch), Status::Ok, "{:?}", self.initiator.last_problem());
        check(&self.theirs, seed);
        fill(&self.memory, !seed);
        let batch = self.start(false);
        assert_eq!(self.end(batch), Status::Ok, "{:?}", self.initiator.last_problem());
        check(&self.memory, seed);
    }

    /// Returns the bytes that each rail of a path has moved.
    fn moved(&mut self, path: Path) -> Vec<u64> {
        let metrics = self.initiator.books().rail_metrics();
        metrics.filter(|rail| rail.path == path).map(|rail| rail.counts.bytes).collect()
    }
}

#[test]
fn both_devices_carry_one_request() {
    let mut bed = bed(true);
    bed.round_trip(1);
    bed.round_trip(2);
    let rails = bed.moved(Path::Rdma);
    assert_eq!((rails.len(), rails.iter().sum::<u64>()), (2, 4 * BYTES));
    assert!(rails.iter().all(|bytes| *bytes > 0), "{rails:?}");
    assert_eq!(bed.moved(Path::Stream).iter().sum::<u64>(), 0);
    assert!(bed.initiator.host_counters().rdma_copies >= 4 * BYTES / (256 << 10));
    bed.shard.unregister(bed.segment).expect("a quiet segment");
    let batch = bed.start(false);
    assert_eq!(bed.end(batch), Status::Stale);
    assert_eq!(bed.fabric.violations(), 0);
}

#[test]
fn failed_ports_are_replaced_and_used_again() {
    let mut bed = bed(true);
    bed.round_trip(1);
    for (seed, port) in [(10, 0), (20, 3), (30, 1), (40, 2)] {
        // While a transfer is in flight for certain.
        fill(&bed.memory, seed);
        bed.fabric.pause(0, true);
        let batch = bed.start(true);
        for _ in 0..50 {
            bed.initiator.poll().expect("a working host");
        }
        bed.fabric.set_port(port, false);
        bed.fabric.pause(0, false);
        assert_eq!(bed.end(batch), Status::Ok, "port {port}: {:?}", bed.initiator.last_problem());
        check(&bed.theirs, seed);
        let before = bed.moved(Path::Rdma);
        bed.fabric.set_port(port, true);
        let limit = Instant::now() + Duration::from_secs(60);
        let mut round = 0;
        loop {
            round += 1;
            bed.round_trip(seed + round);
            let after = bed.moved(Path::Rdma);
            if after.iter().zip(&before).all(|(after, before)| after > before) {
                break;
            }
            assert!(Instant::now() < limit, "port {port} is not used again: {before:?} {after:?}");
        }
    }
    assert_eq!(bed.fabric.violations(), 0);
}

#[test]
fn without_devices_transfers_use_tcp_until_one_is_back() {
    let mut bed = bed(true);
    bed.round_trip(1);
    bed.fabric.set_port(2, false);
    bed.fabric.set_port(3, false);
    bed.round_trip(2);
    assert!(bed.moved(Path::Stream).iter().sum::<u64>() > 0);
    bed.fabric.set_port(2, true);
    bed.fabric.set_port(3, true);
    let before: u64 = bed.moved(Path::Rdma).iter().sum();
    let limit = Instant::now() + Duration::from_secs(60);
    while bed.moved(Path::Rdma).iter().sum::<u64>() == before {
        assert!(Instant::now() < limit, "RDMA is not used again: {:?}", bed.initiator.last_problem());
        bed.round_trip(3);
    }
}

#[test]
fn a_shard_without_devices_is_reached_over_tcp() {
    let mut bed = bed(false);
    bed.round_trip(1);
    assert_eq!(bed.moved(Path::Rdma).iter().sum::<u64>(), 0);
    assert_eq!(bed.moved(Path::Stream).iter().sum::<u64>(), 2 * BYTES);
    assert_eq!(bed.initiator.host().rdma_devices().count(), 2);
}

#[test]
fn a_shard_that_ends_in_the_middle_leaves_nothing_under_way() {
    let mut bed = bed(true);
    bed.round_trip(1);
    bed.fabric.pause(0, true);
    bed.fabric.pause(1, true);
    let request = bed.whole(false);
    let batch = bed.initiator.submit(&[request], Duration::from_secs(2)).expect("a valid batch");
    for _ in 0..50 {
        bed.initiator.poll().expect("a working host");
    }
    bed.shard.stop();
    bed.fabric.pause(0, false);
    bed.fabric.pause(1, false);
    let status = bed.end(batch);
    assert!(matches!(status, Status::Unreachable | Status::DeadlineExceeded | Status::Ok), "{status}");
    // No bytes arrive any more.
    fill(&bed.memory, 9);
    for _ in 0..1000 {
        bed.initiator.poll().expect("a working host");
    }
    check(&bed.memory, 9);
    assert_eq!(bed.fabric.violations(), 0);
}

#[test]
fn a_segment_is_let_go_under_traffic() {
    let mut bed = bed(true);
    bed.round_trip(1);
    for _ in 0..8 {
        let batch = bed.start(true);
        for _ in 0..3 {
            bed.initiator.poll().expect("a working host");
        }
        bed.shard.unregister(bed.segment).expect("an answer");
        // Transfers that the device still had queued are not done after this.
        fill(&bed.theirs, 5);
        let status = bed.end(batch);
        assert!(matches!(status, Status::Ok | Status::Stale | Status::Unreachable), "{status}");
        check(&bed.theirs, 5);
        let info = SegmentInfo {
            address: bed.theirs.address(),
            bytes: BYTES,
            writable: true,
            shareable: false,
            remote_accessible: true,
        };
        bed.segment = bed.shard.register(info, Arc::clone(&bed.theirs)).expect("a free range");
        bed.round_trip(2);
    }
    assert_eq!(bed.fabric.violations(), 0);
}

/// More slices than a connection has room for, at offsets that are not adjacent: those that it does not take at once
/// are not lost.
#[test]
fn more_requests_than_a_connection_has_room_for_all_end() {
    const SLICE: u64 = 4 << 10;
    const COUNT: u64 = BYTES / SLICE;
    let mut bed = bed(true);
    let requests = |bed: &Bed, write| -> Vec<_> {
        // From the end to the start: no slice continues the one before.
        let part = |at: u64| match bed.whole(write) {
            Request::Write(target, local) => {
                Request::Write(SegmentTarget { offset: at, ..target }, Local { offset: at, bytes: SLICE, ..local })
            }
            Request::Read(target, local) => {
                Request::Read(SegmentTarget { offset: at, ..target }, Local { offset: at, bytes: SLICE, ..local })
            }
            other => other,
        };
        (0..COUNT).rev().map(|at| part(at * SLICE)).collect()
    };
    for seed in 1..4 {
        fill(&bed.memory, seed);
        for write in [true, false] {
            let requests = requests(&bed, write);
            let batch = bed.initiator.submit(&requests, DEADLINE).expect("a valid batch");
            bed.initiator.wait(batch).expect("a working host");
            let failed = bed.initiator.results(batch).iter().find(|result| result.status != Status::Ok).copied();
            assert_eq!(failed, None, "{:?}", bed.initiator.last_problem());
            bed.initiator.release(batch);
            if write {
                check(&bed.theirs, seed);
                fill(&bed.memory, !seed);
            }
        }
        check(&bed.memory, seed);
    }
    assert_eq!(bed.moved(Path::Rdma).iter().sum::<u64>(), 6 * BYTES);
    assert_eq!(bed.fabric.violations(), 0);
}

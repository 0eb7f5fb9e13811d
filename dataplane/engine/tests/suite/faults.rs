//! Tests of a real shard and a real initiator over connections that fail by seeded plans: a completed transfer is
//! right, every other one ends with an error, and no resource leaks.

use crate::support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvplane_client::{Config, Local, PeerAddress, PeerKind, Request, SegmentTarget, TaskResult};
use kvplane_engine::{
    FaultCounters, FaultPlan, HostConfig, HugePages, Initiator, Pacing, Region, RegionOptions, Shard, ShardConfig,
    ShardHandle, ZeroCopy, ZeroCopyOptions,
};
use kvplane_proto::frame::{HEADER_BYTES, Header, VERSION};
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_proto::map::{ClusterMap, Member, ShardAddress, SlotOwners};
use kvplane_proto::message::{Kind, Operation, Welcome};
use kvplane_proto::rng::mix64;
use kvplane_proto::{Digest, Epoch, Status};
use kvplane_store::service::SegmentInfo;

const OBJECTS: u64 = 20;
/// Distance of objects in the caller's memory: their source, and where they are read back to.
const STRIDE_BYTES: u64 = 320_000;
const BACK: u64 = OBJECTS * STRIDE_BYTES;
const WRITE_BYTES: u64 = 200_000;
const WRITES: u64 = 4;
/// No step of these tests may take this long: a hang is reported as a failure.
const HANG: Duration = Duration::from_secs(60);

/// Fault plans of a run, and the deadline of its batches.
struct Drill {
    shard: FaultPlan,
    initiator: FaultPlan,
    deadline: Duration,
}

/// Results of some runs.
#[derive(Default)]
struct Tally {
    done: u64,
    failed: u64,
    late: u64,
    shard: FaultCounters,
    initiator: FaultCounters,
}

struct Bed {
    shard: ShardHandle,
    initiator: Initiator,
    memory: Arc<Region>,
    buffer: u32,
    deadline: Duration,
}

fn plain(name: &str, bytes: usize) -> RegionOptions {
    RegionOptions { huge: HugePages::Never, prefault: false, ..RegionOptions::new(name, bytes) }
}

/// Every other plan sends without copies.
fn host(fault: FaultPlan) -> HostConfig {
    let when = if fault.seed.is_multiple_of(2) { ZeroCopy::Never } else { ZeroCopy::Always };
    let zero_copy = ZeroCopyOptions { when, least_bytes: 10_000 };
    HostConfig { fault: Some(fault), zero_copy, ..HostConfig::default() }
}

fn map_of(address: std::net::SocketAddr) -> ClusterMap {
    let member = Member {
        node: NodeId(1),
        incarnation: Incarnation(7),
        weight: 1,
        failure_domain: "a".to_owned(),
        host: "here".to_owned(),
        shards: vec![ShardAddress { tcp: address, shm: None }],
    };
    ClusterMap { epoch: Epoch(1), replicas: 1, members: vec![member], former: None }
}

fn start_shard(fault: FaultPlan) -> ShardHandle {
    let shard =
        Shard::start(ShardConfig { pool: Some(plain("pool", 16 << 20)), host: host(fault), ..support::config() })
            .expect("a shard on loopback");
    shard.follow_owners(1, Arc::new(SlotOwners::of(&map_of(shard.address())))).expect("room in the mailbox");
    shard
}

fn start_initiator(fault: FaultPlan, address: std::net::SocketAddr) -> Initiator {
    let config = Config {
        cluster: "test".to_owned(),
        host: "here".to_owned(),
        shared: false,
        slice_bytes: 64 << 10,
        ..Config::default()
    };
    let mut initiator = Initiator::new(config, &host(fault), Pacing::Park).expect("a ring");
    initiator.set_map(map_of(address));
    initiator
}

fn pattern(number: u64, at: u64) -> u8 {
    mix64(number ^ (at / 8) << 20).to_le_bytes()[(at % 8) as usize]
}

const fn object_bytes(number: u64) -> u64 {
    [64, 1000, 16_384, 100_000, 300_000][(number % 5) as usize]
}

fn digest(number: u64) -> Digest {
    Digest::of(b"", &number.to_le_bytes())
}

impl Bed {
    fn new(drill: &Drill) -> Self {
        let shard = start_shard(drill.shard);
        let mut initiator = start_initiator(drill.initiator, shard.address());
        let memory = Region::allocate(&plain("memory", 2 * BACK as usize)).expect("memory");
        let buffer = initiator.add_buffer(Arc::clone(&memory));
        Self { shard, initiator, memory, buffer, deadline: drill.deadline }
    }

    fn local(&self, offset: u64, bytes: u64) -> Local {
        Local { buffer: self.buffer, offset, bytes }
    }

    fn fill(&self, number: u64, offset: u64, bytes: u64) {
        self.memory.fill_with(offset as usize, bytes as usize, &mut |at, part| {
            part.iter_mut().enumerate().for_each(|(i, byte)| *byte = pattern(number, at + i as u64));
        });
    }

    fn check(&self, number: u64, offset: u64, bytes: u64) {
        self.memory.read_with(offset as usize, bytes as usize, &mut |at, part| {
            let wrong = part.iter().enumerate().find(|(i, byte)| **byte != pattern(number, at + *i as u64));
            assert_eq!(wrong, None, "near byte {at} of {bytes} of object {number}, reported as right");
        });
    }

    /// Runs a batch to its end, which always comes.
    fn run(&mut self, requests: &[Request], tally: &mut Tally) -> Vec<TaskResult> {
        let batch = self.initiator.submit(requests, self.deadline).expect("a valid batch");
        let limit = Instant::now() + HANG;
        while !self.initiator.is_complete(batch) {
            assert!(Instant::now() < limit, "a batch does not end");
            self.initiator.round(Duration::from_millis(100), || false).expect("a working ring");
        }
        let results = self.initiator.results(batch).to_vec();
        self.initiator.release(batch);
        for result in &results {
            match result.status {
                Status::Ok | Status::Exists | Status::NotFound => tally.done += 1,
                Status::Unreachable | Status::Corrupt => tally.failed += 1,
                Status::DeadlineExceeded => tally.late += 1,
                other => panic!("faults do not explain {other:?}"),
            }
        }
        results
    }

    /// Puts and gets objects several times.
    fn objects(&mut self, tally: &mut Tally) {
        let mut kept = [false; OBJECTS as usize];
        (0..OBJECTS).for_each(|n| self.fill(n, n * STRIDE_BYTES, object_bytes(n)));
        for _ in 0..3 {
            let puts: Vec<Request> =
                (0..OBJECTS).map(|n| Request::Put(digest(n), self.local(n * STRIDE_BYTES, object_bytes(n)))).collect();
            for (n, result) in self.run(&puts, tally).iter().enumerate() {
                kept[n] |= matches!(result.status, Status::Ok | Status::Exists);
            }
            let gets: Vec<Request> = (0..OBJECTS)
                .map(|n| Request::Get(digest(n), self.local(BACK + n * STRIDE_BYTES, STRIDE_BYTES)))
                .collect();
            // Earlier results must not be mistaken for those of this round.
            self.memory.fill_with(BACK as usize, BACK as usize, &mut |_, part| part.fill(0xa5));
            for (n, result) in (0..OBJECTS).zip(self.run(&gets, tally)) {
                match result.status {
                    Status::Ok => {
                        assert_eq!(result.bytes, object_bytes(n));
                        self.check(n, BACK + n * STRIDE_BYTES, result.bytes);
                    }
                    Status::NotFound => assert!(!kept[n as usize], "object {n} was put and is not there"),
                    _ => {}
                }
            }
        }
    }

    /// Writes ranges of a segment, and reads them back.
    fn ranges(&mut self, tally: &mut Tally) {
        let bytes = WRITES * WRITE_BYTES;
        let region = Region::allocate(&plain("target", bytes as usize)).expect("memory");
        let info =
            SegmentInfo { address: region.address(), bytes, writable: true, shareable: false, remote_accessible: true };
        let segment = self.shard.register(info, region).expect("a free range");
        let peer = self.initiator.open_peer(PeerAddress {
            kind: PeerKind::Native,
            node: NodeId(0),
            incarnation: Incarnation(0),
            shard: ShardId(0),
            tcp: self.shard.address(),
            shm: None,
        });
        let at = |n| SegmentTarget {
            peer,
            segment,
            offset: n * WRITE_BYTES,
            shareable: false,
            place: kvplane_client::Place::UNKNOWN,
        };
        (0..WRITES).for_each(|n| self.fill(100 + n, n * WRITE_BYTES, WRITE_BYTES));
        let writes: Vec<Request> =
            (0..WRITES).map(|n| Request::Write(at(n), self.local(n * WRITE_BYTES, WRITE_BYTES))).collect();
        let written = self.run(&writes, tally);
        let reads: Vec<Request> =
            (0..WRITES).map(|n| Request::Read(at(n), self.local(BACK + n * WRITE_BYTES, WRITE_BYTES))).collect();
        let read = self.run(&reads, tally);
        for (n, (written, read)) in (0..WRITES).zip(written.iter().zip(&read)) {
            if (written.status, read.status) == (Status::Ok, Status::Ok) {
                self.check(100 + n, BACK + n * WRITE_BYTES, WRITE_BYTES);
            }
        }
        self.shard.unregister(segment).expect("a quiet segment");
    }

    /// Ends the initiator: then the shard holds no resource for it.
    fn end(mut self, tally: &mut Tally) {
        tally.initiator = sum(&tally.initiator, &self.initiator.host().faults());
        drop(self.initiator);
        let limit = Instant::now() + HANG;
        let last = loop {
            let snapshot = self.shard.snapshot().expect("a living shard");
            if snapshot.connections == 0 {
                break snapshot;
            }
            assert!(Instant::now() < limit, "{} connections stay", snapshot.connections);
            std::thread::sleep(Duration::from_millis(1));
        };
        tally.shard = sum(&tally.shard, &last.faults);
        let store = last.store.expect("a shard with a store");
        assert_eq!((store.pins, store.pinned_bytes, store.doomed_bytes), (0, 0, 0));
        assert_eq!((store.reservations, store.reserved_bytes, store.quarantined_bytes), (0, 0, 0));
    }
}

const fn sum(a: &FaultCounters, b: &FaultCounters) -> FaultCounters {
    FaultCounters {
        refused: a.refused + b.refused,
        cut_arriving: a.cut_arriving + b.cut_arriving,
        cut_leaving: a.cut_leaving + b.cut_leaving,
        delayed: a.delayed + b.delayed,
        corrupted: a.corrupted + b.corrupted,
    }
}

fn drill(seeds: core::ops::Range<u64>, plan: impl Fn(u64) -> Drill) -> Tally {
    let mut tally = Tally::default();
    for seed in seeds {
        let drill = plan(seed);
        let mut bed = Bed::new(&drill);
        bed.objects(&mut tally);
        // A write that its sender has given up may still be arriving when the same range is written again. It has the
        // same bytes, unless the shard's own memory corrupts them on the way, after the checked second write.
        if drill.shard.corrupt_per_payload == 0.0 {
            bed.ranges(&mut tally);
        }
        bed.end(&mut tally);
    }
    tally
}

/// A plan with some of every fault.
fn mixed(seed: u64) -> FaultPlan {
    FaultPlan {
        seed,
        refuse_connect: 0.1,
        cut_per_frame: 0.01,
        delay_per_frame: 0.05,
        delay_max_ns: 2_000_000,
        corrupt_per_payload: 0.05,
    }
}

const PATIENT: Duration = Duration::from_secs(20);

#[test]
fn a_failing_shard_gives_no_wrong_bytes_and_keeps_nothing() {
    let tally = drill(0..10, |seed| Drill { shard: mixed(seed), initiator: FaultPlan::default(), deadline: PATIENT });
    let FaultCounters { refused, cut_arriving, cut_leaving, delayed, corrupted } = tally.shard;
    assert!(cut_arriving > 0 && cut_leaving > 0 && delayed > 0 && corrupted > 0, "{:?}", tally.shard);
    assert_eq!((refused, tally.initiator), (0, FaultCounters::default()));
    assert!(tally.done > tally.failed, "{} done, {} not", tally.done, tally.failed);
}

#[test]
fn a_failing_initiator_takes_no_wrong_bytes_and_leaves_nothing() {
    let tally =
        drill(100..110, |seed| Drill { shard: FaultPlan::default(), initiator: mixed(seed), deadline: PATIENT });
    let FaultCounters { refused, cut_arriving, cut_leaving, delayed, corrupted } = tally.initiator;
    assert!(refused > 0 && cut_arriving > 0 && cut_leaving > 0, "{:?}", tally.initiator);
    assert!(delayed > 0 && corrupted > 0, "{:?}", tally.initiator);
    assert_eq!(tally.shard, FaultCounters::default());
    assert!(tally.done > tally.failed, "{} done, {} not", tally.done, tally.failed);
}

#[test]
fn with_both_sides_failing_often_every_batch_still_ends() {
    let often = |seed| FaultPlan { cut_per_frame: 0.08, corrupt_per_payload: 0.3, ..mixed(seed) };
    // Lost connections are retried until the deadline, corrupted payloads within the limit of attempts.
    let deadline = Duration::from_secs(5);
    let tally = drill(200..206, |seed| Drill { shard: often(seed), initiator: often(seed + 50), deadline });
    assert!(tally.failed > 0, "{} of these should have been too much for some request", tally.done);
}

#[test]
fn deadlines_end_delayed_requests() {
    let slow = |seed| FaultPlan { seed, delay_per_frame: 0.1, delay_max_ns: 150_000_000, ..FaultPlan::default() };
    let deadline = Duration::from_millis(40);
    let tally = drill(300..305, |seed| Drill { shard: slow(seed), initiator: slow(seed + 50), deadline });
    assert!(tally.shard.delayed > 0 && tally.initiator.delayed > 0);
    assert!(tally.late > 0, "{} done, none late", tally.done);
}

/// Greets a peer and answers its first put before reading any byte of the payload, and reads none until `done`.
fn answer_too_early(mut stream: TcpStream, done: &AtomicBool) -> std::io::Result<()> {
    let frame = |stream: &mut TcpStream| -> std::io::Result<Header> {
        let mut header = [0; HEADER_BYTES];
        stream.read_exact(&mut header)?;
        let header = Header::decode(&header).expect("a frame of an honest initiator");
        stream.read_exact(&mut vec![0; header.body_bytes as usize])?;
        Ok(header)
    };
    let hello = frame(&mut stream)?;
    let welcome = Welcome {
        version: VERSION,
        node: NodeId(1),
        incarnation: Incarnation(7),
        shard: ShardId(0),
        epoch: Epoch(1),
        pool_bytes: 1 << 30,
    }
    .encode();
    let greeting = Header::reply(Kind::Reply(Operation::Hello), hello.request, Status::Ok).with_body(&welcome, 1);
    stream.write_all(&greeting.encode())?;
    stream.write_all(&welcome)?;
    let mut put = frame(&mut stream)?;
    if put.kind == Kind::Request(Operation::Fence) {
        // The put was tried before, on a connection that has ended.
        put = frame(&mut stream)?;
    }
    assert_eq!(put.kind, Kind::Request(Operation::Put));
    stream.write_all(&Header::reply(Kind::Reply(Operation::Put), put.request, Status::Ok).encode())?;
    while !done.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

#[test]
fn an_answer_before_its_payload_has_left_is_not_taken() {
    // More than the kernel buffers for a connection whose reader does not read.
    const BYTES: usize = 64 << 20;
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    let done = Arc::new(AtomicBool::new(false));
    let peer = std::thread::spawn({
        let done = Arc::clone(&done);
        move || {
            let mut threads = Vec::new();
            while let Ok((stream, _)) = listener.accept() {
                if done.load(Ordering::Acquire) {
                    break;
                }
                let done = Arc::clone(&done);
                threads.push(std::thread::spawn(move || answer_too_early(stream, &done)));
            }
            // The initiator is expected to end the connection, at any point.
            threads.into_iter().for_each(|thread| drop(thread.join().expect("an honest initiator")));
        }
    });
    let mut initiator = start_initiator(FaultPlan::default(), address);
    let memory = Region::allocate(&plain("memory", BYTES)).expect("memory");
    let buffer = initiator.add_buffer(memory);
    let put = Request::Put(digest(1), Local { buffer, offset: 0, bytes: BYTES as u64 });
    // Puts whose owner is lost are retried until their deadline.
    let batch = initiator.submit(&[put], Duration::from_secs(1)).expect("a valid batch");
    initiator.wait(batch).expect("a working ring");
    assert_eq!(initiator.results(batch)[0].status, Status::DeadlineExceeded);
    let problem = initiator.last_problem().unwrap_or_default().to_owned();
    assert!(problem.contains("answered before"), "{problem}");
    drop(initiator);
    done.store(true, Ordering::Release);
    drop(TcpStream::connect(address).expect("the listener still listens"));
    peer.join().expect("an honest initiator");
}

//! Tests of many small ranges over real TCP: thousands of any size and offset, in one batch, with and without
//! checksums, over connections that fail, and among ranges that are refused.

use crate::support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_client::{Config, Local, PeerAddress, PeerId, Request, SegmentTarget, TaskResult};
use kvplane_engine::{
    FaultPlan, HostConfig, HugePages, Initiator, Pacing, Region, RegionOptions, Shard, ShardConfig, ShardHandle,
};
use kvplane_proto::frame::{HEADER_BYTES, Header, VERSION};
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_proto::message::{Hello, Item, Kind, Operation, RunItem};
use kvplane_proto::rng::{Rng, mix64};
use kvplane_proto::{RequestId, SegmentId, Status};
use kvplane_store::service::SegmentInfo;

/// No step of these tests may take this long: a hang is reported as a failure.
const HANG: Duration = Duration::from_secs(60);
const BYTES: usize = 48 << 20;

/// Seeds of the initial contents of each memory.
const TARGET: u64 = 1;
const SOURCE: u64 = 2;
const BACK: u64 = 3;

struct Bed {
    shard: ShardHandle,
    initiator: Initiator,
    peer: PeerId,
    segment: SegmentId,
    target: Arc<Region>,
    source: Arc<Region>,
    back: Arc<Region>,
    buffers: [u32; 2],
}

/// Range, with its offsets in the segment and in the caller's memories.
#[derive(Clone, Copy, Debug)]
struct Range {
    remote: u64,
    local: u64,
    bytes: u64,
}

fn memory(name: &str) -> Arc<Region> {
    let options = RegionOptions { huge: HugePages::Never, prefault: false, ..RegionOptions::new(name, BYTES) };
    Region::allocate(&options).expect("memory")
}

fn pattern(seed: u64, at: u64) -> u8 {
    mix64(seed << 48 ^ (at / 8)).to_le_bytes()[(at % 8) as usize]
}

/// Returns the pattern from `at` on, eight bytes of it computed at once.
fn patterns(seed: u64, at: u64) -> impl Iterator<Item = u8> {
    let words = (at / 8..).flat_map(move |word| mix64(seed << 48 ^ word).to_le_bytes());
    words.skip((at % 8) as usize)
}

fn fill(region: &Region, seed: u64) {
    region.fill_with(0, BYTES, &mut |at, part| {
        part.iter_mut().zip(patterns(seed, at)).for_each(|(byte, wanted)| *byte = wanted);
    });
}

/// Checks that the bytes from `offset` are those of `seed` from `from`.
fn check(region: &Region, offset: u64, bytes: u64, (seed, from): (u64, u64)) {
    region.read_with(offset as usize, bytes as usize, &mut |at, part| {
        let wrong = part.iter().zip(patterns(seed, from + at)).position(|(&byte, wanted)| byte != wanted);
        assert_eq!(wrong, None, "of {bytes} bytes at {offset}, after {at}");
    });
}

fn bed(config: Config, fault: Option<FaultPlan>) -> Bed {
    let host = HostConfig { fault, ..HostConfig::default() };
    let shard = Shard::start(ShardConfig { host: host.clone(), ..support::config() }).expect("a shard on loopback");
    let (target, source, back) = (memory("target"), memory("source"), memory("back"));
    fill(&target, TARGET);
    fill(&source, SOURCE);
    fill(&back, BACK);
    let info = SegmentInfo {
        address: target.address(),
        bytes: BYTES as u64,
        writable: true,
        shareable: false,
        remote_accessible: true,
    };
    let segment = shard.register(info, Arc::clone(&target)).expect("a free range");
    let config = Config { cluster: "test".to_owned(), shared: false, ..config };
    let mut initiator = Initiator::new(config, &host, Pacing::Park).expect("a ring");
    let peer = initiator.open_peer(PeerAddress::native(shard.address(), None));
    let buffers = [initiator.add_buffer(Arc::clone(&source)), initiator.add_buffer(Arc::clone(&back))];
    Bed { shard, initiator, peer, segment, target, source, back, buffers }
}

impl Bed {
    fn request(&self, range: &Range, write: bool) -> Request {
        let at = SegmentTarget {
            peer: self.peer,
            segment: self.segment,
            offset: range.remote,
            shareable: false,
            place: kvplane_client::Place::UNKNOWN,
        };
        let local = Local { buffer: self.buffers[usize::from(!write)], offset: range.local, bytes: range.bytes };
        if write { Request::Write(at, local) } else { Request::Read(at, local) }
    }

    fn run(&mut self, ranges: &[Range], write: bool, deadline: Duration) -> Vec<TaskResult> {
        let requests: Vec<Request> = ranges.iter().map(|range| self.request(range, write)).collect();
        let batch = self.initiator.submit(&requests, deadline).expect("a valid batch");
        let limit = Instant::now() + HANG;
        while !self.initiator.is_complete(batch) {
            assert!(Instant::now() < limit, "a batch does not end");
            self.initiator.round(Duration::from_millis(100), || false).expect("a working ring");
        }
        let results = self.initiator.results(batch).to_vec();
        self.initiator.release(batch);
        results
    }

    /// Writes and reads all ranges, and checks that they arrive and that no other byte is touched.
    fn there_and_back(&mut self, ranges: &[Range]) {
        for write in [true, false] {
            for (range, result) in ranges.iter().zip(self.run(ranges, write, HANG)) {
                assert_eq!((result.status, result.bytes), (Status::Ok, range.bytes), "{range:?}");
            }
        }
        let mut by_place = ranges.to_vec();
        by_place.sort_unstable_by_key(|range| range.remote);
        let mut end = 0;
        for range in &by_place {
            check(&self.target, end, range.remote - end, (TARGET, end));
            check(&self.target, range.remote, range.bytes, (SOURCE, range.local));
            end = range.remote + range.bytes;
        }
        check(&self.target, end, BYTES as u64 - end, (TARGET, end));
        by_place.sort_unstable_by_key(|range| range.local);
        let mut end = 0;
        for range in &by_place {
            check(&self.back, end, range.local - end, (BACK, end));
            check(&self.back, range.local, range.bytes, (SOURCE, range.local));
            end = range.local + range.bytes;
        }
        check(&self.back, end, BYTES as u64 - end, (BACK, end));
        check(&self.source, 0, BYTES as u64, (SOURCE, 0));
    }
}

/// Draws ranges of any length that do not overlap, some of them adjacent, in any order.
fn scattered(rng: &mut Rng, count: usize) -> Vec<Range> {
    let mut sizes: Vec<u64> = (0..count)
        .map(|_| match rng.below(20) {
            0 => 1 + rng.below(16),
            1 => 50_000 + rng.below(40_000),
            2..=9 => 4096,
            _ => 1 + rng.below(6000),
        })
        .collect();
    let place = |sizes: &[u64], rng: &mut Rng| {
        let mut at = rng.below(64);
        let places: Vec<u64> = sizes
            .iter()
            .map(|bytes| {
                let start = at;
                at += bytes + if rng.below(3) == 0 { 0 } else { rng.below(64) };
                start
            })
            .collect();
        assert!(at <= BYTES as u64, "the ranges take {at} bytes");
        places
    };
    let remote = place(&sizes, rng);
    let mut ranges: Vec<Range> =
        remote.iter().zip(&sizes).map(|(&remote, &bytes)| Range { remote, local: 0, bytes }).collect();
    // Some runs of neighbours stay together.
    for _ in 0..count / 8 {
        let (a, b) = (rng.below(count as u64) as usize, rng.below(count as u64) as usize);
        ranges.swap(a, b);
    }
    sizes = ranges.iter().map(|range| range.bytes).collect();
    let local = place(&sizes, rng);
    ranges.iter_mut().zip(local).for_each(|(range, local)| range.local = local);
    ranges
}

#[test]
fn thousands_of_ranges_of_any_size_arrive_where_they_belong() {
    for (seed, checksum_segments) in [(1, true), (2, false)] {
        let mut bed = bed(Config { checksum_segments, ..Config::default() }, None);
        bed.there_and_back(&scattered(&mut Rng::new(seed, "ranges"), 6000));
    }
}

#[test]
fn thousands_of_evenly_spaced_blocks_arrive_where_they_belong() {
    for checksum_segments in [true, false] {
        let mut bed = bed(Config { checksum_segments, lanes: 1, slice_bytes: 4 << 20, ..Config::default() }, None);
        let ranges: Vec<Range> =
            (0..5000).map(|n| Range { remote: 64 + n * 8192, local: n * 4096, bytes: 4096 }).collect();
        bed.there_and_back(&ranges);
    }
}

#[test]
fn a_bad_range_does_not_fail_its_neighbours() {
    let mut bed = bed(Config::default(), None);
    let mut ranges: Vec<Range> = (0..2000).map(|n| Range { remote: n * 8192, local: n * 4096, bytes: 4096 }).collect();
    for bad in [7, 8, 1999] {
        ranges[bad].remote = BYTES as u64 - 4095;
    }
    for write in [true, false] {
        let results = bed.run(&ranges, write, HANG);
        for (n, result) in results.iter().enumerate() {
            let wanted = if [7, 8, 1999].contains(&n) { (Status::OutOfRange, 0) } else { (Status::Ok, 4096) };
            assert_eq!((result.status, result.bytes), wanted, "range {n}");
        }
    }
    for range in ranges.iter().filter(|range| range.remote + range.bytes <= BYTES as u64) {
        check(&bed.target, range.remote, range.bytes, (SOURCE, range.local));
        check(&bed.back, range.local, range.bytes, (SOURCE, range.local));
    }
    check(&bed.target, BYTES as u64 - 4095, 4095, (TARGET, BYTES as u64 - 4095));
    bed.shard.unregister(bed.segment).expect("a quiet segment");
    assert!(bed.run(&ranges, true, HANG).iter().all(|result| result.status == Status::Stale));
}

#[test]
fn memory_that_is_unregistered_meanwhile_is_not_touched_afterwards() {
    let mut bed = bed(Config::default(), None);
    let ranges: Vec<Range> = (0..4000).map(|n| Range { remote: n * 8192, local: n * 4096, bytes: 4096 }).collect();
    let requests: Vec<Request> = ranges.iter().map(|range| bed.request(range, true)).collect();
    let batch = bed.initiator.submit(&requests, HANG).expect("a valid batch");
    for _ in 0..3 {
        bed.initiator.round(Duration::from_millis(1), || false).expect("a working ring");
    }
    let (shard, segment) = (&bed.shard, bed.segment);
    std::thread::scope(|scope| {
        let unregistering = scope.spawn(move || shard.unregister(segment));
        let limit = Instant::now() + HANG;
        while !bed.initiator.is_complete(batch) {
            assert!(Instant::now() < limit, "a batch does not end");
            bed.initiator.round(Duration::from_millis(10), || false).expect("a working ring");
        }
        unregistering.join().expect("no panic").expect("a quiet segment");
    });
    let results = bed.initiator.results(batch);
    assert!(results.iter().all(|result| matches!(result.status, Status::Ok | Status::Stale)), "{results:?}");
    for (range, result) in ranges.iter().zip(results) {
        if result.status == Status::Ok {
            check(&bed.target, range.remote, range.bytes, (SOURCE, range.local));
        }
    }
}

#[test]
fn transfers_completed_over_failing_connections_are_right() {
    let (mut done, mut failed, mut faults) = (0, 0, 0);
    for seed in 0..6 {
        let plan = FaultPlan {
            seed,
            cut_per_frame: 0.004,
            delay_per_frame: 0.1,
            delay_max_ns: 2_000_000,
            corrupt_per_payload: 0.05,
            ..FaultPlan::default()
        };
        let mut bed = bed(Config::default(), Some(plan));
        let ranges = scattered(&mut Rng::new(seed, "ranges"), 1500);
        let deadline = if seed % 3 == 2 { Duration::from_millis(30) } else { Duration::from_secs(20) };
        let written = bed.run(&ranges, true, deadline);
        let read = bed.run(&ranges, false, deadline);
        for (range, (written, read)) in ranges.iter().zip(written.iter().zip(&read)) {
            for result in [written, read] {
                match result.status {
                    Status::Ok => done += 1,
                    Status::Unreachable | Status::Corrupt | Status::DeadlineExceeded => failed += 1,
                    other => panic!("faults do not explain {other:?}"),
                }
            }
            if written.status == Status::Ok {
                check(&bed.target, range.remote, range.bytes, (SOURCE, range.local));
            }
            if (written.status, read.status) == (Status::Ok, Status::Ok) {
                check(&bed.back, range.local, range.bytes, (SOURCE, range.local));
            }
        }
        let made = bed.initiator.host().faults();
        faults += made.cut_arriving + made.cut_leaving + made.corrupted;
        bed.shard.unregister(bed.segment).expect("a segment that falls quiet");
    }
    assert!(done > 3000 && faults > 0, "{done} done, {failed} failed, {faults} faults");
}

fn ask(stream: &mut TcpStream, operation: Operation, number: u32, body: &[u8]) {
    let request = RequestId { index: number, generation: 1 };
    let header = Header::request(Kind::Request(operation), request).with_body(body, 1);
    stream.write_all(&header.encode()).expect("an open connection");
    stream.write_all(body).expect("an open connection");
}

/// Reads the next answer with its body and payload.
fn hear(stream: &mut TcpStream) -> (Header, Vec<u8>) {
    let mut bytes = [0; HEADER_BYTES];
    stream.read_exact(&mut bytes).expect("an answer");
    let header = Header::decode(&bytes).expect("a frame");
    let mut rest = vec![0; header.body_bytes as usize + header.payload_bytes as usize];
    stream.read_exact(&mut rest).expect("a whole answer");
    (header, rest)
}

#[test]
fn a_peer_that_requests_much_and_reads_nothing_gets_backpressure() {
    const REQUESTS: u32 = 2000;
    let bed = bed(Config::default(), None);
    let mut stream = TcpStream::connect(bed.shard.address()).expect("a listening shard");
    stream.set_read_timeout(Some(HANG)).expect("a timeout");
    let hello = Hello {
        version_min: VERSION,
        version_max: VERSION,
        client: 1,
        connection: 0,
        node: NodeId(0),
        incarnation: Incarnation(0),
        shard: ShardId(0),
        lane: 0,
        fetches: false,
        cluster: "test".to_owned(),
    };
    ask(&mut stream, Operation::Hello, 0, &hello.encode());
    assert_eq!(hear(&mut stream).0.status, Status::Ok);
    // A hundred bytes that request 4096 pieces of memory.
    let run = RunItem { segment: bed.segment, offset: 0, stride_bytes: 8192, bytes: 16, ranges: 4096 };
    let mut body = Vec::new();
    run.encode(&mut body);
    (0..REQUESTS).for_each(|number| ask(&mut stream, Operation::ReadMany, number, &body));
    let limit = Instant::now() + HANG;
    let mut taken = 0;
    loop {
        std::thread::sleep(Duration::from_millis(50));
        let now = bed.shard.snapshot().expect("a living shard").service.requests;
        if now == taken {
            break;
        }
        assert!(Instant::now() < limit, "requests are taken without end");
        taken = now;
    }
    assert!(taken < u64::from(REQUESTS) / 2, "{taken} requests were taken though no answer was read");
    for number in 0..REQUESTS {
        let (header, payload) = hear(&mut stream);
        assert_eq!((header.status, header.request.index, payload.len()), (Status::Ok, number, 65_536));
        if number % 500 == 0 {
            let wanted = (0..4096).flat_map(|range| (0..16).map(move |at| pattern(TARGET, range * 8192 + at)));
            assert!(payload.iter().copied().eq(wanted), "answer {number}");
        }
    }
}

//! Tests of segments of peers on this host, and of this process: the path taken, the arrival of the bytes, and that no
//! memory is touched after it was unregistered.

use crate::support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvplane_client::{Config, Local, PeerAddress, PeerId, Request, SegmentTarget, Transport};
use kvplane_engine::{
    HostConfig, HugePages, Initiator, Listen, Pacing, Region, RegionOptions, Shard, ShardConfig, ShardHandle,
};
use kvplane_proto::Status;
use kvplane_proto::ids::SegmentId;
use kvplane_proto::rng::mix64;
use kvplane_store::service::SegmentInfo;

const DEADLINE: Duration = Duration::from_secs(20);
const BYTES: usize = 4 << 20;
/// Variable with the addresses of the shard for the other process, and the segment that it writes.
const PART: &str = "KVPLANE_ENGINE_TEST_SAME_HOST";

struct Owner {
    shard: ShardHandle,
    directory: std::path::PathBuf,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl Owner {
    fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("kvplane-same-host-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory for the test's sockets");
        let listen = Listen {
            tcp: ([127, 0, 0, 1], 0).into(),
            shm: Some(directory.join("shard.sock")),
            mooncake: None,
            handed: None,
        };
        let shard = Shard::start(ShardConfig { pacing: Pacing::default(), listen, ..support::config() })
            .expect("a shard on loopback");
        Self { shard, directory }
    }

    fn address(&self) -> PeerAddress {
        PeerAddress::native(self.shard.address(), self.shard.shm().map(|path| path.display().to_string()))
    }

    fn register(&self, region: &Arc<Region>, change: impl FnOnce(&mut SegmentInfo)) -> SegmentId {
        let mut info = SegmentInfo {
            address: region.address(),
            bytes: region.bytes() as u64,
            writable: true,
            shareable: region.fd().is_some(),
            remote_accessible: true,
        };
        change(&mut info);
        self.shard.register(info, Arc::clone(region)).expect("a free range")
    }

    /// Returns the payload bytes that went over the shard's connections.
    fn streamed(&self) -> u64 {
        let counters = self.shard.snapshot().expect("a living shard").service;
        counters.read_bytes + counters.write_bytes
    }
}

/// Allocates memory that others can map, or private memory.
fn memory(shared: bool, bytes: usize) -> Arc<Region> {
    let options = RegionOptions { shared, huge: HugePages::Never, ..RegionOptions::new("memory", bytes) };
    Region::allocate(&options).expect("memory")
}

struct Asker {
    initiator: Initiator,
    peer: PeerId,
    memory: Arc<Region>,
    buffer: u32,
}

fn config(change: impl FnOnce(&mut Config)) -> Config {
    let mut config = Config { cluster: "test".to_owned(), host: "here".to_owned(), ..Config::default() };
    change(&mut config);
    config
}

impl Asker {
    fn new(address: PeerAddress, config: Config) -> Self {
        let mut initiator = Initiator::new(config, &HostConfig::default(), Pacing::default()).expect("a ring");
        let memory = memory(false, BYTES);
        let buffer = initiator.add_buffer(Arc::clone(&memory));
        let peer = initiator.open_peer(address);
        Self { initiator, peer, memory, buffer }
    }

    fn local(&self, offset: usize, bytes: usize) -> Local {
        Local { buffer: self.buffer, offset: offset as u64, bytes: bytes as u64 }
    }

    fn at(&self, segment: SegmentId, offset: usize, shareable: bool) -> SegmentTarget {
        SegmentTarget {
            peer: self.peer,
            segment,
            offset: offset as u64,
            shareable,
            place: kvplane_client::Place::UNKNOWN,
        }
    }

    fn run(&mut self, requests: &[Request]) -> Vec<Status> {
        let batch = self.initiator.submit(requests, DEADLINE).expect("a valid batch");
        self.initiator.wait(batch).expect("a working ring");
        let results = self.initiator.results(batch).iter().map(|result| result.status).collect();
        self.initiator.release(batch);
        results
    }

    /// Returns the bytes by transport from the client's metrics, and checks that every slice copied was timed.
    fn counted(&mut self) -> [u64; 3] {
        let books = self.initiator.books();
        let by = [Transport::Shm, Transport::Cma, Transport::Local];
        by.map(|transport| {
            let rails = books.rail_metrics().filter(|rail| rail.transport == transport);
            rails.fold(0, |sum, rail| {
                let counts = rail.counts;
                assert_eq!((counts.service.count(), counts.queue.count()), (counts.operations, counts.operations));
                assert!(counts.bytes < 1 << 20 || counts.service.sum_ns() > 1000, "{transport:?}: copies take time");
                sum + counts.bytes
            })
        })
    }

    /// Returns the bytes copied so far by mapping, by CMA, and within this process.
    fn moved(&self) -> [u64; 3] {
        let counters = self.initiator.host_counters();
        [counters.map_bytes, counters.cma_bytes, counters.local_bytes]
    }
}

fn pattern(seed: u64, at: u64) -> u8 {
    mix64(seed ^ (at / 8)).to_le_bytes()[(at % 8) as usize]
}

fn fill(region: &Region, seed: u64) {
    region.fill_with(0, region.bytes(), &mut |at, part| {
        part.iter_mut().enumerate().for_each(|(i, byte)| *byte = pattern(seed, at + i as u64));
    });
}

/// Returns the first byte of a range that differs from the pattern from `from` on.
fn wrong(region: &Region, seed: u64, offset: usize, bytes: usize, from: u64) -> Option<u64> {
    let mut first = None;
    region.read_with(offset, bytes, &mut |at, part| {
        let here = part.iter().enumerate().find(|(i, byte)| **byte != pattern(seed, from + at + *i as u64));
        first = first.or(here.map(|(i, _)| at + i as u64));
    });
    first
}

/// Writes and reads whole, odd and many small ranges; returns the bytes that were copied on this host.
fn exchange(asker: &mut Asker, theirs: &Region, segment: SegmentId, shareable: bool) -> u64 {
    let before: u64 = asker.moved().iter().sum();
    fill(&asker.memory, 3);
    fill(theirs, 4);
    let size = 3_000_001;
    let (to, whole) = (asker.at(segment, 77, shareable), asker.local(13, size));
    assert_eq!(asker.run(&[Request::Write(to, whole)]), [Status::Ok]);
    assert_eq!(wrong(theirs, 3, 77, size, 13), None);
    assert_eq!(wrong(theirs, 4, 0, 77, 0), None, "before the range");
    assert_eq!(wrong(theirs, 4, 77 + size, 4096, 77 + size as u64), None, "behind it");
    fill(theirs, 5);
    let parts: Vec<Request> = (0..300)
        .map(|n| Request::Read(asker.at(segment, n * 5000 + 1, shareable), asker.local((299 - n) * 4096, 4096)))
        .collect();
    assert!(asker.run(&parts).iter().all(|&status| status == Status::Ok));
    for n in 0..300 {
        assert_eq!(wrong(&asker.memory, 5, (299 - n) * 4096, 4096, n as u64 * 5000 + 1), None, "range {n}");
    }
    let (over, little) = (asker.at(segment, BYTES - 100, shareable), asker.local(0, 101));
    assert_eq!(asker.run(&[Request::Write(over, little)]), [Status::OutOfRange]);
    asker.moved().iter().sum::<u64>() - before
}

const EXCHANGED: u64 = 3_000_001 + 300 * 4096;

#[test]
fn shared_memory_is_mapped() {
    let owner = Owner::new("map");
    let theirs = memory(true, BYTES);
    let segment = owner.register(&theirs, |_| ());
    for slice_bytes in [256 << 10, 8 << 20] {
        let mut asker = Asker::new(owner.address(), config(|config| config.slice_bytes = slice_bytes));
        assert_eq!(exchange(&mut asker, &theirs, segment, true), EXCHANGED);
        assert_eq!((asker.moved()[0], owner.streamed()), (EXCHANGED, 0));
        assert_eq!(asker.counted(), asker.moved());
    }
}

#[test]
fn any_memory_is_copied_by_the_kernel() {
    let owner = Owner::new("cma");
    let theirs = memory(false, BYTES);
    let segment = owner.register(&theirs, |_| ());
    for slice_bytes in [256 << 10, 8 << 20] {
        let mut asker = Asker::new(owner.address(), config(|config| config.slice_bytes = slice_bytes));
        assert_eq!(exchange(&mut asker, &theirs, segment, false), EXCHANGED);
        if asker.moved()[1] == 0 {
            println!("skipped: the kernel does not copy between processes here");
            return;
        }
        assert_eq!((asker.moved()[1], owner.streamed()), (EXCHANGED, 0));
        assert_eq!(asker.counted(), asker.moved());
    }
}

#[test]
fn closed_ways_lead_to_the_stream() {
    let owner = Owner::new("ways");
    let theirs = memory(false, BYTES);
    let segment = owner.register(&theirs, |_| ());
    // Without CMA, memory that cannot be mapped goes over the stream.
    let mut asker = Asker::new(owner.address(), config(|config| config.cma = false));
    assert_eq!(exchange(&mut asker, &theirs, segment, false), 0);
    assert_eq!((asker.moved(), owner.streamed()), ([0; 3], EXCHANGED));
    // The descriptor may state properties that the owner does not provide: the next path is taken.
    assert_eq!(exchange(&mut asker, &theirs, segment, true), 0);
    assert_eq!((asker.moved(), owner.streamed()), ([0; 3], 2 * EXCHANGED));
    let mut only = Asker::new(owner.address(), config(|config| (config.cma, config.stream) = (false, false)));
    let (from, to) = (only.at(segment, 0, false), only.local(0, 100));
    assert_eq!(only.run(&[Request::Read(from, to)]), [Status::Unsupported], "disabled ways are not used");
    // Without mappings, memory that could be mapped is copied by the kernel, or goes over the stream.
    let shared = memory(true, BYTES);
    let segment = owner.register(&shared, |_| ());
    let mut asker = Asker::new(owner.address(), config(|config| config.shared = false));
    exchange(&mut asker, &shared, segment, true);
    assert_eq!(asker.moved()[0], 0);
    assert_eq!(asker.counted(), asker.moved());
}

#[test]
fn rights_hold_on_every_way() {
    let owner = Owner::new("rights");
    for shared in [true, false] {
        let (fixed, hidden) = (memory(shared, 8192), memory(shared, 8192));
        let read_only = owner.register(&fixed, |info| info.writable = false);
        let private = owner.register(&hidden, |info| info.remote_accessible = false);
        fill(&fixed, 1);
        fill(&hidden, 2);
        for (cma, stream) in [(true, false), (false, true)] {
            let mut asker = Asker::new(owner.address(), config(|config| (config.cma, config.stream) = (cma, stream)));
            let (one, two) = (asker.local(0, 4096), asker.local(4096, 4096));
            let (fixed_at, hidden_at) = (asker.at(read_only, 4096, shared), asker.at(private, 0, shared));
            assert_eq!(asker.run(&[Request::Read(fixed_at, one)]), [Status::Ok]);
            assert_eq!(wrong(&asker.memory, 1, 0, 4096, 4096), None);
            assert_eq!(asker.run(&[Request::Write(fixed_at, two)]), [Status::Unauthorized]);
            let refused = asker.run(&[Request::Read(hidden_at, one), Request::Write(hidden_at, two)]);
            assert!(refused.iter().all(|s| matches!(s, Status::Stale | Status::Unauthorized)), "{refused:?}");
        }
        assert_eq!((wrong(&fixed, 1, 0, 8192, 0), wrong(&hidden, 2, 0, 8192, 0)), (None, None));
    }
}

/// Peers that may only read map memory that cannot be made writable again. If they may write it later, they use another
/// path.
#[test]
fn memory_may_be_for_readers_first_and_for_writers_later() {
    let owner = Owner::new("turns");
    let theirs = memory(true, BYTES);
    let segment = owner.register(&theirs, |info| info.writable = false);
    fill(&theirs, 1);
    let mut asker = Asker::new(owner.address(), config(|_| ()));
    let (at, local) = (asker.at(segment, 8, true), asker.local(0, 4096));
    assert_eq!(asker.run(&[Request::Read(at, local)]), [Status::Ok]);
    assert_eq!((asker.moved()[0], wrong(&asker.memory, 1, 0, 4096, 8)), (4096, None));
    assert_eq!(asker.run(&[Request::Write(at, local)]), [Status::Unauthorized]);
    assert_eq!(wrong(&theirs, 1, 0, BYTES, 0), None);
    owner.shard.unregister(segment).expect("nobody uses it");
    let segment = owner.register(&theirs, |_| ());
    let moved = exchange(&mut asker, &theirs, segment, true);
    assert_eq!(asker.moved()[0], 4096, "through no mapping");
    assert_eq!(moved + owner.streamed(), EXCHANGED);
}

/// A host that is kept from its rounds has not been answered sooner for that: with the clock of a round before the
/// request was sent, it would appear so.
#[test]
fn the_time_of_an_answer_is_when_it_is_taken() {
    const APART: Duration = Duration::from_millis(1);
    let owner = Owner::new("time");
    let theirs = memory(false, BYTES);
    let segment = owner.register(&theirs, |_| ());
    let mut asker = Asker::new(PeerAddress::native(owner.shard.address(), None), config(|_| ()));
    let read = Request::Read(asker.at(segment, 0, false), asker.local(0, 4096));
    assert_eq!(asker.run(&[read]), [Status::Ok]);
    let served = |asker: &mut Asker| {
        let books = asker.initiator.books();
        let stream = books.rail_metrics().filter(|rail| rail.transport == Transport::Tcp);
        stream.map(|rail| rail.counts.service.sum_ns()).sum::<u64>()
    };
    for round in 0..20 {
        let before_ns = served(&mut asker);
        let batch = asker.initiator.submit(&[read], DEADLINE).expect("a valid batch");
        // A request that a round sends is not answered before the next.
        while !asker.initiator.is_complete(batch) {
            asker.initiator.poll().expect("a working poller");
            std::thread::sleep(APART);
        }
        assert_eq!(asker.initiator.results(batch)[0].status, Status::Ok);
        asker.initiator.release(batch);
        let took_ns = u128::from(served(&mut asker) - before_ns);
        assert!(took_ns >= APART.as_nanos(), "{took_ns} ns in round {round}");
    }
}

/// Failures of copies in the round that detects the connection's end must not be reported as the end of the segment.
/// That round is one of the first few; all are tried.
#[test]
fn the_end_of_a_connection_is_not_the_end_of_a_segment() {
    for rounds in 0..20 {
        let owner = Owner::new("end");
        let theirs = memory(true, BYTES);
        let segment = owner.register(&theirs, |_| ());
        fill(&theirs, 1);
        let mut asker = Asker::new(owner.address(), config(|_| ()));
        let read = Request::Read(asker.at(segment, 8, true), asker.local(0, 4096));
        assert_eq!(asker.run(&[read]), [Status::Ok]);
        drop(owner);
        for _ in 0..rounds {
            asker.initiator.poll().expect("a working poller");
        }
        let status = asker.run(&[read])[0];
        assert!(matches!(status, Status::Ok | Status::Unreachable), "{status:?} after {rounds} rounds");
    }
}

#[test]
fn this_process_is_a_peer_too() {
    let mut asker = Asker::new(PeerAddress::local(), config(|_| ()));
    let own = memory(false, BYTES);
    let segment = SegmentId { index: 3, generation: 9 };
    asker.initiator.host().add_segment(segment, Arc::clone(&own));
    assert_eq!(exchange(&mut asker, &own, segment, false), EXCHANGED);
    assert_eq!(asker.moved(), [0, 0, EXCHANGED]);
    asker.initiator.host().remove_segment(segment);
    let (at, local) = (asker.at(segment, 0, false), asker.local(0, 10));
    assert_eq!(asker.run(&[Request::Read(at, local)]), [Status::Stale]);
    let peer = asker.peer;
    assert_eq!(asker.run(&[Request::OpenSegment(peer)]), [Status::Unsupported]);
}

/// Another thread writes a segment as fast as it can while it is unregistered. Memory that is ours again stays
/// unchanged.
#[test]
fn no_byte_is_written_after_unregister_returned() {
    let owner = Owner::new("hammer");
    for (round, shared) in [true, false].into_iter().cycle().take(12).enumerate() {
        let theirs = memory(shared, BYTES);
        let segment = owner.register(&theirs, |_| ());
        let (stop, started) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let slice_bytes = if round % 4 < 2 { 256 << 10 } else { BYTES as u64 };
                let mut asker = Asker::new(owner.address(), config(|config| config.slice_bytes = slice_bytes));
                fill(&asker.memory, 1);
                let (to, whole) = (asker.at(segment, 0, shared), asker.local(0, BYTES));
                let mut last = Status::Ok;
                while !stop.load(Ordering::Acquire) {
                    last = asker.run(&[Request::Write(to, whole)])[0];
                    started.store(true, Ordering::Release);
                }
                last
            });
            while !started.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            owner.shard.unregister(segment).expect("peers let go");
            fill(&theirs, 2);
            // Long enough for some more of its writes, which must all fail.
            std::thread::sleep(Duration::from_millis(20));
            let found = wrong(&theirs, 2, 0, BYTES, 0);
            stop.store(true, Ordering::Release);
            assert_eq!(found, None, "written after unregister returned");
            assert_eq!(writer.join().expect("a writer"), Status::Stale);
        });
    }
}

/// Body of the child process: writes the given segment forever.
#[test]
fn the_other_process() {
    let Ok(part) = std::env::var(PART) else { return };
    let words: Vec<&str> = part.split(' ').collect();
    let [tcp, shm, index, generation, shared] = words[..] else { panic!("{part:?}") };
    let address = PeerAddress::native(tcp.parse().expect("an address"), Some(shm.to_owned()));
    let number = |text: &str| text.parse().expect("a number");
    let segment = SegmentId { index: number(index), generation: number(generation) };
    let mut asker = Asker::new(address, config(|config| config.stream = false));
    let (to, whole) = (asker.at(segment, 0, shared == "true"), asker.local(0, BYTES));
    fill(&asker.memory, 1);
    loop {
        let status = asker.run(&[Request::Write(to, whole)]);
        println!("SAY {status:?} {:?}", asker.moved());
    }
}

fn start_writer(owner: &Owner, segment: SegmentId, shared: bool) -> (Child, String) {
    let address = owner.address();
    let shm = address.shm.expect("a socket");
    let part = format!("{} {shm} {} {} {shared}", address.tcp, segment.index, segment.generation);
    let mut child = Command::new(std::env::current_exe().expect("our own path"))
        .args(["same_host::the_other_process", "--exact", "--nocapture"])
        .env(PART, part)
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child");
    let mut output = BufReader::new(child.stdout.take().expect("its output"));
    let mut line = String::new();
    while !line.contains("SAY ") {
        line.clear();
        assert_ne!(output.read_line(&mut line).expect("a line"), 0, "the child ended early");
    }
    // The rest of the output is not read: the child ends when it writes its next line to the closed pipe, or is killed
    // before.
    child.stdout = Some(output.into_inner());
    (child, line)
}

#[test]
fn another_process_writes_and_its_death_blocks_no_unregistering() {
    let owner = Owner::new("killed");
    for shared in [true, false] {
        for _ in 0..5 {
            let theirs = memory(shared, BYTES);
            let segment = owner.register(&theirs, |_| ());
            let (mut child, said) = start_writer(&owner, segment, shared);
            if !shared && said.contains("Unsupported") {
                println!("skipped: the kernel does not copy between processes here");
                let _ = child.kill();
                let _ = child.wait();
                return;
            }
            assert!(said.contains("SAY [Ok]"), "{said}");
            assert_eq!(wrong(&theirs, 1, 0, BYTES, 0), None, "{said}");
            child.kill().expect("our own child");
            owner.shard.unregister(segment).expect("a dead peer holds nothing");
            fill(&theirs, 2);
            child.wait().expect("our own child");
            assert_eq!(wrong(&theirs, 2, 0, BYTES, 0), None, "written after unregister returned");
        }
    }
}

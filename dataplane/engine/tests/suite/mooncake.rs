//! End-to-end tests of Mooncake's data protocol: real shards and initiators, against each other and against raw peers.
//!
//! They cover the requirements of the stock engine's tests on a whole engine: addresses are checked against registered
//! memory, a completed write is visible on every path, lanes and queues keep their bounds under load, a deadline ends
//! each request exactly once, a restarted peer is found again, and shutdown ends all requests. The protocol's details
//! are tested with its driver, `transport/tests/suite/mooncake`.

use crate::{raw, support};

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvplane_client::{Config, Local, PeerAddress, PeerId, Request, SegmentTarget};
use kvplane_engine::{HostConfig, Initiator, Listen, Pacing, Region, Shard, ShardConfig, ShardHandle};
use kvplane_proto::Status;
use kvplane_proto::ids::SegmentId;
use kvplane_proto::rng::Rng;
use kvplane_store::service::SegmentInfo;
use kvplane_transport::mooncake::wire::Dialect;
use raw::{OK, PATIENCE, REJECTED, Raw, byte_at, bytes_at, content, memory};

const BYTES: u64 = 16 << 20;

fn shard(listen: SocketAddr) -> ShardHandle {
    Shard::start(ShardConfig {
        listen: Listen { tcp: ([127, 0, 0, 1], 0).into(), shm: None, mooncake: Some(listen), handed: None },
        ..support::config()
    })
    .expect("a shard on loopback")
}

fn anywhere() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

const fn info(address: u64, bytes: u64) -> SegmentInfo {
    SegmentInfo { address, bytes, writable: true, shareable: false, remote_accessible: true }
}

/// Caller with memory.
struct Asker {
    initiator: Initiator,
    memory: Arc<Region>,
    buffer: u32,
}

impl Asker {
    fn new(lanes: u16, depth: u32) -> Self {
        let config = Config { cluster: "test".to_owned(), lanes, foreign_depth: depth, ..Config::default() };
        let mut initiator = Initiator::new(config, &HostConfig::default(), Pacing::Park).expect("a poller");
        let memory = memory(BYTES as usize);
        let buffer = initiator.add_buffer(Arc::clone(&memory));
        Self { initiator, memory, buffer }
    }

    fn peer(&mut self, address: SocketAddr, version: u8) -> PeerId {
        self.initiator.open_peer(PeerAddress::mooncake(address, version))
    }

    fn local(&self, offset: u64, bytes: u64) -> Local {
        Local { buffer: self.buffer, offset, bytes }
    }

    fn run(&mut self, requests: &[Request], deadline: Duration) -> Vec<Status> {
        let batch = self.initiator.submit(requests, deadline).expect("a valid batch");
        self.initiator.wait(batch).expect("a working poller");
        let statuses = self.initiator.results(batch).iter().map(|result| result.status).collect();
        self.initiator.release(batch);
        statuses
    }

    fn fill(&self, seed: u64, base: u64) {
        self.memory.fill_with(0, BYTES as usize, &mut |at, part| {
            part.iter_mut().enumerate().for_each(|(i, byte)| *byte = byte_at(seed, base + at + i as u64));
        });
    }
}

/// Returns the target of an absolute address of a peer, without a segment.
fn target(peer: PeerId, address: u64) -> SegmentTarget {
    SegmentTarget {
        peer,
        segment: SegmentId::default(),
        offset: address,
        shareable: false,
        place: kvplane_client::Place::UNKNOWN,
    }
}

#[test]
fn writes_are_read_over_every_path() {
    let shard = shard(anywhere());
    let region = memory(BYTES as usize);
    let base = region.address();
    let segment = shard.register(info(base, BYTES), Arc::clone(&region)).expect("registered");
    for (version, depth) in [(1, 1), (1, 8), (2, 1), (2, 16)] {
        let mut asker = Asker::new(4, depth);
        let peer = asker.peer(shard.mooncake().expect("it listens"), version);
        let native = asker.initiator.open_peer(PeerAddress::native(shard.address(), None));
        let seed = u64::from(version) * 100 + u64::from(depth);
        let mut rng = Rng::new(seed, "mooncake");
        asker.fill(seed, base);
        let (mut writes, mut reads, mut native_reads) = (Vec::new(), Vec::new(), Vec::new());
        let mut at = rng.below(100);
        while at < BYTES {
            let most = if rng.below(3) == 0 { 1_000_000 } else { 5_000 };
            let bytes = (1 + rng.below(most)).min(BYTES - at);
            let local = asker.local(at, bytes);
            writes.push(Request::Write(target(peer, base + at), local));
            reads.push(Request::Read(target(peer, base + at), local));
            let known = SegmentTarget {
                peer: native,
                segment,
                offset: at,
                shareable: false,
                place: kvplane_client::Place::UNKNOWN,
            };
            native_reads.push(Request::Read(known, local));
            at += bytes + rng.below(50);
        }
        let start = content(&asker.memory, 0, BYTES as usize);
        assert!(asker.run(&writes, PATIENCE).iter().all(|&status| status == Status::Ok));
        for requests in [native_reads, reads] {
            // Over other bytes, so that the check finds only bytes that were read.
            asker.fill(seed + 1, base);
            let before = content(&asker.memory, 0, BYTES as usize);
            assert!(asker.run(&requests, PATIENCE).iter().all(|&status| status == Status::Ok));
            let after = content(&asker.memory, 0, BYTES as usize);
            let mut covered = vec![false; BYTES as usize];
            for request in &requests {
                let local = request.local().expect("reads have memory");
                covered[local.offset as usize..(local.offset + local.bytes) as usize].fill(true);
            }
            let good = (0..BYTES as usize).all(|i| after[i] == if covered[i] { start[i] } else { before[i] });
            assert!(good, "version {version}, depth {depth}");
        }
    }
    assert_eq!(shard.snapshot().expect("alive").mooncake.torn, 0);
}

#[test]
fn addresses_are_checked_against_registered_memory() {
    let shard = shard(anywhere());
    let region = memory(1 << 20);
    let base = region.address();
    let page = 4096;
    let part = |offset, bytes| info(base + offset, bytes);
    let add = |info: SegmentInfo| {
        let piece = Region::allocate(&kvplane_engine::RegionOptions::new("piece", info.bytes as usize));
        shard.register(info, piece.expect("memory")).expect("registered")
    };
    add(part(0, page));
    add(part(page, page));
    add(SegmentInfo { writable: false, ..part(4 * page, page) });
    add(SegmentInfo { remote_accessible: false, ..part(6 * page, page) });
    let gone = add(part(8 * page, page));
    shard.unregister(gone).expect("quiet");
    let cases = [
        ("the first region", 0, page, true, true),
        ("its last byte", page - 1, 1, true, true),
        ("the second region", page, page, true, true),
        ("both regions, which touch", 0, 2 * page, false, false),
        ("one byte of each", page - 1, 2, false, false),
        ("past the second", 2 * page, 1, false, false),
        ("over its end", page, page + 1, false, false),
        ("read-only", 4 * page, page, true, false),
        ("not for peers", 6 * page, 1, false, false),
        ("unregistered", 8 * page, 1, false, false),
        ("nothing", 0, 0, false, false),
        ("beyond 2^64", 0, u64::MAX, false, false),
    ];
    for (what, offset, bytes, may_read, may_write) in cases {
        for (write, allowed) in [(false, may_read), (true, may_write)] {
            let mut peer = Raw::connect(shard.mooncake().expect("it listens"));
            peer.ask(write, Dialect::V2, base + offset, bytes);
            if write && allowed {
                peer.send(&vec![1; bytes as usize]);
            }
            let wanted = if allowed { OK } else { REJECTED };
            assert_eq!(peer.status(), wanted, "{what}, write: {write}");
            if !allowed {
                assert!(peer.ends());
            }
        }
    }
}

/// A stock peer stops within a payload. Unregistering waits, then closes its connection; later bytes of the peer change
/// nothing.
#[test]
fn unregistering_waits_for_stock_peers_and_then_ends_them() {
    let shard = shard(anywhere());
    let region = memory(1 << 20);
    let (base, bytes) = (region.address(), 1 << 20);
    let segment = shard.register(info(base, bytes), Arc::clone(&region)).expect("registered");
    let mut peer = Raw::connect(shard.mooncake().expect("it listens"));
    peer.ask(true, Dialect::V2, base, bytes);
    peer.send(&bytes_at(1, base, 100_000));
    while content(&region, 99_992, 8) != bytes_at(1, base + 99_992, 8) {
        std::thread::sleep(Duration::from_millis(1));
    }
    shard.unregister(segment).expect("quiet");
    let quiet = content(&region, 0, bytes as usize);
    // As much as the connection still takes.
    let _ = std::io::Write::write_all(&mut peer.0, &[0xee; 500_000]);
    assert!(peer.ends());
    assert!(content(&region, 0, bytes as usize) == quiet, "written after it was given back");
}

#[test]
fn bad_requests_fail_alone() {
    let shard = shard(anywhere());
    let region = memory(BYTES as usize);
    let base = region.address();
    shard.register(info(base, BYTES), Arc::clone(&region)).expect("registered");
    for version in [2, 1] {
        let mut asker = Asker::new(2, 16);
        let peer = asker.peer(shard.mooncake().expect("it listens"), version);
        let requests: Vec<Request> = (0..600)
            .map(|i| {
                let bad = if i % 40 == 7 { BYTES } else { 0 };
                let (at, local) = (target(peer, base + bad + i * 5000), asker.local(i * 5000, 5000));
                if i % 3 == 0 { Request::Write(at, local) } else { Request::Read(at, local) }
            })
            .collect();
        for (i, status) in asker.run(&requests, PATIENCE).into_iter().enumerate() {
            let wanted = if i % 40 == 7 { Status::OutOfRange } else { Status::Ok };
            assert_eq!(status, wanted, "request {i} of version {version}");
        }
    }
}

/// Observations of a peer.
#[derive(Default)]
struct PeerView {
    connections: AtomicUsize,
    open: AtomicUsize,
    most_open: AtomicUsize,
    requests: AtomicUsize,
}

/// Peer of version 2 with memory at every address, which answers while `answering`.
struct Peer {
    address: SocketAddr,
    seen: Arc<PeerView>,
    answering: Arc<AtomicBool>,
    written: Arc<Mutex<BTreeMap<u64, usize>>>,
}

impl Peer {
    fn new() -> Self {
        let listener = TcpListener::bind(anywhere()).expect("a port");
        let address = listener.local_addr().expect("bound");
        let peer =
            Self { address, seen: Arc::default(), answering: Arc::new(AtomicBool::new(true)), written: Arc::default() };
        let (seen, answering, written) =
            (Arc::clone(&peer.seen), Arc::clone(&peer.answering), Arc::clone(&peer.written));
        // The thread ends with the process: it waits for connections forever.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut raw = Raw::of(stream.expect("a connection"));
                raw.0.set_read_timeout(None).expect("an option");
                let (seen, answering, written) = (Arc::clone(&seen), Arc::clone(&answering), Arc::clone(&written));
                seen.connections.fetch_add(1, Ordering::SeqCst);
                let open = seen.open.fetch_add(1, Ordering::SeqCst) + 1;
                seen.most_open.fetch_max(open, Ordering::SeqCst);
                std::thread::spawn(move || {
                    while serve_one(&mut raw, &seen, &answering, &written).is_ok() {}
                    seen.open.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        peer
    }
}

fn serve_one(
    raw: &mut Raw,
    seen: &PeerView,
    answering: &AtomicBool,
    written: &Mutex<BTreeMap<u64, usize>>,
) -> std::io::Result<()> {
    use std::io::{Read as _, Write as _};
    let mut head = [0; 24];
    raw.0.read_exact(&mut head)?;
    let request = kvplane_transport::mooncake::wire::Request::decode(&head).expect("a request");
    seen.requests.fetch_add(1, Ordering::SeqCst);
    let mut bytes = bytes_at(3, request.address, request.bytes as usize);
    if request.write {
        raw.0.read_exact(&mut bytes)?;
        *written.lock().expect("not poisoned").entry(request.address).or_default() += 1;
    }
    while !answering.load(Ordering::SeqCst) {
        // Until the other side closes.
        raw.0.set_read_timeout(Some(Duration::from_millis(5)))?;
        let gone = matches!(raw.0.peek(&mut [0]), Ok(0));
        raw.0.set_read_timeout(None)?;
        if gone {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    raw.0.write_all(&OK)?;
    if !request.write {
        raw.0.write_all(&bytes)?;
    }
    Ok(())
}

#[test]
fn lanes_keep_their_bounds_under_load() {
    let peer = Peer::new();
    let mut asker = Asker::new(3, 8);
    let id = asker.peer(peer.address, 2);
    asker.fill(3, 0x1000_0000);
    let requests: Vec<Request> = (0..3000)
        .map(|i| {
            let (at, local) = (target(id, 0x1000_0000 + i * 3000), asker.local(i * 3000, 1 + i));
            if i % 2 == 0 { Request::Write(at, local) } else { Request::Read(at, local) }
        })
        .collect();
    assert!(asker.run(&requests, PATIENCE).iter().all(|&status| status == Status::Ok));
    assert_eq!(peer.seen.most_open.load(Ordering::SeqCst), 3);
    assert_eq!(peer.seen.connections.load(Ordering::SeqCst), 3, "connections are kept");
    // Each write exactly once; before the first write over each new lane there may be a probe of the peer's version.
    let extra = peer.seen.requests.load(Ordering::SeqCst) - 3000;
    assert!(extra <= 3, "{extra} more requests than transfers");
    assert!(peer.written.lock().expect("not poisoned").values().all(|&times| times == 1));
}

#[test]
fn a_deadline_ends_each_request_once_and_the_peer_is_found_again() {
    let peer = Peer::new();
    let mut asker = Asker::new(2, 4);
    let id = asker.peer(peer.address, 2);
    asker.fill(3, 0x1000_0000);
    let requests: Vec<Request> = (0..50)
        .map(|i| {
            let (at, local) = (target(id, 0x1000_0000 + i * 100_000), asker.local(i * 100_000, 100_000));
            if i % 2 == 0 { Request::Write(at, local) } else { Request::Read(at, local) }
        })
        .collect();
    peer.answering.store(false, Ordering::SeqCst);
    let before = content(&asker.memory, 0, BYTES as usize);
    let statuses = asker.run(&requests, Duration::from_millis(300));
    assert_eq!(statuses, vec![Status::DeadlineExceeded; 50]);
    peer.answering.store(true, Ordering::SeqCst);
    // Answers that arrive now belong to no request.
    for _ in 0..20 {
        asker.initiator.poll().expect("a working poller");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(content(&asker.memory, 0, BYTES as usize) == before, "memory was touched after its request had ended");
    assert_eq!(asker.run(&requests, PATIENCE), vec![Status::Ok; 50]);
    asker.initiator.round(Duration::ZERO, || true).expect("a working poller");
    assert!(asker.initiator.poll_done().is_none(), "each batch is done once");
}

#[test]
fn a_peer_that_went_away_is_unreachable_until_it_is_back() {
    let first = shard(anywhere());
    let address = first.mooncake().expect("it listens");
    let region = memory(BYTES as usize);
    let base = region.address();
    first.register(info(base, BYTES), Arc::clone(&region)).expect("registered");
    let mut asker = Asker::new(2, 16);
    let peer = asker.peer(address, 2);
    asker.fill(9, base);
    let all: Vec<Request> =
        (0..16).map(|i| Request::Write(target(peer, base + (i << 20)), asker.local(i << 20, 1 << 20))).collect();
    assert_eq!(asker.run(&all, PATIENCE), vec![Status::Ok; 16]);
    // In the middle of a transfer.
    let batch = asker.initiator.submit(&all, PATIENCE).expect("valid");
    asker.initiator.poll().expect("a working poller");
    drop(first);
    asker.initiator.wait(batch).expect("a working poller");
    let statuses: Vec<Status> = asker.initiator.results(batch).iter().map(|result| result.status).collect();
    asker.initiator.release(batch);
    assert!(statuses.iter().all(|status| matches!(status, Status::Ok | Status::Unreachable)), "{statuses:?}");
    assert_eq!(asker.run(&all[..2], PATIENCE), [Status::Unreachable; 2]);
    let second = shard(address);
    second.register(info(base, BYTES), Arc::clone(&region)).expect("registered");
    assert_eq!(asker.run(&all, PATIENCE), vec![Status::Ok; 16]);
    assert!(content(&region, 0, BYTES as usize) == bytes_at(9, base, BYTES as usize));
}

#[test]
fn cancelling_ends_everything_once() {
    let peer = Peer::new();
    let mut asker = Asker::new(2, 4);
    let id = asker.peer(peer.address, 2);
    peer.answering.store(false, Ordering::SeqCst);
    let requests: Vec<Request> =
        (0..200).map(|i| Request::Write(target(id, 0x1000 + i * 100), asker.local(i * 100, 100))).collect();
    let batch = asker.initiator.submit(&requests, PATIENCE).expect("valid");
    for _ in 0..10 {
        asker.initiator.poll().expect("a working poller");
    }
    asker.initiator.cancel(batch);
    asker.initiator.wait(batch).expect("a working poller");
    let statuses: Vec<Status> = asker.initiator.results(batch).iter().map(|result| result.status).collect();
    assert_eq!(statuses, vec![Status::Cancelled; 200]);
    asker.initiator.release(batch);
}

/// The descriptor is stale: the server was restarted with an older version. Like that version, it treats every request
/// that is not a write of version 1 as a read.
#[test]
fn a_version_1_server_with_a_stale_descriptor_is_detected() {
    let listener = TcpListener::bind(anywhere()).expect("a port");
    let address = listener.local_addr().expect("bound");
    let store = Arc::new(Mutex::new(vec![0x55; 1 << 20]));
    let held = Arc::clone(&store);
    std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        for stream in listener.incoming() {
            let (mut stream, held) = (stream.expect("a connection"), Arc::clone(&held));
            std::thread::spawn(move || {
                let mut head = [0; 24];
                while stream.read_exact(&mut head).is_ok() {
                    let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes")) as usize;
                    let (bytes, at) = (word(0), word(8));
                    let mut part = held.lock().expect("not poisoned")[at..at + bytes].to_vec();
                    let done = if head[16] == 1 {
                        let done = stream.read_exact(&mut part);
                        held.lock().expect("not poisoned")[at..at + bytes].copy_from_slice(&part);
                        done
                    } else {
                        stream.write_all(&part)
                    };
                    if done.is_err() {
                        return;
                    }
                }
            });
        }
    });
    let mut asker = Asker::new(2, 16);
    let peer = asker.peer(address, 2);
    asker.fill(4, 0);
    let writes: Vec<Request> =
        (0..100).map(|i| Request::Write(target(peer, i * 10_000), asker.local(i * 10_000, 10_000))).collect();
    assert_eq!(asker.run(&writes, PATIENCE), vec![Status::Ok; 100]);
    assert!(store.lock().expect("not poisoned")[..1_000_000] == bytes_at(4, 0, 1_000_000));
    let problem = asker.initiator.last_problem().expect("the problem is reported").to_owned();
    assert!(problem.contains("version 1"), "{problem}");
}

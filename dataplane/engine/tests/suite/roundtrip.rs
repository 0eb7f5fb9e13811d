//! Tests of a real shard and a real initiator: every operation over each path, with bytes checked by address-derived
//! patterns.

use crate::support;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use kvplane_client::{Config, Local, PeerAddress, PeerKind, PutBook, Request, SegmentTarget, TaskResult};
use kvplane_engine::{
    HostConfig, HugePages, Initiator, Listen, Pacing, RdmaDevices, Region, RegionOptions, Shard, ShardConfig,
    ShardHandle,
};
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_proto::map::{ClusterMap, Member, ShardAddress, SlotOwners};
use kvplane_proto::message::{ObjectName, PutItem, PutOptions, SegmentDescriptor};
use kvplane_proto::rng::mix64;
use kvplane_proto::{Digest, Epoch, Status, Version};
use kvplane_soft_verbs::{Loopback, SoftPort};
use kvplane_store::service::{Identity, SegmentInfo};
use kvplane_sys::verbs::Verbs;
use kvplane_transport::RdmaOptions;

const DEADLINE: Duration = Duration::from_secs(20);

struct Bed {
    shard: ShardHandle,
    initiator: Initiator,
    memory: Arc<Region>,
    buffer: u32,
    map: ClusterMap,
    _directory: Directory,
}

struct Directory(std::path::PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn plain(name: &str, bytes: usize) -> RegionOptions {
    RegionOptions { shared: true, huge: HugePages::Never, prefault: false, ..RegionOptions::new(name, bytes) }
}

/// Path by which the bed's initiator reaches its shard.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Tcp,
    Shm,
    /// Over software devices.
    Rdma,
}

/// Returns software devices, or this device of the machine when the tests are repeated over RDMA (docs/rig.md).
fn devices(name: &str) -> RdmaDevices {
    static FABRIC: LazyLock<Loopback> = LazyLock::new(|| Loopback::new(&[SoftPort::default()]));
    let options = RdmaOptions::default();
    let near = Arc::default();
    if std::env::var("KVPLANE_TEST_TRANSPORT").is_ok_and(|network| network == "rdma") {
        let verbs = Verbs::open().expect("libibverbs");
        return RdmaDevices { verbs, names: vec![name.to_owned()], preferred: 0, near, options };
    }
    RdmaDevices { verbs: FABRIC.verbs(), names: Vec::new(), preferred: 0, near, options }
}

fn bed(name: &str, way: Way, pool_bytes: usize) -> Bed {
    let shared = way == Way::Shm;
    let [host, asking] = ["rxe1", "rxe0"].map(|device| match way {
        Way::Tcp | Way::Shm => HostConfig::default(),
        Way::Rdma => HostConfig { rdma: Some(devices(device)), ..HostConfig::default() },
    });
    let path = std::env::temp_dir().join(format!("kvplane-engine-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("a directory for the test's sockets");
    let directory = Directory(path.clone());
    let shard = Shard::start(ShardConfig {
        pacing: Pacing::default(),
        listen: Listen {
            tcp: ([127, 0, 0, 1], 0).into(),
            shm: Some(path.join("shard.sock")),
            mooncake: None,
            handed: None,
        },
        pool: Some(plain("pool", pool_bytes)),
        host,
        ..support::config()
    })
    .expect("a shard on loopback");
    let map = ClusterMap { epoch: Epoch(1), replicas: 1, members: vec![member(&shard)], former: None };
    shard.follow_owners(1, Arc::new(SlotOwners::of(&map))).expect("room in the mailbox");
    let config = Config {
        cluster: "test".to_owned(),
        host: "here".to_owned(),
        shared,
        cma: shared,
        stream: way == Way::Tcp,
        ..Config::default()
    };
    let mut initiator = Initiator::new(config, &asking, Pacing::default()).expect("a ring");
    initiator.set_map(map.clone());
    let memory = Region::allocate(&plain("memory", 16 << 20)).expect("memory");
    let buffer = initiator.add_buffer(Arc::clone(&memory));
    Bed { shard, initiator, memory, buffer, map, _directory: directory }
}

fn member(shard: &ShardHandle) -> Member {
    Member {
        node: NodeId(1),
        incarnation: Incarnation(7),
        weight: 1,
        failure_domain: "a".to_owned(),
        host: "here".to_owned(),
        shards: vec![ShardAddress { tcp: shard.address(), shm: shard.shm().map(|path| path.display().to_string()) }],
    }
}

impl Bed {
    fn local(&self, offset: u64, bytes: u64) -> Local {
        Local { buffer: self.buffer, offset, bytes }
    }

    fn run(&mut self, requests: &[Request]) -> Vec<TaskResult> {
        let batch = self.initiator.submit(requests, DEADLINE).expect("a valid batch");
        self.initiator.wait(batch).expect("a working ring");
        let results = self.initiator.results(batch).to_vec();
        self.initiator.release(batch);
        results
    }

    fn statuses(&mut self, requests: &[Request]) -> Vec<Status> {
        self.run(requests).into_iter().map(|result| result.status).collect()
    }

    fn fill(&self, seed: u64, offset: usize, bytes: usize) {
        self.memory.fill_with(offset, bytes, &mut |at, part| {
            part.iter_mut().enumerate().for_each(|(i, byte)| *byte = pattern(seed, at + i as u64));
        });
    }

    fn check(&self, seed: u64, offset: usize, bytes: usize) {
        self.memory.read_with(offset, bytes, &mut |at, part| {
            for (i, &byte) in part.iter().enumerate() {
                let wanted = pattern(seed, at + i as u64);
                assert_eq!(byte, wanted, "byte {} of {bytes} of object {seed}", at + i as u64);
            }
        });
    }
}

fn pattern(seed: u64, at: u64) -> u8 {
    mix64(seed ^ (at / 8)).to_le_bytes()[(at % 8) as usize]
}

fn digest(number: u64) -> Digest {
    Digest::of(b"", format!("object-{number}").as_bytes())
}

fn every_operation(mut bed: Bed) {
    // Sizes around the limits of staging, streaming and chunks.
    let sizes = [1u64, 64, 4096, 16_320, 65_536, 262_144, 262_145, 1 << 20, 3 << 20];
    for (number, &bytes) in sizes.iter().enumerate() {
        let number = number as u64;
        bed.fill(number, 0, bytes as usize);
        let put = bed.run(&[Request::Put(digest(number), bed.local(0, bytes))]);
        assert_eq!((put[0].status, put[0].bytes), (Status::Ok, bytes), "put of {bytes} bytes");
        bed.fill(99, 8 << 20, bytes as usize + 64);
        let got = bed.run(&[Request::Get(digest(number), bed.local(8 << 20, bytes + 10))]);
        assert_eq!((got[0].status, got[0].bytes), (Status::Ok, bytes), "get of {bytes} bytes");
        assert_eq!(got[0].version, put[0].version);
        bed.check(number, 8 << 20, bytes as usize);
        // No byte past the object's end was touched.
        let mut after = [0; 32];
        bed.memory.copy_out((8 << 20) + bytes as usize, &mut after);
        assert!(after.iter().enumerate().all(|(i, &byte)| byte == pattern(99, bytes + i as u64)));
    }
    let (there, missing) = (digest(3), digest(1000));
    let again = bed.local(0, 16_320);
    assert_eq!(bed.statuses(&[Request::Put(there, again)]), [Status::Exists]);
    assert_eq!(
        bed.statuses(&[Request::Exists(there), Request::Exists(missing), Request::Size(missing)]),
        [Status::Ok, Status::NotFound, Status::NotFound]
    );
    assert_eq!(bed.run(&[Request::Size(there)])[0].bytes, 16_320);
    assert_eq!(bed.statuses(&[Request::Get(missing, again)]), [Status::NotFound]);
    let short = bed.local(0, 100);
    let small = bed.run(&[Request::Get(there, short)]);
    assert_eq!((small[0].status, small[0].bytes), (Status::BufferTooSmall, 16_320));
    assert_eq!(bed.statuses(&[Request::Remove(there), Request::Remove(missing)]), [Status::Ok, Status::NotFound]);
    assert_eq!(bed.statuses(&[Request::Exists(there)]), [Status::NotFound]);
    let huge = bed.local(0, 16 << 20);
    assert_eq!(bed.statuses(&[Request::Put(digest(55), huge)]), [Status::TooLarge]);
    let snapshot = bed.shard.snapshot().expect("a living shard");
    let store = snapshot.store.expect("a shard with a store");
    assert_eq!((store.pinned_bytes, store.reserved_bytes), (0, 0));
}

#[test]
fn every_operation_over_tcp() {
    every_operation(bed("ops-tcp", Way::Tcp, 32 << 20));
}

#[test]
fn every_operation_over_rdma() {
    every_operation(bed("ops-rdma", Way::Rdma, 32 << 20));
}

#[test]
fn every_operation_over_shm() {
    every_operation(bed("ops-shm", Way::Shm, 32 << 20));
}

fn many_small(mut bed: Bed) {
    const COUNT: u64 = 5000;
    for number in 0..COUNT {
        bed.fill(number, (number * 1024) as usize, 1024);
    }
    let puts: Vec<Request> = (0..COUNT).map(|n| Request::Put(digest(n), bed.local(n * 1024, 1024))).collect();
    assert!(bed.statuses(&puts).iter().all(|&status| status == Status::Ok));
    let exists: Vec<Request> = (0..COUNT * 2).map(|n| Request::Exists(digest(n))).collect();
    let found = bed.statuses(&exists);
    assert!(found.iter().enumerate().all(|(n, &status)| (status == Status::Ok) == (n < COUNT as usize)));
    bed.fill(77, 0, (COUNT * 1024) as usize);
    let gets: Vec<Request> = (0..COUNT).rev().map(|n| Request::Get(digest(n), bed.local(n * 1024, 1024))).collect();
    assert!(bed.statuses(&gets).iter().all(|&status| status == Status::Ok));
    for number in 0..COUNT {
        bed.check(number, (number * 1024) as usize, 1024);
    }
}

#[test]
fn large_batches_over_tcp() {
    many_small(bed("many-tcp", Way::Tcp, 32 << 20));
}

#[test]
fn large_batches_over_rdma() {
    many_small(bed("many-rdma", Way::Rdma, 32 << 20));
}

#[test]
fn large_batches_over_shm() {
    many_small(bed("many-shm", Way::Shm, 32 << 20));
}

/// Initiator of a thread, over shared memory.
struct Worker {
    initiator: Initiator,
    memory: Arc<Region>,
    buffer: u32,
}

impl Worker {
    fn new(map: &ClusterMap, client: u64) -> Self {
        let (cluster, host) = ("test".to_owned(), "here".to_owned());
        let config = Config { cluster, host, client, shared: true, stream: false, ..Config::default() };
        let mut initiator = Initiator::new(config, &HostConfig::default(), Pacing::Park).expect("a ring");
        initiator.set_map(map.clone());
        let memory = Region::allocate(&plain("worker", 1 << 20)).expect("memory");
        let buffer = initiator.add_buffer(Arc::clone(&memory));
        Self { initiator, memory, buffer }
    }

    /// Replaces an object by name.
    fn put(&mut self, key: &str, value: &[u8]) -> Status {
        self.memory.copy_in(0, value);
        let name = ObjectName { tenant: b"", key: key.as_bytes() };
        let options = PutOptions { replace: true, ..PutOptions::default() };
        let mut book = PutBook::new();
        let bytes = value.len() as u64;
        let number = book.push(PutItem::named(&name, bytes, &options), &name);
        let local = Local { buffer: self.buffer, offset: 0, bytes };
        let batch = self.initiator.submit_puts(&[Request::PutAs(name.digest(), local, number)], &book, DEADLINE);
        self.status(batch.expect("a valid batch"))
    }

    fn get(&mut self, key: &str, bytes: usize) -> (Status, Vec<u8>) {
        let name = ObjectName { tenant: b"", key: key.as_bytes() };
        let local = Local { buffer: self.buffer, offset: 0, bytes: 1 << 20 };
        let batch = self.initiator.submit(&[Request::Get(name.digest(), local)], DEADLINE).expect("a valid batch");
        let status = self.status(batch);
        let mut found = vec![0; bytes];
        self.memory.copy_out(0, &mut found);
        (status, found)
    }

    fn status(&mut self, batch: kvplane_proto::BatchId) -> Status {
        self.initiator.wait(batch).expect("a working ring");
        let status = self.initiator.results(batch)[0].status;
        self.initiator.release(batch);
        status
    }
}

/// Puts that replace the same few keys free memory all the time, and puts of other objects take it at once, several of
/// them in one round of the shard. A tail that was written late, into memory that its put no longer held, damaged
/// those.
#[test]
fn objects_keep_their_bytes_while_others_are_replaced_over_shm() {
    const ROUNDS: u64 = 4000;
    let bed = bed("replaced-shm", Way::Shm, 64 << 20);
    let map = &bed.map;
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            scope.spawn(move || {
                let mut worker = Worker::new(map, 100 + thread);
                for round in 0..ROUNDS {
                    let random = mix64(thread << 32 | round);
                    let bytes = 512 + (random >> 8) as usize % 3585;
                    let status = worker.put(&format!("shared-{}", random % 6), &vec![random as u8; bytes]);
                    assert!(matches!(status, Status::Ok | Status::Stale), "{status}");
                }
            });
        }
        for thread in 0..2u64 {
            scope.spawn(move || {
                let mut worker = Worker::new(map, 200 + thread);
                let mut newest = std::collections::BTreeMap::new();
                for round in 0..ROUNDS {
                    let random = mix64(1 << 60 | thread << 32 | round);
                    let key = format!("own-{thread}-{}", random % 40);
                    if let (Some(&seed), false) = (newest.get(&key), random >> 32 & 1 == 0) {
                        let (status, found) = worker.get(&key, 5000);
                        assert_eq!(status, Status::Ok, "{key} of round {seed} in round {round}");
                        let wrong = found.iter().enumerate().find(|&(at, &byte)| byte != pattern(seed, at as u64));
                        assert_eq!(wrong, None, "{key} of round {seed} in round {round}");
                    } else {
                        let value: Vec<u8> = (0..5000).map(|at| pattern(round, at)).collect();
                        assert_eq!(worker.put(&key, &value), Status::Ok);
                        newest.insert(key, round);
                    }
                }
            });
        }
    });
}

fn segments(mut bed: Bed, shareable: bool) {
    let target = Region::allocate(&plain("target", 8 << 20)).expect("memory");
    let info =
        SegmentInfo { address: target.address(), bytes: 8 << 20, writable: true, shareable, remote_accessible: true };
    let segment = bed.shard.register(info, Arc::clone(&target)).expect("a free range");
    let address = PeerAddress {
        kind: PeerKind::Native,
        node: NodeId(0),
        incarnation: Incarnation(0),
        shard: ShardId(0),
        tcp: bed.shard.address(),
        shm: shareable.then(|| bed.shard.shm().expect("a socket").display().to_string()),
    };
    let peer = bed.initiator.open_peer(address);
    let batch = bed.initiator.submit(&[Request::OpenSegment(peer)], DEADLINE).expect("a valid batch");
    bed.initiator.wait(batch).expect("a working ring");
    let description = bed.initiator.take_description(batch).expect("a description");
    bed.initiator.release(batch);
    let descriptor = SegmentDescriptor::decode(&description).expect("a whole description");
    assert_eq!((descriptor.name.as_str(), descriptor.regions.len()), ("segment", 1));
    assert_eq!((descriptor.regions[0].segment, descriptor.regions[0].bytes), (segment, 8 << 20));
    let at = |offset| SegmentTarget { peer, segment, offset, shareable, place: kvplane_client::Place::UNKNOWN };
    bed.fill(5, 0, 5_000_001);
    let whole = bed.local(0, 5_000_001);
    assert_eq!(bed.statuses(&[Request::Write(at(4097), whole)]), [Status::Ok]);
    let back = bed.local(8 << 20, 5_000_001);
    let read = bed.run(&[Request::Read(at(4097), back)]);
    assert_eq!((read[0].status, read[0].bytes), (Status::Ok, 5_000_001));
    bed.check(5, 8 << 20, 5_000_001);
    let (over, little) = (bed.local(0, 4096), bed.local(0, 10));
    assert_eq!(bed.statuses(&[Request::Write(at((8 << 20) - 100), over)]), [Status::OutOfRange]);
    assert_eq!(bed.statuses(&[Request::Read(at(1 << 40), little)]), [Status::OutOfRange]);
    bed.shard.unregister(segment).expect("a quiet segment");
    if !shareable {
        assert_eq!(bed.statuses(&[Request::Read(at(0), little)]), [Status::Stale]);
    }
}

#[test]
fn segments_over_tcp() {
    segments(bed("seg-tcp", Way::Tcp, 1 << 20), false);
}

#[test]
fn segments_over_rdma() {
    segments(bed("seg-rdma", Way::Rdma, 1 << 20), false);
}

#[test]
fn segments_over_shm() {
    segments(bed("seg-shm", Way::Shm, 1 << 20), true);
}

#[test]
fn a_port_in_use_is_named() {
    let bed = bed("port", Way::Tcp, 1 << 20);
    let identity = Identity {
        cluster: "test".to_owned(),
        node: NodeId(2),
        incarnation: Incarnation(1),
        shard: ShardId(0),
        segment_name: String::new(),
    };
    let config = ShardConfig {
        identity,
        core: None,
        pacing: Pacing::Park,
        listen: Listen { tcp: bed.shard.address(), shm: None, mooncake: None, handed: None },
        pool: None,
        store: None,
        first_version: Version(1),
        host: HostConfig::default(),
    };
    let error = Shard::start(config).err().expect("the port is taken").to_string();
    assert!(error.contains(&bed.shard.address().to_string()), "{error}");
}

/// A shard answers with the location of an object, and ends before the object is copied: that must not become the
/// result of the get. The client sees both at once only if they coincide; many gets are tried.
#[test]
fn a_get_from_a_shard_that_ends_over_shared_memory_is_unreachable() {
    for number in 0..12 {
        let mut bed = bed(&format!("ends-{number}"), Way::Shm, 1 << 20);
        let put = [Request::Put(digest(1), bed.local(0, 4096))];
        assert_eq!(bed.statuses(&put), [Status::Ok]);
        let gets: Vec<Request> = (0..64).map(|at| Request::Get(digest(1), bed.local(at * 8192, 4096))).collect();
        let Bed { shard, mut initiator, .. } = bed;
        let stopper = std::thread::spawn(move || {
            while shard.snapshot().expect("a living shard").service.get_bytes < 4096 * 200 {}
            shard.stop();
        });
        while !stopper.is_finished() {
            let batch = initiator.submit(&gets, Duration::from_millis(200)).expect("a valid batch");
            initiator.wait(batch).expect("a working ring");
            for result in initiator.results(batch) {
                let expected = matches!(result.status, Status::Ok | Status::Unreachable | Status::DeadlineExceeded);
                assert!(expected, "{:?}", result.status);
            }
            initiator.release(batch);
        }
        stopper.join().expect("no panic");
    }
}

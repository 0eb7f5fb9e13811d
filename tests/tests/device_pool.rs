//! Device pool of real nodes, over the driver for tests: its memory crashes the process that touches it, and its copies
//! are late. Every byte is compared.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvplane::device::DeviceId;
use kvplane::{Client, DevicePool, Node, NodeConfig, Put, ShardSnapshot};
use kvplane_fake_devices::Control;

mod bed;
#[path = "bed/device.rs"]
mod device;

use bed::{Bed, value};
use device::{FIRST, assert_released};

const MIB: u64 = 1 << 20;
/// Objects that are read often, and their lengths.
const HOT: u32 = 24;
const POOL_BYTES: u64 = 16 * MIB;

fn key(number: u32) -> String {
    format!("object-{number}")
}

fn bytes(number: u32) -> usize {
    4096 + (number as usize * 7919) % 300_000
}

/// Control plane, a node with a device pool, and the driver.
struct Rig {
    fake: Control,
    bed: Bed,
}

impl Rig {
    fn start(device_bytes: u64) -> Self {
        let fake = kvplane_fake_cuda::load_cuda().expect("the driver for tests");
        fake.set_copies(100_000, 0, 7);
        let mut bed = Bed::start(0, POOL_BYTES);
        let config = config(&bed, device_bytes);
        bed.nodes.push(Node::start(&config).expect("a node with a device pool"));
        Self { fake, bed }
    }

    fn client(&self, shared_memory: bool) -> Client {
        Client::connect(&self.bed.client_config(shared_memory)).expect("a client")
    }

    fn snapshot(&self) -> ShardSnapshot {
        let mut shards = self.bed.nodes[0].snapshots().expect("the shard answers");
        shards.pop().expect("one shard")
    }

    /// Returns the objects in the device pool, once no move is in flight.
    fn on_device(&self) -> u64 {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let stats = self.snapshot().store.expect("a store");
            if stats.reservations == 0 {
                return stats.device.objects;
            }
            assert!(Instant::now() < until, "moves do not end: {stats:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Reads objects until they are in the device pool.
    fn promote(&self, client: &mut Client, objects: &(impl Iterator<Item = u32> + Clone)) {
        let until = Instant::now() + Duration::from_secs(20);
        let count = objects.clone().count() as u64;
        while self.on_device() < count {
            assert!(Instant::now() < until, "{} of {count} are promoted", self.on_device());
            objects.clone().for_each(|number| verify(client, number, number));
        }
    }

    /// Stops the node; checks that nothing of the driver is in use, and that it was never misused.
    fn end(self) {
        let Self { fake, bed } = self;
        drop(bed);
        assert_released(fake);
    }
}

fn config(bed: &Bed, device_bytes: u64) -> NodeConfig {
    let pool = DevicePool { device: FIRST, bytes: device_bytes };
    NodeConfig { device_pools: vec![pool], ..bed.node_config(1, POOL_BYTES) }
}

fn put(client: &mut Client, number: u32) {
    let put = client.put(key(number).as_bytes(), &value(number, bytes(number))).expect("a put");
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
}

/// Reads an object, which has the bytes of this seed.
fn verify(client: &mut Client, number: u32, seed: u32) {
    let got = client.get(key(number).as_bytes()).expect("a get").expect("the object is there");
    assert!(got == value(seed, bytes(number)), "object {number}");
}

#[test]
fn objects_that_are_read_often_move_to_the_device_and_every_byte_survives() {
    let rig = Rig::start(8 * MIB);
    let (mut client, mut mapper) = (rig.client(false), rig.client(true));
    (0..HOT).for_each(|number| put(&mut client, number));
    rig.promote(&mut client, &(0..HOT));

    // Others fill memory several times over, and evict each other alone.
    (100..600).for_each(|number| put(&mut client, number));
    let before = rig.snapshot().service.device_gets;
    (0..HOT).for_each(|number| verify(&mut client, number, number));
    assert!(rig.snapshot().service.device_gets - before >= HOT.into());
    assert!(rig.snapshot().store.expect("a store").evictions > 0);

    // Parts of an object, a list with names, a replacement, and a removal.
    let (mut names, mut cursor) = (BTreeSet::new(), None);
    loop {
        let page = client.keys().list(cursor).expect("a list");
        names.extend(page.keys.into_iter().map(|one| one.key));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    assert!((0..HOT).all(|number| names.contains(key(number).as_bytes())), "{} names", names.len());
    client.upsert(key(1).as_bytes(), &value(77, bytes(1))).expect("a replacement");
    verify(&mut client, 1, 77);
    assert!(client.remove(key(2).as_bytes()).expect("a removal"));
    assert_eq!(client.get(key(2).as_bytes()).expect("a get"), None);
    assert_eq!(rig.on_device(), u64::from(HOT) - 2);

    // A client that maps memory gets objects back from the device.
    (3..HOT).for_each(|number| verify(&mut mapper, number, number));
    assert_eq!(rig.on_device(), 1);
    let text = rig.bed.nodes[0].metrics_text().expect("metrics");
    for metric in ["kvplane_device_pool_promotions_total", "kvplane_device_pool_recalls_total"] {
        let line = text.lines().find(|line| line.starts_with(metric)).expect("a metric");
        assert!(!line.ends_with(" 0"), "{line}");
    }
    assert_eq!(rig.snapshot().service.corrupt, 0);
    drop((client, mapper));
    rig.end();
}

#[test]
fn more_than_the_device_pool_holds_moves_to_and_fro() {
    let rig = Rig::start(MIB);
    let mut client = rig.client(false);
    (0..HOT).for_each(|number| put(&mut client, number));
    for round in 0..10 {
        (0..HOT).for_each(|at| verify(&mut client, (at * 7 + round) % HOT, (at * 7 + round) % HOT));
    }
    let stats = rig.snapshot().store.expect("a store");
    assert!(stats.device.promotions > 0 && stats.device.demotions > 0, "{stats:?}");
    assert_eq!((stats.objects, stats.evictions), (HOT.into(), 0), "memory has room for all of them");
    drop(client);
    rig.end();
}

#[test]
fn objects_that_the_device_damages_are_misses_when_they_come_back() {
    let rig = Rig::start(8 * MIB);
    let (mut client, mut mapper) = (rig.client(false), rig.client(true));
    (0..HOT).for_each(|number| put(&mut client, number));
    rig.promote(&mut client, &(0..HOT));
    rig.fake.damage(0);
    for number in 0..HOT {
        assert_eq!(mapper.get(key(number).as_bytes()).expect("a get"), None, "object {number}");
    }
    let snapshot = rig.snapshot();
    assert_eq!((snapshot.service.corrupt, snapshot.store.expect("a store").objects), (HOT.into(), 0));
    drop((client, mapper));
    rig.end();
}

#[test]
fn a_device_that_is_lost_costs_its_objects_and_the_node_goes_on() {
    let rig = Rig::start(8 * MIB);
    let mut client = rig.client(false);
    (0..HOT).for_each(|number| put(&mut client, number));
    rig.promote(&mut client, &(0..HOT / 2));
    rig.fake.lose(0, 700);
    for number in 0..HOT {
        let got = client.get(key(number).as_bytes()).expect("a get");
        assert!(got.is_none_or(|got| got == value(number, bytes(number))), "never wrong bytes: {number}");
    }
    let stats = rig.snapshot().store.expect("a store");
    assert_eq!((stats.device.pool_bytes, stats.objects), (0, u64::from(HOT / 2)));
    assert!(stats.device.lost >= u64::from(HOT / 2), "{stats:?}");
    // They are put anew, and stay in memory however often they are read.
    for number in 0..HOT / 2 {
        put(&mut client, number);
        (0..3).for_each(|_| verify(&mut client, number, number));
    }
    assert_eq!(rig.on_device(), 0);
    rig.fake.lose(0, 0);
    drop(client);
    let Rig { bed, .. } = rig;
    drop(bed);
}

#[test]
fn a_device_pool_that_cannot_be_is_an_error_at_the_start() {
    let fake = kvplane_fake_cuda::load_cuda().expect("the driver for tests");
    let bed = Bed::start(0, POOL_BYTES);
    let refusal = |device: &str, bytes: u64| {
        let pool = DevicePool { device: DeviceId::parse(device).expect("a device"), bytes };
        let config = NodeConfig { device_pools: vec![pool], ..bed.node_config(1, POOL_BYTES) };
        let Err(error) = Node::start(&config) else { panic!("{device} has {bytes} bytes") };
        error.to_string()
    };
    let unknown = refusal("cuda:99", 8 * MIB);
    assert!(unknown.contains("8388608 bytes on cuda:99") && unknown.contains("there is no device"), "{unknown}");
    let much = refusal("cuda:0", 1 << 39);
    assert!(much.contains("on cuda:0") && much.contains("out of memory"), "{much}");
    let driver = refusal("hip:99", 8 * MIB);
    assert!(driver.contains("on hip:99: ") && driver.contains("device"), "{driver}");
    drop(bed);
    let counters = fake.counters();
    assert_eq!((counters.contexts, counters.allocations, counters.pinned, counters.streams), (0, 0, 0, 0));
}

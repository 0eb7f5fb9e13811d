//! Gets into memory of a device over shared memory: its copy engine reads the node's pool, which is pinned for it. Over
//! the driver for tests, whose memory crashes the process that touches it, and whose copies are late.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use kvplane::device::{DeviceId, Family};
use kvplane::{
    BatchOutcome, Client, ClientConfig, ObjectRange, Open, Put, Region, RegionOptions, ShardSnapshot, Slice, Status,
};
use kvplane_fake_devices::{Control, is_missing};
use kvplane_proto::rng::Rng;
use kvplane_tests::world::number;

mod bed;
#[path = "bed/device.rs"]
mod device;

use bed::Bed;
use device::{DeviceClient, FIRST, assert_released};

const BYTES: u64 = 48 << 20;

/// Lengths around those of a cache line, a page, a piece, a stage's region and a window of a pool.
const LENGTHS: [u64; 9] = [1, 63, 4096, 4097, 300_000, (1 << 20) + 1, 5 << 20, (16 << 20) + 5, 20 << 20];

fn fake() -> Control {
    kvplane_fake_cuda::load_cuda().expect("CUDA's driver")
}

/// Returns the bytes of an object: those of two numbers have nothing in common.
fn value(number: u64, bytes: usize) -> Vec<u8> {
    let mut state = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = std::iter::repeat_with(|| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state ^ (state >> 29)).to_le_bytes()
    });
    words.flatten().take(bytes).collect()
}

/// Puts an object from memory of the host.
fn put(rig: &mut DeviceClient, key: &str, bytes: &[u8]) {
    let put = rig.client.put(key.as_bytes(), bytes).expect("a put");
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
}

/// Returns the bytes that were staged to the device, and those that its copy engine read from pools.
fn moved(rig: &mut DeviceClient) -> (u64, u64) {
    let metrics = rig.client.metrics();
    (metrics.staging.values().map(|counts| counts.to_device_bytes).sum(), metrics.pool_reads.bytes)
}

fn config(bed: &Bed) -> ClientConfig {
    ClientConfig { stripe_bytes: 64 << 20, ..bed.client_config(true) }
}

fn snapshot(bed: &Bed) -> ShardSnapshot {
    bed.nodes[0].snapshots().expect("shards answer").remove(0)
}

#[test]
fn gets_are_read_from_the_pool_and_nothing_is_staged() {
    gets(FIRST);
}

#[test]
fn gets_into_an_ascend_device_are_read_from_the_pool() {
    if is_missing(kvplane_fake_npu::load_npu) {
        return;
    }
    gets(DeviceId { family: Family::Npu, ordinal: 1 });
}

fn gets(id: DeviceId) {
    let bed = Bed::start(2, 128 << 20);
    let mut rig = DeviceClient::on(id, BYTES, &config(&bed));
    let mut all_bytes = 0;
    for (at, bytes) in LENGTHS.into_iter().enumerate() {
        let (key, whole) = (format!("one-{at}"), value(at as u64, bytes as usize));
        put(&mut rig, &key, &whole);
        rig.write(70, &vec![9; bytes as usize + 107]);
        // The memory may be longer than the object; what is beside it stays as it is.
        let got = rig.client.get_into(key.as_bytes(), rig.memory.slice(77, bytes + 50)).expect("a get");
        assert_eq!(got.expect("the object").bytes, bytes);
        assert!(rig.read(77, bytes) == whole, "{bytes}");
        assert_eq!((rig.read(70, 7), rig.read(77 + bytes, 100)), (vec![9; 7], vec![9; 100]));
        all_bytes += bytes;
        assert_eq!(moved(&mut rig), (0, all_bytes), "{bytes}");
    }
    assert_eq!(rig.client.get_into(b"nobody", rig.memory.slice(0, 100)).expect("a get"), None);
    let small = rig.client.get_into(b"one-3", rig.memory.slice(0, 4096));
    assert_eq!(small.expect_err("too small").status(), Some(Status::BufferTooSmall));

    // Ranges of one object, which have no checksum of their own.
    let whole = value(6, LENGTHS[6] as usize);
    let range = |at: u64| ObjectRange {
        key: b"one-6",
        offset: at * 50_000 + 11,
        into: rig.memory.slice(at * 40_000, 30_000 + at),
    };
    let ranges: Vec<ObjectRange<'_>> = (0..100).map(range).collect();
    let read = rig.client.ranges().get(&ranges).expect("a batch");
    assert!(read.iter().all(|one| matches!(one, Ok(Some(_)))), "{read:?}");
    for at in 0..100_u64 {
        let from = (at * 50_000 + 11) as usize;
        assert!(rig.read(at * 40_000, 30_000 + at) == whole[from..from + 30_000 + at as usize], "range {at}");
        all_bytes += 30_000 + at;
    }
    assert_eq!(moved(&mut rig), (0, all_bytes));

    // Batches, and one object into pieces of both kinds of memory.
    let bytes = |at: u64| 1 + (at * 7919) % 90_000;
    for at in 0..300 {
        put(&mut rig, &format!("block-{at}"), &value(at, bytes(at) as usize));
        all_bytes += bytes(at);
    }
    let keys: Vec<String> = (0..300).map(|at| format!("block-{at}")).collect();
    let slices = (0..300).map(|at| rig.memory.slice(at * 100_000, bytes(at)));
    let items: Vec<(&String, Slice)> = keys.iter().zip(slices).collect();
    let got = rig.client.batch_get_into(&items).expect("a batch");
    assert!(got.iter().all(|one| matches!(one, Ok(Some(_)))), "{got:?}");
    (0..300).for_each(|at| assert!(rig.read(at * 100_000, bytes(at)) == value(at, bytes(at) as usize), "block {at}"));
    assert_eq!(moved(&mut rig), (0, all_bytes));
    let host = rig.client.register(Region::allocate(&RegionOptions::new("memory", 1 << 20)).expect("memory"));
    let length = |at: u64| if at == 20 { 1000 } else { 400_000 + at };
    let piece = |at| if at == 20 { host.slice(0, 1000) } else { rig.memory.slice(at * 500_000, length(at)) };
    let pieces: Vec<Slice> = (0..50).map(piece).collect();
    let whole = value(77, (0..50).map(length).sum::<u64>() as usize);
    put(&mut rig, "pieces", &whole);
    rig.client.scatter_gather().get_exact(b"pieces", &pieces).expect("a get").expect("the object");
    let mut rest = &whole[..];
    for at in 0..50 {
        let (wanted, after) = rest.split_at(length(at) as usize);
        rest = after;
        let mut found = vec![0; wanted.len()];
        if at == 20 {
            host.region().copy_out(0, &mut found);
        } else {
            found = rig.read(at * 500_000, length(at));
        }
        assert!(found == wanted, "piece {at}");
    }
    assert_eq!(moved(&mut rig).0, 0);

    // The windows go with the last buffer of the driver.
    let metrics = rig.client.metrics();
    let (pinned, reads) = (rig.fake.counters().pinned, metrics.pool_reads);
    assert!(pinned > 2 || rig.fake.is_the_machines());
    assert!(reads.pinned_bytes > 0 && reads.pinned_bytes <= 256 << 20, "{reads:?}");
    assert_eq!((reads.copied_reads, reads.refused), (0, 0));
    let DeviceClient { fake, mut client, memory } = rig;
    client.unregister_device(memory);
    assert_eq!(fake.counters().pinned, 0);
    drop((client, host));
    assert_released(fake);
}

#[test]
fn a_refused_pinning_is_counted_once_and_the_gets_are_staged() {
    if fake().skips("memory that is not pinned") {
        return;
    }
    let bed = Bed::start(1, 128 << 20);
    let mut rig = DeviceClient::on(FIRST, BYTES, &config(&bed));
    let whole = value(1, 2 << 20);
    put(&mut rig, "key", &whole);
    // Out of memory.
    rig.fake.fail("cuMemHostRegister_v2", 0, 2);
    for at in 0..3 {
        rig.client.get_into(b"key", rig.memory.slice(at << 22, 2 << 20)).expect("a get").expect("the object");
        assert!(rig.read(at << 22, 2 << 20) == whole);
    }
    let reads = rig.client.metrics().pool_reads;
    assert_eq!((reads.refused, reads.copied_reads, reads.bytes, reads.pinned_bytes), (1, 3, 0, 0));
    assert_eq!(moved(&mut rig), (6 << 20, 0));
    rig.end();
}

/// Changes a byte of an object in a pool, which is memory of this process, as its node's.
fn corrupt(object: &[u8]) {
    let mut maps = String::new();
    File::open("/proc/self/maps").and_then(|mut file| file.read_to_string(&mut maps)).expect("a memory map");
    let memory = OpenOptions::new().read(true).write(true).open("/proc/self/mem").expect("memory");
    let pool = maps.lines().find(|line| line.contains("kvplane-pool")).expect("a pool");
    let (from, to) = pool.split_once(' ').and_then(|(range, _)| range.split_once('-')).expect("a range");
    let [from, to] = [from, to].map(|number| u64::from_str_radix(number, 16).expect("an address"));
    let mut bytes = vec![0; (to - from) as usize];
    memory.read_exact_at(&mut bytes, from).expect("a pool in memory");
    let at = bytes.windows(object.len().min(64)).position(|found| *found == object[..found.len()]);
    let at = at.expect("the object") + object.len() / 2;
    memory.write_all_at(&[!bytes[at]], from + at as u64).expect("a pool that may be written");
}

#[test]
fn an_object_whose_bytes_were_changed_in_the_pool_is_a_miss_as_no_other_node_has_it() {
    let bed = Bed::start(1, 64 << 20);
    let mut rig = DeviceClient::on(FIRST, BYTES, &config(&bed));
    let whole = value(3, 1 << 20);
    put(&mut rig, "key", &whole);
    rig.client.get_into(b"key", rig.memory.slice(0, 1 << 20)).expect("a get").expect("the object");
    corrupt(&whole);
    // The client tells the shard of the damage, which finds it and has nowhere to repair it from.
    assert_eq!(rig.client.get_into(b"key", rig.memory.slice(0, 1 << 20)).expect("an answer"), None);
    assert_eq!(rig.client.get(b"key").expect("an answer"), None);
    put(&mut rig, "key", &whole);
    assert_eq!(rig.client.get(b"key").expect("a get"), Some(whole));
    rig.end();
}

/// Starts gets of so many objects, and returns how many got their bytes; whatever becomes of the others, no byte of
/// those is wrong.
fn get_all(rig: &mut DeviceClient, count: u64, bytes: u64, what: &str) -> u64 {
    rig.write(0, &vec![0; (count * bytes) as usize]);
    let start = |at: u64| {
        let item = (format!("key-{at}"), rig.memory.slice(at * bytes, bytes));
        rig.client.batches().start_gets(&[item]).expect("a batch")
    };
    let opened: Vec<Open> = (0..count).map(start).collect();
    let (mut good, mut ended) = (0, 0);
    while let Some((open, outcome)) = rig.client.batches().next_finished().expect("a kernel that works") {
        let BatchOutcome::Gets(got) = outcome else { panic!("a batch of gets") };
        let at = opened.iter().position(|one| *one == open).expect("a batch of the test") as u64;
        ended += 1;
        if matches!(got[..], [Ok(Some(_))]) {
            good += 1;
            assert!(rig.read(at * bytes, bytes) == value(at, bytes as usize), "{what}: object {at}");
        }
    }
    assert_eq!(ended, count, "{what}");
    good
}

#[test]
fn a_node_that_ends_under_the_copies_harms_nothing() {
    if fake().skips("slow copies") {
        return;
    }
    let mut bed = Bed::start(1, 128 << 20);
    let config = ClientConfig { deadline: Duration::from_millis(500), ..config(&bed) };
    let mut rig = DeviceClient::on(FIRST, BYTES, &config);
    (0..20).for_each(|at| put(&mut rig, &format!("key-{at}"), &value(at, 1 << 20)));
    assert_eq!(get_all(&mut rig, 20, 1 << 20, "before"), 20);
    rig.fake.set_copies(50_000_000, 0, 7);
    let node = bed.nodes.remove(0);
    let ended = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(60));
        drop(node);
    });
    let good = get_all(&mut rig, 20, 1 << 20, "while the node ends");
    println!("{good} of 20 gets before the end");
    ended.join().expect("a node that ends");
    // The pool is unmapped, and its windows with it, once nothing is copied from it any more.
    assert_eq!(get_all(&mut rig, 1, 1 << 20, "after"), 0);
    assert_eq!(rig.client.metrics().pool_reads.pinned_bytes, 0);
    rig.end();
}

#[test]
fn gets_that_end_late_leave_their_pins_and_their_memory_in_order() {
    if fake().skips("slow copies") {
        return;
    }
    let bed = Bed::start(1, 64 << 20);
    let mut rig = DeviceClient::on(FIRST, BYTES, &config(&bed));
    (0..20).for_each(|at| put(&mut rig, &format!("key-{at}"), &value(at, 1 << 20)));
    let hasty = ClientConfig { deadline: Duration::from_millis(30), ..config(&bed) };
    let mut late = DeviceClient::on(FIRST, BYTES, &hasty);
    late.fake.set_copies(100_000_000, 0, 7);
    for round in 0..3 {
        let good = get_all(&mut late, 20, 1 << 20, "late");
        assert!(good < 20, "round {round}: {good} gets in time");
    }
    late.fake.set_copies(100_000, 0, 5);
    assert_eq!(get_all(&mut rig, 20, 1 << 20, "another client"), 20);
    // Nothing is pinned for ever: all of the pool can be taken by others.
    (20..200).for_each(|at| put(&mut rig, &format!("key-{at}"), &value(at, 1 << 20)));
    assert_eq!(snapshot(&bed).service.corrupt, 0);
    let DeviceClient { fake, client, memory } = late;
    drop((client, memory));
    drop(rig.client);
    drop(rig.memory);
    assert_released(fake);
}

#[test]
fn a_lost_device_fails_its_gets_and_not_those_of_others() {
    if fake().skips("a device that is lost") {
        return;
    }
    let bed = Bed::start(1, 64 << 20);
    let mut rig = DeviceClient::on(FIRST, BYTES, &config(&bed));
    (0..20).for_each(|at| put(&mut rig, &format!("key-{at}"), &value(at, 1 << 20)));
    rig.fake.set_copies(20_000_000, 0, 7);
    let fake = rig.fake;
    let losing = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        fake.lose(0, 700);
    });
    for at in 0..20 {
        let item = (format!("key-{at}"), rig.memory.slice(at << 20, 1 << 20));
        rig.client.batches().start_gets(&[item]).expect("a batch");
    }
    let mut failed = 0;
    while let Some((_, outcome)) = rig.client.batches().next_finished().expect("a kernel that works") {
        let BatchOutcome::Gets(got) = outcome else { panic!("a batch of gets") };
        failed += got.iter().filter(|one| one.is_err()).count();
    }
    losing.join().expect("a thread that ends");
    assert!(failed > 0, "some gets were in flight");
    assert!(rig.client.get(b"key-3").expect("a get").expect("the object") == value(3, 1 << 20), "memory of the host");
    drop((rig.client, rig.memory));
    rig.fake.lose(0, 0);
    let mut other = Client::connect(&config(&bed)).expect("a client");
    for at in 0..20 {
        let got = other.get(format!("key-{at}").as_bytes()).expect("a get");
        assert!(got.expect("the object") == value(at, 1 << 20));
    }
}

/// Objects are replaced and evicted all the time while they are read, with copies that take random times: every get
/// that succeeds has the bytes of one put, whole.
#[test]
fn seeds() {
    const KEYS: u64 = 60;
    const VERSIONS: u64 = 200;
    let (rounds, first) = (number("KVPLANE_DEVICE_SEEDS", 20) * 5, number("KVPLANE_SEED", 0));
    let bed = Bed::start(1, 16 << 20);
    let settings = config(&bed);
    let mut rig = DeviceClient::on(FIRST, BYTES, &settings);
    let bytes = |key: u64| 1 + (key * 98_893) % 900_000;
    let object = move |key: u64, version: u64| value(key * 1000 + version, bytes(key) as usize);
    // All of them are more than the pool holds.
    (0..KEYS).for_each(|key| put(&mut rig, &format!("key-{key}"), &object(key, 0)));
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let writer = std::thread::spawn(move || {
        let mut client = Client::connect(&settings).expect("a client");
        let mut choices = Rng::new(first, "writer");
        let mut puts = 0_u64;
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            let (key, version) = (choices.below(KEYS), choices.below(VERSIONS));
            // A full pool of pinned objects refuses a put.
            puts += u64::from(client.upsert(format!("key-{key}").as_bytes(), &object(key, version)).is_ok());
        }
        puts
    });
    let (mut found, mut missed) = (0, 0);
    for round in first..first + rounds {
        let mut choices = Rng::new(round, "reader");
        let delay_ns = [0, 1000, 200_000, 3_000_000][choices.below(4) as usize];
        rig.fake.set_copies(delay_ns, 0, round);
        let keys: Vec<u64> = (0..1 + choices.below(30)).map(|_| choices.below(KEYS)).collect();
        let item = |(at, key): (usize, &u64)| (format!("key-{key}"), rig.memory.slice((at as u64) << 20, bytes(*key)));
        let items: Vec<(String, Slice)> = keys.iter().enumerate().map(item).collect();
        let got = rig.client.batch_get_into(&items).expect("a batch");
        for (at, (key, got)) in keys.iter().zip(got).enumerate() {
            let Some(got) = got.expect("a get") else {
                missed += 1;
                continue;
            };
            found += 1;
            assert_eq!(got.bytes, bytes(*key));
            let there = rig.read((at as u64) << 20, got.bytes);
            let is_of = |version: u64| there.starts_with(&value(key * 1000 + version, there.len().min(16)));
            let version = (0..VERSIONS).find(|version| is_of(*version)).expect("the first bytes of a put");
            assert!(there == object(*key, version), "round {round}: key {key} has bytes of another put than {version}");
        }
    }
    drop(stop);
    let puts = writer.join().expect("a writer that ends");
    println!("{rounds} rounds from {first}: {found} gets under {puts} puts, {missed} misses, none of them wrong");
    assert!(found > 0 && snapshot(&bed).store.expect("a store").evictions > 0);
    let (staged, direct) = moved(&mut rig);
    assert!(direct > 0 && staged == 0, "{staged} bytes staged");
    assert_eq!(snapshot(&bed).service.corrupt, 0);
    rig.end();
}

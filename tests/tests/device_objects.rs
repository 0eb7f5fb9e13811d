//! Objects from and into memory of a device, over the driver for tests: its memory crashes the process that touches it,
//! and its copies are late. With real nodes, over shared memory and over the network.

use std::time::Duration;

use kvplane::device::{Backing, Device, DeviceId, DeviceMemory, Family};
use kvplane::{
    BatchOutcome, BeginOutcome, Client, ClientConfig, Fill, ObjectRange, Opcode, Open, Put, PutOptions, Region,
    RegionOptions, RegisterOptions, SegmentHandle, Slice, Status, SubmitOptions, TaskState, TransferEngine,
    TransferEngineConfig, TransferRequest,
};
use kvplane_fake_devices::Control;
use kvplane_proto::rng::Rng;
use kvplane_tests::world::number;

mod bed;
#[path = "bed/device.rs"]
mod device;

use bed::Bed;
use device::{DeviceClient, FIRST, assert_released};

const BYTES: u64 = 24 << 20;
/// Variable of the number of seeds.
const SEEDS: &str = "KVPLANE_DEVICE_SEEDS";

/// Lengths below and above those of a piece, of a stage's region, and of a stripe.
const LENGTHS: [u64; 6] = [1, 4097, 300_000, (1 << 20) + 1, 5 << 20, 20 << 20];

/// Returns the bytes of a value.
fn value(number: u64, bytes: usize) -> Vec<u8> {
    bed::value(number as u32, bytes)
}

fn configs(bed: &Bed) -> [ClientConfig; 2] {
    [(true, 64 << 20), (false, 8 << 20)]
        .map(|(shared, stripe_bytes)| ClientConfig { stripe_bytes, ..bed.client_config(shared) })
}

#[test]
fn objects_are_put_from_a_device_and_read_into_it() {
    put_and_get(FIRST);
}

#[test]
fn objects_are_put_from_an_ascend_device_and_read_into_it() {
    put_and_get(DeviceId { family: Family::Npu, ordinal: 1 });
}

/// The other transports are those of [`configs`].
#[test]
fn the_same_over_rdma() {
    const VARIABLE: &str = "KVPLANE_TEST_TRANSPORT";
    if std::env::var_os(VARIABLE).is_some() {
        return;
    }
    // The driver is one to a process.
    for name in [
        "objects_are_put_from_a_device_and_read_into_it",
        "batches_of_blocks_and_of_pieces_go_from_a_device_and_back",
        "ranges_and_sessions_use_memory_of_a_device",
        "a_long_object_is_not_starved_by_short_ones",
        "seeds",
    ] {
        let mut child = std::process::Command::new(std::env::current_exe().expect("this program"));
        let done = child.args(["--exact", name]).env(VARIABLE, "rdma").env(SEEDS, "5").output();
        let done = done.expect("a process");
        let printed = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(done.status.success() && printed.contains("1 passed"), "{name}: {printed}");
    }
}

fn put_and_get(id: DeviceId) {
    let bed = Bed::start(2, 128 << 20);
    for (number, config) in configs(&bed).into_iter().enumerate() {
        let mut rig = DeviceClient::on(id, BYTES, &config);
        for (at, bytes) in LENGTHS.into_iter().enumerate() {
            let (key, seed) = (format!("one-{number}-{at}"), number + 2 * at);
            let whole = value(seed as u64, bytes as usize);
            rig.write(77, &whole);
            let put = rig.client.put_from(key.as_bytes(), rig.memory.slice(77, bytes)).expect("a put");
            assert!(matches!(put, Put::Stored(_)), "{put:?}");
            assert!(rig.client.get(key.as_bytes()).expect("a get").expect("the object") == whole, "{bytes}");
            rig.write(77, &vec![0; bytes as usize]);
            // The memory may be longer than the object; what is beyond stays as it is.
            rig.write(77 + bytes, &[9; 100]);
            let got = rig.client.get_into(key.as_bytes(), rig.memory.slice(77, bytes + 100)).expect("a get");
            assert_eq!(got.expect("the object").bytes, bytes);
            assert!(rig.read(77, bytes) == whole, "{bytes} over {number}");
            assert_eq!(rig.read(77 + bytes, 100), [9; 100]);
        }
        assert_eq!(rig.client.get_into(b"nobody", rig.memory.slice(0, 100)).expect("a get"), None);
        let small = rig.client.get_into(format!("one-{number}-1").as_bytes(), rig.memory.slice(0, 4096));
        assert_eq!(small.expect_err("too small").status(), Some(Status::BufferTooSmall));
        let DeviceClient { fake, mut client, memory } = rig;
        client.unregister_device(memory);
        drop(client);
        assert_released(fake);
    }
}

#[test]
fn batches_of_blocks_and_of_pieces_go_from_a_device_and_back() {
    let bed = Bed::start(2, 128 << 20);
    for (number, config) in configs(&bed).into_iter().enumerate() {
        let mut rig = DeviceClient::on(FIRST, BYTES, &config);
        let keys: Vec<String> = (0..200).map(|at| format!("block-{number}-{at}")).collect();
        let bytes = |at: usize| 1 + (at as u64 * 7919) % 90_000;
        let slices: Vec<Slice> = (0..200).map(|at| rig.memory.slice(at as u64 * 100_000, bytes(at))).collect();
        let blocks: Vec<Vec<u8>> = (0..200).map(|at| value(at as u64, bytes(at) as usize)).collect();
        blocks.iter().enumerate().for_each(|(at, block)| rig.write(at as u64 * 100_000, block));
        let items: Vec<(&String, Slice)> = keys.iter().zip(slices.iter().copied()).collect();
        let puts = rig.client.batch_put_from(&items).expect("a batch");
        assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored(_)))), "{puts:?}");
        rig.write(0, &vec![0; BYTES as usize]);
        let crossed = [(&keys[0], rig.memory.slice(0, 90_000)), (&keys[1], rig.memory.slice(89_999, 90_000))];
        let refused = rig.client.batch_get_into(&crossed).expect_err("overlapping memory");
        assert!(refused.to_string().contains("overlapping memory"), "{refused}");
        let gets = rig.client.batch_get_into(&items).expect("a batch");
        assert!(gets.iter().all(|got| matches!(got, Ok(Some(_)))), "{gets:?}");
        for (at, block) in blocks.iter().enumerate() {
            assert!(rig.read(at as u64 * 100_000, bytes(at)) == *block, "block {at} over {number}");
        }

        // One object from many pieces of a device, with one of the host between them.
        let host = rig.client.register(Region::allocate(&RegionOptions::new("memory", 1 << 20)).expect("memory"));
        host.region().copy_in(0, &value(500, 1000));
        let pieces: Vec<Slice> = (0..50)
            .map(|at| if at == 20 { host.slice(0, 1000) } else { rig.memory.slice(at * 30_000, 10_000 + at) })
            .collect();
        (0..50).for_each(|at| rig.write(at * 30_000, &value(1000 + at, 10_000 + at as usize)));
        let whole: Vec<u8> = (0..50)
            .flat_map(|at| if at == 20 { value(500, 1000) } else { value(1000 + at, 10_000 + at as usize) })
            .collect();
        let key = format!("pieces-{number}");
        let put = rig.client.scatter_gather().put_from(key.as_bytes(), &pieces, &PutOptions::default()).expect("a put");
        assert!(matches!(put, Put::Stored(_)), "{put:?}");
        assert!(rig.client.get(key.as_bytes()).expect("a get").expect("the object") == whole);
        rig.write(0, &vec![0; 2 << 20]);
        host.region().copy_in(0, &[0; 1000]);
        rig.client.scatter_gather().get_exact(key.as_bytes(), &pieces).expect("a get").expect("the object");
        for at in (0..50).filter(|at| *at != 20) {
            assert!(rig.read(at * 30_000, 10_000 + at) == value(1000 + at, 10_000 + at as usize), "piece {at}");
        }
        let mut found = vec![0; 1000];
        host.region().copy_out(0, &mut found);
        assert!(found == value(500, 1000), "the piece of the host");
        let DeviceClient { fake, client, memory } = rig;
        drop((client, memory));
        assert_released(fake);
    }
}

/// An object that needs most of a stage's region gets it, although short ones always wait for what becomes free.
#[test]
fn a_long_object_is_not_starved_by_short_ones() {
    const SHORT_ONES: u64 = 40;
    let bed = Bed::start(1, 128 << 20);
    let config = ClientConfig { stripe_bytes: 64 << 20, ..bed.client_config(false) };
    let mut rig = DeviceClient::on(FIRST, BYTES, &config);
    let (short, long) = (value(1, 1 << 20), value(2, 12 << 20));
    rig.write(0, &long);
    assert!(matches!(rig.client.put(b"short", &short).expect("a put"), Put::Stored(_)));
    let device = Device::open(FIRST).expect("a device");
    let places = DeviceMemory::allocate(&device, SHORT_ONES << 20).expect("device memory");
    let places = rig.client.register_device(places).expect("a stage");
    let start = |client: &mut Client, place: u64| {
        let item = (b"short", places.slice(place << 20, 1 << 20));
        client.batches().start_gets(&[item]).expect("a batch")
    };
    let mut places_of: Vec<(Open, u64)> = (0..SHORT_ONES).map(|place| (start(&mut rig.client, place), place)).collect();
    let mut gets = 0;
    let put = [(b"long", rig.memory.slice(0, 12 << 20))];
    rig.client.batches().start_puts(&put, &PutOptions::default()).expect("a batch");
    loop {
        match rig.client.batches().next_finished().expect("a kernel that works").expect("an open batch") {
            (_, BatchOutcome::Puts(puts)) => {
                assert!(matches!(puts[..], [Ok(Put::Stored(_))]), "{puts:?} after {gets} gets");
                break;
            }
            (open, BatchOutcome::Gets(found)) => {
                assert!(matches!(found[..], [Ok(Some(_))]), "{found:?}");
                gets += 1;
                assert!(gets < 50 * SHORT_ONES, "{gets} short objects passed the long one");
                let ended = places_of.iter_mut().find(|(of, _)| *of == open).expect("a batch of the test");
                ended.0 = start(&mut rig.client, ended.1);
            }
        }
    }
    while rig.client.batches().next_finished().expect("a kernel that works").is_some() {}
    assert!(rig.client.get(b"long").expect("a get").expect("the object") == long);
    let DeviceClient { fake, client, memory } = rig;
    drop((client, memory, places, device));
    assert_released(fake);
}

/// A refusal fails what needs the memory, and nothing else; a shorter long chunk that is pinned stays in use.
#[test]
fn pinned_memory_that_runs_out_fails_one_object_and_the_next_one_passes() {
    const OUT_OF_MEMORY: i32 = 2;
    let bed = Bed::start(1, 256 << 20);
    let config = ClientConfig { stripe_bytes: 64 << 20, ..bed.client_config(false) };
    let mut rig = DeviceClient::on(FIRST, 40 << 20, &config);
    if rig.fake.skips("pinned memory that runs out") {
        return;
    }
    let put = |rig: &mut DeviceClient, number: u64, bytes: u64| {
        rig.write(0, &value(number, bytes as usize));
        rig.client.put_from(format!("object-{number}").as_bytes(), rig.memory.slice(0, bytes))
    };
    assert!(matches!(put(&mut rig, 1, 18 << 20), Ok(Put::Stored(_))));
    let pinned = rig.fake.counters().pinned;
    rig.fake.fail("cuMemHostRegister_v2", 0, OUT_OF_MEMORY);
    let error = put(&mut rig, 2, 36 << 20).expect_err("no memory to pin");
    assert_eq!(error.status(), Some(Status::DeviceFailed));
    assert_eq!(rig.fake.counters().pinned, pinned, "the shorter chunk is pinned still");
    assert!(!rig.client.exists(b"object-2").expect("an answer"));
    for (number, bytes) in [(3, 19 << 20), (4, 36 << 20), (5, 100)] {
        assert!(matches!(put(&mut rig, number, bytes), Ok(Put::Stored(_))), "{bytes}");
        rig.write(0, &vec![0; bytes as usize]);
        let key = format!("object-{number}");
        rig.client.get_into(key.as_bytes(), rig.memory.slice(0, bytes)).expect("a get").expect("the object");
        assert!(rig.read(0, bytes) == value(number, bytes as usize), "{bytes}");
    }
    // Nor is memory registered that cannot be staged.
    let DeviceClient { fake, mut client, memory } = rig;
    client.unregister_device(memory);
    let device = Device::open(FIRST).expect("a device");
    let register =
        |client: &mut Client| client.register_device(DeviceMemory::allocate(&device, 1 << 20).expect("device memory"));
    fake.fail("cuMemHostRegister_v2", 0, OUT_OF_MEMORY);
    let error = register(&mut client).err().expect("no memory to pin").to_string();
    assert!(error.contains("failed on cuda:0: out of memory"), "{error}");
    let memory = register(&mut client).expect("a stage");
    drop((client, memory, device));
    assert_released(fake);
}

/// A request of the host's memory that is malformed refuses the whole batch, as it does without device memory in it.
#[test]
fn a_batch_of_both_kinds_of_memory_is_validated_before_anything_moves() {
    let bed = Bed::start(1, 64 << 20);
    let mut rig = DeviceClient::on(FIRST, BYTES, &bed.client_config(true));
    let host = rig.client.register(Region::allocate(&RegionOptions::new("memory", 4096)).expect("memory"));
    let items = [("good", rig.memory.slice(0, 1000)), ("empty", host.slice(0, 0))];
    let refused = rig.client.batches().start_puts(&items, &PutOptions::default()).expect_err("a put of 0 bytes");
    assert!(refused.to_string().contains("request 1"), "{refused}");
    assert!(!rig.client.exists(b"good").expect("an answer"), "nothing was put");
}

#[test]
fn ranges_and_sessions_use_memory_of_a_device() {
    let bed = Bed::start(1, 128 << 20);
    for (number, config) in configs(&bed).into_iter().enumerate() {
        let mut rig = DeviceClient::on(FIRST, BYTES, &config);
        let (key, whole) = (format!("session-{number}"), value(3, 5 << 20));
        rig.write(0, &whole);
        let session = match rig
            .client
            .put_sessions()
            .open(key.as_bytes(), 5 << 20, &PutOptions::default(), Duration::from_secs(20))
            .expect("a session")
        {
            BeginOutcome::Session(session) => session,
            BeginOutcome::Exists => panic!("{key} exists"),
        };
        let fills: Vec<Fill<'_>> = (0..5)
            .map(|at| Fill { session: &session, offset: at << 20, from: rig.memory.slice(at << 20, 1 << 20) })
            .collect();
        let filled = rig.client.put_sessions().fill(&fills).expect("a batch");
        assert!(filled.iter().all(Result::is_ok), "{filled:?}");
        assert!(matches!(rig.client.put_sessions().commit(&session).expect("a commit"), Put::Stored(_)));
        rig.write(0, &vec![0; 5 << 20]);
        let ranges: Vec<ObjectRange<'_>> = (0..100)
            .map(|at| ObjectRange {
                key: key.as_bytes(),
                offset: at * 50_000 + 11,
                into: rig.memory.slice(at * 40_000, 30_000 + at),
            })
            .collect();
        let read = rig.client.ranges().get(&ranges).expect("a batch");
        assert!(read.iter().all(|one| matches!(one, Ok(Some(_)))), "{read:?}");
        for at in 0..100_u64 {
            let from = (at * 50_000 + 11) as usize;
            assert!(rig.read(at * 40_000, 30_000 + at) == whole[from..from + 30_000 + at as usize], "range {at}");
        }
        let DeviceClient { fake, client, memory } = rig;
        drop((client, memory));
        assert_released(fake);
    }
}

/// Memory of an engine, of either kind.
struct EngineMemory {
    fake: Control,
    backing: Backing,
}

impl EngineMemory {
    fn new(fake: Control, engine: &TransferEngine, device: Option<DeviceId>) -> Self {
        let backing: Backing = match device {
            Some(id) => {
                DeviceMemory::allocate(&Device::open(id).expect("a device"), PLACE_BYTES).expect("memory").into()
            }
            None => {
                let options = RegionOptions { shared: true, ..RegionOptions::new("place", PLACE_BYTES as usize) };
                Region::allocate(&options).expect("memory").into()
            }
        };
        engine.register(backing.clone(), &RegisterOptions::default()).expect("registered");
        Self { fake, backing }
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        match &self.backing {
            Backing::Host(region) => region.copy_in(offset as usize, bytes),
            Backing::Device(memory) => self.fake.write(memory.address() + offset, bytes),
        }
    }

    fn read(&self, offset: u64, bytes: u64) -> Vec<u8> {
        match &self.backing {
            Backing::Host(region) => {
                let mut found = vec![0; bytes as usize];
                region.copy_out(offset as usize, &mut found);
                found
            }
            Backing::Device(memory) => self.fake.read(memory.address() + offset, bytes),
        }
    }
}

const PLACE_BYTES: u64 = 8 << 20;
const GUARD: u64 = 32;

/// Batches of random ranges between memory of hosts and devices, and random objects, with copies that take random
/// times: every byte is the right one, and none beside it is changed.
#[test]
fn seeds() {
    let (count, first) = (number("KVPLANE_DEVICE_SEEDS", 20), number("KVPLANE_SEED", 0));
    let bed = Bed::start(1, 64 << 20);
    let mut rig = DeviceClient::on(FIRST, BYTES, &bed.client_config(true));
    let config = || TransferEngineConfig {
        slice_bytes: 64 << 10,
        runtime_directory: Some(std::env::temp_dir().join(format!("kvplane-seeds-{}", std::process::id()))),
        ..TransferEngineConfig::default()
    };
    let engines = [0, 1].map(|_| TransferEngine::start(config()).expect("an engine"));
    let peer = engines[0].open_segment(engines[1].name()).expect("a segment");
    let places = [0, 1].map(|number| {
        let kinds = [None, Some(DeviceId { ordinal: rig.fake.ordinal(number), ..FIRST })];
        kinds.map(|device| EngineMemory::new(rig.fake, &engines[usize::from(number)], device))
    });
    let mut moved = 0;
    for seed in first..first + count {
        let mut choices = Rng::new(seed, "device");
        let delay_ns = [0, 1000, 200_000, 2_000_000][choices.below(4) as usize];
        rig.fake.set_copies(delay_ns, 0, seed);
        moved += transfers(&mut choices, &engines[0], peer, &places, seed);
        let bytes = 1 + choices.below(2 << 20);
        let (key, object) = (format!("seed-{seed}"), value(seed, bytes as usize));
        rig.write(0, &object);
        rig.client.put_from(key.as_bytes(), rig.memory.slice(0, bytes)).expect("a put");
        rig.client.get_into(key.as_bytes(), rig.memory.slice(bytes, bytes)).expect("a get").expect("the object");
        assert!(rig.read(bytes, bytes) == object, "seed {seed}: an object of {bytes} bytes");
        assert!(rig.client.remove(key.as_bytes()).expect("a removal"));
        moved += 2 * bytes;
    }
    println!("{count} seeds from {first}: {moved} bytes between hosts and devices, none of them wrong");
    let DeviceClient { fake, client, memory } = rig;
    drop((engines, places, client, memory));
    let counters = fake.counters();
    assert_eq!((counters.without_context, counters.unpinned), (0, 0));
    assert_released(fake);
}

/// Runs one batch between two places, of which the choices say the kinds and the direction. Returns its bytes.
fn transfers(
    choices: &mut Rng,
    engine: &TransferEngine,
    peer: SegmentHandle,
    places: &[[EngineMemory; 2]; 2],
    seed: u64,
) -> u64 {
    let (ours, theirs) = (&places[0][choices.below(2) as usize], &places[1][choices.below(2) as usize]);
    let opcode = if choices.below(2) == 0 { Opcode::Read } else { Opcode::Write };
    let (from, to) = if opcode == Opcode::Read { (theirs, ours) } else { (ours, theirs) };
    let longest = [300, 70_000, 3 << 20][choices.below(3) as usize];
    let (mut at, mut requests) = (GUARD, Vec::new());
    while requests.len() < 40 {
        let length = 1 + choices.below(longest);
        if at + length + GUARD > PLACE_BYTES {
            break;
        }
        requests.push(TransferRequest {
            opcode,
            source: ours.backing.address() + at,
            target: peer,
            target_offset: theirs.backing.address() + at,
            length,
        });
        from.write(at, &value(seed + at, length as usize));
        to.write(at - GUARD, &vec![0xee; (length + 2 * GUARD) as usize]);
        at += length + 2 * GUARD + choices.below(5000);
    }
    let batch = engine.submit(&requests, &SubmitOptions::default()).expect("a batch");
    assert_eq!(batch.wait().state, TaskState::Completed, "seed {seed}: {:?}", batch.problem());
    for request in &requests {
        let at = request.source - ours.backing.address();
        let found = to.read(at - GUARD, request.length + 2 * GUARD);
        let (guard, rest) = found.split_at(GUARD as usize);
        let (bytes, end) = rest.split_at(request.length as usize);
        assert!(bytes == value(seed + at, bytes.len()), "seed {seed}: {opcode:?} of {} bytes at {at}", bytes.len());
        assert!(guard.iter().chain(end).all(|byte| *byte == 0xee), "seed {seed}: bytes beside {at}");
    }
    requests.iter().map(|request| request.length).sum()
}

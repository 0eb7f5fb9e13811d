//! Memory of devices at either end of a transfer, over the drivers for tests: their memory crashes the process that
//! touches it, and their copies are late. Each test runs in a process of its own, as the driver is one to a process.

mod direct;
mod engines;

use std::collections::BTreeSet;

use kvplane_fake_devices::{Control, Counters, is_missing};
use kvplane_sys::device::{Device, DeviceId, Family};
use kvplane_transfer::{
    Backing, Error, Opcode, RdmaUse, RegisterOptions, SegmentHandle, SubmitOptions, TaskState, TransferEngine,
    TransferEngineConfig, TransferRequest,
};

use crate::counted;
use crate::network::{self, End};
use crate::rig::{CUDA, Way, check, device_memory, driver, fill, private_region, region};

const BYTES: u64 = 6 << 20;

/// Lengths that are shorter and longer than slices, pieces and pages of pinned memory.
const LENGTHS: [u64; 7] = [1, 63, 4096, 65_537, (1 << 20) + 17, (3 << 20) - 1, 5 << 20];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Host,
    /// Memory of the host that peers cannot map.
    Private,
    Device(DeviceId),
}

impl Kind {
    const fn is_host(self) -> bool {
        matches!(self, Self::Host | Self::Private)
    }
}

const HIP: DeviceId = DeviceId { family: Family::Hip, ordinal: 1 };
const NPU: DeviceId = DeviceId { family: Family::Npu, ordinal: 0 };

/// Loads the driver of the device; CUDA's for memory of the host.
fn control(kind: Kind) -> Control {
    driver(if let Kind::Device(id) = kind { id } else { CUDA })
}

fn memory(kind: Kind, bytes: u64) -> Backing {
    match kind {
        Kind::Host => region(bytes as usize).into(),
        Kind::Private => private_region(bytes as usize).into(),
        Kind::Device(id) => device_memory(id, bytes),
    }
}

/// Engine with memory of one kind.
struct Side {
    engine: TransferEngine,
    memory: Backing,
    kind: Kind,
}

impl Side {
    fn new(config: TransferEngineConfig, kind: Kind) -> Self {
        let engine = TransferEngine::start(config).unwrap();
        let memory = memory(kind, BYTES);
        engine.register(memory.clone(), &RegisterOptions::default()).unwrap();
        Self { engine, memory, kind }
    }

    fn write(&self, offset: u64, bytes: u64, seed: u64) {
        fill(&self.memory, offset as usize, bytes as usize, seed);
    }

    fn check(&self, offset: u64, bytes: u64, seed: u64) {
        check(&self.memory, offset as usize, bytes as usize, seed);
    }
}

/// Transport, with TCP as well: over shared memory, it reaches a peer's device memory.
fn config(way: Way, end: End) -> TransferEngineConfig {
    let config = TransferEngineConfig { tcp: true, ..way.config() };
    let mut rdma = config.rdma.clone();
    if rdma.mode == RdmaUse::Require {
        rdma.devices = network::devices(end);
    }
    TransferEngineConfig { rdma, ..config }
}

/// Writes and reads ranges of all lengths between memory of these kinds, one by one and in one batch. Returns the
/// transports that carried bytes.
fn round_trips(way: Way, ours: Kind, theirs: Kind) -> BTreeSet<&'static str> {
    round_trips_between([End::Asks, End::Serves].map(|end| config(way, end)), ours, theirs)
}

fn round_trips_between(configs: [TransferEngineConfig; 2], ours: Kind, theirs: Kind) -> BTreeSet<&'static str> {
    for kind in [ours, theirs] {
        if !kind.is_host() {
            control(kind).set_copies(200_000, 0, 11);
        }
    }
    let [our_config, their_config] = configs;
    let (a, b) = (Side::new(our_config, ours), Side::new(their_config, theirs));
    let peer = a.engine.open_segment(b.engine.name()).unwrap();
    let request = |opcode, offset: u64, length| TransferRequest {
        opcode,
        source: a.memory.address() + offset,
        target: peer,
        target_offset: b.memory.address() + BYTES - offset - length,
        length,
    };
    let run = |requests: &[TransferRequest]| {
        let batch = a.engine.submit(requests, &SubmitOptions::default()).unwrap();
        let status = batch.wait();
        assert_eq!(status.state, TaskState::Completed, "{ours:?} {theirs:?}: {:?}", batch.problem());
        assert_eq!(status.transferred_bytes, requests.iter().map(|one| one.length).sum::<u64>());
    };
    for (number, length) in LENGTHS.into_iter().enumerate() {
        let (offset, seed) = (number as u64 * 100, number as u64 + 1);
        a.write(offset, length, seed);
        run(&[request(Opcode::Write, offset, length)]);
        b.check(BYTES - offset - length, length, seed);
        b.write(BYTES - offset - length, length, !seed);
        run(&[request(Opcode::Read, offset, length)]);
        a.check(offset, length, !seed);
    }
    // Small ranges with gaps between them.
    let ranges = |opcode| (0..300).map(|number| request(opcode, number * 9000, 5000)).collect::<Vec<_>>();
    (0..300).for_each(|number| a.write(number * 9000, 5000, 77 + number));
    run(&ranges(Opcode::Write));
    (0..300).for_each(|number| b.check(BYTES - number * 9000 - 5000, 5000, 77 + number));
    (0..300).for_each(|number| b.write(BYTES - number * 9000 - 5000, 5000, 777 + number));
    run(&ranges(Opcode::Read));
    (0..300).for_each(|number| a.check(number * 9000, 5000, 777 + number));
    let rails = a.engine.metrics().rails.into_iter().filter(|rail| rail.bytes > 0);
    let carried = rails.map(|rail| rail.transport.name()).collect();
    for side in [a, b] {
        side.engine.unregister(side.memory.address()).unwrap();
    }
    for kind in [ours, theirs] {
        if !kind.is_host() {
            assert_eq!(control(kind).counters().unpinned, 0, "transfers are staged in pinned memory");
            assert_released(control(kind));
        }
    }
    carried
}

/// Checks that nothing of a driver is in use, and that it was never misused.
fn assert_released(fake: Control) {
    let counters = fake.counters();
    // Copies within one engine are from and to memory of its user, pinned or not.
    let Counters { copied_bytes, calls, unpinned, .. } = counters;
    assert_eq!(counters, Counters { copied_bytes, calls, unpinned, ..Counters::default() });
}

fn every_way(ours: Kind, theirs: Kind) {
    for way in Way::all() {
        round_trips(way, ours, theirs);
    }
}

#[test]
fn memory_of_a_device_is_written_to_and_read_from_that_of_a_host() {
    every_way(Kind::Device(CUDA), Kind::Host);
}

/// The peer is one of Mooncake's to an engine that does not speak our protocol.
#[test]
fn memory_of_a_device_is_staged_to_engines_of_mooncake_which_do_not_see_ours() {
    let config = |native| TransferEngineConfig { native, ..config(Way::Tcp, End::Asks) };
    let carried = round_trips_between([config(false), config(true)], Kind::Device(CUDA), Kind::Host);
    assert!(carried.contains("mooncake"), "{carried:?}");
    let (a, b) = (Side::new(config(false), Kind::Host), Side::new(config(true), Kind::Device(CUDA)));
    let target = a.engine.open_segment(b.engine.name()).unwrap();
    let (source, target_offset) = (a.memory.address(), b.memory.address());
    let write = TransferRequest { opcode: Opcode::Write, source, target, target_offset, length: 1 };
    let refused = a.engine.submit(&[write], &SubmitOptions::default()).unwrap_err();
    assert!(matches!(refused, Error::AddressNotRegistered(_)), "{refused}");
}

#[test]
fn the_kernel_copies_between_staged_memory_of_a_device_and_private_memory_of_a_peer() {
    if counted::kernel_copies() {
        let carried = round_trips(Way::Shm, Kind::Device(CUDA), Kind::Private);
        assert!(carried.contains("cma"), "{carried:?}");
    }
}

#[test]
fn a_host_writes_and_reads_memory_of_a_device() {
    every_way(Kind::Host, Kind::Device(CUDA));
}

#[test]
fn devices_of_two_vendors_exchange_bytes() {
    if is_missing(kvplane_fake_hip::load_hip) {
        return;
    }
    every_way(Kind::Device(CUDA), Kind::Device(HIP));
}

#[test]
fn memory_of_an_ascend_device_is_written_to_and_read_from_that_of_another_one() {
    if is_missing(kvplane_fake_npu::load_npu) {
        return;
    }
    every_way(Kind::Device(NPU), Kind::Device(DeviceId { ordinal: 1, ..NPU }));
}

#[test]
fn a_host_and_a_device_of_another_vendor_write_and_read_memory_of_an_ascend_device() {
    if is_missing(kvplane_fake_npu::load_npu) {
        return;
    }
    every_way(Kind::Host, Kind::Device(NPU));
    every_way(Kind::Device(NPU), Kind::Device(CUDA));
}

#[test]
fn copies_within_one_engine_go_between_all_kinds() {
    if is_missing(kvplane_fake_hip::load_hip) {
        return;
    }
    let second = DeviceId { ordinal: control(Kind::Device(CUDA)).ordinal(1), ..CUDA };
    copies_within_one_engine([Kind::Host, Kind::Device(CUDA), Kind::Device(second), Kind::Device(HIP)]);
}

#[test]
fn copies_within_one_engine_go_between_ascend_devices_and_the_host() {
    if is_missing(kvplane_fake_npu::load_npu) {
        return;
    }
    let second = DeviceId { ordinal: 1, ..NPU };
    copies_within_one_engine([Kind::Host, Kind::Device(NPU), Kind::Device(second), Kind::Device(CUDA)]);
}

fn copies_within_one_engine(kinds: [Kind; 4]) {
    let engine = TransferEngine::start(Way::Tcp.config()).unwrap();
    let devices = || kinds.into_iter().filter(|kind| !kind.is_host());
    devices().for_each(|kind| control(kind).set_copies(200_000, 0, 3));
    let options = RegisterOptions { remote_accessible: false, ..RegisterOptions::default() };
    let sides = kinds.map(|kind| (memory(kind, 1 << 20), kind));
    sides.iter().for_each(|(memory, _)| engine.register(memory.clone(), &options).unwrap());
    let side = |number: usize| Side {
        engine: TransferEngine::start(Way::Tcp.config()).unwrap(),
        memory: sides[number].0.clone(),
        kind: sides[number].1,
    };
    for (number, (from, to)) in (0..kinds.len()).flat_map(|from| (0..kinds.len()).map(move |to| (from, to))).enumerate()
    {
        let mixed =
            matches!((kinds[from], kinds[to]), (Kind::Device(one), Kind::Device(other)) if one.family != other.family);
        let (from, to) = (side(from), side(to));
        from.write(0, 500_001, number as u64);
        let copy = TransferRequest {
            opcode: Opcode::Write,
            source: from.memory.address(),
            target: SegmentHandle::LOCAL,
            target_offset: to.memory.address() + 500_001,
            length: 500_001,
        };
        let batch = engine.submit(&[copy], &SubmitOptions::default());
        if mixed {
            assert!(batch.unwrap_err().to_string().contains("devices of two vendors"));
            continue;
        }
        let batch = batch.unwrap();
        assert_eq!(batch.status().state, TaskState::Completed, "it is complete at once: {:?}", batch.problem());
        to.check(500_001, 500_001, number as u64);
    }
    engine.unregister_batch(&sides.iter().map(|(memory, _)| memory.address()).collect::<Vec<_>>()).unwrap();
    drop((engine, sides));
    devices().for_each(|kind| assert_released(control(kind)));
}

#[test]
fn memory_is_registered_where_it_is() {
    let fake = control(Kind::Device(CUDA));
    let engine = TransferEngine::start(Way::Tcp.config()).unwrap();
    let (device, host) = (memory(Kind::Device(CUDA), 1 << 20), memory(Kind::Host, 1 << 20));
    let at = |location: &str| RegisterOptions { location: location.to_owned(), ..RegisterOptions::default() };
    for (memory, location, word) in [
        (&device, "cuda:1", "cuda:0"),
        (&device, "npu:0", "cuda:0"),
        (&device, "cpu:0", "cuda:0"),
        (&host, "cuda:0", "of the host"),
        (&host, "gpu:0", "gpu:0"),
    ] {
        let error = engine.register(memory.clone(), &at(location)).unwrap_err();
        assert!(error.to_string().contains(word), "{location}: {error}");
        assert_eq!(error.code(), -1);
    }
    engine.register(device.clone(), &at("cuda:0")).unwrap();
    engine.register(host.clone(), &at("*")).unwrap();
    let buffers = engine.segment_info(SegmentHandle::LOCAL).unwrap().buffers;
    let locations: Vec<_> =
        buffers.iter().filter(|one| one.address == device.address()).map(|one| one.location.clone()).collect();
    assert_eq!(locations, [Some("cuda:0".to_owned())]);
    engine.unregister_batch(&[device.address(), host.address()]).unwrap();
    drop((engine, device));
    assert_released(fake);
}

#[test]
fn memory_that_cannot_be_staged_is_refused_and_may_be_registered_later() {
    let fake = control(Kind::Device(CUDA));
    if fake.skips("pinned memory that runs out") {
        return;
    }
    let engine = TransferEngine::start(Way::Tcp.config()).unwrap();
    let device = memory(Kind::Device(CUDA), 1 << 20);
    // Of the stage of an initiator, and of that for peers.
    for passes in [0, 1] {
        fake.fail("cuMemHostRegister_v2", passes, 2);
        let error = engine.register(device.clone(), &RegisterOptions::default()).unwrap_err();
        assert!(error.to_string().contains("failed on cuda:0: out of memory"), "{error}");
        assert_eq!(fake.counters().pinned, 0, "a refusal leaves nothing behind");
    }
    engine.register(device.clone(), &RegisterOptions::default()).unwrap();
    engine.unregister(device.address()).unwrap();
    drop((engine, device));
    assert_released(fake);
}

#[test]
fn memory_that_was_freed_fails_transfers_and_harms_nothing() {
    let fake = control(Kind::Device(CUDA));
    if fake.skips("a device that is lost") {
        return;
    }
    for at_peer in [false, true] {
        let (ours, theirs) = if at_peer { (Kind::Host, Kind::Device(CUDA)) } else { (Kind::Device(CUDA), Kind::Host) };
        let (a, b) = (Side::new(config(Way::Tcp, End::Asks), ours), Side::new(config(Way::Tcp, End::Serves), theirs));
        let peer = a.engine.open_segment(b.engine.name()).unwrap();
        let (source, target_offset) = (a.memory.address(), b.memory.address());
        let good = TransferRequest { opcode: Opcode::Write, source, target: peer, target_offset, length: 100_000 };
        let run = |request| a.engine.submit(&[request], &SubmitOptions::default()).unwrap().wait().state;
        let within = TransferRequest { target: SegmentHandle::LOCAL, target_offset: source + 200_000, ..good };
        assert_eq!((run(good), run(within)), (TaskState::Completed, TaskState::Completed));
        fake.lose(0, 719);
        assert_eq!(run(good), TaskState::Failed);
        assert_eq!(run(within), if at_peer { TaskState::Completed } else { TaskState::Failed });
        assert_eq!(run(TransferRequest { opcode: Opcode::Read, ..good }), TaskState::Failed);
        fake.lose(0, 0);
    }
}

#[test]
fn a_batch_on_a_device_can_be_cancelled_and_ends_by_its_deadline() {
    let fake = control(Kind::Device(CUDA));
    if fake.skips("slow copies") {
        return;
    }
    fake.set_copies(0, 20_000_000, 5);
    let (a, b) = (
        Side::new(config(Way::Tcp, End::Asks), Kind::Device(CUDA)),
        Side::new(config(Way::Tcp, End::Serves), Kind::Host),
    );
    let peer = a.engine.open_segment(b.engine.name()).unwrap();
    let (source, target_offset) = (a.memory.address(), b.memory.address());
    let write = TransferRequest { opcode: Opcode::Write, source, target: peer, target_offset, length: BYTES };
    let batch = a.engine.submit(&[write], &SubmitOptions::default()).unwrap();
    batch.cancel();
    assert_eq!(batch.wait().state, TaskState::Canceled);
    let deadline = Some(std::time::Duration::from_millis(20));
    let batch = a.engine.submit(&[write], &SubmitOptions { deadline, ..SubmitOptions::default() }).unwrap();
    assert_eq!(batch.wait().state, TaskState::Timeout);
    fake.set_copies(0, 0, 5);
    // Everything that these held is free again.
    let batch = a.engine.submit(&[write], &SubmitOptions::default()).unwrap();
    assert_eq!(batch.wait().state, TaskState::Completed);
    [&a, &b].into_iter().for_each(|side| side.engine.unregister(side.memory.address()).unwrap());
    drop((a, b, batch));
    assert_released(fake);
}

#[test]
fn bytes_of_a_kernel_that_was_launched_before_are_those_that_leave() {
    kernel_before_write(CUDA, 1);
}

#[test]
fn bytes_of_a_kernel_that_was_launched_before_on_an_ascend_device_are_those_that_leave() {
    kernel_before_write(NPU, 0);
}

fn kernel_before_write(id: DeviceId, default_stream: u64) {
    let fake = control(Kind::Device(id));
    let (a, b) = (
        Side::new(config(Way::Tcp, End::Asks), Kind::Device(id)),
        Side::new(config(Way::Tcp, End::Serves), Kind::Host),
    );
    let peer = a.engine.open_segment(b.engine.name()).unwrap();
    let (source, target_offset) = (a.memory.address(), b.memory.address());
    let write = TransferRequest { opcode: Opcode::Write, source, target: peer, target_offset, length: 1 << 20 };
    let named = |raw| kvplane_transfer::StreamHandle { family: id.family, raw };
    let _caller = Device::open(DeviceId { ordinal: 1, ..id }).unwrap();
    let own = fake.stream(0);
    let mut streams = vec![(own, Some(named(own))), (default_stream, None)];
    // Streams of other devices of the family, where the driver tells them apart.
    if id.family == Family::Cuda {
        let other = fake.stream(1);
        streams.push((other, Some(named(other))));
    }
    for (number, (on, stream)) in streams.into_iter().enumerate() {
        fake.fill(on, source, 1 << 20, number as u64, 30_000_000);
        let batch = a.engine.submit(&[write], &SubmitOptions { stream, ..SubmitOptions::default() }).unwrap();
        assert_eq!(batch.wait().state, TaskState::Completed);
        let Backing::Host(region) = &b.memory else { unreachable!("memory of the host") };
        let mut found = vec![0; 1 << 20];
        region.copy_out(0, &mut found);
        assert!(found == Control::pattern(number as u64, 1 << 20), "bytes left before the kernel wrote them");
    }
}

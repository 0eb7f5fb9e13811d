//! Device memory of another process of this host, over the drivers for tests: mapped here, copied from and to without
//! staging, and staged where it cannot be mapped. Each test runs in a process of its own.

mod peer;

use std::time::{Duration, Instant};

use kvplane_fake_devices::{Control, Counters, is_missing};
use kvplane_sys::device::{DeviceId, Family};
use kvplane_transfer::{
    Backing, Opcode, RegisterOptions, SegmentHandle, StreamHandle, SubmitOptions, TaskState, TransferEngine,
    TransferRequest,
};

use crate::rig::{CUDA, PATIENCE, byte, check, device_memory, driver, fill, region};
use peer::{Kind, Peer, config};

const BYTES: u64 = 18 << 20;
const HIP: DeviceId = DeviceId { family: Family::Hip, ordinal: 0 };

/// Lengths that are shorter and longer than pieces.
const LENGTHS: [u64; 5] = [1, 63, 65_537, (4 << 20) + 3, (16 << 20) + 17];

fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| byte(seed, at)).collect()
}

/// Engine of this process with memory of a device, and with memory of the host.
struct Side {
    engine: TransferEngine,
    id: DeviceId,
    device: Backing,
    host: Backing,
}

impl Side {
    fn new(id: DeviceId) -> Self {
        let device = device_memory(id, BYTES);
        let engine = TransferEngine::start(config()).unwrap();
        let host: Backing = region(BYTES as usize).into();
        engine.register(device.clone(), &RegisterOptions::default()).unwrap();
        engine.register(host.clone(), &RegisterOptions::default()).unwrap();
        Self { engine, id, device, host }
    }

    fn memory(&self, is_host: bool) -> &Backing {
        if is_host { &self.host } else { &self.device }
    }

    fn fill(&self, is_host: bool, offset: u64, bytes: u64, seed: u64) {
        fill(self.memory(is_host), offset as usize, bytes as usize, seed);
    }

    fn check(&self, is_host: bool, offset: u64, bytes: u64, seed: u64) {
        check(self.memory(is_host), offset as usize, bytes as usize, seed);
    }

    fn run(&self, requests: &[TransferRequest], options: &SubmitOptions) -> TaskState {
        let batch = self.engine.submit(requests, options).unwrap();
        let status = batch.wait();
        if status.state == TaskState::Completed {
            assert_eq!(status.transferred_bytes, requests.iter().map(|one| one.length).sum::<u64>());
        }
        status.state
    }

    /// Returns the bytes copied without staging, and the bytes staged here.
    fn moved(&self) -> (u64, u64) {
        let metrics = self.engine.metrics();
        let staged = metrics.staging.values().map(|one| one.to_host_bytes + one.to_device_bytes).sum();
        (metrics.peer_memory.written_bytes + metrics.peer_memory.read_bytes, staged)
    }

    /// Waits until nothing of a peer is mapped.
    fn wait_for_no_mapping(&self) {
        let start = Instant::now();
        while self.engine.metrics().peer_memory.mappings > 0 {
            assert!(start.elapsed() < PATIENCE, "memory of the peer is still mapped");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends everything, and checks that nothing of the driver is in use.
    fn end(self) {
        let fake = driver(self.id);
        let addresses = [self.device.address(), self.host.address()];
        self.engine.unregister_batch(&addresses).unwrap();
        drop(self);
        let counters = fake.counters();
        // Memory of the host is copied from and to as it is.
        let Counters { copied_bytes, calls, unpinned, .. } = counters;
        assert_eq!(counters, Counters { copied_bytes, calls, unpinned, ..Counters::default() });
    }
}

fn request(opcode: Opcode, source: u64, to: (SegmentHandle, u64), length: u64) -> TransferRequest {
    TransferRequest { opcode, source, target: to.0, target_offset: to.1, length }
}

/// Writes and reads ranges of all lengths, one by one and in batches of many, without staging.
fn round_trips(ours: DeviceId, theirs: DeviceId, kind: Kind, is_host: bool) {
    driver(ours).set_copies(200_000, 0, 17);
    let (side, mut peer) = (Side::new(ours), Peer::start(theirs, kind));
    let segment = side.engine.open_segment(&peer.name).unwrap();
    let source = side.memory(is_host).address();
    let there = peer.address;
    let at = |opcode, offset: u64, length: u64| {
        request(opcode, source + offset, (segment, there + BYTES - offset - length), length)
    };
    let mut total = 0;
    for (number, length) in LENGTHS.into_iter().enumerate() {
        let (offset, seed) = (number as u64 * 100, number as u64 + 1);
        side.fill(is_host, offset, length, seed);
        let write = at(Opcode::Write, offset, length);
        assert_eq!(side.run(&[write], &SubmitOptions::default()), TaskState::Completed, "{length}");
        peer.check(BYTES - offset - length, length, seed);
        peer.fill(BYTES - offset - length, length, !seed);
        let read = at(Opcode::Read, offset, length);
        assert_eq!(side.run(&[read], &SubmitOptions::default()), TaskState::Completed, "{length}");
        side.check(is_host, offset, length, !seed);
        total += 2 * length;
    }
    let ranges = |opcode| (0..300).map(|number| at(opcode, number * 9000, 5000)).collect::<Vec<_>>();
    (0..300).for_each(|number| side.fill(is_host, number * 9000, 5000, 77 + number));
    assert_eq!(side.run(&ranges(Opcode::Write), &SubmitOptions::default()), TaskState::Completed);
    (0..300).for_each(|number| peer.check(BYTES - number * 9000 - 5000, 5000, 77 + number));
    (0..300).for_each(|number| peer.fill(BYTES - number * 9000 - 5000, 5000, 777 + number));
    assert_eq!(side.run(&ranges(Opcode::Read), &SubmitOptions::default()), TaskState::Completed);
    (0..300).for_each(|number| side.check(is_host, number * 9000, 5000, 777 + number));
    total += 2 * 300 * 5000;
    assert_eq!((side.moved(), peer.staged()), ((total, 0), 0), "nothing is staged at either end");
    assert_eq!(side.engine.metrics().peer_memory.mappings, 1, "one allocation for all of them");
    assert_eq!(peer.tell("unregister"), "done");
    side.wait_for_no_mapping();
    drop(peer);
    side.end();
}

#[test]
fn devices_of_two_processes_copy_without_staging() {
    for number in [0, 1] {
        let ordinal = driver(CUDA).ordinal(number);
        round_trips(CUDA, DeviceId { ordinal, ..CUDA }, Kind::Allocated, false);
    }
}

#[test]
fn hip_devices_of_two_processes_copy_without_staging() {
    if is_missing(kvplane_fake_hip::load_hip) {
        return;
    }
    round_trips(HIP, HIP, Kind::Allocated, false);
}

#[test]
fn memory_of_the_virtual_memory_interface_is_mapped_by_descriptors_and_fabric_handles() {
    if driver(CUDA).skips("allocations for handles of each type") {
        return;
    }
    round_trips(CUDA, CUDA, Kind::Mapped, false);
    round_trips(CUDA, CUDA, Kind::Fabric, false);
}

#[test]
fn memory_of_the_host_is_copied_by_the_device_of_both_processes() {
    round_trips(CUDA, CUDA, Kind::Allocated, true);
    if !driver(CUDA).skips("allocations for descriptors") {
        round_trips(CUDA, CUDA, Kind::Mapped, true);
    }
}

/// Moves bytes both ways by requests, which are staged.
fn staged_round_trip(side: &Side, peer: &mut Peer, is_written: bool) {
    let segment = side.engine.open_segment(&peer.name).unwrap();
    let (source, there) = (side.device.address(), peer.address);
    peer.fill(100, 1 << 20, 5);
    let read = request(Opcode::Read, source, (segment, there + 100), 1 << 20);
    assert_eq!(side.run(&[read], &SubmitOptions::default()), TaskState::Completed);
    side.check(false, 0, 1 << 20, 5);
    side.fill(false, 0, 1 << 20, 6);
    let write = request(Opcode::Write, source, (segment, there + 100), 1 << 20);
    let state = side.run(&[write], &SubmitOptions::default());
    assert_eq!(state, if is_written { TaskState::Completed } else { TaskState::Failed });
    peer.check(100, 1 << 20, if is_written { 6 } else { 5 });
    assert_eq!((side.moved().0, side.engine.metrics().peer_memory.mappings), (0, 0));
    assert!(peer.staged() >= 1 << 20);
}

#[test]
fn memory_that_cannot_be_mapped_is_staged() {
    if driver(CUDA).skips("handles that are refused") {
        return;
    }
    let side = Side::new(CUDA);
    // Peers that may only read get no handle, as a mapping could be written.
    staged_round_trip(&side, &mut Peer::start(CUDA, Kind::ReadOnly), false);
    // The owner's driver makes no handle.
    let mut peer = Peer::start(CUDA, Kind::Allocated);
    assert_eq!(peer.tell("fail 801"), "done");
    staged_round_trip(&side, &mut peer, true);
    // The driver of this process does not map it, as the devices cannot access each other.
    let mut peer = Peer::start(DeviceId { ordinal: 1, ..CUDA }, Kind::Allocated);
    driver(CUDA).fail("cuIpcOpenMemHandle_v2", 0, 217);
    staged_round_trip(&side, &mut peer, true);
    assert_eq!(side.engine.metrics().peer_memory.refused, 3);
    drop(peer);
    // Devices of two vendors have no common driver.
    staged_round_trip(&side, &mut Peer::start(HIP, Kind::Allocated), true);
    side.end();
}

#[test]
fn memory_that_its_owner_freed_and_allocated_anew_is_not_touched() {
    if driver(CUDA).skips("an address that is used again") {
        return;
    }
    for kind in [Kind::Allocated, Kind::Mapped, Kind::Fabric] {
        let (side, mut peer) = (Side::new(CUDA), Peer::start(CUDA, kind));
        let segment = side.engine.open_segment(&peer.name).unwrap();
        let (source, there) = (side.device.address(), peer.address);
        let write = request(Opcode::Write, source, (segment, there), 1 << 20);
        side.fill(false, 0, 1 << 20, 1);
        assert_eq!(side.run(&[write], &SubmitOptions::default()), TaskState::Completed);
        assert_eq!(side.moved(), (1 << 20, 0));
        assert_eq!(peer.tell("replace"), "done");
        peer.fill(0, 1 << 20, 2);
        side.fill(false, 0, 1 << 20, 3);
        assert_eq!(side.run(&[write], &SubmitOptions::default()), TaskState::Failed, "{kind:?}");
        peer.check(0, 1 << 20, 2);
        let read = TransferRequest { opcode: Opcode::Read, ..write };
        assert_eq!(side.run(&[read], &SubmitOptions::default()), TaskState::Failed, "{kind:?}");
        side.check(false, 0, 1 << 20, 3);
        assert_eq!(side.moved().0, 1 << 20, "nothing went by the mapping");
        drop(peer);
        side.end();
    }
}

#[test]
fn memory_of_this_process_that_was_freed_and_allocated_anew_is_not_copied() {
    if driver(CUDA).skips("an address that is used again") {
        return;
    }
    let fake = driver(CUDA);
    let (side, mut peer) = (Side::new(CUDA), Peer::start(CUDA, Kind::Allocated));
    let segment = side.engine.open_segment(&peer.name).unwrap();
    let source = side.device.address();
    let write = request(Opcode::Write, source, (segment, peer.address), 1 << 20);
    side.fill(false, 0, 1 << 20, 1);
    assert_eq!(side.run(&[write], &SubmitOptions::default()), TaskState::Completed);
    fake.free(source);
    assert_eq!(fake.allocate(0, BYTES), source, "the address is used again");
    side.fill(false, 0, 1 << 20, 2);
    assert_eq!(side.run(&[write], &SubmitOptions::default()), TaskState::Failed);
    peer.check(0, 1 << 20, 1);
    let read = TransferRequest { opcode: Opcode::Read, ..write };
    assert_eq!(side.run(&[read], &SubmitOptions::default()), TaskState::Failed);
    side.check(false, 0, 1 << 20, 2);
    assert_eq!(side.moved(), (1 << 20, 0));
}

#[test]
fn copies_wait_for_the_callers_stream() {
    let fake = driver(CUDA);
    let (side, mut peer) = (Side::new(CUDA), Peer::start(CUDA, Kind::Allocated));
    let segment = side.engine.open_segment(&peer.name).unwrap();
    let source = side.device.address();
    let write = request(Opcode::Write, source, (segment, peer.address), 1 << 20);
    let read = request(Opcode::Read, source + (2 << 20), (segment, peer.address), 1 << 20);
    let raw = fake.stream(0);
    for (number, (on, stream)) in
        [(raw, Some(StreamHandle { family: Family::Cuda, raw })), (1, None)].into_iter().enumerate()
    {
        let seed = number as u64 + 1;
        fake.fill(on, source, 1 << 20, seed, 30_000_000);
        assert_eq!(side.run(&[write], &SubmitOptions { stream, ..SubmitOptions::default() }), TaskState::Completed);
        assert_eq!(side.run(&[read], &SubmitOptions { stream, ..SubmitOptions::default() }), TaskState::Completed);
        let found = fake.read(source + (2 << 20), 1 << 20);
        assert!(found == Control::pattern(seed, 1 << 20), "bytes left before the kernel wrote them");
    }
    assert_eq!((side.moved(), peer.staged()), ((4 << 20, 0), 0));
}

#[test]
fn a_batch_can_be_cancelled_and_ends_by_its_deadline_and_a_lost_device_fails_it() {
    if driver(CUDA).skips("slow copies") {
        return;
    }
    let fake = driver(CUDA);
    let (side, mut peer) = (Side::new(CUDA), Peer::start(CUDA, Kind::Allocated));
    let segment = side.engine.open_segment(&peer.name).unwrap();
    let write = request(Opcode::Write, side.device.address(), (segment, peer.address), BYTES);
    let many = [write; 100];
    fake.set_copies(0, 1 << 30, 5);
    let batch = side.engine.submit(&many, &SubmitOptions::default()).unwrap();
    batch.cancel();
    assert_eq!(batch.wait().state, TaskState::Canceled);
    let deadline = Some(Duration::from_millis(20));
    let batch = side.engine.submit(&many, &SubmitOptions { deadline, ..SubmitOptions::default() }).unwrap();
    assert_eq!(batch.wait().state, TaskState::Timeout);
    fake.set_copies(0, 0, 5);
    assert_eq!(side.run(&[write], &SubmitOptions::default()), TaskState::Completed);
    fake.lose(0, 719);
    assert_eq!(side.run(&[write], &SubmitOptions::default()), TaskState::Failed);
    fake.lose(0, 0);
    assert_eq!(peer.staged(), 0);
}

#[test]
fn a_peer_frees_nothing_that_a_lost_device_may_still_write() {
    if driver(CUDA).skips("a device that is lost") {
        return;
    }
    let fake = driver(CUDA);
    let (side, mut peer) = (Side::new(CUDA), Peer::start_with(CUDA, Kind::Allocated, Duration::from_millis(200)));
    let segment = side.engine.open_segment(&peer.name).unwrap();
    let write = request(Opcode::Write, side.device.address(), (segment, peer.address), BYTES);
    assert_eq!(side.run(&[write], &SubmitOptions::default()), TaskState::Completed);
    fake.set_copies(0, 1 << 20, 5);
    let begun = side.engine.metrics().peer_memory.batches;
    let batch = side.engine.submit(&[write], &SubmitOptions::default()).unwrap();
    let start = Instant::now();
    while side.engine.metrics().peer_memory.batches == begun {
        assert!(start.elapsed() < PATIENCE, "no copy begins");
        std::thread::sleep(Duration::from_millis(1));
    }
    fake.lose(0, 719);
    assert_eq!(batch.wait().state, TaskState::Failed);
    assert_eq!(peer.tell("held"), "done", "a copy may still write");
}

#[test]
fn a_peer_that_is_killed_ends_its_mappings_and_harms_nothing() {
    driver(CUDA).set_copies(100_000, 1 << 32, 3);
    let (side, mut peer) = (Side::new(CUDA), Peer::start(CUDA, Kind::Allocated));
    let segment = side.engine.open_segment(&peer.name).unwrap();
    let write = request(Opcode::Write, side.device.address(), (segment, peer.address), BYTES);
    assert_eq!(side.run(&[write], &SubmitOptions::default()), TaskState::Completed);
    let options = SubmitOptions { deadline: Some(Duration::from_secs(20)), ..SubmitOptions::default() };
    let batch = side.engine.submit(&[write], &options).unwrap();
    peer.kill();
    // Whatever has become of it, nothing accesses its memory any more.
    batch.wait();
    drop(batch);
    // Refused at once, or failed.
    let batch = side.engine.submit(&[write], &options);
    assert!(batch.is_err() || batch.is_ok_and(|batch| batch.wait().state != TaskState::Completed));
    side.wait_for_no_mapping();
    drop(peer);
    side.end();
}

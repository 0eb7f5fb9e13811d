//! Device memory that RDMA devices access by themselves, over software devices that map what a descriptor stands for.

use std::fs;

use kvplane_engine::StagingCounters;
use kvplane_soft_verbs::{DmaBufRule, Loopback, SoftPort};
use kvplane_transfer::{
    DeviceRegistration, ObstacleKind, Opcode, RdmaConfig, RdmaUse, RegistrationPath, StreamHandle, SubmitOptions,
    TaskState, TransferEngine, TransferEngineConfig, TransferRequest,
};

use super::{BYTES, CUDA, HIP, Kind, LENGTHS, Side, assert_released, control};
use crate::network::End;
use crate::rig::Way;

/// Error numbers of the kernel.
const EFAULT: i32 = 14;
const EOPNOTSUPP: i32 = 95;

/// Devices of each end.
const DEVICES: usize = 2;

fn fabric() -> Loopback {
    Loopback::new(&[SoftPort::default(); 2 * DEVICES])
}

fn config(fabric: &Loopback, end: End) -> TransferEngineConfig {
    let first = if end == End::Asks { 0 } else { DEVICES };
    let devices = (first..first + DEVICES).map(|number| format!("loop{number}")).collect();
    let rdma = RdmaConfig { devices, verbs: Some(fabric.verbs()), ..RdmaConfig::of(RdmaUse::Auto) };
    TransferEngineConfig { rdma, tcp: true, initiators: 1, ..Way::Tcp.config() }
}

/// Two engines over RDMA, with TCP besides it.
struct Pair {
    fabric: Loopback,
    a: Side,
    b: Side,
}

impl Pair {
    fn new(fabric: &Loopback, ours: Kind, theirs: Kind) -> Self {
        for kind in [ours, theirs] {
            if kind != Kind::Host {
                control(kind).set_copies(200_000, 0, 11);
            }
        }
        let side = |end, kind| Side::new(config(fabric, end), kind);
        Self { fabric: fabric.clone(), a: side(End::Asks, ours), b: side(End::Serves, theirs) }
    }

    fn request(&self, opcode: Opcode, offset: u64, length: u64) -> TransferRequest {
        let target = self.a.engine.open_segment(self.b.engine.name()).unwrap();
        let target_offset = self.b.memory.address() + BYTES - offset - length;
        TransferRequest { opcode, source: self.a.memory.address() + offset, target, target_offset, length }
    }

    fn run(&self, requests: &[TransferRequest]) {
        let batch = self.a.engine.submit(requests, &SubmitOptions::default()).unwrap();
        let status = batch.wait();
        let (ours, theirs) = (self.a.kind, self.b.kind);
        assert_eq!(status.state, TaskState::Completed, "{ours:?} {theirs:?}: {:?}", batch.problem());
        assert_eq!(status.transferred_bytes, requests.iter().map(|one| one.length).sum::<u64>());
    }

    /// Writes and reads ranges of all lengths, one by one and many in a batch.
    fn exchange(&self) {
        for (number, length) in LENGTHS.into_iter().enumerate() {
            let (offset, seed) = (number as u64 * 100, number as u64 + 1);
            self.a.write(offset, length, seed);
            self.run(&[self.request(Opcode::Write, offset, length)]);
            self.b.check(BYTES - offset - length, length, seed);
            self.b.write(BYTES - offset - length, length, !seed);
            self.run(&[self.request(Opcode::Read, offset, length)]);
            self.a.check(offset, length, !seed);
        }
        let ranges = |opcode| (0..300).map(|number| self.request(opcode, number * 9000, 5000)).collect::<Vec<_>>();
        (0..300).for_each(|number| self.a.write(number * 9000, 5000, 77 + number));
        self.run(&ranges(Opcode::Write));
        (0..300).for_each(|number| self.b.check(BYTES - number * 9000 - 5000, 5000, 77 + number));
        (0..300).for_each(|number| self.b.write(BYTES - number * 9000 - 5000, 5000, 777 + number));
        self.run(&ranges(Opcode::Read));
        (0..300).for_each(|number| self.a.check(number * 9000, 5000, 777 + number));
    }

    /// Returns the bytes that were staged, at our end and at the peer's.
    fn staged(&self) -> [u64; 2] {
        let bytes = |one: &StagingCounters| one.to_host_bytes + one.to_device_bytes;
        let own = self.a.engine.metrics().staging.values().map(bytes).sum();
        [own, self.b.engine.snapshot().unwrap().staging.values().map(bytes).sum()]
    }

    /// Returns the registrations with our devices, and with the peer's.
    fn registrations(&self) -> [Vec<DeviceRegistration>; 2] {
        [self.a.engine.metrics().registrations, served(&self.b.engine)]
    }

    /// Unregisters the memory; nothing of it is registered with a device any more, and no driver is in use.
    fn end(self) {
        let Self { fabric, a, b } = self;
        let kinds = [a.kind, b.kind];
        for side in [&a, &b] {
            side.engine.unregister(side.memory.address()).unwrap();
        }
        assert_eq!([a.engine.metrics().registrations, served(&b.engine)], [vec![], vec![]]);
        drop((a, b));
        assert_eq!((0..2 * DEVICES).map(|device| fabric.registered(device)).sum::<usize>(), 0);
        assert_eq!(fabric.violations(), 0, "memory was deregistered under a request");
        for kind in kinds {
            if kind != Kind::Host {
                assert_eq!(descriptors(), 0, "every descriptor of device memory is closed");
                assert_released(control(kind));
            }
        }
    }
}

/// Returns the registrations of an engine's segments.
fn served(engine: &TransferEngine) -> Vec<DeviceRegistration> {
    engine.snapshot().unwrap().rdma.into_iter().flat_map(|device| device.registrations).collect()
}

/// Returns the number of open descriptors of device memory.
fn descriptors() -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    links.filter(|link| link.to_string_lossy().contains("fake-devices")).count()
}

fn rules(fabric: &Loopback, devices: impl IntoIterator<Item = usize>, rule: DmaBufRule) {
    devices.into_iter().for_each(|device| fabric.set_dma_bufs(device, rule));
}

/// Exchanges bytes between device memory at either end and both, none of it staged.
fn all_direct(fabric: &Loopback, expected: impl Fn(&RegistrationPath) -> bool) {
    let device = Kind::Device(CUDA);
    for (ours, theirs) in [(device, Kind::Host), (Kind::Host, device), (device, device)] {
        let pair = Pair::new(fabric, ours, theirs);
        let open = descriptors();
        assert_eq!(open, [ours, theirs].iter().filter(|kind| **kind == device).count(), "one of each allocation");
        let flushes = control(device).calls("cuFlushGPUDirectRDMAWrites");
        pair.exchange();
        assert_eq!(pair.staged(), [0, 0], "{ours:?} {theirs:?}");
        assert!(control(device).calls("cuFlushGPUDirectRDMAWrites") > flushes, "writes of a NIC are flushed");
        for (kind, registrations) in [ours, theirs].into_iter().zip(pair.registrations()) {
            assert_eq!(registrations.len(), if kind == device { DEVICES } else { 0 });
            registrations.iter().for_each(|one| assert!(expected(&one.path), "{one}"));
        }
        pair.end();
    }
}

#[test]
fn device_memory_is_registered_as_a_whole() {
    all_direct(&fabric(), |path| *path == RegistrationPath::DmaBuf { pieces: 1 });
}

#[test]
fn device_memory_is_registered_in_pieces_where_mappings_end() {
    let fabric = fabric();
    rules(&fabric, 0..2 * DEVICES, DmaBufRule::Within(2 << 20));
    all_direct(&fabric, |path| matches!(path, RegistrationPath::DmaBuf { pieces: 3 | 4 }));
}

#[test]
fn device_memory_is_registered_by_its_address_where_there_are_no_dma_bufs() {
    let fabric = fabric();
    rules(&fabric, 0..2 * DEVICES, DmaBufRule::Refused(EOPNOTSUPP));
    (0..2 * DEVICES).for_each(|device| fabric.set_peer_memory(device, true));
    all_direct(&fabric, |path| matches!(path, RegistrationPath::PeerMemory(why) if why.kind == ObstacleKind::Refused));
}

#[test]
fn device_memory_that_no_rdma_device_registers_is_staged() {
    let (fabric, device) = (fabric(), Kind::Device(CUDA));
    rules(&fabric, 0..2 * DEVICES, DmaBufRule::Refused(EFAULT));
    let pair = Pair::new(&fabric, device, device);
    pair.exchange();
    assert!(pair.staged().iter().all(|bytes| *bytes > BYTES), "{:?}", pair.staged());
    for one in pair.registrations().concat() {
        let text = one.to_string();
        assert!(matches!(&one.path, RegistrationPath::Staged(why) if why.kind == ObstacleKind::Refused), "{text}");
        assert!(text.contains("Bad address") && text.contains("and as peer memory: loop"), "{text}");
    }
    pair.end();
}

#[test]
fn device_memory_of_a_device_without_a_flush_is_staged() {
    let device = Kind::Device(CUDA);
    control(device).forbid_flushes();
    let pair = Pair::new(&fabric(), device, device);
    pair.exchange();
    assert!(pair.staged().iter().all(|bytes| *bytes > BYTES), "{:?}", pair.staged());
    for one in pair.registrations().concat() {
        let text = one.to_string();
        assert!(matches!(&one.path, RegistrationPath::Staged(why) if why.kind == ObstacleKind::NotCapable), "{text}");
        assert!(text.contains("its driver has no flush"), "{text}");
    }
    pair.end();
}

/// At our end it is staged; the peer's is accessed directly.
#[test]
fn device_memory_that_one_of_our_rdma_devices_refuses_is_staged() {
    let (fabric, device) = (fabric(), Kind::Device(CUDA));
    rules(&fabric, [1], DmaBufRule::Refused(EOPNOTSUPP));
    let pair = Pair::new(&fabric, device, device);
    pair.exchange();
    let [own, peer] = pair.staged();
    assert!(own > BYTES && peer == 0, "{own} {peer}");
    pair.end();
}

/// The requests that our devices could make are staged, as the peer's devices do not know its memory.
#[test]
fn device_memory_that_the_peer_cannot_register_is_staged_at_both_ends() {
    let (fabric, device) = (fabric(), Kind::Device(CUDA));
    rules(&fabric, DEVICES..2 * DEVICES, DmaBufRule::Refused(EOPNOTSUPP));
    let pair = Pair::new(&fabric, device, device);
    pair.exchange();
    assert!(pair.staged().iter().all(|bytes| *bytes > BYTES), "{:?}", pair.staged());
    pair.end();
    // HIP has no descriptors here.
    let pair = Pair::new(&fabric, device, Kind::Device(HIP));
    pair.exchange();
    assert!(pair.staged().iter().all(|bytes| *bytes > BYTES), "{:?}", pair.staged());
    let [_, theirs] = pair.registrations();
    assert!(theirs.iter().all(|one| one.path.obstacle().unwrap().kind == ObstacleKind::NoDescriptor), "{theirs:?}");
    pair.end();
}

#[test]
fn transfers_go_on_when_the_ports_of_all_rdma_devices_are_down() {
    let (fabric, device) = (fabric(), Kind::Device(CUDA));
    let pair = Pair::new(&fabric, device, device);
    pair.exchange();
    assert_eq!(pair.staged(), [0, 0]);
    (0..DEVICES).for_each(|device| fabric.set_port(device, false));
    pair.exchange();
    assert!(pair.staged().iter().all(|bytes| *bytes > BYTES), "{:?}", pair.staged());
    pair.end();
}

#[test]
fn bytes_of_a_kernel_that_was_launched_before_leave_directly() {
    let (fabric, device) = (fabric(), Kind::Device(CUDA));
    let fake = control(device);
    let pair = Pair::new(&fabric, device, device);
    let write = pair.request(Opcode::Write, 0, BYTES);
    let stream = fake.stream(0);
    let named = StreamHandle { family: CUDA.family, raw: stream };
    for (number, (on, stream)) in [(stream, Some(named)), (1, None)].into_iter().enumerate() {
        fake.fill(on, pair.a.memory.address(), BYTES, number as u64, 30_000_000);
        let batch = pair.a.engine.submit(&[write], &SubmitOptions { stream, ..SubmitOptions::default() }).unwrap();
        assert_eq!(batch.wait().state, TaskState::Completed);
        let found = fake.read(pair.b.memory.address(), BYTES);
        assert!(found == kvplane_fake_devices::Control::pattern(number as u64, BYTES), "bytes left too early");
    }
    assert_eq!(pair.staged(), [0, 0]);
}

#[test]
fn metrics_and_explanations_name_the_way_of_each_registration() {
    let (fabric, device) = (fabric(), Kind::Device(CUDA));
    rules(&fabric, [1], DmaBufRule::Refused(EOPNOTSUPP));
    rules(&fabric, [2], DmaBufRule::Within(2 << 20));
    let pair = Pair::new(&fabric, device, device);
    let texts = [&pair.a, &pair.b].map(|side| side.engine.metrics_text());
    for (text, side, nic, path, reason) in [
        (&texts[0], "own", "loop0", "dma_buf", ""),
        (&texts[0], "own", "loop1", "staged", "refused"),
        (&texts[1], "peer", "loop2", "dma_buf_pieces", ""),
        (&texts[1], "peer", "loop3", "dma_buf", ""),
    ] {
        let labels = format!("device=\"cuda:0\",nic=\"{nic}\",path=\"{path}\",reason=\"{reason}\",side=\"{side}\"");
        assert!(text.contains(&format!("kvplane_device_registrations{{{labels}}} 1")), "{labels} in {text}");
    }
    let found = pair.a.engine.explain(pair.b.engine.name()).unwrap();
    let words: Vec<String> = found.registrations.iter().map(ToString::to_string).collect();
    assert!(
        words.iter().any(|words| words.contains("of cuda:0") && words.ends_with("over loop0: dma-buf")),
        "{words:?}"
    );
    assert!(words.iter().any(|words| words.contains("over loop1: staged: loop1 cannot register")), "{words:?}");
    pair.end();
}

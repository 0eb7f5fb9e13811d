//! Test bed: engines, memory with bytes that identify their positions, and a way to block on a future.

use core::future::Future;
use core::pin::pin;
use core::task::{Context, Poll, Waker};
use std::cell::Cell;
use std::sync::Arc;
use std::task::Wake;
use std::thread::Thread;
use std::time::Duration;

use kvplane_fake_devices::Control;
use kvplane_sys::device::{Device, DeviceId, DeviceMemory, Family};
use kvplane_transfer::{
    Backing, HugePages, Opcode, Pacing, RdmaConfig, RdmaUse, Region, RegionOptions, RegisterOptions, SegmentHandle,
    TransferEngine, TransferEngineConfig, TransferRequest, Transport, ZeroCopy, ZeroCopyOptions,
};

use crate::network::{self, End};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Transport to a peer of the same host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    Tcp,
    /// TCP without copies into the kernel.
    Lent,
    Shm,
    /// RDMA over software devices, or those of the machine.
    Rdma,
}

impl Way {
    /// Returns all transports; only RDMA where the tests run again over RDMA.
    pub(crate) fn all() -> Vec<Self> {
        if network::over_rdma() { vec![Self::Rdma] } else { vec![Self::Tcp, Self::Lent, Self::Shm, Self::Rdma] }
    }

    /// Returns the transport of tests that need a network, whichever it is.
    pub(crate) fn network() -> Self {
        if network::over_rdma() { Self::Rdma } else { Self::Tcp }
    }

    fn rdma(self) -> RdmaConfig {
        match self {
            Self::Rdma => network::rdma(End::Asks, RdmaUse::Require),
            Self::Tcp | Self::Lent | Self::Shm => RdmaConfig::of(RdmaUse::Never),
        }
    }

    pub(crate) fn config(self) -> TransferEngineConfig {
        let directory = std::env::temp_dir().join(format!("kvplane-transfer-{}", std::process::id()));
        TransferEngineConfig {
            shared_memory: self == Self::Shm,
            // Memory of a device in the same process cannot be mapped, and is staged over a network.
            tcp: matches!(self, Self::Tcp | Self::Lent) || (self == Self::Shm && on_devices()),
            rdma: self.rdma(),
            zero_copy: ZeroCopyOptions {
                when: if self == Self::Lent { ZeroCopy::Always } else { ZeroCopy::Auto },
                least_bytes: 4096,
            },
            runtime_directory: Some(directory),
            pacing: Pacing::Adaptive { window_ns: 20_000 },
            slice_bytes: 64 << 10,
            ..TransferEngineConfig::default()
        }
    }
}

pub(crate) fn region(bytes: usize) -> Arc<Region> {
    let options = RegionOptions { shared: true, huge: HugePages::Never, ..RegionOptions::new("test", bytes) };
    Region::allocate(&options).unwrap()
}

/// Allocates memory that other engines cannot map.
pub(crate) fn private_region(bytes: usize) -> Arc<Region> {
    let options = RegionOptions { shared: false, huge: HugePages::Never, ..RegionOptions::new("private", bytes) };
    Region::allocate(&options).unwrap()
}

/// Returns the byte that a seed gives for a position.
pub(crate) fn byte(seed: u64, at: u64) -> u8 {
    let mixed = (seed ^ (at / 8)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).to_le_bytes()[(at % 8) as usize]
}

/// Memory that tests fill and check.
pub(crate) trait TestBytes {
    /// Has `fill` write the bytes of a range, part by part.
    fn fill_with(&self, offset: usize, bytes: usize, fill: &mut dyn FnMut(u64, &mut [u8]));

    /// Passes the bytes of a range to `read`, part by part.
    fn read_with(&self, offset: usize, bytes: usize, read: &mut dyn FnMut(u64, &[u8]));
}

impl TestBytes for Region {
    fn fill_with(&self, offset: usize, bytes: usize, fill: &mut dyn FnMut(u64, &mut [u8])) {
        Self::fill_with(self, offset, bytes, &mut |at, part| fill(at, part));
    }

    fn read_with(&self, offset: usize, bytes: usize, read: &mut dyn FnMut(u64, &[u8])) {
        Self::read_with(self, offset, bytes, &mut |at, part| read(at, part));
    }
}

impl TestBytes for Arc<Region> {
    fn fill_with(&self, offset: usize, bytes: usize, fill: &mut dyn FnMut(u64, &mut [u8])) {
        TestBytes::fill_with(&**self, offset, bytes, fill);
    }

    fn read_with(&self, offset: usize, bytes: usize, read: &mut dyn FnMut(u64, &[u8])) {
        TestBytes::read_with(&**self, offset, bytes, read);
    }
}

impl TestBytes for Backing {
    fn fill_with(&self, offset: usize, bytes: usize, fill: &mut dyn FnMut(u64, &mut [u8])) {
        match self {
            Self::Host(region) => TestBytes::fill_with(region, offset, bytes, fill),
            Self::Device(memory) => {
                let mut whole = vec![0; bytes];
                fill(0, &mut whole);
                driver(memory.device().id()).write(memory.address() + offset as u64, &whole);
            }
        }
    }

    fn read_with(&self, offset: usize, bytes: usize, read: &mut dyn FnMut(u64, &[u8])) {
        match self {
            Self::Host(region) => TestBytes::read_with(region, offset, bytes, read),
            Self::Device(memory) => {
                read(0, &driver(memory.device().id()).read(memory.address() + offset as u64, bytes as u64));
            }
        }
    }
}

/// First device of CUDA.
pub(crate) const CUDA: DeviceId = DeviceId { family: Family::Cuda, ordinal: 0 };

/// Loads the driver for tests that has this device.
pub(crate) fn driver(id: DeviceId) -> Control {
    match id.family {
        Family::Cuda => kvplane_fake_cuda::load_cuda().unwrap(),
        Family::Hip => kvplane_fake_hip::load_hip().unwrap(),
        Family::Npu => kvplane_fake_npu::load_npu().unwrap(),
    }
}

/// Allocates memory of a device.
pub(crate) fn device_memory(id: DeviceId, bytes: u64) -> Backing {
    driver(id);
    DeviceMemory::allocate(&Device::open(id).unwrap(), bytes).unwrap().into()
}

/// Allocates memory of an engine: of the host, or of a device in a process that runs the tests on devices.
fn engine_memory(bytes: usize) -> Backing {
    if !on_devices() {
        return region(bytes).into();
    }
    driver(CUDA).set_copies(50_000, 0, 3);
    device_memory(CUDA, bytes as u64)
}

/// Returns true in a process in which engines have memory of devices: with `KVPLANE_TEST_MEMORY=device`.
pub(crate) fn on_devices() -> bool {
    std::env::var("KVPLANE_TEST_MEMORY").is_ok_and(|kind| kind == "device")
}

pub(crate) fn fill(memory: &impl TestBytes, offset: usize, bytes: usize, seed: u64) {
    memory.fill_with(offset, bytes, &mut |at, part| {
        for (index, out) in part.iter_mut().enumerate() {
            *out = byte(seed, at + index as u64);
        }
    });
}

/// Panics at the first byte that differs from the seed's.
pub(crate) fn check(memory: &impl TestBytes, offset: usize, bytes: usize, seed: u64) {
    memory.read_with(offset, bytes, &mut |at, part| {
        for (index, &found) in part.iter().enumerate() {
            let at = at + index as u64;
            assert_eq!(found, byte(seed, at), "byte {at} of {bytes} at {offset}, seed {seed:#x}");
        }
    });
}

/// Engine with one registered region.
pub(crate) struct Side {
    pub(crate) engine: TransferEngine,
    pub(crate) region: Backing,
    /// True if only RDMA may carry its transfers.
    rdma_only: bool,
}

thread_local! {
    /// True if the next engine of this test's thread gets the initiator's devices.
    static ASKS: Cell<bool> = const { Cell::new(true) };
}

impl Side {
    /// Creates an engine. Engines over RDMA get the devices of one end and of the other in turns, so that neighbors
    /// connect over the wire.
    pub(crate) fn new(mut config: TransferEngineConfig, bytes: usize) -> Self {
        let rdma_only = config.rdma.mode == RdmaUse::Require;
        if rdma_only {
            let end = if ASKS.replace(!ASKS.get()) { End::Asks } else { End::Serves };
            config.rdma.devices = network::devices(end);
        }
        let engine = TransferEngine::start(config).unwrap();
        let region = engine_memory(bytes);
        engine.register(region.clone(), &RegisterOptions::default()).unwrap();
        Self { engine, region, rdma_only }
    }

    /// Creates an engine with the devices of the serving end: for a process that serves.
    pub(crate) fn serving(config: TransferEngineConfig, bytes: usize) -> Self {
        ASKS.set(false);
        Self::new(config, bytes)
    }

    pub(crate) fn request(
        &self,
        opcode: Opcode,
        local: usize,
        (target, address): (SegmentHandle, u64),
        length: usize,
    ) -> TransferRequest {
        TransferRequest {
            opcode,
            source: self.region.address() + local as u64,
            target,
            target_offset: address,
            length: length as u64,
        }
    }
}

impl Drop for Side {
    /// Transfers that had to use RDMA used no other network.
    fn drop(&mut self) {
        if self.rdma_only && !std::thread::panicking() {
            let rails = self.engine.metrics().rails;
            let others = [Transport::Tcp, Transport::Shm, Transport::Cma];
            let moved: u64 = rails.iter().filter(|rail| others.contains(&rail.transport)).map(|rail| rail.bytes).sum();
            assert_eq!(moved, 0, "bytes went by others than RDMA: {rails:?}");
        }
    }
}

/// Returns the initiating engine, the serving one, and the handle of the latter.
pub(crate) fn pair(way: Way, bytes: usize) -> (Side, Side, SegmentHandle) {
    let (a, b) = (Side::new(way.config(), bytes), Side::new(way.config(), bytes));
    let handle = a.engine.open_segment(b.engine.name()).unwrap();
    (a, b, handle)
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Blocks on a future, up to the time that a test may take.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    let start = std::time::Instant::now();
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        assert!(start.elapsed() < PATIENCE, "the future was never woken");
        std::thread::park_timeout(PATIENCE);
    }
}

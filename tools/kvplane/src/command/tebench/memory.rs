//! Memory of a benchmark run: of the host, or of a GPU, whose bytes are written and verified through pinned memory.

use std::sync::{Arc, Mutex, PoisonError};

use kvplane::device::{
    Backing, CopyQueue, Device, DeviceCopy, DeviceId, DeviceMemory, DeviceRange, PinnedRegion, open_families,
};
use kvplane::{HugePages, IoBuf, Region, RegionOptions};

use super::Failure;
use super::values::{GpuChoice, MemoryType, ValueError};

/// Bytes of a GPU that are written or verified at a time.
const PIECE_BYTES: usize = 4 << 20;

/// Returns the GPUs of this machine that a side uses.
///
/// # Errors
/// When no driver has a device, or none of that number.
fn devices(gpu: GpuChoice) -> Result<Vec<DeviceId>, ValueError> {
    let mut reasons = Vec::new();
    for (family, devices) in open_families() {
        match devices {
            Ok(devices) if !devices.is_empty() => {
                let visible = devices.len();
                let ids: Vec<DeviceId> = devices.into_iter().map(|info| info.id).filter(|id| gpu.takes(*id)).collect();
                return if ids.is_empty() { Err(ValueError::NoGpu { gpu, visible }) } else { Ok(ids) };
            }
            Ok(_) => reasons.push(format!("the driver of {} devices has none", family.prefix())),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    Err(ValueError::Vram { reasons })
}

/// Allocates memory of the host for transfers.
pub(crate) fn allocate(name: &str, bytes: u64, mappable: bool) -> Result<Arc<Region>, Failure> {
    let options = RegionOptions {
        shared: mappable,
        huge: HugePages::Try,
        prefault: true,
        ..RegionOptions::new(name, usize::try_from(bytes)?)
    };
    Ok(Region::allocate(&options)?)
}

/// Memory that transfers of a run read and write.
pub(crate) enum BenchMemory {
    /// Of the host.
    Host(Arc<Region>),
    /// Of a GPU.
    Gpu {
        /// Memory.
        memory: Arc<DeviceMemory>,
        /// Access of this program to it.
        access: Mutex<GpuAccess>,
    },
}

/// Queue and pinned memory by which a GPU's bytes are written and verified.
pub(crate) struct GpuAccess {
    queue: CopyQueue,
    pinned: PinnedRegion,
}

impl GpuAccess {
    fn new(device: &Arc<Device>) -> Result<Self, Failure> {
        let options = RegionOptions { huge: HugePages::Try, ..RegionOptions::new("tebench-verify", PIECE_BYTES) };
        Ok(Self { queue: CopyQueue::new(device)?, pinned: PinnedRegion::new(device, Region::allocate(&options)?)? })
    }

    /// Returns the first `bytes` bytes of the pinned memory.
    fn host(&self, bytes: usize) -> IoBuf {
        IoBuf::new(Arc::clone(self.pinned.region()), 0, bytes)
    }

    /// Makes one copy and waits for it.
    fn copy(&mut self, copy: DeviceCopy) -> Result<(), Failure> {
        let ticket = self.queue.copy(vec![copy])?;
        while self.queue.poll()? <= ticket {
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl BenchMemory {
    /// Allocates memory of a type: of the host one buffer, which peers can map if `mappable`, of GPUs one on each.
    pub(super) fn allocate(
        kind: MemoryType,
        gpu: GpuChoice,
        name: &str,
        bytes: u64,
        mappable: bool,
    ) -> Result<Vec<Self>, Failure> {
        if kind == MemoryType::Dram {
            return Ok(vec![Self::Host(allocate(name, bytes, mappable)?)]);
        }
        let on_gpu = |id| {
            let device = Device::open(id)?;
            let memory = DeviceMemory::allocate(&device, bytes)?;
            Ok(Self::Gpu { memory, access: Mutex::new(GpuAccess::new(&device)?) })
        };
        devices(gpu)?.into_iter().map(on_gpu).collect()
    }

    /// Returns the memory as the engine registers it.
    pub(super) fn backing(&self) -> Backing {
        match self {
            Self::Host(region) => Arc::clone(region).into(),
            Self::Gpu { memory, .. } => Arc::clone(memory).into(),
        }
    }

    /// Returns the region, if the memory is the host's.
    pub(super) const fn region(&self) -> Option<&Arc<Region>> {
        match self {
            Self::Host(region) => Some(region),
            Self::Gpu { .. } => None,
        }
    }

    /// Writes `bytes` bytes from `offset` on; `fill` gives them part by part, by the distance from `offset`.
    pub(super) fn fill_with(
        &self,
        offset: u64,
        bytes: u64,
        fill: &mut dyn FnMut(u64, &mut [u8]),
    ) -> Result<(), Failure> {
        match self {
            Self::Host(region) => region.fill_with(offset as usize, bytes as usize, fill),
            Self::Gpu { memory, access } => {
                let mut access = access.lock().unwrap_or_else(PoisonError::into_inner);
                for start in (0..bytes).step_by(PIECE_BYTES) {
                    let length = (bytes - start).min(PIECE_BYTES as u64);
                    let from = access.host(length as usize);
                    from.region().fill_with(0, length as usize, &mut |at, part| fill(start + at, part));
                    access.copy(DeviceCopy::ToDevice { from, to: DeviceRange::new(memory, offset + start, length) })?;
                }
            }
        }
        Ok(())
    }

    /// Reads `bytes` bytes from `offset` on; `read` gets them part by part, with the distance from `offset`.
    pub(super) fn read_with(&self, offset: u64, bytes: u64, read: &mut dyn FnMut(u64, &[u8])) -> Result<(), Failure> {
        match self {
            Self::Host(region) => region.read_with(offset as usize, bytes as usize, read),
            Self::Gpu { memory, access } => {
                let mut access = access.lock().unwrap_or_else(PoisonError::into_inner);
                for start in (0..bytes).step_by(PIECE_BYTES) {
                    let length = (bytes - start).min(PIECE_BYTES as u64);
                    let to = access.host(length as usize);
                    let from = DeviceRange::new(memory, offset + start, length);
                    access.copy(DeviceCopy::ToHost { from, to: to.clone() })?;
                    to.region().read_with(0, length as usize, &mut |at, part| read(start + at, part));
                }
            }
        }
        Ok(())
    }
}

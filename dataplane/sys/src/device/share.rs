//! Allocations that other processes of this host map: by a handle of fixed size, or by a descriptor or fabric handle.
//!
//! A mapping is of the whole allocation, and grants reads and writes: no driver has handles that are read-only. Each
//! allocation is mapped once for each device of a process, however many callers map it, since drivers differ in what
//! they do otherwise. The mapping lasts as long as one of the callers holds it. An allocation is known by its process
//! and its buffer id, so memory that is freed and allocated anew at the same address is not taken for what it was.

use super::memory::Ownership;
use super::{Device, DeviceError, DeviceId, DeviceMemory, Family, MemoryKind};
use crate::random::random_u64;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

pub use super::driver::{HANDLE_BYTES, ShareHandle};

/// Allocation of one process, as another process of the same host maps it.
#[derive(Debug)]
pub struct SharedAllocation {
    /// Vendor interface.
    pub family: Family,
    /// Number of the device: see [`DeviceInfo::pci_number`](super::DeviceInfo::pci_number).
    pub pci: u64,
    /// Number of the process that has the allocation: see [`process_number`].
    pub process: u64,
    /// Number of the allocation in that process; 0 if its driver has no such numbers.
    pub buffer_id: u64,
    /// Length of the allocation, in bytes.
    pub bytes: u64,
    /// Offset in the allocation of the range that is shared.
    pub offset: u64,
    /// Handle.
    pub handle: ShareHandle,
}

/// Mapping in this process by a handle.
struct Mapping {
    device: DeviceId,
    process: u64,
    buffer_id: u64,
    /// Bytes of the handle.
    handle: [u8; HANDLE_BYTES],
    memory: Weak<DeviceMemory>,
}

/// Mappings of this process.
static MAPPINGS: Mutex<Vec<Mapping>> = Mutex::new(Vec::new());

/// Returns a random number that identifies this process among those of its host.
#[must_use]
pub fn process_number() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    // Without the kernel's generator, the process id distinguishes it from others that live at the same time.
    *NUMBER.get_or_init(|| random_u64().unwrap_or_else(|_| u64::from(std::process::id())))
}

impl DeviceMemory {
    /// Returns what another process of this host needs to map the allocation around the range.
    ///
    /// # Errors
    /// When the memory is managed or of another kind that is not shared, it spans several physical allocations, or the
    /// driver has neither handles nor descriptors for it.
    pub fn share(&self) -> Result<SharedAllocation, DeviceError> {
        let (device, allocation) = (self.device(), self.allocation());
        let unsupported = |what| DeviceError::Unsupported { id: device.id(), what };
        if matches!(allocation.kind, MemoryKind::Managed(_)) {
            return Err(unsupported("handles of managed memory"));
        }
        let (base, bytes, handle) = if allocation.handle {
            let handle = device.with(|driver, ordinal| driver.share(ordinal, allocation.base))?;
            (allocation.base, allocation.bytes, ShareHandle::Bytes(handle))
        } else {
            let shared = device.with(|driver, ordinal| driver.share_physical(ordinal, self.address()))?;
            (shared.base, shared.bytes, shared.handle)
        };
        let offset = self.address().saturating_sub(base);
        if offset.saturating_add(self.bytes()) > bytes {
            return Err(unsupported("handles of memory that spans several physical allocations"));
        }
        Ok(SharedAllocation {
            family: device.id().family,
            pci: device.info().pci_number(),
            process: process_number(),
            buffer_id: allocation.buffer_id,
            bytes,
            offset,
            handle,
        })
    }

    /// Maps an allocation of another process as a whole, with access for this device. The mapping ends with the last
    /// clone.
    ///
    /// # Errors
    /// When the driver rejects the handle: the allocation is gone, this process made the handle itself, or the devices
    /// cannot access each other. When the allocation is shorter than it was said to be.
    pub fn map(device: &Arc<Device>, shared: &SharedAllocation) -> Result<Arc<Self>, DeviceError> {
        let id = device.id();
        if shared.family != id.family {
            return Err(DeviceError::Unsupported { id, what: "memory of another vendor's devices" });
        }
        let handle = match &shared.handle {
            ShareHandle::Bytes(bytes) | ShareHandle::Fabric(bytes) => *bytes,
            // Descriptors cannot be told from each other, and a driver may give one number to all physical allocations
            // that are mapped in one reservation: each gets a mapping of its own.
            ShareHandle::Descriptor(_) => return Self::map_anew(device, shared),
        };
        let SharedAllocation { process, buffer_id, .. } = *shared;
        let mut known = MAPPINGS.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|one| one.memory.strong_count() > 0);
        let is_same =
            |one: &&Mapping| (one.device, one.process, one.buffer_id, one.handle) == (id, process, buffer_id, handle);
        if let Some(memory) = known.iter().find(is_same).and_then(|one| one.memory.upgrade()) {
            return Ok(memory);
        }
        let memory = Self::map_anew(device, shared)?;
        known.push(Mapping { device: id, process, buffer_id, handle, memory: Arc::downgrade(&memory) });
        Ok(memory)
    }

    /// Maps an allocation of another process, whether or not it is mapped already.
    fn map_anew(device: &Arc<Device>, shared: &SharedAllocation) -> Result<Arc<Self>, DeviceError> {
        let bytes = shared.bytes;
        match &shared.handle {
            ShareHandle::Bytes(handle) => {
                let base = device.with(|driver, ordinal| driver.map(ordinal, handle))?;
                Self::owned(device, base, bytes, Ownership::Handle)
            }
            physical @ (ShareHandle::Descriptor(_) | ShareHandle::Fabric(_)) => {
                let base = device.with(|driver, ordinal| driver.map_physical(ordinal, physical, bytes))?;
                Self::owned(device, base, bytes, Ownership::Physical)
            }
        }
    }
}

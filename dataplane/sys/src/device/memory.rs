//! Memory that copies name: ranges of device allocations, and pinned memory of the host.

use super::driver::Driver;
use super::handle::check_process;
use super::{Allocation, Device, DeviceError, MemoryKind, locate};
use crate::region::{IoBuf, Region};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Range of device memory, inside one allocation. The owner of the memory keeps it allocated; the range only knows the
/// identity of the allocation and holds the context of its device. Any thread may use it.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    allocation: Allocation,
    address: u64,
    bytes: u64,
    ownership: Ownership,
}

/// Owner of a range's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ownership {
    /// The caller that allocated it.
    Caller,
    /// This range: its memory is freed on drop.
    Range,
    /// Another process, whose allocation is mapped by its handle until the drop.
    Handle,
    /// Another process, whose physical allocation is mapped until the drop.
    Physical,
}

impl DeviceMemory {
    /// Adopts memory that the caller allocated on a device.
    ///
    /// # Errors
    /// When the address is the host's or unknown, or the range exceeds its allocation; see [`locate`] and
    /// [`Device::open`].
    ///
    /// # Safety
    /// The allocation must not be freed before the last clone of the returned `Arc` is gone: copies in flight hold
    /// clones, and an address that the driver uses again could become memory of the host.
    pub unsafe fn adopt(address: u64, bytes: u64) -> Result<Arc<Self>, DeviceError> {
        let there = locate(address, bytes)?;
        let (Some(allocation), Some(id)) = (there.allocation, there.kind.device()) else {
            return Err(DeviceError::HostMemory { address });
        };
        let device = Device::open(id)?;
        Ok(Arc::new(Self { device, allocation, address, bytes, ownership: Ownership::Caller }))
    }

    /// Allocates memory on a device, which is freed with the last clone. Its bytes are undefined.
    ///
    /// # Errors
    /// When the device has too little memory left, or is lost.
    pub fn allocate(device: &Arc<Device>, bytes: u64) -> Result<Arc<Self>, DeviceError> {
        let address = device.with(|driver, ordinal| driver.allocate(ordinal, bytes))?;
        Self::owned(device, address, bytes, Ownership::Range)
    }

    /// Describes the allocation at `base`, which the range owns; it is released if that fails.
    pub(super) fn owned(
        device: &Arc<Device>,
        base: u64,
        bytes: u64,
        ownership: Ownership,
    ) -> Result<Arc<Self>, DeviceError> {
        let kind = MemoryKind::Device(device.id());
        let allocation = Allocation { kind, base, bytes, buffer_id: 0, rdma: false, handle: false };
        let mut memory = Self { device: Arc::clone(device), allocation, address: base, bytes, ownership };
        let found = device.with(|driver, _| driver.describe(base))?;
        memory.allocation = found.ok_or(DeviceError::Stale { address: base, id: device.id() })?;
        let Allocation { base, bytes: allocated, .. } = memory.allocation;
        if !memory.allocation.covers(memory.address, bytes) {
            return Err(DeviceError::BeyondAllocation { address: memory.address, bytes, base, allocated });
        }
        Ok(Arc::new(memory))
    }

    /// Returns the device.
    #[must_use]
    pub const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the allocation around the range.
    #[must_use]
    pub const fn allocation(&self) -> &Allocation {
        &self.allocation
    }

    /// Returns the first address.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Checks that the memory is still the allocation that was adopted or allocated. A mapping of another process's
    /// memory always is.
    ///
    /// # Errors
    /// [`DeviceError::Stale`] if it was freed, whether or not the address is in use again; errors of the driver.
    pub fn check(&self) -> Result<(), DeviceError> {
        check_process()?;
        if matches!(self.ownership, Ownership::Handle | Ownership::Physical) {
            return Ok(());
        }
        let (address, bytes) = (self.address, self.bytes);
        let found = self.device.without_context(|driver| driver.describe(address))?;
        let is_same = |found: &Allocation| found.buffer_id == self.allocation.buffer_id && found.covers(address, bytes);
        match found {
            Some(found) if is_same(&found) => Ok(()),
            _ => Err(DeviceError::Stale { address, id: self.device.id() }),
        }
    }

    /// Exports the whole allocation as a dma-buf descriptor; the range begins at the returned offset in it. One
    /// descriptor serves all NICs.
    ///
    /// # Errors
    /// When the memory is managed, or the driver or the device cannot export it.
    pub fn export_dma_buf(&self) -> Result<(OwnedFd, u64), DeviceError> {
        let Allocation { kind, base, bytes, .. } = self.allocation;
        if matches!(kind, MemoryKind::Managed(_)) {
            return Err(DeviceError::Unsupported {
                id: self.device.id(),
                what: "dma-buf descriptors of managed memory",
            });
        }
        let (fd, offset) = self.device.with(|driver, ordinal| driver.export_dma_buf(ordinal, base, bytes))?;
        Ok((fd, offset + (self.address - base)))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let (address, bytes) = (self.address, self.bytes);
        let release = |driver: &dyn Driver| match self.ownership {
            Ownership::Caller => {}
            Ownership::Range => driver.free(address),
            Ownership::Handle => driver.unmap(address),
            Ownership::Physical => driver.unmap_physical(address, bytes),
        };
        if self.ownership != Ownership::Caller {
            // A context that is gone has neither allocations nor mappings.
            let _ = self.device.with(|driver, _| {
                release(driver);
                Ok(())
            });
        }
    }
}

/// Host memory that the copy engines access directly. The pinning ends on drop. Any thread may use it.
#[derive(Debug)]
pub struct PinnedRegion {
    device: Arc<Device>,
    memory: IoBuf,
}

impl PinnedRegion {
    /// Pins a region for the copy engines of all devices of this one's family.
    ///
    /// # Errors
    /// When the driver cannot pin it: out of memory, or pinned already.
    pub fn new(device: &Arc<Device>, region: Arc<Region>) -> Result<Self, DeviceError> {
        Self::of(device, IoBuf::whole(region))
    }

    /// Pins a range of a region, which begins and ends at pages, like [`Self::new`]. A copy must not cross the end of
    /// a range that was pinned by itself.
    ///
    /// # Errors
    /// When the driver cannot pin it: out of memory, or some of it is pinned already.
    pub fn of(device: &Arc<Device>, memory: IoBuf) -> Result<Self, DeviceError> {
        let address = address_of(&memory);
        // SAFETY: the range's region is held until the pinning ends.
        device.with(|driver, ordinal| unsafe { driver.pin(ordinal, address, memory.bytes()) })?;
        Ok(Self { device: Arc::clone(device), memory })
    }

    /// Returns the device whose driver has pinned it.
    #[must_use]
    pub const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the region.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        self.memory.region()
    }

    /// Returns the number of pinned bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }
}

impl Drop for PinnedRegion {
    fn drop(&mut self) {
        let address = address_of(&self.memory);
        // A context that is gone pins nothing.
        let _ = self.device.with(|driver, _| {
            driver.unpin(address);
            Ok(())
        });
    }
}

fn address_of(memory: &IoBuf) -> u64 {
    memory.region().address() + memory.offset() as u64
}

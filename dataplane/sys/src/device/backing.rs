//! Memory behind a buffer: the host's, or a device's.

use super::{DeviceError, DeviceMemory, MemoryKind, is_any_driver_loaded, locate};
use crate::memory_map::{Mapping, MemoryMap};
use crate::region::Region;
use std::sync::Arc;

/// Memory behind a buffer. Cloning is cheap and copies no bytes.
#[derive(Clone, Debug)]
pub enum Backing {
    /// Memory of the host.
    Host(Arc<Region>),
    /// Memory of a device, which the CPU does not touch; or managed memory, whose pages move.
    Device(Arc<DeviceMemory>),
}

impl Backing {
    /// Adopts memory that the caller owns, of whichever kind. No driver is loaded for it: in a process without one,
    /// all memory is the host's. Memory of the host that is not mapped writable, by the kernel's list of mappings, is
    /// adopted [read-only](Region::adopt_read_only): a peer that wrote there would end this process. A caller with many
    /// ranges reads the list once; without it, the caller is trusted.
    ///
    /// # Errors
    /// When neither the host nor a driver knows the address, the range exceeds its allocation or the device is lost; in
    /// a forked child of a process that uses a driver.
    ///
    /// # Safety
    /// The contracts of [`Region::adopt`], or of [`Region::adopt_read_only`], and [`DeviceMemory::adopt`].
    pub unsafe fn adopt(address: u64, bytes: u64, map: Option<&MemoryMap>) -> Result<Self, DeviceError> {
        if is_any_driver_loaded() && locate(address, bytes)?.kind != MemoryKind::Host {
            // SAFETY: by this function's contract.
            return unsafe { DeviceMemory::adopt(address, bytes) }.map(Self::Device);
        }
        let (start, length) = (address as *mut u8, bytes as usize);
        let is_writable = map.is_none_or(|map| map.covers(address, bytes, Mapping::is_writable));
        // SAFETY: as above.
        Ok(Self::Host(unsafe {
            if is_writable { Region::adopt(start, length) } else { Region::adopt_read_only(start, length) }
        }))
    }

    /// Returns the first address.
    #[must_use]
    pub fn address(&self) -> u64 {
        match self {
            Self::Host(region) => region.address(),
            Self::Device(memory) => memory.address(),
        }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Host(region) => region.bytes() as u64,
            Self::Device(memory) => memory.bytes(),
        }
    }

    /// Returns the region, if the memory is the host's.
    #[must_use]
    pub const fn region(&self) -> Option<&Arc<Region>> {
        match self {
            Self::Host(region) => Some(region),
            Self::Device(_) => None,
        }
    }

    /// Returns the device memory, if it is a device's.
    #[must_use]
    pub const fn device(&self) -> Option<&Arc<DeviceMemory>> {
        match self {
            Self::Host(_) => None,
            Self::Device(memory) => Some(memory),
        }
    }

    /// Returns true if this process may write to it.
    #[must_use]
    pub fn writable(&self) -> bool {
        self.region().is_none_or(|region| region.writable())
    }
}

impl From<Arc<Region>> for Backing {
    fn from(region: Arc<Region>) -> Self {
        Self::Host(region)
    }
}

impl From<Arc<DeviceMemory>> for Backing {
    fn from(memory: Arc<DeviceMemory>) -> Self {
        Self::Device(memory)
    }
}

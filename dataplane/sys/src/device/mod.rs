//! Device memory: memory of accelerators, reached through the vendors' drivers.
//!
//! A driver is a shared library that is loaded at run time, and only when an address cannot be explained by the memory
//! map of the process ([`locate`]) or a caller names a device ([`Device::open`]); the binary links none. Each vendor's
//! library is behind one trait, [`driver::Driver`]; the types here are the same for all:
//!
//! * [`Device`]: the primary context of one device, retained while anything of it is in use. No context of our own is
//!   created. A context is current on a thread only inside a call here, so threads of other owners are not disturbed;
//!   with one exception of Ascend's, where a thread that had no context keeps that of the last call.
//! * [`Backing`]: memory behind a buffer, the host's or a device's.
//! * [`DeviceMemory`]: a range of one allocation, with the identity of the allocation. The CPU never touches it.
//! * [`PinnedRegion`]: host memory that the copy engines of a device read and write directly.
//! * [`CopyQueue`]: copies in order between the two, asynchronous; completions are polled and never waited for.
//!
//! After a fork the child must not call a driver: every function here returns [`DeviceError::Forked`] there. A context
//! that is gone because the process ends is no error when something is released.

mod ascend;
mod backing;
mod captures;
mod classify;
mod cuda;
mod driver;
mod error;
mod handle;
mod hip;
mod memory;
mod queue;
mod share;

use std::ffi::CStr;
use std::fmt;

pub use backing::Backing;
pub use classify::{Location, is_any_driver_loaded, locate};
pub use error::DeviceError;
pub use handle::{Device, open_families};
pub use memory::{DeviceMemory, PinnedRegion};
pub use queue::{CopyQueue, CopyTicket, DeviceCopy, DeviceRange, StreamHandle};
pub use share::{HANDLE_BYTES, ShareHandle, SharedAllocation, process_number};

/// Vendor interface that a device is reached through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// NVIDIA: `libcuda.so.1`.
    Cuda,
    /// AMD: `libamdhip64.so`.
    Hip,
    /// Huawei's Ascend: `libascendcl.so`.
    Npu,
}

impl Family {
    /// All families, in the order in which they are tried for an address.
    pub const ALL: [Self; 3] = [Self::Cuda, Self::Hip, Self::Npu];

    /// Returns the prefix of its locations, as in Mooncake's descriptors.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Hip => "hip",
            Self::Npu => "npu",
        }
    }

    /// Returns the file name of its driver library.
    #[must_use]
    pub const fn library(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda.so.1",
            Self::Hip => "libamdhip64.so",
            Self::Npu => "libascendcl.so",
        }
    }

    /// Returns the file names that its driver library may have, for the loader. AMD's packages of Python have only the
    /// one with their version.
    const fn libraries(self) -> &'static [&'static CStr] {
        match self {
            Self::Cuda => &[c"libcuda.so.1"],
            Self::Hip => &[c"libamdhip64.so", c"libamdhip64.so.7", c"libamdhip64.so.6", c"libamdhip64.so.5"],
            Self::Npu => &[c"libascendcl.so"],
        }
    }
}

/// Device of this process: its family, and its number among the visible devices of that family. Displayed as its
/// location: `cuda:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId {
    /// Vendor interface.
    pub family: Family,
    /// Number among the visible devices.
    pub ordinal: u16,
}

impl DeviceId {
    /// Parses a location such as `cuda:0`; `None` if it names no device.
    #[must_use]
    pub fn parse(location: &str) -> Option<Self> {
        let (prefix, number) = location.split_once(':')?;
        let family = Family::ALL.into_iter().find(|family| family.prefix() == prefix)?;
        let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        if is_number { Some(Self { family, ordinal: number.parse().ok()? }) } else { None }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.family.prefix(), self.ordinal)
    }
}

/// Kind of the memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory of the host. Host memory that a driver has pinned counts as such.
    Host,
    /// Memory of a device, which the CPU must not touch.
    Device(DeviceId),
    /// Memory that the driver migrates between host and device. Its pages move, so no NIC registers it.
    Managed(DeviceId),
}

impl MemoryKind {
    /// Returns the device that the memory belongs to; `None` for the host's.
    #[must_use]
    pub const fn device(self) -> Option<DeviceId> {
        match self {
            Self::Host => None,
            Self::Device(id) | Self::Managed(id) => Some(id),
        }
    }
}

/// Properties of a device that do not change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Device.
    pub id: DeviceId,
    /// Product name.
    pub name: String,
    /// PCI address, `0000:01:00.0`, in lower case; empty if the driver does not say.
    pub pci_address: String,
    /// Number of copy engines that work concurrently with kernels.
    pub copy_engines: u32,
    /// True if the driver exports device memory as dma-buf descriptors.
    pub dma_buf: bool,
    /// NUMA node of the host that is nearest by the driver's word; `None` if it does not say.
    pub host_node: Option<u32>,
    /// True if writes of a NIC need a flush before kernels of the device see them.
    pub needs_flush: bool,
    /// True if kernels may not see writes of a NIC, and no flush helps: its memory is not for RDMA devices.
    pub hides_writes: bool,
}

/// Allocation of a device, as its driver describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Kind of the memory: on a device, or managed.
    pub kind: MemoryKind,
    /// First address of the allocation.
    pub base: u64,
    /// Length of the allocation, in bytes.
    pub bytes: u64,
    /// Number that no other allocation of this process has, also none at the same address later; 0 if the driver has
    /// no such numbers.
    pub buffer_id: u64,
    /// True if a NIC may access the memory directly.
    pub rdma: bool,
    /// True if another process can map it by a handle of fixed size.
    pub handle: bool,
}

impl DeviceInfo {
    /// Returns the PCI address as a number that all processes of this host have for the device; 0 if the driver gives
    /// none.
    #[must_use]
    pub fn pci_number(&self) -> u64 {
        let parts: Option<Vec<u64>> =
            self.pci_address.split([':', '.']).map(|part| u64::from_str_radix(part, 16).ok()).collect();
        match parts.as_deref() {
            Some(&[domain, bus, device, function]) => domain << 24 | bus << 16 | device << 8 | function,
            _ => 0,
        }
    }
}

impl Allocation {
    /// Returns true if `address .. address + bytes` is inside the allocation.
    #[must_use]
    pub const fn covers(&self, address: u64, bytes: u64) -> bool {
        address >= self.base && address - self.base <= self.bytes && bytes <= self.bytes - (address - self.base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_those_of_mooncake_and_nothing_else_parses() {
        let id = DeviceId { family: Family::Cuda, ordinal: 13 };
        assert_eq!(id.to_string(), "cuda:13");
        assert_eq!(DeviceId::parse("cuda:13"), Some(id));
        for family in Family::ALL {
            let id = DeviceId { family, ordinal: 1 };
            assert_eq!(DeviceId::parse(&id.to_string()), Some(id));
        }
        assert_eq!(DeviceId::parse("npu:7"), Some(DeviceId { family: Family::Npu, ordinal: 7 }));
        for other in ["cpu:0", "cuda", "cuda:", "cuda:-1", "cuda:+1", "cuda:65536", "cuda:1:2", "CUDA:1", "*", ""] {
            assert_eq!(DeviceId::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_device_has_one_number_in_all_processes() {
        let info = |pci_address: &str| DeviceInfo {
            id: DeviceId { family: Family::Cuda, ordinal: 0 },
            name: String::new(),
            pci_address: pci_address.to_owned(),
            copy_engines: 1,
            dma_buf: false,
            host_node: None,
            needs_flush: false,
            hides_writes: false,
        };
        assert_eq!(info("0000:a1:00.0").pci_number(), 0x00a1_0000);
        assert_eq!(info("0001:02:1f.7").pci_number(), 0x0102_1f07);
        assert!(["", "a1:00.0", "0000:a1:00.0.1", "0000:xx:00.0"].iter().all(|text| info(text).pci_number() == 0));
    }

    #[test]
    fn a_range_beyond_its_allocation_is_not_covered() {
        let kind = MemoryKind::Device(DeviceId { family: Family::Cuda, ordinal: 0 });
        let allocation = Allocation { kind, base: 4096, bytes: 4096, buffer_id: 1, rdma: true, handle: true };
        assert!(allocation.covers(4096, 4096) && allocation.covers(8191, 1) && allocation.covers(8192, 0));
        for (address, bytes) in [(4095, 1), (4096, 4097), (8191, 2), (8193, 0), (5000, u64::MAX), (u64::MAX, 1)] {
            assert!(!allocation.covers(address, bytes), "{address} {bytes}");
        }
    }
}

//! Errors of device memory: which call of which driver failed, at which address, and what to do.

use super::{DeviceId, Family};
use std::ffi::CStr;
use std::fmt;
use std::io;

/// Error of a driver, or of an address that was given to it.
#[derive(Debug)]
pub enum DeviceError {
    /// The driver library is not installed, or does not load.
    NoDriver {
        /// Vendor interface.
        family: Family,
        /// Reason that the loader gave.
        detail: String,
    },
    /// The driver lacks a function that is needed.
    OldDriver {
        /// Vendor interface.
        family: Family,
        /// Missing function.
        function: &'static str,
        /// First driver version that has it, as the vendor writes it.
        since: &'static str,
    },
    /// The driver has no device of this number.
    NoDevice {
        /// Device that was named.
        id: DeviceId,
        /// Number of devices that are visible.
        visible: usize,
    },
    /// Neither the memory map of this process nor a driver knows the address.
    UnknownAddress {
        /// Address.
        address: u64,
        /// Reasons why drivers could not be asked, if there are any.
        detail: String,
    },
    /// Memory of the host where a device's is needed.
    HostMemory {
        /// Address.
        address: u64,
    },
    /// The range does not lie inside one allocation.
    BeyondAllocation {
        /// First address of the range.
        address: u64,
        /// Length of the range, in bytes.
        bytes: u64,
        /// First address of the allocation.
        base: u64,
        /// Length of the allocation, in bytes.
        allocated: u64,
    },
    /// The allocation was freed, or freed and allocated anew at the same address.
    Stale {
        /// Address.
        address: u64,
        /// Device.
        id: DeviceId,
    },
    /// The device, or its context, is lost; nothing on it can be read any more.
    Lost {
        /// Device.
        id: DeviceId,
        /// Failed call.
        call: &'static str,
        /// Error code of the driver.
        code: i32,
    },
    /// The driver rejected a call.
    Call {
        /// Device.
        id: DeviceId,
        /// Failed call.
        call: &'static str,
        /// Error code of the driver.
        code: i32,
        /// Name of the code.
        name: String,
    },
    /// The device, or the host, has no memory left for this.
    OutOfMemory {
        /// Device.
        id: DeviceId,
        /// Failed call.
        call: &'static str,
    },
    /// The device does not support an operation.
    Unsupported {
        /// Device.
        id: DeviceId,
        /// Missing ability.
        what: &'static str,
    },
    /// This process is a forked child of the one that uses the driver.
    Forked,
    /// The memory map of this process cannot be read.
    MemoryMap(io::Error),
}

impl DeviceError {
    /// Returns true if no copy of this process on the device will be reported as done any more: the device is lost, or
    /// this is a forked child.
    #[must_use]
    pub const fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Forked)
    }

    /// Returns the error of a device that answers nothing of its work any more, whatever it has answered.
    pub(super) fn into_lost(self) -> Self {
        match self {
            Self::Call { id, call, code, .. } => Self::Lost { id, call, code },
            Self::OutOfMemory { id, call } | Self::Unsupported { id, what: call } => Self::Lost { id, call, code: 0 },
            Self::NoDevice { id, .. } => Self::Lost { id, call: "a query of its copies", code: 0 },
            other => other,
        }
    }

    /// Returns the error of a driver without this function, which it has since that version.
    pub(super) fn old(family: Family, function: &'static CStr, since: &'static str) -> Self {
        Self::OldDriver { family, function: function.to_str().unwrap_or_default(), since }
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDriver { family, detail } => write!(
                f,
                "the driver of {} devices cannot be loaded: {detail}; install it, or make {} visible to the loader",
                family.prefix(),
                family.library()
            ),
            Self::OldDriver { family, function, since } => write!(
                f,
                "the driver of {} devices is too old: it lacks {function}; install version {since} or newer",
                family.prefix()
            ),
            Self::NoDevice { id, visible } => {
                write!(f, "there is no device {id}: {visible} of its kind are visible to this process")
            }
            Self::UnknownAddress { address, detail } if detail.is_empty() => {
                write!(f, "address {address:#x} is neither memory of this process nor of a device")
            }
            Self::UnknownAddress { address, detail } => {
                write!(f, "address {address:#x} is not memory of this process, and no driver can tell more: {detail}")
            }
            Self::HostMemory { address } => write!(f, "address {address:#x} is memory of the host, not of a device"),
            Self::BeyondAllocation { address, bytes, base, allocated } => write!(
                f,
                "{bytes} bytes at {address:#x} exceed the allocation of {allocated} bytes at {base:#x}; register each \
                 allocation by itself"
            ),
            Self::Stale { address, id } => write!(
                f,
                "the memory at {address:#x} on {id} was freed after its registration; unregister it before it is freed"
            ),
            Self::Lost { id, call, code } => {
                write!(f, "device {id} is lost: {call} failed with {code}; restart the process")
            }
            Self::Call { id, call, code, name } => write!(f, "{call} failed on {id} with {name} ({code})"),
            Self::OutOfMemory { id, call } => {
                write!(
                    f,
                    "{call} failed on {id}: out of memory; free some, or raise the limit of locked memory (ulimit -l)"
                )
            }
            Self::Unsupported { id, what } => write!(f, "device {id} does not support {what}"),
            Self::Forked => f.write_str(
                "devices cannot be used in a forked child; start a new process (spawn), or fork before the first use",
            ),
            Self::MemoryMap(error) => write!(f, "/proc/self/maps cannot be read: {error}"),
        }
    }
}

impl std::error::Error for DeviceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::MemoryMap(error) => Some(error),
            _ => None,
        }
    }
}

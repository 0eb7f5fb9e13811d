//! Kind of the memory at an address: the memory map of the process first, drivers only for what it does not explain.
//!
//! Host memory is a readable mapping that is not of a driver's device file. Device memory is mapped without access, by
//! a device file, or not at all. So a process without accelerators never loads a driver.

use super::handle::{check_process, driver};
use super::{Allocation, DeviceError, Family, MemoryKind};
use crate::library::Library;
use crate::memory_map::{Mapping, MemoryMap};
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// Kind of the memory.
    pub kind: MemoryKind,
    /// Allocation around it; `None` for host memory.
    pub allocation: Option<Allocation>,
}

impl Location {
    const HOST: Self = Self { kind: MemoryKind::Host, allocation: None };
}

/// Returns the kind of the memory at `address .. address + bytes`, and its allocation if a device owns it. Reads the
/// memory map of the process, and asks drivers if that does not explain the range.
///
/// # Errors
/// When neither explains the range, or it exceeds its allocation; in a forked child of a process that uses a driver.
pub fn locate(address: u64, bytes: u64) -> Result<Location, DeviceError> {
    if MemoryMap::read().map_err(DeviceError::MemoryMap)?.is_host(address, bytes) {
        return Ok(Location::HOST);
    }
    check_process()?;
    let mut reasons = Vec::new();
    for family in Family::ALL {
        let found = match driver(family) {
            Ok(driver) => driver.describe(address)?,
            Err(error) => {
                reasons.push(error.to_string());
                None
            }
        };
        let Some(allocation) = found else { continue };
        if !allocation.covers(address, bytes) {
            let Allocation { base, bytes: allocated, .. } = allocation;
            return Err(DeviceError::BeyondAllocation { address, bytes, base, allocated });
        }
        return Ok(Location { kind: allocation.kind, allocation: Some(allocation) });
    }
    // A driver may map the host memory that it pins from a device file of its own.
    let map = MemoryMap::read().map_err(DeviceError::MemoryMap)?;
    if map.covers(address, bytes, Mapping::is_readable) {
        return Ok(Location::HOST);
    }
    Err(DeviceError::UnknownAddress { address, detail: reasons.join("; ") })
}

/// Returns true if this process has loaded a driver library, by itself or by another library such as CUDA's runtime.
/// Otherwise no address of it is a device's: for callers that spare themselves the memory map. Takes under a
/// microsecond, unless the process has loaded a library since the last call.
#[must_use]
pub fn is_any_driver_loaded() -> bool {
    /// Number of libraries that the process had loaded, none of them a driver, plus 1; 0 before the first look. The
    /// greatest number once there is a driver: none is ever unloaded.
    static SEEN: AtomicU64 = AtomicU64::new(0);
    const ANY: u64 = u64::MAX;
    let loads = Library::loads();
    let seen = SEEN.load(Ordering::Relaxed);
    if seen == ANY || seen == loads + 1 {
        return seen == ANY;
    }
    let found = Family::ALL.iter().flat_map(|family| family.libraries()).any(|name| Library::is_loaded(name));
    SEEN.store(if found { ANY } else { loads + 1 }, Ordering::Relaxed);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{Region, RegionOptions};

    #[test]
    fn memory_of_this_process_is_the_hosts_and_no_driver_is_loaded_for_it() {
        let region = Region::allocate(&RegionOptions::new("classify", 1 << 20)).unwrap();
        let there = locate(region.address(), 1 << 20).unwrap();
        assert_eq!(there, Location { kind: MemoryKind::Host, allocation: None });
    }
}

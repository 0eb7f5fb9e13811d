//! Kind of the memory at an address: the memory map of the process first, drivers only for what it does not explain.
//!
//! Host memory is a readable mapping that is not of a driver's device file. Device memory is mapped without access, by
//! a device file, or not at all. So a process without accelerators never loads a driver.

use super::handle::{check_process, driver};
use super::{Allocation, DeviceError, Family, MemoryKind};
use std::fs;

/// Device files of drivers: memory that is mapped from them may be the device's.
const DEVICE_FILES: [&str; 4] = ["/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci"];

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
    if is_explained(address, bytes)? {
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
    Err(DeviceError::UnknownAddress { address, detail: reasons.join("; ") })
}

/// Returns true if the memory map of this process shows host memory at every byte of the range.
///
/// # Errors
/// When the kernel does not show the map.
pub fn is_explained(address: u64, bytes: u64) -> Result<bool, DeviceError> {
    let map = fs::read_to_string("/proc/self/maps").map_err(DeviceError::MemoryMap)?;
    Ok(explains(&map, address, bytes))
}

/// Returns true if readable mappings of this map that are no device file's cover the range without a gap.
fn explains(map: &str, address: u64, bytes: u64) -> bool {
    let Some(end) = address.checked_add(bytes.max(1)) else { return false };
    let mut next = address;
    for line in map.lines() {
        let Some(mapping) = Mapping::parse(line) else { continue };
        if mapping.end <= next {
            continue;
        }
        if mapping.start > next || !mapping.is_host {
            return false;
        }
        next = mapping.end;
        if next >= end {
            return true;
        }
    }
    false
}

/// One line of the map.
struct Mapping {
    start: u64,
    end: u64,
    is_host: bool,
}

impl Mapping {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let is_readable = fields.next()?.starts_with('r');
        // Behind the offset, the device and the inode.
        let path = fields.nth(3).unwrap_or("");
        let is_host = is_readable && !DEVICE_FILES.iter().any(|file| path.starts_with(file));
        Some(Self { start, end, is_host })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{Region, RegionOptions};

    const MAP: &str = "\
        1000-3000 r-xp 00000000 08:01 42                         /usr/bin/program\n\
        3000-4000 rw-p 00000000 00:00 0 \n\
        4000-5000 ---p 00000000 00:00 0 \n\
        6000-7000 rw-s 00000000 00:05 9                          /dev/nvidia-uvm\n\
        7000-8000 rw-s 00000000 00:05 9                          /memfd:pool (deleted)\n";

    #[test]
    fn readable_mappings_explain_what_they_cover_without_a_gap() {
        for (address, bytes) in [(0x1000, 1), (0x1000, 0x3000), (0x2fff, 2), (0x3fff, 0), (0x7000, 0x1000)] {
            assert!(explains(MAP, address, bytes), "{address:#x} {bytes:#x}");
        }
    }

    #[test]
    fn memory_of_a_device_file_or_without_access_or_beyond_a_mapping_is_not_explained() {
        let ranges = [
            (0, 1),
            (0xfff, 2),
            (0x3fff, 2),
            (0x4000, 1),
            (0x5000, 1),
            (0x6000, 0x1000),
            (0x6fff, 2),
            (0x7fff, 2),
            (0x8000, 0),
            (u64::MAX, 1),
        ];
        for (address, bytes) in ranges {
            assert!(!explains(MAP, address, bytes), "{address:#x} {bytes:#x}");
        }
    }

    #[test]
    fn memory_of_this_process_is_the_hosts_and_no_driver_is_loaded_for_it() {
        let region = Region::allocate(&RegionOptions::new("classify", 1 << 20)).unwrap();
        let there = locate(region.address(), 1 << 20).unwrap();
        assert_eq!(there, Location { kind: MemoryKind::Host, allocation: None });
    }
}

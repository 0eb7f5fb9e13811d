//! Memory map of this process, as the kernel shows it.

use std::{fs, io};

/// Device files of drivers: memory that is mapped from them may be the device's.
const DEVICE_FILES: [&str; 5] = ["/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci", "/dev/devmm_svm"];

/// Mappings of this process at one time.
#[derive(Debug)]
pub struct MemoryMap {
    text: String,
}

impl MemoryMap {
    /// Reads the map.
    ///
    /// # Errors
    /// When the kernel does not show it.
    pub fn read() -> io::Result<Self> {
        Ok(Self { text: fs::read_to_string("/proc/self/maps")? })
    }

    /// Returns true if mappings that `counts` accepts cover the range without a gap. An empty range counts as one byte.
    pub fn covers(&self, address: u64, bytes: u64, counts: impl Fn(&Mapping) -> bool) -> bool {
        let Some(end) = address.checked_add(bytes.max(1)) else { return false };
        let mut next = address;
        for line in self.text.lines() {
            let Some(mapping) = Mapping::parse(line) else { continue };
            if mapping.end <= next {
                continue;
            }
            if mapping.start > next || !counts(&mapping) {
                return false;
            }
            next = mapping.end;
            if next >= end {
                return true;
            }
        }
        false
    }

    /// Returns true if every byte of the range is host memory.
    #[must_use]
    pub fn is_host(&self, address: u64, bytes: u64) -> bool {
        self.covers(address, bytes, Mapping::is_host)
    }
}

/// Mapping of the process.
#[derive(Debug)]
pub struct Mapping {
    start: u64,
    end: u64,
    is_readable: bool,
    is_writable: bool,
    is_of_device: bool,
}

impl Mapping {
    /// Returns true if the process may read the memory.
    #[must_use]
    pub const fn is_readable(&self) -> bool {
        self.is_readable
    }

    /// Returns true if the process may read and write the memory.
    #[must_use]
    pub const fn is_writable(&self) -> bool {
        self.is_readable && self.is_writable
    }

    /// Returns true for readable memory that is no device file's.
    const fn is_host(&self) -> bool {
        self.is_readable && !self.is_of_device
    }

    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let rights = fields.next()?.as_bytes();
        // Behind the offset, the device and the inode.
        let path = fields.nth(3).unwrap_or("");
        Some(Self {
            start,
            end,
            is_readable: rights.first() == Some(&b'r'),
            is_writable: rights.get(1) == Some(&b'w'),
            is_of_device: DEVICE_FILES.iter().any(|file| path.starts_with(file)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "\
        1000-3000 r-xp 00000000 08:01 42                         /usr/bin/program\n\
        3000-4000 rw-p 00000000 00:00 0 \n\
        4000-5000 ---p 00000000 00:00 0 \n\
        6000-7000 rw-s 00000000 00:05 9                          /dev/nvidia-uvm\n\
        7000-8000 rw-s 00000000 00:05 9                          /memfd:pool (deleted)\n";

    fn map() -> MemoryMap {
        MemoryMap { text: MAP.to_owned() }
    }

    #[test]
    fn readable_mappings_explain_what_they_cover_without_a_gap() {
        for (address, bytes) in [(0x1000, 1), (0x1000, 0x3000), (0x2fff, 2), (0x3fff, 0), (0x7000, 0x1000)] {
            assert!(map().is_host(address, bytes), "{address:#x} {bytes:#x}");
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
            assert!(!map().is_host(address, bytes), "{address:#x} {bytes:#x}");
        }
    }

    #[test]
    fn rights_of_ranges_are_those_of_all_their_mappings() {
        let rights = |address, bytes| {
            [Mapping::is_readable, Mapping::is_writable].map(|counts| map().covers(address, bytes, counts))
        };
        assert_eq!(rights(0x1000, 0x2000), [true, false]);
        assert_eq!(rights(0x2000, 0x2000), [true, false]);
        assert_eq!(rights(0x3000, 0x1000), [true, true]);
        assert_eq!(rights(0x3000, 0x1001), [false, false]);
        assert_eq!(rights(0x6000, 0x2000), [true, true]);
    }
}

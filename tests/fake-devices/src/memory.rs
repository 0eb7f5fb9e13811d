//! Device memory: allocations in an address range without access.

use libc::{c_int, c_void};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;

/// Address range of one device. Reserved and never accessible.
pub(crate) const ARENA_BYTES: u64 = 1 << 38;
/// Alignment of allocations.
const ALIGN: u64 = 512;

/// Allocation of device memory.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) device: usize,
    pub(crate) buffer_id: u64,
    pub(crate) managed: bool,
    /// True for a mapping of another process's allocation.
    pub(crate) imported: bool,
    pub(crate) fd: c_int,
    /// Where the driver maps the bytes.
    pub(crate) alias: *mut u8,
}

// SAFETY: the alias is a mapping of the whole process, and only copies access it.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Allocation {
    fn mapped_bytes(&self) -> usize {
        (self.bytes as usize).next_multiple_of(4096)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: mapped by this allocation; copies in flight hold the `Arc`.
        unsafe { libc::munmap(self.alias.cast(), self.mapped_bytes()) };
        // SAFETY: opened by this allocation.
        unsafe { libc::close(self.fd) };
    }
}

/// Memory of all devices.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    arenas: Vec<u64>,
    allocations: BTreeMap<u64, Arc<Allocation>>,
    last_id: u64,
}

impl Memory {
    /// Reserves the address ranges.
    pub(crate) fn new(devices: usize) -> Self {
        let reserve = || {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new mapping at an address of the kernel's choice.
            let at = unsafe { libc::mmap(ptr::null_mut(), ARENA_BYTES as usize, libc::PROT_NONE, flags, -1, 0) };
            assert!(at != libc::MAP_FAILED, "reserves {ARENA_BYTES} bytes of addresses");
            at as u64
        };
        Self { arenas: (0..devices).map(|_| reserve()).collect(), ..Self::default() }
    }

    /// Allocates on a device, at the lowest address that is free, with fresh bytes or those of `fd`.
    pub(crate) fn allocate(
        &mut self,
        device: usize,
        bytes: u64,
        managed: bool,
        imported: Option<c_int>,
    ) -> Option<u64> {
        let start = *self.arenas.get(device)?;
        let mut base = start;
        for other in self.allocations.range(start..start + ARENA_BYTES).map(|(_, other)| other) {
            if other.base - base >= bytes {
                break;
            }
            base = (other.base + other.bytes).next_multiple_of(ALIGN);
        }
        if base + bytes > start + ARENA_BYTES || bytes == 0 {
            return None;
        }
        let fd = imported.unwrap_or_else(|| {
            // SAFETY: a constant name.
            unsafe { libc::memfd_create(c"fake-devices".as_ptr(), libc::MFD_CLOEXEC) }
        });
        let length = (bytes as usize).next_multiple_of(4096);
        // SAFETY: a descriptor of this function.
        if fd < 0 || imported.is_none() && unsafe { libc::ftruncate(fd, length as i64) } != 0 {
            return None;
        }
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let alias = unsafe { libc::mmap(ptr::null_mut(), length, rights, libc::MAP_SHARED, fd, 0) };
        if alias == libc::MAP_FAILED {
            // SAFETY: a descriptor of this function.
            unsafe { libc::close(fd) };
            return None;
        }
        self.last_id += 1;
        let (buffer_id, imported) = (self.last_id, imported.is_some());
        let alias = alias.cast();
        let allocation = Allocation { base, bytes, device, buffer_id, managed, imported, fd, alias };
        self.allocations.insert(base, Arc::new(allocation));
        Some(base)
    }

    /// Frees the allocation that begins at `base`.
    pub(crate) fn free(&mut self, base: u64) -> bool {
        self.allocations.remove(&base).is_some()
    }

    /// Returns the allocation around an address.
    pub(crate) fn find(&self, address: u64) -> Option<&Arc<Allocation>> {
        let (_, found) = self.allocations.range(..=address).next_back()?;
        (address < found.base + found.bytes).then_some(found)
    }

    /// Returns true if the address is in the range of a device, allocated or not.
    pub(crate) fn is_device(&self, address: u64) -> bool {
        self.arenas.iter().any(|&start| (start..start + ARENA_BYTES).contains(&address))
    }

    /// Returns where the driver accesses a range of device memory, and the allocation; `None` if none covers it.
    pub(crate) fn alias(&self, address: u64, bytes: u64) -> Option<(*mut u8, Arc<Allocation>)> {
        let found = self.find(address)?;
        let offset = address - found.base;
        (bytes <= found.bytes - offset).then(|| (found.alias.wrapping_add(offset as usize), Arc::clone(found)))
    }

    /// Returns the number of allocations.
    pub(crate) fn count(&self) -> usize {
        self.allocations.len()
    }
}

/// Opens the memory behind another process's allocation.
pub(crate) fn open_foreign(pid: u32, fd: u32) -> Option<c_int> {
    let path = format!("/proc/{pid}/fd/{fd}\0");
    // SAFETY: the path ends with a zero byte.
    let opened = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDWR | libc::O_CLOEXEC) };
    (opened >= 0).then_some(opened)
}

/// Copies bytes between mappings.
///
/// # Safety
/// Both ranges are mapped.
pub(crate) unsafe fn copy_bytes(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: by this function's contract; the ranges may overlap.
    unsafe { libc::memmove(to.cast::<c_void>(), from.cast::<c_void>(), bytes) };
}

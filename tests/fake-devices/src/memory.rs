//! Device memory: allocations in an address range without access.

use libc::{c_int, c_void};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;

/// Address range of one device. Reserved and never accessible.
pub(crate) const ARENA_BYTES: u64 = 1 << 38;
/// Unit of descriptors for RDMA devices, in which allocations may lie side by side.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Alignment of allocations.
const ALIGN: u64 = 512;

/// Origin of an allocation's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Allocated here as a whole.
    Own,
    /// Mapping of another process's allocation by its handle.
    Handle(crate::exports::Handle),
    /// Mapping of a physical allocation of the virtual-memory interface.
    Mapped {
        /// Number of the physical allocation.
        handle: u64,
        /// True once a device has access.
        accessible: bool,
    },
}

/// File with an allocation's bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct File {
    pub(crate) fd: c_int,
    /// Offset of the first byte.
    pub(crate) offset: u64,
}

/// Allocation of device memory.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) device: usize,
    pub(crate) buffer_id: u64,
    pub(crate) managed: bool,
    /// Where the bytes come from.
    pub(crate) source: Source,
    pub(crate) fd: c_int,
    /// Offset of the bytes in the file: as far as the allocation begins behind its page.
    pub(crate) offset: u64,
    /// Where the driver maps the bytes.
    pub(crate) alias: *mut u8,
}

// SAFETY: the alias is a mapping of the whole process, and only copies access it.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: mapped by this allocation; copies in flight hold the `Arc`.
        unsafe { libc::munmap(self.alias.wrapping_sub(self.offset as usize).cast(), mapped(self.offset, self.bytes)) };
        // SAFETY: opened by this allocation.
        unsafe { libc::close(self.fd) };
    }
}

/// Returns the length of the pages of an allocation that begins at this offset of the first one.
const fn mapped(offset: u64, bytes: u64) -> usize {
    (offset + bytes).next_multiple_of(PAGE_BYTES) as usize
}

/// Memory of all devices.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    arenas: Vec<u64>,
    allocations: BTreeMap<u64, Arc<Allocation>>,
    /// Reserved addresses: length by the first address.
    reserved: BTreeMap<u64, u64>,
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

    /// Allocates on a device, at the lowest address that is free.
    pub(crate) fn allocate(&mut self, device: usize, bytes: u64, managed: bool) -> Option<u64> {
        let base = self.place(device, bytes, ALIGN)?;
        let offset = base % PAGE_BYTES;
        let fd = create(offset + bytes)?;
        self.insert(device, base, bytes, managed, File { fd, offset }, Source::Own)
    }

    /// Maps the bytes of a file, at the lowest address of a device that is free.
    pub(crate) fn import(&mut self, device: usize, bytes: u64, file: File, source: Source) -> Option<u64> {
        let base = self.place(device, bytes, ALIGN)?;
        self.insert(device, base, bytes, false, file, source)
    }

    /// Returns the lowest address of a device with so many free bytes.
    fn place(&self, device: usize, bytes: u64, align: u64) -> Option<u64> {
        let start = *self.arenas.get(device)?;
        let mut base = start.next_multiple_of(align);
        let taken = |from: u64, bytes: u64| (from, from + bytes);
        let allocations = self.allocations.values().map(|one| taken(one.base, one.bytes));
        let mut taken: Vec<(u64, u64)> =
            allocations.chain(self.reserved.iter().map(|(&from, &bytes)| taken(from, bytes))).collect();
        taken.sort_unstable();
        for (from, end) in taken.into_iter().filter(|&(from, _)| (start..start + ARENA_BYTES).contains(&from)) {
            if from >= base && from - base >= bytes {
                break;
            }
            base = base.max(end.next_multiple_of(align));
        }
        (base + bytes <= start + ARENA_BYTES && bytes > 0).then_some(base)
    }

    /// Reserves addresses of a device for mappings.
    pub(crate) fn reserve(&mut self, device: usize, bytes: u64, align: u64) -> Option<u64> {
        let base = self.place(device, bytes, align)?;
        self.reserved.insert(base, bytes);
        Some(base)
    }

    /// Gives a reservation back. Returns false if there is none, or something is mapped in it.
    pub(crate) fn unreserve(&mut self, base: u64, bytes: u64) -> bool {
        let is_mapped = self.allocations.range(base..base + bytes).next().is_some();
        !is_mapped && self.reserved.get(&base) == Some(&bytes) && self.reserved.remove(&base).is_some()
    }

    /// Returns true if a range is reserved, and nothing is mapped in it.
    pub(crate) fn is_vacant(&self, base: u64, bytes: u64) -> bool {
        let around = self.reserved.range(..=base).next_back();
        let is_reserved = around.is_some_and(|(&from, &length)| base + bytes <= from + length);
        is_reserved && self.allocations.range(base..base + bytes).next().is_none() && self.find(base).is_none()
    }

    /// Returns the device whose addresses these are.
    pub(crate) fn device_of(&self, address: u64) -> Option<usize> {
        self.arenas.iter().position(|&start| (start..start + ARENA_BYTES).contains(&address))
    }

    /// Adds an allocation at `base` with the bytes of a file, which it closes in the end.
    pub(crate) fn insert(
        &mut self,
        device: usize,
        base: u64,
        bytes: u64,
        managed: bool,
        File { fd, offset }: File,
        source: Source,
    ) -> Option<u64> {
        let length = mapped(offset, bytes);
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let alias = unsafe { libc::mmap(ptr::null_mut(), length, rights, libc::MAP_SHARED, fd, 0) };
        if alias == libc::MAP_FAILED {
            // SAFETY: a descriptor of this function.
            unsafe { libc::close(fd) };
            return None;
        }
        self.last_id += 1;
        let buffer_id = self.last_id;
        let alias = alias.cast::<u8>().wrapping_add(offset as usize);
        let allocation = Allocation { base, bytes, device, buffer_id, managed, source, fd, offset, alias };
        self.allocations.insert(base, Arc::new(allocation));
        Some(base)
    }

    /// Frees the allocation that begins at `base`.
    pub(crate) fn free(&mut self, base: u64) -> bool {
        self.allocations.remove(&base).is_some()
    }

    /// Gives every device access to what is mapped at `base`. Returns false if nothing is.
    pub(crate) fn allow(&mut self, base: u64) -> bool {
        let Some(found) = self.allocations.get_mut(&base).and_then(Arc::get_mut) else { return false };
        if let Source::Mapped { accessible, .. } = &mut found.source {
            *accessible = true;
        }
        true
    }

    /// Returns the allocations.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Allocation>> {
        self.allocations.values()
    }

    /// Returns the allocation around an address.
    pub(crate) fn find(&self, address: u64) -> Option<&Arc<Allocation>> {
        let (_, found) = self.allocations.range(..=address).next_back()?;
        (address < found.base + found.bytes).then_some(found)
    }

    /// Returns an allocation whose whole pages these are.
    pub(crate) fn find_pages(&self, start: u64, bytes: u64) -> Option<&Arc<Allocation>> {
        let mut in_first = self.allocations.range(start..start + PAGE_BYTES).map(|(_, found)| found);
        in_first.find(|found| found.base - start == found.offset && mapped(found.offset, found.bytes) as u64 == bytes)
    }

    /// Returns true if the address is in the range of a device, allocated or not.
    pub(crate) fn is_device(&self, address: u64) -> bool {
        self.arenas.iter().any(|&start| (start..start + ARENA_BYTES).contains(&address))
    }

    /// Returns where the driver accesses a range of device memory, and the allocation; `None` if none covers it.
    pub(crate) fn alias(&self, address: u64, bytes: u64) -> Option<(*mut u8, Arc<Allocation>)> {
        let found = self.find(address)?;
        let offset = address - found.base;
        let is_accessible = !matches!(found.source, Source::Mapped { accessible: false, .. });
        let is_inside = bytes <= found.bytes - offset;
        (is_inside && is_accessible).then(|| (found.alias.wrapping_add(offset as usize), Arc::clone(found)))
    }

    /// Returns the length of the reservation that begins at an address.
    pub(crate) fn reserved_at(&self, base: u64) -> Option<u64> {
        self.reserved.get(&base).copied()
    }

    /// Returns the number of reservations.
    pub(crate) fn reservations(&self) -> usize {
        self.reserved.len()
    }

    /// Returns the number of allocations.
    pub(crate) fn count(&self) -> usize {
        self.allocations.len()
    }
}

/// Creates memory of so many bytes.
pub(crate) fn create(bytes: u64) -> Option<c_int> {
    // SAFETY: a constant name.
    let fd = unsafe { libc::memfd_create(c"fake-devices".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: a descriptor of this function.
    (fd >= 0 && unsafe { libc::ftruncate(fd, bytes.next_multiple_of(4096) as i64) } == 0).then_some(fd)
}

/// Returns the number of the file behind a descriptor; 0 if there is none.
pub(crate) fn inode(fd: c_int) -> u64 {
    // SAFETY: a record of integers, for which zeros are valid.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: stores one record.
    if unsafe { libc::fstat(fd, &raw mut found) } == 0 { found.st_ino } else { 0 }
}

/// Opens the memory behind another process's allocation, unless the descriptor is of other memory by now.
pub(crate) fn open_foreign(pid: u32, fd: u32, file: u64) -> Option<c_int> {
    let path = format!("/proc/{pid}/fd/{fd}\0");
    // SAFETY: the path ends with a zero byte.
    let opened = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDWR | libc::O_CLOEXEC) };
    if opened >= 0 && inode(opened) != file {
        // SAFETY: opened above.
        unsafe { libc::close(opened) };
        return None;
    }
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

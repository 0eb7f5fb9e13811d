//! System calls of regions: mmap, mbind, madvise.
//!
//! All calls act on ranges that this module mapped itself, before their addresses are known to other code.

use super::memfd::{self, memory_file};
use super::{HugePages, PageKind, RegionError};
use crate::memory_file::MemoryFile;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::{self, NonNull};

/// Size of a huge page, in bytes.
pub(super) const HUGE_BYTES: usize = 2 << 20;
/// Size of a plain page, in bytes.
pub(crate) const PAGE_BYTES: usize = 4096;
/// `madvise`: fault pages in for writing; Linux 5.14.
const MADV_POPULATE_WRITE: libc::c_int = 23;
/// `madvise`: collapse these pages into huge ones synchronously; Linux 6.1. Honors `deny`, but neither `never` nor
/// `madvise`.
const MADV_COLLAPSE: libc::c_int = 25;
/// `mbind` policy: this node or fail.
const MPOL_BIND: libc::c_int = 2;
/// Size of a NUMA node mask; it names one node less than its bits because the kernel does not count the last.
const NODE_MASK_WORDS: usize = 16;

/// A mapped range; unmapped on drop unless foreign.
#[derive(Debug)]
pub(super) struct Mapping {
    address: NonNull<u8>,
    mapped_bytes: usize,
    owned: bool,
}

impl Mapping {
    /// Wraps memory that is unmapped by its owner.
    pub(super) fn foreign(address: NonNull<u8>, bytes: usize) -> Self {
        Self { address, mapped_bytes: bytes, owned: false }
    }

    pub(super) fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Returns true if the range, which is within this mapping, is still mapped. An owned mapping always is.
    pub(super) fn is_there(&self, offset: usize, bytes: usize) -> bool {
        if self.owned || bytes == 0 {
            return true;
        }
        let start = self.address.as_ptr().wrapping_add(offset);
        let within = start.addr() % PAGE_BYTES;
        // SAFETY: with MS_ASYNC, msync changes no state since Linux 2.6.19: the kernel only walks the list of mappings,
        // and returns ENOMEM if there is a gap.
        let result = unsafe { libc::msync(start.wrapping_sub(within).cast(), within + bytes, libc::MS_ASYNC) };
        result == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ENOMEM)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: this module mapped exactly this range, and every user holds an Arc of the region around it.
            unsafe { libc::munmap(self.address.as_ptr().cast(), self.mapped_bytes) };
        }
    }
}

/// Request for a fresh mapping.
pub(super) struct Request<'a> {
    pub(super) name: &'a str,
    pub(super) bytes: usize,
    pub(super) shared: bool,
    pub(super) huge: HugePages,
    /// True if huge pages may come from the reserved pool.
    pub(super) reserved: bool,
}

/// Maps fresh memory with the best pages that the request allows.
pub(super) fn create(request: &Request<'_>) -> Result<(Mapping, PageKind, Option<OwnedFd>), RegionError> {
    if request.huge != HugePages::Never && request.reserved {
        // A shortage of reserved pages is common, so any failure falls back to the next kind.
        if let Ok((mapping, file)) = create_with(request, true) {
            return Ok((mapping, PageKind::HugeTlb, file));
        }
    }
    let (mapping, file) = create_with(request, false)?;
    if request.huge == HugePages::Never {
        advise(&mapping, libc::MADV_NOHUGEPAGE).ok();
        return Ok((mapping, PageKind::Plain, file));
    }
    let asked = advise(&mapping, libc::MADV_HUGEPAGE).is_ok();
    if asked && transparent_huge_pages_enabled(request.shared) {
        return Ok((mapping, PageKind::TransparentHuge, file));
    }
    if request.huge == HugePages::Require {
        return Err(RegionError::NoHugePages { name: request.name.to_owned(), bytes: request.bytes });
    }
    Ok((mapping, PageKind::Plain, file))
}

fn create_with(request: &Request<'_>, reserved_pages: bool) -> Result<(Mapping, Option<OwnedFd>), RegionError> {
    let unit = if reserved_pages { HUGE_BYTES } else { PAGE_BYTES };
    let mapped_bytes = round_up(request.bytes, unit)?;
    let file =
        match request.shared {
            true => Some(memory_file(request.name, mapped_bytes, reserved_pages).map_err(|source| {
                RegionError::Create { name: request.name.to_owned(), bytes: request.bytes, source }
            })?),
            false => None,
        };
    let sharing = match file {
        Some(_) => libc::MAP_SHARED,
        None if reserved_pages => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB,
        None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    };
    let aligned = !reserved_pages && mapped_bytes >= HUGE_BYTES;
    let fd = file.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let mapping = map(mapped_bytes, aligned, protection, sharing, fd)
        .map_err(|source| RegionError::Map { bytes: request.bytes, source })?;
    Ok((mapping, file))
}

/// Maps a file in memory, whose length is known to suffice.
pub(super) fn in_memory(file: &MemoryFile, bytes: usize) -> Result<(Mapping, PageKind), RegionError> {
    let kind = if file.page_bytes() > PAGE_BYTES { PageKind::HugeTlb } else { PageKind::Plain };
    let mapped_bytes = round_up(bytes, file.page_bytes())?;
    let aligned = kind != PageKind::HugeTlb && mapped_bytes >= HUGE_BYTES;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let mapping = map(mapped_bytes, aligned, protection, libc::MAP_SHARED, file.fd().as_raw_fd())
        .map_err(|source| RegionError::Map { bytes, source })?;
    Ok((mapping, kind))
}

/// Maps a peer's memfd, writable, or a file in memory that only a user may shorten who could end this process anyway.
pub(super) fn pool(fd: &OwnedFd, bytes: usize) -> Result<(Mapping, PageKind), RegionError> {
    if memfd::sealed_against_shrinking(fd) || !memfd::is_private_memory(fd) {
        return peer(fd, bytes, true);
    }
    offered(fd, bytes, true)
}

/// Maps a peer's memfd after checking that the peer cannot truncate it.
pub(super) fn peer(fd: &OwnedFd, bytes: usize, writable: bool) -> Result<(Mapping, PageKind), RegionError> {
    if bytes > 0 && !memfd::sealed_against_shrinking(fd) {
        return Err(RegionError::NotSealed);
    }
    offered(fd, bytes, writable)
}

/// Maps a file of a peer, which does not become shorter.
fn offered(fd: &OwnedFd, bytes: usize, writable: bool) -> Result<(Mapping, PageKind), RegionError> {
    if bytes == 0 {
        return Err(RegionError::Empty { name: "of a peer".to_owned() });
    }
    let failed = |source| RegionError::Map { bytes, source };
    let file_bytes = memfd::file_bytes(fd).map_err(failed)?;
    let (unit, kind) = memfd::page_unit(fd).map_err(failed)?;
    let mapped_bytes = round_up(bytes, unit)?;
    // The last page must be inside the file too: access past it raises SIGBUS.
    let inside = file_bytes.next_multiple_of(PAGE_BYTES as u64) >= mapped_bytes as u64;
    if file_bytes < bytes as u64 || !inside {
        return Err(RegionError::TooShort { file_bytes, bytes });
    }
    let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
    let aligned = kind != PageKind::HugeTlb && mapped_bytes >= HUGE_BYTES;
    let mapping = map(mapped_bytes, aligned, protection, libc::MAP_SHARED, fd.as_raw_fd()).map_err(failed)?;
    Ok((mapping, kind))
}

/// Maps a file's first bytes read-only.
pub(super) fn file(file: &std::fs::File, bytes: usize) -> Result<Mapping, RegionError> {
    if bytes == 0 {
        return Err(RegionError::Empty { name: "of a file".to_owned() });
    }
    let failed = |source| RegionError::Map { bytes, source };
    let file_bytes = file.metadata().map_err(failed)?.len();
    if file_bytes < bytes as u64 {
        return Err(RegionError::TooShort { file_bytes, bytes });
    }
    map(round_up(bytes, PAGE_BYTES)?, false, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd()).map_err(failed)
}

fn map(
    mapped_bytes: usize,
    aligned: bool,
    protection: libc::c_int,
    sharing: libc::c_int,
    fd: RawFd,
) -> io::Result<Mapping> {
    // Transparent huge pages need an aligned start, which mmap does not guarantee. Map with slack, unmap it, and pass
    // the aligned address as a hint. Another thread may take the range in between: then the kernel picks another
    // address, the start may be unaligned, and a huge page or two is lost. MAP_FIXED could replace that thread's memory
    // instead.
    let hint = match aligned {
        true => aligned_place(mapped_bytes)?,
        false => ptr::null_mut(),
    };
    map_at(hint, mapped_bytes, protection, sharing, fd)
}

fn aligned_place(bytes: usize) -> io::Result<*mut libc::c_void> {
    let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let slack = map_at(ptr::null_mut(), bytes + HUGE_BYTES, libc::PROT_NONE, nothing, -1)?;
    let start = slack.address.as_ptr();
    Ok(start.wrapping_add(start.align_offset(HUGE_BYTES)).cast())
}

fn map_at(
    hint: *mut libc::c_void,
    mapped_bytes: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: RawFd,
) -> io::Result<Mapping> {
    assert_eq!(flags & libc::MAP_FIXED, 0, "a fixed mapping could replace memory in use");
    // SAFETY: without MAP_FIXED the kernel picks free address space, so no memory in use is replaced.
    let address = unsafe { libc::mmap(hint, mapped_bytes, protection, flags, fd, 0) };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    match NonNull::new(address.cast()) {
        Some(address) => Ok(Mapping { address, mapped_bytes, owned: true }),
        None => Err(io::Error::from_raw_os_error(libc::ENOMEM)),
    }
}

/// Binds a fresh mapping, from an offset on, to a NUMA node if there is more than one. Returns true if it was bound.
pub(super) fn bind_to_node(mapping: &Mapping, offset: usize, node: u32) -> io::Result<bool> {
    assert!(offset < mapping.mapped_bytes, "binding from {offset} on, of {} bytes", mapping.mapped_bytes);
    let online = fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default();
    if !online.contains([',', '-']) {
        return Ok(false);
    }
    let mut mask = [0u64; NODE_MASK_WORDS];
    let bits = NODE_MASK_WORDS * 64;
    let node = node as usize;
    if node + 1 >= bits {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    mask[node / 64] |= 1 << (node % 64);
    // SAFETY: the range is a part of our own mapping; the mask has the passed number of bits.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            mapping.address.as_ptr().add(offset),
            mapping.mapped_bytes - offset,
            MPOL_BIND,
            mask.as_ptr(),
            bits,
            0,
        )
    };
    if result == 0 { Ok(true) } else { Err(io::Error::last_os_error()) }
}

/// Excludes the range from forked children: otherwise a fork would make pages copy-on-write under a device.
pub(super) fn keep_from_children(mapping: &Mapping) {
    // A failure does not affect correctness: this process only forks to exec.
    advise(mapping, libc::MADV_DONTFORK).ok();
}

/// Returns the bytes of this host that can be faulted in without taking memory from other processes, including reserved
/// huge pages; `None` if the host does not report it.
#[must_use]
pub fn host_available_bytes() -> Option<u64> {
    available_bytes(&fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

/// Rejects a size that exceeds the available memory: the kernel would overcommit, and the OOM killer would strike when
/// the pages are faulted in.
pub(super) fn check_available(name: &str, bytes: usize) -> Result<(), RegionError> {
    match host_available_bytes() {
        Some(available_bytes) if bytes as u64 > available_bytes => {
            Err(RegionError::NotAvailable { name: name.to_owned(), bytes, available_bytes })
        }
        // If the machine does not report it, the size is accepted.
        _ => Ok(()),
    }
}

/// Rejects a size that exceeds the available memory of a NUMA node: where only that node may serve a fault, the OOM
/// killer would strike.
pub(super) fn check_node_available(name: &str, bytes: usize, node: u32) -> Result<(), RegionError> {
    let meminfo = fs::read_to_string(format!("/sys/devices/system/node/node{node}/meminfo")).unwrap_or_default();
    match node_available_bytes(&meminfo) {
        Some(available_bytes) if bytes as u64 > available_bytes => {
            Err(RegionError::NodeNotAvailable { name: name.to_owned(), node, bytes, available_bytes })
        }
        // If the machine does not report it, the size is accepted.
        _ => Ok(()),
    }
}

/// Returns the bytes of a NUMA node that are free, in reserved huge pages, or caches of files.
pub(super) fn node_available_bytes(meminfo: &str) -> Option<u64> {
    let field = |name: &str| {
        let value = meminfo.lines().find_map(|line| line.split_once(name)?.1.strip_prefix(':'))?;
        value.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    let cached_kib = ["Active(file)", "Inactive(file)"].into_iter().filter_map(field).sum::<u64>();
    let reserved_bytes = field("HugePages_Free").unwrap_or(0).saturating_mul(HUGE_BYTES as u64);
    Some(field("MemFree")?.saturating_add(cached_kib).saturating_mul(1024).saturating_add(reserved_bytes))
}

/// Returns the bytes that can be faulted in without taking memory from other processes, including reserved huge pages.
pub(super) fn available_bytes(meminfo: &str) -> Option<u64> {
    let field = |name: &str| {
        let value = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        value.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    let reserved = field("HugePages_Free").zip(field("Hugepagesize"));
    let reserved_kib = reserved.map_or(0, |(pages, page_kib)| pages.saturating_mul(page_kib));
    Some(field("MemAvailable")?.saturating_add(reserved_kib).saturating_mul(1024))
}

/// Faults a fresh shared mapping in as transparent huge pages, even where the system does not provide them for shared
/// memory (`shmem_enabled` is `never` on most machines). Returns false if it got only some of its huge pages; the rest
/// of the pages is plain. The part of the mapping past its last whole huge page is left unchanged.
///
/// The kernel collapses only ranges that hold a page already, so each range gets its first page before the call.
pub(super) fn collapse(mapping: &Mapping) -> bool {
    let whole = mapping.mapped_bytes / HUGE_BYTES * HUGE_BYTES;
    if whole == 0 || mapping.address.as_ptr().align_offset(HUGE_BYTES) != 0 {
        return false;
    }
    for offset in (0..whole).step_by(HUGE_BYTES) {
        // SAFETY: inside our own fresh writable mapping, which still holds zeros and is not known to other code.
        unsafe { mapping.address.as_ptr().add(offset).write_volatile(0) };
        let range = mapping.address.as_ptr().wrapping_add(offset).cast();
        // SAFETY: the range is our own mapping, and collapsing keeps its contents.
        if unsafe { libc::madvise(range, HUGE_BYTES, MADV_COLLAPSE) } != 0 {
            return false;
        }
    }
    true
}

/// Makes huge pages of the first pages of a shared mapping, all of which exist, without changing their contents.
/// Returns false if that succeeded for some of them only. One call for all, because each waits for every processor.
pub(super) fn collapse_present(mapping: &Mapping, bytes: usize) -> bool {
    let whole = mapping.mapped_bytes.min(bytes) / HUGE_BYTES * HUGE_BYTES;
    let start = mapping.address.as_ptr();
    // SAFETY: the range is our own mapping, and collapsing keeps its contents.
    let collapses = || unsafe { libc::madvise(start.cast(), whole, MADV_COLLAPSE) == 0 };
    whole > 0 && start.align_offset(HUGE_BYTES) == 0 && collapses()
}

/// Faults in every page of a fresh mapping by one call, which returns an error if a page is not available.
pub(super) fn populate(mapping: &Mapping) -> io::Result<()> {
    advise(mapping, MADV_POPULATE_WRITE)
}

/// Faults in every page of a fresh mapping, even on kernels that lack the call for it.
pub(super) fn prefault(mapping: &Mapping) -> io::Result<()> {
    match populate(mapping) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            for offset in (0..mapping.mapped_bytes).step_by(PAGE_BYTES) {
                // SAFETY: inside our own fresh writable mapping, which still holds zeros and is not known to other
                // code.
                unsafe { mapping.address.as_ptr().add(offset).write_volatile(0) };
            }
            Ok(())
        }
        result => result,
    }
}

fn advise(mapping: &Mapping, advice: libc::c_int) -> io::Result<()> {
    let address = mapping.address.as_ptr().cast();
    // SAFETY: the range is our own mapping, and none of the advice used here discards its contents.
    match unsafe { libc::madvise(address, mapping.mapped_bytes, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn transparent_huge_pages_enabled(shared: bool) -> bool {
    let file = if shared { "shmem_enabled" } else { "enabled" };
    let path = format!("/sys/kernel/mm/transparent_hugepage/{file}");
    let setting = fs::read_to_string(path).unwrap_or_default();
    !setting.is_empty() && !setting.contains("[never]") && !setting.contains("[deny]")
}

fn round_up(bytes: usize, unit: usize) -> Result<usize, RegionError> {
    let limit = isize::MAX as usize - HUGE_BYTES;
    match bytes.checked_next_multiple_of(unit) {
        Some(rounded) if rounded <= limit => Ok(rounded),
        _ => Err(RegionError::TooLarge { bytes }),
    }
}

//! Memfd behind a shared region, and the seals that make it safe to share.
//!
//! Seals bind every process and are never removed: against shrinking, so that access to a mapping of the file cannot
//! raise SIGBUS; against growing, so that its length is the announced one; later possibly against new writers.

use super::PageKind;
use super::map::PAGE_BYTES;
use crate::memory_file::is_memory;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// `statfs` type of files on hugetlbfs.
const HUGETLBFS_MAGIC: i64 = 0x958458f6;

/// Returns true if the file cannot be truncated any more. False for anything that is not a memfd.
pub(super) fn sealed_against_shrinking(fd: &OwnedFd) -> bool {
    seals(fd) & libc::F_SEAL_SHRINK != 0
}

/// Returns true for a file in memory that nobody but this user, or root, may open.
pub(super) fn is_private_memory(fd: &OwnedFd) -> bool {
    let Ok(found) = status(fd) else { return false };
    let is_file = found.st_mode & libc::S_IFMT == libc::S_IFREG;
    let is_private = found.st_mode & 0o077 == 0 && [0, crate::cpu::effective_uid()].contains(&found.st_uid);
    is_file && is_private && is_memory(fd.as_fd())
}

/// Returns true if the file cannot be mapped writable any more.
pub(super) fn sealed_against_writers(fd: &OwnedFd) -> bool {
    seals(fd) & (libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_WRITE) != 0
}

/// Returns the seals of a memfd; none for any other file.
fn seals(fd: &OwnedFd) -> libc::c_int {
    // SAFETY: plain query on an open descriptor.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    seals.max(0)
}

/// Creates an empty memfd without seals, on reserved huge pages or on plain ones.
pub(crate) fn create(name: &str, reserved_pages: bool) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    let pages = if reserved_pages { libc::MFD_HUGETLB | libc::MFD_HUGE_2MB } else { 0 };
    let base = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | pages;
    let create = |flags| {
        // SAFETY: the name is a C string that outlives the call.
        match unsafe { libc::memfd_create(name.as_ptr(), flags) } {
            -1 => Err(io::Error::last_os_error()),
            // SAFETY: the kernel has just created the descriptor, and this is its only owner.
            fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        }
    };
    // Kernels before 6.3 do not know the flag that forbids executing the file.
    create(base | libc::MFD_NOEXEC_SEAL).or_else(|_| create(base))
}

/// Creates a memfd of this length that can neither shrink nor grow.
pub(super) fn memory_file(name: &str, bytes: usize, reserved_pages: bool) -> io::Result<OwnedFd> {
    let file = create(name, reserved_pages)?;
    let length = i64::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    crate::claim::check_limit(bytes as u64)?;
    // SAFETY: plain call on an open descriptor.
    if unsafe { libc::ftruncate(file.as_raw_fd(), length) } != 0 {
        return Err(io::Error::last_os_error());
    }
    add_seals(&file, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW)?;
    Ok(file)
}

/// Adds seals to a memfd; seals are never removed.
pub(super) fn add_seals(file: &OwnedFd, seals: libc::c_int) -> io::Result<()> {
    // SAFETY: plain call on an open descriptor.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the length of a memfd, in bytes.
pub(super) fn file_bytes(fd: &OwnedFd) -> io::Result<u64> {
    Ok(u64::try_from(status(fd)?.st_size).unwrap_or(0))
}

fn status(fd: &OwnedFd) -> io::Result<libc::stat> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the kernel fills a structure of this function.
    if unsafe { libc::fstat(fd.as_raw_fd(), status.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all-zero is a valid `stat`, and the kernel has filled it.
    Ok(unsafe { status.assume_init() })
}

/// Returns the mapping granularity of a memfd, and the kind of its pages.
pub(super) fn page_unit(fd: &OwnedFd) -> io::Result<(usize, PageKind)> {
    let mut status = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the kernel fills a structure of this function.
    if unsafe { libc::fstatfs(fd.as_raw_fd(), status.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all-zero is a valid `statfs`, and the kernel has filled it.
    let status = unsafe { status.assume_init() };
    match usize::try_from(status.f_bsize) {
        Ok(unit) if status.f_type == HUGETLBFS_MAGIC && unit.is_power_of_two() => Ok((unit, PageKind::HugeTlb)),
        _ => Ok((PAGE_BYTES, PageKind::Plain)),
    }
}

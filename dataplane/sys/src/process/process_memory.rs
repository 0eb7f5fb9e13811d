//! Cross-process copies by the kernel (CMA): `process_vm_readv` and `process_vm_writev`.
//!
//! The kernel allows them where it would allow `ptrace`: for the same user, a dumpable process, and unless a security
//! module forbids it. No mapping and no action of the other process is needed, so they work on any of its memory.
//! Concurrent writes by that process tear the bytes, as in any racing copy.
//!
//! A process id denotes the other process. A caller that keeps an id beyond the death of its process may access the
//! memory of another one: callers verify with [`word`] a value that only the right process has.

use crate::region::IoBuf;
use std::fmt;
use std::io;
use std::mem::MaybeUninit;

/// Limit of ranges in one system call; longer lists are split.
const RANGES_PER_CALL: usize = 1024;

/// A local range and the start of its remote counterpart.
#[derive(Clone, Debug)]
pub struct CrossProcessRange {
    /// Range of our memory.
    pub local: IoBuf,
    /// Address in the other process; the length is that of the local range.
    pub address: u64,
}

/// Error of a cross-process copy.
#[derive(Debug)]
pub enum CrossError {
    /// Permission denied for that process, or for all.
    Denied,
    /// The process has ended, or is not visible from here.
    Gone,
    /// A range is not mapped in that process, or lacks the access right; or the local range is not writable.
    Fault,
    /// Any other error.
    Kernel(io::Error),
}

impl fmt::Display for CrossError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied => f.write_str("the kernel does not let us copy from or to that process (ptrace permission)"),
            Self::Gone => f.write_str("the process is gone, or not visible from here"),
            Self::Fault => f.write_str("a range is not mapped in that process, or lacks the access right"),
            Self::Kernel(error) => write!(f, "copying between processes: {error}"),
        }
    }
}

impl std::error::Error for CrossError {}

impl CrossError {
    fn last() -> Self {
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // The kernel lacks the call, or a filter forbids it: denied for every process.
            Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => Self::Denied,
            Some(libc::ESRCH) => Self::Gone,
            Some(libc::EFAULT) => Self::Fault,
            _ => Self::Kernel(error),
        }
    }
}

/// Copies every range from process `pid` into local memory, in order.
///
/// # Errors
/// At the first range that cannot be copied; the ranges before it, and a part of it, were copied.
pub fn read(pid: i32, crossings: &[CrossProcessRange]) -> Result<(), CrossError> {
    cross(pid, crossings, libc::process_vm_readv)
}

/// Copies every local range into process `pid`, in order.
///
/// # Errors
/// See [`read`].
pub fn write(pid: i32, crossings: &[CrossProcessRange]) -> Result<(), CrossError> {
    cross(pid, crossings, libc::process_vm_writev)
}

/// Reads eight bytes of another process.
///
/// # Errors
/// See [`read`].
pub fn word(pid: i32, address: u64) -> Result<u64, CrossError> {
    let mut word = [0u8; 8];
    let ours = libc::iovec { iov_base: word.as_mut_ptr().cast(), iov_len: word.len() };
    let theirs = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: word.len() };
    // SAFETY: the kernel writes at most 8 bytes to the array, and only reads the other process.
    let moved = unsafe { libc::process_vm_readv(pid, &raw const ours, 1, &raw const theirs, 1, 0) };
    match moved {
        8 => Ok(u64::from_ne_bytes(word)),
        0.. => Err(CrossError::Fault),
        _ => Err(CrossError::last()),
    }
}

type Call = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

fn cross(pid: i32, crossings: &[CrossProcessRange], call: Call) -> Result<(), CrossError> {
    let mut ours = [const { MaybeUninit::<libc::iovec>::uninit() }; RANGES_PER_CALL];
    let mut theirs = [const { MaybeUninit::<libc::iovec>::uninit() }; RANGES_PER_CALL];
    // First incomplete range, and the bytes of it that are done.
    let (mut next, mut done) = (0, 0);
    while next < crossings.len() {
        let count = RANGES_PER_CALL.min(crossings.len() - next);
        for (position, crossing) in crossings[next..next + count].iter().enumerate() {
            let skip = if position == 0 { done } else { 0 };
            let bytes = crossing.local.bytes() - skip;
            // The kernel rejects an address that wraps around.
            let address = crossing.address.wrapping_add(skip as u64) as *mut libc::c_void;
            let pointer = crossing.local.pointer().wrapping_add(skip).cast();
            ours[position].write(libc::iovec { iov_base: pointer, iov_len: bytes });
            theirs[position].write(libc::iovec { iov_base: address, iov_len: bytes });
        }
        // SAFETY: the first `count` entries of both lists were written. The local ranges lie in regions that the
        // crossings keep mapped, where every other access is opaque or the kernel's too; the kernel checks the remote
        // ranges.
        let moved = unsafe {
            let count = count as libc::c_ulong;
            call(pid, ours.as_ptr().cast(), count, theirs.as_ptr().cast(), count, 0)
        };
        let Ok(mut moved) = usize::try_from(moved) else { return Err(CrossError::last()) };
        let before = (next, done);
        while next < crossings.len() && moved >= crossings[next].local.bytes() - done {
            moved -= crossings[next].local.bytes() - done;
            (next, done) = (next + 1, 0);
        }
        done += moved;
        if (next, done) == before {
            return Err(CrossError::Fault);
        }
    }
    Ok(())
}

//! Copies between our memory and another process's, by the kernel: `process_vm_readv` and `process_vm_writev`.
//!
//! The kernel allows it where it would allow `ptrace`: the same user, a process that may be dumped, and no security
//! module against it. Nothing is mapped and the other process does nothing, so any memory of it will do. What
//! it does to its memory meanwhile tears the bytes, as a racing copy would.
//!
//! The other process is named by its id. Whoever holds on to an id past its process's death may reach a stranger's
//! memory: callers ask [`word`] for something that only the right process knows.

use crate::region::IoBuf;
use std::fmt;
use std::io;
use std::mem::MaybeUninit;

/// Most ranges that one call to the kernel takes; longer lists are cut.
const RANGES_PER_CALL: usize = 1024;

/// A range of our memory and where its other end starts in the other process.
#[derive(Clone, Debug)]
pub struct CrossProcessRange {
    /// Ours.
    pub local: IoBuf,
    /// Theirs: an address of that process, as long as ours.
    pub address: u64,
}

/// Why the kernel did not copy.
#[derive(Debug)]
pub enum CrossError {
    /// This process may not touch that one's memory, or no process may.
    Denied,
    /// There is no such process any more, or none that is visible from here.
    Gone,
    /// A range is not mapped in that process, or not with that right; or ours is not writable.
    Fault,
    /// Anything else.
    Kernel(io::Error),
}

impl fmt::Display for CrossError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied => f.write_str("the kernel does not let us copy from or to that process (ptrace permission)"),
            Self::Gone => f.write_str("the process is gone, or not visible from here"),
            Self::Fault => f.write_str("a range is not mapped in that process, or may not be used so"),
            Self::Kernel(error) => write!(f, "copying between processes: {error}"),
        }
    }
}

impl std::error::Error for CrossError {}

impl CrossError {
    fn last() -> Self {
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // A kernel without the call, or a filter on it: nobody may.
            Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => Self::Denied,
            Some(libc::ESRCH) => Self::Gone,
            Some(libc::EFAULT) => Self::Fault,
            _ => Self::Kernel(error),
        }
    }
}

/// Copies every range out of process `pid` into ours, in order.
///
/// # Errors
/// At the first range that cannot be copied; those before it, and some of it, were.
pub fn read(pid: i32, crossings: &[CrossProcessRange]) -> Result<(), CrossError> {
    cross(pid, crossings, libc::process_vm_readv)
}

/// Copies every range of ours into process `pid`, in order.
///
/// # Errors
/// As [`read`].
pub fn write(pid: i32, crossings: &[CrossProcessRange]) -> Result<(), CrossError> {
    cross(pid, crossings, libc::process_vm_writev)
}

/// Eight bytes of another process.
///
/// # Errors
/// As [`read`].
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
    // The first range that is not done, and how much of it is.
    let (mut next, mut done) = (0, 0);
    while next < crossings.len() {
        let count = RANGES_PER_CALL.min(crossings.len() - next);
        for (position, crossing) in crossings[next..next + count].iter().enumerate() {
            let skip = if position == 0 { done } else { 0 };
            let bytes = crossing.local.bytes() - skip;
            // An address that wraps is nobody's memory: the kernel says so.
            let address = crossing.address.wrapping_add(skip as u64) as *mut libc::c_void;
            let pointer = crossing.local.pointer().wrapping_add(skip).cast();
            ours[position].write(libc::iovec { iov_base: pointer, iov_len: bytes });
            theirs[position].write(libc::iovec { iov_base: address, iov_len: bytes });
        }
        // SAFETY: the first `count` entries of both lists were written. Ours lie in regions that the crossings keep
        // mapped, where every other access is opaque or the kernel's too; theirs are the kernel's to check.
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

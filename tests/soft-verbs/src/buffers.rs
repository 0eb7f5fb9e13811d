//! Device memory of software devices: buffers behind dma-buf descriptors, which these devices map to access them, and
//! what a device says to them.

use crate::fabric::Memory;
use crate::objects::{context, give, refuse, state};
use kvplane_sys::device::{DeviceMemory, is_any_driver_loaded};
use kvplane_sys::memory_map::MemoryMap;
use kvplane_sys::verbs::provider::*;
use libc::{c_int, c_void};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

/// Rule by which a software device registers dma-buf descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DmaBufRule {
    /// It registers any range.
    #[default]
    Any,
    /// It registers ranges that cross no multiple of so many bytes in the buffer, as if that was mapped piece by piece.
    Within(u64),
    /// It refuses them with this error number.
    Refused(i32),
}

/// Rules of one device about device memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BufferRules {
    pub(crate) dma_bufs: DmaBufRule,
    /// True if a module for peer memory is loaded.
    pub(crate) peer_memory: bool,
}

/// Mapped buffer.
pub(crate) struct BufferMapping {
    at: *mut c_void,
    bytes: usize,
}

// SAFETY: the mapping is of the whole process, and accessed only with the fabric locked.
unsafe impl Send for BufferMapping {}
// SAFETY: as above.
unsafe impl Sync for BufferMapping {}

impl BufferMapping {
    /// Maps the buffer behind a descriptor, which covers the range; the error is an error number.
    fn new(fd: BorrowedFd<'_>, offset: u64, bytes: usize) -> Result<Self, c_int> {
        let file = File::from(fd.try_clone_to_owned().map_err(|_| libc::EBADF)?);
        let length = file.metadata().map_err(|_| libc::EBADF)?.len();
        if bytes == 0 || offset.checked_add(bytes as u64).is_none_or(|end| end > length) {
            return Err(libc::EINVAL);
        }
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let (length, fd) = (length as usize, file.as_raw_fd());
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(ptr::null_mut(), length, rights, libc::MAP_SHARED, fd, 0) };
        if at == libc::MAP_FAILED { Err(libc::EINVAL) } else { Ok(Self { at, bytes: length }) }
    }

    /// Returns the address at which the byte at this offset is mapped.
    pub(crate) fn place(&self, offset: u64) -> u64 {
        self.at.expose_provenance() as u64 + offset
    }
}

impl Drop for BufferMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by this object; the registration that had it is gone.
        unsafe { libc::munmap(self.at, self.bytes) };
    }
}

/// Registers a range of a dma-buf.
pub(crate) unsafe extern "C" fn reg_dmabuf_mr(
    raw: *mut ibv_pd,
    offset: u64,
    bytes: usize,
    start: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: a domain of a software device.
    let device = unsafe { (*raw).context };
    // SAFETY: an open software device.
    let rule = unsafe { rules(device) }.dma_bufs;
    match rule {
        DmaBufRule::Refused(error) => return refuse(error),
        DmaBufRule::Within(piece) if bytes > 0 && offset / piece != (offset + bytes as u64 - 1) / piece => {
            return refuse(libc::EINVAL);
        }
        DmaBufRule::Any | DmaBufRule::Within(_) => {}
    }
    // SAFETY: the caller's descriptor, which it keeps open during the call.
    let mapped = BufferMapping::new(unsafe { BorrowedFd::borrow_raw(fd) }, offset, bytes);
    match mapped {
        // SAFETY: as above.
        Ok(mapped) => unsafe { register(raw, mapped, offset, bytes, start, access as u32) },
        Err(error) => refuse(error),
    }
}

/// Registers device memory by its address; `None` if the address is the host's, or may be.
///
/// # Safety
/// A domain of an open software device.
pub(crate) unsafe fn reg_peer_memory(raw: *mut ibv_pd, bytes: usize, start: u64, access: u32) -> Option<*mut ibv_mr> {
    let is_host = |map: MemoryMap| map.is_host(start, bytes as u64);
    if !is_any_driver_loaded() || MemoryMap::read().is_ok_and(is_host) {
        return None;
    }
    // SAFETY: by this function's contract.
    let rules = unsafe { rules((*raw).context) };
    let found = if rules.peer_memory { find_buffer(start, bytes as u64) } else { None };
    let Some((fd, offset)) = found else { return Some(refuse(libc::EFAULT)) };
    Some(match BufferMapping::new(fd.as_fd(), offset, bytes) {
        // SAFETY: by this function's contract.
        Ok(mapped) => unsafe { register(raw, mapped, offset, bytes, start, access) },
        Err(error) => refuse(error),
    })
}

/// Returns the descriptor of the buffer at a range of device memory, and the offset of the range in it.
fn find_buffer(address: u64, bytes: u64) -> Option<(OwnedFd, u64)> {
    // SAFETY: the object is gone before this returns, and nothing copies from or to it.
    unsafe { DeviceMemory::adopt(address, bytes) }.ok()?.export_dma_buf().ok()
}

/// Returns the rules of a device.
///
/// # Safety
/// An open software device.
unsafe fn rules(device: *mut ibv_context) -> BufferRules {
    // SAFETY: by this function's contract.
    let (state, index) = unsafe { (state(device), context(device).device) };
    state.ports[index].buffers
}

/// Adds the registration of a mapped buffer.
///
/// # Safety
/// A domain of an open software device.
unsafe fn register(
    raw: *mut ibv_pd,
    mapped: BufferMapping,
    offset: u64,
    bytes: usize,
    start: u64,
    access: u32,
) -> *mut ibv_mr {
    // SAFETY: by this function's contract.
    let (device, domain) = unsafe { ((*raw).context, (*raw).handle) };
    // SAFETY: by this function's contract.
    let mut state = unsafe { state(device) };
    let key = state.number();
    let memory = Memory { domain, address: start, bytes: bytes as u64, access, buffer: Some((mapped, offset)) };
    state.memories.insert(key, memory);
    drop(state);
    give(ibv_mr { context: device, pd: raw, addr: ptr::null_mut(), length: bytes, handle: key, lkey: key, rkey: key })
}

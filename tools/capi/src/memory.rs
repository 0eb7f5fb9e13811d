//! Registration of the program's own memory.

use std::ffi::{c_char, c_int, c_void};

use kvplane::device::Backing;
use kvplane::memory_map::MemoryMap;
use kvplane::{RegisterOptions, TransferError};

use crate::engine::Engine;
use crate::rim::{INVALID_ARGUMENT, array, text, with_engine};
use crate::types::BufferEntry;

/// Returns true if a process can have memory of this length at the address.
pub(crate) fn is_range(address: u64, bytes: u64) -> bool {
    address != 0 && bytes != 0 && address.checked_add(bytes).is_some_and(|end| end <= isize::MAX as u64)
}

/// Adopts a range of memory, the host's or a device's, by the kernel's list of mappings; it belongs to C and is not
/// freed here.
///
/// # Safety
/// The range is mapped readable and writable, or allocated on a device, until it is unregistered, or the engine is
/// destroyed.
unsafe fn adopt(address: *mut c_void, bytes: usize, map: Option<&MemoryMap>) -> Result<Backing, c_int> {
    if !is_range(address as u64, bytes as u64) {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: by the caller's promise; unregistering waits until nothing uses the region.
    unsafe { Backing::adopt(address as u64, bytes as u64, map) }.map_err(|error| TransferError::from(error).code())
}

fn register(engine: &Engine, memory: &[Backing], location: &str, remote_accessible: bool) -> Result<c_int, c_int> {
    let location = if location.is_empty() { "*" } else { location };
    let options = RegisterOptions { location: location.to_owned(), remote_accessible, writable: true };
    engine.engine.register_batch(memory, &options).map_err(|error| error.code())?;
    Ok(0)
}

/// Registers a range for transfers, and for peers if `remote_accessible` is not 0.
///
/// # Safety
/// Conditions of the header: a live engine, a range that stays mapped, a string with a final zero or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn registerLocalMemory(
    engine: *mut c_void,
    addr: *mut c_void,
    length: usize,
    location: *const c_char,
    remote_accessible: c_int,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            let memory = adopt(addr, length, MemoryMap::read().ok().as_ref())?;
            register(engine, &[memory], text(location).unwrap_or("*"), remote_accessible != 0)
        })
    }
}

/// Unregisters the range that begins at `addr`; after a result of 0, no peer accesses it any more.
///
/// # Safety
/// A live engine.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn unregisterLocalMemory(engine: *mut c_void, addr: *mut c_void) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            engine.engine.unregister(addr as u64).map_err(|error| error.code())?;
            Ok(0)
        })
    }
}

/// Registers all ranges for transfers and for peers, or none.
///
/// # Safety
/// Conditions of [`registerLocalMemory`], and an array of `buffer_len` entries.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn registerLocalMemoryBatch(
    engine: *mut c_void,
    buffer_list: *mut BufferEntry,
    buffer_len: usize,
    location: *const c_char,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            let entries = array(buffer_list, buffer_len).ok_or(INVALID_ARGUMENT)?;
            let map = MemoryMap::read().ok();
            let adopted = entries.iter().map(|entry| adopt(entry.addr, entry.length, map.as_ref()));
            let memory: Result<Vec<_>, c_int> = adopted.collect();
            register(engine, &memory?, text(location).unwrap_or("*"), true)
        })
    }
}

/// Unregisters all ranges, or none.
///
/// # Safety
/// A live engine and an array of `addr_len` addresses.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn unregisterLocalMemoryBatch(
    engine: *mut c_void,
    addr_list: *mut *mut c_void,
    addr_len: usize,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            let addresses = array(addr_list, addr_len).ok_or(INVALID_ARGUMENT)?;
            let addresses: Vec<u64> = addresses.iter().map(|address| *address as u64).collect();
            engine.engine.unregister_batch(&addresses).map_err(|error| error.code())?;
            Ok(0)
        })
    }
}

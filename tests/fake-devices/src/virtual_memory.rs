//! Virtual-memory interface: physical allocations, reserved addresses, mappings, and descriptors for other processes.
//!
//! Lengths and addresses are multiples of the granularity. A mapping holds its physical allocation, which other
//! processes import by a descriptor; copies need that access was set.

use crate::exports::{result, store};
use crate::memory::{File, Source, create, inode, open_foreign};
use crate::state::*;
use libc::{c_int, c_void};

/// Least length of a physical allocation.
pub(crate) const GRANULE: u64 = 2 << 20;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const DESCRIPTOR: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
const FABRIC: c_int = 8;
const FABRIC_MARK: u64 = 0x6661_6272_6963_0001;

/// `CUmemFabricHandle`, as this driver fills it: whose allocation it is, and which.
#[repr(C)]
#[derive(Clone, Copy)]
struct FabricHandle {
    mark: u64,
    pid: u64,
    fd: u64,
    file: u64,
    rest: [u64; 4],
}

/// Physical allocation. It lives while its handle is held or it is mapped.
#[derive(Debug)]
pub(crate) struct Physical {
    device: usize,
    bytes: u64,
    handle_types: c_int,
    fd: c_int,
    /// References: those of the handle, and one for each mapping.
    references: u32,
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: opened for this allocation.
        unsafe { libc::close(self.fd) };
    }
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: [c_int; 2],
    windows: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Access {
    location: [c_int; 2],
    flags: c_int,
}

impl State {
    fn create(&mut self, device: usize, bytes: u64, handle_types: c_int) -> Result<u64, i32> {
        if bytes == 0 || !bytes.is_multiple_of(GRANULE) {
            return Err(INVALID_VALUE);
        }
        let fd = create(bytes).ok_or(OUT_OF_MEMORY)?;
        let handle = self.handle();
        self.physical.insert(handle, Physical { device, bytes, handle_types, fd, references: 1 });
        Ok(handle)
    }

    /// Maps new physical allocations of these bytes one behind the other, for all devices.
    pub(crate) fn map_all(&mut self, device: usize, count: u64, bytes: u64, handle_types: c_int) -> Result<u64, i32> {
        let base = self.memory.reserve(device, count * bytes, GRANULE).ok_or(OUT_OF_MEMORY)?;
        for number in 0..count {
            let handle = self.create(device, bytes, handle_types)?;
            self.map(base + number * bytes, bytes, handle)?;
            self.memory.allow(base + number * bytes);
            self.release(handle)?;
        }
        Ok(base)
    }

    /// Ends the mappings of a reservation, and gives it back. Returns false if there is none at the address.
    pub(crate) fn unmap_all(&mut self, base: u64) -> bool {
        let Some(bytes) = self.memory.reserved_at(base) else { return false };
        self.unmap(base, bytes).is_ok() && self.memory.unreserve(base, bytes)
    }

    fn release(&mut self, handle: u64) -> Result<(), i32> {
        let physical = self.physical.get_mut(&handle).ok_or(INVALID_VALUE)?;
        physical.references -= 1;
        if physical.references == 0 {
            self.physical.remove(&handle);
        }
        Ok(())
    }

    fn map(&mut self, address: u64, bytes: u64, handle: u64) -> Result<(), i32> {
        let physical = self.physical.get_mut(&handle).ok_or(INVALID_VALUE)?;
        if physical.bytes != bytes || !self.memory.is_vacant(address, bytes) {
            return Err(INVALID_VALUE);
        }
        let device = self.memory.device_of(address).ok_or(INVALID_VALUE)?;
        // SAFETY: the allocation's descriptor.
        let fd = unsafe { libc::fcntl(physical.fd, libc::F_DUPFD_CLOEXEC, 0) };
        physical.references += 1;
        let source = Source::Mapped { handle, accessible: false };
        self.memory
            .insert(device, address, bytes, false, File { fd, offset: 0 }, source)
            .map(|_| ())
            .ok_or(OUT_OF_MEMORY)
    }

    /// Ends every mapping in a range, which begins and ends with one.
    fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), i32> {
        let inside = self.memory.all().filter(|one| (address..address + bytes).contains(&one.base));
        let inside: Vec<(u64, u64)> = inside
            .map(|one| match one.source {
                Source::Mapped { handle, .. } if one.base + one.bytes <= address + bytes => Ok((one.base, handle)),
                _ => Err(INVALID_VALUE),
            })
            .collect::<Result<_, _>>()?;
        if inside.first().is_none_or(|(base, _)| *base != address) {
            return Err(INVALID_VALUE);
        }
        for (base, handle) in inside {
            self.memory.free(base);
            self.release(handle)?;
        }
        Ok(())
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64) -> c_int {
    result(call_in_context("cuMemGetAddressRange_v2").and_then(|(state, _)| {
        let found = state.memory.find(address).ok_or(INVALID_VALUE)?;
        // SAFETY: a place of the caller.
        unsafe { store(base, found.base) }?;
        // SAFETY: as above.
        unsafe { store(bytes, found.bytes as usize) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) -> c_int {
    result(call_in_context("cuMemRetainAllocationHandle").and_then(|(mut state, _)| {
        let found = state.memory.find(address as u64).ok_or(INVALID_VALUE)?;
        let Source::Mapped { handle: found, .. } = found.source else { return Err(INVALID_VALUE) };
        state.physical.get_mut(&found).ok_or(INVALID_VALUE)?.references += 1;
        // SAFETY: a place of the caller.
        unsafe { store(handle, found) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemRelease(handle: u64) -> c_int {
    result(call_in_context("cuMemRelease").and_then(|(mut state, _)| state.release(handle)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(place: *mut Properties, handle: u64) -> c_int {
    result(call_in_context("cuMemGetAllocationPropertiesFromHandle").and_then(|(state, _)| {
        let physical = state.physical.get(&handle).ok_or(INVALID_VALUE)?;
        let properties = Properties {
            kind: 1,
            handle_types: physical.handle_types,
            location: [1, physical.device as c_int],
            windows: std::ptr::null_mut(),
            flags: [0; 8],
        };
        // SAFETY: a place of the caller.
        unsafe { store(place, properties) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemExportToShareableHandle(
    place: *mut c_void,
    handle: u64,
    kind: c_int,
    flags: u64,
) -> c_int {
    result(call_in_context("cuMemExportToShareableHandle").and_then(|(state, _)| {
        let physical = state.physical.get(&handle).ok_or(INVALID_VALUE)?;
        if flags != 0 || physical.handle_types & kind == 0 {
            return Err(INVALID_VALUE);
        }
        if kind == FABRIC {
            let (pid, fd, file) = (u64::from(std::process::id()), physical.fd as u64, inode(physical.fd));
            // SAFETY: a place of the caller.
            return unsafe { store(place.cast(), FabricHandle { mark: FABRIC_MARK, pid, fd, file, rest: [0; 4] }) };
        }
        // SAFETY: the allocation's descriptor.
        let fd = unsafe { libc::fcntl(physical.fd, libc::F_DUPFD_CLOEXEC, 0) };
        // SAFETY: a place of the caller.
        if fd < 0 { Err(OUT_OF_MEMORY) } else { unsafe { store(place.cast::<c_int>(), fd) } }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemImportFromShareableHandle(
    place: *mut u64,
    descriptor: *mut c_void,
    kind: c_int,
) -> c_int {
    result(call_in_context("cuMemImportFromShareableHandle").and_then(|(mut state, device)| {
        let fd = match kind {
            // SAFETY: a descriptor of the caller, which keeps it.
            DESCRIPTOR => unsafe { libc::fcntl(descriptor as usize as c_int, libc::F_DUPFD_CLOEXEC, 0) },
            FABRIC => {
                // SAFETY: the caller passes a fabric handle.
                let fabric = unsafe { descriptor.cast::<FabricHandle>().read_unaligned() };
                let known = if fabric.mark == FABRIC_MARK { Ok(fabric) } else { Err(INVALID_VALUE) }?;
                open_foreign(known.pid as u32, known.fd as u32, known.file).unwrap_or(-1)
            }
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: a record of integers, for which zeros are valid.
        let mut found: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: stores one record.
        if unsafe { libc::fstat(fd, &raw mut found) } != 0 {
            return Err(INVALID_VALUE);
        }
        let handle = state.handle();
        let bytes = found.st_size as u64;
        state.physical.insert(handle, Physical { device, bytes, handle_types: 0, fd, references: 1 });
        // SAFETY: a place of the caller.
        unsafe { store(place, handle) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAddressReserve(
    place: *mut u64,
    bytes: usize,
    _align: usize,
    _address: u64,
    flags: u64,
) -> c_int {
    result(call_in_context("cuMemAddressReserve").and_then(|(mut state, device)| {
        if flags != 0 || bytes == 0 || !(bytes as u64).is_multiple_of(GRANULE) {
            return Err(INVALID_VALUE);
        }
        let base = state.memory.reserve(device, bytes as u64, GRANULE).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: a place of the caller.
        unsafe { store(place, base) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemAddressFree(address: u64, bytes: usize) -> c_int {
    result(call_in_context("cuMemAddressFree").and_then(|(mut state, _)| {
        if state.memory.unreserve(address, bytes as u64) { Ok(()) } else { Err(INVALID_VALUE) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) -> c_int {
    result(call_in_context("cuMemMap").and_then(|(mut state, _)| {
        if offset != 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        state.map(address, bytes as u64, handle)
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemUnmap(address: u64, bytes: usize) -> c_int {
    result(call_in_context("cuMemUnmap").and_then(|(mut state, _)| state.unmap(address, bytes as u64)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemSetAccess(
    address: u64,
    _bytes: usize,
    access: *const Access,
    count: usize,
) -> c_int {
    result(call_in_context("cuMemSetAccess").and_then(|(mut state, device)| {
        // SAFETY: the caller gives `count` records, at least one.
        let first = if count > 0 { unsafe { access.read() } } else { return Err(INVALID_VALUE) };
        if first.location != [1, device as c_int] || first.flags != 3 || !state.memory.allow(address) {
            return Err(INVALID_VALUE);
        }
        Ok(())
    }))
}

/// Maps physical allocations one behind the other, as a program's other libraries would; 0 if that fails.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_map(device: usize, count: u64, each_bytes: u64, handle_types: c_int) -> u64 {
    state().map_all(device, count, each_bytes, handle_types).unwrap_or(0)
}

/// Makes later allocations mappings of this interface that were created for these types of handles, as some allocators
/// of programs do; or not.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_set_virtual(is_virtual: c_int, handle_types: c_int) {
    state().is_virtual = (is_virtual != 0).then_some(handle_types);
}

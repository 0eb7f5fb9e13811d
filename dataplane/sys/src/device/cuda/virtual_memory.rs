//! Allocations of the virtual-memory interface: shared with other processes, and mapped from theirs.
//!
//! Such memory is a range of addresses in which physical allocations are mapped. A handle is of one physical
//! allocation, so memory that spans several of them is not shared. An allocation was created for some types of handles:
//! a descriptor is used where it has one, and otherwise a fabric handle, which the driver takes where both processes
//! may use the same `IMEX` channel.

use super::ffi::*;
use super::library::VirtualMemory;
use super::{Cuda, id};
use crate::device::DeviceError;
use crate::device::driver::{HANDLE_BYTES, ShareHandle, SharedPhysical};
use libc::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

impl VirtualMemory {
    /// Exports the physical allocation that is mapped at an address.
    pub(super) fn share(&self, cuda: &Cuda, ordinal: u16, address: u64) -> Result<SharedPhysical, DeviceError> {
        let (mut base, mut bytes) = (0_u64, 0_usize);
        // SAFETY: the driver stores one address and one length.
        let code = unsafe { (self.address_range)(&raw mut base, &raw mut bytes, address) };
        cuda.check(ordinal, "cuMemGetAddressRange", code)?;
        let mut handle: AllocationHandle = 0;
        // SAFETY: the driver stores one handle, which is released below.
        let code = unsafe { (self.retain)(&raw mut handle, address as *mut c_void) };
        // Memory that was not mapped by this interface.
        if code == INVALID_VALUE {
            return Err(DeviceError::Unsupported { id: id(ordinal), what: "handles of this allocation" });
        }
        cuda.check(ordinal, "cuMemRetainAllocationHandle", code)?;
        let exported = self.export(cuda, ordinal, handle);
        // SAFETY: retained above.
        let _ = unsafe { (self.release)(handle) };
        Ok(SharedPhysical { handle: exported?, base, bytes: bytes as u64 })
    }

    fn export(&self, cuda: &Cuda, ordinal: u16, handle: AllocationHandle) -> Result<ShareHandle, DeviceError> {
        let mut found = AllocationProperties {
            kind: 0,
            handle_types: 0,
            location: MemLocation::default(),
            windows: std::ptr::null_mut(),
            flags: [0; 8],
        };
        // SAFETY: the driver stores one record.
        let code = unsafe { (self.properties)(&raw mut found, handle) };
        cuda.check(ordinal, "cuMemGetAllocationPropertiesFromHandle", code)?;
        let allows = |kind| found.handle_types & kind != 0 && found.location.kind == LOCATION_DEVICE;
        if allows(HANDLE_DESCRIPTOR) {
            let mut fd: c_int = -1;
            // SAFETY: the driver stores one descriptor.
            let code = unsafe { (self.export)((&raw mut fd).cast(), handle, HANDLE_DESCRIPTOR, 0) };
            cuda.check(ordinal, "cuMemExportToShareableHandle", code)?;
            // SAFETY: a new descriptor, which belongs to the caller.
            return Ok(ShareHandle::Descriptor(unsafe { OwnedFd::from_raw_fd(fd) }));
        }
        if allows(HANDLE_FABRIC) {
            let mut bytes = [0; HANDLE_BYTES];
            // SAFETY: the driver stores one fabric handle, which has this length.
            let code = unsafe { (self.export)((&raw mut bytes).cast(), handle, HANDLE_FABRIC, 0) };
            cuda.check(ordinal, "cuMemExportToShareableHandle", code)?;
            return Ok(ShareHandle::Fabric(bytes));
        }
        let what = "descriptors and fabric handles of an allocation that was not created for them";
        Err(DeviceError::Unsupported { id: id(ordinal), what })
    }

    /// Maps the physical allocation behind a descriptor or fabric handle, for this device alone.
    pub(super) fn map(&self, cuda: &Cuda, ordinal: u16, shared: &ShareHandle, bytes: u64) -> Result<u64, DeviceError> {
        let mut handle: AllocationHandle = 0;
        let mut fabric = if let ShareHandle::Fabric(bytes) = shared { *bytes } else { [0; HANDLE_BYTES] };
        // The driver takes a descriptor in the place of a pointer, and a fabric handle by one.
        let (from, kind) = match shared {
            ShareHandle::Descriptor(fd) => (fd.as_raw_fd() as usize as *mut c_void, HANDLE_DESCRIPTOR),
            ShareHandle::Fabric(_) => ((&raw mut fabric).cast(), HANDLE_FABRIC),
            ShareHandle::Bytes(_) => {
                return Err(DeviceError::Unsupported { id: id(ordinal), what: "a handle of a whole allocation" });
            }
        };
        // SAFETY: the driver stores one handle, and checks the descriptor, or reads one fabric handle.
        let code = unsafe { (self.import)(&raw mut handle, from, kind) };
        cuda.check(ordinal, "cuMemImportFromShareableHandle", code)?;
        let mapped = self.map_handle(cuda, ordinal, handle, bytes);
        // SAFETY: imported above; its mapping holds the allocation.
        let _ = unsafe { (self.release)(handle) };
        mapped
    }

    fn map_handle(&self, cuda: &Cuda, ordinal: u16, handle: AllocationHandle, bytes: u64) -> Result<u64, DeviceError> {
        let (mut address, length) = (0_u64, bytes as usize);
        // SAFETY: the driver stores one address.
        let code = unsafe { (self.reserve)(&raw mut address, length, 0, 0, 0) };
        cuda.check(ordinal, "cuMemAddressReserve", code)?;
        // SAFETY: the range was reserved above, and has no mapping.
        let code = unsafe { (self.map)(address, length, 0, handle, 0) };
        if let Err(error) = cuda.check(ordinal, "cuMemMap", code) {
            // SAFETY: reserved above.
            let _ = unsafe { (self.free)(address, length) };
            return Err(error);
        }
        let location = MemLocation { kind: LOCATION_DEVICE, id: c_int::from(ordinal) };
        let access = AccessDescription { location, flags: ACCESS_READ_WRITE };
        // SAFETY: mapped above; one record.
        let code = unsafe { (self.set_access)(address, length, &raw const access, 1) };
        if let Err(error) = cuda.check(ordinal, "cuMemSetAccess", code) {
            self.unmap(address, bytes);
            return Err(error);
        }
        Ok(address)
    }

    /// Ends a mapping, and gives its addresses back.
    pub(super) fn unmap(&self, address: u64, bytes: u64) {
        // SAFETY: mapped by this interface, which is ended once.
        let _ = unsafe { (self.unmap)(address, bytes as usize) };
        // SAFETY: reserved by this interface, and not mapped any more.
        let _ = unsafe { (self.free)(address, bytes as usize) };
    }
}

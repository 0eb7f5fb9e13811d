//! Registrations of device memory: through a dma-buf descriptor, or by its address with a module of the kernel.

use super::error::VerbsError;
use super::ffi::*;
use super::memory::{Access, MemoryRegion, ProtectionDomain, RegisteredMemory};
use crate::device::{DeviceError, DeviceMemory, DeviceRange};
use libc::c_int;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{NonNull, without_provenance_mut};
use std::sync::Arc;

/// Dma-buf descriptor of an allocation of device memory, for its registrations with any number of RDMA devices. It is
/// not needed any more when these are made. Any thread may use it.
#[derive(Debug)]
pub struct DmaBuf {
    memory: Arc<DeviceMemory>,
    fd: OwnedFd,
    /// Offset of the memory in the buffer.
    offset: u64,
}

impl DmaBuf {
    /// Exports the allocation around memory of a device.
    ///
    /// # Errors
    /// See [`DeviceMemory::export_dma_buf`].
    pub fn export(memory: &Arc<DeviceMemory>) -> Result<Self, DeviceError> {
        let (fd, offset) = memory.export_dma_buf()?;
        Ok(Self { memory: Arc::clone(memory), fd, offset })
    }
}

impl ProtectionDomain {
    /// Registers `bytes` bytes at offset `from` of device memory through its descriptor. Peers and pieces name them by
    /// their addresses on the device. The kernel keeps the buffer alive as long as the registration.
    ///
    /// # Errors
    /// When the library or the device does not support it; when the range crosses a boundary between mappings of the
    /// device's memory ([`VerbsError::is_invalid`]).
    ///
    /// # Panics
    /// When the range is not inside the memory.
    pub fn register_dma_buf(
        &self,
        buffer: &DmaBuf,
        from: u64,
        bytes: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let range = DeviceRange::new(&buffer.memory, from, bytes);
        let Some(register) = self.context().functions().reg_dmabuf_mr else {
            return Err(self.not_offered("dma-buf registration (rdma-core 34 or newer)"));
        };
        let flags = access.raw() & !ACCESS_ON_DEMAND;
        let (domain, fd, offset) = (self.inner().raw(), buffer.fd.as_raw_fd(), buffer.offset + from);
        // SAFETY: the kernel checks the descriptor and the range, and holds the buffer itself.
        let raw = unsafe { register(domain, offset, bytes as usize, range.address(), fd, flags as c_int) };
        match NonNull::new(raw) {
            Some(raw) => Ok(MemoryRegion::new(self, raw, RegisteredMemory::Device(range), flags)),
            None => Err(self.register_failed(bytes, io::Error::last_os_error())),
        }
    }

    /// Registers device memory by its address, which needs a module of the kernel that knows the addresses of such
    /// memory: `nvidia_peermem` for CUDA.
    ///
    /// # Errors
    /// When there is no such module, or it or the device refuses.
    pub fn register_peer_memory(&self, memory: &Arc<DeviceMemory>, access: Access) -> Result<MemoryRegion, VerbsError> {
        let range = DeviceRange::new(memory, 0, memory.bytes());
        let (place, bytes) = (without_provenance_mut(range.address() as usize), range.bytes() as usize);
        let access = Access { on_demand: false, ..access };
        let raw = self.register_raw(place, bytes, access)?;
        Ok(MemoryRegion::new(self, raw, RegisteredMemory::Device(range), access.raw()))
    }
}

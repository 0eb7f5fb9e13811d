//! Interface of a vendor's driver, as far as it is used here: the one trait that each driver library implements.
//!
//! Calls that need a current context say so; [`Device`](super::Device) makes its context current around them. Handles
//! are plain words, because a driver gives pointers and another one numbers.

use super::captures::Captures;
use super::{Allocation, DeviceError, DeviceId, DeviceInfo, Family};
use std::os::fd::OwnedFd;

/// Context of a device, as its driver names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawContext(pub(crate) u64);

/// Proof that this thread entered a context, which it is to leave, with what the driver needs for that.
#[derive(Debug)]
#[must_use]
pub(crate) struct Previous(pub(crate) Option<u64>);

/// Stream of a driver: a queue whose operations are done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawStream(pub(crate) u64);

/// Event of a driver: a point in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawEvent(pub(crate) u64);

/// Sides of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From host memory to device memory.
    ToDevice,
    /// From device memory to host memory.
    ToHost,
    /// From device memory to device memory.
    Between,
}

/// One copy of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawCopy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: usize,
    pub(crate) direction: Direction,
}

/// Length of a handle that lets another process map an allocation.
pub const HANDLE_BYTES: usize = 64;

/// Handle of an allocation, by which another process maps it.
#[derive(Debug)]
pub enum ShareHandle {
    /// Bytes that the driver of another process takes.
    Bytes([u8; HANDLE_BYTES]),
    /// Descriptor of a physical allocation of the virtual-memory interface.
    Descriptor(OwnedFd),
    /// Fabric handle of a physical allocation of the virtual-memory interface, where that has no descriptor.
    Fabric([u8; HANDLE_BYTES]),
}

/// Physical allocation for other processes.
#[derive(Debug)]
pub(crate) struct SharedPhysical {
    /// Descriptor or fabric handle.
    pub(crate) handle: ShareHandle,
    /// First address of its mapping here.
    pub(crate) base: u64,
    /// Length of the mapping.
    pub(crate) bytes: u64,
}

/// Driver library. Any thread may call it.
pub(crate) trait Driver: Send + Sync {
    /// Returns the family.
    fn family(&self) -> Family;

    /// Returns the visible devices, by ordinal.
    fn devices(&self) -> &[DeviceInfo];

    /// Describes the allocation at an address; `None` if the address is the host's or unknown to the driver.
    fn describe(&self, address: u64) -> Result<Option<Allocation>, DeviceError>;

    /// Retains the primary context of a device.
    fn retain(&self, ordinal: u16) -> Result<RawContext, DeviceError>;

    /// Releases what [`Self::retain`] retained. Errors of a process that ends are ignored.
    fn release(&self, ordinal: u16, context: RawContext);

    /// Makes a context current on this thread.
    fn enter(&self, ordinal: u16, context: RawContext) -> Result<Previous, DeviceError>;

    /// Makes the context current that was so before [`Self::enter`].
    fn leave(&self, previous: Previous);

    /// Returns the functions for captures of streams into graphs; by default, none.
    fn captures(&self) -> Captures {
        Captures::default()
    }

    /// Creates a stream that waits for no other. Needs the current context.
    fn create_stream(&self, ordinal: u16) -> Result<RawStream, DeviceError>;

    /// Destroys a stream without operations in flight. Needs the current context.
    fn destroy_stream(&self, stream: RawStream);

    /// Waits until a stream is idle; for the end of a queue only. Needs the current context.
    fn synchronize(&self, ordinal: u16, stream: RawStream) -> Result<(), DeviceError>;

    /// Returns the device of a caller's stream. Needs the current context, of any device. By default, the device of
    /// that context.
    fn device_of_stream(&self, ordinal: u16, stream: RawStream) -> Result<u16, DeviceError> {
        let _ = stream;
        Ok(ordinal)
    }

    /// Makes a stream wait for an event, on the device. Needs the current context.
    fn wait(&self, ordinal: u16, stream: RawStream, event: RawEvent) -> Result<(), DeviceError>;

    /// Creates an event. Needs the current context.
    fn create_event(&self, ordinal: u16) -> Result<RawEvent, DeviceError>;

    /// Destroys an event. Needs the current context.
    fn destroy_event(&self, event: RawEvent);

    /// Places an event behind all operations of a stream. Needs the current context.
    fn record(&self, ordinal: u16, event: RawEvent, stream: RawStream) -> Result<(), DeviceError>;

    /// Returns true if everything before the event is done. Needs the current context.
    fn is_done(&self, ordinal: u16, event: RawEvent) -> Result<bool, DeviceError>;

    /// Enqueues copies in one call where the driver can. Needs the current context. After an error any of them may be
    /// in flight.
    ///
    /// # Safety
    /// Host memory stays mapped, and unused by Rust references, until an event behind the copies is done.
    unsafe fn copy(&self, ordinal: u16, stream: RawStream, copies: &[RawCopy]) -> Result<(), DeviceError>;

    /// Allocates device memory; returns its address. Needs the current context.
    fn allocate(&self, ordinal: u16, bytes: u64) -> Result<u64, DeviceError>;

    /// Frees what [`Self::allocate`] allocated. Needs the current context.
    fn free(&self, address: u64);

    /// Pins host memory for the copy engines of all devices. Needs the current context.
    ///
    /// # Safety
    /// The memory stays mapped until [`Self::unpin`].
    unsafe fn pin(&self, ordinal: u16, address: u64, bytes: usize) -> Result<(), DeviceError>;

    /// Ends the pinning. Needs the current context.
    fn unpin(&self, address: u64);

    /// Exports an allocation as a dma-buf descriptor, with the offset of the allocation in it. Needs the current
    /// context.
    fn export_dma_buf(&self, ordinal: u16, base: u64, bytes: u64) -> Result<(OwnedFd, u64), DeviceError>;

    /// Makes a NIC's writes visible to kernels of the device. Needs the current context.
    fn flush_writes(&self, ordinal: u16) -> Result<(), DeviceError>;

    /// Returns the handle by which another process maps the allocation at `base`. Needs the current context.
    fn share(&self, ordinal: u16, base: u64) -> Result<[u8; HANDLE_BYTES], DeviceError>;

    /// Maps the allocation of another process; returns its address here. Needs the current context.
    fn map(&self, ordinal: u16, handle: &[u8; HANDLE_BYTES]) -> Result<u64, DeviceError>;

    /// Ends a mapping. Needs the current context.
    fn unmap(&self, address: u64);

    /// Exports the physical allocation that is mapped at an address by the virtual-memory interface, as a descriptor
    /// or fabric handle for other processes. Needs the current context.
    fn share_physical(&self, ordinal: u16, _address: u64) -> Result<SharedPhysical, DeviceError> {
        Err(self.without_virtual_memory(ordinal))
    }

    /// Maps the physical allocation behind a descriptor or fabric handle, with access for this device; returns its
    /// address here. Needs the current context.
    fn map_physical(&self, ordinal: u16, _handle: &ShareHandle, _bytes: u64) -> Result<u64, DeviceError> {
        Err(self.without_virtual_memory(ordinal))
    }

    /// Ends what [`Self::map_physical`] mapped. Needs the current context.
    fn unmap_physical(&self, _address: u64, _bytes: u64) {}

    /// Returns the error of a driver that does not share allocations of virtual memory.
    fn without_virtual_memory(&self, ordinal: u16) -> DeviceError {
        let id = DeviceId { family: self.family(), ordinal };
        DeviceError::Unsupported { id, what: "descriptors of allocations for other processes" }
    }
}

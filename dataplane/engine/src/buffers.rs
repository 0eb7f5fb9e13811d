//! Registered memory of an initiator, and ranges of it.

use std::sync::Arc;

use kvplane_client::Local;
use kvplane_sys::Region;
use kvplane_sys::device::DeviceMemory;

/// First index of the caller's buffers. Those below it are the initiator's own.
pub const FIRST_BUFFER: u32 = 16;

/// Registered memory of one initiator.
#[derive(Clone)]
pub struct Buffer {
    region: Arc<Region>,
    index: u32,
}

impl Buffer {
    /// Creates the handle of the region at this position of the initiator
    /// ([`Initiator::add_buffer`](crate::Initiator::add_buffer)).
    #[must_use]
    pub const fn new(region: Arc<Region>, index: u32) -> Self {
        Self { region, index }
    }

    /// Returns the memory.
    #[must_use]
    pub const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the position among the initiator's regions.
    #[must_use]
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// Returns a range of the buffer.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    #[must_use]
    pub fn slice(&self, offset: usize, bytes: usize) -> Slice {
        let local = Local { buffer: self.index, offset: offset as u64, bytes: bytes as u64 };
        Slice::inside(local, self.region.bytes() as u64)
    }
}

/// Registered memory of a device.
#[derive(Clone)]
pub struct DeviceBuffer {
    memory: Arc<DeviceMemory>,
    index: u32,
}

impl DeviceBuffer {
    /// Creates the handle of the memory at this position of the initiator
    /// ([`Initiator::add_device_buffer`](crate::Initiator::add_device_buffer)).
    #[must_use]
    pub const fn new(memory: Arc<DeviceMemory>, index: u32) -> Self {
        Self { memory, index }
    }

    /// Returns the memory.
    #[must_use]
    pub const fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// Returns the position among the initiator's buffers.
    #[must_use]
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// Returns a range of the buffer.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    #[must_use]
    pub fn slice(&self, offset: u64, bytes: u64) -> Slice {
        Slice::inside(Local { buffer: self.index, offset, bytes }, self.memory.bytes())
    }
}

/// Range of registered memory.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    local: Local,
}

impl Slice {
    /// Creates a slice of a range as requests name it. Memory that is not registered with the initiator is refused at
    /// its use.
    #[must_use]
    pub const fn new(local: Local) -> Self {
        Self { local }
    }

    /// Creates a slice of a buffer of `all_bytes` bytes.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    fn inside(local: Local, all_bytes: u64) -> Self {
        let Local { offset, bytes, .. } = local;
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= all_bytes);
        assert!(is_inside, "{bytes} bytes at {offset} are not inside a buffer of {all_bytes} bytes");
        Self { local }
    }

    /// Returns the range as requests name it.
    #[must_use]
    pub const fn local(self) -> Local {
        self.local
    }
}

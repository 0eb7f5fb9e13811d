//! Registered memory of an initiator, and ranges of it.

use std::sync::Arc;

use kvplane_client::Local;
use kvplane_sys::Region;

/// Registered memory of one initiator.
#[derive(Clone)]
pub struct Buffer {
    region: Arc<Region>,
    index: u32,
}

impl Buffer {
    /// The region that the initiator has at this position ([`Initiator::add_buffer`](crate::Initiator::add_buffer)).
    #[must_use]
    pub const fn new(region: Arc<Region>, index: u32) -> Self {
        Self { region, index }
    }

    /// The memory.
    #[must_use]
    pub const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Its position among the initiator's regions.
    #[must_use]
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// A part of it.
    ///
    /// # Panics
    /// When the part is not inside.
    #[must_use]
    pub fn slice(&self, offset: usize, bytes: usize) -> Slice {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.region.bytes());
        assert!(inside, "{bytes} bytes at {offset} are not inside a buffer of {} bytes", self.region.bytes());
        Slice { local: Local { buffer: self.index, offset: offset as u64, bytes: bytes as u64 } }
    }
}

/// A part of registered memory.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    local: Local,
}

impl Slice {
    /// A range as requests name it; what is not registered with the initiator is refused when it is used.
    #[must_use]
    pub const fn new(local: Local) -> Self {
        Self { local }
    }

    /// The range, as requests name it.
    #[must_use]
    pub const fn local(self) -> Local {
        self.local
    }
}

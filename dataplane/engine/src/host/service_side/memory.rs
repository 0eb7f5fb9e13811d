//! Memory that the service names: its pool, and registered segments.

use std::sync::Arc;

use kvplane_store::service::{Memory, MemoryExtent, PoolBytes};
use kvplane_sys::{IoBuf, Region};

use crate::host::segments::SegmentRegions;

/// View of the pool, from which lists and copies read names.
pub(crate) struct PoolView<'a>(pub(crate) &'a Region);

impl PoolBytes for PoolView<'_> {
    fn read(&self, offset: u64, into: &mut [u8]) {
        self.0.copy_out(offset as usize, into);
    }

    fn bytes(&self) -> u64 {
        self.0.bytes() as u64
    }
}

/// Memory of a service.
pub(super) struct ServedMemory {
    /// Pool of its store, if it has one.
    pub(super) pool: Option<Arc<Region>>,
    /// Memory of registered segments.
    pub(super) segments: SegmentRegions,
}

impl ServedMemory {
    pub(super) fn new(pool: Option<Arc<Region>>) -> Self {
        Self { pool, segments: SegmentRegions::default() }
    }

    /// Returns the memory of an extent that the service named.
    ///
    /// # Panics
    /// If the service names memory that it was not given.
    pub(super) fn of(&self, extent: MemoryExtent) -> IoBuf {
        let region = match extent.memory {
            Memory::Pool => self.pool.as_ref(),
            Memory::Segment(segment) => self.segments.get(segment),
            // Requests for it are staged.
            Memory::DevicePool => None,
        };
        let region = region.expect("the service names only memory that the host gave it");
        IoBuf::new(Arc::clone(region), extent.offset as usize, extent.bytes as usize)
    }

    /// Returns the memory of several extents, in order.
    ///
    /// # Panics
    /// See [`Self::of`].
    pub(super) fn all(&self, extents: &[MemoryExtent]) -> Vec<IoBuf> {
        extents.iter().map(|&extent| self.of(extent)).collect()
    }

    /// Returns true if a region is still the pool, or the memory of a segment.
    pub(super) fn has(&self, region: &Arc<Region>) -> bool {
        self.pool.iter().chain(self.segments.regions()).any(|held| Arc::ptr_eq(held, region))
    }
}

//! Objects of a former process whose bytes were not compared with their checksums yet.

use core::fmt;
use std::sync::Arc;

use kvplane_proto::digest::Digest;

use super::space::Space;
use crate::entry::EntryId;
use crate::eviction::EvictionPolicy;

/// Checksums of bytes in the pool, which the owner of its memory computes.
pub trait PoolSums: fmt::Debug + Send + Sync {
    /// Returns the checksum of these bytes of the pool.
    fn checksum(&self, offset: u64, bytes: u64) -> u64;
}

/// Counters of objects of a former process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KeptCounters {
    /// Objects taken back.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Objects whose bytes were compared with their checksums, when they were accessed first, and matched.
    pub checked: u64,
    /// Objects whose bytes did not match: they are removed.
    pub damaged: u64,
}

/// Reader of the pool, and what it has found.
#[derive(Debug, Default)]
pub(super) struct UncheckedObjects {
    pub(super) sums: Option<Arc<dyn PoolSums>>,
    pub(super) counters: KeptCounters,
    /// Entries that peers of the former process may still access: pinned ones, and withheld extents. No pin or
    /// reservation of this process leads to them, and they take none of its places.
    pub(super) lent: u32,
    pub(super) withheld: u32,
}

impl UncheckedObjects {
    /// Returns the entry of an object whose bytes are about to be lent: like a look-up, but an object of a former
    /// process whose bytes do not match its checksum is removed.
    #[inline]
    pub(super) fn find_to_lend<P: EvictionPolicy>(&mut self, space: &mut Space<P>, digest: Digest) -> Option<EntryId> {
        let id = space.objects().find(digest)?;
        if space.objects().entries()[id].is_unchecked() && !self.check(space, id) {
            return None;
        }
        Some(id)
    }

    /// Compares the bytes of an object with its checksum, and removes it if they differ.
    #[cold]
    fn check<P: EvictionPolicy>(&mut self, space: &mut Space<P>, id: EntryId) -> bool {
        let entry = &space.objects().entries()[id];
        let (extent, stated) = (space.pool().extent(entry), entry.checksum());
        let is_whole = self.sums.as_ref().is_some_and(|sums| sums.checksum(extent.offset, extent.bytes) == stated);
        if is_whole {
            space.objects_mut().entries_mut().set_unchecked(id, false);
            self.counters.checked += 1;
        } else {
            self.counters.damaged += 1;
            space.remove(id, true);
        }
        is_whole
    }
}

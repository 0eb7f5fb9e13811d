//! Store of a shard, with its tables on huge pages if the system provides them: look-ups spend most of their time
//! waiting for memory. The pool's memory copies its objects between its near and its far part.

use std::sync::Arc;

use kvplane_proto::{ConfigError, Version};
use kvplane_store::allocator::GRANULE_BYTES;
use kvplane_store::{PoolCopies, Store, StoreConfig, open_far_pool};
use kvplane_sys::Region;
use kvplane_sys::advice::prefer_huge_pages;

/// Unit of space above an SSD: objects that move between memory and SSD without a copy are aligned for direct I/O.
const SSD_UNIT_BYTES: u64 = 4096;

/// Returns the unit of space of a store with these limits, with or without an SSD tier.
#[must_use]
pub fn unit_bytes(limits: Option<&StoreConfig>, above_ssd: bool) -> u64 {
    if above_ssd { SSD_UNIT_BYTES } else { limits.map_or(GRANULE_BYTES, |limits| limits.unit_bytes) }
}

/// Memory of a pool, which copies bytes inside itself.
#[derive(Debug)]
struct PoolMemory(Arc<Region>);

impl PoolCopies for PoolMemory {
    fn copy(&self, from: u64, to: u64, bytes: u64) {
        Region::copy_between(&self.0, to as usize, &self.0, from as usize, bytes as usize);
    }
}

/// Creates an empty store for a pool, with or without an SSD tier. The last `far_pool_bytes` of the memory are its far
/// pool.
pub(super) fn store(
    limits: Option<StoreConfig>,
    above_ssd: bool,
    pool: &Arc<Region>,
    first_version: Version,
) -> Result<Store, ConfigError> {
    let bytes = pool.bytes() as u64;
    let limits = limits.unwrap_or_else(|| StoreConfig::for_pool(bytes));
    let (unit_bytes, far_pool_bytes) = (unit_bytes(Some(&limits), above_ssd), limits.far_pool_bytes);
    let near_bytes = bytes.saturating_sub(far_pool_bytes);
    // Offsets in the far pool follow those in the near part: the latter is in whole units where there is the former.
    let pool_bytes = if far_pool_bytes > 0 { near_bytes } else { near_bytes / unit_bytes * unit_bytes };
    let mut store = Store::new(StoreConfig { pool_bytes, unit_bytes, ..limits }, first_version)?;
    if far_pool_bytes > 0 {
        open_far_pool(&mut store, Arc::new(PoolMemory(Arc::clone(pool))));
    }
    let [digests, entries] = store.objects().memory();
    prefer_huge_pages(digests, true);
    prefer_huge_pages(entries, false);
    Ok(store)
}

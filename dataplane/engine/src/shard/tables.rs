//! Store of a shard, with its tables on huge pages if the system provides them: look-ups spend most of their time
//! waiting for memory.

use kvplane_proto::{ConfigError, Version};
use kvplane_store::allocator::GRANULE_BYTES;
use kvplane_store::{Store, StoreConfig};
use kvplane_sys::advice::prefer_huge_pages;

/// Unit of space above an SSD: objects that move between memory and SSD without a copy are aligned for direct I/O.
const SSD_UNIT_BYTES: u64 = 4096;

/// Returns the unit of space of a store with these limits, with or without an SSD tier.
#[must_use]
pub fn unit_bytes(limits: Option<&StoreConfig>, above_ssd: bool) -> u64 {
    if above_ssd { SSD_UNIT_BYTES } else { limits.map_or(GRANULE_BYTES, |limits| limits.unit_bytes) }
}

/// Creates an empty store for a pool of `bytes`, with or without an SSD tier.
pub(super) fn store(
    limits: Option<StoreConfig>,
    above_ssd: bool,
    bytes: u64,
    first_version: Version,
) -> Result<Store, ConfigError> {
    let limits = limits.unwrap_or_else(|| StoreConfig::for_pool(bytes));
    let unit_bytes = unit_bytes(Some(&limits), above_ssd);
    let pool_bytes = bytes / unit_bytes * unit_bytes;
    let store = Store::new(StoreConfig { pool_bytes, unit_bytes, ..limits }, first_version)?;
    let [digests, entries] = store.objects().memory();
    prefer_huge_pages(digests, true);
    prefer_huge_pages(entries, false);
    Ok(store)
}

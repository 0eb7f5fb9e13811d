//! Store of a shard, with its tables on huge pages if the system provides them: look-ups spend most of their time
//! waiting for memory.

use kvplane_proto::{ConfigError, Version};
use kvplane_store::{Store, StoreConfig};
use kvplane_sys::advice::prefer_huge_pages;

/// Creates an empty store for a pool of `bytes`, with or without an SSD tier.
pub(super) fn store(
    limits: Option<StoreConfig>,
    above_ssd: bool,
    bytes: u64,
    first_version: Version,
) -> Result<Store, ConfigError> {
    let limits = limits.unwrap_or_else(|| StoreConfig::for_pool(bytes));
    // Objects that move between memory and SSD without a copy are aligned for direct I/O.
    let unit_bytes = if above_ssd { 4096 } else { limits.unit_bytes };
    let pool_bytes = bytes / unit_bytes * unit_bytes;
    let store = Store::new(StoreConfig { pool_bytes, unit_bytes, ..limits }, first_version)?;
    let [digests, entries] = store.objects().memory();
    prefer_huge_pages(digests, true);
    prefer_huge_pages(entries, false);
    Ok(store)
}

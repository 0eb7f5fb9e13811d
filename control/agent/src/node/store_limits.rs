//! Limits of a shard's store, derived from the settings of its node.

use kvplane_engine::DevicePoolConfig;
use kvplane_proto::Limits;
use kvplane_store::StoreConfig;
use kvplane_sys::random::random_u64;

use crate::error::Error;
use crate::node::far_pools::FarPoolPart;
use crate::node::{NodeConfig, NodeConfigError};

/// Returns the limits of one of `shards` shards with a pool of this size in DRAM, and a far pool and a device pool if
/// there are such.
pub(crate) fn of_shard(
    config: &NodeConfig,
    pool_bytes: u64,
    far_pool: Option<FarPoolPart>,
    device_pool: Option<DevicePoolConfig>,
    shards: usize,
) -> Result<StoreConfig, Error> {
    let usual = StoreConfig::for_pool(pool_bytes);
    let device_pool_bytes = device_pool.map_or(0, |pool| pool.bytes);
    let far_pool_bytes = far_pool.map_or(0, |pool| pool.bytes);
    let max_objects = match config.max_objects {
        Some(objects) => {
            u32::try_from(objects.div_ceil(shards as u64)).map_err(|_| NodeConfigError::Objects { objects, shards })?
        }
        None => StoreConfig::for_pool(pool_bytes + far_pool_bytes + device_pool_bytes).max_objects,
    };
    Ok(StoreConfig {
        device_pool_bytes,
        far_pool_bytes,
        max_objects,
        eviction: config.eviction,
        high_watermark_percent: config.watermarks_percent.0,
        low_watermark_percent: config.watermarks_percent.1,
        hard_pin_percent: config.hard_pin_percent,
        // A soft pin longer than the protocol allows cannot be requested.
        soft_pin_max_ms: config.soft_pin_max.as_millis().min(Limits::SOFT_PIN_MS.into()) as u32,
        hash_seed: random_u64()?,
        ..usual
    })
}

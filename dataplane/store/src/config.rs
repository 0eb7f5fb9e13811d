//! Limits of a shard's store, and their permitted ranges. All memory of the store follows from them.

use kvplane_proto::{ConfigError, Limits};

use crate::allocator::{GRANULE_BYTES, MAX_HELD_BLOCKS, MAX_POOL_BYTES};
use crate::entry::PINS_MOST;
use crate::eviction::{ChosenPolicy, Eviction};

/// Most pins, and most reservations, that can be configured.
pub const MAX_HANDLES: u32 = PINS_MOST;

/// Configuration of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// Size of the pool: a multiple of [`GRANULE_BYTES`], at most [`MAX_POOL_BYTES`].
    pub pool_bytes: u64,
    /// Unit of space: objects begin at multiples of it and take whole multiples. A power of two from [`GRANULE_BYTES`]
    /// to 4096, which direct I/O requires.
    pub unit_bytes: u64,
    /// Size of the device pool, in memory of an accelerator: a multiple of [`GRANULE_BYTES`]; 0 for none. With one, the
    /// unit is a granule, and the eviction policy is one that tells hot objects from others.
    pub device_pool_bytes: u64,
    /// Size of the far pool, in far memory behind the pool: a multiple of `unit_bytes`; 0 for none. With one,
    /// `pool_bytes` is a multiple of `unit_bytes` too, and there is no device pool.
    pub far_pool_bytes: u64,
    /// Limit on objects, counting those being written and those removed while pinned.
    pub max_objects: u32,
    /// Largest object that is accepted.
    pub max_object_bytes: u64,
    /// Eviction policy.
    pub eviction: Eviction,
    /// For segmented LRU: the part of a tenant's objects, and of the pool, that objects read more than once may fill
    /// before the oldest of them go back to probation. 0 makes the eviction order plain LRU.
    pub protected_percent: u8,
    /// Usage of the pool above which puts evict a few objects more than they need, until `low_watermark_percent` is
    /// reached. 100: objects are evicted only when room is needed, and the pool holds the most.
    pub high_watermark_percent: u8,
    /// Usage at which such eviction stops; at most `high_watermark_percent`.
    pub low_watermark_percent: u8,
    /// Part of the pool that hard pinned objects may take; puts of more are refused.
    pub hard_pin_percent: u8,
    /// Longest soft pin; longer ones are shortened to this. 0: there are none.
    pub soft_pin_max_ms: u32,
    /// Limit on pins held at once, over all objects.
    pub max_pins: u32,
    /// Limit on reservations, counting the expired ones that are not aborted yet.
    pub max_reservations: u32,
    /// Salt of the hash table, so that a peer that chooses digests cannot choose collisions. Drawn at random at the
    /// start.
    pub hash_seed: u64,
}

impl StoreConfig {
    /// Returns limits that suit a pool of `pool_bytes`, rounded down to whole granules: an object for every 4 KiB,
    /// objects up to a quarter of the pool.
    #[must_use]
    pub fn for_pool(pool_bytes: u64) -> Self {
        let pool_bytes = pool_bytes - pool_bytes % GRANULE_BYTES;
        Self {
            pool_bytes,
            unit_bytes: GRANULE_BYTES,
            device_pool_bytes: 0,
            far_pool_bytes: 0,
            max_objects: (pool_bytes / 4096).clamp(1024, 1 << 26) as u32,
            max_object_bytes: (pool_bytes / 4).max(pool_bytes.min(1 << 20)),
            eviction: Eviction::default(),
            protected_percent: 20,
            high_watermark_percent: 100,
            low_watermark_percent: 100,
            hard_pin_percent: 25,
            soft_pin_max_ms: Limits::SOFT_PIN_MS,
            max_pins: 16_384,
            max_reservations: 4096,
            hash_seed: 0,
        }
    }

    /// Returns the limits of a store without a pool: it holds no object. They are not valid for [`crate::Store::new`].
    pub(crate) const fn without_pool() -> Self {
        Self {
            pool_bytes: 0,
            unit_bytes: GRANULE_BYTES,
            device_pool_bytes: 0,
            far_pool_bytes: 0,
            max_objects: 0,
            max_object_bytes: 0,
            eviction: Eviction::SegmentedLru,
            protected_percent: 0,
            high_watermark_percent: 100,
            low_watermark_percent: 100,
            hard_pin_percent: 0,
            soft_pin_max_ms: 0,
            max_pins: 0,
            max_reservations: 0,
            hash_seed: 0,
        }
    }

    /// Returns true if there is a pool, so that the store may hold objects.
    #[must_use]
    pub const fn has_pool(&self) -> bool {
        self.pool_bytes > 0
    }

    /// Returns the host memory of the store, near and far.
    #[must_use]
    pub const fn host_bytes(&self) -> u64 {
        self.pool_bytes + self.far_pool_bytes
    }

    /// Creates the eviction policy that `eviction` names, for this pool.
    #[must_use]
    pub fn policy(&self) -> ChosenPolicy {
        let pool_granules = self.pool_bytes / GRANULE_BYTES;
        ChosenPolicy::new(self.eviction, pool_granules, self.max_objects, self.protected_percent)
    }

    /// Checks every field.
    ///
    /// # Errors
    /// The first field that is out of range, with the numbers.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let within = |field, value, least, most| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(ConfigError::OutOfRange { field, value, least, most })
        };
        within("pool_bytes", self.pool_bytes, GRANULE_BYTES, MAX_POOL_BYTES)?;
        if !self.pool_bytes.is_multiple_of(GRANULE_BYTES) {
            let (field, value) = ("pool_bytes", self.pool_bytes);
            return Err(ConfigError::NotMultiple { field, value, unit: GRANULE_BYTES });
        }
        within("unit_bytes", self.unit_bytes, GRANULE_BYTES, 4096)?;
        if !self.unit_bytes.is_power_of_two() {
            return Err(ConfigError::NotMultiple { field: "unit_bytes", value: self.unit_bytes, unit: GRANULE_BYTES });
        }
        if self.device_pool_bytes > 0 {
            within("device_pool_bytes", self.device_pool_bytes, GRANULE_BYTES, MAX_POOL_BYTES)?;
            if !self.device_pool_bytes.is_multiple_of(GRANULE_BYTES) {
                let (field, value) = ("device_pool_bytes", self.device_pool_bytes);
                return Err(ConfigError::NotMultiple { field, value, unit: GRANULE_BYTES });
            }
            // Tails of objects in the device pool take blocks of one granule, and no slots of pages.
            within("unit_bytes", self.unit_bytes, GRANULE_BYTES, GRANULE_BYTES)?;
            let protected = if self.eviction == Eviction::Lru { 0 } else { self.protected_percent };
            within("protected_percent", protected.into(), 1, 100)?;
        }
        if self.far_pool_bytes > 0 {
            within("far_pool_bytes", self.far_pool_bytes, self.unit_bytes, MAX_POOL_BYTES)?;
            for (field, value) in [("pool_bytes", self.pool_bytes), ("far_pool_bytes", self.far_pool_bytes)] {
                if !value.is_multiple_of(self.unit_bytes) {
                    return Err(ConfigError::NotMultiple { field, value, unit: self.unit_bytes });
                }
            }
            within("device_pool_bytes", self.device_pool_bytes, 0, 0)?;
        }
        within("max_objects", self.max_objects.into(), 1, MAX_HELD_BLOCKS.into())?;
        within("max_object_bytes", self.max_object_bytes, 1, self.pool_bytes)?;
        within("protected_percent", self.protected_percent.into(), 0, 100)?;
        within("high_watermark_percent", self.high_watermark_percent.into(), 1, 100)?;
        let high = self.high_watermark_percent.into();
        within("low_watermark_percent", self.low_watermark_percent.into(), 0, high)?;
        within("hard_pin_percent", self.hard_pin_percent.into(), 0, 90)?;
        within("soft_pin_max_ms", self.soft_pin_max_ms.into(), 0, Limits::SOFT_PIN_MS.into())?;
        within("max_pins", self.max_pins.into(), 1, MAX_HANDLES.into())?;
        within("max_reservations", self.max_reservations.into(), 1, MAX_HANDLES.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_from_the_smallest_pool_to_the_largest() {
        for pool_bytes in [256, 511, 4096, 1 << 20, 1 << 30, (1 << 36) + 77, MAX_POOL_BYTES] {
            assert_eq!(StoreConfig::for_pool(pool_bytes).validate(), Ok(()), "{pool_bytes} B");
        }
        assert!(StoreConfig::for_pool(255).validate().is_err());
        assert!(StoreConfig::for_pool(MAX_POOL_BYTES + 256).validate().is_err());
    }

    #[test]
    fn a_bad_field_is_named_with_its_numbers() {
        let good = StoreConfig::for_pool(1 << 20);
        let message = |config: StoreConfig| config.validate().unwrap_err().to_string();
        assert_eq!(
            message(StoreConfig { pool_bytes: (1 << 20) + 1, ..good.clone() }),
            "pool_bytes is 1048577: set it to a multiple of 256"
        );
        assert_eq!(
            message(StoreConfig { protected_percent: 101, ..good.clone() }),
            "protected_percent is 101: set it between 0 and 100"
        );
        assert_eq!(
            message(StoreConfig { max_object_bytes: 1 << 21, ..good.clone() }),
            "max_object_bytes is 2097152: set it between 1 and 1048576"
        );
        assert!(message(StoreConfig { max_objects: 0, ..good.clone() }).starts_with("max_objects"));
        assert!(message(StoreConfig { max_pins: 0, ..good.clone() }).starts_with("max_pins"));
        assert!(message(StoreConfig { max_reservations: 0, ..good.clone() }).starts_with("max_res"));
        let device = StoreConfig { device_pool_bytes: 1 << 20, ..good };
        assert_eq!(device.validate(), Ok(()));
        assert!(message(StoreConfig { device_pool_bytes: 257, ..device.clone() }).starts_with("device_pool_bytes"));
        assert!(message(StoreConfig { unit_bytes: 4096, ..device.clone() }).starts_with("unit_bytes"));
        assert!(message(StoreConfig { eviction: Eviction::Lru, ..device.clone() }).starts_with("protected_percent"));
        let far = StoreConfig { far_pool_bytes: 1 << 20, unit_bytes: 4096, ..StoreConfig::for_pool(1 << 20) };
        assert_eq!(far.validate(), Ok(()));
        assert!(message(StoreConfig { far_pool_bytes: 256, ..far.clone() }).starts_with("far_pool_bytes"));
        assert!(message(StoreConfig { far_pool_bytes: 4096 + 256, ..far.clone() }).starts_with("far_pool_bytes"));
        assert!(message(StoreConfig { pool_bytes: (1 << 20) + 256, ..far }).starts_with("pool_bytes"));
        assert!(message(StoreConfig { far_pool_bytes: 1 << 20, ..device }).starts_with("device_pool_bytes"));
    }
}

//! Statistics of the store.

/// Counters of requests since the start.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) pin_refusals: u64,
    pub(super) puts: u64,
    pub(super) exists_conflicts: u64,
    pub(super) replacements: u64,
    pub(super) reserve_refusals: u64,
    pub(super) expirations: u64,
    pub(super) aborts: u64,
    pub(super) removes: u64,
    pub(super) stale_ids: u64,
    /// Objects that were committed, by size class.
    pub(super) sizes: [u64; SIZE_CLASSES],
    /// Objects that moved into the device pool, out of it, and that were lost with the device.
    pub(super) promotions: u64,
    pub(super) demotions: u64,
    pub(super) lost_with_device: u64,
}

/// Size classes: class n has the objects of up to 2^n bytes that are larger than those of the class before. The last
/// has all larger objects too.
pub const SIZE_CLASSES: usize = 32;

pub(super) const fn size_class(bytes: u64) -> usize {
    let class = bytes.saturating_sub(1).checked_ilog2();
    let class = match class {
        None => 0,
        Some(power) => power as usize + 1,
    };
    if class < SIZE_CLASSES { class } else { SIZE_CLASSES - 1 }
}

/// Snapshot of gauges and counters. Gauges of space count whole granules: `used_bytes + free_bytes` is the pool, and
/// `used_bytes` is live, removed but pinned, reserved and quarantined objects together, and the pages of their tails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Visible objects.
    pub objects: u64,
    /// Exact sizes of visible objects, summed.
    pub payload_bytes: u64,
    /// Replicated objects among them.
    pub replicas: ReplicaStats,
    /// Size of the pool.
    pub pool_bytes: u64,
    /// Space that is not free.
    pub used_bytes: u64,
    /// Free space, fragmented.
    pub free_bytes: u64,
    /// Length of the largest free block.
    pub largest_free_bytes: u64,
    /// Space of objects that are pinned by readers, removed ones included, or hard pinned.
    pub pinned_bytes: u64,
    /// Objects with hard or soft pins.
    pub kept: PinStats,
    /// Space of removed objects that wait for the release of their last pin; a part of `pinned_bytes`.
    pub doomed_bytes: u64,
    /// Space of puts in flight.
    pub reserved_bytes: u64,
    /// Space of expired puts that were not aborted.
    pub quarantined_bytes: u64,
    /// Space of pages of tails.
    pub tail_page_bytes: u64,
    /// Device pool. Its objects count among the visible ones; its space does not count in the gauges above.
    pub device: DevicePoolStats,
    /// Pins held.
    pub pins: u64,
    /// Reservations held, expired ones included.
    pub reservations: u64,
    /// Gets that found their object and got a pin.
    pub hits: u64,
    /// Gets that found no object.
    pub misses: u64,
    /// Commits of new objects or versions.
    pub puts: u64,
    /// Puts, at reserve or commit, that were refused because an object of the digest existed.
    pub exists_conflicts: u64,
    /// Objects replaced by a newer version.
    pub replacements: u64,
    /// Reservations refused for lack of space, objects or reservations.
    pub reserve_refusals: u64,
    /// Puts whose deadline passed.
    pub expirations: u64,
    /// Reservations aborted.
    pub aborts: u64,
    /// Objects removed on request.
    pub removes: u64,
    /// Objects evicted.
    pub evictions: u64,
    /// Exact sizes of evicted objects, summed.
    pub evicted_bytes: u64,
    /// Pins and reservations that peers did not get, or did not have.
    pub handles: HandleStats,
    /// Objects that were committed, by size: see [`SIZE_CLASSES`].
    pub sizes: [u64; SIZE_CLASSES],
    /// Events of objects.
    pub events: EventStats,
}

/// Pins and reservations that peers did not get, or did not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandleStats {
    /// Gets that found no free pin.
    pub pin_refusals: u64,
    /// Messages about pins and reservations that were not held.
    pub stale_ids: u64,
}

/// Device pool: space, objects, and moves between it and the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DevicePoolStats {
    /// Size; 0 without a device pool.
    pub pool_bytes: u64,
    /// Space that is not free.
    pub used_bytes: u64,
    /// Visible objects in it.
    pub objects: u64,
    /// Objects that moved from the pool to the device pool.
    pub promotions: u64,
    /// Objects that moved from the device pool to the pool.
    pub demotions: u64,
    /// Objects that were lost with the device.
    pub lost: u64,
}

/// Visible objects that are replicated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaStats {
    /// Replicas of objects that another shard owns.
    pub here: u64,
    /// Objects whose replica owner may have a replica.
    pub elsewhere: u64,
}

/// Objects with hard or soft pins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinStats {
    /// Space of hard pinned objects, including those being written.
    pub hard_bytes: u64,
    /// Number of softly pinned objects.
    pub soft: u64,
    /// Number of retained objects.
    pub retained: u64,
}

/// Events of objects, for subscribers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventStats {
    /// Number of the next event.
    pub next: u64,
    /// Events that were dropped before they were read.
    pub lost: u64,
    /// True if events are kept.
    pub are_kept: bool,
}

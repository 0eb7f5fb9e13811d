//! Counters of the traffic between memory and SSD.

/// Counters since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierCounters {
    /// Gets that were answered from the SSD.
    pub hits: u64,
    /// Gets that the SSD could not answer because the record is damaged, or was removed meanwhile.
    pub misses: u64,
    /// Objects read for gets.
    pub reads: u64,
    /// Gets that joined a read in flight.
    pub reads_shared: u64,
    /// Gets that waited because the tier had its maximum of reads in flight.
    pub reads_queued: u64,
    /// Objects that stayed in memory after they were read.
    pub promotions: u64,
    /// Objects that left memory after they were read.
    pub passed_through: u64,
    /// Objects prefetched.
    pub prefetches: u64,
    /// Prefetched objects that a get read afterwards.
    pub prefetches_used: u64,
    /// Prefetched objects that no get read in time: they left memory again.
    pub prefetches_expired: u64,
    /// Objects not prefetched for lack of room.
    pub prefetch_refusals: u64,
    /// Objects passed to the tier.
    pub writes: u64,
    /// Bytes of those objects.
    pub write_bytes: u64,
    /// Times that the tier could not accept an object at once.
    pub writes_put_off: u64,
    /// Objects not written because the backlog was full, or because they are too large.
    pub writes_skipped: u64,
    /// Objects not written because the day's budget was used up.
    pub writes_over_budget: u64,
    /// Objects not written because their tenant's quota of SSD bytes had no room for them.
    pub writes_over_quota: u64,
    /// Objects whose writes failed for good.
    pub writes_failed: u64,
    /// Writes that failed and are retried.
    pub writes_retried: u64,
    /// Removals written.
    pub removals: u64,
    /// Removals that could not be written: a restart may bring the object back.
    pub removals_unwritten: u64,
    /// Objects that reclaim dropped, or that left because of their tenants' quotas.
    pub reclaimed: u64,
    /// Slots whose objects on the SSD were trusted at the start or when the slots came back, because no other shard can
    /// have owned them meanwhile.
    pub slots_kept: u64,
    /// Slots that came back and were reconciled with the changes of their owners meanwhile.
    pub slots_compared: u64,
    /// Slots that came back and whose changes no shard knew: their records on the SSD are void.
    pub slots_voided: u64,
    /// Objects removed because other owners had put or removed them while their slots were away.
    pub doubts_removed: u64,
    /// Damaged records that the scrubber found.
    pub quarantined: u64,
    /// Damaged records that were written again from memory.
    pub rewritten: u64,
    /// Objects removed because their slot went to another owner.
    pub swept: u64,
}

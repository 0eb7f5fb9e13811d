//! Far pool of a store in use: who copies bytes between it and DRAM, how much may be promoted, and what was done.

use core::fmt;
use std::sync::Arc;

/// Most bytes that are promoted a second, in the long run: far memory is slower than DRAM, but not so slow that moving
/// an object for each of its gets would pay.
const PROMOTED_BYTES_PER_S: u64 = 512 << 20;

/// Bytes that may be promoted at once after a pause.
const PROMOTED_AT_ONCE: u64 = PROMOTED_BYTES_PER_S / 8;

/// Copies of bytes inside the pool, which the owner of its memory makes.
pub trait PoolCopies: fmt::Debug + Send + Sync {
    /// Copies so many bytes from one offset of the pool to another; the ranges do not overlap. Every later read of the
    /// destination sees them.
    fn copy(&self, from: u64, to: u64, bytes: u64);
}

/// Far pool: space, objects, and moves between it and DRAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FarPoolStats {
    /// Size; 0 without a far pool.
    pub pool_bytes: u64,
    /// Space that is not free.
    pub used_bytes: u64,
    /// Visible objects in it.
    pub objects: u64,
    /// Gets that found their object in it.
    pub hits: u64,
    /// Objects that were evicted from DRAM to it.
    pub demotions: u64,
    /// Exact sizes of these, summed.
    pub demoted_bytes: u64,
    /// Objects that moved back to DRAM.
    pub promotions: u64,
    /// Exact sizes of these, summed.
    pub promoted_bytes: u64,
    /// Objects that were evicted from it; they count among all evicted ones.
    pub evictions: u64,
    /// Exact sizes of these, summed.
    pub evicted_bytes: u64,
}

/// Far pool in use.
#[derive(Debug)]
pub(super) struct FarPool {
    pub(super) copies: Arc<dyn PoolCopies>,
    allowance: PromotionAllowance,
    /// Counters of moves; the gauges are 0.
    pub(super) counts: FarPoolStats,
}

/// Bytes that may be promoted now.
#[derive(Debug)]
struct PromotionAllowance {
    /// Negative after an object that was larger than what was left.
    bytes: i64,
    /// Time until which it was replenished.
    at_ns: u64,
}

impl FarPool {
    /// Creates a far pool in which nothing has moved yet.
    pub(super) fn new(copies: Arc<dyn PoolCopies>) -> Self {
        let allowance = PromotionAllowance { bytes: PROMOTED_AT_ONCE as i64, at_ns: 0 };
        Self { copies, allowance, counts: FarPoolStats::default() }
    }

    /// Advances the time.
    pub(super) fn replenish(&mut self, now_ns: u64) {
        self.allowance.replenish(now_ns);
    }

    /// Returns true if an object may be promoted now.
    pub(super) const fn may_promote(&self) -> bool {
        self.allowance.bytes > 0
    }

    /// Counts an object that is promoted.
    pub(super) const fn count_promotion(&mut self, bytes: u64) {
        self.allowance.bytes -= bytes.cast_signed();
        self.counts.promotions += 1;
        self.counts.promoted_bytes += bytes;
    }

    /// Counts an object that is demoted.
    pub(super) const fn count_demotion(&mut self, bytes: u64) {
        self.counts.demotions += 1;
        self.counts.demoted_bytes += bytes;
    }

    /// Counts an object that was evicted from far memory.
    pub(super) const fn count_eviction(&mut self, bytes: u64) {
        self.counts.evictions += 1;
        self.counts.evicted_bytes += bytes;
    }
}

impl PromotionAllowance {
    /// Adds what the time since the last call allows.
    fn replenish(&mut self, now_ns: u64) {
        let elapsed_ns = now_ns.saturating_sub(self.at_ns);
        self.at_ns = self.at_ns.max(now_ns);
        let added = u128::from(elapsed_ns) * u128::from(PROMOTED_BYTES_PER_S) / 1_000_000_000;
        let added = i64::try_from(added).unwrap_or(i64::MAX);
        self.bytes = self.bytes.saturating_add(added).min(PROMOTED_AT_ONCE as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_allowance_comes_back_with_time_and_not_beyond_its_limit() {
        let mut allowance = PromotionAllowance { bytes: -(PROMOTED_BYTES_PER_S as i64), at_ns: 5 };
        allowance.replenish(5);
        allowance.replenish(4);
        assert_eq!(allowance.bytes, -(PROMOTED_BYTES_PER_S as i64));
        allowance.replenish(1_000_000_005);
        assert_eq!((allowance.bytes, allowance.at_ns), (0, 1_000_000_005));
        allowance.replenish(u64::MAX);
        assert_eq!(allowance.bytes, PROMOTED_AT_ONCE as i64);
    }
}

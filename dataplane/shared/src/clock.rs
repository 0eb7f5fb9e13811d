//! The store's clock, as a shard knows it: from the time at which the store says that an object was written.
//!
//! It decides how long packs live, and nothing else: if it jumps, objects are lost early or late.

/// The store's clock.
#[derive(Debug, Default)]
pub(crate) struct StoreClock {
    /// The store's time in milliseconds, and the shard's own at that moment in nanoseconds.
    read: Option<(u64, u64)>,
}

impl StoreClock {
    /// Sets the clock: the store's time is `at_ms` now.
    pub(crate) const fn set(&mut self, at_ms: u64, now_ns: u64) {
        self.read = Some((at_ms, now_ns));
    }

    /// Returns the store's time in milliseconds, once it is known.
    pub(crate) fn now_ms(&self, now_ns: u64) -> Option<u64> {
        let (at_ms, read_ns) = self.read?;
        Some(at_ms.saturating_add(now_ns.saturating_sub(read_ns) / 1_000_000))
    }

    /// Returns true once the time is known.
    pub(crate) const fn is_known(&self) -> bool {
        self.read.is_some()
    }
}

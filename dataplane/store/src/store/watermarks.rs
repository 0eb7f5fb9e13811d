//! Watermarks: the usage of the pool at which puts begin and stop to evict more than they need.

use crate::config::StoreConfig;

/// Watermarks of a pool, and whether its usage is on the way from the high one to the low one.
#[derive(Debug)]
pub(super) struct Watermarks {
    high_percent: u8,
    low_percent: u8,
    /// True if usage exceeded the high watermark and has not reached the low one since.
    draining: bool,
}

impl Watermarks {
    pub(super) const fn new(config: &StoreConfig) -> Self {
        let StoreConfig { high_watermark_percent, low_watermark_percent, .. } = *config;
        Self { high_percent: high_watermark_percent, low_percent: low_watermark_percent, draining: false }
    }

    /// Returns true if objects are to be evicted while `used` granules of `pool` are not free.
    pub(super) const fn is_draining(&mut self, used: u64, pool: u64) -> bool {
        let percent = if self.draining { self.low_percent } else { self.high_percent };
        self.draining = used * 100 > pool * percent as u64;
        self.draining
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draining_begins_above_the_high_watermark_and_ends_at_the_low_one() {
        let config =
            StoreConfig { high_watermark_percent: 90, low_watermark_percent: 80, ..StoreConfig::for_pool(4096) };
        let mut watermarks = Watermarks::new(&config);
        let steps = [85, 90, 91, 89, 81, 80, 85, 90, 95, 80];
        let draining = steps.map(|used| watermarks.is_draining(used, 100));
        assert_eq!(draining, [false, false, true, true, true, false, false, false, true, false]);
    }
}

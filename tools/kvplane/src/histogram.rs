//! Latency histogram of fixed size: log-linear buckets as in Gil Tene's HdrHistogram.
//!
//! Values below 128 ns are exact; above, each power of two is cut in 128 equal buckets, so a reported value is within
//! 0.4 % of a recorded one. Values above 2^40 ns (18 minutes) share the last bucket; the maximum is kept exactly.
//! Recording is a few instructions and never allocates; each thread has a histogram of its own, and these are merged at
//! the end.

use serde::Serialize;

/// Buckets per power of two, as a power of two.
const SUB_BITS: u32 = 7;
const SUB_BUCKETS: usize = 1 << SUB_BITS;
/// Values from 2 to this power on are in the last bucket.
const MAX_BITS: u32 = 40;
const BUCKETS: usize = (MAX_BITS - SUB_BITS + 1) as usize * SUB_BUCKETS;
/// Neighbouring buckets that [`Histogram::points`] merges: 16 points per power of two.
const POINT_BUCKETS: usize = 8;

/// Counts of durations in nanoseconds.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Vec<u64>,
    count: u64,
    sum_ns: u128,
    min_ns: u64,
    max_ns: u64,
}

/// Number of durations at or below `ns` and above the point before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HistogramPoint {
    /// Upper end of the range, in nanoseconds.
    pub ns: u64,
    /// Durations in the range.
    pub count: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the bucket of a value.
const fn bucket_of(ns: u64) -> usize {
    if ns < SUB_BUCKETS as u64 {
        return ns as usize;
    }
    if ns >= 1 << MAX_BITS {
        return BUCKETS - 1;
    }
    let exponent = ns.ilog2();
    let sub = (ns >> (exponent - SUB_BITS)) as usize - SUB_BUCKETS;
    (exponent - SUB_BITS + 1) as usize * SUB_BUCKETS + sub
}

/// Returns the least and the greatest value of a bucket.
const fn range_of(bucket: usize) -> (u64, u64) {
    if bucket < SUB_BUCKETS {
        return (bucket as u64, bucket as u64);
    }
    let shift = (bucket / SUB_BUCKETS - 1) as u32;
    let low = ((bucket % SUB_BUCKETS + SUB_BUCKETS) as u64) << shift;
    (low, low + (1 << shift) - 1)
}

impl Histogram {
    /// Creates an empty histogram: 34 KiB, allocated here and never again.
    #[must_use]
    pub fn new() -> Self {
        Self { counts: vec![0; BUCKETS], count: 0, sum_ns: 0, min_ns: u64::MAX, max_ns: 0 }
    }

    /// Counts one duration.
    pub fn record(&mut self, ns: u64) {
        self.counts[bucket_of(ns)] += 1;
        self.count += 1;
        self.sum_ns += u128::from(ns);
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds all durations of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.count += other.count;
        self.sum_ns += other.sum_ns;
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Returns the number of durations.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Returns the mean duration in nanoseconds, exact; 0 when empty.
    #[must_use]
    pub fn mean_ns(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum_ns as f64 / self.count as f64 }
    }

    /// Returns the greatest duration in nanoseconds, exact; 0 when empty.
    #[must_use]
    pub const fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// Returns the duration in nanoseconds that the part `quantile` (0 to 1, clamped) of all durations does not exceed,
    /// within 0.4 %; 0 when empty.
    #[must_use]
    pub fn percentile_ns(&self, quantile: f64) -> u64 {
        if self.count == 0 {
            return 0;
        }
        let rank = ((quantile.clamp(0.0, 1.0) * self.count as f64).ceil() as u64).clamp(1, self.count);
        let mut seen = 0;
        for (bucket, &count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                // The last bucket is open-ended: its maximum stands for it.
                let (low, high) = if bucket == BUCKETS - 1 { (self.max_ns, self.max_ns) } else { range_of(bucket) };
                return (low + (high - low) / 2).clamp(self.min_ns, self.max_ns);
            }
        }
        self.max_ns
    }

    /// Returns the distribution in at most 16 points per power of two, ascending, without empty ranges, for plots and
    /// reports.
    #[must_use]
    pub fn points(&self) -> Vec<HistogramPoint> {
        let groups = self.counts.chunks(POINT_BUCKETS).enumerate();
        groups
            .map(|(group, counts)| HistogramPoint {
                ns: range_of(group * POINT_BUCKETS + counts.len() - 1).1.min(self.max_ns),
                count: counts.iter().sum(),
            })
            .filter(|point| point.count > 0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_tile_the_range() {
        let mut next = 0;
        for bucket in 0..BUCKETS {
            let (low, high) = range_of(bucket);
            assert_eq!(low, next, "bucket {bucket}");
            assert_eq!((bucket_of(low), bucket_of(high)), (bucket, bucket));
            assert!((high - low) as f64 <= low as f64 / 127.0);
            next = high + 1;
        }
        assert_eq!(next, 1 << MAX_BITS);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn empty_and_extreme() {
        let mut histogram = Histogram::new();
        assert_eq!((histogram.percentile_ns(0.5), histogram.mean_ns(), histogram.max_ns()), (0, 0.0, 0));
        assert!(histogram.points().is_empty());
        histogram.record(u64::MAX);
        assert_eq!((histogram.percentile_ns(0.5), histogram.max_ns()), (u64::MAX, u64::MAX));
        histogram.record(0);
        assert_eq!((histogram.percentile_ns(0.0), histogram.percentile_ns(f64::NAN)), (0, 0));
        assert_eq!(histogram.points().iter().map(|point| point.count).sum::<u64>(), 2);
    }

    proptest! {
        #[test]
        fn percentiles_are_within_one_percent(
            mut values in prop::collection::vec(0u64..10_000_000_000, 1..300), quantile in 0.0f64..=1.0,
        ) {
            let mut histogram = Histogram::new();
            for &value in &values {
                histogram.record(value);
            }
            values.sort_unstable();
            let rank = ((quantile * values.len() as f64).ceil() as usize).max(1) - 1;
            let (found, exact) = (histogram.percentile_ns(quantile) as f64, values[rank] as f64);
            prop_assert!((found - exact).abs() <= exact * 0.01, "{found} for {exact}");
            let most = *values.last().unwrap();
            prop_assert_eq!(histogram.percentile_ns(1.0).abs_diff(most) * 200 / most.max(1), 0);
        }

        #[test]
        fn merging_equals_recording_together(
            left in prop::collection::vec(any::<u64>(), 0..50), right in prop::collection::vec(any::<u64>(), 0..50),
        ) {
            let of = |values: &[u64]| {
                let mut histogram = Histogram::new();
                values.iter().for_each(|&value| histogram.record(value));
                histogram
            };
            let mut merged = of(&left);
            merged.merge(&of(&right));
            let together = of(&[left, right].concat());
            prop_assert_eq!(merged.points(), together.points());
            prop_assert_eq!(merged.count(), together.count());
            prop_assert_eq!(merged.mean_ns(), together.mean_ns());
            prop_assert_eq!(merged.percentile_ns(0.99), together.percentile_ns(0.99));
        }
    }
}

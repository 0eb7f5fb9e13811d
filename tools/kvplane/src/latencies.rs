//! Latencies of calls: a fine histogram, with the shortest and the longest call.
//!
//! Values below 128 ns are exact; above, a reported value is within 0.4 % of a recorded one. Values above 2^40 ns (18
//! minutes) share the last bucket; the minimum and the maximum are exact. Recording is a few instructions and allocates
//! once, 34 KiB; each thread has latencies of its own, and these are merged at the end.

use kvplane_proto::histogram::LogLinearHistogram;
use serde::Serialize;

/// Values from 2 to this power on are in the last bucket.
const END_BITS: u32 = 40;

/// Counts of durations in nanoseconds.
#[derive(Clone, Debug)]
pub struct Latencies {
    times: LogLinearHistogram<0, 7, END_BITS>,
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

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

impl Latencies {
    /// Creates empty latencies.
    #[must_use]
    pub const fn new() -> Self {
        Self { times: LogLinearHistogram::new(), min_ns: u64::MAX, max_ns: 0 }
    }

    /// Counts one duration.
    pub fn record(&mut self, ns: u64) {
        self.times.add(ns);
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds all durations of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.times.merge(&other.times);
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Returns the number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.times.count()
    }

    /// Returns the mean duration in nanoseconds, exact; 0 when empty.
    #[must_use]
    pub fn mean_ns(&self) -> f64 {
        match self.count() {
            0 => 0.0,
            count => self.times.sum_ns() as f64 / count as f64,
        }
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
        let all = self.count();
        if all == 0 {
            return 0;
        }
        let rank = ((quantile.clamp(0.0, 1.0) * all as f64).ceil() as u64).clamp(1, all);
        let mut seen = 0;
        for (range, count) in self.times.ranges() {
            seen += count;
            if seen >= rank {
                // The last bucket is open-ended: its maximum stands for it.
                let is_last = range.end == 1 << END_BITS;
                let middle = if is_last { self.max_ns } else { range.start + (range.end - 1 - range.start) / 2 };
                return middle.clamp(self.min_ns, self.max_ns);
            }
        }
        self.max_ns
    }

    /// Returns the distribution in at most 16 points per power of two, ascending, without empty ranges, for plots and
    /// reports.
    #[must_use]
    pub fn points(&self) -> Vec<HistogramPoint> {
        // Each of its buckets holds eight of the fine ones.
        let mut coarse = LogLinearHistogram::<3, 4, END_BITS>::new();
        self.times.ranges().for_each(|(range, count)| coarse.add_many(range.start, count));
        coarse.buckets().map(|(bound, count)| HistogramPoint { ns: (bound - 1).min(self.max_ns), count }).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn empty_and_extreme() {
        let mut latencies = Latencies::new();
        assert_eq!((latencies.percentile_ns(0.5), latencies.mean_ns(), latencies.max_ns()), (0, 0.0, 0));
        assert!(latencies.points().is_empty());
        latencies.record(u64::MAX);
        assert_eq!((latencies.percentile_ns(0.5), latencies.max_ns()), (u64::MAX, u64::MAX));
        latencies.record(0);
        assert_eq!((latencies.percentile_ns(0.0), latencies.percentile_ns(f64::NAN)), (0, 0));
        assert_eq!(latencies.points().iter().map(|point| point.count).sum::<u64>(), 2);
    }

    proptest! {
        #[test]
        fn percentiles_are_within_one_percent(
            mut values in prop::collection::vec(0u64..10_000_000_000, 1..300), quantile in 0.0f64..=1.0,
        ) {
            let mut latencies = Latencies::new();
            for &value in &values {
                latencies.record(value);
            }
            values.sort_unstable();
            let rank = ((quantile * values.len() as f64).ceil() as usize).max(1) - 1;
            let (found, exact) = (latencies.percentile_ns(quantile) as f64, values[rank] as f64);
            prop_assert!((found - exact).abs() <= exact * 0.01, "{found} for {exact}");
            let most = *values.last().unwrap();
            prop_assert_eq!(latencies.percentile_ns(1.0).abs_diff(most) * 200 / most.max(1), 0);
        }

        #[test]
        fn merging_equals_recording_together(
            left in prop::collection::vec(any::<u64>(), 0..50), right in prop::collection::vec(any::<u64>(), 0..50),
        ) {
            let of = |values: &[u64]| {
                let mut latencies = Latencies::new();
                values.iter().for_each(|&value| latencies.record(value));
                latencies
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

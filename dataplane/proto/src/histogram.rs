//! Histograms of durations with log-linear buckets, as in Gil Tene's HdrHistogram.
//!
//! Durations below a power of two are counted in equal buckets; from there on, each power of two is cut in that many
//! buckets, so that the relative error is bounded. Durations from a greatest power of two on share the last bucket.

use core::ops::Range;

use crate::narrowing::to_usize;

/// Histogram of the data plane: a relative error of at most 25 % from 256 ns to a minute, in 1 KiB.
pub type Histogram = LogLinearHistogram<6, 2, 36>;

/// Counts of durations, and their sum. Powers of two are cut in 2^`PART_BITS` buckets; the shortest bucket is
/// 2^`UNIT_BITS` ns long, and durations of 2^`END_BITS` ns or longer share the last bucket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogLinearHistogram<const UNIT_BITS: u32, const PART_BITS: u32, const END_BITS: u32> {
    counts: Vec<u64>,
    sum_ns: u64,
}

impl<const UNIT_BITS: u32, const PART_BITS: u32, const END_BITS: u32> Default
    for LogLinearHistogram<UNIT_BITS, PART_BITS, END_BITS>
{
    fn default() -> Self {
        Self::new()
    }
}

impl<const UNIT_BITS: u32, const PART_BITS: u32, const END_BITS: u32>
    LogLinearHistogram<UNIT_BITS, PART_BITS, END_BITS>
{
    /// Buckets of a power of two, and equal buckets below the first power that is cut.
    const PARTS: usize = 1 << PART_BITS;
    const BUCKETS: usize = (END_BITS - UNIT_BITS - PART_BITS + 1) as usize * Self::PARTS;

    /// Creates an empty histogram. Memory for the counts is allocated with the first duration.
    #[must_use]
    pub const fn new() -> Self {
        Self { counts: Vec::new(), sum_ns: 0 }
    }

    const fn bucket(ns: u64) -> usize {
        let units = ns >> UNIT_BITS;
        if units < Self::PARTS as u64 {
            return to_usize(units);
        }
        let octave = units.ilog2() - PART_BITS;
        // At least `PARTS` and less than twice as much.
        let part = to_usize(units >> octave);
        let bucket = octave as usize * Self::PARTS + part;
        if bucket < Self::BUCKETS { bucket } else { Self::BUCKETS - 1 }
    }

    /// Returns the durations of a bucket, in nanoseconds.
    const fn range(bucket: usize) -> Range<u64> {
        let octave = (bucket / Self::PARTS).saturating_sub(1);
        let part = (bucket - octave * Self::PARTS) as u64;
        let shift = octave as u64 + UNIT_BITS as u64;
        part << shift..(part + 1) << shift
    }

    /// Counts one duration.
    pub fn add(&mut self, ns: u64) {
        self.add_many(ns, 1);
    }

    /// Counts a duration `times` times.
    pub fn add_many(&mut self, ns: u64, times: u64) {
        if self.counts.is_empty() {
            self.counts.resize(Self::BUCKETS, 0);
        }
        self.counts[Self::bucket(ns)] += times;
        self.sum_ns = self.sum_ns.saturating_add(ns.saturating_mul(times));
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Self) {
        if self.counts.is_empty() {
            self.counts.clone_from(&other.counts);
        } else {
            self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// Returns the difference to `base`, an earlier state of this histogram or a part of it.
    #[must_use]
    pub fn beyond(&self, base: &Self) -> Self {
        let mut rest = self.clone();
        rest.counts.iter_mut().zip(&base.counts).for_each(|(count, less)| *count = count.saturating_sub(*less));
        rest.sum_ns = self.sum_ns.saturating_sub(base.sum_ns);
        rest
    }

    /// Returns the sum of all durations, in nanoseconds.
    #[must_use]
    pub const fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Returns the number of durations counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the buckets that are not empty, shortest first: their durations in nanoseconds, and the count. The last
    /// bucket has longer ones too.
    pub fn ranges(&self) -> impl Iterator<Item = (Range<u64>, u64)> + '_ {
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        filled.map(|(bucket, &count)| (Self::range(bucket), count))
    }

    /// Returns the buckets that are not empty, shortest first: `(upper bound in nanoseconds, count)`.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ranges().map(|(range, count)| (range.end, count))
    }

    /// Returns an upper bound of the quantile `share` (0 to 1), in nanoseconds; 0 if the histogram is empty.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a count is at most the count, and a negative share or none saturates to 0"
    )]
    pub fn quantile_ns(&self, share: f64) -> u64 {
        let wanted = (self.count() as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (bound_ns, count) in self.buckets() {
            seen += count;
            if seen >= wanted {
                return bound_ns;
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn histograms_add_up_and_take_apart_again(
            first in vec(0u64..1 << 40, 0..50),
            second in vec(0u64..1 << 40, 0..50),
        ) {
            let of = |times: &[u64]| {
                let mut histogram = Histogram::new();
                times.iter().for_each(|&ns| histogram.add(ns));
                histogram
            };
            let (one, other) = (of(&first), of(&second));
            let mut both = one.clone();
            both.merge(&other);
            prop_assert_eq!(&both, &of(&[&first[..], &second].concat()));
            prop_assert_eq!(both.sum_ns(), first.iter().chain(&second).sum::<u64>());
            let rest = both.beyond(&one);
            prop_assert_eq!((rest.sum_ns(), rest.count()), (other.sum_ns(), other.count()));
            prop_assert_eq!(rest.buckets().collect::<Vec<_>>(), other.buckets().collect::<Vec<_>>());
        }
    }

    fn check_tiles<const UNIT_BITS: u32, const PART_BITS: u32, const END_BITS: u32>() {
        let bucket_of = LogLinearHistogram::<UNIT_BITS, PART_BITS, END_BITS>::bucket;
        let buckets = LogLinearHistogram::<UNIT_BITS, PART_BITS, END_BITS>::BUCKETS;
        let mut next = 0;
        for bucket in 0..buckets {
            let Range { start, end } = LogLinearHistogram::<UNIT_BITS, PART_BITS, END_BITS>::range(bucket);
            assert_eq!(start, next, "bucket {bucket}");
            assert_eq!((bucket_of(start), bucket_of(end - 1)), (bucket, bucket));
            assert!(end - start <= (1 << UNIT_BITS).max(start >> PART_BITS));
            next = end;
        }
        assert_eq!(next, 1 << END_BITS);
        assert_eq!(bucket_of(u64::MAX), buckets - 1);
    }

    #[test]
    fn buckets_tile_the_range() {
        check_tiles::<6, 2, 36>();
        check_tiles::<0, 7, 40>();
        check_tiles::<3, 4, 40>();
    }

    #[test]
    fn a_histogram_keeps_times_within_a_quarter() {
        let mut times = Histogram::new();
        assert_eq!((times.count(), times.quantile_ns(0.5)), (0, 0));
        for ns in [1, 300, 1_000, 43_000, 1_000_000, 20_000_000_000, u64::MAX] {
            let mut one = Histogram::new();
            one.add(ns);
            let bound_ns = one.quantile_ns(1.0);
            assert!(
                ns > 1 << 35 || bound_ns >= ns && (bound_ns as f64) <= (ns as f64 * 1.26).max(320.0),
                "{ns}: {bound_ns}"
            );
            times.add(ns);
        }
        assert_eq!((times.count(), times.buckets().count()), (7, 7));
        assert_eq!(times.sum_ns(), u64::MAX, "sums do not wrap");
        assert!(times.quantile_ns(0.5) >= 43_000 && times.quantile_ns(0.5) < 54_000);
    }
}

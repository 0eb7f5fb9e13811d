//! Histogram of durations: buckets of a quarter octave, from a quarter microsecond to half a minute.

/// Number of octaves, and of buckets in each.
const OCTAVES: u32 = 28;
const PARTS: u32 = 4;
/// Durations below 2^8 ns share the first bucket.
const FIRST_SHIFT: u32 = 8;
const BUCKETS: usize = (OCTAVES * PARTS) as usize;

/// Counts of durations, with a relative error of at most 25 %, and their sum.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Histogram {
    counts: Vec<u64>,
    sum_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

impl Histogram {
    /// Creates an empty histogram. Memory for the counts is allocated with the first duration.
    #[must_use]
    pub const fn new() -> Self {
        Self { counts: Vec::new(), sum_ns: 0 }
    }

    const fn bucket(ns: u64) -> usize {
        if ns < 1 << FIRST_SHIFT {
            return 0;
        }
        let octave = ns.ilog2();
        let part = (ns >> (octave - 2)) & 3;
        let bucket = (octave - FIRST_SHIFT) as usize * PARTS as usize + part as usize;
        if bucket < BUCKETS { bucket } else { BUCKETS - 1 }
    }

    /// Counts one duration.
    pub fn add(&mut self, ns: u64) {
        self.add_many(ns, 1);
    }

    /// Counts a duration `times` times.
    pub fn add_many(&mut self, ns: u64, times: u64) {
        if self.counts.is_empty() {
            self.counts.resize(BUCKETS, 0);
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

    /// Returns the buckets that are not empty, shortest first: `(upper bound in nanoseconds, count)`.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(bucket, &count)| {
            let (octave, part) =
                (crate::narrowing::length_u32(bucket) / PARTS + FIRST_SHIFT, bucket as u64 % u64::from(PARTS));
            ((u64::from(PARTS) + part + 1) << (octave - 2), count)
        })
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
        assert_eq!((times.count(), times.buckets().count()), (7, 6));
        assert_eq!(times.sum_ns(), u64::MAX, "sums do not wrap");
        assert!(times.quantile_ns(0.5) >= 43_000 && times.quantile_ns(0.5) < 54_000);
    }
}

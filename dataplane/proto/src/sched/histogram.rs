//! A small histogram of times: buckets of a quarter octave, from a quarter microsecond to half a minute.

/// Octaves counted, and parts of each.
const OCTAVES: u32 = 28;
const PARTS: u32 = 4;
/// Times below this share the first bucket: 2^8 ns.
const FIRST_SHIFT: u32 = 8;
const BUCKETS: usize = (OCTAVES * PARTS) as usize;

/// Counts of times, with a relative error of at most 25 %, and their sum.
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
    /// An empty one. Its counts take memory with the first time only.
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

    /// Counts one time.
    pub fn add(&mut self, ns: u64) {
        self.add_many(ns, 1);
    }

    /// Counts so many times of this length.
    pub fn add_many(&mut self, ns: u64, times: u64) {
        if self.counts.is_empty() {
            self.counts.resize(BUCKETS, 0);
        }
        self.counts[Self::bucket(ns)] += times;
        self.sum_ns = self.sum_ns.saturating_add(ns.saturating_mul(times));
    }

    /// Adds what another counted.
    pub fn merge(&mut self, other: &Self) {
        if self.counts.is_empty() {
            self.counts.clone_from(&other.counts);
        } else {
            self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// What was counted beyond `base`, an earlier state of this histogram or a part of it.
    #[must_use]
    pub fn beyond(&self, base: &Self) -> Self {
        let mut rest = self.clone();
        rest.counts.iter_mut().zip(&base.counts).for_each(|(count, less)| *count = count.saturating_sub(*less));
        rest.sum_ns = self.sum_ns.saturating_sub(base.sum_ns);
        rest
    }

    /// The sum of all times.
    #[must_use]
    pub const fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// How many times were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The buckets that are not empty, shortest first: `(upper bound in nanoseconds, count)`.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(bucket, &count)| {
            let (octave, part) = (bucket as u32 / PARTS + FIRST_SHIFT, bucket as u64 % u64::from(PARTS));
            ((u64::from(PARTS) + part + 1) << (octave - 2), count)
        })
    }

    /// An upper bound of the time that this share of all (0 to 1) stayed within; 0 when there were none.
    #[must_use]
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

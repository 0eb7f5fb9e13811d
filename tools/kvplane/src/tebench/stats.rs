//! Statistics of one case.
//!
//! A thread keeps the duration of each of its batches in [`Samples`]: all of them up to a limit, beyond it a uniform
//! sample (Vitter's algorithm R), with count and sum always exact. [`CaseStats`] then computes the columns of the
//! table:
//!
//! * bandwidth: bytes of all batches over the mean of the threads' total durations;
//! * instantaneous bandwidth: the mean over batches of bytes by duration;
//! * latency: total duration times threads over batches; transfer time: mean and percentiles over batches, interpolated
//!   linearly between ranks.

use kvplane_proto::rng::Rng;
use serde::Serialize;

use super::sweep::Case;

/// Number of durations that one thread keeps by default: 2 MiB.
pub const DEFAULT_SAMPLES: usize = 1 << 18;

/// Durations of one thread's batches.
#[derive(Clone, Debug)]
pub struct Samples {
    kept_ns: Vec<u64>,
    limit: usize,
    count: u64,
    sum_ns: u128,
    /// Sum of 1 / duration, over all batches.
    sum_inverse: f64,
    rng: Rng,
    promises: Promises,
    kept: FastBatches,
}

/// Limits of a batch's time, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promises {
    /// Objective of the thread's class.
    pub slo_ns: u64,
    /// Deadline of the batch.
    pub deadline_ns: u64,
}

impl Default for Promises {
    /// Returns no limits: every batch keeps them.
    fn default() -> Self {
        Self { slo_ns: u64::MAX, deadline_ns: u64::MAX }
    }
}

/// Number of batches within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct FastBatches {
    /// Batches within the objective of their class.
    pub slo: u64,
    /// Batches within their deadline.
    pub deadline: u64,
}

impl Samples {
    /// Keeps at most `limit` (at least 1) durations, allocated here; beyond it, `seed` and `thread` determine the
    /// sample.
    #[must_use]
    pub fn new(limit: usize, seed: u64, thread: u64) -> Self {
        let limit = limit.max(1);
        let rng = Rng::new(seed ^ thread, "tebench samples");
        let (promises, kept) = (Promises::default(), FastBatches::default());
        Self { kept_ns: Vec::with_capacity(limit), limit, count: 0, sum_ns: 0, sum_inverse: 0.0, rng, promises, kept }
    }

    /// Sets the limits against which batches are counted.
    #[must_use]
    pub fn with_promises(self, promises: Promises) -> Self {
        Self { promises, ..self }
    }

    /// Counts a batch that took `ns` nanoseconds.
    pub fn record(&mut self, ns: u64) {
        self.count += 1;
        self.sum_ns += u128::from(ns);
        self.kept.slo += u64::from(ns <= self.promises.slo_ns);
        self.kept.deadline += u64::from(ns <= self.promises.deadline_ns);
        // A clock may not have moved on: such a batch counts as one nanosecond, not as infinitely fast.
        self.sum_inverse += 1.0 / ns.max(1) as f64;
        if self.kept_ns.len() < self.limit {
            self.kept_ns.push(ns);
            return;
        }
        let at = self.rng.below(self.count) as usize;
        if let Some(kept) = self.kept_ns.get_mut(at) {
            *kept = ns;
        }
    }

    /// Returns the number of batches.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Returns the number of batches within the limits.
    #[must_use]
    pub const fn kept(&self) -> FastBatches {
        self.kept
    }
}

/// Values that the table shows of one case.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CaseStats {
    /// Measured case.
    #[serde(flatten)]
    pub case: Case,
    /// Number of batches of all threads.
    pub batches: u64,
    /// Bandwidth in GB/s (10^9 bytes).
    pub bandwidth_gb_s: f64,
    /// Mean over batches of the bandwidth of each, in GB/s.
    pub average_instant_gb_s: f64,
    /// Time per batch including the pause between batches, in µs.
    pub average_latency_us: f64,
    /// Mean time of a batch, in µs.
    pub average_transfer_us: f64,
    /// Median time of a batch, in µs.
    pub p50_transfer_us: f64,
    /// 99th percentile of the time of a batch, in µs.
    pub p99_transfer_us: f64,
    /// 99.9th percentile of the time of a batch, in µs.
    pub p999_transfer_us: f64,
    /// CPU seconds of this process per 10^9 bytes; `None` if not measured.
    pub cpu_s_per_gb: Option<f64>,
}

impl CaseStats {
    /// Summarizes `threads`: each thread's samples and its total duration in nanoseconds. `cpu_s` is the CPU time spent
    /// meanwhile.
    #[must_use]
    pub fn new(case: Case, threads: &[(Samples, u64)], cpu_s: Option<f64>) -> Self {
        let batches: u64 = threads.iter().map(|(samples, _)| samples.count).sum();
        let bytes_per_batch = case.block_bytes as f64 * case.batch as f64;
        let bytes = bytes_per_batch * batches as f64;
        let sum = |of: fn(&(Samples, u64)) -> f64| threads.iter().map(of).sum::<f64>();
        let average_duration_ns = ratio(sum(|(_, total_ns)| *total_ns as f64), threads.len() as f64);
        let ranked = RankedDurations::of(threads);
        let percentile = |quantile| ranked.percentile_ns(quantile) / 1e3;
        Self {
            case,
            batches,
            // Bytes per nanosecond are GB/s.
            bandwidth_gb_s: ratio(bytes, average_duration_ns),
            average_instant_gb_s: ratio(bytes_per_batch * sum(|(samples, _)| samples.sum_inverse), batches as f64),
            average_latency_us: ratio(average_duration_ns * threads.len() as f64, batches as f64) / 1e3,
            average_transfer_us: ratio(sum(|(samples, _)| samples.sum_ns as f64), batches as f64) / 1e3,
            p50_transfer_us: percentile(0.5),
            p99_transfer_us: percentile(0.99),
            p999_transfer_us: percentile(0.999),
            cpu_s_per_gb: cpu_s.map(|cpu_s| ratio(cpu_s, bytes / 1e9)),
        }
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// Durations of all threads, ascending, each with its weight.
///
/// In a thread that kept only a sample of its durations, each stands for several batches, so that threads of different
/// speeds keep their weight.
struct RankedDurations(Vec<(u64, f64)>);

impl RankedDurations {
    fn of(threads: &[(Samples, u64)]) -> Self {
        let mut values: Vec<(u64, f64)> = Vec::new();
        for (samples, _) in threads {
            let weight = ratio(samples.count as f64, samples.kept_ns.len() as f64);
            values.extend(samples.kept_ns.iter().map(|&ns| (ns, weight)));
        }
        values.sort_unstable_by_key(|value| value.0);
        Self(values)
    }

    /// Returns the percentile, interpolated linearly between ranks: the rank of n values of weight 1 is
    /// `quantile * (n - 1)`, and each value covers the ranks from its own to the next's.
    fn percentile_ns(&self, quantile: f64) -> f64 {
        let total: f64 = self.0.iter().map(|value| value.1).sum();
        let rank = quantile * (total - 1.0).max(0.0);
        let mut passed = 0.0;
        for pair in self.0.windows(2) {
            let (low, high) = (pair[0], pair[1]);
            if rank <= passed + low.1 {
                let share = (rank - passed) / low.1;
                return low.0 as f64 + (high.0 as f64 - low.0 as f64) * share;
            }
            passed += low.1;
        }
        self.0.last().map_or(0.0, |value| value.0 as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASE: Case = Case { threads: 1, block_bytes: 1000, batch: 2 };

    fn thread(durations_ns: &[u64], total_ns: u64) -> (Samples, u64) {
        let mut samples = Samples::new(1024, 1, 0);
        durations_ns.iter().for_each(|&ns| samples.record(ns));
        (samples, total_ns)
    }

    #[track_caller]
    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() <= expected * 1e-9, "{found} for {expected}");
    }

    #[test]
    fn one_thread_by_hand() {
        let stats = CaseStats::new(CASE, &[thread(&[1000, 2000, 4000], 10_000)], Some(0.003));
        assert_eq!(stats.batches, 3);
        near(stats.bandwidth_gb_s, 6000.0 / 10_000.0);
        near(stats.average_instant_gb_s, (2.0 + 1.0 + 0.5) / 3.0);
        near(stats.average_latency_us, 10.0 / 3.0);
        near(stats.average_transfer_us, 7.0 / 3.0);
        near(stats.p50_transfer_us, 2.0);
        near(stats.p99_transfer_us, 2.0 + 0.98 * 2.0);
        near(stats.cpu_s_per_gb.unwrap(), 0.003 / 6e-6);
    }

    #[test]
    fn threads_add_up_and_run_side_by_side() {
        let case = Case { threads: 2, ..CASE };
        let stats = CaseStats::new(case, &[thread(&[1000, 1000], 4_000), thread(&[3000], 6_000)], None);
        near(stats.bandwidth_gb_s, 6000.0 / 5_000.0);
        near(stats.average_latency_us, 5.0 * 2.0 / 3.0);
        near(stats.p50_transfer_us, 1.0);
        assert_eq!(stats.cpu_s_per_gb, None);
    }

    #[test]
    fn percentiles_are_interpolated_between_ranks() {
        let durations: Vec<u64> = (1..=101).map(|at| at * 1000).collect();
        let threads = [thread(&durations, 1)];
        for (quantile, expected) in [(0.0, 1e3), (0.5, 51e3), (0.99, 100e3), (0.995, 100.5e3), (1.0, 101e3)] {
            near(RankedDurations::of(&threads).percentile_ns(quantile), expected);
        }
        near(RankedDurations::of(&[thread(&[5], 1)]).percentile_ns(0.99), 5.0);
    }

    #[test]
    fn statistics_without_samples_are_zero() {
        let stats = CaseStats::new(CASE, &[thread(&[], 0)], Some(1.0));
        assert_eq!((stats.bandwidth_gb_s, stats.p99_transfer_us, stats.average_latency_us), (0.0, 0.0, 0.0));
        assert!(CaseStats::new(CASE, &[thread(&[0], 0)], None).average_instant_gb_s.is_finite());
        assert_eq!(CaseStats::new(CASE, &[], None).batches, 0);
    }

    #[test]
    fn promises_are_counted_exactly_beyond_the_limit_too() {
        let mut samples = Samples::new(4, 1, 0).with_promises(Promises { slo_ns: 10, ..Promises::default() });
        for ns in 1..=100 {
            samples.record(ns);
        }
        assert_eq!(samples.kept(), FastBatches { slo: 10, deadline: 100 });
    }

    #[test]
    fn beyond_the_limit_a_uniform_sample_stays() {
        let mut samples = Samples::new(2_000, 3, 0);
        for ns in 0..200_000u64 {
            samples.record(ns);
        }
        assert_eq!((samples.kept_ns.len(), samples.count()), (2_000, 200_000));
        let stats = CaseStats::new(CASE, &[(samples, 1)], None);
        near(stats.average_transfer_us, 99.9995);
        assert!((stats.p50_transfer_us - 100.0).abs() < 8.0, "{}", stats.p50_transfer_us);
        assert!((stats.p99_transfer_us - 198.0).abs() < 2.0, "{}", stats.p99_transfer_us);
    }
}

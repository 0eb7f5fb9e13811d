//! Counters of the NVMe driver by priority, and latency histograms.

use kvplane_tier::Priority;

/// Number of buckets of [`Latency`]: the last one takes everything above.
pub const BUCKETS: usize = 32;

/// Latency histogram, by powers of two of microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// Number of samples.
    pub count: u64,
    /// Sum of all samples, in nanoseconds.
    pub sum_ns: u64,
    /// Largest sample, in nanoseconds.
    pub most_ns: u64,
    /// Samples below 2^index microseconds and not below half of that.
    pub buckets: [u64; BUCKETS],
}

impl Latency {
    pub(super) fn add(&mut self, ns: u64) {
        self.count += 1;
        self.sum_ns += ns;
        self.most_ns = self.most_ns.max(ns);
        let bucket = (u64::BITS - (ns / 1000).leading_zeros()) as usize;
        self.buckets[bucket.min(BUCKETS - 1)] += 1;
    }

    /// Returns an upper bound of the given percentile, in nanoseconds: exact to a factor of two.
    #[must_use]
    pub fn percentile_ns(&self, percent: u64) -> u64 {
        let wanted = (self.count * percent).div_ceil(100);
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return (1000 << index).min(self.most_ns);
            }
        }
        self.most_ns
    }
}

/// Counters of the operations of one priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PriorityCounters {
    /// Operations submitted to the device.
    pub started: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Operations that failed, or were completed in part.
    pub failed: u64,
    /// Operations in flight now.
    pub in_flight: u64,
    /// Operations queued for the device now.
    pub queued: u64,
}

/// Counters of a driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvmeCounters {
    /// Counters by priority, in the order of [`Priority::ALL`].
    pub priorities: [PriorityCounters; Priority::ALL.len()],
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Operations whose completions were polled.
    pub polled: u64,
    /// Reads and writes that were issued as commands to the drive.
    pub commands: u64,
    /// Commands that failed and were retried through io_uring.
    pub commands_failed: u64,
    /// Reads and writes whose memory was registered (pinned) before.
    pub pinned: u64,
    /// Submission calls: each submits a batch of operations.
    pub submissions: u64,
    /// Retries of operations that the kernel put off.
    pub retries: u64,
    /// Latency of reads on behalf of gets.
    pub get_latency: Latency,
    /// Latency of flushes.
    pub flush_latency: Latency,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_a_factor_of_two() {
        let mut latency = Latency::default();
        assert_eq!(latency.percentile_ns(99), 0);
        (1..=100u64).for_each(|at| latency.add(at * 10_000));
        assert_eq!((latency.count, latency.most_ns, latency.sum_ns), (100, 1_000_000, 50_500_000));
        let (half, most) = (latency.percentile_ns(50), latency.percentile_ns(99));
        assert!((500_000..=1_024_000).contains(&half) && (990_000..=1_000_000).contains(&most), "{half} {most}");
        latency.add(u64::MAX / 2);
        assert_eq!(latency.buckets[BUCKETS - 1], 1);
    }
}

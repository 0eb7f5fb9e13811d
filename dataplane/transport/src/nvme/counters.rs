//! What the driver counts, by priority, and how long flushes take.

use kvplane_tier::Priority;

/// Buckets of [`Latency`]: the last takes everything above.
pub const BUCKETS: usize = 32;

/// How long something took, by powers of two of microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// How often.
    pub count: u64,
    /// Altogether, in nanoseconds.
    pub sum_ns: u64,
    /// At the most.
    pub most_ns: u64,
    /// How many took less than 2^index microseconds, and not less than half of that.
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

    /// A time that at least `percent` of all were not above, in nanoseconds: exact to a factor of two.
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

/// Operations of one priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PriorityCounters {
    /// Given to the device.
    pub started: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// That the device could not do, or not whole.
    pub failed: u64,
    /// Under way now.
    pub in_flight: u64,
    /// Waiting for the device now.
    pub queued: u64,
}

/// What a driver counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvmeCounters {
    /// By priority, in the order of [`Priority::ALL`].
    pub priorities: [PriorityCounters; Priority::ALL.len()],
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Operations whose completions were polled for.
    pub polled: u64,
    /// Reads and writes that were commands to the drive.
    pub commands: u64,
    /// Commands that failed, and were tried the plain way.
    pub commands_failed: u64,
    /// Reads and writes whose memory was pinned before.
    pub pinned: u64,
    /// Times when operations were given to the kernel, as many as there were in one call.
    pub submissions: u64,
    /// Times when the device asked to try again.
    pub retries: u64,
    /// How long reads took that somebody waited for.
    pub get_latency: Latency,
    /// How long flushes took.
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

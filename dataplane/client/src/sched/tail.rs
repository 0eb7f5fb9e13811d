//! Latency tail: a running estimate of the 99th percentile of a peer's reply times.

/// Step of the estimate, as a fraction of it: a longer time raises it by 99 steps and any other lowers it by one, so
/// that it settles where one time in a hundred is longer.
const PARTS: u64 = 4_096;

/// Estimate of the 99th percentile of times, clamped to between half of a limit and the limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tail {
    /// Estimate in nanoseconds; 0 before the first time.
    ns: u64,
}

impl Tail {
    /// Returns the estimate.
    #[must_use]
    pub fn estimate_ns(&self, most_ns: u64) -> u64 {
        self.ns.clamp(most_ns / 2, most_ns)
    }

    /// Adds a time.
    pub fn took(&mut self, took_ns: u64, most_ns: u64) {
        let tail_ns = self.estimate_ns(most_ns);
        let part_ns = (tail_ns / PARTS).max(1);
        self.ns = if took_ns > tail_ns { tail_ns + 99 * part_ns } else { tail_ns - part_ns };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_settles_at_the_99th_percentile_within_its_limits() {
        let (mut tail, most_ns) = (Tail::default(), 1_000_000);
        assert_eq!(tail.estimate_ns(most_ns), most_ns / 2);
        for turn in 0..400_000_u64 {
            tail.took(500_000 + turn * 7919 % 100 * 4_000, most_ns);
        }
        let settled_ns = tail.estimate_ns(most_ns);
        assert!((880_000..920_000).contains(&settled_ns), "{settled_ns}");
        (0..1_000_000).for_each(|_| tail.took(1, most_ns));
        assert_eq!(tail.estimate_ns(most_ns), most_ns / 2);
        (0..100_000).for_each(|_| tail.took(most_ns * 3, most_ns));
        assert_eq!(tail.estimate_ns(most_ns), most_ns);
    }
}

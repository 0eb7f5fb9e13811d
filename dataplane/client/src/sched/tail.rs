//! How long the slowest of a peer's answers take: a running estimate of their 99th percentile.

/// A time that is longer than the estimate raises it by 99 of these parts of itself, and one that is not lowers it by
/// one: it settles where one in a hundred is longer.
const PARTS: u64 = 4_096;

/// An estimate of the 99th percentile of times, within half of a limit and all of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tail {
    /// 0 before the first.
    ns: u64,
}

impl Tail {
    /// The estimate.
    #[must_use]
    pub fn estimate_ns(&self, most_ns: u64) -> u64 {
        self.ns.clamp(most_ns / 2, most_ns)
    }

    /// Something took so long.
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
    fn it_settles_where_one_in_a_hundred_is_longer_and_stays_within_its_limits() {
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

//! Pace of a lane: when it polls its driver for copies that are done.
//!
//! A poll is several calls of the driver, and a thread in a busy loop would make a hundred of them for each copy. So a
//! lane learns how long copies take, from whether they were done at its first poll, and polls at that time.

/// Expected time of a MiB before anything is known, in nanoseconds: that of 50 GB/s.
const FIRST_NS_PER_MIB: u64 = 20_000;

/// Bounds of that time: those of 1 TB/s and of 100 MB/s.
const LEAST_NS_PER_MIB: u64 = 1_000;
const MOST_NS_PER_MIB: u64 = 10_000_000;

/// Copies of fewer bytes take a time that does not depend on their length: nothing is learned from them.
const LEAST_BYTES: u64 = 256 << 10;

/// Bounds of the time between two polls, in nanoseconds, for copies that are expected to take less.
const LEAST_STEP_NS: u64 = 2_000;
const MOST_STEP_NS: u64 = 50_000;

/// Expected end of the first copies in flight on a lane.
#[derive(Debug)]
pub(super) struct Pace {
    ns_per_mib: u64,
    bytes: u64,
    expected_ns: u64,
    next_ns: u64,
    /// Time to the poll after the next; 0 before the first one.
    step_ns: u64,
}

impl Pace {
    /// Creates the pace of a lane that never copied.
    pub(super) const fn new() -> Self {
        Self { ns_per_mib: FIRST_NS_PER_MIB, bytes: 0, expected_ns: 0, next_ns: 0, step_ns: 0 }
    }

    /// Notes that copies of this many bytes are the first in flight from now on.
    pub(super) fn begin(&mut self, bytes: u64, now_ns: u64) {
        self.bytes = bytes;
        self.expected_ns = ((u128::from(bytes) * u128::from(self.ns_per_mib)) >> 20) as u64;
        self.next_ns = now_ns.saturating_add(self.expected_ns);
        self.step_ns = 0;
    }

    /// Returns true if it is time to poll.
    pub(super) const fn is_due(&self, now_ns: u64) -> bool {
        self.next_ns <= now_ns
    }

    /// Notes whether a poll found the first copies in flight done.
    pub(super) fn polled(&mut self, is_done: bool, now_ns: u64) {
        if self.step_ns == 0 {
            if self.bytes >= LEAST_BYTES {
                // Too long by an eighth at most, and right at once in seven of eight cases.
                let (less, more) = (self.ns_per_mib / 64, self.ns_per_mib / 8);
                let learned = if is_done { self.ns_per_mib - less } else { self.ns_per_mib + more };
                self.ns_per_mib = learned.clamp(LEAST_NS_PER_MIB, MOST_NS_PER_MIB);
            }
            self.step_ns = (self.expected_ns / 8).max(LEAST_STEP_NS);
        }
        self.next_ns = now_ns.saturating_add(self.step_ns);
        self.step_ns = (self.step_ns * 2).min(self.expected_ns.max(MOST_STEP_NS));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of polls, and the longest time that finished copies waited for one, over the last of many
    /// copies that take `ns` each.
    fn polls(bytes: u64, ns: u64) -> (u64, u64) {
        let (mut pace, mut now_ns) = (Pace::new(), 0);
        let (mut count, mut late_ns) = (0, 0);
        for number in 0..400 {
            let ends_ns = now_ns + ns;
            pace.begin(bytes, now_ns);
            loop {
                now_ns += 500;
                if !pace.is_due(now_ns) {
                    continue;
                }
                let is_done = ends_ns <= now_ns;
                pace.polled(is_done, now_ns);
                if number >= 200 {
                    count += 1;
                    late_ns = late_ns.max(now_ns.saturating_sub(ends_ns));
                }
                if is_done {
                    break;
                }
            }
        }
        (count, late_ns)
    }

    #[test]
    fn copies_are_polled_little_more_than_once_and_soon_after_their_end() {
        for (bytes, ns) in [(1 << 20, 42_000), (4 << 20, 168_000), (256 << 10, 80_000), (8 << 20, 3_000_000)] {
            let (count, late_ns) = polls(bytes, ns);
            assert!(count <= 240, "{count} polls for 200 copies of {bytes} bytes");
            assert!(late_ns <= ns / 6 + 1000, "{late_ns} ns after copies of {ns} ns");
        }
    }

    #[test]
    fn short_copies_and_those_behind_a_kernel_are_polled_a_bounded_number_of_times() {
        let (count, late_ns) = polls(4096, 9_000);
        assert!(count <= 200 * 4 && late_ns <= 9_000, "{count} polls, {late_ns} ns");
        let mut pace = Pace::new();
        pace.begin(1 << 20, 0);
        let count = (0..30_000_000).step_by(500).filter(|now_ns| {
            let is_due = pace.is_due(*now_ns);
            if is_due {
                pace.polled(false, *now_ns);
            }
            is_due
        });
        assert!(count.count() <= 620, "a kernel of 30 ms");
        pace.begin(1 << 20, 0);
        assert!(pace.next_ns <= 25_000, "one kernel teaches little");
    }
}

//! Health of the store for operations of one kind: after failures it is left alone for a growing time.

/// First pause after failures, in nanoseconds; it doubles with each further one.
const PAUSE_NS: u64 = 500_000_000;
/// Longest pause.
const PAUSE_MOST_NS: u64 = 30_000_000_000;

/// Health of the store for reads or for writes.
#[derive(Debug)]
pub(crate) struct Health {
    /// Failures in a row that cause no pause yet.
    free: u32,
    failures: u32,
    until_ns: u64,
}

impl Health {
    pub(crate) const fn new(free: u32) -> Self {
        Self { free, failures: 0, until_ns: 0 }
    }

    /// Notes a failure. Returns true if the store is failing from now on.
    pub(crate) fn failed(&mut self, now_ns: u64) -> bool {
        self.failures += 1;
        let Some(over) = self.failures.checked_sub(self.free + 1) else { return false };
        self.until_ns = now_ns.saturating_add((PAUSE_NS << over.min(16)).min(PAUSE_MOST_NS));
        over == 0
    }

    /// Notes a success. Returns true if the store was failing.
    pub(crate) const fn worked(&mut self) -> bool {
        let was_failing = self.is_failing();
        (self.failures, self.until_ns) = (0, 0);
        was_failing
    }

    /// Returns true if the last operations have failed.
    pub(crate) const fn is_failing(&self) -> bool {
        self.failures > self.free
    }

    /// Returns true while the store is left alone.
    pub(crate) const fn is_paused(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns
    }

    /// Returns the time of the next probe while the store fails: without one, only a caller would find out that it
    /// works again.
    pub(crate) fn probe_ns(&self) -> Option<u64> {
        self.is_failing().then(|| self.pause_ends()).flatten()
    }

    /// Returns the end of the pause, if there is one.
    pub(crate) fn pause_ends(&self) -> Option<u64> {
        (self.until_ns > 0).then_some(self.until_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_failures_and_end_with_a_success() {
        let mut health = Health::new(2);
        assert!(!health.failed(0) && !health.failed(0) && !health.is_paused(0));
        assert!(health.failed(0) && health.is_paused(PAUSE_NS - 1) && !health.is_paused(PAUSE_NS));
        assert!(!health.failed(PAUSE_NS) && health.is_paused(3 * PAUSE_NS - 1));
        (0..40).for_each(|_| assert!(!health.failed(0)));
        assert_eq!(health.pause_ends(), Some(PAUSE_MOST_NS));
        assert!(health.worked() && !health.worked() && !health.is_paused(0) && !health.is_failing());
    }
}

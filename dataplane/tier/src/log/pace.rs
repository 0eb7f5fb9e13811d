//! Pace of the evictions for limits that were lowered: many records would otherwise take the device from everybody
//! else.

/// Time that an eviction takes of a limit's pace: 16,384 records a second.
const EVICTION_NS: u64 = 1_000_000_000 / 16_384;
/// Time that may be taken ahead: a shard without other work looks once a second.
const BURST_NS: u64 = 1_000_000_000;

/// Pace of the evictions for limits that were lowered (the generic cell rate algorithm, ITU-T I.371).
#[derive(Debug, Default)]
pub(crate) struct EvictionPace {
    /// Time until which evictions have been taken.
    taken_ns: u64,
    /// True if an eviction waits.
    is_behind: bool,
}

impl EvictionPace {
    /// Takes an eviction, if it may be now.
    pub(super) const fn take(&mut self, now_ns: u64) -> bool {
        self.is_behind = self.taken_ns > now_ns.saturating_add(BURST_NS);
        if !self.is_behind {
            let from_ns = if self.taken_ns > now_ns { self.taken_ns } else { now_ns };
            self.taken_ns = from_ns.saturating_add(EVICTION_NS);
        }
        !self.is_behind
    }

    /// Notes that no eviction waits.
    pub(super) const fn rest(&mut self) {
        self.is_behind = false;
    }

    /// Returns the time when the eviction that waits may be.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        self.is_behind.then(|| self.taken_ns.saturating_sub(BURST_NS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evictions_keep_their_pace() {
        let (mut pace, second) = (EvictionPace::default(), 1_000_000_000);
        let taken = |pace: &mut EvictionPace, now_ns: u64| (0..100_000).take_while(|_| pace.take(now_ns)).count();
        let burst = taken(&mut pace, 5 * second);
        assert!((16_384..16_400).contains(&burst), "{burst}");
        let due_ns = pace.due_ns().expect("one waits");
        assert!(due_ns > 5 * second && due_ns <= 5 * second + EVICTION_NS, "{due_ns}");
        assert_eq!(taken(&mut pace, due_ns), 1);
        let later: usize = (1..=1000).map(|tick| taken(&mut pace, due_ns + tick * second / 100)).sum();
        assert!((163_000..165_000).contains(&later), "ten seconds of it: {later}");
        assert!(taken(&mut pace, 100 * second) < 16_400, "nothing was saved up");
    }
}

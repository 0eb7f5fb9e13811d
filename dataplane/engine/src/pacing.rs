//! When to spin and when to park.
//!
//! A parked core takes tens of microseconds to wake, a spinning one burns its power and, where threads outnumber
//! cores, the time of others. So a host spins for as long as the next event is likely to come soon: the window
//! follows the gaps between past events, up to a limit. Time comes as an argument.

/// How a host waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pacing {
    /// Never parks, except a shard while nobody is connected to it: for latency above all.
    Spin,
    /// Spins while the next event is expected within the window, then parks.
    Adaptive {
        /// The longest window in nanoseconds.
        window_ns: u64,
    },
    /// Parks as soon as there is nothing to do: for machines with fewer cores than threads.
    Park,
}

impl Default for Pacing {
    fn default() -> Self {
        Self::Adaptive { window_ns: 100_000 }
    }
}

/// What a host learned about the gaps between events.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pacer {
    pacing: Pacing,
    idle_since_ns: u64,
    /// Moving average of the gaps, each counted as at most four windows.
    gap_ns: u64,
}

impl Pacer {
    pub(crate) const fn new(pacing: Pacing) -> Self {
        Self { pacing, idle_since_ns: 0, gap_ns: 0 }
    }

    /// A round did something.
    pub(crate) fn busy(&mut self, now_ns: u64) {
        if let Pacing::Adaptive { window_ns } = self.pacing
            && self.idle_since_ns > 0
        {
            let gap_ns = now_ns.saturating_sub(self.idle_since_ns).min(4 * window_ns);
            self.gap_ns = (self.gap_ns * 7 + gap_ns) / 8;
        }
        self.idle_since_ns = 0;
    }

    /// A round did nothing; whether to park now.
    pub(crate) fn idle(&mut self, now_ns: u64) -> bool {
        if self.idle_since_ns == 0 {
            self.idle_since_ns = now_ns.max(1);
        }
        match self.pacing {
            Pacing::Spin => false,
            Pacing::Park => true,
            Pacing::Adaptive { window_ns } => {
                // Events rarer than the window are not worth waiting for, beyond a moment.
                let patience_ns = if self.gap_ns > window_ns { window_ns / 16 } else { window_ns };
                now_ns.saturating_sub(self.idle_since_ns) >= patience_ns
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spins_while_events_come_often_and_parks_when_they_stop() {
        let mut pacer = Pacer::new(Pacing::Adaptive { window_ns: 100_000 });
        let mut now = 1_000;
        for _ in 0..100 {
            assert!(!pacer.idle(now), "gaps of 10 us are waited for");
            now += 10_000;
            pacer.busy(now);
        }
        assert!(!pacer.idle(now));
        assert!(pacer.idle(now + 100_000));
    }

    #[test]
    fn rare_events_are_hardly_waited_for() {
        let mut pacer = Pacer::new(Pacing::Adaptive { window_ns: 100_000 });
        let mut now = 1_000;
        for _ in 0..100 {
            pacer.idle(now);
            now += 10_000_000;
            pacer.busy(now);
        }
        assert!(!pacer.idle(now));
        assert!(pacer.idle(now + 10_000));
    }

    #[test]
    fn the_extremes_are_what_they_say() {
        assert!(!Pacer::new(Pacing::Spin).idle(u64::MAX));
        assert!(Pacer::new(Pacing::Park).idle(1));
    }
}

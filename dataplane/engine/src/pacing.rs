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

/// After so many waits in a row that spun to the end of the window in vain, spinning is left alone for a while.
const VAIN_WAITS: u8 = 4;
/// For how many waits: at first, and at most, doubling each time that it was in vain again.
const SHORT_WAITS: (u16, u16) = (16, 1024);
/// How much of the window a wait spins that is not expected to be worth it.
const SHORT_SHARE: u64 = 16;
/// A look that comes so much of the window after the one before, which took a microsecond or two, was held up.
const LOST_SHARE: u64 = 4;

/// What a host learned about the gaps between events.
///
/// Besides how long they are, it counts what came of spinning. Where the one that is waited for needs this very core,
/// its answer comes only when the core is given up, or taken: waits then last a window or a little more, and so the
/// mean of the gaps stays too close to the window to tell. That spinning never pays tells, and so does that time jumps
/// between two looks: meanwhile somebody else had the core.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pacer {
    pacing: Pacing,
    idle_since_ns: u64,
    /// Moving average of the gaps, each counted as at most four windows.
    gap_ns: u64,
    /// When a spinning wait looked last.
    looked_ns: u64,
    /// Whether the present wait has parked.
    parked: bool,
    /// Whether the present wait spun through the window, or lost the core while it spun.
    spun: bool,
    /// Waits in a row that did so in vain.
    vain: u8,
    /// Waits that are still to be short, and how many were the last time.
    short_left: u16,
    short: u16,
}

impl Pacer {
    pub(crate) const fn new(pacing: Pacing) -> Self {
        Self {
            pacing,
            idle_since_ns: 0,
            gap_ns: 0,
            looked_ns: 0,
            parked: false,
            spun: false,
            vain: 0,
            short_left: 0,
            short: 0,
        }
    }

    /// A round did something.
    pub(crate) fn busy(&mut self, now_ns: u64) {
        if let Pacing::Adaptive { window_ns } = self.pacing
            && self.idle_since_ns > 0
        {
            let gap_ns = now_ns.saturating_sub(self.idle_since_ns).min(4 * window_ns);
            self.gap_ns = (self.gap_ns * 7 + gap_ns) / 8;
            self.look(now_ns, window_ns);
            self.learn(gap_ns > window_ns / SHORT_SHARE);
        }
        self.idle_since_ns = 0;
    }

    /// Notices when somebody else had the core since the last look.
    const fn look(&mut self, now_ns: u64, window_ns: u64) {
        if !self.parked && now_ns.saturating_sub(self.looked_ns) > window_ns / LOST_SHARE {
            self.spun = true;
        }
        self.looked_ns = now_ns;
    }

    /// A wait is over; whether it was longer than one that hardly spins.
    fn learn(&mut self, long: bool) {
        if self.spun {
            self.spun = false;
            // Who found out before needs no more proof.
            self.vain = if self.short > 0 { VAIN_WAITS } else { self.vain + 1 };
            if self.vain >= VAIN_WAITS {
                self.short = (self.short * 2).clamp(SHORT_WAITS.0, SHORT_WAITS.1);
                self.short_left = self.short;
                self.vain = 0;
            }
        } else if self.short_left > 0 {
            self.short_left -= 1;
        } else if long {
            // It spun for longer than a short wait, and was right to.
            (self.vain, self.short) = (0, 0);
        }
    }

    /// A round did nothing; whether to park now.
    pub(crate) fn idle(&mut self, now_ns: u64) -> bool {
        if self.idle_since_ns == 0 {
            self.idle_since_ns = now_ns.max(1);
            (self.looked_ns, self.parked) = (now_ns, false);
        }
        match self.pacing {
            Pacing::Spin => false,
            Pacing::Park => true,
            Pacing::Adaptive { window_ns } => {
                // Events rarer than the window are not worth waiting for, beyond a moment.
                self.look(now_ns, window_ns);
                let hopeless = self.gap_ns > window_ns || self.short_left > 0;
                let patience_ns = if hopeless { window_ns / SHORT_SHARE } else { window_ns };
                let park = now_ns.saturating_sub(self.idle_since_ns) >= patience_ns;
                self.spun |= park && !self.parked && !hopeless;
                self.parked |= park;
                park
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
    fn spinning_that_is_always_in_vain_stops_and_is_tried_again_seldom() {
        let mut pacer = Pacer::new(Pacing::Adaptive { window_ns: 100_000 });
        let (mut now, mut spun_ns) = (1_000, 0);
        for _ in 0..1_000 {
            // What is waited for comes 10 us after the core was given up, however long that takes.
            let start = now;
            while !pacer.idle(now) {
                now += 1_000;
            }
            spun_ns += now - start;
            now += 10_000;
            pacer.busy(now);
        }
        assert!(spun_ns < 1_000 * 15_000, "{spun_ns} ns in 1000 waits");
    }

    #[test]
    fn who_loses_the_core_while_it_spins_spins_less() {
        let mut pacer = Pacer::new(Pacing::Adaptive { window_ns: 100_000 });
        let (mut now, mut lost) = (1_000, 0);
        for _ in 0..1_000 {
            // The one that answers takes the core 10 us after it was asked, and keeps it for 80; or is there in 20 when
            // it finds the core free.
            let start = now;
            let mut parked = false;
            while !parked && now < start + 10_000 {
                parked = pacer.idle(now);
                now += 1_000;
            }
            now += if parked { 20_000 } else { 80_000 };
            lost += u32::from(!parked);
            pacer.busy(now);
        }
        assert!(lost < 30, "{lost} of 1000 waits");
    }

    #[test]
    fn spinning_goes_on_where_it_pays() {
        let mut pacer = Pacer::new(Pacing::Adaptive { window_ns: 100_000 });
        let mut now = 1_000;
        for wait in 0..1_000 {
            // One wait in ten is for something long.
            let gap_ns = if wait % 10 == 9 { 150_000 } else { 20_000 };
            let start = now;
            let mut parked = false;
            while now < start + gap_ns {
                parked |= pacer.idle(now);
                now += 1_000;
            }
            assert!(!parked || gap_ns > 100_000, "wait {wait} of {gap_ns} ns parked");
            pacer.busy(now);
        }
    }

    #[test]
    fn the_extremes_are_what_they_say() {
        assert!(!Pacer::new(Pacing::Spin).idle(u64::MAX));
        assert!(Pacer::new(Pacing::Park).idle(1));
    }
}

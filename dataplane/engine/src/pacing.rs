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
        // Long enough for what reads from an SSD: a device of the faster kind takes 60 to 90 us.
        Self::Adaptive { window_ns: 200_000 }
    }
}

/// After so many waits in a row that spun to the end of the window in vain, spinning is left alone for a while.
const VAIN_WAITS: u8 = 4;
/// For how many waits: at first, and at most, doubling each time that it was in vain again.
const SHORT_WAITS: (u16, u16) = (16, 1024);
/// How much of the window a wait spins that is not expected to be worth it.
const SHORT_SHARE: u64 = 16;
/// After so many waits that hardly spun, as gaps had been long, one spins after all; at most this many, as each time
/// that it was in vain doubles it.
const PROBE_WAITS: (u16, u16) = (16, 1024);
/// A look that comes so much of the window after the one before, which took a microsecond or two, was held up.
const LOST_SHARE: u64 = 8;

/// What a host learned about the gaps between events.
///
/// Besides how long they are, it counts what came of spinning. Where the one that is waited for needs this very core,
/// its answer comes only when the core is given up, or taken: waits then last a window or a little more, and so the
/// mean of the gaps stays too close to the window to tell. That spinning never pays tells, and so does that somebody
/// else had the core between two looks: time has jumped, and the kernel has counted it. Time jumps too where an
/// interrupt came or a virtual machine stood still: those who spin need not mind.
///
/// A gap that was slept through is longer by what it takes to wake, at both ends. Gaps that are a little under the
/// window while both ends spin are over it once they park, and would be for good. So now and then a wait spins all the
/// same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pacer {
    pacing: Pacing,
    /// Tells how often this thread's core was taken, and how often it was when that was asked last.
    preemptions: fn() -> u64,
    preempted: u64,
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
    /// Waits until one spins though gaps have been long, how many there are to be, and whether this is one.
    probe_left: u16,
    probe: u16,
    probing: bool,
}

impl Pacer {
    pub(crate) const fn new(pacing: Pacing, preemptions: fn() -> u64) -> Self {
        Self {
            pacing,
            preemptions,
            preempted: 0,
            idle_since_ns: 0,
            gap_ns: 0,
            looked_ns: 0,
            parked: false,
            spun: false,
            vain: 0,
            short_left: 0,
            short: 0,
            probe_left: PROBE_WAITS.0,
            probe: PROBE_WAITS.0,
            probing: false,
        }
    }

    /// A round did something.
    pub(crate) fn busy(&mut self, now_ns: u64) {
        if let Pacing::Adaptive { window_ns } = self.pacing
            && self.idle_since_ns > 0
        {
            let gap_ns = now_ns.saturating_sub(self.idle_since_ns).min(4 * window_ns);
            self.look(now_ns, window_ns);
            self.average(gap_ns, window_ns);
            self.learn(gap_ns > window_ns / SHORT_SHARE);
        }
        self.idle_since_ns = 0;
    }

    /// Takes a gap into the average, and decides whether the next wait spins though gaps have been long.
    fn average(&mut self, gap_ns: u64, window_ns: u64) {
        if self.probing && gap_ns <= window_ns && !self.parked {
            // What was slept through before says little: this counts as much as all of that.
            self.gap_ns = u64::midpoint(self.gap_ns, gap_ns);
            self.probe = PROBE_WAITS.0;
        } else {
            self.gap_ns = (self.gap_ns * 7 + gap_ns) / 8;
            if self.probing {
                self.probing = false;
                self.probe = (self.probe * 2).min(PROBE_WAITS.1);
                self.probe_left = self.probe;
            }
        }
        if self.gap_ns <= window_ns {
            (self.probing, self.probe_left) = (false, self.probe);
        } else if !self.probing {
            self.probe_left -= 1;
            self.probing = self.probe_left == 0;
        }
    }

    /// Notices when somebody else had the core since the last look.
    fn look(&mut self, now_ns: u64, window_ns: u64) {
        if !self.parked && now_ns.saturating_sub(self.looked_ns) > window_ns / LOST_SHARE {
            let preempted = (self.preemptions)();
            self.spun |= preempted != self.preempted;
            self.preempted = preempted;
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
                let hopeless = self.gap_ns > window_ns && !self.probing || self.short_left > 0;
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
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static PREEMPTIONS: Cell<u64> = const { Cell::new(0) };
    }

    fn adaptive() -> Pacer {
        Pacer::new(Pacing::Adaptive { window_ns: 100_000 }, || PREEMPTIONS.get())
    }

    #[test]
    fn spins_while_events_come_often_and_parks_when_they_stop() {
        let mut pacer = adaptive();
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
        let mut pacer = adaptive();
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
        let mut pacer = adaptive();
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
        let mut pacer = adaptive();
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
            PREEMPTIONS.set(PREEMPTIONS.get() + u64::from(!parked));
            lost += u32::from(!parked);
            pacer.busy(now);
        }
        assert!(lost < 30, "{lost} of 1000 waits");
    }

    #[test]
    fn interrupts_are_nobody_s_core_lost() {
        let mut pacer = adaptive();
        let (mut now, mut parks) = (1_000, 0);
        for _ in 0..1_000 {
            // The answer takes an interrupt that keeps the core for 40 us.
            parks += u32::from(pacer.idle(now));
            parks += u32::from(pacer.idle(now + 40_000));
            now += 50_000;
            pacer.busy(now);
            now += 1_000;
        }
        assert_eq!(parks, 0);
    }

    #[test]
    fn spinning_goes_on_where_it_pays() {
        let mut pacer = adaptive();
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
    fn gaps_that_only_sleeping_makes_long_are_found_out() {
        let mut pacer = adaptive();
        let (mut now, mut parked_late) = (1_000, 0);
        for wait in 0..2_000 {
            // Some long waits at first; then what comes after 70 us, or after 150 when we have to be woken.
            let gap_ns = if wait < 100 { 1_000_000 } else { 70_000 };
            let start = now;
            let mut parked = false;
            while !parked && now < start + gap_ns {
                parked = pacer.idle(now);
                now += 1_000;
            }
            now = start + if parked { gap_ns + 80_000 } else { gap_ns };
            parked_late += u32::from(parked && wait >= 300);
            pacer.busy(now);
        }
        assert_eq!(parked_late, 0, "of 1700 waits");
    }

    #[test]
    fn probes_of_gaps_that_are_long_are_rare() {
        let mut pacer = adaptive();
        let (mut now, mut spun_ns) = (1_000, 0);
        for _ in 0..10_000 {
            let start = now;
            while !pacer.idle(now) {
                now += 1_000;
            }
            spun_ns += now - start;
            now = start + 300_000;
            pacer.busy(now);
        }
        assert!(spun_ns < 10_000 * 9_000, "{spun_ns} ns in 10000 waits");
    }

    #[test]
    fn the_extremes_are_what_they_say() {
        assert!(!Pacer::new(Pacing::Spin, || 0).idle(u64::MAX));
        assert!(Pacer::new(Pacing::Park, || 0).idle(1));
    }
}

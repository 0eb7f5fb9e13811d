//! Pacing of a host: the choice between spinning and parking.
//!
//! A parked core takes tens of microseconds to wake; a spinning one burns its power and, if there are more threads than
//! cores, the time of others. So a host spins for as long as the next event is likely to come soon: the window follows
//! the gaps between past events, up to a limit. Time is an argument.

/// Waiting strategy of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pacing {
    /// Never parks, except a shard without connections: for the lowest latency.
    Spin,
    /// Spins while the next event is expected within the window, then parks.
    Adaptive {
        /// Longest window, in nanoseconds.
        window_ns: u64,
    },
    /// Parks at once if there is no work: for machines with fewer cores than threads.
    Park,
}

impl Default for Pacing {
    fn default() -> Self {
        // Long enough for reads from an SSD: a fast device takes 60 to 90 us.
        Self::Adaptive { window_ns: 200_000 }
    }
}

/// Consecutive waits that spun to the end of the window in vain, after which waits are short for a while.
const VAIN_WAITS: u8 = 4;
/// Number of short waits: at first, and at most. It doubles each time that spinning was in vain again.
const SHORT_WAITS: (u16, u16) = (16, 1024);
/// Divisor of the window for a short wait.
const SHORT_SHARE: u64 = 16;
/// Waits that hardly spun, because gaps had been long, after which one probes by spinning; at first, and at most, as
/// each probe in vain doubles the number.
const PROBE_WAITS: (u16, u16) = (16, 1024);
/// Divisor of the window: a look that comes this much later than the one before, when it should take a microsecond or
/// two, was delayed.
const LOST_SHARE: u64 = 8;

/// Estimate of the gaps between events.
///
/// Besides their lengths, it counts whether spinning paid off. If the peer that will answer needs this very core, its
/// answer comes only when the core is given up, or taken: waits then last a window or a little more, and so the mean of
/// the gaps stays too close to the window to be conclusive. Conclusive is that spinning never pays off, and that
/// another thread had the core between two looks: time has jumped, and the kernel has counted a preemption. Time also
/// jumps at an interrupt, or if a virtual machine was stopped: these do not matter.
///
/// A gap that was slept through is longer by the time of the wake-ups at both ends. Gaps that are a little under the
/// window while both ends spin are over it once they park, and would be for good. So a wait spins as a probe from time
/// to time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pacer {
    pacing: Pacing,
    /// Function that counts the preemptions of this thread, and its result at the last call.
    preemptions: fn() -> u64,
    preempted: u64,
    idle_since_ns: u64,
    /// Moving average of the gaps, each counted as at most four windows.
    gap_ns: u64,
    /// Time of the last look of a spinning wait.
    looked_ns: u64,
    /// True if the current wait has parked.
    parked: bool,
    /// True if the current wait spun through the window, or was preempted while it spun.
    spun: bool,
    /// Consecutive waits that spun in vain.
    vain: u8,
    /// Short waits that are left, and their number the last time.
    short_left: u16,
    short: u16,
    /// Waits until the next probe, the number between probes, and whether the current wait is a probe.
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

    /// Notes a round with progress.
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

    /// Adds a gap to the average, and decides whether the next wait is a probe.
    fn average(&mut self, gap_ns: u64, window_ns: u64) {
        if self.probing && gap_ns <= window_ns && !self.parked {
            // Gaps that were slept through are poor evidence: this one weighs as much as all of them.
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

    /// Detects that another thread had the core since the last look.
    fn look(&mut self, now_ns: u64, window_ns: u64) {
        if !self.parked && now_ns.saturating_sub(self.looked_ns) > window_ns / LOST_SHARE {
            let preempted = (self.preemptions)();
            self.spun |= preempted != self.preempted;
            self.preempted = preempted;
        }
        self.looked_ns = now_ns;
    }

    /// Learns from a completed wait; `long`: it was longer than a short wait.
    fn learn(&mut self, long: bool) {
        if self.spun {
            self.spun = false;
            // If spinning was in vain before, once is enough.
            self.vain = if self.short > 0 { VAIN_WAITS } else { self.vain + 1 };
            if self.vain >= VAIN_WAITS {
                self.short = (self.short * 2).clamp(SHORT_WAITS.0, SHORT_WAITS.1);
                self.short_left = self.short;
                self.vain = 0;
            }
        } else if self.short_left > 0 {
            self.short_left -= 1;
        } else if long {
            // It spun for longer than a short wait, and that paid off.
            (self.vain, self.short) = (0, 0);
        }
    }

    /// Notes a round without progress; returns true if the host should park now.
    pub(crate) fn idle(&mut self, now_ns: u64) -> bool {
        if self.idle_since_ns == 0 {
            self.idle_since_ns = now_ns.max(1);
            (self.looked_ns, self.parked) = (now_ns, false);
        }
        match self.pacing {
            Pacing::Spin => false,
            Pacing::Park => true,
            Pacing::Adaptive { window_ns } => {
                // Events rarer than the window are worth a short wait only.
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
    fn rare_events_get_short_waits() {
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
    fn spinning_in_vain_stops_and_is_rarely_tried_again() {
        let mut pacer = adaptive();
        let (mut now, mut spun_ns) = (1_000, 0);
        for _ in 0..1_000 {
            // The event comes 10 us after the core was given up, however long that takes.
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
    fn preempted_spinning_becomes_shorter() {
        let mut pacer = adaptive();
        let (mut now, mut lost) = (1_000, 0);
        for _ in 0..1_000 {
            // The answering thread takes the core 10 us after the request, and keeps it for 80 us; or it answers within
            // 20 us if the core is free.
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
    fn interrupts_are_not_counted_as_preemptions() {
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
    fn spinning_continues_while_it_pays_off() {
        let mut pacer = adaptive();
        let mut now = 1_000;
        for wait in 0..1_000 {
            // One wait in ten is for a long event.
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
    fn gaps_that_only_parking_makes_long_are_detected() {
        let mut pacer = adaptive();
        let (mut now, mut parked_late) = (1_000, 0);
        for wait in 0..2_000 {
            // Some long waits at first; then events after 70 us, or after 150 us if the host parks.
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
    fn spin_never_parks_and_park_never_spins() {
        assert!(!Pacer::new(Pacing::Spin, || 0).idle(u64::MAX));
        assert!(Pacer::new(Pacing::Park, || 0).idle(1));
    }
}

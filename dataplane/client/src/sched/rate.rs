//! Service rate of a rail: bytes over time, measured from posting to completion only, and its fixed latency apart.
//!
//! A rail carries several slices at once, so the time of a single slice says little. The rate is the bytes completed
//! while bulk was in flight, over the time that this took: the time between completions, from the moment that the rail
//! became busy. Queueing on our side is not included, and an outlier weighs no more than the time that it took. Small
//! transfers cannot distort the rate: if they are alone on a rail, they update its latency instead.

/// Time after which an observation has lost most of its weight.
const MEMORY_NS: f64 = 20_000_000.0;
/// Weight of the port's stated speed against observations.
const SEED_NS: f64 = 1_000_000.0;
/// Interval at which the estimates of an unused rail decay: its rate doubles, up to the seed, and its latency halves.
/// Otherwise a bad start would keep the rail from ever being tried again.
const FORGET_NS: u64 = 100_000_000;
/// Lower bound of the estimate, in bytes per nanosecond: 1 MB/s.
const LEAST: f64 = 0.001;

/// Running estimate of service rate and latency. Times are in nanoseconds, rates in bytes per nanosecond.
#[derive(Clone, Debug)]
pub struct Rate {
    seed: f64,
    /// Decayed bytes completed before the last interval ended, and bytes completed since. The latter are integers, so
    /// that completions at one time add up to the same result in any grouping.
    bytes: f64,
    fresh_bytes: u64,
    span_ns: f64,
    latency_ns: f64,
    /// Time of a large slice on an idle rail: latency and transfer of its own bytes.
    base_ns: f64,
    /// Start of the interval up to the next completion.
    mark_ns: u64,
    /// True if the interval that began at the mark includes the latency of a first slice.
    first: bool,
    last_done_ns: u64,
}

impl Rate {
    /// Creates the estimate of a rail whose port states this speed.
    #[must_use]
    pub fn new(bytes_per_second: u64) -> Self {
        let seed = (bytes_per_second as f64 / 1e9).max(LEAST);
        Self {
            seed,
            bytes: seed * SEED_NS,
            fresh_bytes: 0,
            span_ns: SEED_NS,
            latency_ns: 0.0,
            base_ns: 0.0,
            mark_ns: 0,
            first: false,
            last_done_ns: 0,
        }
    }

    /// Returns the stated speed of the port, in bytes per nanosecond.
    #[must_use]
    pub const fn stated(&self) -> f64 {
        self.seed
    }

    /// Returns the estimated rate, in bytes per nanosecond.
    #[must_use]
    pub fn bytes_per_ns(&self) -> f64 {
        ((self.bytes + self.fresh_bytes as f64) / self.span_ns).max(LEAST)
    }

    /// Returns the estimated time of a transfer besides that of its bytes.
    #[must_use]
    pub const fn latency_ns(&self) -> f64 {
        self.latency_ns
    }

    /// Returns the latency to predict with: halved for every interval in which the rail was unused.
    #[must_use]
    pub fn hopeful_latency_ns(&self, idle: bool, now_ns: u64) -> f64 {
        let unused_ns = now_ns.saturating_sub(self.last_done_ns.max(self.mark_ns));
        match idle {
            true => self.latency_ns * 0.5f64.powi((unused_ns / FORGET_NS).min(30) as i32),
            false => self.latency_ns,
        }
    }

    /// Starts an interval: bulk is posted on a rail that had none in flight.
    pub fn begin(&mut self, now_ns: u64) {
        let idle_ns = now_ns.saturating_sub(self.last_done_ns.max(self.mark_ns));
        let doublings = (idle_ns / FORGET_NS).min(30) as i32;
        if doublings > 0 && self.bytes_per_ns() < self.seed {
            let rate = (self.bytes_per_ns() * 2f64.powi(doublings)).min(self.seed);
            (self.bytes, self.fresh_bytes, self.span_ns) = (rate * SEED_NS, 0, SEED_NS);
        }
        self.mark_ns = now_ns;
        self.first = true;
    }

    /// Returns the rate to predict with: a rail that was unused for long gets the benefit of the doubt.
    #[must_use]
    pub fn hopeful(&self, idle: bool, now_ns: u64) -> f64 {
        let rate = self.bytes_per_ns();
        let unused_ns = now_ns.saturating_sub(self.last_done_ns.max(self.mark_ns));
        if !idle || rate >= self.seed || unused_ns < FORGET_NS {
            return rate;
        }
        (rate * 2f64.powi((unused_ns / FORGET_NS).min(30) as i32)).min(self.seed)
    }

    /// Returns the time from posting a large slice on an idle rail to its completion: the least time to post ahead to
    /// keep the rail busy. It is learned when bulk begins and lowered by faster slices, but never raised by slices that
    /// queue behind others, or a long queue would justify itself.
    #[must_use]
    pub const fn base_ns(&self) -> f64 {
        self.base_ns
    }

    /// Reports completed slices, of `bytes` in total, that were posted at `posted_ns`, while bulk is or was in flight.
    pub fn served(&mut self, slices: u64, bytes: u64, posted_ns: u64, now_ns: u64) {
        let mut span_ns = now_ns.saturating_sub(self.mark_ns) as f64;
        let took_ns = now_ns.saturating_sub(posted_ns) as f64;
        if self.first && self.base_ns > 0.0 {
            self.base_ns += (took_ns - self.base_ns) / 4.0;
        } else if self.first || took_ns < self.base_ns {
            self.base_ns = took_ns;
        }
        // The second of them is not the first of its interval.
        if slices > 1 && took_ns < self.base_ns {
            self.base_ns = took_ns;
        }
        if core::mem::take(&mut self.first) {
            // At most half of the span, as an overestimated latency must not make a rail look infinitely fast.
            span_ns -= self.latency_ns.min(span_ns * 0.5);
        }
        if span_ns == 0.0 {
            self.fresh_bytes += bytes;
        } else {
            let keep = MEMORY_NS / (MEMORY_NS + span_ns);
            self.bytes = (self.bytes + self.fresh_bytes as f64) * keep;
            self.fresh_bytes = bytes;
            self.span_ns = self.span_ns * keep + span_ns;
        }
        self.mark_ns = now_ns;
        self.last_done_ns = now_ns;
    }

    /// Reports completed small transfers, of `bytes` in total; `alone` if nothing is in flight after the last one.
    pub fn served_small(&mut self, slices: u64, bytes: u64, posted_ns: u64, alone: bool, now_ns: u64) {
        if slices > 1 {
            // The last of them was not alone before, unless they took no time at all.
            self.last_done_ns = now_ns;
        }
        if alone && posted_ns >= self.last_done_ns {
            let sample_ns = now_ns.saturating_sub(posted_ns) as f64 - bytes as f64 / self.bytes_per_ns();
            let sample_ns = sample_ns.max(0.0);
            let known_ns = self.hopeful_latency_ns(true, posted_ns);
            self.latency_ns = if known_ns == 0.0 { sample_ns } else { known_ns + (sample_ns - known_ns) / 8.0 };
        }
        self.last_done_ns = now_ns;
    }

    /// Restarts the interval after a loss of the work in flight: the time until now carries no information.
    pub const fn interrupted(&mut self, now_ns: u64) {
        self.mark_ns = now_ns;
    }
}

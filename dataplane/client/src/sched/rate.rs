//! How fast a rail serves: bytes by time, measured from posted to completed only, and its fixed latency apart.
//!
//! A rail carries several slices at once, so the time of one of them says little. What counts is the bytes that were
//! done while bulk was under way, over the time that this took: the time between completions, from the moment that
//! the rail became busy. Waiting in queues of ours is not in it, and a single odd sample weighs no more than the time
//! that it took. Small transfers cannot spoil the rate: alone on a rail they teach its latency instead.

/// Time after which an observation has lost most of its weight.
const MEMORY_NS: f64 = 20_000_000.0;
/// What the port's stated speed weighs against observations.
const SEED_NS: f64 = 1_000_000.0;
/// An unused rail's figures are forgotten: its rate doubles in every such interval, up to the seed, and its latency
/// halves. Otherwise one bad beginning would keep it from ever showing that it is better.
const FORGET_NS: u64 = 100_000_000;
/// Bytes in a nanosecond below which no estimate falls: 1 MB/s.
const LEAST: f64 = 0.001;

/// A running estimate of service rate and latency. Times are in nanoseconds, rates in bytes per nanosecond.
#[derive(Clone, Debug)]
pub struct Rate {
    seed: f64,
    /// Bytes that were done until the last interval ended, less by age, and those done since: whole numbers, so that
    /// what ends at one time adds up to the same however it is told.
    bytes: f64,
    fresh_bytes: u64,
    span_ns: f64,
    latency_ns: f64,
    /// Time of a large slice that nothing was before, latency and its own bytes.
    base_ns: f64,
    /// From when the time until the next completion counts.
    mark_ns: u64,
    /// The interval that began at the mark has the latency of a first slice in it.
    first: bool,
    last_done_ns: u64,
}

impl Rate {
    /// A rail whose port claims this speed.
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

    /// Bytes in a nanosecond that the port claims.
    #[must_use]
    pub const fn stated(&self) -> f64 {
        self.seed
    }

    /// Bytes in a nanosecond.
    #[must_use]
    pub fn bytes_per_ns(&self) -> f64 {
        ((self.bytes + self.fresh_bytes as f64) / self.span_ns).max(LEAST)
    }

    /// Time that a transfer takes beside its bytes.
    #[must_use]
    pub const fn latency_ns(&self) -> f64 {
        self.latency_ns
    }

    /// The same as it is to be used now: halved for every interval that the rail was not used.
    #[must_use]
    pub fn hopeful_latency_ns(&self, idle: bool, now_ns: u64) -> f64 {
        let unused_ns = now_ns.saturating_sub(self.last_done_ns.max(self.mark_ns));
        match idle {
            true => self.latency_ns * 0.5f64.powi((unused_ns / FORGET_NS).min(30) as i32),
            false => self.latency_ns,
        }
    }

    /// Bulk begins to move on a rail that moved none.
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

    /// The estimate as it is to be used now: what has not been used for long is given the benefit of the doubt.
    #[must_use]
    pub fn hopeful(&self, idle: bool, now_ns: u64) -> f64 {
        let rate = self.bytes_per_ns();
        let unused_ns = now_ns.saturating_sub(self.last_done_ns.max(self.mark_ns));
        if !idle || rate >= self.seed || unused_ns < FORGET_NS {
            return rate;
        }
        (rate * 2f64.powi((unused_ns / FORGET_NS).min(30) as i32)).min(self.seed)
    }

    /// Time from posting a large slice on an idle rail until it is done: what has to be posted ahead at least, if the
    /// rail is to stay busy. It is learned when bulk begins and lowered by what is faster; never raised by slices that
    /// wait for others, or a long queue would justify itself.
    #[must_use]
    pub const fn base_ns(&self) -> f64 {
        self.base_ns
    }

    /// So many slices, with `bytes` in all, that were posted at `posted_ns` are done while bulk is or was under way.
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
            // Never all of it: a latency that was learned too high must not make a rail look infinitely fast.
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

    /// So many small transfers, with `bytes` in all, are done; `alone` if nothing is under way after the last.
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

    /// What was under way is gone without being done: the time until now says nothing.
    pub const fn interrupted(&mut self, now_ns: u64) {
        self.mark_ns = now_ns;
    }
}

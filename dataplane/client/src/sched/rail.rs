//! A rail: one way from a port of ours to a port of the peer, with its rate, its load and its health.
//!
//! Its connections (lanes) are equal. A rail that failed is paused until one of its lanes is connected again, then
//! proves itself with one slice, and then earns its window back as a new connection does: what it may carry grows by
//! what it has carried. So a rail that keeps failing never holds much, and one that is sound again is back in a few
//! round trips.

use kvplane_proto::states::Step;

use super::rate::Rate;

kvplane_proto::state_machine! {
    /// Whether a rail is to be trusted.
    states Health {
        /// In use.
        Healthy,
        /// Its last lane was lost: nothing is sent until one is back.
        Paused,
        /// A lane is back: one slice at a time until one is done.
        Probing,
    }

    /// What says something about a rail.
    events HealthEvent {
        /// Its last lane was lost, or could not be had.
        Failed,
        /// A lane was welcomed.
        Connected,
        /// Something that it carried is done.
        Served,
    }
    transitions {
        Healthy | Probing, Failed => Paused;
        Paused, Failed => Paused;
        Paused, Connected => Probing;
        Healthy, Connected => ignored;
        Probing, Connected => ignored;
        Probing, Served => Healthy;
        Healthy, Served => ignored;
        Paused, Served => ignored;
    }
}

/// How much a predicted time counts, by the NUMA distance of the port: same node, other node, unknown or far.
const TIER_PENALTY: [f64; 3] = [1.0, 5.0, 10.0];
/// A silence loses a part of its weight with so many slices, so that most of it is gone after a thousand.
const SILENCE_SLICES: u64 = 64;
const SILENCE_PART: u64 = 16;
/// How many times its own window a rail may have beside others with larger ones.
const EVEN_MOST: u64 = 4;
/// What a rail may carry at once when it has just proved itself.
const BITE_BYTES: u64 = 256 << 10;

/// One way to a peer.
#[derive(Clone, Debug)]
pub struct Rail {
    rate: Rate,
    penalty: f64,
    health: Health,
    bulk_bytes: u64,
    small_bytes: u64,
    /// Bytes of large slices that were done since it was compared with its neighbours anew.
    carried_bytes: u64,
    /// What it may carry after a failure, growing; `u64::MAX` where it never failed.
    bite_bytes: u64,
    paused_until_ns: u64,
    /// The longest time of late in which nothing was done although something was posted, and when something was last.
    silence_ns: u64,
    heard_ns: u64,
    /// Slices that were done since it last lost some of its weight.
    heard_slices: u64,
}

impl Rail {
    /// A rail over a port of this speed, at this NUMA distance from the memory (0 near, 1 other node, 2 far).
    #[must_use]
    pub fn new(bytes_per_second: u64, tier: u8) -> Self {
        Self {
            rate: Rate::new(bytes_per_second),
            penalty: TIER_PENALTY[usize::from(tier).min(TIER_PENALTY.len() - 1)],
            health: Health::Healthy,
            bulk_bytes: 0,
            small_bytes: 0,
            carried_bytes: 0,
            bite_bytes: u64::MAX,
            paused_until_ns: 0,
            silence_ns: 0,
            heard_ns: 0,
            heard_slices: 0,
        }
    }

    /// Whether it is trusted.
    #[must_use]
    pub const fn health(&self) -> Health {
        self.health
    }

    /// Its rate and latency.
    #[must_use]
    pub const fn rate(&self) -> &Rate {
        &self.rate
    }

    /// Bytes posted and not done: of large slices, of small ones.
    #[must_use]
    pub const fn inflight_bytes(&self) -> (u64, u64) {
        (self.bulk_bytes, self.small_bytes)
    }

    /// The longest time of late in which it was silent although it had work. Slow rails tell of many slices at once.
    #[must_use]
    pub const fn silence_ns(&self) -> u64 {
        self.silence_ns
    }

    /// It was not waited for any longer after such a silence. Should it have been slow and not gone, it gets more time
    /// when it is back.
    pub fn gave_up(&mut self, silent_ns: u64) {
        self.silence_ns = self.silence_ns.max(silent_ns);
    }

    /// Whether slices may be promised to it: it is not paused, or its pause is over and it may be tried.
    #[must_use]
    pub fn is_hopeful(&self, now_ns: u64) -> bool {
        self.health != Health::Paused || now_ns >= self.paused_until_ns
    }

    /// When its pause is over.
    #[must_use]
    pub const fn paused_until_ns(&self) -> u64 {
        self.paused_until_ns
    }

    /// When a slice of `bytes` posted now would be done, from now, with the penalty of distance. A small one shares
    /// the rail with bulk instead of waiting for its end.
    #[must_use]
    pub fn predict_ns(&self, bytes: u64, small: bool, now_ns: u64) -> f64 {
        let idle = self.bulk_bytes + self.small_bytes == 0;
        let work = match (small, self.bulk_bytes) {
            (true, 0) => self.small_bytes + bytes,
            (true, _) => (self.small_bytes + bytes) * 2,
            (false, bulk) => bulk + self.small_bytes + bytes,
        };
        (self.rate.hopeful_latency_ns(idle, now_ns) + work as f64 / self.rate.hopeful(idle, now_ns)) * self.penalty
    }

    /// Bytes of large slices that it may have posted, for `ahead_ns` of work beyond a slice's own time; never less than
    /// `least_bytes`.
    #[must_use]
    pub fn window_bytes(&self, ahead_ns: u64, least_bytes: u64) -> u64 {
        let window = self.rate.bytes_per_ns() * (ahead_ns as f64 + self.rate.base_ns());
        (window as u64).max(least_bytes)
    }

    /// A window by what the port claims: nanoseconds of work at its stated speed.
    #[must_use]
    pub fn window_ns(&self, window_bytes: u64) -> f64 {
        window_bytes as f64 / self.rate.stated()
    }

    /// Its window beside other rails, of which one has as much as `widest_ns` ([`Self::window_ns`]): as much by its
    /// own stated speed. Ports that are driven by the same cores, or by one bus, share those by what each has posted;
    /// with windows by measured rates alone, whichever was ahead once would stay so. One that is really slower has no
    /// more than a few times its own.
    #[must_use]
    pub fn even_window_bytes(&self, window_bytes: u64, widest_ns: f64) -> u64 {
        let even = (widest_ns * self.rate.stated()) as u64;
        even.clamp(window_bytes, window_bytes.saturating_mul(EVEN_MOST))
    }

    /// Its part of what it and its neighbours are given, in nanoseconds of its stated speed: what it has carried since
    /// [`Self::start_share`], and has posted.
    #[must_use]
    pub fn share_ns(&self) -> f64 {
        (self.carried_bytes + self.bulk_bytes) as f64 / self.rate.stated()
    }

    /// From now on its part counts from nothing.
    pub const fn start_share(&mut self) {
        self.carried_bytes = 0;
    }

    /// Its window while it is ahead of neighbours that are about as fast ([`share_behind`]): half, so that what drives
    /// them all serves those more. For ways whose round trip is short beside what is posted ahead, as between devices
    /// of one fabric: a port that shares nothing with them stays busy then.
    #[must_use]
    pub const fn held_window_bytes(window_bytes: u64) -> u64 {
        window_bytes / 2
    }

    /// Whether it may carry one more slice of this kind. One larger than the whole window goes alone. It has to prove
    /// itself after a failure unless it is the `only` rail: then nothing is won by holding back.
    #[must_use]
    pub fn has_room(&self, small: bool, window_bytes: u64, only: bool) -> bool {
        let used = if small { self.small_bytes } else { self.bulk_bytes };
        let window_bytes = if only { window_bytes } else { window_bytes.min(self.bite_bytes) };
        match self.health {
            Health::Paused => false,
            Health::Probing if !only => self.bulk_bytes + self.small_bytes == 0,
            Health::Healthy | Health::Probing => used == 0 || used < window_bytes,
        }
    }

    /// Whether it may carry a whole window: it never failed, or has carried enough since.
    #[must_use]
    pub const fn is_trusted(&self, window_bytes: u64) -> bool {
        self.bite_bytes >= window_bytes
    }

    /// A slice is posted.
    pub fn book(&mut self, bytes: u64, small: bool, now_ns: u64) {
        if small {
            self.small_bytes += bytes;
        } else {
            if self.bulk_bytes == 0 {
                self.rate.begin(now_ns);
            }
            self.bulk_bytes += bytes;
        }
    }

    /// A slice is not posted any more, whatever became of it.
    pub const fn unbook(&mut self, bytes: u64, small: bool) {
        if small {
            self.small_bytes -= bytes;
        } else {
            self.bulk_bytes -= bytes;
        }
    }

    /// A slice that was unbooked just now had moved `bytes`.
    pub fn done(&mut self, bytes: u64, small: bool, posted_ns: u64, now_ns: u64) {
        self.all_done(1, bytes, small, posted_ns, now_ns);
    }

    /// The same for so many slices, one at least, that together moved `bytes`, were posted together and are done
    /// together. It leaves the rail exactly as if each had been told of by itself.
    pub fn all_done(&mut self, slices: u64, bytes: u64, small: bool, posted_ns: u64, now_ns: u64) {
        let silence_ns = now_ns.saturating_sub(self.heard_ns.max(posted_ns));
        self.heard_ns = now_ns;
        self.silence_ns = self.silence_ns.max(silence_ns);
        // Forgotten slowly: what comes at once after a silence says nothing against it.
        self.heard_slices += slices;
        while self.heard_slices >= SILENCE_SLICES {
            self.heard_slices -= SILENCE_SLICES;
            self.silence_ns -= self.silence_ns / SILENCE_PART;
        }
        if !small || self.bulk_bytes > 0 {
            self.rate.served(slices, bytes, posted_ns, now_ns);
        } else {
            // Only the last of them leaves the rail empty.
            self.rate.served_small(slices, bytes, posted_ns, self.small_bytes == 0, now_ns);
        }
        if !small {
            self.carried_bytes = self.carried_bytes.saturating_add(bytes);
        }
        if self.bite_bytes != u64::MAX {
            self.bite_bytes = self.bite_bytes.saturating_add(bytes);
            // Beyond any window: it has earned its trust back.
            if self.bite_bytes > 1 << 30 {
                self.bite_bytes = u64::MAX;
            }
        }
        self.step(HealthEvent::Served);
    }

    /// Its last lane is lost, or could not be had; it may be tried again at `retry_ns`.
    pub fn failed(&mut self, retry_ns: u64, now_ns: u64) {
        self.step(HealthEvent::Failed);
        self.paused_until_ns = retry_ns;
        self.bite_bytes = BITE_BYTES;
        self.rate.interrupted(now_ns);
    }

    /// A lane of it is connected and welcomed.
    pub fn connected(&mut self) {
        self.step(HealthEvent::Connected);
    }

    fn step(&mut self, event: HealthEvent) {
        match self.health.on(event) {
            Step::Moved(to) => self.health = to,
            Step::Stale => {}
            Step::Illegal => unreachable!("the machine is total"),
        }
    }
}

/// How far the last of some rails is with its part, of those that are at least half as fast as the fastest. Who is more
/// than a window ahead of it gets a smaller one for a while ([`Rail::held_window_bytes`]).
#[must_use]
pub fn share_behind<'a>(rails: impl Iterator<Item = &'a Rail> + Clone) -> f64 {
    let rate = |rail: &Rail| rail.rate.bytes_per_ns();
    let fastest = rails.clone().map(rate).fold(0.0, f64::max);
    let alike = rails.filter(|rail| rate(rail) * 2.0 >= fastest);
    alike.map(Rail::share_ns).fold(f64::INFINITY, f64::min)
}

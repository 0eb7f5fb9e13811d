//! Rail: one network path from a port of ours to a port of the peer, with its rate, load and health.
//!
//! Its connections (lanes) are equivalent. A failed rail is paused until one of its lanes is connected again, then
//! probed with one slice, and then its window grows like that of a new connection: by the bytes that it has carried. So
//! a flapping rail never holds much, and a recovered one is back at full rate in a few round trips.

use kvplane_proto::states::Step;

use super::rate::Rate;

kvplane_proto::state_machine! {
    /// Health of a rail.
    states Health {
        /// In use.
        Healthy,
        /// The last lane was lost: nothing is sent until one is connected again.
        Paused,
        /// A lane is connected again: one slice at a time, until one completes.
        Probing,
    }

    /// Event that affects the health of a rail.
    events HealthEvent {
        /// The last lane was lost, or could not be connected.
        Failed,
        /// A lane was welcomed.
        Connected,
        /// A slice on the rail completed.
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

/// Factor on predicted times, by the NUMA distance of the port: same node, other node, unknown or far.
const TIER_PENALTY: [f64; 3] = [1.0, 5.0, 10.0];
/// Decay of the longest silence: a sixteenth every 64 slices, so that most of it is gone after a thousand.
const SILENCE_SLICES: u64 = 64;
const SILENCE_PART: u64 = 16;
/// Most by which the window of a rail is enlarged next to rails with larger ones.
const EVEN_MOST: u64 = 4;
/// Window of a rail directly after its probe.
const BITE_BYTES: u64 = 256 << 10;

/// One network path to a peer.
#[derive(Clone, Debug)]
pub struct Rail {
    rate: Rate,
    penalty: f64,
    health: Health,
    bulk_bytes: u64,
    small_bytes: u64,
    /// Bytes of large slices completed since the last [`Self::start_share`].
    carried_bytes: u64,
    /// Window after a failure, which grows; `u64::MAX` if the rail never failed or is fully trusted again.
    bite_bytes: u64,
    paused_until_ns: u64,
    /// Longest recent silence with work in flight, and the time of the last completion.
    silence_ns: u64,
    heard_ns: u64,
    /// Slices completed since the last decay of the silence.
    heard_slices: u64,
}

impl Rail {
    /// Creates a rail over a port of this speed, at this NUMA distance from the memory (0 near, 1 other node, 2 far).
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

    /// Returns the health.
    #[must_use]
    pub const fn health(&self) -> Health {
        self.health
    }

    /// Returns the measured rate and latency.
    #[must_use]
    pub const fn rate(&self) -> &Rate {
        &self.rate
    }

    /// Returns the bytes in flight: of large slices, of small ones.
    #[must_use]
    pub const fn inflight_bytes(&self) -> (u64, u64) {
        (self.bulk_bytes, self.small_bytes)
    }

    /// Returns the longest recent silence with work in flight. Slow rails report many slices at once.
    #[must_use]
    pub const fn silence_ns(&self) -> u64 {
        self.silence_ns
    }

    /// Records that the rail was given up after such a silence. If it was slow rather than dead, it gets more time when
    /// it is back.
    pub fn gave_up(&mut self, silent_ns: u64) {
        self.silence_ns = self.silence_ns.max(silent_ns);
    }

    /// Returns true if slices may be assigned to it: it is not paused, or its pause is over and it may be retried.
    #[must_use]
    pub fn is_hopeful(&self, now_ns: u64) -> bool {
        self.health != Health::Paused || now_ns >= self.paused_until_ns
    }

    /// Returns the time at which its pause is over.
    #[must_use]
    pub const fn paused_until_ns(&self) -> u64 {
        self.paused_until_ns
    }

    /// Predicts the time to complete a slice of `bytes` posted now, from now, with the distance penalty. A small slice
    /// shares the rail with bulk instead of waiting for its end.
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

    /// Returns the window of large slices in bytes, for `ahead_ns` of work beyond a slice's own time; at least
    /// `least_bytes`.
    #[must_use]
    pub fn window_bytes(&self, ahead_ns: u64, least_bytes: u64) -> u64 {
        let window = self.rate.bytes_per_ns() * (ahead_ns as f64 + self.rate.base_ns());
        (window as u64).max(least_bytes)
    }

    /// Converts a window to nanoseconds of work at the port's stated speed.
    #[must_use]
    pub fn window_ns(&self, window_bytes: u64) -> f64 {
        window_bytes as f64 / self.rate.stated()
    }

    /// Returns the window next to other rails, the widest of which has `widest_ns` ([`Self::window_ns`]): as wide, by
    /// this rail's own stated speed. Ports that are driven by the same cores, or share a bus, divide these in
    /// proportion to the work posted on each; with windows by measured rates alone, a rail that was ahead once would
    /// stay ahead. A rail that is really slower gets at most a few times its own window.
    #[must_use]
    pub fn even_window_bytes(&self, window_bytes: u64, widest_ns: f64) -> u64 {
        let even = (widest_ns * self.rate.stated()) as u64;
        even.clamp(window_bytes, window_bytes.saturating_mul(EVEN_MOST))
    }

    /// Returns its share of the work of this rail and its neighbours, in nanoseconds at its stated speed: the bytes
    /// carried since [`Self::start_share`], and those in flight.
    #[must_use]
    pub fn share_ns(&self) -> f64 {
        (self.carried_bytes + self.bulk_bytes) as f64 / self.rate.stated()
    }

    /// Restarts the share at the bytes in flight.
    pub const fn start_share(&mut self) {
        self.carried_bytes = 0;
    }

    /// Returns the window of a rail that is ahead of neighbours of about the same speed ([`share_behind`]): half, so
    /// that their common bottleneck serves the neighbours more. For paths whose round trip is short compared to the
    /// work posted ahead, as between devices of one fabric: there a port without a common bottleneck stays busy.
    #[must_use]
    pub const fn held_window_bytes(window_bytes: u64) -> u64 {
        window_bytes / 2
    }

    /// Returns true if it has room for one more slice of this size class. A slice larger than the whole window goes
    /// alone. After a failure the rail has to prove itself, unless it is the `only` one: then holding back gains
    /// nothing.
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

    /// Returns true if it has regained its full window: it never failed, or has carried enough since.
    #[must_use]
    pub const fn is_trusted(&self, window_bytes: u64) -> bool {
        self.bite_bytes >= window_bytes
    }

    /// Books a posted slice.
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

    /// Unbooks a slice that is no longer in flight, whatever its outcome.
    pub const fn unbook(&mut self, bytes: u64, small: bool) {
        if small {
            self.small_bytes -= bytes;
        } else {
            self.bulk_bytes -= bytes;
        }
    }

    /// Reports the completion of a slice of `bytes` that was just unbooked.
    pub fn done(&mut self, bytes: u64, small: bool, posted_ns: u64, now_ns: u64) {
        self.all_done(1, bytes, small, posted_ns, now_ns);
    }

    /// Reports the completion of at least one slice: `slices` slices of `bytes` in total, posted together and completed
    /// together. The resulting state is exactly that after reporting each separately.
    pub fn all_done(&mut self, slices: u64, bytes: u64, small: bool, posted_ns: u64, now_ns: u64) {
        let silence_ns = now_ns.saturating_sub(self.heard_ns.max(posted_ns));
        self.heard_ns = now_ns;
        self.silence_ns = self.silence_ns.max(silence_ns);
        // Decays slowly: a quick completion directly after a silence is no evidence against it.
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
            // Larger than any window: the rail is fully trusted again.
            if self.bite_bytes > 1 << 30 {
                self.bite_bytes = u64::MAX;
            }
        }
        self.step(HealthEvent::Served);
    }

    /// Reports that its last lane was lost, or could not be connected; it may be retried at `retry_ns`.
    pub fn failed(&mut self, retry_ns: u64, now_ns: u64) {
        self.step(HealthEvent::Failed);
        self.paused_until_ns = retry_ns;
        self.bite_bytes = BITE_BYTES;
        self.rate.interrupted(now_ns);
    }

    /// Reports that one of its lanes is connected and welcomed.
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

/// Returns the least share of those rails that are at least half as fast as the fastest. A rail more than a window
/// ahead of it gets a smaller window for a while ([`Rail::held_window_bytes`]).
#[must_use]
pub fn share_behind<'a>(rails: impl Iterator<Item = &'a Rail> + Clone) -> f64 {
    let rate = |rail: &Rail| rail.rate.bytes_per_ns();
    let fastest = rails.clone().map(rate).fold(0.0, f64::max);
    let alike = rails.filter(|rail| rate(rail) * 2.0 >= fastest);
    alike.map(Rail::share_ns).fold(f64::INFINITY, f64::min)
}

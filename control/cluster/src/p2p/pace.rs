//! Typical duration of fetches in a swarm, and the limits that follow from it.

use super::member::MovingAverage;

/// Range of the concurrent fetches of a source and of a receiver; the maximum is for very short fetches.
const PLACES: std::ops::RangeInclusive<u64> = 3..=16;
/// Total duration of the concurrent fetches of a member: short fetches are pipelined, so that the next grant arrives in
/// time.
const AHEAD_NS: u64 = 10_000_000;
/// Assumed duration of a fetch before any has been measured.
const UNKNOWN_NS: u64 = 500_000_000;
/// Multiple of the typical duration beyond which a member is slow.
const SLOW: u64 = 3;

/// Typical duration of fetches, and of one fetch without concurrent ones.
#[derive(Debug, Default)]
pub(super) struct Pace {
    typical: MovingAverage,
    alone: MovingAverage,
}

impl Pace {
    /// Notes the duration of a fetch, and the number of concurrent fetches of its receiver.
    pub(super) fn learn(&mut self, took_ns: u64, along: u32) {
        self.typical.learn(took_ns);
        self.alone.learn(took_ns / u64::from(along.max(1)));
    }

    /// Returns the typical duration of a fetch.
    pub(super) fn usual_ns(&self) -> u64 {
        self.typical.ns().unwrap_or(UNKNOWN_NS)
    }

    /// Returns true if a member is slow whose fetches take `took_ns`.
    pub(super) fn is_slow(&self, took_ns: Option<u64>) -> bool {
        matches!((took_ns, self.typical.ns()), (Some(took), Some(usual)) if took > SLOW * usual)
    }

    /// Returns the number of concurrent fetches of each receiver and of each source.
    pub(super) fn places(&self) -> u32 {
        let ahead = self.alone.ns().map_or(0, |alone_ns| AHEAD_NS / alone_ns);
        (ahead + 2).clamp(*PLACES.start(), *PLACES.end()) as u32
    }
}

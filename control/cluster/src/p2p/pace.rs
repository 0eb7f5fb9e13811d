//! How long fetches take in a swarm, and what follows from that.

use super::member::Typical;

/// Places of a source and of a receiver: at least, and at most where shards are fetched in no time.
const PLACES: std::ops::RangeInclusive<u64> = 3..=16;
/// A shard that takes less than this is fetched along with others, so that the next grant is there in time.
const AHEAD_NS: u64 = 10_000_000;
/// How long a fetch takes where nothing is known.
const UNKNOWN_NS: u64 = 500_000_000;
/// A member is slow that takes so many times as long as is usual.
const SLOW: u64 = 3;

/// How long fetches take, and how long one would take by itself.
#[derive(Debug, Default)]
pub(super) struct Pace {
    typical: Typical,
    alone: Typical,
}

impl Pace {
    /// A fetch took so long, along with others at the same receiver.
    pub(super) fn learn(&mut self, took_ns: u64, along: u32) {
        self.typical.learn(took_ns);
        self.alone.learn(took_ns / u64::from(along.max(1)));
    }

    /// How long a fetch takes.
    pub(super) fn usual_ns(&self) -> u64 {
        self.typical.ns().unwrap_or(UNKNOWN_NS)
    }

    /// Whether somebody is slow whose fetches take so long.
    pub(super) fn is_slow(&self, took_ns: Option<u64>) -> bool {
        matches!((took_ns, self.typical.ns()), (Some(took), Some(usual)) if took > SLOW * usual)
    }

    /// Fetches at a time, of each receiver and of each source.
    pub(super) fn places(&self) -> u32 {
        let ahead = self.alone.ns().map_or(0, |alone_ns| AHEAD_NS / alone_ns);
        (ahead + 2).clamp(*PLACES.start(), *PLACES.end()) as u32
    }
}

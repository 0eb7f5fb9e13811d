//! Policies of demotion and promotion: decisions without effects.

use kvplane_proto::Digest;
use kvplane_proto::message::PutAck;

/// Time at which an object is written to the SSD.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WritePolicy {
    /// At commit (write-through).
    Through,
    /// Once it was put or read this many times lately: an object that is never read again is not written.
    Selective {
        /// Number of puts and gets; 2 is the second.
        times: u8,
    },
    /// After a time in memory, or when the backlog is large (write-back). An object that is removed before is never
    /// written. No object leaves memory unwritten, except after the device failed to write it repeatedly.
    Back {
        /// Longest time in memory, in nanoseconds.
        within_ns: u64,
    },
}

/// Policy of tiering.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierPolicy {
    /// Time at which an object is written.
    pub write: WritePolicy,
    /// Default acknowledgement level of a put whose object is written at commit.
    pub ack: PutAck,
    /// Puts and gets that an object must have had lately to stay in memory after it was read from the SSD; 1 keeps
    /// every object.
    pub promote_times: u8,
    /// Part of the pool that may be pinned by the backlog, in percent. Beyond it, puts of objects that must be written
    /// are refused as busy, and their clients retry them: backpressure. Only the selective policy leaves objects
    /// unwritten instead, as it promises no object to the SSD.
    pub backlog_percent: u8,
    /// Part of the pool that may be filled by prefetched objects, in percent. 0 turns prefetching off.
    pub prefetch_percent: u8,
    /// True if an exists request prefetches its objects by default.
    pub prefetch_on_exists: bool,
    /// Budget of bytes that may be written to the SSD in a day; 0 for no limit. Objects that were promised to be on the
    /// SSD are written regardless.
    pub bytes_per_day: u64,
    /// Rate at which the records on the SSD are scrubbed in the background, in bytes a second; 0 turns scrubbing off.
    pub scrub_bytes_per_s: u64,
}

impl Default for TierPolicy {
    fn default() -> Self {
        Self {
            write: WritePolicy::Through,
            ack: PutAck::Memory,
            promote_times: 1,
            backlog_percent: 25,
            prefetch_percent: 10,
            prefetch_on_exists: false,
            bytes_per_day: 0,
            scrub_bytes_per_s: 0,
        }
    }
}

impl TierPolicy {
    /// Returns the acknowledgement level of a put that named this level, or none.
    pub(super) fn ack_of(&self, asked: Option<PutAck>) -> PutAck {
        asked.unwrap_or(self.ack)
    }

    /// Returns true if an object must be written, by its put's level: its put then waits for room in the backlog,
    /// whatever its reply waits for. An object that was acknowledged from memory and then not queued for the SSD would
    /// be lost when it is evicted.
    pub(super) fn must_write(&self, asked: Option<PutAck>) -> bool {
        self.ack_of(asked) != PutAck::Memory || !matches!(self.write, WritePolicy::Selective { .. })
    }
}

/// Counters of the sketch, of one byte each.
const COUNTERS: usize = 1 << 16;
/// Largest value of a counter.
const MOST: u8 = 15;

/// Estimate of how often each object was put or read lately, never too low: two counters for each object in a table of
/// fixed size that all objects share. All counters are halved now and then, so that old accesses are forgotten.
///
/// A count-min sketch with ageing, as TinyLFU uses it (Einziger, Friedman, Manes, 2017).
#[derive(Debug)]
pub(in crate::service) struct Frequency {
    counters: Vec<u8>,
    seen: usize,
}

impl Frequency {
    pub(in crate::service) fn new() -> Self {
        Self { counters: vec![0; COUNTERS], seen: 0 }
    }

    /// Counts an access; returns the new estimate.
    pub(in crate::service) fn see(&mut self, digest: Digest) -> u8 {
        let [one, other] = Self::places(digest);
        let count = self.counters[one].min(self.counters[other]).saturating_add(1).min(MOST);
        // Only the lower of the two is certainly too low.
        self.counters[one] = self.counters[one].max(count);
        self.counters[other] = self.counters[other].max(count);
        self.seen += 1;
        if self.seen == 4 * COUNTERS {
            self.seen = 0;
            self.counters.iter_mut().for_each(|counter| *counter /= 2);
        }
        count
    }

    /// Returns the estimate for an object.
    pub(super) fn estimate(&self, digest: Digest) -> u8 {
        let [one, other] = Self::places(digest);
        self.counters[one].min(self.counters[other])
    }

    fn places(digest: Digest) -> [usize; 2] {
        let mixed = digest.low().wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (digest.0 >> 64) as u64;
        [(mixed >> 48) as usize % COUNTERS, (mixed >> 16) as usize % COUNTERS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_is_never_too_low_and_ages() {
        let mut frequency = Frequency::new();
        let key = |number: u64| Digest::of(b"", &number.to_le_bytes());
        assert_eq!((1..=20).map(|_| frequency.see(key(1))).max(), Some(MOST));
        let once_seen = (2..1002).filter(|number| frequency.see(key(*number)) > 1).count();
        assert!(once_seen < 50, "{once_seen} of 1000 are mistaken for others");
        (0..4 * COUNTERS as u64).for_each(|number| {
            frequency.see(key(10_000 + number % 7));
        });
        assert!(frequency.see(key(1)) <= MOST / 2 + 1, "half is forgotten");
    }
}

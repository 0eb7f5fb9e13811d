//! What goes to the SSD and what comes back: decisions without effects.

use kvplane_proto::Digest;
use kvplane_proto::message::PutAck;

/// When an object is written to the SSD.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WritePolicy {
    /// As soon as it is put.
    Through,
    /// When it was put or asked for so often lately: what nobody asks for again is never written.
    Selective {
        /// How often: 2 is the second time.
        times: u8,
    },
    /// When it has been in memory for a while, or there is much that waits. What is removed before is never written.
    /// Nothing leaves memory unwritten but what the device failed to take time and again.
    Back {
        /// How long at the most, in nanoseconds.
        within_ns: u64,
    },
}

/// How memory and SSD work together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierPolicy {
    /// When an object is written.
    pub write: WritePolicy,
    /// When a put of an object that is written at once is answered, unless the put says.
    pub ack: PutAck,
    /// How often an object must have been asked for lately to stay in memory after it was read from the SSD: 1 keeps
    /// everything.
    pub promote_times: u8,
    /// How much of the pool may be held for objects that wait to be written, in percent. Beyond it, puts of objects
    /// that must be written are refused as busy, and their clients retry them: backpressure. Only the selective policy
    /// leaves objects unwritten instead, as it promises no object to the SSD.
    pub backlog_percent: u8,
    /// How much of the pool may be filled by objects that are prefetched, in percent. 0: nothing is prefetched.
    pub prefetch_percent: u8,
    /// Whether objects are prefetched because somebody asked whether they exist, and did not say.
    pub prefetch_on_exists: bool,
    /// Bytes that may be written to the SSD in a day; 0 for as many as there are. What was promised to be there is
    /// written all the same.
    pub bytes_per_day: u64,
    /// How fast the records on the SSD are checked in the background, in bytes a second; 0 for not at all.
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
    /// What a put waits for that asked for this.
    pub(super) fn ack_of(&self, asked: Option<PutAck>) -> PutAck {
        asked.unwrap_or(self.ack)
    }

    /// Whether an object whose put asked for this must be written: then its put waits for room in the backlog, whatever
    /// its answer waits for. An object that was acknowledged from memory and then not queued for the SSD would be lost
    /// with the next one that needs its room.
    pub(super) fn must_write(&self, asked: Option<PutAck>) -> bool {
        self.ack_of(asked) != PutAck::Memory || !matches!(self.write, WritePolicy::Selective { .. })
    }
}

/// Counters of the sketch; at a byte each.
const COUNTERS: usize = 1 << 16;
/// The most that one counter says.
const MOST: u8 = 15;

/// How often each object was put or asked for lately: an estimate that is never too low, from two counters in a table
/// of fixed size that all objects share. All counters are halved now and then, so that what was is forgotten.
///
/// A count-min sketch with ageing, as TinyLFU uses it (Einziger, Friedman, Manes, 2017).
#[derive(Debug)]
pub(super) struct Frequency {
    counters: Vec<u8>,
    seen: usize,
}

impl Frequency {
    pub(super) fn new() -> Self {
        Self { counters: vec![0; COUNTERS], seen: 0 }
    }

    /// Once more; returns how often by now.
    pub(super) fn see(&mut self, digest: Digest) -> u8 {
        let [one, other] = Self::places(digest);
        let count = self.counters[one].min(self.counters[other]).saturating_add(1).min(MOST);
        // Only the lower of the two is wrong for certain.
        self.counters[one] = self.counters[one].max(count);
        self.counters[other] = self.counters[other].max(count);
        self.seen += 1;
        if self.seen == 4 * COUNTERS {
            self.seen = 0;
            self.counters.iter_mut().for_each(|counter| *counter /= 2);
        }
        count
    }

    /// How often an object was seen.
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
        let strangers = (2..1002).filter(|number| frequency.see(key(*number)) > 1).count();
        assert!(strangers < 50, "{strangers} of 1000 are mistaken for others");
        (0..4 * COUNTERS as u64).for_each(|number| {
            frequency.see(key(10_000 + number % 7));
        });
        assert!(frequency.see(key(1)) <= MOST / 2 + 1, "half is forgotten");
    }
}

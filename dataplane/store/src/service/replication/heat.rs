//! Detection of hot objects: objects with so much read bandwidth that they are to be replicated.
//!
//! A get counts its bytes and a constant for its own cost. After every interval of so many bytes, of random length so
//! that objects read in turn do not stay in step with it, the object being read is a sample, so that most gets cost an
//! addition. The samples of a second are counted by Misra and Gries' "Finding repeated elements" (Science of Computer
//! Programming 2, 1982), whose counts are never too high, however many objects there are.

use kvplane_proto::Digest;

/// Cost of a get beside its bytes, in bytes that could be sent meanwhile.
const GET_WEIGHT: u64 = 8 << 10;
/// Samples in a second that make an object hot.
const SAMPLES: u32 = 64;
/// Objects that are counted: every object with at least 1/64 of all samples is among them.
const COUNTED: usize = 64;
/// Length of a window of samples.
const WINDOW_NS: u64 = 1_000_000_000;

/// Counter of the objects with most read bandwidth.
#[derive(Debug, Default)]
pub(super) struct Heat {
    /// Read bandwidth from which an object is hot, in bytes a second; 0 for never.
    rate: u64,
    /// Bytes left before the next sample.
    credit: u64,
    /// State of the random generator: xorshift, never 0.
    chance: u64,
    counted: Vec<(Digest, u32)>,
    began_ns: u64,
}

impl Heat {
    /// Sets the read bandwidth from which an object is hot; 0 for never.
    pub(super) fn set_rate(&mut self, bytes_per_s: u64) {
        *self = Self { rate: bytes_per_s, chance: 0x9e37_79b9_7f4a_7c15, ..Self::default() };
        self.credit = self.next_credit();
    }

    /// Counts a get of this many bytes. Returns true if the object has become hot: at most once in a second for each
    /// object.
    #[inline]
    pub(super) fn asked(&mut self, digest: Digest, bytes: u64, now_ns: u64) -> bool {
        let weight = bytes.saturating_add(GET_WEIGHT);
        if self.rate == 0 || weight <= self.credit {
            self.credit = self.credit.saturating_sub(weight);
            return false;
        }
        // A get that is longer than several intervals counts as several samples.
        let beyond = weight - self.credit;
        let samples = u32::try_from(1 + beyond / self.interval()).unwrap_or(u32::MAX);
        self.credit = self.next_credit();
        self.sample(digest, samples, now_ns)
    }

    fn interval(&self) -> u64 {
        (self.rate / u64::from(SAMPLES)).max(1)
    }

    /// Uniform between 0 and two intervals.
    fn next_credit(&mut self) -> u64 {
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 7;
        self.chance ^= self.chance << 17;
        self.chance % (2 * self.interval())
    }

    fn sample(&mut self, digest: Digest, samples: u32, now_ns: u64) -> bool {
        if now_ns.saturating_sub(self.began_ns) >= WINDOW_NS {
            self.counted.clear();
            self.began_ns = now_ns;
        }
        if let Some((_, count)) = self.counted.iter_mut().find(|(counted, _)| *counted == digest) {
            let before = *count;
            *count = before.saturating_add(samples);
            return before < SAMPLES && *count >= SAMPLES;
        }
        if self.counted.len() < COUNTED {
            self.counted.push((digest, samples));
            return samples >= SAMPLES;
        }
        // All counts are reduced by the new one's samples, or by the smallest count, which makes room.
        let least = self.counted.iter().map(|(_, count)| *count).min().unwrap_or(0).min(samples);
        self.counted.iter_mut().for_each(|(_, count)| *count -= least);
        self.counted.retain(|(_, count)| *count > 0);
        if samples > least {
            self.counted.push((digest, samples - least));
            return samples - least >= SAMPLES;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RATE: u64 = 64 << 20;

    fn heat() -> Heat {
        let mut heat = Heat::default();
        heat.set_rate(RATE);
        heat
    }

    #[test]
    fn an_object_read_faster_than_the_rate_becomes_hot_once_a_second() {
        let mut heat = heat();
        let hot = |heat: &mut Heat, from_ns: u64, pause_ns: u64| {
            (0..2000).filter(|at| heat.asked(Digest(7), 56 << 10, from_ns + at * pause_ns)).count()
        };
        // 64 KiB each, with the constant cost of a get: 2,000 a second are twice the rate, 500 are half of it.
        assert_eq!(hot(&mut heat, 0, 500_000), 1);
        assert_eq!(hot(&mut heat, 10_000_000_000, 2_000_000), 0);
        assert_eq!(hot(&mut heat, 20_000_000_000, 500_000), 1);
        heat.set_rate(0);
        assert_eq!(hot(&mut heat, 30_000_000_000, 1), 0);
    }

    #[test]
    fn a_single_very_large_get_makes_an_object_hot() {
        let mut heat = heat();
        assert!(heat.asked(Digest(1), 2 * RATE, 0));
        assert!(!heat.asked(Digest(2), RATE / 2, 0));
        assert!(heat.asked(Digest(3), u64::MAX, 0));
    }

    proptest! {
        /// An object read at less than half the rate is never hot, however many objects there are; one read well above
        /// the rate, with a large part of all bytes, is hot.
        #[test]
        fn only_objects_with_much_read_bandwidth_are_hot(
            gets in prop::collection::vec((0u8..200, 0u64..(1 << 20)), 1..2000),
            favourite in 0u8..4,
        ) {
            let mut heat = heat();
            let (mut given, mut found) = ([0u64; 256], [false; 256]);
            for (at, (key, bytes)) in gets.into_iter().enumerate() {
                let key = if at % 4 == 0 { favourite } else { key };
                given[usize::from(key)] += bytes + GET_WEIGHT;
                found[usize::from(key)] |= heat.asked(Digest(key.into()), bytes, 1);
            }
            let all: u64 = given.iter().sum();
            for (given, found) in given.into_iter().zip(found) {
                prop_assert!(!found || given > RATE / 2, "{given} is hot");
                prop_assert!(found || given < 2 * RATE + all / 16, "{given} of {all} is not");
            }
        }
    }
}

//! Hot objects: the objects with most gets, for operators.
//!
//! One get in [`EACH`] is a sample, so that most gets cost a subtraction; the distance is random, so that objects read
//! in turn do not stay in step with it. Samples of a window are counted by Misra and Gries' "Finding repeated elements"
//! (Science of Computer Programming 2, 1982): counts are never too high, and an object with a large share of all gets
//! is among them, however many objects there are.

use kvplane_proto::Digest;

/// Gets that a sample stands for, on average.
const EACH: u64 = 16;
/// Objects that are counted: every object with at least 1/64 of all samples is among them.
const COUNTED: usize = 64;
/// Length of a window of samples.
const WINDOW_NS: u64 = 10_000_000_000;
/// Most objects that are reported: the hottest.
pub const HOT_KEPT: usize = 16;

/// Object with many gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HotObject {
    /// Digest of the object.
    pub digest: Digest,
    /// Gets of it in the window, estimated from samples.
    pub gets: u64,
    /// Bytes of those gets.
    pub bytes: u64,
}

/// Hottest objects.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HotObjects {
    /// Time over which they were counted, in nanoseconds.
    pub over_ns: u64,
    /// The hottest first, at most [`HOT_KEPT`].
    pub objects: Vec<HotObject>,
}

/// Counter of hot objects.
#[derive(Debug)]
pub(in crate::service) struct Popular {
    /// Gets until the next sample.
    left: u64,
    /// State of the random generator: xorshift, never 0.
    chance: u64,
    /// Samples of the current window, and their bytes.
    counted: Vec<(Digest, u64, u64)>,
    began_ns: u64,
    /// Result of the previous window.
    before: HotObjects,
}

impl Default for Popular {
    fn default() -> Self {
        let before = HotObjects::default();
        Self { left: 0, chance: 0x9e37_79b9_7f4a_7c15, counted: Vec::with_capacity(COUNTED), began_ns: 0, before }
    }
}

impl Popular {
    /// Counts a get of this many bytes of an object.
    #[inline]
    pub(in crate::service) fn asked(&mut self, digest: Digest, bytes: u64, now_ns: u64) {
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => self.sample(digest, bytes, now_ns),
        }
    }

    #[cold]
    fn sample(&mut self, digest: Digest, bytes: u64, now_ns: u64) {
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 7;
        self.chance ^= self.chance << 17;
        // Uniform between 0 and twice the average distance.
        self.left = self.chance % (2 * EACH - 1);
        self.roll(now_ns);
        if let Some((_, samples, all)) = self.counted.iter_mut().find(|(counted, ..)| *counted == digest) {
            (*samples, *all) = (*samples + 1, all.saturating_add(bytes));
        } else if self.counted.len() < COUNTED {
            self.counted.push((digest, 1, bytes));
        } else {
            // Decrements all counts, which makes room for the next object.
            for (_, samples, all) in &mut self.counted {
                *all -= *all / *samples;
                *samples -= 1;
            }
            self.counted.retain(|(_, samples, _)| *samples > 0);
        }
    }

    /// Begins a new window if the current one is over.
    fn roll(&mut self, now_ns: u64) {
        let since_ns = now_ns.saturating_sub(self.began_ns);
        if since_ns >= WINDOW_NS {
            // After more than two windows there were no gets for a while.
            self.before = if since_ns < 2 * WINDOW_NS { self.figures(now_ns) } else { HotObjects::default() };
            self.counted.clear();
            self.began_ns = now_ns;
        }
    }

    fn figures(&self, now_ns: u64) -> HotObjects {
        let mut objects: Vec<HotObject> = self
            .counted
            .iter()
            .map(|&(digest, samples, bytes)| {
                let times = |samples: u64| samples.saturating_mul(EACH);
                HotObject { digest, gets: times(samples), bytes: times(bytes) }
            })
            .collect();
        objects.sort_by_key(|one| (std::cmp::Reverse(one.gets), one.digest));
        objects.truncate(HOT_KEPT);
        HotObjects { over_ns: now_ns.saturating_sub(self.began_ns).max(1), objects }
    }

    /// Returns the hottest objects of the previous window; of the current one if it is old enough to be meaningful, or
    /// the first.
    pub(super) fn hottest(&self, now_ns: u64) -> HotObjects {
        let since_ns = now_ns.saturating_sub(self.began_ns);
        if since_ns >= 2 * WINDOW_NS {
            return HotObjects::default();
        }
        let tells = since_ns >= WINDOW_NS / 2 || self.before.objects.is_empty();
        if tells { self.figures(now_ns) } else { self.before.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn the_hottest_objects_come_first_and_expire_without_gets() {
        let mut popular = Popular::default();
        for at in 0..64_000u64 {
            // Half of the gets for one object, a quarter for another, and the rest for a thousand others.
            let key = if at % 2 == 0 {
                1
            } else if at % 4 == 1 {
                2
            } else {
                100 + at % 1000
            };
            popular.asked(Digest(key.into()), 100, SECOND_NS);
        }
        let hot = popular.hottest(2 * SECOND_NS);
        assert_eq!(hot.over_ns, 2 * SECOND_NS);
        let [first, second] = [hot.objects[0], hot.objects[1]];
        assert_eq!((first.digest, second.digest), (Digest(1), Digest(2)));
        assert!((25_000..36_000).contains(&first.gets), "{first:?}");
        assert!((11_000..18_000).contains(&second.gets), "{second:?}");
        assert!((first.bytes / 100).abs_diff(first.gets) < 200, "{first:?}");
        // The window is over; its result is reported until the next one is meaningful.
        (0..2).for_each(|_| popular.sample(Digest(7), 1, 11 * SECOND_NS));
        assert_eq!(popular.hottest(12 * SECOND_NS).objects[0].digest, Digest(1));
        assert_eq!(popular.hottest(17 * SECOND_NS).objects[0].digest, Digest(7));
        assert!(popular.hottest(40 * SECOND_NS).objects.is_empty());
    }

    proptest! {
        /// No count exceeds the number of samples, the table is bounded, and every object with a large share of the
        /// samples is in it.
        #[test]
        fn counts_are_never_too_high(keys in prop::collection::vec(0u8..255, 1..3000), favourite in 0u8..255) {
            let mut popular = Popular::default();
            let mut sampled = [0u64; 256];
            for (at, key) in keys.iter().enumerate() {
                let key = if at % 8 == 0 { favourite } else { *key };
                sampled[usize::from(key)] += 1;
                popular.sample(Digest(key.into()), 10, 1);
            }
            prop_assert!(popular.counted.len() <= COUNTED);
            for (digest, samples, bytes) in &popular.counted {
                prop_assert!(*samples <= sampled[digest.0 as usize] && *bytes <= 10 * sampled[digest.0 as usize]);
            }
            let all = keys.len() as u64;
            for (key, samples) in sampled.into_iter().enumerate() {
                let is_there = popular.counted.iter().any(|(digest, ..)| digest.0 as usize == key);
                prop_assert!(is_there || samples <= all / COUNTED as u64 + 1, "{key} has {samples} of {all}");
            }
        }
    }
}

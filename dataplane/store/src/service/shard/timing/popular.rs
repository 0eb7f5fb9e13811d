//! Which objects are asked for most, for people who look.
//!
//! One get in [`EACH`], by chance more or less lest objects that take turns keep step with it, is a sample, so that
//! most gets cost a subtraction. Samples of a while are counted by Misra and Gries' "Finding repeated elements"
//! (Science of Computer Programming 2, 1982): counts are never too high, and whoever has a good share of all is among
//! them, however many objects there are.

use kvplane_proto::Digest;

/// Gets that a sample stands for, on average.
const EACH: u64 = 16;
/// Objects that are counted: one that has a sixty-fourth of all is among them.
const COUNTED: usize = 64;
/// How long samples are counted together.
const WINDOW_NS: u64 = 10_000_000_000;
/// Objects that are told of at most: the hottest.
pub const HOT_KEPT: usize = 16;

/// An object that is asked for much.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HotObject {
    /// Which.
    pub digest: Digest,
    /// Gets that asked for it in that time, as the samples say,
    pub gets: u64,
    /// and the bytes that they asked for.
    pub bytes: u64,
}

/// The objects that were asked for most.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HotObjects {
    /// How long they were counted.
    pub over_ns: u64,
    /// The hottest first, at most [`HOT_KEPT`].
    pub objects: Vec<HotObject>,
}

/// The counting side.
#[derive(Debug)]
pub(in crate::service) struct Popular {
    /// Gets until the next sample.
    left: u64,
    /// Chance: xorshift, never 0.
    chance: u64,
    /// Samples of the current window, and their bytes,
    counted: Vec<(Digest, u64, u64)>,
    began_ns: u64,
    /// and what there was in the one before.
    before: HotObjects,
}

impl Default for Popular {
    fn default() -> Self {
        let before = HotObjects::default();
        Self { left: 0, chance: 0x9e37_79b9_7f4a_7c15, counted: Vec::with_capacity(COUNTED), began_ns: 0, before }
    }
}

impl Popular {
    /// A get asked for so many bytes of an object.
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
        // From none to twice as many between two samples as there are on average.
        self.left = self.chance % (2 * EACH - 1);
        self.roll(now_ns);
        if let Some((_, samples, all)) = self.counted.iter_mut().find(|(counted, ..)| *counted == digest) {
            (*samples, *all) = (*samples + 1, all.saturating_add(bytes));
        } else if self.counted.len() < COUNTED {
            self.counted.push((digest, 1, bytes));
        } else {
            // All counts lose one: then there is room for the next.
            for (_, samples, all) in &mut self.counted {
                *all -= *all / *samples;
                *samples -= 1;
            }
            self.counted.retain(|(_, samples, _)| *samples > 0);
        }
    }

    /// Begins another window where one is over.
    fn roll(&mut self, now_ns: u64) {
        let since_ns = now_ns.saturating_sub(self.began_ns);
        if since_ns >= WINDOW_NS {
            // Nobody has asked for a while where more than two are over.
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

    /// The hottest objects of the window before, or of the current one where that is old enough to tell, or the
    /// first.
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
    fn what_is_asked_for_most_comes_first_and_goes_when_nobody_asks() {
        let mut popular = Popular::default();
        for at in 0..64_000u64 {
            // A half for one object, a quarter for another, and the rest for a thousand others.
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
        // The window is over; what it had is told until the next one tells enough.
        (0..2).for_each(|_| popular.sample(Digest(7), 1, 11 * SECOND_NS));
        assert_eq!(popular.hottest(12 * SECOND_NS).objects[0].digest, Digest(1));
        assert_eq!(popular.hottest(17 * SECOND_NS).objects[0].digest, Digest(7));
        assert!(popular.hottest(40 * SECOND_NS).objects.is_empty());
    }

    proptest! {
        /// No count is above what was sampled, there are never too many, and whoever has a large share of the samples
        /// is among them.
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

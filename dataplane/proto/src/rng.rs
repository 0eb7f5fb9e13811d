//! Seeded randomness as an argument: one seed, many independent streams.
//!
//! Each stream is salted with a name, so that drawing more numbers for the network does not disturb the schedule or the
//! workload of a simulation. The generator is xoshiro256++ (Blackman and Vigna, 2019), seeded through SplitMix64. Not
//! for secrets.

/// A stream of pseudo-random numbers, fixed by its seed and its salt.
#[derive(Clone, Debug)]
pub struct Rng {
    state: [u64; 4],
}

/// Applies one step of SplitMix64, which is also a good 64-bit mixer.
#[must_use]
pub const fn mix64(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// Creates the stream named `salt` of `seed`.
    #[must_use]
    pub fn new(seed: u64, salt: &str) -> Self {
        let mut word = mix64(seed);
        for byte in salt.bytes() {
            word = mix64(word ^ u64::from(byte));
        }
        let mut state = [0; 4];
        for part in &mut state {
            word = mix64(word);
            *part = word;
        }
        Self { state }
    }

    /// Returns the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Returns a number in `0..bound`. The bias is below 2^-32 for the bounds used here (Lemire's multiply-shift).
    ///
    /// # Panics
    /// When `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "the bound of a random number is 0");
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns a number in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns true with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_repeat_and_differ_by_salt() {
        let draw = |salt| {
            let mut rng = Rng::new(42, salt);
            [rng.next_u64(), rng.next_u64(), rng.next_u64()]
        };
        assert_eq!(draw("network"), draw("network"));
        assert_ne!(draw("network"), draw("schedule"));
    }

    #[test]
    fn below_stays_below_and_covers() {
        let mut rng = Rng::new(1, "below");
        let mut seen = [0u32; 10];
        for _ in 0..10_000 {
            seen[rng.below(10) as usize] += 1;
        }
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
    }
}

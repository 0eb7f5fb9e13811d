//! Hash maps for the data path: a cheap hash, with a seed so that peers cannot construct collisions.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

/// Hash map with a small key.
pub(super) type MixedMap<K, V> = HashMap<K, V, MixHasher>;

/// Odd, with bits everywhere: 2^64 divided by the golden ratio, as in Fibonacci hashing (Knuth, volume 3, 6.4).
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// Hasher that mixes the bits of numbers with a seed of its map.
#[derive(Clone)]
pub(super) struct MixHasher {
    seed: u64,
}

impl Default for MixHasher {
    fn default() -> Self {
        Self { seed: RandomState::new().build_hasher().finish() }
    }
}

impl BuildHasher for MixHasher {
    type Hasher = Mixer;

    #[inline]
    fn build_hasher(&self) -> Mixer {
        Mixer(self.seed)
    }
}

/// State of one hash computation.
pub(super) struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64((*byte).into());
        }
    }

    #[inline]
    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        let wide = u128::from(self.0 ^ word) * u128::from(FACTOR);
        self.0 = wide as u64 ^ (wide >> 64) as u64;
    }

    #[inline]
    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn small_keys_spread_and_seeds_differ() {
        let table = MixHasher::default();
        let hashes: HashSet<u64> = (0..4096u32).map(|key| table.hash_one((key, 7u32)) >> 44).collect();
        assert!(hashes.len() > 3500, "{} of 4,096 keys differ in their upper bits", hashes.len());
        assert_ne!(table.hash_one(1u64), MixHasher::default().hash_one(1u64));
    }
}

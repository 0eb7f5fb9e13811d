//! Test pattern that identifies its location: every 8-byte word is a function of a seed and of its own absolute offset.
//!
//! A constant fill cannot tell a block from its neighbour; with this pattern a slice that is stale, misplaced, shifted
//! or from another object is a mismatch at its first word. A word is a Weyl sequence over the word's index, started at
//! the mixed seed, through one bijective round; so within one seed no two words of a 2^64-word stream are equal.
//!
//! The round uses only a 32 by 32 to 64 bit product, shifts and exclusive-or, because those vectorise on every x86-64
//! and arm64 without choosing instructions at run time. The pattern is neither a checksum nor a secret.

use std::fmt;

use kvplane_proto::digest::Digest;
use kvplane_proto::rng::mix64;

/// Odd, so that the Weyl sequence visits every 64-bit number.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const SCRAMBLE: u64 = 0x85eb_ca6b;
const WORD_BYTES: usize = 8;
/// Number of words processed together: wide enough for any vector unit.
const LANES: usize = 8;
const CHUNK_BYTES: usize = LANES * WORD_BYTES;

/// First byte that differs from the pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Absolute offset in the pattern, in bytes.
    pub offset: u64,
    /// Byte of the pattern at this offset.
    pub expected: u8,
    /// Byte that was found.
    pub found: u8,
    /// Number of bytes of the slice that differ.
    pub wrong_bytes: u64,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "byte {} is {:#04x} and should be {:#04x}; {} bytes differ",
            self.offset, self.found, self.expected, self.wrong_bytes
        )
    }
}

impl std::error::Error for Mismatch {}

/// Returns the seed of the pattern of the object named `digest`.
#[must_use]
pub const fn seed_of(digest: Digest) -> u64 {
    mix64(digest.low() ^ mix64((digest.0 >> 64) as u64))
}

/// Applies a bijection of 64 bits: the low half stirs the high half, then the high half the low.
#[inline(always)]
const fn scramble(word: u64) -> u64 {
    let stirred = word ^ (((word & 0xffff_ffff) * SCRAMBLE) << 32);
    stirred ^ (stirred >> 32)
}

/// Returns the first word of the raw sequence of `seed`.
const fn start(seed: u64) -> u64 {
    mix64(seed ^ 0x6b76_706c_616e_6531)
}

#[inline(always)]
const fn word_at(start: u64, index: u64) -> u64 {
    scramble(start.wrapping_add(index.wrapping_mul(STEP)))
}

#[inline(always)]
const fn byte_at(start: u64, offset: u64) -> u8 {
    word_at(start, offset / WORD_BYTES as u64).to_le_bytes()[(offset % WORD_BYTES as u64) as usize]
}

/// Returns the raw sequence of `LANES` words from the word `index` on.
#[inline(always)]
fn lanes_at(start: u64, index: u64) -> [u64; LANES] {
    std::array::from_fn(|lane| start.wrapping_add(index.wrapping_add(lane as u64).wrapping_mul(STEP)))
}

/// Returns the number of bytes before the first whole word of a slice of `len` bytes at `offset`.
fn head_bytes(offset: u64, len: usize) -> usize {
    ((WORD_BYTES as u64 - offset % WORD_BYTES as u64) % WORD_BYTES as u64).min(len as u64) as usize
}

/// Fills `out` with the pattern of `seed` from byte `offset` on. Both may have any alignment.
pub fn fill(seed: u64, offset: u64, out: &mut [u8]) {
    let start = start(seed);
    let (head, body) = out.split_at_mut(head_bytes(offset, out.len()));
    for (at, byte) in head.iter_mut().enumerate() {
        *byte = byte_at(start, offset.wrapping_add(at as u64));
    }
    let body_offset = offset.wrapping_add(head.len() as u64);
    let mut words = lanes_at(start, body_offset / WORD_BYTES as u64);
    let (chunks, tail) = body.as_chunks_mut::<CHUNK_BYTES>();
    for chunk in &mut *chunks {
        for (word, out) in words.iter_mut().zip(chunk.as_chunks_mut::<WORD_BYTES>().0) {
            *out = scramble(*word).to_le_bytes();
            *word = word.wrapping_add(STEP.wrapping_mul(LANES as u64));
        }
    }
    let tail_offset = body_offset.wrapping_add((chunks.len() * CHUNK_BYTES) as u64);
    for (at, byte) in tail.iter_mut().enumerate() {
        *byte = byte_at(start, tail_offset.wrapping_add(at as u64));
    }
}

/// Compares `data` with the pattern of `seed` from byte `offset` on.
///
/// # Errors
/// Returns [`Mismatch`] with the first byte that differs and the number of such bytes.
pub fn check(seed: u64, offset: u64, data: &[u8]) -> Result<(), Mismatch> {
    let start = start(seed);
    let (head, body) = data.split_at(head_bytes(offset, data.len()));
    let body_offset = offset.wrapping_add(head.len() as u64);
    let mut words = lanes_at(start, body_offset / WORD_BYTES as u64);
    let (chunks, tail) = body.as_chunks::<CHUNK_BYTES>();
    // Differences are gathered without a branch per word; only a wrong slice pays for locating the first one.
    let mut difference = [0u64; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            let found = u64::from_le_bytes(chunk.as_chunks::<WORD_BYTES>().0[lane]);
            difference[lane] |= found ^ scramble(words[lane]);
            words[lane] = words[lane].wrapping_add(STEP.wrapping_mul(LANES as u64));
        }
    }
    let tail_offset = body_offset.wrapping_add((chunks.len() * CHUNK_BYTES) as u64);
    let agrees = |part: &[u8], from: u64| {
        part.iter().enumerate().all(|(at, &byte)| byte == byte_at(start, from.wrapping_add(at as u64)))
    };
    if difference.iter().all(|&bits| bits == 0) && agrees(head, offset) && agrees(tail, tail_offset) {
        return Ok(());
    }
    Err(locate(start, offset, data))
}

/// Locates the first difference of a slice that is known to have one.
#[cold]
fn locate(start: u64, offset: u64, data: &[u8]) -> Mismatch {
    let mut first = None;
    let mut wrong_bytes = 0;
    for (at, &found) in data.iter().enumerate() {
        let position = offset.wrapping_add(at as u64);
        let expected = byte_at(start, position);
        if found != expected {
            wrong_bytes += 1;
            first.get_or_insert((position, expected, found));
        }
    }
    let (offset, expected, found) = first.expect("a difference was seen in this very slice");
    Mismatch { offset, expected, found, wrong_bytes }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pattern(seed: u64, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        fill(seed, offset, &mut bytes);
        bytes
    }

    proptest! {
        #[test]
        fn any_part_equals_the_same_part_of_the_whole(
            seed: u64, base in 0u64..1 << 40, from in 0usize..600, len in 0usize..600,
        ) {
            let whole = pattern(seed, base, 1200);
            prop_assert_eq!(&pattern(seed, base + from as u64, len), &whole[from..from + len]);
            prop_assert_eq!(check(seed, base + from as u64, &whole[from..from + len]), Ok(()));
        }

        #[test]
        fn one_flipped_bit_is_found_where_it_is(
            seed: u64, offset in 0u64..1 << 40, len in 1usize..400, at: prop::sample::Index, bit in 0u8..8,
        ) {
            let mut bytes = pattern(seed, offset, len);
            let at = at.index(len);
            let expected = bytes[at];
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(
                check(seed, offset, &bytes),
                Err(Mismatch { offset: offset + at as u64, expected, found: bytes[at], wrong_bytes: 1 })
            );
        }

        #[test]
        fn bytes_from_elsewhere_are_caught(
            seed: u64, other: u64, offset in 0u64..1 << 40, shift in 1u64..1 << 30, len in 16usize..300,
        ) {
            prop_assert!(check(seed, offset + shift, &pattern(seed, offset, len)).is_err());
            prop_assume!(seed != other);
            prop_assert!(check(other, offset, &pattern(seed, offset, len)).is_err());
        }
    }

    #[test]
    fn swapped_words_and_swapped_slices_are_caught() {
        let mut bytes = pattern(7, 0, 4096);
        let (left, right) = bytes.split_at_mut(2048);
        left.swap_with_slice(right);
        assert!(check(7, 0, &bytes).unwrap_err().wrong_bytes > 4000);
        let mut bytes = pattern(7, 0, 64);
        for byte in 0..8 {
            bytes.swap(8 + byte, 16 + byte);
        }
        assert_eq!(check(7, 0, &bytes).unwrap_err().offset / 8, 1);
    }

    #[test]
    fn bytes_are_spread_evenly() {
        let mut counts = [0u32; 256];
        for byte in pattern(1, 0, 256 * 1024) {
            counts[usize::from(byte)] += 1;
        }
        assert!(counts.iter().all(|&count| (850..1200).contains(&count)), "{counts:?}");
    }

    #[test]
    fn seeds_of_digests_use_both_halves() {
        assert_ne!(seed_of(Digest(1)), seed_of(Digest(1 << 64)));
        assert_ne!(seed_of(Digest(1)), seed_of(Digest(2)));
    }

    #[test]
    fn golden_bytes() {
        // A second process may verify the bytes of a first one: the pattern is part of the tools' interface.
        assert_eq!(pattern(42, 0, 8), GOLDEN);
    }
    const GOLDEN: [u8; 8] = [109, 175, 152, 8, 89, 184, 128, 60];
}

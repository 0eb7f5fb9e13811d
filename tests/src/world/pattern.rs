//! Payload pattern that identifies its origin: a function of the object's digest, the write that made it and the
//! offset.
//!
//! A byte of another object, of another write, or of another offset in the same object differs with probability
//! 255/256, so that a few hundred bytes leave no doubt. Objects of a few bytes can be equal by chance; comparisons must
//! allow for that.

use kvplane_proto::Digest;
use kvplane_proto::rng::mix64;

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

const fn word(salt: u64, index: u64) -> [u8; 8] {
    mix64(salt ^ index.wrapping_mul(STEP)).to_le_bytes()
}

const fn salt(digest: Digest, write: usize) -> u64 {
    mix64(digest.low() ^ mix64(write as u64))
}

/// Fills `out` with the bytes of a write.
pub(crate) fn fill(digest: Digest, write: usize, out: &mut [u8]) {
    let salt = salt(digest, write);
    for (index, chunk) in out.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&word(salt, index as u64)[..chunk.len()]);
    }
}

/// Returns the offset of the first byte that differs from the write's.
pub(crate) fn first_difference(digest: Digest, write: usize, bytes: &[u8]) -> Option<usize> {
    let salt = salt(digest, write);
    for (index, chunk) in bytes.chunks(8).enumerate() {
        let expected = word(salt, index as u64);
        if let Some(at) = chunk.iter().zip(expected).position(|(&found, expected)| found != expected) {
            return Some(index * 8 + at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_recognised_and_a_wrong_byte_is_found() {
        let mut bytes = [0; 1003];
        fill(Digest(7), 3, &mut bytes);
        assert_eq!(first_difference(Digest(7), 3, &bytes), None);
        assert_eq!(first_difference(Digest(7), 4, &bytes), Some(0));
        assert_eq!(first_difference(Digest(8), 3, &bytes), Some(0));
        bytes[1001] ^= 1;
        assert_eq!(first_difference(Digest(7), 3, &bytes), Some(1001));
        assert!(first_difference(Digest(7), 3, &bytes[8..]).is_some(), "moved bytes are noticed");
    }
}

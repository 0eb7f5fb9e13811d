//! Objects of tests: their digests and contents.

use kvplane_proto::digest::Digest;

/// Returns digests that agree in their low word.
pub(crate) fn digest(key: u8) -> Digest {
    Digest(u128::from(key) << 64 | 9)
}

/// Returns bytes that depend on their position and on the put that wrote them.
pub(crate) fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (seed.wrapping_mul(31) ^ at.wrapping_mul(7) ^ at >> 8) as u8).collect()
}

/// Object that was committed: its bytes are those of this seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contents {
    pub(crate) seed: u64,
    pub(crate) tail_bytes: u32,
}

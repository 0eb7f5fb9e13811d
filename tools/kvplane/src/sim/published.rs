//! Hit rates by cache size that the Mooncake paper published, for comparison.
//!
//! Figure 9 of "Mooncake: Trading more storage for less computation" (FAST 2025): an LRU cache, hit rates by tokens,
//! read off the drawing. A trace is identified by its numbers of requests and tokens.

use crate::trace::HitCounts;

/// Sizes in tokens that [`figure_9`] has values for.
pub const SIZES: [u64; 10] =
    [10_000, 100_000, 1_000_000, 2_000_000, 4_000_000, 5_000_000, 8_000_000, 10_000_000, 50_000_000, 100_000_000];

/// (requests, tokens of all prompts, published rates at [`SIZES`]).
const FIGURE_9: [(usize, u64, [f64; SIZES.len()]); 2] = [
    (12_031, 144_793_823, [0.045, 0.073, 0.087, 0.120, 0.215, 0.247, 0.300, 0.326, 0.398, 0.401]),
    (3_993, 61_194_628, [0.000, 0.012, 0.146, 0.234, 0.381, 0.435, 0.545, 0.589, 0.658, 0.658]),
];

/// Returns the published hit rate by tokens of a cache of `tokens` on this trace; `None` for other traces and sizes.
#[must_use]
pub fn figure_9(requests: usize, whole: HitCounts, tokens: u64) -> Option<f64> {
    let at = SIZES.iter().position(|size| *size == tokens)?;
    let found = FIGURE_9.iter().find(|(count, sum, _)| (*count, *sum) == (requests, whole.tokens))?;
    Some(found.2[at])
}

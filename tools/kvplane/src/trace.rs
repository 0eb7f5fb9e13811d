//! Traces of requests to an inference service, which drive replays.
//!
//! A request has its arrival time, its lengths in tokens and the ids of its blocks. Ids are chained over the prefix:
//! two equal ids stand for equal blocks *and* equal prefixes before them. A request of `n` input tokens has `ceil(n /
//! 512)` ids, and a last partial block has an id of its own.
//!
//! Traces come from a file ([`read`]) or from the seeded generator ([`mod@generate`]); [`stats`] describes either.

use std::fmt;

pub mod generate;
pub mod read;
pub mod stats;

pub use generate::{GenerateError, Shape, generate};
pub use read::{TraceError, load};
pub use stats::TraceStats;

/// Tokens of a full block.
pub const BLOCK_TOKENS: u32 = 512;

/// Most requests of a trace, read or generated.
pub const MAX_REQUESTS: usize = 10_000_000;

/// Most blocks in all requests of a trace together (2 GiB of ids).
pub const MAX_TRACE_BLOCKS: u64 = 1 << 28;

/// Request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Arrival time after the start of the trace, in milliseconds.
    pub timestamp_ms: u64,
    /// Length of the prompt, in tokens.
    pub input_tokens: u32,
    /// Length of the generated answer, in tokens.
    pub output_tokens: u32,
    /// Blocks of the prompt in order, with ids chained over the prefix.
    pub blocks: Vec<u64>,
}

impl Request {
    /// Returns the number of blocks of a prompt of `input_tokens`.
    #[must_use]
    pub const fn blocks_of(input_tokens: u32) -> usize {
        input_tokens.div_ceil(BLOCK_TOKENS) as usize
    }

    /// Returns the number of tokens in the first `blocks` blocks; the last block of the request counts its remainder.
    #[must_use]
    pub fn tokens_in_prefix(&self, blocks: usize) -> u64 {
        (blocks as u64 * u64::from(BLOCK_TOKENS)).min(u64::from(self.input_tokens))
    }
}

/// Trace in arrival order.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Origin of the trace: its path, or the words "generated ..." with shape and seed. Shown in every report.
    pub label: String,
    /// Requests, in the order of the file.
    pub requests: Vec<Request>,
    /// Number of requests with an earlier timestamp than the one before them.
    pub unordered: u64,
}

/// Blocks and tokens requested and found: the two ways a hit rate is weighted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct HitCounts {
    /// Blocks requested.
    pub blocks: u64,
    /// Blocks of the longest prefix found, summed over requests.
    pub hit_blocks: u64,
    /// Tokens requested.
    pub tokens: u64,
    /// Tokens in the prefixes found.
    pub hit_tokens: u64,
}

impl HitCounts {
    /// Counts `request`, of which the first `hit_blocks` blocks were found.
    pub fn add(&mut self, request: &Request, hit_blocks: usize) {
        self.blocks += request.blocks.len() as u64;
        self.hit_blocks += hit_blocks as u64;
        self.tokens += u64::from(request.input_tokens);
        self.hit_tokens += request.tokens_in_prefix(hit_blocks);
    }

    /// Returns the fraction of blocks found, 0 to 1; 0 if none were requested.
    #[must_use]
    pub fn rate_blocks(&self) -> f64 {
        ratio(self.hit_blocks, self.blocks)
    }

    /// Returns the fraction of tokens found, 0 to 1; 0 if none were requested.
    #[must_use]
    pub fn rate_tokens(&self) -> f64 {
        ratio(self.hit_tokens, self.tokens)
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

impl fmt::Display for HitCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} % of blocks, {:.2} % of tokens", self.rate_blocks() * 100.0, self.rate_tokens() * 100.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_block_counts_its_remainder() {
        let request = Request { timestamp_ms: 0, input_tokens: 1000, output_tokens: 1, blocks: vec![0, 1] };
        let mut counts = HitCounts::default();
        counts.add(&request, 1);
        assert_eq!((counts.hit_blocks, counts.hit_tokens), (1, 512));
        counts.add(&request, 2);
        assert_eq!((counts.blocks, counts.hit_blocks, counts.tokens, counts.hit_tokens), (4, 3, 2000, 1512));
        assert_eq!(HitCounts::default().rate_blocks(), 0.0);
    }

    #[test]
    fn a_full_last_block_is_no_extra_block() {
        assert_eq!([1, 511, 512, 513, 1024].map(Request::blocks_of), [1, 1, 1, 2, 2]);
    }
}

//! Simulation of caches of many sizes on a trace: every eviction policy of the store, candidate variants, and Belady's
//! bound, which knows the future.
//!
//! The policies are the store's own: a real [`kvplane_store::Store`] without memory behind it, in which a token takes
//! one granule. So a figure includes the allocator's losses to fragmentation. The trace is replayed request by request
//! as `kvplane replay` does it. [`crate::model`] models the same policies independently; a test compares the two.

mod belady;
mod leaves;
pub mod published;
pub mod report;
mod stored;

use std::fmt;

use kvplane_store::eviction::Eviction;
use serde::Serialize;

use crate::trace::{HitCounts, Request};

/// Size of the largest cache that can be simulated, in tokens.
pub const MAX_TOKENS: u64 = kvplane_store::allocator::MAX_POOL_BYTES / kvplane_store::allocator::GRANULE_BYTES;

/// Error of a text that is no number of tokens within [`MAX_TOKENS`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokensError {
    text: String,
}

impl fmt::Display for TokensError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = &self.text;
        write!(f, "{text:?} is not a cache size: give tokens, from 1 to {MAX_TOKENS}, such as 100k or 3M")
    }
}

impl std::error::Error for TokensError {}

/// Parses a number of tokens: `10000`, `100k`, `3M`.
///
/// # Errors
/// When the text is no number from 1 to [`MAX_TOKENS`].
pub fn tokens(text: &str) -> Result<u64, TokensError> {
    let (digits, factor) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 1_000),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 1_000_000),
        _ => (text, 1),
    };
    let tokens = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    match tokens {
        Some(tokens @ 1..=MAX_TOKENS) => Ok(tokens),
        _ => Err(TokensError { text: text.to_owned() }),
    }
}

/// Rule that decides which blocks are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keeper {
    /// A policy of the store.
    Policy {
        /// Policy of the store.
        eviction: Eviction,
        /// Store the partial last blocks of prompts, which are hardly ever reused.
        tails: bool,
        /// Evict a block without cached continuations in place of a block that has some.
        leaves_first: bool,
    },
    /// Evict the block whose next use is the latest, which takes knowledge of the future: no policy finds more.
    Belady,
}

impl Keeper {
    /// Returns all rules that are compared, in the order in which they are shown.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for (tails, leaves_first) in [(true, false), (false, false), (false, true)] {
            all.extend(Eviction::ALL.map(|eviction| Self::Policy { eviction, tails, leaves_first }));
        }
        all.push(Self::Belady);
        all
    }

    /// Returns the name in reports.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Belady => "Belady's bound".to_owned(),
            Self::Policy { eviction, tails, leaves_first } => {
                let tails = if tails { "" } else { ", no tails" };
                let leaves = if leaves_first { ", leaves first" } else { "" };
                format!("{eviction}{tails}{leaves}")
            }
        }
    }

    /// Replays `requests` against a cache of `tokens`.
    ///
    /// # Panics
    /// Panics if `tokens` is 0 or above [`MAX_TOKENS`].
    #[must_use]
    pub fn replay(self, requests: &[Request], tokens: u64) -> HitCounts {
        assert!((1..=MAX_TOKENS).contains(&tokens), "a cache of {tokens} tokens");
        match self {
            Self::Belady => belady::replay(requests, tokens),
            Self::Policy { eviction, tails, leaves_first } => {
                stored::replay(requests, tokens, eviction, tails, leaves_first)
            }
        }
    }
}

/// Hits of one rule at one size.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cell {
    /// Size of the cache, in tokens.
    pub tokens: u64,
    /// Blocks and tokens found.
    pub hits: HitCounts,
}

/// Hits of one rule at every size.
#[derive(Clone, Debug)]
pub struct Row {
    /// Rule of the cache.
    pub keeper: Keeper,
    /// One cell for each size, in the order of the request.
    pub cells: Vec<Cell>,
}

/// Returns the number of tokens in the block at `at` of a request.
fn block_tokens(request: &Request, at: usize) -> u64 {
    request.tokens_in_prefix(at + 1) - request.tokens_in_prefix(at)
}

/// Returns true if the block at `at` of a request is a full one.
fn is_full(request: &Request, at: usize) -> bool {
    block_tokens(request, at) == u64::from(crate::trace::BLOCK_TOKENS)
}

#[cfg(test)]
mod tests;

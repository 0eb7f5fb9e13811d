//! Simulation of caches of many sizes on a trace: every eviction policy of the store, candidate variants, and Belady's
//! bound, which knows the future.
//!
//! The policies are the store's own: a real [`kvplane_store::Store`] without memory behind it, in which a token takes
//! one granule. So a figure includes the allocator's losses to fragmentation. The trace is replayed request by request
//! as `kvplane replay` does it. [`crate::model`] models the same policies independently; a test compares the two.

mod belady;
pub mod cluster;
pub mod figures;
mod leaves;
pub mod published;
pub mod report;
mod stored;

use kvplane_store::eviction::Eviction;
use serde::Serialize;

use crate::trace::{HitCounts, Request};

/// Size of the largest cache that can be simulated, in tokens.
pub const MAX_TOKENS: u64 = kvplane_store::allocator::MAX_POOL_BYTES / kvplane_store::allocator::GRANULE_BYTES;

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

//! Prefixes of the shared store that are worth a copy on a second node: what requests fetch from it is counted as they
//! are placed, and [`crate::copies`] says what pays.
//!
//! What every instance has is fetched by nobody, however often it is used: such a head of all prompts is not copied
//! along.

use std::sync::Arc;

use super::hot::LEAST;
use super::{AssignedInstances, Desk, Pool, PoolKey, Source};
use crate::copies::{CopyConfig, CopyCounts, CopyOrder, PrefixFetch, Sources};
use crate::hot::HotRow;
use crate::index::{ContextId, PrefixMatches, Tiers};
use crate::policy::Fetch;
use crate::scheduler::Request;

/// Prefixes of a model that are looked at.
const ROWS: usize = 64;

/// A prefix of a model: the pool's number, the context, the hash of its last block.
pub type CopyKey = (u32, ContextId, u64);

/// Blocks of the shared store that are to be copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyWanted {
    /// The name under which [`Desk::copy_ended`] knows them.
    pub key: CopyKey,
    /// Of which model.
    pub pool: PoolKey,
    /// Their hashes.
    pub hashes: Vec<u64>,
}

/// What the Conductor's copies are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyState {
    /// What they may take.
    pub config: CopyConfig,
    /// What they take, those that are being made included.
    pub bytes: u64,
    /// Prefixes that have one.
    pub prefixes: usize,
    /// Those that are being made.
    pub coming: usize,
    /// What was counted.
    pub counts: CopyCounts,
}

impl Pool {
    /// A request was placed: what it fetches from the shared store counts. A store that spreads blocks over its parts
    /// is named by none of them, but then no instance has all that is to be reused.
    pub(super) fn note_fetch(&mut self, request: &Request, assigned: &AssignedInstances, fetch: Fetch, now_ns: u64) {
        let has_all = |source: &&Source| source.tokens >= assigned.reuse_tokens;
        let mut whole = assigned.sources.iter().filter(has_all);
        let from_store = matches!(fetch, Fetch::Pool { .. }) && whole.clone().all(|source| source.instance.is_none())
            || whole.any(|source| source.instance.is_none());
        if from_store {
            let blocks = (assigned.reuse_tokens / self.key.block_tokens) as usize;
            self.fetched.note(request.context, &request.hashes[..blocks.min(request.hashes.len())], now_ns);
        }
    }

    /// Blocks of a beginning that every instance has.
    fn head(&mut self, row: &HotRow, found: &mut PrefixMatches) -> usize {
        // Contexts of a pool are those of its index.
        let _: Result<(), _> = self.conductor.index().find(row.context, &row.chain, usize::MAX, Tiers::OWN, found);
        let has = |holder| found.matches().iter().find(|held| held.holder == holder).map_or(0, |held| held.blocks);
        let instances = (0..self.prefill.len()).filter_map(|at| self.conductor.holder(at).ok());
        instances.map(has).min().unwrap_or(0) as usize
    }
}

impl Desk {
    /// What is to be copied now to second nodes of a store of so many nodes. Nothing where it has only one.
    pub fn copies_wanted(&mut self, nodes: u32, now_ns: u64) -> Vec<CopyWanted> {
        let sources = Sources { nodes, nic_bytes_s: self.config.books.nic_bytes_s };
        let mut all: Vec<PrefixFetch<CopyKey>> = Vec::new();
        let mut chains: Vec<(Arc<[u64]>, usize)> = Vec::new();
        for (number, pool) in &mut self.pools {
            let block_bytes = u64::from(pool.key.block_tokens) * pool.token_bytes;
            for row in pool.fetched.most(ROWS, now_ns).into_iter().take_while(|row| row.per_minute >= LEAST) {
                let head = pool.head(&row, self.scratch.found_mut());
                let pieces = row.chain.len().saturating_sub(head) as u64;
                let Some(last) = row.chain.last().filter(|_| pieces > 0) else { continue };
                let key = (*number, row.context, *last);
                let (per_s, bytes) = (row.per_minute / 60.0, pieces * block_bytes);
                all.push(PrefixFetch { key, per_s, bytes, pieces, places: 1 });
                chains.push((row.chain, head));
            }
        }
        let mut wanted = Vec::new();
        for order in self.copies.decide(&all, sources, now_ns) {
            let CopyOrder::Copy(key) = order else { continue };
            let Some(at) = all.iter().position(|one| one.key == key) else { continue };
            let Some(pool) = self.pools.get(&key.0) else { continue };
            let (chain, head) = &chains[at];
            wanted.push(CopyWanted { key, pool: pool.key.clone(), hashes: chain[*head..].to_vec() });
        }
        wanted
    }

    /// What [`Self::copies_wanted`] said was done, or could not be.
    pub fn copy_ended(&mut self, key: CopyKey, made: bool, now_ns: u64) {
        self.copies.ended(key, made, now_ns);
    }

    /// The copies as they are.
    #[must_use]
    pub fn copies(&self) -> CopyState {
        let (prefixes, coming) = self.copies.prefixes();
        CopyState {
            config: *self.copies.config(),
            bytes: self.copies.bytes(),
            prefixes,
            coming,
            counts: self.copies.counts,
        }
    }
}

//! Names of blocks: the hash by which the index knows a block, for the hash that an engine or the store gives it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::aliases::{Aliases, KeyMixer, NamedBlock, PartialBlock};
use crate::index::{ContextId, IndexConfig};

/// Names of a pool's blocks.
pub(super) struct BlockNames {
    /// Context of engines that report events: their hashes depend on adapter and salt already. Only its blocks have
    /// token hashes.
    pub(super) plain: ContextId,
    pub(super) aliases: Aliases,
    pub(super) store: StoreNames,
    /// Instances, by their numbers among those that prefill, whose engine hashes cover no more than the tokens of their
    /// block, as those of SGLang before rolling hashes: one was found to name two blocks.
    pub(super) page_hashed: BTreeSet<usize>,
    /// Instances whose events contain tokens.
    pub(super) with_tokens: BTreeSet<usize>,
}

impl BlockNames {
    pub(super) fn new(plain: ContextId, config: &IndexConfig) -> Self {
        let IndexConfig { max_blocks, seed, .. } = *config;
        let (aliases, store) = (Aliases::new(max_blocks, seed), StoreNames::new(max_blocks, seed));
        Self { plain, aliases, store, page_hashed: BTreeSet::new(), with_tokens: BTreeSet::new() }
    }

    /// Returns the hash by which the index knows a block: its token hash, if known. Returns none if the hash names
    /// several blocks.
    pub(super) fn key_of(&self, context: ContextId, hash: u64) -> Option<u64> {
        if context != self.plain {
            return Some(hash);
        }
        match self.aliases.get(hash) {
            Some(NamedBlock::Full(hash) | NamedBlock::Partial(PartialBlock { hash, .. })) => Some(hash),
            Some(NamedBlock::Several) => None,
            None => Some(hash),
        }
    }

    /// Returns true if an engine hash names several blocks.
    pub(super) fn is_ambiguous(&self, hash: u64) -> bool {
        self.aliases.get(hash) == Some(NamedBlock::Several)
    }

    /// Returns the known token hashes of blocks.
    pub(super) fn aliased(&self, context: ContextId, hashes: &[u64]) -> Vec<u64> {
        if self.aliases.is_empty() {
            return Vec::new();
        }
        hashes.iter().filter_map(|hash| self.key_of(context, *hash).filter(|key| key != hash)).collect()
    }

    /// Returns the hashes by which the index knows the blocks of a prompt, up to the first partial block, and that
    /// block.
    pub(super) fn resolve(&self, context: ContextId, hashes: &[u64]) -> (Vec<u64>, Option<PartialBlock>) {
        if context != self.plain {
            return (hashes.to_vec(), None);
        }
        let mut keys = Vec::with_capacity(hashes.len());
        for hash in hashes {
            match self.aliases.get(*hash) {
                Some(NamedBlock::Full(key)) => keys.push(key),
                Some(NamedBlock::Partial(part)) => return (keys, Some(part)),
                // Nothing tells which of its blocks is meant.
                Some(NamedBlock::Several) => break,
                None => keys.push(*hash),
            }
        }
        (keys, None)
    }

    /// Returns the hashes by which the index knows the full blocks of a request.
    pub(super) fn request_hashes(&self, context: ContextId, hashes: Arc<[u64]>) -> Arc<[u64]> {
        if context != self.plain || self.aliases.is_empty() {
            return hashes;
        }
        // The engine hash of a partial block, or of several blocks, is no key of the index, so it ends what the request
        // can reuse.
        let key = |hash: &u64| match self.aliases.get(*hash) {
            Some(NamedBlock::Full(key)) => key,
            _ => *hash,
        };
        hashes.iter().map(key).collect()
    }

    /// Returns the hashes by which the store knows blocks of the index.
    pub(super) fn store_hashes(&self, context: ContextId, keys: &[u64]) -> Vec<u64> {
        let name = |key: &u64| if context == self.plain { self.store.of(*key) } else { *key };
        keys.iter().map(name).collect()
    }
}

/// Engine hashes of the shared store's blocks, by token hash: the store knows its objects by engine hash alone.
pub(super) struct StoreNames {
    by_token_hash: HashMap<u64, u64, KeyMixer>,
    /// Most blocks; the store's hash of a further one is not known.
    most: usize,
}

impl StoreNames {
    pub(super) fn new(most: usize, seed: u64) -> Self {
        Self { by_token_hash: HashMap::with_hasher(KeyMixer::new(seed)), most }
    }

    /// Notes the engine hash of a block that the store holds; the latest counts.
    pub(super) fn insert(&mut self, token_hash: u64, engine_hash: u64) {
        if self.by_token_hash.len() < self.most || self.by_token_hash.contains_key(&token_hash) {
            self.by_token_hash.insert(token_hash, engine_hash);
        }
    }

    /// Forgets a block that the store does not hold any more.
    pub(super) fn remove(&mut self, token_hash: u64) {
        self.by_token_hash.remove(&token_hash);
    }

    /// Keeps the blocks that the store still holds.
    pub(super) fn retain(&mut self, mut is_held: impl FnMut(u64) -> bool) {
        self.by_token_hash.retain(|token_hash, _| is_held(*token_hash));
    }

    /// Returns the hash by which the store knows a block.
    pub(super) fn of(&self, hash: u64) -> u64 {
        self.by_token_hash.get(&hash).copied().unwrap_or(hash)
    }
}

//! Prefixes of a prompt that the instances of a pool hold, in tokens.
//!
//! A partial block counts for a holder whose full blocks end where it begins. Its tokens are among those of the prompt,
//! so no holder has more tokens than the prompt.

use std::collections::BTreeMap;

use super::Pool;
use super::aliases::PartialBlock;
use crate::conductor::error::ConductorError;
use crate::engine::tokens::TokenPrompt;
use crate::index::{ContextId, PrefixMatches, Tier, Tiers};
use crate::scheduler::SchedulerError;

/// Maximum number of partial blocks that a query by tokens looks for.
const MOST_PARTS: usize = 4_096;

/// Prefix that an instance holds.
#[derive(Clone, Copy, Debug)]
pub(in crate::conductor) struct HeldPrefix {
    /// Number of the instance among those that prefill.
    pub(in crate::conductor) at: usize,
    /// Tokens in any tier of the query.
    tokens: u32,
    /// Tokens on the GPU; there or in memory; there, in memory or on an SSD.
    pub(in crate::conductor) by_tier: [u32; 3],
}

/// Tiers that count for each number of [`HeldPrefix::by_tier`].
const COUNTED: [Tiers; 3] = [Tiers::only(Tier::Gpu), Tiers::up_to(Tier::Dram), Tiers::up_to(Tier::Ssd)];

/// Prefixes that instances hold, in the order in which they were found.
#[derive(Default)]
struct HeldPrefixes {
    prefixes: Vec<HeldPrefix>,
    /// Place in `prefixes` of each instance.
    places: BTreeMap<usize, usize>,
}

impl HeldPrefixes {
    fn add(&mut self, held: HeldPrefix) {
        self.places.insert(held.at, self.prefixes.len());
        self.prefixes.push(held);
    }

    fn get_mut(&mut self, at: usize) -> Option<&mut HeldPrefix> {
        self.places.get(&at).and_then(|place| self.prefixes.get_mut(*place))
    }
}

/// Lookup of a prompt's holders in one pool.
pub(in crate::conductor) struct PrefixLookup<'a> {
    pool: &'a mut Pool,
    /// Scratch memory of the index.
    found: &'a mut PrefixMatches,
    most: usize,
    tiers: Tiers,
    held: HeldPrefixes,
    /// Tokens that all holders can provide together.
    pooled_tokens: u32,
}

impl<'a> PrefixLookup<'a> {
    /// Begins a lookup of at most `most` holders in these tiers.
    pub(in crate::conductor) fn new(
        pool: &'a mut Pool,
        found: &'a mut PrefixMatches,
        most: usize,
        tiers: Tiers,
    ) -> Self {
        Self { pool, found, most, tiers, held: HeldPrefixes::default(), pooled_tokens: 0 }
    }

    /// Looks for the holders of a prompt by hashes of engines.
    pub(in crate::conductor) fn by_hashes(&mut self, context: ContextId, hashes: &[u64]) -> Result<(), ConductorError> {
        let (keys, part) = self.pool.names.resolve(context, hashes);
        self.find(context, &keys)?;
        match part {
            Some(part) => self.add_part(keys.len() as u32, part),
            None => Ok(()),
        }
    }

    /// Returns true if hashes of engines name the first full blocks of a prompt, and no others.
    pub(in crate::conductor) fn is_same(&self, context: ContextId, hashes: &[u64], prompt: &TokenPrompt<'_>) -> bool {
        let (keys, part) = self.pool.names.resolve(context, hashes);
        part.is_none() && context == self.pool.names.plain && prompt.hashes().starts_with(&keys)
    }

    /// Looks for the holders of a prompt by its tokens.
    pub(in crate::conductor) fn by_tokens(&mut self, prompt: &TokenPrompt<'_>) -> Result<(), ConductorError> {
        let plain = self.pool.names.plain;
        self.find(plain, prompt.hashes())?;
        if !self.pool.names.aliases.has_partial() {
            return Ok(());
        }
        let block_tokens = self.pool.key.block_tokens;
        let tokens = self.held.prefixes.iter().flat_map(|held| held.by_tier.into_iter().chain([held.tokens]));
        let mut ends: Vec<u32> = tokens.map(|tokens| tokens / block_tokens).chain([0]).collect();
        ends.sort_unstable_by(|one, other| other.cmp(one));
        ends.dedup();
        let parts = ends.into_iter().flat_map(|blocks| {
            let lengths = (1..=prompt.most_part_tokens(blocks as usize)).rev();
            lengths.map(move |tokens| (blocks, tokens))
        });
        for (blocks, tokens) in parts.take(MOST_PARTS) {
            if let Some(hash) = prompt.part_hash(blocks as usize, tokens) {
                self.add_part(blocks, PartialBlock { hash, tokens: tokens as u32 })?;
            }
        }
        Ok(())
    }

    /// Finds the holders of full blocks, and adds them to those that are known.
    fn find(&mut self, context: ContextId, keys: &[u64]) -> Result<(), ConductorError> {
        let block_tokens = self.pool.key.block_tokens;
        let index = self.pool.scheduler.index();
        // One more than `most`, because the shared store is not an instance.
        index.find(context, keys, self.most + 1, self.tiers, self.found).map_err(SchedulerError::from)?;
        let pooled = index.held_by_anybody(context, keys, Tiers::SHARED).map_err(SchedulerError::from)?;
        self.pooled_tokens = self.pooled_tokens.max(pooled.saturating_mul(block_tokens));
        for found in self.found.matches() {
            let Some(at) = self.pool.scheduler.instance_of(found.holder) else { continue };
            let index = self.pool.scheduler.index();
            let within = |tiers| index.blocks_within(self.found, found.holder, tiers).saturating_mul(block_tokens);
            let (tokens, by_tier) = (found.blocks.saturating_mul(block_tokens), COUNTED.map(within));
            match self.held.get_mut(at) {
                Some(held) => {
                    held.tokens = held.tokens.max(tokens);
                    held.by_tier.iter_mut().zip(by_tier).for_each(|(held, tokens)| *held = (*held).max(tokens));
                }
                None => self.held.add(HeldPrefix { at, tokens, by_tier }),
            }
        }
        Ok(())
    }

    /// Counts a partial block behind the first `blocks` blocks for the holders of both.
    fn add_part(&mut self, blocks: u32, part: PartialBlock) -> Result<(), ConductorError> {
        let plain = self.pool.names.plain;
        let index = self.pool.scheduler.index();
        index.find(plain, &[part.hash], usize::MAX, self.tiers, self.found).map_err(SchedulerError::from)?;
        let end = blocks.saturating_mul(self.pool.key.block_tokens);
        for found in self.found.matches() {
            let Some(at) = self.pool.scheduler.instance_of(found.holder) else { continue };
            if blocks == 0 && self.held.get_mut(at).is_none() {
                self.held.add(HeldPrefix { at, tokens: 0, by_tier: [0; 3] });
            }
            let Some(held) = self.held.get_mut(at) else { continue };
            if held.tokens == end {
                held.tokens += part.tokens;
            }
            let index = self.pool.scheduler.index();
            for (tokens, tiers) in held.by_tier.iter_mut().zip(COUNTED) {
                if *tokens == end && index.blocks_within(self.found, found.holder, tiers) > 0 {
                    *tokens += part.tokens;
                }
            }
        }
        Ok(())
    }

    /// Returns the holders, those with the most tokens first, and the tokens that all holders can provide together.
    pub(in crate::conductor) fn finish(self) -> (Vec<HeldPrefix>, u32) {
        let mut held = self.held.prefixes;
        held.sort_by_key(|held| std::cmp::Reverse(held.tokens));
        held.truncate(self.most);
        (held, self.pooled_tokens)
    }
}

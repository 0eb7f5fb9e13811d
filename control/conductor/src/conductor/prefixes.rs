//! Queries for the holders of a prompt's prefixes, by hashes or by tokens.

use std::collections::BTreeSet;
use std::sync::Arc;

use bincode::{Decode, Encode};

use super::Conductor;
use super::config::MAX_PROMPT_BLOCKS;
use super::error::{ConductorError, bad};
use super::instances::InstanceRegistry;
use super::pools::{Pool, PoolKey, Pools, PrefixLookup};
use crate::engine::tokens::TokenPrompt;
use crate::index::{PromptContext, Tier, Tiers};
use crate::scheduler::SchedulerError;

/// Maximum number of holders in an answer.
const MOST_HOLDERS: usize = 1_024;

/// Holders of a prompt's prefixes.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PrefixHolders {
    /// Instances that hold a prefix, those with the most tokens first; then, without tokens, those whose caches the
    /// index may not know completely, as they may hold it all the same.
    pub holders: Vec<PrefixHolder>,
    /// Tokens that the shared store and all instances can provide together.
    pub pooled_tokens: u32,
}

/// Holders of a prompt's prefixes, where what the shared store has counts as memory of every instance that prefills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldersWithStore {
    /// Instances, in the order of [`PrefixHolders::holders`]; then those that have no more than the store.
    pub holders: Vec<PrefixHolder>,
    /// Length of the prefix that the store has alone, in tokens.
    pub stored_tokens: u32,
}

/// Prefix of a prompt that an instance holds, in tokens without a gap; each count includes the tiers before it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct PrefixHolder {
    pub instance: Arc<str>,
    /// Tokens on its GPU.
    pub gpu_tokens: u32,
    /// Tokens on its GPU or in its memory.
    pub dram_tokens: u32,
    /// Tokens on its GPU, in its memory or on its SSD.
    pub ssd_tokens: u32,
    /// True if its cache is not completely known.
    pub degraded: bool,
}

impl PrefixHolder {
    fn without_tokens(instance: &Arc<str>, degraded: bool) -> Self {
        Self { instance: Arc::clone(instance), gpu_tokens: 0, dram_tokens: 0, ssd_tokens: 0, degraded }
    }
}

/// Prompt of a query.
#[derive(Clone, Copy, Debug)]
pub enum QueryPrompt<'a> {
    /// Rolling hashes of its blocks, as the engines of the model compute them.
    Hashes(&'a [u64]),
    /// Tokens, for engines whose events contain tokens; and the engine hashes of these tokens, for those whose events
    /// do not, and for the shared store.
    Tokens(&'a TokenPrompt<'a>, &'a [u64]),
}

impl QueryPrompt<'_> {
    /// Returns true if a query by tokens needs the engine hashes of the tokens too: instances of this model, or the
    /// shared store, may have blocks that are found by engine hash only.
    #[must_use]
    pub fn needs_engine_hashes(conductor: &Conductor, key: &PoolKey) -> bool {
        let Some(number) = conductor.pools.find(key) else { return false };
        let has_store = conductor.pools.get(number).is_some_and(Pool::has_store);
        has_store || conductor.instances.has_unfindable_blocks(number, true)
    }

    fn check(&self) -> Result<(), ConductorError> {
        let blocks = match self {
            Self::Hashes(hashes) => hashes.len(),
            Self::Tokens(prompt, hashes) => prompt.hashes().len().max(hashes.len()),
        };
        if blocks > MAX_PROMPT_BLOCKS {
            return Err(bad(format!("a prompt of {blocks} blocks; at most {MAX_PROMPT_BLOCKS}")));
        }
        Ok(())
    }

    /// Returns its hashes: each list names all its blocks.
    fn lists(&self) -> impl Iterator<Item = &[u64]> {
        let (tokens, hashes) = match self {
            Self::Hashes(hashes) => (None, *hashes),
            Self::Tokens(prompt, hashes) => (Some(prompt.hashes()), *hashes),
        };
        tokens.into_iter().chain([hashes])
    }
}

/// Answers [`super::Conductor::query`].
pub(super) fn query(
    pools: &mut Pools,
    instances: &InstanceRegistry,
    context: &PromptContext,
    prompt: QueryPrompt<'_>,
    most: usize,
    tiers: Tiers,
) -> Result<PrefixHolders, ConductorError> {
    prompt.check()?;
    let number = pools.of_context(context)?;
    let Some((pool, scratch)) = pools.with_scratch(number) else { return Err(bad("the pool was removed")) };
    let most = most.min(MOST_HOLDERS);
    let hashes = match prompt {
        QueryPrompt::Hashes(hashes) | QueryPrompt::Tokens(_, hashes) => Arc::from(hashes),
    };
    let (context, hashes) = pool.context(context, hashes)?;
    let mut lookup = PrefixLookup::new(pool, scratch.found_mut(), most, tiers);
    // The hashes of a prompt that was looked up by tokens find the same blocks, as far as they are aliases of these.
    let is_answered = match prompt {
        QueryPrompt::Tokens(prompt, _) => {
            lookup.by_tokens(prompt)?;
            lookup.is_same(context, &hashes, prompt)
        }
        QueryPrompt::Hashes(_) => false,
    };
    if !is_answered {
        lookup.by_hashes(context, &hashes)?;
    }
    let (held, pooled_tokens) = lookup.finish();
    let mut holders = Vec::with_capacity(held.len());
    for held in held {
        let instance = pool.prefill_name(held.at);
        let [gpu_tokens, dram_tokens, ssd_tokens] = held.by_tier;
        let degraded = instances.get(&instance).is_some_and(|known| known.cache.is_incomplete());
        holders.push(PrefixHolder { instance, gpu_tokens, dram_tokens, ssd_tokens, degraded });
    }
    let listed: BTreeSet<Arc<str>> = holders.iter().map(|holder| Arc::clone(&holder.instance)).collect();
    let unknown = instances.unknown_in(number).filter(|name| !listed.contains(*name));
    let room = most - holders.len();
    holders.extend(unknown.take(room).map(|name| PrefixHolder::without_tokens(name, true)));
    Ok(PrefixHolders { holders, pooled_tokens })
}

/// Answers [`super::Conductor::query_with_store`].
pub(super) fn query_with_store(
    pools: &mut Pools,
    instances: &InstanceRegistry,
    context: &PromptContext,
    prompt: QueryPrompt<'_>,
    most: usize,
    tiers: Tiers,
) -> Result<HoldersWithStore, ConductorError> {
    let PrefixHolders { mut holders, .. } = query(pools, instances, context, prompt, most, tiers)?;
    let number = pools.of_context(context)?;
    let stored_tokens = match pools.get_mut(number) {
        Some(pool) if pool.has_store() => tokens_in_store(pool, context, prompt)?,
        _ => 0,
    };
    if stored_tokens == 0 {
        return Ok(HoldersWithStore { holders, stored_tokens });
    }
    let listed: BTreeSet<Arc<str>> = holders.iter().map(|holder| Arc::clone(&holder.instance)).collect();
    let others = instances.prefilling_in(number).filter(|(name, _)| !listed.contains(*name));
    let room = most.min(MOST_HOLDERS) - holders.len();
    holders.extend(others.take(room).map(|(name, degraded)| PrefixHolder::without_tokens(name, degraded)));
    for holder in &mut holders {
        holder.dram_tokens = holder.dram_tokens.max(stored_tokens);
        holder.ssd_tokens = holder.ssd_tokens.max(holder.dram_tokens);
    }
    Ok(HoldersWithStore { holders, stored_tokens })
}

/// Returns the length of the prompt's prefix that the shared store has alone, in tokens.
fn tokens_in_store(pool: &mut Pool, context: &PromptContext, prompt: QueryPrompt<'_>) -> Result<u32, ConductorError> {
    let mut most = 0;
    for hashes in prompt.lists() {
        most = most.max(blocks_in_store(pool, context, hashes)?);
    }
    Ok(most.saturating_mul(pool.key.block_tokens))
}

fn blocks_in_store(pool: &mut Pool, context: &PromptContext, hashes: &[u64]) -> Result<u32, ConductorError> {
    let (context, hashes) = pool.context(context, Arc::from(hashes))?;
    let hashes = pool.request_hashes(context, hashes);
    let blocks = pool.index().held_by_anybody(context, &hashes, Tiers::only(Tier::Pool));
    Ok(blocks.map_err(SchedulerError::from)?)
}

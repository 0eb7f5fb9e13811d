//! Queries for the holders of a prompt's prefixes, by hashes or by tokens.

use std::collections::BTreeSet;
use std::sync::Arc;

use bincode::{Decode, Encode};

use super::config::MAX_PROMPT_BLOCKS;
use super::error::{ConductorError, bad};
use super::instances::InstanceRegistry;
use super::pools::{Pool, Pools, PrefixLookup};
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
    if let QueryPrompt::Tokens(prompt, _) = prompt {
        lookup.by_tokens(prompt)?;
    }
    lookup.by_hashes(context, &hashes)?;
    let (held, pooled_tokens) = lookup.finish();
    let mut holders = Vec::with_capacity(held.len());
    for held in held {
        let instance = pool.prefill_name(held.at);
        let [gpu_tokens, dram_tokens, ssd_tokens] = held.by_tier;
        let degraded = instances.get(&instance).is_some_and(|known| known.cache.is_incomplete());
        holders.push(PrefixHolder { instance, gpu_tokens, dram_tokens, ssd_tokens, degraded });
    }
    let listed: BTreeSet<Arc<str>> = holders.iter().map(|holder| Arc::clone(&holder.instance)).collect();
    let unknown = instances.unknown_in(number).filter(|name| !listed.contains(*name)).cloned();
    let (gpu_tokens, dram_tokens, ssd_tokens, degraded) = (0, 0, 0, true);
    let unknown = unknown.take(most - holders.len()).map(|instance| PrefixHolder {
        instance,
        gpu_tokens,
        dram_tokens,
        ssd_tokens,
        degraded,
    });
    holders.extend(unknown);
    Ok(PrefixHolders { holders, pooled_tokens })
}

/// Answers [`super::Conductor::in_store`].
pub(super) fn in_store(
    pools: &mut Pools,
    context: &PromptContext,
    prompt: QueryPrompt<'_>,
) -> Result<u32, ConductorError> {
    let number = pools.of_context(context)?;
    let Some(pool) = pools.get_mut(number) else { return Err(bad("the pool was removed")) };
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

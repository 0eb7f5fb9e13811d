//! Pools: the instances of one tenant, model and block size, with a scheduler and an index of their own.

mod aliases;
mod changes;
mod names;
mod prefixes;

use std::collections::BTreeMap;
use std::sync::Arc;

use kvplane_proto::Digest;
use kvplane_proto::rng::mix64;

use super::calls::{AssignedGroup, AssignedStage, Assignment, FetchSource};
use super::config::ConductorConfig;
use super::error::ConductorError;
use super::limits::Limit;
pub(super) use aliases::Aliases;
use names::BlockNames;
pub(super) use prefixes::PrefixLookup;

use crate::hot::{HotRow, HotTable};
use crate::index::{ContextId, HolderId, IndexError, PrefixIndex, PrefixMatches, PromptContext, Tiers};
use crate::policy::{Fetch, Placement, StagePlan};
use crate::scheduler::{Request, Scheduler, SchedulerError, Scratch, adopt_index};

/// Maximum number of sources in an answer.
const SOURCES: usize = 4;
/// Number of consecutive prompts with more cached blocks than the index knew after which hashes count as mismatched.
const MISMATCH: u32 = 16;

/// Key of a pool: tenant, model and block size.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct PoolKey {
    pub tenant: String,
    pub model: String,
    /// Tokens per block.
    pub block_tokens: u32,
}

/// Counters of placements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Hits {
    /// Tokens of placed prompts.
    pub(super) tokens: u64,
    /// Tokens of these that were predicted to be reused.
    pub(super) reused: u64,
}

/// Locations of a whole prefix.
pub(super) struct PrefixPlaces {
    /// Number of instances that have all of it.
    pub(super) instances: usize,
    /// True if the shared store has all of it.
    pub(super) is_stored: bool,
}

/// Pool: the instances of one model.
pub(super) struct Pool {
    pub(super) key: PoolKey,
    pub(super) token_bytes: u64,
    pub(super) scheduler: Scheduler,
    /// Context shared by those beyond the maximum number of contexts: their hashes are salted with their names.
    overflow: ContextId,
    names: BlockNames,
    /// Holders that are parts of the shared store, by the numbers of the parts.
    store: BTreeMap<u64, HolderId>,
    /// Names of instances, by number.
    prefill: Vec<Arc<str>>,
    decode: Vec<Arc<str>>,
    /// Number of instances.
    pub(super) instances: usize,
    /// Number of requests.
    pub(super) requests: usize,
    /// Number of batches of cache events that changed its index.
    pub(super) batches: u64,
    /// Number of consecutive prompts with more cached blocks than the index knew.
    surprises: u32,
    pub(super) hits: Hits,
    /// Hottest reused prefixes, and those fetched most from the shared store.
    pub(super) hot: HotTable,
    pub(super) fetched: HotTable,
}

impl Pool {
    fn new(key: PoolKey, token_bytes: u64, config: &ConductorConfig) -> Result<Self, ConductorError> {
        let mut limits = config.scheduler.clone();
        limits.block_tokens = key.block_tokens;
        if token_bytes > 0 {
            limits.token_bytes = token_bytes;
        }
        let token_bytes = limits.token_bytes;
        let mut scheduler = Scheduler::new(limits, config.policy.make(config.refuses))?;
        let overflow = scheduler.context(&everything())?;
        let plain = scheduler.context(&event_context(&key))?;
        Ok(Self {
            key,
            token_bytes,
            scheduler,
            overflow,
            names: BlockNames::new(plain, &config.scheduler.index),
            store: BTreeMap::new(),
            prefill: Vec::new(),
            decode: Vec::new(),
            instances: 0,
            requests: 0,
            batches: 0,
            surprises: 0,
            hits: Hits::default(),
            hot: HotTable::default(),
            fetched: HotTable::default(),
        })
    }

    /// Returns the context named `key`, and hashes for it. Beyond the maximum number of contexts, all others share one,
    /// with hashes that are salted with the name.
    pub(super) fn context(
        &mut self,
        key: &PromptContext,
        hashes: Arc<[u64]>,
    ) -> Result<(ContextId, Arc<[u64]>), ConductorError> {
        match self.scheduler.context(key) {
            Ok(context) => Ok((context, hashes)),
            Err(SchedulerError::Index(IndexError::TooManyContexts { .. })) => {
                let salt = salt_of(key);
                Ok((self.overflow, hashes.iter().map(|hash| mix64(hash ^ salt)).collect()))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Replaces the index by a restored one, before the first request: `kept` are the hidden holders of instances, and
    /// `aliases` those of their blocks.
    pub(super) fn adopt_index(
        &mut self,
        index: PrefixIndex,
        kept: &[(usize, HolderId)],
        aliases: Aliases,
    ) -> Result<(), ConductorError> {
        adopt_index(&mut self.scheduler, index, kept)?;
        self.overflow = self.scheduler.context(&everything())?;
        self.names.plain = self.scheduler.context(&event_context(&self.key))?;
        self.names.aliases = aliases;
        Ok(())
    }

    /// Returns the aliases of the pool's blocks.
    pub(super) const fn aliases(&self) -> &Aliases {
        &self.names.aliases
    }

    /// Returns the number of engine hashes whose token hashes are known.
    pub(super) fn hash_aliases(&self) -> usize {
        self.names.aliases.len()
    }

    /// Returns the hashes by which the index knows the full blocks of a request.
    pub(super) fn request_hashes(&self, context: ContextId, hashes: Arc<[u64]>) -> Arc<[u64]> {
        self.names.request_hashes(context, hashes)
    }

    /// Returns the hashes by which the store knows blocks of the index.
    pub(super) fn store_hashes(&self, context: ContextId, keys: &[u64]) -> Vec<u64> {
        self.names.store_hashes(context, keys)
    }

    pub(super) fn index(&mut self) -> &mut PrefixIndex {
        self.scheduler.index()
    }

    pub(super) fn prefill_name(&self, at: usize) -> Arc<str> {
        self.prefill.get(at).cloned().unwrap_or_else(|| "".into())
    }

    /// Returns the name of an instance that decodes.
    pub(super) fn decode_name(&self, at: usize) -> Option<Arc<str>> {
        self.decode.get(at).cloned()
    }

    /// Sets the name of the instance of this number among those that prefill, which another had before.
    pub(super) fn name_prefill(&mut self, at: usize, name: &Arc<str>) {
        self.names.page_hashed.remove(&at);
        self.names.with_tokens.remove(&at);
        note_name(&mut self.prefill, at, name);
    }

    /// Sets the name of the instance of this number among those that decode.
    pub(super) fn name_decode(&mut self, at: usize, name: &Arc<str>) {
        note_name(&mut self.decode, at, name);
    }

    /// Returns true if the shared store has, or had lately, blocks of the model.
    pub(super) fn has_store(&self) -> bool {
        !self.store.is_empty()
    }

    /// Returns true if a holder is a part of the shared store.
    fn is_store(&self, holder: HolderId) -> bool {
        self.store.values().any(|part| *part == holder)
    }

    /// Returns true if the hashes of requests and of events seem to be of different kinds.
    pub(super) const fn is_mismatched(&self) -> bool {
        self.surprises >= MISMATCH
    }

    /// Compares the reused tokens of a placed prompt with the predicted ones: if many reused blocks were never
    /// reported, the hashes of events and of requests are of different kinds.
    pub(super) fn note_reuse(&mut self, said_tokens: u32, reused_tokens: u32) {
        if said_tokens > 0 || reused_tokens < self.key.block_tokens.saturating_mul(2) {
            self.surprises = if said_tokens > 0 && reused_tokens > 0 { 0 } else { self.surprises };
        } else {
            self.surprises = self.surprises.saturating_add(1);
        }
    }

    /// Returns a placement with names, for a reservation with this lease.
    pub(super) fn assigned(
        &mut self,
        id: u64,
        request: &Request,
        placement: &Placement,
        lease_ns: u64,
        scratch: &mut Scratch,
    ) -> Assignment {
        let mut answer = Assignment {
            reservation: id,
            prefill: self.prefill_name(placement.prefill),
            decode: placement.decode.and_then(|at| self.decode_name(at)),
            reuse_tokens: placement.reuse,
            sources: Vec::new(),
            keep: !matches!(placement.fetch, Fetch::Pool { keep: false }),
            wait_ns: placement.wait_ns,
            prefill_ns: placement.prefill_ns,
            lease_ns,
        };
        let block_tokens = self.key.block_tokens;
        let tokens = |blocks: u32| blocks.saturating_mul(block_tokens).min(request.tokens);
        match placement.fetch {
            Fetch::Nothing => {}
            Fetch::One(source) => {
                let instance = Some(self.prefill_name(source));
                answer.sources.push(FetchSource { instance, tokens: placement.reuse });
            }
            Fetch::Pool { .. } => {
                let (context, hashes) = (request.context, &request.hashes);
                let found = scratch.found_mut();
                if self.index().find(context, hashes, SOURCES, Tiers::SHARED, found).is_ok() {
                    for found in found.matches() {
                        let at = self.scheduler.instance_of(found.holder);
                        let instance = at.map(|at| self.prefill_name(at));
                        if at != Some(placement.prefill) && (instance.is_some() || self.is_store(found.holder)) {
                            answer.sources.push(FetchSource { instance, tokens: tokens(found.blocks) });
                        }
                    }
                }
            }
        }
        answer
    }

    /// Returns the pipeline group of a placement, with names.
    pub(super) fn assigned_group(&self, placement: &Placement) -> Option<AssignedGroup> {
        let plan = placement.group.as_ref()?;
        let stage = |stage: &StagePlan| {
            let StagePlan { instance, first_layer, layers, load_tokens, wait_ns, busy_ns, .. } = *stage;
            let instance = self.prefill_name(instance);
            AssignedStage { instance, first_layer, layers, load_tokens, wait_ns, busy_ns }
        };
        let (name, chunk_tokens) = (Arc::clone(&plan.name), plan.chunk_tokens);
        Some(AssignedGroup { name, chunk_tokens, stages: plan.stages.iter().map(stage).collect() })
    }

    /// Counts the reused blocks of a placed request.
    pub(super) fn note_placement(&mut self, request: &Request, assigned: &Assignment, fetch: Fetch, now_ns: u64) {
        self.hits.tokens += u64::from(request.tokens);
        self.hits.reused += u64::from(assigned.reuse_tokens);
        let blocks = (assigned.reuse_tokens / self.key.block_tokens) as usize;
        let reused = &request.hashes[..blocks.min(request.hashes.len())];
        self.hot.note(request.context, reused, now_ns);
        if from_store(assigned, fetch) {
            self.fetched.note(request.context, reused, now_ns);
        }
    }

    /// Returns the locations of a whole prefix.
    pub(super) fn places_of(&mut self, row: &HotRow, most: usize, found: &mut PrefixMatches) -> PrefixPlaces {
        // The context belongs to this index, and the chain is no longer than a prompt.
        let _: Result<(), _> = self.index().find(row.context, &row.chain, most, Tiers::SHARED, found);
        let whole = || found.matches().iter().filter(|found| found.blocks as usize == row.chain.len());
        let instances = whole().filter(|found| self.scheduler.instance_of(found.holder).is_some()).count();
        PrefixPlaces { instances, is_stored: whole().any(|found| self.is_store(found.holder)) }
    }

    /// Returns the number of blocks of a prefix that every instance has.
    pub(super) fn head(&mut self, row: &HotRow, found: &mut PrefixMatches) -> usize {
        // The contexts of a pool are those of its index.
        let _: Result<(), _> = self.scheduler.index().find(row.context, &row.chain, usize::MAX, Tiers::OWN, found);
        let has = |holder| found.matches().iter().find(|held| held.holder == holder).map_or(0, |held| held.blocks);
        let instances = (0..self.prefill.len()).filter_map(|at| self.scheduler.holder(at).ok());
        instances.map(has).min().unwrap_or(0) as usize
    }
}

fn note_name(names: &mut Vec<Arc<str>>, at: usize, name: &Arc<str>) {
    names.resize(names.len().max(at + 1), "".into());
    names[at] = Arc::clone(name);
}

/// Returns true if a request fetches its reused blocks from the shared store. A store that spreads blocks over its
/// parts is not among the sources, but then no instance has all reused blocks.
fn from_store(assigned: &Assignment, fetch: Fetch) -> bool {
    let has_all = |source: &&FetchSource| source.tokens >= assigned.reuse_tokens;
    let mut whole = assigned.sources.iter().filter(has_all);
    matches!(fetch, Fetch::Pool { .. }) && whole.clone().all(|source| source.instance.is_none())
        || whole.any(|source| source.instance.is_none())
}

/// All pools, by number.
#[derive(Default)]
pub struct Pools {
    by_number: BTreeMap<u32, Pool>,
    next: u32,
    scratch: Scratch,
}

impl Pools {
    pub(super) fn get(&self, number: u32) -> Option<&Pool> {
        self.by_number.get(&number)
    }

    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut Pool> {
        self.by_number.get_mut(&number)
    }

    /// Returns a pool, with scratch memory for a lookup.
    pub(super) fn with_scratch(&mut self, number: u32) -> Option<(&mut Pool, &mut Scratch)> {
        let pool = self.by_number.get_mut(&number)?;
        Some((pool, &mut self.scratch))
    }

    /// Returns all pools in the order of their creation, with scratch memory for lookups.
    pub(super) fn iter_with_scratch(&mut self) -> (impl Iterator<Item = (u32, &mut Pool)>, &mut Scratch) {
        let pools = self.by_number.iter_mut().map(|(number, pool)| (*number, pool));
        (pools, &mut self.scratch)
    }

    /// Returns all pools in the order of their creation.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Pool)> {
        self.by_number.iter().map(|(number, pool)| (*number, pool))
    }

    /// Returns all pools in the order of their creation, to be changed.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut Pool)> {
        self.by_number.iter_mut().map(|(number, pool)| (*number, pool))
    }

    /// Returns the number of models with instances.
    #[must_use]
    pub fn models(&self) -> usize {
        self.by_number.len()
    }

    /// Returns the number of the pool with this key.
    pub(super) fn find(&self, key: &PoolKey) -> Option<u32> {
        self.by_number.iter().find(|(_, pool)| pool.key == *key).map(|(number, _)| *number)
    }

    /// Returns the number of the pool that a context is in.
    pub(super) fn of_context(&self, context: &PromptContext) -> Result<u32, ConductorError> {
        self.find(&PoolKey::of(context)).ok_or_else(|| unknown_model(context))
    }

    /// Returns the number of the pool with this key; creates it if it is new.
    pub(super) fn get_or_make(
        &mut self,
        key: PoolKey,
        token_bytes: u64,
        config: &ConductorConfig,
    ) -> Result<u32, ConductorError> {
        if let Some(known) = self.find(&key) {
            return Ok(known);
        }
        if self.by_number.len() >= config.max_pools {
            return Err(ConductorError::Limit { limit: Limit::Models, most: config.max_pools });
        }
        let pool = Pool::new(key, token_bytes, config)?;
        let number = self.next;
        self.next += 1;
        self.by_number.insert(number, pool);
        Ok(number)
    }

    /// Removes a pool without instances and requests.
    pub(super) fn drop_unused(&mut self, number: u32) {
        if self.by_number.get(&number).is_some_and(|pool| pool.instances == 0 && pool.requests == 0) {
            self.by_number.remove(&number);
        }
    }

    /// Drops all blocks of an instance from the index.
    pub(super) fn clear(&mut self, number: u32, at: usize) -> Result<(), ConductorError> {
        match self.by_number.get_mut(&number) {
            Some(pool) => Ok(pool.scheduler.cleared(at)?),
            None => Ok(()),
        }
    }

    /// Lets lookups answer the restored blocks of an instance.
    pub(super) fn show_restored(&mut self, number: u32, at: usize) -> Result<(), ConductorError> {
        match self.by_number.get_mut(&number) {
            Some(pool) => {
                let holder = pool.scheduler.holder(at)?;
                Ok(pool.index().show(holder).map_err(SchedulerError::from)?)
            }
            None => Ok(()),
        }
    }

    /// Notes that a part of the shared store has a block of a model, or has it no longer. Returns false if no instance
    /// serves that model.
    ///
    /// # Errors
    /// When there are too many holders.
    pub fn store_has(
        &mut self,
        part: u64,
        tenant: &str,
        model: &str,
        hash: u64,
        there: bool,
    ) -> Result<bool, ConductorError> {
        let named = |known: &str| known == model || known.rsplit('/').next() == Some(model);
        let mut told = false;
        for pool in self.by_number.values_mut().filter(|pool| pool.key.tenant == tenant && named(&pool.key.model)) {
            pool.change_store(part, hash, there)?;
            told = true;
        }
        Ok(told)
    }

    /// Notes that a part of the shared store was cleared, for every model.
    pub fn store_cleared(&mut self, part: u64) {
        self.by_number.values_mut().for_each(|pool| pool.clear_store(part));
    }
}

impl PoolKey {
    /// Returns the key of the pool that a context is in.
    fn of(context: &PromptContext) -> Self {
        Self { tenant: context.tenant.clone(), model: context.model.clone(), block_tokens: context.block_tokens }
    }
}

fn unknown_model(context: &PromptContext) -> ConductorError {
    ConductorError::UnknownModel {
        model: context.model.clone(),
        tenant: context.tenant.clone(),
        block_tokens: context.block_tokens,
    }
}

/// Returns the key of the context of engines that report events.
fn event_context(key: &PoolKey) -> PromptContext {
    let PoolKey { tenant, model, block_tokens } = key.clone();
    PromptContext { tenant, model, block_tokens, ..PromptContext::default() }
}

/// Returns the key of the context that all contexts beyond the maximum share.
fn everything() -> PromptContext {
    PromptContext { salt: "\u{0}more contexts".to_owned(), ..PromptContext::default() }
}

/// Returns a salt for a context's name.
fn salt_of(key: &PromptContext) -> u64 {
    let name = format!("{}\u{0}{}\u{0}{}", key.lora, key.salt, key.block_tokens);
    Digest::of(key.tenant.as_bytes(), name.as_bytes()).0 as u64
}

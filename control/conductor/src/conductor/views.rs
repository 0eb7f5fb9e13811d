//! Questions that change nothing: who has how much of a prompt, why a request went where, how instances are, which
//! prefixes are hot and which of these are worth a copy.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Conductor;
use super::calls::{Answer, AssignedInstances, Why};
use super::config::MAX_PROMPT_BLOCKS;
use super::error::{ConductorError, bad};
use super::instance_spec::Part;
use super::pools::{Hits, Pool, PoolKey};
use super::requests::RequestState;
use crate::copies::{CopyConfig, CopyCounts, CopyOrder, PrefixFetch, Sources};
use crate::index::{ContextId, ContextKey, Tier, Tiers};
use crate::policy::Choice;
use crate::scheduler::SchedulerError;

/// The most holders in an answer.
const MOST_HOLDERS: usize = 1_024;
/// Candidates in an explanation at most.
const CANDIDATES: usize = 64;
/// Holders of a hot prefix that are counted at most.
const HOT_HOLDERS: usize = 1_024;
/// How often a minute a hot prefix comes that counts.
const LEAST_PER_MINUTE: f64 = 0.5;
/// Prefixes of a model that are looked at for copies.
const COPY_ROWS: usize = 64;

/// Who has how much of the beginning of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Most first.
    pub holders: Vec<PrefixHolding>,
    /// Instances that are not among the holders and of whose caches something is not known.
    pub unknown: Vec<Arc<str>>,
    /// Tokens that the shared store and all instances can give together.
    pub pooled_tokens: u32,
}

/// What an instance has of the beginning of a prompt, in tokens without a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixHolding {
    /// Who.
    pub instance: Arc<str>,
    /// On its GPU.
    pub gpu_tokens: u32,
    /// There or in its memory.
    pub dram_tokens: u32,
    /// There, in its memory or on its SSD.
    pub ssd_tokens: u32,
    /// Whether something of its cache is not known.
    pub degraded: bool,
}

/// An instance as everybody sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceRow {
    /// Its name.
    pub name: Arc<str>,
    /// Its incarnation.
    pub incarnation: u64,
    /// Whose, of which model.
    pub pool: PoolKey,
    /// What it does.
    pub part: Part,
    /// Where it is reached.
    pub address: String,
    /// Whether it missed reports.
    pub doubted: bool,
    /// Whether an operator has taken it out.
    pub held: bool,
    /// Whether something of its cache is not known.
    pub degraded: bool,
    /// Prefills booked there.
    pub prefills: u32,
    /// Until these are done, in nanoseconds.
    pub wait_ns: u64,
    /// Tokens of KV cache of decodes booked there.
    pub decode_tokens: u64,
    /// These decodes.
    pub decodes: u32,
    /// How long ago it was heard of, in nanoseconds.
    pub silent_ns: u64,
}

/// A pool as everybody sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRow {
    /// Whose, of which model.
    pub key: PoolKey,
    /// Instances.
    pub instances: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that wait or are booked.
    pub requests: usize,
    /// Blocks in the index.
    pub blocks: usize,
    /// Blocks that the index forgot for want of room.
    pub forgotten_blocks: usize,
    /// Tokens placed and reused.
    pub hits: Hits,
    /// Mean relative error of late predictions of prefills, in thousandths.
    pub error_permille: u32,
    /// Whether hashes of requests and of events seem to be of different kinds.
    pub mismatch: bool,
    /// True while the index may lack blocks that its instances hold.
    pub incomplete: bool,
}

/// Everything there is, but for requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// [`super::InstanceRegistry::version`].
    pub version: u64,
    /// Instances by name.
    pub instances: Vec<InstanceRow>,
    /// Pools in the order of their making.
    pub pools: Vec<PoolRow>,
}

/// An instance as it was weighed for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Who.
    pub instance: Arc<str>,
    /// Whether it may be chosen.
    pub takes: bool,
    /// Tokens of the prompt that it has or will have.
    pub held_tokens: u32,
    /// Until all that is booked there is done, in nanoseconds.
    pub wait_ns: u64,
    /// Until its NIC is free, in nanoseconds.
    pub egress_wait_ns: u64,
    /// Its speed beside the model's, in thousandths of time.
    pub factor_permille: u32,
}

/// Why a request went where it went, by what is known now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementExplanation {
    /// What it was answered.
    pub answer: Answer,
    /// What it would be answered now, if it had to go at once.
    pub now: Option<AssignedInstances>,
    /// Instances, those that are free soonest first.
    pub candidates: Vec<Candidate>,
    /// Tokens that can be had from anywhere.
    pub pooled_tokens: u32,
}

/// A beginning of prompts that is reused often.
#[derive(Clone, Debug, PartialEq)]
pub struct HotPrefix {
    /// Of which model.
    pub pool: PoolKey,
    /// The hash of its last block.
    pub hash: u64,
    /// Its tokens.
    pub tokens: u64,
    /// Requests a minute that reuse it and nothing longer, of late; for certain.
    pub per_minute: f64,
    /// Instances that have all of it.
    pub holders: usize,
    /// Whether the shared store has all of it.
    pub stored: bool,
    /// Whether the Conductor has had it copied to second nodes of the store.
    pub copied: bool,
}

/// A prefix of a model: the pool's number, the context, the hash of its last block.
pub type CopyKey = (u32, ContextId, u64);

/// Blocks of the shared store that are to be copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyWanted {
    /// The name under which [`Conductor::copy_ended`] knows them.
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

impl Conductor {
    /// Who has how much of the beginning of a prompt; up to `most`, who has most first. `tiers` are those that count.
    ///
    /// # Errors
    /// When nobody serves the model, or there are too many hashes.
    pub fn query(
        &mut self,
        context: &ContextKey,
        hashes: &[u64],
        most: usize,
        tiers: Tiers,
    ) -> Result<Holdings, ConductorError> {
        if hashes.len() > MAX_PROMPT_BLOCKS {
            return Err(bad(format!("a prompt of {} blocks; at most {MAX_PROMPT_BLOCKS}", hashes.len())));
        }
        let number = self.pools.of_context(context)?;
        let Some((pool, scratch)) = self.pools.with_scratch(number) else { return Err(bad("the pool is gone")) };
        let (context, hashes) = pool.context(context, Arc::from(hashes))?;
        // One more, for the shared store is no instance.
        let most = most.min(MOST_HOLDERS);
        let found = scratch.found_mut();
        pool.index().find(context, &hashes, most + 1, tiers, found).map_err(SchedulerError::from)?;
        let pooled = pool.index().held_by_anybody(context, &hashes, Tiers::SHARED).map_err(SchedulerError::from)?;
        let block_tokens = pool.key.block_tokens;
        let mut answer = Vec::with_capacity(found.matches().len());
        for holder in found.matches().iter().map(|found| found.holder) {
            let Some(at) = pool.scheduler.instance_of(holder) else { continue };
            let instance = pool.prefill_name(at);
            let [gpu, dram, ssd] = pool.by_tiers(holder, found).map(|blocks| blocks.saturating_mul(block_tokens));
            let degraded = self.instances.get(&instance).is_some_and(|known| known.cache.is_incomplete());
            answer.push(PrefixHolding { instance, gpu_tokens: gpu, dram_tokens: dram, ssd_tokens: ssd, degraded });
        }
        answer.truncate(most);
        let listed: BTreeSet<&Arc<str>> = answer.iter().map(|holding| &holding.instance).collect();
        let unknown = self.instances.unknown_in(number).filter(|name| !listed.contains(name)).cloned();
        let unknown = unknown.take(most - answer.len()).collect();
        Ok(Holdings { holders: answer, unknown, pooled_tokens: pooled.saturating_mul(block_tokens) })
    }

    /// Tokens of the beginning of a prompt that the shared store has by itself.
    ///
    /// # Errors
    /// When nobody serves the model, or there are too many contexts.
    pub fn in_store(&mut self, context: &ContextKey, hashes: &[u64]) -> Result<u32, ConductorError> {
        let number = self.pools.of_context(context)?;
        let Some(pool) = self.pools.get_mut(number) else { return Err(bad("the pool is gone")) };
        let (context, hashes) = pool.context(context, Arc::from(hashes))?;
        let blocks = pool.index().held_by_anybody(context, &hashes, Tiers::only(Tier::Pool));
        Ok(blocks.map_err(SchedulerError::from)?.saturating_mul(pool.key.block_tokens))
    }

    /// Why a request went where it went. Ids are each tenant's own: where several have this one, it is that of the
    /// first by name, so the default tenant's before all others.
    ///
    /// # Errors
    /// When it is not known, any more or at all.
    pub fn explain(&mut self, name: &str, now_ns: u64) -> Result<PlacementExplanation, ConductorError> {
        let Some((id, kept)) = self.requests.named(name) else {
            return Err(ConductorError::UnknownRequest { name: name.to_owned() });
        };
        let answer = match &kept.state {
            RequestState::Placed(assigned) => Answer::Assigned(assigned.clone()),
            RequestState::Waiting => Answer::Queued { reservation: id, position: 0, eta_ns: 0 },
            RequestState::Orphan(_) => Answer::Refused { why: Why::Lost, retry_after_ns: 0 },
        };
        let Some((pool, scratch)) = self.pools.with_scratch(kept.pool) else { return Err(bad("the pool is gone")) };
        let orphan = if let RequestState::Orphan(request) = &kept.state { Some(request) } else { None };
        let Some(request) = pool.scheduler.request(id).or(orphan).cloned() else {
            return Err(bad("the books do not have this request"));
        };
        let (prefill, _, choice) = pool.scheduler.explain(&request, now_ns);
        let named = prefill.iter().enumerate().filter(|(at, _)| pool.scheduler.holder(*at).is_ok());
        let mut candidates: Vec<Candidate> = named
            .map(|(at, view)| Candidate {
                instance: pool.prefill_name(at),
                takes: view.alive,
                held_tokens: view.held,
                wait_ns: view.wait_ns,
                egress_wait_ns: view.egress_wait_ns,
                factor_permille: (view.factor * 1000.0) as u32,
            })
            .collect();
        candidates.sort_by_key(|candidate| (!candidate.takes, candidate.wait_ns));
        candidates.truncate(CANDIDATES);
        let lease_ns = self.requests.lease_ns();
        let now = match choice {
            Choice::Place(placement) => Some(pool.assigned(id, &request, &placement, lease_ns, scratch)),
            _ => None,
        };
        let pooled = pool.index().held_by_anybody(request.context, &request.hashes, Tiers::SHARED);
        let pooled_tokens = pooled.unwrap_or(0).saturating_mul(pool.key.block_tokens);
        Ok(PlacementExplanation { answer, now, candidates, pooled_tokens })
    }

    /// Instances and pools as they are now.
    #[must_use]
    pub fn table(&mut self, now_ns: u64) -> Table {
        let mut instances = Vec::new();
        for (name, known) in self.instances.iter() {
            let scheduler = self.pools.get(known.pool).map(|pool| &pool.scheduler);
            let prefill = scheduler.zip(known.numbers.prefill).map(|(of, at)| of.prefill_booked(at, now_ns));
            let decode = scheduler.zip(known.numbers.decode).map(|(of, at)| of.decode_booked(at, now_ns));
            let ((prefills, wait_ns), (decode_tokens, decodes)) =
                (prefill.unwrap_or_default(), decode.unwrap_or_default());
            instances.push(InstanceRow {
                name: Arc::clone(name),
                incarnation: known.spec.incarnation,
                pool: known.spec.pool(),
                part: known.spec.part,
                address: known.spec.address.clone(),
                doubted: known.doubted,
                held: known.held,
                degraded: known.cache.is_incomplete(),
                prefills,
                wait_ns,
                decode_tokens,
                decodes,
                silent_ns: now_ns.saturating_sub(known.heard_ns),
            });
        }
        let known = &self.instances;
        let row = |(number, pool): (u32, &mut Pool)| {
            let stats = pool.index().stats();
            PoolRow {
                key: pool.key.clone(),
                instances: pool.instances,
                waiting: pool.scheduler.waiting(),
                requests: pool.requests,
                blocks: stats.blocks,
                forgotten_blocks: stats.forgotten_blocks,
                hits: pool.hits,
                error_permille: (pool.scheduler.model().error() * 1000.0).min(1e6) as u32,
                mismatch: pool.is_mismatched() || known.has_alien(number),
                incomplete: known.unknown_in(number).next().is_some(),
            }
        };
        Table { version: known.version(), instances, pools: self.pools.iter_mut().map(row).collect() }
    }

    /// True while the index may lack blocks that instances of this model hold: answers are lower bounds.
    #[must_use]
    pub fn incomplete(&self, key: &PoolKey) -> bool {
        self.pools.find(key).is_some_and(|number| self.instances.unknown_in(number).next().is_some())
    }

    /// Whether hashes of requests and of events seem to be of different kinds, of instances of this model.
    #[must_use]
    pub fn mismatched(&self, key: &PoolKey) -> bool {
        let Some(number) = self.pools.find(key) else { return false };
        self.pools.get(number).is_some_and(Pool::is_mismatched) || self.instances.has_alien(number)
    }

    /// How many models have instances.
    #[must_use]
    pub fn models(&self) -> usize {
        self.pools.count()
    }

    /// The beginnings of prompts that are reused most, of all models, `count` at most; those of less than one request
    /// in two minutes are left out.
    pub fn hot(&mut self, count: usize, now_ns: u64) -> Vec<HotPrefix> {
        let mut hot = Vec::new();
        let (pools, scratch) = self.pools.iter_with_scratch();
        for (number, pool) in pools {
            let rows = pool.hot.most(count, now_ns).into_iter();
            for row in rows.take_while(|row| row.per_minute >= LEAST_PER_MINUTE) {
                let places = pool.places_of(&row, HOT_HOLDERS, scratch.found_mut());
                let hash = row.chain.last().copied().unwrap_or_default();
                hot.push(HotPrefix {
                    pool: pool.key.clone(),
                    hash,
                    tokens: row.chain.len() as u64 * u64::from(pool.key.block_tokens),
                    per_minute: row.per_minute,
                    holders: places.instances,
                    stored: places.is_stored,
                    copied: self.copies.is_copied(&(number, row.context, hash)),
                });
            }
        }
        hot.sort_by(|one, other| other.per_minute.total_cmp(&one.per_minute));
        hot.truncate(count);
        hot
    }

    /// What is to be copied now to second nodes of a store of so many nodes. Nothing where it has only one. What
    /// requests fetch from the store was counted as they were placed, and [`crate::copies`] says what pays. What every
    /// instance has is fetched by nobody, however often it is used: such a head of all prompts is not copied along.
    pub fn copies_wanted(&mut self, nodes: u32, now_ns: u64) -> Vec<CopyWanted> {
        let sources = Sources { nodes, nic_bytes_s: self.config.scheduler.nic_bytes_s };
        let mut all: Vec<PrefixFetch<CopyKey>> = Vec::new();
        let mut chains: Vec<(Arc<[u64]>, usize)> = Vec::new();
        let (pools, scratch) = self.pools.iter_with_scratch();
        for (number, pool) in pools {
            let block_bytes = u64::from(pool.key.block_tokens) * pool.token_bytes;
            let rows = pool.fetched.most(COPY_ROWS, now_ns).into_iter();
            for row in rows.take_while(|row| row.per_minute >= LEAST_PER_MINUTE) {
                let head = pool.head(&row, scratch.found_mut());
                let pieces = row.chain.len().saturating_sub(head) as u64;
                let Some(last) = row.chain.last().filter(|_| pieces > 0) else { continue };
                let key = (number, row.context, *last);
                let (per_s, bytes) = (row.per_minute / 60.0, pieces * block_bytes);
                all.push(PrefixFetch { key, per_s, bytes, pieces, places: 1 });
                chains.push((row.chain, head));
            }
        }
        let mut wanted = Vec::new();
        for order in self.copies.decide(&all, sources, now_ns) {
            let CopyOrder::Copy(key) = order else { continue };
            let Some(at) = all.iter().position(|one| one.key == key) else { continue };
            let Some(pool) = self.pools.get(key.0) else { continue };
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

//! Questions that change nothing: who has how much of a prompt, why a request went where, how instances are.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::cache::{MISMATCH, pool_key};
use super::error::bad;
use super::requests::{State, unknown_model};
use super::{Answer, AssignedInstances, Desk, DeskError, Hits, MAX_PROMPT_BLOCKS, Part, PoolKey, Why};
use crate::index::{ContextKey, HolderId, Tier, Tiers};
use crate::scheduler::SchedulerError;

/// The most holders in an answer.
const MOST_HOLDERS: usize = 1_024;
/// Candidates in an explanation at most.
const CANDIDATES: usize = 64;

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
    /// [`Desk::version`].
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

impl Desk {
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
    ) -> Result<Holdings, DeskError> {
        if hashes.len() > MAX_PROMPT_BLOCKS {
            return Err(bad(format!("a prompt of {} blocks; at most {MAX_PROMPT_BLOCKS}", hashes.len())));
        }
        let number = self.pool_of(&pool_key(context)).ok_or_else(|| unknown_model(context))?;
        let Some(pool) = self.pools.get_mut(&number) else { return Err(bad("the pool is gone")) };
        let (context, hashes) = pool.context(context, Arc::from(hashes))?;
        // One more, for the shared store is no instance.
        let most = most.min(MOST_HOLDERS);
        let found = self.scratch.found_mut();
        pool.index().find(context, &hashes, most + 1, tiers, found).map_err(SchedulerError::from)?;
        let pooled = pool.index().held_by_anybody(context, &hashes, Tiers::SHARED).map_err(SchedulerError::from)?;
        let block_tokens = pool.key.block_tokens;
        let holders: Vec<HolderId> = self.scratch.found().matches().iter().map(|found| found.holder).collect();
        let mut answer = Vec::with_capacity(holders.len());
        for holder in holders {
            let Some(pool) = self.pools.get(&number) else { break };
            let Some(at) = pool.conductor.instance_of(holder) else { continue };
            let instance = pool.prefill_name(at);
            let [gpu, dram, ssd] = self.by_tiers(number, holder).map(|blocks| blocks.saturating_mul(block_tokens));
            let degraded = self.instances.get(&instance).is_some_and(|known| known.degraded || known.away);
            answer.push(PrefixHolding { instance, gpu_tokens: gpu, dram_tokens: dram, ssd_tokens: ssd, degraded });
        }
        answer.truncate(most);
        let listed: BTreeSet<&Arc<str>> = answer.iter().map(|holding| &holding.instance).collect();
        let unknown = self.unknown_in(number).filter(|name| !listed.contains(name)).cloned();
        let unknown = unknown.take(most - answer.len()).collect();
        Ok(Holdings { holders: answer, unknown, pooled_tokens: pooled.saturating_mul(block_tokens) })
    }

    /// Tokens of the beginning of a prompt that the shared store has by itself.
    ///
    /// # Errors
    /// When nobody serves the model, or there are too many contexts.
    pub fn in_store(&mut self, context: &ContextKey, hashes: &[u64]) -> Result<u32, DeskError> {
        let number = self.pool_of(&pool_key(context)).ok_or_else(|| unknown_model(context))?;
        let Some(pool) = self.pools.get_mut(&number) else { return Err(bad("the pool is gone")) };
        let (context, hashes) = pool.context(context, Arc::from(hashes))?;
        let blocks = pool.index().held_by_anybody(context, &hashes, Tiers::only(Tier::Pool));
        Ok(blocks.map_err(SchedulerError::from)?.saturating_mul(pool.key.block_tokens))
    }

    /// Why a request went where it went. Ids are each tenant's own: where several have this one, it is that of the
    /// first by name, so the default tenant's before all others.
    ///
    /// # Errors
    /// When it is not known, any more or at all.
    pub fn explain(&mut self, name: &str, now_ns: u64) -> Result<PlacementExplanation, DeskError> {
        let known = self.by_name.values().find_map(|names| names.get(name));
        let known = known.and_then(|id| Some((*id, self.requests.get(id)?)));
        let Some((id, kept)) = known else {
            return Err(DeskError::UnknownRequest { name: name.to_owned() });
        };
        let number = kept.pool;
        let answer = match &kept.state {
            State::Placed(assigned) => Answer::Assigned(assigned.clone()),
            State::Waiting => Answer::Queued { reservation: id, position: 0, eta_ns: 0 },
            State::Orphan(_) => Answer::Refused { why: Why::Lost, retry_after_ns: 0 },
        };
        let Some(pool) = self.pools.get(&number) else { return Err(bad("the pool is gone")) };
        let orphan = if let State::Orphan(request) = &kept.state { Some(request) } else { None };
        let Some(request) = pool.conductor.request(id).or(orphan).cloned() else {
            return Err(bad("the books do not have this request"));
        };
        let (prefill, _, choice) = pool.conductor.explain(&request, now_ns);
        let named = prefill.iter().enumerate().filter(|(at, _)| pool.conductor.holder(*at).is_ok());
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
        let now = match choice {
            crate::policy::Choice::Place(placement) => Some(placement),
            _ => None,
        };
        let now = now.map(|placement| self.assigned(number, id, &request, &placement));
        let Some(pool) = self.pools.get_mut(&number) else { return Err(bad("the pool is gone")) };
        let block_tokens = pool.key.block_tokens;
        let pooled = pool.index().held_by_anybody(request.context, &request.hashes, Tiers::SHARED);
        let pooled_tokens = pooled.unwrap_or(0).saturating_mul(block_tokens);
        Ok(PlacementExplanation { answer, now, candidates, pooled_tokens })
    }

    /// Instances and pools as they are now.
    #[must_use]
    pub fn table(&mut self, now_ns: u64) -> Table {
        let mut instances = Vec::with_capacity(self.instances.len());
        for (name, known) in &self.instances {
            let books = self.pools.get(&known.pool).map(|pool| &pool.conductor);
            let prefill = books.zip(known.prefill).map(|(books, at)| books.prefill_booked(at, now_ns));
            let decode = books.zip(known.decode).map(|(books, at)| books.decode_booked(at, now_ns));
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
                degraded: known.degraded || known.away,
                prefills,
                wait_ns,
                decode_tokens,
                decodes,
                silent_ns: now_ns.saturating_sub(known.heard_ns),
            });
        }
        let incomplete: BTreeSet<u32> =
            self.pools.keys().copied().filter(|number| self.unknown_in(*number).next().is_some()).collect();
        let alien: BTreeSet<u32> =
            self.instances.values().filter(|known| known.alien).map(|known| known.pool).collect();
        let row = |(number, pool): (&u32, &mut super::Pool)| {
            let stats = pool.index().stats();
            PoolRow {
                key: pool.key.clone(),
                instances: pool.instances,
                waiting: pool.conductor.waiting(),
                requests: pool.requests,
                blocks: stats.blocks,
                forgotten_blocks: stats.forgotten_blocks,
                hits: pool.hits,
                error_permille: (pool.conductor.model().error() * 1000.0).min(1e6) as u32,
                mismatch: pool.surprises >= MISMATCH || alien.contains(number),
                incomplete: incomplete.contains(number),
            }
        };
        Table { version: self.version, instances, pools: self.pools.iter_mut().map(row).collect() }
    }
}

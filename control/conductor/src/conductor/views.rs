//! Read-only views: explanations of placements, instances and pools, hot prefixes; and the prefixes to be replicated.

use std::sync::Arc;

use bincode::{Decode, Encode};

use super::Conductor;
use super::cache_feed::FeedProgress;
use super::calls::{AssignedGroup, Assignment, ScheduleRefusal, ScheduleReply};
use super::error::{ConductorError, bad};
use super::instance_spec::InstancePart;
use super::pools::{Pool, PoolKey};
use super::prefixes::{self, HoldersWithStore, PrefixHolders, QueryPrompt};
use super::requests::RequestState;
use crate::copies::{CopyConfig, CopyCounts, CopyOrder, PrefixFetch, Sources};
use crate::index::{ContextId, PromptContext, Tiers};
use crate::policy::{Choice, DecodeView};
use crate::scheduler::Scheduler;

/// Maximum number of candidates in an explanation.
const CANDIDATES: usize = 64;
/// Maximum number of counted holders of a hot prefix.
const HOT_HOLDERS: usize = 1_024;
/// Minimum rate of a hot prefix, per minute.
const LEAST_PER_MINUTE: f64 = 0.5;
/// Number of prefixes of a model that are considered for replication.
const COPY_ROWS: usize = 64;

/// All instances and models, for routers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct InstanceTable {
    /// Version of the registry: [`super::InstanceRegistry::version`].
    pub version: u64,
    /// Instances, by name.
    pub instances: Vec<InstanceStatus>,
    /// Models, in the order of their creation, each with its queue.
    pub models: Vec<ModelStatus>,
}

/// State of an instance, for routers.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct InstanceStatus {
    pub instance: Arc<str>,
    pub incarnation: u64,
    pub tenant: String,
    pub model: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Phases that it serves.
    pub part: InstancePart,
    /// Address at which routers reach it.
    pub address: String,
    /// True if it is not chosen: it missed reports, or an operator holds it.
    pub suspect: bool,
    /// True if its cache is not completely known.
    pub degraded: bool,
    /// Number of prefills booked there.
    pub prefills: u32,
    /// Time until these are done, in nanoseconds.
    pub wait_ns: u64,
    /// Tokens of KV cache of decodes booked there.
    pub decode_tokens: u64,
    /// Number of these decodes.
    pub decodes: u32,
    /// Time since its last message, in nanoseconds.
    pub silent_ns: u64,
    /// Duration of its decode steps relative to the model's, in thousandths.
    pub decode_factor_permille: u32,
}

/// State of a model.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ModelStatus {
    pub tenant: String,
    pub model: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Number of instances.
    pub instances: u64,
    /// Number of requests that wait.
    pub waiting: u64,
    /// Number of requests that wait or are booked.
    pub requests: u64,
    /// Blocks in the index.
    pub blocks: u64,
    /// Blocks that the index evicted because it was full.
    pub forgotten_blocks: u64,
    /// Tokens of placed prompts.
    pub tokens: u64,
    /// Tokens of these that were predicted to be reused.
    pub reused_tokens: u64,
    /// Recent mean relative error of predicted prefill durations, in thousandths.
    pub error_permille: u32,
    /// True if the hashes of requests and of events seem to be of different kinds.
    pub mismatch: bool,
    /// Learned duration of decode steps, and lengths of outputs.
    pub decode: DecodeStatus,
    /// Number of sessions whose next turn is expected.
    pub sessions: u64,
}

/// State of a model's decode model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct DecodeStatus {
    /// Duration of a step, in nanoseconds.
    pub base_ns: u64,
    /// Addition for each resident token of KV cache, in picoseconds.
    pub token_ps: u64,
    /// Addition for each request of the batch, in nanoseconds.
    pub request_ns: u64,
    /// Number of reports from which these were fitted; 0 if they are the initial constants.
    pub reports: u64,
    /// Recent mean relative error of predicted steps, in thousandths.
    pub error_permille: u32,
    /// Median of the last outputs, in tokens; 0 while too few requests have finished.
    pub output_p50: u32,
    /// Their 90th percentile.
    pub output_p90: u32,
    /// Recent mean error of expected outputs relative to the generated ones, in thousandths.
    pub output_error_permille: u32,
    /// Part of the recent outputs that were no longer than the 90th percentile expected of them, in thousandths.
    pub output_within_permille: u32,
}

impl DecodeStatus {
    fn of(scheduler: &Scheduler) -> Self {
        let (decodes, learned) = (scheduler.decodes(), scheduler.decodes().learned());
        let (output_p50, output_p90) = decodes.output_quantiles().unwrap_or_default();
        let errors = decodes.output_errors().unwrap_or_default();
        Self {
            base_ns: learned.model().base_ns as u64,
            token_ps: (learned.model().token_ns * 1e3) as u64,
            request_ns: learned.model().request_ns as u64,
            reports: learned.reports(),
            error_permille: permille(learned.error()),
            output_p50,
            output_p90,
            output_error_permille: permille(errors.relative),
            output_within_permille: permille(errors.within_high),
        }
    }
}

/// Returns a ratio in thousandths.
fn permille(ratio: f64) -> u32 {
    (ratio * 1000.0).round().min(1e6) as u32
}

/// State of an instance, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceRow {
    /// State as routers see it.
    pub status: InstanceStatus,
    /// True if it missed reports.
    pub suspect: bool,
    /// True while an operator holds it.
    pub held: bool,
    /// Progress of its cache feed; none if it reports no cache, or only decodes.
    pub progress: Option<FeedProgress>,
}

/// State of a pool, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRow {
    /// State as routers see it.
    pub status: ModelStatus,
    /// True while the index may lack blocks that its instances hold.
    pub incomplete: bool,
    /// Number of its instances that report their caches.
    pub feeds: usize,
    /// Number of these whose caches are completely known.
    pub complete_feeds: usize,
    /// Number of batches that are known to be published and are not applied yet.
    pub missing_batches: u64,
}

/// Snapshot of all instances and pools, without requests, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Version of the registry: [`super::InstanceRegistry::version`].
    pub version: u64,
    /// Instances, by name.
    pub instances: Vec<InstanceRow>,
    /// Pools, in the order of their creation.
    pub pools: Vec<PoolRow>,
}

impl From<Table> for InstanceTable {
    fn from(table: Table) -> Self {
        Self {
            version: table.version,
            instances: table.instances.into_iter().map(|row| row.status).collect(),
            models: table.pools.into_iter().map(|row| row.status).collect(),
        }
    }
}

/// Instance that was considered for a request.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct CandidateStatus {
    pub instance: Arc<str>,
    /// True if it accepts requests.
    pub takes: bool,
    /// Tokens of the prompt that it has or will have.
    pub held_tokens: u32,
    /// Time until all prefills booked there are done, in nanoseconds.
    pub wait_ns: u64,
    /// Time until its NIC is free, in nanoseconds.
    pub egress_wait_ns: u64,
    /// Its durations relative to the model's, in thousandths.
    pub factor_permille: u32,
}

/// Explanation of a placement, from present knowledge.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RequestExplained {
    /// Answer that the request got.
    pub answer: ScheduleReply,
    /// Placement that the request would get now, if it had to be placed at once.
    pub now: Option<Assignment>,
    /// Candidates, those that are free soonest first.
    pub candidates: Vec<CandidateStatus>,
    /// Tokens that all holders can provide together.
    pub pooled_tokens: u32,
}

/// Explanation of a placement, with the pipeline groups that prefill.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PlacementExplained {
    /// The explanation; of a group, its placements have the last stage.
    pub explained: RequestExplained,
    /// Group that prefills the request, if one does.
    pub group: Option<AssignedGroup>,
    /// Group that would prefill it, if it had to be placed now.
    pub group_now: Option<AssignedGroup>,
}

/// Prefix that is reused often.
#[derive(Clone, Debug, PartialEq)]
pub struct HotPrefix {
    /// Tenant, model and block size.
    pub pool: PoolKey,
    /// Hash of its last block.
    pub hash: u64,
    /// Number of its tokens.
    pub tokens: u64,
    /// Recent rate of requests that reuse it and nothing longer, per minute; a lower bound.
    pub per_minute: f64,
    /// Number of instances that have all of it.
    pub holders: usize,
    /// True if the shared store has all of it.
    pub stored: bool,
    /// True if the Conductor has replicated it to other nodes of the store.
    pub copied: bool,
}

/// Key of a prefix: the pool's number, the context, the hash of its last block.
pub type CopyKey = (u32, ContextId, u64);

/// Blocks of the shared store that are to be replicated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyWanted {
    /// Key for [`Conductor::copy_ended`].
    pub key: CopyKey,
    /// Tenant, model and block size.
    pub pool: PoolKey,
    /// Hashes of the blocks.
    pub hashes: Vec<u64>,
}

/// State of the Conductor's replicas of prefixes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct CopyState {
    /// Their limits.
    pub config: CopyConfig,
    /// Bytes of all replicas, including those being made.
    pub bytes: u64,
    /// Number of prefixes with a replica.
    pub prefixes: usize,
    /// Number of replicas being made.
    pub coming: usize,
    pub counts: CopyCounts,
}

impl PlacementExplained {
    /// Explains the placement of a request as [`Conductor::explain`] does, with the pipeline groups.
    ///
    /// # Errors
    /// When the request is not known, or no longer.
    pub fn of(conductor: &mut Conductor, name: &str, now_ns: u64) -> Result<Self, ConductorError> {
        let Some((id, kept)) = conductor.requests.named(name) else {
            return Err(ConductorError::UnknownRequest { name: name.to_owned() });
        };
        let (answer, group) = match &kept.state {
            RequestState::Placed(assigned, group) => (ScheduleReply::Assigned(assigned.clone()), group.clone()),
            RequestState::Waiting => (ScheduleReply::Queued { reservation: id, position: 0, eta_ns: 0 }, None),
            RequestState::Orphan(_) => (ScheduleReply::Refused { why: ScheduleRefusal::Lost, retry_after_ns: 0 }, None),
        };
        let Some((pool, scratch)) = conductor.pools.with_scratch(kept.pool) else {
            return Err(bad("the pool was removed"));
        };
        let orphan = if let RequestState::Orphan(request) = &kept.state { Some(request) } else { None };
        let Some(request) = pool.scheduler.request(id).or(orphan).cloned() else {
            return Err(bad("the scheduler has no such request"));
        };
        let (prefill, _, choice) = pool.scheduler.explain(&request, now_ns);
        let named = prefill.iter().enumerate().filter(|(at, _)| pool.scheduler.holder(*at).is_ok());
        let mut candidates: Vec<CandidateStatus> = named
            .map(|(at, view)| CandidateStatus {
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
        let lease_ns = conductor.requests.lease_ns();
        let (now, group_now) = match choice {
            Choice::Place(placement) => {
                let assigned = pool.assigned(id, &request, &placement, lease_ns, scratch);
                (Some(assigned), pool.assigned_group(&placement))
            }
            _ => (None, None),
        };
        let pooled = pool.index().held_by_anybody(request.context, &request.hashes, Tiers::SHARED);
        let pooled_tokens = pooled.unwrap_or(0).saturating_mul(pool.key.block_tokens);
        let explained = RequestExplained { answer, now, candidates, pooled_tokens };
        Ok(Self { explained, group, group_now })
    }
}

impl Conductor {
    /// Returns the holders of a prompt's prefixes: at most `most`, those with the most tokens first. Only `tiers`
    /// count. No holder has more tokens than the prompt.
    ///
    /// # Errors
    /// When no instance serves the model, or the prompt has too many blocks.
    pub fn query(
        &mut self,
        context: &PromptContext,
        prompt: QueryPrompt<'_>,
        most: usize,
        tiers: Tiers,
    ) -> Result<PrefixHolders, ConductorError> {
        prefixes::query(&mut self.pools, &self.instances, context, prompt, most, tiers)
    }

    /// Returns the holders of a prompt's prefixes as [`Self::query`] does, where the blocks that the shared store has
    /// from the beginning of the prompt on count as memory of every instance that prefills.
    ///
    /// # Errors
    /// Errors of [`Self::query`], and when there are too many contexts.
    pub fn query_with_store(
        &mut self,
        context: &PromptContext,
        prompt: QueryPrompt<'_>,
        most: usize,
        tiers: Tiers,
    ) -> Result<HoldersWithStore, ConductorError> {
        prefixes::query_with_store(&mut self.pools, &self.instances, context, prompt, most, tiers)
    }

    /// Explains the placement of a request. Ids are per tenant: if several tenants use this one, it is the request of
    /// the first tenant by name, so the default tenant's before all others.
    ///
    /// # Errors
    /// When the request is not known, or no longer.
    pub fn explain(&mut self, name: &str, now_ns: u64) -> Result<RequestExplained, ConductorError> {
        PlacementExplained::of(self, name, now_ns).map(|explained| explained.explained)
    }

    /// Returns the present state of instances and pools, for operators.
    #[must_use]
    pub fn table(&mut self, now_ns: u64) -> Table {
        let mut instances = Vec::new();
        for (name, known) in self.instances.iter() {
            let scheduler = self.pools.get(known.pool).map(|pool| &pool.scheduler);
            let prefill = scheduler.zip(known.numbers.prefill).map(|(of, at)| of.prefill_booked(at, now_ns));
            let decode = scheduler.zip(known.numbers.decode).map(|(of, at)| of.decode_booked(at, now_ns));
            let (prefills, wait_ns) = prefill.unwrap_or_default();
            let factor = decode.map_or(1.0, |view| view.factor);
            let DecodeView { tokens: decode_tokens, requests: decodes, .. } = decode.unwrap_or_default();
            let PoolKey { tenant, model, block_tokens } = known.spec.pool();
            let status = InstanceStatus {
                instance: Arc::clone(name),
                incarnation: known.spec.incarnation,
                tenant,
                model,
                block_tokens,
                part: known.spec.part,
                address: known.spec.address.clone(),
                suspect: known.suspect || known.held,
                degraded: known.cache.is_incomplete(),
                prefills,
                wait_ns,
                decode_tokens,
                decodes,
                silent_ns: now_ns.saturating_sub(known.heard_ns),
                decode_factor_permille: permille(factor),
            };
            let progress = known.feed().map(|(progress, _)| progress);
            instances.push(InstanceRow { status, suspect: known.suspect, held: known.held, progress });
        }
        let known = &self.instances;
        let row = |(number, pool): (u32, &mut Pool)| {
            let stats = pool.index().stats();
            let PoolKey { tenant, model, block_tokens } = pool.key.clone();
            let status = ModelStatus {
                tenant,
                model,
                block_tokens,
                instances: pool.instances as u64,
                waiting: pool.scheduler.waiting() as u64,
                requests: pool.requests as u64,
                blocks: stats.blocks as u64,
                forgotten_blocks: stats.forgotten_blocks as u64,
                tokens: pool.hits.tokens,
                reused_tokens: pool.hits.reused,
                error_permille: permille(pool.scheduler.model().error()),
                mismatch: pool.is_mismatched(),
                decode: DecodeStatus::of(&pool.scheduler),
                sessions: pool.scheduler.sessions() as u64,
            };
            let mut row = PoolRow {
                status,
                incomplete: known.unknown_in(number).next().is_some(),
                feeds: 0,
                complete_feeds: 0,
                missing_batches: 0,
            };
            for (progress, is_incomplete) in known.feeds_of(number) {
                row.feeds += 1;
                row.complete_feeds += usize::from(!is_incomplete);
                row.missing_batches += progress.newest - progress.next;
            }
            row
        };
        Table { version: known.version(), instances, pools: self.pools.iter_mut().map(row).collect() }
    }

    /// Returns true while the index may lack blocks that instances of this model hold: answers are lower bounds.
    #[must_use]
    pub fn incomplete(&self, key: &PoolKey) -> bool {
        self.pools.find(key).is_some_and(|number| self.instances.unknown_in(number).next().is_some())
    }

    /// Returns true if queries by tokens may not find blocks that instances of this model hold: their events name
    /// blocks by hashes only, which cannot be computed, or which seem to be computed from another seed.
    #[must_use]
    pub fn has_unfindable_blocks(&self, key: &PoolKey) -> bool {
        let Some(number) = self.pools.find(key) else { return false };
        self.instances.has_unfindable_blocks(number, self.pools.get(number).is_some_and(Pool::is_mismatched))
    }

    /// Returns the number of engine hashes whose token hashes are known, over all models.
    #[must_use]
    pub fn hash_aliases(&self) -> usize {
        self.pools.iter().map(|(_, pool)| pool.hash_aliases()).sum()
    }

    /// Returns the hottest prefixes of all models, at most `count`; prefixes with less than one request in two minutes
    /// are left out.
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

    /// Returns the prefixes to be replicated now to other nodes of a store with this many nodes; none if it has only
    /// one. Fetches from the store were counted as requests were placed, and [`crate::copies`] decides which replicas
    /// pay off. Blocks that every instance has are never fetched, however often they are used: such a common head of
    /// all prompts is not replicated.
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
            let hashes = pool.store_hashes(key.1, &chain[*head..]);
            wanted.push(CopyWanted { key, pool: pool.key.clone(), hashes });
        }
        wanted
    }

    /// Notes that a replica of [`Self::copies_wanted`] was made, or could not be.
    pub fn copy_ended(&mut self, key: CopyKey, made: bool, now_ns: u64) {
        self.copies.ended(key, made, now_ns);
    }

    /// Returns the state of the replicas.
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

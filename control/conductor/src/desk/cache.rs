//! What instances say of their caches: numbered batches, gaps that are asked for again, snapshots.
//!
//! A batch that leaves a gap changes nothing: its publisher is told from which number on to repeat. Who cannot repeat
//! says that something is lost; then the instance holds nothing until it says so again, so that nobody is sent to
//! where blocks may be gone, and counts as degraded until a snapshot.

use std::sync::Arc;

use super::error::bad;
use super::{Desk, DeskError, PoolKey};
use crate::index::{ContextKey, HolderId, Tier, Tiers};
use crate::scheduler::SchedulerError;

/// The most changes of a batch.
const MOST_CHANGES: usize = 65_536;
/// Prompts in a row of which more was cached than the index knew, from which on hashes count as of different kinds.
pub(super) const MISMATCH: u32 = 16;
/// After how long without reach of what it publishes an instance that promised no reports is not chosen any more.
pub const AWAY_DOUBTED_NS: u64 = 15_000_000_000;
/// After how long it is taken to hold nothing.
pub const AWAY_FORGOTTEN_NS: u64 = 60_000_000_000;
/// Tiers that instances speak of.
const TOLD: [Tier; 3] = [Tier::Gpu, Tier::Dram, Tier::Ssd];

/// Changes of an instance's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheBatch {
    /// Its number: one more than that of the batch before.
    pub seq: u64,
    /// What kind of batch this is.
    pub change: CacheChange,
    /// What changed, in order.
    pub events: Vec<CacheEvent>,
}

/// What kind of batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheChange {
    /// Follows the one before.
    Goes,
    /// Begins with an empty cache: everything that is there follows, in this batch and the next ones.
    Snapshot,
    /// Batches before it are lost for good.
    Lost,
}

/// A change of an instance's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Blocks are there.
    Stored {
        /// The LoRA adapter; empty for none.
        lora: String,
        /// What else their hashes depend on; empty for nothing.
        salt: String,
        /// Where.
        tier: Tier,
        /// The block before the first, where there is one.
        parent: Option<u64>,
        /// Rolling hashes, in the order of the prompt.
        hashes: Vec<u64>,
    },
    /// Blocks are there no more.
    Removed {
        /// The LoRA adapter.
        lora: String,
        /// What else their hashes depend on.
        salt: String,
        /// Where; everywhere where that is not said.
        tier: Option<Tier>,
        /// Their hashes.
        hashes: Vec<u64>,
    },
    /// Nothing is there.
    Cleared,
}

/// What the publisher of a batch is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// The number of the batch that comes next.
    pub next: u64,
    /// What is wanted besides.
    pub wanted: CacheRequest,
}

/// What is wanted of a publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheRequest {
    /// Nothing.
    Nothing,
    /// The batches from [`Ack::next`] on, again; or a word that they are lost.
    Replay,
    /// Everything, anew, when it can.
    Snapshot,
}

impl Desk {
    /// A batch of changes of an instance's cache.
    ///
    /// # Errors
    /// When the instance is unknown, does not prefill, or the batch is too long.
    pub fn cache(&mut self, name: &str, incarnation: u64, batch: CacheBatch, now_ns: u64) -> Result<Ack, DeskError> {
        if batch.events.len() > MOST_CHANGES {
            return Err(bad(format!("{} changes in a batch; at most {MOST_CHANGES}", batch.events.len())));
        }
        let known = self.known(name, incarnation)?;
        known.heard_ns = now_ns;
        let (number, Some(at)) = (known.pool, known.prefill) else {
            return Err(bad(format!("instance {name:?} only decodes; its cache is not indexed")));
        };
        let first = known.events.is_none();
        let begins_to_report = !std::mem::replace(&mut known.reports_cache, true);
        let next = known.events.unwrap_or(batch.seq);
        let clears = match batch.change {
            CacheChange::Snapshot => {
                known.degraded = false;
                true
            }
            // What was known goes: some of it may be gone. What was not known at all is no worse than before.
            CacheChange::Lost if batch.seq >= next => {
                known.degraded = true;
                true
            }
            CacheChange::Goes | CacheChange::Lost if batch.seq < next => {
                self.counts.duplicates += 1;
                return Ok(Ack { next, wanted: CacheRequest::Nothing });
            }
            _ if batch.seq > next => {
                known.degraded = true;
                self.counts.gaps += 1;
                return Ok(Ack { next, wanted: CacheRequest::Replay });
            }
            // The first batches are numbered 0 or 1; what came before others is not known. Where something was missing
            // already, only number 0 says that nothing came before.
            _ => {
                if first {
                    known.degraded = batch.seq > u64::from(!known.degraded);
                }
                false
            }
        };
        let next = batch.seq.wrapping_add(1);
        known.events = Some(next);
        // From there on all is known again, whatever was lost before.
        if batch.events.contains(&CacheEvent::Cleared) {
            known.degraded = false;
        }
        let wanted = if known.degraded { CacheRequest::Snapshot } else { CacheRequest::Nothing };
        self.counts.batches += 1;
        if begins_to_report {
            self.changed.insert(name.into());
        }
        if clears {
            self.clear(number, at)?;
        }
        for event in batch.events {
            self.change(number, at, event)?;
        }
        Ok(Ack { next, wanted })
    }

    /// What an instance publishes has not been within reach for so long. Something of its cache may not be known then;
    /// after [`AWAY_DOUBTED_NS`] it is not chosen any more, unless it is heard of otherwise or promised reports, which
    /// say more; after [`AWAY_FORGOTTEN_NS`] it is taken to hold nothing, which is said by `true`: its events are to be
    /// asked for from the first on.
    ///
    /// # Errors
    /// When it is not registered in this incarnation.
    pub fn away(&mut self, name: &str, incarnation: u64, for_ns: u64, now_ns: u64) -> Result<bool, DeskError> {
        let known = self.known(name, incarnation)?;
        let silent_ns = for_ns.min(now_ns.saturating_sub(known.heard_ns));
        self.version += u64::from(!std::mem::replace(&mut known.away, true));
        let known = self.known(name, incarnation)?;
        let doubted = known.spec.report_ns == 0 && silent_ns >= AWAY_DOUBTED_NS;
        let forgotten = (for_ns >= AWAY_FORGOTTEN_NS).then(|| (known.pool, known.prefill, known.events.take()));
        if doubted {
            self.set_takes(name, false)?;
        }
        let Some((number, at, events)) = forgotten else { return Ok(false) };
        if let (Some(at), Some(_)) = (at, events) {
            // It may hold what it held, and is degraded until that is known again, also when it is within reach.
            self.known(name, incarnation)?.degraded = true;
            self.clear(number, at)?;
        }
        Ok(true)
    }

    /// What an instance publishes is within reach, and what it still had of what was missed has been taken.
    ///
    /// # Errors
    /// When it is not registered in this incarnation.
    pub fn reached(&mut self, name: &str, incarnation: u64, now_ns: u64) -> Result<(), DeskError> {
        let known = self.known(name, incarnation)?;
        let (was, number) = (std::mem::replace(&mut known.away, false), known.pool);
        let promised = known.spec.report_ns != 0;
        if was {
            self.version += 1;
        }
        if promised {
            return Ok(());
        }
        self.known(name, incarnation)?.heard_ns = now_ns;
        self.believe(name)?;
        self.poll_pool(number, now_ns);
        Ok(())
    }

    /// True once an instance's cache was reported or followed.
    #[must_use]
    pub fn reports_cache(&self, name: &str) -> bool {
        self.instances.get(name).is_some_and(|known| known.reports_cache)
    }

    /// Instances that publish what nobody reaches.
    #[must_use]
    pub fn unreachable(&self) -> usize {
        self.instances.values().filter(|known| known.away).count()
    }

    /// Whether an instance hashes as it should, as was seen by tokens that it told. Where one does not, the model is
    /// marked: nobody who hashes as one should would find anything there.
    ///
    /// # Errors
    /// When it is not registered in this incarnation.
    pub fn hashes_as_expected(&mut self, name: &str, incarnation: u64, does: bool) -> Result<(), DeskError> {
        let known = self.known(name, incarnation)?;
        if known.alien == does {
            known.alien = !does;
            self.version += 1;
        }
        Ok(())
    }

    /// True while the index may lack blocks that instances of this model hold: answers are lower bounds.
    #[must_use]
    pub fn incomplete(&self, key: &PoolKey) -> bool {
        self.pool_of(key).is_some_and(|number| self.unknown_in(number).next().is_some())
    }

    /// Instances of a pool of whose caches something is not known.
    pub(super) fn unknown_in(&self, number: u32) -> impl Iterator<Item = &Arc<str>> {
        let unknown = move |known: &super::Instance| {
            known.pool == number && known.prefill.is_some() && (known.degraded || known.away)
        };
        self.instances.iter().filter(move |(_, known)| unknown(known)).map(|(name, _)| name)
    }

    /// Whether hashes of requests and of events seem to be of different kinds, of instances of this model.
    #[must_use]
    pub fn mismatched(&self, key: &PoolKey) -> bool {
        let Some(number) = self.pool_of(key) else { return false };
        self.pools.get(&number).is_some_and(|pool| pool.surprises >= MISMATCH)
            || self.instances.values().any(|known| known.pool == number && known.alien)
    }

    pub(super) fn clear(&mut self, number: u32, at: usize) -> Result<(), DeskError> {
        match self.pools.get_mut(&number) {
            Some(pool) => Ok(pool.conductor.cleared(at)?),
            None => Ok(()),
        }
    }

    fn change(&mut self, number: u32, at: usize, event: CacheEvent) -> Result<(), DeskError> {
        let Some(pool) = self.pools.get_mut(&number) else { return Ok(()) };
        let PoolKey { tenant, model, block_tokens } = pool.key.clone();
        let key = |lora, salt| ContextKey { tenant, model, lora, block_tokens, salt };
        match event {
            CacheEvent::Cleared => pool.conductor.cleared(at)?,
            CacheEvent::Stored { lora, salt, tier, parent, hashes } => {
                let key = key(lora, salt);
                let (context, hashes) = pool.context(&key, Arc::from(hashes))?;
                let parent = match parent {
                    Some(parent) => pool.context(&key, Arc::from([parent]))?.1.first().copied(),
                    None => None,
                };
                pool.conductor.stored(at, context, tier, parent, &hashes)?;
            }
            CacheEvent::Removed { lora, salt, tier, hashes } => {
                let (context, hashes) = pool.context(&key(lora, salt), Arc::from(hashes))?;
                for tier in TOLD.into_iter().filter(|told| tier.is_none_or(|tier| tier == *told)) {
                    pool.conductor.removed(at, context, tier, &hashes)?;
                }
            }
        }
        Ok(())
    }

    /// A block of a model is in a part of the shared store, or no more. False where nobody serves that model.
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
    ) -> Result<bool, DeskError> {
        let named = |known: &str| known == model || known.rsplit('/').next() == Some(model);
        let mut told = false;
        for pool in self.pools.values_mut().filter(|pool| pool.key.tenant == tenant && named(&pool.key.model)) {
            let holder = match pool.store.get(&part) {
                Some(holder) => *holder,
                None => {
                    let holder = pool.conductor.index().register().map_err(SchedulerError::from)?;
                    pool.store.insert(part, holder);
                    holder
                }
            };
            let PoolKey { tenant, model, block_tokens } = pool.key.clone();
            let key = ContextKey { tenant, model, block_tokens, ..ContextKey::default() };
            let (context, hashes) = pool.context(&key, Arc::from([hash]))?;
            let index = pool.index();
            let changed = if there {
                index.stored(context, holder, Tier::Pool, None, &hashes).map(|_| ())
            } else {
                index.removed(context, holder, Tier::Pool, &hashes).map(|_| ())
            };
            changed.map_err(SchedulerError::from)?;
            told = true;
        }
        Ok(told)
    }

    /// A part of the shared store has nothing, of any model.
    pub fn store_cleared(&mut self, part: u64) {
        for pool in self.pools.values_mut() {
            if let Some(holder) = pool.store.remove(&part) {
                // It was registered with this index, and not retired since.
                let _: Result<(), _> = pool.index().retire(holder);
            }
        }
    }

    /// How many models have instances.
    #[must_use]
    pub fn models(&self) -> usize {
        self.pools.len()
    }

    /// Blocks that a holder has of an answer, by tiers: on the GPU, there or in memory, there or on an SSD.
    pub(super) fn by_tiers(&mut self, number: u32, holder: HolderId) -> [u32; 3] {
        let Some(pool) = self.pools.get_mut(&number) else { return [0; 3] };
        let found = self.scratch.found();
        let within = |pool: &mut super::Pool, tiers| pool.conductor.index().blocks_within(found, holder, tiers);
        [
            within(pool, Tiers::only(Tier::Gpu)),
            within(pool, Tiers::up_to(Tier::Dram)),
            within(pool, Tiers::up_to(Tier::Ssd)),
        ]
    }
}

/// The pool that a context is in.
pub(super) fn pool_key(context: &ContextKey) -> PoolKey {
    PoolKey { tenant: context.tenant.clone(), model: context.model.clone(), block_tokens: context.block_tokens }
}

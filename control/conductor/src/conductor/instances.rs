//! Registry of instances by name: incarnations, load reports, exclusion for silence, and removal.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::cache_feed::{AWAY_FORGOTTEN_NS, AWAY_SUSPECT_NS, BatchOutcome, CacheBatch, CacheFeed, FeedProgress};
use super::calls::Assignment;
use super::durable::DurableInstance;
use super::error::{ConductorError, bad};
use super::instance_spec::{
    InstanceLoad, InstancePart, InstanceRegistered, InstanceSpec, RegisterInstance, Registration,
};
use super::limits::Limit;
use super::pools::Pools;
use crate::scheduler::{CapabilityError, ExcludedInstances, Foreign, InstanceCapabilities, InstanceNumbers, Request};

/// Reports in a row after which an instance that missed reports is trusted again.
pub const TRUSTED_AFTER: u32 = 3;

/// State of an instance.
pub(super) struct Instance {
    pub(super) spec: RegisterInstance,
    has_vllm_hashes: bool,
    capabilities: InstanceCapabilities,
    pub(super) pool: u32,
    pub(super) numbers: InstanceNumbers,
    /// Time of its last message.
    pub(super) heard_ns: u64,
    /// True if it missed reports, and has not sent enough again.
    pub(super) suspect: bool,
    /// Reports in a row since it is suspect.
    returned: ReportStreak,
    /// True while an operator holds it: it gets no new requests, in this incarnation.
    pub(super) held: bool,
    /// Number of its latest load report.
    seq: u64,
    pub(super) cache: CacheFeed,
}

impl Instance {
    /// Returns the progress of its cache feed and true if it is degraded; none if it reports no cache, or only decodes.
    pub(super) fn feed(&self) -> Option<(FeedProgress, bool)> {
        let progress = self.numbers.prefill.and_then(|_| self.cache.progress())?;
        Some((progress, self.cache.is_incomplete()))
    }
}

/// Reports of a suspect instance in a row: [`TRUSTED_AFTER`] of them and it is trusted again.
#[derive(Clone, Copy, Default)]
struct ReportStreak {
    count: u32,
    /// Time of the last report that counted.
    last_ns: u64,
}

impl ReportStreak {
    /// Counts a report of an instance that promised one every `report_ns`, and is suspect after `suspect_after_ns`
    /// without one; returns true if it is trusted again. Reports that arrive together, as delayed ones do, count as
    /// one; after a silence for which an instance would be suspect the streak begins anew.
    fn note(&mut self, report_ns: u64, suspect_after_ns: u64, now_ns: u64) -> bool {
        let since_ns = now_ns.saturating_sub(self.last_ns);
        if self.count == 0 || since_ns > suspect_after_ns {
            *self = Self { count: 1, last_ns: now_ns };
        } else if since_ns >= report_ns / 2 {
            *self = Self { count: self.count + 1, last_ns: now_ns };
        }
        self.count >= TRUSTED_AFTER
    }
}

/// Counters of reports.
#[derive(Clone, Copy, Default)]
pub(super) struct ReportCounts {
    pub(super) batches: u64,
    pub(super) duplicates: u64,
    pub(super) gaps: u64,
    pub(super) stale_reports: u64,
    pub(super) by_hash_only: u64,
    pub(super) implausible: u64,
    pub(super) confirmed: u64,
    pub(super) dropped: u64,
}

/// Batch of changes to be applied to the index.
pub(super) struct CacheUpdate {
    pub(super) pool: u32,
    /// Number of the instance among those that prefill.
    pub(super) at: usize,
    pub(super) outcome: BatchOutcome,
}

/// Instances that have been silent for too long, and the next time at which one will be.
#[derive(Default)]
pub(super) struct SilentInstances {
    pub(super) suspects: Vec<Arc<str>>,
    pub(super) lost: Vec<Arc<str>>,
    pub(super) next_ns: Option<u64>,
}

impl SilentInstances {
    /// Notes that an instance will have been silent for too long at `at_ns`.
    fn look_at(&mut self, at_ns: u64) {
        self.next_ns = Some(self.next_ns.map_or(at_ns, |next_ns| next_ns.min(at_ns)));
    }
}

/// Registry of instances, by name.
pub struct InstanceRegistry {
    most: usize,
    /// Missed reports after which an instance is excluded, and after which it is removed.
    missed: (u32, u32),
    by_name: BTreeMap<Arc<str>, Instance>,
    /// Names of instances whose durable state changed.
    changed: BTreeSet<Arc<str>>,
    version: u64,
    counts: ReportCounts,
}

impl InstanceRegistry {
    /// Creates an empty registry of at most `most` instances; `missed` are the limits of missed reports.
    pub(super) fn new(most: usize, missed: (u32, u32)) -> Self {
        let (by_name, changed) = (BTreeMap::new(), BTreeSet::new());
        Self { most, missed, by_name, changed, version: 0, counts: ReportCounts::default() }
    }

    /// Returns a version that changes whenever an instance comes, goes, or is excluded or accepted again.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// Returns the tenant of an instance.
    #[must_use]
    pub fn tenant_of(&self, name: &str) -> Option<&str> {
        self.by_name.get(name).map(|known| known.spec.tenant.as_str())
    }

    /// Returns the registrations of all instances, to follow their publishers.
    pub fn specs(&self) -> impl Iterator<Item = &RegisterInstance> {
        self.by_name.values().map(|known| &known.spec)
    }

    /// Returns true once an instance's cache was reported or followed.
    #[must_use]
    pub fn reports_cache(&self, name: &str) -> bool {
        self.by_name.get(name).is_some_and(|known| known.cache.is_reported())
    }

    /// Returns the number of instances whose publisher is unreachable.
    #[must_use]
    pub fn unreachable(&self) -> usize {
        self.by_name.values().filter(|known| known.cache.is_away()).count()
    }

    pub(super) const fn counts(&self) -> ReportCounts {
        self.counts
    }

    pub(super) fn get(&self, name: &str) -> Option<&Instance> {
        self.by_name.get(name)
    }

    /// Returns the number of instances.
    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Instance)> {
        self.by_name.iter()
    }

    /// Returns an instance in this incarnation.
    fn known(&mut self, name: &str, incarnation: u64) -> Result<&mut Instance, ConductorError> {
        match self.by_name.get_mut(name) {
            Some(known) if known.spec.incarnation == incarnation => Ok(known),
            Some(known) if known.spec.incarnation > incarnation => {
                Err(ConductorError::StaleIncarnation { name: name.to_owned(), incarnation: known.spec.incarnation })
            }
            _ => Err(ConductorError::UnknownInstance { name: name.to_owned() }),
        }
    }

    /// Returns the answer to an instance that is registered in this incarnation already; `None` for one that is to be
    /// entered.
    pub(super) fn register_again(
        &mut self,
        registered: &InstanceSpec,
        now_ns: u64,
        pools: &mut Pools,
    ) -> Result<Option<Registration>, ConductorError> {
        let InstanceSpec { call: spec, has_vllm_hashes, capabilities } = registered;
        let Some(known) = self.by_name.get_mut(spec.instance.as_str()) else {
            self.refuse_over_limit()?;
            return Ok(None);
        };
        if spec.incarnation < known.spec.incarnation {
            let incarnation = known.spec.incarnation;
            return Err(ConductorError::StaleIncarnation { name: spec.instance.clone(), incarnation });
        }
        if spec.incarnation > known.spec.incarnation {
            return Ok(None);
        }
        if known.spec != *spec || known.capabilities != *capabilities {
            let what =
                format!("instance {:?} has registered with another description in this incarnation", spec.instance);
            return Err(ConductorError::Conflict { what });
        }
        known.heard_ns = now_ns;
        if std::mem::replace(&mut known.has_vllm_hashes, *has_vllm_hashes) != *has_vllm_hashes {
            self.changed.insert(spec.instance.as_str().into());
        }
        let fresh = known.cache.is_fresh();
        self.note_report(&spec.instance, now_ns, pools)?;
        let answer = InstanceRegistered { fresh, suspect_after_ns: suspect_after_ns(spec, self.missed) };
        Ok(Some(Registration { answer, again: true }))
    }

    fn refuse_over_limit(&self) -> Result<(), ConductorError> {
        if self.by_name.len() >= self.most {
            return Err(ConductorError::Limit { limit: Limit::Instances, most: self.most });
        }
        Ok(())
    }

    /// Enters an instance in a pool that was not known in this incarnation.
    pub(super) fn enter(
        &mut self,
        registered: InstanceSpec,
        pool: u32,
        now_ns: u64,
        pools: &mut Pools,
    ) -> Result<Registration, ConductorError> {
        let spec = &registered.call;
        let suspect_after_ns = suspect_after_ns(spec, self.missed);
        let cache = CacheFeed::new(spec.events.is_some(), spec.part != InstancePart::Decode);
        let name = self.insert(registered, cache, pool, now_ns, pools)?;
        self.changed.insert(name);
        self.version += 1;
        Ok(Registration { answer: InstanceRegistered { fresh: true, suspect_after_ns }, again: false })
    }

    /// Restores an instance that was registered before the Conductor started.
    pub(super) fn restore(
        &mut self,
        kept: DurableInstance,
        pool: u32,
        graced_ns: u64,
        pools: &mut Pools,
    ) -> Result<(), ConductorError> {
        let DurableInstance { spec: call, has_vllm_hashes, capabilities, held, reports_cache, .. } = kept;
        let cache = CacheFeed::restored(reports_cache, call.events.is_some(), call.part != InstancePart::Decode);
        let registered = InstanceSpec { call, has_vllm_hashes, capabilities };
        let name = self.insert(registered, cache, pool, graced_ns, pools)?;
        if let Some(known) = self.by_name.get_mut(&name) {
            known.held = held;
        }
        self.version += 1;
        self.let_take(&name, pools)
    }

    /// Rejects a restored instance that is invalid or exceeds the limit.
    pub(super) fn check_restored(&self, kept: &DurableInstance) -> Result<(), ConductorError> {
        kept.spec.check(&kept.capabilities)?;
        check_group(&kept.spec, &kept.capabilities, self)?;
        self.refuse_over_limit()
    }

    fn insert(
        &mut self,
        registered: InstanceSpec,
        cache: CacheFeed,
        number: u32,
        heard_ns: u64,
        pools: &mut Pools,
    ) -> Result<Arc<str>, ConductorError> {
        let InstanceSpec { call: spec, has_vllm_hashes, capabilities } = registered;
        let pool = pools.get_mut(number).ok_or_else(|| bad("the pool was removed"))?;
        let name: Arc<str> = spec.instance.as_str().into();
        let mut numbers = InstanceNumbers::default();
        if matches!(spec.part, InstancePart::Prefill | InstancePart::Mixed) {
            let at = pool.scheduler.add_prefill()?;
            pool.name_prefill(at, &name);
            capabilities.install(&mut pool.scheduler, at)?;
            numbers.prefill = Some(at);
        }
        if matches!(spec.part, InstancePart::Decode | InstancePart::Mixed) {
            let at = pool.scheduler.add_decode(spec.capacity_tokens, numbers.prefill);
            pool.name_decode(at, &name);
            numbers.decode = Some(at);
        }
        pool.instances += 1;
        let (suspect, held) = (false, false);
        let (pool, seq, returned) = (number, 0, ReportStreak::default());
        let instance = Instance {
            spec,
            has_vllm_hashes,
            capabilities,
            pool,
            numbers,
            heard_ns,
            suspect,
            returned,
            held,
            seq,
            cache,
        };
        self.by_name.insert(Arc::clone(&name), instance);
        Ok(name)
    }

    /// Rejects an incarnation older than the registered one; returns true if an instance is registered.
    pub(super) fn check_goes(&self, name: &str, incarnation: u64) -> Result<bool, ConductorError> {
        match self.by_name.get(name) {
            Some(known) if known.spec.incarnation > incarnation => {
                Err(ConductorError::StaleIncarnation { name: name.to_owned(), incarnation: known.spec.incarnation })
            }
            known => Ok(known.is_some()),
        }
    }

    /// Removes an instance; returns its requests that must be rescheduled.
    pub(super) fn remove(&mut self, name: &str, pools: &mut Pools) -> Vec<Request> {
        let Some(instance) = self.by_name.remove(name) else { return Vec::new() };
        self.changed.insert(name.into());
        self.version += 1;
        let Some(pool) = pools.get_mut(instance.pool) else { return Vec::new() };
        pool.instances -= 1;
        let InstanceNumbers { prefill, decode } = instance.numbers;
        // Both numbers are of this pool, and alive until now.
        let mut lost = prefill.and_then(|at| pool.scheduler.lose_prefill(at).ok()).unwrap_or_default();
        lost.extend(decode.and_then(|at| pool.scheduler.lose_decode(at).ok()).unwrap_or_default());
        pools.drop_unused(instance.pool);
        lost
    }

    /// Notes the load report of an instance; returns its pool if the report is new. An older one only proves that the
    /// instance lives.
    pub(super) fn report(
        &mut self,
        name: &str,
        incarnation: u64,
        load: InstanceLoad,
        now_ns: u64,
        pools: &mut Pools,
    ) -> Result<Option<u32>, ConductorError> {
        let known = self.known(name, incarnation)?;
        known.heard_ns = now_ns;
        let (number, numbers) = (known.pool, known.numbers);
        if load.seq <= known.seq && known.seq != 0 {
            self.counts.stale_reports += 1;
            self.note_report(name, now_ns, pools)?;
            return Ok(None);
        }
        known.seq = load.seq;
        let InstanceLoad { queued_tokens, decode_tokens, decodes, steps, .. } = load;
        if let Some(pool) = pools.get_mut(number) {
            pool.scheduler.report_load(numbers, Foreign { queued_tokens, decode_tokens, decodes, steps })?;
        }
        self.note_report(name, now_ns, pools)?;
        Ok(Some(number))
    }

    /// Trusts a suspect instance again after enough reports in a row. One that promised none is trusted at once, and so
    /// is one whose whole pool is suspect: then it was rather the control plane that stood still.
    fn note_report(&mut self, name: &str, now_ns: u64, pools: &mut Pools) -> Result<(), ConductorError> {
        let missed = self.missed;
        let Some(known) = self.by_name.get_mut(name).filter(|known| known.suspect) else { return Ok(()) };
        let (report_ns, pool) = (known.spec.report_ns, known.pool);
        let has_returned = known.returned.note(report_ns, suspect_after_ns(&known.spec, missed), now_ns);
        let is_trusted = |other: &Instance| other.pool == pool && !other.suspect;
        if report_ns == 0 || has_returned || !self.by_name.values().any(is_trusted) {
            return self.set_suspect(name, false, pools);
        }
        Ok(())
    }

    /// Holds an instance, or lets it accept requests again.
    pub(super) fn hold(&mut self, name: &str, held: bool, pools: &mut Pools) -> Result<(), ConductorError> {
        let unknown = || ConductorError::UnknownInstance { name: name.to_owned() };
        let known = self.by_name.get_mut(name).ok_or_else(unknown)?;
        if std::mem::replace(&mut known.held, held) != held {
            self.changed.insert(name.into());
        }
        self.version += 1;
        self.let_take(name, pools)
    }

    /// Excludes an instance that missed reports, or accepts it again.
    pub(super) fn set_suspect(&mut self, name: &str, suspect: bool, pools: &mut Pools) -> Result<(), ConductorError> {
        let Some(instance) = self.by_name.get_mut(name) else { return Ok(()) };
        if std::mem::replace(&mut instance.suspect, suspect) == suspect {
            return Ok(());
        }
        instance.returned = ReportStreak::default();
        self.version += 1;
        self.let_take(name, pools)
    }

    /// Lets an instance accept requests if it is neither suspect nor held.
    fn let_take(&self, name: &str, pools: &mut Pools) -> Result<(), ConductorError> {
        let Some(instance) = self.by_name.get(name) else { return Ok(()) };
        let takes = !instance.suspect && !instance.held;
        let Some(pool) = pools.get_mut(instance.pool) else { return Ok(()) };
        Ok(pool.scheduler.set_takes(instance.numbers, takes)?)
    }

    /// Examines a batch of changes of an instance's cache; returns the update of the index.
    pub(super) fn take_batch(
        &mut self,
        name: &str,
        incarnation: u64,
        batch: &CacheBatch,
        now_ns: u64,
    ) -> Result<CacheUpdate, ConductorError> {
        let known = self.known(name, incarnation)?;
        known.heard_ns = now_ns;
        let (pool, Some(at)) = (known.pool, known.numbers.prefill) else {
            return Err(bad(format!("instance {name:?} only decodes; its cache is not indexed")));
        };
        let was_unconfirmed = known.cache.is_unconfirmed();
        let outcome = known.cache.take(batch);
        let drops = was_unconfirmed && !known.cache.is_unconfirmed();
        match outcome {
            BatchOutcome::Duplicate(_) => self.counts.duplicates += 1,
            BatchOutcome::Gap(_) => self.counts.gaps += 1,
            BatchOutcome::Taken { begins, confirms, .. } => {
                self.counts.batches += 1;
                self.counts.confirmed += u64::from(confirms);
                self.counts.dropped += u64::from(drops && !confirms);
                self.version += u64::from(drops);
                if begins {
                    self.changed.insert(name.into());
                }
            }
        }
        Ok(CacheUpdate { pool, at, outcome })
    }

    /// Returns the cache feed of an instance in this incarnation.
    pub(super) fn feed(&mut self, name: &str, incarnation: u64) -> Result<&mut CacheFeed, ConductorError> {
        Ok(&mut self.known(name, incarnation)?.cache)
    }

    /// Ends the wait for a confirmation: restored blocks are answered if they are `confirmed`, else dropped.
    pub(super) fn settle(
        &mut self,
        name: &str,
        incarnation: u64,
        confirmed: bool,
        pools: &mut Pools,
    ) -> Result<(), ConductorError> {
        let known = self.known(name, incarnation)?;
        if !known.cache.confirm() {
            return Ok(());
        }
        let (pool, prefill) = (known.pool, known.numbers.prefill);
        if !confirmed {
            known.cache.forget(prefill.is_some());
        }
        self.version += 1;
        self.counts.confirmed += u64::from(confirmed);
        self.counts.dropped += u64::from(!confirmed);
        match prefill {
            Some(at) if confirmed => pools.show_restored(pool, at),
            Some(at) => pools.clear(pool, at),
            None => Ok(()),
        }
    }

    /// Returns the progress of the feeds of a pool, each with true if it is degraded.
    pub(super) fn feeds_of(&self, pool: u32) -> impl Iterator<Item = (FeedProgress, bool)> {
        self.by_name.values().filter(move |known| known.pool == pool).filter_map(Instance::feed)
    }

    /// Notes how long the publisher of an instance has been unreachable; returns true if its blocks are dropped.
    pub(super) fn away(
        &mut self,
        name: &str,
        incarnation: u64,
        for_ns: u64,
        now_ns: u64,
        pools: &mut Pools,
    ) -> Result<bool, ConductorError> {
        let known = self.known(name, incarnation)?;
        let silent_ns = for_ns.min(now_ns.saturating_sub(known.heard_ns));
        let is_new = known.cache.set_away(true);
        let is_suspect = known.spec.report_ns == 0 && silent_ns >= AWAY_SUSPECT_NS;
        let (pool, prefill) = (known.pool, known.numbers.prefill);
        let is_forgotten = for_ns >= AWAY_FORGOTTEN_NS;
        let was_unconfirmed = known.cache.is_unconfirmed();
        let forgets = is_forgotten && known.cache.forget(prefill.is_some());
        self.counts.dropped += u64::from(forgets && was_unconfirmed);
        self.version += u64::from(is_new);
        if is_suspect {
            self.set_suspect(name, true, pools)?;
        }
        if let Some(at) = prefill.filter(|_| forgets) {
            pools.clear(pool, at)?;
        }
        Ok(is_forgotten)
    }

    /// Notes that the publisher of an instance is reachable; returns its pool if the instance may accept requests again
    /// because of that.
    pub(super) fn reached(
        &mut self,
        name: &str,
        incarnation: u64,
        now_ns: u64,
        pools: &mut Pools,
    ) -> Result<Option<u32>, ConductorError> {
        let known = self.known(name, incarnation)?;
        let is_new = known.cache.set_away(false);
        let (pool, promised) = (known.pool, known.spec.report_ns != 0);
        if !promised {
            known.heard_ns = now_ns;
        }
        self.version += u64::from(is_new);
        if promised {
            return Ok(None);
        }
        self.set_suspect(name, false, pools)?;
        Ok(Some(pool))
    }

    /// Notes that an instance stored `blocks` blocks that are found by its hashes only.
    pub(super) fn note_by_hash_only(&mut self, name: &str, blocks: usize) {
        self.counts.by_hash_only += blocks as u64;
        if let Some(known) = self.by_name.get_mut(name).filter(|_| blocks > 0) {
            known.cache.set_by_hash_only();
        }
    }

    /// Compares the reused tokens of a placed prompt with the reported ones. Returns the numbers of its instance if
    /// that repeatedly lacks reported blocks and is no longer believed.
    pub(super) fn note_reuse(
        &mut self,
        assigned: &Assignment,
        block_tokens: u32,
        reused_tokens: u32,
    ) -> Option<InstanceNumbers> {
        let instance = self.by_name.get_mut(&*assigned.prefill)?;
        if !assigned.sources.is_empty() || assigned.reuse_tokens < block_tokens {
            return None;
        }
        if !instance.cache.note_reuse(assigned.reuse_tokens, reused_tokens) {
            return None;
        }
        self.counts.implausible += 1;
        self.version += 1;
        Some(instance.numbers)
    }

    /// Returns the numbers of the named instances that are in a pool.
    pub(super) fn excluded(&self, pool: u32, names: &[String]) -> ExcludedInstances {
        if names.is_empty() {
            return ExcludedInstances::default();
        }
        let known = names.iter().filter_map(|name| self.by_name.get(name.as_str()));
        let known: Vec<InstanceNumbers> = known.filter(|known| known.pool == pool).map(|known| known.numbers).collect();
        ExcludedInstances {
            prefill: known.iter().filter_map(|known| known.prefill).map(|at| at as u32).collect(),
            decode: known.iter().filter_map(|known| known.decode).map(|at| at as u32).collect(),
        }
    }

    /// Returns the instances of a pool that prefill, each with true if its cache is not completely known.
    pub(super) fn prefilling_in(&self, pool: u32) -> impl Iterator<Item = (&Arc<str>, bool)> {
        let known = self.by_name.iter().filter(move |(_, known)| known.pool == pool && known.numbers.prefill.is_some());
        known.map(|(name, known)| (name, known.cache.is_incomplete()))
    }

    /// Returns the instances of a pool whose caches are not completely known.
    pub(super) fn unknown_in(&self, pool: u32) -> impl Iterator<Item = &Arc<str>> {
        let unknown = move |known: &Instance| {
            known.pool == pool && known.numbers.prefill.is_some() && known.cache.is_incomplete()
        };
        self.by_name.iter().filter(move |(_, known)| unknown(known)).map(|(name, _)| name)
    }

    /// Returns true if an instance of a pool holds blocks that are found by its hashes only, and these cannot be
    /// computed from tokens; with `is_mismatched`, none can.
    pub(super) fn has_unfindable_blocks(&self, pool: u32, is_mismatched: bool) -> bool {
        let mut known = self.by_name.values().filter(|known| known.pool == pool && known.cache.is_by_hash_only());
        known.any(|known| is_mismatched || !known.has_vllm_hashes)
    }

    /// Returns the instances that missed reports, those that missed many, and the next time at which one will have.
    pub(super) fn silent(&self, now_ns: u64) -> SilentInstances {
        let (suspect, lose) = self.missed;
        let mut silent = SilentInstances::default();
        for (name, instance) in &self.by_name {
            let report_ns = instance.spec.report_ns;
            if report_ns == 0 {
                continue;
            }
            let lost_ns = instance.heard_ns.saturating_add(report_ns.saturating_mul(u64::from(lose)));
            let suspect_ns = instance.heard_ns.saturating_add(report_ns.saturating_mul(u64::from(suspect)));
            if now_ns >= lost_ns {
                silent.lost.push(Arc::clone(name));
            } else if now_ns >= suspect_ns && !instance.suspect {
                silent.suspects.push(Arc::clone(name));
                silent.look_at(lost_ns);
            } else {
                silent.look_at(if instance.suspect { lost_ns } else { suspect_ns });
            }
        }
        silent
    }

    /// Returns true if the durable state changed.
    pub(super) fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Takes the names of instances whose durable state changed since the last call.
    pub(super) fn take_changed(&mut self) -> BTreeSet<Arc<str>> {
        std::mem::take(&mut self.changed)
    }

    /// Returns the durable state of an instance, if it is registered.
    pub(super) fn durable(&self, name: &str, pools: &Pools) -> Option<DurableInstance> {
        let known = self.by_name.get(name)?;
        let pool_token_bytes = pools.get(known.pool)?.token_bytes;
        let (spec, has_vllm_hashes) = (known.spec.clone(), known.has_vllm_hashes);
        let capabilities = known.capabilities.clone();
        let (held, reports_cache) = (known.held, known.cache.is_reported());
        Some(DurableInstance { spec, has_vllm_hashes, capabilities, pool_token_bytes, held, reports_cache })
    }
}

/// Returns the silence after which an instance is suspect; `missed` are the reports that a suspect one and a lost one
/// missed.
const fn suspect_after_ns(spec: &RegisterInstance, missed: (u32, u32)) -> u64 {
    spec.report_ns.saturating_mul(missed.0 as u64)
}

/// Rejects an instance whose pipeline group contradicts what the other members have registered.
pub(super) fn check_group(
    spec: &RegisterInstance,
    capabilities: &InstanceCapabilities,
    known: &InstanceRegistry,
) -> Result<(), ConductorError> {
    let Some(stage) = &capabilities.stage else { return Ok(()) };
    let others = known.by_name.iter().filter(|(name, known)| {
        let is_in_group = known.capabilities.stage.as_ref().is_some_and(|other| other.group == stage.group);
        is_in_group && known.spec.tenant == spec.tenant && ***name != *spec.instance
    });
    for (name, other) in others {
        if other.spec.pool() != spec.pool() {
            let (group, other) = (stage.group.clone(), Arc::clone(name));
            return Err(CapabilityError::Differs { group, what: "model or block size", other }.into());
        }
        capabilities.check_beside(name, &other.capabilities)?;
    }
    Ok(())
}

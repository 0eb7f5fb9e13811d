//! The Conductor's host: calls it on the control plane's thread, with the time that passes here.
//!
//! Calls come from QUIC and HTTP and are answered at once; nothing waits in a queue of its own, for each connection has
//! a limit of calls and the conductor limits of everything else. Who waits for an instance is told over its stream of
//! assignments. A stream that is not read ends; what it missed is told again when it begins anew, or asked for by id.

mod convert;
pub(crate) mod copies;
mod durable;
mod master;
mod metrics;
mod placement;
pub(crate) mod shim;
mod status;
pub(crate) mod store_blocks;
mod subscriber;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvplane_cluster::Change;
use kvplane_conductor::conductor::{ClientNotice, Conductor, ConductorConfig, ConductorError, Load, PoolKey};
use kvplane_conductor::engine::keys::BlockKey;
use kvplane_conductor::index::{Tier, Tiers};
use kvplane_rpc::conductor::{
    BlockTier, CacheTaken, DeregisterInstance, EventSource, ExplainRequest, InstanceRegistered, InstanceTable,
    PlacementNotice, PrefixHolders, QueryPrefix, RegisterInstance, ReportCache, ReportLoad, RequestExplained,
    Reschedule, Schedule, ScheduleReply, UpdateRequest, WatchAssignments,
};
use kvplane_rpc::message::EmptyReply;
use kvplane_rpc::{ItemFrame, Refusal, RefusalCode, item_frame};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::sleep_until;

pub(crate) use durable::DecodedRecords;
use durable::Keep;
use master::{MasterRow, MasterSpec, Masters};
pub use placement::policy_named;
use store_blocks::StoreState;
use subscriber::EventOrigin;

use crate::control::Control;

use convert::{answer_out, assigned_out, batch_in, context_in, refusal, spec_in, step_in, table_out};

/// Assignments that may wait for a client to read them.
const ASSIGNMENTS: usize = 1024;
/// Clients that watch assignments, and watchers of instances.
const WATCHERS: usize = 256;
/// Tables that may wait for a watcher.
const TABLES: usize = 4;
/// Models whose seeds of hashes are remembered.
const SEEDS: usize = 256;
/// The longest topic.
const TOPIC_BYTES: usize = 256;
/// How often watchers hear of instances' loads while nothing else changes.
const LOADS: Duration = Duration::from_secs(1);

struct Core {
    conductor: Conductor,
    clients: BTreeMap<u64, mpsc::Sender<ItemFrame>>,
    watchers: Vec<mpsc::Sender<ItemFrame>>,
    /// By instance: who follows what it publishes.
    followers: BTreeMap<String, AbortHandle>,
    /// Masters of other stores.
    masters: Masters,
    /// Masters that were registered before this process began and are not followed yet.
    restored_masters: Vec<MasterSpec>,
    /// By model: what its engines' hashes begin with.
    seeds: BTreeMap<PoolKey, String>,
    /// Changes of masters and seeds that are not durable yet; the conductor has those of instances.
    changes: Vec<Change>,
    /// The version that watchers heard of last, and when.
    told: (u64, u64),
    /// When it is looked again.
    armed_ns: u64,
}

/// The host.
pub(crate) struct Host {
    core: Mutex<Core>,
    /// Blocks of our own store.
    stored: Mutex<StoreState>,
    /// Where the state is made durable.
    keeper: OnceLock<Weak<Control>>,
    rearm: Notify,
    /// How many models there were, of all times: nothing is known yet of a new one's blocks in stores.
    fresh: watch::Sender<u64>,
    started: Instant,
    /// Events of engines that could not be read, and that do not concern us.
    unread: AtomicU64,
    foreign: AtomicU64,
    /// How often publishers of events went out of reach.
    lost_publishers: AtomicU64,
}

impl Host {
    /// A host that goes on with what is remembered. For `grace` nobody's silence counts.
    ///
    /// # Errors
    /// When the limits do not allow all that is remembered.
    pub(crate) fn new(
        config: ConductorConfig,
        first: u64,
        mut restored: DecodedRecords,
        grace: Duration,
    ) -> Result<Self, String> {
        let graced_ns = u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX);
        let conductor = restored.conductor(config, first, graced_ns)?;
        let models = conductor.models() as u64;
        let core = Core {
            conductor,
            clients: BTreeMap::new(),
            watchers: Vec::new(),
            followers: BTreeMap::new(),
            masters: Masters::default(),
            restored_masters: restored.masters,
            seeds: restored.seeds.into_iter().collect(),
            changes: Vec::new(),
            told: (0, 0),
            armed_ns: u64::MAX,
        };
        Ok(Self {
            core: Mutex::new(core),
            stored: Mutex::default(),
            keeper: OnceLock::new(),
            rearm: Notify::new(),
            fresh: watch::channel(models).0,
            started: Instant::now(),
            unread: AtomicU64::new(0),
            foreign: AtomicU64::new(0),
            lost_publishers: AtomicU64::new(0),
        })
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        // The conductor is whole between calls; one that ended in a bug is that call's loss.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stored(&self) -> MutexGuard<'_, StoreState> {
        // What is known is whole between reports.
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the conductor, makes durable what is to be remembered, tells who is to be told, and sees to it that it is
    /// looked at in time.
    pub(crate) fn with<T>(
        &self,
        call: impl FnOnce(&mut Conductor, u64) -> Result<T, ConductorError>,
    ) -> Result<T, Refusal> {
        self.call(Keep::Soon, |core, now_ns| call(&mut core.conductor, now_ns))
    }

    /// The same for a call that changes durable state: refused while the state cannot be written, and durable when
    /// this returns.
    fn change<T>(&self, call: impl FnOnce(&mut Core, u64) -> Result<T, ConductorError>) -> Result<T, Refusal> {
        self.check_durable()?;
        self.call(Keep::Now, call)
    }

    fn call<T>(
        &self,
        keep: Keep,
        call: impl FnOnce(&mut Core, u64) -> Result<T, ConductorError>,
    ) -> Result<T, Refusal> {
        let now_ns = self.now_ns();
        let mut core = self.core();
        let result = call(&mut core, now_ns);
        self.keep(&mut core, keep)?;
        core.tell(now_ns);
        if core.conductor.soon_ns(now_ns).is_some_and(|soon_ns| soon_ns < core.armed_ns) {
            self.rearm.notify_one();
        }
        result.map_err(|error| refusal(&error))
    }

    /// Lets time pass, for as long as it is asked to; then nobody is followed any more.
    pub(crate) async fn run(self: Arc<Self>) {
        let _followers = Followers(&self);
        self.follow_restored();
        loop {
            let now_ns = self.now_ns();
            let due_ns = {
                let mut core = self.core();
                let due_ns = core.conductor.tick(now_ns).unwrap_or(u64::MAX);
                // A failure ends the control plane, which says so.
                let _ = self.keep(&mut core, Keep::Soon);
                core.tell(now_ns);
                let loads_ns = if core.watchers.is_empty() { u64::MAX } else { core.told.1 + LOADS.as_nanos() as u64 };
                core.armed_ns = due_ns.min(loads_ns).max(now_ns);
                core.armed_ns
            };
            // A year hence is never.
            let due = self.started + Duration::from_nanos(due_ns.min(now_ns.saturating_add(31_536_000_000_000_000)));
            tokio::select! {
                () = sleep_until(due.into()) => {}
                () = self.rearm.notified() => {}
            }
        }
    }

    /// Instances and models as they are.
    pub(crate) fn table(&self) -> InstanceTable {
        let now_ns = self.now_ns();
        table_out(&self.core().conductor.table(now_ns))
    }

    /// True while the index may lack blocks of instances of a model, or of stores: answers are lower bounds.
    fn incomplete(&self, pool: &PoolKey) -> bool {
        let core = self.core();
        core.conductor.incomplete(pool)
            || !core.restored_masters.is_empty()
            || core.masters.values().any(MasterRow::degraded)
    }

    /// Whether engines of a model hash otherwise than who asks.
    fn mismatched(&self, pool: &PoolKey) -> bool {
        self.core().conductor.mismatched(pool)
    }

    fn check_tenant(&self, instance: &str, tenant: &str) -> Result<(), Refusal> {
        match self.core().conductor.instances().tenant_of(instance) {
            Some(known) if known != tenant => {
                let reason = format!("instance {instance:?} is not of tenant {tenant:?}");
                Err(Refusal::new(RefusalCode::NotPermitted, reason))
            }
            _ => Ok(()),
        }
    }

    /// What hashes of a model begin with.
    fn seed(&self, pool: &PoolKey) -> String {
        self.core().seeds.get(pool).cloned().unwrap_or_else(|| "0".to_owned())
    }

    /// What changed in a shard of the store; `void` is whether all that was known of it is.
    fn store_changed(&self, shard: u64, void: bool, changes: &[(String, BlockKey, bool)]) {
        // Too many holders of one model: its blocks in the store are not known.
        let _ = self.with(|conductor, _| {
            if void {
                conductor.store_cleared(shard);
            }
            for (tenant, key, there) in changes {
                conductor.store_has(shard, tenant, &key.model, key.hash, *there)?;
            }
            Ok(())
        });
    }

    /// Counts events that were left out.
    fn note_events(&self, unread: usize, foreign: usize) {
        self.unread.fetch_add(unread as u64, Ordering::Relaxed);
        self.foreign.fetch_add(foreign as u64, Ordering::Relaxed);
    }

    pub(crate) fn register(self: &Arc<Self>, call: RegisterInstance) -> Result<InstanceRegistered, Refusal> {
        self.enter(call, false, None)
    }

    /// An instance registers. With `is_vllm` its first blocks are compared with how questions with tokens are hashed;
    /// `seed` is what its model's hashes begin with from now on.
    fn enter(
        self: &Arc<Self>,
        call: RegisterInstance,
        is_vllm: bool,
        seed: Option<String>,
    ) -> Result<InstanceRegistered, Refusal> {
        self.check_tenant(&call.instance, &call.tenant)?;
        if let Some(source) = &call.events {
            check_source(source)?;
        }
        let spec = spec_in(call, is_vllm);
        let (pool, followed) = (spec.pool(), durable::followed(&spec));
        let (models, registered) = self.change(|core, now_ns| {
            let models = core.conductor.models();
            let registered = core.conductor.register(spec, now_ns)?;
            if let Some(seed) = seed {
                core.set_seed(pool, seed);
            }
            Ok((models, registered))
        })?;
        if self.core().conductor.models() > models {
            self.fresh.send_modify(|models| *models += 1);
        }
        if let Some(followed) = followed {
            self.follow(followed, !registered.again);
        }
        // It may be due before anything else.
        self.rearm.notify_one();
        Ok(InstanceRegistered { fresh: registered.fresh, doubted_after_ns: registered.doubted_after_ns })
    }

    /// Follows what an instance publishes, if nobody does. With `anew` whoever follows a former registration ends.
    fn follow(self: &Arc<Self>, followed: EventOrigin, anew: bool) {
        let mut core = self.core();
        core.followers.retain(|_, follower| !follower.is_finished());
        let subscriber::Feed::Engine { instance, .. } = &followed.feed else { return };
        let instance = instance.clone();
        if anew && let Some(former) = core.followers.remove(&instance) {
            former.abort();
        }
        if let Entry::Vacant(free) = core.followers.entry(instance) {
            let task = tokio::spawn(subscriber::follow(Arc::clone(self), followed));
            free.insert(task.abort_handle());
        }
    }

    pub(crate) fn deregister(&self, call: &DeregisterInstance) -> Result<EmptyReply, Refusal> {
        self.check_tenant(&call.instance, &call.tenant)?;
        let gone = self.change(|core, now_ns| core.conductor.deregister(&call.instance, call.incarnation, now_ns))?;
        if gone && let Some(follower) = self.core().followers.remove(&call.instance) {
            follower.abort();
        }
        Ok(EmptyReply)
    }

    pub(crate) fn load(&self, call: &ReportLoad) -> Result<EmptyReply, Refusal> {
        self.check_tenant(&call.instance, &call.tenant)?;
        let ReportLoad { seq, queued_tokens, decode_tokens, decodes, .. } = *call;
        let load = Load { seq, queued_tokens, decode_tokens, decodes };
        self.with(|conductor, now_ns| conductor.report(&call.instance, call.incarnation, load, now_ns))
            .map(|()| EmptyReply)
    }

    pub(crate) fn cache(&self, call: ReportCache) -> Result<CacheTaken, Refusal> {
        self.check_tenant(&call.instance, &call.tenant)?;
        let (instance, incarnation, batch) = batch_in(call);
        let reports_already = self.core().conductor.instances().reports_cache(&instance);
        let take = |core: &mut Core, now_ns| core.conductor.cache(&instance, incarnation, batch, now_ns);
        // The first batch changes what is remembered of an instance.
        let ack = if reports_already { self.call(Keep::Soon, take) } else { self.change(take) }?;
        Ok(convert::ack_out(ack))
    }

    pub(crate) fn query(&self, call: &QueryPrefix) -> Result<PrefixHolders, Refusal> {
        let tiers = Tiers::up_to(match call.tier {
            BlockTier::Gpu => Tier::Gpu,
            BlockTier::Dram => Tier::Dram,
            BlockTier::Ssd => Tier::Ssd,
        });
        let context = context_in(call.context.clone());
        let most = call.most as usize;
        let holdings = self.with(|conductor, _| conductor.query(&context, &call.hashes, most, tiers))?;
        Ok(convert::holdings_out(&holdings))
    }

    /// Tokens of a prompt's beginning that the shared store has by itself; none where nobody serves the model.
    fn in_store(&self, call: &QueryPrefix) -> u32 {
        let context = context_in(call.context.clone());
        self.with(|conductor, _| conductor.in_store(&context, &call.hashes)).unwrap_or(0)
    }

    pub(crate) fn schedule(&self, call: Schedule) -> Result<ScheduleReply, Refusal> {
        let asked = convert::asked_in(call);
        self.with(|conductor, now_ns| conductor.schedule(&asked, now_ns)).map(|answer| answer_out(&answer))
    }

    pub(crate) fn update(&self, call: UpdateRequest) -> Result<EmptyReply, Refusal> {
        self.with(|conductor, now_ns| conductor.update(call.reservation, step_in(call.step), now_ns))
            .map(|()| EmptyReply)
    }

    pub(crate) fn reschedule(&self, call: &Reschedule) -> Result<ScheduleReply, Refusal> {
        let answer = self.with(|conductor, now_ns| conductor.reschedule(call.reservation, &call.failed, now_ns))?;
        Ok(answer_out(&answer))
    }

    pub(crate) fn explain(&self, call: &ExplainRequest) -> Result<RequestExplained, Refusal> {
        let explained = self.with(|conductor, now_ns| conductor.explain(&call.request, now_ns))?;
        Ok(RequestExplained {
            answer: answer_out(&explained.answer),
            now: explained.now.as_ref().map(assigned_out),
            candidates: explained.candidates.iter().map(convert::candidate_out).collect(),
            pooled_tokens: explained.pooled_tokens,
        })
    }

    pub(crate) fn watch_instances(&self) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let table = self.table();
        let mut core = self.core();
        core.watchers.retain(|watcher| !watcher.is_closed());
        if core.watchers.len() >= WATCHERS {
            return Err(full("watch instances"));
        }
        let (items, receiver) = mpsc::channel(TABLES);
        // It is empty.
        let _ = items.try_send(frame(&table)?);
        core.watchers.push(items);
        drop(core);
        self.rearm.notify_one();
        Ok(receiver)
    }

    pub(crate) fn watch_assignments(&self, call: WatchAssignments) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let mut core = self.core();
        core.clients.retain(|_, client| !client.is_closed());
        if core.clients.len() >= WATCHERS && !core.clients.contains_key(&call.client) {
            return Err(full("watch assignments"));
        }
        let (items, receiver) = mpsc::channel(ASSIGNMENTS);
        for told in core.conductor.unclaimed(call.client).iter().take(ASSIGNMENTS) {
            // What does not fit is asked for by id.
            let _ = items.try_send(told_frame(told)?);
        }
        core.clients.insert(call.client, items);
        Ok(receiver)
    }
}

/// Ends all who follow for a host, when it goes: they hold on to it themselves.
struct Followers<'a>(&'a Host);

impl Drop for Followers<'_> {
    fn drop(&mut self) {
        let mut core = self.0.core();
        let (engines, masters) = (std::mem::take(&mut core.followers), std::mem::take(&mut core.masters));
        drop(core);
        engines.into_values().for_each(|task| task.abort());
        masters.into_values().for_each(|master| master.end());
    }
}

impl Core {
    /// Remembers what a model's hashes begin with, for as many models as there may be.
    fn set_seed(&mut self, pool: PoolKey, seed: String) {
        if self.seeds.get(&pool) == Some(&seed) {
            return;
        }
        let full = self.seeds.len() >= SEEDS && !self.seeds.contains_key(&pool);
        let forgotten = if full { self.seeds.pop_first() } else { None };
        self.changes.extend(durable::seed_changes(&pool, &seed, forgotten));
        self.seeds.insert(pool, seed);
    }

    /// Sends what is to be told. Who does not read loses its stream.
    fn tell(&mut self, now_ns: u64) {
        while let Some(told) = self.conductor.take_told() {
            let Some(client) = self.clients.get(&told.client) else { continue };
            // An answer is small; a client that does not keep up asks again.
            if told_frame(&told).is_ok_and(|frame| client.try_send(frame).is_err()) {
                self.clients.remove(&told.client);
            }
        }
        if self.watchers.is_empty() {
            return;
        }
        let version = self.conductor.instances().version();
        if version == self.told.0 && now_ns < self.told.1 + LOADS.as_nanos() as u64 {
            return;
        }
        self.told = (version, now_ns);
        let Ok(frame) = frame(&table_out(&self.conductor.table(now_ns))) else { return };
        // One that is slow gets the next one.
        self.watchers
            .retain(|watcher| !matches!(watcher.try_send(frame.clone()), Err(mpsc::error::TrySendError::Closed(_))));
    }
}

/// Whether events can be had from there.
fn check_source(source: &EventSource) -> Result<(), Refusal> {
    let replay = source.replay.is_empty() || subscriber::address_of(&source.replay).is_some();
    if subscriber::address_of(&source.publisher).is_none() || !replay || source.topic.len() > TOPIC_BYTES {
        let reason = format!("events come from tcp://HOST:PORT, not {:?} and {:?}", source.publisher, source.replay);
        return Err(Refusal::new(RefusalCode::BadRequest, reason));
    }
    Ok(())
}

fn full(what: &str) -> Refusal {
    Refusal::new(RefusalCode::LimitReached, format!("{WATCHERS} {what} already, which is the limit"))
}

fn frame(table: &InstanceTable) -> Result<ItemFrame, Refusal> {
    item_frame(table).map_err(|error| Refusal::new(RefusalCode::TooLarge, error.to_string()))
}

fn told_frame(told: &ClientNotice) -> Result<ItemFrame, Refusal> {
    let assigned = PlacementNotice { request: told.request.to_string(), answer: answer_out(&told.answer) };
    item_frame(&assigned).map_err(|error| Refusal::new(RefusalCode::TooLarge, error.to_string()))
}

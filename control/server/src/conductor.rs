//! Host of the Conductor: calls it on the control plane's thread, and advances its time.
//!
//! Calls come from QUIC and HTTP and are answered at once. No queue is needed here, since each connection has a limit
//! of calls and the Conductor limits everything else. A client whose request is queued gets its placement over its
//! stream of assignments. A stream that is not read is closed; placements that it missed are sent when the client
//! subscribes again, or in reply to a retry with the request's id.

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

/// Most assignments queued for a client.
const ASSIGNMENTS: usize = 1024;
/// Most clients that watch assignments, and most watchers of instances.
const WATCHERS: usize = 256;
/// Most tables queued for a watcher.
const TABLES: usize = 4;
/// Most models whose hash seeds are stored.
const SEEDS: usize = 256;
/// Most bytes of a topic.
const TOPIC_BYTES: usize = 256;
/// Interval at which watchers get the instances' loads while nothing else changes.
const LOADS: Duration = Duration::from_secs(1);

struct Core {
    conductor: Conductor,
    clients: BTreeMap<u64, mpsc::Sender<ItemFrame>>,
    watchers: Vec<mpsc::Sender<ItemFrame>>,
    /// Tasks that follow the events of engines, by instance.
    followers: BTreeMap<String, AbortHandle>,
    /// Mooncake masters whose events are followed.
    masters: Masters,
    /// Masters that were registered before this process started and are not followed yet.
    restored_masters: Vec<MasterSpec>,
    /// Hash seed of the engines, by model.
    seeds: BTreeMap<PoolKey, String>,
    /// Changes of masters and seeds that are not durable yet; the Conductor holds those of instances.
    changes: Vec<Change>,
    /// Version that was sent to watchers last, and its time.
    told: (u64, u64),
    /// Time at which the driver wakes up next.
    armed_ns: u64,
}

/// Host of the Conductor.
pub(crate) struct Host {
    core: Mutex<Core>,
    /// Known blocks of this cluster's store.
    stored: Mutex<StoreState>,
    /// Control plane that makes the state durable.
    keeper: OnceLock<Weak<Control>>,
    rearm: Notify,
    /// Number of models ever seen: the blocks in stores of a new model are not indexed yet.
    fresh: watch::Sender<u64>,
    started: Instant,
    /// Events of engines that could not be decoded, and events that do not concern this cluster.
    unread: AtomicU64,
    foreign: AtomicU64,
    /// Times that a publisher of events became unreachable.
    lost_publishers: AtomicU64,
}

impl Host {
    /// Creates a host from the restored state. For `grace` no instance is doubted for its silence.
    ///
    /// # Errors
    /// When the limits do not allow the restored state.
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
        // The Conductor is consistent between calls; only the call that panicked is lost.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stored(&self) -> MutexGuard<'_, StoreState> {
        // The state is consistent between reports.
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the Conductor, makes its changes durable, sends its notices, and rearms the driver if something is due
    /// earlier.
    pub(crate) fn with<T>(
        &self,
        call: impl FnOnce(&mut Conductor, u64) -> Result<T, ConductorError>,
    ) -> Result<T, Refusal> {
        self.call(Keep::Soon, |core, now_ns| call(&mut core.conductor, now_ns))
    }

    /// Makes a call that changes durable state: refused while the state cannot be written, and durable when this
    /// returns.
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

    /// Drives the Conductor's time, for as long as it is polled; then ends all followers.
    pub(crate) async fn run(self: Arc<Self>) {
        let _followers = Followers(&self);
        self.follow_restored();
        loop {
            let now_ns = self.now_ns();
            let due_ns = {
                let mut core = self.core();
                let due_ns = core.conductor.tick(now_ns).unwrap_or(u64::MAX);
                // After a failure the control plane stops with its reason.
                let _ = self.keep(&mut core, Keep::Soon);
                core.tell(now_ns);
                let loads_ns = if core.watchers.is_empty() { u64::MAX } else { core.told.1 + LOADS.as_nanos() as u64 };
                core.armed_ns = due_ns.min(loads_ns).max(now_ns);
                core.armed_ns
            };
            // One year stands for no deadline.
            let due = self.started + Duration::from_nanos(due_ns.min(now_ns.saturating_add(31_536_000_000_000_000)));
            tokio::select! {
                () = sleep_until(due.into()) => {}
                () = self.rearm.notified() => {}
            }
        }
    }

    /// Returns the table of instances and models.
    pub(crate) fn table(&self) -> InstanceTable {
        let now_ns = self.now_ns();
        table_out(&self.core().conductor.table(now_ns))
    }

    /// Returns true while the index may lack blocks of a model's instances, or of stores: answers are lower bounds
    /// then.
    fn incomplete(&self, pool: &PoolKey) -> bool {
        let core = self.core();
        core.conductor.incomplete(pool)
            || !core.restored_masters.is_empty()
            || core.masters.values().any(MasterRow::degraded)
    }

    /// Returns true if a model's engines hash differently from the requester.
    fn mismatched(&self, pool: &PoolKey) -> bool {
        self.core().conductor.mismatched(pool)
    }

    fn check_tenant(&self, instance: &str, tenant: &str) -> Result<(), Refusal> {
        match self.core().conductor.instances().tenant_of(instance) {
            Some(known) if known != tenant => {
                let reason = format!("instance {instance:?} belongs to another tenant than {tenant:?}");
                Err(Refusal::new(RefusalCode::NotPermitted, reason))
            }
            _ => Ok(()),
        }
    }

    /// Returns the hash seed of a model.
    fn seed(&self, pool: &PoolKey) -> String {
        self.core().seeds.get(pool).cloned().unwrap_or_else(|| "0".to_owned())
    }

    /// Updates the index with changes of a shard of the store; `void` discards everything known of the shard.
    fn store_changed(&self, shard: u64, void: bool, changes: &[(String, BlockKey, bool)]) {
        // Fails if a model has too many holders: its blocks in the store are not indexed then.
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

    /// Counts events that were skipped.
    fn note_events(&self, unread: usize, foreign: usize) {
        self.unread.fetch_add(unread as u64, Ordering::Relaxed);
        self.foreign.fetch_add(foreign as u64, Ordering::Relaxed);
    }

    pub(crate) fn register(self: &Arc<Self>, call: RegisterInstance) -> Result<InstanceRegistered, Refusal> {
        self.enter(call, false, None)
    }

    /// Registers an instance. With `is_vllm` the hashes of its first blocks are compared with those computed from
    /// tokens; `seed` becomes the hash seed of its model.
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
        // The instance may be due before anything else.
        self.rearm.notify_one();
        Ok(InstanceRegistered { fresh: registered.fresh, doubted_after_ns: registered.doubted_after_ns })
    }

    /// Follows the events of an instance, unless a task does. With `anew` the task of a former registration is ended.
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
        // The first batch changes the stored record of an instance.
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

    /// Returns the tokens of a prompt's prefix that the shared store holds by itself; 0 if no instance serves the
    /// model.
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
        // The channel is empty.
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
            // Placements that do not fit are returned in reply to a retry.
            let _ = items.try_send(told_frame(told)?);
        }
        core.clients.insert(call.client, items);
        Ok(receiver)
    }
}

/// Ends all followers of a host when it stops: they hold references to the host themselves.
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
    /// Sets the hash seed of a model, within the limit of models.
    fn set_seed(&mut self, pool: PoolKey, seed: String) {
        if self.seeds.get(&pool) == Some(&seed) {
            return;
        }
        let full = self.seeds.len() >= SEEDS && !self.seeds.contains_key(&pool);
        let forgotten = if full { self.seeds.pop_first() } else { None };
        self.changes.extend(durable::seed_changes(&pool, &seed, forgotten));
        self.seeds.insert(pool, seed);
    }

    /// Sends notices and tables. A client that does not read loses its stream.
    fn tell(&mut self, now_ns: u64) {
        while let Some(told) = self.conductor.take_told() {
            let Some(client) = self.clients.get(&told.client) else { continue };
            // An answer is small; a client that does not keep up retries its request.
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
        // A slow watcher gets the next table.
        self.watchers
            .retain(|watcher| !matches!(watcher.try_send(frame.clone()), Err(mpsc::error::TrySendError::Closed(_))));
    }
}

/// Checks that the addresses of an event source are usable.
fn check_source(source: &EventSource) -> Result<(), Refusal> {
    let replay = source.replay.is_empty() || subscriber::address_of(&source.replay).is_some();
    if subscriber::address_of(&source.publisher).is_none() || !replay || source.topic.len() > TOPIC_BYTES {
        let reason = format!("event sources are tcp://HOST:PORT, not {:?} and {:?}", source.publisher, source.replay);
        return Err(Refusal::new(RefusalCode::BadRequest, reason));
    }
    Ok(())
}

fn full(what: &str) -> Refusal {
    Refusal::new(RefusalCode::LimitReached, format!("{WATCHERS} subscribers {what} already, which is the limit"))
}

fn frame(table: &InstanceTable) -> Result<ItemFrame, Refusal> {
    item_frame(table).map_err(|error| Refusal::new(RefusalCode::TooLarge, error.to_string()))
}

fn told_frame(told: &ClientNotice) -> Result<ItemFrame, Refusal> {
    let assigned = PlacementNotice { request: told.request.to_string(), answer: answer_out(&told.answer) };
    item_frame(&assigned).map_err(|error| Refusal::new(RefusalCode::TooLarge, error.to_string()))
}

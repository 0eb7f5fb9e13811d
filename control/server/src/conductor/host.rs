//! Host of the Conductor: calls it on the control plane's thread, makes its changes durable, sends its notices, and
//! advances its time.
//!
//! One lock protects the Conductor, the hash seeds of its models, and the streams that carry its notices and tables
//! ([`Core`]). Changes are made durable under it, with the lock of the cluster, so their order in the durable state is
//! that of the calls.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvplane_cluster::Change;
use kvplane_conductor::conductor::{Conductor, ConductorError, InstanceSpec, InstanceTable, PoolKey, Registration};
use kvplane_conductor::engine::keys::BlockKey;
use kvplane_rpc::{ItemFrame, Refusal};
use tokio::sync::{Notify, mpsc, watch};

use super::durable::change_out;
use super::seeds::Seeds;
use super::streams::Streams;
use crate::cluster::ClusterHost;
use crate::server::clock::HostClock;

/// The Conductor, and what changes with it.
struct Core {
    conductor: Conductor,
    seeds: Seeds,
    streams: Streams,
    /// Time at which the driver wakes up next.
    armed_ns: u64,
}

/// Time at which a change becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keep {
    /// Before the call is answered; otherwise the call fails.
    Now,
    /// At once if possible, otherwise with a later call: no caller was promised that the change lasts.
    Soon,
}

/// Host of the Conductor.
pub(crate) struct ConductorHost {
    core: Mutex<Core>,
    /// Makes changes durable.
    cluster: Arc<ClusterHost>,
    rearm: Notify,
    /// Number of models ever seen: the blocks in stores of a new model are not indexed yet.
    models: watch::Sender<u64>,
    clock: HostClock,
}

impl ConductorHost {
    /// Hosts a restored Conductor; its changes become part of the cluster's durable state.
    pub(super) fn new(mut conductor: Conductor, seeds: Seeds, cluster: Arc<ClusterHost>) -> Self {
        let models = conductor.pools().models() as u64;
        let core = Core { conductor, seeds, streams: Streams::default(), armed_ns: u64::MAX };
        Self {
            core: Mutex::new(core),
            cluster,
            rearm: Notify::new(),
            models: watch::channel(models).0,
            clock: HostClock::start(),
        }
    }

    fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        // The Conductor is consistent between calls; only the call that panicked is lost.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the Conductor: for what makes no change durable, notifies nobody and is due at no earlier time.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&mut Conductor, u64) -> T) -> T {
        let now_ns = self.now_ns();
        look(&mut self.lock().conductor, now_ns)
    }

    /// Calls the Conductor, makes its changes durable, sends its notices, and rearms the driver if something is due
    /// earlier.
    pub(super) fn with<T>(
        &self,
        call: impl FnOnce(&mut Conductor, u64) -> Result<T, ConductorError>,
    ) -> Result<T, Refusal> {
        self.call(Keep::Soon, |core, now_ns| call(&mut core.conductor, now_ns))
    }

    /// Makes a call that changes durable state: refused while the state cannot be written, and durable when this
    /// returns.
    pub(super) fn change<T>(
        &self,
        call: impl FnOnce(&mut Conductor, u64) -> Result<T, ConductorError>,
    ) -> Result<T, Refusal> {
        self.check_durable()?;
        self.call(Keep::Now, |core, now_ns| call(&mut core.conductor, now_ns))
    }

    fn call<T>(
        &self,
        keep: Keep,
        call: impl FnOnce(&mut Core, u64) -> Result<T, ConductorError>,
    ) -> Result<T, Refusal> {
        let now_ns = self.now_ns();
        let mut core = self.lock();
        let result = call(&mut core, now_ns);
        self.keep(&mut core, keep, Vec::new())?;
        core.tell(now_ns);
        if core.conductor.soon_ns(now_ns).is_some_and(|soon_ns| soon_ns < core.armed_ns) {
            self.rearm.notify_one();
        }
        result.map_err(Refusal::from)
    }

    /// Refuses a change of durable state while it could not be written.
    pub(super) fn check_durable(&self) -> Result<(), Refusal> {
        self.cluster.check_durable()
    }

    /// Makes `others` and all pending changes durable.
    fn keep(&self, core: &mut Core, keep: Keep, others: Vec<Change>) -> Result<(), Refusal> {
        if others.is_empty() && !core.seeds.has_changes() && !core.conductor.has_durable() {
            return Ok(());
        }
        if keep == Keep::Soon && self.check_durable().is_err() {
            return Ok(());
        }
        let mut changes = others;
        changes.extend(core.seeds.take_changes());
        changes.extend(core.conductor.take_durable().into_iter().map(change_out));
        self.cluster.keep(&changes)
    }

    /// Makes changes of records beside the Conductor's own durable.
    pub(super) fn keep_records(&self, changes: Vec<Change>) -> Result<(), Refusal> {
        self.keep(&mut self.lock(), Keep::Now, changes)
    }

    /// Registers an instance; `seed` becomes the hash seed of its model.
    pub(super) fn register(&self, spec: InstanceSpec, seed: Option<String>) -> Result<Registration, Refusal> {
        self.check_durable()?;
        let (is_new_model, registered) = self.call(Keep::Now, |core, now_ns| {
            let (pool, models) = (spec.call.pool(), core.conductor.pools().models());
            let registered = core.conductor.register(spec, now_ns)?;
            if let Some(seed) = seed {
                core.seeds.set(pool, seed);
            }
            Ok((core.conductor.pools().models() > models, registered))
        })?;
        if is_new_model {
            self.models.send_modify(|models| *models += 1);
        }
        // The instance may be due before anything else.
        self.rearm.notify_one();
        Ok(registered)
    }

    /// Returns the hash seed of a model's engines.
    pub(crate) fn seed(&self, pool: &PoolKey) -> String {
        self.lock().seeds.of(pool)
    }

    /// Subscribes to the number of models ever seen.
    pub(super) fn models(&self) -> watch::Receiver<u64> {
        self.models.subscribe()
    }

    /// Updates the index with changes of a shard of the store; `void` discards everything known of the shard.
    pub(super) fn store_changed(&self, shard: u64, void: bool, changes: &[(String, BlockKey, bool)]) {
        // Fails if a model has too many holders: its blocks in the store are not indexed then.
        let _ = self.with(|conductor, _| {
            if void {
                conductor.pools().store_cleared(shard);
            }
            for (tenant, key, there) in changes {
                conductor.pools().store_has(shard, tenant, &key.model, key.hash, *there)?;
            }
            Ok(())
        });
    }

    /// Opens a stream of tables of instances, beginning with the present one.
    pub(super) fn watch_instances(&self) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let now_ns = self.now_ns();
        let mut core = self.lock();
        let table = InstanceTable::from(core.conductor.table(now_ns));
        let receiver = core.streams.watch_instances(&table)?;
        drop(core);
        self.rearm.notify_one();
        Ok(receiver)
    }

    /// Opens a client's stream of assignments, beginning with those that it missed.
    pub(super) fn watch_assignments(&self, client: u64) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let mut core = self.lock();
        let missed = core.conductor.unclaimed(client);
        core.streams.watch_assignments(client, &missed)
    }

    /// Drives the Conductor's time, for as long as it is polled.
    pub(super) async fn run(&self) {
        loop {
            let now_ns = self.now_ns();
            let due_ns = {
                let mut core = self.lock();
                let due_ns = core.conductor.tick(now_ns).unwrap_or(u64::MAX);
                // After a failure the control plane stops with its reason.
                let _ = self.keep(&mut core, Keep::Soon, Vec::new());
                core.tell(now_ns);
                core.armed_ns = due_ns.min(core.streams.due_ns()).max(now_ns);
                core.armed_ns
            };
            tokio::select! {
                () = self.clock.sleep_until(Some(due_ns).filter(|due_ns| *due_ns < u64::MAX)) => {}
                () = self.rearm.notified() => {}
            }
        }
    }
}

impl Core {
    fn tell(&mut self, now_ns: u64) {
        self.streams.send(&mut self.conductor, now_ns);
    }
}

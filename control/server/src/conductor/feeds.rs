//! Event feeds that are followed: those of engines, about their caches, and those of Mooncake's masters, about their
//! stores. A task of its own follows each ([`super::subscriber`]), from its registration until it is unregistered.
//!
//! The lock protects which feeds are followed. The Conductor's lock may be taken under it, to make a master durable
//! before it is followed; a task applies its events with the Conductor's lock alone.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvplane_rpc::conductor::EventSource;
use kvplane_rpc::{Refusal, RefusalCode};
use tokio::task::AbortHandle;

use super::durable::{followed, master_change, master_gone};
use super::host::ConductorHost;
use super::master::{Master, MasterRow, MasterSpec, Masters};
use super::subscriber::{self, EventOrigin, Feed};

/// Most bytes of a topic.
const TOPIC_BYTES: usize = 256;

/// Counters of events, and of their publishers.
#[derive(Default)]
pub(crate) struct FeedCounts {
    unread: AtomicU64,
    foreign: AtomicU64,
    lost_publishers: AtomicU64,
}

impl FeedCounts {
    /// Counts events that were skipped.
    pub(super) fn note_skipped(&self, unread: usize, foreign: usize) {
        self.unread.fetch_add(unread as u64, Ordering::Relaxed);
        self.foreign.fetch_add(foreign as u64, Ordering::Relaxed);
    }

    /// Counts a publisher that became unreachable.
    pub(super) fn note_lost_publisher(&self) {
        self.lost_publishers.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the events that could not be decoded.
    pub(super) fn unread(&self) -> u64 {
        self.unread.load(Ordering::Relaxed)
    }

    /// Returns the events that do not concern this cluster.
    pub(super) fn foreign(&self) -> u64 {
        self.foreign.load(Ordering::Relaxed)
    }

    /// Returns how often a publisher of events became unreachable.
    pub(super) fn lost_publishers(&self) -> u64 {
        self.lost_publishers.load(Ordering::Relaxed)
    }
}

/// Feeds that are followed, by their names.
#[derive(Default)]
struct FeedTable {
    /// Tasks that follow the events of engines, by instance.
    engines: BTreeMap<String, AbortHandle>,
    masters: Masters,
}

/// The feeds that are followed, and counters of their events.
pub(crate) struct Feeds {
    /// Applies the events.
    host: Arc<ConductorHost>,
    followed: Mutex<FeedTable>,
    counts: Arc<FeedCounts>,
}

impl Feeds {
    /// Creates the feeds; `masters` were registered before this process started and are not followed yet.
    pub(super) fn new(host: Arc<ConductorHost>, masters: Vec<MasterSpec>) -> Self {
        let followed = FeedTable { engines: BTreeMap::new(), masters: Masters::restored(masters) };
        Self { host, followed: Mutex::new(followed), counts: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, FeedTable> {
        // The tables are consistent between calls.
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the counters.
    pub(super) fn counts(&self) -> &FeedCounts {
        &self.counts
    }

    fn spawn(&self, origin: EventOrigin) -> AbortHandle {
        let task = subscriber::follow(Arc::clone(&self.host), Arc::clone(&self.counts), origin);
        tokio::spawn(task).abort_handle()
    }

    /// Follows the events of an instance, unless a task does. With `anew` the task of a former registration is ended.
    pub(super) fn follow_instance(&self, origin: EventOrigin, anew: bool) {
        let mut followed = self.lock();
        followed.engines.retain(|_, follower| !follower.is_finished());
        let Feed::Engine { instance, .. } = &origin.feed else { return };
        let instance = instance.clone();
        if anew && let Some(former) = followed.engines.remove(&instance) {
            former.abort();
        }
        if let Entry::Vacant(free) = followed.engines.entry(instance) {
            free.insert(self.spawn(origin));
        }
    }

    /// Ends following the events of an instance.
    pub(super) fn forget_instance(&self, instance: &str) {
        if let Some(follower) = self.lock().engines.remove(instance) {
            follower.abort();
        }
    }

    /// Follows the instances and masters that were registered before this process started, unless tasks do already.
    pub(super) fn follow_restored(&self) {
        let origins: Vec<EventOrigin> =
            self.host.look(|conductor, _| conductor.instances().specs().filter_map(followed).collect());
        let masters = self.lock().masters.take_restored();
        origins.into_iter().for_each(|origin| self.follow_instance(origin, false));
        masters.into_iter().for_each(|master| self.follow_master(master, true));
    }

    /// Registers a master and follows it. Idempotent; returns true if it is new.
    ///
    /// # Errors
    /// When a master of that name has other settings, there are too many, or the change cannot be made durable.
    pub(crate) fn register_master(&self, spec: MasterSpec) -> Result<bool, Refusal> {
        check_source(&spec.source())?;
        self.host.check_durable()?;
        let followed = self.lock();
        if !followed.masters.is_new(&spec)? {
            return Ok(false);
        }
        self.host.keep_records(vec![master_change(&spec)])?;
        drop(followed);
        self.follow_master(spec, false);
        Ok(true)
    }

    /// Follows a master from now on. A master that was registered before this process started has no replay, so it is
    /// degraded until it has cleared its parts or restarts.
    fn follow_master(&self, spec: MasterSpec, was_registered: bool) {
        let master = Master::new(Arc::clone(&self.host), &spec.name, was_registered);
        let (source, degraded) = (spec.source(), master.degraded());
        let task = self.spawn(EventOrigin { source, feed: Feed::Master(master) });
        self.lock().masters.insert(MasterRow::new(spec, degraded, task));
    }

    /// Unregisters a master. Returns false if there is none of that name and tenant.
    ///
    /// # Errors
    /// When the change cannot be made durable.
    pub(crate) fn unregister_master(&self, name: &str, tenant: &str) -> Result<bool, Refusal> {
        self.host.check_durable()?;
        let mut followed = self.lock();
        if !followed.masters.has(name, tenant) {
            return Ok(false);
        }
        self.host.keep_records(vec![master_gone(name)])?;
        let gone = followed.masters.remove(name);
        drop(followed);
        Ok(gone.map(MasterRow::end).is_some())
    }

    /// Returns all masters, and whether each is degraded.
    pub(crate) fn masters(&self) -> Vec<(MasterSpec, bool)> {
        self.lock().masters.list()
    }

    /// Returns true while the index may lack objects of a master's store.
    pub(super) fn is_degraded(&self) -> bool {
        self.lock().masters.is_degraded()
    }

    /// Ends following all of them.
    pub(super) fn end(&self) {
        let FeedTable { engines, masters } = std::mem::take(&mut *self.lock());
        engines.into_values().for_each(|task| task.abort());
        masters.end();
    }
}

/// Checks that the addresses of an event source are usable.
pub(super) fn check_source(source: &EventSource) -> Result<(), Refusal> {
    let replay = source.replay.is_empty() || subscriber::address_of(&source.replay).is_some();
    if subscriber::address_of(&source.publisher).is_none() || !replay || source.topic.len() > TOPIC_BYTES {
        let reason = format!("event sources are tcp://HOST:PORT, not {:?} and {:?}", source.publisher, source.replay);
        return Err(Refusal::new(RefusalCode::BadRequest, reason));
    }
    Ok(())
}

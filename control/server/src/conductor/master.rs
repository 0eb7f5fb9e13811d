//! Masters of Mooncake whose events are followed: blocks of their stores count for every instance, as those of this
//! cluster's store do.
//!
//! A master has no replay and, after a gap, no snapshot. After a gap everything known of its blocks is dropped, since a
//! block that is reported but absent costs more than an unknown one; the master is degraded until its events are
//! complete again: after it cleared its parts (as kvplane's own publisher does before its snapshots) or restarted. A
//! master that is unreachable for a minute counts as empty.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvplane_conductor::engine::keys::BlockKey;
use kvplane_conductor::engine::msgpack::Value;
use kvplane_conductor::engine::store::{ObjectName, StoreChange, StoreMedium, read_store_batch};
use kvplane_proto::Digest;
use kvplane_rpc::conductor::EventSource;
use kvplane_rpc::{Refusal, RefusalCode};
use tokio::task::AbortHandle;

use super::durable::{Keep, master_change, master_gone};
use super::store_blocks::{Change, MEMORY, SSD, StoreState};
use super::subscriber::{self, EventOrigin, Feed};
use super::{Host, check_source};

/// Most masters that are followed.
const MASTERS: usize = 16;
/// Most parts of one store that are distinguished.
const PARTS: usize = 256;
/// Time without a connection after which everything known of a master is dropped.
pub(super) const FORGET: Duration = Duration::from_secs(60);
/// Blocks sent to a new model's index in one go.
const TOLD: usize = 1_024;

/// Masters by the names that they are registered under.
pub(super) type Masters = BTreeMap<String, MasterRow>;

/// A followed master.
pub(super) struct MasterRow {
    pub registered: MasterSpec,
    degraded: Arc<AtomicBool>,
    task: AbortHandle,
}

/// A master as registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MasterSpec {
    pub name: String,
    pub tenant: String,
    /// Model that it was registered for; each event names the model of its blocks.
    pub model: String,
    pub block_tokens: u32,
    /// Address of its publisher.
    pub publisher: String,
}

impl MasterRow {
    /// Returns true while the index may lack objects of its store.
    pub(super) fn degraded(&self) -> bool {
        self.degraded.load(Ordering::Relaxed)
    }

    /// Ends following the master; the task drops everything known of its store.
    pub(super) fn end(self) {
        self.task.abort();
    }
}

impl Host {
    /// Registers a master and follows it. Idempotent; returns true if it is new.
    pub(crate) fn register_master(self: &Arc<Self>, spec: MasterSpec) -> Result<bool, Refusal> {
        let source = EventSource { publisher: spec.publisher.clone(), replay: String::new(), topic: String::new() };
        check_source(&source)?;
        self.check_durable()?;
        let mut core = self.core();
        match core.masters.get(&spec.name) {
            Some(known) if known.registered == spec => return Ok(false),
            Some(_) => {
                let reason = format!("{:?} is registered with other settings; unregister it first", spec.name);
                return Err(Refusal::new(RefusalCode::AlreadyExists, reason));
            }
            None if core.masters.len() >= MASTERS => {
                let reason = format!("there are {MASTERS} masters already, which is the limit");
                return Err(Refusal::new(RefusalCode::LimitReached, reason));
            }
            None => {}
        }
        core.changes.push(master_change(&spec));
        self.keep(&mut core, Keep::Now)?;
        drop(core);
        self.follow_master(spec, false);
        Ok(true)
    }

    /// Follows a master from now on. A master that was registered before this process started has no replay, so it is
    /// degraded until it has cleared its parts or restarts.
    pub(super) fn follow_master(self: &Arc<Self>, spec: MasterSpec, was_registered: bool) {
        let source = EventSource { publisher: spec.publisher.clone(), replay: String::new(), topic: String::new() };
        let degraded = Arc::new(AtomicBool::new(was_registered));
        let master = Master {
            host: Arc::clone(self),
            name: spec.name.clone(),
            known: StoreState::default(),
            parts: BTreeSet::new(),
            unsure: if was_registered { BTreeSet::from([0]) } else { BTreeSet::new() },
            degraded: Arc::clone(&degraded),
        };
        let task =
            tokio::spawn(subscriber::follow(Arc::clone(self), EventOrigin { source, feed: Feed::Master(master) }));
        let row = MasterRow { registered: spec.clone(), degraded, task: task.abort_handle() };
        self.core().masters.insert(spec.name, row);
    }

    /// Unregisters a master. Returns false if there is none of that name and tenant.
    ///
    /// # Errors
    /// When the change cannot be made durable.
    pub(crate) fn unregister_master(&self, name: &str, tenant: &str) -> Result<bool, Refusal> {
        self.check_durable()?;
        let mut core = self.core();
        if core.masters.get(name).is_none_or(|known| known.registered.tenant != tenant) {
            return Ok(false);
        }
        core.changes.push(master_gone(name));
        self.keep(&mut core, Keep::Now)?;
        let gone = core.masters.remove(name);
        drop(core);
        Ok(gone.map(MasterRow::end).is_some())
    }

    /// Returns all masters, and whether each is degraded.
    pub(crate) fn masters(&self) -> Vec<(MasterSpec, bool)> {
        let core = self.core();
        core.masters.values().map(|row| (row.registered.clone(), row.degraded())).collect()
    }
}

/// Contents of a store, by its master's events.
pub(super) struct Master {
    host: Arc<Host>,
    name: String,
    known: StoreState,
    /// Numbers of the store's parts.
    parts: BTreeSet<u64>,
    /// Parts whose contents may be incomplete; 0 stands for parts that have sent no event yet.
    unsure: BTreeSet<u64>,
    degraded: Arc<AtomicBool>,
}

impl Master {
    /// Applies a batch; returns the number of events that could not be decoded, and of those that concern no blocks.
    pub(super) fn take(&mut self, payload: &[u8]) -> (usize, usize) {
        let value = Value::read(payload);
        let Some(batch) = value.as_ref().and_then(read_store_batch) else { return (1, 0) };
        let mut foreign = batch.foreign;
        let mut changes: BTreeMap<u64, Vec<Change>> = BTreeMap::new();
        for event in batch.events {
            let part = self.number(&["part", &self.name, event.backend]) as u64 | 1;
            if !self.parts.contains(&part) && self.parts.len() >= PARTS {
                foreign += 1;
                continue;
            }
            self.parts.insert(part);
            let object = match event.object {
                ObjectName::Digest(digest) => digest,
                ObjectName::Key(key) => self.number(&["key", event.tenant, key]),
                ObjectName::Block(BlockKey { model, hash }) => {
                    self.number(&["block", event.tenant, &model, &format!("{hash:x}")])
                }
                ObjectName::All => 0,
            };
            let media = match event.medium {
                StoreMedium::Memory => MEMORY,
                StoreMedium::Ssd => SSD,
                StoreMedium::All => MEMORY | SSD,
            };
            let (name, of) = ((part, object), changes.entry(part).or_default());
            match event.change {
                StoreChange::Stored => {
                    of.extend(self.known.stored(name, media, || Some((event.tenant.to_owned(), event.block?))));
                }
                StoreChange::Removed => of.extend(self.known.removed(name, media)),
                StoreChange::Cleared => {
                    self.known.cleared(part, media, of);
                    self.unsure.remove(&part);
                    self.unsure.remove(&0);
                }
            }
        }
        for (part, changes) in changes {
            self.host.store_changed(part, false, &changes);
        }
        self.degraded.store(!self.unsure.is_empty(), Ordering::Relaxed);
        (batch.unread, foreign)
    }

    /// Hashes words to a number.
    fn number(&self, words: &[&str]) -> u128 {
        let mut bytes = Vec::with_capacity(64);
        for word in words {
            bytes.extend_from_slice(&(word.len() as u64).to_le_bytes());
            bytes.extend_from_slice(word.as_bytes());
        }
        Digest::of(b"mooncake", &bytes).0
    }

    /// Drops everything known; `missing` marks the store as incomplete.
    pub(super) fn forget(&mut self, missing: bool) {
        self.unsure = if missing { self.parts.iter().copied().chain([0]).collect() } else { BTreeSet::new() };
        self.degraded.store(missing, Ordering::Relaxed);
        self.known = StoreState::default();
        for part in &self.parts {
            self.host.store_changed(*part, true, &[]);
        }
    }

    /// Sends all known blocks to the index, for a new model.
    pub(super) async fn tell_all(&self) {
        let mut told: BTreeMap<u64, Vec<Change>> = BTreeMap::new();
        for (part, change) in self.known.all() {
            told.entry(part).or_default().push(change);
        }
        for (part, changes) in told {
            for some in changes.chunks(TOLD) {
                self.host.store_changed(part, false, some);
                // Other tasks run meanwhile.
                tokio::task::yield_now().await;
            }
        }
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        self.forget(false);
    }
}

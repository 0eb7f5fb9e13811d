//! Masters of Mooncake whose events are followed: blocks of their stores count for everybody, as those of ours do.
//!
//! A master has no replay and, after a gap, no snapshot. What was known of its blocks is forgotten then, for a block
//! that is said to be there and is not costs more than one that is not known; it counts as degraded until what it says
//! is complete again: after it cleared its parts (as our own publisher does before its snapshots) or started anew. One
//! that cannot be reached for a minute is taken to hold nothing.

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

/// Masters that are followed at most.
const MASTERS: usize = 16;
/// Parts of one store that are told apart at most.
const PARTS: usize = 256;
/// After how long without a connection nothing is known any more.
pub(super) const FORGET: Duration = Duration::from_secs(60);
/// Blocks that are told to a new model in one go.
const TOLD: usize = 1_024;

/// All masters, by the name that they are registered under.
pub(super) type Masters = BTreeMap<String, MasterRow>;

/// A master as operators see it.
pub(super) struct MasterRow {
    pub registered: MasterSpec,
    degraded: Arc<AtomicBool>,
    task: AbortHandle,
}

/// A master as it is registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MasterSpec {
    /// Its name.
    pub name: String,
    /// Whose.
    pub tenant: String,
    /// The model that it was registered for; the events say which models' blocks there are.
    pub model: String,
    pub block_tokens: u32,
    /// Where it publishes.
    pub publisher: String,
}

impl MasterRow {
    /// True while the index may lack objects of its store.
    pub(super) fn degraded(&self) -> bool {
        self.degraded.load(Ordering::Relaxed)
    }

    /// It is not followed any more; what was known goes with the task.
    pub(super) fn end(self) {
        self.task.abort();
    }
}

impl Host {
    /// A master registers, and is followed from now on; the same again does no harm. Says whether it is new.
    pub(crate) fn register_master(self: &Arc<Self>, spec: MasterSpec) -> Result<bool, Refusal> {
        let source = EventSource { publisher: spec.publisher.clone(), replay: String::new(), topic: String::new() };
        check_source(&source)?;
        self.check_durable()?;
        let mut core = self.core();
        match core.masters.get(&spec.name) {
            Some(known) if known.registered == spec => return Ok(false),
            Some(_) => {
                let reason = format!("{:?} is registered otherwise; unregister it first", spec.name);
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

    /// Follows a master from now on. Of one that was registered before this process began, which has no replay, nothing
    /// is known until it has cleared its parts or starts anew.
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

    /// A master goes. False where there is none of that name and tenant.
    ///
    /// # Errors
    /// When that cannot be made durable.
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

    /// All masters, and whether each is degraded.
    pub(crate) fn masters(&self) -> Vec<(MasterSpec, bool)> {
        let core = self.core();
        core.masters.values().map(|row| (row.registered.clone(), row.degraded())).collect()
    }
}

/// What is known of a store by its master's events.
pub(super) struct Master {
    host: Arc<Host>,
    name: String,
    known: StoreState,
    /// Parts by their numbers.
    parts: BTreeSet<u64>,
    /// Those of which something may be missing; 0 stands for those that have not been heard of.
    unsure: BTreeSet<u64>,
    degraded: Arc<AtomicBool>,
}

impl Master {
    /// Takes a batch; says how many events could not be read, and how many concern no blocks.
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

    /// A number for words.
    fn number(&self, words: &[&str]) -> u128 {
        let mut bytes = Vec::with_capacity(64);
        for word in words {
            bytes.extend_from_slice(&(word.len() as u64).to_le_bytes());
            bytes.extend_from_slice(word.as_bytes());
        }
        Digest::of(b"mooncake", &bytes).0
    }

    /// Nothing is known any more; `missing` says that there may be something.
    pub(super) fn forget(&mut self, missing: bool) {
        self.unsure = if missing { self.parts.iter().copied().chain([0]).collect() } else { BTreeSet::new() };
        self.degraded.store(missing, Ordering::Relaxed);
        self.known = StoreState::default();
        for part in &self.parts {
            self.host.store_changed(*part, true, &[]);
        }
    }

    /// A model is new: it hears of everything.
    pub(super) async fn tell_all(&self) {
        let mut told: BTreeMap<u64, Vec<Change>> = BTreeMap::new();
        for (part, change) in self.known.all() {
            told.entry(part).or_default().push(change);
        }
        for (part, changes) in told {
            for some in changes.chunks(TOLD) {
                self.host.store_changed(part, false, some);
                // Others are served meanwhile.
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

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
use kvplane_conductor::engine::store::{ObjectName, StoreMedium, read_store_batch};
use kvplane_proto::Digest;
use kvplane_proto::events::ObjectChange;
use kvplane_rpc::conductor::EventSource;
use kvplane_rpc::{Refusal, RefusalCode};
use tokio::task::AbortHandle;

use super::host::ConductorHost;
use super::store_blocks::{Change, MEMORY, SSD, StoreState};

/// Most masters that are followed.
const MASTERS: usize = 16;
/// Most parts of one store that are distinguished.
const PARTS: usize = 256;
/// Time without a connection after which everything known of a master is dropped.
pub(super) const FORGET: Duration = Duration::from_secs(60);
/// Blocks sent to a new model's index in one go.
const TOLD: usize = 1_024;

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

impl MasterSpec {
    /// Returns the source of its events: it has no replay.
    pub(super) fn source(&self) -> EventSource {
        EventSource { publisher: self.publisher.clone(), replay: String::new(), topic: String::new() }
    }
}

/// A followed master.
pub(super) struct MasterRow {
    registered: MasterSpec,
    degraded: Arc<AtomicBool>,
    task: AbortHandle,
}

impl MasterRow {
    /// Describes a master that a task follows.
    pub(super) fn new(registered: MasterSpec, degraded: Arc<AtomicBool>, task: AbortHandle) -> Self {
        Self { registered, degraded, task }
    }

    /// Returns true while the index may lack objects of its store.
    fn is_degraded(&self) -> bool {
        self.degraded.load(Ordering::Relaxed)
    }

    /// Ends following the master; the task drops everything known of its store.
    pub(super) fn end(self) {
        self.task.abort();
    }
}

/// Masters that are followed, by the names that they are registered under.
#[derive(Default)]
pub(super) struct Masters {
    rows: BTreeMap<String, MasterRow>,
    /// Masters that were registered before this process started and are not followed yet.
    restored: Vec<MasterSpec>,
}

impl Masters {
    /// Takes the masters that were stored.
    pub(super) fn restored(restored: Vec<MasterSpec>) -> Self {
        Self { rows: BTreeMap::new(), restored }
    }

    /// Takes the masters that are not followed yet, to follow them.
    pub(super) fn take_restored(&mut self) -> Vec<MasterSpec> {
        std::mem::take(&mut self.restored)
    }

    /// Returns true if the master is new, false if it is followed already.
    ///
    /// # Errors
    /// When one of that name has other settings, or there are too many.
    pub(super) fn is_new(&self, spec: &MasterSpec) -> Result<bool, Refusal> {
        match self.rows.get(&spec.name) {
            Some(known) if known.registered == *spec => Ok(false),
            Some(_) => {
                let reason = format!("{:?} is registered with other settings; unregister it first", spec.name);
                Err(Refusal::new(RefusalCode::AlreadyExists, reason))
            }
            None if self.rows.len() >= MASTERS => {
                let reason = format!("there are {MASTERS} masters already, which is the limit");
                Err(Refusal::new(RefusalCode::LimitReached, reason))
            }
            None => Ok(true),
        }
    }

    /// Enters a master that a task follows now.
    pub(super) fn insert(&mut self, row: MasterRow) {
        self.rows.insert(row.registered.name.clone(), row);
    }

    /// Returns true if a master of this name and tenant is followed.
    pub(super) fn has(&self, name: &str, tenant: &str) -> bool {
        self.rows.get(name).is_some_and(|known| known.registered.tenant == tenant)
    }

    /// Removes a master.
    pub(super) fn remove(&mut self, name: &str) -> Option<MasterRow> {
        self.rows.remove(name)
    }

    /// Returns all masters, and whether each is degraded.
    pub(super) fn list(&self) -> Vec<(MasterSpec, bool)> {
        self.rows.values().map(|row| (row.registered.clone(), row.is_degraded())).collect()
    }

    /// Returns true while the index may lack objects of a store.
    pub(super) fn is_degraded(&self) -> bool {
        !self.restored.is_empty() || self.rows.values().any(MasterRow::is_degraded)
    }

    /// Ends following all of them.
    pub(super) fn end(self) {
        self.rows.into_values().for_each(MasterRow::end);
    }
}

/// Contents of a store, by its master's events.
pub(super) struct Master {
    host: Arc<ConductorHost>,
    name: String,
    known: StoreState,
    /// Numbers of the store's parts.
    parts: BTreeSet<u64>,
    /// Parts whose contents may be incomplete; 0 stands for parts that have sent no event yet.
    unsure: BTreeSet<u64>,
    degraded: Arc<AtomicBool>,
}

impl Master {
    /// Begins without contents. A master that was registered before this process started has no replay, so its store
    /// counts as incomplete.
    pub(super) fn new(host: Arc<ConductorHost>, name: &str, was_registered: bool) -> Self {
        Self {
            host,
            name: name.to_owned(),
            known: StoreState::default(),
            parts: BTreeSet::new(),
            unsure: if was_registered { BTreeSet::from([0]) } else { BTreeSet::new() },
            degraded: Arc::new(AtomicBool::new(was_registered)),
        }
    }

    /// Returns the mark that is true while the contents may be incomplete.
    pub(super) fn degraded(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.degraded)
    }

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
                ObjectChange::Stored => {
                    of.extend(self.known.stored(name, media, || Some((event.tenant.to_owned(), event.block?))));
                }
                ObjectChange::Removed => of.extend(self.known.removed(name, media)),
                ObjectChange::Cleared => {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, publisher: &str) -> MasterSpec {
        let (name, tenant, publisher) = (name.to_owned(), "t".to_owned(), publisher.to_owned());
        MasterSpec { name, tenant, model: String::new(), block_tokens: 0, publisher }
    }

    fn row(name: &str, degraded: bool) -> MasterRow {
        let task = tokio::spawn(std::future::pending::<()>()).abort_handle();
        MasterRow::new(spec(name, "h:1"), Arc::new(AtomicBool::new(degraded)), task)
    }

    #[tokio::test]
    async fn a_master_is_registered_once_within_the_limit() {
        let mut masters = Masters::default();
        assert!(masters.is_new(&spec("a", "h:1")).is_ok_and(|is_new| is_new));
        masters.insert(row("a", false));
        assert!(masters.is_new(&spec("a", "h:1")).is_ok_and(|is_new| !is_new));
        let code = |refused: Result<bool, Refusal>| refused.err().and_then(|refusal| refusal.known_code());
        assert_eq!(code(masters.is_new(&spec("a", "h:2"))), Some(RefusalCode::AlreadyExists));
        (1..MASTERS).for_each(|number| masters.insert(row(&number.to_string(), false)));
        assert_eq!(code(masters.is_new(&spec("b", "h:1"))), Some(RefusalCode::LimitReached));
        assert!(masters.has("a", "t") && !masters.has("a", "other") && !masters.has("b", "t"));
        masters.remove("a").expect("it is there").end();
        assert!(masters.is_new(&spec("b", "h:1")).is_ok_and(|is_new| is_new));
    }

    #[tokio::test]
    async fn masters_are_degraded_until_all_are_followed_and_complete() {
        let mut masters = Masters::restored(vec![spec("a", "h:1")]);
        assert!(masters.is_degraded(), "it is not followed yet");
        assert_eq!(masters.take_restored(), [spec("a", "h:1")]);
        assert!(!masters.is_degraded());
        masters.insert(row("a", false));
        masters.insert(row("b", true));
        assert!(masters.is_degraded());
        assert_eq!(masters.list(), [(spec("a", "h:1"), false), (spec("b", "h:1"), true)]);
        masters.remove("b").expect("it is there").end();
        assert!(!masters.is_degraded());
    }
}

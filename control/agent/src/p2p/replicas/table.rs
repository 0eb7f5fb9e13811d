//! Table: replicas by name and version, and those that are being announced, so that no other thread begins the same.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::p2p::replica::Replica;

/// Name and version of an object.
type Key = (String, u64);

#[derive(Default)]
struct State {
    held: BTreeMap<Key, Arc<Replica>>,
    announcing: BTreeSet<Key>,
}

/// Replicas by name and version.
#[derive(Default)]
pub(super) struct Table {
    state: Mutex<State>,
}

/// Exclusive right to announce a version of an object, while this lives.
pub(super) struct Announcement<'a> {
    table: &'a Table,
    key: Key,
}

impl Table {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is complete.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the announcement of a version of an object; `None` if it is held here, or another thread announces it.
    pub(super) fn begin(&self, key: Key) -> Option<Announcement<'_>> {
        let mut state = self.state();
        let is_free = !state.held.contains_key(&key) && state.announcing.insert(key.clone());
        is_free.then(|| Announcement { table: self, key })
    }

    /// Returns the replica of that name and version; of the newest version held here if none is given.
    pub(super) fn newest(&self, name: &str, version: Option<u64>) -> Option<Arc<Replica>> {
        let (first, last) = version.map_or((0, u64::MAX), |version| (version, version));
        let state = self.state();
        let found = state.held.range((name.to_owned(), first)..=(name.to_owned(), last)).next_back();
        found.map(|(_, replica)| Arc::clone(replica))
    }

    /// Adds a replica that was removed.
    pub(super) fn insert(&self, replica: &Arc<Replica>) {
        self.state().held.insert(replica.key(), Arc::clone(replica));
    }

    /// Removes a replica.
    pub(super) fn remove(&self, replica: &Replica) {
        self.state().held.remove(&replica.key());
    }

    /// Removes and returns all replicas.
    pub(super) fn take(&self) -> Vec<Arc<Replica>> {
        std::mem::take(&mut self.state().held).into_values().collect()
    }
}

impl Announcement<'_> {
    /// Adds the replica, which has been announced.
    pub(super) fn insert(self, replica: &Arc<Replica>) {
        self.table.insert(replica);
    }
}

impl Drop for Announcement<'_> {
    fn drop(&mut self) {
        self.table.state().announcing.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvplane_cluster::p2p::{Layout, ObjectSpec};

    fn replica(version: u64) -> Arc<Replica> {
        let layout = Layout::new(vec![8], 8).unwrap();
        let spec = Arc::new(ObjectSpec { layout, hashes: vec![0], about: Vec::new() });
        Arc::new(Replica::whole("a", version, spec, &[]))
    }

    #[test]
    fn a_version_is_announced_once_at_a_time() {
        let table = Table::default();
        let announcement = table.begin(replica(1).key()).unwrap();
        assert!(table.begin(replica(1).key()).is_none());
        assert!(table.begin(replica(2).key()).is_some());
        assert!(table.newest("a", None).is_none());
        drop(announcement);
        table.begin(replica(1).key()).unwrap().insert(&replica(1));
        assert!(table.begin(replica(1).key()).is_none());
        table.remove(&replica(1));
        assert!(table.begin(replica(1).key()).is_some());
    }

    #[test]
    fn the_newest_version_stands_for_a_name() {
        let table = Table::default();
        [3, 1, 2].into_iter().for_each(|version| table.insert(&replica(version)));
        let found = |version| table.newest("a", version).map(|found| found.version);
        assert_eq!((found(None), found(Some(1)), found(Some(4))), (Some(3), Some(1), None));
        assert!(table.newest("aa", None).is_none() && table.newest("", None).is_none());
        assert_eq!(table.take().len(), 3);
        assert!(table.newest("a", None).is_none());
    }
}

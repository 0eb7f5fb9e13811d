//! A variant of any policy: whoever should go is spared while a block that continues it is there, and that one goes.
//!
//! A block is of no use without all blocks before it, so evicting from the far end of a prompt wastes nothing. It needs
//! to know for each block which one it continues; here the trace says so.

use std::collections::{HashMap, HashSet};

use kvplane_proto::digest::Digest;
use kvplane_store::entry::{Entries, EntryId};
use kvplane_store::eviction::{ChosenPolicy, EvictionPolicy};

use super::stored::digest_of;
use crate::trace::Request;

pub(super) struct LeavesFirst {
    inner: ChosenPolicy,
    /// The block before each one.
    parents: HashMap<Digest, Digest>,
    /// The blocks held that continue one, in the order in which they came.
    children: HashMap<Digest, Vec<EntryId>>,
}

impl LeavesFirst {
    pub(super) fn new(inner: ChosenPolicy, requests: &[Request]) -> Self {
        let pairs = requests.iter().flat_map(|request| request.blocks.windows(2));
        let parents = pairs.map(|pair| (digest_of(pair[1]), digest_of(pair[0]))).collect();
        Self { inner, parents, children: HashMap::new() }
    }

    fn forget(&mut self, entries: &Entries, id: EntryId) {
        if let Some(parent) = self.parents.get(&entries[id].digest())
            && let Some(children) = self.children.get_mut(parent)
        {
            children.retain(|other| *other != id);
        }
    }
}

impl EvictionPolicy for LeavesFirst {
    fn anew(&self) -> Self {
        Self { inner: self.inner.anew(), parents: self.parents.clone(), children: HashMap::new() }
    }

    fn insert(&mut self, entries: &mut Entries, id: EntryId) {
        self.inner.insert(entries, id);
        if let Some(parent) = self.parents.get(&entries[id].digest()) {
            self.children.entry(*parent).or_default().push(id);
        }
    }

    fn access(&mut self, entries: &mut Entries, id: EntryId) {
        self.inner.access(entries, id);
    }

    fn remove(&mut self, entries: &mut Entries, id: EntryId) {
        self.forget(entries, id);
        self.inner.remove(entries, id);
    }

    fn evict(&mut self, entries: &mut Entries, id: EntryId) {
        self.forget(entries, id);
        self.inner.evict(entries, id);
    }

    fn unpinned(&mut self, entries: &mut Entries, id: EntryId) {
        self.inner.unpinned(entries, id);
    }

    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        let mut victim = self.inner.victim(entries)?;
        let mut passed = HashSet::from([victim.0]);
        // A trace may be wrong about what continues what: no block is passed twice.
        while let Some(child) = self.children.get(&entries[victim].digest()).and_then(|children| children.first())
            && passed.insert(child.0)
        {
            victim = *child;
        }
        Some(victim)
    }

    fn check(&self, entries: &Entries) -> usize {
        self.inner.check(entries)
    }
}

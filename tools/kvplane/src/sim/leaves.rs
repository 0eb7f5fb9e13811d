//! Leaves-first variant of any eviction policy: a victim with cached continuations is spared, and one of these is
//! evicted.
//!
//! A block is of no use without all blocks before it, so evicting from the far end of a prompt loses nothing else. The
//! variant needs the parent of each block, which the trace gives here.

use std::collections::{HashMap, HashSet};

use kvplane_proto::digest::Digest;
use kvplane_store::entry::{Entries, EntryId};
use kvplane_store::eviction::{ChosenPolicy, EvictionPolicy};

use super::stored::digest_of;
use crate::trace::Request;

pub(super) struct LeavesFirst {
    inner: ChosenPolicy,
    /// Parent of each block: the one before it in a prompt.
    parents: HashMap<Digest, Digest>,
    /// Cached children of each block, in the order of their insertion.
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
        // A trace may contain a cycle of parents: no block is passed twice.
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

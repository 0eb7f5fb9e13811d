//! Reference twins of the eviction policies: plain vectors, oldest first.

pub(crate) mod objects;

use std::collections::HashMap;

use kvplane_proto::digest::Digest;
use kvplane_store::entry::{Entries, EntryId};
use kvplane_store::eviction::EvictionPolicy;

#[derive(Debug)]
pub(crate) struct ReferenceSegmentedLru {
    probation: Vec<EntryId>,
    protected: Vec<EntryId>,
    pool_granules: u64,
    percent: u64,
}

impl ReferenceSegmentedLru {
    pub(crate) fn new(pool_granules: u64, percent: u64) -> Self {
        Self { probation: Vec::new(), protected: Vec::new(), pool_granules, percent }
    }
}

fn granules(entries: &Entries, ids: &[EntryId]) -> u64 {
    ids.iter().map(|id| entries[*id].granules()).sum()
}

impl EvictionPolicy for ReferenceSegmentedLru {
    fn anew(&self) -> Self {
        Self::new(self.pool_granules, self.percent)
    }

    fn insert(&mut self, _: &mut Entries, id: EntryId) {
        self.probation.push(id);
    }

    fn access(&mut self, entries: &mut Entries, id: EntryId) {
        self.remove(entries, id);
        self.protected.push(id);
        while granules(entries, &self.protected) > self.pool_granules * self.percent / 100 {
            self.probation.push(self.protected.remove(0));
        }
    }

    fn remove(&mut self, _: &mut Entries, id: EntryId) {
        self.probation.retain(|other| *other != id);
        self.protected.retain(|other| *other != id);
    }

    fn unpinned(&mut self, _: &mut Entries, _: EntryId) {}

    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        let held = granules(entries, &self.probation) + granules(entries, &self.protected);
        let mut demoted = 0;
        while demoted < 16 && granules(entries, &self.protected) > held * self.percent / 100 {
            self.probation.push(self.protected.remove(0));
            demoted += 1;
        }
        let mut in_order = self.probation.iter().chain(&self.protected).copied();
        in_order.find(|id| entries[*id].pins() == 0)
    }

    fn check(&self, _: &Entries) -> usize {
        self.probation.len() + self.protected.len()
    }
}

/// Plain LRU.
#[derive(Debug, Default)]
pub(crate) struct ReferenceLru(Vec<EntryId>);

impl EvictionPolicy for ReferenceLru {
    fn anew(&self) -> Self {
        Self::default()
    }

    fn insert(&mut self, _: &mut Entries, id: EntryId) {
        self.0.push(id);
    }

    fn access(&mut self, entries: &mut Entries, id: EntryId) {
        self.remove(entries, id);
        self.0.push(id);
    }

    fn remove(&mut self, _: &mut Entries, id: EntryId) {
        self.0.retain(|other| *other != id);
    }

    fn unpinned(&mut self, _: &mut Entries, _: EntryId) {}

    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        self.0.iter().copied().find(|id| entries[*id].pins() == 0)
    }

    fn check(&self, _: &Entries) -> usize {
        self.0.len()
    }
}

/// S3-FIFO: frequencies in a map, and ghosts as whole digests with the number of the eviction that made them.
#[derive(Debug)]
pub(crate) struct ReferenceS3Fifo {
    small: Vec<EntryId>,
    main: Vec<EntryId>,
    frequencies: HashMap<u32, u32>,
    ghosts: Vec<(Digest, usize)>,
    small_evictions: usize,
}

impl ReferenceS3Fifo {
    pub(crate) fn new() -> Self {
        Self {
            small: Vec::new(),
            main: Vec::new(),
            frequencies: HashMap::new(),
            ghosts: Vec::new(),
            small_evictions: 0,
        }
    }

    /// Moves the first unpinned object of the small queue on to the main one, or names it as the victim.
    fn step_small(&mut self, entries: &Entries) -> Option<Result<EntryId, ()>> {
        let at = self.small.iter().position(|id| entries[*id].pins() == 0)?;
        if self.frequencies[&self.small[at].0] < 2 {
            return Some(Ok(self.small[at]));
        }
        let id = self.small.remove(at);
        self.frequencies.insert(id.0, 0);
        self.main.push(id);
        Some(Err(()))
    }

    /// Sends the first unpinned object of the main queue round again, or names it as the victim.
    fn step_main(&mut self, entries: &Entries) -> Option<Result<EntryId, ()>> {
        let at = self.main.iter().position(|id| entries[*id].pins() == 0)?;
        let id = self.main[at];
        let frequency = self.frequencies.get_mut(&id.0).expect("every entry has one");
        if *frequency == 0 {
            return Some(Ok(id));
        }
        *frequency -= 1;
        self.main.remove(at);
        self.main.push(id);
        Some(Err(()))
    }
}

impl EvictionPolicy for ReferenceS3Fifo {
    fn anew(&self) -> Self {
        Self::new()
    }

    fn insert(&mut self, entries: &mut Entries, id: EntryId) {
        self.frequencies.insert(id.0, 0);
        let digest = entries[id].digest();
        let known = self.ghosts.iter().position(|ghost| ghost.0 == digest).map(|at| self.ghosts.remove(at));
        let young = known.is_some_and(|(_, born)| self.small_evictions - born < self.main.len());
        if young { self.main.push(id) } else { self.small.push(id) }
    }

    fn access(&mut self, _: &mut Entries, id: EntryId) {
        let frequency = self.frequencies.get_mut(&id.0).expect("every entry has one");
        *frequency = (*frequency + 1).min(3);
    }

    fn remove(&mut self, _: &mut Entries, id: EntryId) {
        self.small.retain(|other| *other != id);
        self.main.retain(|other| *other != id);
        self.frequencies.remove(&id.0);
    }

    fn evict(&mut self, entries: &mut Entries, id: EntryId) {
        if self.small.contains(&id) {
            self.small_evictions += 1;
            let digest = entries[id].digest();
            self.ghosts.retain(|ghost| ghost.0 != digest);
            self.ghosts.push((digest, self.small_evictions));
        }
        self.remove(entries, id);
    }

    fn unpinned(&mut self, _: &mut Entries, _: EntryId) {}

    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        loop {
            let (small, main) = (granules(entries, &self.small), granules(entries, &self.main));
            let step = if small >= (small + main) / 10 {
                self.step_small(entries).or_else(|| self.step_main(entries))
            } else {
                self.step_main(entries).or_else(|| self.step_small(entries))
            };
            match step {
                Some(Ok(victim)) => return Some(victim),
                Some(Err(())) => {}
                None => return None,
            }
        }
    }

    fn check(&self, _: &Entries) -> usize {
        self.small.len() + self.main.len()
    }
}

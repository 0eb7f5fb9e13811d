//! The reference twin of segmented LRU: two vectors, oldest first, and nothing clever.

use kvplane_store::entry::{Entries, EntryId};
use kvplane_store::eviction::EvictionPolicy;

#[derive(Debug)]
pub(crate) struct ReferenceSegmentedLru {
    probation: Vec<EntryId>,
    protected: Vec<EntryId>,
    protected_limit_granules: u64,
}

impl ReferenceSegmentedLru {
    pub(crate) fn new(protected_limit_granules: u64) -> Self {
        Self { probation: Vec::new(), protected: Vec::new(), protected_limit_granules }
    }
}

impl EvictionPolicy for ReferenceSegmentedLru {
    fn insert(&mut self, _: &mut Entries, id: EntryId) {
        self.probation.push(id);
    }

    fn access(&mut self, entries: &mut Entries, id: EntryId) {
        self.remove(entries, id);
        self.protected.push(id);
        let granules = |ids: &[EntryId]| ids.iter().map(|id| entries[*id].granules()).sum::<u64>();
        while granules(&self.protected) > self.protected_limit_granules {
            self.probation.push(self.protected.remove(0));
        }
    }

    fn remove(&mut self, _: &mut Entries, id: EntryId) {
        self.probation.retain(|other| *other != id);
        self.protected.retain(|other| *other != id);
    }

    fn unpinned(&mut self, _: &mut Entries, _: EntryId) {}

    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        let mut in_order = self.probation.iter().chain(&self.protected).copied();
        in_order.find(|id| entries[*id].pins() == 0)
    }

    fn check(&self, _: &Entries) -> usize {
        self.probation.len() + self.protected.len()
    }
}

//! Segmented LRU by bytes: objects that were read once cannot evict objects that were read twice.
//!
//! After Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (IEEE Computer, 1994). New
//! objects enter *probation* at its recent end. An access moves an object to the recent end of *protected*. When
//! protected exceeds its share, its least recent objects go back to the recent end of probation. Victims are taken from
//! the old end of probation, then of protected.
//!
//! The share is of what the policy holds when a victim is needed, and never more than that share of the pool. A policy
//! that can fill only a part of the pool (of a tenant with a quota, of one of several tenants, of a store of few
//! objects) would otherwise protect all of its objects, and the only candidate left would be the latest one. Going back
//! to probation does not change the order in which the present objects are evicted; it only puts them before later
//! ones.
//!
//! With nothing protected it is plain LRU: an access then moves an object to the recent end of probation.
//!
//! It does not decide on admission, and does not count frequency beyond "more than once".

use super::EvictionPolicy;
use super::segment::Segment;
use crate::entry::{Entries, Entry, EntryId, EvictionList};

/// Most objects that a request for a victim sends back to probation: more than are evicted, so that a reduced share is
/// reached after a while, and few enough that no put pays for all of them.
const DEMOTED_AT_ONCE: usize = 16;

/// State of the policy. One clock tick per move to a recent end orders all entries.
#[derive(Debug)]
pub struct SegmentedLru {
    probation: Segment,
    protected: Segment,
    pool_granules: u64,
    protected_percent: u8,
    clock: u64,
}

impl SegmentedLru {
    /// Creates a policy for a pool of `pool_granules`. The protected segment has at most `protected_percent` of it, and
    /// of what the policy itself holds.
    #[must_use]
    pub const fn new(pool_granules: u64, protected_percent: u8) -> Self {
        Self {
            probation: Segment::new(EvictionList::Probation, EvictionList::ProbationParked),
            protected: Segment::new(EvictionList::Protected, EvictionList::ProtectedParked),
            pool_granules,
            protected_percent,
            clock: 0,
        }
    }

    /// Returns the granules that protected may hold of this many.
    fn share_of(&self, granules: u64) -> u64 {
        (u128::from(granules) * u128::from(self.protected_percent) / 100) as u64
    }

    /// Sends the least recent protected object back to probation; false if there is none.
    fn demote(&mut self, entries: &mut Entries) -> bool {
        let Some(oldest) = self.protected.oldest(entries) else { return false };
        self.unlink(entries, oldest);
        self.insert(entries, oldest);
        true
    }

    fn stamp(&mut self, entries: &mut Entries, id: EntryId) {
        self.clock += 1;
        entries[id].stamp = self.clock;
    }

    fn segment(&mut self, entries: &Entries, id: EntryId) -> &mut Segment {
        match entries[id].place() {
            EvictionList::Probation | EvictionList::ProbationParked => &mut self.probation,
            EvictionList::Protected | EvictionList::ProtectedParked => &mut self.protected,
            _ => panic!("{id:?} is not in this eviction order"),
        }
    }

    fn unlink(&mut self, entries: &mut Entries, id: EntryId) {
        self.segment(entries, id).unlink(entries, id);
    }
}

impl EvictionPolicy for SegmentedLru {
    fn anew(&self) -> Self {
        Self::new(self.pool_granules, self.protected_percent)
    }

    fn insert(&mut self, entries: &mut Entries, id: EntryId) {
        self.stamp(entries, id);
        self.probation.push(entries, id);
    }

    fn access(&mut self, entries: &mut Entries, id: EntryId) {
        self.unlink(entries, id);
        self.stamp(entries, id);
        self.protected.push(entries, id);
        while self.protected.granules() > self.share_of(self.pool_granules) && self.demote(entries) {}
    }

    fn remove(&mut self, entries: &mut Entries, id: EntryId) {
        self.unlink(entries, id);
    }

    fn unpinned(&mut self, entries: &mut Entries, id: EntryId) {
        self.segment(entries, id).unpark(entries, id);
    }

    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        let held = self.probation.granules() + self.protected.granules();
        for _ in 0..DEMOTED_AT_ONCE {
            if self.protected.granules() <= self.share_of(held) || !self.demote(entries) {
                break;
            }
        }
        let probation = self.probation.oldest_unpinned(entries);
        probation.or_else(|| self.protected.oldest_unpinned(entries))
    }

    fn was_accessed(&self, entry: &Entry) -> bool {
        self.protected_percent == 0 || entry.is_protected()
    }

    fn check(&self, entries: &Entries) -> usize {
        assert!(self.protected.granules() <= self.share_of(self.pool_granules), "protected outgrew the pool's share");
        self.probation.check(entries, true) + self.protected.check(entries, true)
    }
}

//! Segmented LRU by bytes: what was asked for once cannot push out what was asked for twice.
//!
//! After Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (IEEE Computer, 1994). New
//! objects enter *probation* at its recent end. An access moves an object to the recent end of *protected*. When
//! protected outgrows its share of the pool, its least recent objects go back to the recent end of probation. Victims
//! are taken from the old end of probation, then of protected.
//!
//! With nothing protected it is plain LRU: an access then moves an object to the recent end of probation.
//!
//! Not here: whether an object is admitted at all, and frequency beyond "more than once".

use super::EvictionPolicy;
use super::segment::Segment;
use crate::entry::{Entries, EntryId, Place};

/// The policy. One clock tick per move to a recent end orders everything.
#[derive(Debug)]
pub struct SegmentedLru {
    probation: Segment,
    protected: Segment,
    protected_limit_granules: u64,
    clock: u64,
}

impl SegmentedLru {
    /// A policy whose protected segment holds up to `protected_limit_granules`.
    #[must_use]
    pub const fn new(protected_limit_granules: u64) -> Self {
        Self {
            probation: Segment::new(Place::Probation, Place::ProbationParked),
            protected: Segment::new(Place::Protected, Place::ProtectedParked),
            protected_limit_granules,
            clock: 0,
        }
    }

    fn stamp(&mut self, entries: &mut Entries, id: EntryId) {
        self.clock += 1;
        entries[id].stamp = self.clock;
    }

    fn segment(&mut self, entries: &Entries, id: EntryId) -> &mut Segment {
        match entries[id].place {
            Place::Probation | Place::ProbationParked => &mut self.probation,
            Place::Protected | Place::ProtectedParked => &mut self.protected,
            _ => panic!("{id:?} is not in this eviction order"),
        }
    }

    fn unlink(&mut self, entries: &mut Entries, id: EntryId) {
        self.segment(entries, id).unlink(entries, id);
    }
}

impl EvictionPolicy for SegmentedLru {
    fn anew(&self) -> Self {
        Self::new(self.protected_limit_granules)
    }

    fn insert(&mut self, entries: &mut Entries, id: EntryId) {
        self.stamp(entries, id);
        self.probation.push(entries, id);
    }

    fn access(&mut self, entries: &mut Entries, id: EntryId) {
        self.unlink(entries, id);
        self.stamp(entries, id);
        self.protected.push(entries, id);
        while self.protected.granules() > self.protected_limit_granules {
            let Some(oldest) = self.protected.oldest(entries) else { break };
            self.unlink(entries, oldest);
            self.insert(entries, oldest);
        }
    }

    fn remove(&mut self, entries: &mut Entries, id: EntryId) {
        self.unlink(entries, id);
    }

    fn unpinned(&mut self, entries: &mut Entries, id: EntryId) {
        self.segment(entries, id).unpark(entries, id);
    }

    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        let probation = self.probation.oldest_unpinned(entries);
        probation.or_else(|| self.protected.oldest_unpinned(entries))
    }

    fn check(&self, entries: &Entries) -> usize {
        assert!(self.protected.granules() <= self.protected_limit_granules, "protected outgrew its share");
        self.probation.check(entries, true) + self.protected.check(entries, true)
    }
}

//! Segmented LRU by bytes: what was asked for once cannot push out what was asked for twice.
//!
//! After Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (IEEE Computer, 1994). New
//! objects enter *probation* at its recent end. An access moves an object to the recent end of *protected*. When
//! protected outgrows its share of the pool, its least recent objects go back to the recent end of probation. Victims
//! are taken from the old end of probation, then of protected.
//!
//! **Pins do not change the order.** A pinned object keeps the place that its accesses gave it; it is only passed over.
//! Passing over must not cost a walk each time, so a pinned object found at the old end is *parked*: moved to a side
//! list of its segment. All parked objects are older than all listed ones were when they were parked, so both lists
//! are sorted by stamp (the time they came to the segment's recent end), parking appends, and the segment's oldest is
//! the older of the two heads. Each pin causes at most one parking. When the last pin goes the object returns to the
//! old end of the list by stamp, past at most those that were parked before it and returned sooner.
//!
//! Not here: whether an object is admitted at all, and frequency beyond "more than once".

use super::EvictionPolicy;
use super::list::List;
use crate::entry::{Entries, EntryId, Place};

#[derive(Debug)]
struct Segment {
    listed: List,
    parked: List,
    granules: u64,
}

impl Segment {
    const fn new(listed: Place, parked: Place) -> Self {
        Self { listed: List::new(listed), parked: List::new(parked), granules: 0 }
    }

    /// Adds an entry at the recent end.
    fn push(&mut self, entries: &mut Entries, id: EntryId) {
        self.granules += entries[id].granules();
        self.listed.push_last(entries, id);
    }

    /// The oldest member, pinned or not.
    fn oldest(&self, entries: &Entries) -> Option<EntryId> {
        let heads = [self.listed.first(), self.parked.first()];
        heads.into_iter().flatten().min_by_key(|id| entries[*id].stamp)
    }

    /// The oldest member without pins; parks the pinned ones it meets.
    fn oldest_unpinned(&mut self, entries: &mut Entries) -> Option<EntryId> {
        while let Some(id) = self.listed.first() {
            if entries[id].pins() == 0 {
                return Some(id);
            }
            self.listed.unlink(entries, id);
            self.parked.push_last(entries, id);
        }
        None
    }

    fn check(&self, entries: &Entries) -> usize {
        let (listed, listed_granules) = self.listed.check(entries);
        let (parked, parked_granules) = self.parked.check(entries);
        assert_eq!(self.granules, listed_granules + parked_granules, "granules of {self:?}");
        listed + parked
    }
}

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

    fn unlink(&mut self, entries: &mut Entries, id: EntryId) {
        let (segment, parked) = match entries[id].place {
            Place::Probation => (&mut self.probation, false),
            Place::ProbationParked => (&mut self.probation, true),
            Place::Protected => (&mut self.protected, false),
            Place::ProtectedParked => (&mut self.protected, true),
            Place::Nowhere => panic!("{id:?} is not in the eviction order"),
        };
        segment.granules -= entries[id].granules();
        let list = if parked { &mut segment.parked } else { &mut segment.listed };
        list.unlink(entries, id);
    }
}

impl EvictionPolicy for SegmentedLru {
    fn insert(&mut self, entries: &mut Entries, id: EntryId) {
        self.stamp(entries, id);
        self.probation.push(entries, id);
    }

    fn access(&mut self, entries: &mut Entries, id: EntryId) {
        self.unlink(entries, id);
        self.stamp(entries, id);
        self.protected.push(entries, id);
        while self.protected.granules > self.protected_limit_granules {
            let Some(oldest) = self.protected.oldest(entries) else { break };
            self.unlink(entries, oldest);
            self.insert(entries, oldest);
        }
    }

    fn remove(&mut self, entries: &mut Entries, id: EntryId) {
        self.unlink(entries, id);
    }

    fn unpinned(&mut self, entries: &mut Entries, id: EntryId) {
        let segment = match entries[id].place {
            Place::ProbationParked => &mut self.probation,
            Place::ProtectedParked => &mut self.protected,
            _ => return,
        };
        segment.parked.unlink(entries, id);
        segment.listed.insert_by_stamp(entries, id);
    }

    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        let probation = self.probation.oldest_unpinned(entries);
        probation.or_else(|| self.protected.oldest_unpinned(entries))
    }

    fn check(&self, entries: &Entries) -> usize {
        assert!(self.protected.granules <= self.protected_limit_granules, "protected outgrew its share");
        self.probation.check(entries) + self.protected.check(entries)
    }
}

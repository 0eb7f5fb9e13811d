//! Segment of an eviction order: a list from oldest to newest that skips pinned objects without walking them.
//!
//! **Pins do not change the order.** A pinned object keeps the position that its accesses gave it; it is only skipped.
//! Skipping must not cost a walk each time, so a pinned object found at the old end is *parked*: moved to a side list
//! of its segment. All parked objects are older than all listed ones were when they were parked. Each pin causes at
//! most one parking. When the last pin is released, the object returns to the old end of the list by stamp (the time at
//! which it came to the segment's recent end), past at most those that were parked before it and returned sooner.
//!
//! Parking appends. If every access moves an object to the recent end, no object is parked twice under the same stamp,
//! so that the parked list is sorted too, and the segment's oldest is the older of the two heads.

use super::list::List;
use crate::entry::{Entries, EntryId, EvictionList};

#[derive(Debug)]
pub(crate) struct Segment {
    listed: List,
    parked: List,
    granules: u64,
    members: u32,
}

impl Segment {
    /// Creates an empty segment, whose members carry one of the two places.
    pub(crate) const fn new(listed: EvictionList, parked: EvictionList) -> Self {
        Self { listed: List::new(listed), parked: List::new(parked), granules: 0, members: 0 }
    }

    /// Returns the space that the members take, pinned or not.
    pub(super) const fn granules(&self) -> u64 {
        self.granules
    }

    /// Returns the number of members, pinned or not.
    pub(super) const fn members(&self) -> u32 {
        self.members
    }

    /// Appends an entry at the recent end; its stamp is newer than that of all others.
    pub(crate) fn push(&mut self, entries: &mut Entries, id: EntryId) {
        self.granules += entries[id].granules();
        self.members += 1;
        self.listed.push_last(entries, id);
    }

    /// Removes a member.
    pub(crate) fn unlink(&mut self, entries: &mut Entries, id: EntryId) {
        self.granules -= entries[id].granules();
        self.members -= 1;
        let parked = entries[id].place() == self.parked.place();
        let list = if parked { &mut self.parked } else { &mut self.listed };
        list.unlink(entries, id);
    }

    /// Handles the release of a member's last pin: it is a candidate again, at its position.
    pub(crate) fn unpark(&mut self, entries: &mut Entries, id: EntryId) {
        if entries[id].place() == self.parked.place() {
            self.parked.unlink(entries, id);
            self.listed.insert_by_stamp(entries, id);
        }
    }

    /// Returns the oldest member, pinned or not. Only valid if every access moves a member to the recent end.
    pub(super) fn oldest(&self, entries: &Entries) -> Option<EntryId> {
        let heads = [self.listed.first(), self.parked.first()];
        heads.into_iter().flatten().min_by_key(|id| entries[*id].stamp)
    }

    /// Returns the oldest member without pins; parks the pinned ones before it.
    pub(crate) fn oldest_unpinned(&mut self, entries: &mut Entries) -> Option<EntryId> {
        while let Some(id) = self.listed.first() {
            if entries[id].pins() == 0 {
                return Some(id);
            }
            self.listed.unlink(entries, id);
            self.parked.push_last(entries, id);
        }
        None
    }

    /// Asserts lists and accounts; returns the number of members. `by_access`: each access moves a member to the recent
    /// end.
    pub(crate) fn check(&self, entries: &Entries, by_access: bool) -> usize {
        let (listed, listed_granules) = self.listed.check(entries, true);
        let (parked, parked_granules) = self.parked.check(entries, by_access);
        assert_eq!(self.granules, listed_granules + parked_granules, "granules of {self:?}");
        assert_eq!(self.members as usize, listed + parked, "members of {self:?}");
        listed + parked
    }
}

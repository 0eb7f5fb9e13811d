//! Doubly linked list through the entries, least recent first.

use crate::entry::{Entries, EntryId, EvictionList, NONE};

#[derive(Debug)]
pub(super) struct List {
    first: u32,
    last: u32,
    place: EvictionList,
}

impl List {
    /// Creates an empty list whose members carry `place`.
    pub(super) const fn new(place: EvictionList) -> Self {
        Self { first: NONE, last: NONE, place }
    }

    /// Returns the mark that members carry.
    pub(super) const fn place(&self) -> EvictionList {
        self.place
    }

    /// Returns the least recent member.
    pub(super) fn first(&self) -> Option<EntryId> {
        (self.first != NONE).then_some(EntryId(self.first))
    }

    /// Appends an entry at the recent end.
    pub(super) fn push_last(&mut self, entries: &mut Entries, id: EntryId) {
        self.insert_between(entries, self.last, id, NONE);
    }

    /// Inserts an entry by its stamp, searching from the least recent end.
    pub(super) fn insert_by_stamp(&mut self, entries: &mut Entries, id: EntryId) {
        let (mut before, mut after) = (NONE, self.first);
        while after != NONE && entries[EntryId(after)].stamp < entries[id].stamp {
            (before, after) = (after, entries[EntryId(after)].after);
        }
        self.insert_between(entries, before, id, after);
    }

    /// Removes a member.
    pub(super) fn unlink(&mut self, entries: &mut Entries, id: EntryId) {
        let entry = &mut entries[id];
        assert!(entry.place() == self.place, "{entry:?} is not in the list of {:?}", self.place);
        let (before, after) = (entry.before, entry.after);
        entry.set_place(EvictionList::Nowhere);
        match before {
            NONE => self.first = after,
            before => entries[EntryId(before)].after = after,
        }
        match after {
            NONE => self.last = before,
            after => entries[EntryId(after)].before = before,
        }
    }

    /// Asserts links, places and, if `sorted`, the order by stamp; returns the number of members and their granules.
    pub(super) fn check(&self, entries: &Entries, sorted: bool) -> (usize, u64) {
        let (mut members, mut granules) = (0, 0);
        let (mut before, mut cursor) = (NONE, self.first);
        while cursor != NONE {
            let entry = &entries[EntryId(cursor)];
            assert!(entry.place() == self.place && entry.before == before, "{entry:?}");
            let ordered = !sorted || before == NONE || entries[EntryId(before)].stamp < entry.stamp;
            assert!(ordered, "{entry:?} is out of order");
            members += 1;
            granules += entry.granules();
            (before, cursor) = (cursor, entry.after);
        }
        assert_eq!(self.last, before, "the list of {:?} ends at its last member", self.place);
        (members, granules)
    }

    fn insert_between(&mut self, entries: &mut Entries, before: u32, id: EntryId, after: u32) {
        let entry = &mut entries[id];
        assert!(entry.place() == EvictionList::Nowhere, "{entry:?} is in a list already");
        (entry.before, entry.after) = (before, after);
        entry.set_place(self.place);
        match before {
            NONE => self.first = id.0,
            before => entries[EntryId(before)].after = id.0,
        }
        match after {
            NONE => self.last = id.0,
            after => entries[EntryId(after)].before = id.0,
        }
    }
}

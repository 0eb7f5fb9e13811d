//! Handles that sessions hold, and their deadlines: linked lists through tables that are as long as the store's limits.
//!
//! An index is on at most one list of a table. Removing an index needs no search, and no list allocates, so that the
//! service's memory follows from the limits on pins, reservations and connections, not from how many there were.

#[cfg(test)]
mod tests;

const NONE: u32 = u32::MAX;
/// Marks, in place of a predecessor, an index that is on no list.
const UNLINKED: u32 = u32::MAX - 1;

/// Ends of a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct List {
    first: u32,
    last: u32,
}

impl List {
    pub(super) const fn new() -> Self {
        Self { first: NONE, last: NONE }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.first == NONE
    }
}

#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    after: u32,
}

/// Links of the lists, by index.
struct Links {
    links: Vec<Link>,
}

impl Links {
    fn new(limit: u32) -> Self {
        Self { links: Vec::with_capacity(limit as usize) }
    }

    /// Appends an index to a list.
    fn push(&mut self, list: &mut List, index: u32) {
        if self.links.len() <= index as usize {
            self.links.resize(index as usize + 1, Link { before: UNLINKED, after: NONE });
        }
        let link = &mut self.links[index as usize];
        assert_eq!(link.before, UNLINKED, "position {index} is on a list already");
        *link = Link { before: list.last, after: NONE };
        match list.last {
            NONE => list.first = index,
            last => self.links[last as usize].after = index,
        }
        list.last = index;
    }

    /// Removes an index from its list.
    fn remove(&mut self, list: &mut List, index: u32) {
        let Link { before, after } = self.links[index as usize];
        assert_ne!(before, UNLINKED, "position {index} is on no list");
        match before {
            NONE => list.first = after,
            before => self.links[before as usize].after = after,
        }
        match after {
            NONE => list.last = before,
            after => self.links[after as usize].before = before,
        }
        self.links[index as usize] = Link { before: UNLINKED, after: NONE };
    }

    fn is_linked(&self, index: u32) -> bool {
        self.links.get(index as usize).is_some_and(|link| link.before != UNLINKED)
    }
}

/// Deadlines by index, at most one each, which expire in the order in which they were set: the time until a deadline is
/// the same for all.
pub(super) struct Deadlines {
    links: Links,
    list: List,
    at_ns: Vec<u64>,
}

impl Deadlines {
    /// Creates an empty set with capacity for indexes below `limit`; larger ones are possible.
    pub(super) fn new(limit: u32) -> Self {
        Self { links: Links::new(limit), list: List::new(), at_ns: Vec::with_capacity(limit as usize) }
    }

    /// Sets the deadline of an index that has none; not earlier than any that was set before.
    pub(super) fn set(&mut self, index: u32, at_ns: u64) {
        if self.at_ns.len() <= index as usize {
            self.at_ns.resize(index as usize + 1, 0);
        }
        self.at_ns[index as usize] = at_ns;
        self.links.push(&mut self.list, index);
    }

    /// Cancels the deadline of an index, if it has one.
    pub(super) fn cancel(&mut self, index: u32) {
        if self.links.is_linked(index) {
            self.links.remove(&mut self.list, index);
        }
    }

    /// Returns the next deadline.
    pub(super) fn next_ns(&self) -> Option<u64> {
        let first = self.list.first;
        (first != NONE).then(|| self.at_ns[first as usize])
    }

    /// Removes and returns an index whose deadline has passed.
    pub(super) fn take_due(&mut self, now_ns: u64) -> Option<u32> {
        self.next_ns().filter(|&at_ns| at_ns <= now_ns)?;
        let first = self.list.first;
        self.links.remove(&mut self.list, first);
        Some(first)
    }
}

#[derive(Clone, Copy, Default)]
struct Holder {
    session: u32,
    generation: u32,
}

/// Pins or reservations of the store that sessions hold, in one list for each session.
pub(super) struct Handles {
    links: Links,
    holders: Vec<Holder>,
}

impl Handles {
    /// Creates a table with capacity for as many handles as the store may give.
    pub(super) fn new(limit: u32) -> Self {
        Self { links: Links::new(limit), holders: Vec::with_capacity(limit as usize) }
    }

    /// Lends a handle to a session.
    pub(super) fn lend(&mut self, list: &mut List, session: u32, index: u32, generation: u32) {
        if self.holders.len() <= index as usize {
            self.holders.resize(index as usize + 1, Holder::default());
        }
        self.holders[index as usize] = Holder { session, generation };
        self.links.push(list, index);
    }

    /// Takes a handle back; false if this session does not hold it.
    pub(super) fn take(&mut self, list: &mut List, session: u32, index: u32, generation: u32) -> bool {
        let held = self.holder(index) == Some((session, generation));
        if held {
            self.links.remove(list, index);
        }
        held
    }

    /// Takes back any handle of a list: its index and generation.
    pub(super) fn take_first(&mut self, list: &mut List) -> Option<(u32, u32)> {
        let (_, generation) = self.holder(list.first)?;
        let index = list.first;
        self.links.remove(list, index);
        Some((index, generation))
    }

    /// Returns the session that holds the handle at this index, and the handle's generation.
    pub(super) fn holder(&self, index: u32) -> Option<(u32, u32)> {
        let Holder { session, generation } = *self.holders.get(index as usize)?;
        self.links.is_linked(index).then_some((session, generation))
    }
}

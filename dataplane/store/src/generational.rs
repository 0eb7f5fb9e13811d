//! Bounded table of entries whose handles are (index, generation), so that a late message about a former holder of an
//! index is recognised.
//!
//! Vacant indexes are reused in the order in which they became vacant: the generation of an index then wraps only after
//! 2^32 times the limit of holders, so that a stale handle cannot become valid by accident within any transfer's
//! lifetime.

use core::marker::PhantomData;

use kvplane_proto::ids::{PinId, ReservationId};

use crate::entry::EntryId;

const NONE: u32 = u32::MAX;

/// Handle of a table: an index and a generation.
pub(crate) trait Handle: Copy {
    fn new(index: u32, generation: u32) -> Self;

    /// Returns index and generation.
    fn parts(self) -> (u32, u32);
}

macro_rules! handle {
    ($name:ident) => {
        impl Handle for $name {
            #[inline]
            fn new(index: u32, generation: u32) -> Self {
                Self { index, generation }
            }

            #[inline]
            fn parts(self) -> (u32, u32) {
                (self.index, self.generation)
            }
        }
    };
}

handle!(PinId);
handle!(ReservationId);

#[derive(Debug)]
enum Content {
    Held(EntryId),
    /// Next vacant index.
    Vacant(u32),
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    content: Content,
}

/// At most `limit` handles of type `H`, each of which leads to an entry. Several may lead to one.
#[derive(Debug)]
pub(crate) struct GenerationalTable<H> {
    slots: Vec<Slot>,
    limit: u32,
    held: u32,
    vacant_first: u32,
    vacant_last: u32,
    handles: PhantomData<H>,
}

impl<H: Handle> GenerationalTable<H> {
    pub(crate) fn new(limit: u32) -> Self {
        let slots = Vec::with_capacity(limit as usize);
        Self { slots, limit, held: 0, vacant_first: NONE, vacant_last: NONE, handles: PhantomData }
    }

    pub(crate) const fn is_full(&self) -> bool {
        self.held == self.limit
    }

    /// Returns the number of handles held.
    pub(crate) const fn len(&self) -> u32 {
        self.held
    }

    /// Returns the number of handles that are free.
    pub(crate) const fn free(&self) -> u32 {
        self.limit - self.held
    }

    /// Returns a new handle of an entry.
    ///
    /// # Panics
    /// If the table is full: the caller checks first.
    pub(crate) fn insert(&mut self, value: EntryId) -> H {
        assert!(!self.is_full(), "all {} slots are held", self.limit);
        self.held += 1;
        // Unused indexes first, which keeps the queue of vacant ones long.
        if self.slots.len() < self.limit as usize {
            self.slots.push(Slot { generation: 1, content: Content::Held(value) });
            return H::new(self.slots.len() as u32 - 1, 1);
        }
        let index = self.vacant_first;
        let slot = &mut self.slots[index as usize];
        let Content::Vacant(next) = slot.content else {
            panic!("slot {index} is held and in the queue of vacant slots");
        };
        slot.content = Content::Held(value);
        self.vacant_first = next;
        if next == NONE {
            self.vacant_last = NONE;
        }
        H::new(index, slot.generation)
    }

    /// Returns the entry of a handle; `None` if it is stale.
    pub(crate) fn get(&self, handle: H) -> Option<EntryId> {
        let (index, generation) = handle.parts();
        match self.slots.get(index as usize)? {
            Slot { generation: g, content: Content::Held(value) } if *g == generation => Some(*value),
            _ => None,
        }
    }

    /// Removes a handle; returns its entry, or `None` if it is stale.
    pub(crate) fn remove(&mut self, handle: H) -> Option<EntryId> {
        let value = self.get(handle)?;
        let (index, _) = handle.parts();
        let slot = &mut self.slots[index as usize];
        slot.content = Content::Vacant(NONE);
        slot.generation = slot.generation.wrapping_add(1);
        self.held -= 1;
        if self.vacant_last == NONE {
            self.vacant_first = index;
        } else {
            self.slots[self.vacant_last as usize].content = Content::Vacant(index);
        }
        self.vacant_last = index;
        Some(value)
    }

    /// Returns the entry of each handle, for checks.
    pub(crate) fn values(&self) -> impl Iterator<Item = EntryId> + '_ {
        self.slots.iter().filter_map(|slot| match slot.content {
            Content::Held(value) => Some(value),
            Content::Vacant(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    impl Handle for (u32, u32) {
        fn new(index: u32, generation: u32) -> Self {
            (index, generation)
        }

        fn parts(self) -> (u32, u32) {
            self
        }
    }

    proptest! {
        #[test]
        fn stale_handles_name_nothing(
            limit in 1..6u32,
            ops in prop::collection::vec((any::<bool>(), any::<usize>()), 0..100),
        ) {
            let mut table = GenerationalTable::<(u32, u32)>::new(limit);
            let mut held = BTreeMap::new();
            let mut stale = Vec::new();
            for (value, (insert, pick)) in ops.into_iter().enumerate() {
                let new = EntryId(value as u32);
                prop_assert_eq!(table.is_full(), held.len() == limit as usize);
                if insert && !table.is_full() {
                    let name = table.insert(new);
                    prop_assert!(!stale.contains(&name), "a name came back");
                    prop_assert_eq!(held.insert(name, new), None);
                } else if let Some((&name, &value)) = held.iter().nth(pick % held.len().max(1)) {
                    prop_assert_eq!(table.remove(name), Some(value));
                    held.remove(&name);
                    stale.push(name);
                }
                for (name, value) in &held {
                    prop_assert_eq!(table.get(*name), Some(*value));
                }
                for name in &stale {
                    prop_assert_eq!(table.remove(*name), None);
                }
                prop_assert_eq!(table.get((limit, 1)), None);
                prop_assert_eq!(table.values().count(), held.len());
            }
        }
    }

    #[test]
    fn vacant_indexes_are_reused_in_order() {
        let mut table = GenerationalTable::new(3);
        let names: Vec<(u32, u32)> = (0..3).map(|value| table.insert(EntryId(value))).collect();
        for name in [names[1], names[0]] {
            table.remove(name);
        }
        assert_eq!(table.insert(EntryId(9)), (1, 2));
        assert_eq!(table.insert(EntryId(9)), (0, 2));
    }

    #[test]
    fn unused_indexes_are_taken_before_vacant_ones() {
        let mut table = GenerationalTable::new(2);
        assert_eq!(table.insert(EntryId(9)), (0, 1));
        table.remove((0, 1));
        assert_eq!(table.insert(EntryId(9)), (1, 1));
        assert_eq!(table.insert(EntryId(9)), (0, 2));
    }
}

//! Values by slot. A map concerns thousands of slots at once, and a shard looks up each of them several times while it
//! follows the map: here a lookup is an index, not a search.

use kvplane_proto::ids::{SLOTS, Slot};

/// Values of some slots, iterated in ascending order of slots. Takes memory for all slots, or none while empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::service) struct SlotTable<T> {
    /// Value of each slot; empty without values.
    values: Vec<Option<T>>,
    len: usize,
}

impl<T> SlotTable<T> {
    pub(in crate::service) const fn len(&self) -> usize {
        self.len
    }

    pub(in crate::service) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(in crate::service) fn get(&self, slot: Slot) -> Option<&T> {
        self.values.get(usize::from(slot.0))?.as_ref()
    }

    pub(in crate::service) fn get_mut(&mut self, slot: Slot) -> Option<&mut T> {
        self.values.get_mut(usize::from(slot.0))?.as_mut()
    }

    /// Returns true if a slot has a value.
    pub(in crate::service) fn has(&self, slot: Slot) -> bool {
        self.get(slot).is_some()
    }

    /// Sets the value of a slot and returns the former one.
    ///
    /// # Panics
    /// If the number is not that of a slot.
    pub(in crate::service) fn insert(&mut self, slot: Slot, value: T) -> Option<T> {
        if self.values.is_empty() {
            self.values.resize_with(SLOTS, || None);
        }
        let former = self.values[usize::from(slot.0)].replace(value);
        self.len += usize::from(former.is_none());
        former
    }

    /// Removes and returns the value of a slot.
    pub(in crate::service) fn remove(&mut self, slot: Slot) -> Option<T> {
        let value = self.values.get_mut(usize::from(slot.0))?.take()?;
        self.len -= 1;
        self.forget_if_empty();
        Some(value)
    }

    /// Keeps the values for which `keeps` returns true.
    pub(in crate::service) fn retain(&mut self, mut keeps: impl FnMut(Slot, &mut T) -> bool) {
        for (slot, place) in self.values.iter_mut().enumerate() {
            if place.as_mut().is_some_and(|value| !keeps(Slot(slot as u16), value)) {
                *place = None;
                self.len -= 1;
            }
        }
        self.forget_if_empty();
    }

    /// Returns the slots with their values.
    pub(in crate::service) fn iter(&self) -> impl Iterator<Item = (Slot, &T)> {
        self.iter_from(Slot(0))
    }

    /// Returns the slots from this one on with their values.
    pub(in crate::service) fn iter_from(&self, first: Slot) -> impl Iterator<Item = (Slot, &T)> {
        let places = self.values.iter().enumerate().skip(usize::from(first.0));
        places.filter_map(|(slot, value)| Some((Slot(slot as u16), value.as_ref()?)))
    }

    /// Returns the slots that have a value.
    pub(in crate::service) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.iter().map(|(slot, _)| slot)
    }

    fn forget_if_empty(&mut self) {
        if self.len == 0 {
            self.values = Vec::new();
        }
    }
}

impl<T> Default for SlotTable<T> {
    fn default() -> Self {
        Self { values: Vec::new(), len: 0 }
    }
}

impl<T> FromIterator<(Slot, T)> for SlotTable<T> {
    fn from_iter<I: IntoIterator<Item = (Slot, T)>>(values: I) -> Self {
        let mut table = Self::default();
        table.extend(values);
        table
    }
}

impl<T> Extend<(Slot, T)> for SlotTable<T> {
    fn extend<I: IntoIterator<Item = (Slot, T)>>(&mut self, values: I) {
        values.into_iter().for_each(|(slot, value)| _ = self.insert(slot, value));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_table_is_a_map_in_order(steps in prop::collection::vec((0..4u8, 0..6u16, any::<u32>()), 0..200)) {
            let (mut table, mut model) = (SlotTable::default(), BTreeMap::new());
            // Numbers at both ends of the range.
            let slot = |number: u16| Slot(if number < 3 { number } else { (SLOTS - 1) as u16 - number });
            for (step, number, value) in steps {
                let slot = slot(number);
                match step {
                    0 | 1 => prop_assert_eq!(table.insert(slot, value), model.insert(slot, value)),
                    2 => prop_assert_eq!(table.remove(slot), model.remove(&slot)),
                    _ => {
                        table.retain(|slot, held| slot.0 != number && *held % 3 != 0);
                        model.retain(|slot, held| slot.0 != number && *held % 3 != 0);
                    }
                }
                prop_assert_eq!((table.len(), table.is_empty()), (model.len(), model.is_empty()));
                prop_assert_eq!((table.get(slot), table.has(slot)), (model.get(&slot), model.contains_key(&slot)));
                let expected = model.range(slot..).map(|(slot, value)| (*slot, value));
                prop_assert!(table.iter_from(slot).eq(expected));
                prop_assert!(table.slots().eq(model.keys().copied()));
                prop_assert_eq!(&table, &model.iter().map(|(slot, value)| (*slot, *value)).collect());
            }
        }
    }
}

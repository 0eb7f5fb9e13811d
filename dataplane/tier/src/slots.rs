//! Bounded table whose places are identified by (index, generation): a late message about a former value finds nothing.

/// Identifier of a place and its value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SlotId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

#[derive(Debug)]
pub(crate) struct Slots<T> {
    places: Vec<(u32, Option<T>)>,
    vacant: Vec<u32>,
}

impl<T> Slots<T> {
    pub(crate) fn new(limit: u32) -> Self {
        Self { places: (0..limit).map(|_| (1, None)).collect(), vacant: (0..limit).rev().collect() }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.vacant.len() == self.places.len()
    }

    /// Inserts `value`; returns `None` if the table is full.
    pub(crate) fn insert(&mut self, value: T) -> Option<SlotId> {
        let index = self.vacant.pop()?;
        let place = &mut self.places[index as usize];
        place.1 = Some(value);
        Some(SlotId { index, generation: place.0 })
    }

    pub(crate) fn get(&self, id: SlotId) -> Option<&T> {
        let (generation, value) = self.places.get(id.index as usize)?;
        value.as_ref().filter(|_| *generation == id.generation)
    }

    pub(crate) fn get_mut(&mut self, id: SlotId) -> Option<&mut T> {
        let (generation, value) = self.places.get_mut(id.index as usize)?;
        value.as_mut().filter(|_| *generation == id.generation)
    }

    pub(crate) fn remove(&mut self, id: SlotId) -> Option<T> {
        self.get(id)?;
        let place = &mut self.places[id.index as usize];
        place.0 = place.0.wrapping_add(1);
        self.vacant.push(id.index);
        place.1.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_former_holder_is_not_found() {
        let mut slots = Slots::new(1);
        let first = slots.insert('a').expect("room");
        assert!(slots.insert('b').is_none());
        assert_eq!(slots.remove(first), Some('a'));
        let second = slots.insert('c').expect("room");
        assert_eq!(slots.remove(first), None);
        assert_eq!((slots.get(first), slots.get(second)), (None, Some(&'c')));
    }
}

//! Free list: reuses the positions of peers, rails and lanes, which come and go, so that their numbers stay small.

use core::ops::{Deref, DerefMut};

/// Entries by their positions, and the free positions. An entry at a free position is kept, so that its generation is
/// not lost.
#[derive(Debug)]
pub(crate) struct FreeList<T> {
    entries: Vec<T>,
    free: Vec<u32>,
}

impl<T> FreeList<T> {
    pub(crate) const fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }

    /// Allocates the position that was freed last and applies `renew` to its entry, or a new position with an entry
    /// from `make`.
    ///
    /// # Panics
    /// With more than 2^32 entries.
    pub(crate) fn take(&mut self, make: impl FnOnce() -> T, renew: impl FnOnce(&mut T)) -> u32 {
        if let Some(place) = self.free.pop() {
            renew(&mut self.entries[place as usize]);
            return place;
        }
        self.entries.push(make());
        u32::try_from(self.entries.len() - 1).expect("fewer than 2^32 entries")
    }

    /// Allocates a position for an entry.
    pub(crate) fn add(&mut self, entry: T) -> u32 {
        match self.free.pop() {
            Some(place) => {
                self.entries[place as usize] = entry;
                place
            }
            None => self.take(|| entry, |_| {}),
        }
    }

    /// Frees these positions.
    pub(crate) fn give_back(&mut self, places: impl IntoIterator<Item = u32>) {
        self.free.extend(places);
    }
}

impl<T> Deref for FreeList<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.entries
    }
}

impl<T> DerefMut for FreeList<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_reused_and_keep_their_entries() {
        let mut list = FreeList::new();
        let places = ["a", "b", "c"].map(|name| list.add((name, 1)));
        assert_eq!(places, [0, 1, 2]);
        list.give_back([0, 2]);
        let again = list.take(|| unreachable!("a place is free"), |entry| entry.1 += 1);
        assert_eq!((again, list[2]), (2, ("c", 2)));
        assert_eq!((list.add(("d", 1)), list[0]), (0, ("d", 1)));
        assert_eq!((list.add(("e", 1)), list.len()), (3, 4));
    }
}

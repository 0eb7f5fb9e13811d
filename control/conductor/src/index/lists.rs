//! Lists of the few records of a run, in one vector.
//!
//! A list is exactly as long as its records are many and moves when that changes, so a list of two records takes 16
//! bytes. Places of former lists are used again by lists of the same length.

use super::run::Record;

/// Maximum length of a list; the minimum is 2.
pub(super) const MOST: usize = 6;
/// Records that are reserved together, at least; then a sixteenth of those that there are.
const GROWTH: usize = 64;

/// Lists of records. A list is identified by the index of its first record and its length.
#[derive(Default)]
pub(super) struct Lists {
    records: Vec<Record>,
    /// Places of former lists, by length.
    free: [Vec<u32>; MOST + 1],
}

impl Lists {
    pub(super) fn bytes(&self) -> usize {
        let free: usize = self.free.iter().map(Vec::capacity).sum();
        self.records.capacity() * size_of::<Record>() + free * size_of::<u32>()
    }

    pub(super) fn get(&self, at: u32, len: usize) -> &[Record] {
        &self.records[at as usize..at as usize + len]
    }

    pub(super) fn get_mut(&mut self, at: u32, len: usize) -> &mut [Record] {
        &mut self.records[at as usize..at as usize + len]
    }

    /// Adds a list; returns its index.
    pub(super) fn add(&mut self, list: &[Record]) -> u32 {
        if let Some(at) = self.free[list.len()].pop() {
            self.get_mut(at, list.len()).copy_from_slice(list);
            return at;
        }
        if self.records.capacity() - self.records.len() < list.len() {
            self.records.reserve_exact((self.records.len() / 16).max(GROWTH));
        }
        self.records.extend_from_slice(list);
        (self.records.len() - list.len()) as u32
    }

    pub(super) fn remove(&mut self, at: u32, len: usize) {
        self.free[len].push(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_removed_lists_are_used_again_by_lists_of_the_same_length() {
        let list = |slot, len: usize| vec![Record { slot, tier: 0, start: 0, end: 1 }; len];
        let mut lists = Lists::default();
        let (two, three) = (lists.add(&list(1, 2)), lists.add(&list(2, 3)));
        lists.remove(two, 2);
        assert_eq!(lists.add(&list(3, 3)), 5);
        assert_eq!(lists.add(&list(4, 2)), two);
        assert_eq!(lists.get(two, 2), list(4, 2));
        assert_eq!(lists.get(three, 3), list(2, 3));
        let mut bytes = 0;
        for round in 0..1000 {
            lists.remove(three, 3);
            assert_eq!(lists.add(&list(5, 3)), three);
            assert!(round == 0 || lists.bytes() == bytes, "nothing grows");
            bytes = lists.bytes();
        }
    }
}

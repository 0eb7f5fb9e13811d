//! Lists of the few records of a run, in one vector.
//!
//! A list takes an even number of records and moves when that changes, so a list of two records takes 16 bytes. Places
//! of former lists are used again by lists of the same size. Instances that report their whole caches one after the
//! other, as after a restart, make all lists grow together, and leave all former places behind: of lists of six records
//! as much as these take, but more than twice as much if each length had places of its own.

use super::run::Record;

/// Maximum length of a list; the minimum is 2.
pub(super) const MOST: usize = 6;
/// Records that are reserved together, at least; then a sixteenth of those that there are.
const GROWTH: usize = 64;

/// Lists of records. A list is identified by the index of its first record and its length.
#[derive(Default)]
pub(super) struct Lists {
    records: Vec<Record>,
    /// Places of former lists, by half of their size.
    free: [Vec<u32>; MOST / 2 + 1],
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
        let size = size_of_list(list.len());
        if let Some(at) = self.free[size / 2].pop() {
            self.get_mut(at, list.len()).copy_from_slice(list);
            return at;
        }
        if self.records.capacity() - self.records.len() < size {
            self.records.reserve_exact((self.records.len() / 16).max(GROWTH));
        }
        let at = self.records.len();
        self.records.extend_from_slice(list);
        self.records.resize(at + size, Record::default());
        at as u32
    }

    pub(super) fn remove(&mut self, at: u32, len: usize) {
        self.free[size_of_list(len) / 2].push(at);
    }
}

/// Returns the number of records that a list of this length takes.
const fn size_of_list(len: usize) -> usize {
    len.next_multiple_of(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_removed_lists_are_used_again_by_lists_of_the_same_size() {
        let list = |slot, len: usize| vec![Record { slot, tier: 0, start: 0, end: 1 }; len];
        let mut lists = Lists::default();
        let (two, three) = (lists.add(&list(1, 2)), lists.add(&list(2, 3)));
        lists.remove(two, 2);
        assert_eq!(lists.add(&list(3, 3)), 6);
        assert_eq!(lists.add(&list(4, 2)), two);
        assert_eq!(lists.get(two, 2), list(4, 2));
        assert_eq!(lists.get(three, 3), list(2, 3));
        lists.remove(three, 3);
        assert_eq!(lists.add(&list(2, 4)), three, "a longer one of the same size");
        lists.remove(three, 4);
        assert_eq!(lists.add(&list(2, 3)), three);
        let mut bytes = 0;
        for round in 0..1000 {
            lists.remove(three, 3);
            assert_eq!(lists.add(&list(5, 3)), three);
            assert!(round == 0 || lists.bytes() == bytes, "nothing grows");
            bytes = lists.bytes();
        }
    }
}

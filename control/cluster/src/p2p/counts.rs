//! Number of copies of each shard, not counting the origins.

use super::shards::ShardSet;

/// By shard: number of members, other than origins, that have it or are fetching it.
#[derive(Debug)]
pub(super) struct ShardCounts {
    copies: Vec<u32>,
    /// Shards without a copy.
    unseeded: ShardSet,
}

impl ShardCounts {
    /// Creates the counts of an object with this many shards, all 0.
    pub(super) fn new(shards: u32) -> Self {
        Self { copies: vec![0; shards as usize], unseeded: ShardSet::full(shards) }
    }

    pub(super) fn of(&self, shard: u32) -> u32 {
        self.copies[shard as usize]
    }

    /// Returns the shards without a copy.
    pub(super) const fn unseeded(&self) -> &ShardSet {
        &self.unseeded
    }

    /// Adds or removes a copy that other members can fetch; returns true if it was the last one.
    pub(super) fn change(&mut self, shard: u32, more: bool) -> bool {
        let copies = &mut self.copies[shard as usize];
        *copies = if more { *copies + 1 } else { copies.saturating_sub(1) };
        match *copies {
            0 => self.unseeded.insert(shard),
            1 if more => {
                self.unseeded.remove(shard);
                false
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_copy_is_reported_once() {
        let mut counts = ShardCounts::new(3);
        assert!(!counts.change(1, true) && !counts.change(1, true));
        assert_eq!((counts.of(1), counts.unseeded().count()), (2, 2));
        assert!(!counts.change(1, false) && counts.change(1, false));
        assert!(!counts.change(1, false), "there was no copy left");
        assert_eq!((counts.of(1), counts.unseeded().count()), (0, 3));
    }
}

//! Set of the replica owners of one slot, by their position in the map.

use super::MAX_REPLICAS;

/// Most replica owners of a slot.
pub const MAX_REPLICA_OWNERS: usize = MAX_REPLICAS as usize - 1;

/// Replica owners of one slot: number 0 is the first one after the owner in the order of
/// [`OwnerTable::owners`](super::OwnerTable::owners). Its meaning ends with the map whose order it names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug, Hash)]
pub struct ReplicaSet(u8);

impl ReplicaSet {
    /// No replica owner.
    pub const NONE: Self = Self(0);
    /// The first replica owner.
    pub const FIRST: Self = Self(1);
    const ALL: u8 = (1 << MAX_REPLICA_OWNERS) - 1;

    /// Returns the set with these bits; `None` if a bit stands for no replica owner.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if bits & !Self::ALL == 0 { Some(Self(bits)) } else { None }
    }

    /// Returns a bit for each replica owner, the first in the lowest one.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Returns the set of the first `count` replica owners.
    #[must_use]
    pub const fn first(count: usize) -> Self {
        if count >= MAX_REPLICA_OWNERS { Self(Self::ALL) } else { Self((1 << count) - 1) }
    }

    /// Returns the set of the replica owners whose numbers satisfy `is_in`.
    #[must_use]
    pub fn of(is_in: impl Fn(usize) -> bool) -> Self {
        (0..MAX_REPLICA_OWNERS).filter(|number| is_in(*number)).fold(Self::NONE, Self::with)
    }

    /// Returns true if the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the number of replica owners in the set.
    #[must_use]
    pub const fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Returns true if a replica owner is in the set.
    #[must_use]
    pub const fn has(self, number: usize) -> bool {
        number < MAX_REPLICA_OWNERS && self.0 & 1 << number != 0
    }

    /// Returns the set with a replica owner.
    #[must_use]
    pub const fn with(self, number: usize) -> Self {
        if number < MAX_REPLICA_OWNERS { Self(self.0 | 1 << number) } else { self }
    }

    /// Returns the set without a replica owner.
    #[must_use]
    pub const fn without(self, number: usize) -> Self {
        if number < MAX_REPLICA_OWNERS { Self(self.0 & !(1 << number)) } else { self }
    }

    /// Returns the replica owners that are in both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the replica owners of this set that are not in another.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the numbers of the replica owners in the set, in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..MAX_REPLICA_OWNERS).filter(move |number| self.has(*number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replica_owners_are_added_and_removed_by_their_number() {
        let set = ReplicaSet::NONE.with(0).with(6).with(7);
        assert_eq!((set.count(), set.has(6), set.has(7), set.bits()), (2, true, false, 0x41));
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 6]);
        assert_eq!((set.without(0).bits(), set.without(9), set.and(ReplicaSet::FIRST).count()), (0x40, set, 1));
        assert_eq!(ReplicaSet::of(|number| number % 2 == 0).bits(), 0x55);
        assert_eq!((set.minus(ReplicaSet::FIRST).bits(), ReplicaSet::FIRST.minus(set)), (0x40, ReplicaSet::NONE));
        assert_eq!((ReplicaSet::first(0), ReplicaSet::first(2).bits()), (ReplicaSet::NONE, 3));
        assert_eq!((ReplicaSet::first(7), ReplicaSet::first(99)), (ReplicaSet(0x7f), ReplicaSet(0x7f)));
        assert_eq!((ReplicaSet::from_bits(0x7f), ReplicaSet::from_bits(0x80)), (Some(ReplicaSet(0x7f)), None));
    }
}

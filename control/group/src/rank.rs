//! Ranks, and sets of them. A process has a rank in its world and another one in each of its groups; the types keep the
//! two apart.

use core::fmt;
use core::marker::PhantomData;

use bincode::{Decode, Encode};

/// Most ranks of a world, and most members of a group.
pub const MAX_RANKS: usize = 64;

/// A number below [`MAX_RANKS`] that names a process.
pub trait Rank: Copy + Ord + fmt::Debug {
    /// Makes a rank of its number, which is below [`MAX_RANKS`].
    fn from_index(index: u8) -> Self;
    /// Returns the number of this rank.
    fn index(self) -> u8;
}

/// Rank of a process in its world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct WorldRank(pub u8);

/// Rank of a member in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct GroupRank(pub u8);

impl Rank for WorldRank {
    fn from_index(index: u8) -> Self {
        Self(index)
    }

    fn index(self) -> u8 {
        self.0
    }
}

impl Rank for GroupRank {
    fn from_index(index: u8) -> Self {
        Self(index)
    }

    fn index(self) -> u8 {
        self.0
    }
}

/// Set of ranks. Ranks from [`MAX_RANKS`] on are in no set.
pub struct RankSet<R> {
    bits: u64,
    ranks: PhantomData<R>,
}

impl<R: Rank> RankSet<R> {
    /// The set without ranks.
    pub const EMPTY: Self = Self::from_bits(0);

    /// Makes a set of a mask with a bit for each rank.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self { bits, ranks: PhantomData }
    }

    /// Returns the mask with a bit for each rank.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.bits
    }

    /// Returns the set of the first `count` ranks.
    #[must_use]
    pub const fn first(count: usize) -> Self {
        Self::from_bits(if count >= MAX_RANKS { u64::MAX } else { (1 << count) - 1 })
    }

    /// Returns the set of one rank.
    #[must_use]
    pub fn single(rank: R) -> Self {
        Self::from_bits(1u64.checked_shl(u32::from(rank.index())).unwrap_or(0))
    }

    /// Adds a rank.
    pub fn insert(&mut self, rank: R) {
        self.bits |= Self::single(rank).bits;
    }

    /// Removes a rank.
    pub fn remove(&mut self, rank: R) {
        self.bits &= !Self::single(rank).bits;
    }

    /// Returns true if the set has this rank.
    #[must_use]
    pub fn contains(self, rank: R) -> bool {
        self.bits & Self::single(rank).bits != 0
    }

    /// Returns true if the set has every rank of `other`.
    #[must_use]
    pub const fn contains_all(self, other: Self) -> bool {
        other.bits & !self.bits == 0
    }

    /// Returns the ranks of either set.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self::from_bits(self.bits | other.bits)
    }

    /// Returns the ranks of both sets.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self::from_bits(self.bits & other.bits)
    }

    /// Returns the ranks that `other` has not.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self::from_bits(self.bits & !other.bits)
    }

    /// Returns true if the set has no rank.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.bits == 0
    }

    /// Returns the number of ranks.
    #[must_use]
    pub const fn len(self) -> usize {
        self.bits.count_ones() as usize
    }

    /// Returns the highest rank.
    #[must_use]
    pub fn last(self) -> Option<R> {
        (self.bits != 0).then(|| R::from_index((63 - self.bits.leading_zeros()) as u8))
    }

    /// Returns the ranks in order.
    pub fn iter(self) -> impl Iterator<Item = R> {
        let mut bits = self.bits;
        core::iter::from_fn(move || {
            let rank = (bits != 0).then(|| R::from_index(bits.trailing_zeros() as u8))?;
            bits &= bits - 1;
            Some(rank)
        })
    }
}

impl<R: Rank> FromIterator<R> for RankSet<R> {
    fn from_iter<I: IntoIterator<Item = R>>(ranks: I) -> Self {
        let mut set = Self::EMPTY;
        ranks.into_iter().for_each(|rank| set.insert(rank));
        set
    }
}

// Derived implementations would bound the type of the ranks, of which a set has none.
impl<R> Clone for RankSet<R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for RankSet<R> {}

impl<R> PartialEq for RankSet<R> {
    fn eq(&self, other: &Self) -> bool {
        self.bits == other.bits
    }
}

impl<R> Eq for RankSet<R> {}

impl<R> Default for RankSet<R> {
    fn default() -> Self {
        Self { bits: 0, ranks: PhantomData }
    }
}

impl<R: Rank> fmt::Debug for RankSet<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(Rank::index)).finish()
    }
}

impl<R> Encode for RankSet<R> {
    fn encode<E: bincode::enc::Encoder>(&self, encoder: &mut E) -> Result<(), bincode::error::EncodeError> {
        self.bits.encode(encoder)
    }
}

impl<R, C> Decode<C> for RankSet<R> {
    fn decode<D: bincode::de::Decoder<Context = C>>(decoder: &mut D) -> Result<Self, bincode::error::DecodeError> {
        Ok(Self { bits: u64::decode(decoder)?, ranks: PhantomData })
    }
}

bincode::impl_borrow_decode!(RankSet<R>, R);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_have_the_ranks_that_were_added() {
        let mut set: RankSet<GroupRank> = [3, 63, 0].map(GroupRank).into_iter().collect();
        set.remove(GroupRank(3));
        set.insert(GroupRank(64));
        assert_eq!(set.iter().map(|rank| rank.0).collect::<Vec<_>>(), [0, 63]);
        assert_eq!((set.len(), set.last()), (2, Some(GroupRank(63))));
        assert_eq!(RankSet::<GroupRank>::first(64).len(), 64);
        assert_eq!(RankSet::<GroupRank>::first(2).bits(), 3);
        assert_eq!(RankSet::<GroupRank>::EMPTY.last(), None);
    }
}

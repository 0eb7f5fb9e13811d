//! Static schedule for a known number of ranks: the parent from which each rank fetches each shard, without a round
//! trip to the scheduler.
//!
//! Shards are sent down two binary trees, the even ones down one and the odd ones down the other, after Sanders, Speck
//! and Träff (two-tree broadcast). In each tree ranks are in order, as in a search tree: ranks with near numbers are
//! near in the tree, too. The second tree is the first one shifted by one rank; since an in-order tree has only even
//! places as inner nodes and all odd ones as leaves, each rank is an inner node of one tree at most. An inner node
//! sends half of the object to two others; so no rank sends more than about as much as it receives, and all links are
//! used in both directions.

/// Number of halves of an object's shards: those with even numbers, and those with odd ones.
pub const HALVES: usize = 2;

/// Maximum number of ranks of a schedule.
pub const MAX_RANKS: u32 = 65_536;

/// Returns the half that a shard is in.
#[must_use]
pub const fn half_of(shard: u32) -> usize {
    shard as usize % HALVES
}

/// Source of one half of a rank's shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Parent {
    /// A member that published the object.
    Origin,
    /// Another rank.
    Rank(u32),
}

/// Schedule for a number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    ranks: u32,
}

impl Schedule {
    /// Creates the schedule for ranks from 0 to `ranks` - 1; `None` for no ranks, or more than [`MAX_RANKS`].
    #[must_use]
    pub const fn new(ranks: u32) -> Option<Self> {
        if ranks == 0 || ranks > MAX_RANKS { None } else { Some(Self { ranks }) }
    }

    /// Returns the number of ranks.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Returns a rank's place in a half's tree, from 1 on.
    fn place(self, half: usize, rank: u32) -> u32 {
        (rank + half as u32) % self.ranks + 1
    }

    fn rank(self, half: usize, place: u32) -> u32 {
        (place + self.ranks - 1 - half as u32 % self.ranks) % self.ranks
    }

    /// Returns the parent of a place. Places beyond the last rank are left out: their children move up.
    const fn above(self, place: u32) -> Option<u32> {
        let root = 1 << self.ranks.ilog2();
        let mut at = place;
        while at != root {
            let level = at & at.wrapping_neg();
            at = (at ^ level) | (level << 1);
            if at <= self.ranks {
                return Some(at);
            }
        }
        None
    }

    /// Returns the source of a half for a rank.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn parent(&self, half: usize, rank: u32) -> Parent {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        let above = self.above(self.place(half, rank));
        above.map_or(Parent::Origin, |above| Parent::Rank(self.rank(half, above)))
    }

    /// Returns the number of fetches that a shard of a half goes through until a rank has it: 1 for a rank that fetches
    /// from the origin.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn depth(&self, half: usize, rank: u32) -> u32 {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        let places = std::iter::successors(Some(self.place(half, rank)), |&place| self.above(place));
        places.count() as u32
    }

    /// Returns the ranks that fetch a half from a rank: two at most.
    #[must_use]
    pub fn children(&self, half: usize, rank: u32) -> Vec<u32> {
        let place = self.place(half, rank);
        // Its children are in the middle of the spans on both sides, or of the existing part of them.
        let level = place & place.wrapping_neg();
        let mut below: Vec<u32> = Vec::new();
        if level > 1 {
            below.push(place - level / 2);
            let right = std::iter::successors(Some(level / 2), |&step| (step > 1).then_some(step / 2));
            below.extend(right.map(|step| place + step).find(|&right| right <= self.ranks));
        }
        below.into_iter().map(|place| self.rank(half, place)).collect()
    }
}

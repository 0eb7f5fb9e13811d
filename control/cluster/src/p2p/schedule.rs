//! A schedule for ranks that are known before: from whom each fetches which shard, so that nobody has to be asked.
//!
//! Shards go down two binary trees, the even ones down one and the odd ones down the other, after Sanders, Speck and
//! Träff. In each tree ranks are in order, as in a search tree: those whose numbers are near are near in it, too. The
//! second tree is the first one shifted by one rank, and as a tree in order has only even places inside and all odd
//! ones as leaves, each rank is inside one of them at most. Who is inside gives half of the object to two others; so
//! nobody sends more than about as much as it receives, and all links are used both ways.

/// The halves that an object's shards are in: those with even numbers, and those with odd ones.
pub const HALVES: usize = 2;

/// The most ranks of a schedule.
pub const MAX_RANKS: u32 = 65_536;

/// The half that a shard is in.
#[must_use]
pub const fn half_of(shard: u32) -> usize {
    shard as usize % HALVES
}

/// From whom a rank fetches one half of the shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Parent {
    /// From who brought the object.
    Origin,
    /// From another rank.
    Rank(u32),
}

/// Who fetches from whom among this many ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    ranks: u32,
}

impl Schedule {
    /// For ranks from 0 to `ranks` - 1; none where there are none, or more than [`MAX_RANKS`].
    #[must_use]
    pub const fn new(ranks: u32) -> Option<Self> {
        if ranks == 0 || ranks > MAX_RANKS { None } else { Some(Self { ranks }) }
    }

    /// How many ranks there are.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// A rank's place in a half's tree, from 1 on.
    fn place(self, half: usize, rank: u32) -> u32 {
        (rank + half as u32) % self.ranks + 1
    }

    fn rank(self, half: usize, place: u32) -> u32 {
        (place + self.ranks - 1 - half as u32 % self.ranks) % self.ranks
    }

    /// The place above another one. Those beyond the last rank are left out, and what is below them moves up.
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

    /// From whom a rank fetches a half.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn parent(&self, half: usize, rank: u32) -> Parent {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        let above = self.above(self.place(half, rank));
        above.map_or(Parent::Origin, |above| Parent::Rank(self.rank(half, above)))
    }

    /// How many fetches a shard of a half goes through until a rank has it: 1 for who fetches from the origin.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn depth(&self, half: usize, rank: u32) -> u32 {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        let places = std::iter::successors(Some(self.place(half, rank)), |&place| self.above(place));
        places.count() as u32
    }

    /// Who fetches a half from a rank: two at most.
    #[must_use]
    pub fn children(&self, half: usize, rank: u32) -> Vec<u32> {
        let place = self.place(half, rank);
        // Below are the halves of the span on both sides, or what is left of them.
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

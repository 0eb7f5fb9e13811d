//! Sets of shards: a bitmap, exchanged as intervals.

/// Run of shards on the wire: the first, and their number.
pub type Interval = (u32, u32);

/// Set of an object's shards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardSet {
    words: Vec<u64>,
    shards: u32,
    count: u32,
}

impl ShardSet {
    /// Creates an empty set for an object of this many shards.
    #[must_use]
    pub fn empty(shards: u32) -> Self {
        Self { words: vec![0; shards.div_ceil(64) as usize], shards, count: 0 }
    }

    /// Creates the full set for an object of this many shards.
    #[must_use]
    pub fn full(shards: u32) -> Self {
        let mut set = Self::empty(shards);
        set.insert_run(0, shards);
        set
    }

    /// Creates the set of the shards in the intervals, which may overlap.
    ///
    /// # Errors
    /// The first interval that is not within the object.
    pub fn of(shards: u32, intervals: &[Interval]) -> Result<Self, Interval> {
        let mut set = Self::empty(shards);
        for &(first, count) in intervals {
            if first.checked_add(count).is_none_or(|end| end > shards) {
                return Err((first, count));
            }
            set.insert_run(first, count);
        }
        Ok(set)
    }

    fn insert_run(&mut self, first: u32, count: u32) {
        for shard in first..first + count {
            self.insert(shard);
        }
    }

    /// Inserts a shard; returns false if it is in the set already, or not a shard of the object.
    pub fn insert(&mut self, shard: u32) -> bool {
        let fresh = shard < self.shards && !self.contains(shard);
        if fresh {
            self.words[(shard / 64) as usize] |= 1 << (shard % 64);
            self.count += 1;
        }
        fresh
    }

    /// Inserts the shards of a bitmap of 64-bit words, the first shard in the lowest bit; bits beyond the last shard
    /// are ignored. Returns the shards that were not in the set.
    pub fn insert_words(&mut self, words: &[u64]) -> Vec<u32> {
        let pairs = words.iter().zip(&self.words).map(|(theirs, ours)| theirs & !ours);
        let fresh = pairs.enumerate().flat_map(|(index, word)| bits(word).map(move |bit| index as u32 * 64 + bit));
        let fresh: Vec<u32> = fresh.filter(|&shard| shard < self.shards).collect();
        fresh.iter().for_each(|&shard| {
            self.insert(shard);
        });
        fresh
    }

    /// Inserts all shards of another set of the same object.
    pub(super) fn insert_all(&mut self, others: &Self) {
        for (ours, theirs) in self.words.iter_mut().zip(&others.words) {
            self.count += (theirs & !*ours).count_ones();
            *ours |= theirs;
        }
    }

    /// Removes a shard; returns false if it was not in the set.
    pub fn remove(&mut self, shard: u32) -> bool {
        let there = self.contains(shard);
        if there {
            self.words[(shard / 64) as usize] &= !(1 << (shard % 64));
            self.count -= 1;
        }
        there
    }

    /// Returns true if a shard is in the set.
    #[must_use]
    pub fn contains(&self, shard: u32) -> bool {
        shard < self.shards && self.words[(shard / 64) as usize] >> (shard % 64) & 1 == 1
    }

    /// Returns the number of shards in the set.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Returns true if the set is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the number of shards of the object.
    #[must_use]
    pub const fn shards(&self) -> u32 {
        self.shards
    }

    /// Returns one word of the bitmap; 0 beyond the last.
    pub(super) fn word(&self, index: usize) -> u64 {
        self.words.get(index).copied().unwrap_or(0)
    }

    pub(super) fn words(&self) -> usize {
        self.words.len()
    }

    /// Returns the bitmap, in the format of [`Self::insert_words`].
    #[must_use]
    pub fn as_words(&self) -> &[u64] {
        &self.words
    }

    /// Returns the shards in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let words = self.words.iter().enumerate();
        words.flat_map(|(index, &word)| bits(word).map(move |bit| index as u32 * 64 + bit))
    }

    /// Returns the set as the fewest possible intervals.
    #[must_use]
    pub fn intervals(&self) -> Vec<Interval> {
        let mut runs: Vec<Interval> = Vec::new();
        for shard in self.iter() {
            match runs.last_mut() {
                Some((first, count)) if *first + *count == shard => *count += 1,
                _ => runs.push((shard, 1)),
            }
        }
        runs
    }
}

/// Returns the positions of the set bits, ascending.
fn bits(word: u64) -> impl Iterator<Item = u32> {
    let rest = std::iter::successors(Some(word), |&word| Some(word & word.wrapping_sub(1)));
    rest.take_while(|&word| word != 0).map(u64::trailing_zeros)
}

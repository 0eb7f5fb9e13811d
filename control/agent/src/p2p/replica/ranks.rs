//! Ranks: which rank this process is of a job, and the board of a rank, a bitmap in its memory of the shards that it
//! has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_cluster::p2p::{Follow, HALVES, Schedule, ShardSet};
use kvplane_engine::{HugePages, Region, RegionOptions};

use crate::error::Error;
use crate::p2p::error::P2pError;

/// Rank of this process among several that all fetch the same object at about the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// Name of the job, the same for all its ranks. It may be empty.
    pub job: String,
    /// Number of this rank, from 0. Ranks near to each other in the network should have numbers near to each other.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Longest wait for another rank that is missing or makes no progress, before its shards are fetched from other
    /// peers; as long again for each rank between that one and the origin.
    pub patience: Duration,
}

impl Ranks {
    /// Creates this rank of so many, for the job with an empty name.
    #[must_use]
    pub const fn new(rank: u32, ranks: u32) -> Self {
        Self { job: String::new(), rank, ranks, patience: Duration::from_secs(2) }
    }

    /// # Errors
    /// When there is no such rank.
    pub(in crate::p2p) fn schedule(&self) -> Result<Schedule, P2pError> {
        let schedule = Schedule::new(self.ranks).filter(|_| self.rank < self.ranks);
        schedule.ok_or(P2pError::Rank { rank: self.rank, ranks: self.ranks })
    }

    /// Returns the plan of a rank that lacks these shards, for this deadline.
    pub(in crate::p2p) fn follow(&self, lacks: &ShardSet, deadline: Duration) -> Result<Follow, Error> {
        let schedule = self.schedule()?;
        let depth = (0..HALVES).map(|half| schedule.depth(half, self.rank)).max().unwrap_or(1);
        // Leaves time to fetch from other peers.
        let patience = self.patience.min(deadline / (4 * depth));
        let patience_ns = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        Ok(Follow::new(schedule, self.rank, lacks, patience_ns, 0))
    }
}

/// Board of a rank, and space for copies of its parents' boards.
pub(in crate::p2p) struct Seat {
    ranks: Ranks,
    region: Arc<Region>,
    words: usize,
    started: Instant,
}

impl Seat {
    /// Creates a board that shows the present shards.
    ///
    /// # Errors
    /// When memory cannot be allocated.
    pub(in crate::p2p) fn new(ranks: &Ranks, have: &ShardSet) -> Result<Self, Error> {
        let words = have.as_words().len().max(1);
        let options = RegionOptions::new("p2p-board", (1 + HALVES) * words * size_of::<u64>());
        let region = Region::allocate(&RegionOptions { huge: HugePages::Never, ..options })?;
        let seat = Self { ranks: ranks.clone(), region, words, started: Instant::now() };
        have.iter().for_each(|shard| seat.mark(shard));
        Ok(seat)
    }

    /// Returns the rank.
    pub(in crate::p2p) const fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Returns the memory of the board and of the copies of boards.
    pub(in crate::p2p) const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the address of the board.
    pub(in crate::p2p) fn board(&self) -> u64 {
        self.region.address()
    }

    /// Returns the length of a board in 64-bit words.
    pub(in crate::p2p) const fn words(&self) -> usize {
        self.words
    }

    /// Returns the address at which the board of a half's parent is stored.
    pub(in crate::p2p) fn copy_address(&self, half: usize) -> u64 {
        self.region.address() + self.copy_offset(half) as u64
    }

    /// Returns the time since the start of the fetch.
    pub(in crate::p2p) fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Marks a shard as present.
    pub(in crate::p2p) fn mark(&self, shard: u32) {
        let word = self.region.atomic_u64(shard as usize / 64 * size_of::<u64>());
        word.fetch_or((1u64 << (shard % 64)).to_le(), std::sync::atomic::Ordering::Release);
    }

    const fn copy_offset(&self, half: usize) -> usize {
        (1 + half) * self.words * size_of::<u64>()
    }

    /// Returns the stored board of a half's parent.
    pub(in crate::p2p) fn parent_board(&self, half: usize) -> Vec<u64> {
        let word = |at| u64::from_le(self.region.load_u64(self.copy_offset(half) + at * size_of::<u64>()));
        (0..self.words).map(word).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_board_shows_present_shards_and_marks() {
        let have = ShardSet::of(130, &[(1, 1), (128, 2)]).unwrap();
        let seat = Seat::new(&Ranks::new(1, 4), &have).unwrap();
        assert_eq!(seat.words(), 3);
        let word = |at: usize| u64::from_le(seat.region().load_u64(at * 8));
        assert_eq!((word(0), word(1), word(2)), (2, 0, 3));
        seat.mark(65);
        assert_eq!((word(0), word(1), word(2)), (2, 2, 3));
        // The copies of the parents' boards lie behind it, and are empty.
        assert_eq!((seat.copy_address(0) - seat.board(), seat.copy_address(1) - seat.board()), (24, 48));
        assert_eq!(seat.parent_board(1), [0, 0, 0]);
    }

    #[test]
    fn only_existing_ranks_have_a_schedule() {
        assert!(Ranks::new(3, 4).schedule().is_ok());
        assert!(Ranks::new(4, 4).schedule().unwrap_err().to_string().contains("ranks count from 0"));
    }
}

//! Cache of the runs that were stored last, by the key of their first block.
//!
//! It has about one entry for each run, so that it stays in the processor's cache where the table of all blocks does
//! not. It only guesses: a run may have been replaced, or displaced by another, and the caller compares.

/// Number of entries at the start.
const LEAST: usize = 64;
/// Blocks of the index for each entry, at least.
const BLOCKS: usize = 16;

/// Cache of runs, of which each key has one place.
pub(super) struct RecentRuns {
    runs: Vec<u32>,
    most: usize,
}

impl RecentRuns {
    /// Creates an empty cache for an index of `max_blocks` blocks.
    pub(super) fn new(max_blocks: usize) -> Self {
        Self { runs: vec![u32::MAX; LEAST], most: (max_blocks / BLOCKS).max(LEAST) }
    }

    pub(super) fn bytes(&self) -> usize {
        self.runs.capacity() * size_of::<u32>()
    }

    /// Returns the run that perhaps begins with the block with `key`; no run has the number [`u32::MAX`].
    pub(super) fn guess(&self, key: u64) -> u32 {
        self.runs[self.place(key)]
    }

    /// Notes that `run`, one of `count`, begins with the block with `key`.
    pub(super) fn set(&mut self, key: u64, run: u32, count: usize) {
        if count > self.runs.len() && 2 * self.runs.len() <= self.most {
            // The high bits of a key choose its place, so both halves of a former place have its run.
            self.runs = self.runs.iter().flat_map(|run| [*run; 2]).collect();
        }
        let place = self.place(key);
        self.runs[place] = run;
    }

    fn place(&self, key: u64) -> usize {
        (key >> (u64::BITS - self.runs.len().ilog2())) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_run_of_a_place_is_the_guess_while_the_cache_grows() {
        let mut recent = RecentRuns::new(256 * BLOCKS);
        assert_eq!((recent.guess(0), recent.guess(u64::MAX)), (u32::MAX, u32::MAX));
        recent.set(u64::MAX, 3, 1);
        recent.set(u64::MAX - 1, 4, 2);
        assert_eq!((recent.guess(u64::MAX), recent.guess(0)), (4, u32::MAX));
        for run in 0..1000 {
            recent.set(u64::from(run) << 40, run, 1000);
            assert_eq!((recent.guess(u64::from(run) << 40), recent.guess(u64::MAX)), (run, 4));
        }
        assert_eq!(recent.bytes(), 256 * size_of::<u32>());
    }
}

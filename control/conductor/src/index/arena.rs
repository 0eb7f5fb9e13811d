//! Keys of blocks in contiguous extents, and the way from a block to its run.
//!
//! Extents are counted in units of four blocks and come from bins by exact size; what is asked for may be given in a
//! smaller piece when only smaller ones are left, because a run can go on in another one. So the arena can be used to
//! the last unit whatever the order of frees.

/// Blocks of a unit.
pub(super) const UNIT: usize = 4;
/// The largest extent in units.
pub(super) const MOST_UNITS: usize = 1024;
/// Words with a bit for each bin.
const BIN_WORDS: usize = MOST_UNITS / 64 + 1;
/// What is the run of a unit that is free.
const NOBODY: u32 = u32::MAX;

/// The keys and who has them.
pub(super) struct Arena {
    keys: Vec<u64>,
    /// The run of each unit.
    runs: Vec<u32>,
    /// Free extents by size in units.
    bins: Vec<Vec<u32>>,
    /// Which of them have any: a bit for each, so that the search for one is short.
    filled: [u64; BIN_WORDS],
    /// Units from here on were never used.
    fresh: usize,
    free_units: usize,
}

impl Arena {
    /// Room for `blocks` keys, rounded up to whole units.
    pub(super) fn new(blocks: usize) -> Self {
        let units = blocks.div_ceil(UNIT);
        Self {
            keys: vec![0; units * UNIT],
            runs: vec![0; units],
            bins: vec![Vec::new(); MOST_UNITS + 1],
            filled: [0; BIN_WORDS],
            fresh: 0,
            free_units: units,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let bins: usize = self.bins.iter().map(|bin| bin.capacity() * size_of::<u32>()).sum();
        self.keys.len() * size_of::<u64>() + self.runs.len() * size_of::<u32>() + bins
    }

    pub(super) fn used_blocks(&self) -> usize {
        self.keys.len() - self.free_units * UNIT
    }

    /// An extent for up to `blocks` blocks that belongs to `run`: where it begins and how many blocks it has. Nothing
    /// when the arena is full.
    pub(super) fn allocate(&mut self, blocks: usize, run: u32) -> Option<(u32, usize)> {
        let wanted = blocks.div_ceil(UNIT).clamp(1, MOST_UNITS);
        let units = self.runs.len();
        let (unit, size) = if let Some(size) = self.smallest_from(wanted) {
            (self.take(size), size)
        } else if self.fresh < units {
            let size = wanted.min(units - self.fresh);
            self.fresh += size;
            ((self.fresh - size) as u32, size)
        } else {
            let size = (1..wanted).rev().find(|size| !self.bins[*size].is_empty())?;
            (self.take(size), size)
        };
        let taken = size.min(wanted);
        if size > taken {
            self.put(size - taken, unit + taken as u32);
        }
        self.free_units -= taken;
        self.runs[unit as usize..unit as usize + taken].fill(run);
        Some((unit * UNIT as u32, taken * UNIT))
    }

    /// Gives back an extent, or the end of one: `blocks` from `start`, both whole units.
    pub(super) fn free(&mut self, start: u32, blocks: usize) {
        let (unit, size) = (start as usize / UNIT, blocks / UNIT);
        if size == 0 {
            return;
        }
        self.runs[unit..unit + size].fill(NOBODY);
        self.put(size, unit as u32);
        self.free_units += size;
    }

    /// The smallest size of which there is an extent, from this one on.
    fn smallest_from(&self, wanted: usize) -> Option<usize> {
        let mut mask = u64::MAX << (wanted % 64);
        for at in wanted / 64..BIN_WORDS {
            let filled = self.filled[at] & mask;
            if filled != 0 {
                return Some(at * 64 + filled.trailing_zeros() as usize);
            }
            mask = u64::MAX;
        }
        None
    }

    fn take(&mut self, size: usize) -> u32 {
        let unit = self.bins[size].pop().expect("a bin with something in it");
        if self.bins[size].is_empty() {
            self.filled[size / 64] &= !(1 << (size % 64));
        }
        unit
    }

    fn put(&mut self, size: usize, unit: u32) {
        self.bins[size].push(unit);
        self.filled[size / 64] |= 1 << (size % 64);
    }

    /// The run that a block belongs to.
    pub(super) fn run_of(&self, block: u32) -> u32 {
        self.runs[block as usize / UNIT]
    }

    pub(super) fn key(&self, block: usize) -> u64 {
        self.keys[block]
    }

    pub(super) fn keys(&self, start: u32, blocks: usize) -> &[u64] {
        &self.keys[start as usize..start as usize + blocks]
    }

    pub(super) fn set(&mut self, block: usize, key: u64) {
        self.keys[block] = key;
    }

    /// Copies keys from one extent to another.
    pub(super) fn copy(&mut self, from: usize, to: usize, blocks: usize) {
        self.keys.copy_within(from..from + blocks, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_can_be_had_in_pieces() {
        let mut arena = Arena::new(64);
        let parts: Vec<_> = (0..8).map(|run| arena.allocate(8, run).unwrap()).collect();
        assert_eq!(arena.allocate(1, 9), None);
        parts.iter().step_by(2).for_each(|(start, blocks)| arena.free(*start, *blocks));
        assert_eq!(arena.used_blocks(), 32);
        let pieces: Vec<_> = std::iter::from_fn(|| arena.allocate(1000, 7)).collect();
        assert_eq!(pieces.iter().map(|piece| piece.1).collect::<Vec<_>>(), [8; 4]);
        assert!(pieces.iter().all(|piece| arena.run_of(piece.0) == 7));
        // A larger extent is cut.
        arena.free(pieces[0].0, 8);
        assert_eq!(arena.allocate(3, 1).map(|piece| piece.1), Some(4));
        assert_eq!(arena.allocate(8, 1).map(|piece| piece.1), Some(4));
    }
}

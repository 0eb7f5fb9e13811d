//! Arena of block keys in contiguous extents, with the map from a block to its run.
//!
//! Extents are measured in units of four blocks and allocated from bins by exact size; a request may get a smaller
//! extent when only smaller ones are left, because a prompt can continue in another run. So the arena can be filled to
//! the last unit whatever the order of frees.

/// Blocks per unit.
pub(super) const UNIT: usize = 4;
/// Maximum size of an extent, in units.
pub(super) const MOST_UNITS: usize = 1024;
/// Words of a bitmap of the bins.
const BIN_WORDS: usize = MOST_UNITS / 64 + 1;
/// Run number of a free unit.
const NOBODY: u32 = u32::MAX;

/// Arena of keys, with the run of each unit.
pub(super) struct Arena {
    keys: Vec<u64>,
    /// The run of each unit.
    runs: Vec<u32>,
    /// Free extents, by size in units.
    bins: Vec<Vec<u32>>,
    /// Bitmap of the bins that are not empty, so that the search for one is short.
    filled: [u64; BIN_WORDS],
    /// First of the units that were never used.
    fresh: usize,
    free_units: usize,
}

impl Arena {
    /// Creates an arena for `blocks` keys, rounded up to whole units.
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

    /// Allocates an extent for up to `blocks` blocks that belongs to `run`; returns its start and its size in blocks,
    /// or `None` when the arena is full.
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

    /// Frees an extent, or the end of one: `blocks` from `start`, both whole units.
    pub(super) fn free(&mut self, start: u32, blocks: usize) {
        let (unit, size) = (start as usize / UNIT, blocks / UNIT);
        if size == 0 {
            return;
        }
        self.runs[unit..unit + size].fill(NOBODY);
        self.put(size, unit as u32);
        self.free_units += size;
    }

    /// Returns the smallest size, from `wanted` on, of which there is a free extent.
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
        let unit = self.bins[size].pop().expect("the bin has an extent");
        if self.bins[size].is_empty() {
            self.filled[size / 64] &= !(1 << (size % 64));
        }
        unit
    }

    fn put(&mut self, size: usize, unit: u32) {
        self.bins[size].push(unit);
        self.filled[size / 64] |= 1 << (size % 64);
    }

    /// Returns the run that a block belongs to.
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
    fn every_unit_can_be_allocated_despite_fragmentation() {
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

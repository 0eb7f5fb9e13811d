//! Arena of the hashes of blocks in contiguous extents, with a bitmap of the beginnings of extents.
//!
//! Extents are measured in units of two blocks and allocated from bins by exact size; a request may get a smaller
//! extent when only smaller ones are left, because a prompt can continue in another run. So the arena can be filled to
//! the last unit whatever the order of frees.

/// Blocks per unit.
pub(super) const UNIT: usize = 2;
/// Maximum size of an extent, in units.
pub(super) const MOST_UNITS: usize = 2048;
/// Words of a bitmap of the bins.
const BIN_WORDS: usize = MOST_UNITS / 64 + 1;

/// Arena of hashes.
pub(super) struct Arena {
    hashes: Vec<u64>,
    /// Bitmap of the units at which an extent in use begins.
    begins: Vec<u64>,
    /// Free extents, by size in units.
    bins: Vec<Vec<u32>>,
    /// Bitmap of the bins that are not empty, so that the search for one is short.
    filled: [u64; BIN_WORDS],
    /// First of the units that were never used.
    fresh: usize,
    free_units: usize,
}

impl Arena {
    /// Creates an arena for `blocks` hashes, rounded up to whole units.
    pub(super) fn new(blocks: usize) -> Self {
        let units = blocks.div_ceil(UNIT);
        Self {
            hashes: vec![0; units * UNIT],
            begins: vec![0; units.div_ceil(64)],
            bins: vec![Vec::new(); MOST_UNITS + 1],
            filled: [0; BIN_WORDS],
            fresh: 0,
            free_units: units,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let bins: usize = self.bins.iter().map(|bin| bin.capacity() * size_of::<u32>()).sum();
        (self.hashes.len() + self.begins.len()) * size_of::<u64>() + bins
    }

    pub(super) fn used_blocks(&self) -> usize {
        self.hashes.len() - self.free_units * UNIT
    }

    /// Allocates an extent for up to `blocks` blocks; returns its start and its size in blocks, or `None` when the
    /// arena is full.
    pub(super) fn allocate(&mut self, blocks: usize) -> Option<(u32, usize)> {
        let wanted = blocks.div_ceil(UNIT).clamp(1, MOST_UNITS);
        let units = self.hashes.len() / UNIT;
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
        self.begins[unit as usize / 64] |= 1 << (unit % 64);
        Some((unit * UNIT as u32, taken * UNIT))
    }

    /// Frees an extent, or the end of one: `blocks` from `start`, both whole units.
    pub(super) fn free(&mut self, start: u32, blocks: usize) {
        let (unit, size) = (start as usize / UNIT, blocks / UNIT);
        if size == 0 {
            return;
        }
        self.begins[unit / 64] &= !(1 << (unit % 64));
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

    /// Returns the start of the extent in use that a block is in.
    pub(super) fn start_of(&self, block: u32) -> u32 {
        let unit = block as usize / UNIT;
        let mut mask = u64::MAX >> (63 - unit % 64);
        for at in (0..=unit / 64).rev() {
            let begins = self.begins[at] & mask;
            if begins != 0 {
                return ((at * 64 + begins.ilog2() as usize) * UNIT) as u32;
            }
            mask = u64::MAX;
        }
        unreachable!("every block in use is in an extent, which has a beginning")
    }

    #[inline]
    pub(super) fn hash(&self, block: usize) -> u64 {
        self.hashes[block]
    }

    #[inline]
    pub(super) fn hashes(&self, start: u32, blocks: usize) -> &[u64] {
        &self.hashes[start as usize..start as usize + blocks]
    }

    pub(super) fn set(&mut self, block: usize, hash: u64) {
        self.hashes[block] = hash;
    }

    /// Copies hashes from one extent to another.
    pub(super) fn copy(&mut self, from: usize, to: usize, blocks: usize) {
        self.hashes.copy_within(from..from + blocks, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_can_be_allocated_despite_fragmentation() {
        let mut arena = Arena::new(64);
        let parts: Vec<_> = (0..8).map(|_| arena.allocate(8).unwrap()).collect();
        assert_eq!(arena.allocate(1), None);
        parts.iter().step_by(2).for_each(|(start, blocks)| arena.free(*start, *blocks));
        assert_eq!(arena.used_blocks(), 32);
        let pieces: Vec<_> = std::iter::from_fn(|| arena.allocate(1000)).collect();
        assert_eq!(pieces.iter().map(|piece| piece.1).collect::<Vec<_>>(), [8; 4]);
        // A larger extent is cut.
        arena.free(pieces[0].0, 8);
        assert_eq!(arena.allocate(3).map(|piece| piece.1), Some(4));
        assert_eq!(arena.allocate(4).map(|piece| piece.1), Some(4));
    }

    #[test]
    fn block_is_in_the_extent_that_begins_before_it() {
        let mut arena = Arena::new(1 << 13);
        let sizes = [2, 4096, 130, 6];
        let starts: Vec<u32> = sizes.iter().map(|blocks| arena.allocate(*blocks).unwrap().0).collect();
        for (start, blocks) in starts.iter().zip(sizes) {
            (*start..*start + blocks as u32).for_each(|block| assert_eq!(arena.start_of(block), *start));
        }
        // The end of an extent, then another extent in its place.
        arena.free(starts[1] + 100, 3996);
        assert_eq!(arena.start_of(starts[1] + 99), starts[1]);
        let (start, _) = arena.allocate(3996).unwrap();
        assert_eq!((start, arena.start_of(start + 3995)), (starts[1] + 100, start));
        assert_eq!(arena.start_of(starts[1] + 99), starts[1]);
    }
}

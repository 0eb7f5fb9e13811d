//! Free blocks by size: a list per bin, and bitmaps of the non-empty bins.
//!
//! A bin is a power of two (the level) cut into 32 equal parts. The levels below 64 granules hold one size per bin. Two
//! bitmaps, one bit per level and one word of bits per level, give the next bin with a block in two steps.

use super::node::{NONE, Node};

const PARTS_BITS: u32 = 5;
const PARTS: usize = 1 << PARTS_BITS;
/// Sizes below `PARTS` share level 0; each higher power of two has one.
const LEVELS: usize = (32 - PARTS_BITS) as usize + 1;

#[derive(Debug)]
pub(super) struct Bins {
    heads: [[u32; PARTS]; LEVELS],
    parts_with_blocks: [u32; LEVELS],
    levels_with_blocks: u32,
}

/// Returns the bin of a size: (level, part).
const fn bin_of(granules: u32) -> (usize, usize) {
    if granules < PARTS as u32 {
        return (0, granules as usize);
    }
    let shift = granules.ilog2() - PARTS_BITS;
    (shift as usize + 1, (granules >> shift) as usize - PARTS)
}

impl Bins {
    pub(super) const fn new() -> Self {
        Self { heads: [[NONE; PARTS]; LEVELS], parts_with_blocks: [0; LEVELS], levels_with_blocks: 0 }
    }

    /// Inserts a block at the head of its bin.
    pub(super) fn insert(&mut self, nodes: &mut [Node], index: u32) {
        let (level, part) = bin_of(nodes[index as usize].granules);
        let head = &mut self.heads[level][part];
        nodes[index as usize].bin_before = NONE;
        nodes[index as usize].bin_after = *head;
        if *head != NONE {
            nodes[*head as usize].bin_before = index;
        }
        *head = index;
        self.parts_with_blocks[level] |= 1 << part;
        self.levels_with_blocks |= 1 << level;
    }

    /// Removes a block from its bin.
    pub(super) fn remove(&mut self, nodes: &mut [Node], index: u32) {
        let Node { granules, bin_before, bin_after, .. } = nodes[index as usize];
        if bin_after != NONE {
            nodes[bin_after as usize].bin_before = bin_before;
        }
        if bin_before != NONE {
            nodes[bin_before as usize].bin_after = bin_after;
            return;
        }
        let (level, part) = bin_of(granules);
        self.heads[level][part] = bin_after;
        if bin_after == NONE {
            self.parts_with_blocks[level] &= !(1 << part);
            if self.parts_with_blocks[level] == 0 {
                self.levels_with_blocks &= !(1 << level);
            }
        }
    }

    /// Returns a block of at least `granules`.
    pub(super) fn find(&self, nodes: &[Node], granules: u32) -> Option<u32> {
        let (level, part) = bin_of(granules);
        self.blocks(nodes, level, part)
            .take(super::PROBES)
            .find(|&index| nodes[index as usize].granules >= granules)
            .or_else(|| self.head_above(level, part))
    }

    /// Returns the size of the largest block; 0 if there is none.
    pub(super) fn largest(&self, nodes: &[Node]) -> u32 {
        let Some(level) = self.levels_with_blocks.checked_ilog2() else { return 0 };
        let part = self.parts_with_blocks[level as usize].ilog2();
        let sizes = self.blocks(nodes, level as usize, part as usize);
        sizes.map(|index| nodes[index as usize].granules).max().unwrap_or(0)
    }

    /// Asserts that lists, bitmaps and nodes agree, and that `free_blocks` blocks are in the bins.
    pub(super) fn check(&self, nodes: &[Node], free_blocks: usize) {
        let mut seen = 0;
        for level in 0..LEVELS {
            assert_eq!(
                self.levels_with_blocks >> level & 1 == 1,
                self.parts_with_blocks[level] != 0,
                "bitmap of level {level}"
            );
            for part in 0..PARTS {
                let bit = self.parts_with_blocks[level] >> part & 1 == 1;
                assert_eq!(bit, self.heads[level][part] != NONE, "bitmap of bin {level}.{part}");
                let mut before = NONE;
                for index in self.blocks(nodes, level, part) {
                    let node = &nodes[index as usize];
                    assert!(node.is_free() && node.bin_before == before, "{node:?} in a bin");
                    assert_eq!(bin_of(node.granules), (level, part), "{node:?} in its bin");
                    before = index;
                    seen += 1;
                }
            }
        }
        assert_eq!(seen, free_blocks, "every free block is in a bin");
    }

    fn blocks<'a>(&self, nodes: &'a [Node], level: usize, part: usize) -> impl Iterator<Item = u32> + 'a {
        let some = |index: u32| (index != NONE).then_some(index);
        let head = some(self.heads[level][part]);
        core::iter::successors(head, move |&index| some(nodes[index as usize].bin_after))
    }

    /// Returns the head of the first non-empty bin after (level, part): each of its blocks is larger than the bin's
    /// sizes.
    fn head_above(&self, level: usize, part: usize) -> Option<u32> {
        let parts = self.parts_with_blocks[level] & (!1u32 << part);
        if parts != 0 {
            return Some(self.heads[level][parts.trailing_zeros() as usize]);
        }
        let levels = self.levels_with_blocks & (!1u32 << level);
        if levels == 0 {
            return None;
        }
        let level = levels.trailing_zeros() as usize;
        Some(self.heads[level][self.parts_with_blocks[level].trailing_zeros() as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_ordered_by_size_and_exact_below_64_granules() {
        let mut last = bin_of(1);
        for granules in 2..100_000 {
            let bin = bin_of(granules);
            if granules < 64 {
                assert!(bin > last, "{granules} granules have a bin of their own");
            }
            assert!(bin >= last, "{granules} granules");
            last = bin;
        }
        assert_eq!(bin_of(u32::MAX), (LEVELS - 1, PARTS - 1));
    }
}

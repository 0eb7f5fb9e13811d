//! Runs: adjacent blocks that become one free block if their owners are evicted.
//!
//! If objects differ in size, evicting in order of recency frees bytes all over the pool but not next to each other. A
//! run names the adjacent blocks to evict for a large block; the caller's predicate decides which owners may be
//! evicted.

use super::node::{NONE, Node};
use super::{Allocator, Block};

impl Allocator {
    /// Returns the first block of a run of at least `granules` that includes `block`, made of free blocks and blocks
    /// whose owner `may_go`. Costs the number of blocks in the run.
    pub fn run_around(&self, block: Block, granules: u64, may_go: impl Fn(u32) -> bool) -> Option<Block> {
        let usable = |index: u32| index != NONE && self.usable(index, &may_go);
        if !usable(block.0) {
            return None;
        }
        let mut sum = self.granules(block);
        let mut right = self.nodes[block.0 as usize].after;
        while sum < granules && usable(right) {
            sum += self.granules(Block(right));
            right = self.nodes[right as usize].after;
        }
        let mut first = block.0;
        while sum < granules && usable(self.nodes[first as usize].before) {
            first = self.nodes[first as usize].before;
            sum += self.granules(Block(first));
        }
        (sum >= granules).then_some(Block(first))
    }

    /// Like [`Self::run_around`], anywhere in the pool: finds a run if there is one. Walks the pool's blocks: the last
    /// resort before a request is refused.
    pub fn run_anywhere(&self, granules: u64, may_go: impl Fn(u32) -> bool) -> Option<Block> {
        let (mut first, mut sum) = (0, 0);
        let mut cursor = 0;
        while cursor != NONE {
            let after = self.nodes[cursor as usize].after;
            if self.usable(cursor, &may_go) {
                sum += self.granules(Block(cursor));
                if sum >= granules {
                    return Some(Block(first));
                }
            } else {
                (first, sum) = (after, 0);
            }
            cursor = after;
        }
        None
    }

    /// Returns the next block in the pool.
    #[must_use]
    pub fn after(&self, block: Block) -> Option<Block> {
        let Node { after, .. } = self.nodes[block.0 as usize];
        (after != NONE).then_some(Block(after))
    }

    fn usable(&self, index: u32, may_go: &impl Fn(u32) -> bool) -> bool {
        self.owner(Block(index)).is_none_or(may_go)
    }
}

//! Allocator of extents in the pool: two-level segregated fit.
//!
//! The pool is a sequence of blocks, each free or held. Free blocks are in bins by size (see `bins`). Allocation takes
//! a block from the request's own bin if one of the first [`PROBES`] fits, else the head of the next non-empty bin, and
//! puts the rest back. Freeing merges with both neighbours at once. Both cost O(1) whatever the number of blocks. The
//! method is that of Masmano, Ripoll, Crespo and Real, "TLSF: a new dynamic memory allocator for real-time systems"
//! (ECRTS 2004); unlike it, the request's own bin is searched first. Without that, the last block of exactly the
//! requested size is missed, and a pool of N equal objects would hold N - 1.
//!
//! Sizes are counted in granules of [`GRANULE_BYTES`]. Up to 63 granules (16 KiB) every size has its own bin; above, a
//! bin spans 1/32 of its size, so that a fit deeper than [`PROBES`] in a crowded bin may be missed; `run_anywhere` does
//! not miss it.
//!
//! Invariants ([`Allocator::check`]): blocks tile the pool, no two free blocks are adjacent, bins and bitmaps agree
//! with the blocks. The descriptors (24 bytes) are in a vector reserved at start. The allocator knows nothing of the
//! contents, beyond a word per block that names its owner.

mod bins;
mod node;
mod runs;
#[cfg(test)]
mod tests;

use bins::Bins;
pub use node::NOTES;
use node::{HELD, NO_NOTE, NONE, Node, VACANT};

/// Allocation unit: sizes are rounded up to it, offsets are multiples of it.
pub const GRANULE_BYTES: u64 = 256;

/// Size of the largest pool: granule numbers fit 32 bits.
pub const MAX_POOL_BYTES: u64 = u32::MAX as u64 * GRANULE_BYTES;

/// Most blocks that can be held at once, for any pool.
pub const MAX_HELD_BLOCKS: u32 = 1 << 28;

/// Blocks of the request's own bin that are tried.
pub const PROBES: usize = 64;

/// Returns the granules that `bytes` take.
#[must_use]
pub const fn granules_of(bytes: u64) -> u64 {
    bytes.div_ceil(GRANULE_BYTES)
}

/// Range of the pool: exactly the object's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Offset from the start of the pool.
    pub offset: u64,
    /// Size of the object.
    pub bytes: u64,
}

/// Kind of memory that a block is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryKind {
    /// The near part of the pool, in DRAM.
    Near,
    /// The far pool: the part of the pool in far memory.
    Far,
    /// The device pool.
    Device,
}

/// Number of kinds of memory.
pub(crate) const MEMORY_KINDS: usize = 3;

/// Handle of a block: valid from the call that returned it until the block is freed or merged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block(u32);

/// Bits of the handles of blocks of a device pool, and of a far pool; node numbers are below both.
const OF_DEVICE: u32 = 1 << 30;
const OF_FAR: u32 = 1 << 31;

const _: () = assert!(size_of::<Node>() == Allocator::BYTES_PER_BLOCK && 2 * MAX_HELD_BLOCKS < HELD);
const _: () = assert!(2 * MAX_HELD_BLOCKS < OF_DEVICE && 2 * MAX_HELD_BLOCKS < NOTES);

impl Block {
    /// Returns the handle of a block of this kind of memory, whose allocator knows it by this one. Handles of different
    /// kinds are distinct.
    #[must_use]
    pub(crate) const fn of(self, kind: MemoryKind) -> Self {
        match kind {
            MemoryKind::Near => self,
            MemoryKind::Far => Self(self.0 | OF_FAR),
            MemoryKind::Device => Self(self.0 | OF_DEVICE),
        }
    }

    /// Returns the kind of memory that the block is of.
    #[must_use]
    #[inline]
    pub(crate) const fn kind(self) -> MemoryKind {
        match self.0 & (OF_DEVICE | OF_FAR) {
            0 => MemoryKind::Near,
            OF_FAR => MemoryKind::Far,
            _ => MemoryKind::Device,
        }
    }

    /// Returns the handle by which the allocator of its pool knows the block.
    #[must_use]
    pub(crate) const fn in_its_pool(self) -> Self {
        Self(self.0 & !(OF_DEVICE | OF_FAR))
    }

    /// Returns the block as a note: see [`Allocator::set_note`].
    #[must_use]
    pub(crate) const fn as_note(self) -> u32 {
        self.0
    }

    /// Returns the block that a note names.
    #[must_use]
    pub(crate) const fn of_note(note: u32) -> Self {
        Self(note)
    }
}

/// Allocator of one pool.
#[derive(Debug)]
pub struct Allocator {
    nodes: Vec<Node>,
    vacant: u32,
    max_held_blocks: u32,
    held_blocks: u32,
    pool_granules: u32,
    free_granules: u64,
    bins: Bins,
}

impl Allocator {
    /// Size of a block's descriptors.
    pub const BYTES_PER_BLOCK: usize = 24;

    /// Creates an allocator over `pool_bytes` that can hold `max_held_blocks` blocks at once. The part of the pool
    /// beyond the last whole granule is not used.
    ///
    /// # Panics
    /// If the pool has more than [`MAX_POOL_BYTES`], or the blocks exceed [`MAX_HELD_BLOCKS`]: the
    /// configuration is validated before.
    #[must_use]
    pub fn new(pool_bytes: u64, max_held_blocks: u32) -> Self {
        assert!(pool_bytes <= MAX_POOL_BYTES, "pool of {pool_bytes} B");
        assert!(max_held_blocks <= MAX_HELD_BLOCKS, "{max_held_blocks} blocks");
        let pool_granules = (pool_bytes / GRANULE_BYTES) as u32;
        // No two free blocks are adjacent, so that there is at most one more of them than of held ones.
        let max_nodes = 2 * max_held_blocks as usize + 1;
        let mut allocator = Self {
            nodes: Vec::with_capacity(max_nodes.min(pool_granules as usize)),
            vacant: NONE,
            max_held_blocks,
            held_blocks: 0,
            pool_granules,
            free_granules: u64::from(pool_granules),
            bins: Bins::new(),
        };
        if pool_granules > 0 {
            // Node 0 always stays the first block: splits and merges keep the lower node.
            let first = allocator.new_node(0, pool_granules);
            allocator.bins.insert(&mut allocator.nodes, first);
        }
        allocator
    }

    /// Allocates a block for `bytes`; `None` if no free block was found that is large enough.
    ///
    /// # Panics
    /// If `bytes` is 0, or `max_held_blocks` are held already.
    pub fn allocate(&mut self, bytes: u64) -> Option<Block> {
        assert!(bytes > 0, "a block of 0 bytes was requested");
        let granules = u32::try_from(granules_of(bytes)).ok()?;
        let node = self.bins.find(&self.nodes, granules)?;
        Some(self.carve(Block(node), bytes))
    }

    /// Takes `bytes` from the low end of a free block; the rest stays free.
    ///
    /// # Panics
    /// If `block` is not free or too small, or `max_held_blocks` are held already.
    pub fn carve(&mut self, block: Block, bytes: u64) -> Block {
        assert!(self.held_blocks < self.max_held_blocks, "{} blocks are held", self.held_blocks);
        let node = self.nodes[block.0 as usize];
        let granules = granules_of(bytes);
        assert!(node.is_free(), "carving from {block:?}, which is not free");
        assert!((1..=u64::from(node.granules)).contains(&granules), "{granules} of {node:?}");
        let granules = granules as u32;
        self.bins.remove(&mut self.nodes, block.0);
        if node.granules > granules {
            let rest = self.new_node(node.start + granules, node.granules - granules);
            self.link(rest, node.after);
            self.link(block.0, rest);
            self.bins.insert(&mut self.nodes, rest);
        }
        let taken = &mut self.nodes[block.0 as usize];
        taken.granules = granules;
        taken.bin_before = HELD + NO_NOTE;
        taken.bin_after = NONE;
        self.held_blocks += 1;
        self.free_granules -= u64::from(granules);
        block
    }

    /// Holds blocks at these places of a pool in which none is held: each a first granule and a number of granules, in
    /// ascending order. Returns the blocks in this order; `None`, and changes nothing, if places overlap or lie beyond
    /// the pool, if there are more than may be held, or if a block is held already.
    pub fn hold_at(&mut self, places: &[(u32, u32)]) -> Option<Vec<Block>> {
        let mut end = 0u32;
        for &(start, granules) in places {
            if granules == 0 || start < end {
                return None;
            }
            end = start.checked_add(granules)?;
        }
        if end > self.pool_granules || places.len() > self.max_held_blocks as usize || self.held_blocks > 0 {
            return None;
        }
        let (mut rest, mut blocks) = (0, Vec::with_capacity(places.len()));
        for &(start, granules) in places {
            // The last block is free, and the place is in it.
            let Node { start: first, granules: left, .. } = self.nodes[rest as usize];
            if first < start {
                self.bins.remove(&mut self.nodes, rest);
                let upper = self.new_node(start, left - (start - first));
                self.nodes[rest as usize].granules = start - first;
                self.link(rest, upper);
                self.bins.insert(&mut self.nodes, rest);
                self.bins.insert(&mut self.nodes, upper);
                rest = upper;
            }
            let block = self.carve(Block(rest), u64::from(granules) * GRANULE_BYTES);
            rest = self.nodes[block.0 as usize].after;
            blocks.push(block);
        }
        Some(blocks)
    }

    /// Frees a held block and returns the free block that it is now part of.
    ///
    /// # Panics
    /// If `block` is not held: a double free, or a handle of another allocator.
    pub fn free(&mut self, block: Block) -> Block {
        let node = *self.nodes.get(block.0 as usize).expect("freeing a block of another pool");
        assert!(node.is_held(), "freeing {block:?}, which is not held: {node:?}");
        self.held_blocks -= 1;
        self.free_granules += u64::from(node.granules);
        let mut merged = block.0;
        if node.after != NONE && self.nodes[node.after as usize].is_free() {
            self.bins.remove(&mut self.nodes, node.after);
            self.absorb_next(merged);
        }
        if node.before != NONE && self.nodes[node.before as usize].is_free() {
            merged = node.before;
            self.bins.remove(&mut self.nodes, merged);
            self.absorb_next(merged);
        }
        self.bins.insert(&mut self.nodes, merged);
        Block(merged)
    }

    /// Returns the offset of the block in the pool.
    #[must_use]
    pub fn offset_bytes(&self, block: Block) -> u64 {
        u64::from(self.nodes[block.0 as usize].start) * GRANULE_BYTES
    }

    /// Returns the length of the block, in granules.
    #[must_use]
    pub fn granules(&self, block: Block) -> u64 {
        u64::from(self.nodes[block.0 as usize].granules)
    }

    /// Sets the owner of the block: a word of the caller, `u32::MAX` until then.
    ///
    /// # Panics
    /// If `block` is not held.
    pub fn set_owner(&mut self, block: Block, owner: u32) {
        let node = &mut self.nodes[block.0 as usize];
        assert!(node.is_held(), "an owner for {block:?}, which is not held");
        node.bin_after = owner;
    }

    /// Returns the owner of the block; `None` if it is free.
    #[must_use]
    pub fn owner(&self, block: Block) -> Option<u32> {
        let node = &self.nodes[block.0 as usize];
        node.is_held().then_some(node.bin_after)
    }

    /// Sets the note of a held block, for as long as it is held: a word below [`NOTES`].
    ///
    /// # Panics
    /// If `block` is not held, or the word is too large.
    pub fn set_note(&mut self, block: Block, note: u32) {
        let node = &mut self.nodes[block.0 as usize];
        assert!(node.is_held() && note < NOTES, "a note of {note} for {node:?}");
        node.bin_before = HELD + note;
    }

    /// Returns the note of a held block, if it has one.
    #[must_use]
    pub fn note(&self, block: Block) -> Option<u32> {
        let node = &self.nodes[block.0 as usize];
        (node.is_held() && node.bin_before != HELD + NO_NOTE).then(|| node.bin_before - HELD)
    }

    /// Returns the pool's size in whole granules.
    #[must_use]
    pub const fn pool_granules(&self) -> u64 {
        self.pool_granules as u64
    }

    /// Returns the number of free granules, fragmented or not.
    #[must_use]
    pub const fn free_granules(&self) -> u64 {
        self.free_granules
    }

    /// Returns the number of free bytes, fragmented or not.
    #[must_use]
    pub const fn free_bytes(&self) -> u64 {
        self.free_granules * GRANULE_BYTES
    }

    /// Returns the length of the largest free block. Walks one bin: for messages, not for the fast path.
    #[must_use]
    pub fn largest_free_bytes(&self) -> u64 {
        u64::from(self.bins.largest(&self.nodes)) * GRANULE_BYTES
    }

    /// Returns the number of held blocks.
    #[must_use]
    pub const fn held_blocks(&self) -> u32 {
        self.held_blocks
    }

    /// Asserts every invariant. Walks all blocks: for tests and simulation.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn check(&self) {
        let (mut at, mut before, mut free, mut held, mut free_blocks) = (0u64, NONE, 0, 0, 0);
        let mut cursor = if self.nodes.is_empty() { NONE } else { 0 };
        while cursor != NONE {
            let node = &self.nodes[cursor as usize];
            assert_eq!(u64::from(node.start), at, "blocks tile the pool");
            assert_eq!(node.before, before, "links go both ways");
            assert!(node.granules > 0 && node.bin_before != VACANT, "{node:?}");
            if node.is_free() {
                let touches = before != NONE && self.nodes[before as usize].is_free();
                assert!(!touches, "two free blocks touch at granule {at}");
                free += u64::from(node.granules);
                free_blocks += 1;
            } else {
                held += 1;
            }
            at += u64::from(node.granules);
            before = cursor;
            cursor = node.after;
        }
        assert_eq!(at, self.pool_granules(), "the blocks end where the pool ends");
        assert_eq!(free, self.free_granules, "free granules are counted");
        assert_eq!(held, self.held_blocks, "held blocks are counted");
        self.bins.check(&self.nodes, free_blocks);
    }

    /// Creates a node that is neither in the sequence of blocks nor in a bin.
    fn new_node(&mut self, start: u32, granules: u32) -> u32 {
        let node = Node { start, granules, before: NONE, after: NONE, bin_before: NONE, bin_after: NONE };
        if self.vacant != NONE {
            let index = self.vacant;
            self.vacant = self.nodes[index as usize].after;
            self.nodes[index as usize] = node;
            return index;
        }
        assert!(self.nodes.len() < self.nodes.capacity(), "more nodes than blocks allow");
        self.nodes.push(node);
        (self.nodes.len() - 1) as u32
    }

    /// Makes `after` (or `NONE`) follow `before` in the sequence.
    fn link(&mut self, before: u32, after: u32) {
        self.nodes[before as usize].after = after;
        if after != NONE {
            self.nodes[after as usize].before = before;
        }
    }

    /// Extends `keep` over the next block, whose node becomes vacant. Neither is in a bin.
    fn absorb_next(&mut self, keep: u32) {
        let gone = self.nodes[keep as usize].after;
        let Node { granules, after, .. } = self.nodes[gone as usize];
        self.nodes[keep as usize].granules += granules;
        self.link(keep, after);
        let node = &mut self.nodes[gone as usize];
        node.bin_before = VACANT;
        node.after = self.vacant;
        self.vacant = gone;
    }
}

//! Descriptors of blocks, and the marks of those that are in no bin.

/// No node.
pub(super) const NONE: u32 = u32::MAX;

/// Marks of nodes that are in no bin, in place of the link to the bin's previous block. The mark of a held block
/// carries a note; node numbers are below it.
pub(super) const HELD: u32 = 1 << 31;
pub(super) const VACANT: u32 = u32::MAX - 2;
/// Note of a held block that has none.
pub(super) const NO_NOTE: u32 = NOTES;
/// Exclusive upper bound of notes.
pub const NOTES: u32 = (1 << 30) - 1;

const _: () = assert!(HELD + NOTES < VACANT);

/// Descriptor of a block. While the block is held, `bin_after` is its owner and `bin_before` a note; while the node is
/// vacant, `after` links the vacant nodes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) start: u32,
    pub(super) granules: u32,
    pub(super) before: u32,
    pub(super) after: u32,
    pub(super) bin_before: u32,
    pub(super) bin_after: u32,
}

impl Node {
    pub(super) const fn is_free(&self) -> bool {
        self.bin_before < HELD || self.bin_before == NONE
    }

    pub(super) const fn is_held(&self) -> bool {
        self.bin_before >= HELD && self.bin_before <= HELD + NO_NOTE
    }
}

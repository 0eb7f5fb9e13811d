//! Block operations that the host carries out on the device, and their results.

use crate::memory::Span;
use crate::slots::SlotId;
use kvplane_proto::narrowing::{low_u32, to_u32};

/// Most pieces of memory of one operation.
pub const MAX_PIECES: usize = 12;
/// Number of priorities.
pub const PRIORITIES: usize = 4;

/// Priority of an operation, most urgent first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub enum Priority {
    /// A read for a get.
    Get,
    /// Writes of records and footers, and flushes.
    Commit,
    /// A read of an object that a get may soon need.
    Prefetch,
    /// Reclaim, recovery, scrubbing.
    Background,
}

impl Priority {
    /// All priorities, most urgent first.
    pub const ALL: [Self; PRIORITIES] = [Self::Get, Self::Commit, Self::Prefetch, Self::Background];
}

/// Action of a block operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Reads from the device into memory.
    Read,
    /// Writes from memory to the device. With `durable` it is complete only once it would survive a power failure.
    Write {
        /// Force unit access, or a write with `RWF_DSYNC`.
        durable: bool,
    },
    /// Makes every write that was complete before the flush was submitted survive a power failure.
    Flush,
}

/// Identifier of an operation; its completion carries it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpId {
    pub(crate) slot: SlotId,
}

impl OpId {
    /// Returns the id as one word, for completion tokens.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        (self.slot.generation as u64) << 32 | self.slot.index as u64
    }

    /// Returns the id of a word: the inverse of [`Self::to_bits`]. Every word is a well-formed (perhaps stale) id.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self { slot: SlotId { index: low_u32(bits), generation: (bits >> 32) as u32 } }
    }
}

/// Pieces of memory, in the device's order.
#[derive(Clone, Copy, Default)]
pub struct Pieces {
    spans: [Span; MAX_PIECES],
    len: u8,
}

impl Pieces {
    /// Returns the pieces.
    #[must_use]
    pub fn as_slice(&self) -> &[Span] {
        &self.spans[..self.len as usize]
    }

    pub(crate) fn of(spans: &[Span]) -> Self {
        let mut pieces = Self::default();
        spans.iter().for_each(|span| pieces.push(*span));
        pieces
    }

    /// Adds a piece; merges it with the last piece if it continues that.
    pub(crate) fn push(&mut self, span: Span) {
        if span.bytes == 0 {
            return;
        }
        if let Some(last) = self.spans[..self.len as usize].last_mut()
            && last.space == span.space
            && last.offset + u64::from(last.bytes) == span.offset
        {
            last.bytes += span.bytes;
            return;
        }
        self.spans[self.len as usize] = span;
        self.len += 1;
    }

    pub(crate) const fn len(&self) -> usize {
        self.len as usize
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.as_slice().iter().map(|span| u64::from(span.bytes)).sum()
    }

    /// Returns the part of `bytes` from `at` on.
    pub(crate) fn part(&self, mut at: u64, bytes: u64) -> Self {
        let (mut part, mut left) = (Self::default(), bytes);
        for span in self.as_slice() {
            let skipped = to_u32(at.min(u64::from(span.bytes)));
            at -= u64::from(skipped);
            let taken = to_u32(left.min(u64::from(span.bytes - skipped)));
            part.push(span.part(skipped, taken));
            left -= u64::from(taken);
        }
        part
    }
}

impl core::fmt::Debug for Pieces {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

/// Operation on the device.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Copy, Debug)]
pub struct BlockOp {
    /// Identifier that its completion carries.
    pub id: OpId,
    pub action: Action,
    /// Offset on the device, in bytes: a multiple of the block. 0 for a flush.
    pub offset: u64,
    /// Bytes to transfer: a multiple of the block, the sum of the pieces. 0 for a flush.
    pub bytes: u32,
    /// Memory to write from or read into, in order.
    pub pieces: Pieces,
    pub priority: Priority,
}

/// Reason why an operation failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The device failed (EIO, a medium or transport error), or moved fewer bytes than requested.
    Io,
    /// No space on the device (ENOSPC, EDQUOT).
    NoSpace,
    /// The device takes no writes (EROFS, EPERM).
    ReadOnly,
    /// The device is gone (ENXIO, ENODEV).
    Gone,
}

//! Parts of an operation's memory, and work on them at one member.

use crate::data_type::DataType;
use crate::reduction::Reduction;

/// Memory of an operation at a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// The caller's source. Unchanged until the operation is complete.
    Source,
    /// The caller's target; the source, of an operation in place.
    Target,
    /// Memory of the member's host, for partial results.
    Work,
}

/// Contiguous bytes of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Span {
    pub buffer: Buffer,
    pub offset: u64,
    pub bytes: u64,
}

impl Span {
    /// Makes a span.
    #[must_use]
    pub const fn new(buffer: Buffer, offset: u64, bytes: u64) -> Self {
        Self { buffer, offset, bytes }
    }

    /// Returns `bytes` bytes from `offset` on, within this span.
    #[must_use]
    pub fn part(self, offset: u64, bytes: u64) -> Self {
        debug_assert!(offset + bytes <= self.bytes, "{bytes} bytes from {offset} on in {self:?}");
        Self { buffer: self.buffer, offset: self.offset + offset, bytes }
    }
}

/// Placement of a frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The payload is copied here.
    Store(Span),
    /// Each element of `into` becomes the combination of that of `with` and the payload's.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Combine { into: Span, with: Span, data_type: DataType, reduction: Reduction },
}

/// Work of the host on an operation's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum LocalStep {
    /// Copies bytes, of equal length.
    Copy { from: Span, into: Span },
    /// Combines `with` into `into`, of equal length.
    Combine { into: Span, with: Span, data_type: DataType, reduction: Reduction },
    /// Divides the elements of a sum by the number of contributions.
    Divide { span: Span, data_type: DataType, by: u32 },
}

//! Handles of open segments.

use crate::error::{ArgumentError, Error};

/// Handle of an open segment. Handles are never reused within an engine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SegmentHandle(u32);

impl SegmentHandle {
    /// Memory of this engine.
    pub const LOCAL: Self = Self(0);

    /// Returns the handle as a number: 0 for [`Self::LOCAL`], from 1 on for others.
    #[must_use]
    pub const fn to_bits(self) -> u32 {
        self.0
    }

    /// Converts a number back, the inverse of [`Self::to_bits`]. An unknown number is rejected where it is used.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }
}

/// Returns the error for a handle that is not open.
pub(crate) fn unknown(handle: SegmentHandle) -> Error {
    ArgumentError::SegmentNotOpen { handle: handle.to_bits() }.into()
}

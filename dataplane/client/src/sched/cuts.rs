//! Large ranges are cut into slices.
//!
//! A cut falls where the target's offset is a multiple of the alignment, so that pages and disk blocks are not split
//! among slices. A short rest goes with the last slice. Nothing is cut below [`LEAST_BYTES`].

/// A piece is not made smaller than this to occupy another rail.
pub(crate) const LEAST_BYTES: u64 = 64 << 10;

/// Bytes of a slice of a range of `bytes`: `most_bytes`, or less so that each of `rails` gets a piece.
#[must_use]
pub fn cut_bytes(bytes: u64, most_bytes: u64, rails: usize) -> u64 {
    let share = bytes.div_ceil(rails.max(1) as u64);
    most_bytes.min(share.max(LEAST_BYTES.min(most_bytes)))
}

/// The slices of a range.
#[derive(Clone, Debug)]
pub struct Cuts {
    offset: u64,
    end: u64,
    slice_bytes: u64,
    /// Bytes up to the next cut: those of a slice, but for the first one, which ends at a whole alignment.
    ahead_bytes: u64,
}

impl Cuts {
    /// Cuts the target's range of `bytes` from `offset` into slices of about `slice_bytes`. The range must not end
    /// beyond 2^64. Slices shorter than two alignments are not aligned.
    #[must_use]
    pub const fn new(offset: u64, bytes: u64, slice_bytes: u64, align_bytes: u64) -> Self {
        let aligned = align_bytes > 1 && slice_bytes >= 2 * align_bytes;
        // Whole alignments: then only the first slice is shortened.
        let slice_bytes = if aligned { slice_bytes - slice_bytes % align_bytes } else { slice_bytes };
        let ahead_bytes = if aligned { slice_bytes - offset % align_bytes } else { slice_bytes };
        Self { offset, end: offset + bytes, slice_bytes, ahead_bytes }
    }

    /// How many slices there are.
    #[must_use]
    pub const fn slices(&self) -> u64 {
        let most = self.slice_bytes.saturating_add(self.slice_bytes / 4);
        let left = self.end - self.offset;
        if left <= most {
            return (left > 0) as u64;
        }
        let left = left - self.ahead_bytes;
        1 + if left <= most { 1 } else { (left - most).div_ceil(self.slice_bytes) + 1 }
    }
}

impl Iterator for Cuts {
    /// Offset in the target, and bytes.
    type Item = (u64, u64);

    #[inline]
    fn next(&mut self) -> Option<(u64, u64)> {
        let left = self.end - self.offset;
        if left == 0 {
            return None;
        }
        // A rest of up to a quarter goes along.
        let bytes = if left <= self.slice_bytes.saturating_add(self.slice_bytes / 4) { left } else { self.ahead_bytes };
        let cut = (self.offset, bytes);
        self.offset += bytes;
        self.ahead_bytes = self.slice_bytes;
        Some(cut)
    }
}

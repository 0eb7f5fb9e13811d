//! Cuts large ranges into slices.
//!
//! A cut falls where the target's offset is a multiple of the alignment, so that pages and disk blocks are not split
//! among slices. A short remainder is merged into the last slice. No slice is cut smaller than [`LEAST_BYTES`].

/// Least size of a slice that is cut to occupy another rail.
pub(crate) const LEAST_BYTES: u64 = 64 << 10;

/// Returns the slice size for a range of `bytes`: `most_bytes`, or less so that each of `rails` gets a part.
#[must_use]
pub fn cut_bytes(bytes: u64, most_bytes: u64, rails: usize) -> u64 {
    let share = bytes.div_ceil(rails.max(1) as u64);
    most_bytes.min(share.max(LEAST_BYTES.min(most_bytes)))
}

/// Iterator over the slices of a range.
#[derive(Clone, Debug)]
pub struct Cuts {
    offset: u64,
    end: u64,
    slice_bytes: u64,
    /// Bytes up to the next cut: the slice size, except for the first slice, which ends at a multiple of the alignment.
    ahead_bytes: u64,
}

impl Cuts {
    /// Cuts the target's range of `bytes` from `offset` into slices of about `slice_bytes`. The range must not end
    /// beyond 2^64. Slices shorter than two alignments are not aligned.
    #[must_use]
    pub const fn new(offset: u64, bytes: u64, slice_bytes: u64, align_bytes: u64) -> Self {
        let aligned = align_bytes > 1 && slice_bytes >= 2 * align_bytes;
        // A multiple of the alignment: then only the first slice is shortened.
        let slice_bytes = if aligned { slice_bytes - slice_bytes % align_bytes } else { slice_bytes };
        let ahead_bytes = if aligned { slice_bytes - offset % align_bytes } else { slice_bytes };
        Self { offset, end: offset + bytes, slice_bytes, ahead_bytes }
    }

    /// Returns the number of slices.
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
    /// Offset in the target, and length.
    type Item = (u64, u64);

    #[inline]
    fn next(&mut self) -> Option<(u64, u64)> {
        let left = self.end - self.offset;
        if left == 0 {
            return None;
        }
        // A remainder of up to a quarter is merged.
        let bytes = if left <= self.slice_bytes.saturating_add(self.slice_bytes / 4) { left } else { self.ahead_bytes };
        let cut = (self.offset, bytes);
        self.offset += bytes;
        self.ahead_bytes = self.slice_bytes;
        Some(cut)
    }
}

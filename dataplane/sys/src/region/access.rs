//! Access to a region's bytes: copies and atomics, never references to plain bytes.
//!
//! Every method checks its range first and panics if it is out of bounds: callers validate the requests of peers before
//! they get here, so a bad range is a bug of this process.

use super::Region;
use crate::copy;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Size of the chunks passed to a callback, in bytes; on the stack.
const CHUNK_BYTES: usize = 16 << 10;
/// Size of the chunk for small ranges, in bytes.
const SMALL_CHUNK_BYTES: usize = 4 << 10;

impl Region {
    /// Copies `bytes` into the region at `offset`. Panics if the range is out of bounds or the region read-only.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) {
        self.check_write(offset, bytes.len());
        // SAFETY: the range is inside our writable mapping, and the slice is readable.
        unsafe { copy::copy_streaming(self.at(offset), bytes.as_ptr(), bytes.len()) };
    }

    /// Copies from the region at `offset` into `bytes`. Panics if the range is out of bounds.
    ///
    /// A peer may write concurrently: the copy is then a mix of old and new bytes, and the caller must verify it.
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) {
        self.check(offset, bytes.len());
        // SAFETY: the range is inside our mapping, and the slice is writable. Copied through the cache, because the
        // caller reads it next.
        unsafe { copy::copy_bytes(bytes.as_mut_ptr(), self.at(offset), bytes.len()) };
    }

    /// Copies between regions, or inside one; overlap is allowed. From 256 KiB on the copy bypasses the cache. Panics
    /// if a range is out of bounds or the destination is read-only.
    pub fn copy_between(
        destination: &Self,
        destination_offset: usize,
        source: &Self,
        source_offset: usize,
        bytes: usize,
    ) {
        destination.check_write(destination_offset, bytes);
        source.check(source_offset, bytes);
        let (to, from) = (destination.at(destination_offset), source.at(source_offset));
        // SAFETY: both ranges are inside their mappings, and the destination is writable.
        unsafe { copy::copy_streaming(to, from, bytes) };
    }

    /// Fills a range with bytes that `f` produces, in order, 16 KiB at a time. `f` gets the offset within the range and
    /// a chunk with undefined previous contents. Panics if the range is out of bounds or the region read-only.
    pub fn fill_with(&self, offset: usize, bytes: usize, f: &mut dyn FnMut(u64, &mut [u8])) {
        self.check_write(offset, bytes);
        let mut chunk = [0u8; CHUNK_BYTES];
        for start in (0..bytes).step_by(CHUNK_BYTES) {
            let part = &mut chunk[..CHUNK_BYTES.min(bytes - start)];
            f(start as u64, part);
            self.copy_in(offset + start, part);
        }
    }

    /// Passes the bytes of a range to `f`, in order, at most 16 KiB at a time, as copies that a peer's writes cannot
    /// change while `f` reads them. `f` gets the offset within the range. Panics if the range is out of bounds.
    pub fn read_with(&self, offset: usize, bytes: usize, f: &mut dyn FnMut(u64, &[u8])) {
        // A large buffer costs more to clear than a small range costs to read.
        if bytes <= SMALL_CHUNK_BYTES {
            self.read_chunks::<SMALL_CHUNK_BYTES>(offset, bytes, f);
        } else {
            self.read_chunks::<CHUNK_BYTES>(offset, bytes, f);
        }
    }

    fn read_chunks<const CHUNK: usize>(&self, offset: usize, bytes: usize, f: &mut dyn FnMut(u64, &[u8])) {
        self.check(offset, bytes);
        let mut chunk = [0u8; CHUNK];
        for start in (0..bytes).step_by(CHUNK) {
            let part = &mut chunk[..CHUNK.min(bytes - start)];
            self.copy_out(offset + start, part);
            f(start as u64, part);
        }
    }

    /// Returns a word that this process and a peer access atomically. Panics if it is out of bounds or unaligned, or
    /// the region is read-only (see [`Region::load_u64`] for those).
    pub fn atomic_u32(&self, offset: usize) -> &AtomicU32 {
        self.check_write(offset, 4);
        self.check_aligned(offset, 4);
        // SAFETY: in range, aligned and writable; lives as long as the borrow of the region; every other access is an
        // atomic or an opaque copy.
        unsafe { AtomicU32::from_ptr(self.at(offset).cast()) }
    }

    /// Returns a 64-bit word, see [`Region::atomic_u32`].
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        self.check_write(offset, 8);
        self.check_aligned(offset, 8);
        // SAFETY: as in atomic_u32.
        unsafe { AtomicU64::from_ptr(self.at(offset).cast()) }
    }

    /// Loads an aligned word with acquire ordering; works on read-only regions too.
    pub fn load_u64(&self, offset: usize) -> u64 {
        self.check(offset, 8);
        self.check_aligned(offset, 8);
        // SAFETY: in range, aligned and readable; the reference does not leave this function and is only loaded
        // from, which on x86-64 is a plain move and so does not write to a read-only page.
        unsafe { AtomicU64::from_ptr(self.at(offset).cast()) }.load(Ordering::Acquire)
    }

    /// Returns the address of a byte of the region, for the kernel. `offset` may be one past the end.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.mapping.address().as_ptr().wrapping_add(offset)
    }

    /// Returns true if the range lies inside the region.
    pub(crate) fn contains(&self, offset: usize, bytes: usize) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.bytes)
    }

    fn check(&self, offset: usize, bytes: usize) {
        assert!(
            self.contains(offset, bytes),
            "range of {bytes} bytes at {offset} is outside a region of {} bytes",
            self.bytes
        );
    }

    fn check_write(&self, offset: usize, bytes: usize) {
        self.check(offset, bytes);
        assert!(self.writable, "write of {bytes} bytes at {offset} to a region mapped read-only");
    }

    fn check_aligned(&self, offset: usize, alignment: usize) {
        let aligned = self.at(offset).addr().is_multiple_of(alignment);
        assert!(aligned, "offset {offset} is not aligned to {alignment} bytes");
    }
}

//! Buffer of an I/O operation: a range of a region that keeps the region alive.

use super::Region;
use std::fmt;
use std::sync::Arc;

/// A range of a [`Region`]. Cloning is cheap and copies no bytes. The range is always inside the region.
#[derive(Clone)]
pub struct IoBuf {
    region: Arc<Region>,
    offset: usize,
    bytes: usize,
}

impl IoBuf {
    /// Creates a buffer for a range of the region. Panics if the range is out of bounds.
    pub fn new(region: Arc<Region>, offset: usize, bytes: usize) -> Self {
        assert!(
            region.contains(offset, bytes),
            "buffer of {bytes} bytes at {offset} is outside a region of {} bytes",
            region.bytes()
        );
        Self { region, offset, bytes }
    }

    /// Creates a buffer for the whole region.
    pub fn whole(region: Arc<Region>) -> Self {
        let bytes = region.bytes();
        Self { region, offset: 0, bytes }
    }

    /// Returns the region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the offset in the region, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns true if the length is zero.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns the part of `bytes` bytes at offset `from`. Panics if it is not inside this buffer.
    #[must_use]
    pub fn slice(&self, from: usize, bytes: usize) -> Self {
        let inside = from.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "slice of {bytes} bytes at {from} is outside a buffer of {}", self.bytes);
        Self { region: Arc::clone(&self.region), offset: self.offset + from, bytes }
    }

    /// Removes the first `bytes` bytes from the range. Panics if there are fewer.
    pub fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.bytes, "advance by {bytes} in a buffer of {} bytes", self.bytes);
        self.offset += bytes;
        self.bytes -= bytes;
    }

    /// Copies `bytes` to the start of the buffer. Panics if the buffer is shorter.
    pub fn copy_in(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes, "{} bytes into a buffer of {}", bytes.len(), self.bytes);
        self.region.copy_in(self.offset, bytes);
    }

    /// Copies from the start of the buffer. Panics if the buffer is shorter.
    pub fn copy_out(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.bytes, "{} bytes from a buffer of {}", bytes.len(), self.bytes);
        self.region.copy_out(self.offset, bytes);
    }

    /// Returns true if the buffer is still mapped; see [`Region::is_mapped`].
    pub fn is_mapped(&self) -> bool {
        self.region.is_mapped(self.offset, self.bytes)
    }

    /// Returns true if all buffers are still mapped. Adjacent buffers of one region share a single check, as long as
    /// the whole region is mapped.
    pub fn all_mapped(buffers: &[Self]) -> bool {
        let mut whole: Option<&Arc<Region>> = None;
        buffers.iter().all(|buffer| {
            let region = buffer.region();
            if whole.is_some_and(|whole| Arc::ptr_eq(whole, region)) {
                return true;
            }
            whole = region.is_mapped(0, region.bytes()).then_some(region);
            whole.is_some() || buffer.is_mapped()
        })
    }

    /// Returns the address for the kernel.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.region.at(self.offset)
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (offset, bytes) = (self.offset, self.bytes);
        write!(f, "IoBuf({offset}+{bytes} of {:#x})", self.region.address())
    }
}

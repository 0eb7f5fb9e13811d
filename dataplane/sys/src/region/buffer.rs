//! A range of a region that keeps the region alive: what I/O is done on.

use super::Region;
use std::fmt;
use std::sync::Arc;

/// A range of a [`Region`]. Cloning is cheap and does not copy bytes. The range is inside the region, always.
#[derive(Clone)]
pub struct IoBuf {
    region: Arc<Region>,
    offset: usize,
    bytes: usize,
}

impl IoBuf {
    /// A range of the region. Panics when it is not inside.
    pub fn new(region: Arc<Region>, offset: usize, bytes: usize) -> Self {
        assert!(
            region.contains(offset, bytes),
            "buffer of {bytes} bytes at {offset} is outside a region of {} bytes",
            region.bytes()
        );
        Self { region, offset, bytes }
    }

    /// The whole region.
    pub fn whole(region: Arc<Region>) -> Self {
        let bytes = region.bytes();
        Self { region, offset: 0, bytes }
    }

    /// The region it lies in.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Where it starts in the region.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether its length is zero.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The part of `bytes` bytes that starts `from` bytes in. Panics when it is not inside this buffer.
    #[must_use]
    pub fn slice(&self, from: usize, bytes: usize) -> Self {
        let inside = from.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "slice of {bytes} bytes at {from} is outside a buffer of {}", self.bytes);
        Self { region: Arc::clone(&self.region), offset: self.offset + from, bytes }
    }

    /// Drops the first `bytes` bytes from the range. Panics when there are fewer.
    pub fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.bytes, "advance by {bytes} in a buffer of {} bytes", self.bytes);
        self.offset += bytes;
        self.bytes -= bytes;
    }

    /// Copies `bytes` to its start. Panics when they are more than the buffer takes.
    pub fn copy_in(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes, "{} bytes into a buffer of {}", bytes.len(), self.bytes);
        self.region.copy_in(self.offset, bytes);
    }

    /// Copies from its start. Panics when more bytes are wanted than the buffer has.
    pub fn copy_out(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.bytes, "{} bytes from a buffer of {}", bytes.len(), self.bytes);
        self.region.copy_out(self.offset, bytes);
    }

    /// Whether it is still mapped; see [`Region::is_mapped`].
    pub fn is_mapped(&self) -> bool {
        self.region.is_mapped(self.offset, self.bytes)
    }

    /// Whether all of these are still mapped. Neighbours in the list that lie in one region cost one look together, as
    /// long as all of that is there.
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

    /// The address for the kernel.
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

//! Ring of byte records in memory shared by two processes: one produces, the other consumes.
//!
//! Layout, from `offset`: the consumer's position at +0, the producer's at +128 (both 64-bit, monotonic byte counts, in
//! separate cache lines), data from +256. A record is a 32-bit length in native order (both ends are on one machine),
//! the bytes, and padding to 8; it may wrap.
//!
//! The peer may be hostile and can write all of this at any time. Each side therefore keeps its own position in private
//! memory, reads the peer's position and a record's length exactly once, and validates them before use. A consumer that
//! finds an invalid value reports [`CorruptRing`] from then on; a producer that does treats the ring as full. Neither
//! panics, loops, or accesses memory outside the ring.
//!
//! A ring starts in zeroed memory, with both positions at zero; it is not resumed. It does not wake its consumer: see
//! [`crate::doorbell::SharedDoorbell`].

use super::sync::{Ordering, Region};
use std::fmt;
use std::sync::Arc;

/// Offset of the data, in bytes.
const HEADER_BYTES: usize = 256;
const PRODUCER_AT: usize = 128;
const LENGTH_BYTES: usize = 4;
const ALIGNMENT: usize = 8;
/// Largest capacity in bytes: lengths fit into 32 bits with room to round up.
const MAX_CAPACITY: usize = 1 << 30;

/// Returns the bytes that a ring of this capacity takes in a region.
pub const fn bytes_needed(capacity: usize) -> usize {
    HEADER_BYTES + capacity
}

/// Error: the ring has no room for the record now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the shared ring is full: the peer has to take records first")
    }
}

impl std::error::Error for Full {}

/// Error: the peer corrupted the ring; the connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CorruptRing {
    /// Our position, in bytes since the start.
    pub position: u64,
    /// Invalid value: the peer's position or the record's length.
    pub found: u64,
}

impl fmt::Display for CorruptRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { position, found } = self;
        write!(f, "the peer corrupted the shared ring: found {found} at position {position}")
    }
}

impl std::error::Error for CorruptRing {}

/// Location of a ring.
#[derive(Debug)]
struct RingMemory {
    region: Arc<Region>,
    offset: usize,
    capacity: usize,
}

impl RingMemory {
    fn new(region: Arc<Region>, offset: usize, capacity: usize) -> Self {
        let sound = capacity.is_power_of_two() && (ALIGNMENT..=MAX_CAPACITY).contains(&capacity);
        assert!(sound, "a ring's capacity is a power of two up to {MAX_CAPACITY}, not {capacity}");
        assert!(region.contains(offset, bytes_needed(capacity)), "the ring is inside its region");
        region.atomic_u64(offset);
        Self { region, offset, capacity }
    }

    /// Returns the ranges of the region that `bytes` bytes at a position cover: (offset in region, start, end).
    fn pieces(&self, position: u64, bytes: usize) -> [(usize, usize, usize); 2] {
        let start = position as usize & (self.capacity - 1);
        let first = bytes.min(self.capacity - start);
        let data = self.offset + HEADER_BYTES;
        [(data + start, 0, first), (data, first, bytes)]
    }

    fn write(&self, position: u64, bytes: &[u8]) {
        for (at, from, to) in self.pieces(position, bytes.len()) {
            self.region.copy_in(at, &bytes[from..to]);
        }
    }

    fn read(&self, position: u64, bytes: &mut [u8]) {
        for (at, from, to) in self.pieces(position, bytes.len()) {
            self.region.copy_out(at, &mut bytes[from..to]);
        }
    }
}

/// Returns the size of a record in the ring, in bytes.
const fn record_bytes(bytes: usize) -> usize {
    (LENGTH_BYTES + bytes).next_multiple_of(ALIGNMENT)
}

/// Producer of a ring. One thread at a time.
#[derive(Debug)]
pub struct ShmProducer {
    place: RingMemory,
    tail: u64,
    seen_head: u64,
}

impl ShmProducer {
    /// Creates the producer of a new ring. Panics if the ring does not fit into the writable region, the offset is not
    /// a multiple of 8, or the capacity is not a power of two.
    pub fn new(region: Arc<Region>, offset: usize, capacity: usize) -> Self {
        Self { place: RingMemory::new(region, offset, capacity), tail: 0, seen_head: 0 }
    }

    /// Returns the length of the longest record, in bytes.
    pub fn max_record_bytes(&self) -> usize {
        self.place.capacity - LENGTH_BYTES
    }

    /// Appends one record, the concatenation of the parts. Panics if it is longer than [`Self::max_record_bytes`].
    pub fn push(&mut self, parts: &[&[u8]]) -> Result<(), Full> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let limit = self.max_record_bytes();
        assert!(bytes <= limit, "a record of {bytes} bytes in a ring that takes {limit}");
        let needed = record_bytes(bytes) as u64;
        if self.free() < needed {
            self.look();
            if self.free() < needed {
                return Err(Full);
            }
        }
        self.place.write(self.tail, &(bytes as u32).to_ne_bytes());
        let mut position = self.tail + LENGTH_BYTES as u64;
        for part in parts {
            self.place.write(position, part);
            position += part.len() as u64;
        }
        self.tail += needed;
        let tail = self.place.region.atomic_u64(self.place.offset + PRODUCER_AT);
        tail.store(self.tail, Ordering::Release);
        Ok(())
    }

    fn free(&self) -> u64 {
        self.place.capacity as u64 - (self.tail - self.seen_head)
    }

    /// Reads the consumer's position and stores it if it is valid.
    fn look(&mut self) {
        let head = self.place.region.atomic_u64(self.place.offset).load(Ordering::Acquire);
        if (self.seen_head..=self.tail).contains(&head) && head.is_multiple_of(ALIGNMENT as u64) {
            self.seen_head = head;
        }
    }
}

/// Consumer of a ring. One thread at a time.
#[derive(Debug)]
pub struct ShmConsumer {
    place: RingMemory,
    head: u64,
    corrupt: Option<CorruptRing>,
}

impl ShmConsumer {
    /// Creates the consumer of a new ring. Panics like [`ShmProducer::new`].
    pub fn new(region: Arc<Region>, offset: usize, capacity: usize) -> Self {
        Self { place: RingMemory::new(region, offset, capacity), head: 0, corrupt: None }
    }

    /// Returns true if the ring is empty. Costs one load.
    pub fn is_empty(&self) -> bool {
        self.tail() == self.head
    }

    /// Replaces `out` with the oldest record; returns `false` if the ring is empty. An error is permanent.
    pub fn pop(&mut self, out: &mut Vec<u8>) -> Result<bool, CorruptRing> {
        if let Some(corrupt) = self.corrupt {
            return Err(corrupt);
        }
        let tail = self.tail();
        if tail == self.head {
            return Ok(false);
        }
        let available = tail.wrapping_sub(self.head);
        if available > self.place.capacity as u64 || !available.is_multiple_of(ALIGNMENT as u64) {
            return Err(self.broken(tail));
        }
        let mut length = [0; LENGTH_BYTES];
        self.place.read(self.head, &mut length);
        let bytes = u32::from_ne_bytes(length) as usize;
        let taken = record_bytes(bytes) as u64;
        if taken > available {
            return Err(self.broken(bytes as u64));
        }
        out.resize(bytes, 0);
        self.place.read(self.head + LENGTH_BYTES as u64, out);
        self.head += taken;
        self.place.region.atomic_u64(self.place.offset).store(self.head, Ordering::Release);
        Ok(true)
    }

    fn tail(&self) -> u64 {
        let tail = self.place.region.atomic_u64(self.place.offset + PRODUCER_AT);
        tail.load(Ordering::Acquire)
    }

    fn broken(&mut self, found: u64) -> CorruptRing {
        let corrupt = CorruptRing { position: self.head, found };
        self.corrupt = Some(corrupt);
        corrupt
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

//! Memory of a client: the source of puts, with bytes that identify their location, and the destination of gets.

use std::sync::Arc;

use kvplane::{HugePages, Region, RegionOptions};

use super::cells::MOST_SOURCE_BYTES;
use crate::Failure;

/// Number of shifts: each call's values begin some lines further on, so that they differ from those of the call before.
const SHIFTS: usize = 61;
const LINE_BYTES: usize = 64;
const WORD_BYTES: usize = 8;

/// Source and destination of one client.
pub(crate) struct Memory {
    pub(crate) source: Arc<Region>,
    pub(crate) found: Arc<Region>,
    source_bytes: usize,
    first_word: u64,
}

impl Memory {
    /// Creates the memory; every word of the source identifies the client and its offset.
    pub(crate) fn new(index: u64, bytes: usize) -> Result<Self, Failure> {
        let region = |name: &str, bytes| {
            let options = RegionOptions { huge: HugePages::Try, prefault: true, ..RegionOptions::new(name, bytes) };
            Region::allocate(&options)
        };
        let source_bytes = bytes.min(MOST_SOURCE_BYTES as usize);
        let memory = Self {
            source: region("bench-source", source_bytes + SHIFTS * LINE_BYTES)?,
            found: region("bench-found", bytes)?,
            source_bytes,
            first_word: index << 40,
        };
        memory.source.fill_with(0, memory.source.bytes(), &mut |at, part| memory.pattern(at, part));
        Ok(memory)
    }

    /// Returns the source's bytes from `at` on.
    fn pattern(&self, at: u64, part: &mut [u8]) {
        for (n, word) in part.chunks_exact_mut(WORD_BYTES).enumerate() {
            word.copy_from_slice(&(self.first_word + at + (n * WORD_BYTES) as u64).to_le_bytes());
        }
    }

    /// Returns the offset of a call's item in the source. Items beyond its end reuse it.
    pub(crate) const fn source_at(&self, size: usize, call: usize, item: usize) -> usize {
        (call % SHIFTS) * LINE_BYTES + (item % (self.source_bytes / size)) * size
    }

    /// Returns the offset of an item in the destination.
    pub(crate) const fn found_at(size: usize, item: usize) -> usize {
        item * size
    }

    /// Overwrites the destination, so that older bytes are not taken for received ones.
    pub(crate) fn wipe(&self) {
        self.found.fill_with(0, self.found.bytes(), &mut |_, part| part.fill(0xee));
    }

    /// Returns true if the destination has this item of this call.
    pub(crate) fn is_right(&self, size: usize, call: usize, item: usize) -> bool {
        let (source, mut right) = (self.source_at(size, call, item) as u64, true);
        let mut expected = Vec::new();
        self.found.read_with(Self::found_at(size, item), size, &mut |at, part| {
            expected.resize(part.len(), 0);
            self.pattern(source + at, &mut expected);
            right &= part == expected;
        });
        right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_another_item_are_wrong() {
        let memory = Memory::new(3, 1 << 16).unwrap();
        memory.wipe();
        assert!(!memory.is_right(4096, 5, 2));
        Region::copy_between(
            &memory.found,
            Memory::found_at(4096, 2),
            &memory.source,
            memory.source_at(4096, 5, 2),
            4096,
        );
        assert!(memory.is_right(4096, 5, 2));
        assert!(!memory.is_right(4096, 6, 2) && !memory.is_right(4096, 5, 3));
    }
}

//! The header of a segment: which use of the segment this is.
//!
//! It is durable before any record of that use is written, and stands twice in its block. Generations are sequence
//! numbers, so they grow from one use of any segment to the next.

use super::{Flaw, check_start, put32, put64, seeded, start, word32, word64};

/// Bytes of a segment's header.
pub const SEGMENT_HEADER_BYTES: usize = 64;
/// Where the two copies are in the segment's first block; the rest of it is zero.
pub const SEGMENT_HEADER_OFFSETS: [usize; 2] = [0, 256];
const MAGIC: [u8; 4] = *b"KVTG";
const CHECKSUM_AT: usize = 60;

/// The header of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentHeader {
    /// The segment's number.
    pub segment: u32,
    /// Which use of it: greater than that of any segment begun before.
    pub generation: u64,
    /// Segments of lesser generations hold nothing that counts.
    pub oldest_live: u64,
    /// The generation of the segment that was filled before this one in the same incarnation of the shard, or 0.
    pub previous: u64,
    /// Contents of the segment that was filled last before this header was made, in the same incarnation.
    pub filled: Option<FilledNote>,
}

/// The removals in a segment that was filled, so that those which are missing at its end are missed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FilledNote {
    /// Which use of which segment; never 0.
    pub generation: u64,
    /// How many tombstones it has, each counted once.
    pub tombstones: u32,
    /// The sequence of the last of them, or 0.
    pub last_tombstone: u64,
}

impl SegmentHeader {
    /// Disk form.
    #[must_use]
    pub fn encode(&self, uuid: u128) -> [u8; SEGMENT_HEADER_BYTES] {
        let mut out = [0; SEGMENT_HEADER_BYTES];
        start(&mut out, MAGIC);
        put32(&mut out, 8, self.segment);
        put64(&mut out, 16, self.generation);
        put64(&mut out, 24, self.oldest_live);
        put64(&mut out, 32, self.previous);
        if let Some(filled) = &self.filled {
            put64(&mut out, 40, filled.generation);
            put64(&mut out, 48, filled.last_tombstone);
            put32(&mut out, 56, filled.tombstones);
        }
        let checksum = seeded(uuid, &out[..CHECKSUM_AT]);
        put32(&mut out, CHECKSUM_AT, checksum);
        out
    }

    /// Reads a header.
    ///
    /// # Errors
    /// When there is none.
    pub fn decode(bytes: &[u8; SEGMENT_HEADER_BYTES], uuid: u128) -> Result<Self, Flaw> {
        check_start(bytes, MAGIC)?;
        if word32(bytes, CHECKSUM_AT) != seeded(uuid, &bytes[..CHECKSUM_AT]) {
            return Err(Flaw::Checksum);
        }
        // Zero in the headers of earlier programs: they say nothing about others.
        let filled = FilledNote {
            generation: word64(bytes, 40),
            last_tombstone: word64(bytes, 48),
            tombstones: word32(bytes, 56),
        };
        Ok(Self {
            filled: (filled.generation != 0).then_some(filled),
            segment: word32(bytes, 8),
            generation: word64(bytes, 16),
            oldest_live: word64(bytes, 24),
            previous: word64(bytes, 32),
        })
    }
}

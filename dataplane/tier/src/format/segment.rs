//! Segment header: the generation of a segment.
//!
//! It is durable before any record of that generation is written, and is stored twice in its block. Generations are
//! sequence numbers, so they grow from one use of any segment to the next.

use super::{Flaw, check_start, put32, put64, seeded, start, word32, word64};

/// Bytes of a segment's header.
pub const SEGMENT_HEADER_BYTES: usize = 64;
/// Offsets of the two copies in the segment's first block; the rest of the block is zero.
pub const SEGMENT_HEADER_OFFSETS: [usize; 2] = [0, 256];
const MAGIC: [u8; 4] = *b"KVTG";
const CHECKSUM_AT: usize = 60;

/// Header of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentHeader {
    /// Number of the segment.
    pub segment: u32,
    /// Generation of the segment: greater than that of any segment begun before.
    pub generation: u64,
    /// Least generation of segments with live records: segments of lesser generations have none.
    pub oldest_live: u64,
    /// Generation of the segment that was filled before this one in the same incarnation of the shard, or 0.
    pub previous: u64,
    /// Note on the segment that was filled last before this header was made, in the same incarnation.
    pub filled: Option<FilledNote>,
}

/// Tombstones of a segment that was filled, so that recovery detects missing ones at its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FilledNote {
    /// Generation of that segment; never 0.
    pub generation: u64,
    /// Number of its tombstones, twins not counted.
    pub tombstones: u32,
    /// Sequence of its last tombstone, or 0.
    pub last_tombstone: u64,
}

impl SegmentHeader {
    /// Encodes the header.
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

    /// Decodes a header.
    ///
    /// # Errors
    /// If the bytes are not a valid header.
    pub fn decode(bytes: &[u8; SEGMENT_HEADER_BYTES], uuid: u128) -> Result<Self, Flaw> {
        check_start(bytes, MAGIC)?;
        if word32(bytes, CHECKSUM_AT) != seeded(uuid, &bytes[..CHECKSUM_AT]) {
            return Err(Flaw::Checksum);
        }
        // Zero in the headers of earlier versions, which carry no note.
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

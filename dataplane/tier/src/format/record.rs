//! Record: an object, or the tombstone of one.
//!
//! Header, checksums of the payload's chunks if there are several, key, payload. A *packed* record is contiguous and
//! ends at the next unit of 64 bytes. An *extent* has its payload in blocks of its own, so that it is read without
//! anything else and without a copy; its head may share a block with the heads of extents that follow, so the payload
//! begins up to [`AWAY_MOST`] blocks after the block in which the head ends.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;

use super::{
    Flaw, UNIT_BYTES, check_start, put16, put32, put64, put128, seeded, start, word16, word32, word64, word128,
};

/// Bytes of a record's fixed header.
pub const RECORD_HEADER_BYTES: usize = 104;
/// Most chunk checksums that a record lists.
pub const MAX_CHUNKS: u32 = 16_384;
/// Most blocks between the block in which an extent's head ends and its payload.
pub const AWAY_MOST: u8 = 31;
const MAGIC: [u8; 4] = *b"KVTR";
const CHECKSUM_AT: usize = 100;

const EXTENT: u8 = 1;
const PINNED: u8 = 2;
const TWIN: u8 = 4;
const NAMES_PARTS: u8 = 8;
const COPIED: u8 = 16;

/// Kind of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// An object.
    Object,
    /// A removal: earlier records of the digest are void.
    Tombstone,
}

impl Kind {
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Object => 1,
            Self::Tombstone => 2,
        }
    }

    pub(crate) const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Object),
            2 => Some(Self::Tombstone),
            _ => None,
        }
    }
}

/// Lengths of a record's parts, and properties of its payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Bytes of the payload.
    pub payload_bytes: u32,
    /// Bytes of the key.
    pub key_bytes: u16,
    /// True if the payload has blocks of its own.
    pub extent: bool,
    /// True if the payload is a stripe head, which only names the stripes of a larger object, as the caller stated.
    pub names_parts: bool,
    /// True if the object is replicated on a replica owner, as the caller stated.
    pub copied: bool,
}

impl Shape {
    /// Returns the number of checksums that the record lists: 0 if one chunk holds the whole payload.
    #[must_use]
    pub const fn chunks(&self, chunk_bytes: u32) -> u32 {
        if self.payload_bytes <= chunk_bytes { 0 } else { self.payload_bytes.div_ceil(chunk_bytes) }
    }

    /// Returns the bytes before the payload, without padding.
    #[must_use]
    pub const fn head_bytes(&self, chunk_bytes: u32) -> u64 {
        RECORD_HEADER_BYTES as u64 + 8 * self.chunks(chunk_bytes) as u64 + self.key_bytes as u64
    }

    /// Returns the bytes that the payload takes: whole blocks in an extent.
    #[must_use]
    pub const fn payload_room(&self, block_bytes: u32) -> u64 {
        let bytes = self.payload_bytes as u64;
        if self.extent { bytes.next_multiple_of(block_bytes as u64) } else { bytes }
    }

    /// Returns the offset of the payload of a record whose head is at `at`. Both count from the start of any range of
    /// whole blocks.
    #[must_use]
    pub const fn payload_at(&self, at: u64, away: u8, chunk_bytes: u32, block_bytes: u32) -> u64 {
        let head = at + self.head_bytes(chunk_bytes);
        let block = block_bytes as u64;
        if self.extent { head.next_multiple_of(block) + away as u64 * block } else { head }
    }

    /// Returns the most bytes that an appended record takes: a head in blocks of its own.
    #[must_use]
    pub const fn most_bytes(&self, chunk_bytes: u32, block_bytes: u32) -> u64 {
        let head = self.head_bytes(chunk_bytes);
        let head = if self.extent { head.next_multiple_of(block_bytes as u64) } else { head };
        (head + self.payload_room(block_bytes)).next_multiple_of(UNIT_BYTES)
    }

    /// Returns the bytes of the record: head and payload, without the padding between them.
    #[must_use]
    pub const fn record_bytes(&self, chunk_bytes: u32, block_bytes: u32) -> u64 {
        let head = self.head_bytes(chunk_bytes);
        let head = if self.extent { head.next_multiple_of(UNIT_BYTES) } else { head };
        (head + self.payload_room(block_bytes)).next_multiple_of(UNIT_BYTES)
    }
}

/// Fixed header of a record.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordHeader {
    pub kind: Kind,
    pub shape: Shape,
    /// True if the object is hard-pinned: reclaim keeps it.
    pub pinned: bool,
    /// True if this is the second copy of a tombstone, in a block of its own.
    pub twin: bool,
    pub digest: Digest,
    pub version: Version,
    /// Sequence of the record: greater than that of any record appended before.
    pub sequence: u64,
    /// Generation of the record's segment.
    pub generation: u64,
    /// Offset that the record was written for, in bytes from the start of the device.
    pub offset: u64,
    /// CRC-64/NVME of the whole payload.
    pub payload_checksum: u64,
    /// Records up to this sequence were durable when this one was appended.
    pub durable_sequence: u64,
    /// Number of tombstones of this segment that were durable when this record was appended.
    pub durable_tombstones: u32,
    /// Least generation of segments with live records, as in the segment's header, in case that is unreadable.
    pub oldest_live: u64,
    /// Blocks between an extent's head and its payload: see [`Shape::payload_at`].
    pub away: u8,
    /// Bytes of payload under one checksum.
    pub chunk_bytes: u32,
    /// CRC-32C of the listed checksums and the key.
    pub body_checksum: u32,
}

impl RecordHeader {
    /// Encodes the header.
    #[must_use]
    pub fn encode(&self, uuid: u128) -> [u8; RECORD_HEADER_BYTES] {
        let mut out = [0; RECORD_HEADER_BYTES];
        start(&mut out, MAGIC);
        out[6] = self.kind.code();
        let Shape { extent, names_parts, copied, .. } = self.shape;
        let of_shape = [(EXTENT, extent), (NAMES_PARTS, names_parts), (COPIED, copied)];
        let flags = of_shape.into_iter().chain([(PINNED, self.pinned), (TWIN, self.twin)]);
        for (flag, set) in flags {
            out[7] |= if set { flag } else { 0 };
        }
        put128(&mut out, 8, self.digest.0);
        put64(&mut out, 24, self.version.0);
        put64(&mut out, 32, self.sequence);
        put64(&mut out, 40, self.generation);
        put64(&mut out, 48, self.offset);
        put64(&mut out, 56, self.payload_checksum);
        put64(&mut out, 64, self.durable_sequence);
        put32(&mut out, 72, self.durable_tombstones);
        put32(&mut out, 76, self.shape.payload_bytes);
        put32(&mut out, 80, self.chunk_bytes);
        put32(&mut out, 84, self.body_checksum);
        put16(&mut out, 88, self.shape.key_bytes);
        out[90] = self.away;
        put64(&mut out, 92, self.oldest_live);
        let checksum = seeded(uuid, &out[..CHECKSUM_AT]);
        put32(&mut out, CHECKSUM_AT, checksum);
        out
    }

    /// Decodes a header and verifies what can be verified without its body. The lengths are trusted only after the
    /// checksum matched, and are bounded by `most_payload_bytes`.
    ///
    /// # Errors
    /// If the bytes are not a valid header.
    pub fn decode(bytes: &[u8; RECORD_HEADER_BYTES], uuid: u128, most_payload_bytes: u32) -> Result<Self, Flaw> {
        check_start(bytes, MAGIC)?;
        if word32(bytes, CHECKSUM_AT) != seeded(uuid, &bytes[..CHECKSUM_AT]) {
            return Err(Flaw::Checksum);
        }
        let has = |flag| bytes[7] & flag != 0;
        let header = Self {
            kind: Kind::from_code(bytes[6]).ok_or(Flaw::Values)?,
            shape: Shape {
                payload_bytes: word32(bytes, 76),
                key_bytes: word16(bytes, 88),
                extent: has(EXTENT),
                names_parts: has(NAMES_PARTS),
                copied: has(COPIED),
            },
            pinned: has(PINNED),
            twin: has(TWIN),
            digest: Digest(word128(bytes, 8)),
            version: Version(word64(bytes, 24)),
            sequence: word64(bytes, 32),
            generation: word64(bytes, 40),
            offset: word64(bytes, 48),
            payload_checksum: word64(bytes, 56),
            durable_sequence: word64(bytes, 64),
            durable_tombstones: word32(bytes, 72),
            oldest_live: word64(bytes, 92),
            away: bytes[90],
            chunk_bytes: word32(bytes, 80),
            body_checksum: word32(bytes, 84),
        };
        let plausible = bytes[7] & !(EXTENT | PINNED | TWIN | NAMES_PARTS | COPIED) == 0
            && header.away <= if header.shape.extent { AWAY_MOST } else { 0 }
            && header.shape.payload_bytes <= most_payload_bytes
            && header.chunk_bytes > 0
            && header.shape.chunks(header.chunk_bytes) <= MAX_CHUNKS;
        if plausible { Ok(header) } else { Err(Flaw::Values) }
    }
}

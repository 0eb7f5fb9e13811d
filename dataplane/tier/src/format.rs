//! On-disk format: superblock, segment header, record, footer page. Fixed layout, little-endian.
//!
//! Every structure begins with a magic number and the format version and carries a CRC-32C. The CRCs of segments,
//! records and footers are seeded with the device's uuid, and each structure states its location: content of an earlier
//! formatting of the device, of another device, or payload that imitates a record is not mistaken for this device's.
//! Payloads carry CRC-64/NVME, one for each chunk. The byte tables are in docs/tier.md; golden bytes in the tests pin
//! them.
//!
//! Not here: when anything is written, and how what was read is used.

mod footer;
mod ownership;
mod record;
mod segment;
mod superblock;

pub use footer::{FOOTER_ENTRY_BYTES, FOOTER_HEADER_BYTES, FooterEntry, FooterPage};
pub use ownership::{Doubt, OWNERSHIP_IO_BYTES, OWNERSHIP_OFFSETS, Ownership, SlotSet};
pub use record::{AWAY_MOST, Kind, MAX_CHUNKS, RECORD_HEADER_BYTES, RecordHeader, Shape};
pub use segment::{FilledNote, SEGMENT_HEADER_BYTES, SEGMENT_HEADER_OFFSETS, SegmentHeader};
pub use superblock::{SUPERBLOCK_BYTES, Superblock, SuperblockFound};

use core::fmt;

use kvplane_proto::checksum::frame_checksum;

/// Format version that this code reads and writes.
pub const FORMAT_VERSION: u16 = 2;
/// Alignment of records.
pub const UNIT_BYTES: u64 = 64;
/// Offsets of the two copies of the superblock.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 32_768];
/// Bytes that are written and read of each copy: whole blocks of any device.
pub const SUPERBLOCK_IO_BYTES: u32 = 4_096;
/// Offset of the first segment.
pub const FIRST_SEGMENT_OFFSET: u64 = 65_536;

/// Reason why bytes are not the expected structure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    /// No magic number: never written, or other data.
    Absent,
    /// Another format version.
    Version(u16),
    /// The checksum does not match: torn, with flipped bits, or of another device.
    Checksum,
    /// The checksum matches, but the values are outside the device's limits.
    Values,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("no magic number"),
            Self::Version(version) => write!(f, "format version {version}, this program reads {FORMAT_VERSION}"),
            Self::Checksum => f.write_str("the checksum does not match"),
            Self::Values => f.write_str("values out of range"),
        }
    }
}

/// Returns the CRC-32C of the device's uuid followed by `bytes`.
pub(crate) fn seeded(uuid: u128, bytes: &[u8]) -> u32 {
    const MOST: usize = 128;
    let mut whole = [0; MOST + 16];
    whole[..16].copy_from_slice(&uuid.to_le_bytes());
    whole[16..16 + bytes.len()].copy_from_slice(bytes);
    frame_checksum(&whole[..16 + bytes.len()])
}

/// Checks the magic number and the version, which come first in every structure. Only the superblock checks its
/// checksum before its version.
pub(crate) fn check_start(bytes: &[u8], magic: [u8; 4]) -> Result<(), Flaw> {
    if bytes[..4] != magic {
        return Err(Flaw::Absent);
    }
    match word16(bytes, 4) {
        FORMAT_VERSION => Ok(()),
        other => Err(Flaw::Version(other)),
    }
}

pub(crate) fn start(bytes: &mut [u8], magic: [u8; 4]) {
    bytes[..4].copy_from_slice(&magic);
    put16(bytes, 4, FORMAT_VERSION);
}

pub(crate) fn word16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn word32(bytes: &[u8], at: usize) -> u32 {
    u32::from(word16(bytes, at)) | u32::from(word16(bytes, at + 2)) << 16
}

pub(crate) fn word64(bytes: &[u8], at: usize) -> u64 {
    u64::from(word32(bytes, at)) | u64::from(word32(bytes, at + 4)) << 32
}

pub(crate) fn word128(bytes: &[u8], at: usize) -> u128 {
    u128::from(word64(bytes, at)) | u128::from(word64(bytes, at + 8)) << 64
}

pub(crate) fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

pub(crate) fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

pub(crate) fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

pub(crate) fn put128(bytes: &mut [u8], at: usize, value: u128) {
    bytes[at..at + 16].copy_from_slice(&value.to_le_bytes());
}

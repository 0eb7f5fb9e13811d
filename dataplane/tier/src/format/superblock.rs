//! Superblock: identity and layout of a device.
//!
//! Two copies, written in turn with growing generations; the valid one of the greater generation is current. The first
//! 128 bytes and the offset of their checksum are the same in every format version, so that another version is
//! distinguished from damage and refused.

use kvplane_proto::checksum::frame_checksum;
use kvplane_proto::ids::{NodeId, ShardId};

use super::{FORMAT_VERSION, Flaw, put16, put32, put64, put128, start, word16, word32, word64, word128};

/// Bytes of a superblock; the rest of its block is zero.
pub const SUPERBLOCK_BYTES: usize = 128;
const MAGIC: [u8; 4] = *b"KVTS";
const CHECKSUM_AT: usize = 124;

/// Superblock of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Superblock {
    /// Number of this superblock among all ever written to the device: it grows by one with each incarnation of the
    /// shard.
    pub generation: u64,
    /// Permanent identity of the device, drawn when it is formatted.
    pub uuid: u128,
    /// Digest of the name of the cluster that the device belongs to.
    pub cluster: u128,
    /// Node that the device belongs to.
    pub node: NodeId,
    /// Shard of that node.
    pub shard: ShardId,
    /// Unit of the device's writes, in bytes.
    pub block_bytes: u32,
    /// Bytes of a page of a footer.
    pub footer_page_bytes: u32,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Number of segments.
    pub segments: u32,
    /// Bytes of payload under one checksum.
    pub chunk_bytes: u32,
}

/// Contents of a superblock's location.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SuperblockFound {
    /// A superblock of this format.
    Kvplane(Superblock),
    /// Only zeros.
    Blank,
    /// A whole superblock of another format version.
    OtherVersion(u16),
    /// A superblock's magic number with a wrong checksum.
    Damaged,
    /// Other data.
    Foreign,
}

impl Superblock {
    /// Encodes the superblock.
    #[must_use]
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut out = [0; SUPERBLOCK_BYTES];
        start(&mut out, MAGIC);
        put16(&mut out, 6, self.shard.0);
        put64(&mut out, 8, self.generation);
        put128(&mut out, 16, self.uuid);
        put128(&mut out, 32, self.cluster);
        put64(&mut out, 48, self.node.0);
        put32(&mut out, 56, self.block_bytes);
        put32(&mut out, 60, self.footer_page_bytes);
        put64(&mut out, 64, self.segment_bytes);
        put32(&mut out, 72, self.segments);
        put32(&mut out, 76, self.chunk_bytes);
        let checksum = frame_checksum(&out[..CHECKSUM_AT]);
        put32(&mut out, CHECKSUM_AT, checksum);
        out
    }

    /// Decodes the contents of a superblock's location.
    #[must_use]
    pub fn decode(bytes: &[u8; SUPERBLOCK_BYTES]) -> SuperblockFound {
        if bytes.iter().all(|byte| *byte == 0) {
            return SuperblockFound::Blank;
        }
        if bytes[..4] != MAGIC {
            return SuperblockFound::Foreign;
        }
        if word32(bytes, CHECKSUM_AT) != frame_checksum(&bytes[..CHECKSUM_AT]) {
            return SuperblockFound::Damaged;
        }
        match super::check_start(bytes, MAGIC) {
            Err(Flaw::Version(version)) => SuperblockFound::OtherVersion(version),
            _ => SuperblockFound::Kvplane(Self {
                generation: word64(bytes, 8),
                uuid: word128(bytes, 16),
                cluster: word128(bytes, 32),
                node: NodeId(word64(bytes, 48)),
                shard: ShardId(word16(bytes, 6)),
                block_bytes: word32(bytes, 56),
                footer_page_bytes: word32(bytes, 60),
                segment_bytes: word64(bytes, 64),
                segments: word32(bytes, 72),
                chunk_bytes: word32(bytes, 76),
            }),
        }
    }
}

// Version 1 was never released: a device of it is refused as any other unknown version.
const _: () = assert!(FORMAT_VERSION == 2, "a new version needs a new golden test, and a way to read the old one");

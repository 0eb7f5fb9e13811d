//! Objects of the store: packs, checkpoints, manifests, and their names. Fixed layout, little-endian.
//!
//! Each begins with a magic number, the format version and the identity of its stream, and is covered by checksums that
//! begin with that identity: an object of another cluster, shard or number does not pass under this name. The byte
//! tables are in docs/shared-tier-format.md; golden bytes in the tests hold them.

mod checkpoint;
mod manifest;
mod pack;

use core::fmt;

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_proto::map::ShardKey;

pub use checkpoint::{CheckpointReader, CheckpointWriter, PACK_ROW_BYTES, PackRow};
pub use manifest::{MANIFEST_BYTES, Manifest};
pub use pack::{ENTRY_BYTES, Entry, EntryKind, HEADER_BYTES, PackEnd, PackWriter, TRAILER_BYTES};

/// Version of the format that this code reads and writes.
pub const FORMAT_VERSION: u16 = 1;

/// Reason why bytes are not the expected object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    /// Fewer bytes than the object says.
    Short,
    /// No magic number.
    Absent,
    /// Another format version.
    Version(u16),
    /// The checksum does not match: other bytes, or of another stream.
    Checksum,
    /// The checksum matches, but values are out of range.
    Values,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short => f.write_str("it is too short"),
            Self::Absent => f.write_str("it has no magic number"),
            Self::Version(version) => write!(f, "format version {version}, this program reads {FORMAT_VERSION}"),
            Self::Checksum => f.write_str("the checksum does not match"),
            Self::Values => f.write_str("values out of range"),
        }
    }
}

/// Stream of a shard's objects in the store: the shard in one incarnation, in one cluster state of one cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Stream {
    /// Digest of the cluster's name.
    pub cluster: u128,
    /// Cluster state.
    pub state: u64,
    /// Shard.
    pub shard: ShardKey,
}

/// Length of an encoded stream identity.
const STREAM_BYTES: usize = 48;

impl Stream {
    /// Returns the stream of another shard in the same cluster state.
    #[must_use]
    pub const fn of(self, shard: ShardKey) -> Self {
        Self { shard, ..self }
    }

    /// Returns the common beginning of the names of its objects.
    #[must_use]
    pub fn prefix(self) -> String {
        let ShardKey { node, incarnation, shard } = self.shard;
        format!("{:016x}/{:016x}-{:04x}-{:016x}", self.state, node.0, shard.0, incarnation.0)
    }

    /// Parses the beginning of a name: the cluster state, the shard, and the rest.
    #[must_use]
    pub fn parse(cluster: u128, name: &str) -> Option<(Self, &str)> {
        let mut parts = name.splitn(3, '/');
        let (state, shard, rest) = (parts.next()?, parts.next()?, parts.next()?);
        let hex =
            |text: &str, digits: usize| (text.len() == digits).then(|| u64::from_str_radix(text, 16).ok()).flatten();
        let mut ids = shard.split('-');
        let (node, index, incarnation) = (ids.next()?, ids.next()?, ids.next()?);
        let shard = ShardKey {
            node: NodeId(hex(node, 16)?),
            shard: ShardId(u16::try_from(hex(index, 4)?).ok()?),
            incarnation: Incarnation(hex(incarnation, 16)?),
        };
        (ids.next().is_none()).then_some(())?;
        Some((Self { cluster, state: hex(state, 16)?, shard }, rest))
    }

    /// Returns the name of a pack.
    #[must_use]
    pub fn pack(self, number: u64) -> String {
        format!("{}/pack-{number:016x}", self.prefix())
    }

    /// Returns the name of a checkpoint.
    #[must_use]
    pub fn checkpoint(self, number: u64) -> String {
        format!("{}/checkpoint-{number:016x}", self.prefix())
    }

    /// Returns the name of a manifest; the one with the greatest number counts.
    #[must_use]
    pub fn manifest(self, number: u64) -> String {
        format!("{}/manifest-{number:016x}", self.prefix())
    }

    /// Returns the name of the object by which the shard learns the store's time.
    #[must_use]
    pub fn clock(self) -> String {
        format!("{}/clock", self.prefix())
    }

    fn encode(self) -> [u8; STREAM_BYTES] {
        let mut bytes = [0; STREAM_BYTES];
        bytes[..16].copy_from_slice(&self.cluster.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.state.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.shard.node.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.shard.incarnation.0.to_le_bytes());
        bytes[40..42].copy_from_slice(&self.shard.shard.0.to_le_bytes());
        bytes
    }
}

/// Returns the number of a pack from the last part of its name.
#[must_use]
pub fn pack_number(rest: &str) -> Option<u64> {
    number_of("pack-", rest)
}

/// Returns the number of a manifest from the last part of its name.
#[must_use]
pub fn manifest_number(rest: &str) -> Option<u64> {
    number_of("manifest-", rest)
}

fn number_of(kind: &str, rest: &str) -> Option<u64> {
    let digits = rest.strip_prefix(kind).filter(|digits| digits.len() == 16)?;
    u64::from_str_radix(digits, 16).ok()
}

/// Returns the checksum of parts of an object with this number, seeded with its stream.
fn seeded(stream: Stream, number: u64, parts: &[&[u8]]) -> u64 {
    let mut checksum = PayloadChecksum::new();
    checksum.update(&stream.encode());
    checksum.update(&number.to_le_bytes());
    parts.iter().for_each(|part| checksum.update(part));
    checksum.finish()
}

/// Checks the magic number and the version at the start of a structure.
fn check_start(bytes: &[u8], magic: [u8; 4]) -> Result<(), Flaw> {
    if bytes.len() < 8 {
        return Err(Flaw::Short);
    }
    if bytes[..4] != magic {
        return Err(Flaw::Absent);
    }
    match word16(bytes, 4) {
        FORMAT_VERSION => Ok(()),
        other => Err(Flaw::Version(other)),
    }
}

fn start(bytes: &mut [u8], magic: [u8; 4]) {
    bytes[..4].copy_from_slice(&magic);
    put16(bytes, 4, FORMAT_VERSION);
}

fn word16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    u32::from(word16(bytes, at)) | u32::from(word16(bytes, at + 2)) << 16
}

fn word64(bytes: &[u8], at: usize) -> u64 {
    u64::from(word32(bytes, at)) | u64::from(word32(bytes, at + 4)) << 32
}

fn word128(bytes: &[u8], at: usize) -> u128 {
    u128::from(word64(bytes, at)) | u128::from(word64(bytes, at + 8)) << 64
}

fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

fn put128(bytes: &mut [u8], at: usize, value: u128) {
    bytes[at..at + 16].copy_from_slice(&value.to_le_bytes());
}

//! Memory image: the record of the objects in a shard's pool that outlives its process, for the next process of the
//! shard.
//!
//! ```text
//! header (4096 bytes):
//!     magic 8 | format u32 | phase u32 | uuid u128 | node u64 | shard u16 | shards u16 | 0 u8 3 | cluster bytes u8
//!     pool bytes u64 | unit bytes u64 | incarnation u64 | state u64 | epoch u64 | opening u64
//!     objects u64 | withheld u64 | members u64 | outstanding u64 | next version u64 | checksum of the contents u64
//!     cluster 256 | checksum of the header u64 | zeros
//! contents: objects (96 bytes each), in the order of eviction | withheld extents (offset u64 | bytes u64)
//!     members (node u64 | incarnation u64)
//!     outstanding replicas (digest u128 | node u64 | incarnation u64 | shard u64)
//! ```
//!
//! All numbers are little-endian; checksums are CRC-64/NVME, that of the header without the phase. The phase is written
//! last: an image counts only if it is complete, so that the end of a process in the middle of it is recognised. From
//! the moment at which its objects are served again, until the next image is written, the phase says that the memory is
//! in use: an image is restored once.
//!
//! Invariants: one value has one encoding; decoding never panics, and never reserves memory for more objects than the
//! bytes can hold. The checksums detect accidents, not forgery: files in memory are private to their user.

use core::fmt;

use kvplane_proto::checksum::{joined_payload_checksum, payload_checksum};
use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, ShardId, Version};
use kvplane_proto::map::{ReplicaSet, ShardKey};
use kvplane_proto::message::ObjectPriority;

use crate::allocator::{Extent, GRANULE_BYTES, granules_of};

/// Bytes of an encoded header.
pub const HEADER_BYTES: usize = 4096;
/// Bytes of an encoded object.
pub const OBJECT_BYTES: usize = 96;
/// Bytes of an encoded extent.
const EXTENT_BYTES: usize = 16;
/// Bytes of an encoded member, and of an encoded removal.
const MEMBER_BYTES: usize = 16;
const OUTSTANDING_BYTES: usize = 40;
/// Version of the format.
pub const FORMAT: u32 = 2;

const MAGIC: [u8; 8] = *b"KVPMEMRY";
const FORMAT_AT: usize = 8;
/// Offset of the phase, which is changed by itself.
pub const PHASE_AT: usize = 12;
const UUID_AT: usize = 16;
const NODE_AT: usize = 32;
const SHARD_AT: usize = 40;
const SHARDS_AT: usize = 42;
const CLUSTER_BYTES_AT: usize = 47;
const NUMBERS_AT: usize = 48;
const CLUSTER_AT: usize = NUMBERS_AT + 12 * 8;
const CHECKSUM_AT: usize = CLUSTER_AT + 256;
/// Objects that are encoded at a time.
const ENCODED_AT_ONCE: usize = 1024;

const _: () = assert!(CHECKSUM_AT + 8 <= HEADER_BYTES);

/// Phase of an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ImagePhase {
    /// A process uses the memory, or ended without an image of it.
    InUse = 1,
    /// A process writes the image, or ended in the middle.
    Writing = 2,
    /// The image is complete.
    Complete = 3,
}

/// Owner and shape of a shard's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct MemoryIdentity {
    /// Identity of the memory, drawn at random when it was created.
    pub uuid: u128,
    pub cluster: String,
    pub node: NodeId,
    pub shard: ShardId,
    /// Number of shards of the node.
    pub shards: u16,
    pub pool_bytes: u64,
    /// Unit of space of the pool.
    pub unit_bytes: u64,
}

/// Facts about the process that wrote an image, at its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ImageOrigin {
    /// Incarnation of the node.
    pub incarnation: Incarnation,
    /// Cluster state that the epoch belongs to; 0 if none is known.
    pub state: u64,
    /// Epoch of the map by which the shard served its slots last.
    pub epoch: Epoch,
    /// Number of the opening of its SSD; 0 without one.
    pub opening: u64,
}

/// Header of an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageHeader {
    /// Owner and shape of the memory.
    pub identity: MemoryIdentity,
    /// Phase that is encoded with it.
    pub phase: ImagePhase,
    /// Process that wrote it.
    pub origin: ImageOrigin,
    objects: u64,
    withheld: u64,
    members: u64,
    outstanding: u64,
    next_version: Version,
    contents_checksum: u64,
}

/// Place of an object's tail.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TailPlace {
    /// Class of pages that it is in; `None` if it is behind the object's bytes.
    pub page_class: Option<u8>,
    /// Offset in the pool.
    pub offset: u64,
    /// Its length; 0 if it is not present.
    pub bytes: u32,
    /// Checksum of its bytes.
    pub checksum: u64,
}

/// Object in an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeptObject {
    /// Digest.
    pub digest: Digest,
    /// Version.
    pub version: Version,
    /// Checksum of its bytes, that its writer stated.
    pub checksum: u64,
    /// Place of its bytes in the pool.
    pub extent: Extent,
    /// Granules that its tail takes beyond those of its bytes.
    pub extra_granules: u8,
    /// Place of its tail.
    pub tail: TailPlace,
    /// Number of the tenant that it is charged to.
    pub tenant: u32,
    /// Group that it belongs to; 0 for none.
    pub group: u64,
    /// Time left of its soft pin, in nanoseconds; 0 for none.
    pub soft_pin_ns: u64,
    /// Priority.
    pub priority: ObjectPriority,
    /// True if it is never evicted.
    pub hard_pin: bool,
    /// True if it is a stripe head.
    pub head: bool,
    /// True if it is to be replicated.
    pub wanted: bool,
    /// True if the eviction policy ranks it among those that were accessed again.
    pub protected: bool,
    /// True if a process may still read its bytes through a mapping of the pool: its extent is not reused.
    pub lent: bool,
    /// True if it is a replica of another owner's object.
    pub replica: bool,
    /// Number of replicas that it is to have beside the owner's, if it is to be replicated.
    pub copies: u8,
    /// Replica owners of its slot that may have a replica, by the map of the image's epoch.
    pub at: ReplicaSet,
}

/// Replica that its owner had to remove, or was sending, when its process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutstandingReplica {
    /// Object; the first digest of a slot stands for all objects of the slot.
    pub digest: Digest,
    /// Replica owner that may have it.
    pub owner: ShardKey,
}

/// Objects of an image, and extents that are not used because a process may still write to them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ImageContents {
    /// Objects, those first that are to be evicted first.
    pub objects: Vec<KeptObject>,
    /// Extents that are not used.
    pub withheld: Vec<Extent>,
    /// Incarnations of the cluster's nodes, by the map of the image's epoch.
    pub members: Vec<(NodeId, Incarnation)>,
    /// Replicas elsewhere that were not removed, or not acknowledged, yet.
    pub outstanding: Vec<OutstandingReplica>,
    /// Version of the next object.
    pub next_version: Version,
}

/// Reason why there is no image to restore.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ImageError {
    /// It is not the beginning of an image.
    Magic,
    /// It has a format that this program does not know.
    Format {
        /// Its version.
        found: u32,
    },
    /// The header is damaged.
    Header,
    /// A process ended without an image: it was killed, or it crashed.
    InUse,
    /// A process ended while it wrote the image.
    Unfinished,
    /// The contents are damaged.
    Contents,
}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic => f.write_str("there is no image of the memory"),
            Self::Format { found } => {
                write!(f, "the image has format version {found}, this program knows {FORMAT}")
            }
            Self::Header => f.write_str("the header of the image is damaged"),
            Self::InUse => f.write_str("the former process was killed, or crashed: it left no image of the memory"),
            Self::Unfinished => f.write_str("the former process ended while it wrote the image of the memory"),
            Self::Contents => f.write_str("the image is damaged: its checksum does not match"),
        }
    }
}

impl core::error::Error for ImageError {}

impl ImageHeader {
    /// Returns the header of memory that is in use, and so has no contents.
    #[must_use]
    pub fn in_use(identity: MemoryIdentity) -> Self {
        Self::of(identity, ImageOrigin::default(), &ImageContents::default(), 0).in_phase(ImagePhase::InUse)
    }

    fn in_phase(self, phase: ImagePhase) -> Self {
        Self { phase, ..self }
    }

    /// Returns the header of these contents, whose encoding has this checksum.
    #[must_use]
    pub const fn of(
        identity: MemoryIdentity,
        origin: ImageOrigin,
        contents: &ImageContents,
        contents_checksum: u64,
    ) -> Self {
        let (objects, withheld) = (contents.objects.len() as u64, contents.withheld.len() as u64);
        let (members, outstanding) = (contents.members.len() as u64, contents.outstanding.len() as u64);
        let (phase, next_version) = (ImagePhase::Writing, contents.next_version);
        Self { identity, phase, origin, objects, withheld, members, outstanding, next_version, contents_checksum }
    }

    /// Returns the length of the contents, in bytes; `None` if it is beyond all memory.
    #[must_use]
    pub const fn contents_bytes(&self) -> Option<u64> {
        let Some(bytes) = self.objects.checked_mul(OBJECT_BYTES as u64) else { return None };
        let mut bytes = bytes;
        let others =
            [(self.withheld, EXTENT_BYTES), (self.members, MEMBER_BYTES), (self.outstanding, OUTSTANDING_BYTES)];
        let mut at = 0;
        while at < others.len() {
            let (count, each) = others[at];
            let Some(more) = count.checked_mul(each as u64) else { return None };
            let Some(sum) = bytes.checked_add(more) else { return None };
            (bytes, at) = (sum, at + 1);
        }
        Some(bytes)
    }

    /// Returns the number of objects.
    #[must_use]
    pub const fn objects(&self) -> u64 {
        self.objects
    }

    /// Encodes the header.
    ///
    /// # Panics
    /// If the name of the cluster has more than 255 bytes: limits are checked before anything is encoded.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let MemoryIdentity { uuid, cluster, node, shard, shards, pool_bytes, unit_bytes } = &self.identity;
        let ImageOrigin { incarnation, state, epoch, opening } = self.origin;
        let mut out = vec![0; HEADER_BYTES];
        put(&mut out, 0, &MAGIC);
        put(&mut out, FORMAT_AT, &FORMAT.to_le_bytes());
        put(&mut out, PHASE_AT, &(self.phase as u32).to_le_bytes());
        put(&mut out, UUID_AT, &uuid.to_le_bytes());
        put(&mut out, NODE_AT, &node.0.to_le_bytes());
        put(&mut out, SHARD_AT, &shard.0.to_le_bytes());
        put(&mut out, SHARDS_AT, &shards.to_le_bytes());
        out[CLUSTER_BYTES_AT] = u8::try_from(cluster.len()).expect("a name within its limit");
        let numbers = [
            *pool_bytes,
            *unit_bytes,
            incarnation.0,
            state,
            epoch.0,
            opening,
            self.objects,
            self.withheld,
            self.members,
            self.outstanding,
            self.next_version.0,
            self.contents_checksum,
        ];
        numbers.iter().enumerate().for_each(|(at, word)| put(&mut out, NUMBERS_AT + 8 * at, &word.to_le_bytes()));
        put(&mut out, CLUSTER_AT, cluster.as_bytes());
        let checksum = header_checksum(&out);
        put(&mut out, CHECKSUM_AT, &checksum.to_le_bytes());
        out
    }

    /// Decodes a header, of an image in any phase.
    ///
    /// # Errors
    /// `Magic`, `Format` or `Header`.
    pub fn decode(bytes: &[u8]) -> Result<Self, ImageError> {
        if bytes.len() < HEADER_BYTES || bytes[..MAGIC.len()] != MAGIC {
            return Err(ImageError::Magic);
        }
        let format = word32(bytes, FORMAT_AT);
        if format != FORMAT {
            return Err(ImageError::Format { found: format });
        }
        let phase = match word32(bytes, PHASE_AT) {
            1 => ImagePhase::InUse,
            2 => ImagePhase::Writing,
            3 => ImagePhase::Complete,
            _ => return Err(ImageError::Header),
        };
        let number = |at: usize| word64(bytes, NUMBERS_AT + 8 * at);
        let cluster = &bytes[CLUSTER_AT..][..usize::from(bytes[CLUSTER_BYTES_AT])];
        let cluster = core::str::from_utf8(cluster).map_err(|_| ImageError::Header)?.to_owned();
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let uuid = u128::from(word64(bytes, UUID_AT)) | u128::from(word64(bytes, UUID_AT + 8)) << 64;
        let header = Self {
            identity: MemoryIdentity {
                uuid,
                cluster,
                node: NodeId(word64(bytes, NODE_AT)),
                shard: ShardId(half(SHARD_AT)),
                shards: half(SHARDS_AT),
                pool_bytes: number(0),
                unit_bytes: number(1),
            },
            phase,
            origin: ImageOrigin {
                incarnation: Incarnation(number(2)),
                state: number(3),
                epoch: Epoch(number(4)),
                opening: number(5),
            },
            objects: number(6),
            withheld: number(7),
            members: number(8),
            outstanding: number(9),
            next_version: Version(number(10)),
            contents_checksum: number(11),
        };
        // Padding and the rest of the name are zeros, so that the checksum covers all of it.
        if word64(bytes, CHECKSUM_AT) == header_checksum(bytes) { Ok(header) } else { Err(ImageError::Header) }
    }

    /// Checks that the image is complete.
    ///
    /// # Errors
    /// `InUse` or `Unfinished`.
    pub const fn check_complete(&self) -> Result<(), ImageError> {
        match self.phase {
            ImagePhase::InUse => Err(ImageError::InUse),
            ImagePhase::Writing => Err(ImageError::Unfinished),
            ImagePhase::Complete => Ok(()),
        }
    }

    /// Decodes the contents.
    ///
    /// # Errors
    /// `Contents`.
    pub fn decode_contents(&self, bytes: &[u8]) -> Result<ImageContents, ImageError> {
        let is_whole = self.contents_bytes() == Some(bytes.len() as u64);
        if !is_whole || payload_checksum(bytes) != self.contents_checksum {
            return Err(ImageError::Contents);
        }
        let (objects, bytes) = bytes.split_at(self.objects as usize * OBJECT_BYTES);
        let (withheld, bytes) = bytes.split_at(self.withheld as usize * EXTENT_BYTES);
        let (members, outstanding) = bytes.split_at(self.members as usize * MEMBER_BYTES);
        let objects: Option<Vec<KeptObject>> = objects.chunks_exact(OBJECT_BYTES).map(KeptObject::decode).collect();
        let extent = |bytes: &[u8]| Extent { offset: word64(bytes, 0), bytes: word64(bytes, 8) };
        let withheld = withheld.chunks_exact(EXTENT_BYTES).map(extent).collect();
        let member = |bytes: &[u8]| (NodeId(word64(bytes, 0)), Incarnation(word64(bytes, 8)));
        let members = members.chunks_exact(MEMBER_BYTES).map(member).collect();
        let outstanding: Option<_> =
            outstanding.chunks_exact(OUTSTANDING_BYTES).map(OutstandingReplica::decode).collect();
        let (objects, outstanding) = (objects.ok_or(ImageError::Contents)?, outstanding.ok_or(ImageError::Contents)?);
        Ok(ImageContents { objects, withheld, members, outstanding, next_version: self.next_version })
    }
}

/// Returns the checksum of a header, without its phase and its checksum.
fn header_checksum(bytes: &[u8]) -> u64 {
    let (before, after) = (&bytes[..PHASE_AT], &bytes[PHASE_AT + 4..CHECKSUM_AT]);
    joined_payload_checksum(payload_checksum(before), payload_checksum(after), after.len() as u64)
}

impl ImageContents {
    /// Keeps the objects for which `is_kept` returns true. The extents of the others are withheld where a process may
    /// still read them, in a pool with this unit.
    pub fn retain(&mut self, unit_bytes: u64, is_kept: impl Fn(&KeptObject) -> bool) {
        for dropped in self.objects.extract_if(.., |object| !is_kept(object)).filter(|object| object.lent) {
            let bytes = dropped.granules(unit_bytes).saturating_mul(GRANULE_BYTES);
            self.withheld.push(Extent { offset: dropped.extent.offset, bytes });
        }
    }

    /// Returns the length of the encoding, in bytes.
    #[must_use]
    pub const fn encoded_bytes(&self) -> u64 {
        let replication = self.members.len() * MEMBER_BYTES + self.outstanding.len() * OUTSTANDING_BYTES;
        (self.objects.len() * OBJECT_BYTES + self.withheld.len() * EXTENT_BYTES + replication) as u64
    }

    /// Passes the encoding to `emit`, piece by piece, and returns its checksum.
    pub fn encode(&self, mut emit: impl FnMut(&[u8])) -> u64 {
        let (mut checksum, mut piece) = (0, Vec::with_capacity(ENCODED_AT_ONCE * OBJECT_BYTES));
        let mut pass = |piece: &mut Vec<u8>| {
            checksum = joined_payload_checksum(checksum, payload_checksum(piece), piece.len() as u64);
            emit(piece);
            piece.clear();
        };
        for objects in self.objects.chunks(ENCODED_AT_ONCE) {
            objects.iter().for_each(|object| object.encode(&mut piece));
            pass(&mut piece);
        }
        for extents in self.withheld.chunks(ENCODED_AT_ONCE) {
            for Extent { offset, bytes } in extents {
                piece.extend_from_slice(&offset.to_le_bytes());
                piece.extend_from_slice(&bytes.to_le_bytes());
            }
            pass(&mut piece);
        }
        for (node, incarnation) in &self.members {
            piece.extend_from_slice(&node.0.to_le_bytes());
            piece.extend_from_slice(&incarnation.0.to_le_bytes());
        }
        pass(&mut piece);
        for removals in self.outstanding.chunks(ENCODED_AT_ONCE) {
            removals.iter().for_each(|removal| removal.encode(&mut piece));
            pass(&mut piece);
        }
        checksum
    }
}

/// Flags of an encoded object.
const HARD_PIN: u8 = 1;
const HEAD: u8 = 2;
const WANTED: u8 = 4;
const PROTECTED: u8 = 8;
const LENT: u8 = 16;
const PAGED: u8 = 32;
const REPLICA: u8 = 64;
const FLAGS: u8 = HARD_PIN | HEAD | WANTED | PROTECTED | LENT | PAGED | REPLICA;

impl OutstandingReplica {
    fn encode(&self, out: &mut Vec<u8>) {
        let ShardKey { node, incarnation, shard } = self.owner;
        out.extend_from_slice(&self.digest.0.to_le_bytes());
        [node.0, incarnation.0, shard.0.into()].iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
    }

    /// Decodes a removal; `None` if there is no such shard.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let shard = ShardId(u16::try_from(word64(bytes, 32)).ok()?);
        let (node, incarnation) = (NodeId(word64(bytes, 16)), Incarnation(word64(bytes, 24)));
        let digest = Digest(u128::from(word64(bytes, 0)) | u128::from(word64(bytes, 8)) << 64);
        Some(Self { digest, owner: ShardKey { node, incarnation, shard } })
    }
}

impl KeptObject {
    /// Returns the granules that the object takes in a pool with this unit.
    pub(crate) fn granules(&self, unit_bytes: u64) -> u64 {
        let granules = granules_of(self.extent.bytes) + u64::from(self.extra_granules);
        granules.next_multiple_of(unit_bytes / GRANULE_BYTES)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let flag = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
        let flags = flag(self.hard_pin, HARD_PIN)
            | flag(self.head, HEAD)
            | flag(self.wanted, WANTED)
            | flag(self.protected, PROTECTED)
            | flag(self.lent, LENT)
            | flag(self.tail.page_class.is_some(), PAGED)
            | flag(self.replica, REPLICA);
        out.extend_from_slice(&self.digest.0.to_le_bytes());
        let numbers = [
            self.version.0,
            self.checksum,
            self.extent.offset,
            self.extent.bytes,
            self.tail.offset,
            self.tail.checksum,
            self.group,
            self.soft_pin_ns,
        ];
        numbers.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
        out.extend_from_slice(&self.tenant.to_le_bytes());
        out.extend_from_slice(&self.tail.bytes.to_le_bytes());
        let class = self.tail.page_class.unwrap_or(0);
        let replication = [self.copies, self.at.bits(), 0, 0];
        out.extend_from_slice(&[flags, self.priority.nibble(), self.extra_granules, class]);
        out.extend_from_slice(&replication);
    }

    /// Decodes an object; `None` if a field has an unknown value.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| word64(bytes, 16 + 8 * at);
        let [flags, priority, extra_granules, class, copies, at, rest @ ..] = bytes.get(88..OBJECT_BYTES)? else {
            return None;
        };
        let at = ReplicaSet::from_bits(*at)?;
        if flags & !FLAGS != 0 || *priority > 0xf || rest.iter().any(|byte| *byte != 0) {
            return None;
        }
        let is = |bit: u8| flags & bit != 0;
        let page_class = is(PAGED).then_some(*class);
        (is(PAGED) || *class == 0).then(|| Self {
            digest: Digest(u128::from(word64(bytes, 0)) | u128::from(word64(bytes, 8)) << 64),
            version: Version(number(0)),
            checksum: number(1),
            extent: Extent { offset: number(2), bytes: number(3) },
            extra_granules: *extra_granules,
            tail: TailPlace { page_class, offset: number(4), bytes: word32(bytes, 84), checksum: number(5) },
            tenant: word32(bytes, 80),
            group: number(6),
            soft_pin_ns: number(7),
            priority: ObjectPriority::from_nibble(*priority),
            hard_pin: is(HARD_PIN),
            head: is(HEAD),
            wanted: is(WANTED),
            protected: is(PROTECTED),
            lent: is(LENT),
            replica: is(REPLICA),
            copies: *copies,
            at,
        })
    }
}

fn put(out: &mut [u8], at: usize, bytes: &[u8]) {
    out[at..at + bytes.len()].copy_from_slice(bytes);
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(core::array::from_fn(|byte| bytes[at + byte]))
}

fn word64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(core::array::from_fn(|byte| bytes[at + byte]))
}

#[cfg(test)]
mod tests;

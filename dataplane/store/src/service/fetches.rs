//! Requests to other shards, which the host sends, and their outcomes.

use kvplane_proto::ids::{Epoch, Slot, Version};
use kvplane_proto::map::ShardKey;
use kvplane_proto::message::{ObjectPriority, PageQuery};
use kvplane_proto::{Digest, Status};

use super::types::MemoryExtent;

/// Limits of background fetching.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FetchLimits {
    /// Bytes a second; 0 for none: objects are then fetched only when a request needs them.
    pub bytes_per_s: u64,
    /// Most objects in flight.
    pub objects: usize,
    /// Most bytes in flight. One object may be larger.
    pub bytes: u64,
    /// Read bandwidth from which an object is hot and gets a replica at the replica owner of its slot, in bytes a
    /// second; 0 for never.
    pub hot_bytes_per_s: u64,
}

impl Default for FetchLimits {
    fn default() -> Self {
        Self { bytes_per_s: 512 << 20, objects: 16, bytes: 32 << 20, hot_bytes_per_s: 256 << 20 }
    }
}

/// Request to another shard.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fetch {
    /// Token to return with the answer.
    pub token: u64,
    /// Shard to send the request to.
    pub source: ShardKey,
    /// Content of the request.
    pub want: Want,
}

/// Content of a request to another shard.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Want {
    /// Sizes of these objects, or that they do not exist.
    Sizes(Vec<Digest>),
    /// Description of this object, by a list.
    Describe(Digest),
    /// Bytes of this object, into the pool.
    Object(Digest, MemoryExtent),
    /// Bytes of this object from another owner of its slot: into its place in the pool where they are damaged, or where
    /// its damaged record on the SSD had them.
    Repair(Digest, MemoryExtent),
    /// Description of this object by another owner of its slot, by a list: its record on the SSD is damaged.
    DescribeCopy(Digest),
    /// Page of the objects of exported slots, or of the changes there. The digest names the shard by one of its slots.
    List(Digest, PageQuery),
    /// Drop of these objects.
    Drop(Vec<Digest>),
    /// End of all exports to this shard by the map of this epoch, or an earlier one: everything was imported. Some of
    /// their slots name the shard.
    EndExports(Vec<Slot>, Epoch),
    /// Write of this object, from the pool, to a replica owner.
    Copy {
        digest: Digest,
        /// Extent of its bytes.
        extent: MemoryExtent,
        /// Offset of its tail, if it has one: see [`super::copy_of`].
        tail_at: Option<u64>,
        /// True if it is a stripe head.
        is_head: bool,
        /// Its present priority.
        priority: ObjectPriority,
        /// Number of replicas that it is to have, the owner's included.
        replicas: u8,
        version: Version,
        /// Checksum that its bytes are to have.
        checksum: u64,
    },
    /// Drop of the replicas that a replica owner has of these. A digest whose bits below the slot are zero means all
    /// of the slot.
    DropCopies(Vec<Digest>),
}

/// Outcome of a request to another shard.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FetchDone {
    /// The request failed.
    Failed(Status),
    /// Status and size of each object.
    Sizes(Vec<(Status, u64)>),
    /// Page of keys.
    Page(Vec<u8>),
    /// The object was received: its length, and the checksum of its bytes.
    Object(u64, u64),
    /// The objects were dropped, or the exports ended.
    Dropped,
    /// The replica was written.
    Copied,
    /// Replicas that are gone, by object.
    CopiesDropped(Vec<bool>),
}

//! Questions to other shards, which the host asks, and how they end.

use kvplane_proto::ids::Version;
use kvplane_proto::map::ShardKey;
use kvplane_proto::message::PageQuery;
use kvplane_proto::{Digest, Status};

use super::types::Place;

/// How much is fetched in the background.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FetchLimits {
    /// Bytes a second; 0 for nothing: then objects come only when they are asked for.
    pub bytes_per_s: u64,
    /// Objects at the same time.
    pub objects: usize,
    /// Their bytes. One object may be larger.
    pub bytes: u64,
    /// An object of which more is given in a second gets a copy at the replica owner of its slot; 0: none does.
    pub hot_bytes_per_s: u64,
}

impl Default for FetchLimits {
    fn default() -> Self {
        Self { bytes_per_s: 512 << 20, objects: 16, bytes: 32 << 20, hot_bytes_per_s: 256 << 20 }
    }
}

/// A question to a former owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fetch {
    /// To be given back with the answer.
    pub token: u64,
    /// Whom to ask.
    pub source: ShardKey,
    /// For what.
    pub want: Want,
}

/// What is asked of a former owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Want {
    /// Which of these are there, and how long.
    Sizes(Vec<Digest>),
    /// The description of this object, by a list.
    Describe(Digest),
    /// This object, into the pool.
    Object(Digest, Place),
    /// A page of what left with its slot, or of what changed there while it was this owner's. The digest says which
    /// shard is meant.
    List(Digest, PageQuery),
    /// That it drops these.
    Drop(Vec<Digest>),
    /// That it takes this object as the replica owner, out of the pool: whose tail is there, and which version it is.
    Copy {
        /// Which.
        digest: Digest,
        /// Where it is.
        place: Place,
        /// Where its tail is, if it has one: see [`super::copy_of`].
        tail_at: Option<u64>,
        /// Whether it names the stripes of a larger object.
        is_head: bool,
        /// Which version of it.
        version: Version,
    },
    /// That it drops the copies that it has as the replica owner of these. A digest of zeros below the slot means all
    /// of the slot.
    DropCopies(Vec<Digest>),
}

/// How a question ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FetchDone {
    /// Not at all.
    Failed(Status),
    /// What is there of each object.
    Sizes(Vec<(Status, u64)>),
    /// A page of keys.
    Page(Vec<u8>),
    /// The object is in place: its length, and what its bytes sum to.
    Object(u64, u64),
    /// They are dropped.
    Dropped,
    /// The copy is there.
    Copied,
    /// Which of the copies are gone.
    CopiesDropped(Vec<bool>),
}

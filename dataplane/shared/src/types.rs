//! Inputs and outputs of a shared tier: operations on the store, events, maps, and objects.

use core::fmt;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, Version};
use kvplane_proto::map::ShardKey;
use kvplane_tier::SlotSet;

/// Id of an operation on the store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct OpId(pub u64);

/// Part of a store object to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum GetRange {
    /// All of it.
    Whole,
    /// Its last bytes: this many, or all.
    Suffix { bytes: u64 },
    /// A range. The driver returns the checksum of its first `checked` bytes.
    Bounded { offset: u64, bytes: u64, checked: u64 },
}

/// Operation on the store. Names are relative to the place of the cluster in the store.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Operation {
    /// Writes an object as a whole: readers see all of it, or what was there before.
    Put {
        name: String,
        bytes: Arc<Vec<u8>>,
    },
    Get {
        name: String,
        range: GetRange,
    },
    /// Lists the objects whose names begin with these path segments.
    List {
        prefix: String,
    },
    /// Returns when an object was written, by the store's clock.
    Stat {
        name: String,
    },
    /// Deletes an object; succeeds if there is none.
    Delete {
        name: String,
    },
}

impl Operation {
    /// Returns true for operations that change the store.
    #[must_use]
    pub const fn is_write(&self) -> bool {
        matches!(self, Self::Put { .. } | Self::Delete { .. })
    }
}

/// Object of a list.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ListedObject {
    pub name: String,
    pub bytes: u64,
    /// Time at which it was written, by the store's clock, in milliseconds.
    pub written_ms: u64,
}

/// Result of an operation that succeeded.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Outcome {
    /// A put or a deletion is done.
    Done,
    /// Bytes of a get, with the checksum of those that were to be checked.
    Bytes {
        bytes: Vec<u8>,
        checksum: u64,
    },
    Listed(Vec<ListedObject>),
    /// Time at which an object was written, by the store's clock, in milliseconds.
    Written {
        at_ms: u64,
    },
}

/// Reason why an operation on the store failed.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum StoreError {
    /// There is no object of this name.
    NotFound,
    /// The place of the store is missing: the bucket, or the directory with its file system. Nothing is known of its
    /// objects.
    Absent { reason: String },
    /// The store denies access: credentials or permissions are missing.
    Denied { reason: String },
    /// The store asks to send less.
    Throttled { reason: String },
    /// The operation did not end by its deadline.
    Deadline { waited_ms: u64 },
    /// The store has no space left, or a quota is used up.
    NoSpace { reason: String },
    /// The file system is read-only.
    ReadOnly { reason: String },
    /// A read returned another number of bytes.
    Short { expected: u64, found: u64 },
    /// Anything else.
    Other { reason: String },
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound => f.write_str("there is no such object"),
            Self::Absent { reason } => write!(f, "its place is missing: {reason}"),
            Self::Denied { reason } => write!(f, "access is denied: {reason}"),
            Self::Throttled { reason } => write!(f, "it is throttled: {reason}"),
            Self::Deadline { waited_ms } => write!(f, "no answer within {waited_ms} ms"),
            Self::NoSpace { reason } => write!(f, "there is no space left: {reason}"),
            Self::ReadOnly { reason } => write!(f, "it is read-only: {reason}"),
            Self::Short { expected, found } => write!(f, "{found} bytes instead of {expected}"),
            Self::Other { reason } => f.write_str(reason),
        }
    }
}

impl std::error::Error for StoreError {}

/// Source of a slot's index: the owner before this shard.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct SlotSource {
    pub owner: ShardKey,
    /// Slots to take over, by the epoch from which the owner had them without a break.
    pub slots: BTreeMap<Epoch, SlotSet>,
    pub rule: SourceRule,
}

/// Condition under which the manifest of a former owner counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum SourceRule {
    /// It had the slots until epoch `since`, and is not a member any more.
    Gone { since: Epoch },
    /// The same, but it is a member: it has to release the slots first. It counts as gone as soon as a map lacks it.
    Alive { since: Epoch },
    /// The former incarnation of this shard, which had the slots until it ended.
    Restarted,
}

/// Change of the slots that a shard owns, by a map.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MapChange {
    /// Cluster state that the epochs belong to.
    pub state: u64,
    /// Epoch of the map.
    pub epoch: Epoch,
    /// Epoch in which the map's layout began.
    pub since: Epoch,
    /// Slots that the shard owns.
    pub owned: SlotSet,
    /// True if the shard may have lost slots and got them back unnoticed.
    pub missed: bool,
    /// Former owners of slots of `owned`; slots that the shard had all the while are not looked up.
    pub sources: Vec<SlotSource>,
    /// Members of the map, in their present incarnations.
    pub members: BTreeSet<(NodeId, Incarnation)>,
}

/// Object to be uploaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct NewObject<'a> {
    pub digest: Digest,
    pub version: Version,
    /// Length of the payload.
    pub bytes: u32,
    /// CRC-64 of the payload, as its writer stated it; 0 if it stated none.
    pub checksum: u64,
    /// Key and options, as they are stored behind an object in memory.
    pub tail: &'a [u8],
    pub tenant: u32,
    /// True if it is the head of a striped object.
    pub is_head: bool,
    /// True if the object is to have a replica.
    pub is_replicated: bool,
}

/// Object of the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct SharedView {
    pub digest: Digest,
    pub version: Version,
    pub bytes: u32,
    pub tail_bytes: u16,
    pub tenant: u32,
    pub is_head: bool,
    pub is_replicated: bool,
}

/// Object of the host, in memory or on an SSD, beside one that a former owner has uploaded. Versions of two shards
/// cannot be compared: a replica, or an object that was migrated, has one that its present shard gave it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeldObject {
    /// The host has no such object.
    Absent,
    /// Version with the same bytes.
    Same(Version),
    /// Version with other bytes, which is newer: the host serves it.
    Other,
}

/// Reason why a call was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Later: a limit is reached.
    Busy,
    /// The store fails, and is left alone for a while.
    Paused,
    /// The index has no such object.
    NotHere,
    /// The bytes differ from the checksum that their writer stated.
    Corrupt,
}

/// Event for the host.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum SharedEvent {
    /// An object was read: its payload, and its tail behind it. Both equal their checksums.
    Read { token: u64, version: Version, checksum: u64, bytes: Vec<u8> },
    /// An object could not be read.
    Missed { token: u64 },
    /// A removal is in the log, or the store did not take it.
    Removed { token: u64, is_written: bool },
    /// The store fails from now on.
    Failing { error: StoreError },
    /// The store works again.
    Works,
    /// The index of so many slots was taken over from former owners, with so many objects.
    TakenOver { slots: u64, objects: u64 },
    /// A takeover of so many slots waits for this object of the store, or for a list of these names; reported once for
    /// objects that are missing, and once for a store that fails. Gets of the slots' objects miss meanwhile.
    Waiting { slots: u64, name: String, error: StoreError },
    /// Contents of so many slots in the store are void: the reason says why.
    Void { slots: u64, reason: VoidReason },
    /// The index has no room for more objects: none is uploaded until it has.
    IndexFull { objects: u64 },
    /// Bytes of an object are not what was written, and this many were not in all. The first one is reported, and one
    /// whenever the number has doubled.
    Damaged { name: String, count: u64 },
}

/// Reason why the contents of slots are void.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum VoidReason {
    /// The former owner left no manifest: it had no shared tier, or the store never worked for it.
    NoManifest,
    /// The manifest is not of the layout in which the former owner had the slots last.
    Outdated,
    /// The former owner did not release the slots in time.
    NotReleased,
    /// An object that the former owner has written is missing, or shorter than the store's list says.
    Missing { name: String },
    /// An object that the former owner has written has other bytes.
    Damaged { name: String },
    /// The store failed all the while.
    Unreadable { error: StoreError },
    /// Too many objects were put or removed meanwhile.
    TooManyChanges,
}

impl fmt::Display for VoidReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoManifest => f.write_str("the former owner has left no manifest"),
            Self::Outdated => f.write_str("the former owner's manifest is older than its ownership of them"),
            Self::NotReleased => f.write_str("the former owner did not release them in time"),
            Self::Missing { name } => write!(f, "{name} is missing"),
            Self::Damaged { name } => write!(f, "{name} is not what was written"),
            Self::Unreadable { error } => write!(f, "the former owner's objects cannot be read: {error}"),
            Self::TooManyChanges => f.write_str("too many objects were put or removed while they were taken over"),
        }
    }
}

impl VoidReason {
    /// Returns true if the store lost or changed what it had, or failed: something for an operator to look at.
    #[must_use]
    pub const fn is_fault_of_store(&self) -> bool {
        matches!(self, Self::Missing { .. } | Self::Damaged { .. } | Self::Unreadable { .. })
    }
}

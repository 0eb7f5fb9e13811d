//! Reports of a shard about its objects: their events, and the progress of their replicas.

use crate::digest::Digest;

/// Event of an object in a tier. Tags of the enums are append-only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "bincode", derive(bincode::Encode, bincode::Decode))]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ObjectEvent {
    pub change: ObjectChange,
    pub medium: ObjectMedium,
    /// Digest of the object; 0 for all objects.
    pub digest: Digest,
    /// Size of the object in bytes, if it is present.
    pub bytes: u64,
}

/// Change of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "bincode", derive(bincode::Encode, bincode::Decode))]
pub enum ObjectChange {
    /// The object is present.
    Stored,
    /// The object is absent.
    Removed,
    /// All objects are absent.
    Cleared,
}

/// Medium that an object is stored on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "bincode", derive(bincode::Encode, bincode::Decode))]
pub enum ObjectMedium {
    /// The shard's pool.
    Memory,
    /// The shard's SSD.
    Ssd,
}

/// Progress of an object's replica, as reported by the object's owner. Tags are append-only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "bincode", derive(bincode::Encode, bincode::Decode))]
pub enum ReplicaProgress {
    /// The shard or node is not the object's owner: its slot migrates.
    #[default]
    Elsewhere,
    /// The object does not exist.
    Missing,
    /// No other node can have a replica: the slot has no replica owner.
    Alone,
    /// The replica is being made, or will be, or the owner could not be reached.
    Coming,
    /// The replica owner has a replica. It may have evicted it since.
    There {
        /// Size of the object in bytes.
        bytes: u64,
    },
}

//! Errors of the P2P store; those of calls to the control plane and of transfers have variants of their own.

use std::fmt;

use kvplane_cluster::p2p::{MAX_RANKS, ObjectError};
use kvplane_proto::Limits;

use super::reshard::ReshardingError;

/// Reason why the P2P store of this process does not do what a call requests.
#[derive(Debug)]
#[non_exhaustive]
pub enum P2pError {
    /// The object is not held here.
    NotHeld {
        /// Name of the object.
        name: String,
    },
    /// The version of the object is held here already, or another call registers it.
    HeldAlready {
        /// Name of the object.
        name: String,
        /// Version of the object.
        version: u64,
    },
    /// The version of the object is held here already, and the replica cannot be widened by this get.
    NotWidened {
        /// Name of the object.
        name: String,
        /// Version of the object.
        version: u64,
        /// Obstacle.
        why: WideningError,
    },
    /// Another call fetches the object.
    BeingFetched {
        /// Name of the object.
        name: String,
    },
    /// Another call gives the replica of the object up.
    BeingGivenUp {
        /// Name of the object.
        name: String,
    },
    /// The system started no thread for a fetch.
    NoThread,
    /// The layout or the description of an object contradicts itself, or is over a limit.
    Object(ObjectError),
    /// An object has more buffers than a store can register.
    Buffers {
        /// Number of buffers.
        buffers: usize,
    },
    /// The number of given buffers is not that of the object.
    BufferCount {
        /// Name of the object.
        name: String,
        /// Number of buffers of the object.
        buffers: usize,
        /// Number of buffers that are given.
        given: usize,
    },
    /// A given buffer has another length than that of the object.
    BufferBytes {
        /// Name of the object.
        name: String,
        /// Index of the buffer.
        buffer: usize,
        /// Length of the object's buffer.
        bytes: u64,
        /// Length of the given buffer.
        given_bytes: u64,
    },
    /// An object is to be read into memory that is read-only.
    ReadOnlyMemory {
        /// Address of the memory.
        address: u64,
    },
    /// Requested shards are not within the object.
    Shards {
        /// First requested shard.
        first: u32,
        /// Number of requested shards.
        count: u32,
        /// Number of shards of the object.
        shards: u32,
    },
    /// There is no such rank.
    Rank {
        /// Number of the rank.
        rank: u32,
        /// Number of ranks.
        ranks: u32,
    },
    /// A rank requests some shards of an object only.
    ShardsOfRank,
    /// The rank that is to be followed holds the object in another number of buffers.
    ParentBuffers {
        /// Segment of the parent.
        segment: String,
        /// Number of the parent's buffers.
        buffers: usize,
        /// Number of buffers of this rank.
        our_buffers: usize,
    },
    /// A range is not within a buffer of an object.
    BufferRange {
        /// Name of the object.
        name: String,
        /// Index of the buffer.
        buffer: usize,
        /// Length of the buffer.
        buffer_bytes: u64,
        /// Begin of the range.
        offset: u64,
        /// Length of the range.
        bytes: u64,
    },
    /// A range is not within the memory to read into.
    MemoryRange {
        /// Length of the memory.
        memory_bytes: u64,
        /// Begin of the range.
        offset: u64,
        /// Length of the range.
        bytes: u64,
    },
    /// Placements, or the locations of bytes, do not allow resharding.
    Resharding(ReshardingError),
}

impl fmt::Display for P2pError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotHeld { name } => write!(f, "object {name:?} is not held here"),
            Self::HeldAlready { name, version } => {
                write!(f, "version {version} of object {name:?} is held here already, or being taken")
            }
            Self::NotWidened { name, version, why } => {
                write!(f, "version {version} of object {name:?} is held here already, {why}")
            }
            Self::BeingFetched { name } => write!(f, "object {name:?} is being fetched: wait for that to end"),
            Self::BeingGivenUp { name } => write!(f, "object {name:?} is being given up: wait for that to end"),
            Self::NoThread => f.write_str("no thread could be started for the fetch"),
            Self::Object(error) => write!(f, "{error}"),
            Self::Buffers { buffers } => write!(
                f,
                "{buffers} buffers: a store registers at most {} for all its objects; put several in one piece of \
                 memory",
                Limits::REGIONS_PER_SEGMENT
            ),
            Self::BufferCount { name, buffers, given } => {
                write!(f, "object {name:?} does not fit: it has {buffers} buffers, but {given} are given")
            }
            Self::BufferBytes { name, buffer, bytes, given_bytes } => write!(
                f,
                "object {name:?} does not fit: buffer {buffer} has {bytes} bytes, but {given_bytes} are given"
            ),
            Self::ReadOnlyMemory { address } => write!(f, "the memory at {address:#x} cannot be written"),
            Self::Shards { first, count, shards } => {
                write!(f, "{count} shards from {first} on are not within the object's {shards}")
            }
            Self::Rank { rank, ranks } => {
                write!(f, "rank {rank} of {ranks}: ranks count from 0, and there are 1 to {MAX_RANKS}")
            }
            Self::ShardsOfRank => f.write_str("ranks fetch all of an object: name no shards, or no rank"),
            Self::ParentBuffers { segment, buffers, our_buffers } => {
                write!(f, "{segment} has {buffers} buffers of {our_buffers}")
            }
            Self::BufferRange { name, buffer, buffer_bytes, offset, bytes } => {
                write!(f, "buffer {buffer} of {name:?} has {buffer_bytes} bytes, not {bytes} bytes from {offset} on")
            }
            Self::MemoryRange { memory_bytes, offset, bytes } => {
                write!(f, "the memory has {memory_bytes} bytes, not {bytes} bytes from {offset} on")
            }
            Self::Resharding(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for P2pError {}

/// Reason why a get does not widen the replica of its object that is held here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum WideningError {
    /// The object was registered here, and is complete.
    Registered,
    /// The replica is in other memory.
    OtherMemory,
    /// The replica is one of an object with other contents.
    OtherObject,
    /// The get is that of a rank.
    Rank,
}

impl fmt::Display for WideningError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Registered => "and was registered: all of it is here",
            Self::OtherMemory => "in other memory: fetch the rest into the same memory, or delete that replica first",
            Self::OtherObject => "and is another object: look it up again",
            Self::Rank => "and ranks fetch all of an object: pass no rank, or delete that replica first",
        })
    }
}

impl std::error::Error for WideningError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_the_object_and_the_numbers() {
        let says = |error: P2pError, text: &str| assert_eq!(error.to_string(), text);
        let name = || "model".to_owned();
        says(
            P2pError::NotWidened { name: name(), version: 3, why: WideningError::OtherObject },
            "version 3 of object \"model\" is held here already, and is another object: look it up again",
        );
        says(
            P2pError::BufferBytes { name: name(), buffer: 1, bytes: 64, given_bytes: 32 },
            "object \"model\" does not fit: buffer 1 has 64 bytes, but 32 are given",
        );
        says(
            P2pError::BufferRange { name: name(), buffer: 0, buffer_bytes: 8, offset: 4, bytes: 5 },
            "buffer 0 of \"model\" has 8 bytes, not 5 bytes from 4 on",
        );
        says(P2pError::Rank { rank: 2, ranks: 2 }, "rank 2 of 2: ranks count from 0, and there are 1 to 65536");
    }
}

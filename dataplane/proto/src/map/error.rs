//! Why bytes or a cluster map are refused. Every error names the number that is wrong and what was expected.

use core::fmt;

use super::{MAX_MAP_SHARDS, MAX_MEMBER_SHARDS, MAX_MEMBERS, MAX_REPLICAS};
use crate::ids::NodeId;

/// Why bytes could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// The bytes end too early.
    Truncated {
        /// Bytes the next field needs.
        wanted_bytes: usize,
        /// Bytes that are left.
        left_bytes: usize,
    },
    /// Bytes follow the last field.
    Trailing {
        /// How many.
        left_bytes: usize,
    },
    /// More bytes than any valid encoding has.
    TooLong {
        /// Length of the input.
        bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// Another kind of data.
    Magic {
        /// The first four bytes.
        found: u32,
        /// What they should be.
        expected: u32,
    },
    /// A format this program does not read.
    Format {
        /// What the bytes say.
        found: u16,
        /// What is read.
        expected: u16,
    },
    /// The bytes were damaged.
    Checksum {
        /// In the bytes.
        stored: u64,
        /// Of the bytes.
        computed: u64,
    },
    /// A field holds a number it must not hold.
    Field {
        /// Which field.
        what: &'static str,
        /// The number.
        found: u64,
    },
    /// A text is not UTF-8.
    Utf8 {
        /// Which text.
        what: &'static str,
    },
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated { wanted_bytes, left_bytes } => {
                write!(f, "{wanted_bytes} bytes are wanted and {left_bytes} are left")
            }
            Self::Trailing { left_bytes } => write!(f, "{left_bytes} bytes follow the last field"),
            Self::TooLong { bytes, limit_bytes } => {
                write!(f, "{bytes} bytes are over the limit of {limit_bytes}")
            }
            Self::Magic { found, expected } => {
                write!(f, "it begins with {found:#010x}, not {expected:#010x}: other data")
            }
            Self::Format { found, expected } => {
                write!(f, "format {found} was written by another version; this one reads format {expected}")
            }
            Self::Checksum { stored, computed } => {
                write!(f, "damaged: checksum {stored:#018x} is stored, {computed:#018x} computed")
            }
            Self::Field { what, found } => write!(f, "{what} cannot be {found}"),
            Self::Utf8 { what } => write!(f, "{what} is not UTF-8"),
        }
    }
}

impl std::error::Error for DecodeError {}

/// Why a map, or a member of one, is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapError {
    /// The bytes are not a map at all.
    Decode(DecodeError),
    /// The number of copies per slot is out of range.
    Replicas {
        /// What the map says.
        found: u8,
    },
    /// Too many members.
    Members {
        /// How many there are.
        found: usize,
    },
    /// Members are not in strictly ascending order of node id, so one id may occur twice.
    Order {
        /// The member that is out of place.
        node: NodeId,
        /// The one before it.
        after: NodeId,
    },
    /// One member has too many shards.
    Shards {
        /// The member.
        node: NodeId,
        /// How many shards it has.
        found: usize,
    },
    /// All members together have too many shards.
    MapShards {
        /// How many there are.
        found: usize,
    },
    /// The former layout is over a limit or not in order.
    Former {
        /// How many claims it has.
        claims: usize,
    },
    /// A member claims slots but has no shard to own them.
    NoShards {
        /// The member.
        node: NodeId,
        /// Its weight.
        weight: u32,
    },
    /// A text of a member is too long.
    Text {
        /// The member.
        node: NodeId,
        /// Which text.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
}

impl From<DecodeError> for MapError {
    fn from(error: DecodeError) -> Self {
        Self::Decode(error)
    }
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Decode(error) => write!(f, "cluster map: {error}"),
            Self::Replicas { found } => {
                write!(f, "a cluster keeps 1 to {MAX_REPLICAS} copies per slot, not {found}")
            }
            Self::Members { found } => {
                write!(f, "{found} members are more than the {MAX_MEMBERS} a cluster map holds")
            }
            Self::Order { node, after } => {
                write!(f, "node {node} comes after node {after}: members must ascend by node id")
            }
            Self::Shards { node, found } => {
                write!(f, "node {node} has {found} shards; a member has at most {MAX_MEMBER_SHARDS}")
            }
            Self::MapShards { found } => {
                write!(f, "{found} shards are more than the {MAX_MAP_SHARDS} a cluster map holds")
            }
            Self::Former { claims } => {
                write!(f, "the former layout of {claims} claims is over a limit of a cluster map, or not in order")
            }
            Self::NoShards { node, weight } => {
                write!(f, "node {node} has weight {weight} but no shard: list its shards or set weight 0")
            }
            Self::Text { node, what, bytes, limit_bytes } => {
                write!(f, "the {what} of node {node} is {bytes} bytes long, over the limit of {limit_bytes}")
            }
        }
    }
}

impl std::error::Error for MapError {}

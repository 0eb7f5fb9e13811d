//! Errors of decoding and validating a cluster map. Every error names the invalid number and the expected one.

use core::fmt;

use super::{MAX_MAP_SHARDS, MAX_MEMBER_SHARDS, MAX_MEMBERS, MAX_REPLICAS};
use crate::ids::NodeId;

/// Error of decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// The bytes end before the next field.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Truncated {
        /// Length of the next field.
        wanted_bytes: usize,
        left_bytes: usize,
    },
    /// Bytes follow the last field.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Trailing { left_bytes: usize },
    /// The input is longer than any valid encoding.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    TooLong { bytes: usize, limit_bytes: usize },
    /// The input is another kind of data.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Magic {
        /// First four bytes of the input.
        found: u32,
        expected: u32,
    },
    /// The input has a format version that this program does not read.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Format { found: u16, expected: u16 },
    /// The bytes are damaged.
    Checksum {
        /// Checksum in the input.
        stored: u64,
        /// Checksum of the input.
        computed: u64,
    },
    /// A field has an invalid value.
    Field {
        /// Name of the field.
        what: &'static str,
        /// Value in the input.
        found: u64,
    },
    /// A text is not UTF-8.
    Utf8 {
        /// Name of the text.
        what: &'static str,
    },
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated { wanted_bytes, left_bytes } => {
                write!(f, "truncated: the next field needs {wanted_bytes} bytes and {left_bytes} are left")
            }
            Self::Trailing { left_bytes } => write!(f, "{left_bytes} bytes follow the last field"),
            Self::TooLong { bytes, limit_bytes } => {
                write!(f, "{bytes} bytes are over the limit of {limit_bytes}")
            }
            Self::Magic { found, expected } => {
                write!(f, "wrong kind of data: it begins with {found:#010x}, not {expected:#010x}")
            }
            Self::Format { found, expected } => {
                write!(f, "format {found} was written by another version; this version reads format {expected}")
            }
            Self::Checksum { stored, computed } => {
                write!(f, "damaged: the stored checksum is {stored:#018x}, the computed one {computed:#018x}")
            }
            Self::Field { what, found } => write!(f, "{what} cannot be {found}"),
            Self::Utf8 { what } => write!(f, "{what} is not UTF-8"),
        }
    }
}

impl std::error::Error for DecodeError {}

/// Error of an invalid map, or of an invalid member of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapError {
    /// The bytes are not a map.
    Decode(DecodeError),
    /// The number of replicas per slot is out of range.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Replicas { found: u8 },
    /// The map has too many members.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Members { found: usize },
    /// Members are not in strictly ascending order of node id, so one id may occur twice.
    Order {
        /// Member that is out of order.
        node: NodeId,
        /// Member before it.
        after: NodeId,
    },
    /// A member has too many shards.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Shards { node: NodeId, found: usize },
    /// All members together have too many shards.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    MapShards { found: usize },
    /// The former layout exceeds a limit or is not in order.
    Former {
        /// Number of claims in it.
        claims: usize,
    },
    /// A member has a weight but no shard to own its slots.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    NoShards { node: NodeId, weight: u32 },
    /// A text of a member is too long.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Text {
        node: NodeId,
        /// Name of the text.
        what: &'static str,
        bytes: usize,
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
                write!(f, "a cluster keeps 1 to {MAX_REPLICAS} replicas per slot, not {found}")
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

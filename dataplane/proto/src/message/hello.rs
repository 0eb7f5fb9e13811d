//! The handshake: who speaks, to whom, and which protocol version.
//!
//! A client says [`Hello`] with the cluster, node and shard it believes to reach; the shard answers [`Welcome`] or
//! refuses, so that a reused port of another cluster or another incarnation of the node is noticed before any object
//! moves.

use core::fmt;

use crate::ids::{Epoch, Incarnation, NodeId, ShardId};
use crate::limits::Limits;

/// The asker's side of the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Oldest message version the asker speaks.
    pub version_min: u8,
    /// Newest message version the asker speaks.
    pub version_max: u8,
    /// Random id of the asker, which no other may know: connections that say the same are one asker's.
    pub client: u64,
    /// Which of all connections of the asker this is: no two are named alike. [`Operation::Fence`] names it so.
    ///
    /// [`Operation::Fence`]: crate::message::Operation::Fence
    pub connection: u64,
    /// The node it wants; `NodeId(0)` for any.
    pub node: NodeId,
    /// The incarnation of that node; `Incarnation(0)` for any.
    pub incarnation: Incarnation,
    /// The shard it wants.
    pub shard: ShardId,
    /// Which of its connections to that shard this is.
    pub lane: u16,
    /// Whether the asker is the new owner of slots that the shard had, and asks for what was in them. It is told of
    /// nothing else.
    pub fetches: bool,
    /// Name of the cluster.
    pub cluster: String,
}

/// The shard's side of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Message version to use.
    pub version: u8,
    /// Who answers.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Its shard.
    pub shard: ShardId,
    /// The map epoch it serves by.
    pub epoch: Epoch,
    /// Bytes of the shard's pool: the length of the mapping, over shared memory.
    pub pool_bytes: u64,
}

/// Why a handshake body is not one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelloError {
    /// Shorter or longer than it says.
    Length(usize),
    /// A flag this version does not know.
    Flags(u8),
    /// The cluster's name is not UTF-8.
    Cluster,
}

impl fmt::Display for HelloError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => write!(f, "a handshake of {bytes} bytes is not what it says it is"),
            Self::Flags(found) => write!(f, "unknown flags {found:#x} in a handshake"),
            Self::Cluster => write!(f, "the cluster's name in a handshake is not UTF-8"),
        }
    }
}

impl std::error::Error for HelloError {}

const HELLO_FIXED_BYTES: usize = 1 + 1 + 2 + 2 + 1 + 1 + 8 + 8 + 8 + 8;
/// Flag of a hello: the client is the new owner of slots that left the shard.
const FETCHES: u8 = 1;
const _: () = assert!(Limits::NAME_BYTES <= u8::MAX as usize, "a cluster's name has its length in one byte");
const WELCOME_BYTES: usize = 1 + 5 + 2 + 8 + 8 + 8 + 8;

impl Hello {
    /// Wire form.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.cluster.len() <= Limits::NAME_BYTES, "cluster name of {} bytes", self.cluster.len());
        let mut out = vec![self.version_min, self.version_max];
        out.extend_from_slice(&self.shard.0.to_le_bytes());
        out.extend_from_slice(&self.lane.to_le_bytes());
        out.extend_from_slice(&[self.cluster.len() as u8, if self.fetches { FETCHES } else { 0 }]);
        out.extend_from_slice(&self.client.to_le_bytes());
        out.extend_from_slice(&self.node.0.to_le_bytes());
        out.extend_from_slice(&self.incarnation.0.to_le_bytes());
        out.extend_from_slice(&self.connection.to_le_bytes());
        out.extend_from_slice(self.cluster.as_bytes());
        out
    }

    /// Reads it back.
    ///
    /// # Errors
    /// When the body is not a whole handshake within the limits.
    pub fn decode(body: &[u8]) -> Result<Self, HelloError> {
        let (fixed, name) = body.split_at_checked(HELLO_FIXED_BYTES).ok_or(HelloError::Length(body.len()))?;
        let short = |at: usize| u16::from_le_bytes([fixed[at], fixed[at + 1]]);
        if name.len() != usize::from(fixed[6]) {
            return Err(HelloError::Length(body.len()));
        }
        if fixed[7] & !FETCHES != 0 {
            return Err(HelloError::Flags(fixed[7]));
        }
        Ok(Self {
            version_min: fixed[0],
            version_max: fixed[1],
            shard: ShardId(short(2)),
            lane: short(4),
            client: long(fixed, 8),
            node: NodeId(long(fixed, 16)),
            incarnation: Incarnation(long(fixed, 24)),
            connection: long(fixed, 32),
            fetches: fixed[7] & FETCHES != 0,
            cluster: core::str::from_utf8(name).map_err(|_| HelloError::Cluster)?.to_owned(),
        })
    }
}

impl Welcome {
    /// Wire form.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.version, 0, 0, 0, 0, 0];
        out.extend_from_slice(&self.shard.0.to_le_bytes());
        for word in [self.node.0, self.incarnation.0, self.epoch.0, self.pool_bytes] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Reads it back.
    ///
    /// # Errors
    /// When the body has another length.
    pub fn decode(body: &[u8]) -> Result<Self, HelloError> {
        if body.len() != WELCOME_BYTES {
            return Err(HelloError::Length(body.len()));
        }
        Ok(Self {
            version: body[0],
            shard: ShardId(u16::from_le_bytes([body[6], body[7]])),
            node: NodeId(long(body, 8)),
            incarnation: Incarnation(long(body, 16)),
            epoch: Epoch(long(body, 24)),
            pool_bytes: long(body, 32),
        })
    }
}

fn long(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

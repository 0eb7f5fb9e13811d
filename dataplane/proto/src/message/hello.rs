//! Handshake: ids of client and shard, and the protocol version.
//!
//! The client sends a [`Hello`] with the cluster, node and shard that it expects to reach; the shard answers with a
//! [`Welcome`] or refuses. So a client that reaches a reused port, of another cluster or of another incarnation of the
//! node, fails before any object moves.

use core::fmt;

use crate::ids::{Epoch, Incarnation, NodeId, ShardId};
use crate::limits::Limits;

/// Client's side of the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Oldest message version that the client supports.
    pub version_min: u8,
    /// Newest message version that the client supports.
    pub version_max: u8,
    /// Random id of the client, kept secret from other clients: all connections with this id belong to one client.
    pub client: u64,
    /// Number of this connection, unique among all connections of the client. [`Operation::Fence`] names connections by
    /// it.
    ///
    /// [`Operation::Fence`]: crate::message::Operation::Fence
    pub connection: u64,
    /// Node that the client expects; `NodeId(0)` for any.
    pub node: NodeId,
    /// Incarnation of that node that the client expects; `Incarnation(0)` for any.
    pub incarnation: Incarnation,
    /// Shard that the client expects.
    pub shard: ShardId,
    /// Index of this connection among the client's connections to that shard.
    pub lane: u16,
    /// True if the client is an importer: the new owner of slots that the shard owned, which pulls the objects of these
    /// slots and sees no others.
    pub fetches: bool,
    /// Name of the cluster.
    pub cluster: String,
}

/// Shard's side of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Message version of this connection.
    pub version: u8,
    /// Node of the shard.
    pub node: NodeId,
    /// Incarnation of the node.
    pub incarnation: Incarnation,
    /// Shard that answers.
    pub shard: ShardId,
    /// Epoch of the map that the shard follows.
    pub epoch: Epoch,
    /// Bytes of the shard's pool, which is the length of its mapping over shared memory.
    pub pool_bytes: u64,
}

/// Error of a malformed handshake body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelloError {
    /// The body is shorter or longer than its fields require.
    Length(usize),
    /// A flag is unknown to this version.
    Flags(u8),
    /// The cluster's name is not UTF-8.
    Cluster,
}

impl fmt::Display for HelloError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => write!(f, "a handshake of {bytes} bytes has the wrong length"),
            Self::Flags(found) => write!(f, "unknown flags {found:#x} in a handshake"),
            Self::Cluster => write!(f, "the cluster's name in a handshake is not UTF-8"),
        }
    }
}

impl std::error::Error for HelloError {}

const HELLO_FIXED_BYTES: usize = 1 + 1 + 2 + 2 + 1 + 1 + 8 + 8 + 8 + 8;
/// Flag of a hello from an importer, the new owner of slots that left the shard.
const FETCHES: u8 = 1;
const _: () = assert!(Limits::NAME_BYTES <= u8::MAX as usize, "a cluster's name has its length in one byte");
const WELCOME_BYTES: usize = 1 + 5 + 2 + 8 + 8 + 8 + 8;

impl Hello {
    /// Encodes the hello for the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.cluster.len() <= Limits::NAME_BYTES, "cluster name of {} bytes", self.cluster.len());
        let mut out = vec![self.version_min, self.version_max];
        out.extend_from_slice(&self.shard.0.to_le_bytes());
        out.extend_from_slice(&self.lane.to_le_bytes());
        out.extend_from_slice(&[
            crate::narrowing::length_u8(self.cluster.len()),
            if self.fetches { FETCHES } else { 0 },
        ]);
        out.extend_from_slice(&self.client.to_le_bytes());
        out.extend_from_slice(&self.node.0.to_le_bytes());
        out.extend_from_slice(&self.incarnation.0.to_le_bytes());
        out.extend_from_slice(&self.connection.to_le_bytes());
        out.extend_from_slice(self.cluster.as_bytes());
        out
    }

    /// Decodes a hello.
    ///
    /// # Errors
    /// Returns an error if the body is not a complete handshake within the limits.
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
    /// Encodes the welcome for the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.version, 0, 0, 0, 0, 0];
        out.extend_from_slice(&self.shard.0.to_le_bytes());
        for word in [self.node.0, self.incarnation.0, self.epoch.0, self.pool_bytes] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Decodes a welcome.
    ///
    /// # Errors
    /// Returns an error if the body has another length.
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

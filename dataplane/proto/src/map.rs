//! The cluster map: who is a member, and who owns which slot.
//!
//! Owners follow from the members alone (weighted rendezvous hashing per slot, distinct failure domains), so the map on the
//! wire is only `{epoch, replicas, members}` and every reader computes, and can check, the same owners.

use std::net::SocketAddr;

use crate::ids::{Epoch, Incarnation, NodeId, ShardId};

/// Where one shard listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardAddress {
    /// Data port of this shard.
    pub tcp: SocketAddr,
    /// Path of the Unix socket that hands out shared memory, for peers on the same host.
    pub shm: Option<String>,
}

/// A member that owns slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Stable identity.
    pub node: NodeId,
    /// Which life of the node.
    pub incarnation: Incarnation,
    /// Share of the slots relative to the other members; 0 owns none.
    pub weight: u32,
    /// Two owners of one slot never share a failure domain while there is another choice.
    pub failure_domain: String,
    /// The kernel's boot id: peers with an equal one are on the same host and may use shared memory.
    pub host: String,
    /// One address per shard, in shard order; never empty for a weight above 0.
    pub shards: Vec<ShardAddress>,
}

/// An owner of a slot: a shard of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    /// Index into [`ClusterMap::members`].
    pub member: u16,
    /// Shard within that member.
    pub shard: ShardId,
}

/// What clients route by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterMap {
    /// Version; grows with every change.
    pub epoch: Epoch,
    /// Copies per slot, at least 1.
    pub replicas: u8,
    /// All members, ordered by node id.
    pub members: Vec<Member>,
}

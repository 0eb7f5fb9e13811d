//! Records of a cluster map: its members with their addresses, and the map as a whole, with their limits.

use std::net::SocketAddr;

use super::former::Former;
use super::{
    MAX_FAILURE_DOMAIN_BYTES, MAX_HOST_BYTES, MAX_MAP_SHARDS, MAX_MEMBER_SHARDS, MAX_MEMBERS, MAX_REPLICAS,
    MAX_SHM_PATH_BYTES, MapError,
};
use crate::ids::{Epoch, Incarnation, NodeId, ShardId};

/// Addresses on which a shard listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardAddress {
    /// TCP address of the shard's data port.
    pub tcp: SocketAddr,
    /// Path of the Unix socket that hands out shared memory, for peers on the same host.
    pub shm: Option<String>,
}

/// A member of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Stable id of the node.
    pub node: NodeId,
    /// Present incarnation of the node.
    pub incarnation: Incarnation,
    /// Share of the slots relative to the other members; a member of weight 0 owns none.
    pub weight: u32,
    /// Failure domain: owners of one slot are in different ones if possible.
    pub failure_domain: String,
    /// Boot id of the member's kernel: peers with an equal one are on the same host and may use shared memory.
    pub host: String,
    /// One address per shard, in shard order; never empty for a weight above 0.
    pub shards: Vec<ShardAddress>,
}

/// Owner of a slot: a shard of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    /// Index into [`ClusterMap::members`].
    pub member: u16,
    /// Index of the shard within that member.
    pub shard: ShardId,
}

/// The cluster map, by which clients route requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterMap {
    /// Epoch of the map; grows with every change.
    pub epoch: Epoch,
    /// Replicas per slot, the owner's included; at least 1.
    pub replicas: u8,
    /// All members, ordered by node id.
    pub members: Vec<Member>,
    /// Owners of the slots before the last change of owners.
    pub former: Option<Former>,
}

impl Member {
    /// Checks the counts and texts of this member against the limits of a map.
    ///
    /// # Errors
    /// Returns the node and the value that exceeds its limit.
    pub fn validate(&self) -> Result<(), MapError> {
        let node = self.node;
        let text = |what, text: &str, limit_bytes| {
            let bytes = text.len();
            if bytes > limit_bytes {
                return Err(MapError::Text { node, what, bytes, limit_bytes });
            }
            Ok(())
        };
        text("failure domain", &self.failure_domain, MAX_FAILURE_DOMAIN_BYTES)?;
        text("host", &self.host, MAX_HOST_BYTES)?;
        if self.shards.len() > MAX_MEMBER_SHARDS {
            return Err(MapError::Shards { node, found: self.shards.len() });
        }
        if self.weight > 0 && self.shards.is_empty() {
            return Err(MapError::NoShards { node, weight: self.weight });
        }
        for shard in &self.shards {
            text("shared-memory socket path", shard.shm.as_deref().unwrap_or(""), MAX_SHM_PATH_BYTES)?;
        }
        Ok(())
    }
}

impl ClusterMap {
    /// Checks the whole map: limits, order and uniqueness of the node ids.
    ///
    /// # Errors
    /// Returns the first violation, with its numbers.
    pub fn validate(&self) -> Result<(), MapError> {
        if self.replicas == 0 || self.replicas > MAX_REPLICAS {
            return Err(MapError::Replicas { found: self.replicas });
        }
        if self.members.len() > MAX_MEMBERS {
            return Err(MapError::Members { found: self.members.len() });
        }
        let mut shards = 0;
        for (index, member) in self.members.iter().enumerate() {
            member.validate()?;
            shards += member.shards.len();
            if index > 0 && self.members[index - 1].node >= member.node {
                return Err(MapError::Order { node: member.node, after: self.members[index - 1].node });
            }
        }
        if shards > MAX_MAP_SHARDS {
            return Err(MapError::MapShards { found: shards });
        }
        match &self.former {
            Some(former) if !former.is_valid() => Err(MapError::Former { claims: former.claims.len() }),
            _ => Ok(()),
        }
    }

    /// Returns the member with this id, by a binary search over the ordered members.
    #[must_use]
    pub fn member(&self, node: NodeId) -> Option<&Member> {
        let index = self.members.binary_search_by_key(&node, |member| member.node).ok()?;
        Some(&self.members[index])
    }

    /// Returns the member and the address of an owner; `None` if the owner was computed from another map.
    #[must_use]
    pub fn locate(&self, owner: Owner) -> Option<(&Member, &ShardAddress)> {
        let member = self.members.get(usize::from(owner.member))?;
        Some((member, member.shards.get(usize::from(owner.shard.0))?))
    }
}

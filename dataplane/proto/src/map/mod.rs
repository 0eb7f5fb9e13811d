//! Cluster map: the members and, by computation, the owners of every slot.
//!
//! Owners follow from the members alone (weighted rendezvous hashing per slot, distinct failure domains). So the map on
//! the wire is only `{epoch, replicas, members}`, and every reader computes, and can check, the same owners: see
//! [`OwnerTable`].
//!
//! Invariants of a valid map ([`ClusterMap::validate`]): members are ordered by node id without repetition, every count
//! and every text is within the limits below, and a member with a weight above 0 has at least one shard. A decoded map
//! is valid.
//!
//! The map does not contain the health of members: the control plane decides on it before it publishes a map, and
//! leaves dead members out.

mod cluster_map;
pub mod codec;
mod error;
mod former;
mod layout;
mod rendezvous;
mod replica_set;
mod slot_owners;
#[cfg(test)]
mod tests;

pub use cluster_map::{ClusterMap, Member, Owner, ShardAddress};
pub use error::MapError;
pub use former::{Claim, Former, Restarts};
pub use rendezvous::OwnerTable;
pub use replica_set::{MAX_REPLICA_OWNERS, ReplicaSet};
pub use slot_owners::{ShardKey, SlotOwners};

/// Most members of a cluster.
pub const MAX_MEMBERS: usize = 4096;
/// Most shards of a member.
pub const MAX_MEMBER_SHARDS: usize = 256;
/// Most shards of all members together; it bounds the size of a map.
pub const MAX_MAP_SHARDS: usize = 65_536;
/// Most replicas of a slot, the owner's included.
pub const MAX_REPLICAS: u8 = 8;
/// Longest name of a failure domain.
pub const MAX_FAILURE_DOMAIN_BYTES: usize = 128;
/// Longest host identity.
pub const MAX_HOST_BYTES: usize = 64;
/// Longest path of a Unix socket: what the kernel's `sun_path` holds besides its terminating zero.
pub const MAX_SHM_PATH_BYTES: usize = 107;

// An owner refers to its member in 16 bits, and a text has its length in one byte.
const _: () = assert!(MAX_MEMBERS <= u16::MAX as usize + 1);
const _: () = assert!(MAX_MEMBER_SHARDS <= u16::MAX as usize && MAX_MEMBER_SHARDS <= MAX_MAP_SHARDS);
const _: () = assert!(MAX_FAILURE_DOMAIN_BYTES <= 255 && MAX_HOST_BYTES <= 255 && MAX_SHM_PATH_BYTES <= 255);

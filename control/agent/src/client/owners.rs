//! Owners: the shards that own the slots by one cluster map.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;

use kvplane_proto::ids::{SLOTS, Slot};
use kvplane_proto::map::{ClusterMap, Owner, OwnerTable};
use kvplane_proto::{Digest, Epoch, NodeId};

/// A map, and the owners of all slots that follow from it.
pub(super) struct Owners {
    map: Arc<ClusterMap>,
    table: OwnerTable,
}

impl Owners {
    /// Computes the owners by a map.
    pub(super) fn of(map: Arc<ClusterMap>) -> Self {
        Self { table: OwnerTable::compute(&map), map }
    }

    /// Returns the epoch since which the slots have these owners.
    pub(super) fn since(&self) -> Epoch {
        owners_since(&self.map)
    }

    /// Returns the node of a digest's owner.
    pub(super) fn node_of(&self, digest: Digest) -> Option<NodeId> {
        let owner = self.table.owner_of(digest)?;
        self.map.members.get(usize::from(owner.member)).map(|member| member.node)
    }

    /// Returns the address of the shard that owns a digest.
    pub(super) fn shard_of(&self, digest: Digest) -> Option<SocketAddr> {
        self.table.owner_of(digest).and_then(|owner| self.address_of(owner))
    }

    /// Returns the addresses of the shards at these positions among a digest's owners: the owner is at position 0, its
    /// replica owners follow. Positions that the map has no owner for are left out.
    pub(super) fn shards_of(&self, digest: Digest, positions: impl IntoIterator<Item = usize>) -> Vec<SocketAddr> {
        let owners = self.table.owners(digest.slot());
        positions.into_iter().filter_map(|at| owners.get(at)).filter_map(|owner| self.address_of(*owner)).collect()
    }

    /// Returns true if a node owns slots.
    pub(super) fn has_slots(&self, node: NodeId) -> bool {
        self.map.members.iter().any(|member| member.node == node && member.weight > 0)
    }

    /// Returns one slot of each shard that owns any: a digest in the slot addresses the shard.
    pub(super) fn one_slot_each(&self) -> Vec<Slot> {
        let (mut seen, mut slots) = (HashSet::new(), Vec::new());
        for slot in (0..SLOTS).map(|slot| Slot(slot as u16)) {
            if let Some(owner) = self.table.owners(slot).first()
                && seen.insert(*owner)
            {
                slots.push(slot);
            }
        }
        slots
    }

    fn address_of(&self, owner: Owner) -> Option<SocketAddr> {
        let member = self.map.members.get(usize::from(owner.member))?;
        member.shards.get(usize::from(owner.shard.0)).map(|shard| shard.tcp)
    }
}

/// Returns the epoch since which the slots have the owners that they have in this map.
pub(super) fn owners_since(map: &ClusterMap) -> Epoch {
    map.former.as_ref().map_or(map.epoch, |former| former.since)
}

#[cfg(test)]
pub(super) mod tests {
    use kvplane_proto::Incarnation;
    use kvplane_proto::map::{Member, ShardAddress};

    use super::*;

    /// Returns a map of nodes 1, 2, ... with these weights, each with two shards.
    pub(in crate::client) fn map_of(weights: &[u32]) -> Arc<ClusterMap> {
        let shard = |node: u64, shard: u16| ShardAddress {
            tcp: SocketAddr::from(([127, 0, 0, 1], node as u16 * 100 + shard)),
            shm: None,
        };
        let member = |(node, weight): (u64, &u32)| Member {
            node: NodeId(node),
            incarnation: Incarnation(1),
            weight: *weight,
            failure_domain: node.to_string(),
            host: node.to_string(),
            shards: vec![shard(node, 0), shard(node, 1)],
        };
        let members = (1..).zip(weights).map(member).collect();
        Arc::new(ClusterMap { epoch: Epoch(7), replicas: 2, members, former: None })
    }

    #[test]
    fn every_shard_has_a_slot_and_every_digest_an_owner_before_its_replica_owner() {
        let owners = Owners::of(map_of(&[1, 1, 0]));
        assert_eq!(owners.since(), Epoch(7));
        assert!(owners.has_slots(NodeId(2)) && !owners.has_slots(NodeId(3)) && !owners.has_slots(NodeId(9)));
        let slots = owners.one_slot_each();
        let shards: HashSet<_> = slots.iter().filter_map(|slot| owners.shard_of(slot.first_digest())).collect();
        assert_eq!((slots.len(), shards.len()), (4, 4), "two nodes of two shards own slots");
        let digest = Digest::of(b"", b"key");
        let both = owners.shards_of(digest, 0..2);
        assert_eq!((both.len(), Some(both[0])), (2, owners.shard_of(digest)));
        assert_eq!(owners.shards_of(digest, 1..9), both[1..]);
        assert_eq!(owners.node_of(digest).map(|node| node.0), Some(u64::from(both[0].port()) / 100));
    }

    #[test]
    fn an_empty_map_has_no_owners() {
        let owners = Owners::of(map_of(&[]));
        let digest = Digest::of(b"", b"key");
        assert!(owners.one_slot_each().is_empty() && owners.shards_of(digest, 0..2).is_empty());
        assert!(owners.node_of(digest).is_none() && owners.shard_of(digest).is_none());
    }
}

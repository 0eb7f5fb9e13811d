//! Owners of all slots, computed once for each map.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, SLOTS, Slot};
use kvplane_proto::map::{ClusterMap, OwnerTable};

/// Owners of all slots by the latest map that they were computed for.
#[derive(Default)]
pub(super) struct KnownOwners {
    known: Option<(Epoch, OwnerTable)>,
}

/// Owner of each slot.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SlotMap {
    pub(crate) epoch: u64,
    /// Owners: nodes and their shards.
    pub(crate) owners: Vec<(u64, u16)>,
    /// By slot: an index into `owners`; none if no node owns slots.
    pub(crate) slots: Vec<Option<u32>>,
}

impl KnownOwners {
    /// Returns the owners by a map, which are computed if those of another map are known.
    fn by(&mut self, map: &ClusterMap) -> &OwnerTable {
        let known = self.known.take().filter(|(epoch, _)| *epoch == map.epoch);
        let (_, table) = self.known.insert(known.unwrap_or_else(|| (map.epoch, OwnerTable::compute(map))));
        table
    }

    /// Returns the nodes that own an object's slot, owner first.
    pub(super) fn of(&mut self, map: &ClusterMap, digest: Digest) -> Vec<u64> {
        let owners = self.by(map).owners(digest.slot());
        let members = owners.iter().filter_map(|owner| map.members.get(usize::from(owner.member)));
        members.map(|member| member.node.0).collect()
    }

    /// Returns the owner of each slot.
    pub(super) fn all(&mut self, map: &ClusterMap) -> SlotMap {
        let table = self.by(map);
        let (mut owners, mut places) = (Vec::new(), BTreeMap::new());
        let slots = (0..SLOTS as u16).map(|slot| {
            let owner = table.owners(Slot(slot)).first()?;
            let node = map.members.get(usize::from(owner.member))?.node.0;
            Some(*places.entry((node, owner.shard.0)).or_insert_with(|| {
                owners.push((node, owner.shard.0));
                owners.len() as u32 - 1
            }))
        });
        let slots = slots.collect();
        SlotMap { epoch: map.epoch.0, owners, slots }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use kvplane_proto::ids::{Incarnation, NodeId};
    use kvplane_proto::map::{Member, ShardAddress};

    use super::*;

    fn map(epoch: u64, nodes: &[u64]) -> ClusterMap {
        let shard = ShardAddress { tcp: SocketAddr::from(([127, 0, 0, 1], 7001)), shm: None };
        let member = |node: &u64| Member {
            node: NodeId(*node),
            incarnation: Incarnation(1),
            weight: 1,
            failure_domain: node.to_string(),
            host: String::new(),
            shards: vec![shard.clone(), shard.clone()],
        };
        ClusterMap { epoch: Epoch(epoch), replicas: 2, members: nodes.iter().map(member).collect(), former: None }
    }

    #[test]
    fn owners_are_those_of_the_map_at_hand() {
        let mut known = KnownOwners::default();
        let digest = Digest(5 << 64 | 9);
        assert_eq!(known.of(&map(1, &[7]), digest), [7]);
        let mut both = known.of(&map(2, &[7, 8]), digest);
        let table = OwnerTable::compute(&map(2, &[7, 8]));
        assert_eq!(both[0], [7, 8][usize::from(table.owners(digest.slot())[0].member)]);
        both.sort_unstable();
        assert_eq!(both, [7, 8]);
        assert!(known.of(&map(3, &[]), digest).is_empty());
    }

    #[test]
    fn every_slot_names_its_owner_once() {
        let mut known = KnownOwners::default();
        let all = known.all(&map(2, &[7, 8]));
        let mut owners = all.owners.clone();
        owners.sort_unstable();
        assert_eq!((all.epoch, owners), (2, vec![(7, 0), (7, 1), (8, 0), (8, 1)]));
        assert_eq!(all.slots.len(), SLOTS);
        let table = OwnerTable::compute(&map(2, &[7, 8]));
        for (slot, at) in (0..SLOTS as u16).zip(&all.slots) {
            let owner = table.owners(Slot(slot))[0];
            let (node, shard) = all.owners[at.expect("an owner") as usize];
            assert_eq!((node, shard), ([7, 8][usize::from(owner.member)], owner.shard.0));
        }
        let nobody = known.all(&map(3, &[]));
        assert!(nobody.owners.is_empty() && nobody.slots.iter().all(Option::is_none));
    }
}

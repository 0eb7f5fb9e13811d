//! Replicated slots: the replica owners of this shard's slots, and the slots of other owners for which this shard is
//! the replica owner.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::ShardKey;

/// Owner for which this shard is the replica owner of a slot, and the epoch since which it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) struct Relation {
    pub(in crate::service) owner: ShardKey,
    pub(in crate::service) since: Epoch,
}

/// Both sides of replication, by slot.
#[derive(Debug, Default)]
pub(in crate::service) struct ReplicaSlots {
    /// Slots of which this shard is the replica owner.
    relations: BTreeMap<Slot, Relation>,
    /// Slots that this shard gained as their former replica owner, with their replicas, and does not serve yet.
    inherited: BTreeSet<Slot>,
    /// Replica owners of this shard's slots, and the epoch of the map that assigned them.
    owners: BTreeMap<Slot, ShardKey>,
    since: Epoch,
}

impl ReplicaSlots {
    /// Returns true if objects of a slot that is not served are kept: as replicas, or as objects of a gained slot that
    /// is not served yet.
    pub(in crate::service) fn keeps(&self, slot: Slot) -> bool {
        self.relations.contains_key(&slot) || self.inherited.contains(&slot)
    }

    /// Returns true if this shard was the replica owner of a slot that it owns now, and has the replicas.
    pub(in crate::service) fn has_inherited(&self, slot: Slot) -> bool {
        self.inherited.contains(&slot)
    }

    /// Marks a slot as gained together with its replicas.
    pub(in crate::service) fn inherit(&mut self, slot: Slot) {
        self.inherited.insert(slot);
    }

    /// Keeps only those inherited slots for which `owns` returns true.
    pub(in crate::service) fn keep_inherited(&mut self, owns: impl Fn(Slot) -> bool) {
        self.inherited.retain(|slot| owns(*slot));
    }

    /// Returns the relation by which this shard is the replica owner of another owner's slot.
    pub(in crate::service) fn relation(&self, slot: Slot) -> Option<&Relation> {
        self.relations.get(&slot)
    }

    pub(in crate::service) fn relations(&self) -> usize {
        self.relations.len()
    }

    /// Installs the relations of a new map and returns the former ones.
    pub(in crate::service) fn relate(&mut self, relations: BTreeMap<Slot, Relation>) -> BTreeMap<Slot, Relation> {
        core::mem::replace(&mut self.relations, relations)
    }

    /// Returns the replica owner of a slot that this shard owns.
    pub(in crate::service) fn owner(&self, slot: Slot) -> Option<ShardKey> {
        self.owners.get(&slot).copied()
    }

    /// Returns true if the slot of an object has a replica owner.
    pub(in crate::service) fn has_owner(&self, digest: Digest) -> bool {
        self.owners.contains_key(&digest.slot())
    }

    /// Returns true if no slot of this shard has a replica owner.
    pub(in crate::service) fn is_alone(&self) -> bool {
        self.owners.is_empty()
    }

    /// Returns the replica owners of this shard's slots.
    pub(in crate::service) const fn owners(&self) -> &BTreeMap<Slot, ShardKey> {
        &self.owners
    }

    /// Returns the epoch of the map that assigned the current replica owners.
    pub(in crate::service) const fn since(&self) -> Epoch {
        self.since
    }

    /// Installs the replica owners by the map of this epoch and returns the former ones.
    pub(in crate::service) fn assign(
        &mut self,
        owners: BTreeMap<Slot, ShardKey>,
        epoch: Epoch,
    ) -> BTreeMap<Slot, ShardKey> {
        self.since = epoch;
        core::mem::replace(&mut self.owners, owners)
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

    use super::*;

    #[test]
    fn replicated_and_inherited_slots_are_kept() {
        let other = ShardKey { node: NodeId(2), incarnation: Incarnation(1), shard: ShardId(0) };
        let mut slots = ReplicaSlots::default();
        let relation = Relation { owner: other, since: Epoch(4) };
        assert!(slots.relate(BTreeMap::from([(Slot(5), relation)])).is_empty());
        assert!(slots.keeps(Slot(5)) && !slots.keeps(Slot(6)));
        slots.inherit(Slot(5));
        assert_eq!(slots.relate(BTreeMap::new()), BTreeMap::from([(Slot(5), relation)]));
        assert!(slots.keeps(Slot(5)) && slots.has_inherited(Slot(5)));
        slots.keep_inherited(|_| false);
        assert!(!slots.keeps(Slot(5)));
        assert!(slots.is_alone());
        slots.assign(BTreeMap::from([(Slot(6), other)]), Epoch(7));
        assert!(!slots.is_alone() && slots.has_owner(Digest(6 << 114)) && !slots.has_owner(Digest(5 << 114)));
        assert_eq!((slots.owner(Slot(6)), slots.since()), (Some(other), Epoch(7)));
    }
}

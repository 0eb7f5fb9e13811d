//! Replicated slots: the replica owners of this shard's slots, and the slots of other owners for which this shard is
//! a replica owner.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::{ReplicaSet, ShardKey};

use super::slot_table::SlotTable;
use crate::Copies;

/// Owner for which this shard is a replica owner of a slot, and the epoch since which it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) struct Relation {
    pub(in crate::service) owner: ShardKey,
    pub(in crate::service) since: Epoch,
}

/// Replica owners of slots, each in the order of the map.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(in crate::service) struct ReplicaOwnersBySlot {
    /// Places of a slot's replica owners in `owners`: the first one, and the number.
    places: SlotTable<(u32, u32)>,
    owners: Vec<ShardKey>,
}

impl ReplicaOwnersBySlot {
    /// Adds a slot that is not here yet.
    pub(in crate::service) fn add(&mut self, slot: Slot, owners: &[ShardKey]) {
        self.places.insert(slot, (self.owners.len() as u32, owners.len() as u32));
        self.owners.extend_from_slice(owners);
    }

    pub(in crate::service) fn get(&self, slot: Slot) -> Option<&[ShardKey]> {
        let (first, count) = *self.places.get(slot)?;
        self.owners.get(first as usize..)?.get(..count as usize)
    }

    /// Returns the slots that have replica owners.
    pub(in crate::service) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.places.slots()
    }

    /// Replaces each replica owner by the one of these that continues it. Returns those that were replaced, each with
    /// its successor.
    fn succeed(&mut self, successors: &Self) -> BTreeMap<ShardKey, ShardKey> {
        let now: BTreeMap<_, _> = successors.owners.iter().map(|key| ((key.node, key.shard), *key)).collect();
        let mut succeeded = BTreeMap::new();
        for owner in &mut self.owners {
            let next = now.get(&(owner.node, owner.shard)).filter(|next| **next != *owner && next.continues(*owner));
            if let Some(next) = next {
                succeeded.insert(*owner, *next);
                *owner = *next;
            }
        }
        succeeded
    }

    /// Returns the replica owners of all slots, each as often as it is one.
    pub(in crate::service) fn all(&self) -> &[ShardKey] {
        &self.owners
    }
}

/// Both sides of replication, by slot.
#[derive(Debug, Default)]
pub(in crate::service) struct ReplicaSlots {
    /// Slots of which this shard is a replica owner.
    relations: SlotTable<Relation>,
    /// Slots that this shard gained as their former replica owner, with their replicas, and does not serve yet.
    inherited: SlotTable<()>,
    /// Replica owners of this shard's slots, where there are any, and the epoch of the map that assigned them.
    owners: ReplicaOwnersBySlot,
    since: Epoch,
}

impl ReplicaSlots {
    /// Returns true if objects of a slot that is not served are kept: as replicas, or as objects of a gained slot that
    /// is not served yet.
    pub(in crate::service) fn keeps(&self, slot: Slot) -> bool {
        self.relations.has(slot) || self.inherited.has(slot)
    }

    /// Returns true if this shard was a replica owner of a slot that it owns now, and has the replicas.
    pub(in crate::service) fn has_inherited(&self, slot: Slot) -> bool {
        self.inherited.has(slot)
    }

    /// Marks a slot as gained together with its replicas.
    pub(in crate::service) fn inherit(&mut self, slot: Slot) {
        self.inherited.insert(slot, ());
    }

    /// Keeps only those inherited slots for which `owns` returns true.
    pub(in crate::service) fn keep_inherited(&mut self, owns: impl Fn(Slot) -> bool) {
        self.inherited.retain(|slot, ()| owns(slot));
    }

    /// Returns the relation by which this shard is a replica owner of another owner's slot.
    pub(in crate::service) fn relation(&self, slot: Slot) -> Option<&Relation> {
        self.relations.get(slot)
    }

    /// Returns the slots of which this shard is a replica owner.
    pub(in crate::service) fn relation_slots(&self) -> impl Iterator<Item = Slot> {
        self.relations.slots()
    }

    pub(in crate::service) const fn relations(&self) -> usize {
        self.relations.len()
    }

    /// Installs the relations of a new map and returns the former ones.
    pub(in crate::service) fn relate(&mut self, relations: SlotTable<Relation>) -> SlotTable<Relation> {
        core::mem::replace(&mut self.relations, relations)
    }

    /// Returns the replica owners of a slot that this shard owns, in the order of the map.
    pub(in crate::service) fn owners_of(&self, slot: Slot) -> &[ShardKey] {
        self.owners.get(slot).unwrap_or(&[])
    }

    /// Returns the number of a replica owner in the order of the map; `None` if it is no replica owner of the slot.
    pub(in crate::service) fn number_of(&self, slot: Slot, owner: ShardKey) -> Option<usize> {
        self.owners_of(slot).iter().position(|other| *other == owner)
    }

    /// Returns true if the slot of an object has a replica owner.
    pub(in crate::service) fn has_owner(&self, digest: Digest) -> bool {
        self.owners.get(digest.slot()).is_some()
    }

    /// Returns the number of replicas that an object can have, beside the owner's, of those that it is to have.
    pub(in crate::service) fn possible(&self, digest: Digest, copies: Copies) -> usize {
        self.owners_of(digest.slot()).len().min(copies.wanted.into())
    }

    /// Returns the replica owners that are to have a replica of an object: the first ones of its slot. So the one that
    /// will own the slot next has it.
    pub(in crate::service) fn destinations(&self, digest: Digest, copies: Copies) -> ReplicaSet {
        ReplicaSet::first(self.possible(digest, copies))
    }

    /// Returns true if a replica owner that is to have a replica of an object lacks it.
    pub(in crate::service) fn lacks(&self, digest: Digest, copies: Copies) -> bool {
        !self.destinations(digest, copies).minus(copies.at).is_empty()
    }

    /// Returns true if no slot of this shard has a replica owner.
    pub(in crate::service) fn is_alone(&self) -> bool {
        self.owners.all().is_empty()
    }

    /// Returns true if the slots of this shard have several replica owners.
    pub(in crate::service) fn has_several(&self) -> bool {
        self.owners.all().len() > self.owners.places.len()
    }

    /// Returns the replica owners of this shard's slots.
    pub(in crate::service) const fn owners(&self) -> &ReplicaOwnersBySlot {
        &self.owners
    }

    /// Returns the epoch of the map that assigned the current replica owners.
    pub(in crate::service) const fn since(&self) -> Epoch {
        self.since
    }

    /// Replaces each replica owner by its successor of these: it has what its predecessor had. Returns those that were
    /// replaced, each with its successor.
    pub(in crate::service) fn succeed(&mut self, successors: &ReplicaOwnersBySlot) -> BTreeMap<ShardKey, ShardKey> {
        self.owners.succeed(successors)
    }

    /// Installs the replica owners by the map of this epoch and returns the former ones.
    pub(in crate::service) fn assign(&mut self, owners: ReplicaOwnersBySlot, epoch: Epoch) -> ReplicaOwnersBySlot {
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
        assert!(slots.relate([(Slot(5), relation)].into_iter().collect()).is_empty());
        assert!(slots.keeps(Slot(5)) && !slots.keeps(Slot(6)));
        slots.inherit(Slot(5));
        assert_eq!(slots.relate(SlotTable::default()).get(Slot(5)), Some(&relation));
        assert!(slots.keeps(Slot(5)) && slots.has_inherited(Slot(5)));
        slots.keep_inherited(|_| false);
        assert!(!slots.keeps(Slot(5)));
        assert!(slots.is_alone());
        let third = ShardKey { node: NodeId(3), ..other };
        let mut owners = ReplicaOwnersBySlot::default();
        owners.add(Slot(6), &[other, third]);
        slots.assign(owners, Epoch(7));
        let (there, elsewhere) = (Digest(6 << 114), Digest(5 << 114));
        assert!(!slots.is_alone() && slots.has_owner(there) && !slots.has_owner(elsewhere));
        assert_eq!((slots.owners_of(Slot(6)), slots.since()), (&[other, third][..], Epoch(7)));
        assert_eq!((slots.number_of(Slot(6), third), slots.number_of(Slot(5), third)), (Some(1), None));
        let wanted = |wanted| Copies { wanted, ..Copies::ONE };
        assert_eq!([1, 2, 7].map(|number| slots.possible(there, wanted(number))), [1, 2, 2]);
        assert!(slots.lacks(there, wanted(1)) && !slots.lacks(elsewhere, wanted(1)));
        assert!(!slots.lacks(there, Copies { at: ReplicaSet::FIRST, ..wanted(1) }));
        assert!(
            slots.lacks(there, Copies { at: ReplicaSet::NONE.with(1), ..wanted(1) }),
            "the first one is to have it"
        );
    }
}

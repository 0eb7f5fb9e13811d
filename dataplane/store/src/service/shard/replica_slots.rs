//! Slots whose objects two shards have: the replica owners of our slots, and the slots of others of which this shard is
//! the replica owner.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::ShardKey;

/// The owner for which this shard is the replica owner of a slot, and since when.
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
    /// Slots that became our own with their replicas, and are not served yet.
    inherited: BTreeSet<Slot>,
    /// The replica owners of our slots, and since which map they are as they are.
    owners: BTreeMap<Slot, ShardKey>,
    since: Epoch,
}

impl ReplicaSlots {
    /// True where objects of a slot that is not served are kept, as replicas, or as ours that are not served yet.
    pub(in crate::service) fn keeps(&self, slot: Slot) -> bool {
        self.relations.contains_key(&slot) || self.inherited.contains(&slot)
    }

    /// True where this shard was the replica owner of a slot that is its own now, and has what is left of it.
    pub(in crate::service) fn has_inherited(&self, slot: Slot) -> bool {
        self.inherited.contains(&slot)
    }

    /// A slot became our own with its replicas.
    pub(in crate::service) fn inherit(&mut self, slot: Slot) {
        self.inherited.insert(slot);
    }

    /// Of the slots that became our own, only those that `owns` has stay.
    pub(in crate::service) fn keep_inherited(&mut self, owns: impl Fn(Slot) -> bool) {
        self.inherited.retain(|slot| owns(*slot));
    }

    /// This shard as the replica owner of a slot of another's.
    pub(in crate::service) fn relation(&self, slot: Slot) -> Option<&Relation> {
        self.relations.get(&slot)
    }

    pub(in crate::service) fn relations(&self) -> usize {
        self.relations.len()
    }

    /// Takes the relations of a new map, and gives those of before.
    pub(in crate::service) fn relate(&mut self, relations: BTreeMap<Slot, Relation>) -> BTreeMap<Slot, Relation> {
        core::mem::replace(&mut self.relations, relations)
    }

    /// The replica owner of a slot of ours.
    pub(in crate::service) fn owner(&self, slot: Slot) -> Option<ShardKey> {
        self.owners.get(&slot).copied()
    }

    /// True where the slot of an object has a replica owner.
    pub(in crate::service) fn has_owner(&self, digest: Digest) -> bool {
        self.owners.contains_key(&digest.slot())
    }

    /// True where no slot of ours has a replica owner.
    pub(in crate::service) fn is_alone(&self) -> bool {
        self.owners.is_empty()
    }

    /// The replica owners of our slots.
    pub(in crate::service) const fn owners(&self) -> &BTreeMap<Slot, ShardKey> {
        &self.owners
    }

    /// Since which map the replica owners are as they are.
    pub(in crate::service) const fn since(&self) -> Epoch {
        self.since
    }

    /// Takes the replica owners by the map of this epoch, and gives those of before.
    pub(in crate::service) fn assign(
        &mut self,
        owners: BTreeMap<Slot, ShardKey>,
        epoch: Epoch,
    ) -> BTreeMap<Slot, ShardKey> {
        self.since = epoch;
        core::mem::replace(&mut self.owners, owners)
    }
}

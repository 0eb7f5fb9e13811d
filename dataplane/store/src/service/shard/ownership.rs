//! Ownership: the slots that a shard owns, in its current incarnation, by the map that it serves.
//!
//! [`Ownership`] holds the shard's identity and the newest map's statements about this and other shards. When slots
//! change hands, [`super::Service`] has the other components act on it; this module keeps only the current state.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};
use kvplane_tier::SlotSet;

use crate::service::types::Identity;

/// Slots of a shard, and the incarnations of nodes by the newest map.
pub(in crate::service) struct Ownership {
    identity: Identity,
    epoch: Epoch,
    owned: SlotSet,
    /// Incarnations by node.
    incarnations: BTreeMap<u64, u64>,
}

impl Ownership {
    /// Creates the state of a shard that owns no slot yet.
    pub(in crate::service) fn new(identity: Identity) -> Self {
        Self { identity, epoch: Epoch(0), owned: SlotSet::none(), incarnations: BTreeMap::new() }
    }

    pub(in crate::service) const fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(in crate::service) const fn key(&self) -> ShardKey {
        let Identity { node, incarnation, shard, .. } = self.identity;
        ShardKey { node, incarnation, shard }
    }

    /// Returns the epoch of the map by which slots are served.
    pub(in crate::service) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns the slots that are served.
    pub(in crate::service) const fn owned(&self) -> &SlotSet {
        &self.owned
    }

    pub(in crate::service) fn owns(&self, digest: Digest) -> bool {
        self.owned.has(digest.slot())
    }

    /// Returns true if any of these slots is not served yet.
    pub(in crate::service) fn gains(&self, slots: &SlotSet) -> bool {
        slots.0.iter().zip(self.owned.0.iter()).any(|(slots, served)| slots & !served != 0)
    }

    /// Serves these slots and no others, by the map of this epoch.
    pub(in crate::service) fn serve(&mut self, epoch: Epoch, slots: &SlotSet) {
        self.epoch = epoch;
        self.restore(slots);
    }

    /// Serves the slots that are recorded on the SSD, before a map assigns them.
    pub(in crate::service) fn restore(&mut self, slots: &SlotSet) {
        self.owned.0.copy_from_slice(&slots.0[..]);
    }

    /// Stops serving a slot. Returns true if it was served.
    pub(in crate::service) fn close(&mut self, slot: Slot) -> bool {
        let had = self.owned.has(slot);
        self.owned.remove(slot);
        had
    }

    /// Stops serving all slots.
    pub(in crate::service) fn close_all(&mut self) {
        self.owned.0.fill(0);
    }

    /// Begins a new incarnation after the former one was declared dead; the shard follows no map in it yet.
    pub(in crate::service) const fn begin_incarnation(&mut self, incarnation: Incarnation) {
        self.identity.incarnation = incarnation;
    }

    /// Treats the next map as the first.
    pub(in crate::service) const fn forget_epoch(&mut self) {
        self.epoch = Epoch(0);
    }

    /// Records the incarnations of nodes by the newest map.
    pub(in crate::service) fn note_incarnations(&mut self, owners: &SlotOwners) {
        self.incarnations = owners.incarnations().map(|(node, incarnation)| (node.0, incarnation.0)).collect();
    }

    /// Returns the incarnations of nodes by the newest map, ordered by node.
    pub(in crate::service) fn incarnations(&self) -> impl Iterator<Item = (NodeId, Incarnation)> + '_ {
        self.incarnations.iter().map(|(node, incarnation)| (NodeId(*node), Incarnation(*incarnation)))
    }

    /// Returns true if an incarnation of a node has ended by the newest map.
    pub(in crate::service) fn is_over(&self, node: u64, incarnation: u64) -> bool {
        self.incarnations.get(&node).is_some_and(|newest| *newest > incarnation)
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::ShardId;

    use super::*;

    fn ownership() -> Ownership {
        Ownership::new(Identity {
            cluster: "cluster".to_owned(),
            node: NodeId(1),
            incarnation: Incarnation(2),
            shard: ShardId(3),
            segment_name: String::new(),
        })
    }

    fn slots(slots: impl IntoIterator<Item = u16>) -> SlotSet {
        let mut set = SlotSet::none();
        slots.into_iter().for_each(|slot| set.insert(Slot(slot)));
        set
    }

    #[test]
    fn slots_are_owned_from_their_map_until_they_are_closed() {
        let mut ownership = ownership();
        let digest = Digest(5 << 114);
        assert!(!ownership.owns(digest) && ownership.gains(&slots([5])));
        ownership.serve(Epoch(7), &slots([5, 6]));
        assert!(ownership.owns(digest) && !ownership.gains(&slots([5])) && ownership.gains(&slots([5, 7])));
        assert_eq!((ownership.epoch(), ownership.owned().count()), (Epoch(7), 2));
        assert!(ownership.close(Slot(5)) && !ownership.close(Slot(5)));
        assert!(!ownership.owns(digest));
        ownership.close_all();
        assert!(ownership.owned().is_empty());
    }

    #[test]
    fn an_incarnation_begins_without_a_map() {
        let mut ownership = ownership();
        ownership.serve(Epoch(7), &slots([5]));
        ownership.begin_incarnation(Incarnation(9));
        ownership.forget_epoch();
        assert_eq!(ownership.key(), ShardKey { incarnation: Incarnation(9), ..self::ownership().key() });
        assert_eq!(ownership.epoch(), Epoch(0));
    }
}

//! Exported slots: slots that this shard lost, whose objects stay as they were for the new owners to fetch.

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};

use super::slot_table::SlotTable;

/// Exported slots, each with its new owner and the epoch of the map that assigned it.
#[derive(Debug, Default)]
pub(in crate::service) struct Exports {
    to: SlotTable<(ShardKey, Epoch)>,
}

impl Exports {
    /// Returns true if an object is in an exported slot.
    pub(in crate::service) fn has(&self, digest: Digest) -> bool {
        self.to.has(digest.slot())
    }

    /// Returns true if a peer with a map of this epoch may remove an object of an exported slot: a removal from before
    /// the export began does not concern it.
    pub(in crate::service) fn may_remove(&self, digest: Digest, epoch: Epoch) -> bool {
        self.to.get(digest.slot()).is_some_and(|(_, since)| *since <= epoch)
    }

    pub(in crate::service) fn has_slot(&self, slot: Slot) -> bool {
        self.to.has(slot)
    }

    /// Returns the epoch of the map that began the export of a slot.
    pub(in crate::service) fn since(&self, slot: Slot) -> Option<Epoch> {
        self.to.get(slot).map(|(_, since)| *since)
    }

    /// Returns the exported slots, each with the epoch of the map that began its export.
    pub(in crate::service) fn slots(&self) -> impl Iterator<Item = (Slot, Epoch)> + '_ {
        self.to.iter().map(|(slot, (_, since))| (slot, *since))
    }

    pub(in crate::service) const fn len(&self) -> usize {
        self.to.len()
    }

    /// Begins the export of a slot whose former owner in the previous map was `former`. Returns true if its objects
    /// stay at this shard, `me`, for the new owner to fetch; false if another owner had it in between.
    pub(in crate::service) fn begin(
        &mut self,
        slot: Slot,
        former: ShardKey,
        me: ShardKey,
        owners: Option<&SlotOwners>,
    ) -> bool {
        let Some(owners) = owners.filter(|owners| owners.past(slot) == Some(former)) else { return false };
        let Some(to) = owners.owner(slot).filter(|_| owners.former(slot) == Some(me)) else { return false };
        self.to.insert(slot, (to, owners.epoch));
        true
    }

    /// Ends the export of a slot. Returns true if there was one.
    pub(in crate::service) fn end(&mut self, slot: Slot) -> bool {
        self.to.remove(slot).is_some()
    }

    /// Ends the exports of slots that their new owner does not own any more, and returns these slots.
    pub(in crate::service) fn end_former(&mut self, owners: Option<&SlotOwners>) -> Vec<Slot> {
        let over = |slot: Slot, to: ShardKey| owners.is_none_or(|owners| owners.owner(slot) != Some(to));
        let mut ended = Vec::new();
        self.to.retain(|slot, (to, _)| {
            let is_over = over(slot, *to);
            ended.extend(is_over.then_some(slot));
            !is_over
        });
        ended
    }
}

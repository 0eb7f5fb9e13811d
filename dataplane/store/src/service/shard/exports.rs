//! Exported slots: slots that this shard lost, whose objects stay as they were for the new owners to fetch.
//!
//! An export ends when the new owner reports that it has imported everything, or loses the slot. A report ends all
//! exports to its sender that began by the map that it names, or before. It names a slot of the sender: if the export
//! of that slot began later, the report belongs to an earlier import of the slot.

use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};
use kvplane_proto::{Digest, Status};

use super::slot_table::SlotTable;

/// Export of a slot.
#[derive(Clone, Copy, Debug)]
struct Export {
    /// New owner.
    to: ShardKey,
    /// Epoch of the map that assigned the slot to it.
    since: Epoch,
    /// True once the new owner has imported everything.
    is_complete: bool,
}

/// Exported slots. Those that were imported completely are remembered until their new owner loses them.
#[derive(Debug, Default)]
pub(in crate::service) struct Exports {
    exports: SlotTable<Export>,
    /// Number of exports that are complete.
    complete: usize,
    /// Number of exports that a new owner has reported as complete so far.
    reported: u64,
}

impl Exports {
    /// Returns true if an object is in an exported slot.
    pub(in crate::service) fn has(&self, digest: Digest) -> bool {
        self.has_slot(digest.slot())
    }

    /// Returns true if a peer with a map of this epoch may remove an object of an exported slot: a removal from before
    /// the export began does not concern it.
    pub(in crate::service) fn may_remove(&self, digest: Digest, epoch: Epoch) -> bool {
        self.since(digest.slot()).is_some_and(|since| since <= epoch)
    }

    pub(in crate::service) fn has_slot(&self, slot: Slot) -> bool {
        self.open(slot).is_some()
    }

    /// Returns true if a slot is exported, or was until its present owner had imported everything.
    pub(in crate::service) fn has_had(&self, slot: Slot) -> bool {
        self.exports.has(slot)
    }

    fn open(&self, slot: Slot) -> Option<&Export> {
        self.exports.get(slot).filter(|export| !export.is_complete)
    }

    /// Returns the epoch of the map that began the export of a slot.
    pub(in crate::service) fn since(&self, slot: Slot) -> Option<Epoch> {
        self.open(slot).map(|export| export.since)
    }

    /// Returns the exported slots, each with the epoch of the map that began its export.
    pub(in crate::service) fn slots(&self) -> impl Iterator<Item = (Slot, Epoch)> + '_ {
        self.exports.iter().filter(|(_, export)| !export.is_complete).map(|(slot, export)| (slot, export.since))
    }

    pub(in crate::service) const fn len(&self) -> usize {
        self.exports.len() - self.complete
    }

    /// Returns the number of exports that a new owner has reported as complete so far.
    pub(in crate::service) const fn reported(&self) -> u64 {
        self.reported
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
        self.end(slot);
        self.exports.insert(slot, Export { to, since: owners.epoch, is_complete: false });
        true
    }

    /// Ends all exports to the new owner of this slot, which has imported everything by the map of this epoch. Returns
    /// the slots whose exports have ended; refuses a report from before the export of this slot began.
    pub(in crate::service) fn complete(&mut self, slot: Slot, epoch: Epoch) -> Result<Vec<Slot>, Status> {
        let Some(Export { to, since, .. }) = self.exports.get(slot).copied() else { return Ok(Vec::new()) };
        if since > epoch {
            return Err(Status::WrongOwner);
        }
        let is_due = |export: &Export| export.to == to && export.since <= epoch && !export.is_complete;
        let ended: Vec<Slot> = self.exports.iter().filter(|(_, export)| is_due(export)).map(|(slot, _)| slot).collect();
        for slot in &ended {
            if let Some(export) = self.exports.get_mut(*slot) {
                export.is_complete = true;
            }
        }
        self.complete += ended.len();
        self.reported += ended.len() as u64;
        Ok(ended)
    }

    /// Ends the export of a slot. Returns true if there was one whose objects are here still.
    pub(in crate::service) fn end(&mut self, slot: Slot) -> bool {
        let Some(export) = self.exports.remove(slot) else { return false };
        self.complete -= usize::from(export.is_complete);
        !export.is_complete
    }

    /// Ends the exports of slots that their new owner does not own any more. Returns those slots of them whose objects
    /// are here still.
    pub(in crate::service) fn end_former(&mut self, owners: Option<&SlotOwners>) -> Vec<Slot> {
        let over = |slot: Slot, to: ShardKey| owners.is_none_or(|owners| owners.owner(slot) != Some(to));
        let former = self.exports.iter().filter(|(slot, export)| over(*slot, export.to)).map(|(slot, _)| slot);
        let mut ended: Vec<Slot> = former.collect();
        ended.retain(|slot| self.end(*slot));
        ended
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

    use super::*;

    #[test]
    fn a_report_ends_the_export_that_it_belongs_to_once() {
        let shard = |node| ShardKey { node: NodeId(node), incarnation: Incarnation(1), shard: ShardId(0) };
        let export = |node, since| Export { to: shard(node), since: Epoch(since), is_complete: false };
        let mut exports = Exports::default();
        let begun =
            [(Slot(2), export(2, 5)), (Slot(3), export(2, 7)), (Slot(4), export(3, 7)), (Slot(5), export(2, 8))];
        exports.exports.extend(begun);
        assert_eq!(exports.complete(Slot(3), Epoch(6)), Err(Status::WrongOwner), "of an import before");
        assert_eq!(exports.complete(Slot(6), Epoch(7)), Ok(vec![]));
        assert!(exports.has_slot(Slot(3)) && exports.len() == 4);
        assert_eq!(exports.complete(Slot(3), Epoch(7)), Ok(vec![Slot(2), Slot(3)]), "not one that began later");
        assert_eq!(exports.complete(Slot(3), Epoch(7)), Ok(vec![]), "once");
        assert_eq!(exports.complete(Slot(3), Epoch(6)), Err(Status::WrongOwner));
        assert!(!exports.has_slot(Slot(3)) && exports.has_had(Slot(3)) && !exports.has(Slot(3).first_digest()));
        assert_eq!((exports.len(), exports.reported(), exports.since(Slot(3))), (2, 2, None));
        assert_eq!(exports.complete(Slot(2), Epoch(8)), Ok(vec![Slot(5)]));
        assert_eq!(exports.slots().collect::<Vec<_>>(), [(Slot(4), Epoch(7))]);
        // A map that is lost ends all; only one of them still has objects here.
        assert_eq!(exports.end_former(None), [Slot(4)]);
        assert_eq!((exports.len(), exports.complete, exports.has_had(Slot(3))), (0, 0, false));
    }
}

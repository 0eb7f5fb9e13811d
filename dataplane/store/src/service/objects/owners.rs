//! Slots change hands: a map gives slots to this shard and takes others, and each component of the store acts on it.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::Digest;
use kvplane_proto::Status;
use kvplane_proto::ids::{Epoch, Incarnation, SLOTS, Slot};
use kvplane_proto::map::SlotOwners;

use super::Objects;
use crate::service::shard::Relation;
use crate::service::types::{CloseReason, MapStanding};

/// A map that gives slots and takes others.
pub(in crate::service) struct OwnerChange {
    epoch: Epoch,
    /// The map before it.
    heard: Epoch,
    /// It `missed` maps: nothing from before is to be trusted.
    missed: bool,
    /// Slots were lost: what is put in them is void.
    pub(in crate::service) has_lost: bool,
}

impl Objects {
    /// A map of this standing came, by which this shard has the slots that `owned` says: ends what it has of others.
    /// What moves goes along where the `owners` are known. Nothing happens where the map is older than one that was
    /// heard of. To be followed by [`Self::gain_slots`].
    pub(in crate::service) fn lose_slots(
        &mut self,
        epoch: Epoch,
        standing: MapStanding,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) -> Option<OwnerChange> {
        let heard = self.local.heard_epoch();
        if epoch < heard {
            return None;
        }
        self.local.restore(epoch, standing);
        // In an epoch that was missed, a slot may have been another's and come back: nothing from before it is to be
        // trusted, unless no slot has changed hands since, or only once, and in the way that the map tells.
        let told = owners.is_some_and(|owners| owners.from <= heard);
        let missed = heard != Epoch(0) && epoch.0 > heard.0 + 1 && standing.since > heard && !told;
        let shard = &mut self.local.shard;
        if let (true, Some(store)) = (missed, &mut shard.store) {
            shard.counters.dropped_objects += store.remove_all();
        }
        let ended = self.replication.follow(shard, epoch, missed, owners);
        self.end_relations(&ended, heard, missed, owners);
        let has_lost = self.end_slots(missed, owned, owners.filter(|_| !missed));
        if has_lost {
            self.local.refuse_void_puts();
        }
        Some(OwnerChange { epoch, heard, missed, has_lost })
    }

    /// Serves the slots that a map brings, and fetches what was in them, when what it takes is ended.
    pub(in crate::service) fn gain_slots(
        &mut self,
        change: &OwnerChange,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        self.migration.follow(&mut self.local, change.heard, change.missed, owned, owners);
        self.local.serve_slots(change.epoch, owned);
    }

    /// This shard is not the replica owner of these slots any more, by a map of which `heard` was the one before: their
    /// replicas become its own, or are kept for the new owner, or go.
    fn end_relations(
        &mut self,
        ended: &BTreeMap<Slot, Relation>,
        heard: Epoch,
        missed: bool,
        owners: Option<&SlotOwners>,
    ) {
        if ended.is_empty() {
            return;
        }
        let me = self.local.shard.ownership.key();
        // Over the connections on which replicas came, what is on its way belongs to owners of before.
        for peer in self.local.shard.sessions.select(|session| session.copies) {
            self.local.shard.close(peer, CloseReason::Refused(Status::WrongOwner));
        }
        // What happened to a slot is told by the map if its owners changed once since we heard, from what we knew.
        let told = |slot: Slot, before: &Relation| {
            owners
                .filter(|owners| !missed && owners.changed_once(slot, heard) && owners.past(slot) == Some(before.owner))
        };
        // What else is here of such a slot left with it before.
        let (mut cleared, mut exported) = (BTreeSet::new(), BTreeSet::new());
        for (slot, before) in ended {
            let Some(owners) = told(*slot, before) else { continue };
            let mine = owners.owner(*slot) == Some(me);
            if !mine && owners.address(before.owner).is_some() {
                continue;
            }
            if self.local.shard.exports.end(*slot) {
                self.local.lose_slot(*slot, false);
                cleared.insert(*slot);
            }
            if mine {
                self.local.shard.replicas.inherit(*slot);
            } else if self.local.shard.exports.begin(*slot, before.owner, me, Some(owners)) {
                exported.insert(*slot);
            }
        }
        let inherited = self.replication.reassign(&mut self.local.shard, ended, &cleared, &exported);
        if let Some(tiering) = &mut self.local.tiering {
            // Only the owner before had written them.
            tiering.demotion.inherit(inherited);
        }
    }

    /// Ends what this shard had of slots that it has no more, or may not have had in between: their objects stay for
    /// the new owners to fetch, if those may ask for them, or on the SSD to be compared, and go else. True where there
    /// were any.
    fn end_slots(&mut self, missed: bool, owned: &dyn Fn(u16) -> bool, owners: Option<&SlotOwners>) -> bool {
        let local = &mut self.local;
        let me = local.shard.ownership.key();
        // One that has nothing any more was away, or its node is: what an SSD has is kept to be compared.
        let idle = !(0..SLOTS as u16).any(owned);
        let ended = local.shard.exports.end_former(owners);
        let mut lost = !ended.is_empty();
        ended.into_iter().for_each(|slot| local.lose_slot(slot, false));
        // A slot that goes on before it is served is lost like one that was: an SSD may have its objects.
        let pending = local.pending_slots();
        for slot in (0..SLOTS as u16).map(Slot) {
            let had = local.shard.ownership.owned().has(slot) || pending.has(slot);
            if had && (missed || !owned(slot.0)) {
                lost = true;
                let kept = local.shard.ownership.close(slot) || local.is_doubted(slot);
                if !local.shard.exports.begin(slot, me, me, owners) {
                    local.lose_slot(slot, kept && (missed || idle));
                }
            }
        }
        let shard = &mut local.shard;
        if let (true, false, Some(store)) = (lost, missed, &mut shard.store) {
            let (ownership, exports, replicas) = (&shard.ownership, &shard.exports, &shard.replicas);
            let kept = |digest: Digest| ownership.owns(digest) || exports.has(digest) || replicas.keeps(digest.slot());
            shard.counters.dropped_objects += store.retain(kept);
        }
        lost
    }

    /// Starts a new incarnation of the shard. True where it had slots of which the SSD keeps something.
    pub(in crate::service) fn begin_incarnation(&mut self, incarnation: Incarnation) -> bool {
        self.local.shard.ownership.begin_incarnation(incarnation);
        let kept = self.local.end_incarnation();
        if kept {
            let shard = &mut self.local.shard;
            shard.counters.dropped_objects += shard.store.as_mut().map_or(0, crate::Store::remove_all);
            self.local.refuse_void_puts();
        }
        kept
    }
}

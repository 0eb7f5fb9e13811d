//! Changes of ownership: a map assigns slots to this shard and removes others, and each component acts on it.

use std::collections::BTreeSet;

use kvplane_proto::Digest;
use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, Incarnation, SLOTS, Slot};
use kvplane_proto::map::SlotOwners;
use kvplane_proto::message::{Bitmap, Operation, VersionItem};
use kvplane_tier::SlotSet;

use super::Objects;
use crate::service::local::LocalStore;
use crate::service::replication::records::{begin_replicas, end_replicas};
use crate::service::shard::Relation;
use crate::service::shard::answers::items_of;
use crate::service::shard::context::RequestContext;
use crate::service::shard::slot_table::SlotTable;
use crate::service::tiering::note_exports;
use crate::service::types::{CloseReason, MapStanding};
use crate::store::{OwnershipChange, ReplicaRole};

/// Map that assigns slots to this shard and removes others.
pub(in crate::service) struct OwnerChange {
    epoch: Epoch,
    /// Cluster state that the map belongs to; 0 if it is not known.
    state: u64,
    /// Epoch of the previous map.
    heard: Epoch,
    /// True if maps were missed: no state from before can be trusted.
    missed: bool,
    /// True if slots were lost: puts in progress in them are void.
    pub(in crate::service) has_lost: bool,
}

impl Objects {
    /// Ends the slots that this shard does not own by a new map with this epoch and standing, where `owned` returns
    /// true for the slots that it owns. Objects migrate if `owners` is known. Does nothing if the map is older than one
    /// seen before. To be followed by [`Self::gain_slots`].
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
        // In an epoch that was missed, a slot may have belonged to another owner and come back. State from before
        // cannot be trusted then, unless no slot has changed hands since, or only once and in the way that the map
        // states.
        let told = owners.is_some_and(|owners| owners.from <= heard);
        let missed = heard != Epoch(0) && epoch.0 > heard.0 + 1 && standing.since > heard && !told;
        let shard = &mut self.local.shard;
        if missed {
            shard.counters.dropped_objects += shard.store.remove_all();
        }
        let ended = self.replication.follow(shard, epoch, missed, owners);
        self.end_relations(&ended, heard, missed, owners);
        begin_replicas(&mut self.local);
        let has_lost = self.end_slots(missed, owned, owners.filter(|_| !missed));
        if let Some(tiering) = &mut self.local.tiering {
            note_exports(&mut tiering.ssd, &self.local.shard);
        }
        if has_lost {
            self.local.refuse_void_puts();
        }
        Some(OwnerChange { epoch, state: standing.state, heard, missed, has_lost })
    }

    /// Serves the slots that a map assigns, and fetches their objects, after the lost slots were ended.
    pub(in crate::service) fn gain_slots(
        &mut self,
        change: &OwnerChange,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        self.migration.follow(&mut self.local, change.heard, change.missed, owned, owners);
        if let Some(left) = self.local.kept.as_mut().and_then(|kept| kept.take_left_replicas()) {
            self.replication.take_over(&mut self.local.shard, left);
        }
        self.local.serve_slots(change.epoch, owned);
        if let (Some(sharing), Some(owners)) = (&mut self.local.sharing, owners) {
            sharing.follow(&self.local.shard, change.state, owners, change.missed);
        }
    }

    /// Ends this shard's role as the replica owner of these slots by a map after epoch `heard`: their replicas become
    /// objects of this shard, are exported to the new owner, or are dropped.
    fn end_relations(&mut self, ended: &SlotTable<Relation>, heard: Epoch, missed: bool, owners: Option<&SlotOwners>) {
        if ended.is_empty() {
            return;
        }
        let me = self.local.shard.ownership.key();
        // Replicas in flight on these connections belong to former owners.
        for peer in self.local.shard.sessions.select(|session| session.copies) {
            self.local.shard.close(peer, CloseReason::Refused(Status::WrongOwner));
        }
        // The map tells what happened to a slot if its owners changed once since epoch `heard`, from the owner that was
        // known, or from one that continues it.
        let told = |slot: Slot, before: &Relation| {
            let owners = owners.filter(|owners| !missed && owners.changed_once(slot, heard))?;
            Some((owners, owners.past(slot).filter(|past| past.continues(before.owner))?))
        };
        // Other objects of such a slot, which this shard still exported, are dropped first.
        let (mut cleared, mut exported) = (SlotSet::none(), SlotSet::none());
        for (slot, before) in ended.iter() {
            let Some((owners, past)) = told(slot, before) else { continue };
            let mine = owners.owner(slot) == Some(me);
            if !mine && owners.address(past).is_some() {
                continue;
            }
            if self.local.shard.exports.end(slot) {
                lose_exported(&mut self.local, slot);
                cleared.insert(slot);
            }
            if mine {
                self.local.shard.replicas.inherit(slot);
            } else if self.local.shard.exports.begin(slot, past, me, Some(owners)) {
                exported.insert(slot);
            }
        }
        end_replicas(&mut self.local, ended.slots(), &exported);
        let inherited = self.replication.reassign(&mut self.local.shard, ended, &cleared, &exported);
        if let Some(tiering) = &mut self.local.tiering {
            // Only the former owner had written them to an SSD.
            tiering.demotion.inherit(inherited);
        }
    }

    /// Ends slots that this shard has lost, or may not have owned in between. Their objects are exported if the new
    /// owners may fetch them, or stay on the SSD to be reconciled, or are dropped. Returns true if there were any such
    /// slots.
    fn end_slots(&mut self, missed: bool, owned: &dyn Fn(u16) -> bool, owners: Option<&SlotOwners>) -> bool {
        let local = &mut self.local;
        let me = local.shard.ownership.key();
        // A shard without slots was away, or its node is: its objects on an SSD are kept to be reconciled.
        let idle = !(0..SLOTS as u16).any(owned);
        let ended: BTreeSet<Slot> = local.shard.exports.end_former(owners).into_iter().collect();
        let mut lost = !ended.is_empty();
        drop_exported(local, &ended);
        // A slot that leaves again before it is served is lost like one that was served: an SSD may have its objects.
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
        if lost && !missed {
            let (ownership, exports, replicas) = (&shard.ownership, &shard.exports, &shard.replicas);
            let kept = |digest: Digest| ownership.owns(digest) || exports.has(digest) || replicas.keeps(digest.slot());
            shard.counters.dropped_objects += shard.store.retain(kept);
        }
        lost
    }

    /// Ends the exports to a new owner that has imported everything. What is left of them here was imported, removed or
    /// replaced there, and is void. A report by an earlier map than that of an export is refused.
    pub(in crate::service) fn end_exports(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let reports = items_of::<VersionItem>(header, body)?;
        let shard = &mut self.local.shard;
        let mut refused = (context.epoch > shard.ownership.epoch()).then_some(Status::WrongOwner);
        let (mut bits, mut ended) = (Vec::new(), BTreeSet::new());
        for item in reports {
            if refused.is_some() {
                break;
            }
            match shard.exports.complete(item.digest.slot(), Epoch(item.version.0)) {
                Ok(slots) => {
                    bits.push(!slots.is_empty());
                    ended.extend(slots);
                }
                Err(status) => refused = Some(status),
            }
        }
        drop_exported(&mut self.local, &ended);
        let shard = &mut self.local.shard;
        match refused {
            Some(status) => shard.refuse(context.peer, Operation::Remove, header.request, status),
            None => shard.answers.items(context.peer, Operation::Remove, header.request, bits.len(), |body| {
                Bitmap::encode(bits, body);
            }),
        }
        Ok(())
    }

    /// Starts a new incarnation of the shard. Returns true if it had slots of which the SSD keeps objects.
    pub(in crate::service) fn begin_incarnation(&mut self, incarnation: Incarnation) -> bool {
        let before = self.local.shard.ownership.key();
        self.local.shard.ownership.begin_incarnation(incarnation);
        if let Some(sharing) = &mut self.local.sharing {
            sharing.begin_incarnation(incarnation, before);
        }
        let kept = self.local.end_incarnation();
        if kept {
            let shard = &mut self.local.shard;
            shard.counters.dropped_objects += shard.store.remove_all();
            self.local.refuse_void_puts();
        }
        kept
    }
}

/// Drops what is left of slots whose export has ended: records, unless they are those of replicas, and objects in
/// memory, but not the replicas that the new owner has written.
fn drop_exported(local: &mut LocalStore, slots: &BTreeSet<Slot>) {
    if slots.is_empty() {
        return;
    }
    slots.iter().for_each(|slot| lose_exported(local, *slot));
    let shard = &mut local.shard;
    shard.counters.dropped_objects += shard.store.reassign(|digest, role| {
        let is_left = role != ReplicaRole::Replica && slots.contains(&digest.slot());
        if is_left { OwnershipChange::Dropped } else { OwnershipChange::Unchanged }
    });
}

/// Makes the records of a slot void whose export has ended. One that had no objects when its export began may have
/// replica records since, which stay.
fn lose_exported(local: &mut LocalStore, slot: Slot) {
    if !local.ssd().is_some_and(|ssd| ssd.replicas.is_open(slot)) {
        local.lose_slot(slot, false);
    }
}

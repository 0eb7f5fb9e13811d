//! Slots in doubt: the SSD has objects of slots that other owners have had since, or may have had. Objects that are
//! still the newest become visible when the slot is back; objects that were put or removed elsewhere meanwhile do not.
//!
//! A slot comes into doubt when a start cannot trust the device's ownership note, when this shard's incarnation
//! was declared dead, when it missed maps, or when it has no slots at all any more and the new owner cannot fetch from
//! it. Until the doubt is resolved, its records from before are hidden: neither returned nor removed. This lasts while
//! this shard owns nothing, as when it waits for its share.
//!
//! When a map assigns the slot to this shard again, one of these holds:
//! * No other owner had it meanwhile, by what the map tells of the layout before. All its records are valid.
//! * Its former owner knows all changes since this shard had it, and migration requests them. Records of changed
//!   objects are removed, the rest are valid. Reconciliation continues while the slot is served: objects that are put
//!   and removed here are newer.
//! * No shard knows the changes. The records are void, and are removed gradually.
//!
//! Objects of this incarnation have versions from `floor` on; they are never in doubt. The device's ownership note
//! names the slots in doubt until the removals are durable, so that a start in between does not trust the other
//! records.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot, Version};
use kvplane_tier::{Doubt, RecordView, SlotSet};

use crate::service::types::MapStanding;

/// Slots in doubt, and the progress of each.
#[derive(Debug)]
pub(in crate::service) struct Doubts {
    /// Cluster state that the epochs belong to.
    pub(in crate::service::tiering) state: u64,
    /// All slots in doubt, each with the epoch of the last map by which this shard had it.
    pub(in crate::service::tiering) epochs: BTreeMap<Slot, Epoch>,
    /// Slots whose records with versions below `floor` are hidden.
    pub(in crate::service::tiering) hidden: SlotSet,
    pub(in crate::service::tiering) floor: Version,
    /// Slots of these whose changes are requested from the former owner.
    pub(in crate::service::tiering) comparing: SlotSet,
    /// Slots whose changes no shard knows.
    pub(in crate::service::tiering) void: SlotSet,
    /// Number of void slots not yet reported to the operator.
    pub(in crate::service::tiering) untold: u64,
    /// Slots that become visible once all objects that others changed are removed.
    pub(in crate::service::tiering) known: SlotSet,
    pub(in crate::service::tiering) to_remove: VecDeque<Digest>,
    /// Slots that are visible, while removals may not be durable yet.
    pub(in crate::service::tiering) shown: SlotSet,
    /// Generation of the slots' sources when they were last checked.
    pub(in crate::service::tiering) generation: u64,
    /// Epoch of the record that was trusted at the start: slots are served by that map until there is another.
    pub(in crate::service::tiering) noted: Epoch,
    /// Newest map received.
    pub(in crate::service::tiering) standing: Option<(Epoch, MapStanding)>,
}

impl Doubts {
    pub(in crate::service::tiering) fn new() -> Self {
        Self {
            state: 0,
            epochs: BTreeMap::new(),
            hidden: SlotSet::none(),
            floor: Version(0),
            comparing: SlotSet::none(),
            void: SlotSet::none(),
            untold: 0,
            known: SlotSet::none(),
            to_remove: VecDeque::new(),
            shown: SlotSet::none(),
            generation: 0,
            noted: Epoch(0),
            standing: None,
        }
    }

    pub(in crate::service::tiering) fn hides(&self, view: &RecordView) -> bool {
        view.version < self.floor && self.hidden.has(view.digest.slot())
    }

    /// Returns true if a record is void.
    pub(in crate::service::tiering) fn is_void(&self, view: &RecordView) -> bool {
        view.version < self.floor && self.void.has(view.digest.slot())
    }

    /// Returns the part of an ownership note that describes the slots in doubt.
    pub(in crate::service::tiering) fn note(&self) -> Doubt {
        let Some(epoch) = self.epochs.values().min() else { return Doubt::none() };
        let mut slots = SlotSet::none();
        self.epochs.keys().for_each(|slot| slots.insert(*slot));
        Doubt { slots, epoch: *epoch, floor: self.floor }
    }

    /// Puts these slots in doubt, which this shard had last by a map of this epoch.
    pub(in crate::service::tiering) fn begin(&mut self, slots: impl Iterator<Item = Slot>, epoch: Epoch) {
        for slot in slots {
            let known = self.epochs.entry(slot).or_insert(epoch);
            *known = epoch.min(*known);
            self.hidden.insert(slot);
        }
    }

    /// Sets the version below which records are in doubt, and the cluster state of the epochs.
    pub(in crate::service::tiering) const fn set_bounds(&mut self, floor: Version, state: u64) {
        (self.floor, self.state) = (floor, state);
    }

    /// Trusts the device's ownership note at a start; it belongs to this map.
    pub(in crate::service::tiering) const fn believe(&mut self, epoch: Epoch) {
        self.noted = epoch;
    }

    pub(in crate::service::tiering) const fn heard(&mut self, epoch: Epoch, standing: MapStanding) {
        self.standing = Some((epoch, standing));
    }

    /// Makes these slots void.
    pub(in crate::service::tiering) fn make_void(&mut self, slots: &SlotSet) {
        for slot in slots.iter().filter(|slot| self.epochs.contains_key(slot)) {
            [&mut self.comparing, &mut self.known, &mut self.shown].into_iter().for_each(|set| set.remove(slot));
            self.void.insert(slot);
            self.hidden.insert(slot);
        }
    }

    /// Ends the doubt about a slot.
    pub(in crate::service::tiering) fn forget(&mut self, slot: Slot) {
        if self.epochs.remove(&slot).is_some() {
            let sets = [&mut self.hidden, &mut self.comparing, &mut self.void, &mut self.known, &mut self.shown];
            sets.into_iter().for_each(|set| set.remove(slot));
        }
    }

    /// Ends the doubt about void slots, whose records are gone.
    pub(in crate::service::tiering) fn end_void(&mut self) {
        let void = core::mem::replace(&mut self.void, SlotSet::none());
        void.iter().for_each(|slot| self.forget(slot));
    }

    /// Returns the slots that no map has assigned to this shard yet.
    pub(in crate::service::tiering) fn waiting(&self) -> Vec<(Slot, Epoch)> {
        let begun =
            |slot: Slot| [&self.comparing, &self.void, &self.known, &self.shown].iter().any(|set| set.has(slot));
        self.epochs.iter().filter(|(slot, _)| !begun(**slot)).map(|(slot, epoch)| (*slot, *epoch)).collect()
    }

    /// Returns true if a slot is in doubt, or was until a map assigned it to this shard.
    pub(in crate::service) fn has(&self, slot: Slot) -> bool {
        self.epochs.contains_key(&slot)
    }

    /// Returns the number of served slots whose records are hidden until they are reconciled.
    pub(in crate::service::tiering) fn reconciling(&self) -> u64 {
        self.comparing.count() + self.known.count()
    }

    /// Returns true if records of served slots are hidden that reconciliation may yet make visible.
    pub(in crate::service::tiering) fn are_compared(&self) -> bool {
        !self.epochs.is_empty() && (!self.comparing.is_empty() || !self.known.is_empty())
    }
}

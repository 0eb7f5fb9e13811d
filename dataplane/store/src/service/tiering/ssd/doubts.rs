//! Slots in doubt: the SSD has objects of them, and others have had them since, or may have. What is still the newest
//! there is counts when the slot is back; what was put or removed meanwhile does not.
//!
//! A slot comes into doubt when a start does not find the device's note good any more, when this shard's incarnation
//! was declared over, when it missed maps, or when it has no slots at all any more and the new owner may not ask it.
//! Until it is resolved, what the SSD has of it from before is hidden: neither given nor struck out. So it stays while
//! this shard owns nothing, as one that waits for its share does.
//!
//! When a map gives the slot to this shard again, one of these holds:
//! * Nobody else had it meanwhile, by what the map tells of the layout before. All counts.
//! * Its former owner knows all that was changed since this shard had it, and the migration asks it for that. What it
//!   tells of is struck out, the rest counts. The comparison goes on while the slot is served: what is put and removed
//!   here is newer.
//! * Nobody knows. What the SSD has is void, and is removed bit by bit.
//!
//! Objects of this incarnation have versions from `floor` on; they are never in doubt. The device's note says which
//! slots are in doubt until what was struck out is on the device, so a start in between does not take the rest for
//! good.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot, Version};
use kvplane_tier::{Doubt, RecordView, SlotSet};

use crate::service::types::MapStanding;

/// Slots in doubt, and how far each is.
#[derive(Debug)]
pub(in crate::service) struct Doubts {
    /// Which state of the control plane the epochs are of.
    pub(in crate::service::tiering) state: u64,
    /// All of them: by a map of which epoch this shard had each last.
    pub(in crate::service::tiering) epochs: BTreeMap<Slot, Epoch>,
    /// Those whose objects with lesser versions than `floor` are not given.
    pub(in crate::service::tiering) hidden: SlotSet,
    pub(in crate::service::tiering) floor: Version,
    /// Of these, those whose former owner is asked.
    pub(in crate::service::tiering) comparing: SlotSet,
    /// Those of which nobody knows.
    pub(in crate::service::tiering) void: SlotSet,
    /// How many of these the operator was not told of.
    pub(in crate::service::tiering) untold: u64,
    /// Those that will be shown when all is struck out that others changed.
    pub(in crate::service::tiering) known: SlotSet,
    pub(in crate::service::tiering) strikes: VecDeque<Digest>,
    /// Those that are shown, while what was struck out may not be on the device yet.
    pub(in crate::service::tiering) shown: SlotSet,
    /// Which sources of slots were looked at.
    pub(in crate::service::tiering) generation: u64,
    /// The map of the note that was believed at the start: what was served is by that until there is another.
    pub(in crate::service::tiering) noted: Epoch,
    /// The map that was heard of last.
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
            strikes: VecDeque::new(),
            shown: SlotSet::none(),
            generation: 0,
            noted: Epoch(0),
            standing: None,
        }
    }

    pub(in crate::service::tiering) fn hides(&self, view: &RecordView) -> bool {
        view.version < self.floor && self.hidden.has(view.digest.slot())
    }

    /// Whether an object counts for nothing any more.
    pub(in crate::service::tiering) fn is_void(&self, view: &RecordView) -> bool {
        view.version < self.floor && self.void.has(view.digest.slot())
    }

    /// What a note says of them.
    pub(in crate::service::tiering) fn note(&self) -> Doubt {
        let Some(epoch) = self.epochs.values().min() else { return Doubt::none() };
        let mut slots = SlotSet::none();
        self.epochs.keys().for_each(|slot| slots.insert(*slot));
        Doubt { slots, epoch: *epoch, floor: self.floor }
    }

    /// These slots were this shard's last by a map of this epoch.
    pub(in crate::service::tiering) fn begin(&mut self, slots: impl Iterator<Item = Slot>, epoch: Epoch) {
        for slot in slots {
            let known = self.epochs.entry(slot).or_insert(epoch);
            *known = epoch.min(*known);
            self.hidden.insert(slot);
        }
    }

    /// What is in doubt is from before this version, and its epochs are of this state.
    pub(in crate::service::tiering) const fn set_bounds(&mut self, floor: Version, state: u64) {
        (self.floor, self.state) = (floor, state);
    }

    /// A start believes its device's note, which is of this map.
    pub(in crate::service::tiering) const fn believe(&mut self, epoch: Epoch) {
        self.noted = epoch;
    }

    pub(in crate::service::tiering) const fn heard(&mut self, epoch: Epoch, standing: MapStanding) {
        self.standing = Some((epoch, standing));
    }

    /// Nobody knows of these slots.
    pub(in crate::service::tiering) fn make_void(&mut self, slots: &SlotSet) {
        for slot in slots.iter().filter(|slot| self.epochs.contains_key(slot)) {
            [&mut self.comparing, &mut self.known, &mut self.shown].into_iter().for_each(|set| set.remove(slot));
            self.void.insert(slot);
            self.hidden.insert(slot);
        }
    }

    /// A slot is not in doubt any more.
    pub(in crate::service::tiering) fn forget(&mut self, slot: Slot) {
        if self.epochs.remove(&slot).is_some() {
            let sets = [&mut self.hidden, &mut self.comparing, &mut self.void, &mut self.known, &mut self.shown];
            sets.into_iter().for_each(|set| set.remove(slot));
        }
    }

    /// What was void is gone.
    pub(in crate::service::tiering) fn end_void(&mut self) {
        let void = core::mem::replace(&mut self.void, SlotSet::none());
        void.iter().for_each(|slot| self.forget(slot));
    }

    /// Those that no map has given to this shard yet.
    pub(in crate::service::tiering) fn waiting(&self) -> Vec<(Slot, Epoch)> {
        let begun =
            |slot: Slot| [&self.comparing, &self.void, &self.known, &self.shown].iter().any(|set| set.has(slot));
        self.epochs.iter().filter(|(slot, _)| !begun(**slot)).map(|(slot, epoch)| (*slot, *epoch)).collect()
    }

    /// True for a slot that is in doubt, or was until a map gave it to this shard.
    pub(in crate::service) fn has(&self, slot: Slot) -> bool {
        self.epochs.contains_key(&slot)
    }

    /// True where anything of slots that are served is hidden that may yet be shown.
    pub(in crate::service::tiering) fn are_compared(&self) -> bool {
        !self.epochs.is_empty() && (!self.comparing.is_empty() || !self.known.is_empty())
    }
}

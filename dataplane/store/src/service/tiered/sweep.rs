//! Slots that went to another owner: what the SSD has of them is hidden at once, then removed bit by bit.
//!
//! Objects that the tier does not know in this incarnation, because it could not read them, cannot be removed one by
//! one. Where there may be such, the slots stay noted as void when the sweep is over, and the next start sweeps them
//! again.

use kvplane_proto::Digest;
use kvplane_proto::ids::{Slot, Version};
use kvplane_proto::map::SlotOwners;
use kvplane_tier::{RecordView, SlotSet};

use super::{Service, Strike};

/// Objects looked at in one round.
const STEP: usize = 256;
/// Removals that may wait before the sweep goes on.
const WAITING_MOST: usize = 256;

/// Slots of which the SSD may have void objects, and how far these are removed.
#[derive(Debug)]
pub(super) struct Sweep {
    pub(super) slots: SlotSet,
    /// Those of them that are served again: their objects are void below `floor` only.
    pub(super) regained: SlotSet,
    pub(super) floor: Version,
    /// Where in the tier's index the walk is; `None` when nothing that the tier knows is void.
    pub(super) at: Option<usize>,
    /// Whether this walk found anything.
    found: bool,
    /// Removals that the SSD has not taken yet.
    pub(super) waiting: usize,
}

impl Sweep {
    pub(super) fn new() -> Self {
        let (slots, regained) = (SlotSet::none(), SlotSet::none());
        Self { slots, regained, floor: Version(0), at: None, found: false, waiting: 0 }
    }

    /// Whether an object is void.
    pub(super) fn hides(&self, view: &RecordView) -> bool {
        self.at.is_some()
            && self.has(view.digest)
            && (view.version < self.floor || !self.regained.has(view.digest.slot()))
    }

    fn has(&self, digest: Digest) -> bool {
        self.slots.has(digest.slot())
    }

    /// These slots are served again: objects from `floor` on count.
    pub(super) fn regain(&mut self, slots: &SlotSet, floor: Version) {
        let void = slots.with(&self.slots, |slots, void| slots & void);
        if !void.is_empty() {
            self.regained = self.regained.with(&void, |one, other| one | other);
            self.floor = floor;
        }
    }
}

impl Service {
    /// A slot is another's from now on, or was in between: its objects stay for its owner to fetch, if that may ask for
    /// them, or else on the SSD to be compared, if they are to be `kept`.
    pub(in crate::service) fn lose_slot(&mut self, slot: usize, kept: bool, owners: Option<&SlotOwners>) {
        let at = Slot(slot as u16);
        let stays = self.export(at, self.ownership.key(), owners) || kept && self.doubt(at);
        if !stays {
            self.slot_left(slot);
        }
    }

    /// A slot is another's from now on.
    pub(in crate::service) fn slot_left(&mut self, slot: usize) {
        let Some(tiered) = &mut self.tiered else { return };
        tiered.doubts.forget(Slot(slot as u16));
        tiered.sweep.slots.0[slot / 64] |= 1 << (slot % 64);
        tiered.sweep.regained.0[slot / 64] &= !(1 << (slot % 64));
        tiered.sweep.at = Some(0);
    }

    /// Removes some of what is void.
    pub(super) fn sweep_tier(&mut self) -> bool {
        let Some(tiered) = &mut self.tiered else { return false };
        // What recovery has not found yet would be missed.
        let Some(at) = tiered.sweep.at.filter(|_| tiered.tier.is_recovered()) else { return false };
        if tiered.removals.len() >= WAITING_MOST {
            return false;
        }
        let (views, next) = tiered.tier.walk(at, STEP);
        let mut progress = !views.is_empty() || at > 0;
        let mut void = Vec::new();
        for view in views {
            let is_void = tiered.sweep.hides(&view) || tiered.doubts.is_void(&view);
            if is_void && !tiered.removing.contains(&view.digest) {
                tiered.sweep.found = true;
                tiered.counters.swept += 1;
                tiered.sweep.waiting += 1;
                tiered.queue_removal(view.digest, Strike::Swept);
                void.push(view.digest);
            }
        }
        // Objects move in the index while others are removed, so one was overlooked perhaps: until none is found.
        let again = core::mem::take(&mut tiered.sweep.found);
        tiered.sweep.found = again && next.is_some();
        tiered.sweep.at = next.or(Some(0));
        if next.is_none() && !again {
            if tiered.sweep.waiting > 0 || tiered.tier.is_settling() {
                return false;
            }
            tiered.sweep.at = None;
            if !tiered.tier.is_untracked() {
                (tiered.sweep.slots, tiered.sweep.regained) = (SlotSet::none(), SlotSet::none());
                tiered.doubts.end_void();
                tiered.noted.dirty = true;
            }
            progress = true;
        }
        void.into_iter().for_each(|digest| self.tell_of_ssd(digest));
        progress
    }
}

//! Slots that went to another owner: what the SSD has of them is hidden at once, then removed bit by bit.
//!
//! Objects that the tier does not know in this incarnation, because it could not read them, cannot be removed one by
//! one. Where there may be such, the slots stay noted as void when the sweep is over, and the next start sweeps them
//! again.

use kvplane_proto::Digest;
use kvplane_proto::ids::{Slot, Version};
use kvplane_tier::{RecordView, SlotSet};

use super::{Ssd, Strike};
use crate::service::shard::Shard;

/// Objects looked at in one round.
const STEP: usize = 256;
/// Removals that may wait before the sweep goes on.
const WAITING_MOST: usize = 256;

/// Slots of which the SSD may have void objects, and how far these are removed.
#[derive(Debug)]
pub(in crate::service) struct Sweep {
    pub(in crate::service::tiering) slots: SlotSet,
    /// Those of them that are served again: their objects are void below `floor` only.
    pub(in crate::service::tiering) regained: SlotSet,
    pub(in crate::service::tiering) floor: Version,
    /// Where in the tier's index the walk is; `None` when nothing that the tier knows is void.
    pub(in crate::service::tiering) at: Option<usize>,
    /// Whether this walk found anything.
    found: bool,
    /// Removals that the SSD has not taken yet.
    pub(in crate::service::tiering) waiting: usize,
    /// The last sweep left nothing void: the note on the SSD has to say so.
    ended: bool,
}

impl Sweep {
    pub(in crate::service::tiering) fn new() -> Self {
        let (slots, regained) = (SlotSet::none(), SlotSet::none());
        Self { slots, regained, floor: Version(0), at: None, found: false, waiting: 0, ended: false }
    }

    /// Whether an object is void.
    pub(in crate::service::tiering) fn hides(&self, view: &RecordView) -> bool {
        self.at.is_some()
            && self.has(view.digest)
            && (view.version < self.floor || !self.regained.has(view.digest.slot()))
    }

    /// True once after a sweep that left nothing void.
    pub(in crate::service::tiering) const fn take_ended(&mut self) -> bool {
        core::mem::replace(&mut self.ended, false)
    }

    fn has(&self, digest: Digest) -> bool {
        self.slots.has(digest.slot())
    }

    /// These slots are served again: objects from `floor` on count.
    pub(in crate::service::tiering) fn regain(&mut self, slots: &SlotSet, floor: Version) {
        let void = slots.with(&self.slots, |slots, void| slots & void);
        if !void.is_empty() {
            self.regained = self.regained.with(&void, |one, other| one | other);
            self.floor = floor;
        }
    }
}

impl Ssd {
    /// A slot is another's from now on.
    pub(in crate::service) fn lose_slot(&mut self, slot: Slot) {
        self.doubts.forget(slot);
        self.sweep.slots.insert(slot);
        self.sweep.regained.remove(slot);
        self.sweep.at = Some(0);
    }

    /// Removes some of what is void. True where there was anything to do.
    pub(in crate::service::tiering) fn sweep_void(&mut self, shard: &mut Shard) -> bool {
        // What recovery has not found yet would be missed.
        let Some(at) = self.sweep.at.filter(|_| self.tier.is_recovered()) else { return false };
        if self.removals.len() >= WAITING_MOST {
            return false;
        }
        let (views, next) = self.tier.walk(at, STEP);
        let mut progress = !views.is_empty() || at > 0;
        let mut void = Vec::new();
        for view in views {
            let is_void = self.sweep.hides(&view) || self.doubts.is_void(&view);
            if is_void && !self.removals.has(view.digest) {
                self.sweep.found = true;
                self.counters.swept += 1;
                self.sweep.waiting += 1;
                self.removals.add(view.digest, Strike::Swept);
                void.push(view.digest);
            }
        }
        // Objects move in the index while others are removed, so one was overlooked perhaps: until none is found.
        let again = core::mem::take(&mut self.sweep.found);
        self.sweep.found = again && next.is_some();
        self.sweep.at = next.or(Some(0));
        if next.is_none() && !again {
            if self.sweep.waiting > 0 || self.tier.is_settling() {
                return false;
            }
            self.sweep.at = None;
            if !self.tier.is_untracked() {
                (self.sweep.slots, self.sweep.regained) = (SlotSet::none(), SlotSet::none());
                self.doubts.end_void();
                self.sweep.ended = true;
            }
            progress = true;
        }
        void.into_iter().for_each(|digest| self.tell_of(shard, digest));
        progress
    }
}

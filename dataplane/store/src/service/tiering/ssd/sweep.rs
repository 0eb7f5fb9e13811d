//! Sweep of slots that went to another owner: their records are hidden at once, then removed gradually.
//!
//! Objects that the tier does not know in this incarnation, because it could not read them, cannot be removed one by
//! one. If there may be such, the slots stay recorded as void when the sweep is over, and the next start sweeps them
//! again.

use kvplane_proto::Digest;
use kvplane_proto::ids::{Slot, Version};
use kvplane_tier::{RecordView, SlotSet, Tier};

use super::doubts::Doubts;
use super::removals::{RemovalCause, Removals};

/// Index entries that one step looks at.
const STEP: usize = 256;
/// Waiting removals above which the sweep pauses.
const WAITING_MOST: usize = 256;

/// Slots of which the SSD may have void records, and the progress of their removal.
#[derive(Debug)]
pub(in crate::service) struct Sweep {
    pub(in crate::service::tiering) slots: SlotSet,
    /// Slots of them that are served again: only their records below `floor` are void.
    pub(in crate::service::tiering) regained: SlotSet,
    pub(in crate::service::tiering) floor: Version,
    /// Position in the tier's index; `None` if no record that the tier knows is void.
    pub(in crate::service::tiering) at: Option<usize>,
    /// True if this walk found any record.
    found: bool,
    /// Removals that the SSD has not written yet.
    pub(in crate::service::tiering) waiting: usize,
    /// True if the last sweep left no void record, which has to be recorded on the SSD.
    ended: bool,
}

/// Outcome of one step of the sweep.
#[derive(Debug)]
pub(super) struct SweepStep {
    /// Objects whose removal was enqueued.
    pub(super) void: Vec<Digest>,
    pub(super) progress: bool,
}

impl Sweep {
    pub(in crate::service::tiering) fn new() -> Self {
        let (slots, regained) = (SlotSet::none(), SlotSet::none());
        Self { slots, regained, floor: Version(0), at: None, found: false, waiting: 0, ended: false }
    }

    /// Returns true if a record is void.
    pub(in crate::service::tiering) fn hides(&self, view: &RecordView) -> bool {
        self.at.is_some()
            && self.has(view.digest)
            && (view.version < self.floor || !self.regained.has(view.digest.slot()))
    }

    /// Returns true once after a sweep that left no void record.
    pub(in crate::service::tiering) const fn take_ended(&mut self) -> bool {
        core::mem::replace(&mut self.ended, false)
    }

    fn has(&self, digest: Digest) -> bool {
        self.slots.has(digest.slot())
    }

    /// Marks slots as served again: records from `floor` on are valid.
    pub(in crate::service::tiering) fn regain(&mut self, slots: &SlotSet, floor: Version) {
        let void = slots.with(&self.slots, |slots, void| slots & void);
        if !void.is_empty() {
            self.regained = self.regained.with(&void, |one, other| one | other);
            self.floor = floor;
        }
    }
    /// Makes the records of a slot void that belongs to another owner from now on.
    pub(super) fn lose(&mut self, slot: Slot) {
        self.slots.insert(slot);
        self.regained.remove(slot);
        self.at = Some(0);
    }

    /// Enqueues the removal of some records that are void, by this sweep or because of `doubts`. When no void record is
    /// left, the doubt about void slots ends.
    pub(super) fn step(&mut self, tier: &Tier, removals: &mut Removals, doubts: &mut Doubts) -> SweepStep {
        let idle = SweepStep { void: Vec::new(), progress: false };
        // Records that recovery has not found yet would be missed.
        let Some(at) = self.at.filter(|_| tier.is_recovered()) else { return idle };
        if removals.len() >= WAITING_MOST {
            return idle;
        }
        let (views, next) = tier.walk(at, STEP);
        let mut step = SweepStep { progress: !views.is_empty() || at > 0, ..idle };
        for view in views {
            let is_void = self.hides(&view) || doubts.is_void(&view);
            if is_void && !removals.has(view.digest) {
                self.found = true;
                self.waiting += 1;
                removals.add(view.digest, RemovalCause::Swept);
                step.void.push(view.digest);
            }
        }
        // Entries move in the index while others are removed, so that a walk may miss one: repeat until a walk finds
        // none.
        let again = core::mem::take(&mut self.found);
        self.found = again && next.is_some();
        self.at = next.or(Some(0));
        if next.is_none() && !again {
            if self.waiting > 0 || tier.is_settling() {
                step.progress = false;
                return step;
            }
            self.at = None;
            if !tier.is_untracked() {
                (self.slots, self.regained) = (SlotSet::none(), SlotSet::none());
                doubts.end_void();
                self.ended = true;
            }
            step.progress = true;
        }
        step
    }
}

//! Slots that went to another owner: what the SSD has of them is hidden at once, then removed bit by bit.

use kvplane_proto::Digest;
use kvplane_proto::ids::{SLOTS, Version};
use kvplane_tier::RecordView;

use super::Service;

/// Objects looked at in one round.
const STEP: usize = 256;
/// Removals that may wait before the sweep goes on.
const WAITING_MOST: usize = 256;

/// Which slots were given away, and how far their objects are removed.
#[derive(Debug)]
pub(super) struct Sweep {
    slots: Box<[u64; SLOTS / 64]>,
    /// Objects of these slots with lesser versions are void.
    floor: Version,
    /// Where in the tier's index the walk is.
    at: Option<usize>,
    /// Whether this walk found anything.
    found: bool,
}

impl Sweep {
    pub(super) fn new() -> Self {
        Self { slots: Box::new([0; SLOTS / 64]), floor: Version(0), at: None, found: false }
    }

    /// Whether an object is void.
    pub(super) fn hides(&self, view: &RecordView) -> bool {
        self.at.is_some() && view.version < self.floor && self.has(view.digest)
    }

    fn has(&self, digest: Digest) -> bool {
        let slot = usize::from(digest.slot().0);
        self.slots[slot / 64] & (1 << (slot % 64)) != 0
    }
}

impl Service {
    /// A slot is another's from now on.
    pub(in crate::service) fn slot_left(&mut self, slot: usize) {
        let (Some(tiered), Some(store)) = (&mut self.tiered, &self.store) else { return };
        tiered.sweep.slots[slot / 64] |= 1 << (slot % 64);
        tiered.sweep.floor = store.next_version();
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
        for view in views {
            if tiered.sweep.hides(&view) && !tiered.removing.contains(&view.digest) {
                tiered.sweep.found = true;
                tiered.counters.swept += 1;
                tiered.queue_removal(view.digest, None);
            }
        }
        tiered.sweep.at = next;
        if next.is_none() {
            // Objects move in the index while others are removed, so one was overlooked perhaps: until none is found.
            tiered.sweep.at = core::mem::take(&mut tiered.sweep.found).then_some(0);
            if tiered.sweep.at.is_none() {
                tiered.sweep.slots.fill(0);
            }
        }
        true
    }
}

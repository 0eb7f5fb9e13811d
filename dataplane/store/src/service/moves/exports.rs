//! Slots that left: their objects stay as they were, for the new owners to fetch.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};

use super::super::Service;

/// Slots that others fetch from here, who owns them, and by which map that was heard of.
#[derive(Debug)]
pub(in crate::service) struct Exports {
    to: BTreeMap<Slot, (ShardKey, Epoch)>,
}

impl Exports {
    pub(super) const fn new() -> Self {
        Self { to: BTreeMap::new() }
    }

    /// Whether an object is in such a slot.
    pub(in crate::service) fn has(&self, digest: Digest) -> bool {
        !self.to.is_empty() && self.to.contains_key(&digest.slot())
    }

    /// Whether such an object may be removed by who asks by the map of this epoch: what the slot's new owner had of an
    /// earlier time is not for it to remove.
    pub(in crate::service) fn may_remove(&self, digest: Digest, epoch: Epoch) -> bool {
        self.to.get(&digest.slot()).is_some_and(|(_, since)| *since <= epoch)
    }

    pub(super) fn has_slot(&self, slot: Slot) -> bool {
        self.to.contains_key(&slot)
    }

    pub(super) fn len(&self) -> usize {
        self.to.len()
    }
}

impl Service {
    /// A slot leaves that was `whose` by the map before. Whether its objects stay for the new owner, which may ask for
    /// them: not where somebody else had it in between.
    pub(in crate::service) fn export(&mut self, slot: Slot, whose: ShardKey, owners: Option<&SlotOwners>) -> bool {
        let Some(owners) = owners.filter(|owners| owners.past(slot) == Some(whose)) else { return false };
        let Some(to) = owners.owner(slot).filter(|_| owners.former(slot) == Some(self.ownership.key())) else {
            return false;
        };
        self.moves.exports.to.insert(slot, (to, owners.epoch));
        true
    }

    /// Ends the export of a slot. Whether there was one.
    pub(in crate::service) fn end_export(&mut self, slot: Slot) -> bool {
        let was = self.moves.exports.to.remove(&slot).is_some();
        if was {
            self.slot_left(slot.0.into());
        }
        was
    }

    /// Ends the exports of slots whose new owner has them no more. Whether there were any.
    pub(in crate::service) fn end_exports(&mut self, owners: Option<&SlotOwners>) -> bool {
        let over = |slot: Slot, to: ShardKey| owners.is_none_or(|owners| owners.owner(slot) != Some(to));
        let exports = self.moves.exports.to.iter();
        let ended: Vec<Slot> = exports.filter(|(slot, (to, _))| over(**slot, *to)).map(|(slot, _)| *slot).collect();
        for slot in &ended {
            self.moves.exports.to.remove(slot);
            self.slot_left(slot.0.into());
        }
        !ended.is_empty()
    }
}

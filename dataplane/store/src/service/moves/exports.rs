//! Slots that left: their objects stay as they were, for the new owners to fetch.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::Slot;
use kvplane_proto::map::{ShardKey, SlotOwners};

use super::super::Service;

/// Slots that others fetch from here, and who owns them.
#[derive(Debug)]
pub(in crate::service) struct Exports {
    to: BTreeMap<Slot, ShardKey>,
}

impl Exports {
    pub(super) const fn new() -> Self {
        Self { to: BTreeMap::new() }
    }

    /// Whether an object is in such a slot.
    pub(in crate::service) fn has(&self, digest: Digest) -> bool {
        !self.to.is_empty() && self.to.contains_key(&digest.slot())
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
        let Some(to) = owners.owner(slot).filter(|_| owners.former(slot) == Some(self.key())) else { return false };
        self.moves.exports.to.insert(slot, to);
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
        let ended: Vec<Slot> = exports.filter(|(slot, to)| over(**slot, **to)).map(|(slot, _)| *slot).collect();
        for slot in &ended {
            self.moves.exports.to.remove(slot);
            self.slot_left(slot.0.into());
        }
        !ended.is_empty()
    }
}

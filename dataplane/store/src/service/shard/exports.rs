//! Slots that left: their objects stay as they were, for the new owners to fetch.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};

/// Slots that others fetch from here, who owns them, and by which map that was heard of.
#[derive(Debug, Default)]
pub(in crate::service) struct Exports {
    to: BTreeMap<Slot, (ShardKey, Epoch)>,
}

impl Exports {
    /// True for an object in such a slot.
    pub(in crate::service) fn has(&self, digest: Digest) -> bool {
        !self.to.is_empty() && self.to.contains_key(&digest.slot())
    }

    /// True where such an object may be removed by a peer with the map of this epoch: what the slot's new owner had of
    /// an earlier time is not for it to remove.
    pub(in crate::service) fn may_remove(&self, digest: Digest, epoch: Epoch) -> bool {
        self.to.get(&digest.slot()).is_some_and(|(_, since)| *since <= epoch)
    }

    pub(in crate::service) fn has_slot(&self, slot: Slot) -> bool {
        self.to.contains_key(&slot)
    }

    pub(in crate::service) fn len(&self) -> usize {
        self.to.len()
    }

    /// A slot leaves that was `former`'s by the map before. True where its objects stay at this shard, `me`, for the
    /// new owner to fetch: not where another owner had it in between.
    pub(in crate::service) fn begin(
        &mut self,
        slot: Slot,
        former: ShardKey,
        me: ShardKey,
        owners: Option<&SlotOwners>,
    ) -> bool {
        let Some(owners) = owners.filter(|owners| owners.past(slot) == Some(former)) else { return false };
        let Some(to) = owners.owner(slot).filter(|_| owners.former(slot) == Some(me)) else { return false };
        self.to.insert(slot, (to, owners.epoch));
        true
    }

    /// Ends the export of a slot. True where there was one.
    pub(in crate::service) fn end(&mut self, slot: Slot) -> bool {
        self.to.remove(&slot).is_some()
    }

    /// Ends the exports of slots whose new owner has them no more, and says which.
    pub(in crate::service) fn end_former(&mut self, owners: Option<&SlotOwners>) -> Vec<Slot> {
        let over = |slot: Slot, to: ShardKey| owners.is_none_or(|owners| owners.owner(slot) != Some(to));
        let ended: Vec<Slot> =
            self.to.iter().filter(|(slot, (to, _))| over(**slot, *to)).map(|(slot, _)| *slot).collect();
        for slot in &ended {
            self.to.remove(slot);
        }
        ended
    }
}

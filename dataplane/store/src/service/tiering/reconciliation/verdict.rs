//! Verdict on a slot whose objects were written before a map: whether they are still the newest.

use kvplane_proto::ids::{Epoch, SLOTS, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};

use super::{SlotSources, VoidCause};
use crate::service::types::MapStanding;

/// Verdict on the objects of a slot that this shard had by an earlier map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) enum SlotVerdict {
    /// No other shard had the slot since: they are the newest.
    Known,
    /// The slot's former owner may know what others changed meanwhile.
    Asked,
    /// No shard knows: they are void.
    Void,
    /// The slot belongs to another shard.
    Left,
}

/// Map by which slots are judged, and what is known of their owners.
pub(in crate::service) struct SlotJudge<'a> {
    pub(in crate::service) me: ShardKey,
    pub(in crate::service) epoch: Epoch,
    pub(in crate::service) standing: MapStanding,
    pub(in crate::service) sources: &'a SlotSources<'a>,
    pub(in crate::service) owned: &'a dyn Fn(u16) -> bool,
    pub(in crate::service) owners: Option<&'a SlotOwners>,
}

impl SlotJudge<'_> {
    /// Returns true if the map gives this shard any slot. One that has none yet waits for its share.
    pub(in crate::service) fn has_slots(&self) -> bool {
        (0..SLOTS as u16).any(self.owned)
    }

    /// Judges a slot that this shard had last by the map of epoch `had`, of this cluster state.
    pub(in crate::service) fn judge(&self, slot: Slot, had: Epoch, state: u64) -> SlotVerdict {
        if !(self.owned)(slot.0) {
            return SlotVerdict::Left;
        }
        let strange = self.standing.state != state || had > self.epoch || self.standing.kept > had;
        let stays = self.owners.is_some_and(|owners| {
            let before = owners.owner_before(slot);
            before.is_some_and(|before| (before.node, before.shard) == (self.me.node, self.me.shard))
                && owners.from.0 <= had.0 + 1
        });
        if !strange && (self.standing.since <= had || stays) {
            SlotVerdict::Known
        } else if !strange && (self.sources.has)(slot) {
            SlotVerdict::Asked
        } else {
            SlotVerdict::Void
        }
    }
}

/// Returns the reason for which everything is void that was written by a map of epoch `noted` of a cluster state;
/// `None` if it is valid or is to be judged slot by slot.
pub(in crate::service) fn distrust(state: u64, noted: Epoch, epoch: Epoch, standing: MapStanding) -> Option<VoidCause> {
    // 0 means no state.
    if state == 0 || state != standing.state {
        return Some(VoidCause::OtherState);
    }
    if noted > epoch {
        return Some(VoidCause::Newer { noted, known: epoch });
    }
    (standing.kept > noted).then_some(VoidCause::Moved { noted, since: standing.kept })
}

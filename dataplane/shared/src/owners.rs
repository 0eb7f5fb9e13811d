//! Owners of slots by the maps that a shard has followed, and since when they have had them: what a former owner wrote
//! counts from the epoch on from which it had a slot without a break.
//!
//! One map tells the owners of two layouts. A shard that has followed the maps before knows more: an owner that dies
//! before it has written a manifest under its last layout has written one under the layout before, and everything that
//! it did since then to a slot that it had all the while is in its log. So if nodes die together, and maps leave them
//! out one after the other, the objects of the later ones are found. A manifest from before that does not count: an
//! owner that has missed two layouts drops its objects before its next manifest.

use std::collections::BTreeMap;

use kvplane_proto::ids::{Epoch, Incarnation, SLOTS, Slot};
use kvplane_proto::map::ShardKey;
use kvplane_proto::narrowing::length_u16;
use kvplane_tier::SlotSet;

use crate::types::{SlotSource, SourceRule};

/// Owners by a map.
#[allow(missing_debug_implementations, reason = "it has functions")]
pub struct Owners<'a> {
    /// Cluster state that the epochs belong to.
    pub state: u64,
    /// Epoch of the map.
    pub epoch: Epoch,
    /// Epoch in which its layout began.
    pub since: Epoch,
    /// Epoch in which the layout before began.
    pub from: Epoch,
    /// Returns the owner of a slot.
    pub owner: &'a dyn Fn(Slot) -> Option<ShardKey>,
    /// Returns the owner of a slot when the layout before ended.
    pub owner_before: &'a dyn Fn(Slot) -> Option<ShardKey>,
    /// Returns true if a shard is a member's, in its present incarnation.
    pub is_member: &'a dyn Fn(ShardKey) -> bool,
    /// True if the shard that follows the map has owned slots, in its present incarnation, since the layout began.
    pub has_lasted: bool,
}

/// Owners by the newest map that a shard has followed.
#[derive(Debug, Default)]
pub struct OwnerHistory {
    state: u64,
    /// Shard that followed the newest map.
    follower: Option<ShardKey>,
    /// Epoch of the newest map; 0 before the first.
    heard: Epoch,
    /// Epochs in which its layout began, the one before, and the one before that.
    began: [Epoch; 3],
    /// Owner of each slot, and an epoch since which it has had the slot without a break.
    slots: Vec<(Option<ShardKey>, Epoch)>,
}

impl OwnerHistory {
    /// Follows a map. Returns the slots of the shard `me`, whose incarnation before was `last`, and their former
    /// owners.
    pub fn follow(&mut self, map: &Owners<'_>, me: ShardKey, last: Option<Incarnation>) -> (SlotSet, Vec<SlotSource>) {
        let Owners { epoch, since, from, .. } = *map;
        if self.state != map.state {
            *self = Self { state: map.state, ..Self::default() };
        }
        self.slots.resize(SLOTS, (None, Epoch(0)));
        // Else layouts may have come and gone unseen.
        let is_seen = self.heard > Epoch(0) && from.0 <= self.heard.0 + 1;
        let is_same_layout = self.heard >= since;
        // An incarnation that may have owned slots before, by maps that came too early for it.
        let is_new = self.follower.replace(me) != Some(me);
        let [known_since, known_before, known_earlier] = self.began;
        let earlier = match is_seen {
            _ if is_same_layout => known_earlier,
            true if from <= self.heard => known_before,
            true => known_since,
            false => from,
        };
        let mut owned = SlotSet::none();
        let mut sources: BTreeMap<ShardKey, SlotSource> = BTreeMap::new();
        for (slot, (known, known_from)) in (0..length_u16(SLOTS)).map(Slot).zip(&mut self.slots) {
            let (owner, before) = ((map.owner)(slot), (map.owner_before)(slot));
            let before_from = if is_seen && before.is_some() && *known == before { *known_from } else { from };
            if owner == Some(me) {
                owned.insert(slot);
                let former = last.map(|incarnation| ShardKey { incarnation, ..me });
                let source = match (map.has_lasted, before, former) {
                    (true, Some(before), Some(former)) if before == me && is_new => {
                        Some((former, SourceRule::Restarted, from))
                    }
                    (true, Some(before), _) if (map.is_member)(before) => {
                        Some((before, SourceRule::Alive { since }, before_from.max(earlier)))
                    }
                    (true, Some(before), _) => Some((before, SourceRule::Gone { since }, before_from.max(earlier))),
                    // If it had the slot in the layout before, too, a manifest of that time will do.
                    (false, _, Some(former)) => {
                        Some((former, SourceRule::Restarted, if before == Some(former) { from } else { since }))
                    }
                    _ => None,
                };
                if let Some((owner, rule, from)) = source {
                    let source = sources.entry(owner);
                    let source = source.or_insert_with(|| SlotSource { owner, slots: BTreeMap::new(), rule });
                    source.slots.entry(from).or_insert_with(SlotSet::none).insert(slot);
                }
            }
            let is_lasting = if is_same_layout { owner == *known } else { owner == before };
            *known_from = match (is_lasting, is_same_layout) {
                (true, true) => *known_from,
                (true, false) => before_from,
                // Also one that has restarted since: its stream is a new one.
                (false, _) => since,
            };
            *known = owner;
        }
        (self.heard, self.began) = (epoch, [since, from, earlier]);
        (owned, sources.into_values().collect())
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{NodeId, ShardId};

    use super::*;

    fn shard(node: u64) -> ShardKey {
        ShardKey { node: NodeId(node), incarnation: Incarnation(1), shard: ShardId(0) }
    }

    /// Follows a map as shard 9. Slot 0 belonged to node `before`, and belongs to node `now`; returns the epoch since
    /// which the former owner had it, if this shard gains it.
    fn follow(history: &mut OwnerHistory, epochs: [u64; 3], before: u64, now: u64) -> Option<(u64, SourceRule)> {
        let [epoch, since, from] = epochs.map(Epoch);
        let of = |node| move |slot: Slot| (slot.0 == 0).then(|| shard(node));
        let map = Owners {
            state: 1,
            epoch,
            since,
            from,
            owner: &of(now),
            owner_before: &of(before),
            is_member: &|shard| shard.node != NodeId(3),
            has_lasted: true,
        };
        let (owned, sources) = history.follow(&map, shard(9), None);
        assert_eq!(owned.has(Slot(0)), now == 9);
        sources.first().map(|source| (source.slots.first_key_value().expect("a slot").0.0, source.rule))
    }

    #[test]
    fn a_former_owner_had_a_slot_for_as_long_as_the_maps_tell_without_a_gap() {
        let gone = SourceRule::Gone { since: Epoch(9) };
        // Only the last map is known: the owner had the slot in the layout before.
        assert_eq!(follow(&mut OwnerHistory::default(), [9, 9, 7], 3, 9), Some((7, gone)));
        let mut history = OwnerHistory::default();
        for (epochs, before, now) in [([4, 4, 2], 2, 3), ([6, 4, 2], 2, 3), ([7, 7, 4], 3, 3)] {
            assert_eq!(follow(&mut history, epochs, before, now), None);
        }
        assert_eq!(follow(&mut history, [9, 9, 7], 3, 9), Some((4, gone)));
        // It may have missed two layouts.
        let mut history = OwnerHistory::default();
        for (epochs, before, now) in [([4, 4, 2], 3, 3), ([5, 5, 4], 3, 3), ([7, 7, 5], 3, 3)] {
            assert_eq!(follow(&mut history, epochs, before, now), None);
        }
        assert_eq!(follow(&mut history, [9, 9, 7], 3, 9), Some((5, gone)));
        // Layouts may have come and gone between the maps; or only one has, of which the last map tells the owners.
        for (from, had_from) in [(8, 8), (7, 4)] {
            let mut history = OwnerHistory::default();
            assert_eq!(follow(&mut history, [6, 4, 2], 3, 3), None);
            assert_eq!(follow(&mut history, [9, 9, from], 3, 9), Some((had_from, gone)));
        }
    }

    #[test]
    fn an_owner_that_had_a_slot_with_a_break_had_it_since_it_came_back() {
        let mut history = OwnerHistory::default();
        for (epochs, before, now) in [([4, 4, 2], 3, 3), ([5, 5, 4], 3, 2), ([6, 6, 5], 2, 3), ([7, 7, 6], 3, 3)] {
            assert_eq!(follow(&mut history, epochs, before, now), None);
        }
        assert_eq!(follow(&mut history, [8, 8, 7], 3, 9), Some((6, SourceRule::Gone { since: Epoch(8) })));
        let mut history = OwnerHistory::default();
        assert_eq!(follow(&mut history, [8, 8, 7], 2, 9), Some((7, SourceRule::Alive { since: Epoch(8) })));
    }
}

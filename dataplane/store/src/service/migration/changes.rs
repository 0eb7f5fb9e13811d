//! Changes in slots whose former owners are absent: the objects that an owner that comes back, with an SSD, must not
//! return any more.
//!
//! A shard that gains a slot whose former owner is gone has none of its objects: it is the slot's *interim owner*. From
//! then on it records the digests of all objects that are put and removed there: the *changes* since that owner's
//! *absence* began. When the slot goes back, the owner fetches the changes from the interim owner and removes those
//! objects from its SSD; all its other records of the slot are still the newest.
//!
//! Correctness:
//! * An absence means: every object of the slot that any other owner put or removed, under a map of this epoch or a
//!   later one, is among the changes. It is begun with the first map that assigns the slot to this shard, and only by
//!   an incarnation that has existed since that map's layout began: no earlier incarnation can have served the slot.
//! * The epoch is the one since which that owner had the slot without interruption, as far as this shard knows: no
//!   other shard changed the slot between then and the absence.
//! * The changes migrate with a slot: the next interim owner fetches them too, and takes an absence as known only when
//!   all of them were received.
//! * Changes are kept in memory and are bounded. A slot with too many changes is forgotten as a whole, and so are all
//!   changes of a shard that missed maps: the objects of an absent owner cannot be trusted then, and are void.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, NodeId, SLOTS, ShardId, Slot, Version};
use kvplane_proto::map::{ShardKey, SlotOwners};
use kvplane_proto::message::{Item, KEY_PAGE_BYTES, KeyItem};
use kvplane_proto::rng::mix64;

use crate::service::shard::Shard;
use crate::service::shard::slot_table::SlotTable;
use crate::service::tiering::reconciliation::changes::{ABSENCES_MOST, Absence, Changes};

/// Most digests of all slots together.
const DIGESTS_MOST: usize = 1 << 18;
/// Items of a page.
const PAGE_ITEMS: usize = KEY_PAGE_BYTES / KeyItem::BYTES;
/// Bits of a walk's position that count the slot's digests before it.
const PLACE_BITS: u32 = 18;

const _: () = assert!(DIGESTS_MOST <= 1 << PLACE_BITS && PLACE_BITS + SLOTS.trailing_zeros() == 32);

/// Changes of all slots.
#[derive(Debug, Default)]
pub(super) struct Witness {
    slots: SlotTable<Changes>,
    /// Number of digests of all slots.
    digests: usize,
    /// Number of slots forgotten: an exporter's answers so far are incomplete when it grows.
    forgotten: u64,
    /// Epoch since which the owner of each slot by the newest map has had it, as far as is known; empty before a map.
    steady: Vec<Epoch>,
}

impl Witness {
    /// Records that an object was put or removed, by a map of this epoch.
    pub(super) fn note(&mut self, digest: Digest, epoch: Epoch) {
        if self.slots.is_empty() {
            return;
        }
        let Some(changes) = self.slots.get_mut(digest.slot()) else { return };
        self.digests += usize::from(changes.change(digest, epoch));
        self.bound();
    }

    /// Forgets the slots with the most changes while there are too many.
    fn bound(&mut self) {
        while self.digests > DIGESTS_MOST {
            let most = self.slots.iter().max_by_key(|(_, changes)| changes.digests.len()).map(|(slot, _)| slot);
            let Some(slot) = most else { return };
            self.forget(slot);
        }
    }

    fn forget(&mut self, slot: Slot) -> Option<Changes> {
        let changes = self.slots.remove(slot)?;
        self.forgotten += 1;
        self.digests -= changes.digests.len();
        Some(changes)
    }

    /// Forgets all changes: the objects of absent owners cannot be trusted any more.
    pub(super) fn clear(&mut self) {
        (self.slots, self.digests) = (SlotTable::default(), 0);
        self.forgotten += 1;
    }

    /// Returns the number that identifies the walk through the changes, in the incarnation that `walk_tag` identifies,
    /// until a slot is forgotten; never 0.
    pub(super) fn tag(&self, walk_tag: u64) -> u64 {
        mix64(walk_tag ^ mix64(self.forgotten)) | 1
    }

    /// Returns the changes of a slot.
    #[cfg(test)]
    pub(super) fn of(&self, slot: Slot) -> Option<&Changes> {
        self.slots.get(slot)
    }

    /// Adds the changes that a former owner has reported, for slots whose changes this shard has recorded since it
    /// gained them.
    pub(super) fn inherit(&mut self, told: BTreeMap<Slot, Changes>, me: ShardKey) {
        for (slot, told) in told {
            let Some(changes) = self.slots.get_mut(slot) else { continue };
            let others: Vec<Absence> = told.absences.into_iter().filter(|absence| !absence.is_of(me)).collect();
            if others.is_empty() {
                continue;
            }
            others.into_iter().for_each(|absence| changes.add(absence));
            let new = told.digests.into_iter().filter(|(digest, epoch)| changes.change(*digest, *epoch)).count();
            self.digests += new;
        }
        self.bound();
    }

    /// Ends the absence of a former owner, which exists and has no objects of these slots left.
    pub(super) fn end_absence(&mut self, slots: impl Iterator<Item = Slot>, of: ShardKey) {
        for slot in slots {
            let Some(changes) = self.slots.get_mut(slot) else { continue };
            changes.absences.retain(|absence| !absence.is_of(of));
            if changes.absences.is_empty() {
                self.forget(slot);
            }
        }
    }

    /// Follows a map after epoch `heard`: begins absences, and keeps the changes of slots that migrate again. If maps
    /// were `missed`, all changes are forgotten. To be called after exports were updated, and before any slot is served
    /// by the map.
    pub(super) fn follow(&mut self, shard: &Shard, heard: Epoch, missed: bool, owners: Option<&SlotOwners>) {
        let Some(owners) = owners else {
            self.clear();
            self.steady.clear();
            return;
        };
        let me = shard.ownership.key();
        if missed {
            self.clear();
        }
        if owners.since <= heard && !self.steady.is_empty() {
            return;
        }
        let told = heard != Epoch(0) && owners.from <= heard && self.steady.len() == SLOTS && !missed;
        let lasts = owners.has_lasted(me);
        let same = |one: ShardKey, other: ShardKey| (one.node, one.shard) == (other.node, other.shard);
        self.steady.resize(SLOTS, Epoch(0));
        for slot in (0..SLOTS as u16).map(Slot) {
            let (now, before) = (owners.owner(slot), owners.owner_before(slot));
            let stays = now.zip(before).is_some_and(|(now, before)| same(now, before));
            let steady = &mut self.steady[usize::from(slot.0)];
            let began = if told { *steady } else { owners.from };
            *steady = if stays { began } else { owners.since };
            let mine = now == Some(me);
            if !mine {
                if !shard.exports.has_had(slot) {
                    self.forget(slot);
                }
                continue;
            }
            let Some(before) = before.filter(|_| !stays) else { continue };
            let frozen = self.forget(slot);
            if !lasts {
                continue;
            }
            // Changes recorded when this shard had the slot before that owner still hold for that owner.
            let mut changes = frozen.filter(|_| told).unwrap_or_default();
            changes.absences.retain(|absence| absence.is_of(before));
            if changes.absences.is_empty() {
                changes.digests.clear();
            }
            changes.add(Absence { node: before.node, shard: before.shard, since: began });
            self.digests += changes.digests.len();
            self.slots.insert(slot, changes);
        }
    }

    /// Returns the items of a page from a position of the walk on, of the slots for which `told` returns true, and the
    /// position of the next page; 0 after the last.
    pub(super) fn page(&self, from: u64, told: &dyn Fn(Slot) -> bool) -> (Vec<KeyItem>, u64) {
        let (first, skipped) = (Slot((from >> PLACE_BITS) as u16), from as usize & ((1 << PLACE_BITS) - 1));
        let mut items = Vec::new();
        for (slot, changes) in self.slots.iter_from(first).filter(|(slot, _)| told(*slot)) {
            let skipped = if slot == first { skipped } else { 0 };
            if items.len() + ABSENCES_MOST >= PAGE_ITEMS {
                return (items, u64::from(slot.0) << PLACE_BITS | skipped as u64);
            }
            if skipped == 0 {
                items.extend(changes.absences.iter().map(|absence| header(slot, absence)));
            }
            for (place, (digest, epoch)) in changes.digests.iter().enumerate().skip(skipped) {
                // The first digest of a slot is on the same page as the slot's headers.
                if items.len() >= PAGE_ITEMS && place > 0 {
                    return (items, u64::from(slot.0) << PLACE_BITS | place as u64);
                }
                items.push(KeyItem::plain(*digest, Version(epoch.0), 0, 0));
            }
        }
        (items, 0)
    }
}

/// Adds the items of a page.
pub(super) fn take_items(told: &mut BTreeMap<Slot, Changes>, items: impl Iterator<Item = KeyItem>) {
    for item in items {
        let changes = told.entry(item.digest.slot()).or_default();
        if item.digest.0 << 14 == 0 {
            let shard = ShardId(item.group as u16);
            changes.add(Absence { node: NodeId(item.bytes), shard, since: Epoch(item.version.0) });
        } else {
            // An earlier version does not state the epoch.
            let epoch = if item.version.0 == 0 { Epoch(u64::MAX) } else { Epoch(item.version.0) };
            changes.change(item.digest, epoch);
        }
    }
}

const fn header(slot: Slot, absence: &Absence) -> KeyItem {
    let digest = slot.first_digest();
    let (version, group) = (Version(absence.since.0), absence.shard.0 as u64);
    KeyItem { group, ..KeyItem::plain(digest, version, absence.node.0, 0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: ShardKey =
        ShardKey { node: NodeId(1), incarnation: kvplane_proto::ids::Incarnation(1), shard: ShardId(0) };

    fn digest(slot: u16, number: u64) -> Digest {
        Digest(u128::from(slot) << 114 | u128::from(number))
    }

    fn absence(node: u64, since: u64) -> Absence {
        Absence { node: NodeId(node), shard: ShardId(0), since: Epoch(since) }
    }

    /// Returns a witness that records the changes of this many slots, since node 2 left.
    fn witness(slots: u16) -> Witness {
        let mut witness = Witness::default();
        for slot in 0..slots {
            let changes = Changes { absences: vec![absence(2, 5)], digests: BTreeMap::new() };
            witness.slots.insert(Slot(slot), changes);
        }
        witness
    }

    #[test]
    fn pages_contain_all_changes_of_exported_slots() {
        for (slots, each) in [(1, 0), (1, 5_000), (300, 1), (40, 130), (3, 3_000)] {
            let mut witness = witness(slots);
            for slot in 0..slots {
                (1..=each).for_each(|number| witness.note(digest(slot, number), Epoch(1 + number % 9)));
            }
            let told_of = |slot: Slot| slot.0 % 3 != 1;
            let (mut told, mut from, mut pages) = (BTreeMap::new(), 0, 0);
            loop {
                let (items, next) = witness.page(from, &told_of);
                assert!(items.len() * KeyItem::BYTES <= KEY_PAGE_BYTES + KeyItem::BYTES);
                take_items(&mut told, items.into_iter());
                (from, pages) = (next, pages + 1);
                if next == 0 {
                    break;
                }
            }
            assert!(pages < 40, "{pages} pages");
            witness.slots.retain(|slot, _| told_of(slot));
            let told: SlotTable<Changes> = told.into_iter().collect();
            assert_eq!(told, witness.slots, "{slots} slots with {each} changes");
        }
    }

    #[test]
    fn too_many_changes_forget_the_slot_with_the_most() {
        let mut witness = witness(2);
        witness.note(digest(0, 1), Epoch(6));
        (0..DIGESTS_MOST as u64).for_each(|number| witness.note(digest(1, number + 1), Epoch(6)));
        assert_eq!((witness.of(Slot(1)), witness.digests), (None, 1));
        witness.note(digest(1, 7), Epoch(6));
        assert_eq!(witness.of(Slot(0)).map(|changes| changes.digests.len()), Some(1));
        assert_eq!(witness.of(Slot(1)), None, "what was forgotten is not begun anew in the middle");
    }

    #[test]
    fn changes_of_a_former_owner_are_added_to_slots_recorded_since() {
        let mut witness = witness(1);
        witness.note(digest(0, 1), Epoch(6));
        let told = |slot| {
            let absences = vec![absence(3, 2), absence(1, 4), absence(2, 1)];
            (Slot(slot), Changes { absences, digests: BTreeMap::from([(digest(slot, 9), Epoch(3))]) })
        };
        witness.inherit(BTreeMap::from([told(0), told(1)]), ME);
        let changes = witness.of(Slot(0)).expect("changes");
        assert_eq!(changes.absences, [absence(2, 1), absence(3, 2)], "our own is over");
        assert_eq!(changes.digests, BTreeMap::from([(digest(0, 1), Epoch(6)), (digest(0, 9), Epoch(3))]));
        assert_eq!(
            changes.since(Epoch(3)).collect::<Vec<_>>(),
            [digest(0, 1)],
            "who had the slot by that map knows the other"
        );
        assert_eq!((witness.of(Slot(1)), witness.digests), (None, 2), "nothing was kept of it here");
        witness.end_absence(core::iter::once(Slot(0)), ShardKey { node: NodeId(2), ..ME });
        assert_eq!(witness.of(Slot(0)).map(|changes| changes.absences.len()), Some(1));
        witness.end_absence(core::iter::once(Slot(0)), ShardKey { node: NodeId(3), ..ME });
        assert_eq!((witness.of(Slot(0)), witness.digests), (None, 0));
    }
}

//! What changed in slots while those who had them before were away: what an owner that comes back, with an SSD, must
//! not give any more.
//!
//! A shard that gets a slot whose owner before is gone has nothing of what was in it. From then on it keeps the digests
//! of all that is put and removed there: the *changes* since that owner's *absence* began. When the slot goes back, the
//! owner asks for them, strikes them out, and all else that its SSD has of the slot is still the newest there is.
//!
//! What makes it right:
//! * An absence says: whatever was put or removed in the slot by any other than this owner, under a map of this epoch
//!   or a later one, is among the changes. It is begun with the first map that gives the slot to this shard, and only
//!   by an incarnation that has been there since that map's layout began: no incarnation before it can have served the
//!   slot.
//! * The epoch is the one since which that owner had the slot without a break, as far as this shard has heard: then
//!   nobody else changed anything up to the absence.
//! * A slot that goes on takes its changes along: the next owner asks for them too, and knows of an absence only when
//!   all of them have come.
//! * They are kept in memory and are bounded. A slot whose changes are too many is forgotten, whole, and so is what a
//!   shard that missed maps knew: then nobody vouches for what an absent owner has, and it is void.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, NodeId, SLOTS, ShardId, Slot, Version};
use kvplane_proto::map::{ShardKey, SlotOwners};
use kvplane_proto::message::{Item, KEY_PAGE_BYTES, KeyItem};
use kvplane_proto::rng::mix64;

use crate::service::shard::Shard;
use crate::service::tiering::reconciliation::changes::{ABSENCES_MOST, Absence, Changes};

/// Digests of all slots together.
const DIGESTS_MOST: usize = 1 << 18;
/// Items of a page.
const PAGE_ITEMS: usize = KEY_PAGE_BYTES / KeyItem::BYTES;
/// Bits of a place in a walk that say how many digests of the slot went before.
const PLACE_BITS: u32 = 18;

const _: () = assert!(DIGESTS_MOST <= 1 << PLACE_BITS && PLACE_BITS + SLOTS.trailing_zeros() == 32);

/// The changes of all slots.
#[derive(Debug, Default)]
pub(super) struct Witness {
    slots: BTreeMap<Slot, Changes>,
    /// Digests in all of them.
    digests: usize,
    /// Grows whenever a slot is forgotten: what was told of it so far is then not all.
    forgotten: u64,
    /// Since which epoch the owner of each slot by the newest map has had it, as far as was heard; empty before a map.
    steady: Vec<Epoch>,
}

impl Witness {
    /// Something was put or removed, by a map of this epoch.
    pub(super) fn note(&mut self, digest: Digest, epoch: Epoch) {
        if self.slots.is_empty() {
            return;
        }
        let Some(changes) = self.slots.get_mut(&digest.slot()) else { return };
        self.digests += usize::from(changes.change(digest, epoch));
        self.bound();
    }

    /// Forgets the slots with the most changes, when all are too many.
    fn bound(&mut self) {
        while self.digests > DIGESTS_MOST {
            let most = self.slots.iter().max_by_key(|(_, changes)| changes.digests.len()).map(|(slot, _)| *slot);
            let Some(slot) = most else { return };
            self.forget(slot);
        }
    }

    fn forget(&mut self, slot: Slot) -> Option<Changes> {
        let changes = self.slots.remove(&slot)?;
        self.forgotten += 1;
        self.digests -= changes.digests.len();
        Some(changes)
    }

    /// Nobody vouches any more for what absent owners have.
    pub(super) fn clear(&mut self) {
        (self.slots, self.digests) = (BTreeMap::new(), 0);
        self.forgotten += 1;
    }

    /// Names the walk through what changed, while nothing of it is forgotten, in the incarnation that `walk_tag` names;
    /// never 0.
    pub(super) fn tag(&self, walk_tag: u64) -> u64 {
        mix64(walk_tag ^ mix64(self.forgotten)) | 1
    }

    /// What is known of a slot.
    #[cfg(test)]
    pub(super) fn of(&self, slot: Slot) -> Option<&Changes> {
        self.slots.get(&slot)
    }

    /// A former owner has told what it knows of slots: it counts where this shard kept changes ever since it has them.
    pub(super) fn inherit(&mut self, told: BTreeMap<Slot, Changes>, me: ShardKey) {
        for (slot, told) in told {
            let Some(changes) = self.slots.get_mut(&slot) else { continue };
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

    /// A former owner that is still there has nothing left of these slots.
    pub(super) fn end_absence(&mut self, slots: impl Iterator<Item = Slot>, of: ShardKey) {
        for slot in slots {
            let Some(changes) = self.slots.get_mut(&slot) else { continue };
            changes.absences.retain(|absence| !absence.is_of(of));
            if changes.absences.is_empty() {
                self.forget(slot);
            }
        }
    }

    /// Takes note of a map, of which `heard` was the one before: of absences that begin with it, and of slots that go
    /// on. What was there is not to be trusted if that `missed` something. To be called when it is known what is
    /// exported, and before anything is served by the map.
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
                if !shard.exports.has_slot(slot) {
                    self.forget(slot);
                }
                continue;
            }
            let Some(before) = before.filter(|_| !stays) else { continue };
            let frozen = self.forget(slot);
            if !lasts {
                continue;
            }
            // What was kept of the slot, when this shard had it before that owner, holds for that owner still.
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

    /// The items of a page from a place of the walk on, of the slots that are told of; then the place of the next page,
    /// 0 after the last.
    pub(super) fn page(&self, from: u64, told: &dyn Fn(Slot) -> bool) -> (Vec<KeyItem>, u64) {
        let (first, skipped) = (Slot((from >> PLACE_BITS) as u16), from as usize & ((1 << PLACE_BITS) - 1));
        let mut items = Vec::new();
        for (slot, changes) in self.slots.range(first..).filter(|(slot, _)| told(**slot)) {
            let skipped = if *slot == first { skipped } else { 0 };
            if items.len() + ABSENCES_MOST >= PAGE_ITEMS {
                return (items, u64::from(slot.0) << PLACE_BITS | skipped as u64);
            }
            if skipped == 0 {
                items.extend(changes.absences.iter().map(|absence| header(*slot, absence)));
            }
            for (place, (digest, epoch)) in changes.digests.iter().enumerate().skip(skipped) {
                // The first of a slot goes with the headers.
                if items.len() >= PAGE_ITEMS && place > 0 {
                    return (items, u64::from(slot.0) << PLACE_BITS | place as u64);
                }
                items.push(KeyItem { digest: *digest, version: Version(epoch.0), ..nothing() });
            }
        }
        (items, 0)
    }
}

/// Takes the items of a page in.
pub(super) fn take_items(told: &mut BTreeMap<Slot, Changes>, items: impl Iterator<Item = KeyItem>) {
    for item in items {
        let changes = told.entry(item.digest.slot()).or_default();
        if item.digest.0 << 14 == 0 {
            let shard = ShardId(item.group as u16);
            changes.add(Absence { node: NodeId(item.bytes), shard, since: Epoch(item.version.0) });
        } else {
            // An earlier version does not say when.
            let epoch = if item.version.0 == 0 { Epoch(u64::MAX) } else { Epoch(item.version.0) };
            changes.change(item.digest, epoch);
        }
    }
}

const fn nothing() -> KeyItem {
    KeyItem {
        digest: Digest(0),
        version: Version(0),
        bytes: 0,
        group: 0,
        tenant: 0,
        soft_pin_ms: 0,
        key_bytes: 0,
        tenant_bytes: 0,
        data_type: 0,
        flags: 0,
    }
}

const fn header(slot: Slot, absence: &Absence) -> KeyItem {
    let digest = Digest((slot.0 as u128) << 114);
    let (version, group) = (Version(absence.since.0), absence.shard.0 as u64);
    KeyItem { digest, version, bytes: absence.node.0, group, ..nothing() }
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

    /// One that keeps the changes of so many slots, since node 2 left.
    fn witness(slots: u16) -> Witness {
        let mut witness = Witness::default();
        for slot in 0..slots {
            let changes = Changes { absences: vec![absence(2, 5)], digests: BTreeMap::new() };
            witness.slots.insert(Slot(slot), changes);
        }
        witness
    }

    #[test]
    fn pages_tell_all_changes_of_the_slots_that_left() {
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
            witness.slots.retain(|slot, _| told_of(*slot));
            assert_eq!(told, witness.slots, "{slots} slots with {each} changes");
        }
    }

    #[test]
    fn too_many_changes_cost_the_slot_that_has_the_most() {
        let mut witness = witness(2);
        witness.note(digest(0, 1), Epoch(6));
        (0..DIGESTS_MOST as u64).for_each(|number| witness.note(digest(1, number + 1), Epoch(6)));
        assert_eq!((witness.of(Slot(1)), witness.digests), (None, 1));
        witness.note(digest(1, 7), Epoch(6));
        assert_eq!(witness.of(Slot(0)).map(|changes| changes.digests.len()), Some(1));
        assert_eq!(witness.of(Slot(1)), None, "what was forgotten is not begun anew in the middle");
    }

    #[test]
    fn what_a_former_owner_knows_is_inherited_where_changes_were_kept_since() {
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

//! Objects that two owners have.
//!
//! The *first* owner of a slot orders everything. After it has made an object visible of which a second copy is wanted,
//! its client puts the bytes at the *second* owner too, out of its own pool. The second serves such a copy to who asks
//! for it as that, and becomes the owner of it when the first has left the map.
//!
//! What makes it right: **a copy is never older than what the first owner has acknowledged.**
//! * The first owner notes, before it sends anything, that the second may have a copy (`Mark::Copied`). When such an
//!   object is removed, replaced or evicted, the copy is *owed* a drop. Until the second has said that it has dropped
//!   it, no removal and no put of that object is answered as done.
//! * A client that was given an object is told whether there is a copy, and may read that for a while (a lease). Where
//!   the second owner is another by a new map, the former one is not asked for drops any more: then what it had copies
//!   of is acknowledged as gone only when all such leases are over. Who knows an older map is not told.
//! * Nothing is sent of an object while a drop of it is owed, and no drop while something is being sent. What was given
//!   up on a lost connection is never carried out later: the client fences it.
//! * The second owner takes and drops copies only as long as the map that it has heard of makes it the second of that
//!   very life of the first ([`Relation`]), and only from a peer with a map of that time.
//! * When owners change, copies go, but for those whose first owner has left: the second then owns them, or keeps them
//!   for the new first owner to fetch, as in a move. Both only if the map tells that nothing else happened in between.
//! * A first owner that begins another incarnation has no notes, and by another incarnation its copies are void.
//!
//! Copies are kept in memory only, and may be evicted like anything else: then there is one less than was thought. An
//! SSD notes of which objects copies were asked for: they are made again after a start, as far as memory has room.

mod first;
mod hot;
mod second;
mod ssd;
mod waits;
mod wished;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, SLOTS, Slot, Version};
use kvplane_proto::map::{ShardKey, SlotOwners};

use super::Service;
use super::types::CloseReason;
use crate::store::{Fate, Side};
pub use first::copy_of;
use first::{OwedRemoval, Push, Second};
use kvplane_proto::Status;
pub(super) use waits::CopyWaits;
pub use wished::ReplicaProgress;

/// What became of copies so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CopyCounters {
    /// Copies that second owners took.
    pub made: u64,
    /// Their bytes.
    pub made_bytes: u64,
    /// Times that an object was asked for so much that a copy of it was begun.
    pub hot: u64,
    /// Copies that they did not take, or not in time.
    pub failed: u64,
    /// Drops of copies that second owners acknowledged.
    pub dropped: u64,
    /// Answers that were refused, as a second owner did not say in time that it dropped a copy.
    pub refused: u64,
    /// Copies that were taken here as a second owner.
    pub taken: u64,
    /// Gets of copies that were answered here.
    pub served: u64,
    /// Copies that became our own, as the first owner left.
    pub inherited: u64,
    /// Drops that are owed to second owners now.
    pub owed: u64,
    /// Slots of which this shard is the second owner.
    pub second_slots: u64,
}

/// For whom we are the second owner of a slot, and since when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Relation {
    first: ShardKey,
    since: Epoch,
}

/// Both sides of copies.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Slots of which we are the second owner.
    relations: BTreeMap<Slot, Relation>,
    /// Slots that became our own with their copies, and are not served yet.
    inherited: BTreeSet<Slot>,
    /// The second owners of our slots, and how each does.
    seconds: BTreeMap<Slot, ShardKey>,
    peers: BTreeMap<ShardKey, Second>,
    /// Copies that have to go before anything of their objects is acknowledged. A digest that is all zeros below the
    /// slot means the whole slot.
    owed: BTreeMap<Digest, OwedRemoval>,
    /// Since which map the second owners are as they are, and when a client was last told that one has a copy.
    seconds_since: Epoch,
    told_ns: u64,
    /// Nothing of that can be asked for before this time, unless something changes.
    owed_idle_ns: u64,
    /// No answer is to be given up before this time; 0 where none waits.
    due_ns: u64,
    /// Objects on their way.
    pushes: BTreeMap<Digest, Push>,
    push_bytes: u64,
    /// Objects that are to be copied next.
    queue: VecDeque<(Digest, Version)>,
    /// Objects that were there when somebody wanted a copy of them, and when the next has its turn.
    wishes: VecDeque<Digest>,
    wish_ns: u64,
    /// Which objects are asked for most.
    heat: hot::Heat,
    /// Answers that wait for copies: of which version, and until when.
    awaited: BTreeMap<Digest, Vec<(Version, super::deferred::Slot, u64)>>,
    /// Where the walk for objects without a copy is, and when it goes on.
    walk: Option<u32>,
    walk_ns: u64,
    again: bool,
    /// The walk has not been through since owners changed.
    unwalked: bool,
    /// The same for what only the SSD has.
    ssd: ssd::SsdWalk,
    counters: CopyCounters,
}

impl Copies {
    /// Whether objects of a slot that is not served are kept, as copies, or as ours that are not served yet.
    pub(super) fn keeps(&self, slot: Slot) -> bool {
        self.relations.contains_key(&slot) || self.inherited.contains(&slot)
    }

    /// Whether all that lacked a copy when owners changed was found since.
    pub(super) const fn walked(&self) -> bool {
        !self.unwalked
    }

    /// Whether this shard was the second owner of a slot that is its own now, and has what is left of it.
    pub(super) fn inherited(&self, slot: Slot) -> bool {
        self.inherited.contains(&slot)
    }
}

impl Service {
    /// What became of copies so far.
    #[must_use]
    pub fn copy_counters(&self) -> CopyCounters {
        let copies = &self.copies;
        CopyCounters { owed: copies.owed.len() as u64, second_slots: copies.relations.len() as u64, ..copies.counters }
    }

    /// The second owner of a slot of ours.
    #[must_use]
    pub fn second_of(&self, slot: Slot) -> Option<ShardKey> {
        self.copies.seconds.get(&slot).copied()
    }

    /// Since which map this shard has been the second owner of a slot, for the same incarnation of the first.
    #[must_use]
    pub fn second_since(&self, slot: Slot) -> Option<Epoch> {
        self.copies.relations.get(&slot).map(|relation| relation.since)
    }

    /// A map came, or nothing is known of owners any more. `heard` is the map before; what was there is not to be
    /// trusted if that `missed` something. To be called before anything else learns of it.
    pub(super) fn change_copies(&mut self, epoch: Epoch, heard: Epoch, missed: bool, owners: Option<&SlotOwners>) {
        let me = self.ownership.key();
        let (mut relations, mut seconds) = (BTreeMap::new(), BTreeMap::new());
        if let Some(owners) = owners {
            for slot in (0..SLOTS as u16).map(Slot) {
                let (Some(first), Some(second)) = (owners.owner(slot), owners.second(slot)) else { continue };
                if first == me {
                    seconds.insert(slot, second);
                } else if second == me {
                    let before = self.copies.relations.get(&slot).filter(|before| before.first == first && !missed);
                    relations.insert(slot, before.copied().unwrap_or(Relation { first, since: epoch }));
                }
            }
        }
        let former = core::mem::replace(&mut self.copies.relations, relations);
        let owns = |slot: Slot| owners.is_some_and(|owners| owners.owner(slot) == Some(me));
        self.change_seconds(epoch, seconds, missed, &owns);
        self.copies.inherited.retain(|slot| owns(*slot) && !missed);
        let ended: BTreeMap<Slot, Relation> =
            former.into_iter().filter(|(slot, before)| self.copies.relations.get(slot) != Some(before)).collect();
        if ended.is_empty() {
            return;
        }
        self.close_copiers();
        // What happened to a slot is told by the map if its owners changed once since we heard, from what we knew.
        let told = |slot: Slot, before: &Relation| {
            owners
                .filter(|owners| !missed && owners.changed_once(slot, heard) && owners.past(slot) == Some(before.first))
        };
        // What else is here of such a slot left with it before.
        let (mut cleared, mut exported) = (BTreeSet::new(), BTreeSet::new());
        for (slot, before) in &ended {
            let Some(owners) = told(*slot, before) else { continue };
            let mine = owners.owner(*slot) == Some(me);
            if !mine && owners.address(before.first).is_some() {
                continue;
            }
            if self.end_export(*slot) {
                cleared.insert(*slot);
            }
            if mine {
                self.copies.inherited.insert(*slot);
            } else if self.export(*slot, before.first, Some(owners)) {
                exported.insert(*slot);
            }
        }
        self.reassign_copies(&ended, &cleared, &exported);
    }

    /// Copies and objects become what they are by the owners that are now known. Of the slots of `cleared` only copies
    /// are kept; those of `exported` are for their new owners to fetch.
    fn reassign_copies(
        &mut self,
        ended: &BTreeMap<Slot, Relation>,
        cleared: &BTreeSet<Slot>,
        exported: &BTreeSet<Slot>,
    ) {
        let Some(store) = &mut self.store else { return };
        let copies = &self.copies;
        let mut inherited = Vec::new();
        let gone = store.reassign(|digest, side| {
            let (slot, copy) = (digest.slot(), side == Side::Copy);
            match (copy, ended.contains_key(&slot)) {
                (false, _) if cleared.contains(&slot) => Fate::Goes,
                (false, _) => Fate::Stays,
                (true, false) if copies.relations.contains_key(&slot) => Fate::Stays,
                (true, true) if copies.inherited.contains(&slot) => {
                    inherited.push(digest);
                    Fate::Own
                }
                (true, true) if exported.contains(&slot) => Fate::Own,
                (true, _) => Fate::Goes,
            }
        });
        self.counters.dropped_objects += gone;
        self.copies.counters.inherited += inherited.len() as u64;
        if let Some(tiered) = &mut self.tiered {
            // Only the owner before had written them.
            tiered.inherit(inherited);
        }
    }

    /// Ends the connections over which copies come: what is on its way there belongs to owners of before.
    fn close_copiers(&mut self) {
        for peer in self.sessions.select(|session| session.copies) {
            self.sessions.close(&mut self.answers.outputs, peer, CloseReason::Refused(Status::WrongOwner));
        }
    }
}

//! Slots in doubt: the SSD has objects of them, and others have had them since, or may have. What is still the newest
//! there is counts when the slot is back; what was put or removed meanwhile does not.
//!
//! A slot comes into doubt when a start does not find the device's note good any more, when this shard's incarnation
//! was declared over, when it missed maps, or when it has no slots at all any more and the new owner may not ask it.
//! Until it is resolved, what the SSD has of it from before is hidden: neither given nor struck out. So it stays while
//! this shard owns nothing, as one that waits for its share does.
//!
//! When a map gives the slot to this shard again, one of these holds:
//! * Nobody else had it meanwhile, by what the map tells of the layout before. All counts.
//! * Its former owner knows all that was changed since this shard had it ([`super::super::moves`]). What that tells of
//!   is struck out, the rest counts. The comparison goes on while the slot is served: what is put and removed here is
//!   newer.
//! * Nobody knows. What the SSD has is void, and is removed bit by bit.
//!
//! Objects of this incarnation have versions from `floor` on; they are never in doubt. The device's note says which
//! slots are in doubt until what was struck out is on the device, so a start in between does not take the rest for
//! good.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, SLOTS, Slot, Version};
use kvplane_proto::map::SlotOwners;
use kvplane_tier::{Doubt, RecordView, SlotSet};

use super::super::Service;
use super::super::moves::Changes;
use super::super::types::MapStanding;
use super::ownership::VoidCause;
use super::{Strike, Tiering};

/// Removals that may wait before more is struck out.
const WAITING_MOST: usize = 256;

/// Slots in doubt, and how far each is.
#[derive(Debug)]
pub(super) struct Doubts {
    /// Which state of the control plane the epochs are of.
    state: u64,
    /// All of them: by a map of which epoch this shard had each last.
    epochs: BTreeMap<Slot, Epoch>,
    /// Those whose objects with lesser versions than `floor` are not given.
    hidden: SlotSet,
    floor: Version,
    /// Of these, those whose former owner is asked.
    comparing: SlotSet,
    /// Those of which nobody knows.
    void: SlotSet,
    /// How many of these the operator was not told of.
    untold: u64,
    /// Those that will be shown when all is struck out that others changed.
    known: SlotSet,
    strikes: VecDeque<Digest>,
    /// Those that are shown, while what was struck out may not be on the device yet.
    shown: SlotSet,
    /// Which sources of slots were looked at.
    generation: u64,
    /// The map of the note that was believed at the start: what was served is by that until there is another.
    noted: Epoch,
    /// The map that was heard of last.
    standing: Option<(Epoch, MapStanding)>,
}

impl Doubts {
    pub(super) fn new() -> Self {
        Self {
            state: 0,
            epochs: BTreeMap::new(),
            hidden: SlotSet::none(),
            floor: Version(0),
            comparing: SlotSet::none(),
            void: SlotSet::none(),
            untold: 0,
            known: SlotSet::none(),
            strikes: VecDeque::new(),
            shown: SlotSet::none(),
            generation: 0,
            noted: Epoch(0),
            standing: None,
        }
    }

    pub(super) fn hides(&self, view: &RecordView) -> bool {
        view.version < self.floor && self.hidden.has(view.digest.slot())
    }

    /// Whether an object counts for nothing any more.
    pub(super) fn is_void(&self, view: &RecordView) -> bool {
        view.version < self.floor && self.void.has(view.digest.slot())
    }

    /// What a note says of them.
    pub(super) fn note(&self) -> Doubt {
        let Some(epoch) = self.epochs.values().min() else { return Doubt::none() };
        let mut slots = SlotSet::none();
        self.epochs.keys().for_each(|slot| slots.insert(*slot));
        Doubt { slots, epoch: *epoch, floor: self.floor }
    }

    /// These slots were this shard's last by a map of this epoch.
    pub(super) fn begin(&mut self, slots: impl Iterator<Item = Slot>, epoch: Epoch) {
        for slot in slots {
            let known = self.epochs.entry(slot).or_insert(epoch);
            *known = epoch.min(*known);
            self.hidden.insert(slot);
        }
    }

    /// What is in doubt is from before this version, and its epochs are of this state.
    pub(super) const fn set_bounds(&mut self, floor: Version, state: u64) {
        (self.floor, self.state) = (floor, state);
    }

    /// A start believes its device's note, which is of this map.
    pub(super) const fn believe(&mut self, epoch: Epoch) {
        self.noted = epoch;
    }

    pub(super) const fn heard(&mut self, epoch: Epoch, standing: MapStanding) {
        self.standing = Some((epoch, standing));
    }

    /// Nobody knows of these slots.
    pub(super) fn make_void(&mut self, slots: &SlotSet) {
        for slot in slots.iter().filter(|slot| self.epochs.contains_key(slot)) {
            [&mut self.comparing, &mut self.known, &mut self.shown].into_iter().for_each(|set| set.remove(slot));
            self.void.insert(slot);
            self.hidden.insert(slot);
        }
    }

    /// A slot is not in doubt any more.
    pub(super) fn forget(&mut self, slot: Slot) {
        if self.epochs.remove(&slot).is_some() {
            let sets = [&mut self.hidden, &mut self.comparing, &mut self.void, &mut self.known, &mut self.shown];
            sets.into_iter().for_each(|set| set.remove(slot));
        }
    }

    /// What was void is gone.
    pub(super) fn end_void(&mut self) {
        let void = core::mem::replace(&mut self.void, SlotSet::none());
        void.iter().for_each(|slot| self.forget(slot));
    }

    /// Those that no map has given to this shard yet.
    fn waiting(&self) -> Vec<(Slot, Epoch)> {
        let begun =
            |slot: Slot| [&self.comparing, &self.void, &self.known, &self.shown].iter().any(|set| set.has(slot));
        self.epochs.iter().filter(|(slot, _)| !begun(**slot)).map(|(slot, epoch)| (*slot, *epoch)).collect()
    }
}

impl Tiering {
    /// Whether an object that others changed is to be struck out. What was put here since has done that already.
    fn must_strike_out(&self, digest: Digest, here: bool) -> bool {
        if self.removing.contains(&digest) || self.is_writing(digest) {
            return false;
        }
        match self.tier.locate(digest) {
            Some(view) => view.version < self.doubts.floor,
            None => !here && self.tier.may_find(digest),
        }
    }
}

impl Service {
    /// A slot that was served is not any more, or others had it in between: what the SSD has of it is in doubt. False
    /// where nothing can be kept.
    pub(super) fn doubt(&mut self, slot: Slot) -> bool {
        let (Some(tiered), Some(store)) = (&mut self.tiered, &self.store) else { return false };
        let state = tiered.noted.state();
        if state == 0 || tiered.tier.degraded().is_some() {
            return false;
        }
        // What was found out about it counts no more; what it was last served by does.
        // A first map may be of a time when the incarnation before was a member still.
        let served = if self.ownership.epoch() == Epoch(0) { tiered.doubts.noted } else { self.ownership.epoch() };
        let had = tiered.doubts.epochs.get(&slot).copied().unwrap_or(served).min(served);
        tiered.doubts.forget(slot);
        tiered.doubts.begin([slot].into_iter(), had);
        tiered.doubts.set_bounds(store.next_version(), state);
        true
    }

    /// True for a slot that is in doubt, or was until a map gave it to this shard.
    pub(in crate::service) fn is_doubted(&self, slot: Slot) -> bool {
        self.tiered.as_ref().is_some_and(|tiered| tiered.doubts.epochs.contains_key(&slot))
    }

    /// This incarnation is over: what the SSD has of the slots that it had is in doubt, for the next incarnation.
    /// Whether there is an SSD that keeps it.
    pub(in crate::service) fn doubt_owned(&mut self) -> bool {
        // What was found out of slots that were to be served is of that map.
        let pending = self.pending_slots();
        for slot in pending.iter() {
            let _ = self.is_doubted(slot) && self.doubt(slot);
        }
        let owned = self.ownership.owned().clone();
        let kept = owned.iter().filter(|slot| self.doubt(*slot)).count() > 0;
        if kept {
            self.ownership.close_all();
            self.ssd_known_anew();
        }
        kept
    }

    /// A map came, and it is known whom slots that came are fetched from: what becomes of those in doubt.
    pub(in crate::service) fn weigh_doubt(&mut self, owned: &dyn Fn(u16) -> bool, owners: Option<&SlotOwners>) {
        let me = self.ownership.key();
        let Some(tiered) = &self.tiered else { return };
        let (doubts, waiting) = (&tiered.doubts, tiered.doubts.waiting());
        let Some((epoch, standing)) = doubts.standing.filter(|_| !waiting.is_empty()) else { return };
        // One that has no share yet waits for that.
        if !(0..SLOTS as u16).any(owned) {
            return;
        }
        let (mut known, mut asked, mut void, mut left) =
            (SlotSet::none(), SlotSet::none(), SlotSet::none(), Vec::new());
        let mut noted = Epoch(0);
        for (slot, had) in waiting {
            noted = noted.max(had);
            if !owned(slot.0) {
                left.push(slot);
                continue;
            }
            let strange = standing.state != doubts.state || had > epoch || standing.kept > had;
            let stays = owners.is_some_and(|owners| {
                let before = owners.owner_before(slot);
                before.is_some_and(|before| (before.node, before.shard) == (me.node, me.shard))
                    && owners.from.0 <= had.0 + 1
            });
            if !strange && (standing.since <= had || stays) {
                known.insert(slot);
            } else if !strange && self.source_of(slot).is_some() {
                asked.insert(slot);
            } else {
                void.insert(slot);
            }
        }
        let Some(tiered) = &mut self.tiered else { return };
        tiered.doubts.known = tiered.doubts.known.with(&known, |one, other| one | other);
        tiered.doubts.comparing = tiered.doubts.comparing.with(&asked, |one, other| one | other);
        tiered.counters.slots_kept += known.count();
        let counted = tiered.counters.slots_kept + tiered.counters.slots_compared;
        if counted == 0 && asked.is_empty() {
            tiered.noted.tell_voided(VoidCause::Moved { noted, since: standing.since.max(standing.kept) });
        }
        self.void_doubt(&void);
        left.into_iter().for_each(|slot| self.slot_left(slot.0.into()));
    }

    /// Whether anything of slots that are served is hidden that may yet be shown.
    pub(in crate::service) fn compares(&self) -> bool {
        let doubts = self.tiered.as_ref().map(|tiered| &tiered.doubts).filter(|doubts| !doubts.epochs.is_empty());
        doubts.is_some_and(|doubts| !doubts.comparing.is_empty() || !doubts.known.is_empty())
    }

    /// Slots of which the device's contents are void, as nobody could tell what others changed there: their number
    /// since the last call, once no slot is compared any more. Not where [`Self::poll_tier_voided`] says that it is
    /// all.
    pub fn poll_slots_voided(&mut self) -> Option<u64> {
        if self.tiered.as_ref()?.doubts.untold == 0 || self.compares() {
            return None;
        }
        let tiered = self.tiered.as_mut()?;
        let slots = core::mem::take(&mut tiered.doubts.untold);
        (!tiered.noted.has_voided()).then_some(slots)
    }

    fn void_doubt(&mut self, slots: &SlotSet) {
        let Some(tiered) = self.tiered.as_mut().filter(|_| !slots.is_empty()) else { return };
        tiered.doubts.make_void(slots);
        tiered.counters.slots_voided += slots.count();
        tiered.doubts.untold += slots.count();
        tiered.sweep.at = Some(0);
    }

    /// The former owner of these slots has told all that it knows of changes there.
    pub(in crate::service) fn resolve_doubt(&mut self, slots: &[Slot], told: &BTreeMap<Slot, Changes>) {
        let me = self.ownership.key();
        let Some(tiered) = &mut self.tiered else { return };
        let (doubts, mut void) = (&mut tiered.doubts, SlotSet::none());
        for slot in slots.iter().filter(|slot| doubts.comparing.has(**slot)).copied().collect::<Vec<_>>() {
            doubts.comparing.remove(slot);
            let had = doubts.epochs.get(&slot).copied().unwrap_or_default();
            let covers = |changes: &&Changes| {
                changes.absences.iter().any(|absence| absence.is_of(me) && absence.since.0 <= had.0 + 1)
            };
            match told.get(&slot).filter(covers) {
                Some(changes) => {
                    doubts.known.insert(slot);
                    doubts.strikes.extend(changes.since(had));
                    tiered.counters.slots_compared += 1;
                }
                None => void.insert(slot),
            }
        }
        self.void_doubt(&void);
    }

    /// Goes on with what is in doubt. Whether there was anything to do.
    pub(super) fn resolve_work(&mut self) -> bool {
        let generation = self.moves.source_generation();
        let Some(tiered) = self.tiered.as_mut().filter(|tiered| !tiered.doubts.epochs.is_empty()) else { return false };
        let doubts = &mut tiered.doubts;
        let mut lost = SlotSet::none();
        if tiered.tier.degraded().is_some() {
            // Nothing can be struck out any more.
            lost = doubts.hidden.with(&doubts.void, |hidden, void| hidden & !void);
        } else if core::mem::replace(&mut doubts.generation, generation) != generation {
            let asked = doubts.comparing.clone();
            asked.iter().filter(|slot| self.source_of(*slot).is_none()).for_each(|slot| lost.insert(slot));
        }
        let mut progress = !lost.is_empty();
        self.void_doubt(&lost);
        progress |= self.strike_out();
        let Some(tiered) = &mut self.tiered else { return progress };
        let is_done = tiered.doubts.strikes.is_empty() && tiered.sweep.waiting == 0 && !tiered.tier.is_settling();
        if is_done && !tiered.doubts.shown.is_empty() {
            let shown = core::mem::replace(&mut tiered.doubts.shown, SlotSet::none());
            shown.iter().for_each(|slot| tiered.doubts.forget(slot));
            tiered.noted.dirty = true;
            progress = true;
        }
        progress
    }

    /// Strikes out what others changed, and shows the rest when that is given to the tier.
    fn strike_out(&mut self) -> bool {
        let (Some(tiered), Some(store)) = (&mut self.tiered, &self.store) else { return false };
        // What recovery has not found yet could not be told from what is not there.
        if tiered.doubts.known.is_empty() || !tiered.tier.is_recovered() {
            return false;
        }
        let mut struck = Vec::new();
        while tiered.removals.len() < WAITING_MOST
            && let Some(digest) = tiered.doubts.strikes.pop_front()
        {
            if tiered.must_strike_out(digest, store.exists(digest)) {
                tiered.counters.struck += 1;
                tiered.sweep.waiting += 1;
                tiered.queue_removal(digest, Strike::Swept);
                struck.push(digest);
            }
        }
        if !tiered.doubts.strikes.is_empty() {
            return !struck.is_empty();
        }
        let doubts = &mut tiered.doubts;
        let known = core::mem::replace(&mut doubts.known, SlotSet::none());
        doubts.hidden = doubts.hidden.with(&known, |hidden, known| hidden & !known);
        doubts.shown = doubts.shown.with(&known, |shown, known| shown | known);
        self.ssd_known_anew();
        self.walk_ssd_again();
        true
    }
}

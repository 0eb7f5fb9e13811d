//! Reconciliation of slots in doubt, with new maps and with the changes that former owners tell.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::SlotOwners;
use kvplane_tier::SlotSet;

use super::changes::Changes;
use super::verdict::{SlotJudge, SlotVerdict};
use super::{Reconciliation, SlotSources, VoidCause};
use crate::service::shard::Shard;
use crate::service::shard::effects::Effect;
use crate::service::tiering::ssd::{RemovalCause, Ssd, break_off_events};

/// Waiting removals above which no more are enqueued.
const WAITING_MOST: usize = 256;

impl Reconciliation {
    /// Puts a slot in doubt that is not served any more, or that had an interim owner. False if its records cannot be
    /// kept.
    pub(in crate::service) fn doubt(&self, ssd: &mut Ssd, shard: &Shard, slot: Slot) -> bool {
        let store = &shard.store;
        if self.state == 0 || ssd.is_degraded() {
            return false;
        }
        // Earlier results for it do not count any more; the epoch by which it was last served does. A first map may
        // date from a time when the former incarnation was still a member.
        let doubts = &mut ssd.doubts;
        let epoch = shard.ownership.epoch();
        let served = if epoch == Epoch(0) { doubts.noted } else { epoch };
        let had = doubts.epochs.get(&slot).copied().unwrap_or(served).min(served);
        doubts.forget(slot);
        doubts.begin([slot].into_iter(), had);
        doubts.set_bounds(store.next_version(), self.state);
        true
    }

    /// Puts the slots of an incarnation that has ended in doubt, for the next one. Returns true if the SSD keeps
    /// anything.
    pub(in crate::service) fn doubt_owned(&self, ssd: &mut Ssd, shard: &mut Shard) -> bool {
        // Results for slots that were still to be served belong to that map.
        for slot in
            self.pending_slots(shard.ownership.owned()).iter().filter(|slot| ssd.doubts.has(*slot)).collect::<Vec<_>>()
        {
            self.doubt(ssd, shard, slot);
        }
        let owned = shard.ownership.owned().clone();
        let kept = owned.iter().filter(|slot| self.doubt(ssd, shard, *slot)).count() > 0;
        if kept {
            shard.ownership.close_all();
            break_off_events(shard);
        }
        kept
    }

    /// Decides about slots in doubt after a map, when it is known which slots have `sources`.
    pub(in crate::service) fn weigh(
        &mut self,
        ssd: &mut Ssd,
        shard: &Shard,
        sources: &SlotSources<'_>,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        let (doubts, waiting) = (&ssd.doubts, ssd.doubts.waiting());
        let Some((epoch, standing)) = doubts.standing.filter(|_| !waiting.is_empty()) else { return };
        let judge = SlotJudge { me: shard.ownership.key(), epoch, standing, sources, owned, owners };
        // A shard that has no slots yet keeps them in doubt.
        if !judge.has_slots() {
            return;
        }
        let (mut known, mut asked, mut void, mut left) =
            (SlotSet::none(), SlotSet::none(), SlotSet::none(), Vec::new());
        let mut noted = Epoch(0);
        for (slot, had) in waiting {
            noted = noted.max(had);
            match judge.judge(slot, had, doubts.state) {
                SlotVerdict::Known => known.insert(slot),
                SlotVerdict::Asked => asked.insert(slot),
                SlotVerdict::Void => void.insert(slot),
                SlotVerdict::Left => left.push(slot),
            }
        }
        let doubts = &mut ssd.doubts;
        doubts.known = doubts.known.with(&known, |one, other| one | other);
        doubts.comparing = doubts.comparing.with(&asked, |one, other| one | other);
        ssd.counters.slots_kept += known.count();
        let counted = ssd.counters.slots_kept + ssd.counters.slots_compared;
        if counted == 0 && asked.is_empty() {
            self.tell_voided(VoidCause::Moved { noted, since: standing.since.max(standing.kept) });
        }
        make_void(ssd, &void);
        left.into_iter().for_each(|slot| ssd.lose_slot(slot));
    }

    /// Returns the number of slots whose records are void because no shard could tell what others changed there: those
    /// since the last call, once no slot is being reconciled. `None` if all records are void.
    pub(in crate::service) fn poll_slots_voided(&self, ssd: &mut Ssd) -> Option<u64> {
        if ssd.doubts.untold == 0 || ssd.doubts.are_compared() {
            return None;
        }
        let slots = core::mem::take(&mut ssd.doubts.untold);
        self.voided.is_none().then_some(slots)
    }

    /// Advances the reconciliation. Returns true if there was any progress.
    pub(in crate::service) fn go_on(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        sources: &SlotSources<'_>,
        is_writing: &dyn Fn(Digest) -> bool,
    ) -> bool {
        if ssd.doubts.epochs.is_empty() {
            return false;
        }
        let doubts = &mut ssd.doubts;
        let mut lost = SlotSet::none();
        if ssd.tier.degraded().is_some() {
            // A degraded device takes no tombstones.
            lost = doubts.hidden.with(&doubts.void, |hidden, void| hidden & !void);
        } else if core::mem::replace(&mut doubts.generation, sources.generation) != sources.generation {
            let asked = doubts.comparing.clone();
            asked.iter().filter(|slot| !(sources.has)(*slot)).for_each(|slot| lost.insert(slot));
        }
        let mut progress = !lost.is_empty();
        make_void(ssd, &lost);
        progress |= remove_doubtful(ssd, shard, is_writing);
        let is_done = ssd.doubts.to_remove.is_empty() && ssd.sweep.waiting == 0 && !ssd.tier.is_settling();
        if is_done && !ssd.doubts.shown.is_empty() {
            let shown = core::mem::replace(&mut ssd.doubts.shown, SlotSet::none());
            shown.iter().for_each(|slot| ssd.doubts.forget(slot));
            self.dirty = true;
            progress = true;
        }
        progress
    }
}

fn make_void(ssd: &mut Ssd, slots: &SlotSet) {
    if slots.is_empty() {
        return;
    }
    ssd.doubts.make_void(slots);
    ssd.counters.slots_voided += slots.count();
    ssd.doubts.untold += slots.count();
    ssd.sweep.at = Some(0);
}

/// Reconciles these slots after their former owner has reported all changes that it knows of.
pub(in crate::service) fn compare(ssd: &mut Ssd, shard: &Shard, slots: &[Slot], told: &BTreeMap<Slot, Changes>) {
    let me = shard.ownership.key();
    let (doubts, mut void) = (&mut ssd.doubts, SlotSet::none());
    for slot in slots.iter().filter(|slot| doubts.comparing.has(**slot)).copied().collect::<Vec<_>>() {
        doubts.comparing.remove(slot);
        let had = doubts.epochs.get(&slot).copied().unwrap_or_default();
        let covers = |changes: &&Changes| {
            changes.absences.iter().any(|absence| absence.is_of(me) && absence.since.0 <= had.0 + 1)
        };
        match told.get(&slot).filter(covers) {
            Some(changes) => {
                doubts.known.insert(slot);
                doubts.to_remove.extend(changes.since(had));
                ssd.counters.slots_compared += 1;
            }
            None => void.insert(slot),
        }
    }
    make_void(ssd, &void);
}

/// Returns true if an object that others changed has to be removed. A put of it here since then has replaced its record
/// already.
fn is_to_be_removed(ssd: &Ssd, shard: &Shard, digest: Digest, is_writing: &dyn Fn(Digest) -> bool) -> bool {
    if ssd.removals.has(digest) || is_writing(digest) {
        return false;
    }
    match ssd.tier.locate(digest) {
        Some(view) => view.version < ssd.doubts.floor,
        None => !shard.store.exists(digest) && ssd.tier.may_find(digest),
    }
}

/// Removes the records that others changed, and makes the rest visible once all removals are passed to the tier.
fn remove_doubtful(ssd: &mut Ssd, shard: &mut Shard, is_writing: &dyn Fn(Digest) -> bool) -> bool {
    // Before recovery is complete, an unrecovered record looks like a missing one.
    if ssd.doubts.known.is_empty() || !ssd.tier.is_recovered() {
        return false;
    }
    let mut progress = false;
    while ssd.removals.len() < WAITING_MOST
        && let Some(digest) = ssd.doubts.to_remove.pop_front()
    {
        if is_to_be_removed(ssd, shard, digest, is_writing) {
            ssd.counters.doubts_removed += 1;
            ssd.sweep.waiting += 1;
            ssd.removals.add(digest, RemovalCause::Swept);
            progress = true;
        }
    }
    if !ssd.doubts.to_remove.is_empty() {
        return progress;
    }
    let doubts = &mut ssd.doubts;
    let known = core::mem::replace(&mut doubts.known, SlotSet::none());
    doubts.hidden = doubts.hidden.with(&known, |hidden, known| hidden & !known);
    doubts.shown = doubts.shown.with(&known, |shown, known| shown | known);
    break_off_events(shard);
    shard.effects.note(Effect::RecordsChanged);
    true
}

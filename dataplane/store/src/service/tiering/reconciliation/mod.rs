//! Reconciliation: the slots that are served where there is an SSD. Records of a slot are valid only if the slot cannot
//! have had an interim owner meanwhile, also across restarts.
//!
//! The tier keeps a durable record of the slots that are owned, with the epoch of the map (the ownership note). Lost
//! slots are closed at once. A gained slot is served when the record with it is durable: a later start then knows that
//! its objects belong to this shard. At a start the record is trusted if the control plane states that no slot has
//! changed hands since its map. If some have, the records on the device are in doubt until they are reconciled with the
//! changes of the interim owners (`comparison.rs`). If the ownership note does not belong to this cluster's maps, or
//! the node ran without the device, all records are void, and [`VoidCause`] gives the reason. A degraded device is not
//! waited for: it gets no new records either.

pub(in crate::service) mod changes;
mod comparison;
pub(in crate::service) mod verdict;

use std::fmt;

use kvplane_proto::ids::{Epoch, Slot};
use kvplane_tier::{Memory, Ownership as Note, SlotSet};

pub(in crate::service) use self::comparison::compare;
use self::verdict::distrust;
use super::ssd::Ssd;
use crate::service::shard::Shard;
use crate::service::types::MapStanding;

/// Reason for which a start did not trust the device's records: all of them count as removed. The objects are misses
/// until they are put again, so that no stale object is ever returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VoidCause {
    /// The device was used before, but no ownership note can be read on it.
    NoNote,
    /// It was written under another cluster state, whose epochs cannot be compared.
    OtherState,
    /// The device has seen a later map than the control plane.
    Newer {
        /// Newest epoch recorded on the device.
        noted: Epoch,
        /// Newest epoch of the control plane.
        known: Epoch,
    },
    /// Since the map that it recorded, all its slots have had interim owners, and no shard knows what these
    /// changed; or the node ran without this device.
    Moved {
        /// Newest epoch recorded on the device.
        noted: Epoch,
        /// Oldest epoch with which the records would have been valid.
        since: Epoch,
    },
}

impl fmt::Display for VoidCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNote => f.write_str("it has no readable record of the slots that it had"),
            Self::OtherState => f.write_str("it was written under another cluster state"),
            Self::Newer { noted, known } => write!(
                f,
                "it has recorded map {}, the control plane knows none after {}: its state was restored from an older \
                 one",
                noted.0, known.0
            ),
            Self::Moved { noted, since } => write!(
                f,
                "it has recorded maps up to {}, but up to {} its slots belonged to other owners or the node ran \
                 without it, and no shard knows what changed",
                noted.0, since.0
            ),
        }
    }
}

/// State of the slots, and of the ownership note that is being written.
#[derive(Debug)]
pub(in crate::service) struct Reconciliation {
    /// Cluster state that maps belong to.
    state: u64,
    /// True once the device's ownership note was evaluated.
    restored: bool,
    /// Reason for which the device was not trusted, if so, and whether it is still to be reported.
    voided: Option<VoidCause>,
    untold: bool,
    /// Map that waits to be served.
    wanted: Option<(Epoch, SlotSet)>,
    /// True if the ownership note is outdated.
    dirty: bool,
    /// Ownership record being written: its epoch, and the slots that it regains.
    writing: Option<NoteWrite>,
    /// Slots that the durable ownership note names, owned or in doubt.
    named: SlotSet,
}

#[derive(Debug)]
struct NoteWrite {
    epoch: Epoch,
    regained: SlotSet,
    named: SlotSet,
}

/// Former owners of gained slots, from which their objects are fetched.
pub(in crate::service) struct SlotSources<'a> {
    /// Grows whenever a slot's source may have changed.
    pub(in crate::service) generation: u64,
    /// Returns true if a slot has a source.
    pub(in crate::service) has: &'a dyn Fn(Slot) -> bool,
}

impl Reconciliation {
    pub(in crate::service) fn new() -> Self {
        Self {
            state: 0,
            restored: false,
            voided: None,
            untold: false,
            wanted: None,
            dirty: false,
            writing: None,
            named: SlotSet::none(),
        }
    }

    /// Returns true if an ownership note that is on the device, or is being written, names a slot: after a restart, its
    /// records may count.
    pub(in crate::service) fn is_noted(&self, slot: Slot) -> bool {
        let writing = self.writing.as_ref().is_some_and(|writing| writing.named.has(slot));
        !self.restored || writing || self.named.has(slot)
    }

    /// Records that all of the device's records are void, which is reported once.
    const fn tell_voided(&mut self, why: VoidCause) {
        (self.voided, self.untold) = (Some(why), true);
    }

    /// Returns the reason for which the device's records at the start are void, if they are.
    pub(in crate::service) const fn voided(&self) -> Option<VoidCause> {
        self.voided
    }

    /// Like [`Self::voided`], once.
    pub(in crate::service) fn poll_voided(&mut self) -> Option<VoidCause> {
        self.voided.filter(|_| core::mem::take(&mut self.untold))
    }

    /// Returns the epoch of the newest map received, if it waits to be served.
    pub(in crate::service) fn heard_epoch(&self) -> Option<Epoch> {
        self.wanted.as_ref().map(|(epoch, _)| *epoch)
    }

    /// Returns the slots of the newest map received that are not among those `served`.
    pub(in crate::service) fn pending_slots(&self, served: &SlotSet) -> SlotSet {
        let wanted = self.wanted.as_ref();
        wanted.map_or_else(SlotSet::none, |(_, wanted)| wanted.with(served, |wanted, served| wanted & !served))
    }

    /// Forgets the map that waits to be served.
    pub(in crate::service) fn forget_wanted(&mut self) {
        self.wanted = None;
    }

    /// Notes that the void records are gone, which is to be recorded.
    pub(in crate::service) const fn note_sweep(&mut self) {
        self.dirty = true;
    }

    /// Decides, by the first map, which of the device's records can be trusted. Evaluates the device's ownership note
    /// once in an incarnation.
    pub(in crate::service) fn restore(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        epoch: Epoch,
        standing: MapStanding,
    ) {
        let store = &shard.store;
        if standing.state != 0 {
            self.state = standing.state;
        }
        ssd.doubts.heard(epoch, standing);
        // An incarnation that ended before its first map knows nothing yet.
        if epoch == Epoch(0) || core::mem::replace(&mut self.restored, true) {
            return;
        }
        let note = ssd.tier.ownership();
        self.named = note.map_or_else(SlotSet::none, named_by);
        // A newly formatted device has no records that could be void.
        let is_new = ssd.tier.incarnation() <= 1;
        let distrust = match note {
            Some(note) => distrust(note.state, note.epoch, epoch, standing),
            None => (!is_new).then_some(VoidCause::NoNote),
        };
        let sweep = &mut ssd.sweep;
        sweep.at = Some(0);
        let Some(note) = note.filter(|_| distrust.is_none()) else {
            sweep.slots = SlotSet::none().with(&SlotSet::none(), |_, _| u64::MAX);
            sweep.floor = store.next_version();
            distrust.into_iter().for_each(|why| self.tell_voided(why));
            return;
        };
        let (owned, doubted) = (&note.owned, &note.doubt.slots);
        let held = owned.with(doubted, |owned, doubted| owned | doubted);
        sweep.slots = held.with(&note.void, |held, void| !held | void);
        sweep.regained = note.void.clone();
        sweep.floor = note.floor;
        let doubts = &mut ssd.doubts;
        doubts.begin(doubted.iter(), note.doubt.epoch);
        if standing.since <= note.epoch {
            doubts.set_bounds(note.doubt.floor, note.state);
            doubts.believe(note.epoch);
            // An interrupted reconciliation is not resumed: the owner that was asked then does not answer this
            // incarnation.
            doubts.make_void(&owned.with(doubted, |owned, doubted| owned & doubted));
            shard.ownership.restore(owned);
            ssd.counters.slots_kept = owned.count();
        } else {
            doubts.begin(owned.with(doubted, |owned, doubted| owned & !doubted).iter(), note.epoch);
            doubts.set_bounds(store.next_version(), note.state);
        }
    }

    /// Serves the slots of a map: at once, or when the new ones are durable.
    pub(in crate::service) fn serve(&mut self, ssd: &Ssd, shard: &mut Shard, epoch: Epoch, slots: SlotSet) {
        self.dirty = true;
        if shard.ownership.gains(&slots) && !ssd.is_degraded() {
            self.wanted = Some((epoch, slots));
            return;
        }
        self.wanted = None;
        shard.serve_slots(epoch, &slots);
    }

    /// Writes the ownership note, if it is outdated and can be expressed.
    pub(in crate::service) fn write_note(&mut self, ssd: &mut Ssd, shard: &mut Shard, memory: &mut dyn Memory) -> bool {
        let store = &shard.store;
        if ssd.is_degraded() {
            let Some((epoch, owned)) = self.wanted.take() else { return false };
            // A gained slot's records may be void, and cannot be removed any more.
            let came = owned.with(shard.ownership.owned(), |wanted, owned| wanted & !owned);
            ssd.sweep.regain(&came, store.next_version());
            shard.serve_slots(epoch, &owned);
            return true;
        }
        if self.writing.is_some() || !self.dirty {
            return false;
        }
        let served = shard.ownership.owned();
        let (epoch, owned) = self.wanted.clone().unwrap_or_else(|| (shard.ownership.epoch(), served.clone()));
        let back =
            owned.with(served, |wanted, served| wanted & !served).with(&ssd.sweep.slots, |came, void| came & void);
        let mut floor = ssd.sweep.floor;
        if !back.is_empty() {
            // A record has only one floor: the objects of the time before are removed first. If that is impossible,
            // objects put since then in slots that were regained earlier are void at the next start.
            let sweeping = ssd.sweep.at.is_some();
            if sweeping && !ssd.sweep.regained.is_empty() && floor != store.next_version() {
                return false;
            }
            floor = store.next_version();
        }
        let regained = back.with(&ssd.sweep.regained, |one, other| one | other);
        let void = regained.with(&owned, |regained, owned| regained & owned);
        let doubt = ssd.doubts.note();
        let note = Note { state: self.state, epoch, owned, void, floor, doubt };
        let named = named_by(&note);
        if !ssd.tier.note_ownership(&note, memory) {
            return false;
        }
        ssd.sweep.floor = floor;
        self.dirty = false;
        self.writing = Some(NoteWrite { epoch, regained: back, named });
        true
    }

    /// Serves the slots of an ownership note that is durable, if they are still wanted.
    pub(in crate::service) fn noted(&mut self, ssd: &mut Ssd, shard: &mut Shard) {
        let Some(NoteWrite { epoch, regained, named }) = self.writing.take() else { return };
        self.named = named;
        let Some((_, owned)) = self.wanted.take_if(|(wanted, _)| *wanted == epoch) else { return };
        let floor = ssd.sweep.floor;
        ssd.sweep.regain(&regained, floor);
        shard.serve_slots(epoch, &owned);
    }
}

/// Returns the slots that a note names, owned or in doubt.
fn named_by(note: &Note) -> SlotSet {
    note.owned.with(&note.doubt.slots, |owned, doubted| owned | doubted)
}

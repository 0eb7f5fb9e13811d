//! Which slots are served, where there is an SSD: what it has of a slot counts only as long as nobody else can have had
//! that slot meanwhile, also over restarts.
//!
//! The tier keeps a durable note of the slots that are owned and by which map. Slots that leave are closed at once. One
//! that comes is served when the note with it is durable: a start after that knows that its objects are this shard's.
//! At a start the note is believed if the control plane says that no slot has changed hands since its map. If some
//! have, what the device has is in doubt until it is compared (`comparison.rs`). Where the note says nothing about this
//! cluster's maps, or the node lived without the device, all is void, and [`VoidCause`] says why. If the device takes
//! no writes, nothing is waited for: it gets nothing new either.

pub(in crate::service) mod changes;
mod comparison;

use std::fmt;

use kvplane_proto::ids::{Epoch, Slot};
use kvplane_tier::{Memory, Ownership as Note, SlotSet};

pub(in crate::service) use self::comparison::compare;
use super::ssd::Ssd;
use crate::service::shard::Shard;
use crate::service::types::MapStanding;

/// Why a start did not believe what the device had: all of it counts as removed. The objects are misses until they are
/// put again; none of them is ever given for a newer one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VoidCause {
    /// The device was used before, but nothing that can be read on it says whose slots it had.
    NoNote,
    /// It was written under another state of the control plane, whose epochs say nothing about this one's.
    OtherState,
    /// The control plane knows only this map, and the device a later one.
    Newer {
        /// The device's.
        noted: Epoch,
        /// The control plane's.
        known: Epoch,
    },
    /// Since the map that it knows, all slots of it were others', and nobody knows what they changed; or the node lived
    /// without this device.
    Moved {
        /// The device's.
        noted: Epoch,
        /// What it says would count if it knew this map.
        since: Epoch,
    },
}

impl fmt::Display for VoidCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNote => f.write_str("nothing that can be read on it says which slots it had"),
            Self::OtherState => f.write_str("it was written under another state of the control plane"),
            Self::Newer { noted, known } => write!(
                f,
                "it knows map {}, the control plane none after {}, whose state is an older one brought back",
                noted.0, known.0
            ),
            Self::Moved { noted, since } => write!(
                f,
                "it knows maps up to {}, and up to {} its slots were others' or the node lived without it, and nobody \
                 can say what changed",
                noted.0, since.0
            ),
        }
    }
}

/// What is known of the slots, and what is being written down.
#[derive(Debug)]
pub(in crate::service) struct Reconciliation {
    /// Which state of the control plane maps are of.
    state: u64,
    /// The note that the device had was looked at.
    restored: bool,
    /// Why the device was not believed, if so, and whether that is still to be told.
    voided: Option<VoidCause>,
    untold: bool,
    /// The map that waits to be served.
    wanted: Option<(Epoch, SlotSet)>,
    /// Something changed that is not written down.
    dirty: bool,
    /// What is being written: its epoch and what will be served then.
    writing: Option<NoteWrite>,
}

#[derive(Debug)]
struct NoteWrite {
    epoch: Epoch,
    regained: SlotSet,
}

/// Former owners of slots that came: whom the objects of a slot are fetched from.
pub(in crate::service) struct SlotSources<'a> {
    /// Grows whenever a slot's source may be another.
    pub(in crate::service) generation: u64,
    /// True for a slot that has one.
    pub(in crate::service) has: &'a dyn Fn(Slot) -> bool,
}

impl Reconciliation {
    pub(in crate::service) const fn new() -> Self {
        Self { state: 0, restored: false, voided: None, untold: false, wanted: None, dirty: false, writing: None }
    }

    /// Nothing of what the device had counts: that is told once.
    const fn tell_voided(&mut self, why: VoidCause) {
        (self.voided, self.untold) = (Some(why), true);
    }

    /// Why nothing of what the device had at the start counts, if so.
    pub(in crate::service) const fn voided(&self) -> Option<VoidCause> {
        self.voided
    }

    /// As [`Self::voided`], once.
    pub(in crate::service) fn poll_voided(&mut self) -> Option<VoidCause> {
        self.voided.filter(|_| core::mem::take(&mut self.untold))
    }

    /// The newest map that was heard of, if that one waits to be served.
    pub(in crate::service) fn heard_epoch(&self) -> Option<Epoch> {
        self.wanted.as_ref().map(|(epoch, _)| *epoch)
    }

    /// Slots of the newest map that was heard of that are not among those that are `served` yet.
    pub(in crate::service) fn pending_slots(&self, served: &SlotSet) -> SlotSet {
        let wanted = self.wanted.as_ref();
        wanted.map_or_else(SlotSet::none, |(_, wanted)| wanted.with(served, |wanted, served| wanted & !served))
    }

    /// What waits to be served will not be.
    pub(in crate::service) fn forget_wanted(&mut self) {
        self.wanted = None;
    }

    /// What is void is gone: that is to be written down.
    pub(in crate::service) const fn note_sweep(&mut self) {
        self.dirty = true;
    }

    /// What a first map lets be believed of what the device has. Reads the device's note once in an incarnation.
    pub(in crate::service) fn restore(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        epoch: Epoch,
        standing: MapStanding,
    ) {
        let Some(store) = &shard.store else { return };
        if standing.state != 0 {
            self.state = standing.state;
        }
        ssd.doubts.heard(epoch, standing);
        // An incarnation that was over before its first map knows nothing yet.
        if epoch == Epoch(0) || core::mem::replace(&mut self.restored, true) {
            return;
        }
        let note = ssd.tier.ownership();
        // What was formatted just now has nothing that could be void.
        let is_new = ssd.tier.incarnation() <= 1;
        let distrust = match note {
            Some(note) => distrust(note, epoch, standing),
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
            // A comparison that was cut short is not begun anew: the owner that was asked then tells this incarnation
            // nothing.
            doubts.make_void(&owned.with(doubted, |owned, doubted| owned & doubted));
            shard.ownership.restore(owned);
            ssd.counters.slots_kept = owned.count();
        } else {
            doubts.begin(owned.with(doubted, |owned, doubted| owned & !doubted).iter(), note.epoch);
            doubts.set_bounds(store.next_version(), note.state);
        }
    }

    /// Serves the slots of a map: at once, or when those that came are written down.
    pub(in crate::service) fn serve(&mut self, ssd: &Ssd, shard: &mut Shard, epoch: Epoch, slots: SlotSet) {
        self.dirty = true;
        if shard.ownership.gains(&slots) && !ssd.is_degraded() {
            self.wanted = Some((epoch, slots));
            return;
        }
        self.wanted = None;
        shard.serve_slots(epoch, &slots);
    }

    /// Writes down what is owned, when that has changed and can be said.
    pub(in crate::service) fn write_note(&mut self, ssd: &mut Ssd, shard: &mut Shard, memory: &mut dyn Memory) -> bool {
        let Some(store) = &shard.store else { return false };
        if ssd.is_degraded() {
            let Some((epoch, owned)) = self.wanted.take() else { return false };
            // What the device has of a slot that came may be void, and cannot be struck out any more.
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
            // One floor is all that a note can say: the objects of the time before go first. Where they cannot, what
            // was put since then in slots that came back before is void at the next start.
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
        if !ssd.tier.note_ownership(&note, memory) {
            return false;
        }
        ssd.sweep.floor = floor;
        self.dirty = false;
        self.writing = Some(NoteWrite { epoch, regained: back });
        true
    }

    /// A note is durable: what it says is served, if it is still wanted.
    pub(in crate::service) fn noted(&mut self, ssd: &mut Ssd, shard: &mut Shard) {
        let Some(NoteWrite { epoch, regained }) = self.writing.take() else { return };
        let Some((_, owned)) = self.wanted.take_if(|(wanted, _)| *wanted == epoch) else { return };
        let floor = ssd.sweep.floor;
        ssd.sweep.regain(&regained, floor);
        shard.serve_slots(epoch, &owned);
    }
}

/// Why nothing of what a note says counts; `None` when it does, or what it says is to be compared.
fn distrust(note: &Note, epoch: Epoch, standing: MapStanding) -> Option<VoidCause> {
    let noted = note.epoch;
    // 0 is no state.
    if note.state == 0 || note.state != standing.state {
        return Some(VoidCause::OtherState);
    }
    if noted > epoch {
        return Some(VoidCause::Newer { noted, known: epoch });
    }
    (standing.kept > noted).then_some(VoidCause::Moved { noted, since: standing.kept })
}

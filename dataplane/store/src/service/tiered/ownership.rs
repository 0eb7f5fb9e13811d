//! Which slots are served, where there is an SSD: what it has of a slot counts only as long as nobody else can have had
//! that slot meanwhile, also over restarts.
//!
//! The tier keeps a durable note of the slots that are owned and by which map. Slots that leave are closed at once. One
//! that comes is served when the note with it is durable: a start after that knows that its objects are this shard's.
//! At a start the note is believed if the control plane says that no slot has changed hands since its map. If some
//! have, what the device has is in doubt until it is compared (`doubt.rs`). Where the note says nothing about this
//! cluster's maps, or the node lived without the device, all is void, and [`VoidCause`] says why. If the device takes
//! no writes, nothing is waited for: it gets nothing new either.

use std::fmt;

use kvplane_proto::ids::{Epoch, SLOTS, Slot};
use kvplane_tier::{Memory, Ownership as Note, SlotSet};

use super::super::Service;
use super::super::types::MapStanding;

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
pub(in crate::service) struct OwnershipNotes {
    /// Which state of the control plane maps are of.
    state: u64,
    /// Whether it was looked at what the device said.
    restored: bool,
    /// Why the device was not believed, if so, and whether that is still to be told.
    pub(super) voided: Option<VoidCause>,
    untold: bool,
    /// The map that waits to be served.
    wanted: Option<(Epoch, SlotSet)>,
    /// Whether something changed that is not written down.
    pub(super) dirty: bool,
    /// What is being written: its epoch and what will be served then.
    writing: Option<NoteWrite>,
}

#[derive(Debug)]
struct NoteWrite {
    epoch: Epoch,
    regained: SlotSet,
}

impl OwnershipNotes {
    pub(super) const fn new() -> Self {
        Self { state: 0, restored: false, voided: None, untold: false, wanted: None, dirty: false, writing: None }
    }

    pub(super) const fn state(&self) -> u64 {
        self.state
    }

    /// Nothing of what the device had counts: that is told once.
    pub(super) const fn tell_voided(&mut self, why: VoidCause) {
        (self.voided, self.untold) = (Some(why), true);
    }

    /// True where nothing of what the device had at the start counts.
    pub(super) const fn has_voided(&self) -> bool {
        self.voided.is_some()
    }
}

impl Service {
    /// The newest map that was heard of.
    pub(in crate::service) fn heard_epoch(&self) -> Epoch {
        let wanted = self.tiered.as_ref().and_then(|tiered| tiered.noted.wanted.as_ref());
        wanted.map_or(self.ownership.epoch(), |(epoch, _)| *epoch)
    }

    /// Slots of the newest map that was heard of that are not served yet.
    pub(in crate::service) fn pending_slots(&self) -> SlotSet {
        let wanted = self.tiered.as_ref().and_then(|tiered| tiered.noted.wanted.as_ref());
        let served = self.ownership.owned();
        wanted.map_or_else(SlotSet::none, |(_, wanted)| wanted.with(served, |wanted, served| wanted & !served))
    }

    /// What waits to be served will not be.
    pub(in crate::service) fn forget_wanted(&mut self) {
        self.tiered.iter_mut().for_each(|tiered| tiered.noted.wanted = None);
    }

    /// What a first map lets be believed of what the device has. Reads the device's note once in an incarnation.
    pub(in crate::service) fn restore_owned(&mut self, epoch: Epoch, standing: MapStanding) {
        let (Some(tiered), Some(store)) = (&mut self.tiered, &self.store) else { return };
        if standing.state != 0 {
            tiered.noted.state = standing.state;
        }
        tiered.doubts.heard(epoch, standing);
        // An incarnation that was over before its first map knows nothing yet.
        if epoch == Epoch(0) || core::mem::replace(&mut tiered.noted.restored, true) {
            return;
        }
        let note = tiered.tier.ownership();
        // What was formatted just now has nothing that could be void.
        let is_new = tiered.tier.incarnation() <= 1;
        let distrust = match note {
            Some(note) => distrust(note, epoch, standing),
            None => (!is_new).then_some(VoidCause::NoNote),
        };
        let sweep = &mut tiered.sweep;
        sweep.at = Some(0);
        let Some(note) = note.filter(|_| distrust.is_none()) else {
            sweep.slots = SlotSet::none().with(&SlotSet::none(), |_, _| u64::MAX);
            sweep.floor = store.next_version();
            distrust.into_iter().for_each(|why| tiered.noted.tell_voided(why));
            return;
        };
        let (owned, doubted) = (&note.owned, &note.doubt.slots);
        let held = owned.with(doubted, |owned, doubted| owned | doubted);
        sweep.slots = held.with(&note.void, |held, void| !held | void);
        sweep.regained = note.void.clone();
        sweep.floor = note.floor;
        let doubts = &mut tiered.doubts;
        doubts.begin(doubted.iter(), note.doubt.epoch);
        if standing.since <= note.epoch {
            doubts.set_bounds(note.doubt.floor, note.state);
            doubts.believe(note.epoch);
            // A comparison that was cut short is not begun anew: whoever was asked then tells this incarnation nothing.
            doubts.make_void(&owned.with(doubted, |owned, doubted| owned & doubted));
            self.ownership.restore(owned);
            tiered.counters.slots_kept = owned.count();
        } else {
            doubts.begin(owned.with(doubted, |owned, doubted| owned & !doubted).iter(), note.epoch);
            doubts.set_bounds(store.next_version(), note.state);
        }
    }

    /// Serves a map: at once, or with a tier when the slots that came are written down.
    pub(in crate::service) fn serve_owned(&mut self, epoch: Epoch, owned: &impl Fn(u16) -> bool) {
        let mut wanted = SlotSet::none();
        for slot in (0..SLOTS as u16).filter(|slot| owned(*slot)) {
            wanted.0[usize::from(slot) / 64] |= 1 << (slot % 64);
        }
        let gains = self.ownership.gains(&wanted);
        if let Some(tiered) = self.tiered.as_mut() {
            tiered.noted.dirty = true;
            if gains && tiered.tier.degraded().is_none() {
                tiered.noted.wanted = Some((epoch, wanted));
                return;
            }
            tiered.noted.wanted = None;
        }
        self.install(epoch, &wanted);
    }

    fn install(&mut self, epoch: Epoch, owned: &SlotSet) {
        let gains = self.ownership.gains(owned);
        self.ownership.serve(epoch, owned);
        if gains {
            self.look_for_uncopied();
        }
    }

    /// Writes down what is owned, when that has changed and can be said.
    pub(super) fn note_work(&mut self, memory: &mut dyn Memory) -> bool {
        let (Some(tiered), Some(store)) = (&mut self.tiered, &self.store) else { return false };
        if tiered.tier.degraded().is_some() {
            let Some((epoch, owned)) = tiered.noted.wanted.take() else { return false };
            // What the device has of a slot that came may be void, and cannot be struck out any more.
            let came = owned.with(self.ownership.owned(), |wanted, owned| wanted & !owned);
            tiered.sweep.regain(&came, store.next_version());
            self.install(epoch, &owned);
            return true;
        }
        if tiered.noted.writing.is_some() || !tiered.noted.dirty {
            return false;
        }
        let served = self.ownership.owned();
        let (epoch, owned) = tiered.noted.wanted.clone().unwrap_or_else(|| (self.ownership.epoch(), served.clone()));
        let back =
            owned.with(served, |wanted, served| wanted & !served).with(&tiered.sweep.slots, |came, void| came & void);
        let mut floor = tiered.sweep.floor;
        if !back.is_empty() {
            // One floor is all that a note can say: the objects of the time before go first. Where they cannot, what
            // was put since then in slots that came back before is void at the next start.
            let sweeping = tiered.sweep.at.is_some();
            if sweeping && !tiered.sweep.regained.is_empty() && floor != store.next_version() {
                return false;
            }
            floor = store.next_version();
        }
        let regained = back.with(&tiered.sweep.regained, |one, other| one | other);
        let void = regained.with(&owned, |regained, owned| regained & owned);
        let doubt = tiered.doubts.note();
        let note = Note { state: tiered.noted.state, epoch, owned, void, floor, doubt };
        if !tiered.tier.note_ownership(&note, memory) {
            return false;
        }
        tiered.sweep.floor = floor;
        tiered.noted.dirty = false;
        tiered.noted.writing = Some(NoteWrite { epoch, regained: back });
        true
    }

    /// A note is durable: what it says is served, if it is still wanted.
    pub(super) fn noted(&mut self) {
        let Some(tiered) = &mut self.tiered else { return };
        let Some(NoteWrite { epoch, regained }) = tiered.noted.writing.take() else { return };
        let Some((_, owned)) = tiered.noted.wanted.take_if(|(wanted, _)| *wanted == epoch) else { return };
        let floor = tiered.sweep.floor;
        tiered.sweep.regain(&regained, floor);
        self.install(epoch, &owned);
    }

    /// What the device said about its slots when it was opened: by which state of the control plane, and by which map.
    #[must_use]
    pub fn tier_ownership(&self) -> Option<&Note> {
        self.tiered.as_ref()?.tier.ownership()
    }

    /// Why what the device had counts as removed since the start, if so: once.
    pub fn poll_tier_voided(&mut self) -> Option<VoidCause> {
        let noted = &mut self.tiered.as_mut()?.noted;
        noted.voided.filter(|_| core::mem::take(&mut noted.untold))
    }

    /// The map by which slots are served: not the newest that was heard of while that one is not written down.
    #[must_use]
    pub const fn served_epoch(&self) -> Epoch {
        self.ownership.epoch()
    }

    /// Whether a slot is served.
    #[must_use]
    pub fn serves(&self, slot: Slot) -> bool {
        self.ownership.owned().has(slot)
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

//! Objects that two owners have: which of ours the replica owner may have a copy of, and which are copies of another's.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{ReservationId, Version};

use super::Store;
use crate::entry::{EntryId, Mark, Replica, State};
use crate::eviction::EvictionPolicy;

/// What becomes of an object when owners change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It stays what it is.
    Stays,
    /// A copy: it is an object of our own from now on.
    Own,
    /// A copy: it goes.
    Goes,
    /// An object: nobody else has a copy of it.
    Alone,
}

/// What an object is of those that two owners have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// A copy of another's.
    Copy,
    /// One of ours, of which the replica owner may have a copy.
    Copied,
    /// One of ours that has none.
    Plain,
}

impl<P: EvictionPolicy> Store<P> {
    /// Whether there is a copy of another's object. Not an access.
    #[must_use]
    pub fn is_copy(&self, digest: Digest) -> bool {
        self.index.find(&self.entries, digest).is_some_and(|id| self.entries[id].is(Mark::Copy))
    }

    /// Whether a reservation is for a copy; false when it is stale.
    #[must_use]
    pub fn reserves_copy(&self, reservation: ReservationId) -> bool {
        let entry = self.reservations.get(reservation.index, reservation.generation);
        entry.is_some_and(|entry| self.entries[EntryId(entry)].is(Mark::Copy))
    }

    /// What an object is of those that two owners have.
    #[must_use]
    pub fn replica(&self, digest: Digest) -> Replica {
        self.index.find(&self.entries, digest).map_or(Replica::None, |id| self.entries[id].replica())
    }

    /// Whether the replica owner may have a copy of an object.
    #[must_use]
    pub fn is_copied(&self, digest: Digest) -> bool {
        self.index.find(&self.entries, digest).is_some_and(|id| self.entries[id].is(Mark::Copied))
    }

    /// An object of ours is to have a copy from now on; false where there is none.
    pub fn want_copy(&mut self, digest: Digest) -> bool {
        let id = self.index.find(&self.entries, digest).filter(|id| !self.entries[*id].is(Mark::Copy));
        if let Some(id) = id {
            self.entries.set(id, Mark::Wanted, true);
        }
        id.is_some()
    }

    /// An object of ours is to have no copy any more; true where the replica owner may have one, which has to go.
    pub fn want_no_copy(&mut self, digest: Digest) -> bool {
        let id = self.index.find(&self.entries, digest).filter(|id| !self.entries[*id].is(Mark::Copy));
        let Some(id) = id else { return false };
        self.entries.set(id, Mark::Wanted, false);
        let copied = self.entries[id].is(Mark::Copied);
        self.set_copied(id, false);
        copied
    }

    /// Notes whether the replica owner may have a copy of this version. False where that is not the object any more.
    pub fn note_copy(&mut self, digest: Digest, version: Version, may_be: bool) -> bool {
        let id = self.index.find(&self.entries, digest).filter(|id| self.entries[*id].version() == version);
        if let Some(id) = id {
            self.set_copied(id, may_be);
        }
        id.is_some()
    }

    fn set_copied(&mut self, id: EntryId, copied: bool) {
        self.counters.copied -= u64::from(self.entries[id].is(Mark::Copied));
        self.counters.copied += u64::from(copied);
        self.entries.set(id, Mark::Copied, copied);
    }

    /// Objects that are gone while the replica owner may have copies of them: all since the last call.
    pub fn take_orphans(&mut self) -> Vec<Digest> {
        core::mem::take(&mut self.orphans)
    }

    /// Whether there are any.
    #[must_use]
    pub const fn has_orphans(&self) -> bool {
        !self.orphans.is_empty()
    }

    /// Objects that are to have a copy and have none: looks at so many entries from `from` on. Then where to go on.
    #[must_use]
    pub fn uncopied(&self, from: u32, most: u32) -> (Vec<Digest>, Option<u32>) {
        let touched = self.entries.touched();
        let end = from.saturating_add(most.max(1)).min(touched);
        let entries = (from..end).map(|at| &self.entries[EntryId(at)]);
        let lack = entries.filter(|entry| {
            entry.state() == State::Live && entry.is(Mark::Wanted) && !entry.is(Mark::Copied) && !entry.is(Mark::Copy)
        });
        (lack.map(crate::entry::Entry::digest).collect(), (end < touched).then_some(end))
    }

    /// Owners have changed: `fate` says what becomes of each object, by what it is of those that two owners have. How
    /// many went. Walks the arena.
    pub fn reassign(&mut self, mut fate: impl FnMut(Digest, Side) -> Fate) -> u64 {
        let mut gone = 0;
        for id in (0..self.entries.touched()).map(EntryId) {
            let entry = &self.entries[id];
            let (copy, copied) = (entry.is(Mark::Copy), entry.is(Mark::Copied));
            if entry.state() != State::Live {
                continue;
            }
            let side = match (copy, copied) {
                (true, _) => Side::Copy,
                (false, true) => Side::Copied,
                (false, false) => Side::Plain,
            };
            match fate(entry.digest(), side) {
                Fate::Stays => {}
                Fate::Alone if !copied => {}
                Fate::Alone => self.set_copied(id, false),
                Fate::Own => {
                    self.counters.copies -= u64::from(copy);
                    self.entries.set(id, Mark::Copy, false);
                    self.entries.set(id, Mark::Wanted, true);
                }
                Fate::Goes => {
                    self.remove_entry(id);
                    gone += 1;
                }
            }
        }
        gone
    }
}

//! Replication of objects: those of this shard that the replica owner may have a replica of, and replicas of other
//! owners.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{ReservationId, Version};

use super::Store;
use crate::entry::{EntryId, Mark, Replica, State};
use crate::eviction::EvictionPolicy;

/// Fate of an object when owners change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It stays as it is.
    Stays,
    /// A replica: it becomes an object of this shard.
    Own,
    /// It is dropped.
    Goes,
    /// An object of this shard: no other shard has a replica of it.
    Alone,
}

/// Role of an object in replication.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Replica of another owner's object.
    Copy,
    /// Object of this shard whose replica owner may have a replica.
    Copied,
    /// Object of this shard without a replica.
    Plain,
}

impl<P: EvictionPolicy> Store<P> {
    /// Returns true if there is a replica of another owner's object. Does not count as an access.
    #[must_use]
    pub fn is_copy(&self, digest: Digest) -> bool {
        self.index.find(&self.entries, digest).is_some_and(|id| self.entries[id].is(Mark::Copy))
    }

    /// Returns true if a reservation is for a replica; false if it is stale.
    #[must_use]
    pub fn reserves_copy(&self, reservation: ReservationId) -> bool {
        let entry = self.reservations.get(reservation.index, reservation.generation);
        entry.is_some_and(|entry| self.entries[EntryId(entry)].is(Mark::Copy))
    }

    /// Returns an object's role in replication.
    #[must_use]
    pub fn replica(&self, digest: Digest) -> Replica {
        self.index.find(&self.entries, digest).map_or(Replica::None, |id| self.entries[id].replica())
    }

    /// Returns true if the replica owner may have a replica of an object.
    #[must_use]
    pub fn is_copied(&self, digest: Digest) -> bool {
        self.index.find(&self.entries, digest).is_some_and(|id| self.entries[id].is(Mark::Copied))
    }

    /// Marks an object of this shard to be replicated; false if there is none.
    pub fn want_copy(&mut self, digest: Digest) -> bool {
        let id = self.index.find(&self.entries, digest).filter(|id| !self.entries[*id].is(Mark::Copy));
        if let Some(id) = id {
            self.entries.set(id, Mark::Wanted, true);
        }
        id.is_some()
    }

    /// Marks an object of this shard not to be replicated any more; returns true if the replica owner may have a
    /// replica, which has to be removed.
    pub fn want_no_copy(&mut self, digest: Digest) -> bool {
        let id = self.index.find(&self.entries, digest).filter(|id| !self.entries[*id].is(Mark::Copy));
        let Some(id) = id else { return false };
        self.entries.set(id, Mark::Wanted, false);
        let copied = self.entries[id].is(Mark::Copied);
        self.set_copied(id, false);
        copied
    }

    /// Records whether the replica owner may have a replica of this version. False if the object has another version by
    /// now.
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

    /// Returns the objects that are gone while the replica owner may have replicas of them: all since the last call.
    pub fn take_orphans(&mut self) -> Vec<Digest> {
        core::mem::take(&mut self.orphans)
    }

    /// Returns true if there are such objects.
    #[must_use]
    pub const fn has_orphans(&self) -> bool {
        !self.orphans.is_empty()
    }

    /// Returns the objects that are to be replicated and have no replica among `most` entries from `from` on, and the
    /// next position.
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

    /// Applies a change of owners: `fate` returns the fate of each object, by its role in replication. Returns the
    /// number of objects dropped. Walks the arena.
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

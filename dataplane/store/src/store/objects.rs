//! Table of a shard's objects: their entries, and the index that finds the visible ones by digest.
//!
//! With each change of what is visible, the table appends the event for subscribers, and it remembers the *orphans*:
//! objects that are gone while replica owners may have replicas of them; and the [`DetachedReplicas`] of those that
//! were evicted and may be on the SSD.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::map::ReplicaSet;

use crate::config::StoreConfig;
use crate::entry::{Copies, Entries, Entry, EntryId, Mark, Replica, State};
use crate::events::EventLog;
use crate::index::{Index, TOGETHER};
use crate::store::ReplicaRole;
use crate::store::detached::{DetachedCopies, DetachedReplicas};
use kvplane_proto::events::{ObjectChange, ObjectMedium};

/// Entries, index, event log, orphans and detached replicas.
#[derive(Debug)]
pub struct ObjectTable {
    entries: Entries,
    index: Index,
    /// Events of the objects, if there are subscribers.
    events: EventLog,
    orphans: Vec<(Digest, ReplicaSet)>,
    detached: DetachedReplicas,
}

impl ObjectTable {
    /// Creates an empty table.
    pub(super) fn new(config: &StoreConfig) -> Self {
        Self {
            entries: Entries::new(config.max_objects).in_units(config.unit_bytes),
            index: Index::new(config.max_objects, config.hash_seed),
            events: EventLog::default(),
            orphans: Vec::new(),
            detached: DetachedReplicas::default(),
        }
    }

    /// Returns the number of visible objects.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.index.len()
    }

    /// Returns true if no object is visible.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Returns the metadata of an object.
    #[must_use]
    pub fn get(&self, digest: Digest) -> Option<&Entry> {
        self.find(digest).map(|id| &self.entries[id])
    }

    /// Returns the entry of an object.
    #[inline]
    pub(super) fn find(&self, digest: Digest) -> Option<EntryId> {
        self.index.find(&self.entries, digest)
    }

    /// Calls `each` with each digest, and true if there is an object of it: faster than one by one if the tables exceed
    /// the caches.
    pub fn exist(&self, digests: impl IntoIterator<Item = Digest>, mut each: impl FnMut(Digest, bool)) {
        self.look_up(digests, |digest, found| each(digest, found.is_some()));
    }

    /// Like [`Self::exist`], and passes for existing objects whether they are stripe heads.
    pub fn exist_as_heads(&self, digests: impl IntoIterator<Item = Digest>, mut each: impl FnMut(bool, bool)) {
        self.look_up(digests, |_, found| each(found.is_some(), found.is_some_and(|entry| entry.is(Mark::Head))));
    }

    fn look_up(&self, digests: impl IntoIterator<Item = Digest>, mut each: impl FnMut(Digest, Option<&Entry>)) {
        let mut digests = digests.into_iter();
        let mut together = [Digest(0); TOGETHER];
        loop {
            let mut count = 0;
            for (place, digest) in together.iter_mut().zip(&mut digests) {
                *place = digest;
                count += 1;
            }
            let mut found = [None; TOGETHER];
            self.index.find_together(&self.entries, &together[..count], &mut found[..count]);
            for (digest, found) in together[..count].iter().zip(found) {
                each(*digest, found.map(|id| &self.entries[id]));
            }
            if count < TOGETHER {
                return;
            }
        }
    }

    /// Returns the memory of the tables that look-ups read at random: that of digests, all of it touched, and that of
    /// entries, touched as it fills. For advice to the kernel about that memory.
    #[must_use]
    pub fn memory(&self) -> [core::ops::Range<*const u8>; 2] {
        [self.index.memory(), self.entries.memory()]
    }

    /// Returns the entries whose point is in `from..to`: see [`crate::Store::between`].
    pub(super) fn between(&self, from: u64, to: u64) -> impl Iterator<Item = (u32, EntryId)> {
        self.index.between(from, to)
    }

    /// Returns the number of index slots that [`crate::Store::between`] has in all.
    #[must_use]
    pub const fn places(&self) -> usize {
        self.index.slots()
    }

    /// Returns the visible objects with their sizes among `most` entries from `from` on, and the next position.
    #[must_use]
    pub fn walk(&self, from: u32, most: u32) -> (Vec<(Digest, u64)>, Option<u32>) {
        let (live, next) = self.live_from(from, most);
        (live.map(|entry| (entry.digest(), entry.bytes())).collect(), next)
    }

    /// Returns the objects that are to be replicated and for which `lacks` returns true, by their replicas, among
    /// `most` entries from `from` on, and the next position.
    pub fn lacking(&self, from: u32, most: u32, lacks: impl Fn(Digest, Copies) -> bool) -> (Vec<Digest>, Option<u32>) {
        let touched = self.entries.touched();
        let end = from.saturating_add(most.max(1)).min(touched);
        let mut found = Vec::new();
        for id in (from..end).map(EntryId) {
            let entry = &self.entries[id];
            let is_owed = entry.is_live() && entry.is(Mark::Wanted) && !entry.is(Mark::Copy);
            if is_owed && lacks(entry.digest(), self.entries.copies(id)) {
                found.push(entry.digest());
            }
        }
        (found, (end < touched).then_some(end))
    }

    /// Returns the objects that are to be replicated and have no replica.
    #[must_use]
    pub fn uncopied(&self) -> Vec<Digest> {
        self.lacking(0, u32::MAX, |_, copies| copies.at.is_empty()).0
    }

    fn live_from(&self, from: u32, most: u32) -> (impl Iterator<Item = &Entry>, Option<u32>) {
        let touched = self.entries.touched();
        let end = from.saturating_add(most.max(1)).min(touched);
        let entries = (from..end).map(|at| &self.entries[EntryId(at)]);
        (entries.filter(|entry| entry.is_live()), (end < touched).then_some(end))
    }

    /// Returns true if there is a replica of another owner's object. Does not count as an access.
    #[must_use]
    pub fn is_copy(&self, digest: Digest) -> bool {
        self.get(digest).is_some_and(|entry| entry.is(Mark::Copy))
    }

    /// Returns an object's role in replication.
    #[must_use]
    pub fn replica(&self, digest: Digest) -> Replica {
        self.get(digest).map_or(Replica::None, Entry::replica)
    }

    /// Returns the replicas of an object of this shard, or with which a replica was written; those of one that is not
    /// replicated are without a meaning, and so is their number for an object that is neither here nor was evicted.
    #[must_use]
    pub fn copies(&self, digest: Digest) -> Copies {
        match self.find(digest) {
            Some(id) => self.entries.copies(id),
            None => self.detached.copies(digest).unwrap_or(Copies::ONE),
        }
    }

    /// Returns the replicas of objects that only the SSD has.
    #[must_use]
    pub const fn detached(&self) -> &DetachedReplicas {
        &self.detached
    }

    /// Returns the replicas of objects that only the SSD has, to be changed.
    pub(crate) const fn detached_mut(&mut self) -> &mut DetachedReplicas {
        &mut self.detached
    }

    /// Makes an object an orphan that only the SSD had, and that is gone.
    pub(crate) fn orphan_detached(&mut self, digest: Digest) {
        let gone = self.detached.take(digest);
        self.orphans.extend(gone.map(|gone| (digest, gone.copies.at)));
    }

    /// Makes all objects orphans that only the SSD had.
    pub(crate) fn orphan_all_detached(&mut self) {
        let gone = self.detached.take_all();
        self.orphans.extend(gone.into_iter().map(|(digest, gone)| (digest, gone.copies.at)));
    }

    /// Makes an object of this shard one that is to have at least so many replicas beside the owner's; false if there
    /// is no such object.
    pub fn want_copies(&mut self, digest: Digest, wanted: u8) -> bool {
        let id = self.find(digest).filter(|id| !self.entries[*id].is(Mark::Copy));
        if let Some(id) = id {
            let before = if self.entries[id].is(Mark::Wanted) { self.entries.copies(id).wanted } else { 0 };
            self.entries.set(id, Mark::Wanted, true);
            self.entries.set_wanted(id, wanted.max(before));
        }
        id.is_some()
    }

    /// Marks an object of this shard not to be replicated any more; returns the replica owners that may have a replica,
    /// which has to be removed.
    pub fn want_no_copy(&mut self, digest: Digest) -> ReplicaSet {
        let id = self.find(digest).filter(|id| !self.entries[*id].is(Mark::Copy));
        let Some(id) = id else { return ReplicaSet::NONE };
        self.entries.set(id, Mark::Wanted, false);
        let at = self.entries.copies(id).at;
        self.entries.set_replica_owners(id, ReplicaSet::NONE);
        at
    }

    /// Records whether a replica owner, by its number, may have a replica of this version. False if the object has
    /// another version by now.
    pub fn note_copy(&mut self, digest: Digest, version: Version, number: usize, may_be: bool) -> bool {
        let id = self.find(digest).filter(|id| self.entries[*id].version() == version);
        if let Some(id) = id {
            let at = self.entries.copies(id).at;
            self.entries.set_replica_owners(id, if may_be { at.with(number) } else { at.without(number) });
        }
        id.is_some()
    }

    /// Records which replica owners may have a replica of an object of this shard, by the numbers of a new map.
    pub(super) fn set_replica_owners(&mut self, id: EntryId, at: ReplicaSet) {
        self.entries.set_replica_owners(id, at);
    }

    /// Makes a replica an object of this shard that is to be replicated.
    pub(super) fn own(&mut self, id: EntryId) {
        self.entries.set(id, Mark::Copy, false);
        self.entries.set(id, Mark::Wanted, true);
    }

    /// Returns the digest of a visible object and its role in replication; `None` if the entry is not visible.
    pub(super) fn role(&self, id: EntryId) -> Option<(Digest, ReplicaRole)> {
        let (entry, at) = (&self.entries[id], self.entries.copies(id).at);
        let side = match (entry.is(Mark::Copy), at.is_empty()) {
            (true, _) => ReplicaRole::Replica,
            (false, false) => ReplicaRole::Replicated(at),
            (false, true) => ReplicaRole::Sole,
        };
        entry.is_live().then(|| (entry.digest(), side))
    }

    /// Returns the orphans since the last call, each with the replica owners that may have a replica.
    pub fn take_orphans(&mut self) -> Vec<(Digest, ReplicaSet)> {
        core::mem::take(&mut self.orphans)
    }

    /// Returns true if there are orphans.
    #[must_use]
    pub const fn has_orphans(&self) -> bool {
        !self.orphans.is_empty()
    }

    /// Returns the event log.
    #[must_use]
    pub const fn events(&self) -> &EventLog {
        &self.events
    }

    /// Returns the event log, to be changed.
    pub const fn events_mut(&mut self) -> &mut EventLog {
        &mut self.events
    }

    /// Returns the entries.
    #[inline]
    pub(super) const fn entries(&self) -> &Entries {
        &self.entries
    }

    /// Returns the entries, for steps and marks that do not change what is visible.
    #[inline]
    pub(super) const fn entries_mut(&mut self) -> &mut Entries {
        &mut self.entries
    }

    /// Adds an entry that became live to the index. One that was evicted and is read back has its replicas again.
    pub(super) fn show(&mut self, id: EntryId) {
        let (digest, version, bytes) =
            (self.entries[id].digest(), self.entries[id].version(), self.entries[id].bytes());
        self.index.insert(digest, id);
        self.events.push(ObjectChange::Stored, ObjectMedium::Memory, digest, bytes);
        match self.detached.take(digest) {
            Some(DetachedCopies { version: of, copies }) if of == version && !self.entries[id].is(Mark::Copy) => {
                self.entries.set(id, Mark::Wanted, true);
                self.entries.set_wanted(id, copies.wanted);
                self.entries.set_replica_owners(id, copies.at);
            }
            Some(DetachedCopies { copies, .. }) => self.orphans.push((digest, copies.at)),
            None => {}
        }
    }

    /// Removes a live entry from the index. The caller removes it from the eviction order. The replicas of one that is
    /// `evicted` stay if the SSD has it.
    pub(super) fn hide(&mut self, id: EntryId, evicted: bool) {
        let entry = &self.entries[id];
        let (digest, version) = (entry.digest(), entry.version());
        let taken = self.index.remove(digest, id);
        assert!(taken, "{id:?} is live but not in the index");
        let copies = self.entries.copies(id);
        if evicted && entry.is(Mark::Wanted) && copies.at.count() < copies.wanted.into() {
            self.detached.note_lacking(digest, copies);
        }
        let is_copied = entry.is(Mark::Copied);
        let is_kept = is_copied && evicted && self.detached.add(digest, DetachedCopies { version, copies });
        if is_copied && !is_kept {
            self.orphans.push((digest, copies.at));
        }
        self.events.push(ObjectChange::Removed, ObjectMedium::Memory, digest, 0);
    }

    /// Makes one live entry take the place of another with the same object, which has moved: nothing changes for
    /// readers and subscribers.
    pub(super) fn supersede(&mut self, old: EntryId, new: EntryId) {
        let digest = self.entries[new].digest();
        let taken = self.index.remove(digest, old);
        assert!(taken, "{old:?} is live but not in the index");
        self.index.insert(digest, new);
    }

    /// Asserts that the index has the live entries only, and that the gauges agree with the entries.
    ///
    /// # Panics
    /// If an assertion fails.
    pub(super) fn check(&self) {
        self.index.check(&self.entries);
        self.entries.check();
        let mut live = 0;
        for (id, entry) in self.entries.iter().filter(|(_, entry)| entry.is_live()) {
            live += 1;
            assert_eq!(self.find(entry.digest()), Some(id), "{entry:?} is in the index");
        }
        assert_eq!(self.index.len(), live, "the index has the live entries only");
        let doomed = self.entries.iter().filter(|(_, entry)| entry.state() == State::Doomed);
        assert!(doomed.into_iter().all(|(_, entry)| entry.pins() > 0), "a doomed entry is pinned");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::Allocator;
    use crate::entry::Reserve;

    /// Returns a table with a live object for each of these digests and roles, and their entries.
    fn table(objects: &[(u128, Replica)]) -> (ObjectTable, Vec<EntryId>) {
        let mut table = ObjectTable::new(&StoreConfig::for_pool(1 << 16));
        table.events_mut().keep(16);
        let block = Allocator::new(256, 1).allocate(1).expect("the pool is empty");
        let mut ids = Vec::new();
        for (at, (digest, replica)) in (1..).zip(objects) {
            let wanted = Reserve { replica: *replica, ..Reserve::plain(Digest(*digest), 100) };
            let id = table.entries_mut().reserve(&wanted, block);
            assert!(table.get(Digest(*digest)).is_none(), "a reserved object is invisible");
            table.entries_mut().commit(id, Version(at), 0);
            table.show(id);
            ids.push(id);
        }
        table.check();
        (table, ids)
    }

    #[test]
    fn only_wanted_objects_without_a_replica_lack_one() {
        let roles = [(1, Replica::None), (2, Replica::First), (3, Replica::Second), (4, Replica::Awaited)];
        let (mut table, _) = table(&roles);
        assert_eq!(table.uncopied(), [Digest(2), Digest(4)]);
        let wanted = [1, 3, 5].map(|digest| table.want_copies(Digest(digest), 3));
        assert_eq!(wanted, [true, false, false]);
        let noted =
            [(2, 2), (4, 9)].map(|(digest, version)| table.note_copy(Digest(digest), Version(version), 4, true));
        assert_eq!(noted, [true, false]);
        assert_eq!(table.uncopied(), [Digest(1), Digest(4)]);
        assert_eq!(table.lacking(0, 1, |_, _| true), (vec![Digest(1)], Some(1)));
        let lacks_several = |_, copies: Copies| copies.at.count() + 1 < usize::from(copies.wanted);
        assert_eq!(table.lacking(0, 9, lacks_several), (vec![Digest(1)], None));
        assert_eq!(table.want_no_copy(Digest(2)), ReplicaSet::NONE.with(4), "that one may have a replica");
        assert!(table.want_no_copy(Digest(2)).is_empty());
        assert_eq!(table.entries().live().copied, 0);
    }

    #[test]
    fn objects_with_a_replica_leave_orphans() {
        let (mut table, ids) = table(&[(1, Replica::First), (2, Replica::First)]);
        table.note_copy(Digest(1), Version(1), 1, true);
        for id in ids {
            table.hide(id, true);
            table.entries_mut().release(id);
        }
        assert_eq!((table.len(), table.has_orphans()), (0, true));
        assert_eq!((table.take_orphans(), table.has_orphans()), (vec![(Digest(1), ReplicaSet::NONE.with(1))], false));
        let events = table.events().read(0, 9).events;
        let changes: Vec<ObjectChange> = events.iter().map(|event| event.change).collect();
        assert_eq!(changes, [ObjectChange::Stored, ObjectChange::Stored, ObjectChange::Removed, ObjectChange::Removed]);
        table.check();
    }

    #[test]
    fn an_evicted_object_keeps_its_replicas_until_it_is_gone_or_replaced() {
        let (mut table, ids) = table(&[(1, Replica::First), (2, Replica::First), (3, Replica::First)]);
        table.detached_mut().keep();
        for (at, id) in (1..).zip(&ids) {
            table.note_copy(Digest(at), Version(at as u64), 1, true);
            table.hide(*id, true);
        }
        let at = ReplicaSet::NONE.with(1);
        assert_eq!((table.has_orphans(), table.detached().len(), table.copies(Digest(1)).at), (false, 3, at));
        let unconfirmed = [1, 2, 3].map(|number| (Digest(number), Version(number as u64)));
        assert_eq!(table.detached_mut().take_unconfirmed(), unconfirmed);
        // The first is read back, the second was put again, the third removed.
        table.show(ids[0]);
        assert_eq!((table.copies(Digest(1)).at, table.detached().len()), (at, 2));
        table.entries_mut().release(ids[1]);
        let block = Allocator::new(256, 1).allocate(1).expect("the pool is empty");
        let again = table.entries_mut().reserve(&Reserve::plain(Digest(2), 100), block);
        table.entries_mut().commit(again, Version(9), 0);
        table.show(again);
        table.orphan_detached(Digest(3));
        assert_eq!(table.take_orphans(), [(Digest(2), at), (Digest(3), at)]);
        assert!(table.detached().is_empty() && table.copies(Digest(2)).at.is_empty());
    }
}

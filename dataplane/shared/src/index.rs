//! Index of a shard: where each object is, and the packs that have them. Entries of a slot are next to each other, as
//! the slot is the beginning of a digest.

use core::ops::RangeInclusive;
use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{SLOT_BITS, Slot, Version};
use kvplane_proto::map::ShardKey;
use kvplane_proto::narrowing::length_u32;

use crate::format::{Entry, PackRow};
use crate::types::SharedView;

/// Object with the row of its pack.
#[derive(Clone, Copy, Debug)]
struct PlacedEntry {
    entry: Entry,
    row: u32,
}

/// Pack of the index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackState {
    pub(crate) pack: PackRow,
    /// Objects that are in it.
    pub(crate) live: u32,
    /// True if other shards may have objects in it: it is deleted only when its lifetime is over.
    pub(crate) is_foreign: bool,
    /// True if nothing of it is read any more.
    pub(crate) is_gone: bool,
    /// True if a checkpoint was begun since then, which leaves it out.
    is_left_out: bool,
}

/// Objects and packs.
#[derive(Debug, Default)]
pub(crate) struct Index {
    entries: BTreeMap<Digest, PlacedEntry>,
    rows: Vec<Option<PackState>>,
    free: Vec<u32>,
    by_name: BTreeMap<(ShardKey, u64), u32>,
}

fn digests_of(slot: Slot) -> RangeInclusive<Digest> {
    let shift = u128::BITS - SLOT_BITS;
    let first = u128::from(slot.0) << shift;
    Digest(first)..=Digest(first | ((1 << shift) - 1))
}

impl Index {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns an object, and its pack, if that can be read.
    pub(crate) fn get(&self, digest: Digest) -> Option<(&Entry, PackRow)> {
        let placed = self.entries.get(&digest)?;
        let state = self.rows[placed.row as usize].as_ref()?;
        (!state.is_gone).then_some((&placed.entry, state.pack))
    }

    /// Returns true if there is an entry, readable or not.
    pub(crate) fn has(&self, digest: Digest) -> bool {
        self.entries.contains_key(&digest)
    }

    /// Returns the row of a pack, which is added if it is new.
    pub(crate) fn add_pack(&mut self, pack: PackRow, is_foreign: bool) -> u32 {
        if let Some(row) = self.by_name.get(&(pack.shard, pack.number)) {
            return *row;
        }
        let state = Some(PackState { pack, live: 0, is_foreign, is_gone: false, is_left_out: false });
        let row = match self.free.pop() {
            Some(row) => {
                self.rows[row as usize] = state;
                row
            }
            None => {
                self.rows.push(state);
                length_u32(self.rows.len() - 1)
            }
        };
        self.by_name.insert((pack.shard, pack.number), row);
        row
    }

    /// Inserts an object, in place of what was there.
    pub(crate) fn insert(&mut self, entry: Entry, row: u32) {
        self.remove(entry.digest);
        if let Some(state) = &mut self.rows[row as usize] {
            state.live += 1;
            self.entries.insert(entry.digest, PlacedEntry { entry, row });
        }
    }

    /// Gives an object another version, if it has these bytes, and can be read. Returns false otherwise.
    pub(crate) fn renumber(&mut self, digest: Digest, bytes: u64, checksum: u64, version: Version) -> bool {
        let is_same = |(entry, _): (&Entry, PackRow)| u64::from(entry.bytes) == bytes && entry.checksum == checksum;
        if !self.get(digest).is_some_and(is_same) {
            return false;
        }
        if let Some(placed) = self.entries.get_mut(&digest) {
            placed.entry.version = version;
        }
        true
    }

    /// Removes an object.
    pub(crate) fn remove(&mut self, digest: Digest) {
        if let Some(placed) = self.entries.remove(&digest)
            && let Some(state) = &mut self.rows[placed.row as usize]
        {
            state.live -= 1;
        }
    }

    /// Removes up to `most` objects of a slot; with `is_foreign`, their packs are another shard's from now on, too.
    /// Returns true if none is left.
    pub(crate) fn purge(&mut self, slot: Slot, is_foreign: bool, most: usize) -> bool {
        let digests: Vec<Digest> = self.entries.range(digests_of(slot)).take(most).map(|(digest, _)| *digest).collect();
        for digest in &digests {
            if is_foreign && let Some(placed) = self.entries.get(digest) {
                let row = placed.row;
                if let Some(state) = &mut self.rows[row as usize] {
                    state.is_foreign = true;
                }
            }
            self.remove(*digest);
        }
        digests.len() < most
    }

    /// Makes nothing of a pack readable any more.
    pub(crate) fn drop_pack(&mut self, shard: ShardKey, number: u64) {
        if let Some(row) = self.by_name.get(&(shard, number))
            && let Some(state) = &mut self.rows[*row as usize]
        {
            state.is_gone = true;
        }
    }

    /// Notes that a checkpoint is begun, which leaves out the packs that are not read any more.
    pub(crate) fn leave_out_gone(&mut self) {
        let gone = self.rows.iter_mut().flatten().filter(|state| state.is_gone);
        gone.for_each(|state| state.is_left_out = true);
    }

    /// Forgets a pack without objects.
    pub(crate) fn forget_pack(&mut self, shard: ShardKey, number: u64) {
        if let Some(row) = self.by_name.remove(&(shard, number)) {
            self.rows[row as usize] = None;
            self.free.push(row);
        }
    }

    /// Returns the packs.
    pub(crate) fn packs(&self) -> impl Iterator<Item = &PackState> {
        self.by_name.values().filter_map(|row| self.rows[*row as usize].as_ref())
    }

    /// Removes the objects of packs that checkpoints leave out among `most` entries after a digest. Returns the last
    /// digest that was looked at; `None` after the last entry.
    pub(crate) fn sweep(&mut self, after: Option<Digest>, most: usize) -> Option<Digest> {
        let from = after.map_or(core::ops::Bound::Unbounded, core::ops::Bound::Excluded);
        let (mut gone, mut last, mut count) = (Vec::new(), None, 0);
        for (digest, placed) in self.entries.range((from, core::ops::Bound::Unbounded)).take(most) {
            (last, count) = (Some(*digest), count + 1);
            if self.rows[placed.row as usize].is_none_or(|state| state.is_left_out) {
                gone.push(*digest);
            }
        }
        gone.into_iter().for_each(|digest| self.remove(digest));
        last.filter(|_| count == most)
    }

    /// Passes up to `most` objects after a digest to `take`, with their packs. Returns the last digest; `None` after
    /// the last entry.
    pub(crate) fn walk(
        &self,
        after: Option<Digest>,
        most: usize,
        take: &mut dyn FnMut(&Entry, &PackState),
    ) -> Option<Digest> {
        let from = after.map_or(core::ops::Bound::Unbounded, core::ops::Bound::Excluded);
        let (mut last, mut count) = (None, 0);
        for (digest, placed) in self.entries.range((from, core::ops::Bound::Unbounded)).take(most) {
            (last, count) = (Some(*digest), count + 1);
            if let Some(state) = &self.rows[placed.row as usize] {
                take(&placed.entry, state);
            }
        }
        last.filter(|_| count == most)
    }
}

/// Returns what the host may know of an entry.
pub(crate) const fn view_of(entry: &Entry) -> SharedView {
    SharedView {
        digest: entry.digest,
        version: entry.version,
        bytes: entry.bytes,
        tail_bytes: entry.tail_bytes,
        tenant: entry.tenant,
        is_head: entry.is_head,
        is_replicated: entry.is_replicated,
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

    use super::*;
    use crate::format::EntryKind;

    fn pack(number: u64) -> PackRow {
        let shard = ShardKey { node: NodeId(1), incarnation: Incarnation(2), shard: ShardId(0) };
        PackRow { shard, number, bytes: 1000, written_ms: 0 }
    }

    fn entry(slot: u16, number: u64) -> Entry {
        let digest = Digest(u128::from(slot) << 114 | u128::from(number));
        Entry { version: Version(number), kind: EntryKind::Object, bytes: 1, ..Entry::removal(digest) }
    }

    #[test]
    fn a_slot_is_purged_in_steps_and_its_packs_become_foreign() {
        let mut index = Index::default();
        let rows = [index.add_pack(pack(1), false), index.add_pack(pack(2), false)];
        (0..10).for_each(|number| index.insert(entry(5, number), rows[0]));
        index.insert(entry(6, 1), rows[1]);
        assert!(!index.purge(Slot(5), true, 8) && index.purge(Slot(5), true, 8));
        let states: Vec<_> = index.packs().map(|state| (state.live, state.is_foreign)).collect();
        assert_eq!(states, [(0, true), (1, false)]);
        assert_eq!(index.len(), 1);
    }

    #[test]
    fn objects_of_a_dropped_pack_are_not_found_and_are_swept() {
        let mut index = Index::default();
        let row = index.add_pack(pack(1), false);
        let other = index.add_pack(pack(2), false);
        (0..10).for_each(|number| index.insert(entry(1, number), if number < 5 { row } else { other }));
        index.drop_pack(pack(1).shard, 1);
        assert!(index.get(entry(1, 1).digest).is_none() && index.has(entry(1, 1).digest));
        index.sweep(None, 100);
        assert_eq!(index.len(), 10, "a checkpoint in the store may have them");
        index.leave_out_gone();
        let mut after = None;
        loop {
            after = index.sweep(after, 3);
            if after.is_none() {
                break;
            }
        }
        assert_eq!(index.len(), 5);
        index.forget_pack(pack(1).shard, 1);
        assert_eq!(index.add_pack(pack(3), false), row, "its row is free");
    }
}

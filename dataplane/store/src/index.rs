//! Index from a digest to its entry: an open-addressing hash table of fixed size.
//!
//! A slot is (fingerprint, entry). The fingerprint is 32 bits of a seeded mix of the whole digest, and it alone
//! determines where a search begins, so that inserting and deleting never touch other entries. Collisions probe
//! linearly with Robin Hood ordering (Celis, 1986: the slot goes to the one that is further from its home), so that a
//! search for a missing digest, the most frequent one, ends as early as one that succeeds; deletion shifts the
//! followers back and leaves no tombstones. At most three quarters of the slots are in use.
//!
//! Memory per object: 64 B of entry and 4/3 of an 8 B slot, under 75 B; with the allocator's descriptor under 100 B.

use kvplane_proto::digest::Digest;
use kvplane_proto::rng::mix64;

use crate::allocator::Allocator;
use crate::entry::{Entries, Entry, EntryId, NONE};

#[derive(Clone, Copy, Debug)]
struct Slot {
    fingerprint: u32,
    entry: u32,
}

/// Most digests of one call of [`Index::find_together`].
pub const TOGETHER: usize = 32;

const EMPTY: Slot = Slot { fingerprint: 0, entry: NONE };

/// Metadata per object in a full pool: entry, share of the table, block descriptor.
pub const BYTES_PER_OBJECT: usize =
    size_of::<Entry>() + (size_of::<Slot>() * 4).div_ceil(3) + Allocator::BYTES_PER_BLOCK;

const _: () = assert!(BYTES_PER_OBJECT <= 100);

/// Hash table from digests to entries.
#[derive(Debug)]
pub struct Index {
    slots: Vec<Slot>,
    limit: u32,
    len: u32,
    seed: u64,
}

impl Index {
    /// Creates a table for `limit` objects, salted with `seed`.
    #[must_use]
    pub fn new(limit: u32, seed: u64) -> Self {
        let slots = limit as usize + (limit as usize).div_ceil(3) + 1;
        Self { slots: vec![EMPTY; slots], limit, len: 0, seed }
    }

    /// Returns the number of objects in the table.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Returns true if the table has no object.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the entry of `digest`.
    #[must_use]
    pub fn find(&self, entries: &Entries, digest: Digest) -> Option<EntryId> {
        let at = self.position(self.fingerprint(digest), |id| entries[id].digest() == digest)?;
        Some(EntryId(self.slots[at].entry))
    }

    /// Like [`Self::find`], for up to [`TOGETHER`] digests, whose cache misses overlap: in a large table each search
    /// misses the caches twice.
    ///
    /// # Panics
    /// If there are more digests, or `found` has another length.
    pub fn find_together(&self, entries: &Entries, digests: &[Digest], found: &mut [Option<EntryId>]) {
        assert!(digests.len() <= TOGETHER && digests.len() == found.len(), "{} digests", digests.len());
        let mut wanted = [0; TOGETHER];
        let mut first = [EMPTY; TOGETHER];
        // Each loop only loads, and no load depends on another of the same loop.
        for ((wanted, first), digest) in wanted.iter_mut().zip(&mut first).zip(digests) {
            *wanted = self.fingerprint(*digest);
            *first = self.slots[self.home(*wanted)];
        }
        let mut likely = [None; TOGETHER];
        for ((likely, wanted), first) in likely.iter_mut().zip(wanted).zip(first).take(digests.len()) {
            let at = if first.fingerprint == wanted { Some(first.entry) } else { self.first_match(wanted) };
            *likely = at.filter(|entry| *entry != NONE).map(EntryId);
        }
        let mut names = [Digest(0); TOGETHER];
        for (name, likely) in names.iter_mut().zip(likely) {
            *name = likely.map_or(Digest(0), |id| entries[id].digest());
        }
        for (at, digest) in digests.iter().enumerate() {
            found[at] = match likely[at] {
                None => None,
                Some(id) if names[at] == *digest => Some(id),
                // Two digests with one fingerprint: one in four thousand million.
                Some(_) => self.find(entries, *digest),
            };
        }
    }

    /// Returns the first entry with this fingerprint.
    fn first_match(&self, fingerprint: u32) -> Option<u32> {
        self.position(fingerprint, |_| true).map(|at| self.slots[at].entry)
    }

    /// Inserts an entry under its digest, which must not be in the table.
    ///
    /// # Panics
    /// If the table is full: the arena of entries has the same limit.
    pub fn insert(&mut self, digest: Digest, id: EntryId) {
        assert!(self.len < self.limit, "all {} objects are in the index", self.limit);
        self.len += 1;
        let mut carried = Slot { fingerprint: self.fingerprint(digest), entry: id.0 };
        let mut at = self.home(carried.fingerprint);
        let mut distance = 0;
        loop {
            let slot = self.slots[at];
            if slot.entry == NONE {
                self.slots[at] = carried;
                return;
            }
            let settled = self.distance(slot.fingerprint, at);
            if settled < distance {
                self.slots[at] = carried;
                carried = slot;
                distance = settled;
            }
            at = self.next(at);
            distance += 1;
        }
    }

    /// Removes an entry; false if it is not in the table.
    pub fn remove(&mut self, digest: Digest, id: EntryId) -> bool {
        let Some(mut hole) = self.position(self.fingerprint(digest), |other| other == id) else {
            return false;
        };
        loop {
            let next = self.next(hole);
            let slot = self.slots[next];
            if slot.entry == NONE || self.distance(slot.fingerprint, next) == 0 {
                break;
            }
            self.slots[hole] = slot;
            hole = next;
        }
        self.slots[hole] = EMPTY;
        self.len -= 1;
        true
    }

    /// Returns the entries whose fingerprint is in `from..to`; `to` may be one beyond the last fingerprint. They lie
    /// between the homes of the two or, displaced, behind: up to the first slot that is empty or holds an entry at its
    /// home.
    pub fn between(&self, from: u64, to: u64) -> impl Iterator<Item = (u32, EntryId)> {
        let slots = self.slots.len();
        let home = |point: u64| ((u128::from(point) * slots as u128) >> 32) as usize;
        let (first, last) = (home(from), home(to));
        let ends = move |at: usize| {
            let slot = self.slots[at % slots];
            at > last && (slot.entry == NONE || self.distance(slot.fingerprint, at % slots) == 0)
        };
        let walked = (first..first + slots).take_while(move |at| !ends(*at));
        let found = walked.map(move |at| self.slots[at % slots]).filter(|slot| slot.entry != NONE);
        let within = found.filter(move |slot| (from..to).contains(&slot.fingerprint.into()));
        within.map(|slot| (slot.fingerprint, EntryId(slot.entry)))
    }

    /// Returns the memory of the slots.
    #[must_use]
    pub fn memory(&self) -> core::ops::Range<*const u8> {
        let slots = self.slots.as_ptr_range();
        slots.start.cast()..slots.end.cast()
    }

    /// Returns the number of slots.
    #[must_use]
    pub const fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Asserts that every slot leads to an entry that is found by its digest, and that all are counted.
    ///
    /// # Panics
    /// If an assertion fails.
    pub fn check(&self, entries: &Entries) {
        let mut seen = 0;
        for slot in self.slots.iter().filter(|slot| slot.entry != NONE) {
            let digest = entries[EntryId(slot.entry)].digest();
            assert_eq!(slot.fingerprint, self.fingerprint(digest), "fingerprint of {digest}");
            assert_eq!(self.find(entries, digest), Some(EntryId(slot.entry)), "{digest} is found");
            seen += 1;
        }
        assert_eq!(seen, self.len, "objects in the index are counted");
    }

    /// Both words go through the mixer, one after the other: digests that agree in either word spread like any others.
    const fn fingerprint(&self, digest: Digest) -> u32 {
        let low = mix64(digest.low() ^ self.seed);
        (mix64(low ^ (digest.0 >> 64) as u64) >> 32) as u32
    }

    /// Returns the slot where a search begins: the fingerprint scaled to the table.
    const fn home(&self, fingerprint: u32) -> usize {
        ((fingerprint as u64 * self.slots.len() as u64) >> 32) as usize
    }

    const fn next(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    /// Returns the distance of `at` from the home of `fingerprint`, modulo the table.
    const fn distance(&self, fingerprint: u32, at: usize) -> usize {
        let home = self.home(fingerprint);
        if at >= home { at - home } else { at + self.slots.len() - home }
    }

    fn position(&self, fingerprint: u32, is_it: impl Fn(EntryId) -> bool) -> Option<usize> {
        let mut at = self.home(fingerprint);
        let mut distance = 0;
        loop {
            let slot = self.slots[at];
            if slot.entry == NONE || self.distance(slot.fingerprint, at) < distance {
                return None;
            }
            if slot.fingerprint == fingerprint && is_it(EntryId(slot.entry)) {
                return Some(at);
            }
            at = self.next(at);
            distance += 1;
        }
    }
}

#[cfg(test)]
mod tests;

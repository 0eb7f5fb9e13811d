//! Index of records by digest: one open-addressing table of fixed size, entries in place.
//!
//! Robin Hood ordering (Celis, 1986) keeps searches for absent digests short; deletion shifts back and leaves no marks.
//! At most six sevenths of the table's buckets are in use, so an object on the device costs [`BYTES_PER_OBJECT`] of
//! memory. An entry has the payload's checksum: a payload is verified against memory, whatever checksum is stored
//! beside it on the device. This table alone determines which records are live: reclaim looks up each entry of a
//! footer.

use kvplane_proto::narrowing::{low_u8, low_u16, low_u32, low_u64, to_usize};
use std::collections::VecDeque;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::rng::mix64;

use crate::config::{DEVICE_BYTES_MOST, KEY_BYTES_MOST, PAYLOAD_BYTES_MOST};
use crate::format::{AWAY_MOST, FooterEntry, Kind, Shape, UNIT_BYTES};
use crate::types::RecordView;

/// Largest hit count.
pub const MAX_HITS: u8 = 3;

/// Most entries that are remembered because they moved behind a walk.
const CARRIED_MOST: usize = 1024;

const USED: u8 = 1;
const EXTENT: u8 = 2;
const PINNED: u8 = 4;
const REMOVED: u8 = 8;
const HITS_SHIFT: u32 = 4;
const HITS: u8 = 3 << HITS_SHIFT;

/// Flag of a stripe head. Payload lengths never need this bit.
const NAMES_PARTS: u32 = 1 << 31;
/// Flag of an object that is replicated on a replica owner. Payload lengths never need this bit either.
const COPIED: u32 = 1 << 30;

/// Entry of a record, in 54 bytes: packed, so that none are lost to alignment. `place` has, from the
/// lowest bit on: 40 bits of the head's offset in units, 13 of the key's length, 5 of the blocks between head and
/// payload, 6 flags. The highest bits of `payload` are [`NAMES_PARTS`] and [`COPIED`], the others are the payload's
/// length.
#[derive(Clone, Copy)]
#[repr(C, packed(2))]
pub(crate) struct Entry {
    digest: [u32; 4],
    version: [u32; 2],
    sequence: [u32; 2],
    checksum: [u32; 2],
    place: [u32; 2],
    payload: u32,
    /// Account of its tenant: see [`super::accounts`].
    account: u16,
}

const EMPTY: Entry = Entry {
    digest: [0; 4],
    version: [0; 2],
    sequence: [0; 2],
    checksum: [0; 2],
    place: [0; 2],
    payload: 0,
    account: 0,
};

/// Memory for each object of a full index.
pub const BYTES_PER_OBJECT: usize = (size_of::<Entry>() * 7).div_ceil(6);

const _: () = assert!(size_of::<Entry>() == 54 && BYTES_PER_OBJECT <= 64);
const _: () = assert!(PAYLOAD_BYTES_MOST < COPIED && DEVICE_BYTES_MOST == UNIT_BYTES << 40);

const fn split(word: u64) -> [u32; 2] {
    [low_u32(word), (word >> 32) as u32]
}

const fn join(words: [u32; 2]) -> u64 {
    words[0] as u64 | (words[1] as u64) << 32
}

impl Entry {
    pub(crate) const fn new(kind: Kind, digest: Digest, version: Version, sequence: u64) -> Self {
        let flags = if matches!(kind, Kind::Tombstone) { USED | REMOVED } else { USED };
        let ([a, b], [c, d]) = (split(low_u64(digest.0)), split((digest.0 >> 64) as u64));
        let mut entry = Self { digest: [a, b, c, d], version: split(version.0), sequence: split(sequence), ..EMPTY };
        entry.set_flags(flags);
        entry
    }

    /// Creates the entry of an object that the footer of a segment beginning at `segment_at` lists.
    pub(crate) const fn listed(listed: &FooterEntry, segment_at: u64) -> Self {
        let mut entry = Self::new(Kind::Object, listed.digest, listed.version, listed.sequence);
        let units = segment_at / UNIT_BYTES + listed.unit as u64;
        let shape = listed.shape;
        entry.place = split(units | (shape.key_bytes as u64) << 40 | (listed.away as u64) << 53);
        let names_parts = if shape.names_parts { NAMES_PARTS } else { 0 };
        entry.payload = shape.payload_bytes | names_parts | if shape.copied { COPIED } else { 0 };
        entry.checksum = split(listed.payload_checksum);
        let extent = if shape.extent { EXTENT } else { 0 };
        entry.set_flags(USED | extent | if listed.pinned { PINNED } else { 0 });
        entry
    }

    pub(crate) const fn digest(&self) -> Digest {
        let [a, b, c, d] = self.digest;
        Digest(join([a, b]) as u128 | (join([c, d]) as u128) << 64)
    }

    pub(crate) const fn version(&self) -> Version {
        Version(join(self.version))
    }

    pub(crate) const fn sequence(&self) -> u64 {
        join(self.sequence)
    }

    /// Returns the CRC-64/NVME of the payload.
    pub(crate) const fn checksum(&self) -> u64 {
        join(self.checksum)
    }

    /// Returns the offset of the record, in bytes from the start of the device.
    pub(crate) const fn offset(&self) -> u64 {
        (join(self.place) & ((1 << 40) - 1)) * UNIT_BYTES
    }

    pub(crate) const fn shape(&self) -> Shape {
        let key_bytes = low_u16(join(self.place) >> 40) & KEY_BYTES_MOST;
        Shape {
            payload_bytes: self.payload & PAYLOAD_BYTES_MOST,
            key_bytes,
            extent: self.flags() & EXTENT != 0,
            names_parts: self.payload & NAMES_PARTS != 0,
            copied: self.payload & COPIED != 0,
        }
    }

    /// Returns the account of the record's tenant.
    pub(crate) const fn account(&self) -> u16 {
        self.account
    }

    /// Charges the record to this account.
    pub(crate) const fn set_account(&mut self, account: u16) {
        self.account = account;
    }

    /// Returns the blocks between the record's head and its payload.
    pub(crate) const fn away(&self) -> u8 {
        low_u8(join(self.place) >> 53) & AWAY_MOST
    }

    /// Returns the host's view of the record, of the tenant with this number.
    pub(crate) const fn view(&self, tenant: Option<u32>) -> RecordView {
        let shape = self.shape();
        RecordView {
            digest: self.digest(),
            version: self.version(),
            payload_bytes: shape.payload_bytes,
            key_bytes: shape.key_bytes,
            extent: shape.extent,
            pinned: self.is_pinned(),
            names_parts: shape.names_parts,
            copied: shape.copied,
            tenant,
            checksum: self.checksum(),
        }
    }

    pub(crate) const fn is_removed(&self) -> bool {
        self.flags() & REMOVED != 0
    }

    pub(crate) const fn is_pinned(&self) -> bool {
        self.flags() & PINNED != 0
    }

    pub(crate) const fn set_pinned(&mut self, pinned: bool) {
        let flags = self.flags();
        self.set_flags(if pinned { flags | PINNED } else { flags & !PINNED });
    }

    pub(crate) const fn hits(&self) -> u8 {
        (self.flags() & HITS) >> HITS_SHIFT
    }

    pub(crate) const fn hit(&mut self) {
        if self.hits() < MAX_HITS {
            self.set_flags(self.flags() + (1 << HITS_SHIFT));
        }
    }

    const fn is_used(&self) -> bool {
        self.flags() & USED != 0
    }

    const fn flags(&self) -> u8 {
        (self.place[1] >> 26) as u8
    }

    const fn set_flags(&mut self, flags: u8) {
        self.place[1] = self.place[1] & ((1 << 26) - 1) | (flags as u32) << 26;
    }
}

impl core::fmt::Debug for Entry {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Entry")
            .field("digest", &self.digest())
            .field("version", &self.version())
            .field("sequence", &self.sequence())
            .field("offset", &self.offset())
            .field("away", &self.away())
            .field("shape", &self.shape())
            .field("flags", &self.flags())
            .finish()
    }
}

/// Hash table of entries.
#[derive(Debug)]
pub(crate) struct Index {
    places: Vec<Entry>,
    limit: u32,
    len: u32,
    seed: u64,
    walker: Walker,
}

/// Incremental walk through the table. Insertions and deletions move entries; those that move from ahead of the walk to
/// behind it are noted.
#[derive(Debug, Default)]
struct Walker {
    at: usize,
    carried: VecDeque<Digest>,
    lost: u64,
}

impl Walker {
    fn moved(&mut self, digest: Digest, from: usize, to: usize) {
        if from < self.at || to >= self.at {
            return;
        }
        if self.carried.len() < CARRIED_MOST {
            self.carried.push_back(digest);
        } else {
            self.lost += 1;
        }
    }
}

impl Index {
    pub(crate) fn new(limit: u32, seed: u64) -> Self {
        let places = limit as usize + (limit as usize).div_ceil(6) + 1;
        Self { places: vec![EMPTY; places], limit, len: 0, seed, walker: Walker::default() }
    }

    /// Returns the number of buckets of the table.
    pub(crate) const fn places(&self) -> usize {
        self.places.len()
    }

    /// Returns the entry in a bucket.
    pub(crate) fn at(&self, place: usize) -> Option<&Entry> {
        self.places.get(place).filter(|entry| entry.is_used())
    }

    /// Sets the position of an incremental walk, which has visited all buckets before it; 0 starts a walk.
    pub(crate) fn watch(&mut self, place: usize) {
        if place == 0 {
            self.walker = Walker::default();
        }
        self.walker.at = place;
    }

    /// Returns an entry that the walk would have missed, as it moved behind the walk's position.
    pub(crate) fn carried_over(&mut self) -> Option<Digest> {
        self.walker.carried.pop_front()
    }

    /// Ends the walk; returns the number of entries that it may have missed because too many moved at once.
    pub(crate) fn unwatch(&mut self) -> u64 {
        core::mem::take(&mut self.walker).lost
    }

    pub(crate) const fn len(&self) -> u32 {
        self.len
    }

    pub(crate) const fn is_full(&self) -> bool {
        self.len == self.limit
    }

    pub(crate) fn find(&self, digest: Digest) -> Option<&Entry> {
        self.position(digest).map(|at| &self.places[at])
    }

    pub(crate) fn find_mut(&mut self, digest: Digest) -> Option<&mut Entry> {
        self.position(digest).map(|at| &mut self.places[at])
    }

    /// Replaces the entry of the same digest, or adds the entry; returns false if the table is full.
    pub(super) fn set(&mut self, entry: Entry) -> bool {
        if let Some(at) = self.position(entry.digest()) {
            self.places[at] = entry;
            return true;
        }
        if self.is_full() {
            return false;
        }
        self.len += 1;
        let (mut carried, mut at, mut distance) = (entry, self.home(entry.digest()), 0);
        loop {
            let settled = self.places[at];
            if !settled.is_used() {
                self.places[at] = carried;
                return true;
            }
            let its = self.distance(settled.digest(), at);
            if its < distance {
                self.places[at] = carried;
                (carried, distance) = (settled, its);
            }
            at = self.next(at);
            if at == 0 {
                self.walker.moved(carried.digest(), self.places.len() - 1, 0);
            }
            distance += 1;
        }
    }

    pub(super) fn remove(&mut self, digest: Digest) -> Option<Entry> {
        let at = self.position(digest)?;
        let entry = self.places[at];
        self.take(at);
        Some(entry)
    }

    /// Removes the entries for which `keep` returns false; returns their number. Walks the whole table.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&Entry) -> bool) -> u32 {
        let (before, mut at) = (self.len, 0);
        while at < self.places.len() {
            if self.places[at].is_used() && !keep(&self.places[at]) {
                // The following entry has shifted into this bucket.
                self.take(at);
            } else {
                at += 1;
            }
        }
        before - self.len
    }

    /// Returns the entries in the table's order, from bucket `from` on, each with the bucket after it.
    pub(crate) fn walk(&self, from: usize) -> impl Iterator<Item = (usize, &Entry)> {
        let places = self.places.iter().enumerate().skip(from);
        places.filter(|(_, entry)| entry.is_used()).map(|(at, entry)| (at + 1, entry))
    }

    /// Returns the upper half of a digest's hash, which determines its home bucket up to the size of the table.
    pub(crate) const fn point(&self, digest: Digest) -> u32 {
        (self.mixed(digest) >> 32) as u32
    }

    /// Returns the entries whose point is in `from..to`; `to` may be one beyond the last point. They lie between the
    /// home buckets of the two or, displaced, behind: up to the first entry at its home, or empty bucket.
    pub(crate) fn between(&self, from: u64, to: u64) -> impl Iterator<Item = &Entry> {
        let places = self.places.len();
        let home = |point: u64| to_usize(low_u64(((u128::from(point) << 32) * places as u128) >> 64));
        let (first, last) = (home(from), home(to));
        let ends = move |at: usize| {
            let entry = &self.places[at % places];
            at > last && (!entry.is_used() || self.distance(entry.digest(), at % places) == 0)
        };
        let walked = (first..first + places).take_while(move |at| !ends(*at));
        let entries = walked.map(move |at| &self.places[at % places]).filter(|entry| entry.is_used());
        entries.filter(move |entry| (from..to).contains(&self.point(entry.digest()).into()))
    }

    /// Asserts that every entry is found and counted.
    pub(super) fn check(&self) {
        let mut seen = 0;
        for (_, entry) in self.walk(0) {
            assert_eq!(self.find(entry.digest()).map(Entry::sequence), Some(entry.sequence()), "{entry:?} is found");
            seen += 1;
        }
        assert_eq!(seen, self.len, "entries are counted");
    }

    fn take(&mut self, mut hole: usize) {
        loop {
            let next = self.next(hole);
            let follower = self.places[next];
            if !follower.is_used() || self.distance(follower.digest(), next) == 0 {
                break;
            }
            self.places[hole] = follower;
            self.walker.moved(follower.digest(), next, hole);
            hole = next;
        }
        self.places[hole] = EMPTY;
        self.len -= 1;
    }

    fn position(&self, digest: Digest) -> Option<usize> {
        let (mut at, mut distance) = (self.home(digest), 0);
        loop {
            let entry = &self.places[at];
            if !entry.is_used() {
                return None;
            }
            if entry.digest() == digest {
                return Some(at);
            }
            // This entry is nearer to its home than `digest` would be to its own: an insertion of `digest` would have
            // displaced it.
            if self.distance(entry.digest(), at) < distance {
                return None;
            }
            at = self.next(at);
            distance += 1;
        }
    }

    /// Returns the home bucket, in which a search begins: a seeded mix of both words, scaled to the table.
    const fn home(&self, digest: Digest) -> usize {
        to_usize(low_u64((self.mixed(digest) as u128 * self.places.len() as u128) >> 64))
    }

    const fn mixed(&self, digest: Digest) -> u64 {
        mix64(mix64(digest.low() ^ self.seed) ^ (digest.0 >> 64) as u64)
    }

    const fn next(&self, at: usize) -> usize {
        if at + 1 == self.places.len() { 0 } else { at + 1 }
    }

    const fn distance(&self, digest: Digest, at: usize) -> usize {
        let home = self.home(digest);
        if at >= home { at - home } else { at + self.places.len() - home }
    }
}

#[cfg(test)]
mod tests;

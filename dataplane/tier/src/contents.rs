//! Contents of the device: the live record of each digest, the segment of each record, and records that the device may
//! have although the index does not know them.
//!
//! Invariants: a segment's live bytes and records are those of the index's entries in it; a record is live while its
//! segment's generation is live and no record of its digest has a greater sequence. Not here: reading and writing.

mod accounts;
mod generations;
mod index;
mod replacements;
mod segments;
mod sequences;
mod untracked;

pub use index::{BYTES_PER_OBJECT, MAX_HITS};

pub(crate) use accounts::Accounts;
use accounts::{Oldest, QueuedRecord, UNKNOWN};
pub(crate) use generations::{Generations, Heritage};
pub(crate) use index::{Entry, Index};
pub(crate) use replacements::{ReplacedRecord, Replacements};
pub(crate) use segments::{SegmentEvent, SegmentState, Segments};
pub(crate) use sequences::{INCARNATIONS_MOST, Sequences, incarnation_of};
pub(crate) use untracked::UntrackedObjects;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::narrowing::to_u32;

use crate::config::TierConfig;
use crate::device::Device;
use crate::format::{FooterEntry, Kind, UNIT_BYTES};
use crate::types::{DamageCounters, Miss, RecordView};

/// Phase of the tier: how much of the contents is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    /// The device is being opened: nothing is known.
    Opening,
    /// Calls are accepted; recovery is searching for records.
    Recovering,
    /// Recovery is complete: all records are known.
    Running,
    /// The device was refused.
    Refused,
}

/// Entries that one step of the walk looks at that builds the queues of accounts.
const WALK_STEP: usize = 4096;
/// Records of a queue that are skipped at a time because they are gone or pinned.
const SKIPPED_AT_ONCE: usize = 4096;

/// Next record to be evicted for the limit of its tenant.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NextEvicted {
    /// This one.
    Entry(Entry),
    /// The queue of the account is not known far enough yet.
    Unknown,
    /// There is none.
    None,
}

/// Contents of a device: index, segments, accounts, and counters.
#[derive(Debug)]
pub(crate) struct Contents {
    pub(crate) index: Index,
    pub(crate) segments: Segments,
    pub(crate) sequences: Sequences,
    pub(crate) generations: Generations,
    /// Records that the device may have and the index does not know.
    pub(crate) untracked: UntrackedObjects,
    pub(crate) replacements: Replacements,
    pub(crate) accounts: Accounts,
    phase: Phase,
    /// Least sequence of an object that is trusted: a removal of an older one may be missing.
    floor: u64,
    /// Objects given up because of the floor, or because the index was full.
    given_up: u64,
    /// Bytes of live records on the device.
    live_bytes: u64,
    /// Removals that the index holds until recovery is complete.
    tombstones_held: u64,
    /// Objects evicted by reclaim.
    evicted: u64,
    /// Counters of records that were not whole, since the start.
    damage: DamageCounters,
}

impl Contents {
    pub(crate) fn new(config: &TierConfig) -> Self {
        Self {
            index: Index::new(config.max_records, config.hash_seed),
            segments: Segments::new(config.segments),
            sequences: Sequences::default(),
            generations: Generations::default(),
            untracked: UntrackedObjects::default(),
            replacements: Replacements::default(),
            accounts: Accounts::new(),
            phase: Phase::Opening,
            floor: 0,
            given_up: 0,
            live_bytes: 0,
            tombstones_held: 0,
            evicted: 0,
            damage: DamageCounters::default(),
        }
    }

    pub(crate) const fn phase(&self) -> Phase {
        self.phase
    }

    pub(crate) const fn enter(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Returns true if calls are accepted.
    pub(crate) const fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Recovering | Phase::Running)
    }

    pub(crate) const fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running)
    }

    pub(crate) const fn given_up(&self) -> u64 {
        self.given_up
    }

    pub(crate) const fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    pub(crate) const fn tombstones_held(&self) -> u64 {
        self.tombstones_held
    }

    pub(crate) const fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns the counters of records that were not whole, since the start.
    pub(crate) const fn damage(&self) -> DamageCounters {
        self.damage
    }

    /// Counts a record, or a page of a footer, that is not whole.
    pub(crate) const fn count_harm(&mut self, miss: Miss) {
        self.damage.count(miss);
    }

    /// Returns the number of objects in the index.
    pub(crate) const fn objects(&self) -> u32 {
        self.index.len() - to_u32(self.tombstones_held)
    }

    /// Returns the generation of the segment that has an entry's record.
    pub(crate) fn generation_of(&self, entry: &Entry, device: &Device) -> u64 {
        self.segments[device.segment_of(entry.offset())].generation
    }

    /// Returns true if an entry is of an object that recovery has made visible.
    pub(crate) fn is_shown(&self, entry: &Entry, device: &Device) -> bool {
        !entry.is_removed() && self.segments[device.segment_of(entry.offset())].visible
    }

    pub(crate) fn shown(&self, digest: Digest, device: &Device) -> Option<&Entry> {
        self.index.find(digest).filter(|entry| self.is_shown(entry, device))
    }

    /// Returns true if the record of this sequence is the live one of its digest.
    pub(crate) fn is_current(&self, digest: Digest, sequence: u64) -> bool {
        self.index.find(digest).is_some_and(|entry| entry.sequence() == sequence)
    }

    /// Returns the host's view of an entry.
    pub(crate) fn view(&self, entry: &Entry) -> RecordView {
        entry.view(self.accounts.number(entry.account()))
    }

    /// Returns the entry of an object that the footer of a segment lists.
    pub(crate) fn listed(&mut self, listed: &FooterEntry, segment: u32, device: &Device) -> Entry {
        let mut entry = Entry::listed(listed, device.segment_at(segment));
        if let Some(number) = listed.tenant {
            entry.set_account(self.accounts.of(number));
        }
        entry
    }

    /// Returns the record of an account that is to be evicted next: the oldest that is not pinned.
    pub(crate) fn next_evicted(&mut self, account: u16, device: &Device) -> NextEvicted {
        for _ in 0..SKIPPED_AT_ONCE {
            let (segment, generation, record) = match self.accounts.oldest(account) {
                Oldest::Record { segment, generation, record } => (segment, generation, record),
                Oldest::Building => return NextEvicted::Unknown,
                Oldest::None => return NextEvicted::None,
            };
            let offset = device.segment_at(segment) + u64::from(record.unit) * UNIT_BYTES;
            let point = u64::from(record.point);
            let mut there = self.index.between(point, point + 1).filter(|entry| entry.offset() == offset);
            let entry = there.next().copied().filter(|_| self.segments[segment].generation == generation);
            match entry.filter(|entry| !entry.is_removed() && entry.account() == account && !entry.is_pinned()) {
                Some(entry) => return NextEvicted::Entry(entry),
                None => self.accounts.take_oldest(account),
            }
        }
        NextEvicted::Unknown
    }

    /// Takes a step of the walk that builds the queues of accounts, if one is to be built.
    pub(crate) fn walk_accounts(&mut self, device: &Device) {
        let Some(from) = self.accounts.walk().filter(|_| self.is_running()) else { return };
        let (mut end, mut seen) = (None, 0);
        for (next, entry) in self.index.walk(from).take(WALK_STEP) {
            (end, seen) = (Some(next), seen + 1);
            if !entry.is_removed() && !entry.is_pinned() {
                let queued = queued(entry, &self.index, &self.segments, device);
                self.accounts.found(entry.account(), queued);
            }
        }
        let end = if seen == WALK_STEP { end } else { None };
        self.accounts.walked(end);
    }

    /// Pins an object, or unpins it; returns false if there is no such object.
    pub(crate) fn set_pinned(&mut self, digest: Digest, pinned: bool) -> bool {
        let Some(entry) = self.index.find_mut(digest).filter(|entry| !entry.is_removed()) else { return false };
        entry.set_pinned(pinned);
        if !pinned {
            let account = entry.account();
            self.accounts.note_unpinned(account);
        }
        true
    }

    /// Puts an entry into the index, replacing one of the same digest; returns false if the index is full.
    pub(crate) fn place(&mut self, entry: Entry, device: &Device) -> bool {
        let before = self.index.find(entry.digest()).copied();
        if !self.index.set(entry) {
            return false;
        }
        if let Some(before) = before {
            self.account(&before, false, device);
        }
        self.account(&entry, true, device);
        true
    }

    /// Removes an entry from the index.
    pub(crate) fn forget(&mut self, digest: Digest, device: &Device) -> Option<Entry> {
        let entry = self.index.remove(digest)?;
        self.account(&entry, false, device);
        Some(entry)
    }

    /// Removes an entry if its record still has this sequence. During recovery, a removal mark remains in the index, so
    /// that no older record takes its place: segments not yet read may have what this record replaced.
    pub(crate) fn forget_record(&mut self, digest: Digest, sequence: u64, device: &Device) -> bool {
        let Some(entry) = self.index.find(digest).filter(|entry| entry.sequence() == sequence).copied() else {
            return false;
        };
        match self.phase {
            Phase::Recovering => self.remember_removal(digest, entry.version(), sequence, device),
            _ => _ = self.forget(digest, device),
        }
        true
    }

    /// Marks a digest as removed in the index, which holds removals until recovery is complete. If the index is full,
    /// all older objects are given up instead.
    pub(crate) fn remember_removal(&mut self, digest: Digest, version: Version, sequence: u64, device: &Device) {
        if !self.place(Entry::new(Kind::Tombstone, digest, version, sequence), device) {
            self.raise_floor(self.sequences.floor().min(sequence), device);
        }
    }

    /// Returns true if an object of this sequence is trusted; see [`Self::raise_floor`].
    pub(crate) const fn is_believed(&self, sequence: u64) -> bool {
        sequence >= self.floor
    }

    /// Gives up an object that recovery has found: it does not go into the index.
    pub(crate) fn give_up(&mut self, digest: Digest) {
        self.untracked.note(digest);
        self.given_up += 1;
    }

    /// Distrusts all objects older than `floor`, those already in the index included.
    pub(crate) fn raise_floor(&mut self, floor: u64, device: &Device) {
        self.untracked.note_fault();
        if floor <= self.floor {
            return;
        }
        self.floor = floor;
        let mut given_up = Vec::new();
        for (_, entry) in self.index.walk(0) {
            if !entry.is_removed() && entry.sequence() < floor {
                given_up.push(entry.digest());
            }
        }
        for digest in given_up {
            self.give_up(digest);
            self.forget(digest, device);
        }
    }

    /// Returns a sequence above that of every record of the segment of this generation. A segment gets its generation
    /// when the segment before it is opened, so only the next generation but one is surely above.
    pub(crate) fn ceiling(&self, generation: u64) -> u64 {
        let incarnation = self.sequences.floor() + 1;
        let above = |least: u64| {
            let newer = self.segments.iter().map(|(_, segment)| segment.generation).filter(|other| *other > least);
            newer.min().unwrap_or(incarnation).min(incarnation)
        };
        above(above(generation))
    }

    /// Drops the removals from the index, as recovery is complete.
    pub(crate) fn drop_removals(&mut self) {
        self.index.retain(|entry| !entry.is_removed());
        self.tombstones_held = 0;
    }

    /// Removes an object that could not be read whole for the rest of this incarnation. A restart may find it again, so
    /// from now on a tombstone is written for removals of digests that the index does not know.
    pub(crate) fn quarantine(&mut self, entry: &Entry, miss: Miss, device: &Device) {
        self.forget_record(entry.digest(), entry.sequence(), device);
        self.untracked.note(entry.digest());
        self.damage.count(miss);
    }

    /// Handles a record that could not be written. The device may have it all the same; after a failed tombstone, the
    /// device may still have the object that it was to remove.
    pub(crate) fn lose(&mut self, kind: Kind, digest: Digest, sequence: u64, device: &Device) {
        self.untracked.note(digest);
        if kind == Kind::Object {
            self.damage.unwritten += u64::from(self.forget_record(digest, sequence, device));
            self.give_back(digest, device);
        }
    }

    /// Restores to the index the record that failed replacements had removed from it.
    pub(crate) fn give_back(&mut self, digest: Digest, device: &Device) {
        if self.index.find(digest).is_some() {
            return;
        }
        let Some(ReplacedRecord { mut entry, generation, tenant }) = self.replacements.give_back(digest) else {
            return;
        };
        let segment = &self.segments[device.segment_of(entry.offset())];
        // Reclaim may have skipped the record meanwhile, as no entry pointed to it.
        let is_there = segment.generation == generation
            && segment.state.has_records()
            && segment.state != SegmentState::Reclaiming;
        if is_there {
            // The account may have become another tenant's.
            entry.set_account(tenant.map_or(UNKNOWN, |number| self.accounts.of(number)));
            self.place(entry, device);
        }
    }

    /// Evicts a record for reclaim; returns false if it is not the live one.
    pub(crate) fn evict(&mut self, entry: &Entry, device: &Device) -> bool {
        let is_evicted = self.forget_record(entry.digest(), entry.sequence(), device);
        if is_evicted {
            self.evicted += 1;
            let generation = self.generation_of(entry, device);
            self.untracked.reclaimed(generation, entry.digest());
        }
        is_evicted
    }

    /// Removes all entries of a segment whose list of records is lost; returns the number of objects.
    pub(crate) fn forget_segment(&mut self, segment: u32, device: &Device) -> u32 {
        let (start, end) = (device.segment_at(segment), device.segment_at(segment + 1));
        let (generation, untracked) = (self.segments[segment].generation, &mut self.untracked);
        let accounts = &mut self.accounts;
        let dropped = self.index.retain(|entry| {
            let stays = entry.is_removed() || entry.offset() < start || entry.offset() >= end;
            if !stays {
                untracked.reclaimed(generation, entry.digest());
                accounts.discharge(entry.account(), device.record_bytes(entry.shape()));
            }
            stays
        });
        self.live_bytes -= self.segments.clear_live(segment);
        self.evicted += u64::from(dropped);
        dropped
    }

    /// Returns true if a restart could find records of digests that the index does not know, including records whose
    /// removal is not durable yet.
    pub(crate) fn is_doubtful(&self, is_reclaiming: bool, durable_sequence: u64) -> bool {
        self.untracked.is_any()
            || self.untracked.has_unclear()
            || !self.is_running()
            || is_reclaiming
            || self.generations.is_ahead(durable_sequence)
    }

    /// Returns true if an object that the index does not know may still be found or restored.
    pub(crate) fn may_find(&self, digest: Digest, device: &Device) -> bool {
        let may_come = !self.is_running() || self.untracked.is_noted(digest) || self.replacements.may_return(digest);
        !device.is_blank() && may_come
    }

    /// Returns true if the next start may find an object of this digest.
    pub(crate) fn may_have(&self, digest: Digest, device: &Device) -> bool {
        let doubtful = self.untracked.may_have(digest) || !self.is_running();
        !device.is_blank() && (doubtful || self.index.find(digest).is_some())
    }

    fn account(&mut self, entry: &Entry, add: bool, device: &Device) {
        if entry.is_removed() {
            self.tombstones_held = self.tombstones_held.wrapping_add(if add { 1 } else { u64::MAX });
            return;
        }
        let (segment, bytes) = (device.segment_of(entry.offset()), device.record_bytes(entry.shape()));
        if add {
            self.live_bytes += bytes;
            self.segments.add_live(segment, bytes);
            let queued = queued(entry, &self.index, &self.segments, device);
            self.accounts.charge(entry.account(), bytes, queued);
        } else {
            self.live_bytes -= bytes;
            self.segments.take_live(segment, bytes);
            self.accounts.discharge(entry.account(), bytes);
        }
    }

    /// Asserts every invariant. Walks the whole index.
    pub(crate) fn check(&self, device: &Device) {
        self.index.check();
        let mut live = vec![(0, 0); device.config().segments as usize];
        let mut held = 0;
        let mut accounts = self.accounts.totals();
        for (_, entry) in self.index.walk(0) {
            if entry.is_removed() {
                held += 1;
                continue;
            }
            let segment = device.segment_of(entry.offset());
            let (bytes, records) = &mut live[segment as usize];
            *bytes += device.record_bytes(entry.shape());
            *records += 1;
            let (of_account, charged) = &mut accounts[usize::from(entry.account())];
            *of_account -= device.record_bytes(entry.shape());
            *charged -= 1;
            let state = self.segments[segment].state;
            let may = state.has_records() || state == SegmentState::Unknown;
            assert!(may, "{entry:?} is in segment {segment}, which is {state:?}");
        }
        assert!(accounts.iter().all(|left| *left == (0, 0)), "bytes and records of accounts: {accounts:?} left");
        assert_eq!(self.tombstones_held, held, "removals in the index");
        for (number, segment) in self.segments.iter() {
            let counted = (segment.live_bytes, segment.live_records);
            assert_eq!(counted, live[number as usize], "live bytes and records of segment {number}");
        }
        assert_eq!(self.live_bytes, live.iter().map(|(bytes, _)| bytes).sum::<u64>(), "live bytes");
        self.segments.check();
    }
}

/// Returns the place of an entry in the queue of its account: generation and number of its segment, and the record.
fn queued(entry: &Entry, index: &Index, segments: &Segments, device: &Device) -> (u64, u32, QueuedRecord) {
    let segment = device.segment_of(entry.offset());
    let unit = to_u32((entry.offset() - device.segment_at(segment)) / UNIT_BYTES);
    (segments[segment].generation, segment, QueuedRecord { unit, point: index.point(entry.digest()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{FooterEntry, Shape};
    use crate::types::Token;

    fn device() -> Device {
        Device::new(TierConfig::for_device(1 << 30, 4096))
    }

    fn open(phase: Phase, device: &Device) -> Contents {
        let mut contents = Contents::new(device.config());
        contents.sequences.claim(1);
        contents.enter(phase);
        contents
    }

    fn entry(number: u64, sequence: u64, segment: u32, device: &Device) -> Entry {
        let shape = Shape { payload_bytes: 5000, key_bytes: 3, extent: true, names_parts: false, copied: false };
        let (kind, digest, version) = (Kind::Object, Digest::of(b"", &number.to_le_bytes()), Version(sequence));
        let (unit, away, payload_checksum, pinned, tenant) = (64, 0, 0, false, Some(0));
        let listed =
            FooterEntry { kind, shape, pinned, digest, version, sequence, unit, away, payload_checksum, tenant };
        Entry::listed(&listed, device.segment_at(segment))
    }

    #[test]
    fn the_live_bytes_of_segments_follow_the_index() {
        let device = device();
        let mut contents = open(Phase::Running, &device);
        let (first, second) = (entry(1, 5, 0, &device), entry(2, 6, 1, &device));
        assert!(contents.place(first, &device) && contents.place(second, &device));
        contents.segments.found_generation(1, 3);
        let both = contents.live_bytes();
        contents.check(&device);
        assert!(contents.place(entry(1, 7, 1, &device), &device), "in place of the first");
        assert_eq!((contents.segments[0].live_records, contents.segments[1].live_records), (0, 2));
        assert!(!contents.forget_record(first.digest(), 5, &device), "it is not the one that counts");
        assert_eq!((contents.live_bytes(), contents.objects()), (both, 2));
        contents.check(&device);
        assert_eq!(contents.forget_segment(1, &device), 2);
        assert_eq!((contents.live_bytes(), contents.objects(), contents.evicted()), (0, 0, 2));
        assert!(contents.may_have(second.digest(), &device), "until a durable header gives the segment up");
        contents.check(&device);
    }

    #[test]
    fn a_record_lost_during_recovery_leaves_a_mark() {
        let device = device();
        let mut contents = open(Phase::Recovering, &device);
        let found = entry(1, 5, 0, &device);
        contents.segments.show(0);
        assert!(contents.place(found, &device) && contents.shown(found.digest(), &device).is_some());
        contents.quarantine(&found, Miss::Damaged, &device);
        assert!(contents.shown(found.digest(), &device).is_none() && contents.is_current(found.digest(), 5));
        assert_eq!((contents.objects(), contents.tombstones_held(), contents.damage().damaged), (0, 1, 1));
        contents.check(&device);
        contents.drop_removals();
        contents.enter(Phase::Running);
        assert_eq!(contents.index.len(), 0);
        assert!(contents.may_have(found.digest(), &device) && contents.is_doubtful(false, 0));
    }

    #[test]
    fn objects_older_than_a_lost_removal_are_given_up() {
        let device = device();
        let mut contents = open(Phase::Recovering, &device);
        let (older, newer) = (entry(1, 5, 0, &device), entry(2, 9, 0, &device));
        assert!(contents.place(older, &device) && contents.place(newer, &device));
        contents.raise_floor(7, &device);
        contents.raise_floor(6, &device);
        assert_eq!((contents.given_up(), contents.objects()), (1, 1));
        assert!(!contents.is_believed(6) && contents.is_believed(7) && contents.is_current(newer.digest(), 9));
        contents.enter(Phase::Running);
        assert!(contents.may_find(older.digest(), &device) && !contents.may_find(newer.digest(), &device));
        contents.check(&device);
    }

    #[test]
    fn a_removed_record_is_restored_if_its_segment_is_unchanged() {
        for generation in [3, 4] {
            let device = device();
            let mut contents = open(Phase::Running, &device);
            let replaced = entry(1, 5, 0, &device);
            contents.segments.step(0, SegmentEvent::FoundSealed);
            contents.segments.found_generation(0, 3);
            contents.replacements.begin(
                Token(1),
                replaced.digest(),
                Some(ReplacedRecord { entry: replaced, generation, tenant: None }),
            );
            assert_eq!(contents.replacements.end(Token(1), false), Some(replaced.digest()));
            contents.give_back(replaced.digest(), &device);
            assert_eq!(contents.is_current(replaced.digest(), 5), generation == 3);
            contents.check(&device);
        }
    }
}

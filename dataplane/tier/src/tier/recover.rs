//! Recovery: segments are looked at from the newest to the oldest, several at a time, while calls are served.
//!
//! A segment is shown when it and everything newer is known, so that nothing that was removed or replaced is seen on
//! the way. A record counts when no record of its digest with a greater sequence is known; calls of this incarnation
//! have the greatest. Footers are believed where they are of the segment's generation, else the segment is scanned; a
//! scanned segment gets a footer.
//!
//! Where something durable is missing that may have been a removal, every object older than it is given up: a cache may
//! forget, but must not bring back what was removed.

use std::collections::{BTreeMap, VecDeque};

use super::Tier;
use super::commit::Barrier;
use super::scan::Scan;
use super::start::Phase;
use crate::config::TierConfig;
use crate::format::{FilledNote, FooterEntry, FooterPage, Kind, UNIT_BYTES};
use crate::index::Entry;
use crate::memory::{Memory, Span};
use crate::ops::{Action, Fault, Job, Owner, Pieces, Priority};
use crate::segments::SegmentEvent;
use crate::types::{Event, RecoveryReport};

/// How a segment's footer is read: from its last page, in windows.
#[derive(Clone, Copy, Debug)]
pub(super) struct FooterWindow {
    /// The first page of the window, and how many there are.
    pub(super) first: u32,
    pub(super) count: u32,
    /// How many pages the footer has, once page 0 is known.
    pub(super) pages: u32,
}

/// A footer that is being read.
#[derive(Clone, Copy, Debug)]
struct Footer {
    segment: u32,
    window: FooterWindow,
    durable_sequence: u64,
}

/// One buffer of recovery and what is read into it.
#[derive(Debug, Default)]
struct Reader {
    footer: Option<Footer>,
    /// The window is being read; else it is asked for when nothing is scanned any more.
    under_way: bool,
}

/// Footers that are read at a time: while one window is gone through the next one comes. More would only let the newest
/// segments wait for older ones, as it is the going through that takes long.
const FOOTERS: u32 = 2;

/// Recovery.
#[derive(Debug)]
pub(super) struct Recovery {
    /// Segments whose footers are to be read, in order. Those with damaged headers are scanned before, for they may be
    /// the newest.
    queue: VecDeque<u32>,
    damaged: Vec<u32>,
    /// Segments whose turn to be shown has not come, in order.
    unshown: VecDeque<u32>,
    known: Vec<bool>,
    readers: Vec<Reader>,
    /// Segments without a footer, and of which generation they are, if that is known.
    to_scan: Vec<(u32, Option<u64>)>,
    /// The scan under way: it has all buffers, and nothing else is read meanwhile.
    scan: Option<Box<Scan>>,
    floor: u64,
    ending: bool,
    /// What headers say of segments that were filled, by their generations.
    pub(super) filled: BTreeMap<u64, FilledNote>,
    /// By incarnation: up to which sequence everything was durable while they lasted, as segments say that are known.
    durable: BTreeMap<u64, u64>,
    pub(super) report: RecoveryReport,
}

/// The incarnation in which a sequence or a generation was given out.
const fn incarnation_of(sequence: u64) -> u64 {
    sequence >> super::SEQUENCE_BITS
}

impl Recovery {
    pub(super) fn new(config: &TierConfig) -> Self {
        Self {
            queue: VecDeque::new(),
            damaged: Vec::new(),
            unshown: VecDeque::new(),
            known: vec![false; config.segments as usize],
            readers: (0..config.scan_buffers.min(FOOTERS)).map(|_| Reader::default()).collect(),
            to_scan: Vec::new(),
            scan: None,
            floor: 0,
            ending: false,
            filled: BTreeMap::new(),
            durable: BTreeMap::new(),
            report: RecoveryReport::default(),
        }
    }

    pub(super) fn header(&mut self, segment: u32, damaged: bool) {
        if damaged {
            self.damaged.push(segment);
        }
    }

    /// Whether a segment is to be scanned of which everything newer is known: that says how much of it was durable.
    /// One whose header is damaged may be the newest.
    fn may_scan(&self) -> bool {
        let next = self.unshown.front();
        self.to_scan.iter().any(|(segment, generation)| generation.is_none() || Some(segment) == next)
    }

    /// How many tombstones a segment had, each durable by now, if that is known. Only what its own incarnation says
    /// counts: what the power took from that one was never durable, whatever a later incarnation has flushed.
    pub(super) fn durable_tombstones(&self, generation: u64, durable_sequence: u64) -> u32 {
        let filled = self.filled.get(&generation);
        let known = self.durable.get(&incarnation_of(generation)).copied();
        let durable = known.map_or(durable_sequence, |known| known.max(durable_sequence));
        filled.filter(|filled| filled.last_tombstone <= durable).map_or(0, |filled| filled.tombstones)
    }

    pub(super) fn is_damaged(&self, segment: u32) -> bool {
        self.damaged.contains(&segment)
    }

    pub(super) fn begin(&mut self, newest_first: impl Iterator<Item = u32>) {
        self.unshown = newest_first.collect();
        self.queue.clone_from(&self.unshown);
        self.to_scan = self.damaged.iter().map(|segment| (*segment, None)).collect();
    }
}

impl Tier {
    /// Gives idle buffers something to read; ends recovery when all is known. A scan comes before every footer: what
    /// it finds is newer than what the footers have, and nothing older is shown before.
    pub(super) fn recovery_work(&mut self) {
        if self.phase != Phase::Recovering || self.recovery.ending || self.recovery.scan.is_some() {
            return;
        }
        let reading = self.recovery.readers.iter().any(|reader| reader.under_way);
        let wants_scan = self.recovery.may_scan() && self.has_list_for_scan();
        if wants_scan && !reading {
            return self.begin_scan();
        }
        let after_damaged = self.recovery.damaged.iter().any(|segment| !self.recovery.known[*segment as usize]);
        if wants_scan || after_damaged {
            return;
        }
        for reader in 0..self.recovery.readers.len() as u32 {
            self.next_footer(reader);
        }
        let idle = self.recovery.readers.iter().all(|reader| reader.footer.is_none());
        if idle && self.recovery.queue.is_empty() && self.recovery.to_scan.is_empty() {
            self.recovery.ending = true;
            self.recovery_known();
            if self.writable() {
                self.after_flush(Barrier::Recovered);
            } else {
                self.recovery_durable();
            }
        }
    }

    /// Reads the next window of a reader's footer, or the first of the next segment.
    fn next_footer(&mut self, reader: u32) {
        if self.recovery.readers[reader as usize].under_way {
            return;
        }
        while self.recovery.readers[reader as usize].footer.is_none() {
            let Some(segment) = self.recovery.queue.pop_front() else { return };
            if self.segments[segment].generation < self.generations.oldest_live() {
                // What was learnt from the records of a segment without a header.
                self.segments.step(segment, SegmentEvent::FoundFree);
                self.segments.free.push_back(segment);
                self.recovery.known[segment as usize] = true;
                self.show_known();
                continue;
            }
            let count = self.config.scan_bytes / self.config.footer_page_bytes;
            let window = FooterWindow { first: 0, count: count.min(self.config.footer_pages), pages: 0 };
            self.recovery.readers[reader as usize].footer = Some(Footer { segment, window, durable_sequence: 0 });
        }
        let at = &mut self.recovery.readers[reader as usize];
        if let Some(Footer { segment, window, .. }) = at.footer {
            at.under_way = true;
            self.read_window(segment, window, Owner::Reader(reader), self.reader_buffer(reader));
        }
    }

    /// Whether a list for the records of a scanned segment is free; one is left for puts.
    const fn has_list_for_scan(&self) -> bool {
        let needed = if self.log.open.is_some() { 1 } else { 2 };
        self.spare_entries.len() >= needed
    }

    /// Begins to scan the newest segment that has no footer; first those of which it is not known how new they are.
    fn begin_scan(&mut self) {
        let newest = |(_, (_, generation)): &(usize, &(u32, Option<u64>))| generation.unwrap_or(u64::MAX);
        let Some((at, _)) = self.recovery.to_scan.iter().enumerate().max_by_key(newest) else { return };
        let Some(entries) = self.spare_entries.pop() else { return };
        let (segment, generation) = self.recovery.to_scan.remove(at);
        let scan = Box::new(Scan::new(segment, generation, entries, self.block()));
        self.read_for_scan(&scan);
        self.recovery.scan = Some(scan);
    }

    pub(super) fn reader_buffer(&self, reader: u32) -> u64 {
        self.layout.scans + u64::from(reader) * u64::from(self.config.scan_bytes)
    }

    /// Reads a window of a footer: its pages lie in the buffer in the device's order, the last one first.
    pub(super) fn read_window(&mut self, segment: u32, window: FooterWindow, owner: Owner, buffer: u64) {
        let bytes = window.count * self.config.footer_page_bytes;
        let offset = self.page_at(segment, window.first + window.count - 1);
        let pieces = Pieces::of(&[Span::staging(buffer, bytes)]);
        self.jobs.submit(Job { owner, action: Action::Read, offset, pieces, priority: Priority::Background });
    }

    /// Checks page `page` of a window that was read; its bytes are in `scratch` afterwards.
    pub(super) fn load_page(
        &mut self,
        segment: u32,
        window: FooterWindow,
        page: u32,
        buffer: u64,
        memory: &dyn Memory,
    ) -> Option<FooterPage> {
        let bytes = self.config.footer_page_bytes;
        let at = buffer + u64::from(window.first + window.count - 1 - page) * u64::from(bytes);
        self.scratch.resize(bytes as usize, 0);
        memory.read(Span::staging(at, bytes), &mut self.scratch);
        let found = FooterPage::decode(&self.scratch, self.uuid).ok()?;
        let fits = found.segment == segment
            && found.generation == self.segments[segment].generation
            && found.page == page
            && found.pages <= self.config.footer_pages;
        fits.then_some(found)
    }

    pub(super) fn reader_filled(&mut self, reader: u32, result: Result<(), Fault>, memory: &dyn Memory) {
        let at = &mut self.recovery.readers[reader as usize];
        at.under_way = false;
        let Some(Footer { segment, window, durable_sequence }) = at.footer.take() else { return };
        let next = result.ok().and_then(|()| self.footer_window(reader, segment, window, memory));
        match next {
            None => self.recovery.to_scan.push((segment, Some(self.segments[segment].generation))),
            Some((Some(window), durable)) => {
                let durable_sequence = durable.max(durable_sequence);
                self.recovery.readers[reader as usize].footer = Some(Footer { segment, window, durable_sequence });
            }
            Some((None, durable)) => {
                self.recovery.report.sealed_segments += 1;
                self.segments.step(segment, SegmentEvent::FoundSealed);
                self.segment_known(segment, durable.max(durable_sequence));
            }
        }
        self.recovery_work();
    }

    /// A window of the scan is read.
    pub(super) fn scan_filled(&mut self, result: Result<(), Fault>, memory: &dyn Memory) {
        let Some(mut scan) = self.recovery.scan.take() else { return };
        if self.scan_window(&mut scan, result, memory) {
            self.read_for_scan(&scan);
            self.recovery.scan = Some(scan);
        } else {
            self.scan_over(*scan);
        }
    }

    /// Applies the pages of a window. `None` when one is no good; else the window that follows, if any.
    fn footer_window(
        &mut self,
        reader: u32,
        segment: u32,
        window: FooterWindow,
        memory: &dyn Memory,
    ) -> Option<(Option<FooterWindow>, u64)> {
        let (buffer, mut window, mut durable) = (self.reader_buffer(reader), window, 0);
        let mut page = window.first;
        while page < window.first + window.count {
            let found = self.load_page(segment, window, page, buffer, memory)?;
            window.pages = found.pages;
            durable = found.durable_sequence;
            let bytes = core::mem::take(&mut self.scratch);
            for entry in FooterPage::entries(&bytes, found.entries) {
                self.apply(segment, &entry);
            }
            self.scratch = bytes;
            page += 1;
            if page == window.pages {
                return Some((None, durable));
            }
        }
        let most = self.config.scan_bytes / self.config.footer_page_bytes;
        let count = most.min(window.pages - page);
        Some((Some(FooterWindow { first: page, count, pages: window.pages }), durable))
    }

    /// Takes note of a record.
    pub(super) fn apply(&mut self, segment: u32, entry: &FooterEntry) {
        let (chunk, block) = (self.config.chunk_bytes, self.config.block_bytes);
        let payload_at = entry.shape.payload_at(u64::from(entry.unit) * UNIT_BYTES, entry.away, chunk, block);
        let fits = payload_at + entry.shape.payload_room(block) <= self.config.segment_bytes
            && entry.shape.payload_bytes <= self.config.max_object_bytes
            && entry.shape.key_bytes <= self.config.max_key_bytes;
        self.recovery.report.tombstones += u64::from(entry.kind == Kind::Tombstone);
        let known = self.index.find(entry.digest).map(Entry::sequence);
        if known.is_some_and(|sequence| sequence >= entry.sequence) {
            let is_object = entry.kind == Kind::Object && known != Some(entry.sequence);
            self.recovery.report.superseded_records += u64::from(is_object);
            return;
        }
        match entry.kind {
            Kind::Tombstone => self.remember_removal(entry.digest, entry.version, entry.sequence),
            Kind::Object if !fits || entry.sequence < self.recovery.floor => {
                self.untracked.note(entry.digest);
                self.recovery.report.given_up += 1;
            }
            Kind::Object => {
                if !self.place(Entry::listed(entry, self.segment_at(segment))) {
                    self.untracked.note(entry.digest);
                    self.recovery.report.given_up += 1;
                    self.raise_floor(entry.sequence);
                }
            }
        }
    }

    /// Objects older than this are not believed any more, those found already included.
    pub(super) fn raise_floor(&mut self, floor: u64) {
        self.untracked.note_fault();
        if floor <= self.recovery.floor {
            return;
        }
        self.recovery.floor = floor;
        let mut given_up = Vec::new();
        for (_, entry) in self.index.walk(0) {
            if !entry.is_removed() && entry.sequence() < floor {
                given_up.push(entry.digest());
            }
        }
        self.recovery.report.given_up += given_up.len() as u64;
        for digest in given_up {
            self.untracked.note(digest);
            self.forget(digest);
        }
    }

    /// A removal that was durable may be missing: nothing older is believed.
    pub(super) fn removal_lost(&mut self, floor: u64) {
        self.recovery.report.lost_removals += 1;
        self.raise_floor(floor);
    }

    /// All of a segment is known. `durable_sequence`: what its records say was durable.
    pub(super) fn segment_known(&mut self, segment: u32, durable_sequence: u64) {
        let at = self.segments[segment].clone();
        let linked =
            at.previous >= self.generations.oldest_live() && at.previous != 0 && durable_sequence > at.previous;
        if linked && !self.segments.iter().any(|(_, other)| other.generation == at.previous) {
            self.removal_lost(self.ceiling(at.previous));
        }
        let known = self.recovery.durable.entry(incarnation_of(durable_sequence)).or_default();
        *known = durable_sequence.max(*known);
        self.recovery.known[segment as usize] = true;
        self.show_known();
        self.recovery_work();
    }

    /// Shows the segments of which everything newer is known.
    fn show_known(&mut self) {
        while let Some(next) = self.recovery.unshown.front().copied() {
            if !self.recovery.known[next as usize] {
                break;
            }
            self.segments[next].visible = true;
            self.recovery.unshown.pop_front();
        }
    }

    /// A sequence above that of every record of the segment of this generation. A segment gets its generation when the
    /// one before it is opened, so it is the next but one that is surely above.
    pub(super) fn ceiling(&self, generation: u64) -> u64 {
        let incarnation = (self.incarnation << super::SEQUENCE_BITS) + 1;
        let above = |least: u64| {
            let newer = self.segments.iter().map(|(_, segment)| segment.generation).filter(|other| *other > least);
            newer.min().unwrap_or(incarnation).min(incarnation)
        };
        above(above(generation))
    }

    fn recovery_known(&mut self) {
        for segment in core::mem::take(&mut self.recovery.damaged) {
            self.segments[segment].visible = true;
        }
        self.index.retain(|entry| !entry.is_removed());
        self.stats.tombstones_held = 0;
        self.recovery.report.objects = self.index.len();
        let mut filled: Vec<_> = self.segments.iter().filter(|(_, segment)| segment.state.has_records()).collect();
        filled.sort_unstable_by_key(|(_, segment)| segment.generation);
        self.segments.filled = filled.into_iter().map(|(number, _)| number).collect();
    }

    pub(super) fn recovery_durable(&mut self) {
        self.phase = Phase::Running;
        self.events.push_back(Event::Recovered(self.recovery.report));
    }
}

//! Recovery: reads segments from the newest to the oldest, several at a time, while calls are served.
//!
//! A segment becomes visible when it and everything newer is known, so that no removed or replaced object is served in
//! between. A record is live if no record of its digest with a greater sequence is known; calls of this incarnation
//! have the greatest sequences. A footer is used if it is of the segment's generation, else the segment is scanned; a
//! scanned segment gets a footer.
//!
//! If a durable record is missing that may have been a tombstone, every older object is given up: a cache may forget
//! objects, but must not bring back removed ones.

mod headers;
mod scan;

use kvplane_proto::narrowing::length_u32;
use std::collections::{BTreeMap, VecDeque};

use crate::config::TierConfig;
use crate::contents::{Contents, Entry, Phase, SegmentEvent, incarnation_of};
use crate::device::{Device, Owner};
use crate::format::{FooterEntry, FooterPage, Kind, UNIT_BYTES};
use crate::log::{Barrier, FooterWindow, Log, NextPage};
use crate::memory::Memory;
use crate::ops::Fault;
use crate::types::{Event, RecoveryReport};
use headers::Headers;
use scan::{Scan, ScannedSegment};

/// Footer that is being read.
#[derive(Clone, Copy, Debug)]
struct Footer {
    window: FooterWindow,
    durable_sequence: u64,
}

/// Buffer of recovery, and the footer that is read into it.
#[derive(Debug, Default)]
struct Reader {
    footer: Option<Footer>,
    /// True while the window is being read; else it will be once no scan is in progress.
    in_flight: bool,
}

/// Footers that are read at a time: the next window is read while one is processed. More would only make the newest
/// segments wait for older ones, as processing takes the longest.
const FOOTERS: u32 = 2;

/// Recovery of a tier's index.
#[derive(Debug)]
pub(crate) struct Recovery {
    headers: Headers,
    /// Segments whose footers are to be read, in order. Segments with damaged headers are scanned before, for they may
    /// be the newest.
    queue: VecDeque<u32>,
    /// Segments that are not visible yet, in order.
    unshown: VecDeque<u32>,
    known: Vec<bool>,
    readers: Vec<Reader>,
    /// Segments without a footer, with their generations if known.
    to_scan: Vec<(u32, Option<u64>)>,
    /// Scan in progress: it has all buffers, and nothing else is read meanwhile.
    scan: Option<Box<Scan>>,
    is_ending: bool,
    /// Last durable sequence of each incarnation, as the known segments state it.
    durable: BTreeMap<u64, u64>,
    report: RecoveryReport,
    /// Buffer for the current page of a footer.
    page: Vec<u8>,
}

impl Recovery {
    pub(crate) fn new(config: &TierConfig) -> Self {
        Self {
            headers: Headers::default(),
            queue: VecDeque::new(),
            unshown: VecDeque::new(),
            known: vec![false; config.segments as usize],
            readers: (0..config.scan_buffers.min(FOOTERS)).map(|_| Reader::default()).collect(),
            to_scan: Vec::new(),
            scan: None,
            is_ending: false,
            durable: BTreeMap::new(),
            report: RecoveryReport::default(),
            page: vec![0; config.footer_page_bytes as usize],
        }
    }

    /// Begins to read the headers of all segments.
    pub(crate) fn begin(&mut self, device: &mut Device) {
        self.headers.begin(device);
    }

    /// Handles the header of a segment that was read. After the last, calls are accepted and the search for records
    /// begins.
    pub(crate) fn header_read(
        &mut self,
        segment: u32,
        place: u32,
        result: Result<(), Fault>,
        log: &mut Log,
        memory: &dyn Memory,
    ) {
        if !self.headers.read_done(segment, place, result, &mut log.device, &mut log.contents, memory) {
            return;
        }
        self.unshown = self.headers.sort_out(&mut log.contents).into();
        self.report.missing_segments = self.headers.missing_segments(&log.contents);
        self.queue.clone_from(&self.unshown);
        self.to_scan = self.headers.damaged().iter().map(|segment| (*segment, None)).collect();
        log.enter(Phase::Recovering);
    }

    /// Starts reads for idle buffers; ends recovery when all is known. A scan precedes every footer: the records that
    /// it finds are newer than those of the footers, and no older segment becomes visible before.
    pub(crate) fn work(&mut self, log: &mut Log) {
        if log.contents.phase() != Phase::Recovering || self.is_ending || self.scan.is_some() {
            return;
        }
        let reading = self.readers.iter().any(|reader| reader.in_flight);
        let wants_scan = self.may_scan() && log.writer.has_list_for_scan();
        if wants_scan && !reading {
            return self.begin_scan(log);
        }
        let after_damaged = self.headers.damaged().iter().any(|segment| !self.known[*segment as usize]);
        if wants_scan || after_damaged {
            return;
        }
        for reader in 0..length_u32(self.readers.len()) {
            self.next_footer(reader, log);
        }
        let idle = self.readers.iter().all(|reader| reader.footer.is_none());
        if idle && self.queue.is_empty() && self.to_scan.is_empty() {
            self.is_ending = true;
            self.all_known(&mut log.contents);
            if log.device.is_writable() {
                log.after_flush(Barrier::Recovered);
            } else {
                self.durable(log);
            }
        }
    }

    /// Returns true if a segment is to be scanned for which everything newer is known: that determines how much of the
    /// segment was durable. A segment whose header is damaged may be the newest.
    fn may_scan(&self) -> bool {
        let next = self.unshown.front();
        self.to_scan.iter().any(|(segment, generation)| generation.is_none() || Some(segment) == next)
    }

    /// Reads the next window of a reader's footer, or the first of the next segment.
    fn next_footer(&mut self, reader: u32, log: &mut Log) {
        if self.readers[reader as usize].in_flight {
            return;
        }
        while self.readers[reader as usize].footer.is_none() {
            let Some(segment) = self.queue.pop_front() else { return };
            if log.contents.segments[segment].generation < log.contents.generations.oldest_live() {
                // The records of a segment without a header have raised the least live generation meanwhile.
                log.contents.segments.found_free(segment);
                self.known[segment as usize] = true;
                self.show_known(&mut log.contents);
                continue;
            }
            let config = log.device.config();
            let buffer = log.device.layout().scans + u64::from(reader) * u64::from(config.scan_bytes);
            let window = FooterWindow::begin(segment, buffer, config);
            self.readers[reader as usize].footer = Some(Footer { window, durable_sequence: 0 });
        }
        let at = &mut self.readers[reader as usize];
        if let Some(Footer { window, .. }) = at.footer {
            at.in_flight = true;
            window.read(Owner::Reader(reader), &mut log.device);
        }
    }

    /// Handles a window of a footer that was read.
    pub(crate) fn reader_filled(&mut self, reader: u32, result: Result<(), Fault>, log: &mut Log, memory: &dyn Memory) {
        let at = &mut self.readers[reader as usize];
        at.in_flight = false;
        let Some(Footer { window, durable_sequence }) = at.footer.take() else { return };
        let segment = window.segment;
        match result.ok().and_then(|()| self.footer_window(window, log, memory)) {
            None => self.to_scan.push((segment, Some(log.contents.segments[segment].generation))),
            Some((Some(window), durable)) => {
                let durable_sequence = durable.max(durable_sequence);
                self.readers[reader as usize].footer = Some(Footer { window, durable_sequence });
            }
            Some((None, durable)) => {
                self.report.sealed_segments += 1;
                log.contents.segments.step(segment, SegmentEvent::FoundSealed);
                self.segment_known(segment, durable.max(durable_sequence), log);
            }
        }
        self.work(log);
    }

    /// Applies the pages of a window. Returns `None` if a page is invalid; else the next window, if any, and the last
    /// durable sequence.
    fn footer_window(
        &mut self,
        mut window: FooterWindow,
        log: &mut Log,
        memory: &dyn Memory,
    ) -> Option<(Option<FooterWindow>, u64)> {
        let mut page = window.first();
        loop {
            let generation = log.contents.segments[window.segment].generation;
            let found = window.load(page, generation, &mut self.page, &log.device, memory)?;
            let bytes = core::mem::take(&mut self.page);
            for entry in FooterPage::entries(&bytes, found.entries) {
                self.apply(window.segment, &entry, &log.device, &mut log.contents);
            }
            self.page = bytes;
            match window.after(page, log.device.config()) {
                NextPage::Here(next) => page = next,
                NextPage::Window(next) => return Some((Some(next), found.durable_sequence)),
                NextPage::None => return Some((None, found.durable_sequence)),
            }
        }
    }

    /// Applies a record to the index.
    fn apply(&mut self, segment: u32, entry: &FooterEntry, device: &Device, contents: &mut Contents) {
        let config = device.config();
        let (chunk, block) = (config.chunk_bytes, config.block_bytes);
        let payload_at = entry.shape.payload_at(u64::from(entry.unit) * UNIT_BYTES, entry.away, chunk, block);
        let fits = payload_at + entry.shape.payload_room(block) <= config.segment_bytes
            && entry.shape.payload_bytes <= config.max_object_bytes
            && entry.shape.key_bytes <= config.max_key_bytes;
        self.report.tombstones += u64::from(entry.kind == Kind::Tombstone);
        let known = contents.index.find(entry.digest).map(Entry::sequence);
        if known.is_some_and(|sequence| sequence >= entry.sequence) {
            let is_object = entry.kind == Kind::Object && known != Some(entry.sequence);
            self.report.superseded_records += u64::from(is_object);
            return;
        }
        match entry.kind {
            Kind::Tombstone => contents.remember_removal(entry.digest, entry.version, entry.sequence, device),
            Kind::Object if !fits || !contents.is_believed(entry.sequence) => contents.give_up(entry.digest),
            Kind::Object => {
                let found = contents.listed(entry, segment, device);
                if !contents.place(found, device) {
                    contents.give_up(entry.digest);
                    contents.raise_floor(entry.sequence, device);
                }
            }
        }
    }

    /// Begins to scan the newest segment that has no footer; segments of unknown generation come first.
    fn begin_scan(&mut self, log: &mut Log) {
        let newest = |(_, (_, generation)): &(usize, &(u32, Option<u64>))| generation.unwrap_or(u64::MAX);
        let Some((at, _)) = self.to_scan.iter().enumerate().max_by_key(newest) else { return };
        let Some(entries) = log.writer.seals.take_list() else { return };
        let (segment, generation) = self.to_scan.remove(at);
        let scan = Box::new(Scan::new(segment, generation, entries, log.device.block(), log.tenant_of));
        scan.read(&mut log.device);
        self.scan = Some(scan);
    }

    /// Handles a window of the scan that was read.
    pub(crate) fn scan_filled(&mut self, result: Result<(), Fault>, log: &mut Log, memory: &dyn Memory) {
        let Some(mut scan) = self.scan.take() else { return };
        let oldest_live = log.contents.generations.oldest_live();
        if scan.look_through(result, oldest_live, &log.device, &mut self.report, memory) {
            scan.read(&mut log.device);
            self.scan = Some(scan);
        } else {
            self.segment_scanned(scan.end(), log);
        }
    }

    /// Handles a scanned segment: its records are applied, all at once.
    fn segment_scanned(&mut self, found: ScannedSegment, log: &mut Log) {
        let (segment, durable_sequence) = (found.segment, found.durable_sequence);
        let (device, contents) = (&log.device, &mut log.contents);
        let (generation, has_header) = (found.generation(), found.header.is_some());
        self.report.scanned_segments += 1;
        if !found.is_whole {
            // There may have been a tombstone. Without a header, the records found may be older than those not found.
            self.removal_lost(contents.ceiling(found.header.unwrap_or(u64::MAX)), device, contents);
            contents.untracked.note_all();
        }
        // Tombstones missing in between according to the segment's own records, and at its end according to other
        // headers.
        let misses_between = found.tombstones(true) < found.durable_tombstones;
        let misses_last = found.tombstones(false) < self.durable_tombstones(generation, durable_sequence);
        if misses_last {
            self.removal_lost(contents.ceiling(generation), device, contents);
        } else if misses_between {
            self.removal_lost(durable_sequence + 1, device, contents);
        }
        let misses_removals = misses_between || misses_last;
        contents.segments.found_generation(segment, generation);
        contents.generations.raise(found.oldest_live);
        if !has_header {
            // The next start may read another header, and the records that this one takes for stale.
            contents.untracked.note_fault();
        }
        let gets_footer = has_header && !found.entries.is_empty() && found.is_whole && !misses_removals;
        contents.untracked.scanned(segment, gets_footer);
        // A segment that was prepared and never used is free, or every interrupted start would cost a segment.
        if found.entries.is_empty() && (!has_header || found.is_whole) {
            self.scanned_empty(segment, found, log);
            let durable_sequence = if has_header { durable_sequence } else { 0 };
            return self.segment_known(segment, durable_sequence, log);
        }
        for entry in &found.entries {
            self.apply(segment, entry, device, contents);
        }
        contents.segments.step(segment, SegmentEvent::FoundUnsealed);
        if !found.is_whole || misses_removals {
            // A footer would hide from the next start that tombstones are missing, and objects given up now would come
            // back.
            contents.segments.step(segment, SegmentEvent::Fail);
        }
        log.writer.seal(segment, found.entries, durable_sequence, device, contents);
        self.segment_known(segment, durable_sequence, log);
    }

    /// Handles a scanned segment without records: it is free, and the next to be used, or broken.
    fn scanned_empty(&mut self, segment: u32, found: ScannedSegment, log: &mut Log) {
        log.writer.seals.return_list(found.entries);
        let segments = &mut log.contents.segments;
        if found.is_whole {
            segments.found_unused(segment);
        } else {
            self.report.unreadable_segments += 1;
            segments.discard(segment);
        }
    }

    /// Returns the number of tombstones of a segment if all of them were durable, as far as that is known, else 0. Only
    /// statements of the segment's own incarnation count: writes that a power failure took from it were never durable,
    /// whatever a later incarnation has flushed.
    fn durable_tombstones(&self, generation: u64, durable_sequence: u64) -> u32 {
        let filled = self.headers.filled(generation);
        let known = self.durable.get(&incarnation_of(generation)).copied();
        let durable = known.map_or(durable_sequence, |known| known.max(durable_sequence));
        filled.filter(|filled| filled.last_tombstone <= durable).map_or(0, |filled| filled.tombstones)
    }

    /// Handles a durable tombstone that may be missing: objects older than `floor` are given up.
    fn removal_lost(&mut self, floor: u64, device: &Device, contents: &mut Contents) {
        self.report.lost_removals += 1;
        contents.raise_floor(floor, device);
    }

    /// Marks a segment as known. `durable_sequence`: the last durable sequence that its records state.
    fn segment_known(&mut self, segment: u32, durable_sequence: u64, log: &mut Log) {
        let contents = &mut log.contents;
        let previous = contents.segments[segment].previous;
        let linked = previous >= contents.generations.oldest_live() && previous != 0 && durable_sequence > previous;
        if linked && !contents.segments.iter().any(|(_, other)| other.generation == previous) {
            self.removal_lost(contents.ceiling(previous), &log.device, contents);
        }
        let known = self.durable.entry(incarnation_of(durable_sequence)).or_default();
        *known = durable_sequence.max(*known);
        self.known[segment as usize] = true;
        self.show_known(contents);
        self.work(log);
    }

    /// Makes the segments visible for which everything newer is known.
    fn show_known(&mut self, contents: &mut Contents) {
        while let Some(next) = self.unshown.pop_front_if(|next| self.known[*next as usize]) {
            contents.segments.show(next);
        }
    }

    fn all_known(&mut self, contents: &mut Contents) {
        for segment in self.headers.damaged() {
            contents.segments.show(*segment);
        }
        contents.drop_removals();
        self.report.objects = contents.index.len();
        contents.segments.order_filled();
    }

    /// Ends recovery, as its result is durable.
    pub(crate) fn durable(&self, log: &mut Log) {
        log.contents.enter(Phase::Running);
        log.events.push(Event::Recovered(RecoveryReport { given_up: log.contents.given_up(), ..self.report }));
    }
}

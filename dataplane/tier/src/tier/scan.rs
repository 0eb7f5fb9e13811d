//! Scanning a segment without a footer: every unit may begin a record; what is whole and of this use of the segment
//! counts.
//!
//! The segment is read in windows from its start. Heads come before their payloads, several in a row where extents
//! share a block for them: what they announce waits in the order of the payloads until the scan comes there. A record
//! counts when its header and every checksum of its payload match, so a write that was torn leaves nothing behind.
//! Records of an earlier use, or that say another place, are counted and passed over.

use std::collections::VecDeque;

use kvplane_proto::checksum::{PayloadChecksum, frame_checksum};

use super::Tier;
use crate::format::{FooterEntry, Kind, RECORD_HEADER_BYTES, RecordHeader, UNIT_BYTES, word64};
use crate::memory::{Memory, Span};
use crate::ops::{Action, Fault, Job, Owner, Pieces, Priority};
use crate::segments::SegmentEvent;

/// The longest window. A host serves nobody while it goes through one.
const WINDOW_MOST: u64 = 4 << 20;

/// A record whose payload is to be checked.
#[derive(Debug)]
struct PendingRecord {
    header: RecordHeader,
    /// Where the record begins, its payload begins and ends, and where the next unchecked byte is, from the segment's
    /// start.
    start: u64,
    payload: u64,
    end: u64,
    at: u64,
    left_of_chunk: u32,
    left: u32,
    sum: PayloadChecksum,
    /// The listed checksums, the last first.
    sums: Vec<u64>,
    good: bool,
}

/// A scan under way.
#[derive(Debug)]
pub(super) struct Scan {
    segment: u32,
    /// The use of the segment that counts; without a header, the newest that is found.
    generation: Option<u64>,
    newest: u64,
    entries: Vec<FooterEntry>,
    /// Where to look next for a head, from the segment's start.
    at: u64,
    window: u64,
    window_bytes: u32,
    /// Before this place, something could not be read: windows are small.
    narrow_until: u64,
    /// What heads have announced, in the order of the payloads.
    pending: VecDeque<PendingRecord>,
    unreadable: bool,
    durable_sequence: u64,
    durable_tombstones: u32,
    oldest_live: u64,
}

enum Step {
    /// Look on.
    Next,
    /// The next thing does not lie in the window as a whole.
    More,
}

impl Scan {
    pub(super) fn new(segment: u32, generation: Option<u64>, entries: Vec<FooterEntry>, from: u64) -> Self {
        Self {
            segment,
            generation,
            newest: 0,
            entries,
            at: from,
            window: 0,
            window_bytes: 0,
            narrow_until: 0,
            pending: VecDeque::new(),
            unreadable: false,
            durable_sequence: 0,
            durable_tombstones: 0,
            oldest_live: 0,
        }
    }

    /// Where the scan goes on: at the next payload when nothing lies before it.
    fn reach(&self) -> u64 {
        self.due().map_or(self.at, |pending| pending.at)
    }

    /// The payload that is to be checked before the next head is looked for.
    fn due(&self) -> Option<&PendingRecord> {
        self.pending.front().filter(|pending| pending.payload <= self.at)
    }

    fn announce(&mut self, pending: PendingRecord) {
        let later = self.pending.iter().rev().take_while(|other| other.payload > pending.payload).count();
        self.pending.insert(self.pending.len() - later, pending);
    }

    /// What a record says of what was durable, and the record itself.
    fn take(&mut self, header: &RecordHeader, start: u64) {
        if header.durable_sequence >= self.durable_sequence {
            self.durable_sequence = header.durable_sequence;
            self.durable_tombstones = self.durable_tombstones.max(header.durable_tombstones);
        }
        self.oldest_live = self.oldest_live.max(header.oldest_live);
        let twin_of = |entry: &&FooterEntry| entry.sequence >= header.sequence;
        let known = self.entries.iter().rev().take_while(twin_of).any(|entry| entry.sequence == header.sequence);
        if !known && self.entries.len() < self.entries.capacity() {
            self.entries.push(header.listed((start / UNIT_BYTES) as u32));
        }
    }
}

impl Tier {
    /// Reads the window at which the scan goes on.
    pub(super) fn read_for_scan(&mut self, scan: &Scan) {
        let (offset, bytes) = self.scan_range(scan);
        let pieces = Pieces::of(&[Span::staging(self.layout.scans, bytes)]);
        let (owner, action) = (Owner::Scan, Action::Read);
        let offset = self.segment_at(scan.segment) + offset;
        self.jobs.submit(Job { owner, action, offset, pieces, priority: Priority::Background });
    }

    fn scan_range(&self, scan: &Scan) -> (u64, u32) {
        let from = scan.reach() - scan.reach() % self.block();
        // All buffers make one window: it is read in several operations at once.
        let windows = if from < scan.narrow_until { 1 } else { u64::from(self.config.scan_buffers) };
        let bytes = (windows * u64::from(self.config.scan_bytes)).min(WINDOW_MOST);
        let bytes = bytes.max(self.config.scan_bytes.into()).min(self.config.segment_bytes - from);
        (from, bytes as u32)
    }

    /// Looks through a window. Whether there is another.
    pub(super) fn scan_window(&mut self, scan: &mut Scan, result: Result<(), Fault>, memory: &dyn Memory) -> bool {
        (scan.window, scan.window_bytes) = self.scan_range(scan);
        let window_end = scan.window + u64::from(scan.window_bytes);
        let end = self.config.segment_bytes - u64::from(self.config.footer_page_bytes);
        if result.is_err() && scan.window_bytes > self.config.scan_bytes {
            // Once more in small parts, so that no more is given up than cannot be read.
            scan.narrow_until = window_end;
            return true;
        }
        if result.is_err() {
            self.recovery.report.unreadable_windows += 1;
            scan.unreadable = true;
            scan.pending.retain(|pending| pending.payload >= window_end);
            scan.at = scan.at.max(window_end);
            return scan.at < end;
        }
        let buffer = self.layout.scans;
        loop {
            let step = if scan.due().is_some() {
                self.scan_payload(scan, buffer, memory)
            } else if scan.at >= end {
                return false;
            } else {
                self.scan_header(scan, buffer, memory)
            };
            match step {
                Step::Next => {}
                Step::More => return scan.reach() < self.config.segment_bytes,
            }
        }
    }

    fn scan_header(&mut self, scan: &mut Scan, buffer: u64, memory: &dyn Memory) -> Step {
        let window_end = scan.window + u64::from(scan.window_bytes);
        let mut fixed = [0; RECORD_HEADER_BYTES];
        if scan.at < scan.window {
            return Step::More;
        }
        if scan.at + RECORD_HEADER_BYTES as u64 > window_end {
            // What is too near to the segment's end for a header is none.
            if window_end == self.config.segment_bytes {
                scan.at = window_end;
            }
            return Step::More;
        }
        let at = buffer + (scan.at - scan.window);
        memory.read(Span::staging(at, 4), &mut fixed[..4]);
        if fixed[..4] != *b"KVTR" {
            scan.at += UNIT_BYTES;
            return Step::Next;
        }
        memory.read(Span::staging(at, RECORD_HEADER_BYTES as u32), &mut fixed);
        let Some(header) = self.scan_check(scan, &fixed) else {
            scan.at += UNIT_BYTES;
            return Step::Next;
        };
        let head_bytes = header.shape.head_bytes(header.chunk_bytes);
        if scan.at + head_bytes > window_end {
            return Step::More;
        }
        let body_bytes = head_bytes as usize - RECORD_HEADER_BYTES;
        self.scratch.resize(body_bytes, 0);
        memory.read(Span::staging(at + RECORD_HEADER_BYTES as u64, body_bytes as u32), &mut self.scratch);
        let chunks = header.shape.chunks(header.chunk_bytes) as usize;
        let sums = match chunks {
            0 => vec![header.payload_checksum],
            _ => (0..chunks).rev().map(|chunk| word64(&self.scratch, 8 * chunk)).collect(),
        };
        let good = frame_checksum(&self.scratch) == header.body_checksum;
        if !good && scan.generation.is_none() {
            // A record of an earlier use, its head partly overwritten by one that may count.
            self.recovery.report.torn_records += 1;
            scan.at += UNIT_BYTES;
            return Step::Next;
        }
        let (start, shape) = (scan.at, header.shape);
        let payload = shape.payload_at(start, header.away, self.config.chunk_bytes, self.config.block_bytes);
        let end = (payload + shape.payload_room(self.config.block_bytes)).next_multiple_of(UNIT_BYTES);
        // A packed record's payload comes next, an extent's after the heads that share its block.
        scan.at = if shape.extent { (start + head_bytes).next_multiple_of(UNIT_BYTES) } else { payload };
        scan.announce(PendingRecord {
            header,
            start,
            payload,
            end,
            at: payload,
            left_of_chunk: header.chunk_bytes.min(header.shape.payload_bytes),
            left: header.shape.payload_bytes,
            sum: PayloadChecksum::new(),
            sums,
            good,
        });
        Step::Next
    }

    /// Whether what looks like a header is one that counts here.
    fn scan_check(&mut self, scan: &mut Scan, fixed: &[u8; RECORD_HEADER_BYTES]) -> Option<RecordHeader> {
        let Ok(header) = RecordHeader::decode(fixed, self.uuid, self.config.max_object_bytes) else {
            self.recovery.report.damaged_headers += 1;
            return None;
        };
        if header.offset != self.segment_at(scan.segment) + scan.at {
            self.recovery.report.misdirected_records += 1;
            return None;
        }
        let counts = match scan.generation {
            Some(generation) => header.generation == generation,
            None => header.generation >= scan.newest && header.generation >= self.generations.oldest_live(),
        };
        if !counts {
            self.recovery.report.stale_records += 1;
            return None;
        }
        let (chunk, block) = (self.config.chunk_bytes, self.config.block_bytes);
        let payload_at = header.shape.payload_at(scan.at, header.away, chunk, block);
        let fits = payload_at + header.shape.payload_room(block) <= self.config.segment_bytes
            && header.chunk_bytes == self.config.chunk_bytes
            && header.shape.key_bytes <= self.config.max_key_bytes;
        if !fits {
            self.recovery.report.damaged_headers += 1;
            return None;
        }
        if header.generation > scan.newest {
            // A newer use than what was found so far.
            self.recovery.report.stale_records += scan.entries.len() as u64;
            scan.entries.clear();
            scan.newest = header.generation;
            (scan.durable_sequence, scan.durable_tombstones) = (0, 0);
        }
        Some(header)
    }

    /// Checks as much of a payload as the window has.
    fn scan_payload(&mut self, scan: &mut Scan, buffer: u64, memory: &dyn Memory) -> Step {
        let window_end = scan.window + u64::from(scan.window_bytes);
        let Some(pending) = scan.pending.front_mut() else { return Step::Next };
        if pending.at < scan.window {
            return Step::More;
        }
        while pending.left > 0 {
            let here = window_end.saturating_sub(pending.at).min(pending.left_of_chunk.into()) as u32;
            if here == 0 {
                return Step::More;
            }
            memory.checksum(Span::staging(buffer + (pending.at - scan.window), here), &mut pending.sum);
            pending.at += u64::from(here);
            pending.left -= here;
            pending.left_of_chunk -= here;
            if pending.left_of_chunk == 0 {
                pending.good &= pending.sums.pop() == Some(pending.sum.finish());
                pending.sum = PayloadChecksum::new();
                pending.left_of_chunk = pending.header.chunk_bytes.min(pending.left);
            }
        }
        let Some(pending) = scan.pending.pop_front() else { return Step::Next };
        let tombstone = pending.header.kind == Kind::Tombstone;
        if pending.header.generation < scan.newest {
            self.recovery.report.stale_records += 1;
        } else if pending.good && (tombstone || pending.header.shape.payload_bytes > 0) {
            scan.take(&pending.header, pending.start);
        } else {
            self.recovery.report.torn_records += 1;
        }
        // Without a header, this may be a record of an earlier use, partly overwritten by those that count.
        let whole = pending.good || scan.generation.is_some();
        scan.at = scan.at.max(if whole { pending.end } else { pending.payload.next_multiple_of(UNIT_BYTES) });
        Step::Next
    }

    /// A segment is scanned: what was found counts now, all at once.
    pub(super) fn scan_over(&mut self, scan: Scan) {
        let segment = scan.segment;
        let generation = scan.generation.unwrap_or(scan.newest);
        self.recovery.report.scanned_segments += 1;
        if scan.unreadable {
            // A removal may have been there. Without a header, what was found may be older than what was not.
            let floor = self.ceiling(scan.generation.unwrap_or(u64::MAX));
            self.removal_lost(floor);
            self.untracked.note_all();
        }
        let durable = |entry: &&FooterEntry| entry.kind == Kind::Tombstone && entry.sequence <= scan.durable_sequence;
        let tombstones = scan.entries.iter().filter(|entry| entry.kind == Kind::Tombstone).count() as u32;
        // What its own records say is missing in between, what other headers say at its end.
        let misses_between = (scan.entries.iter().filter(durable).count() as u32) < scan.durable_tombstones;
        let misses_last = tombstones < self.recovery.durable_tombstones(generation, scan.durable_sequence);
        if misses_last {
            self.removal_lost(self.ceiling(generation));
        } else if misses_between {
            self.removal_lost(scan.durable_sequence + 1);
        }
        let misses_removals = misses_between || misses_last;
        self.segments[segment].generation = generation;
        self.generations.raise(scan.oldest_live);
        let headed = scan.generation.is_some();
        if !headed {
            // The next start may see another header, and what this one takes for stale.
            self.untracked.note_fault();
        }
        let gets_footer = headed && !scan.entries.is_empty() && !scan.unreadable && !misses_removals;
        self.untracked.scanned(segment, gets_footer);
        // What was made ready and never used is free, or every start that is cut short would cost a segment.
        if scan.entries.is_empty() && (scan.generation.is_none() || !scan.unreadable) {
            let durable_sequence = if scan.generation.is_some() { scan.durable_sequence } else { 0 };
            self.scanned_empty(segment, scan);
            return self.segment_known(segment, durable_sequence);
        }
        for entry in &scan.entries {
            self.apply(segment, entry);
        }
        self.segments.step(segment, SegmentEvent::FoundUnsealed);
        if scan.unreadable || misses_removals {
            // A footer would hide from the next start that removals are missing, and what is given up now came back.
            self.segments.step(segment, SegmentEvent::Fail);
        }
        self.seal(segment, scan.entries, scan.durable_sequence);
        self.segment_known(segment, scan.durable_sequence);
    }

    /// Nothing was found in a segment: it is free, and the next to be used, or broken.
    fn scanned_empty(&mut self, segment: u32, mut scan: Scan) {
        scan.entries.clear();
        self.spare_entries.push(scan.entries);
        if scan.unreadable {
            self.recovery.report.unreadable_segments += 1;
            self.segments.step(segment, SegmentEvent::Fail);
            self.segments.step(segment, SegmentEvent::Discard);
        } else {
            self.segments.step(segment, SegmentEvent::FoundFree);
            self.segments.free.push_front(segment);
        }
    }
}

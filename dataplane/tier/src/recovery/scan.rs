//! Scanning a segment without a footer: every unit may begin a record; what is whole and of this use of the segment
//! counts.
//!
//! The segment is read in windows from its start. Heads come before their payloads, several in a row where extents
//! share a block for them: what they announce waits in the order of the payloads until the scan comes there. A record
//! counts when its header and every checksum of its payload match, so a write that was torn leaves nothing behind.
//! Records of an earlier use, or that say another place, are counted and passed over.

use std::collections::VecDeque;

use kvplane_proto::checksum::{PayloadChecksum, frame_checksum};

use crate::device::{Device, Owner};
use crate::format::{FooterEntry, Kind, RECORD_HEADER_BYTES, RecordHeader, UNIT_BYTES, word64};
use crate::memory::{Memory, Span};
use crate::ops::{Fault, Pieces, Priority};
use crate::types::RecoveryReport;

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

/// A scan that goes on; the records that it finds count when it is over.
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
    /// What records say of what was durable.
    durable_sequence: u64,
    durable_tombstones: u32,
    /// What records say of the generations that count.
    oldest_live: u64,
    /// The body of the head at hand.
    body: Vec<u8>,
}

/// A segment that was scanned.
#[derive(Debug)]
pub(super) struct ScannedSegment {
    pub(super) segment: u32,
    /// The generation of its header, where that is whole.
    pub(super) header: Option<u64>,
    /// The newest generation of which records were found.
    newest: u64,
    pub(super) entries: Vec<FooterEntry>,
    /// Whether all of it could be read.
    pub(super) is_whole: bool,
    /// What its records say of what was durable,
    pub(super) durable_sequence: u64,
    pub(super) durable_tombstones: u32,
    /// and of the generations that count.
    pub(super) oldest_live: u64,
}

impl ScannedSegment {
    /// The use of the segment that counts.
    pub(super) fn generation(&self) -> u64 {
        self.header.unwrap_or(self.newest)
    }

    /// How many tombstones were found; with `durable`, of those that its records say were durable.
    pub(super) fn tombstones(&self, durable: bool) -> u32 {
        let tombstones = self.entries.iter().filter(|entry| entry.kind == Kind::Tombstone);
        tombstones.filter(|entry| !durable || entry.sequence <= self.durable_sequence).count() as u32
    }
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
            body: Vec::new(),
        }
    }

    /// There is no window left.
    pub(super) fn end(self) -> ScannedSegment {
        ScannedSegment {
            segment: self.segment,
            header: self.generation,
            newest: self.newest,
            entries: self.entries,
            is_whole: !self.unreadable,
            durable_sequence: self.durable_sequence,
            durable_tombstones: self.durable_tombstones,
            oldest_live: self.oldest_live,
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

    /// Reads the window at which the scan goes on.
    pub(super) fn read(&self, device: &mut Device) {
        let (offset, bytes) = self.range(device);
        let pieces = Pieces::of(&[Span::staging(device.layout().scans, bytes)]);
        let offset = device.segment_at(self.segment) + offset;
        device.read(Owner::Scan, offset, pieces, Priority::Background);
    }

    fn range(&self, device: &Device) -> (u64, u32) {
        let from = self.reach() - self.reach() % device.block();
        // All buffers make one window: it is read in several operations at once.
        let windows = if from < self.narrow_until { 1 } else { u64::from(device.config().scan_buffers) };
        let bytes = (windows * u64::from(device.config().scan_bytes)).min(WINDOW_MOST);
        let bytes = bytes.max(device.config().scan_bytes.into()).min(device.config().segment_bytes - from);
        (from, bytes as u32)
    }

    /// Looks through a window that was read. Whether there is another. Without a header, generations below
    /// `oldest_live` do not count.
    pub(super) fn look_through(
        &mut self,
        result: Result<(), Fault>,
        oldest_live: u64,
        device: &Device,
        report: &mut RecoveryReport,
        memory: &dyn Memory,
    ) -> bool {
        (self.window, self.window_bytes) = self.range(device);
        let window_end = self.window + u64::from(self.window_bytes);
        let end = device.config().segment_bytes - u64::from(device.config().footer_page_bytes);
        if result.is_err() && self.window_bytes > device.config().scan_bytes {
            // Once more in small parts, so that no more is given up than cannot be read.
            self.narrow_until = window_end;
            return true;
        }
        if result.is_err() {
            report.unreadable_windows += 1;
            self.unreadable = true;
            self.pending.retain(|pending| pending.payload >= window_end);
            self.at = self.at.max(window_end);
            return self.at < end;
        }
        loop {
            let step = if self.due().is_some() {
                self.payload(device, report, memory)
            } else if self.at >= end {
                return false;
            } else {
                self.head(oldest_live, device, report, memory)
            };
            match step {
                Step::Next => {}
                Step::More => return self.reach() < device.config().segment_bytes,
            }
        }
    }

    fn head(&mut self, oldest_live: u64, device: &Device, report: &mut RecoveryReport, memory: &dyn Memory) -> Step {
        let window_end = self.window + u64::from(self.window_bytes);
        let mut fixed = [0; RECORD_HEADER_BYTES];
        if self.at < self.window {
            return Step::More;
        }
        if self.at + RECORD_HEADER_BYTES as u64 > window_end {
            // What is too near to the segment's end for a header is none.
            if window_end == device.config().segment_bytes {
                self.at = window_end;
            }
            return Step::More;
        }
        let at = device.layout().scans + (self.at - self.window);
        memory.read(Span::staging(at, 4), &mut fixed[..4]);
        if fixed[..4] != *b"KVTR" {
            self.at += UNIT_BYTES;
            return Step::Next;
        }
        memory.read(Span::staging(at, RECORD_HEADER_BYTES as u32), &mut fixed);
        let Some(header) = self.check(&fixed, oldest_live, device, report) else {
            self.at += UNIT_BYTES;
            return Step::Next;
        };
        let head_bytes = header.shape.head_bytes(header.chunk_bytes);
        if self.at + head_bytes > window_end {
            return Step::More;
        }
        let body_bytes = head_bytes as usize - RECORD_HEADER_BYTES;
        self.body.resize(body_bytes, 0);
        memory.read(Span::staging(at + RECORD_HEADER_BYTES as u64, body_bytes as u32), &mut self.body);
        let chunks = header.shape.chunks(header.chunk_bytes) as usize;
        let sums = match chunks {
            0 => vec![header.payload_checksum],
            _ => (0..chunks).rev().map(|chunk| word64(&self.body, 8 * chunk)).collect(),
        };
        let good = frame_checksum(&self.body) == header.body_checksum;
        if !good && self.generation.is_none() {
            // A record of an earlier use, its head partly overwritten by one that may count.
            report.torn_records += 1;
            self.at += UNIT_BYTES;
            return Step::Next;
        }
        let (start, shape) = (self.at, header.shape);
        let payload = shape.payload_at(start, header.away, device.config().chunk_bytes, device.config().block_bytes);
        let end = (payload + shape.payload_room(device.config().block_bytes)).next_multiple_of(UNIT_BYTES);
        // A packed record's payload comes next, an extent's after the heads that share its block.
        self.at = if shape.extent { (start + head_bytes).next_multiple_of(UNIT_BYTES) } else { payload };
        self.announce(PendingRecord {
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
    fn check(
        &mut self,
        fixed: &[u8; RECORD_HEADER_BYTES],
        oldest_live: u64,
        device: &Device,
        report: &mut RecoveryReport,
    ) -> Option<RecordHeader> {
        let Ok(header) = RecordHeader::decode(fixed, device.uuid(), device.config().max_object_bytes) else {
            report.damaged_headers += 1;
            return None;
        };
        if header.offset != device.segment_at(self.segment) + self.at {
            report.misdirected_records += 1;
            return None;
        }
        let counts = match self.generation {
            Some(generation) => header.generation == generation,
            None => header.generation >= self.newest && header.generation >= oldest_live,
        };
        if !counts {
            report.stale_records += 1;
            return None;
        }
        let (chunk, block) = (device.config().chunk_bytes, device.config().block_bytes);
        let payload_at = header.shape.payload_at(self.at, header.away, chunk, block);
        let fits = payload_at + header.shape.payload_room(block) <= device.config().segment_bytes
            && header.chunk_bytes == device.config().chunk_bytes
            && header.shape.key_bytes <= device.config().max_key_bytes;
        if !fits {
            report.damaged_headers += 1;
            return None;
        }
        if header.generation > self.newest {
            // A newer use than what was found so far.
            report.stale_records += self.entries.len() as u64;
            self.entries.clear();
            self.newest = header.generation;
            (self.durable_sequence, self.durable_tombstones) = (0, 0);
        }
        Some(header)
    }

    /// Checks as much of a payload as the window has.
    fn payload(&mut self, device: &Device, report: &mut RecoveryReport, memory: &dyn Memory) -> Step {
        let window_end = self.window + u64::from(self.window_bytes);
        let Some(pending) = self.pending.front_mut() else { return Step::Next };
        if pending.at < self.window {
            return Step::More;
        }
        while pending.left > 0 {
            let here = window_end.saturating_sub(pending.at).min(pending.left_of_chunk.into()) as u32;
            if here == 0 {
                return Step::More;
            }
            memory.checksum(Span::staging(device.layout().scans + (pending.at - self.window), here), &mut pending.sum);
            pending.at += u64::from(here);
            pending.left -= here;
            pending.left_of_chunk -= here;
            if pending.left_of_chunk == 0 {
                pending.good &= pending.sums.pop() == Some(pending.sum.finish());
                pending.sum = PayloadChecksum::new();
                pending.left_of_chunk = pending.header.chunk_bytes.min(pending.left);
            }
        }
        let Some(pending) = self.pending.pop_front() else { return Step::Next };
        let tombstone = pending.header.kind == Kind::Tombstone;
        if pending.header.generation < self.newest {
            report.stale_records += 1;
        } else if pending.good && (tombstone || pending.header.shape.payload_bytes > 0) {
            self.take(&pending.header, pending.start);
        } else {
            report.torn_records += 1;
        }
        // Without a header, this may be a record of an earlier use, partly overwritten by those that count.
        let whole = pending.good || self.generation.is_some();
        self.at = self.at.max(if whole { pending.end } else { pending.payload.next_multiple_of(UNIT_BYTES) });
        Step::Next
    }
}

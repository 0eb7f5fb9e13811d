//! Scan of a segment without a footer: every unit may begin a record; records that are whole and of this generation of
//! the segment are live.
//!
//! The segment is read in windows from its start. Heads come before their payloads, several in a row if extents share a
//! block for them: the announced payloads are queued in their order until the scan reaches them. A record is accepted
//! if its header and every checksum of its payload match, so a torn write leaves no record. Records of an earlier
//! generation, or that state another location, are counted and skipped.

use kvplane_proto::narrowing::{length_u32, to_u32, to_usize};
use std::collections::VecDeque;

use kvplane_proto::checksum::{PayloadChecksum, frame_checksum};

use crate::device::{Device, Owner};
use crate::format::{FooterEntry, Kind, RECORD_HEADER_BYTES, RecordHeader, UNIT_BYTES, word64};
use crate::memory::{Memory, Span};
use crate::ops::{Fault, Pieces, Priority};
use crate::types::{RecoveryReport, TenantOf};

/// Longest window. The host serves no calls while it processes one.
const WINDOW_MOST: u64 = 4 << 20;

/// Record whose payload is to be verified.
#[derive(Debug)]
struct PendingRecord {
    header: RecordHeader,
    /// Offsets from the segment's start: of the record, of the start and end of its payload, and of the next byte to
    /// verify.
    start: u64,
    payload: u64,
    end: u64,
    at: u64,
    left_of_chunk: u32,
    left: u32,
    sum: PayloadChecksum,
    /// Listed checksums, the last first.
    sums: Vec<u64>,
    good: bool,
    tenant: u32,
}

/// Scan in progress; the records that it finds are applied when it ends.
#[derive(Debug)]
pub(super) struct Scan {
    segment: u32,
    /// Generation of the segment; without a header, the newest that is found.
    generation: Option<u64>,
    newest: u64,
    entries: Vec<FooterEntry>,
    tenant_of: TenantOf,
    /// Offset at which to look for the next head, from the segment's start.
    at: u64,
    window: u64,
    window_bytes: u32,
    /// Offset up to which a read failed: windows before it are small.
    narrow_until: u64,
    /// Announced payloads, in their order.
    pending: VecDeque<PendingRecord>,
    unreadable: bool,
    /// Durable sequence and tombstones that the records state.
    durable_sequence: u64,
    durable_tombstones: u32,
    /// Least live generation that the records state.
    oldest_live: u64,
    /// Buffer for the body of the current head.
    body: Vec<u8>,
}

/// Result of the scan of a segment.
#[derive(Debug)]
pub(super) struct ScannedSegment {
    pub(super) segment: u32,
    /// Generation in the segment's header, if that is valid.
    pub(super) header: Option<u64>,
    /// Newest generation among the records found.
    newest: u64,
    pub(super) entries: Vec<FooterEntry>,
    /// True if the whole segment could be read.
    pub(super) is_whole: bool,
    /// Durable sequence and tombstones that its records state,
    pub(super) durable_sequence: u64,
    pub(super) durable_tombstones: u32,
    /// and the least live generation.
    pub(super) oldest_live: u64,
}

impl ScannedSegment {
    /// Returns the generation of the segment.
    pub(super) fn generation(&self) -> u64 {
        self.header.unwrap_or(self.newest)
    }

    /// Returns the number of tombstones found; with `durable`, only of those that its records state as durable.
    pub(super) fn tombstones(&self, durable: bool) -> u32 {
        let tombstones = self.entries.iter().filter(|entry| entry.kind == Kind::Tombstone);
        length_u32(tombstones.filter(|entry| !durable || entry.sequence <= self.durable_sequence).count())
    }
}

enum Step {
    /// Continue in this window.
    Next,
    /// The next part is not completely in this window.
    More,
}

impl Scan {
    pub(super) fn new(
        segment: u32,
        generation: Option<u64>,
        entries: Vec<FooterEntry>,
        from: u64,
        tenant_of: TenantOf,
    ) -> Self {
        Self {
            segment,
            generation,
            newest: 0,
            entries,
            tenant_of,
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

    /// Ends the scan.
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

    /// Returns the offset at which the scan continues: at the next payload if no head is before it.
    fn reach(&self) -> u64 {
        self.due().map_or(self.at, |pending| pending.at)
    }

    /// Returns the payload that is to be verified before the next head.
    fn due(&self) -> Option<&PendingRecord> {
        self.pending.front().filter(|pending| pending.payload <= self.at)
    }

    fn announce(&mut self, pending: PendingRecord) {
        let later = self.pending.iter().rev().take_while(|other| other.payload > pending.payload).count();
        self.pending.insert(self.pending.len() - later, pending);
    }

    /// Takes a record, and its statements about what was durable.
    fn take(&mut self, header: &RecordHeader, start: u64, tenant: u32) {
        if header.durable_sequence >= self.durable_sequence {
            self.durable_sequence = header.durable_sequence;
            self.durable_tombstones = self.durable_tombstones.max(header.durable_tombstones);
        }
        self.oldest_live = self.oldest_live.max(header.oldest_live);
        let twin_of = |entry: &&FooterEntry| entry.sequence >= header.sequence;
        let known = self.entries.iter().rev().take_while(twin_of).any(|entry| entry.sequence == header.sequence);
        if !known && self.entries.len() < self.entries.capacity() {
            self.entries.push(FooterEntry::of(header, to_u32(start / UNIT_BYTES), Some(tenant)));
        }
    }

    /// Reads the window at which the scan continues.
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

    /// Processes a window that was read; returns true if there is another. Without a header, records of generations
    /// below `oldest_live` are stale.
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
            // The window is read again in small parts, so that only unreadable parts are given up.
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
            // There is no room for a header between here and the segment's end.
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
        memory.read(Span::staging(at, length_u32(RECORD_HEADER_BYTES)), &mut fixed);
        let Some(header) = self.check(&fixed, oldest_live, device, report) else {
            self.at += UNIT_BYTES;
            return Step::Next;
        };
        let head_bytes = header.shape.head_bytes(header.chunk_bytes);
        if self.at + head_bytes > window_end {
            return Step::More;
        }
        let body_bytes = to_usize(head_bytes) - RECORD_HEADER_BYTES;
        self.body.resize(body_bytes, 0);
        memory.read(Span::staging(at + RECORD_HEADER_BYTES as u64, length_u32(body_bytes)), &mut self.body);
        let chunks = header.shape.chunks(header.chunk_bytes) as usize;
        let sums = match chunks {
            0 => vec![header.payload_checksum],
            _ => (0..chunks).rev().map(|chunk| word64(&self.body, 8 * chunk)).collect(),
        };
        let good = frame_checksum(&self.body) == header.body_checksum;
        let tenant = (self.tenant_of)(&self.body[8 * chunks..]);
        if !good && self.generation.is_none() {
            // A record of an earlier generation, its head partly overwritten by a record that may be live.
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
            tenant,
        });
        Step::Next
    }

    /// Decodes a header, and returns it if it is valid for this location and generation.
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
            // The record is of a newer generation than those found so far.
            report.stale_records += self.entries.len() as u64;
            self.entries.clear();
            self.newest = header.generation;
            (self.durable_sequence, self.durable_tombstones) = (0, 0);
        }
        Some(header)
    }

    /// Verifies as much of a payload as the window has.
    fn payload(&mut self, device: &Device, report: &mut RecoveryReport, memory: &dyn Memory) -> Step {
        let window_end = self.window + u64::from(self.window_bytes);
        let Some(pending) = self.pending.front_mut() else { return Step::Next };
        if pending.at < self.window {
            return Step::More;
        }
        while pending.left > 0 {
            let here = to_u32(window_end.saturating_sub(pending.at).min(pending.left_of_chunk.into()));
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
            self.take(&pending.header, pending.start, pending.tenant);
        } else {
            report.torn_records += 1;
        }
        // Without a header, this may be a record of an earlier generation, partly overwritten by live ones.
        let whole = pending.good || self.generation.is_some();
        self.at = self.at.max(if whole { pending.end } else { pending.payload.next_multiple_of(UNIT_BYTES) });
        Step::Next
    }
}

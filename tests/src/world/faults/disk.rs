//! Disk of a shard, with a volatile write cache, that outlives the processes that use it. On a power failure it tears
//! and loses unflushed writes; it carries operations out in any order, and can be made to fail or to lie.

use kvplane_proto::Digest;
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::rng::Rng;
use kvplane_tier::{Action, BlockOp, Fault, Memory, Space, Span};

/// Atomic write unit of a disk, in bytes.
const SECTOR: usize = 512;
/// Alignment of records, length of their headers, and start of the segments.
const UNIT: usize = 64;
const RECORD_BYTES: usize = 104;
const SEGMENTS_AT: u64 = 64 << 10;

/// Failures of a disk: chances for each operation.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct DiskFaults {
    pub(crate) read_error: f64,
    pub(crate) write_error: f64,
    pub(crate) short: f64,
    /// One bit of the written bytes is flipped.
    pub(crate) corrupt_write: f64,
    /// One bit of the read bytes is flipped.
    pub(crate) corrupt_read: f64,
    /// A write is acknowledged but not done.
    pub(crate) lost: f64,
    /// Only writes of records are lost; the metadata of segments is written.
    pub(crate) spares: bool,
    /// A write goes to another place.
    pub(crate) misdirected: f64,
    /// A range becomes unreadable, from some point of the run on.
    pub(crate) bad_range: f64,
}

impl DiskFaults {
    /// Returns true if acknowledged writes may be lost, or a removal undone at the end of the log.
    pub(crate) fn any(&self) -> bool {
        let Self { read_error, write_error, short, corrupt_write, corrupt_read, .. } = *self;
        let Self { lost, misdirected, bad_range, .. } = *self;
        [read_error, write_error, short, corrupt_write, corrupt_read, lost, misdirected, bad_range]
            .iter()
            .any(|chance| *chance > 0.0)
    }

    /// Returns true if the disk acknowledges operations that it did not do.
    pub(crate) fn lies(&self) -> bool {
        self.lost > 0.0 || self.misdirected > 0.0
    }
}

/// Lost tombstone whose loss no later record in its segment reveals.
pub(crate) struct LostTombstone {
    segment: u64,
    digest: [u8; 16],
    sequence: u64,
}

impl LostTombstone {
    /// Returns true if it is of this object.
    pub(crate) fn is_of(&self, digest: Digest) -> bool {
        self.digest == digest.to_bytes()
    }
}

/// Header of a record, as far as the simulation needs it.
struct Record {
    is_tombstone: bool,
    digest: [u8; 16],
    sequence: u64,
    /// All records up to this sequence were durable before it.
    durable: u64,
}

/// Returns the records of a write.
fn records_of(bytes: &[u8]) -> Vec<Record> {
    let number = |at: usize| bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
    let starts = (0..bytes.len().saturating_sub(RECORD_BYTES)).step_by(UNIT);
    let record = |at: usize| Record {
        is_tombstone: bytes[at + 6] == 2,
        digest: bytes[at + 8..at + 24].try_into().unwrap_or_default(),
        sequence: number(at + 32),
        durable: number(at + 64),
    };
    starts.filter(|at| bytes[*at..].starts_with(b"KVTR")).map(record).collect()
}

/// Place of an object's record on a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskRecord {
    pub(crate) head_at: u64,
    pub(crate) head_bytes: u64,
    pub(crate) payload_at: u64,
    pub(crate) payload_bytes: u64,
    pub(crate) version: u64,
    pub(crate) sequence: u64,
    pub(crate) checksum: u64,
}

struct UnflushedWrite {
    number: u64,
    offset: usize,
    bytes: Vec<u8>,
}

/// Simulated disk.
pub(crate) struct Disk {
    /// Capacity.
    bytes: usize,
    /// Bytes that reads return, up to the end of the last segment that was ever written: behind it the disk is blank.
    seen: Vec<u8>,
    /// Bytes that survive a power failure for certain, as many.
    durable: Vec<u8>,
    unflushed: Vec<UnflushedWrite>,
    written: u64,
    bad: Option<(u64, u64)>,
    rng: Rng,
    pub(crate) faults: DiskFaults,
    /// The disk has acknowledged an operation that it did not do.
    pub(crate) lies: bool,
    /// Lost tombstones that the tier had no chance to notice so far.
    pub(crate) lost_tombstones: Vec<LostTombstone>,
    segment_bytes: u64,
    /// Flushes are acknowledged but not done: [`crate::world::scenario::Mischief::SkipFlush`].
    pub(crate) skip_flush: bool,
    /// Tombstones are not written: [`crate::world::scenario::Mischief::DropTombstones`].
    pub(crate) drop_tombstones: bool,
}

impl Disk {
    pub(crate) fn new(bytes: u64, segment_bytes: u64, rng: Rng, faults: DiskFaults) -> Self {
        Self {
            bytes: bytes as usize,
            seen: Vec::new(),
            durable: Vec::new(),
            unflushed: Vec::new(),
            written: 0,
            bad: None,
            rng,
            faults,
            lies: faults.lies(),
            lost_tombstones: Vec::new(),
            segment_bytes,
            skip_flush: false,
            drop_tombstones: false,
        }
    }

    /// Returns the number of completed writes: a flush covers those before its submission.
    pub(crate) const fn written(&self) -> u64 {
        self.written
    }

    /// Carries out an operation that was submitted after `given_at` writes.
    pub(crate) fn carry_out(
        &mut self,
        op: &BlockOp,
        given_at: u64,
        memory: &mut IncarnationMemory<'_>,
    ) -> Result<u32, Fault> {
        match op.action {
            Action::Read => self.read(op, memory),
            Action::Write { durable } => self.write(op, durable, memory),
            Action::Flush => {
                if !self.skip_flush {
                    self.flush(given_at);
                }
                Ok(0)
            }
        }
    }

    /// Returns true if it was ever formatted.
    pub(crate) fn is_formatted(&self) -> bool {
        [0, 32 << 10].iter().any(|at| self.seen.get(*at..).is_some_and(|bytes| bytes.starts_with(b"KVTS")))
    }

    /// Returns the record of an object with the greatest sequence, above `after`.
    pub(crate) fn newest_record(&self, digest: Digest, block_bytes: u32, after: Option<u64>) -> Option<DiskRecord> {
        let bytes = &self.seen;
        let word = |at: usize| bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
        let half = |at: usize| bytes[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
        let starts = (SEGMENTS_AT as usize..bytes.len().saturating_sub(RECORD_BYTES)).step_by(UNIT);
        let name = digest.to_bytes();
        let of_object = |at: &usize| {
            // Nearly all places differ in a byte of these.
            let may_be = bytes[*at] == b'K' && bytes[at + 8] == name[0];
            may_be && bytes[*at..].starts_with(b"KVTR") && bytes[at + 6] == 1 && bytes[at + 8..at + 24] == name
        };
        let record = |at: usize| {
            let (payload_bytes, chunk_bytes) = (u64::from(half(at + 76)), u64::from(half(at + 80)).max(1));
            let chunks = payload_bytes.div_ceil(chunk_bytes);
            let sums = if chunks > 1 { 8 * chunks } else { 0 };
            let key_bytes = u64::from(bytes[at + 88]) | u64::from(bytes[at + 89]) << 8;
            let head_bytes = RECORD_BYTES as u64 + sums + key_bytes;
            let end = at as u64 + head_bytes;
            let is_extent = bytes[at + 7] & 1 != 0;
            let block = u64::from(block_bytes);
            let away = u64::from(bytes[at + 90]) * block;
            let payload_at = if is_extent { end.next_multiple_of(block) + away } else { end };
            let (version, sequence, checksum) = (word(at + 24), word(at + 32), word(at + 56));
            DiskRecord { head_at: at as u64, head_bytes, payload_at, payload_bytes, version, sequence, checksum }
        };
        let records = starts.filter(of_object).map(record);
        let fits = |record: &DiskRecord| record.payload_at + record.payload_bytes <= bytes.len() as u64;
        let newer = |record: &DiskRecord| after.is_none_or(|after| record.sequence > after);
        records.filter(fits).filter(newer).max_by_key(|record| record.sequence)
    }

    /// Returns bytes as reads return them.
    pub(crate) fn bytes(&self, offset: u64, bytes: u64) -> &[u8] {
        &self.seen[offset as usize..][..bytes as usize]
    }

    /// Changes bits of a byte at rest.
    pub(crate) fn damage(&mut self, offset: u64, mask: u8) {
        self.seen[offset as usize] ^= mask;
        self.durable[offset as usize] ^= mask;
    }

    /// Replaces the disk by a blank one.
    pub(crate) fn wipe(&mut self) {
        self.bad = None;
        self.unflushed.clear();
        self.seen.clear();
        self.durable.clear();
    }

    fn read(&mut self, op: &BlockOp, memory: &mut IncarnationMemory<'_>) -> Result<u32, Fault> {
        if self.bad.is_none() && self.written > 0 && self.rng.chance(self.faults.bad_range) {
            // The superblocks are spared, without which no run can start.
            let room = self.bytes as u64 - (64 << 10);
            self.bad = Some(((64 << 10) + self.rng.below(room), 1 + self.rng.below(64 << 10)));
        }
        let hit = |(at, bytes): (u64, u64)| at < op.offset + u64::from(op.bytes) && op.offset < at + bytes;
        if self.rng.chance(self.faults.read_error) || self.bad.is_some_and(hit) {
            return Err(Fault::Io);
        }
        let mut at = op.offset as usize;
        for piece in op.pieces.as_slice() {
            let end = at + piece.bytes as usize;
            assert!(end <= self.bytes, "a read ends at {end} of {}", self.bytes);
            match self.seen.get(at..end) {
                Some(bytes) => memory.write(bytes, *piece),
                None => {
                    let mut bytes = self.seen.get(at..).unwrap_or(&[]).to_vec();
                    bytes.resize(piece.bytes as usize, 0);
                    memory.write(&bytes, *piece);
                }
            }
            if piece.bytes > 0 && self.rng.chance(self.faults.corrupt_read) {
                memory.flip(*piece, self.rng.below(piece.bytes.into()), self.rng.below(8) as u32);
            }
            at += piece.bytes as usize;
        }
        Ok(if self.rng.chance(self.faults.short) { op.bytes / 2 } else { op.bytes })
    }

    fn write(&mut self, op: &BlockOp, durable: bool, memory: &IncarnationMemory<'_>) -> Result<u32, Fault> {
        let mut bytes = memory.gather(op);
        let mut offset = op.offset as usize;
        if self.drop_tombstones {
            drop_tombstones(&mut bytes);
        }
        if self.rng.chance(self.faults.write_error) {
            if self.rng.chance(0.5) {
                self.land(offset, bytes, false);
            }
            return Err(Fault::Io);
        }
        let records = if self.faults.spares { records_of(&bytes) } else { Vec::new() };
        let segment = op.offset.saturating_sub(SEGMENTS_AT) / self.segment_bytes;
        if (!self.faults.spares || !records.is_empty()) && self.rng.chance(self.faults.lost) {
            let gone = records.into_iter().filter(|record| record.is_tombstone);
            let lost = |Record { digest, sequence, .. }| LostTombstone { segment, digest, sequence };
            self.lost_tombstones.extend(gone.map(lost));
            return Ok(op.bytes);
        }
        // A record that states the durable sequence before it reveals the loss.
        let tells = |lost: &LostTombstone| {
            records.iter().any(|record| lost.segment == segment && lost.sequence <= record.durable)
        };
        self.lost_tombstones.retain(|lost| !tells(lost));
        if self.rng.chance(self.faults.misdirected) && self.bytes > (64 << 10) + bytes.len() {
            let room = (self.bytes - (64 << 10) - bytes.len()) / SECTOR;
            offset = (64 << 10) + self.rng.below(room.max(1) as u64) as usize * SECTOR;
        }
        if self.rng.chance(self.faults.corrupt_write) {
            let at = self.rng.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << self.rng.below(8);
        }
        self.land(offset, bytes, durable);
        Ok(op.bytes)
    }

    fn land(&mut self, offset: usize, bytes: Vec<u8>, durable: bool) {
        let end = offset + bytes.len();
        assert!(end <= self.bytes, "a write ends at {end} of {}", self.bytes);
        if end > self.seen.len() {
            let in_segments = (end as u64).saturating_sub(SEGMENTS_AT).next_multiple_of(self.segment_bytes);
            let used = ((SEGMENTS_AT + in_segments) as usize).min(self.bytes);
            self.seen.resize(used, 0);
            self.durable.resize(used, 0);
        }
        self.seen[offset..end].copy_from_slice(&bytes);
        if durable {
            self.durable[offset..end].copy_from_slice(&bytes);
        }
        self.unflushed.push(UnflushedWrite { number: self.written, offset, bytes });
        self.written += 1;
    }

    fn flush(&mut self, given_at: u64) {
        for write in self.unflushed.extract_if(.., |write| write.number < given_at) {
            self.durable[write.offset..][..write.bytes.len()].copy_from_slice(&write.bytes);
        }
    }

    /// Handles the death of the process: a write in flight may have been done, in part or not at all.
    pub(crate) fn cut_off(&mut self, op: &BlockOp, memory: &IncarnationMemory<'_>) {
        if let Action::Write { .. } = op.action {
            let bytes = memory.gather(op);
            for (at, range) in self.torn(bytes.len()) {
                self.land(op.offset as usize + at, bytes[range].to_vec(), false);
            }
        }
    }

    /// Handles a power failure: any sectors of unflushed writes may have been written.
    pub(crate) fn power_failure(&mut self) {
        for write in core::mem::take(&mut self.unflushed) {
            for (at, range) in self.torn(write.bytes.len()) {
                let part = &write.bytes[range];
                self.durable[write.offset + at..][..part.len()].copy_from_slice(part);
            }
        }
        self.seen.copy_from_slice(&self.durable);
    }

    /// Draws the parts of a write that are done: all, none, or some sectors.
    fn torn(&mut self, bytes: usize) -> Vec<(usize, core::ops::Range<usize>)> {
        match self.rng.below(3) {
            0 => Vec::new(),
            1 => vec![(0, 0..bytes)],
            _ => (0..bytes)
                .step_by(SECTOR)
                .filter(|_| self.rng.chance(0.5))
                .map(|at| (at, at..(at + SECTOR).min(bytes)))
                .collect(),
        }
    }
}

/// Zeroes the tombstones of a group.
fn drop_tombstones(bytes: &mut [u8]) {
    for unit in bytes.chunks_mut(64) {
        if unit.starts_with(b"KVTR") && unit.get(6) == Some(&2) {
            unit.fill(0);
        }
    }
}

/// Byte of an incarnation's memory that a disk delivered wrong.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlippedByte {
    space: Space,
    at: u64,
    mask: u8,
}

/// Memory of a shard as its tier sees it.
pub(crate) struct IncarnationMemory<'a> {
    pub(crate) pool: &'a mut [u8],
    pub(crate) staging: &'a mut [u8],
    /// With [`crate::world::scenario::Mischief::TrustDisk`], checksums are computed from the bytes that the disk should
    /// have delivered.
    pub(crate) flipped: Option<&'a mut Vec<FlippedByte>>,
}

impl IncarnationMemory<'_> {
    fn of(&self, span: Span) -> &[u8] {
        let memory = if span.space == Space::Pool { &*self.pool } else { &*self.staging };
        &memory[span.offset as usize..][..span.bytes as usize]
    }

    fn of_mut(&mut self, span: Span) -> &mut [u8] {
        let memory = if span.space == Space::Pool { &mut *self.pool } else { &mut *self.staging };
        &mut memory[span.offset as usize..][..span.bytes as usize]
    }

    fn gather(&self, op: &BlockOp) -> Vec<u8> {
        op.pieces.as_slice().iter().flat_map(|piece| self.of(*piece).iter().copied()).collect()
    }

    fn flip(&mut self, span: Span, byte: u64, bit: u32) {
        self.of_mut(span)[byte as usize] ^= 1 << bit;
        if let Some(flipped) = &mut self.flipped {
            flipped.push(FlippedByte { space: span.space, at: span.offset + byte, mask: 1 << bit });
        }
    }

    fn flips_in(&self, span: Span) -> Vec<FlippedByte> {
        let inside = |flip: &&FlippedByte| {
            flip.space == span.space && flip.at >= span.offset && flip.at < span.offset + u64::from(span.bytes)
        };
        self.flipped.as_ref().map_or_else(Vec::new, |flipped| flipped.iter().filter(inside).copied().collect())
    }

    fn forget_flips(&mut self, span: Span) {
        if let Some(flipped) = &mut self.flipped {
            let end = span.offset + u64::from(span.bytes);
            flipped.retain(|flip| flip.space != span.space || flip.at < span.offset || flip.at >= end);
        }
    }
}

impl Memory for IncarnationMemory<'_> {
    fn read(&self, from: Span, into: &mut [u8]) {
        into.copy_from_slice(self.of(from));
    }

    fn write(&mut self, from: &[u8], to: Span) {
        self.forget_flips(to);
        self.of_mut(to).copy_from_slice(from);
    }

    fn copy(&mut self, from: Span, to: Span) {
        let (bytes, flips) = (self.of(from).to_vec(), self.flips_in(from));
        self.write(&bytes, to);
        if let Some(flipped) = &mut self.flipped {
            let moved =
                |flip: FlippedByte| FlippedByte { space: to.space, at: flip.at - from.offset + to.offset, ..flip };
            flipped.extend(flips.into_iter().map(moved));
        }
    }

    fn checksum(&self, span: Span, sum: &mut PayloadChecksum) {
        let flips = self.flips_in(span);
        if flips.is_empty() {
            sum.update(self.of(span));
            return;
        }
        let mut bytes = self.of(span).to_vec();
        flips.iter().for_each(|flip| bytes[(flip.at - span.offset) as usize] ^= flip.mask);
        sum.update(&bytes);
    }
}

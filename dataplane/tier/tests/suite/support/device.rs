//! Model device in memory with a volatile write cache, which tears, reorders and loses unflushed writes, and which can
//! return false results.

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::rng::Rng;
use kvplane_tier::format::FIRST_SEGMENT_OFFSET;
use kvplane_tier::{Action, BlockOp, Fault, Memory, OpId, Space, Span};

const SECTOR: usize = 512;

/// Memory of the host: staging area and pool.
pub(crate) struct HostMemory {
    pub(crate) staging: Vec<u8>,
    pub(crate) pool: Vec<u8>,
}

impl HostMemory {
    fn slice(&self, span: Span) -> &[u8] {
        let memory = if span.space == Space::Pool { &self.pool } else { &self.staging };
        &memory[span.offset as usize..][..span.bytes as usize]
    }

    fn slice_mut(&mut self, span: Span) -> &mut [u8] {
        let memory = if span.space == Space::Pool { &mut self.pool } else { &mut self.staging };
        &mut memory[span.offset as usize..][..span.bytes as usize]
    }
}

impl Memory for HostMemory {
    fn read(&self, from: Span, into: &mut [u8]) {
        into.copy_from_slice(self.slice(from));
    }

    fn write(&mut self, from: &[u8], to: Span) {
        self.slice_mut(to).copy_from_slice(from);
    }

    fn copy(&mut self, from: Span, to: Span) {
        let bytes = self.slice(from).to_vec();
        self.slice_mut(to).copy_from_slice(&bytes);
    }

    fn checksum(&self, span: Span, sum: &mut PayloadChecksum) {
        sum.update(self.slice(span));
    }
}

/// Probabilities of the device's faults.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Faults {
    pub(crate) read_error: f64,
    pub(crate) write_error: f64,
    pub(crate) short: f64,
    /// Write that is reported as complete, but not done.
    pub(crate) lost: f64,
    /// Write to another location.
    pub(crate) misdirected: f64,
}

struct UnflushedWrite {
    number: u64,
    offset: usize,
    bytes: Vec<u8>,
    durable: bool,
}

pub(crate) struct Device {
    /// Contents that reads return.
    seen: Vec<u8>,
    /// Contents that survive a power failure for certain.
    durable: Vec<u8>,
    unflushed: Vec<UnflushedWrite>,
    under_way: Vec<(BlockOp, u64)>,
    written: u64,
    block: u64,
    segment_bytes: u64,
    pub(crate) rng: Rng,
    pub(crate) faults: Faults,
    pub(crate) lies: u64,
    pub(crate) completions: u64,
}

impl Device {
    pub(crate) fn new(bytes: u64, block: u32, segment_bytes: u64, rng: Rng) -> Self {
        Self {
            seen: vec![0; bytes as usize],
            durable: vec![0; bytes as usize],
            unflushed: Vec::new(),
            under_way: Vec::new(),
            written: 0,
            block: block.into(),
            segment_bytes,
            rng,
            faults: Faults::default(),
            lies: 0,
            completions: 0,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.seen
    }

    pub(crate) fn submit(&mut self, op: BlockOp, memory: &HostMemory) {
        assert!(op.offset.is_multiple_of(self.block) && u64::from(op.bytes).is_multiple_of(self.block), "{op:?}");
        assert!(op.offset + u64::from(op.bytes) <= self.seen.len() as u64, "{op:?}");
        let pieces: u64 = op.pieces.as_slice().iter().map(|piece| u64::from(piece.bytes)).sum();
        assert_eq!(pieces, u64::from(op.bytes), "{op:?}");
        for piece in op.pieces.as_slice() {
            assert!(piece.offset.is_multiple_of(64) && u64::from(piece.bytes).is_multiple_of(self.block), "{op:?}");
        }
        if let Action::Write { .. } = op.action
            && op.offset >= FIRST_SEGMENT_OFFSET
            && self.lies == 0
        {
            let mut start = [0; 4];
            memory.read(Span { bytes: 4, ..op.pieces.as_slice()[0] }, &mut start);
            self.check_order(&op, start);
        }
        self.under_way.push((op, self.written));
    }

    /// Checks the order of durability that docs/tier.md documents: a segment's header before its records, its records
    /// before its footer.
    fn check_order(&self, op: &BlockOp, start: [u8; 4]) {
        let segment = |offset: u64| (offset.max(FIRST_SEGMENT_OFFSET) - FIRST_SEGMENT_OFFSET) / self.segment_bytes;
        let before: &[u8] = match &start {
            b"KVTF" => b"KVTR",
            b"KVTR" => b"KVTG",
            _ => return,
        };
        let volatile = self.unflushed.iter().filter(|write| !write.durable);
        let mut same = volatile.filter(|write| segment(write.offset as u64) == segment(op.offset));
        assert!(!same.any(|write| write.bytes.starts_with(before)), "not durable yet, but needed by {op:?}");
        let mut writing = self.under_way.iter().filter(|(other, _)| matches!(other.action, Action::Write { .. }));
        let is_footer = start == *b"KVTF";
        assert!(!is_footer || !writing.any(|(other, _)| segment(other.offset) == segment(op.offset)), "{op:?}");
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Carries out one of the operations in flight, chosen at random.
    pub(crate) fn step(&mut self, memory: &mut HostMemory) -> Option<(OpId, Result<u32, Fault>)> {
        if self.under_way.is_empty() {
            return None;
        }
        self.completions += 1;
        let pick = self.rng.below(self.under_way.len() as u64) as usize;
        let (op, given_at) = self.under_way.swap_remove(pick);
        let result = match op.action {
            Action::Read => self.read(&op, memory),
            Action::Write { durable } => self.write(&op, durable, memory),
            Action::Flush => {
                self.flush(given_at);
                Ok(0)
            }
        };
        Some((op.id, result))
    }

    fn read(&mut self, op: &BlockOp, memory: &mut HostMemory) -> Result<u32, Fault> {
        if self.rng.chance(self.faults.read_error) {
            return Err(Fault::Io);
        }
        let mut at = op.offset as usize;
        for piece in op.pieces.as_slice() {
            let bytes = self.seen[at..][..piece.bytes as usize].to_vec();
            memory.write(&bytes, *piece);
            at += piece.bytes as usize;
        }
        Ok(if self.rng.chance(self.faults.short) { op.bytes / 2 } else { op.bytes })
    }

    fn write(&mut self, op: &BlockOp, durable: bool, memory: &HostMemory) -> Result<u32, Fault> {
        let mut bytes = Vec::new();
        op.pieces.as_slice().iter().for_each(|piece| bytes.extend_from_slice(memory.slice(*piece)));
        let mut offset = op.offset as usize;
        if self.rng.chance(self.faults.write_error) {
            if self.rng.chance(0.5) {
                self.land(offset, bytes, false);
            }
            return Err(Fault::Io);
        }
        if self.rng.chance(self.faults.lost) {
            self.lies += 1;
            return Ok(op.bytes);
        }
        if self.rng.chance(self.faults.misdirected) {
            self.lies += 1;
            let room = self.seen.len() as u64 - 65_536 - bytes.len() as u64;
            offset = 65_536 + (self.rng.below(room / self.block) * self.block) as usize;
        }
        if durable {
            self.durable[offset..][..bytes.len()].copy_from_slice(&bytes);
        }
        self.land(offset, bytes, durable);
        Ok(op.bytes)
    }

    fn land(&mut self, offset: usize, bytes: Vec<u8>, durable: bool) {
        self.seen[offset..][..bytes.len()].copy_from_slice(&bytes);
        self.unflushed.push(UnflushedWrite { number: self.written, offset, bytes, durable });
        self.written += 1;
    }

    fn flush(&mut self, given_at: u64) {
        for write in self.unflushed.extract_if(.., |write| write.number < given_at) {
            self.durable[write.offset..][..write.bytes.len()].copy_from_slice(&write.bytes);
        }
    }

    /// Kills the process; operations in flight may have been done completely, in part or not at all.
    pub(crate) fn kill(&mut self, memory: &HostMemory) {
        for (op, _) in core::mem::take(&mut self.under_way) {
            if let Action::Write { .. } = op.action {
                let mut bytes = Vec::new();
                op.pieces.as_slice().iter().for_each(|piece| bytes.extend_from_slice(memory.slice(*piece)));
                let offset = op.offset as usize;
                self.tear(offset, &bytes, |device, at, part| device.land(at, part.to_vec(), false));
            }
        }
    }

    /// Fails the power: any sectors of unflushed writes may be on the device.
    pub(crate) fn power_failure(&mut self, memory: &HostMemory) {
        self.kill(memory);
        for write in core::mem::take(&mut self.unflushed) {
            self.tear(write.offset, &write.bytes, |device, at, part| {
                device.durable[at..][..part.len()].copy_from_slice(part);
            });
        }
        self.seen = self.durable.clone();
    }

    fn tear(&mut self, offset: usize, bytes: &[u8], mut keep: impl FnMut(&mut Self, usize, &[u8])) {
        match self.rng.below(3) {
            0 => {}
            1 => keep(self, offset, bytes),
            _ => {
                for (at, sector) in bytes.chunks(SECTOR).enumerate() {
                    if self.rng.chance(0.5) {
                        keep(self, offset + at * SECTOR, sector);
                    }
                }
            }
        }
    }

    /// Flips one bit of the device's contents.
    pub(crate) fn flip(&mut self, byte: usize, bit: u32) {
        self.seen[byte] ^= 1 << bit;
        self.durable[byte] ^= 1 << bit;
    }

    /// Overwrites contents of the device.
    pub(crate) fn put(&mut self, offset: usize, bytes: &[u8]) {
        self.seen[offset..][..bytes.len()].copy_from_slice(bytes);
        self.durable[offset..][..bytes.len()].copy_from_slice(bytes);
    }
}

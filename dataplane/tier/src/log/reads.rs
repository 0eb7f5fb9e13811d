//! Reads of records, each verified before it is used.
//!
//! A get of an extent reads only the payload: whole blocks straight to their destination, the last incomplete one to a
//! buffer. Its checksum is in memory, with the index, so neither old nor misplaced nor damaged bytes pass. The head is
//! read too if the key is needed, if the whole record is to be verified, and if the payload was wrong: the head shows
//! what became of the record. A packed record is read as a whole into a buffer, including its head, and its payload is
//! copied.

use kvplane_proto::narrowing::{length_u32, to_u32, to_usize};
use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::checksum::frame_checksum;

use super::groups::Groups;
use crate::config::Layout;
use crate::contents::{Entry, Segments};
use crate::device::{Device, Owner};
use crate::format::{Kind, RECORD_HEADER_BYTES, RecordHeader};
use crate::memory::{Memory, Span, sum};
use crate::ops::{Fault, Pieces, Priority};
use crate::slots::{SlotId, Slots};
use crate::types::{Miss, Token};

/// Purpose of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    Get(Token),
    /// A get of the key only.
    Key(Token),
    /// A copy of the record by reclaim.
    Move(u64),
    /// A check of the record.
    Scrub,
}

/// Part of a record that is being read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// The whole of a packed record.
    Whole,
    /// The payload of an extent.
    Payload,
    /// The head of an extent, after its payload was right or wrong.
    Head { payload_right: bool },
}

/// Read in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadJob {
    entry: Entry,
    destination: Span,
    priority: Priority,
    purpose: Purpose,
    part: Part,
}

impl ReadJob {
    pub(crate) const fn new(entry: Entry, destination: Span, priority: Priority, purpose: Purpose) -> Self {
        let part = match purpose {
            Purpose::Key(_) => Part::Head { payload_right: true },
            _ if entry.shape().extent => Part::Payload,
            _ => Part::Whole,
        };
        Self { entry, destination, priority, purpose, part }
    }

    /// Returns the offset of the record on the device.
    pub(super) const fn offset(&self) -> u64 {
        self.entry.offset()
    }
}

/// Completed read of a record, with its result: the checksum of the payload, or the reason of the miss.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndedRead {
    pub(crate) slot: SlotId,
    pub(crate) entry: Entry,
    pub(crate) purpose: Purpose,
    pub(crate) verified: Result<u64, Miss>,
}

/// Counters of gets, since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReadCounts {
    /// Gets that returned an object.
    pub(crate) hits: u64,
    /// Bytes of these objects.
    pub(crate) hit_bytes: u64,
    /// Gets of digests that are not in the tier.
    pub(crate) misses: u64,
}

/// Reads in flight.
#[derive(Debug)]
pub(crate) struct Reads {
    slots: Slots<ReadJob>,
    /// Reads of records that are not written yet.
    waiting: VecDeque<SlotId>,
    /// Number of gets among the reads, of objects or keys.
    gets: u32,
    max_gets: u32,
    /// Keys that were read and not taken yet.
    keys: BTreeMap<Token, Vec<u8>>,
    /// Buffer for the body of the head that is being verified.
    body: Vec<u8>,
    counts: ReadCounts,
}

impl Reads {
    pub(super) fn new(device: &Device) -> Self {
        let config = device.config();
        let most = Layout::reads_most(config);
        Self {
            slots: Slots::new(most),
            waiting: VecDeque::with_capacity(most as usize),
            gets: 0,
            max_gets: config.max_reads,
            keys: BTreeMap::new(),
            body: vec![0; to_usize(Layout::head_most(config))],
            counts: ReadCounts::default(),
        }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    pub(crate) const fn counts(&self) -> &ReadCounts {
        &self.counts
    }

    /// Returns true if another get may begin.
    pub(super) const fn may_get(&self) -> bool {
        self.gets < self.max_gets
    }

    /// Counts a get of a digest that is not in the tier.
    pub(super) const fn count_miss(&mut self) {
        self.counts.misses += 1;
    }

    /// Counts a get that returned an object.
    pub(super) fn count_hit(&mut self, entry: &Entry) {
        self.counts.hits += 1;
        self.counts.hit_bytes += u64::from(entry.shape().payload_bytes);
    }

    /// Takes a key that was read.
    pub(crate) fn take_key(&mut self, token: Token) -> Option<Vec<u8>> {
        self.keys.remove(&token)
    }

    /// Keeps the key of a verified record until it is taken.
    pub(super) fn keep_key(&mut self, token: Token, read: &EndedRead, device: &Device, memory: &dyn Memory) {
        let key = self.key(read.slot, &read.entry, device, memory);
        self.keys.insert(token, key);
    }

    /// Begins a read, for which a slot is free; the read of a record that is not written yet waits.
    pub(super) fn begin(&mut self, read: ReadJob, is_written: bool, device: &mut Device, segments: &mut Segments) {
        segments.begin_read(device.segment_of(read.offset()));
        self.gets += u32::from(matches!(read.purpose, Purpose::Get(_) | Purpose::Key(_)));
        let slot = self.slots.insert(read).expect("the table has a slot for every get, move and scrub");
        if is_written {
            submit(slot, &read, device);
        } else {
            self.waiting.push_back(slot);
        }
    }

    /// Submits the waiting reads whose records are written now.
    pub(super) fn wake(&mut self, groups: &Groups, device: &mut Device) {
        for _ in 0..self.waiting.len() {
            let Some(slot) = self.waiting.pop_front() else { return };
            let Some(read) = self.slots.get(slot) else { continue };
            if groups.is_unwritten(read.offset()) {
                self.waiting.push_back(slot);
                continue;
            }
            submit(slot, read, device);
        }
    }

    /// Ends a read whose record is no longer needed, and frees its slot.
    pub(crate) fn end(&mut self, slot: SlotId, device: &Device, segments: &mut Segments) {
        if let Some(read) = self.slots.remove(slot) {
            segments.end_read(device.segment_of(read.offset()));
            self.gets -= u32::from(matches!(read.purpose, Purpose::Get(_) | Purpose::Key(_)));
        }
    }

    /// Returns the key of a verified record.
    pub(crate) fn key(&self, slot: SlotId, entry: &Entry, device: &Device, memory: &dyn Memory) -> Vec<u8> {
        let shape = entry.shape();
        let mut key = vec![0; usize::from(shape.key_bytes)];
        let at = shape.head_bytes(device.config().chunk_bytes) - u64::from(shape.key_bytes);
        memory.read(Span::staging(head_at(slot, entry, device) + at, u32::from(shape.key_bytes)), &mut key);
        key
    }

    /// Verifies a read; the payload is in its destination afterwards. Returns `None` if the head is needed too, which
    /// is then being read.
    pub(super) fn verify(
        &mut self,
        slot: SlotId,
        result: Result<(), Fault>,
        device: &mut Device,
        memory: &mut dyn Memory,
    ) -> Option<EndedRead> {
        let read = *self.slots.get(slot)?;
        let checked = match (result, read.part) {
            (Err(fault), _) => Err(Miss::Fault(fault)),
            (Ok(()), Part::Payload) => {
                let payload_right = verify_payload(&read, read_buffer(slot, device), device, memory).is_ok();
                if !payload_right || !matches!(read.purpose, Purpose::Get(_)) {
                    self.read_head(slot, payload_right, device);
                    return None;
                }
                Ok(())
            }
            (Ok(()), Part::Head { payload_right }) => {
                let payload = if payload_right { Ok(()) } else { Err(Miss::Damaged) };
                self.verify_head(slot, &read.entry, device, memory).and(payload)
            }
            (Ok(()), Part::Whole) => self.verify_head(slot, &read.entry, device, memory).and_then(|()| {
                let payload = payload_at(&read.entry, device) - read.entry.offset();
                verify_payload(&read, head_at(slot, &read.entry, device) + payload, device, memory)
            }),
        };
        let verified = checked.map(|()| read.entry.checksum());
        Some(EndedRead { slot, entry: read.entry, purpose: read.purpose, verified })
    }

    fn read_head(&mut self, slot: SlotId, payload_right: bool, device: &mut Device) {
        let Some(read) = self.slots.get_mut(slot) else { return };
        read.part = Part::Head { payload_right };
        submit(slot, read, device);
    }

    /// Verifies the head of a record against the index and its own checksums.
    fn verify_head(&mut self, slot: SlotId, entry: &Entry, device: &Device, memory: &dyn Memory) -> Result<(), Miss> {
        let (config, shape, head) = (device.config(), entry.shape(), head_at(slot, entry, device));
        let mut fixed = [0; RECORD_HEADER_BYTES];
        memory.read(Span::staging(head, length_u32(RECORD_HEADER_BYTES)), &mut fixed);
        let header = RecordHeader::decode(&fixed, device.uuid(), config.max_object_bytes);
        let Ok(header) = header else { return Err(Miss::Damaged) };
        if header.offset != entry.offset() {
            return Err(Miss::Misdirected);
        }
        if header.sequence != entry.sequence() || header.digest != entry.digest() || header.kind != Kind::Object {
            return Err(Miss::Stale);
        }
        let same = header.shape == shape && header.away == entry.away() && header.payload_checksum == entry.checksum();
        if !same || header.chunk_bytes != config.chunk_bytes {
            return Err(Miss::Damaged);
        }
        let body_bytes = to_usize(shape.head_bytes(config.chunk_bytes)) - RECORD_HEADER_BYTES;
        self.body.resize(body_bytes, 0);
        memory.read(Span::staging(head + RECORD_HEADER_BYTES as u64, length_u32(body_bytes)), &mut self.body);
        if frame_checksum(&self.body) == header.body_checksum { Ok(()) } else { Err(Miss::Damaged) }
    }
}

fn submit(slot: SlotId, read: &ReadJob, device: &mut Device) {
    let (shape, offset, block) = (read.entry.shape(), read.entry.offset(), device.config().block_bytes);
    let buffer = read_buffer(slot, device);
    let head_end = offset + shape.head_bytes(device.config().chunk_bytes);
    let (start, pieces) = match read.part {
        Part::Payload => {
            let rest = shape.payload_bytes % block;
            let tail = Span::staging(buffer, if rest == 0 { 0 } else { block });
            let whole = read.destination.part(0, shape.payload_bytes - rest);
            (payload_at(&read.entry, device), Pieces::of(&[whole, tail]))
        }
        Part::Head { .. } => blocks_of(buffer, offset, head_end, device.block()),
        Part::Whole => blocks_of(buffer, offset, head_end + u64::from(shape.payload_bytes), device.block()),
    };
    device.read(Owner::Read(slot), start, pieces, read.priority);
}

/// Returns the blocks that contain the bytes from `start` to `end` of the device, to be read into a buffer.
fn blocks_of(buffer: u64, start: u64, end: u64, block: u64) -> (u64, Pieces) {
    let first = start - start % block;
    (first, Pieces::of(&[Span::staging(buffer, to_u32(end.next_multiple_of(block) - first))]))
}

/// Returns the offset of a record's payload on the device.
const fn payload_at(entry: &Entry, device: &Device) -> u64 {
    let (chunk, block) = (device.config().chunk_bytes, device.config().block_bytes);
    entry.shape().payload_at(entry.offset(), entry.away(), chunk, block)
}

fn read_buffer(slot: SlotId, device: &Device) -> u64 {
    let layout = device.layout();
    layout.reads + u64::from(slot.index) * u64::from(layout.read_bytes)
}

/// Returns the offset of a record's head in its read buffer.
fn head_at(slot: SlotId, entry: &Entry, device: &Device) -> u64 {
    read_buffer(slot, device) + entry.offset() % device.block()
}

/// Copies the bytes that are only in the buffer to the destination, and compares the checksum of the destination.
fn verify_payload(read: &ReadJob, buffer: u64, device: &Device, memory: &mut dyn Memory) -> Result<(), Miss> {
    let to = read.destination;
    let copied = if read.entry.shape().extent { to.bytes % device.config().block_bytes } else { to.bytes };
    if copied > 0 {
        memory.copy(Span::staging(buffer, copied), to.part(to.bytes - copied, copied));
    }
    if sum(memory, to) == read.entry.checksum() { Ok(()) } else { Err(Miss::Damaged) }
}

//! Gets: what is read is checked before it counts.
//!
//! Of an extent the payload is read and nothing else: whole blocks straight to their destination, the last incomplete
//! one to a buffer. Its checksum is in memory, with the index, so neither old nor misplaced nor damaged bytes pass. The
//! head is read too where the key is wanted, where all of the record is to be checked, and where the payload was wrong:
//! it says what became of the record.
//! A packed record is read as a whole into a buffer, head and all, and its payload copied.

use kvplane_proto::checksum::frame_checksum;
use kvplane_proto::digest::Digest;

use super::Tier;
use crate::errors::{GetError, Reason};
use crate::format::{Kind, RECORD_HEADER_BYTES, RecordHeader};
use crate::index::Entry;
use crate::memory::{Memory, Span, sum};
use crate::ops::{Action, Fault, Job, Owner, Pieces, Priority};
use crate::slots::SlotId;
use crate::types::{Event, Get, Miss, Token};

/// Whom a read is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    Get(Token),
    /// Only the key is wanted.
    Key(Token),
    /// A record that is written again.
    Move(u64),
    /// A record that is only checked.
    Scrub,
}

/// What is being read of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// All of a packed record.
    Whole,
    /// The payload of an extent.
    Payload,
    /// The head of an extent, of which the payload was right or not.
    Head { payload_right: bool },
}

/// A read under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadJob {
    entry: Entry,
    destination: Span,
    priority: Priority,
    purpose: Purpose,
    part: Part,
}

impl ReadJob {
    pub(super) const fn new(entry: Entry, destination: Span, priority: Priority, purpose: Purpose) -> Self {
        let part = match purpose {
            Purpose::Key(_) => Part::Head { payload_right: true },
            _ if entry.shape().extent => Part::Payload,
            _ => Part::Whole,
        };
        Self { entry, destination, priority, purpose, part }
    }
}

impl Tier {
    /// Begins to read an object. [`Event::Got`] or [`Event::Missed`] follows; until then the destination is the tier's.
    ///
    /// # Errors
    /// See [`GetError`]; nothing happened.
    pub fn get(&mut self, get: &Get) -> Result<(), GetError> {
        if self.degraded == Some(Reason::Gone) {
            return Err(GetError::Unavailable(Reason::Gone));
        }
        let Some(entry) = self.shown(get.digest).copied() else {
            self.stats.misses += 1;
            return Err(GetError::NotFound);
        };
        let (shape, at) = (entry.shape(), get.destination);
        if at.bytes != shape.payload_bytes {
            return Err(GetError::WrongLength { bytes: at.bytes, object_bytes: shape.payload_bytes });
        }
        let align_bytes = self.config.memory_align_bytes;
        if shape.extent && !at.offset.is_multiple_of(u64::from(align_bytes)) {
            return Err(GetError::Unaligned { offset: at.offset, align_bytes });
        }
        if self.gets == self.config.max_reads || self.is_clogged() {
            return Err(GetError::Busy);
        }
        self.gets += 1;
        if get.priority == Priority::Get
            && let Some(entry) = self.index.find_mut(get.digest)
        {
            entry.hit();
        }
        let purpose = Purpose::Get(get.token);
        self.begin_read(ReadJob::new(entry, at, get.priority, purpose));
        Ok(())
    }

    /// Begins to read the key that is kept with an object. [`Event::Key`] or [`Event::Missed`] follows; with the
    /// former,
    /// [`Self::take_key`] has it. Counts as no hit.
    ///
    /// # Errors
    /// See [`GetError`]; nothing happened.
    pub fn get_key(&mut self, digest: Digest, priority: Priority, token: Token) -> Result<(), GetError> {
        if self.degraded == Some(Reason::Gone) {
            return Err(GetError::Unavailable(Reason::Gone));
        }
        let Some(entry) = self.shown(digest).copied() else { return Err(GetError::NotFound) };
        if self.gets == self.config.max_reads || self.is_clogged() {
            return Err(GetError::Busy);
        }
        self.gets += 1;
        self.begin_read(ReadJob::new(entry, Span::default(), priority, Purpose::Key(token)));
        Ok(())
    }

    /// The key that [`Event::Key`] told of; once.
    pub fn take_key(&mut self, token: Token) -> Option<Vec<u8>> {
        self.keys.remove(&token)
    }

    /// Begins a read for which a place is free.
    pub(super) fn begin_read(&mut self, read: ReadJob) -> SlotId {
        let segment = self.segment_of(read.entry.offset());
        self.segments[segment].reads += 1;
        let slot = self.reads.insert(read).expect("as many places as gets and moves");
        if let Some(group) = self.log.unwritten(read.entry.offset()) {
            group.is_urgent = true;
            self.waiting.push_back(slot);
        } else {
            self.submit_read(slot, read);
        }
        slot
    }

    /// Looks again at the reads of what was not written.
    pub(super) fn wake_reads(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(slot) = self.waiting.pop_front() else { return };
            let Some(read) = self.reads.get(slot).copied() else { continue };
            if self.log.unwritten(read.entry.offset()).is_some() {
                self.waiting.push_back(slot);
                continue;
            }
            self.submit_read(slot, read);
        }
    }

    fn submit_read(&mut self, slot: SlotId, read: ReadJob) {
        let (shape, offset, block) = (read.entry.shape(), read.entry.offset(), self.config.block_bytes);
        let buffer = self.read_buffer(slot);
        let head_end = offset + shape.head_bytes(self.config.chunk_bytes);
        let (start, pieces) = match read.part {
            Part::Payload => {
                let rest = shape.payload_bytes % block;
                let tail = Span::staging(buffer, if rest == 0 { 0 } else { block });
                let whole = read.destination.part(0, shape.payload_bytes - rest);
                (self.payload_at(&read.entry), Pieces::of(&[whole, tail]))
            }
            Part::Head { .. } => self.blocks_of(buffer, offset, head_end),
            Part::Whole => self.blocks_of(buffer, offset, head_end + u64::from(shape.payload_bytes)),
        };
        let (owner, action, priority) = (Owner::Read(slot), Action::Read, read.priority);
        self.jobs.submit(Job { owner, action, offset: start, pieces, priority });
    }

    /// The blocks that have the bytes from `start` to `end` of the device, to be read into a buffer.
    fn blocks_of(&self, buffer: u64, start: u64, end: u64) -> (u64, Pieces) {
        let first = start - start % self.block();
        (first, Pieces::of(&[Span::staging(buffer, (end.next_multiple_of(self.block()) - first) as u32)]))
    }

    /// Where a record's payload is on the device.
    const fn payload_at(&self, entry: &Entry) -> u64 {
        let (chunk, block) = (self.config.chunk_bytes, self.config.block_bytes);
        entry.shape().payload_at(entry.offset(), entry.away(), chunk, block)
    }

    fn read_buffer(&self, slot: SlotId) -> u64 {
        self.layout.reads + u64::from(slot.index) * u64::from(self.layout.read_bytes)
    }

    /// Where the head of a record that was read is.
    fn head_at(&self, slot: SlotId, entry: &Entry) -> u64 {
        self.read_buffer(slot) + entry.offset() % self.block()
    }

    pub(super) fn read_done(&mut self, slot: SlotId, result: Result<(), Fault>, memory: &mut dyn Memory) {
        let Some(read) = self.reads.get(slot).copied() else { return };
        let Some(verified) = self.verify(slot, &read, result, memory) else { return };
        if let Err(miss) = verified {
            self.quarantine(&read.entry, miss);
        }
        match read.purpose {
            Purpose::Get(token) => {
                self.end_read(slot);
                self.gets -= 1;
                self.events.push_back(match verified {
                    Ok(checksum) => {
                        self.stats.hits += 1;
                        self.stats.hit_bytes += u64::from(read.destination.bytes);
                        Event::Got { token, version: read.entry.version(), checksum }
                    }
                    Err(miss) => Event::Missed { token, miss },
                });
            }
            Purpose::Key(token) => {
                if verified.is_ok() {
                    let key = self.read_key(slot, &read.entry, memory);
                    self.keys.insert(token, key);
                }
                self.end_read(slot);
                self.gets -= 1;
                self.events.push_back(match verified {
                    Ok(_) => Event::Key { token, version: read.entry.version() },
                    Err(miss) => Event::Missed { token, miss },
                });
            }
            Purpose::Move(number) => self.move_read(number, slot, verified),
            Purpose::Scrub => {
                self.end_read(slot);
                self.scrubbed(&read.entry, verified);
            }
        }
    }

    pub(super) fn end_read(&mut self, slot: SlotId) {
        if let Some(read) = self.reads.remove(slot) {
            let segment = self.segment_of(read.entry.offset());
            self.segments[segment].reads -= 1;
        }
    }

    /// The key of a record that was read and verified.
    pub(super) fn read_key(&self, slot: SlotId, entry: &Entry, memory: &dyn Memory) -> Vec<u8> {
        let shape = entry.shape();
        let mut key = vec![0; usize::from(shape.key_bytes)];
        let at = shape.head_bytes(self.config.chunk_bytes) - u64::from(shape.key_bytes);
        memory.read(Span::staging(self.head_at(slot, entry) + at, u32::from(shape.key_bytes)), &mut key);
        key
    }

    /// Checks what was read; the payload is in its destination afterwards. Nothing when the head is wanted too,
    /// which is
    /// then being read.
    fn verify(
        &mut self,
        slot: SlotId,
        read: &ReadJob,
        result: Result<(), Fault>,
        memory: &mut dyn Memory,
    ) -> Option<Result<u64, Miss>> {
        let checked = match (result, read.part) {
            (Err(fault), _) => Err(Miss::Fault(fault)),
            (Ok(()), Part::Payload) => {
                let payload_right = self.verify_payload(read, self.read_buffer(slot), memory).is_ok();
                if !payload_right || !matches!(read.purpose, Purpose::Get(_)) {
                    self.read_head(slot, payload_right);
                    return None;
                }
                Ok(())
            }
            (Ok(()), Part::Head { payload_right }) => {
                let payload = if payload_right { Ok(()) } else { Err(Miss::Damaged) };
                self.verify_head(slot, &read.entry, memory).and(payload)
            }
            (Ok(()), Part::Whole) => self.verify_head(slot, &read.entry, memory).and_then(|()| {
                let at = self.head_at(slot, &read.entry) + self.payload_at(&read.entry) - read.entry.offset();
                self.verify_payload(read, at, memory)
            }),
        };
        Some(checked.map(|()| read.entry.checksum()))
    }

    /// Copies from a buffer what is not in its destination yet, and compares the checksum of what the reader gets.
    fn verify_payload(&self, read: &ReadJob, buffer: u64, memory: &mut dyn Memory) -> Result<(), Miss> {
        let to = read.destination;
        let copied = if read.entry.shape().extent { to.bytes % self.config.block_bytes } else { to.bytes };
        if copied > 0 {
            memory.copy(Span::staging(buffer, copied), to.part(to.bytes - copied, copied));
        }
        if sum(memory, to) == read.entry.checksum() { Ok(()) } else { Err(Miss::Damaged) }
    }

    fn read_head(&mut self, slot: SlotId, payload_right: bool) {
        let Some(read) = self.reads.get_mut(slot) else { return };
        read.part = Part::Head { payload_right };
        let read = *read;
        self.submit_read(slot, read);
    }

    /// Checks the head of a record against the index and itself.
    fn verify_head(&mut self, slot: SlotId, entry: &Entry, memory: &dyn Memory) -> Result<(), Miss> {
        let (shape, head) = (entry.shape(), self.head_at(slot, entry));
        let mut fixed = [0; RECORD_HEADER_BYTES];
        memory.read(Span::staging(head, RECORD_HEADER_BYTES as u32), &mut fixed);
        let header = RecordHeader::decode(&fixed, self.uuid, self.config.max_object_bytes);
        let Ok(header) = header else { return Err(Miss::Damaged) };
        if header.offset != entry.offset() {
            return Err(Miss::Misdirected);
        }
        if header.sequence != entry.sequence() || header.digest != entry.digest() || header.kind != Kind::Object {
            return Err(Miss::Stale);
        }
        let same = header.shape == shape && header.away == entry.away() && header.payload_checksum == entry.checksum();
        if !same || header.chunk_bytes != self.config.chunk_bytes {
            return Err(Miss::Damaged);
        }
        let body_bytes = shape.head_bytes(self.config.chunk_bytes) as usize - RECORD_HEADER_BYTES;
        self.scratch.resize(body_bytes, 0);
        let body = Span::staging(head + RECORD_HEADER_BYTES as u64, body_bytes as u32);
        memory.read(body, &mut self.scratch);
        if frame_checksum(&self.scratch) == header.body_checksum { Ok(()) } else { Err(Miss::Damaged) }
    }

    /// An object that could not be read whole is not given again in this incarnation. A restart may find it once more,
    /// so from now on a removal of what the index does not know is written.
    fn quarantine(&mut self, entry: &Entry, miss: Miss) {
        self.forget_record(entry.digest(), entry.sequence());
        self.untracked.note(entry.digest());
        *match miss {
            Miss::Fault(_) => &mut self.stats.read_faults,
            Miss::Damaged => &mut self.stats.damaged,
            Miss::Stale => &mut self.stats.stale,
            Miss::Misdirected => &mut self.stats.misdirected,
        } += 1;
    }

    /// Whether a record of this sequence is still the one that counts.
    pub(super) fn is_current(&self, digest: Digest, sequence: u64) -> bool {
        self.index.find(digest).is_some_and(|entry| entry.sequence() == sequence)
    }
}

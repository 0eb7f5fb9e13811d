//! Gets: the whole record is read and everything about it checked before it counts.
//!
//! A packed record is read into a buffer of its own and copied; of an extent, the head and the last incomplete block go
//! to the buffer, the whole blocks straight to their destination.

use kvplane_proto::checksum::frame_checksum;
use kvplane_proto::digest::Digest;

use super::Tier;
use crate::errors::{GetError, Reason};
use crate::format::{Kind, RECORD_HEADER_BYTES, RecordHeader, word64};
use crate::index::Entry;
use crate::memory::{Memory, Span, sum};
use crate::ops::{Action, Fault, Job, Owner, Pieces, Priority};
use crate::slots::SlotId;
use crate::types::{Event, Get, Miss, Token};

/// Whom a read is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    Get(Token),
    /// A record that is written again.
    Move(u64),
    /// A record that is only checked.
    Scrub,
}

/// A read under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    pub(super) entry: Entry,
    pub(super) destination: Span,
    pub(super) priority: Priority,
    pub(super) purpose: Purpose,
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
        self.begin_read(Read { entry, destination: at, priority: get.priority, purpose });
        Ok(())
    }

    /// Begins a read for which a place is free.
    pub(super) fn begin_read(&mut self, read: Read) -> SlotId {
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

    fn submit_read(&mut self, slot: SlotId, read: Read) {
        let (shape, offset, block) = (read.entry.shape(), read.entry.offset(), self.block());
        let buffer = self.read_buffer(slot);
        let start = offset - offset % block;
        let pieces = if shape.extent {
            let head = shape.payload_at(self.config.chunk_bytes, self.config.block_bytes) as u32;
            let whole = shape.payload_bytes - shape.payload_bytes % self.config.block_bytes;
            let tail = if whole == shape.payload_bytes { 0 } else { self.config.block_bytes };
            let (head, tail) = (Span::staging(buffer, head), Span::staging(buffer + u64::from(head), tail));
            Pieces::of(&[head, read.destination.part(0, whole), tail])
        } else {
            let end = (offset + self.record_bytes(shape)).next_multiple_of(block);
            Pieces::of(&[Span::staging(buffer, (end - start) as u32)])
        };
        let (owner, action, priority) = (Owner::Read(slot), Action::Read, read.priority);
        self.jobs.submit(Job { owner, action, offset: start, pieces, priority });
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
        let verified = result.map_err(Miss::Fault).and_then(|()| self.verify(slot, &read, memory));
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

    /// Checks a record that was read against the index and itself; the payload is in its destination afterwards.
    fn verify(&mut self, slot: SlotId, read: &Read, memory: &mut dyn Memory) -> Result<u64, Miss> {
        let (entry, shape) = (&read.entry, read.entry.shape());
        let head = self.head_at(slot, entry);
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
        if header.shape != shape || header.chunk_bytes != self.config.chunk_bytes {
            return Err(Miss::Damaged);
        }
        let body_bytes = shape.head_bytes(self.config.chunk_bytes) as usize - RECORD_HEADER_BYTES;
        self.scratch.resize(body_bytes, 0);
        let body = Span::staging(head + RECORD_HEADER_BYTES as u64, body_bytes as u32);
        memory.read(body, &mut self.scratch);
        if frame_checksum(&self.scratch) != header.body_checksum {
            return Err(Miss::Damaged);
        }
        self.verify_payload(slot, read, &header, memory)
    }

    fn verify_payload(
        &self,
        slot: SlotId,
        read: &Read,
        header: &RecordHeader,
        memory: &mut dyn Memory,
    ) -> Result<u64, Miss> {
        let (shape, to) = (header.shape, read.destination);
        let at = shape.payload_at(self.config.chunk_bytes, self.config.block_bytes);
        let rest = shape.payload_bytes % self.config.block_bytes;
        if !shape.extent {
            // What is checked is what the reader gets: a copy first, then its checksum.
            memory.copy(Span::staging(self.head_at(slot, &read.entry) + at, shape.payload_bytes), to);
        } else if rest > 0 {
            let tail = Span::staging(self.read_buffer(slot) + at, rest);
            memory.copy(tail, to.part(shape.payload_bytes - rest, rest));
        }
        let chunks = shape.chunks(self.config.chunk_bytes);
        if chunks == 0 {
            return if sum(memory, to) == header.payload_checksum {
                Ok(header.payload_checksum)
            } else {
                Err(Miss::Damaged)
            };
        }
        for chunk in 0..chunks {
            let at = chunk * self.config.chunk_bytes;
            let span = to.part(at, self.config.chunk_bytes.min(shape.payload_bytes - at));
            if sum(memory, span) != word64(&self.scratch, 8 * chunk as usize) {
                return Err(Miss::Damaged);
            }
        }
        Ok(header.payload_checksum)
    }

    /// An object that could not be read whole is not given again in this life. A restart may find it once more, so from
    /// now on a removal of what the index does not know is written.
    fn quarantine(&mut self, entry: &Entry, miss: Miss) {
        self.forget_record(entry.digest(), entry.sequence());
        self.untracked = true;
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

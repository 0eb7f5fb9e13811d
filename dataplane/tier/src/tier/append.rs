//! Puts: a record at the end of the log.

use kvplane_proto::checksum::{frame_checksum, joined_payload_checksum};
use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;

use super::Tier;
use super::groups::{Heads, Need, NoRoom, TOMBSTONE_BYTES, Tombstone, Waiter};
use crate::errors::{PutError, Reason};
use crate::format::{AWAY_MOST, FooterEntry, Kind, RECORD_HEADER_BYTES, RecordHeader, Shape, UNIT_BYTES};
use crate::index::Entry;
use crate::memory::{Memory, Span, sum, zero};
use crate::types::{Ack, Put, PutReceipt};

/// A record to be appended, its room made and its checksums in `Tier::sums`.
pub(super) struct Record<'a> {
    pub(super) digest: Digest,
    pub(super) version: Version,
    pub(super) key: &'a [u8],
    pub(super) payload: Span,
    pub(super) shape: Shape,
    pub(super) checksum: u64,
    pub(super) pinned: bool,
}

impl Tier {
    /// Takes an object. [`crate::Event::Stored`] or [`crate::Event::StoreFailed`] follows, and
    /// [`crate::Event::Released`] where the payload is lent. From now on gets give this object, and what was promised
    /// of an earlier one of the digest is void.
    ///
    /// # Errors
    /// See [`PutError`]; nothing happened.
    pub fn put(&mut self, now_ns: u64, put: &Put<'_>, memory: &mut dyn Memory) -> Result<PutReceipt, PutError> {
        let shape = self.check_put(put)?;
        let known = self.index.find(put.digest).copied();
        if known.is_none() && self.index.is_full() {
            self.stats.put_refusals += 1;
            return Err(PutError::Full);
        }
        if known.is_none() {
            self.fill_crowded_segment(memory);
        }
        // What is replaced is struck out first: if the new record is damaged one day, the old one does not come back.
        // One of the same version may, and must: the object is not lost if its new record is.
        let replaced = known.filter(|entry| !entry.is_removed() && entry.version() != put.version);
        let need = self.need(shape, replaced.is_some());
        self.make_room(now_ns, need, false, memory).map_err(|no_room| {
            self.stats.put_refusals += 1;
            if no_room == NoRoom::Full { PutError::Full } else { PutError::Busy }
        })?;
        // Only now: who finds no room asks again, and sums take longer than everything else here.
        let computed = self.sum_chunks(put.payload, memory);
        if let Some(stated) = put.checksum.filter(|stated| *stated != computed) {
            self.stats.bad_payloads += 1;
            return Err(PutError::Checksum { stated, computed });
        }
        if let Some(entry) = replaced {
            self.append_tombstone(put.digest, entry.version(), None, memory);
        }
        let Put { digest, version, key, payload, pinned, .. } = *put;
        let record = Record { digest, version, key, payload, shape, checksum: computed, pinned };
        let lent = self.is_lent(shape);
        let waiter = Waiter::Put { token: put.token, ack: put.ack, lent };
        let sequence = self.append(&record, waiter, memory);
        self.strikes.put(digest, replaced.is_some());
        self.waiters += 1;
        self.stats.puts += 1;
        self.stats.put_bytes += u64::from(payload.bytes);
        Ok(PutReceipt { sequence, lent })
    }

    fn check_put(&self, put: &Put<'_>) -> Result<Shape, PutError> {
        if let Some(reason) = self.unavailable() {
            return Err(PutError::Unavailable(reason));
        }
        let (bytes, align) = (put.payload.bytes, self.config.memory_align_bytes);
        if bytes == 0 {
            return Err(PutError::Empty);
        }
        if bytes > self.config.max_object_bytes {
            return Err(PutError::TooLarge { bytes, limit_bytes: self.config.max_object_bytes });
        }
        if put.key.len() > usize::from(self.config.max_key_bytes) {
            return Err(PutError::KeyTooLong { bytes: put.key.len(), limit_bytes: self.config.max_key_bytes });
        }
        let extent = self.config.has_blocks_of_its_own(bytes);
        let (key_bytes, names_parts, copied) = (put.key.len() as u16, put.names_parts, put.copied);
        let shape = Shape { payload_bytes: bytes, key_bytes, extent, names_parts, copied };
        if self.is_lent(shape) && !put.payload.offset.is_multiple_of(u64::from(align)) {
            return Err(PutError::Unaligned { offset: put.payload.offset, align_bytes: align });
        }
        if !self.is_open() || self.waiters == self.config.max_waiters || self.is_clogged() {
            return Err(PutError::Busy);
        }
        Ok(shape)
    }

    /// Why nothing can be written, for good.
    pub(super) const fn unavailable(&self) -> Option<Reason> {
        self.degraded
    }

    /// Whether the payload of such a record goes to the device from where it is.
    const fn is_lent(&self, shape: Shape) -> bool {
        shape.payload_bytes >= self.config.extent_bytes
    }

    /// What a record of this shape needs, with a tombstone before it or not.
    pub(super) const fn need(&self, shape: Shape, tombstone: bool) -> Need {
        let most = shape.most_bytes(self.config.chunk_bytes, self.config.block_bytes);
        let mut need = Need { device_bytes: most, buffer_bytes: most, entries: 1, tombstones: 0 };
        // Room for what is copied: of a payload that is lent the last incomplete block.
        if self.is_lent(shape) {
            need.buffer_bytes -= shape.payload_room(self.config.block_bytes) - self.block();
        }
        if tombstone {
            let bytes = if shape.extent { self.block() } else { TOMBSTONE_BYTES };
            need.device_bytes += bytes;
            need.buffer_bytes += bytes;
            need.entries += 1;
            need.tombstones += 1;
        }
        need
    }

    /// Computes the checksum of each chunk into `sums`, where there are several, and returns that of the whole.
    pub(super) fn sum_chunks(&mut self, payload: Span, memory: &dyn Memory) -> u64 {
        self.sums.clear();
        let chunk = self.config.chunk_bytes;
        if payload.bytes <= chunk {
            return sum(memory, payload);
        }
        let (mut at, mut whole) = (0, 0);
        while at < payload.bytes {
            let bytes = chunk.min(payload.bytes - at);
            let part = sum(memory, payload.part(at, bytes));
            whole = if at == 0 { part } else { joined_payload_checksum(whole, part, u64::from(bytes)) };
            self.sums.push(part);
            at += bytes;
        }
        whole
    }

    /// Appends a record for which there is room; returns its sequence.
    pub(super) fn append(&mut self, record: &Record<'_>, waiter: Waiter, memory: &mut dyn Memory) -> u64 {
        let shape = record.shape;
        let sequence = self.take_sequence();
        let (head, offset, away) = self.take_head(shape, memory);
        let header = self.header(Kind::Object, record.digest, record.version, sequence, shape);
        let mut body = core::mem::take(&mut self.scratch);
        body.clear();
        self.sums.iter().for_each(|sum| body.extend_from_slice(&sum.to_le_bytes()));
        body.extend_from_slice(record.key);
        let header = RecordHeader {
            pinned: record.pinned,
            payload_checksum: record.checksum,
            body_checksum: frame_checksum(&body),
            offset,
            away,
            ..header
        };
        memory.write(&header.encode(self.uuid), head.part(0, RECORD_HEADER_BYTES as u32));
        memory.write(&body, head.part(RECORD_HEADER_BYTES as u32, body.len() as u32));
        self.scratch = body;
        self.write_payload(shape, record.payload, memory);
        let listed = self.note(&header, Some(waiter));
        let placed = self.place(Entry::listed(&listed, self.segment_at(self.segment_of(offset))));
        assert!(placed, "the index has room: it was looked at before");
        sequence
    }

    /// Takes room for a record's head: where it is in the staging area and on the device, and how many blocks lie
    /// between it and its payload, which is to be appended next. Heads of extents go where those before left room.
    fn take_head(&mut self, shape: Shape, memory: &mut dyn Memory) -> (Span, u64, u8) {
        let bytes = shape.head_bytes(self.config.chunk_bytes) as u32;
        let group = self.log.filling().expect("room was made in an open group");
        let end = group.offset + group.bytes;
        if !shape.extent {
            return (self.take_buffer(bytes), end, 0);
        }
        let (block, heads) = (self.block(), self.log.filling().map(|group| group.heads).unwrap_or_default());
        let next = (heads.offset + u64::from(bytes)).next_multiple_of(block);
        let away = end.next_multiple_of(block).saturating_sub(next) / block;
        if bytes <= heads.bytes && away <= u64::from(AWAY_MOST) {
            self.pad(memory);
            self.leave_heads(heads, bytes);
            return (Span::staging(heads.staging, bytes), heads.offset, away as u8);
        }
        self.pad(memory);
        let span = self.take_buffer(bytes.next_multiple_of(self.config.block_bytes));
        zero(memory, span.offset, span.bytes);
        let offset = end.next_multiple_of(block);
        self.leave_heads(Heads { staging: span.offset, offset, bytes: span.bytes }, bytes);
        (span.part(0, bytes), offset, 0)
    }

    /// Notes what is left for heads after one of so many bytes.
    fn leave_heads(&mut self, heads: Heads, bytes: u32) {
        let taken = bytes.next_multiple_of(UNIT_BYTES as u32).min(heads.bytes);
        let Some(group) = self.log.filling() else { return };
        group.heads = Heads {
            staging: heads.staging + u64::from(taken),
            offset: heads.offset + u64::from(taken),
            bytes: heads.bytes - taken,
        };
    }

    fn write_payload(&mut self, shape: Shape, payload: Span, memory: &mut dyn Memory) {
        let whole = if self.is_lent(shape) { payload.bytes - payload.bytes % self.config.block_bytes } else { 0 };
        self.attach(payload.part(0, whole));
        let rest = payload.bytes - whole;
        // A packed record ends at a unit, head and payload together: the group is as long as its records.
        let unit = if shape.extent { self.block() } else { UNIT_BYTES };
        let end = self.log.filling().map_or(0, |group| group.bytes) + u64::from(rest);
        let padded = rest + (end.next_multiple_of(unit) - end) as u32;
        if padded > 0 {
            let tail = self.take_buffer(padded);
            memory.copy(payload.part(whole, rest), tail.part(0, rest));
            zero(memory, tail.offset + u64::from(rest), padded - rest);
        }
    }

    /// Appends a tombstone for which there is room. The index is the caller's.
    pub(super) fn append_tombstone(
        &mut self,
        digest: Digest,
        version: Version,
        waiter: Option<Waiter>,
        memory: &mut dyn Memory,
    ) -> u64 {
        let tombstone = Tombstone { digest, version, sequence: self.take_sequence() };
        let header = self.write_tombstone(&tombstone, false, memory);
        self.note(&header, waiter);
        if let Some(open) = &mut self.log.open {
            open.tombstones += 1;
        }
        if let Some(group) = self.log.filling() {
            group.tombstones.push(tombstone);
        }
        self.stats.tombstones += 1;
        self.generations.tombstone(tombstone.sequence);
        self.untracked.removed(tombstone.sequence, digest);
        tombstone.sequence
    }

    pub(super) fn write_tombstone(
        &mut self,
        tombstone: &Tombstone,
        twin: bool,
        memory: &mut dyn Memory,
    ) -> RecordHeader {
        let shape = Shape { payload_bytes: 0, key_bytes: 0, extent: false, names_parts: false, copied: false };
        let header = self.header(Kind::Tombstone, tombstone.digest, tombstone.version, tombstone.sequence, shape);
        let header = RecordHeader { twin, ..header };
        let span = self.take_buffer(TOMBSTONE_BYTES as u32);
        memory.write(&header.encode(self.uuid), span.part(0, RECORD_HEADER_BYTES as u32));
        zero(memory, span.offset + RECORD_HEADER_BYTES as u64, span.bytes - RECORD_HEADER_BYTES as u32);
        header
    }

    fn header(&mut self, kind: Kind, digest: Digest, version: Version, sequence: u64, shape: Shape) -> RecordHeader {
        let open = self.log.open.as_mut().expect("room was made in an open segment");
        let (segment, end) = (open.segment, open.end);
        let generation = self.segments[segment].generation;
        let (durable_sequence, durable_tombstones) = self.flushes.durable(generation);
        open.durable_sequence = durable_sequence;
        RecordHeader {
            kind,
            shape,
            pinned: false,
            twin: false,
            digest,
            version,
            sequence,
            generation,
            offset: self.segment_at(segment) + end,
            payload_checksum: 0,
            durable_sequence,
            durable_tombstones,
            oldest_live: self.generations.durable_oldest_live(),
            away: 0,
            chunk_bytes: self.config.chunk_bytes,
            body_checksum: frame_checksum(&[]),
        }
    }

    /// Enters a record into its segment's list and its group's.
    fn note(&mut self, header: &RecordHeader, waiter: Option<Waiter>) -> FooterEntry {
        let offset = header.offset;
        let start = self.segment_at(self.segment_of(offset));
        let listed = header.listed(((offset - start) / UNIT_BYTES) as u32);
        if let Some(open) = &mut self.log.open {
            open.entries.push(listed);
        }
        let Some(group) = self.log.filling() else { return listed };
        group.last_sequence = header.sequence;
        let Some(waiter) = waiter else { return listed };
        group.waiters.push(waiter);
        if let Waiter::Put { ack: Ack::Durable, .. } | Waiter::Remove { ack: Ack::Durable, .. } = waiter {
            group.wants_durable = true;
        }
        listed
    }
}

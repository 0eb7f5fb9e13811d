//! Puts: a record at the end of the log.

use kvplane_proto::checksum::{frame_checksum, joined_payload_checksum};
use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;

use super::Tier;
use super::groups::{Need, NoRoom, TOMBSTONE_BYTES, Tombstone, Waiter};
use crate::errors::{PutError, Reason};
use crate::format::{FooterEntry, Kind, RECORD_HEADER_BYTES, RecordHeader, Shape, UNIT_BYTES};
use crate::index::Entry;
use crate::memory::{Memory, Span, sum, zero};
use crate::types::{Accepted, Ack, Put};

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
    pub fn put(&mut self, now_ns: u64, put: &Put<'_>, memory: &mut dyn Memory) -> Result<Accepted, PutError> {
        let shape = self.check_put(put)?;
        let known = self.index.find(put.digest).copied();
        if known.is_none() && self.index.is_full() {
            self.stats.put_refusals += 1;
            return Err(PutError::Full);
        }
        let computed = self.sum_chunks(put.payload, memory);
        if let Some(stated) = put.checksum.filter(|stated| *stated != computed) {
            self.stats.bad_payloads += 1;
            return Err(PutError::Checksum { stated, computed });
        }
        // What is replaced is struck out first: if the new record is damaged one day, the old one does not come back.
        let replaced = known.filter(|entry| !entry.is_removed());
        let need = self.need(shape, replaced.is_some());
        self.make_room(now_ns, need, false, memory).map_err(|no_room| {
            self.stats.put_refusals += 1;
            if no_room == NoRoom::Full { PutError::Full } else { PutError::Busy }
        })?;
        if let Some(entry) = replaced {
            self.append_tombstone(put.digest, entry.version(), None, memory);
        }
        let Put { digest, version, key, payload, pinned, .. } = *put;
        let record = Record { digest, version, key, payload, shape, checksum: computed, pinned };
        let waiter = Waiter::Put { token: put.token, ack: put.ack, lent: shape.extent };
        let sequence = self.append(&record, waiter, memory);
        self.waiters += 1;
        self.stats.puts += 1;
        self.stats.put_bytes += u64::from(payload.bytes);
        Ok(Accepted { sequence, lent: shape.extent })
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
        let extent = bytes >= self.config.extent_bytes;
        if extent && !put.payload.offset.is_multiple_of(u64::from(align)) {
            return Err(PutError::Unaligned { offset: put.payload.offset, align_bytes: align });
        }
        if !self.is_open() || self.waiters == self.config.max_waiters || self.is_clogged() {
            return Err(PutError::Busy);
        }
        Ok(Shape { payload_bytes: bytes, key_bytes: put.key.len() as u16, extent })
    }

    /// Why nothing can be written, for good.
    pub(super) const fn unavailable(&self) -> Option<Reason> {
        self.degraded
    }

    /// What a record of this shape needs, with a tombstone before it or not.
    pub(super) const fn need(&self, shape: Shape, tombstone: bool) -> Need {
        let mut need = Need { device_bytes: self.record_bytes(shape), buffer_bytes: 0, entries: 1, tombstones: 0 };
        need.buffer_bytes = if shape.extent {
            shape.payload_at(self.config.chunk_bytes, self.config.block_bytes) + self.block()
        } else {
            need.device_bytes
        };
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
        if shape.extent {
            self.pad(memory);
        }
        let sequence = self.take_sequence();
        let header = self.header(Kind::Object, record.digest, record.version, sequence, shape);
        let mut body = core::mem::take(&mut self.scratch);
        body.clear();
        self.sums.iter().for_each(|sum| body.extend_from_slice(&sum.to_le_bytes()));
        body.extend_from_slice(record.key);
        let header = RecordHeader {
            pinned: record.pinned,
            payload_checksum: record.checksum,
            body_checksum: frame_checksum(&body),
            ..header
        };
        self.write_record(&header, &body, record.payload, memory);
        self.scratch = body;
        self.note(&header, Some(waiter));
        let entry = Entry::new(Kind::Object, record.digest, record.version, sequence);
        let placed = self.place(entry.at(header.offset, shape, record.pinned));
        assert!(placed, "the index has room: it was looked at before");
        sequence
    }

    fn write_record(&mut self, header: &RecordHeader, body: &[u8], payload: Span, memory: &mut dyn Memory) {
        let shape = header.shape;
        let fixed = header.encode(self.uuid);
        let payload_at = shape.payload_at(self.config.chunk_bytes, self.config.block_bytes) as u32;
        let head = self.take_buffer(payload_at);
        memory.write(&fixed, head.part(0, RECORD_HEADER_BYTES as u32));
        memory.write(body, head.part(RECORD_HEADER_BYTES as u32, body.len() as u32));
        let written = RECORD_HEADER_BYTES as u32 + body.len() as u32;
        zero(memory, head.offset + u64::from(written), payload_at - written);
        let whole = if shape.extent { payload.bytes - payload.bytes % self.config.block_bytes } else { 0 };
        self.attach(payload.part(0, whole));
        let rest = payload.bytes - whole;
        let unit = if shape.extent { self.block() } else { UNIT_BYTES };
        let padded = u64::from(payload_at + payload.bytes).next_multiple_of(unit) as u32 - payload_at - whole;
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
        self.last_tombstone = tombstone.sequence;
        tombstone.sequence
    }

    pub(super) fn write_tombstone(
        &mut self,
        tombstone: &Tombstone,
        twin: bool,
        memory: &mut dyn Memory,
    ) -> RecordHeader {
        let shape = Shape { payload_bytes: 0, key_bytes: 0, extent: false };
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
            oldest_live: self.durable_oldest_live,
            chunk_bytes: self.config.chunk_bytes,
            body_checksum: frame_checksum(&[]),
        }
    }

    /// Enters a record into its segment's list and its group's.
    fn note(&mut self, header: &RecordHeader, waiter: Option<Waiter>) {
        let offset = header.offset;
        let start = self.segment_at(self.segment_of(offset));
        if let Some(open) = &mut self.log.open {
            open.entries.push(FooterEntry {
                kind: header.kind,
                shape: header.shape,
                pinned: header.pinned,
                digest: header.digest,
                version: header.version,
                sequence: header.sequence,
                unit: ((offset - start) / UNIT_BYTES) as u32,
            });
        }
        let Some(group) = self.log.filling() else { return };
        group.last_sequence = header.sequence;
        let Some(waiter) = waiter else { return };
        group.waiters.push(waiter);
        if let Waiter::Put { ack: Ack::Durable, .. } | Waiter::Remove { ack: Ack::Durable, .. } = waiter {
            group.wants_durable = true;
        }
    }
}

//! Appending of records: room for head and payload in the open group, and the header in front of them.

use kvplane_proto::checksum::frame_checksum;
use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::narrowing::{length_u32, to_u8, to_u32};

use super::Writer;
use crate::contents::Contents;
use crate::device::Device;
use crate::format::{AWAY_MOST, FooterEntry, Kind, RECORD_HEADER_BYTES, RecordHeader, Shape, UNIT_BYTES};
use crate::log::groups::{Heads, Tombstone, Waiter};
use crate::log::room::{TOMBSTONE_BYTES, is_lent};
use crate::memory::{Memory, Span, zero};

/// Record to be appended, for which there is room.
pub(crate) struct Record<'a> {
    pub(crate) digest: Digest,
    pub(crate) version: Version,
    pub(crate) key: &'a [u8],
    /// Number of its tenant.
    pub(crate) tenant: u32,
    pub(crate) payload: Span,
    pub(crate) shape: Shape,
    /// Checksum of the whole payload, and of its chunks if there are several.
    pub(crate) checksum: u64,
    pub(crate) sums: &'a [u64],
    pub(crate) pinned: bool,
    pub(crate) hits: u8,
}

impl Writer {
    /// Appends a record for which there is room, and adds it to the index; returns its sequence.
    pub(crate) fn append(
        &mut self,
        record: &Record<'_>,
        waiter: Waiter,
        device: &Device,
        contents: &mut Contents,
        memory: &mut dyn Memory,
    ) -> u64 {
        let shape = record.shape;
        let sequence = contents.sequences.take();
        let (head, offset, away) = self.take_head(shape, device, memory);
        let header = self.header(sequence, shape, device, contents);
        self.body.clear();
        record.sums.iter().for_each(|sum| self.body.extend_from_slice(&sum.to_le_bytes()));
        self.body.extend_from_slice(record.key);
        let header = RecordHeader {
            digest: record.digest,
            version: record.version,
            pinned: record.pinned,
            payload_checksum: record.checksum,
            body_checksum: frame_checksum(&self.body),
            offset,
            away,
            ..header
        };
        memory.write(&header.encode(device.uuid()), head.part(0, length_u32(RECORD_HEADER_BYTES)));
        memory.write(&self.body, head.part(length_u32(RECORD_HEADER_BYTES), length_u32(self.body.len())));
        self.write_payload(shape, record.payload, device, memory);
        let listed = self.enter(&header, Some(record.tenant), Some(waiter), device);
        let mut entry = contents.listed(&listed, device.segment_of(offset), device);
        (0..record.hits).for_each(|_| entry.hit());
        let placed = contents.place(entry, device);
        assert!(placed, "the index has room: it was checked before");
        sequence
    }

    /// Takes room for a record's head. Returns its memory in the staging area, its offset on the device, and the number
    /// of blocks between the head and its payload, which the caller appends next. Heads of extents share blocks with
    /// the heads before them if they fit.
    fn take_head(&mut self, shape: Shape, device: &Device, memory: &mut dyn Memory) -> (Span, u64, u8) {
        let (config, block) = (device.config(), device.block());
        let bytes = to_u32(shape.head_bytes(config.chunk_bytes));
        let group = self.groups.filling().expect("room was made in an open group");
        let (end, heads) = (group.end(), group.heads);
        if !shape.extent {
            return (self.take_buffer(bytes, device), end, 0);
        }
        let next = (heads.offset + u64::from(bytes)).next_multiple_of(block);
        let away = end.next_multiple_of(block).saturating_sub(next) / block;
        if bytes <= heads.bytes && away <= u64::from(AWAY_MOST) {
            self.pad(device, memory);
            self.leave_heads(heads, bytes);
            return (Span::staging(heads.staging, bytes), heads.offset, to_u8(away));
        }
        self.pad(device, memory);
        let span = self.take_buffer(bytes.next_multiple_of(config.block_bytes), device);
        zero(memory, span.offset, span.bytes);
        let offset = end.next_multiple_of(block);
        self.leave_heads(Heads { staging: span.offset, offset, bytes: span.bytes }, bytes);
        (span.part(0, bytes), offset, 0)
    }

    /// Notes the room that is left for heads after a head of `bytes`.
    fn leave_heads(&mut self, heads: Heads, bytes: u32) {
        if let Some(group) = self.groups.filling_mut() {
            group.heads = heads.after(bytes);
        }
    }

    fn write_payload(&mut self, shape: Shape, payload: Span, device: &Device, memory: &mut dyn Memory) {
        let whole =
            if is_lent(shape, device) { payload.bytes - payload.bytes % device.config().block_bytes } else { 0 };
        self.attach(payload.part(0, whole), device);
        let rest = payload.bytes - whole;
        // A packed record ends at a unit, head and payload together: the group is as long as its records.
        let unit = if shape.extent { device.block() } else { UNIT_BYTES };
        let end = self.groups.filling().map_or(0, |group| group.bytes()) + u64::from(rest);
        let padded = rest + to_u32(end.next_multiple_of(unit) - end);
        if padded > 0 {
            let tail = self.take_buffer(padded, device);
            memory.copy(payload.part(whole, rest), tail.part(0, rest));
            zero(memory, tail.offset + u64::from(rest), padded - rest);
        }
    }

    /// Appends a tombstone for which there is room. The caller updates the index.
    pub(crate) fn append_tombstone(
        &mut self,
        digest: Digest,
        version: Version,
        waiter: Option<Waiter>,
        device: &Device,
        contents: &mut Contents,
        memory: &mut dyn Memory,
    ) -> u64 {
        let tombstone = Tombstone { digest, version, sequence: contents.sequences.take() };
        let header = self.write_tombstone(&tombstone, false, device, contents, memory);
        self.enter(&header, None, waiter, device);
        if let Some(open) = &mut self.open {
            open.tombstones += 1;
        }
        if let Some(group) = self.groups.filling_mut() {
            group.enter_tombstone(tombstone);
        }
        self.counts.tombstones += 1;
        contents.generations.tombstone(tombstone.sequence);
        contents.untracked.removed(tombstone.sequence, digest);
        tombstone.sequence
    }

    pub(super) fn write_tombstone(
        &mut self,
        tombstone: &Tombstone,
        twin: bool,
        device: &Device,
        contents: &Contents,
        memory: &mut dyn Memory,
    ) -> RecordHeader {
        let shape = Shape { payload_bytes: 0, key_bytes: 0, extent: false, names_parts: false, copied: false };
        let Tombstone { digest, version, sequence } = *tombstone;
        let header = self.header(sequence, shape, device, contents);
        let header = RecordHeader { kind: Kind::Tombstone, digest, version, twin, ..header };
        let span = self.take_buffer(to_u32(TOMBSTONE_BYTES), device);
        memory.write(&header.encode(device.uuid()), span.part(0, length_u32(RECORD_HEADER_BYTES)));
        zero(memory, span.offset + RECORD_HEADER_BYTES as u64, span.bytes - length_u32(RECORD_HEADER_BYTES));
        header
    }

    /// Returns the header of a record at the end of the open segment; the caller sets digest, offset of the head and
    /// checksums.
    fn header(&mut self, sequence: u64, shape: Shape, device: &Device, contents: &Contents) -> RecordHeader {
        let open = self.open.as_mut().expect("room was made in an open segment");
        let generation = contents.segments[open.segment].generation;
        let (durable_sequence, durable_tombstones) = self.flushes.durable(generation);
        open.durable_sequence = durable_sequence;
        RecordHeader {
            kind: Kind::Object,
            shape,
            pinned: false,
            twin: false,
            digest: Digest(0),
            version: Version(0),
            sequence,
            generation,
            offset: device.segment_at(open.segment) + open.end,
            payload_checksum: 0,
            durable_sequence,
            durable_tombstones,
            oldest_live: contents.generations.durable_oldest_live(),
            away: 0,
            chunk_bytes: device.config().chunk_bytes,
            body_checksum: frame_checksum(&[]),
        }
    }

    /// Adds a record to the lists of its segment and of its group.
    fn enter(
        &mut self,
        header: &RecordHeader,
        tenant: Option<u32>,
        waiter: Option<Waiter>,
        device: &Device,
    ) -> FooterEntry {
        let start = device.segment_at(device.segment_of(header.offset));
        let listed = FooterEntry::of(header, to_u32((header.offset - start) / UNIT_BYTES), tenant);
        if let Some(open) = &mut self.open {
            open.entries.push(listed);
        }
        if let Some(group) = self.groups.filling_mut() {
            group.enter(header.sequence, waiter);
        }
        listed
    }
}

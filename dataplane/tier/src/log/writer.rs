//! End of the log: the open segment, the groups that are being written to it, flushes and seals.
//!
//! Records go to the open group, and the group to the open segment. Groups are written as a whole, several at a time; a
//! segment that is full is sealed. `append.rs` adds records to the open group.

mod append;

pub(crate) use append::Record;

use super::flushes::{Barrier, Flushes};
use super::groups::{EndedGroup, GroupStart, Groups};
use super::room::{Need, NoRoom, segment_room, segment_taken, twins_bytes};
use super::seals::Seals;
use crate::config::Layout;
use crate::contents::{Contents, SegmentEvent, SegmentState};
use crate::device::{Device, Owner};
use crate::format::{FilledNote, FooterEntry, FooterPage, Kind};
use crate::memory::{Memory, Span, zero};
use crate::ops::{Fault, MAX_PIECES};
use kvplane_proto::narrowing::{length_u32, to_u32, to_usize};

/// Segment that takes records.
#[derive(Debug)]
struct OpenSegment {
    segment: u32,
    /// Offset of the next group, or the next record, in bytes from the segment's start.
    end: u64,
    entries: Vec<FooterEntry>,
    tombstones: u32,
    /// Durable sequence that the last record stated.
    durable_sequence: u64,
}

/// Counters of writes, since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WriteCounts {
    /// Tombstones appended, including those of replaced objects.
    pub(crate) tombstones: u64,
    pub(crate) groups: u64,
    /// Bytes of groups.
    pub(crate) bytes: u64,
}

/// Writing end of the log.
#[derive(Debug)]
pub(crate) struct Writer {
    open: Option<OpenSegment>,
    /// Segments that were filled in this incarnation.
    filled: u64,
    pub(crate) groups: Groups,
    pub(crate) seals: Seals,
    pub(crate) flushes: Flushes,
    /// Buffer for the body of the record being appended.
    body: Vec<u8>,
    counts: WriteCounts,
}

impl Writer {
    pub(super) fn new(device: &Device) -> Self {
        let config = device.config();
        Self {
            open: None,
            filled: 0,
            groups: Groups::new(config.groups),
            seals: Seals::new(device),
            flushes: Flushes::default(),
            body: Vec::with_capacity(to_usize(Layout::head_most(config))),
            counts: WriteCounts::default(),
        }
    }

    pub(crate) const fn counts(&self) -> &WriteCounts {
        &self.counts
    }

    /// Returns true if nothing is being written, and no barrier waits for a flush.
    pub(crate) fn is_idle(&self) -> bool {
        self.groups.is_empty() && self.seals.is_empty() && self.flushes.is_idle()
    }

    /// Makes room for a record in the open group, closing groups and segments as needed.
    pub(crate) fn make_room(
        &mut self,
        now_ns: u64,
        need: Need,
        use_reserve: bool,
        device: &mut Device,
        contents: &mut Contents,
        memory: &mut dyn Memory,
    ) -> Result<(), NoRoom> {
        loop {
            if self.open.is_none() {
                self.open_segment(use_reserve, device, contents)?;
            }
            if !self.segment_takes(need, device) {
                self.close_group(device, contents, memory);
                if !self.seals.may_seal() {
                    return Err(NoRoom::Busy);
                }
                self.fill_segment(device, contents);
                continue;
            }
            if self.groups.filling().is_none() {
                self.open_group(now_ns, device, contents)?;
            }
            if self.group_takes(need, device) {
                return Ok(());
            }
            self.close_group(device, contents, memory);
        }
    }

    fn open_segment(&mut self, use_reserve: bool, device: &Device, contents: &mut Contents) -> Result<(), NoRoom> {
        let segments = &mut contents.segments;
        if !use_reserve && !segments.has_free() {
            return Err(NoRoom::Full);
        }
        if self.seals.spare_lists() == 0 {
            return Err(NoRoom::Busy);
        }
        let Some(segment) = segments.open_ready() else {
            return Err(if segments.has_free() { NoRoom::Busy } else { NoRoom::Full });
        };
        let Some(entries) = self.seals.take_list() else { return Err(NoRoom::Busy) };
        contents.generations.opened(segments[segment].generation);
        self.open = Some(OpenSegment { segment, end: device.block(), entries, tombstones: 0, durable_sequence: 0 });
        Ok(())
    }

    fn segment_takes(&self, need: Need, device: &Device) -> bool {
        let Some(open) = &self.open else { return false };
        let (config, block) = (device.config(), device.block());
        let tombstones = self.groups.filling().map_or(0, |group| group.tombstones()) + need.tombstones;
        let entries = length_u32(open.entries.len()) + need.entries;
        let per_page = FooterPage::capacity(config.footer_page_bytes);
        let footer = u64::from(entries.div_ceil(per_page).max(1)) * u64::from(config.footer_page_bytes);
        let end = open.end.next_multiple_of(block) + need.device_bytes.next_multiple_of(block);
        entries <= per_page * config.footer_pages
            && end + twins_bytes(tombstones, block) + footer <= config.segment_bytes
    }

    /// Returns the bytes of all segments that were taken in this incarnation, in bytes of [`segment_room`]. A segment
    /// that was closed early counts as a whole.
    pub(crate) fn log_taken(&self, device: &Device) -> u64 {
        let open = self.open.as_ref().map_or(0, |open| segment_taken(open.end, open.entries.len(), device));
        self.filled * segment_room(device) + open
    }

    /// Returns the most by which a record with this need increases [`Self::log_taken`].
    pub(crate) fn log_cost(&self, need: Need, device: &Device) -> u64 {
        let alone = segment_taken(device.block() + need.device_bytes, 1, device);
        let Some(open) = &self.open else { return alone };
        let (end, entries) = (open.end.next_multiple_of(device.block()), open.entries.len());
        let before = segment_taken(end, entries, device);
        if self.segment_takes(need, device) {
            segment_taken(end + need.device_bytes, entries + 1, device) - before
        } else {
            segment_room(device) - before + alone
        }
    }

    fn group_takes(&self, need: Need, device: &Device) -> bool {
        let Some(group) = self.groups.filling() else { return false };
        let block = device.block();
        let buffered = u64::from(group.buffered()).next_multiple_of(block) + need.buffer_bytes;
        let twins = twins_bytes(group.tombstones() + need.tombstones, block);
        let buffered = buffered.next_multiple_of(block) + twins;
        let is_new = group.bytes() == 0;
        group.pieces().len() + 4 <= MAX_PIECES
            && buffered <= u64::from(device.layout().group_bytes)
            && (is_new || group.bytes() < u64::from(device.config().group_bytes))
    }

    fn open_group(&mut self, now_ns: u64, device: &Device, contents: &mut Contents) -> Result<(), NoRoom> {
        let Some(open) = &self.open else { return Err(NoRoom::Busy) };
        let offset = device.segment_at(open.segment) + open.end;
        let (segment, generation) = (open.segment, contents.segments[open.segment].generation);
        let start = GroupStart { segment, generation, offset, sequence: contents.sequences.next(), now_ns };
        if !self.groups.open(start) {
            return Err(NoRoom::Busy);
        }
        contents.segments.begin_group(open.segment);
        Ok(())
    }

    /// Closes the open group if it is due, or if nothing else is being written. `more_copies`: reclaim is reading
    /// records that are to be appended to the open group.
    pub(crate) fn group_work(
        &mut self,
        now_ns: u64,
        more_copies: bool,
        device: &mut Device,
        contents: &mut Contents,
        memory: &mut dyn Memory,
    ) {
        let Some(group) = self.groups.filling() else { return };
        let config = device.config();
        // No call waits for a group of copies alone: it may wait for more copies, which share its blocks.
        let more = more_copies && group.has_only_copies();
        let due = group.is_due(now_ns, config.group_delay_ns);
        let full = group.bytes() >= u64::from(config.group_bytes);
        if due || group.is_urgent() || full || !more && !self.groups.is_writing() {
            self.close_group(device, contents, memory);
        }
    }

    /// Completes the open group with twins and padding, and submits its write.
    pub(crate) fn close_group(&mut self, device: &mut Device, contents: &mut Contents, memory: &mut dyn Memory) {
        let Some(group) = self.groups.filling_mut() else { return };
        let tombstones = group.take_tombstones();
        if !tombstones.is_empty() {
            self.pad(device, memory);
            for tombstone in &tombstones {
                self.write_tombstone(tombstone, true, device, contents, memory);
            }
        }
        if let Some(group) = self.groups.filling_mut() {
            group.return_tombstones(tombstones);
        }
        self.pad(device, memory);
        let segment = self.groups.filling().map(|group| group.segment());
        let through = self.open.as_ref().map_or(0, |open| open.tombstones);
        let Some(write) = self.groups.close(through, device.config().durable_writes) else { return };
        if write.bytes == 0 {
            // The group is empty; there is nothing to write and no call to acknowledge.
            self.groups.drop_last();
            if let Some(segment) = segment {
                contents.segments.end_group(segment);
            }
            return;
        }
        self.counts.groups += 1;
        self.counts.bytes += write.bytes;
        let owner = Owner::Group(write.number);
        if write.is_durable {
            device.write_durably(owner, write.offset, write.pieces);
        } else {
            device.write(owner, write.offset, write.pieces);
        }
    }

    /// Takes `bytes` of the open group's buffer, which follow the group's current end on the device.
    fn take_buffer(&mut self, bytes: u32, device: &Device) -> Span {
        let group = self.groups.filling_mut().expect("room was made in an open group");
        let span = group.take_buffer(bytes, device.layout());
        self.follow_group(device);
        span
    }

    /// Adds memory to the open group.
    fn attach(&mut self, span: Span, device: &Device) {
        self.groups.filling_mut().expect("room was made in an open group").attach(span);
        self.follow_group(device);
    }

    /// Moves the end of the open segment to the end of the open group.
    fn follow_group(&mut self, device: &Device) {
        if let (Some(open), Some(group)) = (&mut self.open, self.groups.filling()) {
            open.end = group.end() - device.segment_at(group.segment());
        }
    }

    /// Pads the open group with zeros up to the next block.
    fn pad(&mut self, device: &Device, memory: &mut dyn Memory) {
        let Some(group) = self.groups.filling() else { return };
        let bytes = to_u32(group.bytes().next_multiple_of(device.block()) - group.bytes());
        if bytes > 0 {
            let span = self.take_buffer(bytes, device);
            zero(memory, span.offset, bytes);
        }
    }

    /// Closes the open segment early if it holds a large share of an index that is at least half full: if objects are
    /// shorter than the index was sized for, a few segments would hold all of them, and reclaim would evict that many
    /// at once.
    pub(super) fn fill_crowded_segment(
        &mut self,
        device: &mut Device,
        contents: &mut Contents,
        memory: &mut dyn Memory,
    ) {
        let Some(open) = &self.open else { return };
        // The segments that may be full at a time must hold the whole index, with as much to spare.
        let config = device.config();
        let segments = config.segments.saturating_sub(config.free_segments_low).clamp(1, 16);
        let share = config.max_records.div_ceil(segments).saturating_mul(2);
        let crowded = contents.is_running() && contents.index.len() >= config.max_records / 2;
        let next = contents.segments.has_ready() && contents.segments.has_free();
        let is_large = contents.segments[open.segment].live_records >= share;
        if crowded && next && is_large && self.seals.may_seal() {
            self.leave_segment(device, contents, memory);
        }
    }

    /// Closes the open group, and with it the open segment; see [`Self::may_seal`].
    pub(crate) fn leave_segment(&mut self, device: &mut Device, contents: &mut Contents, memory: &mut dyn Memory) {
        self.close_group(device, contents, memory);
        self.fill_segment(device, contents);
    }

    /// Returns true if the open segment may be closed.
    pub(crate) fn may_seal(&self) -> bool {
        self.seals.may_seal()
    }

    /// Closes the open segment for records and begins to seal it.
    fn fill_segment(&mut self, device: &Device, contents: &mut Contents) {
        let Some(open) = self.open.take() else { return };
        self.filled += 1;
        let generation = contents.segments[open.segment].generation;
        let last = open.entries.iter().rev().find(|entry| entry.kind == Kind::Tombstone);
        let last_tombstone = last.map_or(0, |entry| entry.sequence);
        contents.generations.filled(FilledNote { generation, last_tombstone, tombstones: open.tombstones });
        if contents.segments[open.segment].state == SegmentState::Open {
            contents.segments.step(open.segment, SegmentEvent::Fill);
        }
        self.seal(open.segment, open.entries, open.durable_sequence, device, contents);
    }

    /// Begins to seal a segment with these records.
    pub(crate) fn seal(
        &mut self,
        segment: u32,
        entries: Vec<FooterEntry>,
        durable_sequence: u64,
        device: &Device,
        contents: &mut Contents,
    ) {
        self.seals.seal(segment, entries, durable_sequence, device.is_writable(), &mut contents.segments);
    }

    /// Closes a segment after a failed write: it gets no more records and no footer.
    pub(super) fn retire(
        &mut self,
        segment: u32,
        device: &mut Device,
        contents: &mut Contents,
        memory: &mut dyn Memory,
    ) {
        if self.open.as_ref().is_some_and(|open| open.segment == segment) {
            contents.segments.step(segment, SegmentEvent::Fail);
            // The open group still goes to the same segment; its write may succeed.
            self.leave_segment(device, contents, memory);
        }
        self.seals.retire(segment, &mut contents.segments);
    }

    /// Returns the records of a segment that is open or being sealed.
    pub(super) fn entries_of(&self, segment: u32) -> Option<&Vec<FooterEntry>> {
        let open = self.open.as_ref().filter(|open| open.segment == segment).map(|open| &open.entries);
        open.or_else(|| self.seals.entries_of(segment))
    }

    /// Returns true if a list for the records of a scanned segment is free; one is left for puts.
    pub(crate) const fn has_list_for_scan(&self) -> bool {
        let needed = if self.open.is_some() { 1 } else { 2 };
        self.seals.spare_lists() >= needed
    }

    /// Releases a completed group whose waiters were served, and advances the mark up to which the log is written,
    /// which stops before the first group that is not complete.
    pub(super) fn leave_group(&mut self, group: EndedGroup) {
        self.groups.recycle(group);
        while let Some(mark) = self.groups.pop_over() {
            self.flushes.advance(mark);
        }
    }

    /// Handles a page of a footer that was written or has failed; returns the segment after a failure.
    pub(super) fn page_written(
        &mut self,
        result: Result<(), Fault>,
        device: &Device,
        contents: &mut Contents,
    ) -> Option<u32> {
        let (segment, is_sealed) = self.seals.page_written(result, device.config().footer_page_bytes)?;
        if is_sealed {
            contents.segments.step(segment, SegmentEvent::Seal);
            if contents.untracked.gets_footer(segment) {
                self.flushes.after(Barrier::Footer(segment));
            }
        }
        result.is_err().then_some(segment)
    }

    /// Asserts that no list of records is lost or duplicated.
    pub(super) fn check(&self) {
        self.seals.check(usize::from(self.open.is_some()));
    }
}

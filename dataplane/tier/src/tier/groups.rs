//! Groups of records: what is written at once, and the segment that they go to.
//!
//! A group is a contiguous range of the device: packed records and short extents in its buffer, long extents as pieces
//! of their own, padded to the block. Heads of extents share blocks as far as they fit. Where it has tombstones, it
//! ends with a block of their twins, so that no single damaged block brings a
//! removed object back.

use std::collections::VecDeque;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;

use super::Tier;
use crate::format::{FooterEntry, FooterPage, Kind, RECORD_HEADER_BYTES, UNIT_BYTES};
use crate::memory::{Memory, Span, zero};
use crate::ops::{Action, Fault, Job, MAX_PIECES, Owner, Pieces, Priority};
use crate::segments::SegmentEvent;
use crate::types::{Ack, Token};

/// Bytes that a tombstone takes on the device.
pub(super) const TOMBSTONE_BYTES: u64 = (RECORD_HEADER_BYTES as u64).next_multiple_of(UNIT_BYTES);

/// Who waits for a record.
#[derive(Clone, Copy, Debug)]
pub(super) enum Waiter {
    Put {
        token: Token,
        ack: Ack,
        lent: bool,
    },
    Remove {
        token: Token,
        ack: Ack,
    },
    /// A record that is written again.
    Move(u64),
}

/// What is left of the last blocks that were taken for heads of extents.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heads {
    /// In the staging area, and on the device.
    pub(super) staging: u64,
    pub(super) offset: u64,
    pub(super) bytes: u32,
}

/// A tombstone of a group, to be written twice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tombstone {
    pub(super) digest: Digest,
    pub(super) version: Version,
    pub(super) sequence: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GroupState {
    Filling,
    Writing,
    Over,
}

#[derive(Debug)]
pub(super) struct Group {
    pub(super) state: GroupState,
    pub(super) segment: u32,
    /// On the device.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) buffer: u32,
    pub(super) buffered: u32,
    pub(super) pieces: Pieces,
    pub(super) heads: Heads,
    pub(super) since_ns: u64,
    pub(super) first_sequence: u64,
    pub(super) last_sequence: u64,
    pub(super) tombstones: Vec<Tombstone>,
    /// Tombstones of the segment, up to and with this group.
    pub(super) tombstones_through: u32,
    pub(super) waiters: Vec<Waiter>,
    pub(super) wants_durable: bool,
    /// Somebody waits to read it.
    pub(super) is_urgent: bool,
}

/// The segment that records go to.
#[derive(Debug)]
pub(super) struct OpenSegment {
    pub(super) segment: u32,
    /// Where the next group begins, or the next record, in bytes from the segment's start.
    pub(super) end: u64,
    pub(super) entries: Vec<FooterEntry>,
    pub(super) tombstones: u32,
    /// What the last record said was durable.
    pub(super) durable_sequence: u64,
}

/// The end of the log.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) open: Option<OpenSegment>,
    pub(super) groups: VecDeque<Group>,
    pub(super) first_group: u64,
    /// Segments to which nothing more goes, in this incarnation.
    pub(super) filled: u64,
    pub(super) buffers: Vec<u32>,
    /// Lists of groups that are over, for the next ones: appending allocates nothing once they have grown.
    spare_lists: Vec<(Vec<Tombstone>, Vec<Waiter>)>,
}

/// What a record needs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Need {
    pub(super) device_bytes: u64,
    pub(super) buffer_bytes: u64,
    pub(super) entries: u32,
    pub(super) tombstones: u32,
}

/// Why there is no room just now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NoRoom {
    /// Buffers, lists or a prepared segment: soon.
    Busy,
    /// Segments: after reclaim.
    Full,
}

impl Log {
    pub(super) fn new(groups: u32) -> Self {
        Self {
            open: None,
            groups: VecDeque::with_capacity(groups as usize),
            first_group: 0,
            filled: 0,
            buffers: (0..groups).rev().collect(),
            spare_lists: Vec::with_capacity(groups as usize),
        }
    }

    pub(super) fn filling(&mut self) -> Option<&mut Group> {
        self.groups.back_mut().filter(|group| group.state == GroupState::Filling)
    }

    pub(super) fn open_since_ns(&self) -> Option<u64> {
        self.groups.back().filter(|group| group.state == GroupState::Filling).map(|group| group.since_ns)
    }

    /// The group that has this place of the device, if it is not over.
    pub(super) fn unwritten(&mut self, offset: u64) -> Option<&mut Group> {
        let mut groups = self.groups.iter_mut().filter(|group| group.state != GroupState::Over);
        groups.find(|group| group.offset <= offset && offset < group.offset + group.bytes)
    }
}

impl Tier {
    /// Makes sure that the open group takes a record, closing groups and segments as needed.
    pub(super) fn make_room(
        &mut self,
        now_ns: u64,
        need: Need,
        use_reserve: bool,
        memory: &mut dyn Memory,
    ) -> Result<(), NoRoom> {
        loop {
            if self.log.open.is_none() {
                self.open_segment(use_reserve)?;
            }
            if !self.segment_takes(need) {
                self.close_group(memory);
                if !self.may_seal() {
                    return Err(NoRoom::Busy);
                }
                self.fill_segment();
                continue;
            }
            if self.log.filling().is_none() {
                self.open_group(now_ns)?;
            }
            if self.group_takes(need) {
                return Ok(());
            }
            self.close_group(memory);
        }
    }

    fn open_segment(&mut self, use_reserve: bool) -> Result<(), NoRoom> {
        if !use_reserve && self.segments.free.is_empty() {
            return Err(NoRoom::Full);
        }
        if self.spare_entries.is_empty() {
            return Err(NoRoom::Busy);
        }
        let Some(segment) = self.segments.ready.take() else {
            return Err(if self.segments.free.is_empty() { NoRoom::Full } else { NoRoom::Busy });
        };
        let Some(entries) = self.spare_entries.pop() else { return Err(NoRoom::Busy) };
        self.segments.step(segment, SegmentEvent::Open);
        self.segments[segment].visible = true;
        self.generations.opened(self.segments[segment].generation);
        self.segments.filled.push_back(segment);
        let end = self.block();
        self.log.open = Some(OpenSegment { segment, end, entries, tombstones: 0, durable_sequence: 0 });
        Ok(())
    }

    fn segment_takes(&self, need: Need) -> bool {
        let Some(open) = &self.log.open else { return false };
        let pending = self.log.groups.back().filter(|group| group.state == GroupState::Filling);
        let tombstones = pending.map_or(0, |group| group.tombstones.len() as u32) + need.tombstones;
        let entries = open.entries.len() as u32 + need.entries;
        let per_page = FooterPage::capacity(self.config.footer_page_bytes);
        let footer = u64::from(entries.div_ceil(per_page).max(1)) * u64::from(self.config.footer_page_bytes);
        let end = open.end.next_multiple_of(self.block()) + need.device_bytes.next_multiple_of(self.block());
        entries <= per_page * self.config.footer_pages
            && end + self.twins_bytes(tombstones) + footer <= self.config.segment_bytes
    }

    /// What a segment gives back: its bytes without those of the header and the longest footer.
    pub(super) const fn segment_room(&self) -> u64 {
        let footer = self.config.footer_pages as u64 * self.config.footer_page_bytes as u64;
        self.config.segment_bytes - self.block() - footer
    }

    /// How much of a segment is taken, in bytes of [`Self::segment_room`]: of its place or of its footer, whichever is
    /// more. Whole blocks, as what a block has room for yet may never come.
    fn segment_taken(&self, end: u64, entries: usize) -> u64 {
        let listed = u64::from(FooterPage::capacity(self.config.footer_page_bytes) * self.config.footer_pages);
        let room = self.segment_room();
        let of_footer = (entries as u64 * room).div_ceil(listed);
        (end.next_multiple_of(self.block()) - self.block()).max(of_footer).min(room)
    }

    /// How much of all segments was taken in this incarnation, in the same bytes. One that was left early is taken
    /// whole.
    pub(super) fn log_taken(&self) -> u64 {
        let open = self.log.open.as_ref().map_or(0, |open| self.segment_taken(open.end, open.entries.len()));
        self.log.filled * self.segment_room() + open
    }

    /// By how much [`Self::log_taken`] grows at the most with a record that needs this.
    pub(super) fn log_cost(&self, need: Need) -> u64 {
        let alone = self.segment_taken(self.block() + need.device_bytes, 1);
        let Some(open) = &self.log.open else { return alone };
        let (end, entries) = (open.end.next_multiple_of(self.block()), open.entries.len());
        let before = self.segment_taken(end, entries);
        if self.segment_takes(need) {
            self.segment_taken(end + need.device_bytes, entries + 1) - before
        } else {
            self.segment_room() - before + alone
        }
    }

    fn group_takes(&self, need: Need) -> bool {
        let Some(group) = self.log.groups.back() else { return false };
        let tombstones = group.tombstones.len() as u32 + need.tombstones;
        let buffered = u64::from(group.buffered).next_multiple_of(self.block()) + need.buffer_bytes;
        let buffered = buffered.next_multiple_of(self.block()) + self.twins_bytes(tombstones);
        let is_new = group.bytes == 0;
        group.pieces.len() + 4 <= MAX_PIECES
            && buffered <= u64::from(self.layout.group_bytes)
            && (is_new || group.bytes < u64::from(self.config.group_bytes))
    }

    /// Room for the twins of so many tombstones, in blocks of their own.
    fn twins_bytes(&self, tombstones: u32) -> u64 {
        (u64::from(tombstones) * TOMBSTONE_BYTES).next_multiple_of(self.block())
    }

    fn open_group(&mut self, now_ns: u64) -> Result<(), NoRoom> {
        let Some(open) = &self.log.open else { return Err(NoRoom::Busy) };
        let Some(buffer) = self.log.buffers.pop() else { return Err(NoRoom::Busy) };
        let (tombstones, waiters) = self.log.spare_lists.pop().unwrap_or_default();
        self.segments[open.segment].groups += 1;
        self.log.groups.push_back(Group {
            state: GroupState::Filling,
            segment: open.segment,
            offset: self.segment_at(open.segment) + open.end,
            bytes: 0,
            buffer,
            buffered: 0,
            pieces: Pieces::default(),
            heads: Heads::default(),
            since_ns: now_ns,
            first_sequence: self.next_sequence,
            last_sequence: self.next_sequence,
            tombstones,
            tombstones_through: 0,
            waiters,
            wants_durable: false,
            is_urgent: false,
        });
        Ok(())
    }

    /// Closes the open group when it is time to, or when nothing else is being written.
    pub(super) fn group_work(&mut self, now_ns: u64, memory: &mut dyn Memory) {
        let writing = self.log.groups.iter().any(|group| group.state == GroupState::Writing);
        let (most, delay) = (u64::from(self.config.group_bytes), self.config.group_delay_ns);
        let Some(group) = self.log.filling() else { return };
        let due = now_ns >= group.since_ns.saturating_add(delay);
        // Nobody waits for copies alone: they share blocks with the next ones.
        let copies = group.waiters.iter().all(|waiter| matches!(waiter, Waiter::Move(_)));
        let (urgent, bytes) = (group.is_urgent, group.bytes);
        let more = copies && self.more_moves_come();
        if !writing && !more || due || urgent || bytes >= most {
            self.close_group(memory);
        }
    }

    /// Completes the open group with twins and padding and has it written.
    pub(super) fn close_group(&mut self, memory: &mut dyn Memory) {
        let Some(group) = self.log.filling() else { return };
        let tombstones = core::mem::take(&mut group.tombstones);
        if !tombstones.is_empty() {
            self.pad(memory);
            for tombstone in &tombstones {
                self.write_tombstone(tombstone, true, memory);
            }
        }
        if let Some(group) = self.log.filling() {
            group.tombstones = tombstones;
        }
        self.pad(memory);
        let through = self.log.open.as_ref().map_or(0, |open| open.tombstones);
        let durable_writes = self.config.durable_writes;
        let number = self.log.first_group + self.log.groups.len() as u64 - 1;
        let Some(group) = self.log.filling() else { return };
        group.state = GroupState::Writing;
        group.tombstones_through = through;
        group.wants_durable &= durable_writes;
        let (action, offset) = (Action::Write { durable: group.wants_durable }, group.offset);
        let (owner, pieces, bytes) = (Owner::Group(number), group.pieces, group.bytes);
        if bytes == 0 {
            // Nothing came after all; there is nothing to write and nobody to tell.
            self.drop_empty_group();
            return;
        }
        self.stats.groups += 1;
        self.stats.written_bytes += bytes;
        self.jobs.submit(Job { owner, action, offset, pieces, priority: Priority::Commit });
    }

    fn drop_empty_group(&mut self) {
        if let Some(group) = self.log.groups.pop_back() {
            self.segments[group.segment].groups -= 1;
            self.log.buffers.push(group.buffer);
        }
    }

    /// Takes `bytes` of the open group's buffer, which follow on the device what the group has so far.
    pub(super) fn take_buffer(&mut self, bytes: u32) -> Span {
        let (base, each) = (self.layout.groups, u64::from(self.layout.group_bytes));
        let group = self.log.filling().expect("room was made in an open group");
        let at = base + u64::from(group.buffer) * each + u64::from(group.buffered);
        group.buffered += bytes;
        let span = Span::staging(at, bytes);
        self.attach(span);
        span
    }

    /// Adds memory to the open group.
    pub(super) fn attach(&mut self, span: Span) {
        let group = self.log.filling().expect("room was made in an open group");
        group.pieces.push(span);
        group.bytes += u64::from(span.bytes);
        let end = group.offset + group.bytes;
        let segment = group.segment;
        let start = self.segment_at(segment);
        if let Some(open) = &mut self.log.open {
            open.end = end - start;
        }
    }

    /// Zeros up to the next block.
    pub(super) fn pad(&mut self, memory: &mut dyn Memory) {
        let block = self.block();
        let Some(group) = self.log.filling() else { return };
        let bytes = (group.bytes.next_multiple_of(block) - group.bytes) as u32;
        if bytes > 0 {
            let span = self.take_buffer(bytes);
            zero(memory, span.offset, bytes);
        }
    }

    /// A group is written, or not.
    pub(super) fn group_written(
        &mut self,
        now_ns: u64,
        number: u64,
        result: Result<(), Fault>,
        memory: &mut dyn Memory,
    ) {
        let Some(at) = number.checked_sub(self.log.first_group) else { return };
        let Some(group) = self.log.groups.get_mut(at as usize) else { return };
        group.state = GroupState::Over;
        let (segment, durable) = (group.segment, group.wants_durable);
        let mut tombstones = core::mem::take(&mut group.tombstones);
        let mut waiters = core::mem::take(&mut group.waiters);
        self.log.buffers.push(group.buffer);
        self.segments[segment].groups -= 1;
        if let Err(fault) = result {
            self.write_failed(segment, Some(at as usize), fault, memory);
        } else {
            self.flushes.unsynced_since_ns.get_or_insert(now_ns);
        }
        for waiter in waiters.drain(..) {
            self.record_written(waiter, result, durable);
        }
        tombstones.clear();
        self.log.spare_lists.push((tombstones, waiters));
        self.advance_written();
        self.wake_reads();
    }

    /// Groups that are over leave in order, so that "written up to here" has no holes.
    fn advance_written(&mut self) {
        while let Some(group) = self.log.groups.front().filter(|group| group.state == GroupState::Over) {
            let generation = self.segments[group.segment].generation;
            self.flushes.written(group.last_sequence, generation, group.tombstones_through);
            self.log.groups.pop_front();
            self.log.first_group += 1;
        }
    }

    /// The index loses the records of a group that was not written.
    pub(super) fn drop_records(&mut self, group: usize) {
        let Some(group) = self.log.groups.get(group) else { return };
        let (segment, range) = (group.segment, group.first_sequence..=group.last_sequence);
        let open = self.log.open.as_ref().filter(|open| open.segment == segment).map(|open| &open.entries);
        let sealing = || self.seals.iter().find(|seal| seal.segment == segment).map(|seal| &seal.entries);
        let Some(entries) = open.or_else(sealing) else { return self.untracked.note_all() };
        let lost = entries.iter().filter(|entry| range.contains(&entry.sequence));
        let lost: Vec<_> = lost.map(|entry| (entry.kind, entry.digest, entry.sequence)).collect();
        for (kind, digest, sequence) in lost {
            // It may be there all the same; and of a removal, what was to be removed.
            self.untracked.note(digest);
            if kind == Kind::Object {
                self.stats.lost_writes += u64::from(self.forget_record(digest, sequence));
                self.give_back(digest);
            }
        }
    }

    /// Groups that were not given to the device fail, because it takes no more writes.
    pub(super) fn fail_unsubmitted(&mut self, memory: &mut dyn Memory) {
        if self.log.filling().is_some() {
            let number = self.log.first_group + self.log.groups.len() as u64 - 1;
            self.group_written(0, number, Err(Fault::ReadOnly), memory);
        }
    }
}

//! Groups of records: units of writing.
//!
//! A group is a contiguous range of the device: packed records and short extents in its buffer, long extents as pieces
//! of their own, padded to the block. Heads of extents share blocks as far as they fit. A group with tombstones ends
//! with a block of their twins, so that no single damaged block brings a removed object back.

use core::ops::RangeInclusive;
use kvplane_proto::narrowing::{length_u32, to_u32};
use std::collections::VecDeque;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;

use crate::config::Layout;
use crate::format::UNIT_BYTES;
use crate::memory::Span;
use crate::ops::Pieces;
use crate::types::{Ack, Token};

/// Call or move that waits for a record.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Waiter {
    Put {
        token: Token,
        ack: Ack,
        lent: bool,
    },
    Remove {
        token: Token,
        ack: Ack,
    },
    /// A copy of a record by reclaim.
    Move(u64),
}

impl Waiter {
    const fn wants_durable(self) -> bool {
        matches!(self, Self::Put { ack: Ack::Durable, .. } | Self::Remove { ack: Ack::Durable, .. })
    }
}

/// Rest of the last blocks that were taken for heads of extents.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heads {
    /// Offsets in the staging area and on the device.
    pub(super) staging: u64,
    pub(super) offset: u64,
    pub(super) bytes: u32,
}

impl Heads {
    /// Returns the rest after a head of `bytes`.
    pub(super) fn after(self, bytes: u32) -> Self {
        let taken = bytes.next_multiple_of(to_u32(UNIT_BYTES)).min(self.bytes);
        let (staging, offset) = (self.staging + u64::from(taken), self.offset + u64::from(taken));
        Self { staging, offset, bytes: self.bytes - taken }
    }
}

/// Tombstone of a group, to be written twice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tombstone {
    pub(super) digest: Digest,
    pub(super) version: Version,
    pub(super) sequence: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum GroupState {
    Filling,
    Writing,
    Over,
}

/// Position up to which the log is written.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mark {
    pub(super) sequence: u64,
    pub(super) generation: u64,
    /// Tombstones of the segment of this generation.
    pub(super) tombstones: u32,
}

/// Start of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupStart {
    pub(super) segment: u32,
    /// Generation of the segment.
    pub(super) generation: u64,
    /// Offset on the device.
    pub(super) offset: u64,
    pub(super) sequence: u64,
    pub(super) now_ns: u64,
}

/// Group of records.
#[derive(Debug)]
pub(super) struct Group {
    state: GroupState,
    start: GroupStart,
    bytes: u64,
    buffer: u32,
    buffered: u32,
    pieces: Pieces,
    pub(super) heads: Heads,
    last_sequence: u64,
    tombstones: Vec<Tombstone>,
    /// Tombstones of the segment, up to and including this group.
    tombstones_through: u32,
    waiters: Vec<Waiter>,
    wants_durable: bool,
    /// True if a read waits for the group.
    is_urgent: bool,
}

impl Group {
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes of the group's buffer that are taken.
    pub(super) const fn buffered(&self) -> u32 {
        self.buffered
    }

    pub(super) const fn segment(&self) -> u32 {
        self.start.segment
    }

    /// Returns the offset of the group's current end on the device.
    pub(super) const fn end(&self) -> u64 {
        self.start.offset + self.bytes
    }

    pub(super) const fn pieces(&self) -> &Pieces {
        &self.pieces
    }

    pub(super) fn tombstones(&self) -> u32 {
        length_u32(self.tombstones.len())
    }

    pub(super) const fn is_urgent(&self) -> bool {
        self.is_urgent
    }

    /// Returns true if only reclaim waits for the group.
    pub(super) fn has_only_copies(&self) -> bool {
        self.waiters.iter().all(|waiter| matches!(waiter, Waiter::Move(_)))
    }

    pub(super) const fn is_due(&self, now_ns: u64, delay_ns: u64) -> bool {
        now_ns >= self.start.now_ns.saturating_add(delay_ns)
    }

    /// Takes `bytes` of the buffer, which follow the group's current end on the device.
    pub(super) fn take_buffer(&mut self, bytes: u32, layout: &Layout) -> Span {
        let at = layout.groups + u64::from(self.buffer) * u64::from(layout.group_bytes) + u64::from(self.buffered);
        self.buffered += bytes;
        let span = Span::staging(at, bytes);
        self.attach(span);
        span
    }

    /// Adds memory to the group.
    pub(super) fn attach(&mut self, span: Span) {
        self.pieces.push(span);
        self.bytes += u64::from(span.bytes);
    }

    /// Adds the record of this sequence to the group, and the call that waits for it, if any.
    pub(super) fn enter(&mut self, sequence: u64, waiter: Option<Waiter>) {
        self.last_sequence = sequence;
        if let Some(waiter) = waiter {
            self.waiters.push(waiter);
            self.wants_durable |= waiter.wants_durable();
        }
    }

    pub(super) fn enter_tombstone(&mut self, tombstone: Tombstone) {
        self.tombstones.push(tombstone);
    }

    /// Takes the tombstones, to write their twins; the caller returns them.
    pub(super) fn take_tombstones(&mut self) -> Vec<Tombstone> {
        core::mem::take(&mut self.tombstones)
    }

    pub(super) fn return_tombstones(&mut self, tombstones: Vec<Tombstone>) {
        self.tombstones = tombstones;
    }
}

/// Write of a complete group.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupWrite {
    pub(super) number: u64,
    pub(super) offset: u64,
    pub(super) pieces: Pieces,
    pub(super) bytes: u64,
    /// True if the write itself must be durable (FUA).
    pub(super) is_durable: bool,
}

/// Completed group, written or failed, with its waiters.
#[derive(Debug)]
pub(crate) struct EndedGroup {
    pub(crate) segment: u32,
    pub(crate) sequences: RangeInclusive<u64>,
    /// True if the write made the group durable.
    pub(crate) is_durable: bool,
    pub(crate) waiters: Vec<Waiter>,
    tombstones: Vec<Tombstone>,
}

/// Groups that are not complete, and those queued behind one that is not, in order.
#[derive(Debug)]
pub(crate) struct Groups {
    queue: VecDeque<Group>,
    /// Number of the first group.
    first: u64,
    /// Free buffers of the staging area.
    buffers: Vec<u32>,
    /// Lists of completed groups for reuse: appending allocates nothing once they have grown.
    spare_lists: Vec<(Vec<Tombstone>, Vec<Waiter>)>,
}

impl Groups {
    pub(super) fn new(groups: u32) -> Self {
        Self {
            queue: VecDeque::with_capacity(groups as usize),
            first: 0,
            buffers: (0..groups).rev().collect(),
            spare_lists: Vec::with_capacity(groups as usize),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Opens a group; returns false if no buffer is free.
    pub(super) fn open(&mut self, start: GroupStart) -> bool {
        let Some(buffer) = self.buffers.pop() else { return false };
        let (tombstones, waiters) = self.spare_lists.pop().unwrap_or_default();
        self.queue.push_back(Group {
            state: GroupState::Filling,
            start,
            bytes: 0,
            buffer,
            buffered: 0,
            pieces: Pieces::default(),
            heads: Heads::default(),
            last_sequence: start.sequence,
            tombstones,
            tombstones_through: 0,
            waiters,
            wants_durable: false,
            is_urgent: false,
        });
        true
    }

    /// Returns the open group.
    pub(super) fn filling(&self) -> Option<&Group> {
        self.queue.back().filter(|group| group.state == GroupState::Filling)
    }

    pub(super) fn filling_mut(&mut self) -> Option<&mut Group> {
        self.queue.back_mut().filter(|group| group.state == GroupState::Filling)
    }

    /// Returns the number of the open group.
    pub(crate) fn filling_number(&self) -> Option<u64> {
        self.filling().map(|_| self.last_number())
    }

    /// Returns the time at which the open group was opened.
    pub(crate) fn open_since_ns(&self) -> Option<u64> {
        self.filling().map(|group| group.start.now_ns)
    }

    fn last_number(&self) -> u64 {
        self.first + self.queue.len() as u64 - 1
    }

    pub(super) fn is_writing(&self) -> bool {
        self.queue.iter().any(|group| group.state == GroupState::Writing)
    }

    /// Closes the open group; returns its write.
    pub(super) fn close(&mut self, tombstones_through: u32, durable_writes: bool) -> Option<GroupWrite> {
        let number = self.filling_number()?;
        let group = self.filling_mut()?;
        group.state = GroupState::Writing;
        group.tombstones_through = tombstones_through;
        group.wants_durable &= durable_writes;
        let (offset, pieces, bytes) = (group.start.offset, group.pieces, group.bytes);
        Some(GroupWrite { number, offset, pieces, bytes, is_durable: group.wants_durable })
    }

    /// Removes the last group, which is empty.
    pub(super) fn drop_last(&mut self) {
        if let Some(group) = self.queue.pop_back() {
            self.buffers.push(group.buffer);
        }
    }

    /// Returns true if the record at this offset of the device is not written yet.
    pub(crate) fn is_unwritten(&self, offset: u64) -> bool {
        self.queue.iter().any(|group| group.is_unwritten(offset))
    }

    /// Returns [`Self::is_unwritten`], and has the group of the offset written without waiting for more records.
    pub(crate) fn hasten(&mut self, offset: u64) -> bool {
        let group = self.queue.iter_mut().find(|group| group.is_unwritten(offset));
        group.map(|group| group.is_urgent = true).is_some()
    }

    /// Ends a group that was written or has failed.
    pub(super) fn end(&mut self, number: u64) -> Option<EndedGroup> {
        let at = number.checked_sub(self.first)?;
        let group = self.queue.get_mut(usize::try_from(at).ok()?)?;
        group.state = GroupState::Over;
        self.buffers.push(group.buffer);
        Some(EndedGroup {
            segment: group.start.segment,
            sequences: group.start.sequence..=group.last_sequence,
            is_durable: group.wants_durable,
            waiters: core::mem::take(&mut group.waiters),
            tombstones: core::mem::take(&mut group.tombstones),
        })
    }

    /// Keeps the lists of a completed group for reuse.
    pub(super) fn recycle(&mut self, mut group: EndedGroup) {
        group.tombstones.clear();
        group.waiters.clear();
        self.spare_lists.push((group.tombstones, group.waiters));
    }

    /// Removes the next completed group. Groups leave in order, so that the returned mark, up to which the log is
    /// written, has no gaps.
    pub(super) fn pop_over(&mut self) -> Option<Mark> {
        let group = self.queue.pop_front_if(|group| group.state == GroupState::Over)?;
        self.first += 1;
        let (sequence, tombstones) = (group.last_sequence, group.tombstones_through);
        Some(Mark { sequence, generation: group.start.generation, tombstones })
    }
}

impl Group {
    fn is_unwritten(&self, offset: u64) -> bool {
        self.state != GroupState::Over && self.start.offset <= offset && offset < self.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(offset: u64, sequence: u64) -> GroupStart {
        GroupStart { segment: 3, generation: 4, offset, sequence, now_ns: 5 }
    }

    #[test]
    fn groups_end_in_any_order_and_leave_in_theirs() {
        let mut groups = Groups::new(2);
        for (number, offset) in [(0, 4096), (1, 8192)] {
            assert!(groups.open(start(offset, 10 * number)));
            let group = groups.filling_mut().expect("it is open");
            group.attach(Span::staging(0, 4096));
            group.enter(10 * number + 1, Some(Waiter::Remove { token: Token(number), ack: Ack::Durable }));
            let write = groups.close(7, true).expect("it is open");
            assert_eq!((write.number, write.offset, write.bytes, write.is_durable), (number, offset, 4096, true));
        }
        assert!(!groups.open(start(12288, 20)), "both buffers are taken");
        assert!(groups.is_unwritten(4096) && groups.hasten(12287) && !groups.is_unwritten(12288));
        let second = groups.end(1).expect("it was written");
        assert_eq!((second.sequences.clone(), second.waiters.len()), (10..=11, 1));
        groups.recycle(second);
        assert!(groups.pop_over().is_none() && !groups.is_unwritten(8192), "the first is being written");
        assert!(groups.end(0).is_some() && groups.end(2).is_none());
        let marks = [groups.pop_over(), groups.pop_over()].map(|over| over.map(|mark| mark.sequence));
        assert_eq!((marks, groups.is_empty()), ([Some(1), Some(11)], true));
        assert!(groups.end(0).is_none(), "it is gone");
    }

    #[test]
    fn heads_take_whole_units_as_long_as_there_are_some() {
        let heads = Heads { staging: 0, offset: 4096, bytes: 200 }.after(65);
        assert_eq!((heads.staging, heads.offset, heads.bytes), (128, 4224, 72));
        assert_eq!(heads.after(100).bytes, 0);
    }
}

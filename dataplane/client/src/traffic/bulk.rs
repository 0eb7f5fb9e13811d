//! Bulk copies: device copies as a lane posts them, and the joint accounting of those that complete together.

use crate::network::{Lane, Locality, Places};
use crate::tables::{HeldHandle, LEAST_LOAD_BYTES, NOWHERE, Slice, SliceEvent, SliceState, Table, Times, slice_id};
use crate::types::{Config, DeviceCopy, Local, Request, SliceId, Via};

/// Joint accounting of slices that were posted together and completed together.
#[derive(Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(super) times: Times,
    pub(super) small: bool,
    /// Places of their memory, at our end and at the peer's.
    pub(super) places: Places,
    pub(super) slices: u64,
    pub(super) bytes: u64,
    pub(super) load_bytes: u64,
}

impl Tally {
    /// Returns true if a slice that was sent belongs to this tally.
    pub(super) fn has(&self, slice: &Slice, lane: u32, config: &Config, locality: &Locality) -> bool {
        let (Request::Read(target, local) | Request::Write(target, local)) = &slice.request else { return false };
        let places = Places { ours: locality.place_of(local.buffer), theirs: target.place };
        slice.link.lane == lane
            && slice.state == SliceState::Copying
            && slice.tasks == 1
            && slice.times == self.times
            && config.is_small(slice.load_bytes()) == self.small
            && places == self.places
    }
}

/// Individual part of one of several similar copies, which share the segment, the buffer and the direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct RowCopy {
    pub slice: SliceId,
    /// Start within the segment.
    pub offset: u64,
    /// Start within the buffer.
    pub at: u64,
    pub bytes: u64,
}

/// Returns the load that a short slice counts for beyond its bytes. Out of line, as hardly any slice is so short.
#[cold]
#[inline(never)]
pub(super) const fn short_of_least(bytes: u64) -> u64 {
    LEAST_LOAD_BYTES - bytes
}

/// Iterator over the copies that a lane posts next.
pub struct Copies<'a> {
    pub(super) slices: &'a mut Table<Slice>,
    pub(super) lane: &'a mut Lane,
    pub(super) now_ns: u64,
    pub(super) window_bytes: u64,
    pub(super) closes_ways: bool,
    /// Limit of the number of copies, and how many of these are left.
    pub(super) most: u32,
    pub(super) left: u32,
    /// Changed state of the lane, written back when the iterator is dropped.
    pub(super) next: u32,
    pub(super) sent_bytes: u64,
}

impl Copies<'_> {
    /// Posts the copies behind `first` that differ from it in their offsets and lengths only: fills `into` from its
    /// start, and returns their number.
    #[inline(never)]
    pub fn alike(&mut self, first: &DeviceCopy, into: &mut [RowCopy]) -> usize {
        let DeviceCopy { segment, write, local: Local { buffer, .. }, .. } = *first;
        if self.closes_ways && self.lane.is_closed(segment, Via::Rdma) {
            return 0;
        }
        let most = into.len().min(self.left as usize);
        let (now_ns, window_bytes) = (self.now_ns, self.window_bytes);
        let (mut next, mut sent_bytes, mut taken) = (self.next, self.sent_bytes, 0);
        for place in &mut into[..most] {
            if next == NOWHERE || sent_bytes >= window_bytes {
                break;
            }
            let (generation, slice) = self.slices.named(next);
            let (writes, target, local) = match &slice.request {
                Request::Read(target, local) => (false, target, local),
                Request::Write(target, local) => (true, target, local),
                _ => break,
            };
            if writes != write || target.segment != segment || local.buffer != buffer {
                break;
            }
            let Local { offset: at, bytes, .. } = *local;
            *place = RowCopy { slice: slice_id(next, generation), offset: target.offset, at, bytes };
            slice.post(bytes, now_ns);
            sent_bytes += bytes;
            taken += 1;
            next = slice.link.after;
        }
        (self.next, self.sent_bytes) = (next, sent_bytes);
        self.left -= taken as u32;
        taken
    }
}

impl Iterator for Copies<'_> {
    type Item = DeviceCopy;

    fn next(&mut self) -> Option<DeviceCopy> {
        let index = self.next;
        if index == NOWHERE || self.left == 0 || self.sent_bytes >= self.window_bytes {
            return None;
        }
        let (generation, slice) = self.slices.named(index);
        let write = matches!(slice.request, Request::Write(..));
        let (Request::Read(target, local) | Request::Write(target, local)) = &slice.request else { return None };
        if self.closes_ways && self.lane.is_closed(target.segment, Via::Rdma) {
            return None;
        }
        let slice_id = slice_id(index, generation);
        let copy = DeviceCopy { slice: slice_id, segment: target.segment, offset: target.offset, local: *local, write };
        let bytes = local.bytes;
        slice.post(bytes, self.now_ns);
        self.sent_bytes += bytes;
        self.left -= 1;
        self.next = slice.link.after;
        Some(copy)
    }
}

impl Drop for Copies<'_> {
    fn drop(&mut self) {
        let taken = self.most - self.left;
        self.lane.list.queued -= taken;
        // No copy is without bytes.
        self.lane.load.flying += taken;
        (self.lane.list.next, self.lane.load.sent_bytes) = (self.next, self.sent_bytes);
    }
}

impl Slice {
    /// Marks the slice as posted to the device.
    #[inline]
    fn post(&mut self, bytes: u64, now_ns: u64) {
        self.step(SliceEvent::Place);
        self.sent_ns = now_ns;
        self.way.via = Via::Rdma;
        (self.link.sent_bytes, self.answer.bytes) = (bytes, bytes);
    }

    /// Returns true if the device was given the whole slice, without a request in a frame.
    pub(super) fn was_sent_whole(&self) -> bool {
        let whole = self.link.sent_bytes == self.weight_bytes() && self.answer.bytes == self.link.sent_bytes;
        whole && self.answer.version == 0 && self.answer.held == HeldHandle::Nothing
    }
}

/// Unlinks a slice that is not the first in its lane's list.
#[cold]
pub(super) fn unlink(slices: &mut Table<Slice>, lane: &mut Lane, before: u32, after: u32) {
    slices.at(before).link.after = after;
    match after {
        NOWHERE => lane.list.last = before,
        after => slices.at(after).link.before = before,
    }
}

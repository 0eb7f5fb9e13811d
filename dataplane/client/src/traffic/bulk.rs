//! Copies that a device does by itself, as a lane sends them; and what is the same for those that end together.

use crate::network::{Lane, Locality, Places};
use crate::tables::{HeldHandle, LEAST_LOAD_BYTES, NOWHERE, Slice, SliceEvent, SliceState, Table, Times, slice_id};
use crate::types::{Config, DeviceCopy, Local, Request, SliceId, Via};

/// Slices that ended together and were posted together.
#[derive(Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(super) times: Times,
    pub(super) small: bool,
    /// Where their memory is, at our end and at the peer's.
    pub(super) places: Places,
    pub(super) slices: u64,
    pub(super) bytes: u64,
    pub(super) load_bytes: u64,
}

impl Tally {
    /// Whether a slice that was sent has all of it in common.
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

/// One of the copies of a row: what it has for itself. They have the segment, the buffer and the direction in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RowCopy {
    /// For whom.
    pub slice: SliceId,
    /// Where in the segment.
    pub offset: u64,
    /// Where in the buffer.
    pub at: u64,
    /// How much.
    pub bytes: u64,
}

/// What a slice counts for beyond its bytes. By itself, as hardly any is so short: others only compare.
#[cold]
#[inline(never)]
pub(super) const fn short_of_least(bytes: u64) -> u64 {
    LEAST_LOAD_BYTES - bytes
}

/// The copies that a lane sends next.
pub struct Copies<'a> {
    pub(super) slices: &'a mut Table<Slice>,
    pub(super) lane: &'a mut Lane,
    pub(super) now_ns: u64,
    pub(super) window_bytes: u64,
    pub(super) closes_ways: bool,
    /// How many there may be, and how many more.
    pub(super) most: u32,
    pub(super) left: u32,
    /// The state of the lane, which it gets when they end.
    pub(super) next: u32,
    pub(super) sent_bytes: u64,
}

impl Copies<'_> {
    /// Those behind `first` that differ from it in their places only: fills `into` from its start, and returns how many
    /// they are.
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
        // None is without bytes.
        self.lane.load.flying += taken;
        (self.lane.list.next, self.lane.load.sent_bytes) = (self.next, self.sent_bytes);
    }
}

impl Slice {
    /// The device gets all of it.
    #[inline]
    fn post(&mut self, bytes: u64, now_ns: u64) {
        self.step(SliceEvent::Place);
        self.sent_ns = now_ns;
        self.way.via = Via::Rdma;
        (self.link.sent_bytes, self.answer.bytes) = (bytes, bytes);
    }

    /// Whether the device was given all of it, and it was not asked for by a frame.
    pub(super) fn was_sent_whole(&self) -> bool {
        let whole = self.link.sent_bytes == self.weight_bytes() && self.answer.bytes == self.link.sent_bytes;
        whole && self.answer.version == 0 && self.answer.held == HeldHandle::Nothing
    }
}

/// Takes a slice that is not the first of its lane's list out of it.
#[cold]
pub(super) fn unlink(slices: &mut Table<Slice>, lane: &mut Lane, before: u32, after: u32) {
    slices.at(before).link.after = after;
    match after {
        NOWHERE => lane.list.last = before,
        after => slices.at(after).link.before = before,
    }
}

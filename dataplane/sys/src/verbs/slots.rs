//! What a queue has queued and posted and not yet got back: the caller's token of each request, and the memory it
//! works on.
//!
//! A queue of a reliable connection completes in order. So its slots are a ring: requests enter at the head, are handed
//! to the device up to `sent`, and leave at the tail, all up to the one that a completion names.

use super::completion::Status;
use super::memory::{MemoryRegion, Piece};
use std::mem;

/// Sequence numbers travel in 30 bits of a request's id.
pub(crate) const SEQUENCE_BITS: u32 = 30;
const SEQUENCE_MASK: u32 = (1 << SEQUENCE_BITS) - 1;

/// A request that is over: the device does not touch its memory any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retired {
    /// The caller's name for it.
    pub token: u64,
    /// How it ended. Requests before a signalled one share its completion: they succeeded when it is the first to
    /// fail. When the queue was flushed it is not known of them, and they count as flushed.
    pub status: Status,
    /// Whether it was a receive.
    pub receive: bool,
}

#[derive(Clone)]
struct Slot {
    token: u64,
    /// The memory of the first piece: most requests have no other.
    first: Option<MemoryRegion>,
    /// Pieces behind the first.
    more: u32,
}

/// The ring of one queue's requests.
pub(crate) struct Slots {
    slots: Box<[Slot]>,
    /// `stride` less one places for each slot, for the pieces behind the first.
    held: Box<[Option<MemoryRegion>]>,
    stride: usize,
    depth: u32,
    /// The three run freely; slots are found by their low bits.
    head: u32,
    sent: u32,
    tail: u32,
    /// A request has failed: what follows did not happen.
    failed: bool,
    receive: bool,
}

impl Slots {
    pub(crate) fn new(depth: u32, stride: u32, receive: bool) -> Self {
        let places = depth.next_power_of_two() as usize;
        let stride = stride as usize;
        Self {
            slots: vec![Slot { token: 0, first: None, more: 0 }; places].into(),
            held: vec![None; places * stride.saturating_sub(1)].into(),
            stride,
            depth,
            head: 0,
            sent: 0,
            tail: 0,
            failed: false,
            receive,
        }
    }

    pub(crate) fn room(&self) -> u32 {
        self.depth - self.head.wrapping_sub(self.tail)
    }

    pub(crate) fn unsent(&self) -> u32 {
        self.head.wrapping_sub(self.sent)
    }

    pub(crate) fn outstanding(&self) -> u32 {
        self.sent.wrapping_sub(self.tail)
    }

    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// The sequence number of the next request, as it travels.
    pub(crate) fn next_sequence(&self) -> u32 {
        self.head & SEQUENCE_MASK
    }

    pub(crate) fn head(&self) -> u32 {
        self.head
    }

    pub(crate) fn first_unsent(&self) -> u32 {
        self.sent
    }

    /// Takes a request. There is room, and the pieces are at most `stride`.
    #[inline]
    pub(crate) fn push(&mut self, token: u64, pieces: &[Piece<'_>]) {
        let index = self.head as usize & (self.slots.len() - 1);
        let slot = &mut self.slots[index];
        slot.token = token;
        if let [first, more @ ..] = pieces {
            // The place is empty; forgetting that saves looking.
            mem::forget(slot.first.replace(first.memory.clone()));
            slot.more = more.len() as u32;
            if !more.is_empty() {
                self.hold_more(index, more);
            }
        }
        self.head = self.head.wrapping_add(1);
    }

    #[cold]
    fn hold_more(&mut self, index: usize, pieces: &[Piece<'_>]) {
        let stride = self.stride - 1;
        for (place, piece) in self.held[index * stride..][..stride].iter_mut().zip(pieces) {
            *place = Some(piece.memory.clone());
        }
    }

    /// The device took `count` of the unsent ones.
    pub(crate) fn sent(&mut self, count: u32) {
        debug_assert!(count <= self.unsent(), "the device took no more than it was given");
        self.sent = self.sent.wrapping_add(count);
    }

    /// A completion names this request: it and all before it are over. Returns false for one that is over already.
    pub(crate) fn retire(&mut self, sequence: u32, status: Status, each: &mut impl FnMut(Retired)) -> bool {
        let ahead = sequence.wrapping_sub(self.tail) & SEQUENCE_MASK;
        if ahead >= self.outstanding() {
            return false;
        }
        let known = !self.failed && status != Status::Flushed;
        let before = if known { Status::Success } else { Status::Flushed };
        self.failed |= status != Status::Success;
        // One place that calls, so that it is compiled into the loop.
        for left in (0..=ahead).rev() {
            self.pop(if left > 0 { before } else { status }, each);
        }
        true
    }

    /// The device has forgotten everything that was posted.
    pub(crate) fn forget_sent(&mut self, each: &mut impl FnMut(Retired)) {
        while self.tail != self.sent {
            self.pop(Status::Flushed, each);
        }
    }

    /// Drops what was not posted, with nothing posted in front of it or with it staying there.
    pub(crate) fn abandon_unsent(&mut self, each: &mut impl FnMut(Retired)) {
        while self.head != self.sent {
            self.head = self.head.wrapping_sub(1);
            self.clear(self.head, Status::Flushed, each);
        }
    }

    /// The queue starts anew.
    pub(crate) fn heal(&mut self) {
        self.failed = false;
    }

    #[inline]
    fn pop(&mut self, status: Status, each: &mut impl FnMut(Retired)) {
        let at = self.tail;
        self.tail = at.wrapping_add(1);
        self.clear(at, status, each);
    }

    #[inline]
    fn clear(&mut self, at: u32, status: Status, each: &mut impl FnMut(Retired)) {
        let index = at as usize & (self.slots.len() - 1);
        let slot = &mut self.slots[index];
        let token = slot.token;
        drop(slot.first.take());
        if slot.more > 0 {
            self.clear_more(index);
        }
        each(Retired { token, status, receive: self.receive });
    }

    #[cold]
    fn clear_more(&mut self, index: usize) {
        let stride = self.stride - 1;
        self.slots[index].more = 0;
        self.held[index * stride..][..stride].fill(None);
    }
}

//! What a queue has queued and posted and not yet got back: the caller's token of each request, and the memory it
//! works on.
//!
//! A queue of a reliable connection completes in order. So its slots are a ring: requests enter at the head, are handed
//! to the device up to `sent`, and leave at the tail, all up to the one that a completion names.

use super::completion::Status;
use super::memory::MemoryRegion;

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

#[derive(Clone, Copy)]
struct Slot {
    token: u64,
    pieces: u32,
}

/// The ring of one queue's requests.
pub(crate) struct Slots {
    slots: Box<[Slot]>,
    /// `stride` places for each slot.
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
            slots: vec![Slot { token: 0, pieces: 0 }; places].into(),
            held: vec![None; places * stride].into(),
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
    pub(crate) fn push<'a>(&mut self, token: u64, pieces: impl ExactSizeIterator<Item = &'a MemoryRegion>) {
        let index = self.head as usize & (self.slots.len() - 1);
        self.slots[index] = Slot { token, pieces: pieces.len() as u32 };
        for (place, memory) in self.held[index * self.stride..][..self.stride].iter_mut().zip(pieces) {
            *place = Some(memory.clone());
        }
        self.head = self.head.wrapping_add(1);
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
        for _ in 0..ahead {
            self.pop(if known { Status::Success } else { Status::Flushed }, each);
        }
        self.failed |= status != Status::Success;
        self.pop(status, each);
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

    fn pop(&mut self, status: Status, each: &mut impl FnMut(Retired)) {
        let at = self.tail;
        self.tail = at.wrapping_add(1);
        self.clear(at, status, each);
    }

    fn clear(&mut self, at: u32, status: Status, each: &mut impl FnMut(Retired)) {
        let index = at as usize & (self.slots.len() - 1);
        let Slot { token, pieces } = self.slots[index];
        for place in &mut self.held[index * self.stride..][..pieces as usize] {
            *place = None;
        }
        each(Retired { token, status, receive: self.receive });
    }
}

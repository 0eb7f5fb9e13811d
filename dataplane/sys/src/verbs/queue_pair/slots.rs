//! Bookkeeping of a queue's queued and posted requests: the caller's token of each, and its memory.
//!
//! A queue of a reliable connection completes in order. So its slots are a ring: requests enter at the head, are posted
//! up to `sent`, and leave at the tail, up to and including the one that a completion names.

use crate::verbs::completion::Status;
use crate::verbs::memory::{MemoryRegion, Piece};
use std::collections::VecDeque;

/// Width of the sequence number in a request's id, in bits.
pub(crate) const SEQUENCE_BITS: u32 = 30;
pub(in crate::verbs) const SEQUENCE_MASK: u32 = (1 << SEQUENCE_BITS) - 1;

/// A retired request: the device does not access its memory any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetiredRequest {
    /// Token of the caller.
    pub token: u64,
    /// Completion status. Requests before a signalled one share its completion: they succeeded if it is the first to
    /// fail. If the queue was flushed their outcome is unknown, and they count as flushed.
    pub status: Status,
    /// True for a receive.
    pub receive: bool,
}

/// Memory of consecutive requests: most of a queue's use one region, so it is counted once for all of them.
struct RegionRun {
    memory: MemoryRegion,
    /// First request of the run, and the one behind its last.
    from: u32,
    until: u32,
}

/// Ring of one queue's requests.
pub(crate) struct Slots {
    tokens: Box<[u64]>,
    /// Memory of each request's first piece. Of two runs the later one begins at the end of the earlier one, or behind
    /// it. At most one run per request.
    newest: Option<RegionRun>,
    /// Earlier runs, oldest first.
    runs: VecDeque<RegionRun>,
    /// Registrations of further pieces, each with its request, oldest first.
    more: VecDeque<(u32, MemoryRegion)>,
    stride: usize,
    depth: u32,
    /// The three counters run freely; their low bits index the slots.
    head: u32,
    sent: u32,
    tail: u32,
    /// A request has failed: later ones were not carried out.
    failed: bool,
    receive: bool,
}

impl Slots {
    pub(crate) fn new(depth: u32, stride: u32, receive: bool) -> Self {
        Self {
            tokens: vec![0; depth.next_power_of_two() as usize].into(),
            newest: None,
            runs: VecDeque::new(),
            more: VecDeque::new(),
            stride: stride as usize,
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

    /// Returns the sequence number of the next request, as encoded in its id.
    pub(crate) fn next_sequence(&self) -> u32 {
        self.head & SEQUENCE_MASK
    }

    pub(crate) fn head(&self) -> u32 {
        self.head
    }

    pub(crate) fn first_unsent(&self) -> u32 {
        self.sent
    }

    /// Adds a request. The caller has checked for room; the pieces are at most `stride`.
    #[inline]
    pub(crate) fn push(&mut self, token: u64, pieces: &[Piece<'_>]) {
        let at = self.take(token);
        if let [first, more @ ..] = pieces {
            self.hold(at, 1, first.memory);
            self.hold_more(at, more);
        }
    }

    /// Returns the token slots, to be filled from the head on while there is room, for [`Self::push_many`].
    #[inline]
    pub(in crate::verbs) fn tokens(&mut self) -> &mut [u64] {
        &mut self.tokens
    }

    /// Adds requests whose tokens are in their slots, each with one piece in this memory. The caller has checked for
    /// room.
    #[inline]
    pub(in crate::verbs) fn push_many(&mut self, count: u32, memory: &MemoryRegion) {
        if count > 0 {
            let at = self.head;
            self.head = at.wrapping_add(count);
            self.hold(at, count, memory);
        }
    }

    #[inline]
    fn take(&mut self, token: u64) -> u32 {
        let at = self.head;
        let mask = self.tokens.len() - 1;
        self.tokens[at as usize & mask] = token;
        self.head = at.wrapping_add(1);
        at
    }

    #[inline]
    fn hold(&mut self, at: u32, count: u32, memory: &MemoryRegion) {
        match &mut self.newest {
            Some(run) if run.until == at && run.memory.is_same(memory) => run.until = at.wrapping_add(count),
            _ => self.begin_run(at, count, memory),
        }
    }

    #[cold]
    fn begin_run(&mut self, at: u32, count: u32, memory: &MemoryRegion) {
        let run = RegionRun { memory: memory.clone(), from: at, until: at.wrapping_add(count) };
        self.runs.extend(self.newest.replace(run));
    }

    fn hold_more(&mut self, at: u32, pieces: &[Piece<'_>]) {
        self.more.extend(pieces.iter().map(|piece| (at, piece.memory.clone())));
    }

    /// Records that the device accepted `count` of the unsent requests.
    pub(crate) fn sent(&mut self, count: u32) {
        debug_assert!(count <= self.unsent(), "the device took no more than it was given");
        self.sent = self.sent.wrapping_add(count);
    }

    /// Retires the request that a completion names and all earlier ones. Passes their tokens, oldest first, in runs of
    /// equal status. Returns false if the request is retired already.
    #[inline]
    pub(in crate::verbs) fn retire_runs(
        &mut self,
        sequence: u32,
        status: Status,
        each: &mut impl FnMut(&[u64], Status),
    ) -> bool {
        let ahead = sequence.wrapping_sub(self.tail) & SEQUENCE_MASK;
        if ahead >= self.outstanding() {
            return false;
        }
        let known = !self.failed && status != Status::Flushed;
        let before = if known { Status::Success } else { Status::Flushed };
        self.failed |= status != Status::Success;
        let first = self.tail;
        self.pass(ahead + 1);
        let alike = if before == status { ahead + 1 } else { ahead };
        // The run may wrap around the end of the ring; the last request is a run of its own if its status differs.
        let start = first as usize & (self.tokens.len() - 1);
        let until_end = (alike as usize).min(self.tokens.len() - start);
        let last = first.wrapping_add(ahead) as usize & (self.tokens.len() - 1);
        let parts = [
            (&self.tokens[start..start + until_end], before),
            (&self.tokens[..alike as usize - until_end], before),
            (if alike == ahead { &self.tokens[last..=last] } else { &[] }, status),
        ];
        for (tokens, status) in parts {
            if !tokens.is_empty() {
                each(tokens, status);
            }
        }
        true
    }

    /// Retires all posted requests after the device has discarded them.
    pub(crate) fn forget_sent(&mut self, each: &mut impl FnMut(RetiredRequest)) {
        let (first, count) = (self.tail, self.outstanding());
        self.pass(count);
        (0..count).for_each(|at| self.tell(first.wrapping_add(at), Status::Flushed, each));
    }

    /// Drops unsent requests, newest first; posted ones in front of them stay.
    pub(crate) fn abandon_unsent(&mut self, each: &mut impl FnMut(RetiredRequest)) {
        while self.head != self.sent {
            self.head = self.head.wrapping_sub(1);
            let at = self.head;
            if let Some(run) = self.newest.as_mut().filter(|run| run.until == at.wrapping_add(1)) {
                run.until = at;
                // The beginning of the run may be retired.
                if run.from == at || self.tail == at {
                    self.newest = self.runs.pop_back();
                }
            }
            while self.more.back().is_some_and(|(of, _)| *of == at) {
                self.more.pop_back();
            }
            self.tell(at, Status::Flushed, each);
        }
    }

    /// Resets the queue for reuse.
    pub(crate) fn heal(&mut self) {
        self.failed = false;
    }

    /// Removes the oldest `count` requests and releases the memory that only they held.
    fn pass(&mut self, count: u32) {
        // As distances from the old tail, to which both are near.
        let tail = self.tail;
        while self.runs.front().is_some_and(|run| run.until.wrapping_sub(tail) <= count) {
            self.runs.pop_front();
        }
        if self.newest.as_ref().is_some_and(|run| run.until.wrapping_sub(tail) <= count) {
            self.newest = None;
        }
        while self.more.front().is_some_and(|(of, _)| of.wrapping_sub(tail) < count) {
            self.more.pop_front();
        }
        self.tail = tail.wrapping_add(count);
    }

    #[inline]
    fn tell(&self, at: u32, status: Status, each: &mut impl FnMut(RetiredRequest)) {
        let token = self.tokens[at as usize & (self.tokens.len() - 1)];
        each(RetiredRequest { token, status, receive: self.receive });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::Access;
    use crate::verbs::tests::bare;
    use crate::{HugePages, IoBuf, Region, RegionOptions};
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[derive(Clone, Debug)]
    enum Act {
        /// Pushes a request on these registrations.
        Push(Vec<usize>),
        Send(u32),
        Retire(u32),
        Abandon,
        Forget,
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let act = prop_oneof![
            6 => proptest::collection::vec(0usize..3, 0..4).prop_map(Act::Push),
            3 => (0u32..6).prop_map(Act::Send),
            3 => (0u32..6).prop_map(Act::Retire),
            1 => Just(Act::Abandon),
            1 => Just(Act::Forget),
        ];
        proptest::collection::vec(act, 0..120)
    }

    proptest! {
        #[test]
        fn memory_is_held_exactly_as_long_as_requests_are_on_it(start in any::<u32>(), acts in acts()) {
            let domain = bare::domain();
            let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("slots", 4096) };
            let register = || {
                let memory = IoBuf::whole(Region::allocate(&options).unwrap());
                domain.register(&memory, Access::LOCAL).unwrap()
            };
            let memories = [register(), register(), register()];
            let mut slots = Slots::new(8, 3, false);
            (slots.head, slots.sent, slots.tail) = (start, start, start);
            // Tokens and memory of queued requests, and how many of them are posted.
            let (mut model, mut sent, mut token) = (VecDeque::<(u64, Vec<usize>)>::new(), 0usize, 0);
            for act in acts {
                let (mut told, mut expected) = (Vec::new(), Vec::new());
                let mut each = |one: RetiredRequest| told.push(one.token);
                match act {
                    Act::Push(on) if slots.room() > 0 => {
                        token += 1;
                        let pieces: Vec<_> = on.iter().map(|&at| memories[at].piece(0, 8).unwrap()).collect();
                        match &pieces[..] {
                            [one] => {
                                let at = slots.head() as usize & (slots.tokens().len() - 1);
                                slots.tokens()[at] = token;
                                slots.push_many(1, one.memory);
                            }
                            pieces => slots.push(token, pieces),
                        }
                        model.push_back((token, on));
                    }
                    Act::Push(_) => prop_assert_eq!(model.len(), 8),
                    Act::Send(count) => {
                        let count = count.min(slots.unsent());
                        slots.sent(count);
                        sent += count as usize;
                    }
                    Act::Retire(ahead) => {
                        let sequence = slots.tail.wrapping_add(ahead) & SEQUENCE_MASK;
                        let mut each = |tokens: &[u64], _| told.extend_from_slice(tokens);
                        let over = slots.retire_runs(sequence, Status::Success, &mut each);
                        prop_assert_eq!(over, (ahead as usize) < sent);
                        let count = if over { ahead as usize + 1 } else { 0 };
                        expected.extend(model.drain(..count).map(|(token, _)| token));
                        sent -= count;
                    }
                    Act::Abandon => {
                        slots.abandon_unsent(&mut each);
                        expected.extend(model.drain(sent..).rev().map(|(token, _)| token));
                    }
                    Act::Forget => {
                        slots.forget_sent(&mut each);
                        expected.extend(model.drain(..sent).map(|(token, _)| token));
                        sent = 0;
                    }
                }
                prop_assert_eq!(told, expected);
                for (at, memory) in memories.iter().enumerate() {
                    let used = model.iter().any(|(_, on)| on.contains(&at));
                    prop_assert_eq!(memory.is_last(), !used, "registration {}", at);
                }
            }
        }
    }
}

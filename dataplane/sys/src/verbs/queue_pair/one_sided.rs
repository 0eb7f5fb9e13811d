//! Runs of one-sided writes or reads: checks that are equal for all of them are made once.

use crate::verbs::completion::sequence_bits;
use crate::verbs::error::Refusal;
use crate::verbs::ffi::*;
use crate::verbs::memory::{Domain, MemoryRegion, Piece};
use crate::verbs::send_queue::{PreparedRequest, Remote, SendQueue, check_memory};
use crate::verbs::slots::SEQUENCE_MASK;
use std::sync::Arc;

/// A run of writes to one registration of a peer, or of reads, with one local registration.
#[derive(Clone, Copy, Debug)]
pub struct OneSidedRun<'a> {
    memory: &'a MemoryRegion,
    /// Copies of the memory's start address, length and local key.
    start: u64,
    bytes: usize,
    local_key: u32,
    key: u32,
    write: bool,
    most: usize,
}

/// One request of a run; its memory belongs to the run and is in bounds.
#[derive(Clone, Copy, Debug)]
pub struct OneSided<'a> {
    memory: &'a MemoryRegion,
    token: u64,
    address: u64,
    piece: ibv_sge,
}

impl<'a> OneSidedRun<'a> {
    /// Creates a run on `memory`: at most `most` writes or reads, with the key of the peer's registration.
    #[inline]
    #[must_use]
    pub fn new(memory: &'a MemoryRegion, key: u32, write: bool, most: usize) -> Self {
        let (start, bytes, local_key) = (memory.address(), memory.bytes(), memory.local_key());
        Self { memory, start, bytes, local_key, key, write, most }
    }

    /// Returns one request: the caller's token, the address in the peer's memory, and the offset in local memory.
    /// `None` if it is out of bounds.
    #[inline]
    #[must_use]
    pub fn one(&self, token: u64, address: u64, offset: usize, bytes: u32) -> Option<OneSided<'a>> {
        let end = offset.checked_add(bytes as usize)?;
        let piece = ibv_sge { addr: self.start + offset as u64, length: bytes, lkey: self.local_key };
        (end <= self.bytes).then_some(OneSided { memory: self.memory, token, address, piece })
    }
}

/// Fields that are equal in all requests of a run.
#[derive(Clone, Copy)]
struct Alike {
    id: u64,
    opcode: u32,
    key: u32,
}

impl Alike {
    /// Prepares the request with this number, unsignalled.
    #[inline(always)]
    fn prepare(self, place: &mut PreparedRequest, number: u32, one: &OneSided<'_>) {
        place.piece = one.piece;
        place.request.sg_list = &raw mut place.piece;
        place.request.wr_id = self.id | sequence_bits(number & SEQUENCE_MASK);
        place.request.num_sge = 1;
        if one.piece.length == 0 {
            without_pieces(place);
        }
        place.request.opcode = self.opcode;
        (place.request.send_flags, place.request.imm_data) = (0, 0);
        place.request.remote_addr = one.address;
        place.request.rkey = self.key;
    }
}

/// Removes the piece of an empty request, because some devices take zero bytes as 2 GiB. Kept out of line: hardly any
/// request is empty.
#[cold]
#[inline(never)]
const fn without_pieces(place: &mut PreparedRequest) {
    place.request.num_sge = 0;
}

impl SendQueue {
    /// Queues `first` and the requests that `next` returns, until the queue is full. Returns their number.
    #[inline]
    pub(crate) fn push_run<'a>(
        &mut self,
        run: &OneSidedRun<'a>,
        first: OneSided<'a>,
        domain: &Arc<Domain>,
        mut next: impl FnMut() -> Option<OneSided<'a>>,
    ) -> Result<usize, Refusal> {
        check_memory(run.memory, !run.write, domain)?;
        let (from, unsent) = (self.slots.head(), self.slots.unsent() as usize);
        let most = run.most.min(self.slots.room() as usize).min(self.ring.len().saturating_sub(unsent));
        if most == 0 {
            return Ok(0);
        }
        if !std::ptr::eq(first.memory, run.memory) {
            return Err(Refusal::OtherMemory);
        }
        let opcode = if run.write { WR_RDMA_WRITE } else { WR_RDMA_READ };
        let alike = Alike { id: self.id, opcode, key: run.key };
        let (ring, tokens) = (&mut self.ring[..], self.slots.tokens());
        let (ring_mask, token_mask) = (ring.len() - 1, tokens.len() - 1);
        alike.prepare(&mut ring[from as usize & ring_mask], from, &first);
        tokens[from as usize & token_mask] = first.token;
        let (mut at, mut left, mut end) = (from.wrapping_add(1), most - 1, Ok(()));
        // In stretches that do not wrap around the end of either ring.
        while left > 0 {
            let (place, token) = (at as usize & ring_mask, at as usize & token_mask);
            let length = left.min(ring.len() - place).min(tokens.len() - token);
            let begin = at;
            for (place, token) in ring[place..][..length].iter_mut().zip(&mut tokens[token..][..length]) {
                let Some(one) = next() else { break };
                if !std::ptr::eq(one.memory, run.memory) {
                    end = Err(Refusal::OtherMemory);
                    break;
                }
                alike.prepare(place, at, &one);
                *token = one.token;
                at = at.wrapping_add(1);
            }
            left = if at.wrapping_sub(begin) as usize == length { left - length } else { 0 };
        }
        // If an error returned above, no request was queued.
        let count = at.wrapping_sub(from);
        self.signal(from, count);
        self.slots.push_many(count, run.memory);
        end.map(|()| count as usize)
    }

    /// Marks as many of the requests from this one on as signalled as the signaling period requires.
    fn signal(&mut self, from: u32, count: u32) {
        let mask = self.ring.len() - 1;
        // Number of requests up to and including the next one to signal.
        let mut ahead = self.signal_every.saturating_sub(self.silent).max(1);
        let mut behind = self.silent + count;
        let mut passed = 0;
        while count - passed >= ahead {
            passed += ahead;
            let last = from.wrapping_add(passed - 1);
            self.ring[last as usize & mask].request.send_flags = SEND_SIGNALED;
            (ahead, behind) = (self.signal_every.max(1), count - passed);
        }
        self.silent = behind;
    }

    /// Queues one write or read without flags.
    #[inline]
    pub(crate) fn push_one_sided(
        &mut self,
        token: u64,
        write: bool,
        remote: Remote,
        piece: &Piece<'_>,
        domain: &Arc<Domain>,
    ) -> Result<(), Refusal> {
        self.check_room()?;
        let run = OneSidedRun::new(piece.memory, remote.key, write, 1);
        let one = OneSided { memory: piece.memory, token, address: remote.address, piece: piece.raw() };
        self.push_run(&run, one, domain, || None)?;
        Ok(())
    }
}

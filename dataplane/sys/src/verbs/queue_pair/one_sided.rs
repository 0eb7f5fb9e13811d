//! Writes and reads that follow each other: what is the same for all of them is looked at once.

use crate::verbs::completion::sequence_bits;
use crate::verbs::error::Refusal;
use crate::verbs::ffi::*;
use crate::verbs::memory::{Domain, MemoryRegion, Piece};
use crate::verbs::send_queue::{PreparedRequest, Remote, SendQueue, check_memory};
use crate::verbs::slots::SEQUENCE_MASK;
use std::sync::Arc;

/// Writes to one registration of a peer, or reads of it, from or to one registration of ours.
#[derive(Clone, Copy, Debug)]
pub struct OneSidedRun<'a> {
    memory: &'a MemoryRegion,
    /// Of the memory: where it begins, its length, and what the device calls it.
    start: u64,
    bytes: usize,
    local_key: u32,
    key: u32,
    write: bool,
    most: usize,
}

/// One of them, on memory of the run for certain.
#[derive(Clone, Copy, Debug)]
pub struct OneSided<'a> {
    memory: &'a MemoryRegion,
    token: u64,
    address: u64,
    piece: ibv_sge,
}

impl<'a> OneSidedRun<'a> {
    /// From or to `memory`: at most so many writes, or reads, with the key that the peer's registration asks for.
    #[inline]
    #[must_use]
    pub fn new(memory: &'a MemoryRegion, key: u32, write: bool, most: usize) -> Self {
        let (start, bytes, local_key) = (memory.address(), memory.bytes(), memory.local_key());
        Self { memory, start, bytes, local_key, key, write, most }
    }

    /// One of them: the caller's name for it, where in the peer's memory, as the peer names it, and where in ours.
    /// `None` when it is not inside.
    #[inline]
    #[must_use]
    pub fn one(&self, token: u64, address: u64, offset: usize, bytes: u32) -> Option<OneSided<'a>> {
        let end = offset.checked_add(bytes as usize)?;
        let piece = ibv_sge { addr: self.start + offset as u64, length: bytes, lkey: self.local_key };
        (end <= self.bytes).then_some(OneSided { memory: self.memory, token, address, piece })
    }
}

/// What the device is told of each request of a run.
#[derive(Clone, Copy)]
struct Alike {
    id: u64,
    opcode: u32,
    key: u32,
}

impl Alike {
    /// Makes the request of this number, one that does not tell of itself.
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

/// To some devices a piece of zero bytes means 2 GiB. By itself, as hardly any request is empty: others only compare.
#[cold]
#[inline(never)]
const fn without_pieces(place: &mut PreparedRequest) {
    place.request.num_sge = 0;
}

impl SendQueue {
    /// Queues this one and what `next` has, as long as there is room. Returns how many.
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
        // In stretches that reach the end of neither ring.
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
        // Where something above did not return, nothing was queued.
        let count = at.wrapping_sub(from);
        self.signal(from, count);
        self.slots.push_many(count, run.memory);
        end.map(|()| count as usize)
    }

    /// Has as many of the requests from this one on tell of themselves as must.
    fn signal(&mut self, from: u32, count: u32) {
        let mask = self.ring.len() - 1;
        // How many there are up to the next that must, and with it.
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

    /// Queues one write or read that asks for nothing else.
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

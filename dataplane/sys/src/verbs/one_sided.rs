//! Writes and reads that follow each other: what is the same for all of them is looked at once.

use super::completion::sequence_bits;
use super::error::Refusal;
use super::ffi::*;
use super::memory::{Domain, MemoryRegion, Piece};
use super::send_queue::{Remote, SendQueue, check_memory};
use libc::c_int;
use std::sync::Arc;

/// Writes to one registration of a peer, or reads of it, from or to one registration of ours.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// Our memory.
    pub memory: &'a MemoryRegion,
    /// What the peer's registration asks for.
    pub key: u32,
    /// To the peer, or from it.
    pub write: bool,
    /// How many there are at most.
    pub most: usize,
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub struct OneSided<'a> {
    /// The caller's name for it.
    pub token: u64,
    /// Where, as the peer names it.
    pub address: u64,
    /// Of the run's memory.
    pub piece: Piece<'a>,
}

impl SendQueue {
    /// Queues what `next` has, as long as there is room. Returns how many.
    #[inline]
    pub(crate) fn push_run<'a>(
        &mut self,
        run: &Run<'a>,
        domain: &Arc<Domain>,
        mut next: impl FnMut() -> Option<OneSided<'a>>,
    ) -> Result<usize, Refusal> {
        check_memory(run.memory, !run.write, domain)?;
        let opcode = if run.write { WR_RDMA_WRITE } else { WR_RDMA_READ };
        let (from, unsent) = (self.slots.head(), self.slots.unsent() as usize);
        let most = run.most.min(self.slots.room() as usize).min(self.ring.len().saturating_sub(unsent));
        let until = from.wrapping_add(most as u32);
        let (ring, tokens) = (&mut self.ring[..], self.slots.tokens());
        let (ring_mask, token_mask) = (ring.len() - 1, tokens.len() - 1);
        let (mut silent, mut at, mut stranger) = (self.silent, from, false);
        while at != until {
            let Some(one) = next() else { break };
            if !std::ptr::eq(one.piece.memory, run.memory) {
                stranger = true;
                break;
            }
            tokens[at as usize & token_mask] = one.token;
            silent += 1;
            let signalled = silent >= self.signal_every;
            silent = if signalled { 0 } else { silent };
            let place = &mut ring[at as usize & ring_mask];
            place.piece = one.piece.raw();
            place.request.sg_list = &raw mut place.piece;
            place.request.wr_id = self.id | sequence_bits(at & super::slots::SEQUENCE_MASK);
            // To some devices a piece of zero bytes means 2 GiB.
            place.request.num_sge = c_int::from(one.piece.bytes() > 0);
            place.request.opcode = opcode;
            place.request.send_flags = u32::from(signalled) * SEND_SIGNALED;
            place.request.imm_data = 0;
            place.request.remote_addr = one.address;
            place.request.rkey = run.key;
            at = at.wrapping_add(1);
        }
        // Where something above did not return, nothing was queued.
        self.silent = silent;
        let count = at.wrapping_sub(from);
        self.slots.push_many(count, run.memory);
        if stranger { Err(Refusal::OtherMemory) } else { Ok(count as usize) }
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
        let run = Run { memory: piece.memory, key: remote.key, write, most: 1 };
        self.push_run(&run, domain, || Some(OneSided { token, address: remote.address, piece: *piece }))?;
        Ok(())
    }
}

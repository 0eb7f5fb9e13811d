//! The sending half of a queue pair: requests are chained as they are queued and handed over with one doorbell.
//!
//! Only as many requests as one flush may take have room here, as a device copies them when it takes them; the tokens
//! and the memory of those under way lie in `Slots`. Nothing is allocated after the queue was made.

use super::completion::{Kind, QueueId, request_id};
use super::error::{PostError, Refusal};
use super::ffi::*;
use super::memory::{Domain, Piece};
use super::slots::Slots;
use std::io;
use std::ptr;
use std::sync::Arc;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Writes to the peer's memory.
    Write {
        /// Where.
        to: Remote,
    },
    /// Writes to the peer's memory and then completes one of its receives with a number.
    WriteImmediate {
        /// Where.
        to: Remote,
        /// The number.
        immediate: u32,
    },
    /// Reads the peer's memory.
    Read {
        /// Where.
        from: Remote,
    },
    /// Sends a message to one of the peer's receives.
    Send,
    /// The same, with a number.
    SendImmediate {
        /// The number.
        immediate: u32,
    },
}

/// A place in a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Remote {
    /// As the peer names it.
    pub address: u64,
    /// What the peer's registration asks for.
    pub key: u32,
}

/// The local side of a request.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Registered memory, in order.
    Pieces(&'a [Piece<'a>]),
    /// Bytes that are copied now, few of them; not for reads.
    Inline(&'a [u8]),
}

/// A request. Unsignalled ones complete together with the next signalled one behind them.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The caller's name for it.
    pub token: u64,
    /// What it does.
    pub operation: Operation,
    /// The local side.
    pub payload: Payload<'a>,
    /// Ask for a completion. Some requests get one without being asked, so that the queue never fills with silent ones.
    pub signalled: bool,
    /// Wait until earlier reads are done.
    pub fenced: bool,
    /// Wake a peer that waits for messages only.
    pub solicited: bool,
}

impl<'a> Request<'a> {
    /// A request that is neither signalled nor fenced nor solicited.
    #[must_use]
    pub const fn new(token: u64, operation: Operation, payload: Payload<'a>) -> Self {
        Self { token, operation, payload, signalled: false, fenced: false, solicited: false }
    }
}

/// Requests of one flush, chained, over the ring of those under way.
pub(crate) struct SendQueue {
    pub(crate) slots: Slots,
    /// A ring in which each points to the next.
    requests: Box<[ibv_send_wr]>,
    pieces: Box<[ibv_sge]>,
    inline: Box<[u8]>,
    inline_bytes: usize,
    signal_every: u32,
    /// Requests since the last signalled one.
    silent: u32,
    post: PostSend,
}

// SAFETY: the pointers inside lead to memory of this queue only; the queue is moved as a whole, and the boxes stay.
unsafe impl Send for SendQueue {}

impl SendQueue {
    pub(crate) fn new(
        depth: u32,
        stride: u32,
        batch: u32,
        inline_bytes: u32,
        signal_every: u32,
        post: PostSend,
    ) -> Self {
        let places = batch.next_power_of_two() as usize;
        let empty = ibv_send_wr {
            wr_id: 0,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
            opcode: 0,
            send_flags: 0,
            imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            rest: [0; 9],
        };
        // One piece at least, for inline bytes.
        let per_request = stride.max(1) as usize;
        Self {
            slots: Slots::new(depth, stride, false),
            requests: vec![empty; places].into(),
            pieces: vec![ibv_sge::default(); places * per_request].into(),
            inline: vec![0; places * inline_bytes as usize].into(),
            inline_bytes: inline_bytes as usize,
            signal_every,
            silent: 0,
            post,
        }
    }

    /// An empty one with the same device's function.
    pub(crate) fn emptied(&self) -> Self {
        Self::new(0, 0, 1, 0, 1, self.post)
    }

    /// Queues a request; nothing is handed over yet.
    pub(crate) fn push(&mut self, request: &Request<'_>, domain: &Arc<Domain>, id: QueueId) -> Result<(), Refusal> {
        self.check(request, domain)?;
        let sequence = self.slots.next_sequence();
        let index = self.slots.head() as usize & (self.requests.len() - 1);
        let (opcode, remote, immediate) = match request.operation {
            Operation::Write { to } => (WR_RDMA_WRITE, to, 0),
            Operation::WriteImmediate { to, immediate } => (WR_RDMA_WRITE_WITH_IMM, to, immediate),
            Operation::Read { from } => (WR_RDMA_READ, from, 0),
            Operation::Send => (WR_SEND, Remote::default(), 0),
            Operation::SendImmediate { immediate } => (WR_SEND_WITH_IMM, Remote::default(), immediate),
        };
        let per_request = self.slots.stride().max(1);
        let places = &mut self.pieces[index * per_request..][..per_request];
        let (count, inline) = match request.payload {
            Payload::Pieces(pieces) => {
                let count = fill(places, pieces);
                self.slots.push(request.token, pieces.iter().map(|piece| piece.memory));
                (count, 0)
            }
            Payload::Inline(bytes) => {
                let copy = &mut self.inline[index * self.inline_bytes..][..bytes.len()];
                copy.copy_from_slice(bytes);
                places[0] = ibv_sge { addr: copy.as_ptr().addr() as u64, length: bytes.len() as u32, lkey: 0 };
                self.slots.push(request.token, std::iter::empty());
                (usize::from(!bytes.is_empty()), SEND_INLINE)
            }
        };
        self.silent += 1;
        let signalled = request.signalled || self.silent >= self.signal_every;
        if signalled {
            self.silent = 0;
        }
        let bit = |set: bool, bits: u32| if set { bits } else { 0 };
        let sg_list = places.as_mut_ptr();
        let next = (index + 1) & (self.requests.len() - 1);
        let next = &raw mut self.requests[next];
        let place = &mut self.requests[index];
        place.wr_id = request_id(Kind::Send, sequence, id);
        place.next = next;
        place.sg_list = sg_list;
        place.num_sge = count as i32;
        place.opcode = opcode;
        place.send_flags = inline
            | bit(signalled, SEND_SIGNALED)
            | bit(request.fenced, SEND_FENCE)
            | bit(request.solicited, SEND_SOLICITED);
        place.imm_data = immediate.to_be();
        place.remote_addr = remote.address;
        place.rkey = remote.key;
        Ok(())
    }

    fn check(&self, request: &Request<'_>, domain: &Arc<Domain>) -> Result<(), Refusal> {
        if self.slots.room() == 0 {
            return Err(Refusal::Full);
        }
        if self.slots.unsent() as usize >= self.requests.len() {
            return Err(Refusal::BatchFull);
        }
        let reads = matches!(request.operation, Operation::Read { .. });
        match request.payload {
            Payload::Inline(_) if reads => Err(Refusal::InlineRead),
            Payload::Inline(bytes) if bytes.len() > self.inline_bytes => {
                Err(Refusal::TooLongInline { bytes: bytes.len(), limit: self.inline_bytes })
            }
            Payload::Inline(_) => Ok(()),
            Payload::Pieces(pieces) => check_pieces(pieces, self.slots.stride(), reads, domain),
        }
    }

    /// Hands everything that is queued to the device, with one call.
    pub(crate) fn flush(&mut self, queue: *mut ibv_qp, signal_last: bool) -> Result<usize, PostError> {
        let count = self.slots.unsent();
        if count == 0 {
            return Ok(0);
        }
        let mask = self.requests.len() - 1;
        let first = self.slots.first_unsent() as usize & mask;
        let last = self.slots.head().wrapping_sub(1) as usize & mask;
        if signal_last {
            self.requests[last].send_flags |= SEND_SIGNALED;
            self.silent = 0;
        }
        let after = std::mem::replace(&mut self.requests[last].next, ptr::null_mut());
        let base = self.requests.as_mut_ptr();
        let mut bad = ptr::null_mut();
        // SAFETY: the chain runs from the first to the last unsent request inside our ring and ends there; the pieces
        // name registered memory that the slots hold until the requests are over; the queue pair is alive. The device
        // copies requests and inline bytes before it returns.
        let result = unsafe { (self.post)(queue, base.add(first), &raw mut bad) };
        self.requests[last].next = after;
        if result == 0 {
            self.slots.sent(count);
            return Ok(count as usize);
        }
        // Which one was refused; a device that names none has taken them all and failed to tell the hardware.
        let refused = index_of(base, bad, self.requests.len());
        let posted = refused.map_or(count, |refused| (refused.wrapping_sub(first) & mask) as u32).min(count);
        self.slots.sent(posted);
        let source = io::Error::from_raw_os_error(result.saturating_abs());
        Err(PostError { posted: posted as usize, unsent: (count - posted) as usize, source })
    }

    /// Whether requests were queued since the last signalled one: nothing will announce that they are over.
    pub(crate) fn has_silent_tail(&self) -> bool {
        self.silent > 0 && self.slots.outstanding() + self.slots.unsent() > 0
    }

    /// The queue starts anew.
    pub(crate) fn heal(&mut self) {
        self.silent = 0;
        self.slots.heal();
    }
}

/// Fills in pieces for the device; returns how many. Empty ones are left out: to some devices zero means 2 GiB.
pub(crate) fn fill(places: &mut [ibv_sge], pieces: &[Piece<'_>]) -> usize {
    let mut count = 0;
    for piece in pieces.iter().filter(|piece| piece.bytes() > 0) {
        places[count] = piece.raw();
        count += 1;
    }
    count
}

/// Whether pieces fit a queue and its domain, and may be written if they will be.
pub(crate) fn check_pieces(
    pieces: &[Piece<'_>],
    limit: usize,
    written: bool,
    domain: &Arc<Domain>,
) -> Result<(), Refusal> {
    if pieces.len() > limit {
        return Err(Refusal::TooManyPieces { pieces: pieces.len(), limit });
    }
    for piece in pieces {
        if !piece.memory.is_of(domain) {
            return Err(Refusal::OtherDomain);
        }
        if written && !piece.memory.device_may_write() {
            return Err(Refusal::NotWritable);
        }
    }
    Ok(())
}

/// Which element of an array a pointer is.
pub(crate) fn index_of<T>(base: *const T, element: *const T, length: usize) -> Option<usize> {
    let index = element.addr().checked_sub(base.addr())? / size_of::<T>();
    (!element.is_null() && index < length).then_some(index)
}

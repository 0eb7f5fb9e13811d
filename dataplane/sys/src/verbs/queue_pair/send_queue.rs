//! Send queue of a queue pair: requests are chained as they are queued and posted with one doorbell.
//!
//! Only as many requests as one flush may post have room here, because a device copies them when it accepts them; the
//! tokens and the memory of those in flight are in `Slots`. The common request, with one piece in the same memory as
//! its predecessor, allocates nothing.

use crate::verbs::completion::{Kind, QueueId, request_id, sequence_bits};
use crate::verbs::connection::QueuePairOptions;
use crate::verbs::error::{PostError, Refusal};
use crate::verbs::ffi::*;
use crate::verbs::memory::{Domain, MemoryRegion, Piece};
use crate::verbs::slots::{RetiredRequest, Slots};
use libc::c_int;
use std::collections::VecDeque;
use std::io;
use std::ptr;
use std::sync::Arc;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Operation {
    /// Writes to the peer's memory.
    Write { to: Remote },
    /// Writes to the peer's memory and then completes one of its receives with an immediate value.
    WriteImmediate { to: Remote, immediate: u32 },
    /// Reads the peer's memory.
    Read { from: Remote },
    /// Sends a message to one of the peer's receives.
    Send,
    /// Sends a message with an immediate value.
    SendImmediate { immediate: u32 },
}

impl Operation {
    pub(crate) fn is_read(&self) -> bool {
        matches!(self, Self::Read { .. })
    }

    /// Returns the opcode, the remote address with its key, and the immediate value.
    fn raw(self) -> (u32, Remote, u32) {
        match self {
            Self::Write { to } => (WR_RDMA_WRITE, to, 0),
            Self::WriteImmediate { to, immediate } => (WR_RDMA_WRITE_WITH_IMM, to, immediate),
            Self::Read { from } => (WR_RDMA_READ, from, 0),
            Self::Send => (WR_SEND, Remote::default(), 0),
            Self::SendImmediate { immediate } => (WR_SEND_WITH_IMM, Remote::default(), immediate),
        }
    }
}

/// Location in a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Remote {
    /// Address, as defined by the peer's registration.
    pub address: u64,
    /// Remote key of the peer's registration.
    pub key: u32,
}

/// Local side of a request.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Registered memory, in order.
    Pieces(&'a [Piece<'a>]),
    /// A few bytes that are copied at once; not for reads.
    Inline(&'a [u8]),
}

/// A request. Unsignalled ones complete together with the next signalled one behind them.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Token of the caller.
    pub token: u64,
    /// Operation of the request.
    pub operation: Operation,
    /// Local side of the request.
    pub payload: Payload<'a>,
    /// Requests a completion. Some requests get one anyway, so that the queue never fills with unsignalled ones.
    pub signalled: bool,
    /// Waits until earlier reads have completed.
    pub fenced: bool,
    /// Wakes a peer that waits for solicited completions only.
    pub solicited: bool,
}

impl<'a> Request<'a> {
    /// A request that is neither signalled nor fenced nor solicited.
    #[must_use]
    pub const fn new(token: u64, operation: Operation, payload: Payload<'a>) -> Self {
        Self { token, operation, payload, signalled: false, fenced: false, solicited: false }
    }
}

/// A request in the device's format, with its first piece.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::verbs) struct PreparedRequest {
    pub(in crate::verbs) request: ibv_send_wr,
    pub(in crate::verbs) piece: ibv_sge,
}

/// Pool of equally sized places for data of one flush's requests: allocated on first use, because many queues never
/// need them, and then kept.
struct Places<T> {
    each: usize,
    chunks: Vec<Box<[T]>>,
    /// Free places.
    free: Vec<usize>,
    /// Requests that were not posted at the last check, and their places, oldest first.
    used: VecDeque<(u32, usize)>,
}

/// Number of places per chunk.
const CHUNK: usize = 8;

impl<T: Clone + Default> Places<T> {
    const fn new(each: u32) -> Self {
        Self { each: each as usize, chunks: Vec::new(), free: Vec::new(), used: VecDeque::new() }
    }

    /// Returns a place for the next request of these slots: at most as many are in use as requests wait to be posted.
    fn take(&mut self, slots: &Slots) -> &mut [T] {
        let (head, unsent) = (slots.head(), slots.unsent());
        // Distances back from the next request: later ones were dropped, much earlier ones are posted.
        let waits = |&(at, _): &(u32, usize)| (1..=unsent).contains(&head.wrapping_sub(at));
        while let Some((_, place)) = self.used.pop_front_if(|used| !waits(used)) {
            self.free.push(place);
        }
        while let Some((_, place)) = self.used.pop_back_if(|used| !waits(used)) {
            self.free.push(place);
        }
        if self.free.is_empty() {
            let first = self.chunks.len() * CHUNK;
            self.free.extend((first..first + CHUNK).rev());
            self.chunks.push(vec![T::default(); CHUNK * self.each].into());
        }
        let place = self.free.pop().unwrap_or_default();
        self.used.push_back((head, place));
        &mut self.chunks[place / CHUNK][place % CHUNK * self.each..][..self.each]
    }
}

/// Requests of one flush, chained, over the slots of those in flight.
pub(crate) struct SendQueue {
    pub(crate) slots: Slots,
    /// A ring in which each request points to the next.
    pub(in crate::verbs) ring: Box<[PreparedRequest]>,
    /// Places for requests of several pieces.
    pieces: Places<ibv_sge>,
    /// Places for the bytes of inline requests.
    inline: Places<u8>,
    pub(in crate::verbs) signal_every: u32,
    /// Number of requests since the last signalled one.
    pub(in crate::verbs) silent: u32,
    /// Part of the requests' ids that identifies the queue.
    pub(in crate::verbs) id: u64,
    post: PostSend,
}

// SAFETY: the pointers inside refer to memory of this queue only; the queue is moved as a whole, and the boxes do not
// move.
unsafe impl Send for SendQueue {}

impl SendQueue {
    pub(crate) fn new(options: &QueuePairOptions, id: QueueId, signal_every: u32, post: PostSend) -> Self {
        let places = options.batch.next_power_of_two() as usize;
        let request = ibv_send_wr {
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
        let mut ring: Box<[PreparedRequest]> =
            vec![PreparedRequest { request, piece: ibv_sge::default() }; places].into();
        let base = ring.as_mut_ptr();
        for (index, place) in ring.iter_mut().enumerate() {
            place.request.next = base.wrapping_add((index + 1) & (places - 1)).cast();
        }
        Self {
            slots: Slots::new(options.send_depth, options.send_pieces, false),
            ring,
            pieces: Places::new(options.send_pieces),
            inline: Places::new(options.inline_bytes),
            signal_every,
            silent: 0,
            id: request_id(Kind::Send, 0, id),
            post,
        }
    }

    /// Takes everything out permanently.
    pub(crate) fn emptied(&mut self) -> Self {
        let nothing =
            QueuePairOptions { send_depth: 0, send_pieces: 0, batch: 1, inline_bytes: 0, ..Default::default() };
        let empty = Self::new(&nothing, QueueId { index: 0, generation: 0 }, 1, self.post);
        std::mem::replace(self, empty)
    }

    /// Queues a request without posting it.
    #[inline]
    pub(crate) fn push(&mut self, request: &Request<'_>, domain: &Arc<Domain>) -> Result<(), Refusal> {
        self.check_room()?;
        let (index, sequence) = (self.next(), self.slots.next_sequence());
        let (count, inline) = match request.payload {
            Payload::Pieces(pieces) => (self.prepare_pieces(index, request, pieces, domain)?, 0),
            Payload::Inline(bytes) => (self.prepare_inline(index, request, bytes)?, SEND_INLINE),
        };
        let (opcode, remote, immediate) = request.operation.raw();
        let signalled = self.is_signalled(request.signalled);
        let place = &mut self.ring[index].request;
        place.wr_id = self.id | sequence_bits(sequence);
        place.num_sge = count;
        place.opcode = opcode;
        place.send_flags = inline
            | (u32::from(signalled) * SEND_SIGNALED)
            | (u32::from(request.fenced) * SEND_FENCE)
            | (u32::from(request.solicited) * SEND_SOLICITED);
        place.imm_data = immediate.to_be();
        place.remote_addr = remote.address;
        place.rkey = remote.key;
        Ok(())
    }

    #[inline]
    pub(in crate::verbs) fn check_room(&self) -> Result<(), Refusal> {
        if self.slots.room() == 0 {
            return Err(Refusal::Full);
        }
        if self.slots.unsent() as usize >= self.ring.len() {
            return Err(Refusal::BatchFull);
        }
        Ok(())
    }

    /// Returns the ring index of the next request.
    #[inline]
    fn next(&self) -> usize {
        self.slots.head() as usize & (self.ring.len() - 1)
    }

    /// Returns true if the next request is to be signalled.
    #[inline]
    fn is_signalled(&mut self, wanted: bool) -> bool {
        self.silent += 1;
        let signalled = wanted | (self.silent >= self.signal_every);
        if signalled {
            self.silent = 0;
        }
        signalled
    }

    /// Prepares a request with any number of pieces.
    fn prepare_pieces(
        &mut self,
        index: usize,
        request: &Request<'_>,
        pieces: &[Piece<'_>],
        domain: &Arc<Domain>,
    ) -> Result<c_int, Refusal> {
        let stride = self.slots.stride();
        check_pieces(pieces, stride, request.operation.is_read(), domain)?;
        let places = self.pieces.take(&self.slots);
        let count = fill(places, pieces);
        self.ring[index].request.sg_list = places.as_mut_ptr();
        self.slots.push(request.token, pieces);
        Ok(count as c_int)
    }

    fn prepare_inline(&mut self, index: usize, request: &Request<'_>, bytes: &[u8]) -> Result<c_int, Refusal> {
        if request.operation.is_read() {
            return Err(Refusal::InlineRead);
        }
        if bytes.len() > self.inline.each {
            return Err(Refusal::TooLongInline { bytes: bytes.len(), limit: self.inline.each });
        }
        let copy = &mut self.inline.take(&self.slots)[..bytes.len()];
        copy.copy_from_slice(bytes);
        let place = &mut self.ring[index];
        let addr = copy.as_ptr().expose_provenance() as u64;
        place.piece = ibv_sge { addr, length: bytes.len() as u32, lkey: 0 };
        place.request.sg_list = &raw mut place.piece;
        self.slots.push(request.token, &[]);
        Ok(c_int::from(!bytes.is_empty()))
    }

    /// Posts all queued requests with one call.
    pub(crate) fn flush(&mut self, queue: *mut ibv_qp, signal_last: bool) -> Result<usize, PostError> {
        let count = self.slots.unsent();
        if count == 0 {
            return Ok(0);
        }
        let mask = self.ring.len() - 1;
        let first = self.slots.first_unsent() as usize & mask;
        let last = self.slots.head().wrapping_sub(1) as usize & mask;
        if signal_last {
            self.ring[last].request.send_flags |= SEND_SIGNALED;
            self.silent = 0;
        }
        let base = self.ring.as_mut_ptr();
        let mut bad = ptr::null_mut();
        // SAFETY: the chain runs from the first to the last unsent request inside the ring and ends there; the pieces
        // refer to registered memory that the slots hold until the requests complete; the queue pair is alive. The
        // device copies requests and inline bytes before it returns.
        let result = unsafe {
            let end = &raw mut (*base.add(last)).request.next;
            let after = end.replace(ptr::null_mut());
            let result = (self.post)(queue, base.add(first).cast(), &raw mut bad);
            end.write(after);
            result
        };
        if result == 0 {
            self.slots.sent(count);
            return Ok(count as usize);
        }
        // Finds the rejected request; a device that names none has accepted all and failed to ring the hardware's
        // doorbell.
        let refused = index_of(base, bad.cast(), self.ring.len());
        let posted = refused.map_or(count, |refused| (refused.wrapping_sub(first) & mask) as u32).min(count);
        self.slots.sent(posted);
        let source = io::Error::from_raw_os_error(result.saturating_abs());
        Err(PostError { posted: posted as usize, unsent: (count - posted) as usize, source })
    }

    /// Returns true if requests were queued since the last signalled one: their completion is not reported.
    pub(crate) fn has_silent_tail(&self) -> bool {
        self.silent > 0 && self.slots.outstanding() + self.slots.unsent() > 0
    }

    /// Drops requests that were not posted.
    pub(crate) fn abandon(&mut self, each: &mut impl FnMut(RetiredRequest)) {
        if self.slots.unsent() > 0 && self.slots.outstanding() > 0 {
            // The signalled one may have been among them.
            self.silent = self.silent.max(1);
        }
        self.slots.abandon_unsent(each);
    }

    /// Resets the queue for reuse.
    pub(crate) fn heal(&mut self) {
        self.silent = 0;
        self.slots.heal();
    }
}

/// Writes pieces in the device's format; returns their number. Empty ones are omitted: some devices take zero as 2 GiB.
pub(crate) fn fill(places: &mut [ibv_sge], pieces: &[Piece<'_>]) -> usize {
    let mut count = 0;
    for piece in pieces.iter().filter(|piece| piece.bytes() > 0) {
        places[count] = piece.raw();
        count += 1;
    }
    count
}

/// Checks that pieces fit a queue and its domain, and are writable if they will be written.
#[inline]
pub(crate) fn check_pieces(
    pieces: &[Piece<'_>],
    limit: usize,
    written: bool,
    domain: &Arc<Domain>,
) -> Result<(), Refusal> {
    if pieces.len() > limit {
        return Err(Refusal::TooManyPieces { pieces: pieces.len(), limit });
    }
    pieces.iter().try_for_each(|piece| check_memory(piece.memory, written, domain))
}

/// Checks the memory of one piece.
#[inline]
pub(in crate::verbs) fn check_memory(
    memory: &MemoryRegion,
    written: bool,
    domain: &Arc<Domain>,
) -> Result<(), Refusal> {
    if !memory.is_of(domain) {
        return Err(Refusal::OtherDomain);
    }
    if written && !memory.device_may_write() {
        return Err(Refusal::NotWritable);
    }
    Ok(())
}

/// Returns the index of an array element from its pointer.
pub(crate) fn index_of<T>(base: *const T, element: *const T, length: usize) -> Option<usize> {
    let index = element.addr().checked_sub(base.addr())? / size_of::<T>();
    (!element.is_null() && index < length).then_some(index)
}

//! Receive queues: of one queue pair, in order, or shared by several, in order of message arrival.

use crate::verbs::completion::{Completion, Kind, QueueId, request_id};
use crate::verbs::context::Context;
use crate::verbs::error::{PostError, Refusal, VerbsError};
use crate::verbs::ffi::*;
use crate::verbs::memory::{Domain, MemoryRegion, Piece, ProtectionDomain};
use crate::verbs::send_queue::{check_pieces, fill, index_of};
use crate::verbs::slots::{RetiredRequest, Slots};
use libc::c_int;
use std::fmt;
use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Receives of one flush, as a ring in which each points to the next.
struct Chain {
    requests: Box<[ibv_recv_wr]>,
    pieces: Box<[ibv_sge]>,
    per_request: usize,
}

// SAFETY: the pointers inside refer to memory of this chain only; the boxes do not move.
unsafe impl Send for Chain {}

impl Chain {
    fn new(batch: u32, stride: u32) -> Self {
        let slots = batch.next_power_of_two() as usize;
        let empty = ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };
        let pieces = vec![ibv_sge::default(); slots * stride as usize].into();
        Self { requests: vec![empty; slots].into(), pieces, per_request: stride as usize }
    }

    fn put(&mut self, at: u32, wr_id: u64, pieces: &[Piece<'_>]) {
        let mask = self.requests.len() - 1;
        let index = at as usize & mask;
        let slots = &mut self.pieces[index * self.per_request..][..self.per_request];
        let num_sge = fill(slots, pieces) as c_int;
        let sg_list = slots.as_mut_ptr();
        let next = &raw mut self.requests[(index + 1) & mask];
        self.requests[index] = ibv_recv_wr { wr_id, next, sg_list, num_sge };
    }

    /// Posts `count` receives from `first` on with `post`; returns the number accepted, and the result.
    fn post(
        &mut self,
        first: u32,
        count: u32,
        post: impl FnOnce(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    ) -> (u32, Result<usize, PostError>) {
        if count == 0 {
            return (0, Ok(0));
        }
        let mask = self.requests.len() - 1;
        let last = first.wrapping_add(count - 1) as usize & mask;
        let first = first as usize & mask;
        let after = mem::replace(&mut self.requests[last].next, ptr::null_mut());
        let base = self.requests.as_mut_ptr();
        let mut bad = ptr::null_mut();
        let result = post(base.wrapping_add(first), &raw mut bad);
        self.requests[last].next = after;
        if result == 0 {
            return (count, Ok(count as usize));
        }
        let refused = index_of(base, bad, self.requests.len());
        let posted = refused.map_or(count, |refused| (refused.wrapping_sub(first) & mask) as u32).min(count);
        let source = io::Error::from_raw_os_error(result.saturating_abs());
        (posted, Err(PostError { posted: posted as usize, unsent: (count - posted) as usize, source }))
    }
}

/// Receives of one queue pair.
pub(crate) struct ReceiveQueue {
    pub(crate) slots: Slots,
    chain: Chain,
    post: PostRecv,
}

impl ReceiveQueue {
    pub(crate) fn new(depth: u32, stride: u32, batch: u32, post: PostRecv) -> Self {
        // A queue pair with a shared receive queue has no receives of its own.
        Self { slots: Slots::new(depth, stride, true), chain: Chain::new(batch.min(depth), stride), post }
    }

    /// Takes everything out permanently.
    pub(crate) fn emptied(&mut self) -> Self {
        let empty = Self::new(0, 0, 1, self.post);
        mem::replace(self, empty)
    }

    pub(crate) fn push(
        &mut self,
        token: u64,
        pieces: &[Piece<'_>],
        domain: &Arc<Domain>,
        id: QueueId,
    ) -> Result<(), Refusal> {
        if self.slots.room() == 0 {
            return Err(Refusal::Full);
        }
        if self.slots.unsent() as usize >= self.chain.requests.len() {
            return Err(Refusal::BatchFull);
        }
        check_pieces(pieces, self.slots.stride(), true, domain)?;
        let wr_id = request_id(Kind::Receive, self.slots.next_sequence(), id);
        self.chain.put(self.slots.head(), wr_id, pieces);
        self.slots.push(token, pieces);
        Ok(())
    }

    pub(crate) fn flush(&mut self, queue: *mut ibv_qp) -> Result<usize, PostError> {
        let (first, count, post) = (self.slots.first_unsent(), self.slots.unsent(), self.post);
        // SAFETY: the chain belongs to this queue and is terminated, its pieces refer to registered memory that the
        // slots hold until the receives complete; the queue pair is alive.
        let (posted, result) = self.chain.post(first, count, |chain, bad| unsafe { post(queue, chain, bad) });
        self.slots.sent(posted);
        result
    }
}

/// Number of shared queues created so far; names are not reused.
static SHARED_NAMES: AtomicU32 = AtomicU32::new(0);
const NAME_BITS: u32 = 20;
const PLACE_BITS: u32 = 16;
const USE_BITS: u32 = 26;

/// Shared receive queue of several queue pairs. One owner posts and retires; it may move between threads. Queue pairs
/// keep the device's queue alive; the memory of receives is held until they are retired, or until this queue and the
/// last of its queue pairs are dropped.
pub struct SharedReceiveQueue {
    slots: Box<[ReceiveSlot]>,
    held: Box<[Option<MemoryRegion>]>,
    free: Vec<u16>,
    /// Queued receives that are not posted, in order.
    unsent: u32,
    first_unsent: u32,
    batch: u32,
    chain: Chain,
    stride: usize,
    name: u32,
    inner: Arc<SharedQueue>,
}

#[derive(Clone, Copy)]
struct ReceiveSlot {
    token: u64,
    /// Number of uses of the place: part of a receive's id.
    uses: u32,
    taken: bool,
}

pub(crate) struct SharedQueue {
    raw: NonNull<ibv_srq>,
    post: PostSrqRecv,
    /// Memory of receives that were never retired, once their owner is gone.
    orphans: Mutex<Box<[Option<MemoryRegion>]>>,
    pub(crate) domain: Arc<Domain>,
}

// SAFETY: shared queues may be used from several threads at the same time.
unsafe impl Send for SharedQueue {}
// SAFETY: as above.
unsafe impl Sync for SharedQueue {}

impl SharedQueue {
    pub(crate) fn raw(&self) -> *mut ibv_srq {
        self.raw.as_ptr()
    }
}

impl SharedReceiveQueue {
    /// Creates a queue for `depth` receives of up to `pieces` pieces, posted in batches of at most `batch`.
    ///
    /// # Errors
    /// When the device supports fewer, or no shared receive queues.
    pub fn new(domain: &ProtectionDomain, depth: u32, pieces: u32, batch: u32) -> Result<Self, VerbsError> {
        let context: &Arc<Context> = domain.context();
        let most = context.limits().shared_depth.min(u32::from(u16::MAX));
        context.limit("receives in a shared queue", depth.into(), most.into())?;
        context.limit("pieces of a receive", pieces.into(), context.limits().pieces.into())?;
        let (depth, batch) = (depth.max(1), batch.clamp(1, depth.max(1)));
        let name = SHARED_NAMES.fetch_add(1, Ordering::Relaxed);
        if name >= 1 << NAME_BITS {
            SHARED_NAMES.store(1 << NAME_BITS, Ordering::Relaxed);
            context.limit("shared queues of one process", u64::from(name) + 1, 1 << NAME_BITS)?;
        }
        let mut options =
            ibv_srq_init_attr { srq_context: ptr::null_mut(), max_wr: depth, max_sge: pieces, srq_limit: 0 };
        // SAFETY: the domain is alive and stays so; the library reads and updates the options.
        let raw = unsafe { (context.functions().create_srq)(domain.inner().raw(), &raw mut options) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(
                context.refused(format!("create a shared queue of {depth} receives"), io::Error::last_os_error())
            );
        };
        // SAFETY: the queue is alive, and its function table was filled when the device was opened.
        let post = unsafe { (*(*raw.as_ptr()).context).ops.post_srq_recv };
        let (orphans, domain) = (Mutex::default(), Arc::clone(domain.inner()));
        let inner = Arc::new(SharedQueue { raw, post, orphans, domain });
        Ok(Self {
            slots: vec![ReceiveSlot { token: 0, uses: 0, taken: false }; depth as usize].into(),
            held: vec![None; (depth * pieces) as usize].into(),
            free: (0..depth as u16).rev().collect(),
            unsent: 0,
            first_unsent: 0,
            batch,
            chain: Chain::new(batch, pieces),
            stride: pieces as usize,
            name,
            inner,
        })
    }

    pub(crate) fn inner(&self) -> &Arc<SharedQueue> {
        &self.inner
    }

    /// Queues a receive into these pieces; [`SharedReceiveQueue::flush`] posts it.
    ///
    /// # Errors
    /// When it does not fit; no state was changed.
    pub fn push(&mut self, token: u64, pieces: &[Piece<'_>]) -> Result<(), Refusal> {
        if self.unsent >= self.batch {
            return Err(Refusal::BatchFull);
        }
        check_pieces(pieces, self.stride, true, &self.inner.domain)?;
        let slot = self.free.pop().ok_or(Refusal::Full)?;
        let index = usize::from(slot);
        let uses = self.slots[index].uses;
        self.slots[index] = ReceiveSlot { token, uses, taken: true };
        for (held, piece) in self.held[index * self.stride..][..self.stride].iter_mut().zip(pieces) {
            *held = Some(piece.memory.clone());
        }
        let wr_id = (Kind::Shared as u64) << 62
            | u64::from(self.name) << (PLACE_BITS + USE_BITS)
            | u64::from(uses) << PLACE_BITS
            | u64::from(slot);
        let at = self.first_unsent.wrapping_add(self.unsent);
        self.chain.put(at, wr_id, pieces);
        self.unsent += 1;
        Ok(())
    }

    /// Posts all queued receives with one call; returns their number.
    ///
    /// # Errors
    /// When the device accepted fewer.
    pub fn flush(&mut self) -> Result<usize, PostError> {
        let (queue, post) = (self.inner.raw.as_ptr(), self.inner.post);
        let (posted, result) = self
            .chain
            // SAFETY: the chain belongs to this queue and is terminated, its pieces refer to registered memory that
            // `held` keeps until the receives complete; the queue is alive.
            .post(self.first_unsent, self.unsent, |chain, bad| unsafe { post(queue, chain, bad) });
        self.first_unsent = self.first_unsent.wrapping_add(posted);
        self.unsent -= posted;
        result
    }

    /// Returns the number of receives that can be queued before completions must be retired.
    #[must_use]
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of queued receives that are not posted.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.unsent as usize
    }

    /// Retires the receive of a completion. Returns `None` if it belongs to another queue.
    pub fn retire(&mut self, completion: &Completion<'_>) -> Option<RetiredRequest> {
        let id = completion.raw_id();
        let name = (id >> (PLACE_BITS + USE_BITS)) as u32 & ((1 << NAME_BITS) - 1);
        let uses = (id >> PLACE_BITS) as u32 & ((1 << USE_BITS) - 1);
        let index = usize::from(id as u16);
        if completion.kind() != Some(Kind::Shared) || name != self.name {
            return None;
        }
        let slot = self.slots.get_mut(index).filter(|slot| slot.taken && slot.uses == uses)?;
        slot.taken = false;
        slot.uses = (uses + 1) & ((1 << USE_BITS) - 1);
        let token = slot.token;
        for held in &mut self.held[index * self.stride..][..self.stride] {
            *held = None;
        }
        self.free.push(index as u16);
        Some(RetiredRequest { token, status: completion.status(), receive: true })
    }
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        // Until the device's queue is destroyed, receives may still be consumed.
        *self.inner.orphans.lock().unwrap_or_else(PoisonError::into_inner) = mem::take(&mut self.held);
    }
}

impl Drop for SharedQueue {
    fn drop(&mut self) {
        // SAFETY: the queue pairs on it held an Arc of it, so none is left; destroyed once.
        if unsafe { (self.domain.context.functions().destroy_srq)(self.raw.as_ptr()) } != 0 {
            let orphans = self.orphans.get_mut().unwrap_or_else(PoisonError::into_inner);
            mem::forget((mem::take(orphans), Arc::clone(&self.domain)));
        }
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let depth = self.slots.len();
        write!(f, "SharedReceiveQueue({} of {depth} taken)", depth - self.free.len())
    }
}

//! Queue pairs: reliable connections to a peer.
//!
//! The caller sets all attributes of a connection; there are no hidden defaults. A queue pair belongs to one thread at
//! a time. Its posted requests hold their memory; when it is dropped, the device destroys it first, and the memory is
//! released after that.

pub(super) mod connection;
pub(super) mod one_sided;
pub(super) mod receive_queue;
pub(super) mod send_queue;
pub(super) mod slots;
pub(super) mod states;

use super::completion::{Completion, Kind, QueueId, Status};
use super::completion_queue::{CompletionQueue, Queue};
use super::context::Context;
use super::error::{PostError, Refusal, VerbsError};
use super::ffi::*;
use super::memory::{Domain, Piece, ProtectionDomain};
use connection::{Connection, PeerAccess, QueuePairOptions};
use libc::c_int;
use one_sided::{OneSided, OneSidedRun};
use receive_queue::{ReceiveQueue, SharedQueue, SharedReceiveQueue};
use send_queue::{Remote, Request, SendQueue};
use slots::RetiredRequest;
use states::QueueState;
use std::cell::Cell;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::mem::{self, ManuallyDrop};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Limit of requests in one queue: sequence numbers have room for more, to tell old ones from new ones.
const MAX_DEPTH: u32 = 1 << 16;

/// A reliable connection. One thread at a time posts and retires; it may move between threads, but is not shared.
///
/// If it is dropped with requests in flight, the device destroys it at once, but some devices leave its completions in
/// the completion queue, where they take room until they are polled: fail and drain it first if there is time.
pub struct QueuePair {
    raw: NonNull<ibv_qp>,
    qp_num: u32,
    state: QueueState,
    id: QueueId,
    inline_bytes: u32,
    completions: u32,
    send: ManuallyDrop<SendQueue>,
    receive: ManuallyDrop<ReceiveQueue>,
    shared: Option<Arc<SharedQueue>>,
    queue: Arc<Queue>,
    domain: Arc<Domain>,
    not_sync: PhantomData<Cell<()>>,
}

// SAFETY: a queue pair may be used from any thread; all methods that access its queues take `&mut self`.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// Creates a queue pair in state `Reset`, with completions on `queue` and receives from `shared`, if given. The
    /// completion queue reserves room for as many completions as the options allow concurrently; the caller must leave
    /// room for those of a shared queue's receives.
    ///
    /// # Errors
    /// When the device or the completion queue cannot satisfy the options, or the parts belong to several devices.
    pub fn new(
        domain: &ProtectionDomain,
        queue: &CompletionQueue,
        shared: Option<&SharedReceiveQueue>,
        options: &QueuePairOptions,
    ) -> Result<Self, VerbsError> {
        let context = domain.context();
        let receive_depth = if shared.is_some() { 0 } else { options.receive_depth };
        check_options(context, options, receive_depth)?;
        let same = Arc::ptr_eq(context, queue.inner().context())
            && shared.is_none_or(|shared| Arc::ptr_eq(&shared.inner().domain, domain.inner()));
        if !same {
            let what = "a queue pair whose parts belong to several devices or domains";
            return Err(VerbsError::NotOffered { device: context.name().to_owned(), what });
        }
        // With a shared queue each of its receives may complete here; its owner has reserved room for that.
        let completions = options.send_depth + receive_depth;
        let id = queue.inner().admit(completions)?;
        let (raw, inline_bytes) = create(domain, queue, shared, options, receive_depth)
            .inspect_err(|_| queue.inner().release(id, completions))?;
        // SAFETY: the queue pair is alive, and its function table was filled when the device was opened.
        let (qp_num, post_send, post_recv) = unsafe {
            let ops = &(*raw.as_ref().context).ops;
            (raw.as_ref().qp_num, ops.post_send, ops.post_recv)
        };
        let signal_every = options.signal_every.clamp(1, (options.send_depth / 2).max(1));
        let batch = options.batch;
        let send = SendQueue::new(options, id, signal_every, post_send);
        let receive = ReceiveQueue::new(receive_depth, options.receive_pieces, batch, post_recv);
        Ok(Self {
            raw,
            qp_num,
            state: QueueState::Reset,
            id,
            inline_bytes,
            completions,
            send: ManuallyDrop::new(send),
            receive: ManuallyDrop::new(receive),
            shared: shared.map(|shared| Arc::clone(shared.inner())),
            queue: Arc::clone(queue.inner()),
            domain: Arc::clone(domain.inner()),
            not_sync: PhantomData,
        })
    }

    /// Returns its number on the device, for the peer.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.qp_num
    }

    /// Returns its id on its completion queue.
    #[must_use]
    pub fn id(&self) -> QueueId {
        self.id
    }

    /// Returns its state, as known from calls and completions.
    #[must_use]
    pub fn state(&self) -> QueueState {
        self.state
    }

    /// Returns the inline size of the device in bytes; at least the requested one.
    #[must_use]
    pub fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    /// Assigns a port: from `Reset` to `Initialized`. From here on receives can be posted, and should be before the
    /// peer sends.
    ///
    /// # Errors
    /// In another state, or when the device rejects it.
    pub fn initialize(&mut self, port: u8, pkey_index: u16, access: PeerAccess) -> Result<(), VerbsError> {
        let attributes =
            ibv_qp_attr { port_num: port, pkey_index, qp_access_flags: access.raw(), ..ibv_qp_attr::default() };
        self.modify(QueueState::Initialized, attributes)
    }

    /// Sets the peer: from `Initialized` to `ReadyToReceive`. Uses the attributes of `connection` for the peer's
    /// packets.
    ///
    /// # Errors
    /// In another state, or when the device rejects it, for example because it has no route to the peer.
    pub fn accept_from(&mut self, connection: &Connection) -> Result<(), VerbsError> {
        self.modify(QueueState::ReadyToReceive, connection.receive_attributes())
    }

    /// Enables sending: from `ReadyToReceive` to `ReadyToSend`. Uses the attributes of `connection` for our packets.
    ///
    /// # Errors
    /// In another state, or when the device rejects it.
    pub fn start_sending(&mut self, connection: &Connection) -> Result<(), VerbsError> {
        self.modify(QueueState::ReadyToSend, connection.send_attributes())
    }

    /// Makes all three transitions, from `Reset` to `ReadyToSend`.
    ///
    /// # Errors
    /// Those of the transitions; the queue pair stays in the state that it has reached.
    pub fn connect(&mut self, connection: &Connection) -> Result<(), VerbsError> {
        self.initialize(connection.port, connection.pkey_index, connection.access)?;
        self.accept_from(connection)?;
        self.start_sending(connection)
    }

    /// Moves it to the error state, from any state: posted requests are flushed through the completion queue. To
    /// quiesce: fail, then poll until [`QueuePair::outstanding`] is zero.
    ///
    /// # Errors
    /// When the device rejects it; dropping the queue pair stops it in any case.
    pub fn fail(&mut self) -> Result<(), VerbsError> {
        self.modify(QueueState::Error, ibv_qp_attr::default())
    }

    /// Moves it to `Reset`. The device discards posted requests without completions; `each` is called for all of them.
    ///
    /// # Errors
    /// When the device rejects it; no request is discarded then.
    pub fn reset(&mut self, mut each: impl FnMut(RetiredRequest)) -> Result<(), VerbsError> {
        self.modify(QueueState::Reset, ibv_qp_attr::default())?;
        self.send.slots.forget_sent(&mut each);
        self.receive.slots.forget_sent(&mut each);
        self.abandon(each);
        self.send.heal();
        self.receive.slots.heal();
        Ok(())
    }

    /// Destroys it: the device discards its requests, and `each` is called for all queued or posted ones, as flushed.
    /// Ends quiescing when completions do not arrive.
    pub fn close(mut self, mut each: impl FnMut(RetiredRequest)) {
        if self.destroy() {
            self.send.slots.forget_sent(&mut each);
            self.receive.slots.forget_sent(&mut each);
        }
        self.abandon(each);
    }

    /// Drops queued requests that were not posted, newest first, and releases their memory.
    pub fn abandon(&mut self, mut each: impl FnMut(RetiredRequest)) {
        self.send.abandon(&mut each);
        self.receive.slots.abandon_unsent(&mut each);
    }

    fn modify(&mut self, to: QueueState, mut attributes: ibv_qp_attr) -> Result<(), VerbsError> {
        let from = self.state;
        let mask = from.to(to).ok_or(VerbsError::Transition { from, to })?;
        attributes.qp_state = to.raw();
        let modify = self.context().functions().modify_qp;
        // SAFETY: the queue pair is alive; the library reads the attributes that the mask selects.
        match unsafe { modify(self.raw.as_ptr(), &raw mut attributes, mask as c_int) } {
            0 => {
                self.state = to;
                Ok(())
            }
            error => {
                let source = io::Error::from_raw_os_error(error.saturating_abs());
                Err(self.context().refused(format!("move queue pair {} from {from:?} to {to:?}", self.qp_num), source))
            }
        }
    }

    fn context(&self) -> &Arc<Context> {
        &self.domain.context
    }

    /// Queues a request; [`QueuePair::flush`] posts it. The memory of its pieces is held until it is retired.
    ///
    /// # Errors
    /// When it does not fit, or the queue pair cannot send; no state was changed.
    #[inline]
    pub fn push(&mut self, request: &Request<'_>) -> Result<(), Refusal> {
        if !self.state.takes_sends() {
            return Err(Refusal::State(self.state));
        }
        self.send.push(request, &self.domain)
    }

    /// Queues the common kind of request, see [`QueuePair::push`]: a write to the peer's memory or a read of it, with
    /// one local piece and no flags.
    ///
    /// # Errors
    /// See [`QueuePair::push`].
    #[inline]
    pub fn push_one_sided(
        &mut self,
        token: u64,
        write: bool,
        remote: Remote,
        piece: &Piece<'_>,
    ) -> Result<(), Refusal> {
        if !self.state.takes_sends() {
            return Err(Refusal::State(self.state));
        }
        self.send.push_one_sided(token, write, remote, piece, &self.domain)
    }

    /// Queues a run of requests like [`QueuePair::push_one_sided`]: the first and those that `next` returns, until the
    /// queue is full. Returns their number.
    ///
    /// # Errors
    /// See [`QueuePair::push`], without any change; or a piece is not in the run's memory, and the requests before it
    /// are queued.
    #[inline]
    pub fn push_run<'a>(
        &mut self,
        run: &OneSidedRun<'a>,
        first: OneSided<'a>,
        next: impl FnMut() -> Option<OneSided<'a>>,
    ) -> Result<usize, Refusal> {
        if !self.state.takes_sends() {
            return Err(Refusal::State(self.state));
        }
        self.send.push_run(run, first, &self.domain, next)
    }

    /// Posts all queued requests with one doorbell; returns their number. `signal_last` requests a completion of the
    /// last of them, which covers all; without it, the completion of those behind the last signalled one is known only
    /// when a later one completes (see [`QueuePair::has_silent_tail`]).
    ///
    /// # Errors
    /// When the device accepted fewer; the error gives the number. Those that it accepted proceed.
    #[inline]
    pub fn flush(&mut self, signal_last: bool) -> Result<usize, PostError> {
        self.send.flush(self.raw.as_ptr(), signal_last)
    }

    /// Queues a receive; [`QueuePair::flush_receives`] posts it.
    ///
    /// # Errors
    /// When it does not fit, or the queue pair receives from a shared queue; no state was changed.
    pub fn push_receive(&mut self, token: u64, pieces: &[Piece<'_>]) -> Result<(), Refusal> {
        if self.shared.is_some() {
            return Err(Refusal::Shared);
        }
        if !self.state.takes_receives() {
            return Err(Refusal::State(self.state));
        }
        self.receive.push(token, pieces, &self.domain, self.id)
    }

    /// Posts all queued receives with one call; returns their number.
    ///
    /// # Errors
    /// When the device accepted fewer.
    pub fn flush_receives(&mut self) -> Result<usize, PostError> {
        self.receive.flush(self.raw.as_ptr())
    }

    /// Retires the requests that a completion covers, oldest first, and releases their memory. Returns false if the
    /// completion belongs to another queue pair.
    #[inline]
    pub fn retire(&mut self, completion: &Completion<'_>, mut each: impl FnMut(RetiredRequest)) -> bool {
        let receive = completion.is_receive();
        self.retire_runs(completion, |tokens, status| {
            tokens.iter().for_each(|&token| each(RetiredRequest { token, status, receive }));
        })
    }

    /// Retires requests like [`QueuePair::retire`], and passes the tokens in runs of equal status.
    #[inline]
    pub fn retire_runs(&mut self, completion: &Completion<'_>, mut each: impl FnMut(&[u64], Status)) -> bool {
        let ours = completion.is_from(&self.queue) && completion.id() == self.id && completion.qp_num() == self.qp_num;
        if !ours {
            return false;
        }
        let (sequence, status) = (completion.sequence(), completion.status());
        let retired = match completion.kind() {
            Some(Kind::Send) => self.send.slots.retire_runs(sequence, status, &mut each),
            Some(Kind::Receive) => self.receive.slots.retire_runs(sequence, status, &mut each),
            _ => false,
        };
        if retired && status != Status::Success && self.state != QueueState::Reset {
            self.state = QueueState::Error;
        }
        retired
    }

    /// Returns the number of requests that can be queued before completions must be retired.
    #[must_use]
    pub fn room(&self) -> usize {
        self.send.slots.room() as usize
    }

    /// Returns the number of queued requests that are not posted.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.send.slots.unsent() as usize
    }

    /// Returns the number of posted requests that are not retired.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.send.slots.outstanding() as usize
    }

    /// Returns the number of receives that can be queued before completions must be retired.
    #[must_use]
    pub fn receive_room(&self) -> usize {
        self.receive.slots.room() as usize
    }

    /// Returns the number of posted receives that are not retired.
    #[must_use]
    pub fn receives_outstanding(&self) -> usize {
        self.receive.slots.outstanding() as usize
    }

    /// Returns true if the last requests are unsignalled, so that their completion is not reported: flush with
    /// `signal_last`, or push another request that is signalled, for example an empty write.
    #[must_use]
    pub fn has_silent_tail(&self) -> bool {
        self.send.has_silent_tail()
    }

    /// Destroys the queue pair; returns true if the device has discarded it.
    fn destroy(&mut self) -> bool {
        let raw = mem::replace(&mut self.raw, NonNull::dangling());
        if raw == NonNull::dangling() {
            return true;
        }
        // SAFETY: owned, alive, and destroyed once: the pointer was taken out.
        let gone = unsafe { (self.context().functions().destroy_qp)(raw.as_ptr()) } == 0;
        if gone {
            self.queue.release(self.id, self.completions);
        } else {
            // The device may still process posted requests: their memory and everything they depend on is leaked.
            mem::forget((Arc::clone(&self.domain), Arc::clone(&self.queue), self.shared.clone()));
            mem::forget((self.send.emptied(), self.receive.emptied()));
        }
        gone
    }
}

fn check_options(context: &Context, options: &QueuePairOptions, receive_depth: u32) -> Result<(), VerbsError> {
    let limits = context.limits();
    let depth = limits.queue_depth.min(MAX_DEPTH);
    context.limit("requests of a queue pair", options.send_depth.into(), depth.into())?;
    context.limit("receives of a queue pair", receive_depth.into(), depth.into())?;
    let pieces = options.send_pieces.max(options.receive_pieces);
    context.limit("pieces of a request", pieces.into(), limits.pieces.into())?;
    context.limit("requests of a flush", options.batch.into(), MAX_DEPTH.into())?;
    let empty = options.send_depth == 0 || options.batch == 0;
    if empty {
        let what = "a queue pair that sends nothing: send_depth and batch are at least 1";
        return Err(VerbsError::NotOffered { device: context.name().to_owned(), what });
    }
    Ok(())
}

fn create(
    domain: &ProtectionDomain,
    queue: &CompletionQueue,
    shared: Option<&SharedReceiveQueue>,
    options: &QueuePairOptions,
    receive_depth: u32,
) -> Result<(NonNull<ibv_qp>, u32), VerbsError> {
    let context = domain.context();
    let mut wanted = ibv_qp_init_attr {
        qp_context: ptr::null_mut(),
        send_cq: queue.inner().raw(),
        recv_cq: queue.inner().raw(),
        srq: shared.map_or(ptr::null_mut(), |shared| shared.inner().raw()),
        cap: ibv_qp_cap {
            max_send_wr: options.send_depth,
            max_recv_wr: receive_depth,
            max_send_sge: options.send_pieces.max(1),
            max_recv_sge: if shared.is_some() { 0 } else { options.receive_pieces.max(1) },
            max_inline_data: options.inline_bytes,
        },
        qp_type: QPT_RC,
        sq_sig_all: 0,
    };
    // SAFETY: all parts are alive and stay so; the library reads and updates the options.
    let raw = unsafe { (context.functions().create_qp)(domain.inner().raw(), &raw mut wanted) };
    match NonNull::new(raw) {
        Some(raw) => Ok((raw, wanted.cap.max_inline_data)),
        None => {
            let source = io::Error::last_os_error();
            Err(context.refused(format!("create a queue pair with {options:?}"), source))
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.destroy();
        // SAFETY: dropped once, after the device has discarded the queues; the fields are not used again.
        unsafe {
            ManuallyDrop::drop(&mut self.send);
            ManuallyDrop::drop(&mut self.receive);
        }
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, state) = (self.qp_num, self.state);
        write!(f, "QueuePair({number} {state:?}, {} unsent, {} outstanding)", self.unsent(), self.outstanding())
    }
}

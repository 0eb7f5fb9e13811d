//! Queue pairs: reliable connections to a peer.
//!
//! Everything that a connection is made of is said by the caller; nothing has a hidden default. A queue pair belongs to
//! one thread at a time. What it has posted holds its memory; when it is dropped the device forgets it first, and the
//! memory is let go after that.

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

/// The most requests in one queue: as many as travel in a sequence number with room to tell old from new.
const MAX_DEPTH: u32 = 1 << 16;

/// A reliable connection. One thread at a time posts and retires; it may move between threads, but is not shared.
///
/// Dropped with requests under way, it is gone for the device at once, but some devices leave its completions in the
/// completion queue, where they take room until they are polled: fail and drain it first where there is time.
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

// SAFETY: a queue pair may be used from any thread; all methods that touch its queues take `&mut self`.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// A queue pair in state `Reset`, whose completions go to `queue` and whose receives come from `shared`, if given.
    /// The completion queue has room promised for as many completions as the options allow at the same time; room for
    /// those of a shared queue's receives is for the caller to leave.
    ///
    /// # Errors
    /// When the device or the completion queue has less than the options ask for, or the parts are of several devices.
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
        // With a shared queue each receive of it may complete here; its owner has made room for that.
        let completions = options.send_depth + receive_depth;
        let id = queue.inner().admit(completions)?;
        let (raw, inline_bytes) = create(domain, queue, shared, options, receive_depth)
            .inspect_err(|_| queue.inner().release(id, completions))?;
        // SAFETY: the queue pair is alive, and its table of functions was filled when the device was opened.
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

    /// Its number on the device, for the peer.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.qp_num
    }

    /// Its name on its completion queue.
    #[must_use]
    pub fn id(&self) -> QueueId {
        self.id
    }

    /// Its state, as far as calls and completions have told.
    #[must_use]
    pub fn state(&self) -> QueueState {
        self.state
    }

    /// The bytes that the device takes inline; at least what was asked for.
    #[must_use]
    pub fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    /// Ties it to a port: from `Reset` to `Initialized`. From here on receives can be posted, and should be before the
    /// peer sends.
    ///
    /// # Errors
    /// In another state, or when the device refuses.
    pub fn initialize(&mut self, port: u8, pkey_index: u16, access: PeerAccess) -> Result<(), VerbsError> {
        let attributes =
            ibv_qp_attr { port_num: port, pkey_index, qp_access_flags: access.raw(), ..ibv_qp_attr::default() };
        self.modify(QueueState::Initialized, attributes)
    }

    /// Tells it its peer: from `Initialized` to `ReadyToReceive`. Uses of `connection` what concerns the peer's
    /// packets.
    ///
    /// # Errors
    /// In another state, or when the device refuses, for example because it knows no way to the peer.
    pub fn accept_from(&mut self, connection: &Connection) -> Result<(), VerbsError> {
        self.modify(QueueState::ReadyToReceive, connection.receive_attributes())
    }

    /// Lets it send: from `ReadyToReceive` to `ReadyToSend`. Uses of `connection` what concerns our packets.
    ///
    /// # Errors
    /// In another state, or when the device refuses.
    pub fn start_sending(&mut self, connection: &Connection) -> Result<(), VerbsError> {
        self.modify(QueueState::ReadyToSend, connection.send_attributes())
    }

    /// All three steps, from `Reset` to `ReadyToSend`.
    ///
    /// # Errors
    /// Those of the steps; the queue pair stays where it came to.
    pub fn connect(&mut self, connection: &Connection) -> Result<(), VerbsError> {
        self.initialize(connection.port, connection.pkey_index, connection.access)?;
        self.accept_from(connection)?;
        self.start_sending(connection)
    }

    /// Stops it, from any state: what is posted comes back flushed through the completion queue. For quiescence: fail,
    /// poll until [`QueuePair::outstanding`] is zero.
    ///
    /// # Errors
    /// When the device refuses; dropping the queue pair stops it in any case.
    pub fn fail(&mut self) -> Result<(), VerbsError> {
        self.modify(QueueState::Error, ibv_qp_attr::default())
    }

    /// Takes it back to `Reset`. The device forgets what was posted, without completions; `each` is told all of it.
    ///
    /// # Errors
    /// When the device refuses; nothing is forgotten then.
    pub fn reset(&mut self, mut each: impl FnMut(RetiredRequest)) -> Result<(), VerbsError> {
        self.modify(QueueState::Reset, ibv_qp_attr::default())?;
        self.send.slots.forget_sent(&mut each);
        self.receive.slots.forget_sent(&mut each);
        self.abandon(each);
        self.send.heal();
        self.receive.slots.heal();
        Ok(())
    }

    /// Ends it: the device forgets it, and `each` is told what was still queued or posted, as flushed. The end of
    /// quiescence when completions do not come.
    pub fn close(mut self, mut each: impl FnMut(RetiredRequest)) {
        if self.destroy() {
            self.send.slots.forget_sent(&mut each);
            self.receive.slots.forget_sent(&mut each);
        }
        self.abandon(each);
    }

    /// Drops what is queued and was not handed over, newest first; the memory of it is let go.
    pub fn abandon(&mut self, mut each: impl FnMut(RetiredRequest)) {
        self.send.abandon(&mut each);
        self.receive.slots.abandon_unsent(&mut each);
    }

    fn modify(&mut self, to: QueueState, mut attributes: ibv_qp_attr) -> Result<(), VerbsError> {
        let from = self.state;
        let mask = from.to(to).ok_or(VerbsError::Transition { from, to })?;
        attributes.qp_state = to.raw();
        let modify = self.context().functions().modify_qp;
        // SAFETY: the queue pair is alive; the library reads the attributes that the mask names.
        match unsafe { modify(self.raw.as_ptr(), &raw mut attributes, mask as c_int) } {
            0 => {
                self.state = to;
                Ok(())
            }
            error => {
                let source = io::Error::from_raw_os_error(error.saturating_abs());
                Err(self.context().refused(format!("take queue pair {} from {from:?} to {to:?}", self.qp_num), source))
            }
        }
    }

    fn context(&self) -> &Arc<Context> {
        &self.domain.context
    }

    /// Queues a request; nothing is handed over before [`QueuePair::flush`]. The memory of its pieces is held until it
    /// is retired.
    ///
    /// # Errors
    /// When it does not fit, or the queue pair cannot send; nothing was changed.
    #[inline]
    pub fn push(&mut self, request: &Request<'_>) -> Result<(), Refusal> {
        if !self.state.takes_sends() {
            return Err(Refusal::State(self.state));
        }
        self.send.push(request, &self.domain)
    }

    /// As [`QueuePair::push`], for the usual request: a write to the peer's memory, or a read of it, from or to one
    /// piece of ours, that asks for nothing else.
    ///
    /// # Errors
    /// As there.
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

    /// As [`QueuePair::push_one_sided`], for several in a row: queues the first and what `next` has, as long as there
    /// is room. Returns how many.
    ///
    /// # Errors
    /// As there, and then nothing was changed; or a piece is not of the run's memory, and those before it are queued.
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

    /// Hands everything that is queued to the device, with one doorbell. Returns how many requests. `signal_last` asks
    /// for a completion of the last of them, and so of all; without it, those behind the last signalled one are only
    /// known to be over when a later one is (see [`QueuePair::has_silent_tail`]).
    ///
    /// # Errors
    /// When the device took less; the error says how many. Those it took go their way.
    #[inline]
    pub fn flush(&mut self, signal_last: bool) -> Result<usize, PostError> {
        self.send.flush(self.raw.as_ptr(), signal_last)
    }

    /// Queues a receive; nothing is handed over before [`QueuePair::flush_receives`].
    ///
    /// # Errors
    /// When it does not fit, or the queue pair receives from a shared queue; nothing was changed.
    pub fn push_receive(&mut self, token: u64, pieces: &[Piece<'_>]) -> Result<(), Refusal> {
        if self.shared.is_some() {
            return Err(Refusal::Shared);
        }
        if !self.state.takes_receives() {
            return Err(Refusal::State(self.state));
        }
        self.receive.push(token, pieces, &self.domain, self.id)
    }

    /// Hands all queued receives to the device, with one call. Returns how many.
    ///
    /// # Errors
    /// When the device took less.
    pub fn flush_receives(&mut self) -> Result<usize, PostError> {
        self.receive.flush(self.raw.as_ptr())
    }

    /// Takes back the requests that a completion says are over, oldest first, and lets go of their memory. Returns
    /// false when the completion is not of this queue pair.
    #[inline]
    pub fn retire(&mut self, completion: &Completion<'_>, mut each: impl FnMut(RetiredRequest)) -> bool {
        let receive = completion.is_receive();
        self.retire_runs(completion, |tokens, status| {
            tokens.iter().for_each(|&token| each(RetiredRequest { token, status, receive }));
        })
    }

    /// The same by the tokens of those in a row that ended alike.
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

    /// Requests that may still be queued before completions must be retired.
    #[must_use]
    pub fn room(&self) -> usize {
        self.send.slots.room() as usize
    }

    /// Requests that are queued and not handed over.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.send.slots.unsent() as usize
    }

    /// Requests that the device has and that are not retired.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.send.slots.outstanding() as usize
    }

    /// Receives that may still be queued before completions must be retired.
    #[must_use]
    pub fn receive_room(&self) -> usize {
        self.receive.slots.room() as usize
    }

    /// Receives that the device has and that are not retired.
    #[must_use]
    pub fn receives_outstanding(&self) -> usize {
        self.receive.slots.outstanding() as usize
    }

    /// Whether the last requests are unsignalled, so that nothing will say when they are over: flush with
    /// `signal_last`, or push another request that is signalled, an empty write for example.
    #[must_use]
    pub fn has_silent_tail(&self) -> bool {
        self.send.has_silent_tail()
    }

    /// Whether the device has forgotten it.
    fn destroy(&mut self) -> bool {
        let raw = mem::replace(&mut self.raw, NonNull::dangling());
        if raw == NonNull::dangling() {
            return true;
        }
        // SAFETY: ours, alive, destroyed once: the pointer was taken out.
        let gone = unsafe { (self.context().functions().destroy_qp)(raw.as_ptr()) } == 0;
        if gone {
            self.queue.release(self.id, self.completions);
        } else {
            // The device may go on with what is posted: its memory and all it hangs on stay for good.
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
            Err(context.refused(format!("make a queue pair with {options:?}"), source))
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.destroy();
        // SAFETY: dropped once, after the device has forgotten the queues; the fields are not used again.
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

//! Completions: where a device says that requests are over.
//!
//! A completion is only valid until its queue is polled again, and only the queue's owner polls. So it cannot be kept
//! and shown to a queue pair later, when its number may name another request.

use super::context::{Context, set_nonblocking};
use super::error::VerbsError;
use super::ffi::*;
use super::slots::SEQUENCE_BITS;
use libc::c_int;
use std::fmt;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// It was done.
    Success,
    /// The queue failed before, or was told to: whether it was done is not known.
    Flushed,
    /// A message was longer than the receive it met.
    LocalLength,
    /// The queue pair was not fit for it.
    LocalOperation,
    /// Our own memory was not registered for it.
    LocalProtection,
    /// Our own memory was not registered for what a peer wanted.
    LocalAccess,
    /// The peer found the request wrong.
    RemoteInvalid,
    /// The peer's memory was not registered for it, or the key is wrong.
    RemoteAccess,
    /// The peer could not do it.
    RemoteOperation,
    /// The peer does not answer.
    RetryExceeded,
    /// The peer had no receive posted, however often it was asked.
    ReceiverNotReady,
    /// The device failed.
    Fatal,
    /// Something else, by its number in verbs.
    Other(u32),
}

impl Status {
    fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::Success,
            1 => Self::LocalLength,
            2 => Self::LocalOperation,
            4 => Self::LocalProtection,
            5 => Self::Flushed,
            8 => Self::LocalAccess,
            9 => Self::RemoteInvalid,
            10 => Self::RemoteAccess,
            11 => Self::RemoteOperation,
            12 => Self::RetryExceeded,
            13 => Self::ReceiverNotReady,
            19 => Self::Fatal,
            other => Self::Other(other),
        }
    }
}

/// What names a queue pair among those of one completion queue. Indexes are small and used again; with the generation
/// a name is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId {
    /// Dense: fit for a table.
    pub index: u16,
    /// Which of the index's holders.
    pub generation: u16,
}

/// Which kind of queue a request's id belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Send,
    Receive,
    Shared,
}

const KIND_SHIFT: u32 = 62;
const SEQUENCE_SHIFT: u32 = 32;

/// A request's id on a queue pair: kind, sequence, generation and index of the queue.
pub(crate) fn request_id(kind: Kind, sequence: u32, queue: QueueId) -> u64 {
    (kind as u64) << KIND_SHIFT
        | u64::from(sequence) << SEQUENCE_SHIFT
        | u64::from(queue.generation) << 16
        | u64::from(queue.index)
}

/// One place for a completion, for [`CompletionQueue::poll`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Entry(ibv_wc);

impl Entry {
    /// `count` places.
    #[must_use]
    pub fn many(count: usize) -> Box<[Self]> {
        vec![Self(ibv_wc::default()); count].into()
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Entry({:#x})", self.0.wr_id)
    }
}

/// A device says that a request is over. Show it to its queue to learn which, and to let go of its memory.
#[derive(Clone, Copy)]
pub struct Completion<'a> {
    raw: &'a ibv_wc,
    queue: &'a Queue,
}

impl Completion<'_> {
    /// How the request ended.
    #[must_use]
    pub fn status(&self) -> Status {
        Status::from_raw(self.raw.status)
    }

    /// The queue pair it was posted to. `None` when it was posted to a shared receive queue; then
    /// [`Completion::qp_num`] says who took it.
    #[must_use]
    pub fn queue(&self) -> Option<QueueId> {
        (self.kind() != Some(Kind::Shared)).then_some(self.id())
    }

    /// The device's number of the queue pair.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.raw.qp_num
    }

    /// Whether it was a receive, of whichever queue.
    #[must_use]
    pub fn is_receive(&self) -> bool {
        self.kind() != Some(Kind::Send)
    }

    /// Of a successful receive: the length of the message, or of what was written with an immediate.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.raw.byte_len
    }

    /// Of a successful receive: the number that came with it.
    #[must_use]
    pub fn immediate(&self) -> Option<u32> {
        let there = self.raw.status == 0 && self.is_receive() && self.raw.wc_flags & WC_WITH_IMM != 0;
        there.then(|| u32::from_be(self.raw.imm_data))
    }

    /// Of a successful receive: whether it says that the peer wrote to our memory by itself; the receive's own memory
    /// was not used.
    #[must_use]
    pub fn is_remote_write(&self) -> bool {
        self.raw.status == 0 && self.is_receive() && self.raw.opcode == WC_RECV_RDMA_WITH_IMM
    }

    /// What the vendor has to say of an error.
    #[must_use]
    pub fn vendor_error(&self) -> u32 {
        self.raw.vendor_err
    }

    pub(crate) fn raw_id(&self) -> u64 {
        self.raw.wr_id
    }

    pub(crate) fn kind(&self) -> Option<Kind> {
        [Kind::Send, Kind::Receive, Kind::Shared].into_iter().find(|kind| *kind as u64 == self.raw.wr_id >> KIND_SHIFT)
    }

    pub(crate) fn sequence(&self) -> u32 {
        (self.raw.wr_id >> SEQUENCE_SHIFT) as u32 & ((1 << SEQUENCE_BITS) - 1)
    }

    pub(crate) fn id(&self) -> QueueId {
        QueueId { index: self.raw.wr_id as u16, generation: (self.raw.wr_id >> 16) as u16 }
    }

    pub(crate) fn is_from(&self, queue: &Arc<Queue>) -> bool {
        std::ptr::eq(self.queue, Arc::as_ptr(queue))
    }
}

impl fmt::Debug for Completion<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Completion({:?} of {:?}/{})", self.status(), self.queue(), self.qp_num())
    }
}

/// What one poll found.
#[derive(Clone)]
pub struct Polled<'a> {
    entries: std::slice::Iter<'a, Entry>,
    queue: &'a Queue,
}

impl<'a> Iterator for Polled<'a> {
    type Item = Completion<'a>;

    fn next(&mut self) -> Option<Completion<'a>> {
        self.entries.next().map(|entry| Completion { raw: &entry.0, queue: self.queue })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.entries.size_hint()
    }
}

impl ExactSizeIterator for Polled<'_> {}

impl fmt::Debug for Polled<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}

/// Where completion queues that were armed announce that they have something: a descriptor to park on. Clones are the
/// same channel. Any thread may use it.
#[derive(Clone)]
pub struct CompletionChannel {
    inner: Arc<Channel>,
}

struct Channel {
    raw: NonNull<ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: channels may be used from any thread, several at the same time.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the queues on it held an Arc of it, so none is left; destroyed once.
        if unsafe { (self.context.functions().destroy_comp_channel)(self.raw.as_ptr()) } != 0 {
            mem::forget(Arc::clone(&self.context));
        }
    }
}

impl CompletionChannel {
    /// A channel of the device.
    ///
    /// # Errors
    /// When there are too many open files.
    pub fn new(context: &Arc<Context>) -> Result<Self, VerbsError> {
        // SAFETY: the context is open; the library returns a channel that is ours, or null.
        let raw = unsafe { (context.functions().create_comp_channel)(context.raw()) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(context.refused("make a completion channel", io::Error::last_os_error()));
        };
        let channel = Self { inner: Arc::new(Channel { raw, context: Arc::clone(context) }) };
        // SAFETY: the channel is alive; its descriptor does not change.
        let fd = unsafe { raw.as_ref().fd };
        set_nonblocking(fd).map_err(|source| context.refused("make a channel nonblocking", source))?;
        Ok(channel)
    }

    /// The token of a queue that announced something, if one did. Arm it again, then poll it.
    ///
    /// # Errors
    /// When the channel cannot be read: the device is gone.
    pub fn take(&self) -> Result<Option<u64>, VerbsError> {
        let context = &self.inner.context;
        let (mut queue, mut token) = (std::ptr::null_mut(), std::ptr::null_mut());
        let raw = self.inner.raw.as_ptr();
        // SAFETY: the library writes two pointers; the descriptor is nonblocking.
        if unsafe { (context.functions().get_cq_event)(raw, &raw mut queue, &raw mut token) } != 0 {
            let source = io::Error::last_os_error();
            return match source.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(context.refused("read a completion channel", source)),
            };
        }
        // SAFETY: a queue with an event that is not acknowledged is alive: destroying it waits.
        unsafe { (context.functions().ack_cq_events)(queue, 1) };
        Ok(Some(token.addr() as u64))
    }
}

/// Readable when [`CompletionChannel::take`] has something.
impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel, which the borrow holds.
        unsafe { BorrowedFd::borrow_raw(self.inner.raw.as_ref().fd) }
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompletionChannel").field(&self.inner.context.name()).finish()
    }
}

/// Where a device reports requests that are over. Queue pairs keep it alive. One owner polls it; it may move between
/// threads.
pub struct CompletionQueue {
    inner: Arc<Queue>,
}

pub(crate) struct Queue {
    raw: NonNull<ibv_cq>,
    poll: PollCq,
    capacity: u32,
    /// Completions that the queue pairs on it can have at the same time.
    promised: AtomicU32,
    places: Mutex<Places>,
    channel: Option<CompletionChannel>,
    context: Arc<Context>,
}

// SAFETY: queues may be used from any thread, several at the same time.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

/// Which names of queue pairs are in use.
#[derive(Default)]
struct Places {
    generations: Vec<u16>,
    free: Vec<u16>,
}

impl CompletionQueue {
    /// A queue for `entries` completions at the same time. `token` is what its channel calls it.
    ///
    /// # Errors
    /// When the device has fewer entries, or no more queues; or the channel is another device's.
    pub fn new(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<(&CompletionChannel, u64)>,
    ) -> Result<Self, VerbsError> {
        context.limit("entries of a completion queue", entries.into(), context.limits().completion_entries.into())?;
        if channel.is_some_and(|(channel, _)| !Arc::ptr_eq(&channel.inner.context, context)) {
            return Err(VerbsError::NotOffered { device: context.name().to_owned(), what: "another device's channel" });
        }
        let (token, channel) = channel.map_or((0, None), |(channel, token)| (token, Some(channel.clone())));
        let raw_channel = channel.as_ref().map_or(std::ptr::null_mut(), |channel| channel.inner.raw.as_ptr());
        let token = std::ptr::without_provenance_mut(token as usize);
        let entries = entries.max(1);
        // SAFETY: context and channel are alive and stay so; the token is handed back and never followed.
        let raw = unsafe { (context.functions().create_cq)(context.raw(), entries as c_int, token, raw_channel, 0) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(context.refused(format!("make a queue of {entries} completions"), io::Error::last_os_error()));
        };
        // SAFETY: the queue is alive, and its table of functions was filled when the device was opened.
        let poll = unsafe { (*(*raw.as_ptr()).context).ops.poll_cq };
        Ok(Self {
            inner: Arc::new(Queue {
                raw,
                poll,
                capacity: entries,
                promised: AtomicU32::new(0),
                places: Mutex::default(),
                channel,
                context: Arc::clone(context),
            }),
        })
    }

    /// Takes what is there, as much as fits into `entries`. Nothing is not an error.
    ///
    /// # Errors
    /// When the queue has failed: it overflowed, or the device is gone.
    pub fn poll<'a>(&'a mut self, entries: &'a mut [Entry]) -> Result<Polled<'a>, VerbsError> {
        let room = c_int::try_from(entries.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue is alive; the device writes at most as many entries as there is room for.
        let count = unsafe { (self.inner.poll)(self.inner.raw.as_ptr(), room, entries.as_mut_ptr().cast()) };
        match usize::try_from(count) {
            Ok(count) => Ok(Polled { entries: entries[..count].iter(), queue: &self.inner }),
            Err(_) => {
                let source = io::Error::from_raw_os_error(count.saturating_neg());
                Err(self.inner.context.refused("poll a completion queue", source))
            }
        }
    }

    /// Asks for an announcement on the channel with the next completion. What came before may not be announced: poll
    /// once more after arming, before parking.
    ///
    /// # Errors
    /// When the queue was made without a channel, or the device is gone.
    pub fn arm(&self) -> Result<(), VerbsError> {
        let queue = &*self.inner;
        if queue.channel.is_none() {
            return Err(VerbsError::NotOffered {
                device: queue.context.name().to_owned(),
                what: "announcements of a completion queue without a channel",
            });
        }
        // SAFETY: the queue is alive.
        let result = unsafe { ((*(*queue.raw.as_ptr()).context).ops.req_notify_cq)(queue.raw.as_ptr(), 0) };
        match result {
            0 => Ok(()),
            error => Err(queue.context.refused("arm a queue", io::Error::from_raw_os_error(error.saturating_abs()))),
        }
    }

    /// How many completions it takes.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.inner.capacity
    }

    pub(crate) fn inner(&self) -> &Arc<Queue> {
        &self.inner
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionQueue({} entries of {})", self.inner.capacity, self.inner.context.name())
    }
}

impl Queue {
    pub(crate) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// A name for a queue pair that can have `completions` at the same time.
    pub(crate) fn admit(&self, completions: u32) -> Result<QueueId, VerbsError> {
        let promise = |promised: u32| promised.checked_add(completions).filter(|sum| *sum <= self.capacity);
        if let Err(promised) = self.promised.fetch_update(Ordering::Relaxed, Ordering::Relaxed, promise) {
            let left = self.capacity - promised;
            self.context.limit("completions of a queue pair", completions.into(), left.into())?;
        }
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let index = places.free.pop().or_else(|| {
            let index = u16::try_from(places.generations.len()).ok()?;
            places.generations.push(0);
            Some(index)
        });
        let Some(index) = index else {
            self.promised.fetch_sub(completions, Ordering::Relaxed);
            let most = u64::from(u16::MAX) + 1;
            return Err(VerbsError::Limit {
                device: self.context.name().to_owned(),
                what: "queue pairs on one completion queue",
                wanted: most + 1,
                offered: most,
            });
        };
        Ok(QueueId { index, generation: places.generations[usize::from(index)] })
    }

    /// The queue pair of that name is gone.
    pub(crate) fn release(&self, id: QueueId, completions: u32) {
        self.promised.fetch_sub(completions, Ordering::Relaxed);
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = &mut places.generations[usize::from(id.index)];
        // A place whose generations are used up is not used again.
        if let Some(next) = generation.checked_add(1) {
            *generation = next;
            places.free.push(id.index);
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: the queue pairs on it held an Arc of it, so none is left; destroyed once.
        if unsafe { (self.context.functions().destroy_cq)(self.raw.as_ptr()) } != 0 {
            mem::forget((Arc::clone(&self.context), self.channel.take()));
        }
    }
}

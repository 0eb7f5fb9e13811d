//! Work completions: a device's reports of completed requests.
//!
//! A completion is only valid until its queue is polled again, and only the queue's owner polls. So it cannot be kept
//! and passed to a queue pair later, when its id may denote another request.

use super::completion_queue::Queue;
use super::ffi::*;
use super::slots::SEQUENCE_BITS;
use std::fmt;
use std::sync::Arc;

/// Completion status of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// The request succeeded.
    Success,
    /// The queue had failed, or was moved to the error state: the outcome of the request is unknown.
    Flushed,
    /// A message was longer than the receive that it consumed.
    LocalLength,
    /// The queue pair could not carry out the request.
    LocalOperation,
    /// Local memory was not registered for the request.
    LocalProtection,
    /// Local memory was not registered for a peer's request.
    LocalAccess,
    /// The peer rejected the request as invalid.
    RemoteInvalid,
    /// The peer's memory was not registered for the request, or the key is wrong.
    RemoteAccess,
    /// The peer could not carry out the request.
    RemoteOperation,
    /// The peer does not respond.
    RetryExceeded,
    /// The peer had no receive posted, after all retries.
    ReceiverNotReady,
    /// The device failed.
    Fatal,
    /// Another status, by its number in verbs.
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

/// Id of a queue pair among those of one completion queue. Indexes are small and reused; the generation makes every id
/// unique.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId {
    /// Dense index, suitable for a table.
    pub index: u16,
    /// Generation of the index.
    pub generation: u16,
}

/// Kind of the queue to which a request's id belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Send = 0,
    Receive = 1,
    Shared = 2,
}

const KIND_SHIFT: u32 = 62;
const SEQUENCE_SHIFT: u32 = 32;

/// Encodes the id of a request: kind, sequence number, generation and index of the queue.
pub(crate) fn request_id(kind: Kind, sequence: u32, queue: QueueId) -> u64 {
    (kind as u64) << KIND_SHIFT | sequence_bits(sequence) | u64::from(queue.generation) << 16 | u64::from(queue.index)
}

/// Returns a sequence number shifted to its position in ids.
pub(crate) fn sequence_bits(sequence: u32) -> u64 {
    u64::from(sequence) << SEQUENCE_SHIFT
}

/// Buffer for one completion, for [`CompletionQueue::poll`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Entry(ibv_wc);

impl Entry {
    /// Creates `count` buffers.
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

/// Completion of a request. Its queue translates it to the request's token and releases the request's memory.
#[derive(Clone, Copy)]
pub struct Completion<'a> {
    raw: &'a ibv_wc,
    queue: &'a Queue,
}

impl Completion<'_> {
    /// Returns the completion status of the request.
    #[must_use]
    pub fn status(&self) -> Status {
        Status::from_raw(self.raw.status)
    }

    /// Returns the queue pair to which the request was posted. `None` for a shared receive queue; then
    /// [`Completion::qp_num`] tells which queue pair consumed it.
    #[must_use]
    pub fn queue(&self) -> Option<QueueId> {
        (self.kind() != Some(Kind::Shared)).then_some(self.id())
    }

    /// Returns the device's number of the queue pair.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.raw.qp_num
    }

    /// Returns true if it was a receive, on whichever queue.
    #[must_use]
    pub fn is_receive(&self) -> bool {
        self.kind() != Some(Kind::Send)
    }

    /// Returns the length of the message, or of a write with immediate; for a successful receive.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.raw.byte_len
    }

    /// Returns the immediate value of a successful receive, if there is one.
    #[must_use]
    pub fn immediate(&self) -> Option<u32> {
        let there = self.raw.status == 0 && self.is_receive() && self.raw.wc_flags & WC_WITH_IMM != 0;
        there.then(|| u32::from_be(self.raw.imm_data))
    }

    /// Returns true if a successful receive reports a one-sided write with immediate by the peer; the receive's own
    /// memory was not used.
    #[must_use]
    pub fn is_remote_write(&self) -> bool {
        self.raw.status == 0 && self.is_receive() && self.raw.opcode == WC_RECV_RDMA_WITH_IMM
    }

    /// Returns the vendor-specific error code.
    #[must_use]
    pub fn vendor_error(&self) -> u32 {
        self.raw.vendor_err
    }

    pub(crate) fn raw_id(&self) -> u64 {
        self.raw.wr_id
    }

    pub(crate) fn kind(&self) -> Option<Kind> {
        match self.raw.wr_id >> KIND_SHIFT {
            0 => Some(Kind::Send),
            1 => Some(Kind::Receive),
            2 => Some(Kind::Shared),
            _ => None,
        }
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

/// Completions found by one poll.
#[derive(Clone)]
pub struct PollResult<'a> {
    entries: std::slice::Iter<'a, Entry>,
    queue: &'a Queue,
}

impl<'a> Iterator for PollResult<'a> {
    type Item = Completion<'a>;

    fn next(&mut self) -> Option<Completion<'a>> {
        self.entries.next().map(|entry| Completion { raw: &entry.0, queue: self.queue })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.entries.size_hint()
    }
}

impl ExactSizeIterator for PollResult<'_> {}

impl<'a> PollResult<'a> {
    pub(crate) fn new(entries: &'a [Entry], queue: &'a Queue) -> Self {
        Self { entries: entries.iter(), queue }
    }
}

impl fmt::Debug for PollResult<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}

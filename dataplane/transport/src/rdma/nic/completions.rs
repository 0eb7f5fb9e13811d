//! Completion queue of a device, and its event channel that wakes a sleeping host.

use std::io;

use kvplane_sys::verbs::{CompletionChannel, CompletionQueue, Context, Entry, PollResult, VerbsError};
use std::sync::Arc;

/// Batch size of polled completions.
pub(in crate::rdma) const POLLED: usize = 64;

/// Completions of one device.
pub(in crate::rdma) struct Completions {
    channel: CompletionChannel,
    queue: CompletionQueue,
    entries: Box<[Entry]>,
    /// True if the last poll emptied the queue.
    emptied: bool,
}

impl Completions {
    /// Creates a queue with this many entries.
    pub(super) fn new(context: &Arc<Context>, entries: u32) -> Result<Self, VerbsError> {
        let channel = CompletionChannel::new(context)?;
        let queue = CompletionQueue::new(context, entries, Some((&channel, 0)))?;
        Ok(Self { channel, queue, entries: Entry::many(POLLED), emptied: false })
    }

    pub(super) const fn channel(&self) -> &CompletionChannel {
        &self.channel
    }

    /// Returns the completion queue of the device's queue pairs.
    pub(in crate::rdma) const fn queue(&self) -> &CompletionQueue {
        &self.queue
    }

    /// Drains the event channel. The queue itself is polled in each round anyway.
    pub(in crate::rdma) fn hear(&self) {
        while let Ok(Some(_)) = self.channel.take() {}
    }

    /// Arms the queue: the next completion signals the event channel.
    pub(in crate::rdma) fn arm(&self) -> io::Result<()> {
        self.queue.arm().map_err(|error| io::Error::other(error.to_string()))
    }

    /// Polls a batch of completions: [`POLLED`] of them if more may be left.
    #[inline]
    pub(in crate::rdma) fn poll(&mut self) -> Result<PollResult<'_>, VerbsError> {
        self.queue.poll(&mut self.entries)
    }

    /// Returns true if the last poll emptied the queue.
    pub(in crate::rdma) const fn is_emptied(&self) -> bool {
        self.emptied
    }

    pub(in crate::rdma) const fn set_emptied(&mut self, emptied: bool) {
        self.emptied = emptied;
    }
}

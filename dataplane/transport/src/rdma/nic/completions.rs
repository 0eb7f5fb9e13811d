//! What a device says is over: its completion queue, and the bell that it rings for a host that sleeps.

use std::io;

use kvplane_sys::verbs::{CompletionChannel, CompletionQueue, Context, Entry, PollResult, VerbsError};
use std::sync::Arc;

/// Completions taken at once.
pub(in crate::rdma) const POLLED: usize = 64;

/// The completions of one device.
pub(in crate::rdma) struct Completions {
    channel: CompletionChannel,
    queue: CompletionQueue,
    entries: Box<[Entry]>,
    /// Whether all that were there were taken, when it was last asked.
    emptied: bool,
}

impl Completions {
    /// A queue for so many.
    pub(super) fn new(context: &Arc<Context>, entries: u32) -> Result<Self, VerbsError> {
        let channel = CompletionChannel::new(context)?;
        let queue = CompletionQueue::new(context, entries, Some((&channel, 0)))?;
        Ok(Self { channel, queue, entries: Entry::many(POLLED), emptied: false })
    }

    pub(super) const fn channel(&self) -> &CompletionChannel {
        &self.channel
    }

    /// The queue that queue pairs report to.
    pub(in crate::rdma) const fn queue(&self) -> &CompletionQueue {
        &self.queue
    }

    /// The bell has rung. The queue itself is polled in each round anyway.
    pub(in crate::rdma) fn hear(&self) {
        while let Ok(Some(_)) = self.channel.take() {}
    }

    /// Asks the device to ring with the next completion.
    pub(in crate::rdma) fn arm(&self) -> io::Result<()> {
        self.queue.arm().map_err(|error| io::Error::other(error.to_string()))
    }

    /// Takes some: as many as [`POLLED`] where there may be more.
    #[inline]
    pub(in crate::rdma) fn poll(&mut self) -> Result<PollResult<'_>, VerbsError> {
        self.queue.poll(&mut self.entries)
    }

    /// Whether all that were there were taken, when it was last asked.
    pub(in crate::rdma) const fn is_emptied(&self) -> bool {
        self.emptied
    }

    pub(in crate::rdma) const fn set_emptied(&mut self, emptied: bool) {
        self.emptied = emptied;
    }
}

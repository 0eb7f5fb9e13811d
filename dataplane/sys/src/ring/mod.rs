//! A safe io_uring: sockets, files and polls of one shard thread.
//!
//! The ring owns what the kernel may touch. An operation's buffers (`Arc<Region>` inside [`IoBuf`]), message header
//! and address stay in its table until the operation's last completion has been read, whatever the caller drops
//! meanwhile. Dropping the ring cancels everything and waits until the kernel is done; should the kernel not finish in
//! time, the memory is leaked rather than freed under it.
//!
//! The caller names operations by token; several may share one. Results are the kernel's: bytes, or a negative
//! errno. A short count is a result, not an error, and resuming is the caller's.
//!
//! A descriptor is resolved to its file when the operation is submitted, by the next [`Ring::poll`], [`Ring::wait`] or
//! [`Ring::submit`], not when it is queued; after that, closing it is fine. Whoever closes a descriptor with
//! operations queued since the last of those calls must submit first ([`Ring::close`] does both), or the operation may
//! act on whatever file got the number. It never acts on memory other than the buffers given.
//!
//! It does not retry, time out or order operations.

mod operations;
mod queue;
mod setup;
#[cfg(test)]
mod tests;

pub use crate::region::IoBuf;
pub use operations::MAX_VECTORS;

use io_uring::types::{CancelBuilder, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue};
use operations::{Holds, INTERNAL, Operations};
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Accepted sockets that may wait to be fetched; more are closed and reported as `-EMFILE`.
const MAX_UNFETCHED: usize = 1024;
/// How long dropping a ring waits for the kernel before it leaks.
const DROP_DEADLINE: Duration = Duration::from_secs(10);
/// The longest single park.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// One result of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The caller's name for the operation.
    pub token: u64,
    /// Bytes, poll events or zero; a negative errno when it failed.
    pub result: i32,
    /// Whether the operation goes on: a multishot operation without this has ended and wants to be armed again.
    pub more: bool,
}

/// Neither the submission queue nor the operation table has room, and submitting did not make any: call
/// [`Ring::poll`] to retire completions, then try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingFull;

impl fmt::Display for RingFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the ring has no room for another operation: poll it first")
    }
}

impl std::error::Error for RingFull {}

/// An io_uring with everything in flight on it. It belongs on the thread that made it, unless it was made
/// [shared](Ring::shared): the kernel refuses others.
pub struct Ring {
    uring: ManuallyDrop<IoUring>,
    operations: ManuallyDrop<Operations>,
    /// Sockets accepted and not fetched, with the token of their completion.
    accepted: Vec<(u64, OwnedFd)>,
    /// Descriptors to close once the submission queue is empty.
    closing: Vec<OwnedFd>,
    /// Entries ever pushed to the submission queue.
    pushed: u64,
    setup: &'static str,
}

// SAFETY: whoever has the ring has it alone: nothing in it is shared with its former thread, and the addresses in its
// table are those of allocations that it owns. The kernel answers with an error to a thread that may not submit, and
// then the ring keeps what it holds.
unsafe impl Send for Ring {}

impl Ring {
    /// Makes a ring with at least `entries` submission entries. At most four times as many operations can be in flight.
    /// The error says what to do where io_uring is forbidden or memory may not be locked.
    pub fn new(entries: u32) -> io::Result<Self> {
        let (uring, setup) = setup::build(entries, &setup::SETUPS)?;
        Self::with(uring, setup)
    }

    /// As [`Ring::new`], for several threads in turn: each submits and takes completions of all.
    pub fn shared(entries: u32) -> io::Result<Self> {
        let (uring, setup) = setup::build(entries, &setup::SHARED_SETUPS)?;
        Self::with(uring, setup)
    }

    fn with(uring: IoUring, setup: &'static str) -> io::Result<Self> {
        let parameters = uring.params();
        if !parameters.is_feature_ext_arg() || !parameters.is_feature_nodrop() {
            let text = "io_uring of this kernel is too old: Linux 5.19 or later is needed";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let limit = parameters.cq_entries() as usize;
        Ok(Self {
            uring: ManuallyDrop::new(uring),
            operations: ManuallyDrop::new(Operations::new(limit)),
            accepted: Vec::new(),
            closing: Vec::new(),
            pushed: 0,
            setup,
        })
    }

    /// How the ring was set up, for logs.
    pub fn describe(&self) -> String {
        let parameters = self.uring.params();
        let (submissions, completions) = (parameters.sq_entries(), parameters.cq_entries());
        format!("io_uring {} ({submissions} submissions, {completions} completions)", self.setup)
    }

    /// Operations whose last completion has not been read. Cancellations do not count.
    pub fn in_flight(&self) -> usize {
        self.operations.len()
    }

    /// Submits what is queued and adds the completions that are there to `out`; returns how many. Never blocks, and
    /// enters the kernel only when it has something to do there.
    pub fn poll(&mut self, out: &mut Vec<Completion>) -> io::Result<usize> {
        let queue = self.uring.submission();
        let enter = !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
        drop(queue);
        if enter {
            self.submit()?;
        }
        Ok(self.harvest(out))
    }

    /// Submits what is queued and parks until there is a completion or `timeout` has passed. May return early with
    /// none, on a signal for example.
    pub fn wait(&mut self, timeout: Duration, out: &mut Vec<Completion>) -> io::Result<usize> {
        if !self.uring.completion().is_empty() {
            return self.poll(out);
        }
        let timeout = Timespec::from(timeout.min(LONGEST_WAIT));
        let arguments = SubmitArgs::new().timespec(&timeout);
        tolerate(self.uring.submitter().submit_with_args(1, &arguments))?;
        self.close_waiting();
        Ok(self.harvest(out))
    }

    /// Submits what is queued, and lets the kernel finish what it deferred. Never blocks. What the kernel has no room
    /// for at the moment stays queued.
    pub fn submit(&mut self) -> io::Result<()> {
        tolerate(self.uring.submitter().submit())?;
        self.close_waiting();
        Ok(())
    }

    /// Submits what is queued and then closes the descriptor, so that no queued operation meets a stranger's file. When
    /// the kernel takes nothing at the moment, the descriptor stays open until it does. Operations that were
    /// submitted hold the file and go on: cancel them, or shut the socket down, to end them.
    pub fn close(&mut self, fd: OwnedFd) {
        self.closing.push(fd);
        // Whatever goes wrong here goes wrong again in the next poll, which reports it.
        self.submit().ok();
    }

    fn close_waiting(&mut self) {
        if !self.closing.is_empty() && self.uring.submission().is_empty() {
            self.closing.clear();
        }
    }

    /// The socket of a completed accept; once only. `None` for any other completion.
    pub fn accepted(&mut self, completion: &Completion) -> Option<OwnedFd> {
        let wanted = (completion.token, completion.result);
        let found = self.accepted.iter().position(|(token, fd)| (*token, fd.as_raw_fd()) == wanted)?;
        Some(self.accepted.swap_remove(found).1)
    }

    fn harvest(&mut self, out: &mut Vec<Completion>) -> usize {
        let before = out.len();
        for entry in self.uring.completion() {
            out.extend(settle(&mut self.operations, &mut self.accepted, &entry));
        }
        out.len() - before
    }

    /// Waits, without submitting anything, for the kernel to let go of all memory; at most until `deadline`.
    fn quiesce(&mut self, deadline: Instant) {
        let mut out = Vec::new();
        while self.operations.len() > 0 && Instant::now() < deadline {
            let step = Timespec::from(Duration::from_millis(20));
            let submitter = self.uring.submitter();
            // Nothing to cancel, or the kernel (before 6.0) cannot: the completions below decide.
            submitter.register_sync_cancel(Some(step), CancelBuilder::any()).ok();
            let arguments = SubmitArgs::new().timespec(&step);
            let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
            // SAFETY: submits nothing and waits for one completion; the argument is what EXT_ARG asks for, and lives
            // through the call.
            let entered = unsafe { submitter.enter(0, 1, flags.bits(), Some(&arguments)) };
            if tolerate(entered).is_err() {
                return;
            }
            self.harvest(&mut out);
            out.clear();
        }
    }
}

/// Turns one completion queue entry into what the caller sees, and frees what the operation held.
fn settle(
    operations: &mut Operations,
    accepted: &mut Vec<(u64, OwnedFd)>,
    entry: &cqueue::Entry,
) -> Option<Completion> {
    if entry.user_data() == INTERNAL {
        return None;
    }
    let more = cqueue::more(entry.flags());
    let mut result = entry.result();
    let operation = operations.get(entry.user_data())?;
    let token = operation.token;
    if matches!(operation.holds, Holds::Sockets) && result >= 0 {
        // SAFETY: a successful accept's result is a new descriptor, and this is the only place that takes it.
        let socket = unsafe { OwnedFd::from_raw_fd(result) };
        if accepted.len() < MAX_UNFETCHED {
            accepted.push((token, socket));
        } else {
            result = -libc::EMFILE;
        }
    }
    if !more {
        operations.remove(entry.user_data());
    }
    Some(Completion { token, result, more })
}

/// What `io_uring_enter` says when it merely has nothing for us: interrupted, timed out, or out of room until
/// completions are read. What was queued stays queued.
fn tolerate(entered: io::Result<usize>) -> io::Result<()> {
    match entered {
        Ok(_) => Ok(()),
        Err(error) => match error.raw_os_error() {
            Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN) => Ok(()),
            _ => Err(error),
        },
    }
}

/// Readable while there are completions to take: for a [`Poller`](crate::Poller). Of a shared ring only; one that defers
/// its completions has none before it is asked.
impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the ring is.
        unsafe { BorrowedFd::borrow_raw(self.uring.as_raw_fd()) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // What was queued and never submitted is not submitted now: its descriptors may be gone. The kernel has not
        // seen it, so its memory is free. From here on nothing is submitted.
        let queued = self.uring.submission().len() as u64;
        self.operations.forget_from(self.pushed - queued);
        self.quiesce(Instant::now() + DROP_DEADLINE);
        let done = self.operations.len() == 0;
        // SAFETY: dropped here and not used again. Closing the ring makes the kernel abort the rest by itself.
        unsafe { ManuallyDrop::drop(&mut self.uring) };
        if done {
            // SAFETY: dropped here and not used again; the kernel holds none of its memory. Otherwise it is leaked:
            // the kernel may still write there.
            unsafe { ManuallyDrop::drop(&mut self.operations) };
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring({}, {} in flight)", self.describe(), self.in_flight())
    }
}

//! Safe io_uring for the files and devices of one host.
//!
//! The ring owns all memory that the kernel may access. An operation's buffer (`Arc<Region>` inside [`IoBuf`]) stays in
//! the ring's table until the operation's last completion has been read, whatever the caller drops meanwhile.
//! [`Ring::end`] cancels everything and reports when the kernel is done. Dropping the ring does the same for a bounded
//! time; if the kernel does not release the memory in time, it is leaked rather than freed under the kernel: counted in
//! [`leaked`], and reported on standard error.
//!
//! The caller identifies operations by tokens; several may share one. Results are the kernel's: bytes, or a negative
//! errno. A short count is a result, not an error; the caller resumes.
//!
//! A descriptor is resolved to its file when the operation is submitted, by the next [`Ring::poll`] or
//! [`Ring::submit`], not when it is queued; after that, it may be closed. A caller that closes a descriptor of
//! operations queued since the last of those calls must submit first, or the operation may act on another file that
//! reuses the number. An operation never accesses memory other than its buffers.
//!
//! The ring does not retry, time out or order operations.

mod commands;
mod files;
mod fixed;
mod operations;
mod setup;
#[cfg(test)]
mod tests;
mod transfers;

pub use crate::region::IoBuf;
pub use files::RegisteredFile;

use crate::region::Region;
use io_uring::types::{CancelBuilder, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, squeue};
use operations::{KernelHold, Operations};
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time that dropping a ring waits for the kernel before it leaks the memory.
const DROP_DEADLINE: Duration = Duration::from_secs(10);
/// Duration of one step of that wait.
const END_STEP: Duration = Duration::from_millis(20);

static LEAKED_OPERATIONS: AtomicU64 = AtomicU64::new(0);
static LEAKED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Memory that this process leaked because the kernel did not release it before its ring was dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeakedMemory {
    /// Operations that had not completed.
    pub operations: u64,
    /// Bytes of their buffers. Each keeps its whole region mapped.
    pub bytes: u64,
}

/// Returns the memory leaked so far by all rings of this process. Any value but 0 means a device that does not respond.
pub fn leaked() -> LeakedMemory {
    LeakedMemory { operations: LEAKED_OPERATIONS.load(Ordering::Relaxed), bytes: LEAKED_BYTES.load(Ordering::Relaxed) }
}

/// Completion of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Token of the operation.
    pub token: u64,
    /// Bytes or zero; a negative errno if it failed.
    pub result: i32,
}

/// Error: neither the submission queue nor the operation table has room, and submitting did not free any: call
/// [`Ring::poll`] to retire completions, then retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingFull;

impl fmt::Display for RingFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the ring has no room for another operation: poll it first")
    }
}

impl std::error::Error for RingFull {}

/// An io_uring with all of its operations in flight, for several threads in turn.
pub struct Ring<S: squeue::EntryMarker = squeue::Entry, C: cqueue::EntryMarker = cqueue::Entry> {
    uring: ManuallyDrop<IoUring<S, C>>,
    operations: ManuallyDrop<Operations>,
    /// Number of entries pushed to the submission queue so far.
    pushed: u64,
    setup: &'static str,
    fixed: fixed::FixedWindows,
    files: files::RegisteredFiles,
    /// Completions arrive only when the device is polled.
    polled: bool,
    /// Results are status codes of a drive.
    commands: bool,
    /// The ring has ended: it submits nothing more.
    ended: bool,
    /// Time that dropping it waits for the kernel.
    patience: Duration,
}

// SAFETY: the ring has a single owner at a time: none of its state is shared with its former thread, and the addresses
// in its table are those of allocations that it owns. The kernel returns an error to a thread that may not submit, and
// then the ring keeps what it holds.
unsafe impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Send for Ring<S, C> {}

/// Ring for commands to NVMe drives.
pub type CommandRing = Ring<squeue::Entry128, cqueue::Entry32>;

impl Ring {
    /// Creates a ring with at least `entries` submission entries. At most four times as many operations can be in
    /// flight. Several threads may use it in turn: each submits, and takes the completions of all. The error names the
    /// next step if io_uring is forbidden or memory may not be locked.
    pub fn shared(entries: u32) -> io::Result<Self> {
        let (uring, setup) = setup::build(entries, &setup::SHARED_SETUPS)?;
        Self::with(uring, setup)
    }

    /// Creates a ring like [`Ring::shared`], for direct reads and writes with polled completions: its descriptor does
    /// not become readable, so [`Ring::poll`] must be called until all operations have completed. A device without
    /// polling fails each operation with `EOPNOTSUPP`. Flushes belong on another ring.
    pub fn polled(entries: u32) -> io::Result<Self> {
        let (uring, setup) = setup::build(entries, &setup::POLLED_SETUPS)?;
        let mut ring = Self::with(uring, setup)?;
        ring.polled = true;
        Ok(ring)
    }
}

impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Ring<S, C> {
    fn with(uring: IoUring<S, C>, setup: &'static str) -> io::Result<Self> {
        let parameters = uring.params();
        if !parameters.is_feature_ext_arg() || !parameters.is_feature_nodrop() {
            let text = "io_uring of this kernel is too old: Linux 5.19 or later is needed";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let limit = parameters.cq_entries() as usize;
        Ok(Self {
            uring: ManuallyDrop::new(uring),
            operations: ManuallyDrop::new(Operations::new(limit)),
            pushed: 0,
            setup,
            fixed: fixed::FixedWindows::default(),
            files: files::RegisteredFiles::default(),
            polled: false,
            commands: false,
            ended: false,
            patience: DROP_DEADLINE,
        })
    }

    /// Describes the ring's setup, for logs.
    pub fn describe(&self) -> String {
        let parameters = self.uring.params();
        let (submissions, completions) = (parameters.sq_entries(), parameters.cq_entries());
        format!("io_uring {} ({submissions} submissions, {completions} completions)", self.setup)
    }

    /// Returns the number of operations whose completion has not been read.
    pub fn in_flight(&self) -> usize {
        self.operations.len()
    }

    /// Submits queued operations and appends the available completions to `out`; returns their number. Never blocks,
    /// and enters the kernel only if necessary.
    pub fn poll(&mut self, out: &mut Vec<Completion>) -> io::Result<usize> {
        let queue = self.uring.submission();
        let enter = !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
        drop(queue);
        let enter = enter || (self.polled && self.operations.len() > 0 && self.uring.completion().is_empty());
        if enter {
            self.submit()?;
        }
        Ok(self.harvest(out))
    }

    /// Submits queued operations and runs the kernel's deferred work. Never blocks. Operations that the kernel has no
    /// room for at the moment stay queued.
    pub fn submit(&mut self) -> io::Result<()> {
        self.check_open()?;
        tolerate(self.uring.submitter().submit())
    }

    fn check_open(&self) -> io::Result<()> {
        if self.ended { Err(io::Error::other("this io_uring has ended: make another")) } else { Ok(()) }
    }

    /// Ends the ring: cancels everything in flight, submits nothing from now on, and waits at most `longest` for the
    /// kernel to release all memory. Returns true if it has; the caller repeats the call until then, because only then
    /// the buffers belong to the caller again. Operations that were queued and never submitted are not carried out.
    pub fn end(&mut self, longest: Duration) -> bool {
        if !self.ended {
            self.ended = true;
            // Queued entries: their descriptors may be closed before a later call. The kernel has not seen them, so
            // their memory is free.
            let queued = self.uring.submission().len() as u64;
            self.operations.forget_from(self.pushed - queued);
            // Cancels everything, however short the wait. Errors show up in the loop below.
            self.nudge(Duration::ZERO).ok();
        }
        let start = Instant::now();
        let mut out = Vec::new();
        loop {
            // Completions can be read even if the kernel accepts no calls any more.
            self.harvest(&mut out);
            out.clear();
            if self.operations.len() == 0 {
                return true;
            }
            let left = longest.saturating_sub(start.elapsed());
            if left.is_zero() {
                return false;
            }
            if self.nudge(left.min(END_STEP)).is_err() {
                std::thread::sleep(left.min(END_STEP));
            }
        }
    }

    /// Cancels everything and waits for a completion, without submitting.
    fn nudge(&mut self, step: Duration) -> io::Result<()> {
        let step = Timespec::from(step);
        let submitter = self.uring.submitter();
        // May fail if there is nothing to cancel, or on kernels before 6.0: the completions decide.
        submitter.register_sync_cancel(Some(step), CancelBuilder::any()).ok();
        let arguments = SubmitArgs::new().timespec(&step);
        let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        // SAFETY: submits nothing and waits for one completion; the argument has the form that EXT_ARG requires, and
        // lives through the call.
        tolerate(unsafe { submitter.enter(0, 1, flags.bits(), Some(&arguments)) })
    }

    /// Registers a file with the ring for the ring's lifetime.
    ///
    /// # Errors
    /// When the kernel rejects it, or too many files are registered.
    pub fn register_file(&mut self, fd: BorrowedFd<'_>) -> io::Result<RegisteredFile> {
        self.files.register(fd, &self.uring.submitter())
    }

    /// Registers (pins) a region's pages for file operations of this ring: all of them, or none.
    ///
    /// # Errors
    /// When the kernel rejects it or the table is full; the region can then be used unregistered. `ENOMEM` means the
    /// limit of locked memory (`ulimit -l`).
    pub fn register_region(&mut self, region: &Arc<Region>) -> io::Result<()> {
        self.fixed.register(region, &self.uring.submitter())
    }

    /// Returns true if an operation on this buffer uses pages that are pinned already.
    pub fn is_registered(&self, buffer: &IoBuf) -> bool {
        self.fixed.place_of(buffer).is_some()
    }

    /// Unregisters a region's pages. Operations in flight keep them until they complete.
    pub fn unregister_region(&mut self, region: &Arc<Region>) {
        self.fixed.unregister(region, &self.uring.submitter());
    }

    /// Queues an operation; memory for the kernel goes into the table first.
    fn start(&mut self, token: u64, held: impl Into<KernelHold>, mut entry: S) -> Result<(), RingFull> {
        self.make_room()?;
        let user_data = self.operations.insert(token, self.pushed, held);
        entry.set_user_data(user_data);
        self.push(&entry);
        Ok(())
    }

    fn make_room(&mut self) -> Result<(), RingFull> {
        // A ring that has ended submits nothing more.
        if self.ended || self.operations.is_full() {
            return Err(RingFull);
        }
        self.make_queue_room()
    }

    fn make_queue_room(&mut self) -> Result<(), RingFull> {
        if self.uring.submission().is_full() {
            // An error recurs in the next poll, which reports it.
            self.submit().ok();
            if self.uring.submission().is_full() {
                return Err(RingFull);
            }
        }
        Ok(())
    }

    fn push(&mut self, entry: &S) {
        // SAFETY: every address in the entry points into something that the operation table holds until the operation's
        // completion: `start` put it there.
        let pushed = unsafe { self.uring.submission().push(entry) };
        assert!(pushed.is_ok(), "room was made before");
        self.pushed += 1;
    }

    fn harvest(&mut self, out: &mut Vec<Completion>) -> usize {
        let before = out.len();
        for entry in self.uring.completion() {
            let entry: cqueue::Entry = entry.into();
            // Releases what the operation held.
            let Some(operation) = self.operations.remove(entry.user_data()) else { continue };
            let status = entry.result();
            let result = if self.commands { commands::result_of(status, operation.bytes()) } else { status };
            out.push(Completion { token: operation.token, result });
        }
        out.len() - before
    }
}

/// Maps transient errors of `io_uring_enter` to success: interrupted, timed out, or out of room until completions are
/// read. Queued operations stay queued.
fn tolerate(entered: io::Result<usize>) -> io::Result<()> {
    match entered {
        Ok(_) => Ok(()),
        Err(error) => match error.raw_os_error() {
            Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN) => Ok(()),
            _ => Err(error),
        },
    }
}

/// Readable while there are completions to take: for a [`Poller`](crate::Poller). Never for a polled ring.
impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> AsFd for Ring<S, C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the ring is.
        unsafe { BorrowedFd::borrow_raw(self.uring.as_raw_fd()) }
    }
}

impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Drop for Ring<S, C> {
    fn drop(&mut self) {
        let done = self.end(self.patience);
        // SAFETY: dropped here and not used again. Closing the ring makes the kernel abort the rest.
        unsafe { ManuallyDrop::drop(&mut self.uring) };
        if done {
            // SAFETY: dropped here and not used again; the kernel holds none of its memory.
            unsafe { ManuallyDrop::drop(&mut self.operations) };
            return;
        }
        // The kernel may still write there: the table, and with it the memory, is leaked.
        let (operations, bytes) = (self.operations.len() as u64, self.operations.held_bytes() as u64);
        LEAKED_OPERATIONS.fetch_add(operations, Ordering::Relaxed);
        LEAKED_BYTES.fetch_add(bytes, Ordering::Relaxed);
        eprintln!(
            "kvplane: {operations} operations did not end within {} s of being cancelled: the {bytes} bytes that they \
             may still touch are kept for as long as this process lives; look for a device that does not answer",
            self.patience.as_secs()
        );
    }
}

impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> fmt::Debug for Ring<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring({}, {} in flight)", self.describe(), self.in_flight())
    }
}

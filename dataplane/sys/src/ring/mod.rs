//! A safe io_uring: files and devices of one host.
//!
//! The ring owns what the kernel may touch. An operation's buffer (`Arc<Region>` inside [`IoBuf`]) stays in its table
//! until the operation's last completion has been read, whatever the caller drops meanwhile. [`Ring::end`] cancels
//! everything and tells when the kernel is done. Dropping the ring does the same for a while; should the kernel not
//! let go in time, the memory is leaked rather than freed under it: counted in [`leaked`], and said on standard error.
//!
//! The caller names operations by token; several may share one. Results are the kernel's: bytes, or a negative
//! errno. A short count is a result, not an error, and resuming is the caller's.
//!
//! A descriptor is resolved to its file when the operation is submitted, by the next [`Ring::poll`] or
//! [`Ring::submit`], not when it is queued; after that, closing it is fine. Whoever closes a descriptor with
//! operations queued since the last of those calls must submit first, or the operation may act on whatever file got
//! the number. It never acts on memory other than the buffers given.
//!
//! It does not retry, time out or order operations.

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

/// How long dropping a ring waits for the kernel before it leaks.
const DROP_DEADLINE: Duration = Duration::from_secs(10);
/// How long one step of such a wait is.
const END_STEP: Duration = Duration::from_millis(20);

static LEAKED_OPERATIONS: AtomicU64 = AtomicU64::new(0);
static LEAKED_BYTES: AtomicU64 = AtomicU64::new(0);

/// What this process leaked because the kernel did not let go of it before its ring was dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeakedMemory {
    /// Operations that had not ended.
    pub operations: u64,
    /// Bytes of their buffers. Each keeps its whole region mapped.
    pub bytes: u64,
}

/// What was leaked so far, by all rings of this process. Anything but 0 means a device that does not answer.
pub fn leaked() -> LeakedMemory {
    LeakedMemory { operations: LEAKED_OPERATIONS.load(Ordering::Relaxed), bytes: LEAKED_BYTES.load(Ordering::Relaxed) }
}

/// One result of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The caller's name for the operation.
    pub token: u64,
    /// Bytes or zero; a negative errno when it failed.
    pub result: i32,
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

/// An io_uring with everything in flight on it, for several threads in turn.
pub struct Ring<S: squeue::EntryMarker = squeue::Entry, C: cqueue::EntryMarker = cqueue::Entry> {
    uring: ManuallyDrop<IoUring<S, C>>,
    operations: ManuallyDrop<Operations>,
    /// Entries ever pushed to the submission queue.
    pushed: u64,
    setup: &'static str,
    fixed: fixed::FixedWindows,
    files: files::RegisteredFiles,
    /// Completions come only to who asks the device for them.
    polled: bool,
    /// Results are statuses of a drive.
    commands: bool,
    /// Nothing is submitted any more.
    ended: bool,
    /// How long dropping it waits for the kernel.
    patience: Duration,
}

// SAFETY: whoever has the ring has it alone: nothing in it is shared with its former thread, and the addresses in its
// table are those of allocations that it owns. The kernel answers with an error to a thread that may not submit, and
// then the ring keeps what it holds.
unsafe impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Send for Ring<S, C> {}

/// A ring for commands to NVMe drives.
pub type CommandRing = Ring<squeue::Entry128, cqueue::Entry32>;

impl Ring {
    /// Makes a ring with at least `entries` submission entries. At most four times as many operations can be in flight.
    /// Several threads may use it in turn: each submits and takes completions of all. The error says what to do where
    /// io_uring is forbidden or memory may not be locked.
    pub fn shared(entries: u32) -> io::Result<Self> {
        let (uring, setup) = setup::build(entries, &setup::SHARED_SETUPS)?;
        Self::with(uring, setup)
    }

    /// As [`Ring::shared`], for direct reads and writes of devices whose completions are polled for: nothing becomes
    /// readable when one is there, so somebody must call [`Ring::poll`] until all are. A device that does not offer
    /// that answers each operation with `EOPNOTSUPP`. Flushes belong on another ring.
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

    /// How the ring was set up, for logs.
    pub fn describe(&self) -> String {
        let parameters = self.uring.params();
        let (submissions, completions) = (parameters.sq_entries(), parameters.cq_entries());
        format!("io_uring {} ({submissions} submissions, {completions} completions)", self.setup)
    }

    /// Operations whose completion has not been read.
    pub fn in_flight(&self) -> usize {
        self.operations.len()
    }

    /// Submits what is queued and adds the completions that are there to `out`; returns how many. Never blocks, and
    /// enters the kernel only when it has something to do there.
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

    /// Submits what is queued, and lets the kernel finish what it deferred. Never blocks. What the kernel has no room
    /// for at the moment stays queued.
    pub fn submit(&mut self) -> io::Result<()> {
        self.check_open()?;
        tolerate(self.uring.submitter().submit())
    }

    fn check_open(&self) -> io::Result<()> {
        if self.ended { Err(io::Error::other("this io_uring has ended: make another")) } else { Ok(()) }
    }

    /// Ends the ring: cancels everything in flight, submits nothing from now on, and waits for the kernel to let go of
    /// all memory, at most `longest`. Whether it has; to be asked again until it has, as only then the buffers are the
    /// caller's again. What was queued and never submitted is not done.
    pub fn end(&mut self, longest: Duration) -> bool {
        if !self.ended {
            self.ended = true;
            // Its descriptors may be gone when somebody asks again. The kernel has not seen it, so its memory is free.
            let queued = self.uring.submission().len() as u64;
            self.operations.forget_from(self.pushed - queued);
            // However short the wait, everything is cancelled. What goes wrong here is seen below.
            self.nudge(Duration::ZERO).ok();
        }
        let start = Instant::now();
        let mut out = Vec::new();
        loop {
            // Completions come also where the kernel takes no calls any more.
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

    /// Cancels everything and waits for a completion, without submitting anything.
    fn nudge(&mut self, step: Duration) -> io::Result<()> {
        let step = Timespec::from(step);
        let submitter = self.uring.submitter();
        // Nothing to cancel, or the kernel (before 6.0) cannot: the completions decide.
        submitter.register_sync_cancel(Some(step), CancelBuilder::any()).ok();
        let arguments = SubmitArgs::new().timespec(&step);
        let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        // SAFETY: submits nothing and waits for one completion; the argument is what EXT_ARG asks for, and lives
        // through the call.
        tolerate(unsafe { submitter.enter(0, 1, flags.bits(), Some(&arguments)) })
    }

    /// Makes a file known to the ring for good.
    ///
    /// # Errors
    /// When the kernel refuses, or too many are.
    pub fn register_file(&mut self, fd: BorrowedFd<'_>) -> io::Result<RegisteredFile> {
        self.files.register(fd, &self.uring.submitter())
    }

    /// Pins a region's pages for file operations of this ring: all of it, or none.
    ///
    /// # Errors
    /// When the kernel refuses or no place is left; the region can then be used as it is. `ENOMEM` means the limit of
    /// locked memory (`ulimit -l`).
    pub fn register_region(&mut self, region: &Arc<Region>) -> io::Result<()> {
        self.fixed.register(region, &self.uring.submitter())
    }

    /// Whether an operation on this buffer uses pages that are pinned already.
    pub fn is_registered(&self, buffer: &IoBuf) -> bool {
        self.fixed.place_of(buffer).is_some()
    }

    /// Lets a region's pages go. Operations in flight on it keep them until they end.
    pub fn unregister_region(&mut self, region: &Arc<Region>) {
        self.fixed.unregister(region, &self.uring.submitter());
    }

    /// Queues an operation: what the kernel will touch goes into the table first.
    fn start(&mut self, token: u64, held: impl Into<KernelHold>, mut entry: S) -> Result<(), RingFull> {
        self.make_room()?;
        let user_data = self.operations.insert(token, self.pushed, held);
        entry.set_user_data(user_data);
        self.push(&entry);
        Ok(())
    }

    fn make_room(&mut self) -> Result<(), RingFull> {
        // Nothing is submitted any more by a ring that has ended.
        if self.ended || self.operations.is_full() {
            return Err(RingFull);
        }
        self.make_queue_room()
    }

    fn make_queue_room(&mut self) -> Result<(), RingFull> {
        if self.uring.submission().is_full() {
            // Whatever goes wrong here goes wrong again in the next poll, which reports it.
            self.submit().ok();
            if self.uring.submission().is_full() {
                return Err(RingFull);
            }
        }
        Ok(())
    }

    fn push(&mut self, entry: &S) {
        // SAFETY: every address in the entry points into something that the operation table holds until the
        // operation's completion: `start` put it there.
        let pushed = unsafe { self.uring.submission().push(entry) };
        assert!(pushed.is_ok(), "room was made before");
        self.pushed += 1;
    }

    fn harvest(&mut self, out: &mut Vec<Completion>) -> usize {
        let before = out.len();
        for entry in self.uring.completion() {
            let entry: cqueue::Entry = entry.into();
            // Lets go of what the operation held.
            let Some(operation) = self.operations.remove(entry.user_data()) else { continue };
            let status = entry.result();
            let result = if self.commands { commands::result_of(status, operation.bytes()) } else { status };
            out.push(Completion { token: operation.token, result });
        }
        out.len() - before
    }
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

/// Readable while there are completions to take: for a [`Poller`](crate::Poller). Not of a polled ring.
impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> AsFd for Ring<S, C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the ring is.
        unsafe { BorrowedFd::borrow_raw(self.uring.as_raw_fd()) }
    }
}

impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Drop for Ring<S, C> {
    fn drop(&mut self) {
        let done = self.end(self.patience);
        // SAFETY: dropped here and not used again. Closing the ring makes the kernel abort the rest by itself.
        unsafe { ManuallyDrop::drop(&mut self.uring) };
        if done {
            // SAFETY: dropped here and not used again; the kernel holds none of its memory.
            unsafe { ManuallyDrop::drop(&mut self.operations) };
            return;
        }
        // The kernel may still write there: the table, and with it the memory, stays for good.
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

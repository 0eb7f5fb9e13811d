//! NVMe driver under a tier: block operations carried out by io_uring on a part of a file or device.
//!
//! * Operations wait in one queue per priority. The most urgent priority goes first, and each has a queue depth of its
//!   own, so that prefetch, reclaim and recovery neither starve gets nor fill the device's queue before them.
//! * Operations are submitted to the kernel in batches of a few, and completions are handled in batches too: the device
//!   works on the first operations while the next are prepared. If all were batched at once, CPU and device would take
//!   turns, and the device would idle.
//! * Memory is the pool's own pages and the tier's staging area, registered (pinned) once where the kernel allows.
//!   Operations with a single piece use the registration; operations with several pieces are scattered or gathered, and
//!   their pages are pinned for each operation.
//! * Where the device offers polled completions, reads and writes go to a second, polled ring; the first refusal moves
//!   all of them back to the plain ring. Flushes always use the plain ring.
//! * On an NVMe drive reads and writes are passthrough commands (`passthrough.rs`). A command that fails is retried
//!   through io_uring, whose error counts; a drive that refuses commands receives no more of them.
//! * A short count is reported unchanged to the tier, which treats it as an error. Only operations that the kernel puts
//!   off (EAGAIN, EINTR) are retried, a bounded number of times.
//!
//! Thread affinity: one thread at a time; it may be another each time.

mod counters;
mod device;
mod memory;
mod operations;
mod passthrough;
mod rings;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use kvplane_sys::{Completion, IoBuf, cpu};
use kvplane_tier::{Action, BlockOp, Fault, OpId, Priority};
use operations::{Operations, RunningCall};
use rings::{RingKind, Rings};

pub use counters::{NvmeCounters, PriorityCounters};
pub use device::{IoChoice, Offers, Part, Ssd};
pub use memory::TierMemory;
pub use operations::DEPTHS;

/// Limit of attempts for an operation that the kernel puts off.
const ATTEMPTS_MOST: u32 = 100;

/// Batch size of submissions and completions. A submission call costs less than a microsecond; completing and starting
/// an operation costs several, mostly for checksums.
const AT_A_TIME: usize = 8;

/// The driver of one tier.
pub struct Nvme {
    part: Part,
    memory: TierMemory,
    rings: Rings,
    operations: Operations,
    done: VecDeque<(OpId, Result<u32, Fault>)>,
    /// Completions that are not handled yet, each with the path that its operation took.
    ended: VecDeque<(Completion, RingKind)>,
    counters: NvmeCounters,
    remarks: Vec<String>,
    last_problem: Option<String>,
}

impl Nvme {
    /// Creates a driver for this part of a device, on this memory.
    ///
    /// # Errors
    /// When the kernel provides no ring.
    pub fn new(part: Part, memory: TierMemory) -> io::Result<Self> {
        let polling = part.offers().polling;
        Self::with(part, memory, polling)
    }

    fn with(part: Part, memory: TierMemory, polling: bool) -> io::Result<Self> {
        let mut remarks = Vec::new();
        let rings = Rings::open(&part, &memory, polling, &mut remarks)?;
        Ok(Self {
            part,
            memory,
            rings,
            operations: Operations::new(),
            done: VecDeque::new(),
            ended: VecDeque::new(),
            counters: NvmeCounters::default(),
            remarks,
            last_problem: None,
        })
    }

    /// Returns the part that the driver works on.
    #[must_use]
    pub const fn part(&self) -> &Part {
        &self.part
    }

    /// Returns the memory that the driver reads and writes.
    pub const fn memory(&mut self) -> &mut TierMemory {
        &mut self.memory
    }

    /// Returns remarks on how the driver works, for logs.
    #[must_use]
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Returns and clears the description of the last failure.
    pub fn take_problem(&mut self) -> Option<String> {
        self.last_problem.take()
    }

    /// Returns the counters, with the current numbers in flight and queued.
    #[must_use]
    pub fn counters(&self) -> NvmeCounters {
        let mut counters = self.counters.clone();
        for (at, priority) in counters.priorities.iter_mut().enumerate() {
            self.operations.count(at, priority);
        }
        counters
    }

    /// Queues an operation. Its completion is returned by [`Self::poll_done`]; the tier bounds the number of
    /// operations.
    pub fn start(&mut self, op: BlockOp) {
        let fits = op.offset.checked_add(op.bytes.into()).is_some_and(|end| end <= self.part.bytes);
        if !fits {
            let (at, bytes, limit) = (op.offset, op.bytes, self.part.bytes);
            self.last_problem = Some(format!("{bytes} bytes at {at} are outside a part of {limit} bytes"));
            self.done.push_back((op.id, Err(Fault::Io)));
            return;
        }
        self.operations.add(op, cpu::monotonic_ns());
    }

    /// Submits queued operations as far as the queue depths allow: the most urgent first, in few calls.
    ///
    /// # Errors
    /// When the ring fails.
    pub fn flush(&mut self) -> io::Result<()> {
        let mut waiting = 0;
        for priority in Priority::ALL {
            while let Some(index) = self.operations.next(priority) {
                if !self.issue(index) {
                    self.operations.put_back(priority, index);
                    break;
                }
                waiting += 1;
                if waiting == AT_A_TIME {
                    waiting = 0;
                    self.submit()?;
                }
            }
        }
        if waiting > 0 { self.submit() } else { Ok(()) }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.counters.submissions += 1;
        self.rings.submit()
    }

    /// Puts an operation into a ring. Returns false if the ring is full.
    fn issue(&mut self, index: usize) -> bool {
        let Some(RunningCall { op, plain, .. }) = self.operations.get(index) else { return true };
        let pieces: Vec<IoBuf> = op.pieces.as_slice().iter().map(|span| self.memory.buffer(*span)).collect();
        let Ok(is_pinned) = self.rings.issue(&self.part, &op, plain, &pieces, index as u64) else { return false };
        self.operations.issued(op.priority);
        self.counters.priorities[op.priority as usize].started += 1;
        self.counters.pinned += u64::from(is_pinned);
        true
    }

    /// Handles a batch of completions; more may be left. Never blocks. Returns true if there were any.
    ///
    /// # Errors
    /// When a ring fails.
    pub fn poll(&mut self) -> io::Result<bool> {
        if self.ended.is_empty() && self.operations.has_in_flight() {
            self.rings.poll(&mut self.ended)?;
        }
        let some = self.ended.len().min(AT_A_TIME);
        for _ in 0..some {
            let Some((completion, way)) = self.ended.pop_front() else { break };
            self.completed(completion, way);
        }
        Ok(some > 0)
    }

    fn completed(&mut self, completion: Completion, way: RingKind) {
        let index = completion.token as usize;
        let Some(RunningCall { op, since_ns, attempts, .. }) = self.operations.returned(index) else { return };
        if way == RingKind::Commands && completion.result < 0 {
            self.operations.repeat(index, |running| running.plain = true);
            self.counters.commands_failed += 1;
            self.remarks.extend(self.rings.command_failed(&op, completion.result));
            return;
        }
        if way == RingKind::Polled && completion.result == -kvplane_sys::errno::EOPNOTSUPP {
            self.remarks.extend(self.rings.stop_polling());
            self.operations.repeat(index, |_| {});
            return;
        }
        let again = [-kvplane_sys::errno::EAGAIN, -kvplane_sys::errno::EINTR].contains(&completion.result);
        if again && attempts < ATTEMPTS_MOST {
            self.operations.repeat(index, |running| running.attempts += 1);
            self.counters.retries += 1;
            return;
        }
        let took_ns = cpu::monotonic_ns().saturating_sub(since_ns);
        self.operations.remove(index);
        self.counters.polled += u64::from(self.rings.polls(way));
        self.counters.commands += u64::from(way == RingKind::Commands);
        let result = self.outcome(&op, completion.result);
        self.count(&op, result, took_ns);
        self.done.push_back((op.id, result));
    }

    fn outcome(&mut self, op: &BlockOp, result: i32) -> Result<u32, Fault> {
        if result < 0 {
            let error = io::Error::from_raw_os_error(-result);
            let fault = fault_of(&error);
            self.problem(op, &error.to_string());
            if op.action == Action::Flush {
                self.part.ssd.note_failed_flush();
            }
            return Err(fault);
        }
        if op.action == Action::Flush && self.part.ssd.has_failed_flush() {
            self.problem(op, "an earlier flush of the device failed, for this shard or another");
            return Err(Fault::Io);
        }
        if result as u32 != op.bytes {
            self.problem(op, &format!("only {result} bytes were moved"));
        }
        Ok(result as u32)
    }

    fn problem(&mut self, op: &BlockOp, what: &str) {
        let verb = match op.action {
            Action::Read => "reading",
            Action::Write { .. } => "writing",
            Action::Flush => "flushing",
        };
        let (bytes, at, path) = (op.bytes, self.part.start + op.offset, self.part.path().display());
        self.last_problem = Some(format!("{verb} {bytes} bytes at {at} of {path}: {what}"));
    }

    fn count(&mut self, op: &BlockOp, result: Result<u32, Fault>, took_ns: u64) {
        let counters = &mut self.counters;
        let moved = u64::from(result.unwrap_or(0));
        let of = &mut counters.priorities[op.priority as usize];
        of.bytes += moved;
        of.failed += u64::from(result != Ok(op.bytes));
        match op.action {
            Action::Read => {
                counters.reads += 1;
                counters.read_bytes += moved;
                if op.priority == Priority::Get {
                    counters.get_latency.add(took_ns);
                }
            }
            Action::Write { .. } => {
                counters.writes += 1;
                counters.written_bytes += moved;
            }
            Action::Flush => {
                counters.flush_latency.add(took_ns);
                counters.flush_most_ns = counters.flush_most_ns.max(took_ns);
            }
        }
    }

    /// Returns the next completed operation: the bytes it moved, or its fault.
    pub fn poll_done(&mut self) -> Option<(OpId, Result<u32, Fault>)> {
        self.done.pop_front()
    }

    /// Returns true if no operation is queued or in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.operations.is_empty() && self.done.is_empty()
    }

    /// Returns true if completions arrive only when a ring is polled, or are left to be taken: the host must not park
    /// then.
    #[must_use]
    pub fn must_be_polled(&self) -> bool {
        !self.done.is_empty() || !self.ended.is_empty() || self.rings.must_be_polled()
    }

    /// Returns descriptors, one of which becomes readable when an unpolled operation has completed.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.fds()
    }

    /// Ends all I/O for good and waits at most `longest` for the kernel to release the memory. Returns true if it has.
    pub fn end(&mut self, longest: Duration) -> bool {
        self.rings.end(longest)
    }
}

fn fault_of(error: &io::Error) -> Fault {
    use kvplane_sys::errno;
    match error.raw_os_error().unwrap_or(0) {
        errno::ENOSPC | errno::EDQUOT => Fault::NoSpace,
        errno::EROFS | errno::EPERM | errno::EBADF => Fault::ReadOnly,
        errno::ENXIO | errno::ENODEV => Fault::Gone,
        _ => Fault::Io,
    }
}

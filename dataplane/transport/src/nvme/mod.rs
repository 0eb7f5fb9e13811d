//! The SSD under a tier: block operations carried out by io_uring on a part of a file or device.
//!
//! * Operations wait in a queue for each priority. The most urgent goes first, and each priority has a depth of its
//!   own, so that prefetch, reclaim and recovery neither starve gets nor fill the device's queue before them.
//! * What is queued goes to the kernel some operations at a time, and what has ended comes back so: the device works on
//!   the first while the next are made ready. With all at once they would go up and down together, and it would idle.
//! * Memory is the pool's own pages and the tier's staging area, pinned once where the kernel allows. Operations of one
//!   piece use that; those of several pieces are scattered or gathered, and their pages pinned for each.
//! * Where the device's completions can be polled for, reads and writes go to a second ring that does; the first
//!   refusal puts everything back on the plain one. Flushes always take the plain one.
//! * Of an NVMe drive reads and writes are commands to it (`passthrough.rs`). One that fails is tried again the plain
//!   way, whose error counts; a drive that refuses commands is given none any more.
//! * A short count is given to the tier as it is, which takes it for an error. Only what the kernel asks to be tried
//!   again is, and not for ever.
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
use rings::{Rings, Way};

pub use counters::{BUCKETS, Latency, NvmeCounters, PriorityCounters};
pub use device::{IoChoice, Offers, Part, Ssd};
pub use memory::TierMemory;
pub use operations::DEPTHS;

/// How often an operation that the kernel puts off is tried.
const ATTEMPTS_MOST: u32 = 100;

/// How many operations go to the kernel in one call, and come back in one. A call costs less than a microsecond; the
/// end and the beginning of an operation cost us several, mostly for checksums.
const AT_A_TIME: usize = 8;

/// The driver of one tier.
pub struct Nvme {
    part: Part,
    memory: TierMemory,
    rings: Rings,
    operations: Operations,
    done: VecDeque<(OpId, Result<u32, Fault>)>,
    /// What has ended and was not looked at, and by which way it went.
    ended: VecDeque<(Completion, Way)>,
    counters: NvmeCounters,
    remarks: Vec<String>,
    last_problem: Option<String>,
}

impl Nvme {
    /// A driver for this part of a device, on this memory.
    ///
    /// # Errors
    /// When the kernel gives no ring.
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

    /// What it works on.
    #[must_use]
    pub const fn part(&self) -> &Part {
        &self.part
    }

    /// The memory that it moves from and to.
    pub const fn memory(&mut self) -> &mut TierMemory {
        &mut self.memory
    }

    /// How it works, for logs.
    #[must_use]
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// The last thing that went wrong, in words.
    pub fn take_problem(&mut self) -> Option<String> {
        self.last_problem.take()
    }

    /// What happened so far, and how much is under way.
    #[must_use]
    pub fn counters(&self) -> NvmeCounters {
        let mut counters = self.counters;
        for (at, priority) in counters.priorities.iter_mut().enumerate() {
            self.operations.count(at, priority);
        }
        counters
    }

    /// Takes an operation. Its end comes from [`Self::poll_done`]; the tier bounds how many there are.
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

    /// Gives the kernel what is queued, as far as the depths allow: the most urgent first, in few calls.
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

    /// Puts an operation into a ring. Whether there was room.
    fn issue(&mut self, index: usize) -> bool {
        let Some(RunningCall { op, plain, .. }) = self.operations.get(index) else { return true };
        let pieces: Vec<IoBuf> = op.pieces.as_slice().iter().map(|span| self.memory.buffer(*span)).collect();
        let Ok(is_pinned) = self.rings.issue(&self.part, &op, plain, &pieces, index as u64) else { return false };
        self.operations.issued(op.priority);
        self.counters.priorities[op.priority as usize].started += 1;
        self.counters.pinned += u64::from(is_pinned);
        true
    }

    /// Takes some of what has ended: there may be more. Never blocks. Whether anything did.
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

    fn completed(&mut self, completion: Completion, way: Way) {
        let index = completion.token as usize;
        let Some(RunningCall { op, since_ns, attempts, .. }) = self.operations.returned(index) else { return };
        if way == Way::Commands && completion.result < 0 {
            self.operations.repeat(index, |running| running.plain = true);
            self.counters.commands_failed += 1;
            self.remarks.extend(self.rings.command_failed(&op, completion.result));
            return;
        }
        if way == Way::Polled && completion.result == -kvplane_sys::errno::EOPNOTSUPP {
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
        self.counters.commands += u64::from(way == Way::Commands);
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
            Action::Flush => counters.flush_latency.add(took_ns),
        }
    }

    /// The next operation that has ended: the bytes it moved, or why not.
    pub fn poll_done(&mut self) -> Option<(OpId, Result<u32, Fault>)> {
        self.done.pop_front()
    }

    /// Whether nothing is queued or under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.operations.is_empty() && self.done.is_empty()
    }

    /// Whether completions come only when a ring is polled, or wait to be taken: then a host does not park meanwhile.
    #[must_use]
    pub fn must_be_polled(&self) -> bool {
        !self.done.is_empty() || !self.ended.is_empty() || self.rings.must_be_polled()
    }

    /// One of them becomes readable when something has ended that is not polled for.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.fds()
    }

    /// Ends all I/O for good and waits for the kernel to let go of the memory, at most `longest`. Whether it has.
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

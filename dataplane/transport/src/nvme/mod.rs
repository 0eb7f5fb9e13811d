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
mod passthrough;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use kvplane_sys::{Completion, IoBuf, RegisteredFile, Ring, cpu};
use kvplane_tier::{Action, BlockOp, Fault, OpId, Priority};
use passthrough::Commands;

pub use counters::{BUCKETS, Latency, NvmeCounters, PriorityCounters};
pub use device::{IoChoice, Offers, Part, Ssd};
pub use memory::TierMemory;

/// Entries of a ring: all that may be in flight.
const RING_ENTRIES: u32 = 256;
/// How often an operation that the kernel puts off is tried.
const ATTEMPTS_MOST: u32 = 100;

/// How many operations go to the kernel in one call, and come back in one. A call costs less than a microsecond; the
/// end and the beginning of an operation cost us several, mostly for checksums.
const AT_A_TIME: usize = 8;

/// How many operations of each priority the device has at once.
pub const DEPTHS: [usize; Priority::ALL.len()] = [128, 64, 24, 16];

const _: () = assert!(DEPTHS[0] + DEPTHS[1] + DEPTHS[2] + DEPTHS[3] <= RING_ENTRIES as usize);

#[derive(Clone, Copy, Debug)]
struct RunningCall {
    op: BlockOp,
    since_ns: u64,
    attempts: u32,
    /// By a command it could not be done.
    plain: bool,
}

/// The rings, and so who was asked for a completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Commands,
    Polled,
    Plain,
}

/// The driver of one tier.
pub struct Nvme {
    part: Part,
    memory: TierMemory,
    ring: Ring,
    file: RegisteredFile,
    /// The ring whose completions are polled for.
    polled: Option<(Ring, RegisteredFile)>,
    /// Whether it is used.
    polling: bool,
    /// The ring of commands to the drive, as long as it takes them.
    commands: Option<Commands>,
    running: slab::Slab<RunningCall>,
    queues: [VecDeque<usize>; Priority::ALL.len()],
    in_flight: [usize; Priority::ALL.len()],
    done: VecDeque<(OpId, Result<u32, Fault>)>,
    completions: Vec<Completion>,
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
        let mut ring = Ring::shared(RING_ENTRIES)?;
        let fd = part.ssd.claimed().file().fd();
        let file = ring.register_file(fd)?;
        let commands = match part.ssd.namespace() {
            Some(_) => Commands::new(&part, &mut ring, file, polling).map_err(|why| refused(&why)),
            None => Err(String::new()),
        };
        remarks.extend(commands.as_ref().err().filter(|why| !why.is_empty()).cloned());
        let mut commands = commands.ok();
        let mut polled = None;
        if polling {
            let made = Ring::polled(RING_ENTRIES).and_then(|mut ring| Ok((ring.register_file(fd)?, ring)));
            match made {
                Ok((file, ring)) => polled = Some((ring, file)),
                Err(error) => remarks.push(format!("completions come by interrupt: {error}")),
            }
        }
        for region in memory.regions() {
            let rings = [Some(&mut ring), polled.as_mut().map(|(ring, _)| ring)];
            let pinned = rings.into_iter().flatten().map(|ring| ring.register_region(region));
            let also = commands.as_mut().map(|commands| commands.ring.register_region(region));
            if let Some(error) = pinned.chain(also).find_map(Result::err) {
                let bytes = region.bytes();
                remarks.push(format!("{bytes} bytes of memory are not pinned, which costs CPU time: {error}"));
            }
        }
        Ok(Self {
            part,
            memory,
            ring,
            file,
            polling: polled.is_some(),
            polled,
            commands,
            running: slab::Slab::new(),
            queues: core::array::from_fn(|_| VecDeque::new()),
            in_flight: [0; Priority::ALL.len()],
            done: VecDeque::new(),
            completions: Vec::new(),
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
            priority.in_flight = self.in_flight[at] as u64;
            priority.queued = self.queues[at].len() as u64;
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
        let index = self.running.insert(RunningCall { op, since_ns: cpu::monotonic_ns(), attempts: 0, plain: false });
        self.queues[op.priority as usize].push_back(index);
    }

    /// Gives the kernel what is queued, as far as the depths allow: the most urgent first, in few calls.
    ///
    /// # Errors
    /// When the ring fails.
    pub fn flush(&mut self) -> io::Result<()> {
        let mut waiting = 0;
        for (priority, depth) in DEPTHS.into_iter().enumerate() {
            while self.in_flight[priority] < depth {
                let Some(index) = self.queues[priority].pop_front() else { break };
                if !self.issue(index) {
                    self.queues[priority].push_front(index);
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
        self.ring.submit()?;
        if let Some((ring, _)) = &mut self.polled {
            ring.submit()?;
        }
        self.commands.as_mut().map_or(Ok(()), |commands| commands.ring.submit())
    }

    /// Puts an operation into a ring. Whether there was room.
    fn issue(&mut self, index: usize) -> bool {
        let Some(RunningCall { op, plain, .. }) = self.running.get(index).copied() else { return true };
        let (offset, token) = (self.part.start + op.offset, index as u64);
        let pieces: Vec<IoBuf> = op.pieces.as_slice().iter().map(|span| self.memory.buffer(*span)).collect();
        let moves = !matches!(op.action, Action::Flush);
        let (queued, is_pinned) = match &mut self.commands {
            Some(commands) if moves && !plain && commands.takes(&self.part, &op) => {
                commands.issue(&self.part, op.action, &pieces, offset, token)
            }
            _ => {
                let (ring, file) = match &mut self.polled {
                    Some((ring, file)) if self.polling && moves => (ring, *file),
                    _ => (&mut self.ring, self.file),
                };
                let is_pinned = matches!(&pieces[..], [piece] if ring.is_registered(piece));
                let queued = match op.action {
                    Action::Read => ring.scatter_at(file, &pieces, offset, token),
                    Action::Write { durable } => ring.gather_at(file, &pieces, offset, durable, token),
                    Action::Flush => ring.sync_data(file, token),
                };
                (queued, is_pinned)
            }
        };
        if queued.is_ok() {
            self.in_flight[op.priority as usize] += 1;
            self.counters.priorities[op.priority as usize].started += 1;
            self.counters.pinned += u64::from(is_pinned);
        }
        queued.is_ok()
    }

    /// Takes some of what has ended: there may be more. Never blocks. Whether anything did.
    ///
    /// # Errors
    /// When a ring fails.
    pub fn poll(&mut self) -> io::Result<bool> {
        if self.ended.is_empty() {
            self.harvest()?;
        }
        let some = self.ended.len().min(AT_A_TIME);
        for _ in 0..some {
            let Some((completion, way)) = self.ended.pop_front() else { break };
            self.completed(completion, way);
        }
        Ok(some > 0)
    }

    fn harvest(&mut self) -> io::Result<()> {
        if self.in_flight.iter().all(|in_flight| *in_flight == 0) {
            return Ok(());
        }
        for way in [Way::Commands, Way::Polled, Way::Plain] {
            match (way, &mut self.commands, &mut self.polled) {
                (Way::Commands, Some(commands), _) => commands.ring.poll(&mut self.completions)?,
                (Way::Polled, _, Some((ring, _))) => ring.poll(&mut self.completions)?,
                (Way::Plain, ..) => self.ring.poll(&mut self.completions)?,
                _ => 0,
            };
            self.ended.extend(self.completions.drain(..).map(|completion| (completion, way)));
        }
        Ok(())
    }

    fn completed(&mut self, completion: Completion, way: Way) {
        let index = completion.token as usize;
        let Some(running) = self.running.get_mut(index) else { return };
        let op = running.op;
        self.in_flight[op.priority as usize] -= 1;
        if way == Way::Commands && completion.result < 0 {
            running.plain = true;
            self.queues[op.priority as usize].push_back(index);
            self.command_failed(&op, completion.result);
            return;
        }
        if way == Way::Polled && completion.result == -kvplane_sys::errno::EOPNOTSUPP {
            self.stop_polling();
            self.queues[op.priority as usize].push_back(index);
            return;
        }
        let again = [-kvplane_sys::errno::EAGAIN, -kvplane_sys::errno::EINTR].contains(&completion.result);
        if again && running.attempts < ATTEMPTS_MOST {
            running.attempts += 1;
            self.counters.retries += 1;
            self.queues[op.priority as usize].push_back(index);
            return;
        }
        let took_ns = cpu::monotonic_ns().saturating_sub(running.since_ns);
        self.running.remove(index);
        let is_polled =
            way == Way::Polled || self.commands.as_ref().is_some_and(|all| way == Way::Commands && all.polled);
        self.counters.polled += u64::from(is_polled);
        self.counters.commands += u64::from(way == Way::Commands);
        let result = self.outcome(&op, completion.result);
        self.count(&op, result, took_ns);
        self.done.push_back((op.id, result));
    }

    /// Said only where the drive takes no commands at all: what fails is tried the plain way, and said then.
    fn command_failed(&mut self, op: &BlockOp, result: i32) {
        use kvplane_sys::errno::{EACCES, EINVAL, ENOTTY, EOPNOTSUPP, EPERM};
        self.counters.commands_failed += 1;
        let Some(commands) = &mut self.commands else { return };
        if commands.is_used && [EACCES, EINVAL, ENOTTY, EOPNOTSUPP, EPERM].contains(&-result) {
            commands.is_used = false;
            let (error, bytes) = (io::Error::from_raw_os_error(-result), op.bytes);
            self.remarks.push(refused(&format!("one of {bytes} bytes: {error}")));
        }
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

    /// The device does not let its completions be polled for after all.
    fn stop_polling(&mut self) {
        if self.polling {
            self.polling = false;
            self.remarks.push("completions come by interrupt: the device refuses polling".to_owned());
        }
    }

    /// The next operation that has ended: the bytes it moved, or why not.
    pub fn poll_done(&mut self) -> Option<(OpId, Result<u32, Fault>)> {
        self.done.pop_front()
    }

    /// Whether nothing is queued or under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.done.is_empty()
    }

    /// Whether completions come only to who asks for them, or wait to be taken: then a host does not park meanwhile.
    #[must_use]
    pub fn must_be_polled(&self) -> bool {
        let waits = |in_flight: usize| in_flight > 0;
        !self.done.is_empty()
            || !self.ended.is_empty()
            || self.polled.as_ref().is_some_and(|(ring, _)| waits(ring.in_flight()))
            || self.commands.as_ref().is_some_and(|commands| commands.polled && waits(commands.ring.in_flight()))
    }

    /// One of them becomes readable when something has ended that is not polled for.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let commands = self.commands.as_ref().filter(|commands| !commands.polled);
        [Some(self.ring.as_fd()), commands.map(|commands| commands.ring.as_fd())].into_iter().flatten()
    }

    /// Ends all I/O for good and waits for the kernel to let go of the memory, at most `longest`. Whether it has.
    pub fn end(&mut self, longest: Duration) -> bool {
        let polled = self.polled.as_mut().is_none_or(|(ring, _)| ring.end(longest));
        let commands = self.commands.as_mut().is_none_or(|commands| commands.ring.end(longest));
        self.ring.end(longest) && polled && commands
    }
}

fn refused(why: &str) -> String {
    format!("the drive takes no commands, io_uring is used: {why}")
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

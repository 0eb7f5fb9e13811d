//! Batches: what is known of one without a lock, and how its end is waited for.
//!
//! The thread that drives a batch's I/O writes its state; everybody reads it. A batch is done once, and only when
//! nothing touches its memory any more; then its waiters are woken, in every form they asked for.

use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use kvplane_proto::{BatchId, Status};
use kvplane_sys::doorbell::event_fd;

use super::driver::Driver;
use super::memory::Buffer;
use super::segment::Remote;
use crate::error::Error;

/// Where a task or a batch is. The numbers are those of Mooncake's interface.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(u8)]
pub enum TaskState {
    /// Not started.
    Waiting = 0,
    /// Under way.
    Pending = 1,
    /// There is no such task.
    Invalid = 2,
    /// Withdrawn before it was done.
    Canceled = 3,
    /// Done: the bytes are where they belong.
    Completed = 4,
    /// Its deadline passed first.
    Timeout = 5,
    /// It failed.
    Failed = 6,
}

impl TaskState {
    /// Whether nothing more will happen.
    #[must_use]
    pub const fn is_final(self) -> bool {
        !matches!(self, Self::Waiting | Self::Pending)
    }

    const fn of(status: Status) -> Self {
        match status {
            Status::Ok => Self::Completed,
            Status::Cancelled => Self::Canceled,
            Status::DeadlineExceeded => Self::Timeout,
            _ => Self::Failed,
        }
    }
}

/// What is known of one task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TaskStatus {
    /// Where it is.
    pub state: TaskState,
    /// Bytes that were moved.
    pub transferred_bytes: u64,
    /// Its outcome, once it has one.
    pub outcome: Option<Status>,
}

/// What is known of a batch as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchStatus {
    /// Where it is. Final only when all its tasks are: then the most serious of their states.
    pub state: TaskState,
    /// Its tasks.
    pub tasks: usize,
    /// Those of them that have ended.
    pub ended: usize,
    /// Bytes that were moved.
    pub transferred_bytes: u64,
}

/// Bits of a task's word: bytes, then the outcome, then whether there is one.
const BYTES_BITS: u32 = 48;
const ENDED: u64 = 1 << 63;

/// Whether nobody waits for a batch, by its owner's word; and that it does not matter any more.
const PUSH_NO: u8 = 0;
const PUSH_YES: u8 = 1;
const PUSH_OVER: u8 = 2;

/// A batch as its driver and its owner share it.
pub(super) struct State {
    id: u64,
    /// A word for each task.
    tasks: Box<[AtomicU64]>,
    /// Where a task has several parts: the task of each, and each task's parts that have not ended.
    parts: Option<(Box<[u32]>, Box<[AtomicU32]>)>,
    open_tasks: AtomicUsize,
    bytes: AtomicU64,
    /// The most serious outcome so far.
    worst: AtomicU8,
    started: AtomicBool,
    /// What the driver's client calls it; only the driver looks.
    pub(super) place: OnceLock<BatchId>,
    /// Slices it may be cut into.
    pub(super) slices: usize,
    /// Whether the engine's own thread is to move it on from the start.
    background: bool,
    push: AtomicU8,
    /// Whether a peer's description of its segment is awaited, and that.
    pub(super) wants_description: bool,
    pub(super) description: OnceLock<Vec<u8>>,
    problem: OnceLock<String>,
    /// What it uses until it is done.
    buffers: Mutex<Vec<Arc<Buffer>>>,
    remotes: Vec<Arc<Remote>>,
    done: AtomicBool,
    watched: AtomicBool,
    watchers: Mutex<Watchers>,
    event: OnceLock<File>,
}

#[derive(Default)]
struct Watchers {
    threads: Vec<Thread>,
    wakers: Vec<Waker>,
    signalled: bool,
}

/// What a batch is made of.
#[derive(Default)]
pub(super) struct Parts {
    pub(super) tasks: usize,
    /// The task of each part; `None` when each task is one part.
    pub(super) owners: Option<Vec<u32>>,
    pub(super) slices: usize,
    pub(super) buffers: Vec<Arc<Buffer>>,
    pub(super) remotes: Vec<Arc<Remote>>,
    pub(super) background: bool,
    pub(super) wants_description: bool,
}

impl State {
    /// A batch that has not started. Its buffers count it as their user from now on.
    pub(super) fn new(id: u64, parts: Parts) -> Self {
        let several = parts.owners.map(|owners| {
            let mut open = vec![0u32; parts.tasks];
            owners.iter().for_each(|&task| open[task as usize] += 1);
            (owners.into_boxed_slice(), open.into_iter().map(AtomicU32::new).collect())
        });
        parts.buffers.iter().for_each(|buffer| buffer.enter());
        Self {
            id,
            tasks: (0..parts.tasks).map(|_| AtomicU64::new(0)).collect(),
            parts: several,
            open_tasks: AtomicUsize::new(parts.tasks),
            bytes: AtomicU64::new(0),
            worst: AtomicU8::new(severity(TaskState::Completed)),
            started: AtomicBool::new(false),
            place: OnceLock::new(),
            slices: parts.slices,
            background: parts.background,
            push: AtomicU8::new(PUSH_NO),
            wants_description: parts.wants_description,
            description: OnceLock::new(),
            problem: OnceLock::new(),
            buffers: Mutex::new(parts.buffers),
            remotes: parts.remotes,
            done: AtomicBool::new(false),
            watched: AtomicBool::new(false),
            watchers: Mutex::new(Watchers::default()),
            event: OnceLock::new(),
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub(super) const fn is_background(&self) -> bool {
        self.background
    }

    /// Nobody waits for it; whether that is news.
    pub(super) fn begin_push(&self) -> bool {
        self.push.compare_exchange(PUSH_NO, PUSH_YES, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// It is done; whether [`Self::begin_push`] was first.
    pub(super) fn end_push(&self) -> bool {
        self.push.swap(PUSH_OVER, Ordering::SeqCst) == PUSH_YES
    }

    pub(super) fn start(&self) {
        self.started.store(true, Ordering::Relaxed);
    }

    /// The peers that it asks.
    pub(super) fn remotes(&self) -> &[Arc<Remote>] {
        &self.remotes
    }

    /// A part has ended. Only by the thread that drives it, or before it has started.
    pub(super) fn part_ended(&self, part: u32, status: Status, bytes: u64) {
        let task = self.parts.as_ref().map_or(part, |(owners, _)| owners[part as usize]);
        let last = self.parts.as_ref().is_none_or(|(_, open)| open[task as usize].fetch_sub(1, Ordering::Relaxed) == 1);
        self.task_moved(task, status, bytes, last);
    }

    /// Ends the tasks that have no part: those of 0 bytes. Before the batch has started.
    pub(super) fn end_empty(&self) {
        let Some((_, open)) = &self.parts else { return };
        for (task, open) in open.iter().enumerate() {
            if open.load(Ordering::Relaxed) == 0 {
                self.task_moved(task as u32, Status::Ok, 0, true);
            }
        }
    }

    fn task_moved(&self, task: u32, status: Status, bytes: u64, last: bool) {
        let word = &self.tasks[task as usize];
        let old = word.load(Ordering::Relaxed);
        // The first outcome that is not good is the task's.
        let outcome = match (old >> BYTES_BITS) & 0x7fff {
            0 => status as u64,
            earlier => earlier,
        };
        let moved = (old & ((1 << BYTES_BITS) - 1)) + bytes;
        let ended = if last { ENDED } else { 0 };
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        word.store(ended | outcome << BYTES_BITS | moved, Ordering::Release);
        if matches!(status, Status::Stale | Status::WrongOwner | Status::OutOfRange) {
            self.remotes.iter().for_each(|remote| remote.set_stale());
        }
        if last {
            let status = Status::from_code(outcome as u16).unwrap_or(Status::BadRequest);
            self.worst.fetch_max(severity(TaskState::of(status)), Ordering::Relaxed);
            self.open_tasks.fetch_sub(1, Ordering::Release);
        }
    }

    /// Ends what has not ended, when there is nobody left to do it.
    pub(super) fn fail(&self, status: Status) {
        for task in 0..self.tasks.len() as u32 {
            if self.tasks[task as usize].load(Ordering::Relaxed) & ENDED == 0 {
                self.task_moved(task, status, 0, true);
            }
        }
    }

    pub(super) fn all_ended(&self) -> bool {
        self.open_tasks.load(Ordering::Acquire) == 0
    }

    /// Nothing touches its memory any more: lets go of it and tells everybody. Once.
    pub(super) fn finish(&self, problem: Option<&str>) {
        debug_assert!(self.all_ended(), "a batch was done before its tasks");
        if let Some(problem) = problem
            && self.worst.load(Ordering::Relaxed) != severity(TaskState::Completed)
        {
            let _ = self.problem.set(problem.to_owned());
        }
        let buffers = core::mem::take(&mut *lock(&self.buffers));
        buffers.iter().for_each(|buffer| buffer.leave());
        self.done.store(true, Ordering::Release);
        // Against `watch`: either it sees that the batch is done, or this sees that it is watched.
        fence(Ordering::SeqCst);
        if self.watched.load(Ordering::Relaxed) {
            self.tell();
        }
    }

    fn tell(&self) {
        let mut watchers = lock(&self.watchers);
        if let (false, Some(event)) = (watchers.signalled, self.event.get()) {
            watchers.signalled = true;
            signal(event);
        }
        let (threads, wakers) = (core::mem::take(&mut watchers.threads), core::mem::take(&mut watchers.wakers));
        drop(watchers);
        threads.into_iter().for_each(|thread| thread.unpark());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Adds a watcher; false when the batch is done already and nobody will be told.
    fn watch(&self, add: impl FnOnce(&mut Watchers)) -> bool {
        let mut watchers = lock(&self.watchers);
        add(&mut watchers);
        self.watched.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        !self.is_done()
    }

    /// Unparks this thread when the batch is done; false when it is already.
    pub(super) fn watch_thread(&self, thread: Thread) -> bool {
        self.watch(|watchers| watchers.threads.push(thread))
    }

    pub(super) fn unwatch_thread(&self, thread: &Thread) {
        lock(&self.watchers).threads.retain(|other| other.id() != thread.id());
    }

    fn watch_waker(&self, waker: &Waker) -> bool {
        self.watch(|watchers| {
            if !watchers.wakers.iter().any(|other| other.will_wake(waker)) {
                watchers.wakers.push(waker.clone());
            }
        })
    }

    fn event(&self) -> Result<&File, Error> {
        if self.event.get().is_none() {
            // A second thread's is dropped unused.
            let _ = self.event.set(event_fd()?.into());
        }
        let event = self.event.get().expect("it was just set");
        let mut done_before = false;
        self.watch(|watchers| {
            done_before = self.is_done() && !watchers.signalled;
            watchers.signalled |= done_before;
        });
        if done_before {
            signal(event);
        } else if self.is_done() {
            self.tell();
        }
        Ok(event)
    }

    fn status(&self) -> BatchStatus {
        let done = self.is_done();
        let tasks = self.tasks.len();
        let state = match done {
            true => of_severity(self.worst.load(Ordering::Relaxed)),
            false if self.started.load(Ordering::Relaxed) => TaskState::Pending,
            false => TaskState::Waiting,
        };
        BatchStatus {
            state,
            tasks,
            ended: tasks - self.open_tasks.load(Ordering::Acquire),
            transferred_bytes: self.bytes.load(Ordering::Relaxed),
        }
    }

    fn task_status(&self, task: usize) -> TaskStatus {
        let Some(word) = self.tasks.get(task) else {
            return TaskStatus { state: TaskState::Invalid, transferred_bytes: 0, outcome: None };
        };
        let word = word.load(Ordering::Acquire);
        let transferred_bytes = word & ((1 << BYTES_BITS) - 1);
        if word & ENDED == 0 {
            let started = self.started.load(Ordering::Relaxed);
            let state = if started { TaskState::Pending } else { TaskState::Waiting };
            return TaskStatus { state, transferred_bytes, outcome: None };
        }
        let outcome = Status::from_code(((word >> BYTES_BITS) & 0x7fff) as u16);
        let state = TaskState::of(outcome.unwrap_or(Status::BadRequest));
        TaskStatus { state, transferred_bytes, outcome }
    }
}

/// How serious an outcome is among others of its batch.
const fn severity(state: TaskState) -> u8 {
    match state {
        TaskState::Canceled => 1,
        TaskState::Timeout => 2,
        TaskState::Failed => 3,
        _ => 0,
    }
}

const fn of_severity(severity: u8) -> TaskState {
    match severity {
        0 => TaskState::Completed,
        1 => TaskState::Canceled,
        2 => TaskState::Timeout,
        _ => TaskState::Failed,
    }
}

fn signal(mut event: &File) {
    // Its counter is 0 or the owner has written to it himself; either way it is readable afterwards.
    let _ = event.write(&1u64.to_ne_bytes());
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Transfers under way, or done. Any thread may use it.
///
/// Dropping one that is not done cancels it and waits until nothing touches its memory any more.
pub struct Batch {
    state: Arc<State>,
    driver: Arc<Driver>,
}

impl core::fmt::Debug for Batch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Batch").field("id", &self.state.id).field("status", &self.status()).finish()
    }
}

impl Batch {
    pub(super) const fn new(state: Arc<State>, driver: Arc<Driver>) -> Self {
        Self { state, driver }
    }

    pub(super) fn state(&self) -> &State {
        &self.state
    }

    /// Its number, from 1 on; no other batch of the engine has it.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.state.id
    }

    /// Its tasks: one for each request.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.state.tasks.len()
    }

    /// Whether it is done: nothing touches its memory any more.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.state.is_done()
    }

    /// What is known of it, at a cost that does not depend on its tasks. Moves nothing on: see [`Self::poll`].
    #[must_use]
    pub fn status(&self) -> BatchStatus {
        self.state.status()
    }

    /// What is known of one task, at the same cost. [`TaskState::Invalid`] when there is no such task.
    #[must_use]
    pub fn task_status(&self, task: usize) -> TaskStatus {
        self.state.task_status(task)
    }

    /// Moves the engine's I/O on if no other thread does, without waiting, and says what is known of the batch: for
    /// callers with a loop of their own.
    pub fn poll(&self) -> BatchStatus {
        if !self.is_done() {
            self.driver.poll();
        }
        self.status()
    }

    /// Waits until it is done. Its deadline bounds the wait. Nothing touches its memory afterwards, whatever the
    /// outcome.
    pub fn wait(&self) -> BatchStatus {
        self.driver.wait(&self.state, None);
        self.status()
    }

    /// Waits until it is done, but not longer than this; `None` when it is not done yet and its memory in use.
    pub fn wait_for(&self, timeout: Duration) -> Option<BatchStatus> {
        let until = Instant::now().checked_add(timeout);
        self.driver.wait(&self.state, until).then(|| self.status())
    }

    /// Withdraws what is not done. Returns at once; the batch is done soon after.
    pub fn cancel(&self) {
        if !self.is_done() {
            self.driver.cancel(&self.state);
        }
    }

    /// A descriptor that becomes readable once, when the batch is done. It belongs to the batch and is closed with it.
    ///
    /// # Errors
    /// When the kernel gives no descriptor.
    pub fn completion_fd(&self) -> Result<BorrowedFd<'_>, Error> {
        let event = self.state.event()?;
        self.driver.push(&self.state);
        Ok(event.as_fd())
    }

    /// Its end, for executors.
    pub const fn completed(&self) -> Completed<'_> {
        Completed { batch: self }
    }

    /// The last trouble with a connection, when the batch is done and not all went well.
    #[must_use]
    pub fn problem(&self) -> Option<&str> {
        self.state.problem.get().map(String::as_str)
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if !self.is_done() {
            self.cancel();
            self.wait();
        }
    }
}

/// The end of a batch; dropping it changes nothing.
#[must_use = "a future does nothing unless it is awaited"]
#[derive(Debug)]
pub struct Completed<'a> {
    batch: &'a Batch,
}

impl Future for Completed<'_> {
    type Output = BatchStatus;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BatchStatus> {
        let batch = self.batch;
        if batch.is_done() || !batch.state.watch_waker(context.waker()) {
            return Poll::Ready(batch.status());
        }
        batch.driver.push(&batch.state);
        Poll::Pending
    }
}

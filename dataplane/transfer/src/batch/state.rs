//! State of a batch, shared by its driver and its owner.
//!
//! The thread that drives a batch's I/O writes the state; any thread reads it. A batch completes exactly once, and only
//! when nothing accesses its memory any more; then all waiters are woken: threads, futures and descriptors.

use core::task::Waker;
use std::fs::File;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::Thread;

use kvplane_proto::{BatchId, Status};
use kvplane_sys::doorbell::event_fd;

use super::{BatchStatus, TaskState, TaskStatus};
use crate::buffers::Buffer;
use crate::directory::notices::{NoticeSender, QueuedNotice};
use crate::error::Error;
use crate::lock;
use crate::segment::Remote;

/// Layout of a task's word, from the lowest bits: bytes, then the outcome, then the flag of its end.
const BYTES_BITS: u32 = 48;
const ENDED: u64 = 1 << 63;

/// Request for the progress thread to drive a batch: not made, made, or irrelevant because the batch is complete.
const PUSH_NO: u8 = 0;
const PUSH_YES: u8 = 1;
const PUSH_OVER: u8 = 2;

/// State of a batch.
pub(crate) struct State {
    id: u64,
    /// Word of each task.
    tasks: Box<[AtomicU64]>,
    /// Assignment of parts to tasks, where a task has several parts.
    parts: Option<Split>,
    open_tasks: AtomicUsize,
    bytes: AtomicU64,
    /// Most serious outcome so far.
    worst: AtomicU8,
    started: AtomicBool,
    /// Batch id of the driver's client; only the driver uses it.
    pub(crate) place: OnceLock<BatchId>,
    /// Maximum number of slices of the batch.
    pub(crate) slices: usize,
    /// True if the progress thread drives it from the start.
    background: bool,
    push: AtomicU8,
    /// True if the batch requests a segment's description, which is then stored in `description`.
    pub(crate) wants_description: bool,
    pub(crate) description: OnceLock<Vec<u8>>,
    problem: OnceLock<String>,
    /// Buffers in use until the batch is complete.
    buffers: Mutex<Vec<Arc<Buffer>>>,
    notices: Mutex<Option<(Arc<NoticeSender>, Vec<QueuedNotice>)>>,
    /// Peers, until the batch is complete; and the position of each part's peer in that list, where there are several.
    remotes: Mutex<Vec<Arc<Remote>>>,
    asked: Box<[u32]>,
    done: AtomicBool,
    watched: AtomicBool,
    watchers: Mutex<Watchers>,
    event: OnceLock<File>,
}

#[derive(Default)]
struct Watchers {
    threads: Vec<Thread>,
    /// Wakers, each with the number of its future.
    wakers: Vec<(u64, Waker)>,
    last_future: u64,
    signalled: bool,
}

/// Tasks of several parts, or without parts.
struct Split {
    /// Task of each part.
    owners: Box<[u32]>,
    /// Number of parts in flight, for each task.
    open: Box<[AtomicU32]>,
}

/// Contents of a new batch.
#[derive(Default)]
pub(crate) struct Parts {
    pub(crate) tasks: usize,
    /// Task of each part; `None` when each task is one part.
    pub(crate) owners: Option<Vec<u32>>,
    pub(crate) slices: usize,
    pub(crate) buffers: Vec<Arc<Buffer>>,
    pub(crate) remotes: Vec<Arc<Remote>>,
    /// Position of each part's peer in `remotes`, up to the last part with a peer; empty for a single peer.
    pub(crate) asked: Vec<u32>,
    pub(crate) background: bool,
    pub(crate) wants_description: bool,
    /// Notices to peers after success.
    pub(crate) notices: Option<(Arc<NoticeSender>, Vec<QueuedNotice>)>,
}

impl State {
    /// Creates a batch that has not started. It counts as a user of its buffers from now on.
    pub(crate) fn new(id: u64, parts: Parts) -> Self {
        let several = parts.owners.map(|owners| {
            let mut open = vec![0u32; parts.tasks];
            owners.iter().for_each(|&task| open[task as usize] += 1);
            Split { owners: owners.into_boxed_slice(), open: open.into_iter().map(AtomicU32::new).collect() }
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
            notices: Mutex::new(parts.notices),
            remotes: Mutex::new(parts.remotes),
            asked: parts.asked.into_boxed_slice(),
            done: AtomicBool::new(false),
            watched: AtomicBool::new(false),
            watchers: Mutex::new(Watchers::default()),
            event: OnceLock::new(),
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub(crate) const fn is_background(&self) -> bool {
        self.background
    }

    /// Marks that no thread waits for the batch. Returns true the first time.
    pub(crate) fn begin_push(&self) -> bool {
        self.push.compare_exchange(PUSH_NO, PUSH_YES, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Marks the batch as complete. Returns true if [`Self::begin_push`] came first.
    pub(crate) fn end_push(&self) -> bool {
        self.push.swap(PUSH_OVER, Ordering::SeqCst) == PUSH_YES
    }

    pub(crate) fn start(&self) {
        self.started.store(true, Ordering::Relaxed);
    }

    /// Returns the peers of the batch; empty once it is complete.
    pub(crate) fn remotes(&self) -> MutexGuard<'_, Vec<Arc<Remote>>> {
        lock(&self.remotes)
    }

    /// Records the end of a part. Called only by the thread that drives the batch, or before its start.
    pub(crate) fn part_ended(&self, part: u32, status: Status, bytes: u64) {
        let task = self.parts.as_ref().map_or(part, |split| split.owners[part as usize]);
        let last =
            self.parts.as_ref().is_none_or(|split| split.open[task as usize].fetch_sub(1, Ordering::Relaxed) == 1);
        if matches!(status, Status::Stale | Status::WrongOwner | Status::OutOfRange | Status::Unreachable) {
            // The descriptions of other peers stay valid.
            let remotes = lock(&self.remotes);
            let asked = if remotes.len() == 1 { Some(0) } else { self.asked.get(part as usize).copied() };
            if let Some(remote) = asked.and_then(|at| remotes.get(at as usize)) {
                remote.set_stale();
            }
        }
        self.task_moved(task, status, bytes, last);
    }

    /// Ends the tasks without parts: those of 0 bytes. Called before the batch starts.
    pub(crate) fn end_empty(&self) {
        let Some(split) = &self.parts else { return };
        for (task, open) in split.open.iter().enumerate() {
            if open.load(Ordering::Relaxed) == 0 {
                self.task_moved(task as u32, Status::Ok, 0, true);
            }
        }
    }

    fn task_moved(&self, task: u32, status: Status, bytes: u64, last: bool) {
        let word = &self.tasks[task as usize];
        let old = word.load(Ordering::Relaxed);
        // The first failure is the outcome of the task.
        let outcome = match (old >> BYTES_BITS) & 0x7fff {
            0 => status as u64,
            earlier => earlier,
        };
        let moved = (old & ((1 << BYTES_BITS) - 1)) + bytes;
        let ended = if last { ENDED } else { 0 };
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        word.store(ended | outcome << BYTES_BITS | moved, Ordering::Release);
        if last {
            let status = Status::from_code(outcome as u16).unwrap_or(Status::BadRequest);
            self.worst.fetch_max(severity(TaskState::of(status)), Ordering::Relaxed);
            self.open_tasks.fetch_sub(1, Ordering::Release);
        }
    }

    /// Fails all tasks in flight, when no thread can complete them any more.
    pub(crate) fn fail(&self, status: Status) {
        for task in 0..self.tasks.len() as u32 {
            if self.tasks[task as usize].load(Ordering::Relaxed) & ENDED == 0 {
                self.task_moved(task, status, 0, true);
            }
        }
    }

    pub(crate) fn all_ended(&self) -> bool {
        self.open_tasks.load(Ordering::Acquire) == 0
    }

    /// Completes the batch, exactly once: nothing accesses its memory any more. Releases buffers and peers, and wakes
    /// all waiters.
    pub(crate) fn finish(&self, problem: Option<&str>) {
        debug_assert!(self.all_ended(), "a batch was done before its tasks");
        let good = self.worst.load(Ordering::Relaxed) == severity(TaskState::Completed);
        if let (Some(problem), false) = (problem, good) {
            let _ = self.problem.set(problem.to_owned());
        }
        if let (Some((sender, notices)), true) = (lock(&self.notices).take(), good) {
            notices.into_iter().for_each(|notice| sender.send(notice));
        }
        let buffers = core::mem::take(&mut *lock(&self.buffers));
        buffers.iter().for_each(|buffer| buffer.leave());
        // A caller that keeps the batch for its outcome does not keep its peers.
        lock(&self.remotes).clear();
        self.done.store(true, Ordering::Release);
        // Against `watch`: either it sees that the batch is done, or this sees that it is watched.
        fence(Ordering::SeqCst);
        if self.watched.load(Ordering::Relaxed) {
            self.tell();
        }
    }

    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn tasks(&self) -> usize {
        self.tasks.len()
    }

    pub(super) fn problem(&self) -> Option<&str> {
        self.problem.get().map(String::as_str)
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
        for (_, waker) in wakers {
            // The code is the executor's. A panic of it was printed, and must not keep other waiters from being woken.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }

    /// Adds a watcher; returns false when the batch is complete already and no wake-up follows.
    fn watch(&self, add: impl FnOnce(&mut Watchers)) -> bool {
        let mut watchers = lock(&self.watchers);
        add(&mut watchers);
        self.watched.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        !self.is_done()
    }

    /// Unparks this thread when the batch completes; returns false when it is complete already.
    pub(crate) fn watch_thread(&self, thread: Thread) -> bool {
        self.watch(|watchers| watchers.threads.push(thread))
    }

    pub(crate) fn unwatch_thread(&self, thread: &Thread) {
        lock(&self.watchers).threads.retain(|other| other.id() != thread.id());
    }

    /// Wakes this waker when the batch completes, on behalf of the future of this number, which is assigned on the
    /// first call; returns false when the batch is complete already.
    pub(super) fn watch_waker(&self, future: &mut Option<u64>, waker: &Waker) -> bool {
        self.watch(|watchers| {
            let number = *future.get_or_insert_with(|| {
                watchers.last_future += 1;
                watchers.last_future
            });
            match watchers.wakers.iter_mut().find(|(of, _)| *of == number) {
                Some((_, old)) => old.clone_from(waker),
                None => watchers.wakers.push((number, waker.clone())),
            }
        })
    }

    /// Removes the waker of a future.
    pub(super) fn unwatch_waker(&self, future: u64) {
        let mut watchers = lock(&self.watchers);
        let at = watchers.wakers.iter().position(|(of, _)| *of == future);
        let waker = at.map(|at| watchers.wakers.swap_remove(at));
        drop(watchers);
        // Not dropped under the lock, because its drop is the executor's code.
        drop(waker);
    }

    pub(super) fn event(&self) -> Result<&File, Error> {
        if self.event.get().is_none() {
            // If two threads create a descriptor, the second one is dropped unused.
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

    pub(super) fn status(&self) -> BatchStatus {
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

    pub(super) fn task_status(&self, task: usize) -> TaskStatus {
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

/// Returns the rank of an outcome among those of a batch: the greater, the more serious.
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
    // The counter is 0, or the owner has written to it; in both cases the descriptor is readable afterwards.
    let _ = event.write(&1u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use kvplane_client::PeerAddress;

    use super::*;
    use crate::segment::peers::Peers;

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    struct BrokenBatch;

    impl Wake for BrokenBatch {
        fn wake(self: Arc<Self>) {
            panic!("a drill");
        }
    }

    fn state() -> State {
        State::new(1, Parts { tasks: 1, ..Parts::default() })
    }

    #[test]
    fn wakers_of_dropped_futures_are_removed() {
        let state = state();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        let mut kept = None;
        assert!(state.watch_waker(&mut kept, &waker));
        for _ in 0..1000 {
            let mut number = None;
            assert!(state.watch_waker(&mut number, &waker) && state.watch_waker(&mut number, &waker));
            state.unwatch_waker(number.expect("it has one by now"));
            assert_eq!(lock(&state.watchers).wakers.len(), 1);
        }
        // Two futures of one task: each has its own waker.
        assert_eq!(Arc::strong_count(&count), 3, "the test's, the waker, the one that is kept");
        state.part_ended(0, Status::Ok, 0);
        state.finish(None);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        state.unwatch_waker(kept.expect("it has one"));
    }

    #[test]
    fn a_panicking_waker_does_not_keep_others_from_being_woken() {
        let state = state();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let (broken, good) = (Waker::from(Arc::new(BrokenBatch)), Waker::from(Arc::clone(&count)));
        assert!(state.watch_waker(&mut None, &broken) && state.watch_waker(&mut None, &good));
        state.part_ended(0, Status::Ok, 0);
        state.finish(None);
        assert!(state.is_done());
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn only_failed_peers_become_stale() {
        let mut peers = Peers::default();
        let remotes: Vec<Arc<Remote>> = (1..4)
            .map(|port| PeerAddress::native(([127, 0, 0, 1], port).into(), None))
            .map(|address| Arc::new(Remote::unknown("peer", peers.at(&address, "peer"))))
            .collect();
        let parts = Parts { tasks: 5, remotes: remotes.clone(), asked: vec![0, 1, 2, 1], ..Parts::default() };
        let state = State::new(1, parts);
        state.part_ended(0, Status::Ok, 10);
        state.part_ended(3, Status::Stale, 0);
        state.part_ended(2, Status::DeadlineExceeded, 0);
        // A copy within local memory has no peer.
        state.part_ended(4, Status::OutOfRange, 0);
        assert_eq!(remotes.iter().map(|remote| remote.is_stale()).collect::<Vec<_>>(), [false, true, false]);
        let alone = State::new(2, Parts { tasks: 1, remotes: remotes[..1].to_vec(), ..Parts::default() });
        alone.part_ended(0, Status::Unreachable, 0);
        assert!(remotes[0].is_stale());
    }
}

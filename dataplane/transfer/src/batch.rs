//! Batches as seen by their callers: status, polling, waiting and cancellation.

pub(crate) mod request;

mod state;

use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::Status;
use kvplane_sys::interrupt;

use crate::driver::Driver;
use crate::error::Error;

pub(crate) use state::{Parts, State};

/// State of a task or of a batch. The numbers are those of Mooncake's interface.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(u8)]
pub enum TaskState {
    /// Not started.
    Waiting = 0,
    /// In flight.
    Pending = 1,
    /// No such task.
    Invalid = 2,
    /// Cancelled before it was complete.
    Canceled = 3,
    /// Complete: all bytes were moved.
    Completed = 4,
    /// The deadline passed first.
    Timeout = 5,
    /// It failed.
    Failed = 6,
}

impl TaskState {
    /// Returns true for a final state.
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

/// Status of one task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TaskStatus {
    /// State.
    pub state: TaskState,
    /// Bytes that were moved.
    pub transferred_bytes: u64,
    /// Outcome; `None` while the task is in flight.
    pub outcome: Option<Status>,
}

/// Status of a batch as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchStatus {
    /// State. It is final only when all tasks are: then it is the most serious of their states.
    pub state: TaskState,
    /// Number of tasks.
    pub tasks: usize,
    /// Number of tasks that have ended. [`Batch::task_status`] of the last one may be a moment ahead of it.
    pub ended: usize,
    /// Bytes that were moved.
    pub transferred_bytes: u64,
}

/// Batch of transfers, in flight or complete. Any thread may use it.
///
/// Dropping an incomplete batch cancels it and waits until nothing accesses its memory any more.
pub struct Batch {
    state: Arc<State>,
    driver: Arc<Driver>,
}

impl core::fmt::Debug for Batch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Batch").field("id", &self.state.id()).field("status", &self.status()).finish()
    }
}

impl Batch {
    pub(crate) const fn new(state: Arc<State>, driver: Arc<Driver>) -> Self {
        Self { state, driver }
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    /// Returns the id of the batch, from 1 on, unique within the engine.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.state.id()
    }

    /// Returns the number of tasks, one for each request.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.state.tasks()
    }

    /// Returns true when the batch is complete: nothing accesses its memory any more.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.state.is_done()
    }

    /// Returns the status of the batch, at a cost independent of the number of tasks. Does not drive I/O: see
    /// [`Self::poll`].
    #[must_use]
    pub fn status(&self) -> BatchStatus {
        self.state.status()
    }

    /// Returns the status of one task, at the same cost. [`TaskState::Invalid`] when there is no such task.
    #[must_use]
    pub fn task_status(&self, task: usize) -> TaskStatus {
        self.state.task_status(task)
    }

    /// Drives the engine's I/O without waiting, unless another thread does, and returns the status of the batch: for
    /// callers with an event loop of their own.
    pub fn poll(&self) -> BatchStatus {
        if !self.is_done() {
            self.driver.poll();
        }
        self.status()
    }

    /// Waits until the batch is complete; its deadline bounds the wait. Nothing accesses its memory afterwards,
    /// whatever the outcome.
    pub fn wait(&self) -> BatchStatus {
        while interrupt::is_watched() && !self.is_done() {
            if interrupt::ended() {
                self.cancel();
                break;
            }
            self.driver.wait(&self.state, Instant::now().checked_add(interrupt::LOOK));
        }
        self.driver.wait(&self.state, None);
        self.status()
    }

    /// Waits until the batch is complete, at most `timeout`; `None` while it is in flight and its memory in use.
    pub fn wait_for(&self, timeout: Duration) -> Option<BatchStatus> {
        let until = Instant::now().checked_add(timeout);
        self.driver.wait(&self.state, until).then(|| self.status())
    }

    /// Cancels the tasks that are not complete. Returns at once; the batch completes soon after.
    pub fn cancel(&self) {
        if !self.is_done() {
            self.driver.cancel(&self.state);
        }
    }

    /// Returns a descriptor that becomes readable once, when the batch is complete. The batch owns it and closes it.
    ///
    /// # Errors
    /// When the kernel refuses a descriptor.
    pub fn completion_fd(&self) -> Result<BorrowedFd<'_>, Error> {
        let event = self.state.event()?;
        self.driver.push(&self.state);
        Ok(event.as_fd())
    }

    /// Returns a future of the batch's completion.
    pub const fn completed(&self) -> BatchCompletion<'_> {
        BatchCompletion { batch: self, number: None }
    }

    /// Returns the last connection error, when the batch is complete and some of it failed.
    #[must_use]
    pub fn problem(&self) -> Option<&str> {
        self.state.problem()
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

/// Future of a batch's completion; dropping it has no effect on the batch.
#[must_use = "a future does nothing unless it is awaited"]
#[derive(Debug)]
pub struct BatchCompletion<'a> {
    batch: &'a Batch,
    /// Number of this future's waker in the batch.
    number: Option<u64>,
}

impl Future for BatchCompletion<'_> {
    type Output = BatchStatus;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BatchStatus> {
        let batch = self.batch;
        if batch.is_done() || !batch.state.watch_waker(&mut self.number, context.waker()) {
            return Poll::Ready(batch.status());
        }
        batch.driver.push(&batch.state);
        Poll::Pending
    }
}

impl Drop for BatchCompletion<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.batch.state.unwatch_waker(number);
        }
    }
}

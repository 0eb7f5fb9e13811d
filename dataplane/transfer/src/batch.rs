//! Batches as their owners see them: what is known of one, and how its end is waited for.

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
    /// Those of them that have ended. What [`Batch::task_status`] says of the last one may be a moment ahead of it.
    pub ended: usize,
    /// Bytes that were moved.
    pub transferred_bytes: u64,
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

    /// Its number, from 1 on; no other batch of the engine has it.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.state.id()
    }

    /// Its tasks: one for each request.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.state.tasks()
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
    pub const fn completed(&self) -> BatchCompletion<'_> {
        BatchCompletion { batch: self, number: None }
    }

    /// The last trouble with a connection, when the batch is done and not all went well.
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

/// The end of a batch; dropping it changes nothing.
#[must_use = "a future does nothing unless it is awaited"]
#[derive(Debug)]
pub struct BatchCompletion<'a> {
    batch: &'a Batch,
    /// Its number among those whose wakers the batch has.
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

//! An operation or message that a caller waits for.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvplane_collective::{Completion, Failure};

use super::error::GroupError;
use super::process::SharedProcess;

/// Outcome of an operation or a message, once there is one.
#[derive(Debug, Default)]
pub(super) struct WorkOutcome(OnceLock<Result<Completion, Failure>>);

impl WorkOutcome {
    /// Ends the work. Its first outcome counts.
    pub(super) fn end(&self, outcome: Result<Completion, Failure>) {
        drop(self.0.set(outcome));
    }

    pub(super) fn has_ended(&self) -> bool {
        self.0.get().is_some()
    }

    pub(super) fn outcome(&self) -> Option<Result<Completion, Failure>> {
        self.0.get().cloned()
    }
}

/// An operation or a message in flight. [`Work::wait`] moves it on.
#[derive(Clone)]
pub struct Work {
    shared: Arc<SharedProcess>,
    state: Arc<WorkOutcome>,
}

impl Work {
    pub(super) const fn new(shared: Arc<SharedProcess>, state: Arc<WorkOutcome>) -> Self {
        Self { shared, state }
    }

    /// Returns true once the work has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.state.has_ended()
    }

    /// Waits for the end of the work, or for a time; `None` if it has not ended by then. The calling thread moves the
    /// process's works on meanwhile.
    ///
    /// # Errors
    /// When the work ended without a result.
    pub fn wait(&self, timeout: Duration) -> Option<Result<Completion, GroupError>> {
        if !self.state.has_ended() {
            let now = Instant::now();
            self.shared.move_on(&self.state, now.checked_add(timeout).unwrap_or(now + Duration::from_secs(86_400)));
        }
        self.outcome()
    }

    /// Returns the outcome, once the work has ended.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<Completion, GroupError>> {
        Some(self.state.outcome()?.map_err(GroupError::Failed))
    }
}

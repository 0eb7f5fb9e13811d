//! Index restored from a snapshot, for a scheduler that begins.

use super::Scheduler;
use super::error::SchedulerError;
use crate::index::{HolderId, PrefixIndex};

/// Restored index, with the holders that instances have in it.
pub struct RestoredIndex {
    index: PrefixIndex,
    holders: Vec<(usize, HolderId)>,
}

impl RestoredIndex {
    /// Creates it; `holders` are prefill instances, by number, each with its hidden holder.
    #[must_use]
    pub const fn new(index: PrefixIndex, holders: Vec<(usize, HolderId)>) -> Self {
        Self { index, holders }
    }

    /// Replaces the index of a scheduler that has placed no request yet. Other instances hold nothing.
    ///
    /// # Errors
    /// When there are too many holders or contexts; the scheduler keeps its index then.
    pub fn install(self, scheduler: &mut Scheduler) -> Result<(), SchedulerError> {
        scheduler.caches.adopt(self.index, &self.holders)
    }
}

//! Index restored from a snapshot, for a scheduler that begins.

use super::Scheduler;
use super::error::SchedulerError;
use crate::index::{HolderId, PrefixIndex};

/// Replaces the index of a scheduler by a restored one, before the first request; `holders` are prefill instances, by
/// number, each with its hidden holder. Other instances hold nothing.
///
/// # Errors
/// When there are too many holders or contexts; the scheduler keeps its index then.
pub fn adopt_index(
    scheduler: &mut Scheduler,
    index: PrefixIndex,
    holders: &[(usize, HolderId)],
) -> Result<(), SchedulerError> {
    scheduler.caches.adopt(index, holders)
}

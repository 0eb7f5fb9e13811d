//! Limits of a shard's mailbox, and deadlines of its commands.

use std::time::Duration;

/// Commands that may be queued for a shard.
pub(super) const MAILBOX_ENTRIES: usize = 256;
/// Deadline of the answer to a command.
pub(super) const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

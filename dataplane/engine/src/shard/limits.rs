//! Limits of what waits for a shard, and of waiting for it.

use std::time::Duration;

/// Commands that may wait for a shard.
pub(super) const MAILBOX_ENTRIES: usize = 256;
/// How long a command may take to be answered.
pub(super) const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

//! Options and result of a range read.

use std::time::{Duration, Instant};

use crate::p2p::config::USUAL;

/// Options of a range read.
#[derive(Default)]
pub struct ReadOptions<'a> {
    /// Deadline of the call. Until then the call waits for peers: they may be restarting. Without one, the call takes
    /// at most an hour, and waits 3 s if no peer holds the buffer, 8 s if those that do serve nothing.
    pub deadline: Option<Duration>,
    /// Callback with the bytes of each batch that has arrived, called by threads of the call. Bytes that are read again
    /// count again.
    pub each: Option<&'a (dyn Fn(u64) + Sync)>,
}

impl std::fmt::Debug for ReadOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReadOptions({:?})", self.deadline)
    }
}

impl ReadOptions<'_> {
    /// Returns the deadline of a call that begins now.
    pub(super) fn until(&self) -> Instant {
        Instant::now() + self.deadline.unwrap_or(USUAL)
    }
}

/// Result of a range read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadBytes {
    /// Total number of bytes.
    pub bytes: u64,
    /// Bytes of shards that were read completely and match their hashes.
    pub checked: u64,
}

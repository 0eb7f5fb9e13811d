//! Counters of the NVMe driver by priority, and latency histograms.

use kvplane_proto::histogram::Histogram;
use kvplane_tier::Priority;

/// Counters of the operations of one priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PriorityCounters {
    /// Operations submitted to the device.
    pub started: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Operations that failed, or were completed in part.
    pub failed: u64,
    /// Operations in flight now.
    pub in_flight: u64,
    /// Operations queued for the device now.
    pub queued: u64,
}

/// Counters of a driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmeCounters {
    /// Counters by priority, in the order of [`Priority::ALL`].
    pub priorities: [PriorityCounters; Priority::ALL.len()],
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Operations whose completions were polled.
    pub polled: u64,
    /// Reads and writes that were issued as commands to the drive.
    pub commands: u64,
    /// Commands that failed and were retried through io_uring.
    pub commands_failed: u64,
    /// Reads and writes whose memory was registered (pinned) before.
    pub pinned: u64,
    /// Submission calls: each submits a batch of operations.
    pub submissions: u64,
    /// Retries of operations that the kernel put off.
    pub retries: u64,
    /// Latency of reads on behalf of gets.
    pub get_latency: Histogram,
    /// Latency of flushes.
    pub flush_latency: Histogram,
    /// Latency of the slowest flush, in nanoseconds.
    pub flush_most_ns: u64,
}

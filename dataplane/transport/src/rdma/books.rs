//! State shared by all links of a driver: event queue, counters, and scratch memory.

use std::collections::VecDeque;

use super::ended::CopyCompletions;
use crate::types::Event;

/// Limits of the recycled buffers: their number, and the capacity of each in bytes.
const SPARES: usize = 16;
const SPARE_BYTES: usize = 16 << 10;

/// Counters of the RDMA driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RdmaCounters {
    /// Messages sent.
    pub messages: u64,
    /// Requests posted to devices, including messages.
    pub requests: u64,
    /// Doorbells: each posts a batch of requests.
    pub doorbells: u64,
    /// Signalled completions: each completes one request and all before it on its connection.
    pub signalled: u64,
    /// Payload bytes written directly into the memory that peers offered for their answers.
    pub pushed_bytes: u64,
    /// Payload bytes that passed through bounce buffers.
    pub bounced_bytes: u64,
    /// Connections closed to make room for others.
    pub evictions: u64,
    /// Keepalive probes sent on idle connections.
    pub keepalives: u64,
}

/// Shared state of a driver.
#[derive(Default)]
pub(super) struct Books {
    pub(super) events: VecDeque<Event>,
    pub(super) copied: CopyCompletions,
    pub(super) counters: RdmaCounters,
    /// Scratch buffer for one message.
    pub(super) message: Vec<u8>,
    spares: Vec<Vec<u8>>,
}

impl Books {
    /// Returns a buffer for a body or a record.
    pub(super) fn take_spare(&mut self) -> Vec<u8> {
        self.spares.pop().unwrap_or_default()
    }

    /// Recycles the buffer of a body or a record.
    pub(super) fn spare(&mut self, mut bytes: Vec<u8>) {
        if self.spares.len() < SPARES && bytes.capacity() <= SPARE_BYTES {
            bytes.clear();
            self.spares.push(bytes);
        }
    }
}

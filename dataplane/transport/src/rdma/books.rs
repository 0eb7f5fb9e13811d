//! What all links of a driver write to: what happened, what was counted, and memory for the moment.

use std::collections::VecDeque;

use super::ended::CopyCompletions;
use crate::types::Event;

/// Records kept for their memory, and the longest of them.
const SPARES: usize = 16;
const SPARE_BYTES: usize = 16 << 10;

/// What the driver counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RdmaCounters {
    /// Messages sent.
    pub messages: u64,
    /// Requests handed to devices, messages among them.
    pub requests: u64,
    /// Times that requests were handed over.
    pub doorbells: u64,
    /// Completions of requests that devices announced: of one, and all before it on its connection.
    pub signalled: u64,
    /// Payload bytes written to where peers wanted their answers.
    pub pushed_bytes: u64,
    /// Payload bytes that went through bounce buffers.
    pub bounced_bytes: u64,
    /// Connections given up for others.
    pub evictions: u64,
    /// Times that the peer of an idle connection was asked for a sign of life.
    pub keepalives: u64,
}

/// The books of a driver.
#[derive(Default)]
pub(super) struct Books {
    pub(super) events: VecDeque<Event>,
    pub(super) copied: CopyCompletions,
    pub(super) counters: RdmaCounters,
    /// A message, for the moment.
    pub(super) message: Vec<u8>,
    spares: Vec<Vec<u8>>,
}

impl Books {
    /// Memory for a body or a record.
    pub(super) fn take_spare(&mut self) -> Vec<u8> {
        self.spares.pop().unwrap_or_default()
    }

    /// A body or a record is not needed any more.
    pub(super) fn spare(&mut self, mut bytes: Vec<u8>) {
        if self.spares.len() < SPARES && bytes.capacity() <= SPARE_BYTES {
            bytes.clear();
            self.spares.push(bytes);
        }
    }
}

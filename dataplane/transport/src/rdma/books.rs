//! What all links of a driver write to: what happened, what was counted, and memory for the moment.

use std::collections::VecDeque;

use super::RdmaCounters;
use super::ended::CopyCompletions;
use crate::types::Event;

/// Records kept for their memory, and the longest of them.
const SPARES: usize = 16;
const SPARE_BYTES: usize = 16 << 10;

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

//! Operations that have not completed: queued by priority, or in flight on the device.

use std::collections::VecDeque;

use kvplane_tier::{BlockOp, Priority};

use super::counters::PriorityCounters;

/// Number of ring entries: the limit of operations in flight.
pub(super) const RING_ENTRIES: u32 = 256;
/// Queue depth of each priority on the device.
pub const DEPTHS: [usize; Priority::ALL.len()] = [128, 64, 24, 16];

const _: () = assert!(DEPTHS[0] + DEPTHS[1] + DEPTHS[2] + DEPTHS[3] <= RING_ENTRIES as usize);

/// An operation that has not completed.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunningCall {
    pub(super) op: BlockOp,
    pub(super) since_ns: u64,
    /// Number of times the kernel has put it off.
    pub(super) attempts: u32,
    /// The passthrough command failed; the operation is retried through io_uring.
    pub(super) plain: bool,
}

/// All operations of a driver that have not completed.
pub(super) struct Operations {
    running: slab::Slab<RunningCall>,
    queues: [VecDeque<usize>; Priority::ALL.len()],
    in_flight: [usize; Priority::ALL.len()],
}

impl Operations {
    pub(super) fn new() -> Self {
        Self {
            running: slab::Slab::new(),
            queues: core::array::from_fn(|_| VecDeque::new()),
            in_flight: [0; Priority::ALL.len()],
        }
    }

    /// Queues an operation.
    pub(super) fn add(&mut self, op: BlockOp, now_ns: u64) {
        let index = self.running.insert(RunningCall { op, since_ns: now_ns, attempts: 0, plain: false });
        self.queues[op.priority as usize].push_back(index);
    }

    /// Dequeues the next operation of a priority if its queue depth allows.
    pub(super) fn next(&mut self, priority: Priority) -> Option<usize> {
        let priority = priority as usize;
        if self.in_flight[priority] < DEPTHS[priority] { self.queues[priority].pop_front() } else { None }
    }

    /// Puts back the operation that [`Self::next`] returned, because the ring was full.
    pub(super) fn put_back(&mut self, priority: Priority, index: usize) {
        self.queues[priority as usize].push_front(index);
    }

    /// Records that the operation returned by [`Self::next`] is in flight.
    pub(super) const fn issued(&mut self, priority: Priority) {
        self.in_flight[priority as usize] += 1;
    }

    /// Records that an operation is no longer in flight.
    pub(super) fn returned(&mut self, index: usize) -> Option<RunningCall> {
        let running = self.running.get(index).copied()?;
        self.in_flight[running.op.priority as usize] -= 1;
        Some(running)
    }

    /// Queues an operation again after `change` was applied to it.
    pub(super) fn repeat(&mut self, index: usize, change: impl FnOnce(&mut RunningCall)) {
        let Some(running) = self.running.get_mut(index) else { return };
        change(running);
        self.queues[running.op.priority as usize].push_back(index);
    }

    pub(super) fn get(&self, index: usize) -> Option<RunningCall> {
        self.running.get(index).copied()
    }

    /// Removes a completed operation.
    pub(super) fn remove(&mut self, index: usize) {
        self.running.remove(index);
    }

    /// Returns true if no operation is queued or in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Returns true if any operation is in flight.
    pub(super) fn has_in_flight(&self) -> bool {
        self.in_flight.iter().any(|in_flight| *in_flight > 0)
    }

    /// Writes the numbers of in-flight and queued operations of a priority into `counters`.
    pub(super) fn count(&self, priority: usize, counters: &mut PriorityCounters) {
        counters.in_flight = self.in_flight[priority] as u64;
        counters.queued = self.queues[priority].len() as u64;
    }
}

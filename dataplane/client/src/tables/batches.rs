//! Batches: the tasks that a caller submitted at once, their results, and further data from their replies.

use std::collections::BTreeMap;

use kvplane_proto::ids::{BatchId, Epoch};
use kvplane_proto::limits::Limits;
use kvplane_proto::status::Status;

use super::existence::ExistenceBatch;
use super::put_book::PutBook;
use super::table::Table;
use crate::sched::{Priority, Ticket};
use crate::types::{Local, SliceId, SubmitOptions, TaskResult};

/// A batch of tasks that complete together.
pub(crate) struct Batch {
    pub(crate) results: Vec<TaskResult>,
    /// Uncompleted slices of each task.
    pub(crate) open_slices: Vec<u32>,
    /// Slices of the batch, including completed ones.
    pub(crate) slices: Vec<SliceId>,
    /// Number of uncompleted tasks.
    pub(crate) remaining: u32,
    pub(crate) deadline_ns: u64,
    /// Epoch of the map when the batch was submitted.
    pub(crate) epoch: Epoch,
    /// Set when the deadline passed or the caller cancelled the batch: no slice is sent or retried any more.
    pub(crate) ended: Option<Status>,
    /// Memory range of each task, if slices serve several tasks: `(offset, bytes)`.
    pub(crate) ranges: Vec<(u64, u64)>,
    /// Names and options of its puts.
    pub(crate) puts: PutBook,
    /// Objects of its existence queries.
    pub(crate) existence: ExistenceBatch,
    /// Scheduling attributes; bytes and size are filled in for each slice.
    pub(crate) ticket: Ticket,
}

impl Batch {
    /// Creates a batch without tasks.
    pub(crate) const fn new() -> Self {
        Self {
            results: Vec::new(),
            open_slices: Vec::new(),
            slices: Vec::new(),
            remaining: 0,
            deadline_ns: 0,
            epoch: Epoch(0),
            ended: None,
            ranges: Vec::new(),
            puts: PutBook::new(),
            existence: ExistenceBatch::new(),
            ticket: Ticket {
                priority: Priority::Medium,
                tenant: 0,
                weight: 1,
                due_ns: u64::MAX,
                bytes: 0,
                small: true,
            },
        }
    }

    /// Returns true if its allocations are small enough to be kept for reuse.
    pub(crate) const fn is_worth_keeping(&self) -> bool {
        self.results.capacity() <= Limits::ITEMS_PER_FRAME
            && self.slices.capacity() <= Limits::ITEMS_PER_FRAME
            && self.puts.is_worth_keeping()
            && self.existence.is_worth_keeping()
    }
}

impl Batch {
    /// Completes a slice of a task. Returns true if it was the last one of the task.
    #[inline(always)]
    pub(crate) fn end_slice(&mut self, task: u32, bytes: u64) -> bool {
        self.results[task as usize].bytes += bytes;
        let open = &mut self.open_slices[task as usize];
        *open -= 1;
        if *open > 0 {
            return false;
        }
        self.remaining -= 1;
        true
    }

    /// Returns the part of a slice's memory that belongs to a task: offset and bytes. For tasks that share slices.
    pub(crate) fn overlap(&self, task: u32, slice: Local) -> (u64, u64) {
        let (offset, bytes) = self.ranges[task as usize];
        let start = offset.max(slice.offset);
        (start, (offset + bytes).min(slice.offset + slice.bytes) - start)
    }

    /// Initializes it as a batch of so many tasks.
    fn begin(&mut self, tasks: usize, puts: &PutBook, options: &SubmitOptions, epoch: Epoch) {
        self.ranges.clear();
        self.existence.clear();
        self.puts.copy_from(puts);
        self.ticket = Ticket {
            priority: options.priority.unwrap_or(options.intent.priority()),
            tenant: options.tenant,
            weight: options.weight,
            due_ns: options.due_ns.unwrap_or(u64::MAX),
            bytes: 0,
            small: true,
        };
        self.results.clear();
        self.open_slices.clear();
        self.slices.clear();
        self.remaining = tasks as u32;
        (self.deadline_ns, self.epoch) = (options.deadline_ns, epoch);
        self.ended = None;
        self.results.resize(tasks, TaskResult::of(Status::Ok));
        self.open_slices.resize(tasks, 0);
    }
}

/// Batches of a client that are not released yet.
pub struct Batches {
    table: Table<Batch>,
    /// Segment descriptors and pages of keys that the caller has not taken yet.
    descriptions: BTreeMap<BatchId, Vec<u8>>,
}

impl Batches {
    pub(crate) const fn new() -> Self {
        Self { table: Table::new(), descriptions: BTreeMap::new() }
    }

    /// Returns true if a batch has completed. A released batch counts as complete.
    #[must_use]
    pub fn is_complete(&self, batch: BatchId) -> bool {
        is_complete(self, batch)
    }

    /// Returns the results of a complete batch, in the order of its requests; empty for a stale id.
    #[must_use]
    pub fn results(&self, batch: BatchId) -> &[TaskResult] {
        self.get(batch).map_or(&[], |batch| &batch.results)
    }

    /// Returns which objects of a complete [`Client::submit_asks`](crate::Client::submit_asks) exist, by their
    /// positions; empty for a stale id. False for those in [`Self::unanswered`].
    #[must_use]
    pub fn found(&self, batch: BatchId) -> &[bool] {
        self.get(batch).map_or(&[], |batch| batch.existence.found())
    }

    /// Returns the positions of the objects in [`Self::found`] that are stripe heads. Their stripes were not checked.
    #[must_use]
    pub fn found_heads(&self, batch: BatchId) -> &[usize] {
        self.get(batch).map_or(&[], |batch| batch.existence.heads())
    }

    /// Returns the positions of the objects of a complete [`Client::submit_asks`](crate::Client::submit_asks) whose
    /// query failed, with the reason.
    #[must_use]
    pub fn unanswered(&self, batch: BatchId) -> Vec<(usize, Status)> {
        self.get(batch).map_or_else(Vec::new, |batch| batch.existence.unanswered(&batch.results))
    }

    /// Returns the number of batches.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.table.len()
    }

    /// Returns true if there are no batches.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a batch of so many tasks, without slices.
    pub(crate) fn open(&mut self, tasks: usize, puts: &PutBook, options: &SubmitOptions, epoch: Epoch) -> BatchId {
        let mut batch = self.table.recycled().unwrap_or_else(Batch::new);
        batch.begin(tasks, puts, options, epoch);
        let (index, generation) = self.table.insert(batch);
        BatchId { index, generation }
    }

    /// Releases a complete batch.
    pub(crate) fn release(&mut self, batch: BatchId) {
        if let Some(entry) = self.get(batch) {
            assert_eq!(entry.remaining, 0, "a batch was released before it was complete");
            let freed = self.table.remove(batch.index, Batch::new());
            if freed.is_worth_keeping() {
                self.table.recycle(freed);
            }
            self.descriptions.remove(&batch);
        }
    }

    /// Keeps the body of a reply until the caller takes it.
    pub(crate) fn describe(&mut self, batch: BatchId, description: Vec<u8>) {
        self.descriptions.insert(batch, description);
    }

    pub(crate) fn take_description(&mut self, batch: BatchId) -> Option<Vec<u8>> {
        self.descriptions.remove(&batch)
    }

    #[cfg(test)]
    pub(crate) fn has_no_descriptions(&self) -> bool {
        self.descriptions.is_empty()
    }

    #[inline]
    pub(crate) fn get(&self, batch: BatchId) -> Option<&Batch> {
        self.table.get(batch.index, batch.generation)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, batch: BatchId) -> Option<&mut Batch> {
        self.table.get_mut(batch.index, batch.generation)
    }

    /// Returns the batch at a position that the client's tables state to be live.
    #[inline]
    pub(crate) fn at(&mut self, index: u32) -> &mut Batch {
        self.table.at(index)
    }

    /// Returns the live batch at a position, read-only.
    #[inline]
    pub(crate) fn peek(&self, index: u32) -> &Batch {
        self.table.peek(index)
    }
}

/// Returns true if a batch has no uncompleted tasks, or was released.
pub(crate) fn is_complete(batches: &Batches, batch: BatchId) -> bool {
    batches.get(batch).is_none_or(|batch| batch.remaining == 0)
}

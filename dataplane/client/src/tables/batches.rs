//! Batches: what the caller submitted at once, its results, and what else the answers to it brought.

use std::collections::BTreeMap;

use kvplane_proto::ids::{BatchId, Epoch, Version};
use kvplane_proto::limits::Limits;
use kvplane_proto::status::Status;

use super::existence::ExistenceBatch;
use super::put_book::PutBook;
use super::table::Table;
use crate::sched::{Priority, Ticket};
use crate::types::{Local, PeerIncarnation, SliceId, SubmitOptions, TaskResult};

/// A group of tasks that complete together.
pub(crate) struct Batch {
    pub(crate) results: Vec<TaskResult>,
    /// Slices that each task still waits for.
    pub(crate) open_slices: Vec<u32>,
    /// Its slices, some of them complete.
    pub(crate) slices: Vec<SliceId>,
    /// Tasks that are not complete.
    pub(crate) remaining: u32,
    pub(crate) deadline_ns: u64,
    /// The map that was known when it came in.
    pub(crate) epoch: Epoch,
    /// Set when the deadline passed or the caller cancelled: no slice is sent or retried any more.
    pub(crate) ended: Option<Status>,
    /// The memory of each task, where slices serve several tasks: `(offset, bytes)`.
    pub(crate) ranges: Vec<(u64, u64)>,
    /// What its puts say.
    pub(crate) puts: PutBook,
    /// What its requests for many objects at once are about.
    pub(crate) existence: ExistenceBatch,
    /// Its place in the order of things; bytes and size are each slice's own.
    pub(crate) ticket: Ticket,
}

impl Batch {
    /// One without tasks.
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

    /// Whether its allocations are small enough to be kept for the next batch.
    pub(crate) const fn is_worth_keeping(&self) -> bool {
        self.results.capacity() <= Limits::ITEMS_PER_FRAME
            && self.slices.capacity() <= Limits::ITEMS_PER_FRAME
            && self.puts.is_worth_keeping()
            && self.existence.is_worth_keeping()
    }
}

impl Batch {
    /// A slice of a task has succeeded. Whether it was the task's last.
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

    /// The part of a slice's memory that is a task's: offset and bytes. For tasks that share slices.
    pub(crate) fn overlap(&self, task: u32, slice: Local) -> (u64, u64) {
        let (offset, bytes) = self.ranges[task as usize];
        let start = offset.max(slice.offset);
        (start, (offset + bytes).min(slice.offset + slice.bytes) - start)
    }

    /// Makes it one of so many tasks, of which nothing is done.
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
        let pending = TaskResult {
            status: Status::Ok,
            bytes: 0,
            version: Version(0),
            replicas: 0,
            from_replica: false,
            incarnation: PeerIncarnation(0),
        };
        self.results.resize(tasks, pending);
        self.open_slices.resize(tasks, 0);
    }
}

/// The batches of a client that were not released yet.
pub struct Batches {
    table: Table<Batch>,
    /// Segments' descriptions and pages of keys that nobody has taken yet.
    descriptions: BTreeMap<BatchId, Vec<u8>>,
}

impl Batches {
    pub(crate) const fn new() -> Self {
        Self { table: Table::new(), descriptions: BTreeMap::new() }
    }

    /// Whether a batch has completed. A batch that was released counts as complete.
    #[must_use]
    pub fn is_complete(&self, batch: BatchId) -> bool {
        is_complete(self, batch)
    }

    /// The results of a complete batch, in the order of its requests; empty for a stale id.
    #[must_use]
    pub fn results(&self, batch: BatchId) -> &[TaskResult] {
        self.get(batch).map_or(&[], |batch| &batch.results)
    }

    /// Which objects of a complete [`Client::submit_asks`](crate::Client::submit_asks) are there, by their positions;
    /// empty for a stale id. False for those that nobody answered for.
    #[must_use]
    pub fn found(&self, batch: BatchId) -> &[bool] {
        self.get(batch).map_or(&[], |batch| batch.existence.found())
    }

    /// Those of [`Self::found`] that name stripes, by their positions: whether these are there too is another question.
    #[must_use]
    pub fn found_heads(&self, batch: BatchId) -> &[usize] {
        self.get(batch).map_or(&[], |batch| batch.existence.heads())
    }

    /// The objects of a complete [`Client::submit_asks`](crate::Client::submit_asks) that nobody answered for, by their
    /// positions, and why.
    #[must_use]
    pub fn unanswered(&self, batch: BatchId) -> Vec<(usize, Status)> {
        self.get(batch).map_or_else(Vec::new, |batch| batch.existence.unanswered(&batch.results))
    }

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes in a batch of so many tasks, without slices.
    pub(crate) fn open(&mut self, tasks: usize, puts: &PutBook, options: &SubmitOptions, epoch: Epoch) -> BatchId {
        let mut batch = self.table.recycled().unwrap_or_else(Batch::new);
        batch.begin(tasks, puts, options, epoch);
        let (index, generation) = self.table.insert(batch);
        BatchId { index, generation }
    }

    /// Forgets a complete batch.
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

    /// Keeps what an answer told until the caller takes it.
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

    /// The batch at a position that our own tables say is live.
    #[inline]
    pub(crate) fn at(&mut self, index: u32) -> &mut Batch {
        self.table.at(index)
    }

    /// The same, to look at only.
    #[inline]
    pub(crate) fn peek(&self, index: u32) -> &Batch {
        self.table.peek(index)
    }
}

/// True for a batch of which nothing is left to do, and for one that was released.
pub(crate) fn is_complete(batches: &Batches, batch: BatchId) -> bool {
    batches.get(batch).is_none_or(|batch| batch.remaining == 0)
}

//! Batches come in: validated as a whole, split into slices, routed.

use kvplane_proto::ids::{BatchId, RequestId, Version};
use kvplane_proto::status::Status;

use super::drafts::PeerIncarnation;
use super::lane::Cause;
use super::options::SubmitOptions;
use super::puts::PutBook;
use super::second::ReplicaUse;
use super::table::{Batch, HeldHandle, NOWHERE, Slice, SliceState, Times, slice_id};
use super::types::{Local, Request, SegmentTarget, SliceId, SubmitError, TaskResult};
use super::{Client, Output, is_complete};
use crate::sched::Ticket;

impl Client {
    /// Takes in a batch, to be complete by `deadline_ns`. Results come in the order of `requests`.
    ///
    /// The caller keeps the memory of the requests alive and untouched until the batch is complete.
    ///
    /// # Errors
    /// When any request is malformed; then none has any effect.
    pub fn submit(&mut self, requests: &[Request], deadline_ns: u64, now_ns: u64) -> Result<BatchId, SubmitError> {
        self.submit_with(requests, &SubmitOptions::until(deadline_ns), now_ns)
    }

    /// As [`Self::submit`], with more to say about it.
    ///
    /// # Errors
    /// When any request is malformed; then none has any effect.
    pub fn submit_with(
        &mut self,
        requests: &[Request],
        options: &SubmitOptions,
        now_ns: u64,
    ) -> Result<BatchId, SubmitError> {
        self.submit_puts(requests, &PutBook::new(), options, now_ns)
    }

    /// As [`Self::submit_with`], with a book in which puts say more about their objects.
    ///
    /// # Errors
    /// When any request is malformed; then none has any effect.
    pub fn submit_puts(
        &mut self,
        requests: &[Request],
        puts: &PutBook,
        options: &SubmitOptions,
        now_ns: u64,
    ) -> Result<BatchId, SubmitError> {
        let deadline_ns = options.deadline_ns;
        self.now_ns = now_ns;
        let mut stretches = core::mem::take(&mut self.stretches);
        let checked = self.take_in(requests, puts.len(), &mut stretches);
        self.stretches = stretches;
        checked?;
        let mut batch = self.batches.recycled().unwrap_or_else(Batch::new);
        batch.ranges.clear();
        batch.existence.clear();
        batch.puts.copy_from(puts);
        batch.ticket = Ticket {
            priority: options.priority.unwrap_or(options.intent.priority()),
            tenant: options.tenant,
            weight: options.weight,
            due_ns: options.due_ns.unwrap_or(u64::MAX),
            bytes: 0,
            small: true,
        };
        batch.results.clear();
        batch.open_slices.clear();
        batch.slices.clear();
        batch.remaining = requests.len() as u32;
        (batch.deadline_ns, batch.epoch) = (deadline_ns, self.epoch());
        batch.ended = None;
        let pending = TaskResult {
            status: Status::Ok,
            bytes: 0,
            version: Version(0),
            replicas: 0,
            from_replica: false,
            incarnation: PeerIncarnation(0),
        };
        batch.results.resize(requests.len(), pending);
        batch.open_slices.resize(requests.len(), 0);
        let (index, generation) = self.batches.insert(batch);
        let id = BatchId { index, generation };
        // Nothing is sent for what is late: ending it afterwards would cost others their lane.
        let late = deadline_ns <= now_ns;
        for position in 0..self.stretches.len() {
            let stretch = self.stretches[position];
            match stretch.whole {
                true => self.make_whole(id, stretch.tasks(), requests, !late),
                false => self.cut(id, stretch.tasks(), requests, !late),
            }
        }
        if late {
            self.end_batch(id, Status::DeadlineExceeded, Cause::Deadline);
            return Ok(id);
        }
        self.remember_deadline(deadline_ns, id);
        Ok(id)
    }

    /// Withdraws a batch. It completes, with `Cancelled` for what was not done, when nothing touches its memory any
    /// more.
    pub fn cancel(&mut self, batch: BatchId, now_ns: u64) {
        self.now_ns = now_ns;
        self.end_batch(batch, Status::Cancelled, Cause::Withdrawn);
    }

    fn remember_deadline(&mut self, deadline_ns: u64, batch: BatchId) {
        let batches = &self.batches;
        self.timers.add_deadline(deadline_ns, batch, batches.len(), |batch| !is_complete(batches, batch));
    }

    /// A slice that nothing has happened to yet.
    pub(super) fn new_slice(&self, batch: BatchId, task: u32, request: Request) -> Slice {
        Slice::new(batch, task, request, self.usual_via(), self.now_ns)
    }

    fn add_slice(&mut self, batch: BatchId, task: u32, tasks: u32, request: Request) {
        let slice = Slice { tasks, ..self.new_slice(batch, task, request) };
        let (index, generation) = self.slices.insert(slice);
        let entry = self.batches.at(batch.index);
        entry.slices.push(slice_id(index, generation));
        for task in task..task + tasks {
            entry.open_slices[task as usize] += 1;
        }
    }

    /// One of several requests that share a slice may have failed it: each is asked on its own.
    fn split(&mut self, slice: &Slice) {
        let (Request::Read(target, local) | Request::Write(target, local)) = slice.request else { return };
        let first = self.batches.at(slice.batch.index).slices.len();
        for task in slice.task..slice.task + slice.tasks {
            let (offset, bytes) = self.batches.at(slice.batch.index).overlap(task, local);
            let target = SegmentTarget { offset: target.offset + (offset - local.offset), ..target };
            let part = Local { buffer: local.buffer, offset, bytes };
            let request = match slice.request {
                Request::Read(..) => Request::Read(target, part),
                _ => Request::Write(target, part),
            };
            self.add_slice(slice.batch, task, 1, request);
            self.batches.at(slice.batch.index).open_slices[task as usize] -= 1;
        }
        for position in first..first + slice.tasks as usize {
            let id = self.batches.at(slice.batch.index).slices[position];
            self.route(id);
        }
    }

    /// Gives a slice its outcome.
    pub(super) fn complete(&mut self, index: u32, status: Status) {
        if self.slices.peek(index).tries.hedge_ns > 0 {
            self.unwatch(slice_id(index, self.slices.generation(index)));
        }
        let ended = self.slices.end(index);
        ended.step(super::table::SliceEvent::Finish);
        let slice = *ended;
        self.count_end(&slice, status);
        let batch = self.batches.at(slice.batch.index);
        if slice.tasks > 1 && batch.ended.is_none() && is_of_one(status) {
            self.split(&slice);
            return;
        }
        for task in slice.task..slice.task + slice.tasks {
            let shared = slice.request.local().filter(|_| slice.tasks > 1);
            let bytes = shared.map_or(slice.answer.bytes, |local| batch.overlap(task, local).1);
            let result = &mut batch.results[task as usize];
            if result.status == Status::Ok {
                result.status = status;
            }
            if matches!(status, Status::Ok | Status::BufferTooSmall) {
                result.bytes += bytes;
            }
            if status == Status::Ok {
                let put = matches!(slice.request, Request::Put(..) | Request::PutAs(..) | Request::Seal(..));
                result.version = Version(slice.answer.version);
                let has_replicas = put || slice.request.is_get();
                result.replicas = u8::from(has_replicas) + u8::from(has_replicas && slice.answer.is_replicated);
                result.from_replica = slice.request.is_get() && slice.is_of_replica();
                if matches!(slice.request, Request::Begin(..)) {
                    result.incarnation = self.peers[slice.way.peer as usize].incarnation;
                }
            }
            let open = &mut batch.open_slices[task as usize];
            *open -= 1;
            if *open == 0 {
                batch.remaining -= 1;
                if self.config.report_tasks {
                    self.outbox.report(slice.batch, task);
                }
                if batch.remaining == 0 {
                    self.outbox.push(Output::Done { batch: slice.batch });
                }
            }
        }
    }

    /// Ends a batch early: queued slices complete now, others when their lane has been reset.
    pub(super) fn end_batch(&mut self, id: BatchId, status: Status, cause: Cause) {
        let Some(batch) = self.batches.get_mut(id.index, id.generation) else { return };
        if batch.remaining == 0 || batch.ended.is_some() {
            return;
        }
        batch.ended = Some(status);
        let slices = core::mem::take(&mut batch.slices);
        for &SliceId { index, generation } in &slices {
            let Some(slice) = self.slices.get(index, generation) else { continue };
            let lane = slice.link.lane;
            if slice.state == SliceState::Queued {
                self.leave_lane(index);
                self.complete(index, status);
            } else {
                self.reset_lane(lane, cause);
            }
        }
    }
}

impl Batch {
    /// The part of a slice's memory that is a task's: offset and bytes. For tasks that share slices.
    fn overlap(&self, task: u32, slice: Local) -> (u64, u64) {
        let (offset, bytes) = self.ranges[task as usize];
        let start = offset.max(slice.offset);
        (start, (offset + bytes).min(slice.offset + slice.bytes) - start)
    }
}

/// Whether this outcome of a slice may be the fault of one of the requests that share it, and of no other.
const fn is_of_one(status: Status) -> bool {
    matches!(
        status,
        Status::NotFound
            | Status::TooLarge
            | Status::BadRequest
            | Status::Unauthorized
            | Status::Stale
            | Status::OutOfRange
    )
}

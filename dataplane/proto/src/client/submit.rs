//! Batches come in: validated as a whole, split into slices, routed.

use core::ops::Range;

use super::lane::Cause;
use super::options::SubmitOptions;
use super::puts::PutBook;
use super::table::{Batch, Held, NOWHERE, Slice, SliceState, slice_id};
use super::types::{Local, Request, SliceId, SubmitError, TaskResult};
use super::{Client, Output};
use crate::ids::{BatchId, RequestId, Version};
use crate::limits::Limits;
use crate::sched::{Cuts, Ticket, cut_bytes, merge_runs};
use crate::status::Status;

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
        self.validate(requests, puts.len())?;
        let mut batch = self.batches.recycled().unwrap_or_else(Batch::new);
        batch.ranges.clear();
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
        batch.deadline_ns = deadline_ns;
        batch.ended = None;
        let pending = TaskResult { status: Status::Ok, bytes: 0, version: Version(0) };
        batch.results.resize(requests.len(), pending);
        batch.open_slices.resize(requests.len(), 0);
        let (index, generation) = self.batches.insert(batch);
        let id = BatchId { index, generation };
        let merge = self.config.merge;
        for run in merge_runs(requests.len(), |next| merge && touches(&requests[next - 1], &requests[next])) {
            self.cut(id, run, requests);
        }
        if deadline_ns <= now_ns {
            // Nothing is sent for it: ending it later would cost others their lane.
            self.end_batch(id, Status::DeadlineExceeded, Cause::Deadline);
            return Ok(id);
        }
        self.remember_deadline(deadline_ns, id);
        // Routed only when all slices exist: a slice that fails at once must not complete the batch early.
        self.route_all(index);
        Ok(id)
    }

    /// Withdraws a batch. It completes, with `Cancelled` for what was not done, when nothing touches its memory any
    /// more.
    pub fn cancel(&mut self, batch: BatchId, now_ns: u64) {
        self.now_ns = now_ns;
        self.end_batch(batch, Status::Cancelled, Cause::Withdrawn);
    }

    /// Entries of completed batches are dropped when they are the greater part, so that the memory is bounded by the
    /// batches that are open, at a constant cost for each.
    fn remember_deadline(&mut self, deadline_ns: u64, batch: BatchId) {
        if self.deadlines.len() >= 64 + 2 * self.batches.len() {
            let batches = &self.batches;
            self.deadlines.retain(|entry| {
                let batch = entry.0.1;
                batches.get(batch.index, batch.generation).is_some_and(|batch| batch.remaining > 0)
            });
        }
        self.deadlines.push(core::cmp::Reverse((deadline_ns, batch)));
    }

    fn validate(&self, requests: &[Request], puts: usize) -> Result<(), SubmitError> {
        if requests.is_empty() {
            return Err(SubmitError::Empty);
        }
        if requests.len() > Limits::BATCH_REQUESTS {
            return Err(SubmitError::TooMany { requests: requests.len(), limit: Limits::BATCH_REQUESTS });
        }
        let mut slices = 0;
        for (index, request) in requests.iter().enumerate() {
            if request.peer().is_some_and(|peer| !self.peers.get(peer.0 as usize).is_some_and(|peer| peer.pinned)) {
                return Err(SubmitError::UnknownPeer { index });
            }
            if let Request::PutAs(_, _, number) = *request
                && number as usize >= puts
            {
                return Err(SubmitError::UnknownPut { index });
            }
            slices += 1;
            let Some(local) = request.local() else { continue };
            // A put of 0 bytes is refused here as it would be by the store.
            if local.bytes == 0 {
                return Err(SubmitError::ZeroBytes { index });
            }
            if local.bytes > Limits::PAYLOAD_BYTES {
                return Err(SubmitError::TooLarge { index, bytes: local.bytes, limit: Limits::PAYLOAD_BYTES });
            }
            let starts = match request {
                Request::Read(target, _) | Request::Write(target, _) => local.offset.max(target.offset),
                Request::GetRange(_, offset, _) => local.offset.max(*offset),
                _ => local.offset,
            };
            if starts.checked_add(local.bytes).is_none() {
                return Err(SubmitError::OutOfRange { index });
            }
            if let Request::Read(target, _) | Request::Write(target, _) = request {
                slices += self.cuts(target.offset, local.bytes, target.peer).slices() as usize - 1;
            }
        }
        let open = self.slices.len();
        if open + slices > Limits::OPEN_SLICES {
            return Err(SubmitError::Busy { open, slices, limit: Limits::OPEN_SLICES });
        }
        check_overlap(requests)
    }

    fn slice_bytes(&self) -> u64 {
        self.config.slice_bytes.max(Limits::SLICE_BYTES_LEAST)
    }

    /// The slices of a range: every rail of the peer gets a piece of a large one.
    fn cuts(&self, offset: u64, bytes: u64, peer: super::PeerId) -> Cuts {
        let rails = self.peers[peer.0 as usize].groups.iter().map(|group| group.rails.len()).max();
        let slice_bytes = cut_bytes(bytes, self.slice_bytes(), rails.unwrap_or(1));
        Cuts::new(offset, bytes, slice_bytes, self.config.align_bytes)
    }

    /// Cuts requests that touch each other, or a single one, into slices.
    fn cut(&mut self, batch: BatchId, run: Range<usize>, requests: &[Request]) {
        let (first, last) = (&requests[run.start], &requests[run.end - 1]);
        let (Request::Read(target, local) | Request::Write(target, local)) = *first else {
            self.add_slice(batch, run.start as u32, 1, *first);
            return;
        };
        let end = last.local().map_or(0, |local| local.offset + local.bytes);
        let bytes = end - local.offset;
        let several = run.len() > 1;
        if several {
            let ranges = &mut self.batches.at(batch.index).ranges;
            ranges.resize(requests.len(), (0, 0));
            for task in run.clone() {
                ranges[task] = requests[task].local().map_or((0, 0), |local| (local.offset, local.bytes));
            }
        }
        let mut task = run.start;
        let task_end = |task: usize| requests[task].local().map_or(0, |local| local.offset + local.bytes);
        for (offset, bytes) in self.cuts(target.offset, bytes, target.peer) {
            let part = Local { buffer: local.buffer, offset: local.offset + (offset - target.offset), bytes };
            let target = super::SegmentTarget { offset, ..target };
            let request = if matches!(first, Request::Read(..)) {
                Request::Read(target, part)
            } else {
                Request::Write(target, part)
            };
            if !several {
                self.add_slice(batch, task as u32, 1, request);
                continue;
            }
            while task_end(task) <= part.offset {
                task += 1;
            }
            let from = task;
            while task_end(task) < part.offset + bytes {
                task += 1;
            }
            self.add_slice(batch, from as u32, (task - from + 1) as u32, request);
        }
    }

    #[inline]
    fn add_slice(&mut self, batch: BatchId, task: u32, tasks: u32, request: Request) -> SliceId {
        let (index, generation) = self.slices.insert(Slice {
            batch,
            task,
            tasks,
            request,
            state: SliceState::Queued,
            peer: 0,
            group: 0,
            queue: 0,
            place: NOWHERE,
            rail: NOWHERE,
            begun_ns: self.now_ns,
            queued_ns: self.now_ns,
            posted_ns: self.now_ns,
            sent_ns: 0,
            lane: NOWHERE,
            before: NOWHERE,
            after: NOWHERE,
            wire: RequestId::default(),
            sent_bytes: 0,
            attempts: 0,
            parkings: 0,
            via: self.usual_via(),
            alone: false,
            bytes: 0,
            version: 0,
            expected_checksum: None,
            held: Held::Nothing,
        });
        let id = slice_id(index, generation);
        let entry = self.batches.at(batch.index);
        entry.slices.push(id);
        for task in task..task + tasks {
            entry.open_slices[task as usize] += 1;
        }
        id
    }

    /// One of several requests that share a slice may have failed it: each is asked on its own.
    fn split(&mut self, slice: &Slice) {
        let (Request::Read(target, local) | Request::Write(target, local)) = slice.request else { return };
        let first = self.batches.at(slice.batch.index).slices.len();
        for task in slice.task..slice.task + slice.tasks {
            let (offset, bytes) = self.batches.at(slice.batch.index).overlap(task, local);
            let target = super::SegmentTarget { offset: target.offset + (offset - local.offset), ..target };
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
            let bytes = shared.map_or(slice.bytes, |local| batch.overlap(task, local).1);
            let result = &mut batch.results[task as usize];
            if result.status == Status::Ok {
                result.status = status;
            }
            if matches!(status, Status::Ok | Status::BufferTooSmall) {
                result.bytes += bytes;
            }
            if status == Status::Ok {
                result.version = Version(slice.version);
            }
            let open = &mut batch.open_slices[task as usize];
            *open -= 1;
            if *open == 0 {
                batch.remaining -= 1;
                if self.config.report_tasks {
                    self.finished.push_back((slice.batch, task));
                }
                if batch.remaining == 0 {
                    self.outputs.push_back(Output::Done { batch: slice.batch });
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
            let lane = slice.lane;
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

/// Whether a request continues the one before it, in the caller's memory and in the peer's.
fn touches(before: &Request, next: &Request) -> bool {
    let ((Request::Read(target, local), Request::Read(next, to))
    | (Request::Write(target, local), Request::Write(next, to))) = (before, next)
    else {
        return false;
    };
    let follows = super::SegmentTarget { offset: target.offset + local.bytes, ..*target };
    follows == *next && local.buffer == to.buffer && local.offset + local.bytes == to.offset
}

/// No two requests of a batch may write to the same memory: the outcome would depend on the network.
fn check_overlap(requests: &[Request]) -> Result<(), SubmitError> {
    let writes = |request: &Request| match request {
        Request::Get(_, local) | Request::GetRange(_, _, local) | Request::Read(_, local) => Some(*local),
        _ => None,
    };
    let mut ranges: Vec<(u32, u64, u64, usize)> = requests
        .iter()
        .enumerate()
        .filter_map(|(index, request)| writes(request).map(|l| (l.buffer, l.offset, l.bytes, index)))
        .collect();
    if ranges.len() < 2 {
        return Ok(());
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let ((buffer, offset, bytes, first), (next_buffer, next_offset, _, second)) = (pair[0], pair[1]);
        if buffer == next_buffer && offset + bytes > next_offset {
            return Err(SubmitError::Overlap { first: first.min(second), second: first.max(second) });
        }
    }
    Ok(())
}

//! Batches come in: validated as a whole, split into slices, routed.

use super::lane::Cause;
use super::table::{Held, NOWHERE, Slice, SliceState, slice_id};
use super::types::{Local, Request, SliceId, SubmitError, TaskResult};
use super::{Client, Output};
use crate::ids::{BatchId, RequestId, Version};
use crate::limits::Limits;
use crate::status::Status;

impl Client {
    /// Takes in a batch, to be complete by `deadline_ns`. Results come in the order of `requests`.
    ///
    /// The caller keeps the memory of the requests alive and untouched until the batch is complete.
    ///
    /// # Errors
    /// When any request is malformed; then none has any effect.
    pub fn submit(&mut self, requests: &[Request], deadline_ns: u64, now_ns: u64) -> Result<BatchId, SubmitError> {
        self.now_ns = now_ns;
        self.validate(requests)?;
        let mut batch = self.batches.recycled().unwrap_or_default();
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
        for (task, request) in requests.iter().enumerate() {
            self.cut(id, task as u32, request);
        }
        if deadline_ns <= now_ns {
            // Nothing is sent for it: ending it later would cost others their lane.
            self.end_batch(id, Status::DeadlineExceeded, Cause::Deadline);
            return Ok(id);
        }
        self.remember_deadline(deadline_ns, id);
        // Routed only when all slices exist: a slice that fails at once must not complete the batch early.
        for position in 0..self.batches.at(index).slices.len() {
            let slice = self.batches.at(index).slices[position];
            self.route(slice);
        }
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

    fn validate(&self, requests: &[Request]) -> Result<(), SubmitError> {
        if requests.is_empty() {
            return Err(SubmitError::Empty);
        }
        if requests.len() > Limits::BATCH_REQUESTS {
            return Err(SubmitError::TooMany { requests: requests.len(), limit: Limits::BATCH_REQUESTS });
        }
        let mut slices = 0;
        for (index, request) in requests.iter().enumerate() {
            let peer = match request {
                Request::Read(target, _) | Request::Write(target, _) => Some(target.peer),
                Request::OpenSegment(peer) => Some(*peer),
                _ => None,
            };
            if peer.is_some_and(|peer| !self.peers.get(peer.0 as usize).is_some_and(|peer| peer.pinned)) {
                return Err(SubmitError::UnknownPeer { index });
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
            let mut starts = local.offset;
            if let Request::Read(target, _) | Request::Write(target, _) = request {
                starts = starts.max(target.offset);
                slices += ((local.bytes - 1) / self.slice_bytes()) as usize;
            }
            if starts.checked_add(local.bytes).is_none() {
                return Err(SubmitError::OutOfRange { index });
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

    fn cut(&mut self, batch: BatchId, task: u32, request: &Request) {
        match *request {
            Request::Read(target, local) => self.cut_range(batch, task, target.offset, local, |offset, local| {
                Request::Read(super::SegmentTarget { offset, ..target }, local)
            }),
            Request::Write(target, local) => self.cut_range(batch, task, target.offset, local, |offset, local| {
                Request::Write(super::SegmentTarget { offset, ..target }, local)
            }),
            whole => self.add_slice(batch, task, whole),
        }
    }

    fn cut_range(
        &mut self,
        batch: BatchId,
        task: u32,
        offset: u64,
        local: Local,
        request: impl Fn(u64, Local) -> Request,
    ) {
        let mut done = 0;
        while done < local.bytes {
            let bytes = self.slice_bytes().min(local.bytes - done);
            let part = Local { buffer: local.buffer, offset: local.offset + done, bytes };
            self.add_slice(batch, task, request(offset + done, part));
            done += bytes;
        }
    }

    fn add_slice(&mut self, batch: BatchId, task: u32, request: Request) {
        let (index, generation) = self.slices.insert(Slice {
            batch,
            task,
            request,
            state: SliceState::Queued,
            lane: NOWHERE,
            before: NOWHERE,
            after: NOWHERE,
            wire: RequestId::default(),
            sent_bytes: 0,
            attempts: 0,
            parkings: 0,
            bytes: 0,
            version: 0,
            expected_checksum: None,
            held: Held::Nothing,
        });
        let entry = self.batches.at(batch.index);
        entry.slices.push(slice_id(index, generation));
        entry.open_slices[task as usize] += 1;
    }

    /// Gives a slice its outcome.
    pub(super) fn complete(&mut self, index: u32, status: Status) {
        let mut slice = self.slices.remove(index);
        slice.step(super::table::SliceEvent::Finish);
        let batch = self.batches.at(slice.batch.index);
        let result = &mut batch.results[slice.task as usize];
        if result.status == Status::Ok {
            result.status = status;
        }
        if matches!(status, Status::Ok | Status::BufferTooSmall) {
            result.bytes += slice.bytes;
        }
        if status == Status::Ok {
            result.version = Version(slice.version);
        }
        let open = &mut batch.open_slices[slice.task as usize];
        *open -= 1;
        if *open == 0 {
            batch.remaining -= 1;
            if self.config.report_tasks {
                self.finished.push_back((slice.batch, slice.task));
            }
            if batch.remaining == 0 {
                self.outputs.push_back(Output::Done { batch: slice.batch });
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

/// No two requests of a batch may write to the same memory: the outcome would depend on the network.
fn check_overlap(requests: &[Request]) -> Result<(), SubmitError> {
    let writes = |request: &Request| match request {
        Request::Get(_, local) | Request::Read(_, local) => Some(*local),
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

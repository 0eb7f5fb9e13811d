//! Submission: a batch is validated as a whole, its addresses are looked up, and it is passed to an initiator.

use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{Local, PeerId, Request, SegmentTarget};
use kvplane_engine::cpu;
use kvplane_proto::{Limits, Status};

use crate::TransferEngine;
use crate::batch::request::{Opcode, ScatterRequest, SubmitOptions, TransferRequest, check_overlap};
use crate::batch::{Batch, Parts, State};
use crate::driver::Work;
use crate::error::Error;
use crate::files::OpenFile;
use crate::memory::copies::Copy;
use crate::memory::{Buffer, Map};
use crate::segment::open::unknown;
use crate::segment::{Remote, SegmentHandle};

/// Reason why a batch cannot be planned.
enum Obstacle {
    /// The batch is malformed.
    Error(Error),
    /// The owners of these segments have to describe them again first.
    Refresh(Vec<SegmentHandle>),
}

impl From<Error> for Obstacle {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// Validated batch.
#[derive(Default)]
struct Plan {
    /// Requests to peers and local copies: the parts of the batch, with the task of each.
    requests: Vec<Request>,
    copies: Vec<Copy>,
    request_owners: Vec<u32>,
    copy_owners: Vec<u32>,
    parts: Parts,
    /// True if part of a buffer is not mapped any more.
    gone: bool,
}

/// Attempt to submit a batch; another one follows if the description of a segment is outdated.
struct Attempt<'a> {
    options: &'a SubmitOptions,
    /// Time of the submission.
    start_ns: u64,
    deadline_ns: u64,
    /// Segments whose description was renewed meanwhile.
    refreshed: &'a [SegmentHandle],
}

impl TransferEngine {
    /// Starts transfers as one batch; validated as a whole before any has an effect. Requests may name different
    /// segments. A batch without requests is complete at once.
    ///
    /// Transfers within local memory are complete when this returns.
    ///
    /// # Errors
    /// When a request is malformed or outside of registered memory, which the error names, or a limit of transfers in
    /// flight is reached.
    pub fn submit(&self, requests: &[TransferRequest], options: &SubmitOptions) -> Result<Batch, Error> {
        self.submit_tasks(requests, None, requests.len(), options)
    }

    /// Starts sets of ranges as one batch, with one task and one result for each set.
    ///
    /// # Errors
    /// Errors of [`Self::submit`]; requests are counted over all sets.
    pub fn submit_scatter(&self, requests: &[ScatterRequest<'_>], options: &SubmitOptions) -> Result<Batch, Error> {
        let ranges = requests.iter().try_fold(0u64, |sum, one| sum.checked_add(one.count()));
        let ranges = ranges.unwrap_or(u64::MAX);
        if ranges > Limits::BATCH_REQUESTS as u64 {
            return Err(too_many(ranges));
        }
        let (mut flat, mut owners) = (Vec::with_capacity(ranges as usize), Vec::with_capacity(ranges as usize));
        for (task, request) in requests.iter().enumerate() {
            if !request.expand(&mut flat) {
                return Err(Error::Argument(format!("the ranges of request {task} end beyond 2^64 bytes")));
            }
            owners.resize(flat.len(), task as u32);
        }
        self.submit_tasks(&flat, Some(&owners), requests.len(), options)
    }

    fn submit_tasks(
        &self,
        requests: &[TransferRequest],
        owners: Option<&[u32]>,
        tasks: usize,
        options: &SubmitOptions,
    ) -> Result<Batch, Error> {
        if requests.len().max(tasks) > Limits::BATCH_REQUESTS {
            return Err(too_many(requests.len().max(tasks) as u64));
        }
        let start_ns = cpu::monotonic_ns();
        let timeout = options.deadline.unwrap_or(self.config.deadline);
        let deadline_ns = start_ns.saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        let mut refreshed = Vec::new();
        loop {
            match self.try_submit(
                requests,
                owners,
                tasks,
                &Attempt { options, start_ns, deadline_ns, refreshed: &refreshed },
            ) {
                Ok(batch) => return Ok(batch),
                Err(Obstacle::Error(error)) => return Err(error),
                Err(Obstacle::Refresh(handles)) => {
                    let left_ns = deadline_ns.saturating_sub(cpu::monotonic_ns());
                    if left_ns == 0 {
                        return Err(late(&self.name_of(handles[0])?));
                    }
                    self.refresh_all(&handles, Duration::from_nanos(left_ns))?;
                    refreshed.extend(handles);
                }
            }
        }
    }

    fn try_submit(
        &self,
        requests: &[TransferRequest],
        owners: Option<&[u32]>,
        tasks: usize,
        attempt: &Attempt<'_>,
    ) -> Result<Batch, Obstacle> {
        let Attempt { options, start_ns, deadline_ns, refreshed } = *attempt;
        let (driver, state, work, copies) = {
            // Held until the batch is registered as a user of its buffers.
            let map = self.memory.read();
            let mut plan = self.plan(&map, requests, owners, refreshed)?;
            let alone = plan.parts.remotes.iter().any(|remote| remote.file.as_ref().is_some_and(|file| file.alone));
            let driver = if alone { &self.drivers[0] } else { self.driver() };
            check_overlap(requests)?;
            if plan.requests.len() > Limits::BATCH_REQUESTS {
                return Err(too_many(plan.requests.len() as u64).into());
            }
            let mut owners = plan.request_owners;
            owners.append(&mut plan.copy_owners);
            let whole = owners.len() == tasks && owners.iter().enumerate().all(|(at, &task)| task as usize == at);
            if plan.parts.remotes.len() > 1 {
                plan.parts.asked = plan.requests.iter().map(|one| one.peer().map_or(0, |peer| peer.0)).collect();
            }
            plan.parts.owners = (!whole).then_some(owners);
            plan.parts.tasks = tasks;
            plan.parts.background = options.background;
            if let (Some(notice), Some(to)) = (&options.notice, requests.first()) {
                let letter = self.courier.letter(&self.name_of(to.target)?, notice)?;
                plan.parts.letter = Some((Arc::clone(&self.courier), letter));
            }
            if !plan.requests.is_empty() {
                driver.admit(plan.parts.slices)?;
            }
            let state = Arc::new(State::new(self.next_batch(), plan.parts));
            (
                driver,
                state,
                Work { requests: plan.requests, options: options.of_client(start_ns, deadline_ns) },
                plan.copies,
            )
        };
        state.end_empty();
        driver.copies.carry_out(&copies, start_ns, |number, bytes| {
            state.part_ended((work.requests.len() + number) as u32, Status::Ok, bytes);
        });
        match work.requests.is_empty() {
            true => state.finish(None),
            false => driver.submit(&state, work),
        }
        Ok(Batch::new(state, Arc::clone(driver)))
    }

    /// Looks up all addresses.
    fn plan(
        &self,
        map: &Map,
        requests: &[TransferRequest],
        owners: Option<&[u32]>,
        refreshed: &[SegmentHandle],
    ) -> Result<Plan, Obstacle> {
        let mut plan = Plan::default();
        plan.requests.reserve(requests.len());
        plan.request_owners.reserve(requests.len());
        let mut last: Option<(SegmentHandle, Arc<Remote>, PeerId)> = None;
        let mut outdated: Vec<SegmentHandle> = Vec::new();
        for (index, request) in requests.iter().enumerate() {
            let task = owners.map_or(index as u32, |owners| owners[index]);
            if request.length == 0 {
                continue;
            }
            let found = map.find(request.source, request.length);
            let (buffer, offset) = found.ok_or_else(|| outside(index, request.source, request.length, "ours"))?;
            if request.opcode == Opcode::Read && !buffer.region.writable() {
                return Err(Error::Argument(format!("request {index} reads into memory that is read-only")).into());
            }
            plan.use_buffer(buffer);
            if request.target == SegmentHandle::LOCAL {
                plan.copy(map, index, request, buffer, offset)?;
                plan.copy_owners.push(task);
                continue;
            }
            if last.as_ref().is_none_or(|(handle, ..)| *handle != request.target) {
                let remote = self.segments.read().get(request.target).cloned();
                let remote = remote.ok_or_else(|| unknown(request.target))?;
                if remote.is_stale() && !refreshed.contains(&request.target) && !outdated.contains(&request.target) {
                    outdated.push(request.target);
                }
                let peer = plan.use_remote(&remote);
                last = Some((request.target, remote, peer));
            }
            let (_, remote, peer) = last.as_ref().expect("it was just looked up");
            if let Some(file) = &remote.file {
                check_file(index, request, &remote.name, file)?;
            }
            match remote.find(request.target_offset, request.length) {
                Some((region, at, place)) => {
                    let (segment, shareable) = (region.segment, region.shareable);
                    let target = SegmentTarget { peer: *peer, segment, offset: at, shareable, place };
                    let local = Local { buffer: buffer.index, offset, bytes: request.length };
                    plan.cut(request.opcode, target, local, task);
                }
                None if outdated.contains(&request.target) => {}
                None if !refreshed.contains(&request.target) => outdated.push(request.target),
                None => {
                    let whose = format!("{}'s", remote.name);
                    return Err(outside(index, request.target_offset, request.length, &whose).into());
                }
            }
        }
        if !outdated.is_empty() {
            return Err(Obstacle::Refresh(outdated));
        }
        if plan.gone {
            refuse_freed(map, requests)?;
        }
        let slice_bytes = self.config.slice_bytes.max(Limits::SLICE_BYTES_LEAST);
        let slices = |request: &Request| request.local().map_or(1, |local| (local.bytes - 1) / slice_bytes + 1);
        plan.parts.slices = plan.requests.iter().map(slices).sum::<u64>() as usize;
        Ok(plan)
    }
}

impl Plan {
    /// Records a buffer once, unless it is among the last ones recorded.
    fn use_buffer(&mut self, buffer: &Arc<Buffer>) {
        let known = &self.parts.buffers;
        if !known.iter().rev().take(8).any(|other| Arc::ptr_eq(other, buffer)) {
            // Checked as a whole, so that one check covers all of its ranges.
            self.gone |= !buffer.region.is_mapped(0, buffer.region.bytes());
            self.parts.buffers.push(Arc::clone(buffer));
        }
    }

    /// Records a peer once; returns its position among the batch's peers.
    fn use_remote(&mut self, remote: &Arc<Remote>) -> PeerId {
        let remotes = &mut self.parts.remotes;
        let position = remotes.iter().position(|other| Arc::ptr_eq(other, remote)).unwrap_or_else(|| {
            remotes.push(Arc::clone(remote));
            remotes.len() - 1
        });
        PeerId(position as u32)
    }

    /// Splits a transfer into requests of at most one frame's payload.
    fn cut(&mut self, opcode: Opcode, target: SegmentTarget, local: Local, task: u32) {
        let mut done = 0;
        while done < local.bytes {
            let bytes = Limits::PAYLOAD_BYTES.min(local.bytes - done);
            let target = SegmentTarget { offset: target.offset + done, ..target };
            let local = Local { offset: local.offset + done, bytes, ..local };
            self.requests.push(match opcode {
                Opcode::Read => Request::Read(target, local),
                Opcode::Write => Request::Write(target, local),
            });
            self.request_owners.push(task);
            done += bytes;
        }
    }

    fn copy(
        &mut self,
        map: &Map,
        index: usize,
        request: &TransferRequest,
        buffer: &Arc<Buffer>,
        offset: u64,
    ) -> Result<(), Error> {
        let found = map.find(request.target_offset, request.length);
        let (other, at) = found.ok_or_else(|| outside(index, request.target_offset, request.length, "ours"))?;
        self.use_buffer(other);
        let (here, there) = ((Arc::clone(buffer), offset), (Arc::clone(other), at));
        let (to, from) = match request.opcode {
            Opcode::Read => (here, there),
            Opcode::Write => (there, here),
        };
        if !to.0.region.writable() {
            return Err(Error::Argument(format!("request {index} writes to memory that is read-only")));
        }
        self.copies.push(Copy { to, from, bytes: request.length });
        Ok(())
    }
}

/// Rejects requests whose memory was freed without being unregistered: an access would kill the process.
fn refuse_freed(map: &Map, requests: &[TransferRequest]) -> Result<(), Error> {
    for (index, request) in requests.iter().enumerate().filter(|(_, request)| request.length > 0) {
        let local = (request.target == SegmentHandle::LOCAL).then_some(request.target_offset);
        for address in [Some(request.source), local].into_iter().flatten() {
            let found = map.find(address, request.length);
            let gone = |(buffer, offset): &(&Arc<Buffer>, u64)| {
                !buffer.region.is_mapped(*offset as usize, request.length as usize)
            };
            if found.as_ref().is_some_and(gone) {
                return Err(Error::Argument(format!(
                    "request {index}: {} bytes at {address:#x} were freed while they were registered: unregister \
                     memory before it is freed",
                    request.length
                )));
            }
        }
    }
    Ok(())
}

/// Rejects transfers beyond a file's end, and writes to a read-only file.
fn check_file(index: usize, request: &TransferRequest, name: &str, file: &OpenFile) -> Result<(), Error> {
    let bytes = file.file.bytes();
    if request.opcode == Opcode::Write && !file.file.writable() {
        return Err(Error::Argument(format!("request {index} writes to {name}, which was opened to be read only")));
    }
    if request.target_offset.checked_add(request.length).is_none_or(|end| end > bytes) {
        let (length, offset) = (request.length, request.target_offset);
        let range = format!("request {index}: {length} bytes at {offset}");
        return Err(Error::AddressNotRegistered(format!("{range} are not within the {bytes} bytes of {name}")));
    }
    Ok(())
}

fn late(name: &str) -> Error {
    let what = format!("describe segment {name}");
    Error::Status { what, status: Status::DeadlineExceeded, cause: None }
}

fn outside(index: usize, address: u64, bytes: u64, whose: &str) -> Error {
    Error::AddressNotRegistered(format!(
        "request {index}: {bytes} bytes at {address:#x} are not within one of {whose} registered buffers"
    ))
}

fn too_many(requests: u64) -> Error {
    Error::TooManyRequests(format!(
        "a batch of {requests} requests is over the limit of {}: submit it in parts",
        Limits::BATCH_REQUESTS
    ))
}

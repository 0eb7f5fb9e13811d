//! Jobs of the device, split to size: jobs go in, block operations come out, their completions complete jobs.
//!
//! A job reads or writes one contiguous range of the device, or flushes. It is split into operations of at most
//! `max_op_bytes`, each of whole blocks. Jobs are queued by priority; the number of in-flight operations of each
//! priority is limited, so that prefetch and reclaim never starve gets. A completion of an unknown operation is
//! counted.

use kvplane_proto::narrowing::to_u32;
use std::collections::VecDeque;

use crate::ops::{Action, BlockOp, Fault, OpId, PRIORITIES, Pieces, Priority};
use crate::slots::{SlotId, Slots};

/// Purpose of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    /// A read of a copy of the superblock.
    SuperblockRead(u8),
    /// A write of the superblock.
    SuperblockWrite,
    /// A read of an ownership note.
    NoteRead(u8),
    /// A write of an ownership note.
    NoteWrite,
    /// A read of a part of a device without superblocks, which must be zero, to a place of the scan area.
    Look(u32),
    /// A write that zeroes a segment's header.
    Blank(u32),
    /// A read of a segment's header into one of the blocks of the scan area.
    HeaderRead { segment: u32, place: u32 },
    /// A write of the header of the next segment.
    Prepare(u32),
    /// A write of a group of records.
    Group(u64),
    /// A read of an object.
    Read(SlotId),
    /// A write of a page of a footer.
    Page,
    /// A read of a window of a footer, during recovery.
    Reader(u32),
    /// A read of a window of a scanned segment, during recovery.
    Scan,
    /// A read of a window of the footer of the segment being reclaimed.
    Victim,
    /// A flush.
    Flush,
}

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) owner: Owner,
    pub(crate) action: Action,
    pub(crate) offset: u64,
    pub(crate) pieces: Pieces,
    pub(crate) priority: Priority,
}

#[derive(Debug)]
struct RunningJob {
    job: Job,
    bytes: u64,
    given: u64,
    in_flight: u32,
    all_given: bool,
    fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug)]
struct Op {
    job: SlotId,
    bytes: u32,
    priority: Priority,
}

/// Jobs that are queued or in flight.
#[derive(Debug)]
pub(crate) struct Jobs {
    running: Slots<RunningJob>,
    queues: [VecDeque<SlotId>; PRIORITIES],
    ops: Slots<Op>,
    in_flight: [u32; PRIORITIES],
    limits: [u32; PRIORITIES],
    max_op_bytes: u64,
    stale: u64,
}

impl Jobs {
    pub(crate) fn new(jobs: u32, limits: [u16; PRIORITIES], max_op_bytes: u32) -> Self {
        let limits = limits.map(u32::from);
        Self {
            running: Slots::new(jobs),
            queues: core::array::from_fn(|_| VecDeque::with_capacity(jobs as usize)),
            ops: Slots::new(limits.iter().sum()),
            in_flight: [0; PRIORITIES],
            limits,
            max_op_bytes: u64::from(max_op_bytes),
            stale: 0,
        }
    }

    /// Adds a job. There is room: every owner has a bounded number of jobs, and the table's capacity is their sum.
    pub(crate) fn submit(&mut self, job: Job) {
        let (bytes, priority) = (job.pieces.bytes(), job.priority);
        let running = RunningJob { job, bytes, given: 0, in_flight: 0, all_given: false, fault: None };
        let id = self.running.insert(running).expect("the table has room for the jobs of every owner");
        self.queues[priority as usize].push_back(id);
    }

    /// Returns the number of completions of unknown operations.
    pub(crate) const fn stale(&self) -> u64 {
        self.stale
    }

    pub(crate) const fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Returns the next operation, of the most urgent priority below its limit.
    pub(crate) fn next(&mut self) -> Option<BlockOp> {
        let priority = Priority::ALL.into_iter().find(|priority| {
            let at = *priority as usize;
            !self.queues[at].is_empty() && self.in_flight[at] < self.limits[at]
        })?;
        let queue = &mut self.queues[priority as usize];
        let id = *queue.front()?;
        let running = self.running.get_mut(id)?;
        let bytes = self.max_op_bytes.min(running.bytes - running.given);
        let (at, action) = (running.given, running.job.action);
        running.given += bytes;
        running.in_flight += 1;
        // The rest of a failed job is skipped.
        running.all_given = running.given == running.bytes || running.fault.is_some();
        let (offset, pieces) = (running.job.offset + at, running.job.pieces.part(at, bytes));
        if running.all_given {
            queue.pop_front();
        }
        self.in_flight[priority as usize] += 1;
        let op = Op { job: id, bytes: to_u32(bytes), priority };
        let slot = self.ops.insert(op).expect("the table has a slot for every operation that may be in flight");
        Some(BlockOp { id: OpId { slot }, action, offset, bytes: to_u32(bytes), pieces, priority })
    }

    /// Completes an operation, with the bytes that it moved or the fault. Returns the owner of the job if the job is
    /// complete with it.
    pub(crate) fn complete(&mut self, id: OpId, result: Result<u32, Fault>) -> Option<(Owner, Result<(), Fault>)> {
        let Some(op) = self.ops.remove(id.slot) else {
            self.stale += 1;
            return None;
        };
        self.in_flight[op.priority as usize] -= 1;
        let running = self.running.get_mut(op.job)?;
        running.in_flight -= 1;
        let fault = match result {
            Err(fault) => Some(fault),
            Ok(moved) => (moved != op.bytes).then_some(Fault::Io),
        };
        running.fault = running.fault.or(fault);
        if running.fault.is_some() && !running.all_given {
            running.all_given = true;
            self.queues[op.priority as usize].retain(|queued| *queued != op.job);
        }
        if running.in_flight > 0 || !running.all_given {
            return None;
        }
        let running = self.running.remove(op.job)?;
        Some((running.job.owner, running.fault.map_or(Ok(()), Err)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Span;

    fn job(priority: Priority, bytes: u32) -> Job {
        let pieces = Pieces::of(&[Span::staging(0, 512), Span::pool(4096, bytes - 512)]);
        Job { owner: Owner::Reader(priority as u32), action: Action::Read, offset: 512, pieces, priority }
    }

    #[test]
    fn a_job_is_cut_and_ends_with_its_last_operation() {
        let mut jobs = Jobs::new(4, [2; PRIORITIES], 1024);
        jobs.submit(job(Priority::Get, 2560));
        let first = jobs.next().expect("work");
        assert_eq!((first.offset, first.bytes), (512, 1024));
        assert_eq!(first.pieces.as_slice(), [Span::staging(0, 512), Span::pool(4096, 512)]);
        let second = jobs.next().expect("work");
        assert_eq!(second.pieces.as_slice(), [Span::pool(4608, 1024)]);
        assert!(jobs.next().is_none(), "two may be in flight");
        assert_eq!(jobs.complete(second.id, Ok(1024)), None);
        let third = jobs.next().expect("work");
        assert_eq!((third.offset, third.bytes), (2560, 512));
        assert_eq!(jobs.complete(third.id, Ok(512)), None);
        assert_eq!(jobs.complete(third.id, Ok(512)), None, "twice");
        assert_eq!(jobs.complete(first.id, Ok(1024)), Some((Owner::Reader(0), Ok(()))));
        assert_eq!((jobs.stale, jobs.is_idle()), (1, true));
    }

    #[test]
    fn failed_jobs_stop_and_priorities_do_not_block_each_other() {
        let mut jobs = Jobs::new(4, [1; PRIORITIES], 512);
        jobs.submit(job(Priority::Background, 1024));
        jobs.submit(job(Priority::Get, 1024));
        let get = jobs.next().expect("work");
        let background = jobs.next().expect("work");
        assert_eq!((get.priority, background.priority), (Priority::Get, Priority::Background));
        assert_eq!(jobs.complete(get.id, Ok(100)), Some((Owner::Reader(0), Err(Fault::Io))), "short");
        assert_eq!(jobs.complete(background.id, Err(Fault::Gone)), Some((Owner::Reader(3), Err(Fault::Gone))));
        assert!(jobs.next().is_none() && jobs.is_idle());
    }
}

//! File segments: ranges of files that io_uring transfers to and from registered memory, bypassing the page cache.
//!
//! A transfer whose memory, offset and length are block-aligned goes directly between the device and its memory. Any
//! other transfer passes through aligned staging, at most [`STAGING_BYTES`] at a time. A write of a part of a block
//! reads the rest of that block first (read-modify-write); no other write of this process may touch the block
//! meanwhile.
//!
//! A transfer completes when all of its bytes have been moved: a short count is continued, and a file that ends before
//! the range does is an error, never a success. A completed write has reached the device or the page cache;
//! [`Files::sync`] makes it durable.
//!
//! Thread affinity: one thread at a time; it may be another each time.

mod job;
mod table;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvplane_proto::{SegmentId, Status};
use kvplane_sys::{BLOCK_BYTES, Completion, DirectFile, FileOptions, HugePages, IoBuf, Region, RegionOptions, Ring};

pub use job::{FileTransfer, STAGING_BYTES};
use job::{Job, Next};
use table::Table;

/// Limit of operations in flight; further transfers wait.
const DEPTH: usize = 64;
/// Limit of transfers that pass through staging at once.
const STAGINGS: usize = 8;
/// Number of ring entries.
const RING_ENTRIES: u32 = 128;

/// The files of one host and the transfers in flight on them.
#[derive(Default)]
pub struct Files {
    ring: Option<Ring>,
    table: Table,
    jobs: slab::Slab<Job>,
    /// Jobs that wait for queue depth, staging or a block lock, oldest first.
    waiting: VecDeque<usize>,
    stagings: Vec<IoBuf>,
    stagings_made: usize,
    in_flight: usize,
    done: VecDeque<(u64, Result<(), Status>)>,
    completions: Vec<Completion>,
    last_problem: Option<String>,
}

impl Files {
    /// Creates an instance without files; the ring is set up with the first file.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens a file as a segment.
    ///
    /// # Errors
    /// When the file cannot be opened or no ring can be set up: names the file and the reason.
    pub fn open(&mut self, path: &Path, options: FileOptions) -> io::Result<SegmentId> {
        self.add(Arc::new(DirectFile::open(path, options)?))
    }

    /// Makes an open file a segment. Writes of partial blocks are serialized within one `Files` only, so a file with
    /// direct I/O must be written by one `Files` only.
    ///
    /// # Errors
    /// When no ring can be set up, or too many files are open.
    pub fn add(&mut self, file: Arc<DirectFile>) -> io::Result<SegmentId> {
        if self.ring.is_none() {
            self.ring = Some(Ring::shared(RING_ENTRIES)?);
        }
        self.table.add(file)
    }

    /// Removes a file. Transfers in flight complete; new ones fail as stale.
    pub fn close(&mut self, file: SegmentId) {
        self.table.remove(file);
    }

    /// Returns an open file.
    #[must_use]
    pub fn get(&self, file: SegmentId) -> Option<&DirectFile> {
        self.table.get(file).map(Arc::as_ref)
    }

    /// Registers memory with the ring (pins it) for repeated use. If the kernel refuses, transfers are merely a little
    /// slower.
    pub fn register(&mut self, region: &Arc<Region>) {
        if let Some(ring) = &mut self.ring {
            let _ = ring.register_region(region);
        }
    }

    /// Unregisters memory.
    pub fn unregister(&mut self, region: &Arc<Region>) {
        if let Some(ring) = &mut self.ring {
            ring.unregister_region(region);
        }
    }

    /// Starts a transfer. Its completion is returned by [`Self::poll_done`], also when the transfer is rejected.
    pub fn start(&mut self, transfer: FileTransfer) {
        let refusal = match self.table.get(transfer.file) {
            None => Some(Status::Stale),
            Some(file) if transfer.write && !file.writable() => Some(Status::Unauthorized),
            Some(file) => {
                let end = transfer.offset.checked_add(transfer.buffer.bytes() as u64);
                end.is_none_or(|end| end > file.bytes()).then_some(Status::OutOfRange)
            }
        };
        match (refusal, self.table.get(transfer.file)) {
            (None, Some(file)) => {
                let job = self.jobs.insert(Job::new(transfer, Arc::clone(file)));
                self.waiting.push_back(job);
                self.advance_waiting();
            }
            (refusal, _) => self.done.push_back((transfer.token, Err(refusal.unwrap_or(Status::Stale)))),
        }
    }

    /// Cancels the transfers whose token `which` selects: those not started end now, the others as soon as the kernel
    /// releases their memory. All of them end with [`Status::Cancelled`] unless they completed before.
    pub fn cancel(&mut self, mut which: impl FnMut(u64) -> bool) {
        for (_, job) in &mut self.jobs {
            if which(job.token()) {
                job.fail(Status::Cancelled);
            }
        }
        self.advance_waiting();
    }

    /// Submits queued operations and handles completions. Never blocks. Returns true if an operation completed.
    ///
    /// # Errors
    /// When the ring fails.
    pub fn poll(&mut self) -> io::Result<bool> {
        let Some(ring) = self.ring.as_mut().filter(|_| self.in_flight > 0) else { return Ok(false) };
        let mut completions = core::mem::take(&mut self.completions);
        ring.poll(&mut completions)?;
        let progress = !completions.is_empty();
        for completion in completions.drain(..) {
            self.in_flight -= 1;
            self.completed(completion);
        }
        self.completions = completions;
        if progress {
            self.advance_waiting();
        }
        Ok(progress)
    }

    /// Submits the operations that were queued since the last call.
    ///
    /// # Errors
    /// When the ring fails.
    pub fn flush(&mut self) -> io::Result<()> {
        match &mut self.ring {
            Some(ring) if self.in_flight > 0 => ring.submit(),
            _ => Ok(()),
        }
    }

    /// Ends all I/O for good: cancels the operations in flight and starts no more. Waits at most `longest` for the
    /// kernel to release the memory; returns true if it has. Transfers in flight are not reported any more; once this
    /// returned true, their memory belongs to the caller again.
    pub fn end(&mut self, longest: Duration) -> bool {
        self.waiting.clear();
        self.ring.as_mut().is_none_or(|ring| ring.end(longest))
    }

    /// Returns the next completed transfer, by its token.
    pub fn poll_done(&mut self) -> Option<(u64, Result<(), Status>)> {
        self.done.pop_front()
    }

    /// Returns true if no transfer is in flight. A host that is not idle must keep polling.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.done.is_empty()
    }

    /// Returns a descriptor that becomes readable when transfers have completed; `None` before the first file.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.ring.as_ref().map(AsFd::as_fd)
    }

    /// Makes completed writes to a file durable. Blocks until the device has flushed.
    ///
    /// # Errors
    /// When the file was closed or the flush failed.
    pub fn sync(&self, file: SegmentId) -> io::Result<()> {
        self.get(file).ok_or_else(|| io::Error::other("the file segment was closed"))?.sync()
    }

    /// Returns and clears the description of the last failure.
    pub fn take_problem(&mut self) -> Option<String> {
        self.last_problem.take()
    }

    /// Starts the next operation of every waiting job that can proceed, oldest first.
    fn advance_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(index) = self.waiting.pop_front() else { return };
            self.advance(index);
        }
    }

    fn advance(&mut self, index: usize) {
        let Some(job) = self.jobs.get_mut(index) else { return };
        match job.next() {
            Next::Done(result) => self.finish(index, result),
            Next::Direct { write, buffer, offset } => {
                let free = !write || self.table.lock(job.file_id(), index, offset, buffer.bytes() as u64);
                if self.in_flight >= DEPTH || !free {
                    self.waiting.push_back(index);
                    return;
                }
                self.operate(index, write, buffer, offset);
            }
            Next::Staging { offset, bytes, write } => {
                // Blocks are locked only by a job that has staging, or two jobs could deadlock.
                let staged = job.has_staging() || self.lend_staging(index);
                let file = self.jobs[index].file_id();
                let free = staged && (!write || self.table.lock(file, index, offset, bytes as u64));
                if !free || self.in_flight >= DEPTH {
                    self.waiting.push_back(index);
                    return;
                }
                let (write, buffer, offset) = self.jobs[index].staged_operation();
                self.operate(index, write, buffer, offset);
            }
        }
    }

    fn operate(&mut self, index: usize, write: bool, buffer: IoBuf, offset: u64) {
        let (Some(ring), Some(job)) = (&mut self.ring, self.jobs.get(index)) else { return };
        let fd = job.file().fd();
        let queued = match write {
            true => ring.write_at(fd, buffer, offset, index as u64),
            false => ring.read_at(fd, buffer, offset, index as u64),
        };
        match queued {
            Ok(()) => self.in_flight += 1,
            Err(_) => self.waiting.push_back(index),
        }
    }

    fn completed(&mut self, completion: Completion) {
        let index = completion.token as usize;
        let Some(job) = self.jobs.get_mut(index) else { return };
        if let Err(problem) = job.moved(completion.result) {
            self.last_problem = Some(problem.to_string());
        }
        if job.is_between_windows() {
            self.table.unlock(job.file_id(), index);
        }
        self.advance(index);
    }

    fn lend_staging(&mut self, index: usize) -> bool {
        let staging = self.stagings.pop().or_else(|| {
            if self.stagings_made >= STAGINGS {
                return None;
            }
            let bytes = STAGING_BYTES + 2 * BLOCK_BYTES;
            let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("kvplane-file", bytes) };
            let region = Region::allocate(&options).inspect_err(|error| self.last_problem = Some(error.to_string()));
            self.stagings_made += usize::from(region.is_ok());
            region.ok().map(IoBuf::whole)
        });
        let lent = staging.is_some();
        if let Some(staging) = staging {
            self.jobs[index].take_staging(staging);
        }
        lent
    }

    fn finish(&mut self, index: usize, result: Result<(), Status>) {
        let mut job = self.jobs.remove(index);
        self.table.unlock(job.file_id(), index);
        self.stagings.extend(job.give_staging());
        self.done.push_back((job.token(), result));
    }
}

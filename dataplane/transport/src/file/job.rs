//! State machine of one file transfer: which part is moved next, and how.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use kvplane_proto::{SegmentId, Status};
use kvplane_sys::{BLOCK_BYTES, DirectFile, IoBuf, Region, file};

/// Size of the aligned staging buffer that one transfer may borrow, in bytes.
pub const STAGING_BYTES: usize = 256 << 10;

/// A transfer between a file and memory.
#[derive(Clone, Debug)]
pub struct FileTransfer {
    /// Token of the caller, returned with the completion.
    pub token: u64,
    /// The file segment.
    pub file: SegmentId,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Memory that is read or written.
    pub buffer: IoBuf,
    /// True: memory to file. False: file to memory.
    pub write: bool,
}

/// Failure of an operation of a transfer.
#[derive(Debug)]
pub(super) enum MoveError {
    /// The file ended before the range did.
    Ended {
        path: PathBuf,
        /// Position in the file, in bytes.
        at: u64,
        /// Length of the file when it was opened.
        bytes: u64,
    },
    /// Operation after operation moved less than a block.
    Short { path: PathBuf, at: u64, moved: usize },
    /// The kernel refused the operation.
    Refused { path: PathBuf, at: u64, source: io::Error },
}

impl fmt::Display for MoveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended { path, at, bytes } => {
                write!(f, "{} ended at {at} although it had {bytes} bytes when opened", path.display())
            }
            Self::Short { path, at, moved } => write!(f, "{} moves only {moved} bytes at {at}", path.display()),
            Self::Refused { path, at, source } => write!(f, "{} at {at}: {source}", path.display()),
        }
    }
}

impl std::error::Error for MoveError {}

/// Next action of a job.
pub(super) enum Next {
    /// The job has ended.
    Done(Result<(), Status>),
    /// Move a part directly between the file and the memory of the transfer.
    Direct {
        /// True: memory to file.
        write: bool,
        /// Memory of the part.
        buffer: IoBuf,
        /// Offset of the part in the file, in bytes.
        offset: u64,
    },
    /// Move a window of whole blocks through staging.
    Staging {
        /// Offset of the window in the file, in bytes.
        offset: u64,
        /// Length of the window, in bytes.
        bytes: usize,
        /// True if the job writes, so that it needs an exclusive lock on the window's blocks.
        write: bool,
    },
}

/// State of the staged window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// No window is open.
    Between,
    /// The window's blocks are being read; this many bytes have been read.
    Reading(usize),
    /// The window's blocks are being written; this many bytes have been written.
    Writing(usize),
}

/// A transfer and its progress.
pub(super) struct Job {
    transfer: FileTransfer,
    file: Arc<DirectFile>,
    /// Bytes whose move is complete.
    done_bytes: usize,
    step: Step,
    staging: Option<IoBuf>,
    failed: Option<Status>,
    /// Consecutive operations that moved no bytes.
    idle_operations: u32,
}

/// Limit of consecutive operations that move no bytes; beyond it the transfer fails.
const IDLE_OPERATIONS_MOST: u32 = 64;

impl Job {
    pub(super) const fn new(transfer: FileTransfer, file: Arc<DirectFile>) -> Self {
        Self { transfer, file, done_bytes: 0, step: Step::Between, staging: None, failed: None, idle_operations: 0 }
    }

    pub(super) const fn token(&self) -> u64 {
        self.transfer.token
    }

    pub(super) const fn file_id(&self) -> SegmentId {
        self.transfer.file
    }

    pub(super) fn file(&self) -> &DirectFile {
        &self.file
    }

    pub(super) const fn has_staging(&self) -> bool {
        self.staging.is_some()
    }

    pub(super) fn take_staging(&mut self, staging: IoBuf) {
        self.staging = Some(staging);
    }

    pub(super) const fn give_staging(&mut self) -> Option<IoBuf> {
        self.staging.take()
    }

    /// Fails the job with `status` as soon as no operation of it is in flight; the first status is kept.
    pub(super) fn fail(&mut self, status: Status) {
        self.failed.get_or_insert(status);
    }

    /// Returns true if no window is open, so that the lock on the job's blocks can be released.
    pub(super) fn is_between_windows(&self) -> bool {
        self.step == Step::Between
    }

    const fn position(&self) -> u64 {
        self.transfer.offset + self.done_bytes as u64
    }

    fn left(&self) -> usize {
        self.transfer.buffer.bytes() - self.done_bytes
    }

    /// Returns the next action. Called only while no operation of the job is in flight.
    pub(super) fn next(&self) -> Next {
        if let Some(status) = self.failed {
            return Next::Done(Err(status));
        }
        if self.left() == 0 {
            return Next::Done(Ok(()));
        }
        let (buffer, offset) = (self.transfer.buffer.slice(self.done_bytes, self.left()), self.position());
        // A short count may leave an aligned transfer at an unaligned offset: the rest goes through staging.
        if self.step == Step::Between && (self.file.direct().is_err() || file::is_aligned(&buffer, offset)) {
            return Next::Direct { write: self.transfer.write, buffer, offset };
        }
        let (offset, bytes, _) = self.window();
        Next::Staging { offset, bytes, write: self.transfer.write }
    }

    /// Returns the window of whole blocks around the part to move next: its offset, its length, and the number of bytes
    /// of the transfer in it.
    fn window(&self) -> (u64, usize, usize) {
        let block = BLOCK_BYTES as u64;
        let start = self.position() / block * block;
        let lead = (self.position() - start) as usize;
        let payload = self.left().min(STAGING_BYTES);
        (start, (lead + payload).next_multiple_of(BLOCK_BYTES), payload)
    }

    /// Returns the operation on staging that [`Next::Staging`] announced.
    pub(super) fn staged_operation(&mut self) -> (bool, IoBuf, u64) {
        let (start, bytes, payload) = self.window();
        let whole = (self.position() - start) == 0 && payload == bytes;
        let staging = self.staging.as_ref().expect("staging was lent before");
        if self.step == Step::Between {
            // A write of whole blocks does not need their old contents.
            self.step = if self.transfer.write && whole { Step::Writing(0) } else { Step::Reading(0) };
            if self.step == Step::Writing(0) {
                self.copy_into_staging();
            }
        }
        match self.step {
            Step::Reading(at) => (false, staging.slice(at, bytes - at), start + at as u64),
            Step::Writing(at) => (true, staging.slice(at, bytes - at), start + at as u64),
            Step::Between => unreachable!("a window was just opened"),
        }
    }

    fn copy_into_staging(&self) {
        let (start, _, payload) = self.window();
        let lead = (self.position() - start) as usize;
        let staging = self.staging.as_ref().expect("staging was lent before");
        copy(&staging.slice(lead, payload), &self.transfer.buffer.slice(self.done_bytes, payload));
    }

    /// Handles the result of an operation: a byte count, or a negative errno.
    ///
    /// # Errors
    /// The failure; the job then ends with a status.
    pub(super) fn moved(&mut self, result: i32) -> Result<(), MoveError> {
        let moved = match result {
            bytes @ 1.. => bytes as usize,
            0 => {
                self.fail(Status::OutOfRange);
                self.step = Step::Between;
                let (path, at) = self.place();
                return Err(MoveError::Ended { path, at, bytes: self.file.bytes() });
            }
            errno => return self.refused(-errno),
        };
        let (_, bytes, payload) = self.window();
        match self.step {
            Step::Between => {
                self.done_bytes += moved;
                self.idle_operations = 0;
            }
            // Direct I/O resumes at a block boundary.
            Step::Reading(at) if at + moved < bytes => return self.resume(Step::Reading, at, moved),
            Step::Writing(at) if at + moved < bytes => return self.resume(Step::Writing, at, moved),
            Step::Reading(_) if self.transfer.write => {
                self.copy_into_staging();
                self.step = Step::Writing(0);
            }
            Step::Reading(_) => {
                let lead = (self.position() % BLOCK_BYTES as u64) as usize;
                let staging = self.staging.as_ref().expect("staging was lent before");
                copy(&self.transfer.buffer.slice(self.done_bytes, payload), &staging.slice(lead, payload));
                self.done_bytes += payload;
                self.step = Step::Between;
            }
            Step::Writing(_) => {
                self.done_bytes += payload;
                self.step = Step::Between;
            }
        }
        Ok(())
    }

    /// Resumes a partly moved window: the next operation starts at the last block boundary.
    fn resume(&mut self, step: fn(usize) -> Step, at: usize, moved: usize) -> Result<(), MoveError> {
        let to = (at + moved) / BLOCK_BYTES * BLOCK_BYTES;
        if to > at || self.may_retry() {
            self.step = step(to.max(at));
            return Ok(());
        }
        self.fail(Status::OutOfRange);
        self.step = Step::Between;
        let (path, at) = self.place();
        Err(MoveError::Short { path, at, moved })
    }

    /// Returns the file's path and the position in it, for errors.
    fn place(&self) -> (PathBuf, u64) {
        (self.file.path().to_owned(), self.position())
    }

    const fn may_retry(&mut self) -> bool {
        self.idle_operations += 1;
        self.idle_operations <= IDLE_OPERATIONS_MOST
    }

    fn refused(&mut self, errno: i32) -> Result<(), MoveError> {
        let source = io::Error::from_raw_os_error(errno);
        let passing = matches!(source.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
        if passing && self.may_retry() {
            return Ok(());
        }
        self.fail(match source.kind() {
            io::ErrorKind::StorageFull => Status::NoSpace,
            io::ErrorKind::PermissionDenied => Status::Unauthorized,
            _ => Status::Corrupt,
        });
        self.step = Step::Between;
        let (path, at) = self.place();
        Err(MoveError::Refused { path, at, source })
    }
}

fn copy(to: &IoBuf, from: &IoBuf) {
    Region::copy_between(to.region(), to.offset(), from.region(), from.offset(), from.bytes());
}

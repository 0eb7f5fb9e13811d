//! Queueing operations: each builds its entry, and puts what the kernel will touch into the table first.

use super::operations::{Held, INTERNAL};
use super::{Ring, RingFull};
use crate::region::IoBuf;
use io_uring::squeue::Entry;
use io_uring::{opcode, types::Fd};
use std::os::fd::{AsRawFd, BorrowedFd};

/// The longest single transfer: results are 32-bit signed, and the kernel moves no more than 2 GiB at once.
const MAX_TRANSFER_BYTES: usize = 1 << 30;

pub(super) fn length(buffer: &IoBuf) -> u32 {
    buffer.bytes().min(MAX_TRANSFER_BYTES) as u32
}

pub(super) fn offset_limit(file_offset: u64) {
    // The largest value means "the file's own position" to the kernel, which we never want.
    assert!(file_offset <= i64::MAX as u64, "file offset {file_offset}");
}

impl Ring {
    /// Reports each time the descriptor becomes readable or its peer hangs up, until cancelled (multishot). The
    /// result is the `poll` events.
    pub fn poll_readable(&mut self, fd: BorrowedFd<'_>, token: u64) -> Result<(), RingFull> {
        let events = (libc::POLLIN | libc::POLLRDHUP) as u32;
        let entry = opcode::PollAdd::new(Fd(fd.as_raw_fd()), events).multi(true);
        self.start(token, None, entry.build())
    }

    /// Reads from a file at an offset; the result is the bytes read, short at the end of the file.
    pub fn read_at(&mut self, fd: BorrowedFd<'_>, buffer: IoBuf, file_offset: u64, token: u64) -> Result<(), RingFull> {
        offset_limit(file_offset);
        let (fd, address, bytes) = (Fd(fd.as_raw_fd()), buffer.pointer(), length(&buffer));
        let entry = match self.fixed.place_of(&buffer) {
            Some(place) => opcode::ReadFixed::new(fd, address, bytes, place).offset(file_offset).build(),
            None => opcode::Read::new(fd, address, bytes).offset(file_offset).build(),
        };
        self.start(token, Some(buffer), entry)
    }

    /// Writes to a file at an offset; the result is the bytes written.
    pub fn write_at(
        &mut self,
        fd: BorrowedFd<'_>,
        buffer: IoBuf,
        file_offset: u64,
        token: u64,
    ) -> Result<(), RingFull> {
        offset_limit(file_offset);
        let (fd, address, bytes) = (Fd(fd.as_raw_fd()), buffer.pointer(), length(&buffer));
        let entry = match self.fixed.place_of(&buffer) {
            Some(place) => opcode::WriteFixed::new(fd, address, bytes, place).offset(file_offset).build(),
            None => opcode::Write::new(fd, address, bytes).offset(file_offset).build(),
        };
        self.start(token, Some(buffer), entry)
    }

    /// Cancels all operations of a token. Each still completes, with `-ECANCELED` unless it was faster; the
    /// cancellation itself reports nothing. On [`RingFull`] some may be cancelled already; asking again is harmless.
    /// Looks at every operation in flight.
    pub fn cancel(&mut self, token: u64) -> Result<(), RingFull> {
        let targets: Vec<u64> = self.operations.of_token(token).collect();
        for target in targets {
            self.make_queue_room()?;
            self.push(&opcode::AsyncCancel::new(target).build().user_data(INTERNAL));
        }
        Ok(())
    }

    pub(super) fn start(&mut self, token: u64, held: impl Into<Held>, entry: Entry) -> Result<(), RingFull> {
        self.make_room()?;
        let user_data = self.operations.insert(token, self.pushed, held);
        self.push(&entry.user_data(user_data));
        Ok(())
    }

    fn make_room(&mut self) -> Result<(), RingFull> {
        // Nothing is submitted any more by a ring that has ended.
        if self.ended || self.operations.is_full() {
            return Err(RingFull);
        }
        self.make_queue_room()
    }

    fn make_queue_room(&mut self) -> Result<(), RingFull> {
        if self.uring.submission().is_full() {
            // Whatever goes wrong here goes wrong again in the next poll, which reports it.
            self.submit().ok();
            if self.uring.submission().is_full() {
                return Err(RingFull);
            }
        }
        Ok(())
    }

    fn push(&mut self, entry: &Entry) {
        // SAFETY: every address in the entry points into something that the operation table holds until the
        // operation's last completion (`start` put it there), or the entry has none (cancellation).
        let pushed = unsafe { self.uring.submission().push(entry) };
        assert!(pushed.is_ok(), "room was made before");
        self.pushed += 1;
    }
}

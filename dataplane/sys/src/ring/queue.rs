//! Queueing operations: each builds its entry, and puts what the kernel will touch into the table first.

use super::operations::KernelHold;
use super::{Ring, RingFull};
use crate::region::IoBuf;
use io_uring::{cqueue, opcode, squeue, types::Fd};
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
}

impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Ring<S, C> {
    pub(super) fn start(&mut self, token: u64, held: impl Into<KernelHold>, mut entry: S) -> Result<(), RingFull> {
        self.make_room()?;
        let user_data = self.operations.insert(token, self.pushed, held);
        entry.set_user_data(user_data);
        self.push(&entry);
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

    fn push(&mut self, entry: &S) {
        // SAFETY: every address in the entry points into something that the operation table holds until the
        // operation's completion: `start` put it there.
        let pushed = unsafe { self.uring.submission().push(entry) };
        assert!(pushed.is_ok(), "room was made before");
        self.pushed += 1;
    }
}

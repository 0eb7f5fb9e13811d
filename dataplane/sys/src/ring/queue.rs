//! Queueing operations: each builds its entry, and puts what the kernel will touch into the table first.

use super::operations::{Holds, INTERNAL, MAX_VECTORS, Message, Stable};
use super::{Ring, RingFull};
use crate::net;
use crate::region::IoBuf;
use io_uring::squeue::Entry;
use io_uring::{opcode, types::Fd};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The longest single transfer: results are 32-bit signed, and the kernel moves no more than 2 GiB at once.
const MAX_TRANSFER_BYTES: usize = 1 << 30;

/// `IORING_RECVSEND_POLL_FIRST` of the kernel's interface.
const POLL_FIRST: u16 = 1;

fn length(buffer: &IoBuf) -> u32 {
    buffer.bytes().min(MAX_TRANSFER_BYTES) as u32
}

fn offset_limit(file_offset: u64) {
    // The largest value means "the file's own position" to the kernel, which we never want.
    assert!(file_offset <= i64::MAX as u64, "file offset {file_offset}");
}

impl Ring {
    /// Receives into the buffer. The result is the bytes received, 0 at the end of the stream; with `wait_all` it
    /// is short only at the end of the stream, on an error, or above 1 GiB.
    pub fn recv(&mut self, fd: BorrowedFd<'_>, buffer: IoBuf, wait_all: bool, token: u64) -> Result<(), RingFull> {
        let flags = if wait_all { libc::MSG_WAITALL } else { 0 };
        let entry = opcode::Recv::new(Fd(fd.as_raw_fd()), buffer.pointer(), length(&buffer));
        self.start(token, Holds::Buffer(buffer), entry.flags(flags).build())
    }

    /// As [`Ring::recv`] of whatever comes, where nothing is likely to be there yet: waits for the descriptor to become
    /// readable without trying first, which spares the kernel a futile attempt.
    pub fn recv_when_readable(&mut self, fd: BorrowedFd<'_>, buffer: IoBuf, token: u64) -> Result<(), RingFull> {
        let entry = opcode::Recv::new(Fd(fd.as_raw_fd()), buffer.pointer(), length(&buffer));
        self.start(token, Holds::Buffer(buffer), entry.ioprio(POLL_FIRST).build())
    }

    /// Sends the buffers, in order, as one operation; at least one and at most [`MAX_VECTORS`]. The result is the
    /// bytes sent, short only on an error or above 1 GiB. A closed peer is `-EPIPE`, never a signal.
    pub fn send(&mut self, fd: BorrowedFd<'_>, buffers: &[IoBuf], token: u64) -> Result<(), RingFull> {
        assert!((1..=MAX_VECTORS).contains(&buffers.len()), "{} buffers to send", buffers.len());
        let fd = Fd(fd.as_raw_fd());
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        if let [buffer] = buffers {
            let entry = opcode::Send::new(fd, buffer.pointer(), length(buffer));
            return self.start(token, Holds::Buffer(buffer.clone()), entry.flags(flags).build());
        }
        self.make_room()?;
        let message = self.operations.message(buffers);
        let entry = opcode::SendMsg::new(fd, Message::header(&message)).flags(flags as u32);
        self.start(token, Holds::Message(message), entry.build())
    }

    /// Accepts connections until cancelled (multishot). Each completion with a result >= 0 stands for a socket to
    /// fetch with [`Ring::accepted`]; it is nonblocking and closed on exec.
    pub fn accept(&mut self, listener: BorrowedFd<'_>, token: u64) -> Result<(), RingFull> {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let entry = opcode::AcceptMulti::new(Fd(listener.as_raw_fd())).flags(flags);
        self.start(token, Holds::Sockets, entry.build())
    }

    /// Connects a socket; the result is 0.
    pub fn connect(&mut self, fd: BorrowedFd<'_>, address: SocketAddr, token: u64) -> Result<(), RingFull> {
        let (storage, bytes) = net::to_storage(address);
        let storage = Stable::new(storage);
        let entry = opcode::Connect::new(Fd(fd.as_raw_fd()), storage.pointer().cast(), bytes);
        self.start(token, Holds::Address(storage), entry.build())
    }

    /// Reports each time the descriptor becomes readable or its peer hangs up, until cancelled (multishot). The
    /// result is the `poll` events.
    pub fn poll_readable(&mut self, fd: BorrowedFd<'_>, token: u64) -> Result<(), RingFull> {
        let events = (libc::POLLIN | libc::POLLRDHUP) as u32;
        let entry = opcode::PollAdd::new(Fd(fd.as_raw_fd()), events).multi(true);
        self.start(token, Holds::Nothing, entry.build())
    }

    /// Reads from a file at an offset; the result is the bytes read, short at the end of the file.
    pub fn read_at(&mut self, fd: BorrowedFd<'_>, buffer: IoBuf, file_offset: u64, token: u64) -> Result<(), RingFull> {
        offset_limit(file_offset);
        let (fd, address, bytes) = (Fd(fd.as_raw_fd()), buffer.pointer(), length(&buffer));
        let entry = match self.fixed.place_of(&buffer) {
            Some(place) => opcode::ReadFixed::new(fd, address, bytes, place).offset(file_offset).build(),
            None => opcode::Read::new(fd, address, bytes).offset(file_offset).build(),
        };
        self.start(token, Holds::Buffer(buffer), entry)
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
        self.start(token, Holds::Buffer(buffer), entry)
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

    fn start(&mut self, token: u64, holds: Holds, entry: Entry) -> Result<(), RingFull> {
        self.make_room()?;
        let user_data = self.operations.insert(token, self.pushed, holds);
        self.push(&entry.user_data(user_data));
        Ok(())
    }

    fn make_room(&mut self) -> Result<(), RingFull> {
        if self.operations.is_full() {
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

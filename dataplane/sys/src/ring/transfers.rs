//! Reads, writes and flushes of files and devices: of one buffer, or scattered and gathered on a registered file. Each
//! builds its entry, and hands its memory to the ring.

use super::operations::{KernelHold, Vectors};
use super::{RegisteredFile, Ring, RingFull};
use crate::region::IoBuf;
use io_uring::squeue::{Entry, Flags};
use io_uring::types::Fd;
use io_uring::{opcode, types};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Limit of the pieces of one transfer.
const PIECES_MOST: usize = 1024;

/// Largest single transfer in bytes: results are 32-bit signed, and the kernel moves no more than 2 GiB at once.
const MAX_TRANSFER_BYTES: usize = 1 << 30;

pub(super) fn length(buffer: &IoBuf) -> u32 {
    buffer.bytes().min(MAX_TRANSFER_BYTES) as u32
}

pub(super) fn offset_limit(file_offset: u64) {
    // The largest value means "the file's own position" to the kernel.
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

    /// Reads a contiguous range of a file into these pieces, in order; the result is the bytes read.
    ///
    /// # Errors
    /// When the ring is full.
    pub fn scatter_at(
        &mut self,
        file: RegisteredFile,
        pieces: &[IoBuf],
        file_offset: u64,
        token: u64,
    ) -> Result<(), RingFull> {
        offset_limit(file_offset);
        let fd = self.files.place(file);
        if let [piece] = pieces
            && let Some(place) = self.fixed.place_of(piece)
        {
            let entry = opcode::ReadFixed::new(fd, piece.pointer(), length(piece), place).offset(file_offset).build();
            return self.start_on_file(token, KernelHold::One(piece.clone()), entry);
        }
        let vectors = vectors(pieces);
        let (list, count) = vectors.list();
        let entry = opcode::Readv::new(fd, list, count).offset(file_offset).build();
        self.start_on_file(token, KernelHold::Several(vectors), entry)
    }

    /// Writes these pieces, in order, to a contiguous range of a file; the result is the bytes written. With `durable`
    /// the write completes only when it survives a power failure.
    ///
    /// # Errors
    /// When the ring is full.
    pub fn gather_at(
        &mut self,
        file: RegisteredFile,
        pieces: &[IoBuf],
        file_offset: u64,
        durable: bool,
        token: u64,
    ) -> Result<(), RingFull> {
        offset_limit(file_offset);
        let fd = self.files.place(file);
        let flags = if durable { libc::RWF_DSYNC } else { 0 };
        if let [piece] = pieces
            && let Some(place) = self.fixed.place_of(piece)
        {
            let entry = opcode::WriteFixed::new(fd, piece.pointer(), length(piece), place);
            let entry = entry.offset(file_offset).rw_flags(flags).build();
            return self.start_on_file(token, KernelHold::One(piece.clone()), entry);
        }
        let vectors = vectors(pieces);
        let (list, count) = vectors.list();
        let entry = opcode::Writev::new(fd, list, count).offset(file_offset).rw_flags(flags).build();
        self.start_on_file(token, KernelHold::Several(vectors), entry)
    }

    /// Makes the writes to a file that have completed durable (`fdatasync`).
    ///
    /// # Errors
    /// When the ring is full.
    pub fn sync_data(&mut self, file: RegisteredFile, token: u64) -> Result<(), RingFull> {
        let entry = opcode::Fsync::new(self.files.place(file)).flags(types::FsyncFlags::DATASYNC).build();
        self.start_on_file(token, KernelHold::Nothing, entry)
    }

    fn start_on_file(&mut self, token: u64, held: KernelHold, entry: Entry) -> Result<(), RingFull> {
        self.start(token, held, entry.flags(Flags::FIXED_FILE))
    }
}

fn vectors(pieces: &[IoBuf]) -> Box<Vectors> {
    assert!(!pieces.is_empty() && pieces.len() <= PIECES_MOST, "a transfer of {} pieces", pieces.len());
    Vectors::of(pieces)
}

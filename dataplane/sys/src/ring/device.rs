//! Operations on devices and files that are registered: gathered and scattered transfers, durable writes, flushes.
//!
//! A registered file spares the kernel looking its descriptor up for each operation, and stays open for the ring
//! whatever becomes of the descriptor.

use super::operations::{KernelHold, Vectors};
use super::queue::{length, offset_limit};
use super::{Ring, RingFull};
use crate::region::IoBuf;
use io_uring::squeue::{Entry, Flags};
use io_uring::{cqueue, opcode, squeue, types};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Files that can be registered with a ring.
const FILES: u32 = 16;
/// The most pieces of one transfer.
const PIECES_MOST: usize = 1024;

/// How many files are registered.
#[derive(Default)]
pub(super) struct RegisteredFiles {
    count: u32,
}

/// A file that a ring knows. Of no use with another ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegisteredFile(u32);

impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Ring<S, C> {
    /// Makes a file known to the ring for good.
    ///
    /// # Errors
    /// When the kernel refuses, or too many are.
    pub fn register_file(&mut self, fd: BorrowedFd<'_>) -> io::Result<RegisteredFile> {
        let place = self.files.count;
        if place == FILES {
            return Err(io::Error::other(format!("{FILES} files are registered with the ring, which is the limit")));
        }
        if place == 0 {
            self.uring.submitter().register_files_sparse(FILES)?;
        }
        self.uring.submitter().register_files_update(place, &[fd.as_raw_fd()])?;
        self.files.count += 1;
        Ok(RegisteredFile(place))
    }
}

impl Ring {
    /// Reads a contiguous range of a file into these pieces, in order; the result is the bytes read.
    ///
    /// # Errors
    /// When the ring has no room.
    pub fn scatter_at(
        &mut self,
        file: RegisteredFile,
        pieces: &[IoBuf],
        file_offset: u64,
        token: u64,
    ) -> Result<(), RingFull> {
        offset_limit(file_offset);
        let fd = self.place(file);
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
    /// it completes only when they would survive a power failure.
    ///
    /// # Errors
    /// When the ring has no room.
    pub fn gather_at(
        &mut self,
        file: RegisteredFile,
        pieces: &[IoBuf],
        file_offset: u64,
        durable: bool,
        token: u64,
    ) -> Result<(), RingFull> {
        offset_limit(file_offset);
        let fd = self.place(file);
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

    /// Makes durable what was written to a file by operations that are over (`fdatasync`).
    ///
    /// # Errors
    /// When the ring has no room.
    pub fn sync_data(&mut self, file: RegisteredFile, token: u64) -> Result<(), RingFull> {
        let entry = opcode::Fsync::new(self.place(file)).flags(types::FsyncFlags::DATASYNC).build();
        self.start_on_file(token, KernelHold::Nothing, entry)
    }

    fn place(&self, file: RegisteredFile) -> types::Fd {
        assert!(file.0 < self.files.count, "a file of another ring");
        types::Fd(file.0 as i32)
    }

    fn start_on_file(&mut self, token: u64, held: KernelHold, entry: Entry) -> Result<(), RingFull> {
        self.start(token, held, entry.flags(Flags::FIXED_FILE))
    }
}

fn vectors(pieces: &[IoBuf]) -> Box<Vectors> {
    assert!(!pieces.is_empty() && pieces.len() <= PIECES_MOST, "a transfer of {} pieces", pieces.len());
    Vectors::of(pieces)
}

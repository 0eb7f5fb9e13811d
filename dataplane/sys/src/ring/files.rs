//! Registered files of a ring: save the kernel the descriptor lookup of each operation. They stay open for the ring
//! even if the descriptor is closed.

use io_uring::Submitter;
use io_uring::types::Fd;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Limit of files registered with a ring.
const FILES: u32 = 16;

/// Number of registered files.
#[derive(Default)]
pub(super) struct RegisteredFiles {
    count: u32,
}

/// A file registered with a ring. Invalid for other rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegisteredFile(u32);

impl RegisteredFiles {
    /// See [`Ring::register_file`](super::Ring::register_file).
    pub(super) fn register(&mut self, fd: BorrowedFd<'_>, kernel: &Submitter<'_>) -> io::Result<RegisteredFile> {
        let place = self.count;
        if place == FILES {
            return Err(io::Error::other(format!("{FILES} files are registered with the ring, which is the limit")));
        }
        if place == 0 {
            kernel.register_files_sparse(FILES)?;
        }
        kernel.register_files_update(place, &[fd.as_raw_fd()])?;
        self.count += 1;
        Ok(RegisteredFile(place))
    }

    /// Returns its index in the kernel's table.
    pub(super) fn place(&self, file: RegisteredFile) -> Fd {
        assert!(file.0 < self.count, "a file of another ring");
        Fd(file.0 as i32)
    }
}

//! Events: an eventfd that wakes the thread that polls it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Creates a nonblocking eventfd that is closed on exec.
pub fn event_fd() -> io::Result<OwnedFd> {
    // SAFETY: creates a new descriptor.
    match unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just created it, and this is its only owner.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

/// An eventfd: readable from a signal until it is drained. A peer process may have the same one.
#[derive(Debug)]
pub(crate) struct Event {
    fd: OwnedFd,
}

impl Event {
    #[cfg_attr(loom, expect(dead_code, reason = "models have events of their own"))]
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { fd: event_fd()? })
    }

    /// Adds one to the count. A peer with the same descriptor may have made it blocking and full, so its state is
    /// checked first. A full or failed eventfd is readable too, so no error needs to be reported.
    #[cfg_attr(loom, expect(dead_code, reason = "models have events of their own"))]
    pub(crate) fn signal(&self) {
        let mut query = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one entry, which outlives the call.
        let ready = unsafe { libc::poll(&raw mut query, 1, 0) };
        if ready == 1 && query.revents & libc::POLLOUT != 0 {
            let one = 1u64.to_ne_bytes();
            // SAFETY: writes from eight bytes of this function.
            unsafe { libc::write(self.fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// Resets the count without blocking, whatever mode a peer has set.
    #[cfg_attr(loom, expect(dead_code, reason = "models have events of their own"))]
    pub(crate) fn drain(&self) {
        let mut count = [0u8; 8];
        let vector = libc::iovec { iov_base: count.as_mut_ptr().cast(), iov_len: count.len() };
        // SAFETY: reads into eight bytes of this function.
        unsafe { libc::preadv2(self.fd.as_raw_fd(), &raw const vector, 1, -1, libc::RWF_NOWAIT) };
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<OwnedFd> for Event {
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

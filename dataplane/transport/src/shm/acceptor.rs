//! The shard's Unix socket, at which clients call.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;

use kvplane_sys::{Interest, Poller, stream};

use crate::token::{Source, Token};

/// The listener, if there is one.
pub(super) struct Acceptor {
    listener: Option<UnixListener>,
    /// The kernel refused to accept.
    again: bool,
}

impl Acceptor {
    pub(super) const fn new() -> Self {
        Self { listener: None, again: false }
    }

    /// Accepts connections from this listener, which is nonblocking.
    pub(super) fn listen(&mut self, poller: &Poller, listener: UnixListener) -> io::Result<()> {
        let token = Token { source: Source::ShmListener, index: 0, generation: 0 };
        poller.add(listener.as_fd(), token.to_bits(), Interest::ReadableEdge)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// The next that waits there.
    pub(super) fn accept(&mut self) -> Option<OwnedFd> {
        let accepted = stream::accept(self.listener.as_ref()?.as_fd());
        // Nothing announces those that wait a second time.
        self.again = accepted.is_err();
        accepted.ok().flatten()
    }

    /// Whether somebody may wait whom the kernel did not let us accept.
    pub(super) const fn must_try_again(&self) -> bool {
        self.again
    }
}

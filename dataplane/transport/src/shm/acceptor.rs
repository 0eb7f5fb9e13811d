//! Listener of a shard's Unix socket, to which clients connect.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;

use kvplane_sys::{Interest, Poller, stream};

use crate::token::{Source, Token};

/// Listener of a shard, if there is one.
pub(super) struct Acceptor {
    listener: Option<UnixListener>,
    /// True after the kernel refused to accept.
    again: bool,
}

impl Acceptor {
    pub(super) const fn new() -> Self {
        Self { listener: None, again: false }
    }

    /// Starts to accept connections of this listener, which is nonblocking.
    pub(super) fn listen(&mut self, poller: &Poller, listener: UnixListener) -> io::Result<()> {
        let token = Token { source: Source::ShmListener, index: 0, generation: 0 };
        poller.add(listener.as_fd(), token.to_bits(), Interest::ReadableEdge)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// Accepts the next pending connection.
    pub(super) fn accept(&mut self) -> Option<OwnedFd> {
        let accepted = stream::accept(self.listener.as_ref()?.as_fd());
        // The edge-triggered poller does not report pending connections again.
        self.again = accepted.is_err();
        accepted.ok().flatten()
    }

    /// Returns true if connections may be pending that the kernel refused to accept.
    pub(super) const fn must_try_again(&self) -> bool {
        self.again
    }
}

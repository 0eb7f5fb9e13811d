//! Listener of a shard, with a backoff after the kernel refused to accept.

use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use kvplane_sys::{Interest, Poller, stream};

use crate::token::{Source, Token};

/// Backoff after the kernel refused to accept. A parked host wakes twice a second at least.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Limit of connections accepted at once; the poller reports the remaining ones again.
const ACCEPTED_AT_ONCE: usize = 64;

const LISTENER: Token = Token { source: Source::TcpListener, index: 0, generation: 0 };

/// Listener of a shard, if there is one.
pub(super) struct Acceptor {
    listener: Option<TcpListener>,
    /// End of the backoff, after the kernel refused to accept.
    after: Option<Instant>,
}

impl Acceptor {
    pub(super) const fn new() -> Self {
        Self { listener: None, after: None }
    }

    /// Starts to accept connections of this listener, which is nonblocking.
    pub(super) fn listen(&mut self, poller: &Poller, listener: TcpListener) -> std::io::Result<()> {
        poller.add(listener.as_fd(), LISTENER.to_bits(), Interest::Readable)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// Accepts pending connections.
    pub(super) fn accept(&mut self, poller: &Poller) -> Vec<OwnedFd> {
        let mut accepted = Vec::new();
        let Some(listener) = &self.listener else { return accepted };
        let listener = listener.as_fd();
        while accepted.len() < ACCEPTED_AT_ONCE {
            match stream::accept(listener) {
                Ok(Some(socket)) => accepted.push(socket),
                Ok(None) => break,
                Err(_) => {
                    // Out of descriptors, the next attempt would fail too: accepting pauses until some may have been
                    // closed.
                    let _ = poller.remove(listener);
                    self.after = Some(Instant::now() + ACCEPT_PAUSE);
                    break;
                }
            }
        }
        accepted
    }

    /// Resumes accepting when the backoff is over.
    pub(super) fn resume(&mut self, poller: &Poller) {
        let (Some(at), Some(listener)) = (self.after, &self.listener) else { return };
        if at <= Instant::now() {
            let watched = poller.add(listener.as_fd(), LISTENER.to_bits(), Interest::Readable).is_ok();
            self.after = (!watched).then(|| Instant::now() + ACCEPT_PAUSE);
        }
    }
}

//! Connection of the handshake daemon: a request, its reply, the peer's end. It has no clock and never waits: it is
//! advanced when its socket is ready, and does a bounded amount of work each time.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use crate::frame::{self, HEAD_BYTES, Head, Kind};
use crate::notice::{self, Notice};
use crate::published::Local;
use crate::rdma_handshake::{self, RdmaHandshake};

/// Bytes of one read.
const READ_BYTES: usize = 16 << 10;
/// Bytes moved before other connections have their turn.
const TURN_BYTES: usize = 256 << 10;

/// Stream whose writing half can be closed.
pub(crate) trait Duplex: Read + Write {
    /// Closes the writing half.
    fn end_writing(&mut self);
}

impl Duplex for TcpStream {
    fn end_writing(&mut self) {
        // An error means that the peer is gone, which the next read reports.
        let _ = self.shutdown(Shutdown::Write);
    }
}

/// Outcome of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionOutcome {
    /// A reply of the request's type.
    Typed(Kind),
    /// A notice was refused: there was no room for it, or it was malformed.
    RefusedNotice,
    /// An RDMA connection was refused, requested with or without a type.
    RefusedConnection,
}

/// Next step of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Wait until the socket is ready again.
    Wait,
    /// Continue at once, after other connections had their turn.
    Again,
    /// The peer has finished or is gone.
    Close,
    /// The peer does not speak the protocol.
    Malformed,
}

/// Connection of a peer.
pub(crate) struct Connection<S> {
    stream: S,
    stage: Stage,
    /// Outcome, once the reply has been sent completely; the daemon takes it for its counters.
    answered: Option<ConnectionOutcome>,
}

enum Stage {
    Head {
        bytes: [u8; HEAD_BYTES],
        filled: usize,
    },
    Body {
        request: Option<Kind>,
        left: usize,
        kept: Vec<u8>,
    },
    Reply {
        reply: Reply,
        sent: usize,
    },
    /// The reply was sent. Further bytes of the peer are discarded up to a limit, for closing on unread bytes would
    /// reset the connection and could lose the reply.
    Drain {
        left: usize,
    },
}

struct Reply {
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    body: Arc<str>,
    answered: ConnectionOutcome,
}

impl Reply {
    fn rest(&self, sent: usize) -> &[u8] {
        match self.head[..self.head_bytes].get(sent..) {
            Some(rest) if !rest.is_empty() => rest,
            _ => &self.body.as_bytes()[sent - self.head_bytes..],
        }
    }
}

impl<S: Duplex> Connection<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, stage: Stage::Head { bytes: [0; HEAD_BYTES], filled: 0 }, answered: None }
    }

    /// Returns the bytes of memory held for the request.
    pub(crate) fn held_bytes(&self) -> usize {
        match &self.stage {
            Stage::Body { kept, .. } => kept.capacity(),
            _ => 0,
        }
    }

    /// Takes the outcome if the request has been answered.
    pub(crate) fn take_answered(&mut self) -> Option<ConnectionOutcome> {
        self.answered.take()
    }

    /// Advances the connection. Returns the next step, and true if any byte moved.
    pub(crate) fn advance(&mut self, local: &dyn Local, max_bytes: usize) -> (Step, bool) {
        let mut moved = 0;
        while moved < TURN_BYTES {
            let done = match &self.stage {
                Stage::Reply { .. } => self.write(max_bytes),
                _ => self.read(local, max_bytes),
            };
            match done {
                Ok(bytes) => moved += bytes,
                Err(step) => return (step, moved > 0),
            }
        }
        (Step::Again, true)
    }

    fn write(&mut self, max_bytes: usize) -> Result<usize, Step> {
        let Stage::Reply { reply, sent } = &mut self.stage else { return Err(Step::Close) };
        let rest = reply.rest(*sent);
        let bytes = if rest.is_empty() { 0 } else { outcome(self.stream.write(rest))? };
        *sent += bytes;
        if reply.rest(*sent).is_empty() {
            self.answered = Some(reply.answered);
            self.stream.end_writing();
            self.stage = Stage::Drain { left: max_bytes };
        }
        Ok(bytes)
    }

    fn read(&mut self, local: &dyn Local, max_bytes: usize) -> Result<usize, Step> {
        let mut room = [0; READ_BYTES];
        let wanted = match &self.stage {
            Stage::Head { filled, .. } => HEAD_BYTES - filled,
            Stage::Body { left, .. } | Stage::Drain { left } => *left,
            Stage::Reply { .. } => 0,
        };
        let wanted = wanted.min(READ_BYTES);
        if wanted == 0 {
            return Err(Step::Close);
        }
        let bytes = outcome(self.stream.read(&mut room[..wanted]))?;
        let got = &room[..bytes];
        match &mut self.stage {
            Stage::Head { bytes: head, filled } => {
                head[*filled..*filled + bytes].copy_from_slice(got);
                *filled += bytes;
                if *filled == HEAD_BYTES {
                    self.stage = begin(*head, max_bytes)?;
                }
            }
            Stage::Body { request, left, kept } => {
                *left -= bytes;
                // Of the other requests only the type matters, so that they cost no memory.
                let most = match request {
                    Some(Kind::Notify) => usize::MAX,
                    Some(Kind::Connection) | None => rdma_handshake::MAX_BYTES + 1,
                    Some(Kind::Metadata | Kind::Probe) => 0,
                };
                kept.extend_from_slice(&got[..bytes.min(most.saturating_sub(kept.len()))]);
            }
            Stage::Drain { left } => *left -= bytes,
            Stage::Reply { .. } => {}
        }
        if let Stage::Body { request, left: 0, kept } = &self.stage {
            self.stage = Stage::Reply { reply: answer(*request, kept, local), sent: 0 };
        }
        Ok(bytes)
    }
}

/// Returns the bytes moved, or the next step if none were.
fn outcome(result: io::Result<usize>) -> Result<usize, Step> {
    match result {
        Ok(0) => Err(Step::Close),
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(Step::Wait),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(Step::Again),
        Err(_) => Err(Step::Close),
    }
}

fn begin(head: [u8; HEAD_BYTES], max_bytes: usize) -> Result<Stage, Step> {
    let (request, left) = match Head::decode(head, max_bytes) {
        Ok(Head::Typed { kind, body_bytes }) => (Some(kind), body_bytes),
        Ok(Head::Untyped { body_bytes }) => (None, body_bytes),
        Err(_) => return Err(Step::Malformed),
    };
    // In a frame without a type, this byte is the first byte of JSON.
    let kept = if request.is_none() { head[HEAD_BYTES - 1..].to_vec() } else { Vec::new() };
    Ok(Stage::Body { request, left, kept })
}

fn answer(request: Option<Kind>, kept: &[u8], local: &dyn Local) -> Reply {
    let (answered, body): (_, Arc<str>) = match request {
        Some(Kind::Connection) | None => {
            let reply = match RdmaHandshake::decode(kept) {
                Err(error) => RdmaHandshake::refused(&error.to_string()),
                Ok(request) => local.connect(&request),
            };
            let refused = !reply.refusal.is_empty();
            let answered =
                if refused { ConnectionOutcome::RefusedConnection } else { ConnectionOutcome::Typed(Kind::Connection) };
            (answered, reply.encode().into())
        }
        Some(kind @ Kind::Metadata) => (ConnectionOutcome::Typed(kind), local.descriptor()),
        Some(kind @ Kind::Probe) => (ConnectionOutcome::Typed(kind), notice::ALIVE.into()),
        Some(kind @ Kind::Notify) => {
            let refusal = match Notice::decode(kept) {
                Err(error) => Some(error.to_string()),
                Ok(notice) => local.notified(notice).err().map(|error| error.to_string()),
            };
            let answered =
                if refusal.is_some() { ConnectionOutcome::RefusedNotice } else { ConnectionOutcome::Typed(kind) };
            (answered, notice::reply_to_notice(refusal.as_deref()).into())
        }
    };
    let mut head = [0; HEAD_BYTES];
    let head_bytes = match request {
        Some(kind) => {
            head = frame::head(kind, body.len());
            HEAD_BYTES
        }
        None => {
            let length = (body.len() as u64).to_le_bytes();
            head[..length.len()].copy_from_slice(&length);
            length.len()
        }
    };
    Reply { head, head_bytes, body, answered }
}

#[cfg(test)]
mod tests;

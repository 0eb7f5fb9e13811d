//! Caller of the handshake daemons of other engines: requests descriptors and RDMA connections, probes, and sends
//! notices.

use std::fmt;
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use crate::descriptor::Descriptor;
use crate::environment::{DEFAULT_CALL_TIMEOUT, DEFAULT_MESSAGE_BYTES, Environment};
use crate::frame::{self, HEAD_BYTES, Head, Kind};
use crate::names::{DEFAULT_PORT, Peer};
use crate::notice::{Notice, TAKEN};
use crate::rdma_handshake::RdmaHandshake;
use crate::timed::{Stage, TimedStream};

/// Bytes of one read; the memory of a reply grows with the bytes that arrive, not with the length that it states.
const PIECE_BYTES: u64 = 64 << 10;

/// Settings for calls of daemons. A call blocks its thread for at most `timeout`; any thread may make it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Deadline of a whole call, from resolving the name to the last byte.
    pub timeout: Duration,
    /// Longest reply.
    pub max_message_bytes: usize,
}

/// Error of a call.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Debug)]
pub struct CallError {
    /// Name of the peer, as the caller gave it.
    pub peer: String,
    /// Stage at which the call failed.
    pub stage: Stage,
    /// Error of the operating system; `None` if the peer's reply is at fault.
    pub source: Option<io::Error>,
    pub reason: String,
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the engine at {} failed while {}: {}", self.peer, self.stage, self.reason)
    }
}

impl std::error::Error for CallError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|error| error as _)
    }
}

impl Default for Caller {
    fn default() -> Self {
        Self { timeout: DEFAULT_CALL_TIMEOUT, max_message_bytes: DEFAULT_MESSAGE_BYTES }
    }
}

impl Caller {
    /// Creates a caller with the limits of the environment.
    #[must_use]
    pub fn new(environment: &Environment) -> Self {
        Self { timeout: environment.call_timeout, max_message_bytes: environment.max_message_bytes }
    }

    /// Requests the descriptor of the segment that `peer` serves. `own` is our descriptor in JSON, which stock engines
    /// send along and ignore; `{}` is sufficient.
    ///
    /// # Errors
    /// See [`CallError`].
    pub fn descriptor(&self, peer: &str, own: &str) -> Result<Descriptor, CallError> {
        let reply = self.call(peer, Kind::Metadata, own)?;
        Descriptor::decode(&reply, self.max_message_bytes)
            .map_err(|error| failed(peer, Stage::Decode, error.to_string()))
    }

    /// Probes `peer`.
    ///
    /// # Errors
    /// See [`CallError`].
    pub fn probe(&self, peer: &str) -> Result<(), CallError> {
        let reply = self.call(peer, Kind::Probe, "{}")?;
        let status = serde_json::from_slice::<serde_json::Value>(&reply).ok();
        let status = status.as_ref().and_then(|reply| reply.get("status")?.as_str());
        if status == Some("success") {
            return Ok(());
        }
        Err(failed(peer, Stage::Decode, format!("its status is {status:?}, not \"success\"")))
    }

    /// Sends a notice to the user of `peer`.
    ///
    /// # Errors
    /// See [`CallError`]; also if the peer refuses the notice. After an error at [`Stage::Receive`] the peer may have
    /// accepted it.
    pub fn notify(&self, peer: &str, notice: &Notice) -> Result<(), CallError> {
        let reply = self.call(peer, Kind::Notify, &notice.encode())?;
        let reply = Notice::decode(&reply).map_err(|error| failed(peer, Stage::Decode, error.to_string()))?;
        if reply.message == TAKEN {
            return Ok(());
        }
        let shown: String = reply.message.chars().take(200).collect();
        Err(failed(peer, Stage::Decode, format!("it refused the notice: {shown:?}")))
    }

    /// Requests an RDMA connection from `peer`, or confirms that our half of one is connected.
    ///
    /// # Errors
    /// See [`CallError`]; also if the peer refuses, with its reason.
    pub fn connect(&self, peer: &str, half: &RdmaHandshake) -> Result<RdmaHandshake, CallError> {
        let reply = self.call(peer, Kind::Connection, &half.encode())?;
        let reply = RdmaHandshake::decode(&reply).map_err(|error| failed(peer, Stage::Decode, error.to_string()))?;
        if reply.refusal.is_empty() {
            return Ok(reply);
        }
        let shown: String = reply.refusal.chars().take(300).collect();
        Err(failed(peer, Stage::Decode, format!("it refused the RDMA connection: {shown:?}")))
    }

    fn call(&self, name: &str, kind: Kind, body: &str) -> Result<Vec<u8>, CallError> {
        let deadline = Instant::now() + self.timeout;
        let peer = Peer::parse(name, DEFAULT_PORT).map_err(|error| failed(name, Stage::Resolve, error.to_string()))?;
        let lost = |(stage, source): (Stage, io::Error)| CallError {
            peer: name.to_owned(),
            stage,
            reason: source.to_string(),
            source: Some(source),
        };
        let mut stream = TimedStream::connect(&peer, deadline).map_err(lost)?;
        stream.write_all(&frame::typed(kind, body)).map_err(|error| lost((Stage::Send, error)))?;
        let mut head = [0; HEAD_BYTES];
        stream.read_exact(&mut head).map_err(|error| lost((Stage::Receive, closed(error))))?;
        let bytes = match Head::decode(head, self.max_message_bytes) {
            Ok(Head::Typed { kind: found, body_bytes }) if found == kind => body_bytes,
            Ok(found) => {
                return Err(failed(name, Stage::Decode, format!("it answers a {kind} request with {found:?}")));
            }
            Err(error) => return Err(failed(name, Stage::Decode, error.to_string())),
        };
        let mut reply = Vec::new();
        while reply.len() < bytes {
            let piece = PIECE_BYTES.min((bytes - reply.len()) as u64);
            let got = (&mut stream).take(piece).read_to_end(&mut reply);
            let got = got.map_err(|error| lost((Stage::Receive, error)))?;
            if (got as u64) < piece {
                let reason = format!("it closed the connection after {} of {bytes} bytes", reply.len());
                return Err(failed(name, Stage::Receive, reason));
            }
        }
        Ok(reply)
    }
}

fn failed(peer: &str, stage: Stage, reason: String) -> CallError {
    CallError { peer: peer.chars().take(300).collect(), stage, source: None, reason }
}

/// Replaces the text "failed to fill whole buffer", which does not tell an operator the cause.
fn closed(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), "it closed the connection without a reply"),
        _ => error,
    }
}

//! Connections with one deadline for all steps: resolving, connecting, each read and write.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::names::{Host, Peer};

/// Most names being resolved at a time. The system's resolver cannot be cancelled, so each has a thread until it
/// answers.
const MAX_RESOLVING: usize = 16;
/// Most addresses of one name that are tried.
const MAX_ADDRESSES: usize = 8;

static RESOLVING: AtomicUsize = AtomicUsize::new(0);

/// Stage of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Reading the peer's name, or looking it up.
    Resolve,
    /// Connecting.
    Connect,
    /// Sending the request.
    Send,
    /// Waiting for the reply.
    Receive,
    /// Reading the reply.
    Decode,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Resolve => "resolving its name",
            Self::Connect => "connecting",
            Self::Send => "sending the request",
            Self::Receive => "waiting for the reply",
            Self::Decode => "reading the reply",
        })
    }
}

/// Connection whose reads and writes end at a deadline.
pub(crate) struct TimedStream {
    stream: TcpStream,
    deadline: Instant,
}

impl TimedStream {
    /// Connects; several addresses of a name share the time.
    pub(crate) fn connect(peer: &Peer, deadline: Instant) -> Result<Self, (Stage, io::Error)> {
        let addresses = resolve(peer, deadline).map_err(|error| (Stage::Resolve, error))?;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        let count = addresses.len();
        for (index, address) in addresses.into_iter().enumerate() {
            let share = remaining(deadline).map_err(|error| (Stage::Connect, error))?;
            let share = share / u32::try_from(count - index).unwrap_or(1);
            // A timeout of 0 is invalid for the system.
            match TcpStream::connect_timeout(&address, share.max(Duration::from_millis(1))) {
                Ok(stream) => {
                    stream.set_nodelay(true).map_err(|error| (Stage::Connect, error))?;
                    return Ok(Self { stream, deadline });
                }
                Err(error) => last = error,
            }
        }
        Err((Stage::Connect, last))
    }
}

/// Returns the time that is left, or an error if there is none.
fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::Error::new(io::ErrorKind::TimedOut, "the deadline has passed")) } else { Ok(left) }
}

/// Converts the error of a socket whose timeout has passed, which is `WouldBlock`.
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, "the deadline has passed"),
        _ => error,
    }
}

impl Read for TimedStream {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(remaining(self.deadline)?))?;
        self.stream.read(to).map_err(timed_out)
    }
}

impl Write for TimedStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(remaining(self.deadline)?))?;
        self.stream.write(from).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Resolves a peer within the deadline: the system's resolver itself has none, so it is called on a thread of its own.
///
/// # Errors
/// If there is no address, or not in time, or the resolver has not answered many earlier requests.
pub fn resolve(peer: &Peer, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    let name = match &peer.host {
        Host::Address(ip) => return Ok(vec![SocketAddr::new(*ip, peer.port)]),
        Host::Name(name) => name.clone(),
    };
    if RESOLVING.fetch_add(1, Ordering::AcqRel) >= MAX_RESOLVING {
        RESOLVING.fetch_sub(1, Ordering::AcqRel);
        let text = format!(
            "{MAX_RESOLVING} names are being resolved already, and the resolver does not answer: check the DNS server"
        );
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
    }
    let (answer, answered) = mpsc::sync_channel(1);
    let port = peer.port;
    let body = move || {
        let found = (name.as_str(), port).to_socket_addrs().map(|found| found.take(MAX_ADDRESSES).collect());
        RESOLVING.fetch_sub(1, Ordering::AcqRel);
        // The caller may have given up.
        let _ = answer.send(found);
    };
    if let Err(error) = std::thread::Builder::new().name("kvplane-resolve".to_owned()).spawn(body) {
        RESOLVING.fetch_sub(1, Ordering::AcqRel);
        return Err(error);
    }
    let passed = |_| io::Error::new(io::ErrorKind::TimedOut, "the resolver did not answer in time");
    answered.recv_timeout(remaining(deadline)?).map_err(passed)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    #[test]
    fn a_silent_peer_ends_at_the_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let peer = Peer::parse(&listener.local_addr().expect("bound").to_string(), 1).expect("a peer");
        let mut stream = TimedStream::connect(&peer, soon()).expect("it listens");
        let error = stream.read(&mut [0; 8]).expect_err("nothing comes");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let mut left = 64 << 20;
        let error = loop {
            match stream.write(&[0; 1 << 16]) {
                Ok(bytes) => left -= bytes,
                Err(error) => break error,
            }
            assert!(left > 1 << 20, "nobody reads");
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn errors_name_their_stage() {
        let closed = {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            listener.local_addr().expect("bound").to_string()
        };
        let peer = Peer::parse(&closed, 1).expect("a peer");
        let later = Instant::now() + Duration::from_secs(20);
        let (stage, error) = TimedStream::connect(&peer, later).err().expect("nobody listens");
        assert_eq!((stage, error.kind()), (Stage::Connect, io::ErrorKind::ConnectionRefused));
        let nobody = Peer::parse("no-such-host.invalid:1", 1).expect("a peer");
        let (stage, _) = TimedStream::connect(&nobody, later).err().expect("it does not exist");
        assert_eq!(stage, Stage::Resolve);
        let past = TimedStream::connect(&peer, Instant::now()).err().expect("too late");
        assert_eq!((past.0, past.1.kind()), (Stage::Connect, io::ErrorKind::TimedOut));
    }
}

//! Client side of the control protocol: one connection to the control plane, with deadlines, retries and backoff.
//!
//! Every call has a deadline that includes connecting. After a failed connection attempt the client backs off; the
//! backoff doubles from failure to failure, with jitter, so that a restarted control plane does not meet all its
//! clients at once. A call that was sent is not retried unless it is idempotent: otherwise its caller learns that the
//! outcome is unknown. A call that was refused as [`RefusalCode::NotReady`] is retried within its deadline, since it
//! had no effect.
//!
//! [`RefusalCode::NotReady`]: crate::error::RefusalCode::NotReady
//!
//! A connection on which a reply is overdue is closed and remade: a control plane that was killed and restarted cannot
//! report that it lost the old connection, and waiting for the idle timeout would cost seconds.
//!
//! Runs on the caller's tokio runtime; an idle client wakes up only to keep the connection alive.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvplane_proto::rng::Rng;
use quinn::{ClosedStream, Connection, ConnectionError, Endpoint, ReadError, ReadToEndError, WriteError};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout, timeout_at};

use crate::codec::{CodecError, HEADER_BYTES, Header, Message, decode, encode};
use crate::error::{CallError, CloseCode, Refusal, from_connection};
use crate::identity::role::{ClusterName, Role};
use crate::identity::{Identity, Trust};
use crate::limits::{LARGE_REQUEST_BYTES, Limits, LimitsError};
use crate::local::LocalCluster;
use crate::message::{Hello, Request, Welcome};
use crate::quic::socket::client_endpoint;
use crate::quic::tls::{TlsError, client_config};

/// Longest wait for QUIC's close frame to be sent.
const GOODBYE: Duration = Duration::from_millis(5);

/// Configuration of a [`Client`]: address, credentials and limits.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ClientConfig {
    /// Address that the control plane listens on.
    pub address: SocketAddr,
    /// Cluster that the control plane must belong to.
    pub cluster: ClusterName,
    /// Authorities of which one must have signed the control plane's certificate.
    pub trust: Trust,
    /// The caller's certificate and key.
    pub identity: Identity,
    /// The caller's program and version, for the control plane's logs.
    pub software: String,
    pub limits: Limits,
}

impl ClientConfig {
    /// The configuration for a control plane that was found locally; none when it published no identity for `role`.
    #[must_use]
    pub fn local(local: &LocalCluster, role: Role, software: &str) -> Option<Self> {
        Some(Self {
            address: local.control,
            cluster: local.cluster.clone(),
            trust: local.trust.clone(),
            identity: local.identity(role)?.clone(),
            software: software.to_owned(),
            limits: Limits::DEFAULT,
        })
    }
}

/// Error of [`Client::new`] and [`Client::connect`].
#[derive(Debug)]
pub enum ConnectError {
    /// The limits contradict each other.
    Limits(LimitsError),
    /// The identity is unusable.
    Tls(TlsError),
    /// No UDP socket could be opened.
    Socket(io::Error),
    /// The first exchange failed.
    Call(CallError),
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limits(error) => error.fmt(f),
            Self::Tls(error) => error.fmt(f),
            Self::Socket(error) => write!(f, "cannot open a UDP socket: {error}"),
            Self::Call(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ConnectError {}

/// The connection, as all clones of a client share it.
struct Link {
    connection: Option<Connection>,
    welcome: Option<Welcome>,
    failures: u32,
    retry_at: Option<Instant>,
    last: Option<CallError>,
    rng: Rng,
}

struct ClientState {
    endpoint: Endpoint,
    config: quinn::ClientConfig,
    address: SocketAddr,
    server_name: String,
    software: String,
    limits: Limits,
    link: Mutex<Link>,
}

/// A client of the control plane; clones share one connection.
#[derive(Clone)]
pub struct Client {
    shared: Arc<ClientState>,
}

impl Client {
    /// Returns a client that connects with its first call. Must be called on a tokio runtime; `rng` spreads
    /// reconnections.
    ///
    /// # Errors
    /// When limits or identity are unusable, or there is no socket.
    pub fn new(config: &ClientConfig, rng: Rng) -> Result<Self, ConnectError> {
        config.limits.check().map_err(ConnectError::Limits)?;
        let tls = client_config(&config.identity, &config.trust, &config.limits).map_err(ConnectError::Tls)?;
        let local: IpAddr = match config.address.ip() {
            IpAddr::V4(ip) if ip.is_loopback() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(ip) if ip.is_loopback() => Ipv6Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let endpoint = client_endpoint(SocketAddr::new(local, 0)).map_err(ConnectError::Socket)?;
        let link = Link { connection: None, welcome: None, failures: 0, retry_at: None, last: None, rng };
        let shared = ClientState {
            endpoint,
            config: tls,
            address: config.address,
            server_name: config.cluster.dns_name(Role::Control),
            software: config.software.clone(),
            limits: config.limits,
            link: Mutex::new(link),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns a client that has connected and been welcomed: wrong certificates, versions and addresses are found
    /// here.
    ///
    /// # Errors
    /// Errors of [`Self::new`], and of the first exchange.
    pub async fn connect(config: &ClientConfig, rng: Rng) -> Result<(Self, Welcome), ConnectError> {
        let client = Self::new(config, rng)?;
        let welcome = client.welcome().await.map_err(ConnectError::Call)?;
        Ok((client, welcome))
    }

    /// Returns the control plane's address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.shared.address
    }

    /// Returns the control plane's reply to the present connection's [`Hello`]; connects if there is no connection.
    ///
    /// # Errors
    /// When there is no connection within the deadline.
    pub async fn welcome(&self) -> Result<Welcome, CallError> {
        let until = Instant::now() + self.shared.limits.connect_deadline;
        Ok(self.connection(until).await?.1)
    }

    /// Makes a call. An idempotent call is retried when its connection breaks: a restarted control plane ends the
    /// connections of its predecessor.
    ///
    /// # Errors
    /// See [`CallError`].
    pub async fn call<R: Request>(&self, request: &R) -> Result<R::Reply, CallError> {
        let frame = encode(request).map_err(CallError::BadRequest)?;
        let bytes = frame.len() - HEADER_BYTES;
        if bytes > LARGE_REQUEST_BYTES {
            // A server would treat the frame as invalid and close the connection.
            let limit_bytes = LARGE_REQUEST_BYTES;
            return Err(CallError::BadRequest(CodecError::TooLarge { kind: R::KIND, bytes, limit_bytes }));
        }
        let until = Instant::now() + self.shared.limits.call_deadline;
        loop {
            let (connection, _) = self.connection(until).await?;
            let outcome = self.exchange::<R>(&connection, &frame, until).await;
            if R::IDEMPOTENT && matches!(outcome, Err(CallError::Lost { .. })) && Instant::now() < until {
                tokio::time::sleep(self.shared.limits.backoff_min).await;
                continue;
            }
            // A call that was refused as not ready had no effect, so it can be retried.
            match outcome.as_ref().err().and_then(CallError::not_ready) {
                Some(wait) if Instant::now() + wait < until => tokio::time::sleep(wait).await,
                _ => return outcome,
            }
        }
    }

    /// Checks that the control plane answers on the present connection; makes no connection. Without a reply `within`
    /// that time the connection is closed, and the next call makes another. A killed control plane sends no close
    /// frame, so without this probe its connection would last until the idle timeout.
    ///
    /// # Errors
    /// When there was a connection and no valid reply arrived.
    pub async fn probe(&self, within: Duration) -> Result<(), CallError> {
        let frame = encode(&Hello { software: self.shared.software.clone() }).map_err(CallError::BadRequest)?;
        // If the lock is taken, another task is making a connection.
        let present = self.shared.link.try_lock().ok().and_then(|link| link.connection.clone());
        let Some(connection) = present.filter(|connection| connection.close_reason().is_none()) else { return Ok(()) };
        self.exchange::<Hello>(&connection, &frame, Instant::now() + within).await.map(|_| ())
    }

    /// Sends a report as a datagram on the present connection, connecting if there is none. The datagram may be lost,
    /// and the control plane does not answer it.
    ///
    /// # Errors
    /// When there is no connection, or the report is too long for a datagram.
    pub async fn tell(&self, report: &crate::message::conductor::ReportLoad) -> Result<(), CallError> {
        let frame = encode(report).map_err(CallError::BadRequest)?;
        let until = Instant::now() + self.shared.limits.call_deadline;
        let (connection, _) = self.connection(until).await?;
        match connection.send_datagram(frame.into()) {
            Ok(()) => Ok(()),
            Err(error) => Err(self.broken(&connection, error.to_string()).await),
        }
    }

    /// Closes the connection; later calls make a new one.
    pub async fn close(&self) {
        // A task that holds the link for longer than this is making a connection, so there is none to close.
        let Ok(mut link) = timeout(GOODBYE, self.shared.link.lock()).await else { return };
        let Some(connection) = link.connection.take() else { return };
        connection.close(CloseCode::Done.wire(), b"done");
        // The caller's runtime may end right after this. A server that receives no close frame keeps the connection
        // until the idle timeout, and short-lived clients would fill its table; sending the frame takes far less time
        // than that.
        let _ = timeout(GOODBYE, self.shared.endpoint.wait_idle()).await;
    }

    /// Returns the connection, making one if need be, until `until` at most.
    pub(crate) async fn connection(&self, until: Instant) -> Result<(Connection, Welcome), CallError> {
        let address = self.shared.address;
        let deadline = || CallError::Deadline { address, waited: self.shared.limits.call_deadline };
        let mut link = timeout_at(until, self.shared.link.lock()).await.map_err(|_| deadline())?;
        if let (Some(connection), Some(welcome)) = (&link.connection, &link.welcome)
            && connection.close_reason().is_none()
        {
            return Ok((connection.clone(), welcome.clone()));
        }
        link.connection = None;
        if let Some(retry_at) = link.retry_at {
            if retry_at >= until {
                return Err(link.last.clone().unwrap_or_else(deadline));
            }
            tokio::time::sleep_until(retry_at).await;
        }
        // Every await between here and the end has a deadline, so a failure is always recorded.
        match self.open(until).await {
            Ok((connection, welcome)) => {
                link.connection = Some(connection.clone());
                link.welcome = Some(welcome.clone());
                (link.failures, link.retry_at, link.last) = (0, None, None);
                Ok((connection, welcome))
            }
            Err(error) => {
                let wait = backoff(&self.shared.limits, link.failures, &mut link.rng);
                link.failures = link.failures.saturating_add(1);
                link.retry_at = Some(Instant::now() + wait);
                link.last = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Performs the TLS handshake and the first exchange. A rejected certificate shows only in the exchange, as a
    /// client's handshake ends before the server has verified the client's certificate.
    async fn open(&self, until: Instant) -> Result<(Connection, Welcome), CallError> {
        let shared = &self.shared;
        let address = shared.address;
        let until = until.min(Instant::now() + shared.limits.connect_deadline);
        let unreachable = |reason: String| CallError::Unreachable { address, reason };
        let connecting = shared
            .endpoint
            .connect_with(shared.config.clone(), address, &shared.server_name)
            .map_err(|error| unreachable(error.to_string()))?;
        let connection = match timeout_at(until, connecting).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) => return Err(from_connection(address, &error, false)),
            Err(_) => {
                let waited = shared.limits.connect_deadline.as_secs_f64();
                return Err(unreachable(format!(
                    "no answer within {waited:.1} s: check that it is running and reachable over UDP"
                )));
            }
        };
        let hello = Hello { software: shared.software.clone() };
        let frame = encode(&hello).map_err(CallError::BadRequest)?;
        let welcome = self.exchange::<Hello>(&connection, &frame, until).await?;
        Ok((connection, welcome))
    }

    async fn exchange<R: Request>(
        &self,
        connection: &Connection,
        frame: &[u8],
        until: Instant,
    ) -> Result<R::Reply, CallError> {
        let started = Instant::now();
        let address = self.shared.address;
        let limit_bytes = HEADER_BYTES + R::Reply::LIMIT_BYTES.max(Refusal::LIMIT_BYTES);
        let answer = timeout_at(until, round_trip(connection, frame, limit_bytes)).await;
        let reply = match answer {
            Ok(Ok(reply)) => reply,
            Ok(Err(error)) => return Err(self.broken(connection, error.to_string()).await),
            Err(_) => {
                connection.close(CloseCode::Deadline.wire(), b"an answer is overdue");
                return Err(CallError::Deadline { address, waited: started.elapsed() });
            }
        };
        let bad_reply = |error| CallError::BadReply { address, error };
        let header = Header::decode(&reply).map_err(bad_reply)?;
        if header.kind == Refusal::KIND {
            return Err(CallError::Refused(decode(&reply).map_err(bad_reply)?));
        }
        decode(&reply).map_err(bad_reply)
    }

    /// Returns the error of a broken stream; once the connection is closed, its reason is more exact than the stream's.
    pub(crate) async fn broken(&self, connection: &Connection, reason: String) -> CallError {
        // A stream may fail a moment before the connection's close is known.
        let _ = timeout(Duration::from_millis(100), connection.closed()).await;
        match connection.close_reason() {
            Some(error) => from_connection(self.shared.address, &error, true),
            None => CallError::Lost { address: self.shared.address, reason },
        }
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.shared.limits
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client({})", self.shared.address)
    }
}

/// Reason why a round trip on a stream failed.
enum StreamError {
    /// No stream could be opened.
    Open(ConnectionError),
    /// The request could not be sent.
    Write(WriteError),
    /// The peer has stopped reading the stream.
    Closed(ClosedStream),
    /// The answer is above this limit.
    TooLong { limit_bytes: usize },
    /// The answer could not be received.
    Read(ReadError),
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(error) => error.fmt(f),
            Self::Write(error) => error.fmt(f),
            Self::Closed(error) => error.fmt(f),
            Self::TooLong { limit_bytes } => write!(f, "an answer is above {limit_bytes} bytes"),
            Self::Read(error) => error.fmt(f),
        }
    }
}

/// Sends `frame` on a new stream and reads the reply.
async fn round_trip(connection: &Connection, frame: &[u8], limit_bytes: usize) -> Result<Vec<u8>, StreamError> {
    let (mut send, mut receive) = connection.open_bi().await.map_err(StreamError::Open)?;
    send.write_all(frame).await.map_err(StreamError::Write)?;
    send.finish().map_err(StreamError::Closed)?;
    receive.read_to_end(limit_bytes).await.map_err(|error| match error {
        ReadToEndError::TooLong => StreamError::TooLong { limit_bytes },
        ReadToEndError::Read(error) => StreamError::Read(error),
    })
}

/// Returns the backoff after `failures` earlier failures: between half and all of a span that doubles (equal jitter).
fn backoff(limits: &Limits, failures: u32, rng: &mut Rng) -> Duration {
    let doubled = limits.backoff_min.saturating_mul(1u32 << failures.min(20));
    let span = doubled.min(limits.backoff_max);
    span / 2 + span.mul_f64(rng.unit() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_grows_is_bounded_and_is_spread() {
        let limits = Limits::DEFAULT;
        let mut rng = Rng::new(7, "backoff");
        for failures in 0..200 {
            let span = limits.backoff_min.saturating_mul(1 << failures.min(20)).min(limits.backoff_max);
            let wait = backoff(&limits, failures, &mut rng);
            assert!(span / 2 <= wait && wait <= span, "{failures}: {wait:?} of {span:?}");
        }
        let first = backoff(&limits, 9, &mut rng);
        assert_ne!(first, backoff(&limits, 9, &mut rng));
    }
}

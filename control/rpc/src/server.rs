//! Server side of the control protocol: accepts connections and verifies callers.
//!
//! One task per connection and one per call, all bounded: a permit per connection, QUIC's stream limit per call. A
//! request reaches the service only after its size, its kind and the caller's role were checked. A peer that breaks the
//! protocol loses its own connection and no other; every such event is reported to [`Service::observe`].
//!
//! Certificates are verified again while a connection lasts: an expired certificate, or one of a retired authority,
//! closes it. The server's certificate and the trusted authorities may be replaced while it runs.

pub(crate) mod call;
pub(crate) mod convert;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use quinn::{Connection, ConnectionError, Endpoint, Incoming};
use rustls::pki_types::CertificateDer;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

use crate::error::{
    ALERT_CERTIFICATE_REQUIRED, ALERT_NO_APPLICATION_PROTOCOL, CloseCode, is_bad_certificate, transport_code,
};
use crate::identity::role::{ClusterName, Role, Scope, may_speak_for, role_of};
use crate::identity::{Identity, Trust};
use crate::limits::{Limits, LimitsError};
use crate::quic::reset::ResetSecret;
use crate::quic::socket::server_endpoint;
use crate::quic::tls::{TlsError, Verifier, objection, server_config, verifier};
use crate::server::call::Call;
use crate::service::{Caller, Event, Rejection, Service, ServiceState};

/// Configuration of a [`Server`].
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ServerConfig {
    /// Address to listen on; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// Cluster whose certificates are accepted.
    pub cluster: ClusterName,
    /// The control plane's certificate and key.
    pub identity: Identity,
    /// Authorities of which one must have signed a caller's certificate.
    pub trust: Trust,
    /// Secret by which the server resets connections of its predecessor.
    pub reset_secret: ResetSecret,
    pub limits: Limits,
}

/// Error of [`Server::start`].
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ServeError {
    /// The limits contradict each other.
    Limits(LimitsError),
    /// The identity is unusable.
    Tls(TlsError),
    /// The server cannot listen on the address.
    Listen { address: SocketAddr, source: io::Error },
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limits(error) => error.fmt(f),
            Self::Tls(error) => error.fmt(f),
            Self::Listen { address, source } if source.kind() == io::ErrorKind::AddrInUse => {
                write!(
                    f,
                    "UDP port {} of {} is in use: stop what listens there, or choose another port (0 takes a free one)",
                    address.port(),
                    address.ip()
                )
            }
            Self::Listen { address, source } => write!(f, "cannot listen on UDP {address}: {source}"),
        }
    }
}

impl std::error::Error for ServeError {}

/// A listening server. Dropping it closes its connections at once.
pub struct Server {
    endpoint: Endpoint,
    address: SocketAddr,
    accept: JoinHandle<()>,
    host: Arc<Host>,
}

impl Server {
    /// Starts to listen. Must be called on a tokio runtime, which then drives the server.
    ///
    /// # Errors
    /// See [`ServeError`].
    pub fn start(config: &ServerConfig, standing: ServiceState) -> Result<Self, ServeError> {
        config.limits.check().map_err(ServeError::Limits)?;
        let verifier = verifier(&config.trust).map_err(ServeError::Tls)?;
        let tls = server_config(&config.identity, &verifier, &config.limits).map_err(ServeError::Tls)?;
        let listen = |source| ServeError::Listen { address: config.listen, source };
        let endpoint = server_endpoint(config.listen, tls, &config.reset_secret).map_err(listen)?;
        let address = endpoint.local_addr().map_err(listen)?;
        let host = Arc::new(Host {
            verifier: RwLock::new(verifier),
            standing: watch::Sender::new(standing),
            cluster: config.cluster.clone(),
            limits: config.limits,
            permits: Arc::new(Semaphore::new(config.limits.connections)),
        });
        let accept = tokio::spawn(Arc::clone(&host).accept(endpoint.clone()));
        Ok(Self { endpoint, address, accept, host })
    }

    /// Replaces the identity for new connections and the trusted authorities. The certificates of open connections are
    /// verified again within [`Limits::recheck_interval`].
    ///
    /// # Errors
    /// When TLS cannot use them; then nothing has changed.
    pub fn renew(&self, identity: &Identity, trust: &Trust) -> Result<(), TlsError> {
        let verifier = verifier(trust)?;
        let tls = server_config(identity, &verifier, &self.host.limits)?;
        *self.host.verifier.write().unwrap_or_else(PoisonError::into_inner) = verifier;
        self.endpoint.set_server_config(Some(tls));
        Ok(())
    }

    /// Changes the state of the server to serving or standby. All connections are closed, with the reason.
    pub fn stand(&self, standing: ServiceState) {
        self.host.standing.send_replace(standing);
    }

    /// Returns the address that the server listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes all connections, with the reason, and waits up to `deadline` until the close frames are acknowledged.
    pub async fn close(self, deadline: Duration) {
        self.endpoint.close(CloseCode::ShuttingDown.wire(), b"the control plane is shutting down");
        // A caller that does not acknowledge finds out by its idle timeout.
        let _ = timeout(deadline, self.endpoint.wait_idle()).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.endpoint.close(CloseCode::ShuttingDown.wire(), b"the control plane is shutting down");
        self.accept.abort();
    }
}

/// State that all connections share.
pub(crate) struct Host {
    standing: watch::Sender<ServiceState>,
    cluster: ClusterName,
    pub(crate) limits: Limits,
    permits: Arc<Semaphore>,
    verifier: RwLock<Verifier>,
}

impl Host {
    async fn accept(self: Arc<Self>, endpoint: Endpoint) {
        // Connections end with this set, which ends with the server.
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                incoming = endpoint.accept() => {
                    let Some(incoming) = incoming else { return };
                    let Ok(permit) = self.permits.clone().try_acquire_owned() else {
                        self.reject(Rejection::Full);
                        incoming.refuse();
                        continue;
                    };
                    // Under load, a client must prove that packets reach it at its address (QUIC address validation).
                    let crowded = self.permits.available_permits() < self.limits.connections / 2;
                    if crowded && !incoming.remote_address_validated() && incoming.may_retry() {
                        // It fails only if the connection may not retry, which was checked above.
                        let _ = incoming.retry();
                        continue;
                    }
                    connections.spawn(self.clone().connection(incoming, permit));
                }
                Some(_) = connections.join_next() => {}
            }
        }
    }

    async fn connection(self: Arc<Self>, incoming: Incoming, _permit: OwnedSemaphorePermit) {
        let connecting = match incoming.accept() {
            Ok(connecting) => connecting,
            Err(error) => return self.reject(classify(&error)),
        };
        let connection = match timeout(self.limits.connect_deadline, connecting).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) => return self.reject(classify(&error)),
            Err(_) => return self.reject(Rejection::Deadline),
        };
        let Some(role) = caller_role(&connection, &self.cluster) else {
            let reason = format!("the certificate names no role in cluster {}", self.cluster);
            connection.close(CloseCode::NoRole.wire(), reason.as_bytes());
            return self.reject(Rejection::Certificate);
        };
        let caller = Caller { role, address: connection.remote_address() };
        let mut standing = self.standing.subscribe();
        let now = standing.borrow_and_update().clone();
        let service = match now {
            ServiceState::Serving(service) => service,
            ServiceState::StandingBy(words) => {
                return connection.close(CloseCode::StandingBy.wire(), words.as_bytes());
            }
        };
        service.observe(Event::Connected);
        tokio::select! {
            () = self.serve(&service, &connection, caller) => {}
            // The sender lives as long as this host.
            _ = standing.changed() => {
                let words = match &*standing.borrow() {
                    ServiceState::StandingBy(words) => words.clone(),
                    ServiceState::Serving(_) => "the control plane was restarted".to_owned(),
                };
                connection.close(CloseCode::StandingBy.wire(), words.as_bytes());
            }
        }
        service.observe(Event::Disconnected);
    }

    /// Counts a rejected connection, if a service is there to count.
    fn reject(&self, reason: Rejection) {
        if let ServiceState::Serving(service) = &*self.standing.borrow() {
            service.observe(Event::Rejected(reason));
        }
    }

    async fn serve(self: &Arc<Self>, service: &Arc<dyn Service>, connection: &Connection, caller: Caller) {
        // The state at the first exchange, which announces it to the caller.
        let state = service.maps().borrow().state;
        let call = || {
            let (host, service, connection) = (self.clone(), service.clone(), connection.clone());
            Call { host, service, connection, caller, state }
        };
        // Calls end with this set, which ends with the connection.
        let mut calls = JoinSet::new();
        let mut recheck = tokio::time::interval(self.limits.recheck_interval);
        recheck.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = recheck.tick() => {
                    let verifier = self.verifier.read().unwrap_or_else(PoisonError::into_inner).clone();
                    let objection = peer_chain(connection).and_then(|chain| objection(&verifier, &chain));
                    if let Some(reason) = objection {
                        let reason = format!("the certificate is not valid any more: {reason}");
                        connection.close(CloseCode::Expired.wire(), reason.as_bytes());
                        return self.reject(Rejection::Certificate);
                    }
                }
                stream = connection.accept_bi() => {
                    let Ok((send, receive)) = stream else { return };
                    calls.spawn(call().run(send, receive));
                }
                datagram = connection.read_datagram() => {
                    let Ok(frame) = datagram else { return };
                    call().datagram(&frame);
                }
                Some(_) = calls.join_next() => {}
            }
        }
    }
}

fn classify(error: &ConnectionError) -> Rejection {
    match transport_code(error) {
        Some(ALERT_NO_APPLICATION_PROTOCOL) => Rejection::Protocol,
        Some(ALERT_CERTIFICATE_REQUIRED) => Rejection::Certificate,
        Some(code) if is_bad_certificate(code) => Rejection::Certificate,
        _ if matches!(error, ConnectionError::VersionMismatch) => Rejection::Protocol,
        _ if matches!(error, ConnectionError::TimedOut) => Rejection::Deadline,
        _ => Rejection::Other,
    }
}

/// Returns the caller's certificate chain.
fn peer_chain(connection: &Connection) -> Option<Vec<CertificateDer<'static>>> {
    connection.peer_identity()?.downcast().ok().map(|chain| *chain)
}

fn caller_role(connection: &Connection, cluster: &ClusterName) -> Option<Role> {
    role_of(peer_chain(connection)?.first()?, cluster)
}

impl Host {
    /// Returns true if the caller's certificate lets it act for `scope`.
    pub(crate) fn speaks_for(&self, connection: &Connection, role: Role, scope: &Scope) -> bool {
        peer_chain(connection).is_some_and(|chain| {
            chain.first().is_some_and(|certificate| may_speak_for(certificate, &self.cluster, role, scope))
        })
    }
}

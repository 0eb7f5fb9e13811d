//! The server's side: accepts connections and checks who speaks.
//!
//! One task per connection and one per call, all bounded: a permit per connection, QUIC's stream limit per call.
//! Nothing a peer sends reaches the service before its size, kind and the caller's role were checked. A peer that
//! breaks the protocol loses its connection and nobody else's; every such event is reported to [`Service::observe`].
//!
//! Certificates are looked at again while a connection lasts: one that has expired, or whose authority was retired,
//! ends it. The server's own certificate and whom it trusts may be replaced while it runs.

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

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Where to listen; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// Which cluster's certificates count.
    pub cluster: ClusterName,
    /// The control plane's own identity.
    pub identity: Identity,
    /// Whose certificates callers must present.
    pub trust: Trust,
    /// The secret by which it ends connections of the control plane that it takes the place of.
    pub reset_secret: ResetSecret,
    /// Limits.
    pub limits: Limits,
}

/// Why a server does not start.
#[derive(Debug)]
pub enum ServeError {
    /// The limits contradict each other.
    Limits(LimitsError),
    /// The identity is unusable.
    Tls(TlsError),
    /// The address cannot be listened on.
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
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

/// A listening server. Dropping it stops it at once.
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

    /// Another identity for new connections, and others whose certificates count: those of present connections are
    /// looked at again within [`Limits::recheck_interval`].
    ///
    /// # Errors
    /// When TLS will not work with them; then nothing has changed.
    pub fn renew(&self, identity: &Identity, trust: &Trust) -> Result<(), TlsError> {
        let verifier = verifier(trust)?;
        let tls = server_config(identity, &verifier, &self.host.limits)?;
        *self.host.verifier.write().unwrap_or_else(PoisonError::into_inner) = verifier;
        self.endpoint.set_server_config(Some(tls));
        Ok(())
    }

    /// Has it serve, or stand by. All connections are closed, and callers told why.
    pub fn stand(&self, standing: ServiceState) {
        self.host.standing.send_replace(standing);
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes all connections, telling callers why, and waits up to `deadline` until they know.
    pub async fn close(self, deadline: Duration) {
        self.endpoint.close(CloseCode::ShuttingDown.wire(), b"the control plane is going down");
        // A caller that does not acknowledge finds out by its idle timeout.
        let _ = timeout(deadline, self.endpoint.wait_idle()).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.endpoint.close(CloseCode::ShuttingDown.wire(), b"the control plane is going down");
        self.accept.abort();
    }
}

/// What all connections share.
pub(crate) struct Host {
    standing: watch::Sender<ServiceState>,
    cluster: ClusterName,
    pub(crate) limits: Limits,
    permits: Arc<Semaphore>,
    verifier: RwLock<Verifier>,
}

impl Host {
    async fn accept(self: Arc<Self>, endpoint: Endpoint) {
        // Connections die with this set: with the server.
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
                    // When crowded, who claims an address must show that packets reach it there.
                    let crowded = self.permits.available_permits() < self.limits.connections / 2;
                    if crowded && !incoming.remote_address_validated() && incoming.may_retry() {
                        // It fails only for a connection that may not retry, which was asked.
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
            // The sender lives as long as we do.
            _ = standing.changed() => {
                let words = match &*standing.borrow() {
                    ServiceState::StandingBy(words) => words.clone(),
                    ServiceState::Serving(_) => "the control plane began anew".to_owned(),
                };
                connection.close(CloseCode::StandingBy.wire(), words.as_bytes());
            }
        }
        service.observe(Event::Disconnected);
    }

    /// Counts a connection that was turned away, where somebody counts.
    fn reject(&self, reason: Rejection) {
        if let ServiceState::Serving(service) = &*self.standing.borrow() {
            service.observe(Event::Rejected(reason));
        }
    }

    async fn serve(self: &Arc<Self>, service: &Arc<dyn Service>, connection: &Connection, caller: Caller) {
        // What the first exchange tells: nothing was told before.
        let state = service.maps().borrow().state;
        let call = || {
            let (host, service, connection) = (self.clone(), service.clone(), connection.clone());
            Call { host, service, connection, caller, state }
        };
        // Calls die with this set: with the connection.
        let mut calls = JoinSet::new();
        let mut recheck = tokio::time::interval(self.limits.recheck_interval);
        recheck.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = recheck.tick() => {
                    let verifier = self.verifier.read().unwrap_or_else(PoisonError::into_inner).clone();
                    let objection = peer_chain(connection).and_then(|chain| objection(&verifier, &chain));
                    if let Some(reason) = objection {
                        let reason = format!("the certificate does not count any more: {reason}");
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

/// What the caller presented.
fn peer_chain(connection: &Connection) -> Option<Vec<CertificateDer<'static>>> {
    connection.peer_identity()?.downcast().ok().map(|chain| *chain)
}

fn caller_role(connection: &Connection, cluster: &ClusterName) -> Option<Role> {
    role_of(peer_chain(connection)?.first()?, cluster)
}

impl Host {
    /// Whether the caller's certificate lets it speak for `scope`.
    pub(crate) fn speaks_for(&self, connection: &Connection, role: Role, scope: &Scope) -> bool {
        peer_chain(connection).is_some_and(|chain| {
            chain.first().is_some_and(|certificate| may_speak_for(certificate, &self.cluster, role, scope))
        })
    }
}

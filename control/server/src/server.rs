//! A running control plane: one thread, one single-threaded runtime, never on a shard's core unless the system puts
//! it there.
//!
//! Starting is synchronous and complete: when [`ControlServer::start`] returns, the state is read, the ports are open
//! and local processes can find it. Nothing is polled: the thread sleeps until a packet, a request or a deadline.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvplane_cluster::Cluster;
use kvplane_conductor::desk::DeskConfig;
use kvplane_rpc::files::private_directory;
use kvplane_rpc::{Authority, ClusterName, LocalCluster, Publication, Server, ServerConfig, Service, random_u64};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use crate::access::Access;
use crate::conductor::{Host, store_blocks};
use crate::config::{ControlConfig, StartError};
use crate::control::Control;
use crate::credentials::{LOOK_AGAIN, Source};
use crate::http;
use crate::kv_events;
use crate::metadata::MetadataLimits;
use crate::store::Store;
use crate::tickets::Tickets;

/// File of the state within the state directory.
pub const STATE_FILE: &str = "state.redb";

/// How long a dropped handle waits for its thread.
const DROP_DEADLINE: Duration = Duration::from_secs(2);

/// Of a shutdown, the time that callers get to learn of it.
const GOODBYE: Duration = Duration::from_millis(500);

/// Starts control planes.
pub struct ControlServer;

/// Why a control plane ended by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndError {
    /// It could not go on: the state cannot be written, or a bug was found.
    Failed(String),
    /// It did not end in time; its thread goes on.
    Deadline(Duration),
}

impl fmt::Display for EndError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(reason) => write!(f, "the control plane stopped: {reason}"),
            Self::Deadline(waited) => {
                write!(f, "the control plane did not stop within {:.1} s", waited.as_secs_f64())
            }
        }
    }
}

impl std::error::Error for EndError {}

/// A running control plane. Dropping it shuts it down.
pub struct ControlHandle {
    address: SocketAddr,
    http_address: Option<SocketAddr>,
    events_address: Option<SocketAddr>,
    local: LocalCluster,
    stop: Option<oneshot::Sender<()>>,
    ended: mpsc::Receiver<Result<(), EndError>>,
    /// What came out of `ended`, which gives it only once.
    result: Option<Result<(), EndError>>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for ControlHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ControlHandle({}, http {:?})", self.address, self.http_address)
    }
}

/// What is up once a control plane has started.
struct Running {
    control: Arc<Control>,
    server: Server,
    http: Option<(TcpListener, SocketAddr)>,
    events: Option<(TcpListener, SocketAddr)>,
    access: Access,
    metadata: Option<MetadataLimits>,
    local: LocalCluster,
    source: Source,
    mark: Option<(Vec<u8>, Vec<u8>)>,
    publication: Option<Publication>,
}

impl ControlServer {
    /// Starts a control plane on a thread of its own.
    ///
    /// # Errors
    /// See [`StartError`]; nothing is left running then.
    pub fn start(config: ControlConfig) -> Result<ControlHandle, StartError> {
        let (started, starting) = mpsc::channel();
        let (finished, ended) = mpsc::channel();
        let (stop, stopping) = oneshot::channel();
        let body = move || {
            let up = Builder::new_current_thread().enable_all().build().map_err(StartError::Thread);
            let up = up.and_then(|runtime| {
                let running = runtime.block_on(bring_up(config))?;
                Ok((runtime, running))
            });
            match up {
                // Whoever started us is waiting.
                Err(error) => drop(started.send(Err(error))),
                Ok((runtime, running)) => {
                    let of = |listening: &Option<(TcpListener, SocketAddr)>| listening.as_ref().map(|(_, at)| *at);
                    let addresses = (running.server.address(), of(&running.http), of(&running.events));
                    let _ = started.send(Ok((addresses, running.local.clone())));
                    let _ = finished.send(live(&runtime, running, stopping));
                }
            }
        };
        let thread =
            thread::Builder::new().name("kvplane-control".to_owned()).spawn(body).map_err(StartError::Thread)?;
        match starting.recv() {
            Ok(Ok(((address, http_address, events_address), local))) => Ok(ControlHandle {
                address,
                http_address,
                events_address,
                local,
                stop: Some(stop),
                ended,
                result: None,
                thread: Some(thread),
            }),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                let reason = "it ended in a bug while starting";
                Err(StartError::Thread(std::io::Error::other(reason)))
            }
        }
    }
}

/// The Conductor's host, where one is wanted; its hashes are salted by chance.
fn host(config: Option<DeskConfig>) -> Result<Option<Arc<Host>>, StartError> {
    let Some(mut config) = config else { return Ok(None) };
    config.books.index.seed = random_u64()?;
    Ok(Some(Arc::new(Host::new(config, random_u64()?))))
}

/// Whether nothing listens beyond loopback for whoever comes.
fn check_listeners(config: &ControlConfig) -> Result<(), StartError> {
    if let Some(address) = config.http_listen
        && !address.ip().is_loopback()
        && config.http_token.is_none()
        && !(config.http_without_authentication_anywhere && config.mooncake_metadata.is_some())
    {
        return Err(StartError::HttpNotLoopback(address));
    }
    if let Some(address) = config.kv_events_listen
        && !address.ip().is_loopback()
    {
        return Err(StartError::EventsNotLoopback(address));
    }
    if config.http_listen.is_none() && config.mooncake_metadata.is_some() {
        return Err(StartError::MetadataWithoutHttp);
    }
    Ok(())
}

async fn bring_up(config: ControlConfig) -> Result<Running, StartError> {
    let name = ClusterName::new(&config.cluster.cluster)?;
    check_listeners(&config)?;
    let fresh_id = random_u64()?;
    let (store, records) = match &config.state_directory {
        None => (Store::in_memory(fresh_id), Vec::new()),
        Some(directory) => {
            private_directory(directory).map_err(|error| StartError::Identity(error.into()))?;
            // The state's lock comes first: it keeps a second process from making another authority.
            Store::open(&directory.join(STATE_FILE), fresh_id)?
        }
    };
    let tickets = config
        .tickets
        .map(|tickets| Tickets::open(&config.cluster.cluster, &tickets, config.state_directory.as_deref()));
    let tickets = tickets.transpose()?;
    let source = match (config.identity_directory, config.state_directory) {
        (Some(directory), _) => Source::Issued(directory),
        (None, Some(directory)) => Source::Authority(directory),
        (None, None) => Source::Process(Box::new(Authority::generate(&name)?)),
    };
    let mark = source.mark();
    let credentials = source.read(&name)?;
    let cluster = Cluster::new(config.cluster, records, 0).map_err(StartError::Cluster)?;
    let control =
        Control::new(cluster, store, Instant::now()).map_err(|refusal| StartError::FirstChange(refusal.reason))?;
    let control = control.with_tenants(config.strict_tenants, config.objects).with_tickets(tickets);
    let control = control.map_err(|refusal| StartError::FirstChange(refusal.reason))?;
    let control = Arc::new(control.with_conductor(host(config.conductor)?));
    let server_config = ServerConfig {
        listen: config.listen,
        cluster: name.clone(),
        identity: credentials.identity,
        trust: credentials.trust.clone(),
        limits: config.limits,
    };
    let service: Arc<dyn Service> = control.clone();
    let server = Server::start(&server_config, service).map_err(StartError::Serve)?;
    let http = match config.http_listen {
        None => None,
        Some(address) => {
            Some(http::listen(address).await.map_err(|source| StartError::HttpListen { address, source })?)
        }
    };
    let events = match config.kv_events_listen {
        None => None,
        Some(address) => {
            Some(kv_events::listen(address).await.map_err(|source| StartError::EventsListen { address, source })?)
        }
    };
    let reachable = reachable(server.address());
    control.set_address(reachable);
    let local = LocalCluster::new(name, reachable, credentials.trust, credentials.local);
    let publication = match &config.publish {
        None => None,
        Some(directory) => Some(directory.publish(&local).map_err(StartError::Publish)?),
    };
    let access = Access { token: config.http_token, open_metadata: config.http_without_authentication_anywhere };
    let metadata = config.mooncake_metadata;
    Ok(Running { control, server, http, events, access, metadata, local, source, mark, publication })
}

/// Takes certificates that have been replaced, for as long as it is asked to. What makes no sense is left alone: the
/// former ones go on, and the next look may find files that are complete.
async fn renew(
    server: &Server,
    source: &Source,
    mut mark: Option<(Vec<u8>, Vec<u8>)>,
    local: &LocalCluster,
    publication: Option<&Publication>,
) {
    let mut look = tokio::time::interval(LOOK_AGAIN);
    loop {
        look.tick().await;
        let seen = source.mark();
        if seen.is_none() || seen == mark {
            continue;
        }
        let Ok(found) = source.read(&local.cluster) else { continue };
        if server.renew(&found.identity, &found.trust).is_err() {
            continue;
        }
        let local = LocalCluster::new(local.cluster.clone(), local.control, found.trust, found.local);
        if publication.is_some_and(|publication| publication.replace(&local).is_err()) {
            continue;
        }
        mark = seen;
    }
}

/// An address at which a process on this machine reaches a listener on `address`.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// Runs until told to stop, the handle is gone, or the control plane fails.
fn live(runtime: &Runtime, running: Running, stopping: oneshot::Receiver<()>) -> Result<(), EndError> {
    let Running { control, server, http, events, access, metadata, local, source, mark, publication } = running;
    runtime.block_on(async {
        if let Some((listener, _)) = http {
            let pages = http::Pages::new(control.clone(), access, metadata);
            tokio::spawn(http::serve(listener, pages));
        }
        if let Some((listener, _)) = events {
            let cluster = local.cluster.as_str().to_owned();
            tokio::spawn(kv_events::serve(listener, control.clone(), cluster));
        }
        if let Some(conductor) = control.conductor.clone() {
            tokio::spawn(store_blocks::follow(conductor.clone(), control.clone()));
            tokio::spawn(async move { conductor.run().await });
        }
        let result = tokio::select! {
            () = renew(&server, &source, mark, &local, publication.as_ref()) => Ok(()),
            // Told, or the handle is gone: both mean to stop.
            _ = stopping => Ok(()),
            reason = control.run() => Err(EndError::Failed(reason)),
        };
        server.close(GOODBYE).await;
        result
    })
}

impl ControlHandle {
    /// Where QUIC listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where HTTP listens, if it does.
    #[must_use]
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http_address
    }

    /// Where events are published, if they are.
    #[must_use]
    pub fn events_address(&self) -> Option<SocketAddr> {
        self.events_address
    }

    /// Address, trust and identities for clients in this process.
    #[must_use]
    pub fn local(&self) -> &LocalCluster {
        &self.local
    }

    /// Waits up to `patience` for the control plane to end by itself; none while it runs.
    pub fn ended_within(&mut self, patience: Duration) -> Option<Result<(), EndError>> {
        if self.result.is_none() {
            self.result = match self.ended.recv_timeout(patience) {
                Ok(result) => Some(result),
                Err(mpsc::RecvTimeoutError::Timeout) => None,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    Some(Err(EndError::Failed("its thread ended in a bug".to_owned())))
                }
            };
        }
        self.result.clone()
    }

    /// Shuts down and waits until ports and files are free, up to `deadline`.
    ///
    /// # Errors
    /// When it failed before, or does not end in time.
    pub fn shutdown(mut self, deadline: Duration) -> Result<(), EndError> {
        self.end(deadline)
    }

    fn end(&mut self, deadline: Duration) -> Result<(), EndError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        // An error says that it has ended by itself.
        let _ = self.stop.take().map(|stop| stop.send(()));
        let result = self.ended_within(deadline).unwrap_or(Err(EndError::Deadline(deadline)));
        if !matches!(result, Err(EndError::Deadline(_))) {
            // It has nothing left to do but to drop what it holds.
            let _ = thread.join();
        }
        result
    }
}

impl Drop for ControlHandle {
    fn drop(&mut self) {
        // Nobody is left to be told.
        let _ = self.end(DROP_DEADLINE);
    }
}

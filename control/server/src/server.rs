//! A running control plane: one thread with a single-threaded runtime, on no shard's core unless the kernel schedules
//! it there.
//!
//! Starting is synchronous and complete: when [`ControlServer::start`] returns, the state is read, the ports are open
//! and local processes can discover it. Nothing polls: the thread sleeps until a packet, a request or a deadline.
//!
//! With the state in etcd, several control planes may share it: one is the leader, the others are standbys until a
//! takeover. The ports stay open all the time; a standby tells its callers who the leader is.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kvplane_rpc::{Authority, ClusterName, LocalCluster, Server, ServerConfig, ServiceState};
use kvplane_sys::private_files::private_directory;
use kvplane_sys::random::random_u64;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::sync::{oneshot, watch};

use crate::conductor::SnapshotFiles;
use crate::config::{ControlConfig, StartError};
use crate::credentials::Source;
use crate::events::publisher;
use crate::http;
use crate::http::access::Access;
use crate::store::Store;
use crate::store::etcd::Etcd;
use crate::tickets::Keep;

pub(crate) mod clock;
mod running;

use running::{ControlProcess, Rest, State, live, reachable};

/// Name of the state file in the state directory.
pub const STATE_FILE: &str = "state.redb";

/// Longest wait of a dropped handle for its thread.
const DROP_DEADLINE: Duration = Duration::from_secs(2);

/// Starter of control planes.
pub struct ControlServer;

/// Error with which a control plane ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndError {
    /// The control plane cannot continue: the state cannot be written, or a bug was found.
    Failed(String),
    /// The control plane did not end in time; its thread still runs.
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
    role: watch::Receiver<Role>,
    stop: Option<oneshot::Sender<()>>,
    ended: mpsc::Receiver<Result<(), EndError>>,
    /// Result received from `ended`, which yields it only once.
    result: Option<Result<(), EndError>>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for ControlHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ControlHandle({}, http {:?})", self.address, self.http_address)
    }
}

/// Role of a control plane among those that share a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// The control plane is the leader and serves.
    Leads,
    /// The control plane is a standby; the text names the leader, or the reason for which none is known.
    StandsBy(String),
}

impl ControlServer {
    /// Starts a control plane on a new thread.
    ///
    /// # Errors
    /// See [`StartError`]; nothing keeps running then.
    pub fn start(config: ControlConfig) -> Result<ControlHandle, StartError> {
        let (started, starting) = mpsc::channel();
        let (finished, ended) = mpsc::channel();
        let (stop, stopping) = oneshot::channel();
        let body = move || {
            let up = Builder::new_current_thread().enable_all().build().map_err(StartError::Thread);
            let up = up.and_then(|runtime| {
                let (running, state) = runtime.block_on(bring_up(config))?;
                Ok((runtime, running, state))
            });
            match up {
                // The caller of `start` is waiting.
                Err(error) => drop(started.send(Err(error))),
                Ok((runtime, running, state)) => {
                    let of = |listening: &Listening| listening.as_ref().map(|(_, at)| *at);
                    let addresses = (running.server.address(), of(&running.http), of(&running.events));
                    let _ = started.send(Ok((addresses, running.local.clone(), running.role.subscribe())));
                    let _ = finished.send(runtime.block_on(live(running, state, stopping)));
                }
            }
        };
        let thread =
            thread::Builder::new().name("kvplane-control".to_owned()).spawn(body).map_err(StartError::Thread)?;
        match starting.recv() {
            Ok(Ok(((address, http_address, events_address), local, role))) => Ok(ControlHandle {
                address,
                http_address,
                events_address,
                local,
                role,
                stop: Some(stop),
                ended,
                result: None,
                thread: Some(thread),
            }),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                let reason = "it panicked during the start";
                Err(StartError::Thread(std::io::Error::other(reason)))
            }
        }
    }
}

/// Checks that no listener without authentication is reachable from other hosts.
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

/// Checks that the state has exactly one place.
fn check_state(config: &ControlConfig) -> Result<(), StartError> {
    match &config.etcd {
        Some(_) if config.stop_when_idle.is_some() => Err(StartError::EtcdShape(
            "a control plane that stops when idle shares its state with no other: give a state directory, or none \
             (--state, --stop-when-idle)",
        )),
        Some(_) if config.state_directory.is_some() => {
            Err(StartError::EtcdShape("a state directory and etcd are both given: choose one of them"))
        }
        Some(_) if config.identity_directory.is_none() => Err(StartError::EtcdShape(
            "with the state in etcd, all control planes need certificates of one authority: give a directory with \
             ca.pem, control.pem and control.key (--identity)",
        )),
        _ => Ok(()),
    }
}

type Listening = Option<(Arc<TcpListener>, SocketAddr)>;

/// Opens the ports of HTTP and of events, if configured.
async fn listen(http: Option<SocketAddr>, events: Option<SocketAddr>) -> Result<(Listening, Listening), StartError> {
    let shared = |(listener, at)| (Arc::new(listener), at);
    let http = match http {
        None => None,
        Some(address) => {
            let failed = |source| StartError::HttpListen { address, source };
            Some(http::listen(address).await.map(shared).map_err(failed)?)
        }
    };
    let events = match events {
        None => None,
        Some(address) => {
            let failed = |source| StartError::EventsListen { address, source };
            Some(publisher::listen(address).await.map(shared).map_err(failed)?)
        }
    };
    Ok((http, events))
}

async fn bring_up(config: ControlConfig) -> Result<(ControlProcess, State), StartError> {
    let name = ClusterName::new(&config.cluster.cluster)?;
    check_listeners(&config)?;
    check_state(&config)?;
    let own = match (&config.state_directory, &config.etcd) {
        (_, Some(_)) => None,
        (None, None) => {
            Some((Store::in_memory(random_u64().map_err(StartError::Randomness)?), Vec::new(), Keep::Nowhere))
        }
        (Some(directory), None) => {
            private_directory(directory).map_err(|error| StartError::Identity(error.into()))?;
            // The lock of the state comes first: it keeps a second process from generating another authority.
            let (store, records) =
                Store::open(&directory.join(STATE_FILE), random_u64().map_err(StartError::Randomness)?)?;
            Some((store, records, Keep::Directory(directory.clone())))
        }
    };
    let state_directory = config.state_directory.clone();
    let source = match (config.identity_directory, config.state_directory) {
        (Some(directory), _) => Source::Issued(directory),
        (None, Some(directory)) => Source::Authority(directory),
        (None, None) => Source::Process(Box::new(Authority::generate(&name)?)),
    };
    let mark = source.mark();
    let credentials = source.read(&name)?;
    let hosted = config.conductor.is_some();
    let snapshots = match hosted {
        true => SnapshotFiles::open(&config.conductor_snapshots, state_directory.as_deref(), name.as_str()),
        false => Ok(None),
    };
    let snapshots = snapshots.map_err(StartError::Snapshots)?;
    let rest = Rest {
        cluster: config.cluster,
        tickets: config.tickets,
        strict_tenants: config.strict_tenants,
        objects: config.objects,
        snapshots,
        conductor: config.conductor,
        worlds: config.worlds,
        stop_when_idle: config.stop_when_idle,
    };
    let own = own.map(|(store, records, keep)| rest.control(store, records, keep)).transpose()?;
    let standing = match &own {
        Some(control) => ServiceState::Serving(control.clone()),
        None => ServiceState::StandingBy("this control plane has not reached etcd yet".to_owned()),
    };
    let server_config = ServerConfig {
        listen: config.listen,
        cluster: name.clone(),
        identity: credentials.identity,
        trust: credentials.trust.clone(),
        reset_secret: credentials.reset_secret,
        limits: config.limits,
    };
    let server = Server::start(&server_config, standing).map_err(StartError::Serve)?;
    let (http, events) = listen(config.http_listen, config.kv_events_listen).await?;
    let reachable = reachable(server.address());
    let state = match (own, &config.etcd) {
        (Some(control), _) => {
            control.set_address(reachable);
            State::Own(control)
        }
        (None, etcd) => {
            let etcd = etcd.as_ref().ok_or(StartError::EtcdShape("neither a state directory nor etcd is given"))?;
            let address = etcd.advertise.unwrap_or(reachable).to_string();
            State::Shared(Etcd::start(etcd, name.as_str(), address)?)
        }
    };
    let local = LocalCluster::new(name, reachable, credentials.trust, credentials.local);
    let publication = match &config.publish {
        None => None,
        Some(directory) => Some(directory.publish(&local).map_err(StartError::Publish)?),
    };
    let access = Access { token: config.http_token, open_metadata: config.http_without_authentication_anywhere };
    let metadata = config.mooncake_metadata;
    let role = watch::Sender::new(match &state {
        State::Own(_) => Role::Leads,
        State::Shared(_) => Role::StandsBy("the first request to etcd is in flight".to_owned()),
    });
    let running =
        ControlProcess { server, http, events, access, metadata, local, source, mark, publication, rest, role };
    Ok((running, state))
}

impl ControlHandle {
    /// Returns the address of the QUIC endpoint.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the address of HTTP, if it is served.
    #[must_use]
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http_address
    }

    /// Returns the address at which events are published, if they are.
    #[must_use]
    pub fn events_address(&self) -> Option<SocketAddr> {
        self.events_address
    }

    /// Returns address, trust and identities for clients in this process.
    #[must_use]
    pub fn local(&self) -> &LocalCluster {
        &self.local
    }

    /// Returns the present role: leader or standby.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role.borrow().clone()
    }

    /// Waits up to `patience` for the control plane to end by itself; returns none while it runs. One that stops when
    /// idle ends without an error.
    pub fn ended_within(&mut self, patience: Duration) -> Option<Result<(), EndError>> {
        if self.result.is_none() {
            self.result = match self.ended.recv_timeout(patience) {
                Ok(result) => Some(result),
                Err(mpsc::RecvTimeoutError::Timeout) => None,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    Some(Err(EndError::Failed("its thread panicked".to_owned())))
                }
            };
        }
        self.result.clone()
    }

    /// Shuts down, and waits up to `deadline` until ports and files are free.
    ///
    /// # Errors
    /// When the control plane failed before, or does not end in time.
    pub fn shutdown(mut self, deadline: Duration) -> Result<(), EndError> {
        self.end(deadline)
    }

    fn end(&mut self, deadline: Duration) -> Result<(), EndError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        // An error means that it has ended by itself.
        let _ = self.stop.take().map(|stop| stop.send(()));
        let result = self.ended_within(deadline).unwrap_or(Err(EndError::Deadline(deadline)));
        if !matches!(result, Err(EndError::Deadline(_))) {
            // The thread has nothing left to do but to drop its state.
            let _ = thread.join();
        }
        result
    }
}

impl Drop for ControlHandle {
    fn drop(&mut self) {
        // No caller is left to return the result to.
        let _ = self.end(DROP_DEADLINE);
    }
}

//! How a control plane is set up, and why it does not start.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use kvplane_cluster::{ClusterConfig, StartError as ClusterError};
use kvplane_conductor::conductor::ConductorConfig;
use kvplane_rpc::{IdentityError, Limits, LocalError, RuntimeDirectory, ServeError};

use crate::http::access::HttpToken;
use crate::http::metadata::MetadataLimits;
use crate::http::objects::ObjectsAccess;
use crate::store::StoreError;
use crate::store::etcd::{EtcdConfig, EtcdConfigError};
use crate::tickets::TicketConfig;

/// Settings of a control plane.
#[derive(Clone, Debug)]
pub struct ControlConfig {
    /// The cluster: its name, copies per slot, heartbeats, limits.
    pub cluster: ClusterConfig,
    /// Where to listen for QUIC; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// Where to serve HTTP, if at all. Beyond loopback only with `http_token`.
    pub http_listen: Option<SocketAddr>,
    /// What whoever asks over HTTP must bring, but for `/health` and Mooncake's metadata.
    pub http_token: Option<HttpToken>,
    /// Lets everybody who reaches it use Mooncake's metadata, whose protocol has no authentication: for networks that
    /// are trusted as a whole.
    pub http_without_authentication_anywhere: bool,
    /// Where to publish what becomes of objects, as Mooncake's master does over ZeroMQ; none for not at all. That has
    /// no authentication, so the address must be a loopback one.
    pub kv_events_listen: Option<SocketAddr>,
    /// Serves Mooncake's engines as their metadata server, at `/metadata` of `http_listen`; none for not at all.
    pub mooncake_metadata: Option<MetadataLimits>,
    /// Hosts the Conductor, with these limits; none for not at all.
    pub conductor: Option<ConductorConfig>,
    /// Whether only tenants that were set may put; else others have no quota.
    pub strict_tenants: bool,
    /// Has shards want tickets of their peers, so that they may listen beyond loopback. Without, they want none, and
    /// listen on loopback only.
    pub tickets: Option<TicketConfig>,
    /// How HTTP reaches objects, if at all: for `/get_all_keys` and `/api/v1/remove_all`.
    pub objects: ObjectsAccess,
    /// Directory of the state and the authority's key, made with mode 0700 if its parent exists. Without one, nothing
    /// outlives the process and the authority is new each time.
    pub state_directory: Option<PathBuf>,
    /// Keeps the state in etcd instead, which several control planes of one cluster share: one leads, the others stand
    /// by. Needs `identity_directory`, and no `state_directory`.
    pub etcd: Option<EtcdConfig>,
    /// Directory with `ca.pem`, `control.pem` and `control.key`, where the authority's key is kept elsewhere. Without
    /// one, the authority is in the state directory, or as old as the process. Either is looked at again while it runs.
    pub identity_directory: Option<PathBuf>,
    /// Where to leave identities for processes of the same user, if at all.
    pub publish: Option<RuntimeDirectory>,
    /// Limits of connections and calls.
    pub limits: Limits,
}

impl ControlConfig {
    /// A control plane of `cluster` on free loopback ports, without HTTP, without durable state, unpublished.
    #[must_use]
    pub fn new(cluster: &str) -> Self {
        Self {
            cluster: ClusterConfig::new(cluster),
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            http_listen: None,
            http_token: None,
            strict_tenants: false,
            tickets: None,
            objects: ObjectsAccess::default(),
            http_without_authentication_anywhere: false,
            kv_events_listen: None,
            mooncake_metadata: None,
            conductor: None,
            state_directory: None,
            etcd: None,
            identity_directory: None,
            publish: None,
            limits: Limits::DEFAULT,
        }
    }
}

/// Why a control plane does not start.
#[derive(Debug)]
pub enum StartError {
    /// The cluster's name cannot be in certificates, the authority is unusable, or its directory is.
    Identity(IdentityError),
    /// The file of the keys for tickets is not what was written there.
    TicketKeys(PathBuf),
    /// The file of the ticket time is not what was written there.
    TicketTime(PathBuf),
    /// The state cannot be opened or read.
    Store(StoreError),
    /// The settings contradict each other or the stored state.
    Cluster(ClusterError),
    /// A stored record of the Conductor does not fit this version or its limits.
    Conductor(String),
    /// The state in etcd cannot be used.
    Etcd(EtcdConfigError),
    /// The state is to be in etcd, and something is missing for that, or is too much.
    EtcdShape(&'static str),
    /// What starting itself changes could not be made durable or published.
    FirstChange(String),
    /// The QUIC endpoint.
    Serve(ServeError),
    /// HTTP would be open to others.
    HttpNotLoopback(SocketAddr),
    /// Events would be told to others.
    EventsNotLoopback(SocketAddr),
    /// Events cannot be published.
    EventsListen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// A metadata server is wanted, and no HTTP for it.
    MetadataWithoutHttp,
    /// HTTP cannot listen.
    HttpListen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Nothing could be left for local processes.
    Publish(LocalError),
    /// No thread or runtime could be had.
    Thread(io::Error),
    /// The kernel gives no random numbers.
    Randomness(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TicketKeys(path) => {
                write!(f, "{} is damaged: remove it, and holders of tickets get new ones by themselves", path.display())
            }
            Self::TicketTime(path) => write!(
                f,
                "{} is damaged, which holds the ticket time in seconds: restore a copy, or remove it, and the ticket \
                 time begins anew with this host's clock",
                path.display()
            ),
            Self::Identity(error) => error.fmt(f),
            Self::Store(error) => error.fmt(f),
            Self::Etcd(error) => error.fmt(f),
            Self::Conductor(reason) => write!(f, "the Conductor cannot go on with its stored state: {reason}"),
            Self::EtcdShape(reason) => f.write_str(reason),
            Self::Cluster(error) => error.fmt(f),
            Self::FirstChange(reason) => f.write_str(reason),
            Self::Serve(error) => error.fmt(f),
            Self::HttpNotLoopback(address) => write!(
                f,
                "HTTP on {address} would be open to others without authentication: use a loopback address, or give a \
                 file with a token that whoever asks must bring (--http-token-file)"
            ),
            Self::EventsNotLoopback(address) => write!(
                f,
                "events on {address} would be told to whoever reaches it, as ZeroMQ without security has no \
                 authentication: use a loopback address"
            ),
            Self::EventsListen { address, source } => write!(f, "cannot publish events on TCP {address}: {source}"),
            Self::MetadataWithoutHttp => {
                f.write_str("Mooncake's metadata is served over HTTP: give an address for HTTP, or do without it")
            }
            Self::HttpListen { address, source } if source.kind() == io::ErrorKind::AddrInUse => {
                write!(
                    f,
                    "TCP port {} of {} is in use: stop what listens there, or choose another HTTP port (0 takes a \
                     free one)",
                    address.port(),
                    address.ip()
                )
            }
            Self::HttpListen { address, source } => {
                write!(f, "cannot listen for HTTP on TCP {address}: {source}")
            }
            Self::Publish(error) => error.fmt(f),
            Self::Thread(error) => write!(f, "cannot start the control thread: {error}"),
            Self::Randomness(error) => write!(f, "the kernel gives no random numbers: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

impl From<IdentityError> for StartError {
    fn from(error: IdentityError) -> Self {
        Self::Identity(error)
    }
}

impl From<EtcdConfigError> for StartError {
    fn from(error: EtcdConfigError) -> Self {
        Self::Etcd(error)
    }
}

impl From<StoreError> for StartError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

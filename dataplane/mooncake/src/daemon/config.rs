//! Settings of a handshake daemon, errors of its start, and the choice of its port.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::time::Duration;

use kvplane_sys::net::tcp_listener;

use crate::environment::{DEFAULT_MESSAGE_BYTES, DEFAULT_PORTS, Environment};

/// Connections that may be queued before they are accepted.
const BACKLOG: u32 = 1024;

/// Settings of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonConfig {
    /// Address to listen on. The protocol has no authentication, so it must be a loopback one.
    pub address: IpAddr,
    /// Lifts the restriction on `address`, for networks that are trusted as a whole.
    pub without_authentication_anywhere: bool,
    /// Ports of which a free one is taken at random; `0..=0` lets the system choose.
    pub ports: RangeInclusive<u16>,
    /// Longest request.
    pub max_message_bytes: usize,
    /// Memory for incomplete requests, of all connections together.
    pub max_held_bytes: usize,
    /// Most connections at a time.
    pub max_connections: usize,
    /// Longest idle time of a connection.
    pub idle: Duration,
    /// Longest duration of a connection.
    pub total: Duration,
}

impl Default for DaemonConfig {
    fn default() -> Self {
        Self {
            address: Ipv4Addr::LOCALHOST.into(),
            without_authentication_anywhere: false,
            ports: DEFAULT_PORTS,
            max_message_bytes: DEFAULT_MESSAGE_BYTES,
            max_held_bytes: 64 << 20,
            max_connections: 4096,
            idle: Duration::from_secs(5),
            total: Duration::from_secs(10),
        }
    }
}

impl DaemonConfig {
    /// Creates settings with the address, ports and limits of the environment. An address in `MC_TCP_BIND_ADDRESS` does
    /// not lift the restriction to loopback.
    #[must_use]
    pub fn new(environment: &Environment) -> Self {
        let default = Self::default();
        Self {
            address: environment.bind.unwrap_or(default.address),
            ports: environment.ports.clone(),
            max_message_bytes: environment.max_message_bytes,
            max_held_bytes: default.max_held_bytes.max(environment.max_message_bytes),
            ..default
        }
    }

    pub(super) fn bind(&self) -> Result<TcpListener, StartError> {
        if !self.address.is_loopback() && !self.without_authentication_anywhere {
            return Err(StartError::NotLoopback(self.address));
        }
        if self.max_connections == 0 || self.max_message_bytes == 0 {
            return Err(StartError::Limits);
        }
        let (first, last) = (u32::from(*self.ports.start()), u32::from(*self.ports.end()));
        let count = (last + 1).saturating_sub(first);
        if count == 0 {
            return Err(StartError::NoPort(self.ports.clone()));
        }
        // Each process begins at another port, so that engines that start together do not try the same ones.
        let start = (RandomState::new().hash_one(std::process::id()) % u64::from(count)) as u32;
        for index in 0..count {
            // At most the last port, which is a u16.
            let port = (first + (start + index) % count) as u16;
            match tcp_listener(SocketAddr::new(self.address, port), BACKLOG) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && count > 1 => {}
                result => return result.map_err(StartError::System),
            }
        }
        Err(StartError::NoPort(self.ports.clone()))
    }
}

/// Reason why a daemon does not start.
#[derive(Debug)]
pub enum StartError {
    /// The port would be open to other hosts.
    NotLoopback(IpAddr),
    /// A limit is 0.
    Limits,
    /// All ports of the range are in use, or the range is empty.
    NoPort(RangeInclusive<u16>),
    /// The system refused a resource.
    System(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLoopback(ip) => write!(
                f,
                "a handshake daemon on {ip} would be open to others, and its protocol has no authentication: use a \
                 loopback address, or allow it explicitly"
            ),
            Self::Limits => f.write_str("the handshake daemon's limits of connections and message bytes must not be 0"),
            Self::NoPort(ports) => write!(
                f,
                "no port from {} to {} is free: stop engines that are not needed, or set MC_MIN_RPC_PORT and \
                 MC_MAX_RPC_PORT",
                ports.start(),
                ports.end()
            ),
            Self::System(error) => write!(f, "the handshake daemon cannot start: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

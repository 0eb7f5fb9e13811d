//! Obstacles: the reasons why a transport does not lead to a peer.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use kvplane_engine::CrossError;
use kvplane_mooncake::{DescriptorError, Protocol};

use crate::error::Error;
use crate::rails::rdma::DevicesError;

/// Reason why a transport does not lead to a peer.
#[derive(Debug)]
pub(crate) enum Obstacle {
    /// The kind of peer, in these words.
    Peer { kind: &'static str },
    /// One reason that several transports share.
    Common(Arc<Self>),
    /// The segment of the peer could not be opened.
    NotOpened(Error),
    /// A connection to the peer failed, with the reason of its rail.
    Unreachable { why: String },
    /// The setting of this engine excludes it.
    Off { setting: &'static str },
    /// Shared memory is switched off in this engine.
    NoSharedMemory,
    /// Shared memory is switched off in the peer.
    NoSharedMemoryThere,
    /// The peer runs on another host.
    OtherHost,
    /// The peer's socket for shared memory is not visible.
    HiddenSocket { path: String },
    /// The peer's socket for shared memory does not answer.
    Socket { source: io::Error },
    /// The peer's process is not visible.
    HiddenProcess,
    /// The kernel does not copy between the processes.
    NotCopied {
        pid: i32,
        source: CrossError,
        /// Setting of the kernel, where it restricts such copies.
        ptrace_scope: Option<String>,
    },
    /// No RDMA device is usable.
    Rdma(DevicesError),
    /// This engine uses only RDMA between hosts.
    RdmaRequired,
    /// The peer has no TCP port for the setup of RDMA connections.
    NoSetupPort,
    /// The peer has no TCP port.
    NoPort,
    /// The peer's port does not answer.
    NoAnswer { address: SocketAddr, source: io::Error },
    /// The peer serves other protocols.
    NotOffered { offered: Protocol, missing: &'static str },
    /// The peer's RDMA description is malformed.
    Descriptor(DescriptorError),
    /// The peer's address is unknown.
    NoAddress(Error),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peer { kind } => f.write_str(kind),
            Self::Common(obstacle) => write!(f, "{obstacle}"),
            Self::NotOpened(error) | Self::NoAddress(error) => write!(f, "{error}"),
            Self::Unreachable { why } => write!(f, "it does not lead to the peer from here: {why}"),
            Self::Off { setting } => write!(f, "it is switched off here ({setting})"),
            Self::NoSharedMemory => f.write_str("shared memory is switched off here (shared_memory)"),
            Self::NoSharedMemoryThere => f.write_str("shared memory is switched off there"),
            Self::OtherHost => f.write_str("it runs on another host"),
            Self::HiddenSocket { path } => {
                write!(f, "its socket {path} is not visible from here, as in another container")
            }
            Self::Socket { source } => write!(f, "{source}"),
            Self::HiddenProcess => f.write_str("its process is not visible from here: another pid namespace?"),
            Self::NotCopied { pid, source, ptrace_scope: None } => write!(f, "process {pid}: {source}"),
            Self::NotCopied { pid, source, ptrace_scope: Some(scope) } => {
                write!(f, "process {pid}: {source}; kernel.yama.ptrace_scope is {scope}")
            }
            Self::Rdma(error) => write!(f, "{error}"),
            Self::RdmaRequired => f.write_str("RDMA is required here (rdma)"),
            Self::NoSetupPort => f.write_str("the peer listens on no TCP port, which RDMA needs for its setup"),
            Self::NoPort => f.write_str("the peer listens on no port"),
            Self::NoAnswer { address, source } => write!(f, "{address} does not answer: {source}"),
            Self::NotOffered { offered, missing } => write!(f, "it offers {offered:?} and no {missing}"),
            Self::Descriptor(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Obstacle {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Common(obstacle) => Some(&**obstacle),
            Self::NotOpened(error) | Self::NoAddress(error) => Some(error),
            Self::Socket { source } | Self::NoAnswer { source, .. } => Some(source),
            Self::NotCopied { source, .. } => Some(source),
            Self::Rdma(error) => Some(error),
            Self::Descriptor(error) => Some(error),
            _ => None,
        }
    }
}

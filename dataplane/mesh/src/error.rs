//! Errors of a mesh, and the causes of the end of a channel.

use core::fmt;
use std::io;
use std::net::SocketAddr;

use kvplane_proto::message::Kind;
use kvplane_sys::RegionError;
use kvplane_sys::private_files::FileError;
use kvplane_transport::{CloseCause, RdmaError};

/// Error of a mesh.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum MeshError {
    /// The rank is beyond the limit.
    RankBeyondLimit { rank: u8, limit: usize },
    /// The world's name is empty or too long.
    WorldName { bytes: usize, limit: usize },
    /// The longest payload is no multiple of 64 bytes, or beyond the limit.
    PayloadBytes { bytes: usize, limit: usize },
    /// The memory for channels is too small for those of the largest world.
    WindowBytes { bytes: usize, least: usize },
    /// All lanes are switched off.
    NoLane,
    /// RDMA connections are set up over TCP, which is switched off.
    RdmaWithoutTcp,
    /// The address is beyond loopback, and TLS is not required.
    Unauthenticated { listen: SocketAddr },
    /// The address stands for all addresses, so it must be said which one peers connect to.
    NotAnnounced { listen: SocketAddr },
    /// The announced address is too long for a roster.
    LongAddress { bytes: usize, limit: usize },
    /// The kernel refused a resource.
    Kernel { what: &'static str, source: io::Error },
    /// The directory of sockets cannot be used.
    Directory(FileError),
    /// Memory could not be allocated.
    Memory(RegionError),
    /// An RDMA device cannot be used.
    Rdma(RdmaError),
}

impl fmt::Display for MeshError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RankBeyondLimit { rank, limit } => write!(f, "rank {rank}: a world has at most {limit} processes"),
            Self::WorldName { bytes, limit } => {
                write!(f, "a world's name has 1 to {limit} bytes, not {bytes}")
            }
            Self::PayloadBytes { bytes, limit } => {
                write!(f, "payloads of {bytes} bytes: a multiple of 64 up to {limit} is allowed")
            }
            Self::WindowBytes { bytes, least } => write!(
                f,
                "{bytes} bytes for channels are too few for a world of 64 processes: give it {least}, or shorter \
                 payloads"
            ),
            Self::NoLane => f.write_str("shared memory and TCP are both off: leave one of them on"),
            Self::RdmaWithoutTcp => {
                f.write_str("RDMA connections are set up over TCP: leave it on, or name no RDMA devices")
            }
            Self::Unauthenticated { listen } => write!(
                f,
                "{listen} is beyond loopback: give the mesh certificates with TLS mode require, or set \
                 open_to_network where every process that reaches it is trusted"
            ),
            Self::NotAnnounced { listen } => {
                write!(f, "{listen} stands for all addresses: name the one that peers connect to")
            }
            Self::LongAddress { bytes, limit } => {
                write!(f, "the mesh's address has {bytes} bytes, over the limit of {limit}: use a shorter directory")
            }
            Self::Kernel { what, source } => write!(f, "{what}: {source}"),
            Self::Directory(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::Rdma(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for MeshError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Kernel { source, .. } => Some(source),
            Self::Directory(error) => Some(error),
            Self::Memory(error) => Some(error),
            _ => None,
        }
    }
}

impl From<RegionError> for MeshError {
    fn from(error: RegionError) -> Self {
        Self::Memory(error)
    }
}

/// Returns a closure for `map_err` that names what was attempted.
pub(crate) fn kernel(what: &'static str) -> impl FnOnce(io::Error) -> MeshError {
    move |source| MeshError::Kernel { what, source }
}

/// Violation of the rules of a channel by its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChannelError {
    /// Shared memory has a position or a length that no sender writes.
    Corrupt { position: u64, found: u64 },
    /// The bytes of a frame do not match their checksum.
    Checksum { number: u32 },
    /// A frame arrived within another one.
    Nested { number: u32 },
    /// Another frame arrived than the next one.
    Order { kind: Kind, number: u32, expected: u32 },
    /// A frame is shorter than a head, or longer than the longest.
    Length { bytes: u64 },
}

impl fmt::Display for ChannelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Corrupt { position, found } => {
                write!(f, "the peer corrupted the channel: found {found} at position {position}")
            }
            Self::Checksum { number } => write!(f, "the bytes of frame {number} do not match their checksum"),
            Self::Nested { number } => write!(f, "a frame arrived within frame {number}"),
            Self::Order { kind, number, expected } => {
                write!(f, "{kind:?} {number} arrived where frame {expected} is next")
            }
            Self::Length { bytes } => write!(f, "a frame of {bytes} bytes arrived"),
        }
    }
}

impl std::error::Error for ChannelError {}

/// Cause of the end of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DownCause {
    /// The peer closed the connection or died: the end of its socket, or a reset.
    Ended,
    /// The peer connected again: it had lost the former connection.
    Reconnected,
    /// The connection failed, or the peer violated the protocol; the text says how.
    Failed(String),
}

impl fmt::Display for DownCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended => f.write_str("the peer closed the connection, or died"),
            Self::Reconnected => f.write_str("the peer connected again"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

impl From<&CloseCause> for DownCause {
    fn from(cause: &CloseCause) -> Self {
        match cause {
            CloseCause::Peer => Self::Ended,
            CloseCause::Kernel(errno) if RESET.contains(errno) => Self::Ended,
            other => Self::Failed(other.to_string()),
        }
    }
}

/// `EPIPE`, `ECONNABORTED`, `ECONNRESET`.
const RESET: [i32; 3] = [32, 103, 104];

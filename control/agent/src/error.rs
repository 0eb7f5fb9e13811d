//! What callers of this crate see when something goes wrong.

use core::fmt;

use kvplane_engine::{RegionError, ShardError};
use kvplane_proto::Status;
use kvplane_proto::client::SubmitError;
use kvplane_rpc::{CallError, ConnectError, LocalError};

/// Why something could not be done.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The store or the peer says no.
    Status {
        /// What was asked for.
        what: String,
        /// The answer.
        status: Status,
        /// The last trouble with a connection, where that is the likely cause.
        cause: Option<String>,
    },
    /// The request is malformed; nothing was done.
    Request(SubmitError),
    /// A setting or argument cannot be: says which and why.
    Argument(String),
    /// No local control plane was found, or it may not be trusted.
    Discovery(LocalError),
    /// The control plane could not be reached.
    Connect(ConnectError),
    /// The control plane said no.
    Call(CallError),
    /// A shard could not be started, or did not answer.
    Shard(ShardError),
    /// Memory could not be had.
    Memory(RegionError),
    /// The kernel says no.
    System(std::io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status { what, status, cause: Some(cause) } => write!(f, "{what}: {status} ({cause})"),
            Self::Status { what, status, cause: None } => write!(f, "{what}: {status}"),
            Self::Request(error) => write!(f, "{error}"),
            Self::Argument(why) => f.write_str(why),
            Self::Discovery(error) => write!(f, "{error}"),
            Self::Connect(error) => write!(f, "{error}"),
            Self::Call(error) => write!(f, "{error}"),
            Self::Shard(error) => write!(f, "{error}"),
            Self::Memory(error) => write!(f, "{error}"),
            Self::System(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// The status, when a store or a peer gave one.
    #[must_use]
    pub const fn status(&self) -> Option<Status> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }
}

macro_rules! from {
    ($($source:ty => $variant:ident,)*) => {
        $(impl From<$source> for Error {
            fn from(error: $source) -> Self {
                Self::$variant(error)
            }
        })*
    };
}

from! {
    SubmitError => Request,
    LocalError => Discovery,
    ConnectError => Connect,
    CallError => Call,
    ShardError => Shard,
    RegionError => Memory,
    std::io::Error => System,
}

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
    /// Memory is registered already, whole or in part.
    AddressOverlapped {
        /// Where the new range begins.
        address: u64,
        /// Its length.
        bytes: u64,
        /// Where the registered range begins.
        other_address: u64,
        /// Its length.
        other_bytes: u64,
    },
    /// A range is not within one registered buffer: says which range, and whose buffers.
    AddressNotRegistered(String),
    /// More is open or in flight than may be: says what, and the limit.
    TooManyRequests(String),
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
            Self::Argument(why) | Self::AddressNotRegistered(why) | Self::TooManyRequests(why) => f.write_str(why),
            Self::AddressOverlapped { address, bytes, other_address, other_bytes } => write!(
                f,
                "memory of {bytes} bytes at {address:#x} overlaps {other_bytes} bytes registered at {other_address:#x}"
            ),
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

    /// The number that Mooncake's C interface has for errors of this kind; always negative.
    #[must_use]
    pub fn code(&self) -> i32 {
        match self {
            Self::Request(SubmitError::TooMany { .. } | SubmitError::Busy { .. }) | Self::TooManyRequests(_) => -2,
            Self::Request(_) | Self::Argument(_) => -1,
            Self::AddressNotRegistered(_) => -3,
            Self::Shard(ShardError::Busy) => -4,
            Self::AddressOverlapped { .. } => -7,
            Self::Status { status, .. } => code_of(*status),
            Self::Discovery(_) | Self::Connect(_) | Self::Call(_) => -200,
            Self::Memory(_) => -302,
            Self::Shard(_) | Self::System(_) => -102,
        }
    }
}

const fn code_of(status: Status) -> i32 {
    match status {
        Status::Busy => -4,
        Status::Stale | Status::OutOfRange => -3,
        Status::Unreachable | Status::DeadlineExceeded | Status::Cancelled | Status::Corrupt => -102,
        Status::Incompatible | Status::Unauthorized => -104,
        Status::NotFound | Status::NoOwner | Status::WrongOwner => -200,
        Status::NoSpace => -302,
        Status::Unsupported => -303,
        _ => -1,
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

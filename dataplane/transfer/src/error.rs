//! What callers of the transfer engine see when something goes wrong.

use core::fmt;

use kvplane_client::SubmitError;
use kvplane_engine::{RegionError, ShardError};
use kvplane_mooncake::{CallError, DescriptorError, Stage, StartError, StoreError};
use kvplane_proto::Status;
use kvplane_sys::private_files::FileError;

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
    /// Another engine could not be asked, or answered wrongly.
    Handshake(CallError),
    /// The handshake daemon does not start.
    Daemon(StartError),
    /// The store of metadata failed.
    Metadata(StoreError),
    /// A segment's descriptor cannot be: says why.
    Descriptor(DescriptorError),
    /// What another engine published makes no sense: says what.
    Malformed(String),
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
        /// Whether that is being unregistered, and not left by its users yet.
        leaving: bool,
    },
    /// Memory was unregistered and is still used, or may be: it must stay until unregistering was asked for again and
    /// has succeeded.
    MemoryHeld {
        /// Where it begins.
        address: u64,
        /// Its length.
        bytes: u64,
        /// By whom it is used, where that is known, and what to do.
        why: ShardError,
    },
    /// A range is not within one registered buffer: says which range, and whose buffers.
    AddressNotRegistered(String),
    /// More is open or in flight than may be: says what, and the limit.
    TooManyRequests(String),
    /// A shard could not be started, or did not answer.
    Shard(ShardError),
    /// The directory of sockets cannot be used.
    Directory(FileError),
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
            Self::Handshake(error) => write!(f, "{error}"),
            Self::Daemon(error) => write!(f, "{error}"),
            Self::Metadata(error) => write!(f, "{error}"),
            Self::Descriptor(error) => write!(f, "{error}"),
            Self::Malformed(why)
            | Self::Argument(why)
            | Self::AddressNotRegistered(why)
            | Self::TooManyRequests(why) => f.write_str(why),
            Self::AddressOverlapped { address, bytes, other_address, other_bytes, leaving } => write!(
                f,
                "memory of {bytes} bytes at {address:#x} overlaps {other_bytes} bytes {} at {other_address:#x}",
                if *leaving { "that are being unregistered and still used" } else { "registered" }
            ),
            Self::MemoryHeld { address, bytes, why } => {
                write!(f, "the memory of {bytes} bytes at {address:#x} cannot be given back yet: {why}")
            }
            Self::Shard(error) => write!(f, "{error}"),
            Self::Directory(error) => write!(f, "{error}"),
            Self::Memory(error) => write!(f, "{error}"),
            Self::System(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// The caller's wait was ended before there was an outcome: see [`kvplane_sys::interrupt`].
    pub(crate) fn interrupted() -> Self {
        let what = "the call was interrupted before it had an outcome".to_owned();
        Self::Status { what, status: Status::Cancelled, cause: None }
    }

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
            Self::Request(_) | Self::Argument(_) | Self::Directory(_) => -1,
            Self::AddressNotRegistered(_) => -3,
            Self::Shard(ShardError::Busy) | Self::MemoryHeld { .. } => -4,
            Self::AddressOverlapped { .. } => -7,
            Self::Status { status, .. } => code_of_status(*status),
            Self::Handshake(error) => match error.stage {
                Stage::Resolve => -101,
                Stage::Connect | Stage::Send | Stage::Receive => -102,
                Stage::Decode => -103,
            },
            Self::Descriptor(_) | Self::Malformed(_) => -103,
            Self::Metadata(_) => -200,
            Self::Memory(_) => -302,
            Self::Shard(_) | Self::System(_) | Self::Daemon(_) => -102,
        }
    }
}

/// The number that Mooncake's C interface has for a status; negative.
#[must_use]
pub const fn code_of_status(status: Status) -> i32 {
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
    CallError => Handshake,
    StartError => Daemon,
    StoreError => Metadata,
    DescriptorError => Descriptor,
    ShardError => Shard,
    FileError => Directory,
    RegionError => Memory,
    std::io::Error => System,
}

//! Errors of the transfer engine.

mod argument;
mod refusals;

use core::fmt;

use kvplane_client::SubmitError;
use kvplane_engine::{RegionError, ShardError};
use kvplane_mooncake::{CallError, DescriptorError, Stage, StartError, StoreError};
use kvplane_proto::Status;
use kvplane_sys::device::DeviceError;
use kvplane_sys::private_files::FileError;

pub use argument::{ArgumentError, FileNameError};
pub use refusals::{DirectNameError, LimitError, PublishedError, RangeError};

/// Error of a call.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The store or the peer refused the operation.
    Status {
        /// Operation that failed.
        what: String,
        /// Status of the reply.
        status: Status,
        /// Last connection failure, where that is the likely cause.
        cause: Option<String>,
    },
    /// The request is malformed; nothing was done.
    Request(SubmitError),
    /// A handshake with another engine failed.
    Handshake(CallError),
    /// The handshake daemon does not start.
    Daemon(StartError),
    /// The metadata store failed.
    Metadata(StoreError),
    /// A segment's descriptor is invalid.
    Descriptor(DescriptorError),
    /// Published data of another engine is malformed.
    Malformed(PublishedError),
    /// A setting or an argument is invalid.
    Argument(ArgumentError),
    /// The memory is registered already, entirely or in part.
    AddressOverlapped {
        /// Address of the new range.
        address: u64,
        /// Length of the new range.
        bytes: u64,
        /// Address of the registered range.
        other_address: u64,
        /// Length of the registered range.
        other_bytes: u64,
        /// True if the registered range is being unregistered, and still in use.
        leaving: bool,
    },
    /// The memory was unregistered and is still in use, or may be: it must not be freed until another call of
    /// unregister has succeeded.
    MemoryHeld {
        /// Address.
        address: u64,
        /// Length.
        bytes: u64,
        /// Users of the memory, where they are known, and the next step.
        why: ShardError,
    },
    /// A range is not within one registered buffer.
    AddressNotRegistered(RangeError),
    /// A limit of open or in-flight items is reached.
    TooManyRequests(LimitError),
    /// A shard failed to start, or does not answer.
    Shard(ShardError),
    /// The directory of sockets is unusable.
    Directory(FileError),
    /// Memory could not be allocated or registered.
    Memory(RegionError),
    /// Memory of a device could not be registered, or a driver failed.
    Device(DeviceError),
    /// A system call failed.
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
            Self::Malformed(error) => write!(f, "{error}"),
            Self::Argument(error) => write!(f, "{error}"),
            Self::AddressNotRegistered(error) => write!(f, "{error}"),
            Self::TooManyRequests(error) => write!(f, "{error}"),
            Self::AddressOverlapped { address, bytes, other_address, other_bytes, leaving } => write!(
                f,
                "memory of {bytes} bytes at {address:#x} overlaps {other_bytes} bytes {} at {other_address:#x}",
                if *leaving { "that are being unregistered and are still in use" } else { "registered" }
            ),
            Self::MemoryHeld { address, bytes, why } => {
                write!(f, "the memory of {bytes} bytes at {address:#x} must not be freed yet: {why}")
            }
            Self::Shard(error) => write!(f, "{error}"),
            Self::Directory(error) => write!(f, "{error}"),
            Self::Memory(error) => write!(f, "{error}"),
            Self::Device(error) => write!(f, "{error}"),
            Self::System(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// Error of a call whose wait was ended before there was an outcome: see [`kvplane_sys::interrupt`].
    pub(crate) fn interrupted() -> Self {
        let what = "the call was interrupted before it had an outcome".to_owned();
        Self::Status { what, status: Status::Cancelled, cause: None }
    }

    /// Returns the status, if a store or a peer replied with one.
    #[must_use]
    pub const fn status(&self) -> Option<Status> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// Returns true if an engine's host refused the connection: the engine's process has ended, or was never there.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        let Self::Handshake(error) = self else { return false };
        error.source.as_ref().is_some_and(|source| source.kind() == std::io::ErrorKind::ConnectionRefused)
    }

    /// Returns the error code that Mooncake's C interface uses for errors of this kind; always negative.
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
            Self::Memory(_) | Self::Device(DeviceError::OutOfMemory { .. }) => -302,
            Self::Device(
                DeviceError::NoDriver { .. } | DeviceError::OldDriver { .. } | DeviceError::Unsupported { .. },
            ) => -303,
            Self::Device(DeviceError::UnknownAddress { .. } | DeviceError::Stale { .. }) => -3,
            Self::Device(DeviceError::Lost { .. } | DeviceError::Call { .. }) => -102,
            Self::Device(_) => -1,
            Self::Shard(_) | Self::System(_) | Self::Daemon(_) => -102,
        }
    }
}

/// Returns the error code that Mooncake's C interface uses for a status; negative.
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
    ArgumentError => Argument,
    LimitError => TooManyRequests,
    PublishedError => Malformed,
    RangeError => AddressNotRegistered,
    SubmitError => Request,
    CallError => Handshake,
    StartError => Daemon,
    StoreError => Metadata,
    DescriptorError => Descriptor,
    ShardError => Shard,
    FileError => Directory,
    RegionError => Memory,
    DeviceError => Device,
    std::io::Error => System,
}

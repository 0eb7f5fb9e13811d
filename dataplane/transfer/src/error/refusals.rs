//! Errors of ranges, limits, and data that other engines publish.

use core::fmt;

use kvplane_mooncake::NoticesFull;
use kvplane_mooncake::keys::MalformedRpcMeta;
use kvplane_mooncake::names::NameError;
use kvplane_proto::Limits;

/// Range that is not within one registered buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum RangeError {
    /// No memory is registered at the address.
    NoBuffer { address: u64 },
    /// The range is not within one of the engine's own buffers.
    NotOurs { request: usize, address: u64, bytes: u64 },
    /// The range is not within one of a peer's buffers.
    NotTheirs { request: usize, address: u64, bytes: u64, segment: String },
    /// The range is not within a file.
    NotInFile { request: usize, offset: u64, bytes: u64, name: String, file_bytes: u64 },
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoBuffer { address } => write!(f, "no memory is registered at {address:#x}"),
            Self::NotOurs { request, address, bytes } => write!(
                f,
                "request {request}: {bytes} bytes at {address:#x} are not within one of our registered buffers"
            ),
            Self::NotTheirs { request, address, bytes, segment } => write!(
                f,
                "request {request}: {bytes} bytes at {address:#x} are not within one of {segment}'s registered buffers"
            ),
            Self::NotInFile { request, offset, bytes, name, file_bytes } => write!(
                f,
                "request {request}: {bytes} bytes at {offset} are not within the {file_bytes} bytes of {name}"
            ),
        }
    }
}

impl std::error::Error for RangeError {}

/// Limit of open or in-flight items that is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum LimitError {
    /// A batch has too many requests.
    Requests { requests: u64 },
    /// Too many batches or slices would be in flight.
    InFlight {
        batches: usize,
        most_batches: usize,
        slices: usize,
        /// Slices of the refused batch.
        further_slices: usize,
    },
    /// Too many buffers are registered.
    Buffers { limit: usize },
    /// Too many segments are open.
    Segments { open: usize },
    /// Too many notices wait to be sent.
    NoticesToSend { waiting: usize },
    /// Too many notices wait to be taken.
    NoticesToTake(NoticesFull),
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requests { requests } => write!(
                f,
                "a batch of {requests} requests is over the limit of {}: submit it in parts",
                Limits::BATCH_REQUESTS
            ),
            Self::InFlight { batches, most_batches, slices, further_slices } => write!(
                f,
                "{batches} batches with {slices} slices are in flight, and {further_slices} slices more would exceed \
                 the limits of {most_batches} and {}: wait for some to complete",
                Limits::OPEN_SLICES
            ),
            Self::Buffers { limit } => write!(f, "{limit} buffers are registered, which is the limit"),
            Self::Segments { open } => write!(f, "{open} segments are open already: close some"),
            Self::NoticesToSend { waiting } => {
                write!(f, "{waiting} notices wait to be sent, which is the limit")
            }
            Self::NoticesToTake(why) => write!(f, "{why}"),
        }
    }
}

impl std::error::Error for LimitError {}

/// Malformed data that another engine has published.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum PublishedError {
    /// The address of its data port.
    Address(NameError),
    /// The address of its daemon in the metadata store.
    Daemon(MalformedRpcMeta),
    /// Its name, which has to carry its description.
    DirectName { name: String, why: DirectNameError },
}

impl fmt::Display for PublishedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(why) => write!(f, "{why}"),
            Self::Daemon(why) => write!(f, "{why}"),
            Self::DirectName { name, why } => write!(f, "the segment name {name:?}: {why}"),
        }
    }
}

impl std::error::Error for PublishedError {}

/// Error of a name that has to carry the description of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DirectNameError {
    /// It has another scheme.
    Scheme,
    /// Parts are missing.
    Parts,
    /// The first part is no address.
    Address,
    /// The incarnation is no hexadecimal number.
    Incarnation,
}

impl fmt::Display for DirectNameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scheme => "it does not begin with kvplane://",
            Self::Parts => "an address, an incarnation and a host are needed",
            Self::Address => "it does not begin with an address",
            Self::Incarnation => "the incarnation is not hexadecimal",
        })
    }
}

impl std::error::Error for DirectNameError {}

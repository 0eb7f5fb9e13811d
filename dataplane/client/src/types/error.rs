//! Errors of submitting a batch.

use core::fmt;

/// Reason to reject a batch. A rejected batch has no effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SubmitError {
    /// The batch has no requests.
    Empty,
    /// The batch has more requests than the limit.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    TooMany { requests: usize, limit: usize },
    /// A request moves 0 bytes.
    ZeroBytes {
        /// Position of the request.
        index: usize,
    },
    /// A request moves more bytes than the payload of one frame may have.
    TooLarge {
        /// Position of the request.
        index: usize,
        /// Bytes of the request.
        bytes: u64,
        /// Limit of the bytes.
        limit: u64,
    },
    /// A request's range of memory or of a segment ends beyond 2^64 bytes.
    OutOfRange {
        /// Position of the request.
        index: usize,
    },
    /// The client has too many slices in flight (backpressure).
    Busy {
        /// Slices in flight.
        open: usize,
        /// Slices of this batch.
        slices: usize,
        /// Limit of both together.
        limit: usize,
    },
    /// A request names a peer that is not open.
    UnknownPeer {
        /// Position of the request.
        index: usize,
    },
    /// A put names an entry that the batch's book of puts does not have.
    UnknownPut {
        /// Position of the request.
        index: usize,
    },
    /// Two requests of the batch write to overlapping memory of the caller.
    Overlap {
        /// Position of the first request.
        first: usize,
        /// Position of the second request.
        second: usize,
    },
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the batch has no requests"),
            Self::TooMany { requests, limit } => {
                write!(f, "a batch of {requests} requests is over the limit of {limit}: submit it in parts")
            }
            Self::ZeroBytes { index } => write!(f, "request {index} moves 0 bytes"),
            Self::TooLarge { index, bytes, limit } => {
                write!(f, "request {index} moves {bytes} bytes, over the limit of {limit}")
            }
            Self::OutOfRange { index } => write!(f, "the range of request {index} ends beyond 2^64 bytes"),
            Self::Busy { open, slices, limit } => write!(
                f,
                "{open} slices are in flight and {slices} more exceed the limit of {limit}: wait for some to complete"
            ),
            Self::UnknownPeer { index } => write!(f, "request {index} names a segment that was not opened"),
            Self::UnknownPut { index } => write!(f, "request {index} names an entry that the book of puts lacks"),
            Self::Overlap { first, second } => {
                write!(f, "requests {first} and {second} write to overlapping memory")
            }
        }
    }
}

impl std::error::Error for SubmitError {}

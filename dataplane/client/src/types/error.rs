//! Why a batch is not taken in.

use core::fmt;

/// Why a batch was refused. Nothing of it was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SubmitError {
    /// No requests.
    Empty,
    /// More requests than one batch may hold.
    TooMany {
        /// How many.
        requests: usize,
        /// The limit.
        limit: usize,
    },
    /// A request moves 0 bytes.
    ZeroBytes {
        /// Which request.
        index: usize,
    },
    /// A request moves more than one frame may.
    TooLarge {
        /// Which request.
        index: usize,
        /// Its bytes.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A request's range of memory or of a segment ends beyond 2^64 bytes.
    OutOfRange {
        /// Which request.
        index: usize,
    },
    /// More is open than one client may have open.
    Busy {
        /// Slices that are open.
        open: usize,
        /// Slices of this batch.
        slices: usize,
        /// The limit.
        limit: usize,
    },
    /// A request names a peer that was never opened.
    UnknownPeer {
        /// Which request.
        index: usize,
    },
    /// A put names an entry that the batch's book does not have.
    UnknownPut {
        /// Which request.
        index: usize,
    },
    /// Two requests of the batch write to overlapping memory of the caller.
    Overlap {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
    },
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("a batch of no requests"),
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
                "{open} slices are open and {slices} more would be over the limit of {limit}: wait for some to complete"
            ),
            Self::UnknownPeer { index } => write!(f, "request {index} names a segment that was not opened"),
            Self::UnknownPut { index } => write!(f, "request {index} names an entry that the book of puts has not"),
            Self::Overlap { first, second } => {
                write!(f, "requests {first} and {second} write to overlapping memory")
            }
        }
    }
}

impl std::error::Error for SubmitError {}

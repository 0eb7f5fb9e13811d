//! Errors of arguments of the store's clients.

use core::fmt;
use core::time::Duration;

use kvplane_engine::PiecesError;
use kvplane_proto::Limits;

/// Argument of a call of a client, or setting of a client, that is invalid.
#[derive(Debug)]
#[non_exhaustive]
pub enum ArgumentError {
    /// The settings allow no path to any node.
    NoPath,
    /// The tenant's name is too long.
    TenantName {
        /// Length of the name.
        bytes: usize,
    },
    /// The key is empty or too long.
    Key {
        /// Length of the key.
        bytes: usize,
    },
    /// The soft pin is too long.
    SoftPin {
        /// Requested duration of the soft pin.
        soft_pin_ms: u32,
    },
    /// The number of replicas is beyond what a cluster can have.
    Replicas {
        /// Requested number, the owner's replica included.
        replicas: u8,
    },
    /// The put is to wait for more replicas than it requests.
    WaitReplicas {
        /// Number of replicas to wait for, the owner's included.
        wait_replicas: u8,
        /// Requested number.
        replicas: u8,
    },
    /// The duration of a pin is zero or too long.
    PinDuration {
        /// Requested duration.
        duration: Duration,
    },
    /// The idle limit of a put session is zero or too long.
    SessionIdle {
        /// Requested idle limit.
        idle_ms: u32,
    },
    /// The pattern of keys is too long.
    PatternLength {
        /// Length of the pattern.
        bytes: usize,
    },
    /// The pattern of keys is no regular expression, or takes too much memory.
    Pattern(regex::Error),
    /// The object is in too many pieces.
    Pieces {
        /// Number of pieces.
        pieces: usize,
    },
    /// Two pieces overlap, and both would be written.
    PiecesOverlap {
        /// Length of the first piece.
        bytes: u64,
        /// Offset of the first piece in its buffer.
        offset: u64,
        /// Offset of the next piece in the same buffer.
        next_offset: u64,
    },
    /// The pieces cannot be one buffer.
    PieceMemory(PiecesError),
    /// A slice is of memory that another client registered, or that is not registered any more.
    UnregisteredSlice,
}

impl fmt::Display for ArgumentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPath => {
                f.write_str("neither shared memory nor TCP is allowed, and RDMA is not required: no path to any node")
            }
            Self::TenantName { bytes } => {
                write!(f, "the tenant's name has {bytes} bytes, over the limit of {}", Limits::NAME_BYTES)
            }
            Self::Key { bytes } => write!(f, "a key has 1 to {} bytes, not {bytes}", Limits::KEY_BYTES),
            Self::SoftPin { soft_pin_ms } => {
                write!(f, "a soft pin of {soft_pin_ms} ms is over the limit of {} ms", Limits::SOFT_PIN_MS)
            }
            Self::Replicas { replicas } => {
                write!(f, "an object has 1 to {} replicas, not {replicas}", Limits::REPLICAS)
            }
            Self::WaitReplicas { wait_replicas, replicas } => {
                write!(f, "a put of {replicas} replicas cannot wait for {wait_replicas}")
            }
            Self::PinDuration { duration } => {
                write!(f, "a pin lasts 1 to {} ms, not {} ms", Limits::SOFT_PIN_MS, duration.as_millis())
            }
            Self::SessionIdle { idle_ms } => {
                write!(f, "the idle limit of a session is 1 to {} ms, not {idle_ms}", Limits::PUT_SESSION_IDLE_MOST_MS)
            }
            Self::PatternLength { bytes } => {
                write!(f, "a pattern of {bytes} bytes is over the limit of {}", Limits::KEY_BYTES)
            }
            Self::Pattern(error) => {
                // Of a message of several lines, the last states the error; those before draw it.
                let text = error.to_string();
                let why = text.lines().last().unwrap_or_default().trim_start_matches("error: ");
                write!(f, "the pattern cannot be used: {why}")
            }
            Self::Pieces { pieces } => {
                write!(f, "an object in {pieces} pieces is over the limit of {}", Limits::RANGES_PER_FRAME)
            }
            Self::PiecesOverlap { bytes, offset, next_offset } => {
                write!(f, "pieces overlap: {bytes} bytes at {offset}, and the next piece at {next_offset}")
            }
            Self::PieceMemory(error) => write!(f, "{error}"),
            Self::UnregisteredSlice => f.write_str("a slice of memory that is not registered with this client"),
        }
    }
}

impl std::error::Error for ArgumentError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_the_argument_and_its_limit() {
        let says = |error: ArgumentError, text: &str| assert_eq!(error.to_string(), text);
        says(ArgumentError::Key { bytes: 0 }, "a key has 1 to 4096 bytes, not 0");
        says(
            ArgumentError::SoftPin { soft_pin_ms: u32::MAX },
            "a soft pin of 4294967295 ms is over the limit of 86400000 ms",
        );
        says(ArgumentError::Replicas { replicas: 9 }, "an object has 1 to 8 replicas, not 9");
        let waits = ArgumentError::WaitReplicas { wait_replicas: 3, replicas: 2 };
        says(waits, "a put of 2 replicas cannot wait for 3");
        let overlap = ArgumentError::PiecesOverlap { bytes: 10, offset: 0, next_offset: 9 };
        says(overlap, "pieces overlap: 10 bytes at 0, and the next piece at 9");
    }

    #[test]
    fn a_wrong_pattern_is_explained_in_one_line() {
        #[expect(clippy::invalid_regex, reason = "the error is wanted")]
        let error = regex::Regex::new("(").expect_err("a group without an end");
        let text = ArgumentError::Pattern(error).to_string();
        assert_eq!(text, "the pattern cannot be used: unclosed group");
    }
}

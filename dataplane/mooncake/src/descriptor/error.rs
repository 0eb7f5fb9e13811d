//! Errors of descriptors.

use std::fmt;

/// Reason why a descriptor is refused.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DescriptorError {
    /// The descriptor is longer than allowed.
    TooLong { bytes: usize, limit: usize },
    /// The text is not JSON, or JSON of another shape.
    Json {
        /// Line, from 1.
        line: usize,
        /// Column in bytes, from 1.
        column: usize,
        /// Error of the parser.
        reason: String,
    },
    /// A value is invalid.
    Invalid {
        /// Path of the key, such as `buffers[3].addr`.
        key: String,
        /// Text that follows the key in the message.
        reason: String,
    },
}

pub(super) fn invalid(key: impl Into<String>, reason: String) -> DescriptorError {
    DescriptorError::Invalid { key: key.into(), reason }
}

impl From<serde_json::Error> for DescriptorError {
    fn from(error: serde_json::Error) -> Self {
        Self::Json { line: error.line(), column: error.column(), reason: error.to_string() }
    }
}

impl fmt::Display for DescriptorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { bytes, limit } => write!(
                f,
                "the segment descriptor has {bytes} bytes, more than {limit}: register fewer, larger buffers, or raise \
                 MC_HANDSHAKE_MAX_LENGTH on both sides"
            ),
            // The reason ends with line and column.
            Self::Json { reason, .. } => write!(f, "the segment descriptor cannot be read: {reason}"),
            Self::Invalid { key, reason } => write!(f, "the segment descriptor is refused: {key} {reason}"),
        }
    }
}

impl std::error::Error for DescriptorError {}

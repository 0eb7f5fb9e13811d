//! What is wrong with a descriptor.

use std::fmt;

/// Why a descriptor is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DescriptorError {
    /// Longer than allowed.
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Not JSON, or JSON of another shape.
    Json {
        /// Line, from 1.
        line: usize,
        /// Column in bytes, from 1.
        column: usize,
        /// What was found.
        reason: String,
    },
    /// A value that cannot be.
    Invalid {
        /// Path of the key, such as `buffers[3].addr`.
        key: String,
        /// What is wrong with it.
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

//! Errors of the threads of a benchmark.

use std::fmt;
use std::io;

use crate::command::Failure;

/// Error of one thread.
#[derive(Debug)]
pub(crate) enum ThreadError {
    /// The kernel refused to start it.
    NotStarted {
        /// Number of the thread, from 1.
        number: u64,
        /// Threads of the run.
        threads: u64,
        source: io::Error,
    },
    /// It panicked.
    Panicked,
    /// It was ready but could not begin, because another thread was not.
    Abandoned,
    /// Its work failed.
    Failed(Failure),
}

impl fmt::Display for ThreadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotStarted { number, threads, source } => {
                write!(f, "thread {number} of {threads} cannot be started: {source}")
            }
            Self::Panicked => f.write_str("a thread panicked"),
            Self::Abandoned => f.write_str("another thread could not begin"),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ThreadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NotStarted { source, .. } => Some(source),
            Self::Failed(error) => Some(&**error),
            Self::Panicked | Self::Abandoned => None,
        }
    }
}

impl From<Failure> for ThreadError {
    fn from(error: Failure) -> Self {
        Self::Failed(error)
    }
}

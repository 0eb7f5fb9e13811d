//! Errors of the scheduler's calls.

use std::fmt;

use crate::index::IndexError;

/// Reason for rejecting a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum SchedulerError {
    /// No instance has this number.
    UnknownInstance { instance: usize },
    /// No request of this number is booked.
    UnknownRequest { id: u64 },
    /// The maximum number of reservations is reached.
    TooManyReservations { most: usize },
    /// The central queue is full.
    QueueFull { most: usize },
    /// Error of the index.
    Index(IndexError),
}

impl fmt::Display for SchedulerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownInstance { instance } => write!(f, "there is no instance {instance}; register it first"),
            Self::UnknownRequest { id } => write!(f, "request {id} is not booked; it was released or its lease ended"),
            Self::TooManyReservations { most } => write!(f, "{most} requests are booked; release some"),
            Self::QueueFull { most } => write!(f, "{most} requests wait already; try again later"),
            Self::Index(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SchedulerError {}

impl From<IndexError> for SchedulerError {
    fn from(error: IndexError) -> Self {
        Self::Index(error)
    }
}

//! Why the scheduler refuses a call.

use std::fmt;

use crate::index::IndexError;

/// Why a call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulerError {
    /// No instance of that number.
    UnknownInstance {
        /// The number.
        instance: usize,
    },
    /// No request of that number is booked.
    UnknownRequest {
        /// The number.
        id: u64,
    },
    /// There are as many reservations as there may be.
    TooManyReservations {
        /// The limit.
        most: usize,
    },
    /// The central queue is full.
    QueueFull {
        /// The limit.
        most: usize,
    },
    /// What the index says.
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

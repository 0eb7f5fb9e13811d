//! Errors of the Conductor's calls.

use std::fmt;

use super::limits::Limit;
use crate::scheduler::{CapabilityError, SchedulerError};

/// Reason for rejecting a call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ConductorError {
    /// The request is malformed.
    Bad {
        /// Description, with the offending number.
        what: String,
    },
    /// No instance has that name, or not in that incarnation.
    UnknownInstance { name: String },
    /// No request of that id waits or is booked.
    UnknownRequest { name: String },
    /// No reservation has that number.
    UnknownReservation { reservation: u64 },
    /// No instance serves that model.
    UnknownModel { model: String, tenant: String, block_tokens: u32 },
    /// Operators have set the greatest number of classes or weights.
    ServiceLimit {
        /// Limited items.
        what: &'static str,
        most: usize,
    },
    /// No operator has set that class.
    UnknownClass { name: String },
    /// The request conflicts with an existing entry.
    Conflict {
        /// Text that describes the request and the entry that it conflicts with.
        what: String,
    },
    /// A limit is reached.
    Limit {
        limit: Limit,
        /// Its value.
        most: usize,
    },
    /// A later incarnation of the instance has registered.
    StaleIncarnation {
        name: String,
        /// Its present incarnation.
        incarnation: u64,
    },
    /// Capabilities of an instance are out of their limits, or contradict those of its pipeline group.
    Capability(CapabilityError),
    /// Error of a scheduler.
    Scheduler(SchedulerError),
}

impl fmt::Display for ConductorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bad { what } | Self::Conflict { what } => f.write_str(what),
            Self::UnknownInstance { name } => write!(f, "there is no instance {name:?}; register it first"),
            Self::UnknownRequest { name } => write!(f, "no request {name:?} waits or is booked"),
            Self::UnknownReservation { reservation } => {
                write!(f, "there is no reservation {reservation}; it was released, or its lease ended")
            }
            Self::UnknownModel { model, tenant, block_tokens } => write!(
                f,
                "no instance of model {model:?} with blocks of {block_tokens} tokens is registered for tenant \
                 {tenant:?}"
            ),
            Self::UnknownClass { name } => {
                write!(f, "there is no class {name:?}; an operator sets it: kvplane ctl conductor class {name}")
            }
            Self::ServiceLimit { what, most } => {
                write!(f, "there are {most} {what} already, which is the limit; reset or remove others first")
            }
            Self::Limit { limit, most } => {
                let (name, flag) = (limit.name(), limit.flag());
                write!(f, "there are {most} {name} already, which is the limit of the control plane's --{flag}")
            }
            Self::StaleIncarnation { name, incarnation } => {
                write!(
                    f,
                    "instance {name:?} has registered again with incarnation {incarnation}; the earlier one is fenced"
                )
            }
            Self::Capability(error) => error.fmt(f),
            Self::Scheduler(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ConductorError {}

impl From<CapabilityError> for ConductorError {
    fn from(error: CapabilityError) -> Self {
        Self::Capability(error)
    }
}

impl From<SchedulerError> for ConductorError {
    fn from(error: SchedulerError) -> Self {
        Self::Scheduler(error)
    }
}

/// Returns the error for a malformed request.
pub(super) fn bad(what: impl Into<String>) -> ConductorError {
    ConductorError::Bad { what: what.into() }
}

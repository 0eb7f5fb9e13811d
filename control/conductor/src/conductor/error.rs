//! Why the Conductor refuses a call.

use std::fmt;

use crate::scheduler::SchedulerError;

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConductorError {
    /// Something said makes no sense.
    Bad {
        /// What, with its number.
        what: String,
    },
    /// Nobody of that name, or not in that incarnation.
    UnknownInstance {
        /// The name.
        name: String,
    },
    /// No request of that id is under way.
    UnknownRequest {
        /// The id.
        name: String,
    },
    /// No reservation of that number.
    UnknownReservation {
        /// The number.
        reservation: u64,
    },
    /// No instance serves that model.
    UnknownModel {
        /// The model.
        model: String,
        /// Whose.
        tenant: String,
        /// Tokens of a block.
        block_tokens: u32,
    },
    /// The name is taken by something else.
    Conflict {
        /// What, and by what.
        what: String,
    },
    /// There are as many as there may be.
    Limit {
        /// Of what.
        what: &'static str,
        /// How many.
        most: usize,
    },
    /// A later incarnation of the instance has registered.
    StaleIncarnation {
        /// The instance.
        name: String,
        /// Its present incarnation.
        incarnation: u64,
    },
    /// What a scheduler says.
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
            Self::Limit { what, most } => write!(f, "there are {most} {what} already, which is the limit"),
            Self::StaleIncarnation { name, incarnation } => {
                write!(
                    f,
                    "instance {name:?} has registered again with incarnation {incarnation}; an earlier one is over"
                )
            }
            Self::Scheduler(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ConductorError {}

impl From<SchedulerError> for ConductorError {
    fn from(error: SchedulerError) -> Self {
        Self::Scheduler(error)
    }
}

/// Something that makes no sense.
pub(super) fn bad(what: impl Into<String>) -> ConductorError {
    ConductorError::Bad { what: what.into() }
}

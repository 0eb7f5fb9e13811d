//! What schedulers ask and are told.

use std::sync::Arc;

use crate::index::ContextKey;
use crate::policy::Refusal;

/// How a request is to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Booked: at once where an instance is about to be free, else later.
    Reserve,
    /// Booked at once, even behind others.
    Now,
    /// Not booked: only said.
    Advise,
}

/// A request as it is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleRequest {
    /// Who asks, and is told later.
    pub client: u64,
    /// The scheduler's name for it, unique while it lasts.
    pub request: String,
    /// What its blocks can be shared among.
    pub context: ContextKey,
    /// Tokens of its prompt.
    pub tokens: u32,
    /// Rolling hashes of its full blocks.
    pub hashes: Vec<u64>,
    /// How long it may wait, in nanoseconds; 0 for the desk's.
    pub wait_ns: u64,
    /// How.
    pub mode: Mode,
    /// Instances that it must not go to.
    pub barred: Vec<String>,
}

/// What is said of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It goes there.
    Assigned(AssignedInstances),
    /// It waits.
    Queued {
        /// Its reservation.
        reservation: u64,
        /// How many go before it.
        position: u32,
        /// After how long it may go, in nanoseconds, as far as can be said.
        eta_ns: u64,
    },
    /// It is not served.
    Refused {
        /// Why.
        why: Why,
        /// When it may be worth trying again, in nanoseconds.
        retry_after_ns: u64,
    },
}

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssignedInstances {
    /// Its reservation; 0 where nothing was booked.
    pub reservation: u64,
    /// Who prefills.
    pub prefill: Arc<str>,
    /// Who decodes, where that is chosen too.
    pub decode: Option<Arc<str>>,
    /// Tokens of the prompt to reuse, its own and fetched.
    pub reuse_tokens: u32,
    /// From whom the tokens that it lacks are fetched, most first; none where it has them.
    pub sources: Vec<Source>,
    /// Whether what is fetched is kept.
    pub keep: bool,
    /// Predicted: until the prefill begins.
    pub wait_ns: u64,
    /// Predicted: the prefill.
    pub prefill_ns: u64,
    /// How long the reservation lasts without an update.
    pub lease_ns: u64,
}

/// Who has the beginning of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Who; none for the shared store.
    pub instance: Option<Arc<str>>,
    /// Tokens from the beginning on.
    pub tokens: u32,
}

/// Why a request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The first token would come too late.
    Ttft,
    /// Tokens would come too slowly.
    Tbt,
    /// No instance takes requests.
    NoInstance,
    /// Too many requests wait or are booked.
    Full,
    /// It waited as long as it may.
    Waited,
    /// Its instance was lost; it can be rescheduled.
    Lost,
}

impl Why {
    pub(super) const fn of(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Ttft => Self::Ttft,
            Refusal::Tbt => Self::Tbt,
            Refusal::NoInstance => Self::NoInstance,
            Refusal::QueueFull => Self::Full,
        }
    }
}

/// How a request fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Its prefill began.
    PrefillStarted,
    /// Its prefill ended.
    PrefillDone {
        /// Tokens that were cached.
        reused_tokens: u32,
        /// How long it took, in nanoseconds.
        took_ns: u64,
    },
    /// It decodes.
    Decoding,
    /// It goes on.
    Alive,
    /// It ended, however.
    Ended,
}

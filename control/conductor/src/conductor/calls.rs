//! What schedulers ask and are told.

use std::sync::Arc;

use super::config::{MAX_ID_BYTES, MAX_PROMPT_BLOCKS};
use super::error::{ConductorError, bad};
use crate::index::{ContextId, ContextKey};
use crate::policy::Refusal;
use crate::scheduler::{ExcludedInstances, Request};

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

/// The most instances that a request may be kept from.
pub(super) const MOST_BARRED: usize = 256;

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
    /// How long it may wait, in nanoseconds; 0 for the Conductor's.
    pub wait_ns: u64,
    /// How.
    pub mode: Mode,
    /// Instances that it must not go to.
    pub barred: Vec<String>,
}

impl ScheduleRequest {
    /// Refuses what makes no sense or is over a limit.
    pub(super) fn check(&self) -> Result<(), ConductorError> {
        let name = self.request.len();
        if name == 0 || name > MAX_ID_BYTES {
            return Err(bad(format!("a request's id has 1 to {MAX_ID_BYTES} bytes, not {name}")));
        }
        let (blocks, tokens, of) = (self.hashes.len(), self.tokens, self.context.block_tokens);
        if blocks > MAX_PROMPT_BLOCKS {
            return Err(bad(format!("a prompt of {blocks} blocks; at most {MAX_PROMPT_BLOCKS}: use larger blocks")));
        }
        if tokens == 0 || (blocks as u64).saturating_sub(1) * u64::from(of) >= u64::from(tokens) {
            return Err(bad(format!("{blocks} blocks of {of} tokens are more than a prompt of {tokens} tokens")));
        }
        let most = MAX_PROMPT_BLOCKS as u64 * u64::from(of);
        if u64::from(tokens) > most {
            return Err(bad(format!(
                "a prompt of {tokens} tokens; at most {most} in blocks of {of}: use larger blocks"
            )));
        }
        if self.barred.len() > MOST_BARRED {
            return Err(bad(format!("kept from {} instances; at most {MOST_BARRED}", self.barred.len())));
        }
        Ok(())
    }

    /// The same for a scheduler, under a number, with the context and hashes of its pool.
    pub(super) fn numbered(&self, id: u64, context: ContextId, hashes: Arc<[u64]>, now_ns: u64) -> Request {
        let barred = ExcludedInstances::default();
        Request { id, arrival_ns: now_ns, tokens: self.tokens, context, hashes, barred }
    }
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

/// Something for a client that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientNotice {
    /// Which client.
    pub client: u64,
    /// Its request's id.
    pub request: Arc<str>,
    /// What.
    pub answer: Answer,
}

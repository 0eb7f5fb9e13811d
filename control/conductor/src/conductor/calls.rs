//! Requests of schedulers, and the answers to them.

use std::sync::Arc;

use bincode::{Decode, Encode};

use super::config::{MAX_ID_BYTES, MAX_PROMPT_BLOCKS};
use super::error::{ConductorError, bad};
#[cfg(doc)]
use super::limits::Limit;
use super::requests::service::RequestTerms;
use crate::index::PromptContext;
use crate::policy::Refusal;
use crate::scheduler::RequestOutput;

/// Booking mode of a request. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum ScheduleMode {
    /// Booked at once if an instance is about to be free, else queued.
    Reserve,
    /// Booked at once, even behind other requests.
    Now,
    /// Not booked: the answer is only a prediction.
    Advise,
}

/// Maximum number of instances that a request may exclude.
pub(super) const MOST_BARRED: usize = 256;

/// Maximum number of reservations that end with one call.
pub const MOST_ENDED: usize = 1024;

/// Requests a placement for a request, and books it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Schedule {
    /// Client that sent the request, and gets later notices.
    pub client: u64,
    /// Id that the scheduler gave the request, unique while the request lasts.
    pub request: String,
    /// Context within which its blocks can be shared.
    pub context: PromptContext,
    /// Length of the prompt in tokens.
    pub tokens: u32,
    /// Rolling hashes of the full blocks of the prompt.
    pub hashes: Vec<u64>,
    /// Maximum time that the request may wait, in nanoseconds; 0 for the Conductor's default.
    pub wait_ns: u64,
    /// Booking mode.
    pub mode: ScheduleMode,
    /// Instances that it must not be placed on.
    pub barred: Vec<String>,
}

/// Requests a placement for a request with terms, and ends earlier ones.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ScheduleOnTerms {
    /// The request.
    pub schedule: Schedule,
    /// Service that it gets.
    pub terms: RequestTerms,
    /// Reservations that have ended, at most [`MOST_ENDED`] with those in `finished`; those that are gone already are
    /// ignored.
    pub ended: Vec<u64>,
    /// Reservations that have ended after they had generated their output.
    pub finished: Vec<(u64, RequestOutput)>,
}

/// Requests a placement as [`ScheduleOnTerms`] does, for a scheduler that can drive a pipeline group: the answer may be
/// [`ScheduleReply::AssignedGroup`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ScheduleWithGroups {
    /// The request.
    pub on_terms: ScheduleOnTerms,
}

impl Schedule {
    /// Rejects a request that is malformed or over a limit.
    pub(super) fn check(&self) -> Result<(), ConductorError> {
        let name = self.request.len();
        if name == 0 || name > MAX_ID_BYTES {
            return Err(bad(format!("a request's id must have 1 to {MAX_ID_BYTES} bytes, not {name}")));
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
            return Err(bad(format!("{} excluded instances; at most {MOST_BARRED}", self.barred.len())));
        }
        Ok(())
    }
}

/// Answer to a request. Tags are append-only.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum ScheduleReply {
    /// The request is placed.
    Assigned(Assignment),
    /// The request is queued.
    Queued {
        /// Number of its reservation.
        reservation: u64,
        /// Number of requests ahead of it.
        position: u32,
        /// Predicted wait, in nanoseconds.
        eta_ns: u64,
    },
    /// The request is rejected.
    Refused {
        /// Reason for the rejection.
        why: ScheduleRefusal,
        /// Delay before a retry is worthwhile, in nanoseconds.
        retry_after_ns: u64,
    },
    /// The request is placed on a pipeline group. Only [`ScheduleWithGroups`] is answered so, and what follows it for
    /// the same request.
    AssignedGroup(GroupAssignment),
}

/// Placement of a request on a pipeline group.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GroupAssignment {
    /// The placement; it prefills at the group's last stage, which has the KV cache of the whole prompt at the end.
    pub assignment: Assignment,
    /// The group.
    pub group: AssignedGroup,
}

/// Pipeline group that prefills a prompt: each stage computes its layers for one chunk after the other, and passes each
/// chunk on to the next stage, with the KV cache of all layers so far.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct AssignedGroup {
    /// Name of the group.
    pub name: Arc<str>,
    /// Maximum length of a chunk, in tokens; the first chunk begins after the reused tokens.
    pub chunk_tokens: u32,
    /// Stages in order.
    pub stages: Vec<AssignedStage>,
}

/// Stage of a pipeline group, for one prompt.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct AssignedStage {
    /// Instance.
    pub instance: Arc<str>,
    /// First layer that it computes, from 0.
    pub first_layer: u32,
    /// Number of layers that it computes.
    pub layers: u32,
    /// Reused tokens that it has to fetch: the KV cache of its layers; of all layers at the last stage.
    pub load_tokens: u32,
    /// Predicted time until the instance is free, in nanoseconds.
    pub wait_ns: u64,
    /// Predicted time from then until its last chunk is computed, in nanoseconds.
    pub busy_ns: u64,
}

/// Placement of a request.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Assignment {
    /// Number of the reservation; 0 if nothing was booked.
    pub reservation: u64,
    /// Instance that prefills.
    pub prefill: Arc<str>,
    /// Instance that decodes, if that is chosen too.
    pub decode: Option<Arc<str>>,
    /// Tokens of the prompt to reuse, including fetched ones.
    pub reuse_tokens: u32,
    /// Instances to fetch missing tokens from, those with the most tokens first; empty if nothing is fetched.
    pub sources: Vec<FetchSource>,
    /// True if fetched blocks are to be kept in the cache.
    pub keep: bool,
    /// Predicted wait until the prefill begins.
    pub wait_ns: u64,
    /// Predicted duration of the prefill.
    pub prefill_ns: u64,
    /// Lease of the reservation without an update.
    pub lease_ns: u64,
}

/// Holder of a prefix of a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FetchSource {
    /// Name of the instance; none for the shared store.
    pub instance: Option<Arc<str>>,
    /// Number of tokens in the prefix.
    pub tokens: u32,
}

/// Reason for rejecting a request. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum ScheduleRefusal {
    /// The first token would miss its objective (TTFT).
    Ttft,
    /// Tokens would miss their objective (TBT).
    Tbt,
    /// No instance accepts requests.
    NoInstance,
    /// Too many requests wait or are booked: see [`Limit::Queued`], [`Limit::Requests`] and [`Limit::PromptBlocks`].
    Full,
    /// The request waited for the maximum time: its own, or [`Limit::WaitSeconds`].
    Waited,
    /// The instance of the request was lost; the request can be rescheduled.
    Lost,
}

impl ScheduleReply {
    /// Returns the answer to a request that is placed.
    pub(super) fn placed(assignment: Assignment, group: Option<AssignedGroup>) -> Self {
        match group {
            Some(group) => Self::AssignedGroup(GroupAssignment { assignment, group }),
            None => Self::Assigned(assignment),
        }
    }
}

impl ScheduleRefusal {
    pub(super) const fn of(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Ttft => Self::Ttft,
            Refusal::Tbt => Self::Tbt,
            Refusal::NoInstance => Self::NoInstance,
            Refusal::QueueFull => Self::Full,
        }
    }
}

/// Progress of a request. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum RequestStep {
    /// The prefill began.
    PrefillStarted,
    /// The prefill ended.
    PrefillDone {
        /// Number of cached tokens that it reused.
        reused_tokens: u32,
        /// Duration in nanoseconds.
        took_ns: u64,
    },
    /// Decoding began.
    Decoding,
    /// The request is alive: renews its lease.
    Alive,
    /// The request ended, with or without success.
    Ended,
    /// The request ended after it had generated its output, which tells what to expect of others.
    Finished(RequestOutput),
}

/// Placement or rejection of a request that waited.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct PlacementNotice {
    /// Id of the request.
    pub request: Arc<str>,
    pub answer: ScheduleReply,
}

/// Notice for a client whose request waits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ClientNotice {
    pub client: u64,
    pub notice: PlacementNotice,
}

impl ClientNotice {
    pub(super) const fn new(client: u64, request: Arc<str>, answer: ScheduleReply) -> Self {
        Self { client, notice: PlacementNotice { request, answer } }
    }
}

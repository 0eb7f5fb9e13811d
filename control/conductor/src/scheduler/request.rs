//! Request to be scheduled, and its progress.

use std::sync::Arc;

use super::queue::flows::DEFAULT_FLOW_WEIGHT;
use crate::index::ContextId;
use crate::policy::Ask;

/// Request to be scheduled.
#[derive(Clone, Debug)]
pub struct Request {
    /// Number, unique among the requests that are not released.
    pub id: u64,
    /// Time of arrival.
    pub arrival_ns: u64,
    /// Length of the prompt in tokens.
    pub tokens: u32,
    /// Context within which its blocks can be shared.
    pub context: ContextId,
    /// Rolling hashes of its blocks.
    pub hashes: Arc<[u64]>,
    /// Instances that it must not be placed on.
    pub barred: ExcludedInstances,
    /// Service that it gets.
    pub terms: ServiceTerms,
    /// True if it was admitted before, and is scheduled again: no objective is a reason to reject it.
    pub admitted: bool,
}

impl Request {
    pub(super) const fn ask(&self) -> Ask {
        let Self { id, arrival_ns, tokens, admitted, .. } = *self;
        Ask { id, arrival_ns, tokens, ttft_ns: self.terms.ttft_ns, admitted, groups: self.terms.groups }
    }
}

/// Service that a request gets, beside that of others of its model. The default is that of a request without any terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceTerms {
    /// Flow whose share of the prefill time it uses; the empty name is the default flow.
    pub flow: Arc<str>,
    /// Weight of that flow, from 1 to [`MAX_FLOW_WEIGHT`].
    ///
    /// [`MAX_FLOW_WEIGHT`]: super::MAX_FLOW_WEIGHT
    pub weight: u32,
    /// Priority among the requests of the flows whose turn it is: higher ones go first.
    pub priority: i8,
    /// Objective for its first token, counted from its arrival; none for that of its model.
    pub ttft_ns: Option<u64>,
    /// Class, whose finished requests tell the expected output; empty for none.
    pub class: Arc<str>,
    /// Expected number of tokens that it decodes; 0 if unknown: then finished requests of its flow and class tell.
    pub output_tokens: u32,
    /// Session whose next turn it is; names are those of its context.
    pub session: Option<Arc<str>>,
    /// True if a pipeline group may prefill it, because its scheduler can drive one.
    pub groups: bool,
}

impl Default for ServiceTerms {
    fn default() -> Self {
        let (flow, class, weight) = (Arc::from(""), Arc::from(""), DEFAULT_FLOW_WEIGHT);
        let (ttft_ns, session) = (None, None);
        Self { flow, weight, priority: 0, ttft_ns, class, output_tokens: 0, session, groups: false }
    }
}

/// Progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The prefill began.
    PrefillStarted,
    /// The prefill ended.
    PrefillDone {
        /// Number of cached tokens that it reused.
        reused: u32,
        /// Duration of the prefill.
        took_ns: u64,
    },
    /// Decoding began.
    Decoding,
}

/// Output of a request that ended, as far as it is reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct RequestOutput {
    /// Number of generated tokens; 0 if unknown.
    pub tokens: u32,
    /// Time from the first to the last of them, in nanoseconds; 0 if unknown.
    pub decode_ns: u64,
}

/// Instances that a request must not be placed on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExcludedInstances {
    /// Numbers of prefill instances.
    pub prefill: Arc<[u32]>,
    /// Numbers of decode instances.
    pub decode: Arc<[u32]>,
}

//! Request to be scheduled, and its progress.

use std::sync::Arc;

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
}

impl Request {
    pub(super) const fn ask(&self) -> Ask {
        Ask { id: self.id, arrival_ns: self.arrival_ns, tokens: self.tokens }
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

/// Instances that a request must not be placed on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExcludedInstances {
    /// Numbers of prefill instances.
    pub prefill: Arc<[u32]>,
    /// Numbers of decode instances.
    pub decode: Arc<[u32]>,
}

//! A request to be scheduled, and how it fares.

use std::sync::Arc;

use crate::index::ContextId;
use crate::policy::Ask;

/// A request to be scheduled.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its number, unique among those that are not released.
    pub id: u64,
    /// When it came.
    pub arrival_ns: u64,
    /// Tokens of its prompt.
    pub tokens: u32,
    /// What its blocks can be shared among.
    pub context: ContextId,
    /// Rolling hashes of its blocks.
    pub hashes: Arc<[u64]>,
    /// Instances that it must not go to.
    pub barred: ExcludedInstances,
}

impl Request {
    pub(super) const fn ask(&self) -> Ask {
        Ask { id: self.id, arrival_ns: self.arrival_ns, tokens: self.tokens }
    }
}

/// How a request fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Its prefill began.
    PrefillStarted,
    /// Its prefill ended.
    PrefillDone {
        /// Tokens that were cached.
        reused: u32,
        /// How long the prefill took.
        took_ns: u64,
    },
    /// It decodes.
    Decoding,
}

/// Instances that a request must not go to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExcludedInstances {
    /// Numbers of prefill instances.
    pub prefill: Arc<[u32]>,
    /// Numbers of decode instances.
    pub decode: Arc<[u32]>,
}

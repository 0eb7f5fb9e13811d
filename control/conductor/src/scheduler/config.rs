//! What a scheduler is made of, and its limits.

use crate::cost::{DecodeModel, PrefillModel};
use crate::index::IndexConfig;
use crate::policy::Slo;

/// What a scheduler is made of.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Limits of the prefix index.
    pub index: IndexConfig,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Bytes of KV cache of a token.
    pub token_bytes: u64,
    /// Bytes a second of an instance's NICs.
    pub nic_bytes_s: u64,
    /// What is promised.
    pub slo: Slo,
    /// Requests that may wait in the central queue.
    pub max_queue: usize,
    /// Requests that may be booked.
    pub max_reservations: usize,
    /// After how long a request that nobody updates is released.
    pub lease_ns: u64,
    /// How long blocks of a finished prefill count as held though no event said so.
    pub promise_ns: u64,
    /// Where the cost model begins.
    pub model: PrefillModel,
    /// Time between tokens.
    pub decode_model: DecodeModel,
    /// Whether reports refit the cost model and factors of instances.
    pub learns: bool,
    /// Whether instances are taken to have for the next request what they fetch for one, as engines do whose cache it
    /// passes through.
    pub keeps_fetched: bool,
}

impl Default for SchedulerConfig {
    /// LLaMA3-70B on nodes of eight A800 with 87 GB/s, as in the paper.
    fn default() -> Self {
        Self {
            index: IndexConfig::default(),
            block_tokens: 512,
            token_bytes: 327_680,
            nic_bytes_s: 87_000_000_000,
            slo: Slo::NONE,
            max_queue: 65_536,
            max_reservations: 1 << 20,
            lease_ns: 3_600_000_000_000,
            promise_ns: 2_000_000_000,
            model: PrefillModel::default(),
            decode_model: DecodeModel::default(),
            learns: true,
            keeps_fetched: true,
        }
    }
}

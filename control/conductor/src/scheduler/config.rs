//! Settings and limits of a scheduler.

use crate::cost::{DecodeModel, PrefillModel};
use crate::index::IndexConfig;
use crate::policy::Slo;

/// Settings and limits of a scheduler.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Limits of the prefix index.
    pub index: IndexConfig,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Bytes of KV cache per token.
    pub token_bytes: u64,
    /// Bandwidth of an instance's NICs, in bytes per second.
    pub nic_bytes_s: u64,
    /// Objectives of all requests.
    pub slo: Slo,
    /// Maximum number of requests in the central queue.
    pub max_queue: usize,
    /// Maximum number of flows with a share of their own; those beyond it share the default flow.
    pub max_flows: usize,
    /// Maximum number of booked requests.
    pub max_reservations: usize,
    /// Lease of a booked request without an update.
    pub lease_ns: u64,
    /// Time for which blocks of a finished prefill count as held although no event has reported them.
    pub promise_ns: u64,
    /// Initial cost model.
    pub model: PrefillModel,
    /// Initial model of decode steps.
    pub decode_model: DecodeModel,
    /// True if reports refit the cost models and the factors of instances, and finished requests tell the lengths of
    /// outputs.
    pub learns: bool,
    /// True if the KV cache of a prompt is sent from the prefill instance to the decode instance.
    pub hands_over: bool,
    /// True if fetched blocks count as held for later requests, as with engines that keep fetched blocks in their
    /// cache.
    pub keeps_fetched: bool,
}

impl Default for SchedulerConfig {
    /// Returns the settings for LLaMA3-70B on nodes of eight A800 with 87 GB/s, as in the paper.
    fn default() -> Self {
        Self {
            index: IndexConfig::default(),
            block_tokens: 512,
            token_bytes: 327_680,
            nic_bytes_s: 87_000_000_000,
            slo: Slo::NONE,
            max_queue: 65_536,
            max_flows: 1024,
            max_reservations: 1 << 20,
            lease_ns: 3_600_000_000_000,
            promise_ns: 2_000_000_000,
            model: PrefillModel::default(),
            decode_model: DecodeModel::default(),
            learns: true,
            hands_over: true,
            keeps_fetched: true,
        }
    }
}

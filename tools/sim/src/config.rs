//! Settings of a simulation, and the requests of a trace.

use std::sync::Arc;

use kvplane_conductor::conductor::ConductorConfig;
use kvplane_conductor::copies::CopyConfig;
use kvplane_conductor::cost::{DecodeModel, PrefillModel};
use kvplane_conductor::policy::Slo;
use kvplane_conductor::scheduler::ServiceTerms;
use kvplane_store::eviction::Eviction;

/// Request of a trace.
#[derive(Clone, Debug)]
pub struct Work {
    /// Time of arrival, after the start.
    pub arrival_ns: u64,
    /// Length of its prompt in tokens.
    pub input_tokens: u32,
    /// Number of tokens that it generates.
    pub output_tokens: u32,
    /// Blocks of the prompt: ids chained over the prefix.
    pub blocks: Arc<[u64]>,
    /// Service that the request gets.
    pub terms: ServiceTerms,
}

/// Settings of a simulated cluster. The default is that of the paper's Figure 5: eight prefill nodes of eight A800,
/// LLaMA3-70B, caches of 3M tokens, 87 GB/s.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Number of prefill instances.
    pub prefill: usize,
    /// Number of decode instances; 0 omits decoding.
    pub decode: usize,
    /// Capacity of each prefill instance's cache, in tokens.
    pub cache_tokens: u64,
    /// Eviction policy of the cache.
    pub eviction: Eviction,
    /// Capacity of each decode instance's memory, in tokens.
    pub decode_tokens: u64,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Bytes of KV cache per token.
    pub token_bytes: u64,
    /// Bandwidth of a node's NICs, in bytes per second.
    pub nic_bytes_s: u64,
    /// Actual duration of prefills.
    pub truth: PrefillModel,
    /// Actual duration of decode steps.
    pub decode_model: DecodeModel,
    /// Duration of decode steps from which the scheduler starts.
    pub decode_constants: DecodeModel,
    /// True if the scheduler learns from what finished and what instances report; else it keeps to its constants.
    pub learns: bool,
    /// Objectives of all requests.
    pub slo: Slo,
    /// Maximum wait of a queued request, as of the Conductor: it ends as [`crate::RequestStatus::Waited`].
    pub wait_ns: u64,
    /// Factor by which requests arrive faster than in the trace.
    pub load: f64,
    /// Injected faults.
    pub faults: Faults,
    /// Seed of the random numbers.
    pub seed: u64,
    /// True if the number of instances that hold the most used blocks is sampled every 30 s.
    pub replicas: bool,
    /// Limits of proactive replicas of hot prefixes; none disables them.
    pub copies: Option<CopyConfig>,
    /// True if fetched blocks pass through an instance and are never kept.
    pub pass_through: bool,
    /// True if the KV cache of a prompt is sent to its decode instance, through the NIC of its prefill instance; else
    /// it is there at once.
    pub hands_over: bool,
    /// True if an instance has all blocks of a prompt from its placement on, and not only once they are computed: the
    /// assumption of simulators that do not model the time between the two.
    pub at_once: bool,
    /// Pipeline groups of consecutive instances; none disables them.
    pub groups: Option<SimGroups>,
    /// True if a prefill overlaps with the fetch of its prefix, layer by layer.
    pub layer_wise: bool,
}

/// Pipeline groups of a simulated cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimGroups {
    /// Number of stages of each group.
    pub stages: usize,
    /// Maximum length of a chunk, in tokens.
    pub chunk_tokens: u32,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            prefill: 8,
            decode: 0,
            cache_tokens: 3_000_000,
            eviction: Eviction::Lru,
            decode_tokens: 1_400_000,
            block_tokens: 512,
            token_bytes: 327_680,
            nic_bytes_s: 87_000_000_000,
            truth: PrefillModel::default(),
            decode_model: DecodeModel::default(),
            decode_constants: DecodeModel::default(),
            learns: true,
            slo: Slo::NONE,
            wait_ns: ConductorConfig::default().wait_ns,
            load: 1.0,
            faults: Faults::default(),
            seed: 1,
            replicas: false,
            copies: None,
            pass_through: false,
            hands_over: false,
            at_once: false,
            groups: None,
            layer_wise: false,
        }
    }
}

/// Injected faults.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Delay of cache events to the Conductor.
    pub stale_ns: u64,
    /// Fraction of those events that are lost.
    pub lost: f64,
    /// Error of prefill predictions: each prefill takes up to a factor of `1 + prefill_error` more or less than the
    /// model predicts.
    pub prefill_error: f64,
    /// Time at which an instance dies, if one does.
    pub death_ns: Option<u64>,
}

/// Delay until the Conductor detects a death.
pub(crate) const DETECTED_NS: u64 = 3_000_000_000;

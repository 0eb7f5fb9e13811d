//! What is simulated.

use std::sync::Arc;

use kvplane_conductor::copies::CopyConfig;
use kvplane_conductor::cost::{DecodeModel, PrefillModel};
use kvplane_conductor::policy::Slo;
use kvplane_store::eviction::Eviction;

/// A request of a trace.
#[derive(Clone, Debug)]
pub struct Work {
    /// When it comes, after the start.
    pub arrival_ns: u64,
    /// Tokens of its prompt.
    pub input_tokens: u32,
    /// Tokens that it generates.
    pub output_tokens: u32,
    /// The prompt's blocks, ids chained over the prefix.
    pub blocks: Arc<[u64]>,
}

/// A cluster. The default is that of the paper's Figure 5: eight prefill nodes of eight A800, LLaMA3-70B, caches of
/// 3M tokens, 87 GB/s.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Prefill instances.
    pub prefill: usize,
    /// Decode instances; 0 leaves decoding out.
    pub decode: usize,
    /// Tokens of each prefill instance's cache.
    pub cache_tokens: u64,
    /// What goes when it is full.
    pub eviction: Eviction,
    /// Tokens of each decode instance's memory.
    pub decode_tokens: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Bytes of KV cache of a token.
    pub token_bytes: u64,
    /// Bytes a second of a node's NICs.
    pub nic_bytes_s: u64,
    /// How long prefills really take.
    pub truth: PrefillModel,
    /// How long steps of a decode really take.
    pub decode_model: DecodeModel,
    /// What is promised.
    pub slo: Slo,
    /// How many times faster than the trace requests come.
    pub load: f64,
    /// What goes wrong.
    pub faults: Faults,
    /// What chance is drawn from.
    pub seed: u64,
    /// Whether to note every 30 s how many instances hold each block.
    pub replicas: bool,
    /// What copies of hot prefixes may take that are made without a request; none: there are none.
    pub copies: Option<CopyConfig>,
    /// Whether what instances fetch passes through and is never kept.
    pub pass_through: bool,
    /// Whether an instance has all blocks of a prompt from the moment it is placed there, and not only when it has
    /// computed them: what simulators do that know no time between the two.
    pub at_once: bool,
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
            slo: Slo::NONE,
            load: 1.0,
            faults: Faults::default(),
            seed: 1,
            replicas: false,
            copies: None,
            pass_through: false,
            at_once: false,
        }
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// How late the Conductor hears of what caches hold.
    pub stale_ns: u64,
    /// The part of those events that never arrives.
    pub lost: f64,
    /// How far each prefill may be off what the model says: by a factor of up to `1 + misjudged`, either way.
    pub misjudged: f64,
    /// When an instance dies, if one does.
    pub death_ns: Option<u64>,
}

/// After how long the Conductor knows of a death.
pub(crate) const DETECTED_NS: u64 = 3_000_000_000;

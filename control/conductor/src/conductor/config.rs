//! Settings and limits of the Conductor.

use crate::copies::CopyConfig;
use crate::index::IndexConfig;
use crate::policy::PlacementPolicy;
use crate::scheduler::SchedulerConfig;

/// Maximum length of a request's id and of an instance's name, in bytes.
pub const MAX_ID_BYTES: usize = 128;
/// Maximum number of blocks of a prompt: a million tokens in blocks of eight.
pub const MAX_PROMPT_BLOCKS: usize = 131_072;

/// Settings and limits of the Conductor.
#[derive(Clone, Debug)]
pub struct ConductorConfig {
    /// Maximum number of pools: combinations of tenant, model and block size.
    pub max_pools: usize,
    /// Maximum number of instances, over all pools.
    pub max_instances: usize,
    /// Maximum number of requests that wait or are booked, over all pools.
    pub max_requests: usize,
    /// Maximum number of blocks in the prompts of these requests, 8 bytes each.
    pub max_request_blocks: usize,
    /// Maximum wait of a request, and its default.
    pub wait_ns: u64,
    /// Lease of a booked request without an update.
    pub lease_ns: u64,
    /// Lease of a request placed after a wait, until its client first updates it.
    pub claim_ns: u64,
    /// Missed reports after which an instance is excluded, and after which it is removed.
    pub missed: (u32, u32),
    /// Settings of each pool's scheduler; tokens per block and bytes per token are the pool's.
    pub scheduler: SchedulerConfig,
    /// Placement policy; the objectives are in [`SchedulerConfig::slo`].
    pub policy: PlacementPolicy,
    /// True if the policy rejects requests that would miss their objectives: see [`PlacementPolicy::make`].
    pub refuses: bool,
    /// Limits of the replicas of hot prefixes that the Conductor requests from the shared store.
    pub copies: CopyConfig,
}

impl Default for ConductorConfig {
    fn default() -> Self {
        let scheduler = SchedulerConfig::default();
        let index = IndexConfig { max_blocks: 4 << 20, max_records: 4 << 20, ..scheduler.index };
        Self {
            max_pools: 16,
            max_instances: 1_000,
            max_requests: 65_536,
            max_request_blocks: 8 << 20,
            wait_ns: 600_000_000_000,
            lease_ns: 120_000_000_000,
            claim_ns: 10_000_000_000,
            missed: (3, 10),
            scheduler: SchedulerConfig { index, max_queue: 8_192, lease_ns: u64::MAX, ..scheduler },
            policy: PlacementPolicy::Kvplane,
            refuses: false,
            copies: CopyConfig::default(),
        }
    }
}

//! What the Conductor is made of, and its limits.

use crate::copies::CopyConfig;
use crate::index::IndexConfig;
use crate::policy::PolicyName;
use crate::scheduler::SchedulerConfig;

/// The most bytes of a request's id and of an instance's name.
pub const MAX_ID_BYTES: usize = 128;
/// The most blocks of a prompt: a million tokens in blocks of eight.
pub const MAX_PROMPT_BLOCKS: usize = 131_072;

/// The Conductor's limits.
#[derive(Clone, Debug)]
pub struct ConductorConfig {
    /// Models and tenants that have instances.
    pub max_pools: usize,
    /// Instances of all pools.
    pub max_instances: usize,
    /// Requests that wait or are booked, of all pools.
    pub max_requests: usize,
    /// Blocks of the prompts of these, 8 bytes each.
    pub max_request_blocks: usize,
    /// How long a request may wait that does not say.
    pub wait_ns: u64,
    /// After how long without an update a booked request ends.
    pub lease_ns: u64,
    /// After how long one that was told late and that nobody has answered for ends.
    pub claim_ns: u64,
    /// Reports that an instance may miss before it is doubted, and before it is lost.
    pub missed: (u32, u32),
    /// What each pool's scheduler is made of; tokens of a block, and bytes of a token, are the pool's.
    pub scheduler: SchedulerConfig,
    /// How it decides; what is promised is said by [`SchedulerConfig::slo`].
    pub policy: PolicyName,
    /// The policy refuses requests that cannot be served as promised: see [`PolicyName::make`].
    pub refuses: bool,
    /// What copies of hot prefixes may take that the Conductor asks the shared store for.
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
            policy: PolicyName::Ours,
            refuses: false,
            copies: CopyConfig::default(),
        }
    }
}

//! What a host may be told, and what it counts.

use std::sync::Arc;

use kvplane_store::service::SLOW_AFTER_NS;
use kvplane_ticket::Challenges;
use kvplane_tls::Keychain;
use kvplane_transport::mooncake::ServerOptions;
use kvplane_transport::{FaultPlan, StrangerLimits, ZeroCopyCounters, ZeroCopyOptions};

use super::{FetchConfig, RdmaDevices, StockEngines, TierSetup};

/// Settings of a host.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Whether copies over shared memory are summed up and checked.
    pub verify_shared: bool,
    /// Faults to make on TCP connections, for drills and tests.
    pub fault: Option<FaultPlan>,
    /// Limits of what stock Mooncake engines may ask.
    pub mooncake: ServerOptions,
    /// RDMA devices to use, if any.
    pub rdma: Option<RdmaDevices>,
    /// Stock engines that are asked over RDMA, and the number of this host among those that ask them.
    pub stock: Option<(Arc<dyn StockEngines>, u64)>,
    /// Which payloads leave over TCP without a copy.
    pub zero_copy: ZeroCopyOptions,
    /// The SSD under the service's store.
    pub tier: Option<TierSetup>,
    /// How former owners of the service's slots are asked for what was in them; without it nobody is.
    pub fetch: Option<FetchConfig>,
    /// Whoever asks the service must prove a ticket, and is challenged with these; without, nobody is asked for one.
    pub tickets: Option<Challenges>,
    /// What TCP connections are sealed with, and when; without, they are plain.
    pub tls: Option<Arc<Keychain>>,
    /// How many peers may be connected that have not said who they are.
    pub strangers: StrangerLimits,
    /// From how many nanoseconds on a request that was answered here is remembered as slow.
    pub slow_after_ns: u64,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            verify_shared: true,
            fault: None,
            mooncake: ServerOptions::default(),
            rdma: None,
            stock: None,
            zero_copy: ZeroCopyOptions::default(),
            tier: None,
            fetch: None,
            tickets: None,
            tls: None,
            strangers: StrangerLimits::default(),
            slow_after_ns: SLOW_AFTER_NS,
        }
    }
}

/// What a host counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostCounters {
    /// Rounds that did something.
    pub busy_rounds: u64,
    /// Parks.
    pub parks: u64,
    /// Frames that broke the protocol, ours or a peer's view of it.
    pub broken: u64,
    /// Connections accepted.
    pub accepted: u64,
    /// Of those, closed for others that came before they had said who they are.
    pub crowded_out: u64,
    /// Connections that ended because they could not be sealed, or a record was wrong.
    pub tls_failed: u64,
    /// Segments' bytes that this host copied through mappings of its peers' memory.
    pub map_bytes: u64,
    /// The same by the kernel, between processes.
    pub cma_bytes: u64,
    /// The same within this process.
    pub local_bytes: u64,
    /// Copies between this host's memory and its peers' segments that RDMA devices made.
    pub rdma_copies: u64,
    /// Payloads that left over TCP without a copy, or should have.
    pub zero_copy: ZeroCopyCounters,
}

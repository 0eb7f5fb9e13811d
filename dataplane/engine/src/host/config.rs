//! Settings of a host.

use std::io;
use std::sync::Arc;

use kvplane_store::service::SLOW_AFTER_NS;
use kvplane_sys::Region;
use kvplane_ticket::Challenges;
use kvplane_tls::Keychain;
use kvplane_transport::mooncake::ServerOptions;
use kvplane_transport::{Fault, FaultPlan, StrangerLimits, ZeroCopyOptions};

use super::client_side::foreign::StockEngines;
use super::fetch::FetchConfig;
use super::reactor::connections::Connections;
use super::reactor::devices::RdmaDevices;
use super::tier::TierSetup;

/// Settings of a host.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Whether copies over shared memory are summed up and checked.
    pub verify_shared: bool,
    /// Faults to make on TCP connections, for drills and tests.
    pub fault: Option<FaultPlan>,
    /// Limits of requests of stock Mooncake engines.
    pub mooncake: ServerOptions,
    /// RDMA devices to use, if any.
    pub rdma: Option<RdmaDevices>,
    /// Stock engines that are reached over RDMA, and the number of this host among those that reach them.
    pub stock: Option<(Arc<dyn StockEngines>, u64)>,
    /// Which payloads leave over TCP without a copy.
    pub zero_copy: ZeroCopyOptions,
    /// The SSD under the service's store.
    pub tier: Option<TierSetup>,
    /// How objects are fetched from former owners of the service's slots; without it none are.
    pub fetch: Option<FetchConfig>,
    /// Peers of the service must prove a ticket, and are challenged with these; without, none needs one.
    pub tickets: Option<Challenges>,
    /// What TCP connections are sealed with, and when; without, they are plain.
    pub tls: Option<Arc<Keychain>>,
    /// How many peers may be connected that have not greeted yet.
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

impl HostConfig {
    /// The connections of a host with these settings: none yet. `pool` is what peers on this host may map.
    ///
    /// # Errors
    /// When the kernel gives no poller.
    pub(super) fn connections(&self, pool: Option<Arc<Region>>) -> io::Result<Connections> {
        let mut tcp = Fault::new(self.fault.as_ref(), self.zero_copy);
        if let Some(keychain) = &self.tls {
            tcp.set_tls(Arc::clone(keychain));
        }
        Connections::new(tcp, self.rdma.as_ref(), pool)
    }
}

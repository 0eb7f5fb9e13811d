//! Settings of a host.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvplane_proto::ids::Incarnation;
use kvplane_store::service::SLOW_AFTER_NS;
use kvplane_sys::{MemoryDirectory, Region};
use kvplane_ticket::Challenges;
use kvplane_tls::Keychain;
use kvplane_transport::mooncake::ServerOptions;
use kvplane_transport::{Fault, FaultPlan, UnauthenticatedLimits, ZeroCopyOptions};

use super::client_side::foreign::StockEngines;
use super::device_pool::DevicePoolConfig;
use super::fetch::FetchConfig;
use super::mapped::MappedMemory;
use super::reactor::connections::Connections;
use super::reactor::devices::RdmaDevices;
use super::shared::SharedSetup;
use super::tier::TierSetup;

/// Memory of a shard that a next process of its node can take over.
#[derive(Clone, Debug)]
pub struct KeptMemoryConfig {
    /// Directory of its files, which this process has claimed: they outlive it. `None`: memfds, which a successor takes
    /// over while this process runs, and which end with it otherwise.
    pub directory: Option<Arc<MemoryDirectory>>,
    /// Number of shards of the node.
    pub shards: u16,
    /// Identity of the memory, if it is new.
    pub fresh_uuid: u128,
    /// The shard's memory, if this process has mapped it already: while the former one still served it.
    pub mapped: Option<Arc<MappedMemory>>,
    /// True if another process has served the node since the image was written: none of its objects count.
    pub is_void: bool,
    /// Incarnation of the node that was a member of the cluster last, if the control plane knows one: the image of
    /// another one does not count. `None` for memory that was handed over.
    pub last_member: Option<Incarnation>,
}

/// Settings of a host.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// True if checksums of copies over shared memory are computed and verified.
    pub verify_shared: bool,
    /// Faults to inject into TCP connections, for drills and tests.
    pub fault: Option<FaultPlan>,
    /// Limits of requests of stock Mooncake engines.
    pub mooncake: ServerOptions,
    /// RDMA devices to use, if any.
    pub rdma: Option<RdmaDevices>,
    /// Stock engines that are reached over RDMA, and the number of this host among the hosts that reach them.
    pub stock: Option<(Arc<dyn StockEngines>, u64)>,
    /// Payloads that are sent over TCP without a copy.
    pub zero_copy: ZeroCopyOptions,
    /// SSD tier of the service's store.
    pub tier: Option<TierSetup>,
    /// Shared tier of the service's store.
    pub shared: Option<SharedSetup>,
    /// Device pool of the service's store.
    pub device_pool: Option<DevicePoolConfig>,
    /// Memory in which the service's store can pass to a next process; without it, it ends with this one.
    pub kept: Option<KeptMemoryConfig>,
    /// Settings for fetching objects from former owners of the service's slots; without them, none are fetched.
    pub fetch: Option<FetchConfig>,
    /// Challenges by which peers of the service must prove a ticket; without them, none needs one.
    pub tickets: Option<Challenges>,
    /// Certificates and policy of TLS on TCP connections; without them, connections are plain.
    pub tls: Option<Arc<Keychain>>,
    /// Limits of connections whose peers have not authenticated yet.
    pub unauthenticated: UnauthenticatedLimits,
    /// Time after which unacknowledged data ends a TCP connection that this host made; zero: as the kernel decides.
    pub unacknowledged: Duration,
    /// Rate at which objects in memory are compared with their checksums in the background, in bytes a second; 0 for
    /// never.
    pub memory_scrub_bytes_per_s: u64,
    /// Least duration of a request, in nanoseconds, to be recorded as slow.
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
            shared: None,
            device_pool: None,
            kept: None,
            fetch: None,
            tickets: None,
            tls: None,
            unauthenticated: UnauthenticatedLimits::default(),
            unacknowledged: Duration::ZERO,
            memory_scrub_bytes_per_s: 0,
            slow_after_ns: SLOW_AFTER_NS,
        }
    }
}

impl HostConfig {
    /// Creates the connections of a host with these settings, none of them open. `pool` is the memory that peers on
    /// this host may map.
    ///
    /// # Errors
    /// If the kernel refuses a poller.
    pub(super) fn connections(&self, pool: Option<Arc<Region>>) -> io::Result<Connections> {
        let mut tcp = Fault::new(self.fault.as_ref(), self.zero_copy);
        if let Some(keychain) = &self.tls {
            tcp.set_tls(Arc::clone(keychain));
        }
        tcp.limit_unacknowledged(self.unacknowledged);
        Connections::new(tcp, self.rdma.as_ref(), pool)
    }
}

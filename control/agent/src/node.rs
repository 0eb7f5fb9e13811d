//! Storage node: shards, membership and heartbeats.
//!
//! A node joins, sends a heartbeat every heartbeat interval, and owns the slots that the newest map assigns to it.
//! While the control plane is away, the node keeps serving by its last map and keeps reconnecting. When the control
//! plane reports that the node's incarnation has ended (it was silent for too long and its slots have other owners
//! now), the node drops its objects and joins with a new incarnation.

mod device_pools;
mod drain;
mod error;
mod far_pools;
mod followed_map;
pub mod handover;
mod incarnation;
mod kept_memory;
mod membership;
mod metrics;
mod orders;
mod reports;
mod shared;
mod ssd;
mod store_limits;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvplane_engine::{
    DevicePoolConfig, FetchConfig, FetchLimits, HostConfig, HugePages, IoChoice, KeptFiles, Listen, MappedMemory,
    Pacing, PageKind, RdmaDevices, RegionOptions, SLOW_AFTER_NS, Shard, ShardConfig, ShardError, ShardHandle,
    ShardSnapshot, ShardStartError, SharedSetup, TIER_OBJECT_BYTES, TierPolicy, cpu, discover_machine,
    scheduler_affinity, unit_bytes,
};
use kvplane_proto::Limits;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, ShardId, Version};
use kvplane_proto::map::{Member, ShardAddress};
use kvplane_rpc::{Role, RuntimeDirectory};
use kvplane_store::StoreConfig;
use kvplane_store::eviction::Eviction;
use kvplane_store::service::Identity;
use kvplane_sys::MemoryDirectory;
use kvplane_sys::random::random_u64;
use kvplane_tls::{DataTls, Keychain};
use kvplane_topology::{PlanRequest, ShardPlan, plan};
use kvplane_transfer::RdmaConfig;
use kvplane_transfer::rails::near::dealt;

use crate::error::Error;
use crate::link::ControlLink;
use crate::tickets::NodeTickets;
use crate::which::Control;
pub use device_pools::{DevicePool, ParseDevicePoolError};
pub use error::NodeConfigError;
use far_pools::FarPoolPart;
pub use far_pools::{FarMemory, FarPool, ParseFarPoolError};
use followed_map::FollowedMap;
use handover::{Handover, HandoverError, NodeShape};
use incarnation::BegunIncarnation;
use kept_memory::KeptMemory;
use membership::Membership;
use orders::OrderExecutor;
use reports::shard::ShardReports;
use reports::tier::TierReports;
pub use shared::SharedTierConfig;
use ssd::Ssds;
pub use ssd::{ParseSsdError, SsdConfig};

/// Minimum pool size of a shard.
const POOL_LEAST_BYTES: u64 = 1 << 20;

/// Settings of a node.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Control plane to join.
    pub control: Control,
    /// Id of the node; `None` draws one at random.
    pub node: Option<NodeId>,
    /// Address of this host that the shards listen on. An address beyond loopback requires a control plane that issues
    /// tickets.
    pub listen: IpAddr,
    /// Port of the first shard, the others follow; 0 picks free ports.
    pub port: u16,
    /// Mode of TLS on data connections over TCP.
    pub data_tls: DataTls,
    /// Number of shards; `None` follows the machine's topology.
    pub shards: Option<usize>,
    /// Memory for objects, over all shards, in bytes.
    pub pool_bytes: u64,
    /// Share of the slots relative to other nodes; `None` follows the memory, near and far, one unit for each 64 MiB.
    pub weight: Option<u32>,
    /// Failure domain: replicas of one object are kept in different ones. `None` takes the host.
    pub failure_domain: Option<String>,
    /// Directory of the shards' Unix sockets; `None` takes the user's runtime directory.
    pub runtime_directory: Option<PathBuf>,
    /// Strategy of waiting for work; `None` follows the machine: shards that share cores park at once.
    pub pacing: Option<Pacing>,
    /// Limit of objects in memory, over all shards; `None` allows one for each 4 KiB. Each object costs up to 100 more
    /// bytes of memory, allocated as objects are put.
    pub max_objects: Option<u64>,
    /// Eviction policy.
    pub eviction: Eviction,
    /// High and low watermark of a shard's memory, in percent: above the high one, puts evict slightly more than they
    /// need, down to the low one, which is at most as high. 100 and 100 evict only on demand.
    pub watermarks_percent: (u8, u8),
    /// Limit of memory for hard-pinned objects, in percent; beyond it, puts with a hard pin are refused. At most 90.
    pub hard_pin_percent: u8,
    /// Longest soft pin; longer requests are shortened. 0 disables soft pins.
    pub soft_pin_max: Duration,
    /// Page size to use for the pools.
    pub huge: HugePages,
    /// Mode of RDMA, and the devices to use.
    pub rdma: RdmaConfig,
    /// Memory of accelerators beside the pool, into which objects that are read often move; at most one for each shard.
    /// Not with SSDs.
    pub device_pools: Vec<DevicePool>,
    /// Memory beyond DRAM that the pool has a part in, into which objects move that eviction would drop from DRAM. Not
    /// with device pools, nor with memory that is kept.
    pub far_pool: Option<FarPool>,
    /// Directory on tmpfs or hugetlbfs in which the pools outlive the process: the next start on this host serves their
    /// objects again. With one, `node` must be set. `None`: memory ends with the process, unless a successor takes it
    /// over.
    pub keep_memory: Option<PathBuf>,
    /// SSDs (files and devices) behind the memory; with any, `node` must be set, because an SSD records its node.
    pub ssds: Vec<SsdConfig>,
    /// Mean length of objects on the SSDs, from 512 to 2^30 bytes. It sizes the index, at 61 bytes of memory per
    /// object: of shorter objects, fewer fit than the device has space for.
    pub ssd_object_bytes: u32,
    /// I/O method for the SSDs.
    pub ssd_io: IoChoice,
    /// Policy of the tier: write mode, admission and promotion.
    pub tier: TierPolicy,
    /// Store that many nodes see, below memory and SSDs.
    pub shared: Option<SharedTierConfig>,
    /// Rate at which objects in memory are compared with their checksums in the background, in bytes a second over all
    /// shards; 0 for never.
    pub memory_scrub_bytes_per_s: u64,
    /// Threshold from which a request is recorded as slow, in nanoseconds.
    pub slow_after_ns: u64,
    /// Bandwidth limit for migrating the objects of new slots from their former owners in the background, in bytes a
    /// second over all shards; 0 fetches objects on demand only.
    pub fetch_bytes_per_s: u64,
    /// Threshold of hot objects: objects of which a shard serves more bytes a second are replicated to the replica
    /// owners of their slots, if any, and read from there, too; 0 disables it.
    pub hot_bytes_per_s: u64,
}

/// Default of [`NodeConfig::memory_scrub_bytes_per_s`].
const MEMORY_SCRUB_BYTES_PER_S: u64 = 16 << 20;
/// Default of [`NodeConfig::fetch_bytes_per_s`].
const FETCH_BYTES_PER_S: u64 = 1 << 30;

impl NodeConfig {
    /// Returns the settings of a node of the local control plane of this cluster, with this much memory.
    #[must_use]
    pub fn local(cluster: &str, pool_bytes: u64) -> Self {
        Self {
            control: Control::Local { cluster: cluster.to_owned(), runtime_directory: None },
            node: None,
            listen: Ipv4Addr::LOCALHOST.into(),
            port: 0,
            data_tls: DataTls::Off,
            shards: None,
            pool_bytes,
            weight: None,
            failure_domain: None,
            runtime_directory: None,
            pacing: None,
            max_objects: None,
            eviction: Eviction::default(),
            watermarks_percent: (100, 100),
            hard_pin_percent: 25,
            soft_pin_max: Duration::from_millis(Limits::SOFT_PIN_MS as u64),
            huge: HugePages::Try,
            rdma: RdmaConfig::default(),
            device_pools: Vec::new(),
            far_pool: None,
            keep_memory: None,
            ssds: Vec::new(),
            ssd_object_bytes: TIER_OBJECT_BYTES,
            ssd_io: IoChoice::Auto,
            tier: TierPolicy::default(),
            shared: None,
            memory_scrub_bytes_per_s: MEMORY_SCRUB_BYTES_PER_S,
            slow_after_ns: SLOW_AFTER_NS,
            fetch_bytes_per_s: FETCH_BYTES_PER_S,
            hot_bytes_per_s: FetchLimits::default().hot_bytes_per_s,
        }
    }

    /// Returns the host memory for objects, near and far, over all shards.
    fn host_bytes(&self) -> u64 {
        self.pool_bytes + self.far_pool.map_or(0, |far| far.bytes)
    }
}

/// Running storage node. Dropping it leaves the cluster and stops its shards.
pub struct Node {
    shards: Arc<Vec<ShardHandle>>,
    node: NodeId,
    link: ControlLink,
    /// Present incarnation.
    incarnation: Arc<Mutex<u64>>,
    stop: Arc<AtomicBool>,
    /// True if a successor of this process is to join in its place: it does not leave then.
    is_succeeded: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    trouble: Arc<Mutex<Option<String>>>,
    notes: Vec<String>,
    shape: NodeShape,
    /// Claim of the directory of its memory, if that outlives the process.
    claim: Option<Arc<MemoryDirectory>>,
}

/// Preparation of a node's start: all that needs neither its memory nor its ports, which another process may have.
pub(crate) struct NodePlan {
    link: ControlLink,
    cluster: String,
    node: NodeId,
    begun: BegunIncarnation,
    tickets: NodeTickets,
    tls: Option<Arc<Keychain>>,
    layout: ShardPlan,
    /// Size of the pool of each shard in DRAM.
    pool_bytes: u64,
    far_pools: Vec<Option<FarPoolPart>>,
    directory: RuntimeDirectory,
    rdma: Option<RdmaDevices>,
    device_pools: Vec<Option<DevicePoolConfig>>,
    stores: Vec<StoreConfig>,
    shared: Option<SharedSetup>,
    host: String,
}

impl NodePlan {
    /// Connects to the control plane, and plans the shards.
    pub(crate) fn of(config: &NodeConfig) -> Result<Self, Error> {
        if !config.ssds.is_empty() && config.node.is_none() {
            return Err(NodeConfigError::SsdWithoutNode.into());
        }
        if config.keep_memory.is_some() && config.node.is_none() {
            return Err(NodeConfigError::KeptMemoryWithoutNode.into());
        }
        let link = ControlLink::to(&config.control, Role::Node)?;
        let cluster = config.control.cluster().to_owned();
        let node = match config.node {
            Some(node) => node,
            None => NodeId(random_u64()?.max(1)),
        };
        let begun = incarnation::begin(&link, node, config.shared.is_some() || config.keep_memory.is_some())?;
        let tickets = NodeTickets::ask(&link, node.0, begun.number)?;
        check_listen(config.listen, &tickets)?;
        let tls = link.keychain(config.data_tls)?;
        let machine = discover_machine()?;
        let layout = plan(&machine, &PlanRequest { shards: config.shards, affinity: scheduler_affinity(&machine) });
        let shards = layout.shards.len();
        let unit_bytes = far_pools::near_unit_bytes(config);
        let pool_bytes = config.pool_bytes / shards as u64 / unit_bytes * unit_bytes;
        check_layout(config, &layout, pool_bytes)?;
        let directory = directory_of(config)?;
        let rdma = config.rdma.devices()?;
        let device_pools = device_pools::of_shards(config, shards)?;
        let far_pools = far_pools::of_shards(config, &machine, &layout)?;
        let store = |(device, far): (&Option<DevicePoolConfig>, &Option<FarPoolPart>)| {
            store_limits::of_shard(config, pool_bytes, *far, *device, shards)
        };
        let stores = device_pools.iter().zip(&far_pools).map(store).collect::<Result<_, _>>()?;
        let open = |shared: &SharedTierConfig| shared.open(&cluster, shards, begun.last_member);
        let shared = config.shared.as_ref().map(open).transpose()?;
        let host = cpu::boot_id()?;
        Ok(Self {
            link,
            cluster,
            node,
            begun,
            tickets,
            tls,
            layout,
            pool_bytes,
            far_pools,
            directory,
            rdma,
            device_pools,
            stores,
            shared,
            host,
        })
    }

    /// Returns what the node has in common with a process that it may succeed.
    pub(crate) fn shape(&self, config: &NodeConfig) -> NodeShape {
        NodeShape {
            cluster: self.cluster.clone(),
            node: self.node,
            shards: self.layout.shards.len() as u16,
            pool_bytes: self.pool_bytes,
            max_objects: self.stores.first().map_or(0, |store| store.max_objects),
            listen: config.listen,
            port: config.port,
            directory: config.keep_memory.clone(),
            ssds: config.ssds.iter().map(|ssd| ssd.path.clone()).collect(),
            device_pools: config.device_pools.len(),
            has_far_memory: config.far_pool.is_some(),
        }
    }

    const fn incarnation(&self) -> Incarnation {
        match self.begun.continues {
            Some(incarnation) => incarnation,
            None => Incarnation(self.begun.number),
        }
    }

    fn identity(&self, shard: usize) -> Identity {
        Identity {
            cluster: self.cluster.clone(),
            node: self.node,
            incarnation: self.incarnation(),
            shard: ShardId(shard as u16),
            segment_name: format!("{:?}", self.node),
        }
    }

    fn pool(&self, config: &NodeConfig, shard: usize) -> RegionOptions {
        let far = self.far_pools[shard];
        let bytes = self.pool_bytes + far.map_or(0, |far| far.bytes);
        RegionOptions {
            shared: true,
            huge: config.huge,
            numa_node: self.layout.shards[shard].numa_node,
            far: far.map(|far| far.behind(self.pool_bytes)),
            prefault: true,
            ..RegionOptions::new(format!("kvplane-pool-{shard}"), bytes as usize)
        }
    }

    /// Maps the memory of a shard of the running process.
    pub(crate) fn map_memory(
        &self,
        config: &NodeConfig,
        shard: usize,
        files: KeptFiles,
    ) -> Result<MappedMemory, HandoverError> {
        let unit_bytes = unit_bytes(Some(&self.stores[shard]), !config.ssds.is_empty());
        let (identity, shards) = (self.identity(shard), self.layout.shards.len() as u16);
        Ok(MappedMemory::map(files, &identity, shards, unit_bytes, &self.pool(config, shard))?)
    }

    /// Starts the shards, with what another process handed over or anew; joins the cluster, and returns when the node
    /// is in the map.
    pub(crate) fn start(mut self, config: &NodeConfig, handover: Option<&Handover>) -> Result<Node, Error> {
        let shape = self.shape(config);
        let count = self.layout.shards.len();
        let kept = match handover {
            Some(handover) => {
                let next = handover.pass_to(&self.link, self.node, self.incarnation())?;
                // A node with SSDs has to replicate again what they have: it continues no other incarnation.
                if config.ssds.is_empty() && next.number.is_successor() {
                    self.begun.continues = Some(next.number);
                    self.tickets.renew(&self.link, next.number.0)?;
                }
                KeptMemory::handed(handover, next.is_void)
            }
            None => KeptMemory::claim(config.keep_memory.as_deref(), count, self.begun.last_member)?,
        };
        let (shards, notes, devices) = self.start_shards(config, &kept, handover)?;
        let shards = Arc::new(shards);
        let incarnation = self.incarnation();
        let member = member_of(config, self.node, incarnation, self.host, &shards);
        let (stop, trouble) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let is_succeeded = Arc::new(AtomicBool::new(false));
        let (node, tickets) = (self.node, self.tickets);
        let mut membership = Membership {
            link: self.link,
            member,
            shards: Arc::clone(&shards),
            stop: Arc::clone(&stop),
            succeeds: handover.is_some(),
            is_succeeded: Arc::clone(&is_succeeded),
            trouble: Arc::clone(&trouble),
            followed: FollowedMap::default(),
            capacity_bytes: config.host_bytes(),
            tiers: TierReports::new(devices),
            figures: ShardReports::default(),
            kept_since: Epoch(0),
            unanswered: 0,
            incarnation: Arc::new(Mutex::new(incarnation.0)),
            tickets,
        };
        let mut join = || {
            membership.join()?;
            membership.wait_until_mapped()?;
            membership.list_pool()
        };
        if let Err(error) = join() {
            // What was handed over is still there for the next attempt: the objects too, if a map has arrived.
            if handover.is_some() {
                shards.iter().for_each(|shard| drop(shard.hand_over()));
            }
            return Err(error);
        }
        let executor = OrderExecutor {
            link: membership.link.clone(),
            node: node.0,
            incarnation: Arc::clone(&membership.incarnation),
            shards: Arc::clone(&shards),
            stop: Arc::clone(&stop),
        };
        let (link, incarnation) = (membership.link.clone(), Arc::clone(&membership.incarnation));
        let thread = std::thread::Builder::new().name("kvplane-member".to_owned()).spawn(move || membership.live())?;
        let (threads, claim) = (Mutex::new(vec![thread]), kept.directory());
        let node = Node { shards, node, link, incarnation, stop, is_succeeded, threads, trouble, notes, shape, claim };
        let thread = std::thread::Builder::new().name("kvplane-follow".to_owned()).spawn(move || executor.live())?;
        node.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(node)
    }

    fn start_shards(
        &self,
        config: &NodeConfig,
        kept: &KeptMemory,
        handover: Option<&Handover>,
    ) -> Result<NodeShards, Error> {
        let count = self.layout.shards.len();
        let ssds = Ssds::open(config, count, &self.cluster, self.node)?;
        let mut configs = Vec::with_capacity(count);
        for shard in 0..count {
            configs.push(self.shard(config, shard, kept, &ssds, handover)?);
        }
        // All at once: each reads the image of its memory first.
        let started: Vec<_> = std::thread::scope(|scope| {
            let starts: Vec<_> = configs.into_iter().map(|config| scope.spawn(|| Shard::start(config))).collect();
            starts.into_iter().map(|start| start.join()).collect()
        });
        let mut shards = Vec::with_capacity(count);
        for shard in started {
            // A panic was reported when it happened.
            shards.push(shard.unwrap_or(Err(ShardError::Start(ShardStartError::Ended)))?);
        }
        let mut notes = notes_of(&self.layout, &shards, self.pool_bytes);
        notes.extend(ssds.notes());
        notes.extend(config.shared.as_ref().map(|shared| format!("shared tier {}", shared.place)));
        kept.remove_unused()?;
        notes.push(kept.note());
        let most = self.stores.iter().map(|store| u64::from(store.max_objects)).sum();
        notes.extend(kept.room_note(&shards, most));
        let parts = self.device_pools.iter().enumerate().filter_map(|(shard, part)| Some((shard, (*part)?)));
        notes.extend(parts.map(|(shard, part)| format!("shard {shard}: {} MiB on {}", part.bytes >> 20, part.device)));
        let parts = self.far_pools.iter().enumerate().filter_map(|(shard, part)| Some((shard, (*part)?)));
        notes.extend(parts.map(|(shard, part)| {
            format!("shard {shard}: {} MiB of far memory on NUMA node {}", part.bytes >> 20, part.node)
        }));
        let rdma = config.rdma.usable();
        notes.push(rdma.map_or_else(|why| format!("no RDMA: {why}"), |names| format!("RDMA by {names}")));
        Ok((shards, notes, ssds.devices(count)))
    }

    /// Returns the settings of a shard.
    fn shard(
        &self,
        config: &NodeConfig,
        shard: usize,
        kept: &KeptMemory,
        ssds: &Ssds,
        handover: Option<&Handover>,
    ) -> Result<ShardConfig, Error> {
        let (seat, count) = (&self.layout.shards[shard], self.layout.shards.len());
        let pacing = if self.layout.must_park_at_once() { Pacing::Park } else { Pacing::default() };
        let port = if config.port == 0 { 0 } else { config.port + shard as u16 };
        let (cluster, node) = (&self.cluster, self.node);
        Ok(ShardConfig {
            identity: self.identity(shard),
            core: seat.core,
            pacing: config.pacing.unwrap_or(pacing),
            listen: Listen {
                mooncake: None,
                tcp: SocketAddr::new(config.listen, port),
                shm: Some(self.directory.path().join(format!("{cluster}.{node}.{}.shm", ShardId(shard as u16)))),
                handed: handover.and_then(|handover| handover.listeners.get(shard)).cloned(),
            },
            pool: Some(self.pool(config, shard)),
            store: Some(self.stores[shard].clone()),
            first_version: Version(self.begun.number),
            host: HostConfig {
                rdma: self.rdma.as_ref().map(|all| dealt(all, seat)),
                tier: ssds.tier_of(shard, count)?,
                shared: self.shared.clone(),
                device_pool: self.device_pools[shard],
                kept: Some(kept.of_shard(shard)?),
                memory_scrub_bytes_per_s: config.memory_scrub_bytes_per_s / count as u64,
                slow_after_ns: config.slow_after_ns,
                tickets: self.tickets.challenges()?,
                tls: self.tls.clone(),
                unacknowledged: Duration::from_nanos(Limits::UNACKNOWLEDGED_NS),
                fetch: Some(FetchConfig {
                    client: random_u64()?,
                    cluster: cluster.clone(),
                    host: self.host.clone(),
                    limits: FetchLimits {
                        bytes_per_s: config.fetch_bytes_per_s / count as u64,
                        hot_bytes_per_s: config.hot_bytes_per_s,
                        ..FetchLimits::default()
                    },
                }),
                ..HostConfig::default()
            },
        })
    }
}

impl Node {
    /// Starts the shards, joins the cluster, and returns when the node is in the map.
    ///
    /// # Errors
    /// When a port is taken, memory cannot be allocated, or the control plane refuses the node.
    pub fn start(config: &NodeConfig) -> Result<Self, Error> {
        NodePlan::of(config)?.start(config, None)
    }

    /// Ends the threads that speak to the control plane, without leaving the cluster.
    fn end_membership(&self) {
        self.is_succeeded.store(true, Ordering::Relaxed);
        self.end_threads();
    }

    fn end_threads(&self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner)) {
            // A panic of the thread was reported when it happened; the shards stop either way.
            let _ = thread.join();
        }
    }

    /// Returns its present incarnation.
    fn incarnation(&self) -> Incarnation {
        Incarnation(*self.incarnation.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the id of the node.
    #[must_use]
    pub const fn id(&self) -> NodeId {
        self.node
    }

    /// Returns the addresses that the shards listen on.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.shards.iter().map(ShardHandle::address).collect()
    }

    /// Returns notes on the layout of shards, pages and devices, for logs.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns a snapshot of every shard.
    ///
    /// # Errors
    /// When a shard does not answer.
    pub fn snapshots(&self) -> Result<Vec<ShardSnapshot>, Error> {
        self.shards.iter().map(|shard| Ok(shard.snapshot()?)).collect()
    }

    /// Fails when a shard has ended, or the node has stopped for a successor: it cannot go on.
    ///
    /// # Errors
    /// The error of the shard that ended, or [`HandoverError::Stopped`].
    pub fn check(&self) -> Result<(), Error> {
        if self.is_succeeded.load(Ordering::Relaxed) {
            return Err(HandoverError::Stopped.into());
        }
        match self.shards.iter().find_map(ShardHandle::ended) {
            Some(error) => Err(Error::Shard(error)),
            None => Ok(()),
        }
    }

    /// Returns the error of the last exchange with the control plane, if that failed.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.end_threads();
    }
}

/// Returns the directory of Unix sockets, private to the user.
fn directory_of(config: &NodeConfig) -> Result<RuntimeDirectory, Error> {
    let directory = match &config.runtime_directory {
        Some(path) => RuntimeDirectory::at(path),
        None => RuntimeDirectory::of_user()?,
    };
    kvplane_sys::private_files::private_directory(directory.path())?;
    kvplane_transport::sockets::sweep(directory.path());
    Ok(directory)
}

/// Shards, notes on them for logs, and the device of each shard if there are any.
type NodeShards = (Vec<ShardHandle>, Vec<String>, Vec<String>);

/// Rejects listen addresses that are unusable, or that lack authentication.
fn check_listen(listen: IpAddr, tickets: &NodeTickets) -> Result<(), NodeConfigError> {
    if !listen.is_loopback() && !tickets.wanted {
        return Err(NodeConfigError::OpenPorts { listen });
    }
    if listen.is_unspecified() {
        return Err(NodeConfigError::UnspecifiedListen { listen });
    }
    Ok(())
}

/// Checks that every shard gets enough memory, and a port.
fn check_layout(config: &NodeConfig, layout: &ShardPlan, pool_bytes: u64) -> Result<(), NodeConfigError> {
    let shards = layout.shards.len();
    if pool_bytes < POOL_LEAST_BYTES {
        return Err(NodeConfigError::Pool { pool_bytes: config.pool_bytes, shards });
    }
    if config.port != 0 && usize::from(u16::MAX - config.port) < shards - 1 {
        return Err(NodeConfigError::Ports { shards, port: config.port });
    }
    Ok(())
}

/// Describes the layout of the shards, for logs.
fn notes_of(layout: &ShardPlan, shards: &[ShardHandle], pool_bytes: u64) -> Vec<String> {
    let mut notes = layout.notes.clone();
    notes.extend(layout.shards.iter().zip(shards).map(|(seat, shard)| {
        let core = seat.core.map_or_else(|| "no fixed core".to_owned(), |core| format!("core {core}"));
        let pages = shard.page_kind().map_or_else(String::new, |kind| format!(", {kind:?} pages"));
        let place = format!("shard {}: {}, {core}, {} MiB{pages}", seat.shard, shard.address(), pool_bytes >> 20);
        format!("{place}; {}", seat.reason)
    }));
    if shards.iter().any(|shard| shard.page_kind() == Some(PageKind::Plain)) {
        notes.push(
            "the pool is not on huge pages: set /sys/kernel/mm/transparent_hugepage/shmem_enabled to advise, \
             or reserve some with vm.nr_hugepages"
                .to_owned(),
        );
    }
    notes
}

fn member_of(
    config: &NodeConfig,
    node: NodeId,
    incarnation: Incarnation,
    host: String,
    shards: &[ShardHandle],
) -> Member {
    let by_memory = (config.host_bytes() >> 26).clamp(1, 1 << 20) as u32;
    Member {
        node,
        incarnation,
        weight: config.weight.unwrap_or(by_memory),
        failure_domain: config.failure_domain.clone().unwrap_or_else(|| host.clone()),
        host,
        shards: shards
            .iter()
            .map(|shard| ShardAddress { tcp: shard.address(), shm: shard.shm().map(|path| path.display().to_string()) })
            .collect(),
    }
}

//! Storage node: shards, membership and heartbeats.
//!
//! A node joins, sends a heartbeat every heartbeat interval, and owns the slots that the newest map assigns to it.
//! While the control plane is away, the node keeps serving by its last map and keeps reconnecting. When the control
//! plane reports that the node's incarnation has ended (it was silent for too long and its slots have other owners
//! now), the node drops its objects and joins with a new incarnation.

mod device_pools;
mod drain;
mod error;
mod followed_map;
mod incarnation;
mod kept_memory;
mod membership;
mod metrics;
mod orders;
mod shard_report;
mod shared;
mod ssd;
mod store_limits;
mod tenant_report;
mod tier_report;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvplane_engine::{
    FetchConfig, FetchLimits, HostConfig, HugePages, IoChoice, Listen, Pacing, PageKind, RegionOptions, SLOW_AFTER_NS,
    Shard, ShardConfig, ShardHandle, ShardSnapshot, TIER_OBJECT_BYTES, TierPolicy, cpu, discover_machine,
    scheduler_affinity,
};
use kvplane_proto::Limits;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, ShardId, Version};
use kvplane_proto::map::{Member, ShardAddress};
use kvplane_rpc::{Role, RuntimeDirectory};
use kvplane_store::eviction::Eviction;
use kvplane_store::service::Identity;
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
use followed_map::FollowedMap;
use incarnation::BegunIncarnation;
use kept_memory::KeptDirectory;
use membership::Membership;
use orders::OrderExecutor;
use shard_report::ShardReports;
pub use shared::SharedTierConfig;
use ssd::Ssds;
pub use ssd::{ParseSsdError, SsdConfig};
use tier_report::TierReports;

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
    /// Share of the slots relative to other nodes; `None` follows the memory, one unit for each 64 MiB.
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
    /// High watermark of a shard's memory, in percent: above it, puts evict slightly more than they need. 100 evicts
    /// only on demand.
    pub high_watermark_percent: u8,
    /// Low watermark, in percent, down to which that eviction continues; at most `high_watermark_percent`.
    pub low_watermark_percent: u8,
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
    /// Directory on tmpfs or hugetlbfs in which the pools outlive the process: the next start on this host serves their
    /// objects again. With one, `node` must be set. `None`: memory ends with the process.
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
            high_watermark_percent: 100,
            low_watermark_percent: 100,
            hard_pin_percent: 25,
            soft_pin_max: Duration::from_millis(Limits::SOFT_PIN_MS as u64),
            huge: HugePages::Try,
            rdma: RdmaConfig::default(),
            device_pools: Vec::new(),
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
}

/// Running storage node. Dropping it leaves the cluster and stops its shards.
pub struct Node {
    shards: Arc<Vec<ShardHandle>>,
    node: NodeId,
    link: ControlLink,
    /// Present incarnation.
    incarnation: Arc<Mutex<u64>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    trouble: Arc<Mutex<Option<String>>>,
    notes: Vec<String>,
}

impl Node {
    /// Starts the shards, joins the cluster, and returns when the node is in the map.
    ///
    /// # Errors
    /// When a port is taken, memory cannot be allocated, or the control plane refuses the node.
    pub fn start(config: &NodeConfig) -> Result<Self, Error> {
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
        let begun = incarnation::begin(&link, node)?;
        let born_ns = begun.number;
        let tickets = NodeTickets::ask(&link, node.0, born_ns)?;
        check_listen(config.listen, &tickets)?;
        let (incarnation, tls) = (Incarnation(born_ns), link.keychain(config.data_tls)?);
        let (shards, notes, devices) = start_shards(config, &cluster, node, begun, &tickets, tls.as_ref())?;
        let shards = Arc::new(shards);
        let member = member_of(config, node, incarnation, &shards)?;
        let (stop, trouble) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let mut membership = Membership {
            link,
            member,
            shards: Arc::clone(&shards),
            stop: Arc::clone(&stop),
            trouble: Arc::clone(&trouble),
            followed: FollowedMap::default(),
            capacity_bytes: config.pool_bytes,
            tiers: TierReports::new(devices),
            figures: ShardReports::default(),
            kept_since: Epoch(0),
            unanswered: 0,
            incarnation: Arc::new(Mutex::new(born_ns)),
            tickets,
        };
        membership.join()?;
        membership.wait_until_mapped()?;
        membership.list_pool()?;
        let executor = OrderExecutor {
            link: membership.link.clone(),
            node: node.0,
            incarnation: Arc::clone(&membership.incarnation),
            shards: Arc::clone(&shards),
            stop: Arc::clone(&stop),
        };
        let (link, incarnation) = (membership.link.clone(), Arc::clone(&membership.incarnation));
        let thread = std::thread::Builder::new().name("kvplane-member".to_owned()).spawn(move || membership.live())?;
        let mut node = Self { shards, node, link, incarnation, stop, threads: vec![thread], trouble, notes };
        let thread = std::thread::Builder::new().name("kvplane-follow".to_owned()).spawn(move || executor.live())?;
        node.threads.push(thread);
        Ok(node)
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

    /// Fails when a shard has ended: the node cannot go on.
    ///
    /// # Errors
    /// The error of the shard that ended.
    pub fn check(&self) -> Result<(), Error> {
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
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic of the thread was reported when it happened; the shards stop either way.
            let _ = thread.join();
        }
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

fn start_shards(
    config: &NodeConfig,
    cluster: &str,
    node: NodeId,
    begun: BegunIncarnation,
    tickets: &NodeTickets,
    tls: Option<&Arc<Keychain>>,
) -> Result<NodeShards, Error> {
    let incarnation = Incarnation(begun.number);
    let machine = discover_machine()?;
    let layout = plan(&machine, &PlanRequest { shards: config.shards, affinity: scheduler_affinity(&machine) });
    let pool_bytes = config.pool_bytes / layout.shards.len() as u64 / 4096 * 4096;
    check_layout(config, &layout, pool_bytes)?;
    let pacing = config.pacing.unwrap_or(if layout.must_park_at_once() { Pacing::Park } else { Pacing::default() });
    let directory = directory_of(config)?;
    let (rdma, count) = (config.rdma.devices()?, layout.shards.len());
    let device_pools = device_pools::of_shards(config, count)?;
    let ssds = Ssds::open(config, count, cluster, node)?;
    let shared = config.shared.as_ref().map(|shared| shared.open(cluster, count, begun.last)).transpose()?;
    let kept = KeptDirectory::claim(config.keep_memory.as_deref(), count)?;
    let host = cpu::boot_id()?;
    let mut shards = Vec::new();
    for seat in &layout.shards {
        let shard = ShardId(seat.shard as u16);
        let port = if config.port == 0 { 0 } else { config.port + shard.0 };
        let pool = RegionOptions {
            shared: true,
            huge: config.huge,
            numa_node: seat.numa_node,
            prefault: true,
            ..RegionOptions::new(format!("kvplane-pool-{}", shard.0), pool_bytes as usize)
        };
        shards.push(Shard::start(ShardConfig {
            identity: Identity {
                cluster: cluster.to_owned(),
                node,
                incarnation,
                shard,
                segment_name: format!("{node:?}"),
            },
            core: seat.core,
            pacing,
            listen: Listen {
                mooncake: None,
                tcp: SocketAddr::new(config.listen, port),
                shm: Some(directory.path().join(format!("{cluster}.{node}.{shard}.shm"))),
            },
            pool: Some(pool),
            store: Some(store_limits::of_shard(config, pool_bytes, device_pools[seat.shard], count)?),
            first_version: Version(incarnation.0),
            host: HostConfig {
                rdma: rdma.as_ref().map(|all| dealt(all, seat)),
                tier: ssds.tier_of(seat.shard, count)?,
                shared: shared.clone(),
                device_pool: device_pools[seat.shard],
                kept: kept.of_shard()?,
                memory_scrub_bytes_per_s: config.memory_scrub_bytes_per_s / count as u64,
                slow_after_ns: config.slow_after_ns,
                tickets: tickets.challenges()?,
                tls: tls.cloned(),
                unacknowledged: Duration::from_nanos(Limits::UNACKNOWLEDGED_NS),
                fetch: Some(FetchConfig {
                    client: random_u64()?,
                    cluster: cluster.to_owned(),
                    host: host.clone(),
                    limits: FetchLimits {
                        bytes_per_s: config.fetch_bytes_per_s / count as u64,
                        hot_bytes_per_s: config.hot_bytes_per_s,
                        ..FetchLimits::default()
                    },
                }),
                ..HostConfig::default()
            },
        })?);
    }
    let mut notes = notes_of(&layout, &shards, pool_bytes);
    notes.extend(ssds.notes());
    notes.extend(config.shared.as_ref().map(|shared| format!("shared tier {}", shared.place)));
    kept.remove_unused()?;
    notes.extend(kept.note());
    let parts = device_pools.iter().enumerate().filter_map(|(shard, part)| Some((shard, (*part)?)));
    notes.extend(parts.map(|(shard, part)| format!("shard {shard}: {} MiB on {}", part.bytes >> 20, part.device)));
    notes.push(config.rdma.usable().map_or_else(|why| format!("no RDMA: {why}"), |names| format!("RDMA by {names}")));
    Ok((shards, notes, ssds.devices(count)))
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
    shards: &[ShardHandle],
) -> Result<Member, Error> {
    let host = cpu::boot_id()?;
    let by_memory = (config.pool_bytes >> 26).clamp(1, 1 << 20) as u32;
    Ok(Member {
        node,
        incarnation,
        weight: config.weight.unwrap_or(by_memory),
        failure_domain: config.failure_domain.clone().unwrap_or_else(|| host.clone()),
        host,
        shards: shards
            .iter()
            .map(|shard| ShardAddress { tcp: shard.address(), shm: shard.shm().map(|path| path.display().to_string()) })
            .collect(),
    })
}

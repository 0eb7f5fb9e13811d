//! `kvplane node`: runs a storage node as a process.

mod shared;

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use kvplane::handover::{Handover, HandoverSocket, Succession};
use kvplane::{
    DataTls, DevicePool, Eviction, FarPool, HugePages, IoChoice, MetricsServer, MovesLeft, NodeConfig, NodeId, PutAck,
    RdmaConfig, RdmaUse, SsdConfig, TierPolicy, WritePolicy,
};
use tokio::sync::mpsc;

use crate::command::Failure;
use crate::command::process::log::{Level, Log};
use crate::command::process::stop::Stop;
use crate::command::process::upgrades::{Turn, Upgrades};
use crate::command::process::{durations, metrics, service_manager, upgrades};
use crate::command::size;
use crate::command::tebench::{PacingChoice, values};
use crate::command::which::Which;
use shared::SharedArguments;

/// Pause between two attempts to reach a control plane.
const AGAIN: Duration = Duration::from_millis(500);
/// Margin added to the retry time that a refusing control plane names.
const REFUSED_LONGER: Duration = Duration::from_secs(2);

/// Time for which a process that has the memory of a node tries to join, if no control plane answers: the longest of
/// `--wait-control`. Its memory ends with it, or is out of service, and without a control plane no other node gets its
/// slots.
const RESUME: Duration = Duration::from_secs(86_400);

/// Longest time that an object stays unwritten under write-back, in nanoseconds.
const WRITE_BACK_NS: u64 = 10_000_000_000;

/// Use of RDMA by a node.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum RdmaChoice {
    /// RDMA if available.
    Auto,
    /// No RDMA.
    Never,
    /// RDMA, which must be available: else the start fails.
    Require,
}

impl From<RdmaChoice> for RdmaUse {
    fn from(choice: RdmaChoice) -> Self {
        match choice {
            RdmaChoice::Auto => Self::Auto,
            RdmaChoice::Never => Self::Never,
            RdmaChoice::Require => Self::Require,
        }
    }
}

/// Run a storage node.
#[derive(Args)]
pub(crate) struct Node {
    /// TOML file with settings; its keys are the names of these flags. A flag on the command line overrides the file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Name of the cluster. Without `--control`, its control plane is found in the user's runtime directory.
    #[arg(long, default_value = "kvplane")]
    cluster: String,
    #[command(flatten)]
    log: Log,
    #[command(flatten)]
    which: Which,
    /// Time to wait for a control plane that is not up yet, in seconds: both may start at the same time. 0: fail at
    /// once.
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = durations::seconds())]
    wait_control: u64,
    /// Take the memory, the ports and the identity of the running process of this node over, which then ends: `kvplane
    /// ctl upgrade` starts the new process so. Needs the same settings of memory, ports and SSDs in both.
    #[arg(long, requires = "node_id")]
    take_over: bool,
    #[command(flatten)]
    shape: Shape,
}

/// Settings of a storage node, shared by `kvplane node` and `kvplane dev`.
#[derive(Args, Clone)]
pub(crate) struct Shape {
    /// Size of the memory pool for objects, in bytes, over all shards. Takes K, M, G and T (powers of 1024).
    #[arg(long, value_parser = size::parse, default_value = "1G")]
    pool: u64,
    /// Number of shards, each with a thread of its own. Default: chosen from the machine's topology.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    shards: Option<u16>,
    #[command(flatten)]
    member: MemberArguments,
    /// Waiting strategy of the shards. Default: chosen from the machine's topology.
    #[arg(long, value_enum)]
    pacing: Option<PacingChoice>,
    #[command(flatten)]
    objects: ObjectArguments,
    #[command(flatten)]
    rdma: RdmaArguments,
    /// Loopback port that serves the shards' counters as Prometheus text at /metrics. 0: a free port is picked.
    /// Default: no such port.
    #[arg(long, alias = "metrics_port")]
    metrics_port: Option<u16>,
    /// Latency from which a request counts as slow, in milliseconds. `kvplane ctl shards --slow` shows the latest slow
    /// requests with their stages.
    #[arg(long, value_name = "MS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    slow_ms: u64,
    /// Bandwidth limit of background migration into this node, in bytes per second over all shards. 0: objects of
    /// migrating slots are fetched only on access.
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = size::parse)]
    migration_rate: u64,
    /// Read rate above which an object is replicated automatically, in bytes per second, if slots have two owners; gets
    /// are then spread over both replicas. 0: no object is replicated automatically.
    #[arg(long, alias = "replicate_hot", value_name = "BYTES", default_value = "256M", value_parser = size::parse)]
    replicate_hot: u64,
    /// Time to drain this node on SIGTERM or SIGINT before it leaves, in seconds: its slots migrate to other nodes. 0:
    /// leave without draining.
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = durations::seconds())]
    drain: u64,
    /// Directory on tmpfs or hugetlbfs in which the objects in memory outlive the process: after SIGTERM or SIGINT, the
    /// next start on this host serves them again. --node-id must be the same at every start. A process that is killed
    /// leaves nothing.
    #[arg(long, value_name = "DIRECTORY")]
    keep_memory: Option<PathBuf>,
    #[command(flatten)]
    ssd: Ssd,
    #[command(flatten)]
    shared: SharedArguments,
    /// Directory of local identities and sockets. Default: the user's runtime directory.
    #[arg(long)]
    pub(crate) runtime_directory: Option<PathBuf>,
}

/// Identity of the node in its cluster, and the addresses that it listens on.
#[derive(Args, Clone)]
struct MemberArguments {
    /// Number of this node, above 0, the same at every start. Default: drawn at random at each start.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    node_id: Option<u64>,
    /// Address that the data ports listen on, which other hosts use to reach this node. An address beyond loopback
    /// needs a control plane that issues tickets.
    #[arg(long, default_value = "127.0.0.1")]
    listen: IpAddr,
    /// Data port of the first shard; the other shards take the ports that follow. 0: free ports are picked.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// TLS 1.3 on TCP data connections, with the certificates of control connections. off: none; offer: the connecting
    /// side chooses; require: plain connections are refused, and none is opened.
    #[arg(long, value_name = "off|offer|require", default_value_t = DataTls::Off)]
    data_tls: DataTls,
    /// Weight of this node when slots are assigned, relative to other nodes. Default: one unit for each 64 MiB of the
    /// pool and of far memory.
    #[arg(long)]
    weight: Option<u32>,
    /// Failure domain of this node; the replicas of an object are kept in different failure domains. Default: the host.
    #[arg(long)]
    failure_domain: Option<String>,
}

/// Limits of the objects in memory, and their eviction.
#[derive(Args, Clone)]
struct ObjectArguments {
    /// Maximum number of objects in memory. Default: one for each 4 KiB of the pool. Each object costs up to 100 bytes
    /// of memory more.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    max_objects: Option<u64>,
    /// Memory of an accelerator that objects which are read often move into, which leaves more of the pool for others:
    /// DEVICE=SIZE, such as cuda:0=8G. Several are distributed over the shards. Not with --ssd, nor with --eviction
    /// lru.
    #[arg(long = "device-pool", value_name = "DEVICE=SIZE")]
    device_pools: Vec<DevicePool>,
    /// Far memory, slower than DRAM, that objects move into which eviction would drop from the pool: cxl:SIZE takes
    /// the NUMA nodes without CPUs, numa:NODE:SIZE one that is named. SIZE comes on top of --pool, over all shards.
    /// Not with --device-pool, nor with --keep-memory.
    #[arg(long = "pool-tier", value_name = "MEMORY:SIZE")]
    pool_tier: Option<FarPool>,
    /// Eviction policy: slru (segmented LRU: objects that were accessed twice outlive those that were accessed once),
    /// s3fifo, or lru.
    #[arg(long, default_value = "slru")]
    eviction: Eviction,
    /// High and low watermark of memory use, in percent: above HIGH, puts evict more than they need, down to LOW.
    /// 100,100: objects are evicted only when a put needs their memory.
    #[arg(long, value_name = "HIGH,LOW", default_value = "100,100", value_parser = watermarks)]
    watermarks: (u8, u8),
    /// Most memory that hard-pinned objects (never evicted) may take, in percent of the pool. Puts with a hard pin
    /// beyond it are refused.
    #[arg(long, value_name = "PERCENT", default_value_t = 25, value_parser = clap::value_parser!(u8).range(0..=90))]
    hard_pins: u8,
    /// Rate at which objects in memory are compared with their checksums in the background, in bytes per second. A
    /// damaged one is repaired from a replica. 0: objects are checked only by those who read them.
    #[arg(long = "memory-scrub", value_name = "BYTES", default_value = "16M", value_parser = size::parse)]
    memory_scrub: u64,
    /// Longest soft pin that a put may request, in milliseconds; longer requests are shortened. 0: soft pins have no
    /// effect.
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 86_400_000,
        value_parser = clap::value_parser!(u64).range(0..=86_400_000)
    )]
    soft_pin_max_ms: u64,
}

/// RDMA devices.
#[derive(Args, Clone)]
struct RdmaArguments {
    /// Use of RDMA.
    #[arg(long, value_enum, default_value = "auto")]
    rdma: RdmaChoice,
    /// RDMA devices to use, separated by commas. Each is connected to the device at the same position of the peer's
    /// list. Default: all devices.
    #[arg(long, alias = "rdma_devices", value_delimiter = ',')]
    rdma_devices: Vec<String>,
    /// Affinity of RDMA devices to memory: a NIC priority matrix of Mooncake or a topology of TENT, as JSON or as the
    /// path of a JSON file. Default: derived from the NUMA placement of devices and memory.
    #[arg(long, alias = "nic_priority_matrix", default_value = "")]
    nic_priority_matrix: String,
}

/// Settings of the SSD tier.
#[derive(Args, Clone)]
struct Ssd {
    /// File or block device of the SSD tier: PATH or PATH:SIZE. A missing file is created with SIZE. Several are
    /// distributed over the shards. The objects on it outlive the process, so --node-id must be the same at every
    /// start.
    #[arg(long = "ssd", value_name = "PATH[:SIZE]")]
    paths: Vec<SsdConfig>,
    /// Expected mean size of an object on the SSDs, in bytes. It sizes the index in memory, at 63 bytes for each
    /// object: with 4K, objects of 4 KiB fill the SSDs too, for eight times the memory that 32K takes.
    #[arg(long = "ssd-object-bytes", value_name = "BYTES", default_value = "32K", value_parser = size::parse_object)]
    object_bytes: u32,
    /// I/O path to the SSDs. The path in use is printed at start.
    #[arg(long = "ssd-io", value_enum, default_value = "auto")]
    io: IoArgument,
    /// Write policy of the SSD tier.
    #[arg(long = "ssd-write", value_enum, default_value = "through", requires = "paths")]
    write: WriteChoice,
    /// Acknowledgement level of puts that are written at once and request no level.
    #[arg(long = "ssd-ack", value_enum, default_value = "memory", requires = "paths")]
    ack: AckChoice,
    /// Number of recent accesses from which an object that was read from the SSD is promoted to memory.
    #[arg(long = "ssd-promote", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=15))]
    promote: u8,
    /// Most memory that objects waiting to be written to the SSD may take, in percent of the pool.
    #[arg(long = "ssd-backlog", default_value_t = 25, value_parser = clap::value_parser!(u8).range(1..=75))]
    backlog: u8,
    /// Most memory that prefetched objects may take, in percent of the pool. 0: nothing is prefetched from the SSD.
    #[arg(long = "ssd-prefetch", default_value_t = 10, value_parser = clap::value_parser!(u8).range(0..=50))]
    prefetch: u8,
    /// Prefetch an object from the SSD when a client checks its existence, even if the client requests no prefetch.
    #[arg(long = "ssd-prefetch-on-exists")]
    prefetch_on_exists: bool,
    /// Write budget of the SSDs, in bytes a day. Near the limit only objects that are put or accessed twice are
    /// written; beyond it, only those that --ssd-ack promises. 0: no limit.
    #[arg(long = "ssd-budget", value_name = "BYTES", default_value = "0", value_parser = size::parse)]
    budget: u64,
    /// Read bandwidth of the background scrubber, in bytes per second. 0: no scrubbing.
    #[arg(long = "ssd-scrub", value_name = "BYTES", default_value = "16M", value_parser = size::parse)]
    scrub: u64,
}

/// I/O path to the SSDs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum IoArgument {
    /// NVMe passthrough (/dev/ngXnY) for an NVMe drive, with completion polling where the kernel has poll queues
    /// (nvme.poll_queues); otherwise io_uring.
    Auto,
    /// io_uring with completions by interrupt.
    Uring,
    /// io_uring with polled completions.
    Iopoll,
    /// NVMe commands by passthrough.
    Passthrough,
}

/// Write policy of the SSD tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum WriteChoice {
    /// Write-through: an object is written at its put.
    Through,
    /// Selective: an object is written at its second put or access.
    Selective,
    /// Write-back: an object is written within ten seconds, and before its eviction; earlier when the backlog is large.
    Back,
}

/// Acknowledgement level of a put.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum AckChoice {
    /// The object is in memory.
    Memory,
    /// The device has taken the write; the object outlives the process.
    Buffered,
    /// The write is flushed; the object outlives a power failure.
    Durable,
}

impl From<AckChoice> for PutAck {
    fn from(choice: AckChoice) -> Self {
        match choice {
            AckChoice::Memory => Self::Memory,
            AckChoice::Buffered => Self::Buffered,
            AckChoice::Durable => Self::Durable,
        }
    }
}

impl RdmaArguments {
    fn config(&self) -> Result<RdmaConfig, values::ValueError> {
        values::rdma("--rdma-devices", self.rdma.into(), &self.rdma_devices, &self.nic_priority_matrix)
    }
}

impl Ssd {
    fn policy(&self) -> TierPolicy {
        TierPolicy {
            write: match self.write {
                WriteChoice::Through => WritePolicy::Through,
                WriteChoice::Selective => WritePolicy::Selective { times: 2 },
                WriteChoice::Back => WritePolicy::Back { within_ns: WRITE_BACK_NS },
            },
            ack: self.ack.into(),
            promote_times: self.promote,
            backlog_percent: self.backlog,
            prefetch_percent: self.prefetch,
            prefetch_on_exists: self.prefetch_on_exists,
            bytes_per_day: self.budget,
            scrub_bytes_per_s: self.scrub,
        }
    }
}

/// Error of a text that is no pair of watermarks.
#[derive(Clone, PartialEq, Eq, Debug)]
struct WatermarkError {
    text: String,
}

impl fmt::Display for WatermarkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = &self.text;
        write!(f, "{text:?} is not two percentages, the higher one first and from 1 to 100: for example 95,90")
    }
}

impl std::error::Error for WatermarkError {}

/// Parses `HIGH,LOW` in percent.
fn watermarks(text: &str) -> Result<(u8, u8), WatermarkError> {
    let parts =
        text.split_once(',').and_then(|(high, low)| Some((high.trim().parse().ok()?, low.trim().parse().ok()?)));
    match parts {
        Some((high @ 1..=100, low)) if low <= high => Ok((high, low)),
        _ => Err(WatermarkError { text: text.to_owned() }),
    }
}

/// Time without progress after which a stopping node no longer waits for slots that migrate from it or to it. A node
/// that hands over serves meanwhile, and waits for [`MOVES_MOST`] in any case.
const MOVES_PATIENCE: Duration = Duration::from_secs(5);
/// Longest time that a node that stops, or hands over, waits for migrating slots.
const MOVES_MOST: Duration = Duration::from_secs(20);

/// Describes what a drain has left behind.
pub(crate) fn not_taken(left: MovesLeft, waited: Duration) -> String {
    let MovesLeft { objects, owned, .. } = left;
    let waited = waited.as_secs();
    match owned {
        0 => format!("other nodes did not fetch {objects} objects within {waited} s"),
        _ => format!("other nodes did not take {owned} slots over, nor fetch {objects} objects, within {waited} s"),
    }
}

/// Waits for slots that migrate from a node that is about to end, or to it.
pub(crate) fn finish_moves(node: &kvplane::Node) {
    if let Ok(left @ 1..) = node.finish_moves(MOVES_PATIENCE, MOVES_MOST) {
        eprintln!("kvplane: stopped while {left} slots were still migrating from or to this node");
    }
}

impl Shape {
    /// Sets the node's number where none was given.
    pub(crate) fn or_node_id(&mut self, node: u64) {
        self.member.node_id.get_or_insert(node);
    }

    /// Returns the default directory of the control plane's state: beside the first SSD that is a file, or the memory
    /// that is kept. The objects there are valid only as long as the control plane remembers the owners of their slots.
    pub(crate) fn state_beside_objects(&self) -> Option<PathBuf> {
        let path = self.ssd.paths.first().map(|ssd| &ssd.path).or(self.keep_memory.as_ref())?;
        let mut name = path.file_name().filter(|_| !path.starts_with("/dev"))?.to_owned();
        name.push(".control");
        Some(path.with_file_name(name))
    }

    /// Drains the node before it ends, if `--drain` is set; then waits for slots that migrate, and for new owners that
    /// have not reported yet.
    fn give_away(&self, node: &kvplane::Node) {
        if self.drain > 0 {
            let begin = std::time::Instant::now();
            match node.drain(Duration::from_secs(self.drain)) {
                Ok(left) if left.is_drained() => announce!("drained: other nodes hold all objects"),
                Ok(left) => announce!("drain incomplete: {}", not_taken(left, begin.elapsed())),
                Err(error) => eprintln!("kvplane: drain failed: {error}"),
            }
        }
        finish_moves(node);
    }

    /// Starts the node and the server of its metrics. Returns `None` if a signal stops the process meanwhile.
    pub(crate) fn start(
        &self,
        cluster: &str,
        control: kvplane::Control,
        wait: Duration,
        stop: &mut Stop,
    ) -> Result<Option<RunningNode>, Failure> {
        let config = self.config(cluster, control)?;
        let node = start_when_there(wait, stop, || kvplane::Node::start(&config))?;
        node.map(|node| self.serve(node)).transpose()
    }

    /// Returns the settings of the node.
    fn config(&self, cluster: &str, control: kvplane::Control) -> Result<NodeConfig, Failure> {
        Ok(NodeConfig {
            control,
            node: self.member.node_id.map(NodeId),
            listen: self.member.listen,
            port: self.member.port,
            data_tls: self.member.data_tls,
            shards: self.shards.map(usize::from),
            weight: self.member.weight,
            failure_domain: self.member.failure_domain.clone(),
            runtime_directory: self.runtime_directory.clone(),
            pacing: self.pacing.map(Into::into),
            max_objects: self.objects.max_objects,
            eviction: self.objects.eviction,
            watermarks_percent: self.objects.watermarks,
            hard_pin_percent: self.objects.hard_pins,
            soft_pin_max: Duration::from_millis(self.objects.soft_pin_max_ms),
            huge: HugePages::Try,
            rdma: self.rdma.config()?,
            device_pools: self.objects.device_pools.clone(),
            far_pool: self.objects.pool_tier,
            keep_memory: self.keep_memory.clone(),
            ssds: self.ssd.paths.clone(),
            ssd_object_bytes: self.ssd.object_bytes,
            ssd_io: match self.ssd.io {
                IoArgument::Auto => IoChoice::Auto,
                IoArgument::Uring => IoChoice::Uring,
                IoArgument::Iopoll => IoChoice::Polled,
                IoArgument::Passthrough => IoChoice::Passthrough,
            },
            tier: self.ssd.policy(),
            shared: self.shared.config(),
            memory_scrub_bytes_per_s: self.objects.memory_scrub,
            slow_after_ns: self.slow_ms * 1_000_000,
            fetch_bytes_per_s: self.migration_rate,
            hot_bytes_per_s: self.replicate_hot,
            ..NodeConfig::local(cluster, self.pool)
        })
    }

    /// Announces a node that has started, and serves its metrics.
    fn serve(&self, node: kvplane::Node) -> Result<RunningNode, Failure> {
        let node = Arc::new(node);
        announce!("node {} with {} for objects", node.id(), size::show(self.pool));
        node.notes().iter().for_each(|note| announce!("  {note}"));
        let shown = Arc::downgrade(&node);
        let server = metrics::serve(self.metrics_port, move || shown.upgrade()?.metrics_text().ok())?;
        if let Some(server) = &server {
            announce!("{}", metrics::say(server, "counters of the shards"));
        }
        Ok(RunningNode { metrics: server, node })
    }
}

/// A running node and the server of its metrics, which is dropped first.
pub(crate) struct RunningNode {
    metrics: Option<MetricsServer>,
    pub(crate) node: Arc<kvplane::Node>,
}

/// Starts a node by `start`. Retries for up to `wait` while no control plane is up, or while the control plane refuses
/// the node for now: it refuses a restarted node, which has other ports, as long as it takes the former incarnation for
/// alive. Returns `None` if a signal stops the process meanwhile.
fn start_when_there(
    wait: Duration,
    stop: &mut Stop,
    mut start: impl FnMut() -> Result<kvplane::Node, kvplane::Error>,
) -> Result<Option<kvplane::Node>, kvplane::Error> {
    let until = Instant::now() + wait;
    let (mut told, mut refused_until) = (false, None);
    loop {
        let error = match start() {
            Ok(node) => return Ok(Some(node)),
            Err(error) => error,
        };
        let now = Instant::now();
        let until = match error.join_again_after() {
            // The map comes late from a control plane that has fallen silent since it accepted the node.
            _ if error.is_control_away() || matches!(error, kvplane::Error::NotInMap { .. }) => until,
            // A control plane refuses for as long as the former incarnation lives: the retry time of the first refusal
            // is final.
            Some(after) => until.min(*refused_until.get_or_insert(now + after + REFUSED_LONGER)),
            None => return Err(error),
        };
        if now >= until {
            return Err(error);
        }
        if !told {
            let left = until.saturating_duration_since(now).as_secs_f64().ceil();
            eprintln!("kvplane: {error}; trying again for up to {left} s");
            told = true;
        }
        if stop.comes_within(AGAIN.min(until.saturating_duration_since(now))) {
            return Ok(None);
        }
    }
}

impl Node {
    pub(crate) fn run(self) -> Result<(), Failure> {
        self.log.begin(Level::Info)?;
        let control = self.which.control(&self.cluster, self.shape.runtime_directory.clone());
        let mut config = self.shape.config(&self.cluster, control)?;
        let mut stop = Stop::listen()?;
        let wait = Duration::from_secs(self.wait_control);
        let started = match self.take_over {
            true => self.succeed(&config, &mut stop)?,
            false => start_when_there(wait, &mut stop, || kvplane::Node::start(&config))?,
        };
        let Some(node) = started else { return Ok(()) };
        let mut serving = self.shape.serve(node)?;
        service_manager::announce_ready();
        // A number that was drawn is the node's from now on, in this process and in its successors.
        let drawn = config.node.is_none().then(|| serving.node.id());
        config.node = Some(serving.node.id());
        loop {
            let (socket, mut requests) = match HandoverSocket::listen(&config, &serving.node) {
                Ok((socket, requests)) => (Some(socket), requests),
                Err(error) => {
                    eprintln!("kvplane: this node cannot be upgraded without a restart: {error}");
                    (None, mpsc::channel(1).1)
                }
            };
            let mut upgrades = Upgrades::of(drawn);
            let turn = upgrades.wait(&mut requests, &mut stop, || Ok(serving.node.check()?))?;
            drop(socket);
            let mut link = match turn {
                Turn::Take(link) => link,
                Turn::Drain(order) => {
                    order.carry_out(&serving.node)?;
                    continue;
                }
                Turn::Stop => {
                    upgrades.refuse("the node was stopped");
                    self.shape.give_away(&serving.node);
                    return Ok(());
                }
            };
            let handover = match Handover::of(&serving.node, MOVES_MOST) {
                Ok(handover) => handover,
                Err(error) => {
                    upgrades.refuse(&error.to_string());
                    link.refuse(&error.to_string());
                    serving.node.check()?;
                    eprintln!("kvplane: no handover, this process goes on: {error}");
                    continue;
                }
            };
            // The successor serves metrics at the same port. The memory stays mapped until the end: unmapping it takes
            // long where there are many pages.
            let RunningNode { metrics, node: former } = serving;
            drop(metrics);
            match link.give(&handover) {
                Ok(()) => return upgrades.finish(&link, handover.is_kept(), &mut stop),
                Err(error) => {
                    let why = format!("the new process did not take over: {error}");
                    eprintln!("kvplane: {why}; this process serves again");
                    upgrades.refuse(&why);
                    drop(link);
                    let resumed = start_when_there(RESUME, &mut stop, || handover.resume(&config))?;
                    let Some(node) = resumed else { return Ok(()) };
                    serving = self.shape.serve(node)?;
                    drop(former);
                }
            }
        }
    }

    /// Takes over from the running process of the node.
    fn succeed(&self, config: &NodeConfig, stop: &mut Stop) -> Result<Option<kvplane::Node>, Failure> {
        let mut succession = Succession::begin(config)?;
        announce!("ready to take over: memory is mapped");
        let handover = succession.take(config)?;
        let Some(node) = start_when_there(RESUME, stop, || succession.start(config, &handover))? else {
            return Ok(None);
        };
        // Before the former process ends, which is its unit's main process until then.
        service_manager::announce_ready();
        let report = succession.report(&node, &handover)?;
        announce!("took over: {}", upgrades::describe(&report));
        Ok(Some(node))
    }
}

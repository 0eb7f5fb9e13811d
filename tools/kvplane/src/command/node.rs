//! `kvplane node`: a storage node as a process.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use kvplane::{
    DataTls, Eviction, HugePages, IoChoice, MetricsServer, NodeConfig, NodeId, PutAck, RdmaUse, SsdConfig, TierPolicy,
    WritePolicy,
};

use crate::command::Failure;
use crate::command::process::log::{Level, Log};
use crate::command::process::metrics;
use crate::command::process::stop::Stop;
use crate::command::size;
use crate::command::tebench::{PacingChoice, values};
use crate::command::which::Which;

/// Between two attempts to find a control plane.
const AGAIN: Duration = Duration::from_millis(500);
/// How much longer than the control plane said a node that was refused tries again.
const REFUSED_LONGER: Duration = Duration::from_secs(2);

/// How long an object may wait that is written back.
const WRITE_BACK_NS: u64 = 10_000_000_000;

/// Whether a node offers RDMA.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum RdmaChoice {
    /// On the devices that there are.
    Auto,
    /// Not at all.
    Never,
    /// On devices that must be there.
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

/// A storage node.
#[derive(Args)]
pub(crate) struct Node {
    /// TOML file with settings: its keys are the names of these flags, which count instead where both are given.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Name of the cluster; its control plane is found in the user's runtime directory.
    #[arg(long, default_value = "kvplane")]
    cluster: String,
    #[command(flatten)]
    log: Log,
    #[command(flatten)]
    which: Which,
    /// Wait so many seconds for a control plane that is not there yet, as when both start at the same time; 0: end at
    /// once.
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    wait_control: u64,
    #[command(flatten)]
    shape: Shape,
}

/// What a storage node is made of.
#[derive(Args, Clone)]
pub(crate) struct Shape {
    /// Memory for objects, over all shards.
    #[arg(long, value_parser = size::parse, default_value = "1G")]
    pool: u64,
    /// Number of shards; without it, what suits the machine.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    shards: Option<u16>,
    /// Stable number of this node, above 0; without it, one is drawn.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    node_id: Option<u64>,
    /// Address of the data ports: one of this host, which others reach. Beyond loopback only with a control plane that
    /// makes tickets.
    #[arg(long, default_value = "127.0.0.1")]
    listen: IpAddr,
    /// Data port of the first shard, the others follow; 0 picks free ones.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// TLS 1.3 on data connections over TCP, with the certificates of control connections: off; offer, where whoever
    /// connects may choose; or require, where plain connections are refused and none is made.
    #[arg(long, value_name = "off|offer|require", default_value_t = DataTls::Off)]
    data_tls: DataTls,
    /// Share of the keys relative to other nodes; without it, in proportion to the memory.
    #[arg(long)]
    weight: Option<u32>,
    /// Copies of an object are kept in different failure domains; without it, the host.
    #[arg(long)]
    failure_domain: Option<String>,
    /// How shards wait; without it, what suits the machine.
    #[arg(long, value_enum)]
    pacing: Option<PacingChoice>,
    /// How many objects the memory may hold; without it, one for each 4 KiB. Each costs up to 100 bytes more.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    max_objects: Option<u64>,
    /// What goes when room is needed: slru (what was asked for twice outlives what was asked for once), s3fifo, or lru.
    #[arg(long, default_value = "slru")]
    eviction: Eviction,
    /// When puts begin to evict a little more than they need, in percent of the memory, and how far they go on:
    /// HIGH,LOW. 100,100: nothing goes before there is need.
    #[arg(long, value_name = "HIGH,LOW", default_value = "100,100", value_parser = watermarks)]
    watermarks: (u8, u8),
    /// How much of the memory, in percent, objects may take whose puts asked that they are never evicted.
    #[arg(long, value_name = "PERCENT", default_value_t = 25, value_parser = clap::value_parser!(u8).range(0..=90))]
    hard_pins: u8,
    /// The longest that objects are kept before others where their puts asked for that, in milliseconds; 0: not at all.
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 86_400_000,
        value_parser = clap::value_parser!(u64).range(0..=86_400_000)
    )]
    soft_pin_most_ms: u64,
    /// RDMA: where it can be had (auto), never, or with an error where it cannot (require).
    #[arg(long, value_enum, default_value = "auto")]
    rdma: RdmaChoice,
    /// RDMA devices to use, separated by commas, in this order: each is connected to that of the same place in the
    /// other side's list. Without it, all.
    #[arg(long, alias = "rdma_devices", value_delimiter = ',')]
    rdma_devices: Vec<String>,
    /// Which RDMA devices serve which memory: a matrix of Mooncake or a topology of TENT, as JSON or the path of a file
    /// of it. Without it, it follows from where devices and memory are.
    #[arg(long, alias = "nic_priority_matrix", default_value = "")]
    nic_priority_matrix: String,
    /// Port of loopback for /metrics, what the shards counted as Prometheus text; 0 picks one. Without it, there is
    /// none.
    #[arg(long, alias = "metrics_port")]
    metrics_port: Option<u16>,
    /// From how many milliseconds on a request is slow: the latest are shown with their stages by ctl shards --slow.
    #[arg(long, value_name = "MS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    slow_ms: u64,
    /// How fast what was in slots that came from other nodes is fetched in the background, in bytes a second; 0: only
    /// what is asked for.
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = size::parse)]
    fetch_rate: u64,
    /// An object of which more bytes than this are given in a second gets a copy at another node, where slots have two
    /// owners, and is read from both; 0: none does.
    #[arg(long, alias = "copy_hot", value_name = "BYTES", default_value = "256M", value_parser = size::parse)]
    copy_hot: u64,
    /// On SIGTERM or SIGINT: give the slots to other nodes first, and wait at most so many seconds until these have
    /// fetched what was in them. 0: leave at once.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    drain: u64,
    #[command(flatten)]
    ssd: Ssd,
    /// Directory of local identities and sockets, instead of the user's runtime directory.
    #[arg(long)]
    pub(crate) runtime_directory: Option<PathBuf>,
}

/// SSDs under the memory.
#[derive(Args, Clone)]
struct Ssd {
    /// A file or block device for objects that memory has no room for: PATH or PATH:SIZE. A file that is not there is
    /// made with this size. Several are shared out among the shards. What is there outlives the process, so --node-id
    /// must be the same at every start.
    #[arg(long = "ssd", value_name = "PATH[:SIZE]")]
    paths: Vec<SsdConfig>,
    /// How long objects on the SSDs are on average. The index in memory has room for as many as fill the SSDs then, at
    /// 61 bytes each: 4K fills them also with objects of 4 KiB, for eight times the memory that 32K takes.
    #[arg(long = "ssd-object-bytes", value_name = "BYTES", default_value = "32K", value_parser = object_bytes)]
    object_bytes: u32,
    /// Which way reads and writes take to the SSDs. `auto` gives an NVMe drive commands by passthrough (/dev/ngXnY),
    /// and polls for their ends where the kernel has queues for that (nvme.poll_queues); what a device or file does not
    /// offer is done by io_uring, and said.
    #[arg(long = "ssd-io", value_enum, default_value = "auto")]
    io: IoArgument,
    /// When objects are written to the SSD: as soon as they are put, when they were put or asked for twice, or after a
    /// while and before they leave memory.
    #[arg(long = "ssd-write", value_enum, default_value = "through", requires = "paths")]
    write: WriteChoice,
    /// When a put is answered that is written at once and does not say itself: in memory, taken by the device (it
    /// outlives the process), or durable (it outlives a power failure).
    #[arg(long = "ssd-ack", value_enum, default_value = "memory", requires = "paths")]
    ack: AckChoice,
    /// How often an object must have been asked for lately to stay in memory after it was read from the SSD.
    #[arg(long = "ssd-promote", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=15))]
    promote: u8,
    /// How much of the memory may be held by objects that wait to be written, in percent.
    #[arg(long = "ssd-backlog", default_value_t = 25, value_parser = clap::value_parser!(u8).range(1..=75))]
    backlog: u8,
    /// How much of the memory may be filled by objects that are read ahead from the SSD, in percent; 0 reads nothing
    /// ahead.
    #[arg(long = "ssd-prefetch", default_value_t = 10, value_parser = clap::value_parser!(u8).range(0..=50))]
    prefetch: u8,
    /// Read ahead what somebody asks the existence of, also where they do not say that they want it next.
    #[arg(long = "ssd-prefetch-on-exists")]
    prefetch_on_exists: bool,
    /// Bytes that may be written to the SSDs in a day; 0 for as many as there are. Near the limit only what is put or
    /// asked for twice is written, beyond it only what was promised by --ssd-ack.
    #[arg(long = "ssd-budget", value_name = "BYTES", default_value = "0", value_parser = size::parse)]
    budget: u64,
    /// How fast the records on the SSDs are checked in the background, in bytes a second; 0 for not at all.
    #[arg(long = "ssd-scrub", value_name = "BYTES", default_value = "16M", value_parser = size::parse)]
    scrub: u64,
}

/// The way to the SSDs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum IoArgument {
    /// What the device offers, best first.
    Auto,
    /// io_uring, completions by interrupt.
    Uring,
    /// io_uring, completions polled for.
    Iopoll,
    /// NVMe commands by passthrough.
    Passthrough,
}

/// When objects are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum WriteChoice {
    /// As soon as they are put.
    Through,
    /// The second time they are put or asked for.
    Selective,
    /// After ten seconds, or earlier when much waits.
    Back,
}

/// When puts are answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum AckChoice {
    /// When they are in memory.
    Memory,
    /// When the device has taken them.
    Buffered,
    /// When they are durable.
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

/// A mean length, which is checked where it is used.
fn object_bytes(text: &str) -> Result<u32, String> {
    u32::try_from(size::parse(text)?).map_err(|_| format!("{text}: that long no object is"))
}

/// `HIGH,LOW` in percent.
fn watermarks(text: &str) -> Result<(u8, u8), String> {
    let parts =
        text.split_once(',').and_then(|(high, low)| Some((high.trim().parse().ok()?, low.trim().parse().ok()?)));
    match parts {
        Some((high @ 1..=100, low)) if low <= high => Ok((high, low)),
        _ => Err(format!("{text:?} is not two percentages, the higher one first and from 1 to 100: say 95,90")),
    }
}

/// How long a node that stops waits for slots that move from it and to it while none of them is done with.
const MOVES_PATIENCE: Duration = Duration::from_secs(5);
/// The longest that it waits for them in all.
const MOVES_MOST: Duration = Duration::from_secs(20);

impl Shape {
    /// Gives the node a number where none was given.
    pub(crate) fn or_node_id(&mut self, node: u64) {
        self.node_id.get_or_insert(node);
    }

    /// Where the control plane's state goes when nobody says it: beside the first SSD that is a file, for what is on it
    /// counts only as long as the control plane remembers whose slots were whose.
    pub(crate) fn state_beside_ssd(&self) -> Option<PathBuf> {
        let path = &self.ssd.paths.first()?.path;
        let mut name = path.file_name().filter(|_| !path.starts_with("/dev"))?.to_owned();
        name.push(".control");
        Some(path.with_file_name(name))
    }

    /// Gives the node's slots away before it ends, where that is wanted; else only what moves already.
    fn give_away(&self, node: &kvplane::Node) {
        if self.drain > 0 {
            match node.drain(Duration::from_secs(self.drain)) {
                Ok(0) => return announce!("drained: all objects are with other nodes"),
                Ok(left) => announce!("{left} objects were not fetched by other nodes within {} s", self.drain),
                Err(error) => eprintln!("kvplane: not drained: {error}"),
            }
        }
        if let Ok(left @ 1..) = node.finish_moves(MOVES_PATIENCE, MOVES_MOST) {
            eprintln!("kvplane: stopped while {left} slots were still migrating from or to this node");
        }
    }

    /// Starts the node and what shows its counters. None where the process is told to stop meanwhile.
    pub(crate) fn start(
        &self,
        cluster: &str,
        control: kvplane::Control,
        wait: Duration,
        stop: &mut Stop,
    ) -> Result<Option<RunningNode>, Failure> {
        let config = NodeConfig {
            control,
            node: self.node_id.map(NodeId),
            listen: self.listen,
            port: self.port,
            data_tls: self.data_tls,
            shards: self.shards.map(usize::from),
            weight: self.weight,
            failure_domain: self.failure_domain.clone(),
            runtime_directory: self.runtime_directory.clone(),
            pacing: self.pacing.map(Into::into),
            max_objects: self.max_objects,
            eviction: self.eviction,
            high_watermark_percent: self.watermarks.0,
            low_watermark_percent: self.watermarks.1,
            hard_pin_percent: self.hard_pins,
            soft_pin_most: Duration::from_millis(self.soft_pin_most_ms),
            huge: HugePages::Try,
            rdma: values::rdma("--rdma-devices", self.rdma.into(), &self.rdma_devices, &self.nic_priority_matrix)?,
            ssds: self.ssd.paths.clone(),
            ssd_object_bytes: self.ssd.object_bytes,
            ssd_io: match self.ssd.io {
                IoArgument::Auto => IoChoice::Auto,
                IoArgument::Uring => IoChoice::Uring,
                IoArgument::Iopoll => IoChoice::Polled,
                IoArgument::Passthrough => IoChoice::Passthrough,
            },
            tier: self.ssd.policy(),
            slow_after_ns: self.slow_ms * 1_000_000,
            fetch_bytes_per_s: self.fetch_rate,
            hot_bytes_per_s: self.copy_hot,
            ..NodeConfig::local(cluster, self.pool)
        };
        let Some(node) = start_when_there(&config, wait, stop)?.map(Arc::new) else { return Ok(None) };
        announce!("node {} with {} for objects", node.id(), size::show(self.pool));
        node.notes().iter().for_each(|note| announce!("  {note}"));
        let shown = Arc::downgrade(&node);
        let server = metrics::serve(self.metrics_port, move || shown.upgrade()?.metrics_text().ok())?;
        if let Some(server) = &server {
            announce!("{}", metrics::say(server, "counters of the shards"));
        }
        Ok(Some(RunningNode { _metrics: server, node }))
    }
}

/// A node, and what shows its counters. That ends first.
pub(crate) struct RunningNode {
    _metrics: Option<MetricsServer>,
    pub(crate) node: Arc<kvplane::Node>,
}

/// Starts a node. For up to `wait` it waits for a control plane that is not there yet, and for one that refuses it for
/// now, as while it takes a former incarnation of the node for alive: a restarted node has other ports. None where the
/// process is told to stop meanwhile.
fn start_when_there(
    config: &NodeConfig,
    wait: Duration,
    stop: &mut Stop,
) -> Result<Option<kvplane::Node>, kvplane::Error> {
    let until = Instant::now() + wait;
    let (mut told, mut refused_until) = (false, None);
    loop {
        let error = match kvplane::Node::start(config) {
            Ok(node) => return Ok(Some(node)),
            Err(error) => error,
        };
        let now = Instant::now();
        let until = match error.join_again_after() {
            _ if error.is_control_away() => until,
            // A node that lives goes on refusing: then the first time that was named is the last.
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
        let mut stop = Stop::listen()?;
        let wait = Duration::from_secs(self.wait_control);
        let Some(serving) = self.shape.start(&self.cluster, control, wait, &mut stop)? else { return Ok(()) };
        stop.wait(|| Ok(serving.node.check()?))?;
        self.shape.give_away(&serving.node);
        Ok(())
    }
}

//! Transfer engine of a benchmark run: its name, its memory, and the transports that it may use.

use std::net::SocketAddr;
use std::sync::Arc;

use clap::Args;
use clap::builder::BoolishValueParser;
use kvplane::device::Backing;
use kvplane::{Environment, MetricsServer, RegisterOptions, TransferEngine, TransferEngineConfig, ZeroCopyOptions};

use super::memory::BenchMemory;
use super::values::{self, GpuChoice, ListenAddress, MemoryType, Transport};
use super::{Failure, PacingChoice, ZeroCopyChoice};
use crate::command::process::metrics;
use crate::command::size;

/// Name of this process's own segment as a target.
pub(crate) const LOCAL: &str = "local";

/// Protocol of data connections to targets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Backend {
    /// kvplane's protocol where the target has it, else Mooncake's.
    #[value(aliases = ["classic", "tent"])]
    Kvplane,
    /// Mooncake's protocol always.
    Mooncake,
}

impl Backend {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Kvplane => "kvplane",
            Self::Mooncake => "mooncake",
        }
    }
}

/// Flags of the engine.
#[derive(Args, Clone)]
pub(super) struct EngineFlags {
    /// Name of the local segment: with --metadata_type p2p the address IP:PORT to listen on, otherwise any name.
    #[arg(long = "seg_name", default_value = "")]
    seg_name: String,
    /// Type of memory: DRAM, or VRAM, the memory of a GPU.
    #[arg(long = "seg_type", default_value = "DRAM", value_parser = values::memory)]
    pub(super) seg_type: MemoryType,
    /// Types of memory, separated by commas, instead of --seg_type: a buffer of each on this side, and threads use them
    /// in turn.
    #[arg(long = "seg_type_mix", default_value = "", value_parser = values::memories)]
    seg_type_mix: std::vec::Vec<MemoryType>,
    /// Number of this side's GPU for VRAM. -1: all of them, with a buffer on each.
    #[arg(long = "local_gpu_id", default_value = "0", allow_negative_numbers = true, value_parser = values::gpu)]
    local_gpu_id: GpuChoice,
    /// Number of the GPU whose buffers of a target are used; the target has to tell where its memory is. Default, and
    /// with -1: all buffers, in turn.
    #[arg(long = "target_gpu_id", allow_negative_numbers = true, value_parser = values::gpu)]
    target_gpu_id: Option<GpuChoice>,
    /// Size of the registered memory on each side, in bytes.
    #[arg(long = "total_buffer_size", value_parser = size::parse_some, default_value = "1G")]
    pub(super) total_buffer_size: u64,
    /// Discovery of segments: p2p by address, otherwise in a metadata store.
    #[arg(long = "metadata_type", default_value = "p2p", value_parser = ["p2p", "http", "etcd", "redis"])]
    pub(super) metadata_type: String,
    /// Addresses of the metadata store, separated by commas.
    #[arg(long = "metadata_url_list", default_value = "")]
    metadata_url_list: String,
    /// Port to listen on. 0: a free port is picked.
    #[arg(long = "rpc_server_port", default_value_t = 0)]
    rpc_server_port: u16,
    /// Allow a target's --seg_name to be an address beyond loopback. There is no authentication: every host that
    /// reaches the address can read and write all of the registered memory. Initiators register no memory for peers and
    /// do not need it.
    #[arg(long = "open_to_network", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    open_to_network: bool,
    /// Transport to use: tcp, rdma, shm (mapped memory), cma (copied by the kernel), iouring (files), local (this
    /// process). Default: the best one that both sides have.
    #[arg(long = "xport_type", default_value = "", value_parser = values::transport)]
    xport_type: Transport,
    /// Like --xport_type; the name that Mooncake's TENT uses.
    #[arg(long = "tent_transport_hint", default_value = "unspec", value_parser = values::transport)]
    tent_transport_hint: Transport,
    /// RDMA devices to use, separated by commas. Each is connected to the device at the same position of the target's
    /// list. Default: those of the environment variable `MC_TE_FILTERS`, else all.
    #[arg(long = "rdma_devices", value_delimiter = ',')]
    rdma_devices: Vec<String>,
    /// Affinity of RDMA devices to memory: a NIC priority matrix of Mooncake or a topology of TENT, as JSON or as the
    /// path of a JSON file. Default: that of the environment variable `MC_CUSTOM_TOPO_JSON`, else derived from the NUMA
    /// placement of devices and memory.
    #[arg(long = "nic_priority_matrix", default_value = "")]
    nic_priority_matrix: String,
    /// Protocol of data connections to targets. The names classic and tent mean kvplane.
    #[arg(long = "backend", value_enum, default_value = "kvplane")]
    pub(super) backend: Backend,
    /// Loopback port that serves the engine's counters as Prometheus text at /metrics. 0: a free port is picked.
    /// Threads of an initiator then share the engine, as its counters do not include sessions.
    #[arg(long = "metrics_port")]
    pub(super) metrics_port: Option<u16>,
    /// Waiting strategy for completions.
    #[arg(long = "pacing", value_enum, default_value = "adaptive")]
    pacing: PacingChoice,
    /// Number of TCP connections to each target.
    #[arg(long = "lanes", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    lanes: u16,
    /// Send checksums with TCP payloads, which the receiver verifies.
    #[arg(long = "checksum", num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    checksum: bool,
    /// Use of zero-copy sends for long payloads over TCP.
    #[arg(long = "zerocopy", value_enum, default_value = "auto")]
    zerocopy: ZeroCopyChoice,
    /// Shortest piece of a payload that is sent by zero-copy, in bytes.
    #[arg(long = "zerocopy_min_bytes", default_value = "128K", value_parser = size::parse_some)]
    zerocopy_min_bytes: u64,
}

impl EngineFlags {
    /// Returns the transport to use, from all flags that concern it.
    pub(super) fn transport(&self) -> Result<Transport, Failure> {
        let way = match (self.xport_type, self.tent_transport_hint) {
            (Transport::Any, hint) => hint,
            (way, Transport::Any) => way,
            (way, hint) if way == hint => way,
            (way, hint) => {
                let (way, hint) = (way.name(), hint.name());
                return Err(format!("--xport_type {way} and --tent_transport_hint {hint} contradict each other").into());
            }
        };
        if self.is_stock() && !matches!(way, Transport::Any | Transport::Tcp) {
            return Err(format!("--backend mooncake is over tcp: not with --xport_type {}", way.name()).into());
        }
        Ok(way)
    }

    /// Returns true if targets are treated as stock Mooncake engines.
    pub(super) fn is_stock(&self) -> bool {
        self.backend == Backend::Mooncake
    }

    /// Starts the engine, with this many sets of connections that threads share. Peers may access its memory if
    /// `gives_memory`.
    pub(super) fn start(&self, initiators: usize, gives_memory: bool) -> Result<Arc<TransferEngine>, Failure> {
        let way = self.transport()?;
        let mut address: SocketAddr = ([127, 0, 0, 1], self.rpc_server_port).into();
        let mut name = None;
        match self.seg_name.as_str() {
            "" => {}
            text if self.metadata_type == "p2p" => {
                address = text.parse().map_err(|_| format!("--seg_name {text:?} is not an address IP:PORT"))?;
            }
            text => name = Some(text.to_owned()),
        }
        let ListenAddress { listen, announce } =
            values::reached("--seg_name", address, gives_memory, self.open_to_network)?;
        Ok(Arc::new(TransferEngine::start(TransferEngineConfig {
            listen,
            announce,
            name,
            metadata: values::metadata(&self.metadata_type, &self.metadata_url_list)?,
            environment: Environment::of_process()?,
            open_to_network: self.open_to_network,
            native: !self.is_stock(),
            shared_memory: !matches!(way, Transport::Tcp | Transport::Rdma),
            rdma: values::rdma("--rdma_devices", way.rdma(), &self.rdma_devices, &self.nic_priority_matrix)?,
            mapping: way != Transport::Cma,
            cma: way != Transport::Shm,
            tcp: !matches!(way, Transport::Shm | Transport::Cma),
            lanes: self.lanes,
            checksum: self.checksum,
            zero_copy: ZeroCopyOptions {
                when: self.zerocopy.into(),
                least_bytes: usize::try_from(self.zerocopy_min_bytes).unwrap_or(usize::MAX),
            },
            pacing: self.pacing.into(),
            initiators,
            ..TransferEngineConfig::default()
        })?))
    }

    /// Serves the engine's metrics, if `--metrics_port` is given.
    pub(super) fn serve_metrics(&self, engine: &Arc<TransferEngine>) -> Result<Option<MetricsServer>, Failure> {
        let engine = Arc::downgrade(engine);
        metrics::serve(self.metrics_port, move || Some(engine.upgrade()?.metrics_text()))
    }

    /// Returns the types of this side's memory.
    fn types(&self) -> &[MemoryType] {
        if self.seg_type_mix.is_empty() { std::slice::from_ref(&self.seg_type) } else { &self.seg_type_mix }
    }

    /// Returns true if some of this side's memory is a GPU's.
    pub(super) fn has_gpus(&self) -> bool {
        self.types().contains(&MemoryType::Vram)
    }

    /// Returns the GPUs whose buffers of a target are used.
    pub(super) fn target_gpu(&self) -> GpuChoice {
        self.target_gpu_id.unwrap_or(GpuChoice::All)
    }

    /// Returns true if GPUs are used in a way that sessions cannot.
    pub(super) fn names_gpus(&self) -> bool {
        self.has_gpus() || self.target_gpu_id.is_some()
    }

    /// Allocates the memory of this run, a buffer of each type. For transfers by CMA, peers cannot map it.
    fn memories(&self, name: &str, types: &[MemoryType]) -> Result<Vec<BenchMemory>, Failure> {
        let mappable = self.transport()? != Transport::Cma;
        let mut memories = Vec::new();
        for &kind in types {
            let bytes = self.total_buffer_size;
            memories.append(&mut BenchMemory::allocate(kind, self.local_gpu_id, name, bytes, mappable)?);
        }
        Ok(memories)
    }

    /// Registers the memory that peers read and write, a buffer for each type of memory.
    pub(super) fn serve(&self, engine: &TransferEngine) -> Result<Vec<BenchMemory>, Failure> {
        let memories = self.memories("tebench-target", self.types())?;
        register(engine, &memories, &RegisterOptions::default())?;
        Ok(memories)
    }

    /// Registers the initiator's own memory, which is not published: one buffer for each type of memory.
    pub(super) fn initiate(&self, engine: &TransferEngine) -> Result<Vec<BenchMemory>, Failure> {
        let mut types = self.types().to_vec();
        types.sort_unstable();
        types.dedup();
        let memories = self.memories("tebench-initiator", &types)?;
        let private = RegisterOptions { remote_accessible: false, ..RegisterOptions::default() };
        register(engine, &memories, &private)?;
        Ok(memories)
    }
}

fn register(engine: &TransferEngine, memories: &[BenchMemory], options: &RegisterOptions) -> Result<(), Failure> {
    let backings: Vec<Backing> = memories.iter().map(BenchMemory::backing).collect();
    Ok(engine.register_batch(&backings, options)?)
}

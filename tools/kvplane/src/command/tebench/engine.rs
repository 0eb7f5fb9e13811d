//! The engine of a run: its name, its memory, and which ways to peers it may use.

use std::net::SocketAddr;
use std::sync::Arc;

use clap::Args;
use clap::builder::BoolishValueParser;
use kvplane::{
    Environment, HugePages, MetricsServer, Region, RegionOptions, RegisterOptions, TransferEngine,
    TransferEngineConfig, ZeroCopyOptions,
};

use super::values::{self, ListenAddress, Transport};
use super::{Failure, PacingChoice, ZeroCopyChoice};
use crate::command::process::metrics;
use crate::command::size;

/// The name of our own segment, as a target.
pub(crate) const LOCAL: &str = "local";

/// Whose protocol is spoken to targets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Backend {
    /// Our own where the target has it.
    #[value(aliases = ["classic", "tent"])]
    Kvplane,
    /// Mooncake's own in any case.
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

/// Name, memory and ways.
#[derive(Args, Clone)]
pub(super) struct EngineFlags {
    /// Local segment name: peer to peer the address IP:PORT to listen on, else any name.
    #[arg(long = "seg_name", default_value = "")]
    seg_name: String,
    /// Kind of memory: DRAM; there is no driver of GPU memory for VRAM.
    #[arg(long = "seg_type", default_value = "DRAM", value_parser = values::memory)]
    pub(super) seg_type: String,
    /// Kinds of memory, separated by commas: a target registers a buffer for each, and threads take them in turn.
    #[arg(long = "seg_type_mix", default_value = "", value_parser = values::memories)]
    seg_type_mix: std::vec::Vec<String>,
    /// GPU of this side: 0 or -1, as there is no driver of GPU memory.
    #[arg(long = "local_gpu_id", default_value = "0", allow_negative_numbers = true, value_parser = values::gpu)]
    _local_gpu_id: i32,
    /// GPU of the target: 0 or -1, as there is no driver of GPU memory.
    #[arg(long = "target_gpu_id", default_value = "0", allow_negative_numbers = true, value_parser = values::gpu)]
    _target_gpu_id: i32,
    /// Bytes of registered memory on each side.
    #[arg(long = "total_buffer_size", value_parser = size::parse_some, default_value = "1G")]
    pub(super) total_buffer_size: u64,
    /// How segments are found: by address, or in a store of metadata.
    #[arg(long = "metadata_type", default_value = "p2p", value_parser = ["p2p", "http", "etcd", "redis"])]
    pub(super) metadata_type: String,
    /// Addresses of the store of metadata, separated by commas.
    #[arg(long = "metadata_url_list", default_value = "")]
    metadata_url_list: String,
    /// Port to listen on; 0 picks one.
    #[arg(long = "rpc_server_port", default_value_t = 0)]
    rpc_server_port: u16,
    /// Lets a target's --seg_name be another address than a loopback one. Whoever reaches it may read and write all of
    /// the registered memory: there is no authentication. An initiator gives nobody its memory, and needs no such word.
    #[arg(long = "open_to_network", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    open_to_network: bool,
    /// Transport to use: tcp, rdma, shm (mapped), cma (copied by the kernel), iouring (files), local (this
    /// process); without it, the best of those that both sides have.
    #[arg(long = "xport_type", default_value = "", value_parser = values::transport)]
    xport_type: Transport,
    /// The same, as Mooncake's TENT names it.
    #[arg(long = "tent_transport_hint", default_value = "unspec", value_parser = values::transport)]
    tent_transport_hint: Transport,
    /// RDMA devices to use, separated by commas, in this order: each is connected to that of the same place in the
    /// target's list. Without it, all, or those of the variable `MC_TE_FILTERS`.
    #[arg(long = "rdma_devices", value_delimiter = ',')]
    rdma_devices: Vec<String>,
    /// Which RDMA devices serve which memory: a matrix of Mooncake or a topology of TENT, as JSON or the path of a file
    /// of it. Without it, that of the variable `MC_CUSTOM_TOPO_JSON`,
    /// or what follows from where devices and memory are.
    #[arg(long = "nic_priority_matrix", default_value = "")]
    nic_priority_matrix: String,
    /// Whose protocol to speak to targets: kvplane where they have it (also: classic, tent), or mooncake.
    #[arg(long = "backend", value_enum, default_value = "kvplane")]
    pub(super) backend: Backend,
    /// Port of loopback for /metrics, what the engine counted as Prometheus text; 0 picks one. Threads of an initiator
    /// then share the engine, as sessions are not in it.
    #[arg(long = "metrics_port")]
    pub(super) metrics_port: Option<u16>,
    /// How to wait for completions.
    #[arg(long = "pacing", value_enum, default_value = "adaptive")]
    pacing: PacingChoice,
    /// TCP connections to each target.
    #[arg(long = "lanes", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    lanes: u16,
    /// Whether TCP payloads carry checksums that their receiver checks.
    #[arg(long = "checksum", num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    checksum: bool,
    /// When long payloads leave over TCP without being copied into the kernel: to other hosts as long as that works
    /// (auto), never, or always.
    #[arg(long = "zerocopy", value_enum, default_value = "auto")]
    zerocopy: ZeroCopyChoice,
    /// Pieces of payloads from this length on leave so.
    #[arg(long = "zerocopy_min_bytes", default_value = "128K", value_parser = size::parse_some)]
    zerocopy_min_bytes: u64,
}

impl EngineFlags {
    /// The way to use, from all the flags that say something about it.
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

    /// Whether targets are asked as stock Mooncake engines.
    pub(super) fn is_stock(&self) -> bool {
        self.backend == Backend::Mooncake
    }

    /// Starts the engine, with this many sets of connections that threads share; whether peers may reach its memory.
    pub(super) fn start(&self, initiators: usize, gives_memory: bool) -> Result<Arc<TransferEngine>, Failure> {
        let way = self.transport()?;
        let mut address: SocketAddr = ([127, 0, 0, 1], self.rpc_server_port).into();
        let mut name = None;
        match self.seg_name.as_str() {
            "" => {}
            text if self.metadata_type == "p2p" => {
                address = text.parse().map_err(|_| format!("--seg_name {text:?} is no address IP:PORT"))?;
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

    /// Serves the engine's metrics, where that was asked for.
    pub(super) fn serve_metrics(&self, engine: &Arc<TransferEngine>) -> Result<Option<MetricsServer>, Failure> {
        let engine = Arc::downgrade(engine);
        metrics::serve(self.metrics_port, move || Some(engine.upgrade()?.metrics_text()))
    }

    /// Memory of this run. Where the kernel is to copy, it is memory that cannot be mapped.
    pub(super) fn region(&self, name: &str) -> Result<Arc<Region>, Failure> {
        let mappable = self.transport()? != Transport::Cma;
        allocate(name, self.total_buffer_size, mappable)
    }

    /// Registers what others are to read and write, a buffer for each kind of memory.
    pub(super) fn serve(&self, engine: &TransferEngine) -> Result<Vec<Arc<Region>>, Failure> {
        let buffers = self.seg_type_mix.len().max(1);
        let regions = (0..buffers).map(|_| self.region("tebench-target")).collect::<Result<Vec<_>, _>>()?;
        engine.register_batch(&regions, &RegisterOptions::default())?;
        Ok(regions)
    }
}

/// Memory for transfers.
pub(crate) fn allocate(name: &str, bytes: u64, mappable: bool) -> Result<Arc<Region>, Failure> {
    let options = RegionOptions {
        shared: mappable,
        huge: HugePages::Try,
        prefault: true,
        ..RegionOptions::new(name, usize::try_from(bytes)?)
    };
    Ok(Region::allocate(&options)?)
}

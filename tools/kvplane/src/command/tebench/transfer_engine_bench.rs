//! `kvplane transfer_engine_bench`: flags and output of Mooncake's tool of that name, over kvplane's engine.
//!
//! Measures the throughput of batches of one size, by several threads, for some time. Requests of all threads are
//! interleaved in the target's buffer. For latencies, sweeps and checks there is `tebench`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};
use kvplane::{
    Environment, Opcode, RdmaConfig, Region, RegisterOptions, SegmentHandle, SubmitOptions, TaskState, TransferEngine,
    TransferEngineConfig, TransferRequest,
};
use kvplane_tools::pattern;

use crate::command::Failure;
use crate::command::process::stop;
use crate::command::size;
use crate::command::tebench::engine::Backend;
use crate::command::tebench::memory::allocate;
use crate::command::tebench::thread_error::ThreadError;
use crate::command::tebench::values::{self, ListenAddress, Transport, ValueError};
use crate::command::tebench::{PacingChoice, TARGET_SEED};

/// Time limit of a batch.
const TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Mode {
    Initiator,
    Target,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Operation {
    Read,
    Write,
}

/// Unit of throughput: its name and its bytes per second.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Unit {
    name: &'static str,
    bytes: f64,
}

const UNITS: [Unit; 9] = [
    Unit { name: "GB", bytes: 1e9 },
    Unit { name: "GiB", bytes: (1u64 << 30) as f64 },
    Unit { name: "Gb", bytes: 1e9 / 8.0 },
    Unit { name: "MB", bytes: 1e6 },
    Unit { name: "MiB", bytes: (1u64 << 20) as f64 },
    Unit { name: "Mb", bytes: 1e6 / 8.0 },
    Unit { name: "KB", bytes: 1e3 },
    Unit { name: "KiB", bytes: (1u64 << 10) as f64 },
    Unit { name: "Kb", bytes: 1e3 / 8.0 },
];

/// Error of a name that is no unit of throughput.
#[derive(Clone, PartialEq, Eq, Debug)]
struct UnitError {
    name: String,
}

impl fmt::Display for UnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, names) = (&self.name, UNITS.map(|unit| unit.name).join(", "));
        write!(f, "{name:?} is not one of {names}")
    }
}

impl std::error::Error for UnitError {}

fn unit(text: &str) -> Result<Unit, UnitError> {
    UNITS.into_iter().find(|unit| unit.name == text).ok_or_else(|| UnitError { name: text.to_owned() })
}

/// Benchmark the transfer engine with the flags of Mooncake's transfer_engine_bench.
#[derive(Args, Clone)]
#[command(args_override_self = true)]
pub(crate) struct TransferEngineBench {
    /// Name of the local segment: with P2PHANDSHAKE the address IP[:PORT] to listen on, otherwise any name. Default: a
    /// loopback address.
    #[arg(long = "local_server_name", default_value = "")]
    local_server_name: String,
    /// Discovery of segments: P2PHANDSHAKE, or the URL of a metadata store (http://, etcd://, redis://).
    #[arg(long = "metadata_server", default_value = "P2PHANDSHAKE")]
    metadata_server: String,
    /// Role of this process: initiator or target.
    #[arg(long = "mode", value_enum, default_value = "initiator")]
    mode: Mode,
    /// Operation to measure.
    #[arg(long = "operation", value_enum, default_value = "read")]
    operation: Operation,
    /// Transport to use: tcp, rdma, shm, cma. Default: the best one that both sides have.
    #[arg(long = "protocol", default_value = "", value_parser = values::transport)]
    protocol: Transport,
    /// RDMA devices to use, separated by commas. Default: those of the environment variable `MC_TE_FILTERS`, else all.
    /// Ignored with other transports.
    #[arg(long = "device_name", value_delimiter = ',')]
    device_name: Vec<String>,
    /// Affinity of RDMA devices to memory: a NIC priority matrix of Mooncake or a topology of TENT, as JSON or as the
    /// path of a JSON file. Default: that of the environment variable `MC_CUSTOM_TOPO_JSON`, else derived from the NUMA
    /// placement of devices and memory. Ignored with other transports.
    #[arg(long = "nic_priority_matrix", default_value = "")]
    nic_priority_matrix: String,
    /// Discover the network cards: --device_name and --nic_priority_matrix are then ignored.
    #[arg(long = "auto_discovery", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    auto_discovery: bool,
    /// Name of the target's segment; required for an initiator.
    #[arg(long = "segment_id", default_value = "")]
    segment_id: String,
    /// Size of the registered memory, in bytes.
    #[arg(long = "buffer_size", value_parser = size::parse_some, default_value = "1G")]
    buffer_size: u64,
    /// Requests of a batch.
    #[arg(long = "batch_size", default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..))]
    batch_size: u64,
    /// Size of a request, in bytes.
    #[arg(long = "block_size", value_parser = size::parse_some, default_value = "65536")]
    block_size: u64,
    /// Duration of the run, in seconds; fractions are allowed.
    #[arg(long = "duration", default_value = "10", value_parser = values::seconds)]
    duration: f64,
    /// Number of threads that submit batches.
    #[arg(long = "threads", default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..=4096))]
    threads: u64,
    /// Unit of the throughput: GB, GiB, Gb, MB, MiB, Mb, KB, KiB, Kb.
    #[arg(long = "report_unit", default_value = "GB", value_parser = unit)]
    report_unit: Unit,
    /// Number of decimal places of the throughput.
    #[arg(long = "report_precision", default_value_t = 2, value_parser = clap::value_parser!(u8).range(..=17))]
    report_precision: u8,
    /// Protocol of data connections to targets. The names classic and tent mean kvplane.
    #[arg(long = "backend", value_enum, default_value = "kvplane")]
    backend: Backend,
    /// Use GPU memory: not with this tool; `kvplane tebench` does by --seg_type VRAM.
    #[arg(long = "use_vram", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    use_vram: bool,
    /// Fill the memory with a pattern first.
    #[arg(long = "init_mem", num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    init_mem: bool,
    /// Number of the GPU: 0 or -1, because this tool uses none.
    #[arg(long = "gpu_id", default_value = "0", allow_negative_numbers = true, value_parser = values::no_gpu)]
    _gpu_id: i32,
    /// Allow a target's --local_server_name to be an address beyond loopback. There is no authentication: every host
    /// that reaches the address can read and write all of the registered memory. Initiators register no memory for
    /// peers and do not need it.
    #[arg(long = "open_to_network", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    open_to_network: bool,
    /// Waiting strategy for completions.
    #[arg(long = "pacing", value_enum, default_value = "adaptive")]
    pacing: PacingChoice,
}

impl TransferEngineBench {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if self.use_vram {
            let instead = "use kvplane tebench --seg_type VRAM";
            return Err(format!("--use_vram: this tool moves memory of the host, not GPU memory; {instead}").into());
        }
        if matches!(self.protocol, Transport::Uring | Transport::Local) {
            return Err(format!("--protocol {}: use tebench, with --xport_type", self.protocol.name()).into());
        }
        match self.mode {
            Mode::Target => self.target(),
            Mode::Initiator => self.initiator(),
        }
    }

    fn start(&self) -> Result<TransferEngine, Failure> {
        let (text, way) = (self.local_server_name.as_str(), self.protocol);
        let peer_to_peer = self.metadata_server == "P2PHANDSHAKE";
        let address = text.parse::<SocketAddr>().or_else(|_| text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 0)));
        let address = match address {
            Ok(address) => address,
            Err(_) if text.is_empty() || text == "localhost" || !peer_to_peer => ([127, 0, 0, 1], 0).into(),
            Err(_) => return Err(format!("--local_server_name {text:?} is not an address IP[:PORT]").into()),
        };
        let target = self.mode == Mode::Target;
        let ListenAddress { listen, announce } =
            values::reached("--local_server_name", address, target, self.open_to_network)?;
        let stock = self.backend == Backend::Mooncake;
        if stock && !matches!(way, Transport::Any | Transport::Tcp) {
            return Err(format!("--backend mooncake is over tcp: not with --protocol {}", way.name()).into());
        }
        Ok(TransferEngine::start(TransferEngineConfig {
            listen,
            announce,
            name: (!peer_to_peer && !text.is_empty()).then(|| text.to_owned()),
            metadata: self.metadata_server.clone(),
            environment: Environment::of_process()?,
            open_to_network: self.open_to_network,
            native: !stock,
            shared_memory: !matches!(way, Transport::Tcp | Transport::Rdma),
            rdma: self.rdma()?,
            mapping: way != Transport::Cma,
            cma: way != Transport::Shm,
            tcp: !matches!(way, Transport::Shm | Transport::Cma),
            pacing: self.pacing.into(),
            initiators: self.threads.clamp(1, 64) as usize,
            ..TransferEngineConfig::default()
        })?)
    }

    /// RDMA devices are used for RDMA only, as with Mooncake's tool.
    fn rdma(&self) -> Result<RdmaConfig, ValueError> {
        let named = self.protocol == Transport::Rdma && !self.auto_discovery;
        values::rdma(
            "--device_name",
            self.protocol.rdma(),
            if named { &self.device_name } else { &[] },
            if named { &self.nic_priority_matrix } else { "" },
        )
    }

    fn memory(&self, name: &str) -> Result<Arc<Region>, Failure> {
        let region = allocate(name, self.buffer_size, self.protocol != Transport::Cma)?;
        if self.init_mem {
            region.fill_with(0, region.bytes(), &mut |offset, part| pattern::fill(TARGET_SEED, offset, part));
        }
        Ok(region)
    }

    fn target(&self) -> Result<(), Failure> {
        let engine = self.start()?;
        engine.register(self.memory("bench-target")?, &RegisterOptions::default())?;
        println!("Transfer engine serves {} bytes as -segment_id={}", self.buffer_size, engine.name());
        stop::wait(|| Ok(()))
    }

    fn initiator(&self) -> Result<(), Failure> {
        if self.segment_id.is_empty() {
            return Err("--segment_id is missing: the name of the target's segment".into());
        }
        let bytes = self.block_size.checked_mul(self.batch_size).and_then(|bytes| bytes.checked_mul(self.threads));
        if bytes.is_none_or(|bytes| bytes > self.buffer_size) {
            let Self { threads, batch_size, block_size, buffer_size, .. } = self;
            let need = format!("{threads} threads with {batch_size} blocks of {block_size} bytes");
            return Err(format!("{need} need more than --buffer_size {buffer_size}").into());
        }
        let engine = self.start()?;
        let region = self.memory("bench-initiator")?;
        let private = RegisterOptions { remote_accessible: false, ..RegisterOptions::default() };
        engine.register(Arc::clone(&region), &private)?;
        let target = engine.open_segment(&self.segment_id)?;
        let buffers: Vec<u64> = engine.segment_info(target)?.buffers.iter().map(|buffer| buffer.address).collect();
        if buffers.is_empty() {
            return Err(format!("the segment {} has no memory", self.segment_id).into());
        }
        let running = AtomicBool::new(true);
        let start = Instant::now();
        let outcome: Vec<Result<u64, ThreadError>> = std::thread::scope(|scope| {
            let worker = |thread: u64| {
                let base = buffers[thread as usize % buffers.len()];
                let (engine, region, running) = (&engine, &region, &running);
                let body =
                    move || self.worker(engine, region, target, base, running, thread).map_err(ThreadError::Failed);
                let spawned = std::thread::Builder::new().name(format!("worker-{thread}")).spawn_scoped(scope, body);
                let number = thread + 1;
                spawned.map_err(|source| ThreadError::NotStarted { number, threads: self.threads, source })
            };
            let workers: Vec<_> = (0..self.threads).map(worker).collect();
            if workers.iter().all(Result::is_ok) {
                std::thread::sleep(Duration::from_secs_f64(self.duration));
            }
            running.store(false, Ordering::Relaxed);
            let join = |worker: Result<ScopedJoinHandle<'_, Result<u64, ThreadError>>, ThreadError>| {
                worker?.join().unwrap_or(Err(ThreadError::Panicked))
            };
            workers.into_iter().map(join).collect()
        });
        let seconds = start.elapsed().as_secs_f64();
        let mut batches = 0;
        for outcome in outcome {
            batches += outcome?;
        }
        println!("{}", self.summary(seconds, batches));
        Ok(())
    }

    fn summary(&self, seconds: f64, batches: u64) -> String {
        let bytes = batches as f64 * self.batch_size as f64 * self.block_size as f64;
        let (Unit { name, bytes: unit }, places) = (self.report_unit, usize::from(self.report_precision));
        let rate = bytes / seconds.max(1e-9) / unit;
        format!("Test completed: duration {seconds:.2}, batch count {batches}, throughput {rate:.places$} {name}/s")
    }

    /// Runs batches until the run is over; returns their number.
    fn worker(
        &self,
        engine: &TransferEngine,
        region: &Region,
        target: SegmentHandle,
        base: u64,
        running: &AtomicBool,
        thread: u64,
    ) -> Result<u64, Failure> {
        let request = |number: u64| {
            let offset = self.block_size * (number * self.threads + thread);
            TransferRequest {
                opcode: if self.operation == Operation::Read { Opcode::Read } else { Opcode::Write },
                source: region.address() + offset,
                target,
                target_offset: base + offset,
                length: self.block_size,
            }
        };
        let options = SubmitOptions { deadline: Some(TIMEOUT), ..SubmitOptions::default() };
        let mut batches = 0;
        while running.load(Ordering::Relaxed) {
            let requests: Vec<TransferRequest> = (0..self.batch_size).map(request).collect();
            let batch = engine.submit(&requests, &options)?;
            let state = batch.wait().state;
            if state != TaskState::Completed {
                let cause = batch.problem().map(|cause| format!(" ({cause})")).unwrap_or_default();
                return Err(format!("worker {thread}: a batch ended as {state:?}{cause}").into());
            }
            batches += 1;
        }
        println!("Worker {thread} stopped!");
        Ok(batches)
    }
}

//! `kvplane tebench`: Mooncake's tebench over our engine: the flags of what we have, roles, sweep order and columns,
//! and a check that finds misplaced bytes.
//!
//! Without `--target_seg_name` it is a target: it registers memory and waits. With it, it is an initiator.

mod initiator;
mod later;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvplane::{HugePages, Pacing, Region, RegionOptions, TransferEngine, TransferEngineConfig};
use kvplane_tools::pattern;

use super::{Failure, size, stop};

/// What an initiator does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum OpType {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Reads and writes in turn.
    Mix,
    /// Writes a pattern that follows from the target address.
    WriteSeed,
    /// Reads and checks that pattern.
    ReadVerify,
}

/// Which transports may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Transport {
    /// TCP only.
    Tcp,
    /// Shared memory only.
    Shm,
}

/// How to wait for completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PacingChoice {
    /// Never park.
    Spin,
    /// Spin while it pays.
    Adaptive,
    /// Park at once.
    Park,
}

impl From<PacingChoice> for Pacing {
    fn from(choice: PacingChoice) -> Self {
        match choice {
            PacingChoice::Spin => Self::Spin,
            PacingChoice::Adaptive => Self::default(),
            PacingChoice::Park => Self::Park,
        }
    }
}

/// Measure the transfer engine.
#[derive(Args, Clone)]
pub(crate) struct Tebench {
    /// Local segment name; only peer-to-peer names (IP:PORT) exist, so it is the address to listen on.
    #[arg(long = "seg_name", default_value = "")]
    seg_name: String,
    /// Kind of memory: DRAM.
    #[arg(long = "seg_type", default_value = "DRAM", value_parser = ["DRAM"])]
    seg_type: String,
    /// Segments to transfer to and from, separated by commas; without any, this process is a target.
    #[arg(long = "target_seg_name", default_value = "")]
    target_seg_name: String,
    /// What to do.
    #[arg(long = "op_type", value_enum, default_value = "read")]
    op_type: OpType,
    /// Write, read back and compare every block, by patterns that follow from the address.
    #[arg(long = "check_consistency", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true")]
    check_consistency: bool,
    /// Bytes of registered memory on each side.
    #[arg(long = "total_buffer_size", value_parser = size::parse_some, default_value = "1G")]
    total_buffer_size: u64,
    /// Smallest block.
    #[arg(long = "start_block_size", value_parser = size::parse, default_value = "4096")]
    start_block_size: u64,
    /// Largest block; doubled from the smallest.
    #[arg(long = "max_block_size", value_parser = size::parse, default_value = "64M")]
    max_block_size: u64,
    /// Smallest batch.
    #[arg(long = "start_batch_size", default_value_t = 1)]
    start_batch_size: u64,
    /// Largest batch.
    #[arg(long = "max_batch_size", default_value_t = 1)]
    max_batch_size: u64,
    /// Fewest threads.
    #[arg(long = "start_num_threads", default_value_t = 1)]
    start_num_threads: u64,
    /// Most threads.
    #[arg(long = "max_num_threads", default_value_t = 1)]
    max_num_threads: u64,
    /// Seconds for each case, after a second of warm-up.
    #[arg(long = "duration", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    duration: u64,
    /// Where in the target's memory to begin.
    #[arg(long = "target_offset", value_parser = size::parse, default_value = "0")]
    target_offset: u64,
    /// How much of the target's memory to use; 0 is all.
    #[arg(long = "target_range_size", value_parser = size::parse, default_value = "0")]
    target_range_size: u64,
    /// Least time between the starts of two batches of a thread.
    #[arg(long = "request_interval_us", default_value_t = 0)]
    request_interval_us: u64,
    /// Deadline of each batch; 0 is the default of 10 s.
    #[arg(long = "deadline_us", default_value_t = 0)]
    deadline_us: u64,
    /// How segments are found: p2p, by address.
    #[arg(long = "metadata_type", default_value = "p2p", value_parser = ["p2p"])]
    metadata_type: String,
    /// Port to listen on; 0 picks one.
    #[arg(long = "rpc_server_port", default_value_t = 0)]
    rpc_server_port: u16,
    /// Transport to use; without it, the best of those that both sides have.
    #[arg(long = "xport_type", value_enum)]
    xport_type: Option<Transport>,
    /// Engine: always kvplane; the names of Mooncake's engines are taken as it.
    #[arg(long = "backend", default_value = "kvplane", value_parser = ["kvplane", "classic", "tent"])]
    backend: String,
    #[command(flatten)]
    later: later::Later,
    /// How to wait for completions.
    #[arg(long = "pacing", value_enum, default_value = "adaptive")]
    pacing: PacingChoice,
    /// TCP connections to each target.
    #[arg(long = "lanes", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    lanes: u16,
    /// Whether TCP payloads carry checksums that their receiver checks.
    #[arg(long = "checksum", num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", action = clap::ArgAction::Set)]
    checksum: bool,
    /// Write the rows as JSON to this file; `-` is standard output.
    #[arg(long = "json")]
    json: Option<String>,
    /// Write a page with plots to this file.
    #[arg(long = "plot")]
    plot: Option<PathBuf>,
}

impl Tebench {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if self.check_consistency && matches!(self.op_type, OpType::WriteSeed | OpType::ReadVerify) {
            return Err("--check_consistency does its own writing and reading: leave --op_type away".into());
        }
        if self.target_seg_name.is_empty() { self.target() } else { initiator::run(&self) }
    }

    fn engine(&self) -> Result<TransferEngine, Failure> {
        let listen = match self.seg_name.as_str() {
            "" => ([127, 0, 0, 1], self.rpc_server_port).into(),
            name => name.parse().map_err(|_| format!("--seg_name {name:?} is no address IP:PORT"))?,
        };
        Ok(TransferEngine::start(TransferEngineConfig {
            listen,
            shared_memory: self.xport_type != Some(Transport::Tcp),
            tcp: self.xport_type != Some(Transport::Shm),
            lanes: self.lanes,
            checksum: self.checksum,
            pacing: self.pacing.into(),
            ..TransferEngineConfig::default()
        })?)
    }

    fn region(&self, name: &str) -> Result<std::sync::Arc<Region>, Failure> {
        let options = RegionOptions {
            shared: true,
            huge: HugePages::Try,
            prefault: true,
            ..RegionOptions::new(name, usize::try_from(self.total_buffer_size)?)
        };
        Ok(Region::allocate(&options)?)
    }

    fn target(&self) -> Result<(), Failure> {
        let engine = self.engine()?;
        let region = self.region("tebench-target")?;
        engine.register(std::sync::Arc::clone(&region), &kvplane::RegisterOptions::default())?;
        let name = engine.name();
        // Readers that verify find the pattern there without a writer having been first.
        region.fill_with(0, region.bytes(), &mut |offset, part| pattern::fill(TARGET_SEED, offset, part));
        println!(
            "\x1b[33mTo start initiators, run\n  ./tebench --target_seg_name={name} --seg_type={} --backend={}\n\
             Press Ctrl-C to terminate\x1b[0m",
            self.seg_type, self.backend
        );
        stop::wait(|| Ok(()))
    }

    fn deadline(&self) -> Duration {
        if self.deadline_us == 0 { Duration::from_secs(10) } else { Duration::from_micros(self.deadline_us) }
    }
}

/// Seed of the pattern that `write_seed` writes and `read_verify` expects.
pub(crate) const TARGET_SEED: u64 = 0x7465_6265_6e63_6801;

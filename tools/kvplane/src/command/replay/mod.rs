//! `kvplane replay`: drives the store with a trace as inference engines do, and verifies every byte.
//!
//! For each request, in arrival order: one batched exists over its blocks, one batched get of the existing prefix, one
//! batched put of the rest. Every byte read is compared with a pattern that follows from (key, offset), so a stale,
//! misplaced or torn block is noticed.

pub(crate) mod live;
mod run;
mod tiered;
mod worker;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvplane::{ClientConfig, RdmaUse};
use kvplane_tools::report::{self, ReplayReport};
use kvplane_tools::trace::{self, Shape, Trace};

use super::tebench::values::{self, ValueError};
use super::{Failure, size};
pub(crate) use run::{Plan, run};

/// Transport of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Way {
    /// Shared memory if the node is on this host, else RDMA if both sides have it, else TCP.
    Auto,
    /// Shared memory only.
    Shm,
    /// TCP only.
    Tcp,
    /// RDMA only.
    Rdma,
}

impl Way {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Auto => "best way",
            Self::Shm => "shared memory",
            Self::Tcp => "TCP",
            Self::Rdma => "RDMA",
        }
    }

    /// Restricts a client's configuration to this transport.
    pub(super) fn allow(self, config: ClientConfig, devices: &[String]) -> Result<ClientConfig, ValueError> {
        let mode = match self {
            Self::Auto => RdmaUse::Auto,
            Self::Rdma => RdmaUse::Require,
            Self::Shm | Self::Tcp => RdmaUse::Never,
        };
        Ok(ClientConfig {
            shared_memory: matches!(self, Self::Auto | Self::Shm),
            tcp: matches!(self, Self::Auto | Self::Tcp),
            rdma: values::rdma("--rdma-devices", mode, devices, "")?,
            ..config
        })
    }
}

/// Replay a trace against live nodes.
#[derive(Args)]
pub(crate) struct Replay {
    /// Trace file in Mooncake's format: one JSON object a line.
    #[arg(long, conflicts_with = "generate", required_unless_present = "generate")]
    trace: Option<PathBuf>,
    /// Generate a trace of this shape instead of reading one.
    #[arg(long, value_enum)]
    generate: Option<Shape>,
    /// Number of requests to replay, from the trace's beginning; for a generated trace, its length. Default: all.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
    /// Seed of a generated trace.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Size of a block of 512 tokens, in bytes.
    #[arg(long, value_parser = size::parse_some, default_value = "64K")]
    block_bytes: u64,
    /// Number of clients, which take requests in turn.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    clients: u32,
    /// Speed relative to the recorded arrival times; `max`: requests do not wait for their arrival times.
    #[arg(long, default_value = "max", value_parser = speed)]
    speed: Speed,
    /// Name of the cluster.
    #[arg(long, default_value = "dev")]
    cluster: String,
    /// Directory of local identities. Default: the user's runtime directory.
    #[arg(long)]
    runtime_directory: Option<PathBuf>,
    /// Transport of blocks.
    #[arg(long, value_enum, default_value = "auto")]
    transport: Way,
    /// RDMA devices to use, separated by commas. Default: all devices.
    #[arg(long, alias = "rdma_devices", value_delimiter = ',')]
    rdma_devices: Vec<String>,
    /// Request a prefetch with the exists, so that nodes read the blocks from their SSDs ahead, and wait this time
    /// before the get, in milliseconds, as an engine does that schedules the request meanwhile.
    #[arg(long, value_name = "MS")]
    ahead: Option<u64>,
    /// Pause between exists and get without a prefetch, in milliseconds.
    #[arg(long, value_name = "MS", conflicts_with = "ahead")]
    pause: Option<u64>,
    #[command(flatten)]
    tier: tiered::TierFlags,
    #[command(flatten)]
    live: live::LiveFlags,
    /// Process number of the node, whose CPU time is then reported too.
    #[arg(long)]
    server_pid: Option<u32>,
    /// File to write the results to as JSON; `-` is standard output.
    #[arg(long)]
    json: Option<String>,
    /// File to write a page with plots to, as HTML.
    #[arg(long)]
    html: Option<PathBuf>,
}

/// Speed of a replay: a factor, or `None` for no waiting.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Speed(pub(crate) Option<f64>);

/// Error of a text that is no speed.
#[derive(Clone, PartialEq, Eq, Debug)]
struct SpeedError {
    text: String,
}

impl fmt::Display for SpeedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = &self.text;
        write!(f, "{text:?} is not a speed: give a factor above 0, or max")
    }
}

impl std::error::Error for SpeedError {}

fn speed(text: &str) -> Result<Speed, SpeedError> {
    if text == "max" {
        return Ok(Speed(None));
    }
    match text.parse::<f64>() {
        Ok(factor) if factor > 0.0 && factor.is_finite() => Ok(Speed(Some(factor))),
        _ => Err(SpeedError { text: text.to_owned() }),
    }
}

impl Replay {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let trace = self.load()?;
        let plan = Plan {
            cluster: self.cluster.clone(),
            runtime_directory: self.runtime_directory.clone(),
            way: self.transport,
            rdma_devices: self.rdma_devices.clone(),
            block_bytes: self.block_bytes,
            clients: self.clients,
            speed: self.speed.0,
            server_pid: self.server_pid,
            ahead: self.ahead.is_some(),
            pause: Duration::from_millis(self.ahead.or(self.pause).unwrap_or(0)),
        };
        if self.live.conductor {
            return live::replay(&plan, &trace, &self.live, self.json.as_deref());
        }
        let reports = match &self.tier.tier {
            Some(_) => tiered::replay(&plan, &trace, &self.tier)?,
            None => vec![run(&plan, &trace)?],
        };
        deliver(&reports, self.json.as_deref(), self.html.as_deref())?;
        judge(&reports)
    }

    fn load(&self) -> Result<Trace, Failure> {
        if let Some(shape) = self.generate {
            let requests = self.requests.unwrap_or(shape.published_requests() as u64);
            return Ok(trace::generate(shape, usize::try_from(requests)?, self.seed)?);
        }
        let path = self.trace.as_deref().ok_or("--trace or --generate is needed")?;
        let mut trace = trace::load(path)?;
        if let Some(requests) = self.requests {
            trace.requests.truncate(usize::try_from(requests)?);
        }
        Ok(trace)
    }
}

/// Prints the reports of a run and writes them to files.
pub(crate) fn deliver(reports: &[ReplayReport], json: Option<&str>, html: Option<&Path>) -> Result<(), Failure> {
    // The text is printed first: a file that cannot be written loses no results.
    match json {
        Some("-") => println!("{:#}", report::to_json(reports)),
        Some(path) => {
            print!("{}", report::to_text(reports));
            std::fs::write(path, format!("{:#}\n", report::to_json(reports)))
                .map_err(|error| format!("{path}: {error}"))?;
        }
        None => print!("{}", report::to_text(reports)),
    }
    if let Some(path) = html {
        report::write_html(reports, path).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// Fails if any byte was wrong.
pub(crate) fn judge(reports: &[ReplayReport]) -> Result<(), Failure> {
    let wrong: u64 = reports.iter().map(|report| report.bytes_wrong).sum();
    if wrong > 0 { Err(format!("{wrong} bytes read were wrong").into()) } else { Ok(()) }
}

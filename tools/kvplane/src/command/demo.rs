//! `kvplane demo`: replays a conversation trace against a node and writes a report, with one command.
//!
//! Starts `kvplane dev` as a child process, replays the whole conversation trace over shared memory, then over TCP
//! against a fresh node, with a pool far smaller than the working set, and writes a table, a JSON file and a page with
//! plots.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Args;
use kvplane_tools::report::ReplayReport;
use kvplane_tools::trace::{self, Shape, Trace};

use crate::command::Failure;
use crate::command::process::child::ChildProcess;
use crate::command::replay::{self, Plan, Way};
use crate::command::size;

/// File name of the conversation trace in Mooncake's collection.
const TRACE_FILE: &str = "conversation_trace.jsonl";

/// Start a node, replay the conversation trace, write a report.
#[derive(Args)]
pub(crate) struct Demo {
    /// Trace file in Mooncake's format. Default: searched in $KVPLANE_TRACES and ../shared/data/traces, else generated.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Directory of the report.
    #[arg(long, default_value = "target/demo")]
    out: PathBuf,
    /// Size of the node's memory pool, in bytes.
    #[arg(long, value_parser = size::parse, default_value = "2G")]
    pool: u64,
    /// Size of the KV-cache block of 512 tokens, in bytes.
    #[arg(long, value_parser = size::parse_some, default_value = "64K")]
    block_bytes: u64,
    /// Number of clients, which take requests in turn.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    clients: u32,
    /// Number of requests to replay, from the trace's beginning. Default: all.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
}

impl Demo {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let trace = self.find_trace()?;
        println!("trace: {}, {} requests", trace.label, trace.requests.len());
        std::fs::create_dir_all(&self.out).map_err(|error| format!("{}: {error}", self.out.display()))?;
        let mut reports = Vec::new();
        for way in [Way::Shm, Way::Tcp] {
            reports.push(self.replay(&trace, way)?);
        }
        let (json, html) = (self.out.join("report.json"), self.out.join("report.html"));
        replay::deliver(&reports, json.to_str(), Some(&html))?;
        println!("\nreport: {}", html.display());
        replay::judge(&reports)
    }

    fn replay(&self, trace: &Trace, way: Way) -> Result<ReplayReport, Failure> {
        let mut dev = Dev::start(self.pool)?;
        let plan = Plan {
            cluster: dev.cluster.clone(),
            runtime_directory: Some(dev.directory.clone()),
            way,
            rdma_devices: Vec::new(),
            block_bytes: self.block_bytes,
            clients: self.clients,
            speed: None,
            server_pid: Some(dev.child.id()),
            ahead: false,
            pause: Duration::ZERO,
        };
        let report = replay::run(&plan, trace)?;
        dev.stop()?;
        Ok(report)
    }

    fn find_trace(&self) -> Result<Trace, Failure> {
        let mut found = match &self.trace {
            Some(path) => trace::load(path)?,
            None => match recorded(std::env::var_os("KVPLANE_TRACES").map(PathBuf::from)) {
                Ok(path) => trace::load(&path)?,
                Err(why) => {
                    println!(
                        "{why}: Mooncake publishes it as FAST25-release/traces/{TRACE_FILE} in the repository \
                         kvcache-ai/Mooncake (Apache-2.0); give it with --trace FILE or $KVPLANE_TRACES.\n\
                         Using a generated trace of the same published shape instead."
                    );
                    let shape = Shape::Conversation;
                    trace::generate(shape, shape.published_requests(), 1)?
                }
            },
        };
        if let Some(requests) = self.requests {
            found.requests.truncate(usize::try_from(requests)?);
        }
        Ok(found)
    }
}

/// Reason why there is no recorded trace.
#[derive(Clone, PartialEq, Eq, Debug)]
enum NoTrace {
    /// None was named, and there is none in the shared folder nearby.
    Nearby,
    /// The named one does not exist.
    Missing { file: PathBuf },
}

impl fmt::Display for NoTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nearby => f.write_str("no trace found"),
            Self::Missing { file } => {
                write!(f, "no trace found at $KVPLANE_TRACES: {} does not exist", file.display())
            }
        }
    }
}

impl std::error::Error for NoTrace {}

/// Returns the path of the recorded trace: `named`, a file or a folder that contains the trace, else the shared folder
/// nearby. The error says why there is no trace.
fn recorded(named: Option<PathBuf>) -> Result<PathBuf, NoTrace> {
    let Some(place) = named else {
        let near = Path::new("../shared/data/traces").join(TRACE_FILE);
        return if near.exists() { Ok(near) } else { Err(NoTrace::Nearby) };
    };
    let file = if place.is_dir() { place.join(TRACE_FILE) } else { place };
    match file.exists() {
        true => Ok(file),
        false => Err(NoTrace::Missing { file }),
    }
}

/// A `kvplane dev` child process; dropping it ends the process.
pub(crate) struct Dev {
    pub(crate) child: ChildProcess,
    pub(crate) cluster: String,
    pub(crate) directory: PathBuf,
}

impl Dev {
    fn start(pool: u64) -> Result<Self, Failure> {
        Self::start_with(pool, &[])
    }

    /// Starts the child process with additional arguments.
    pub(crate) fn start_with(pool: u64, more: &[String]) -> Result<Self, Failure> {
        let cluster = "demo".to_owned();
        let directory = std::env::temp_dir().join(format!("kvplane-demo-{}", std::process::id()));
        let mut command = ChildProcess::command()?;
        command
            .args([
                "dev",
                "--cluster",
                &cluster,
                "--pool",
                &pool.to_string(),
                "--end-with-stdin",
                "--runtime-directory",
            ])
            .arg(&directory)
            .args(more)
            .stdin(Stdio::piped());
        let is_ready = |line: &str| line.starts_with("ready");
        let show = move |line: &str| {
            if !is_ready(line) {
                println!("dev | {line}");
            }
        };
        match ChildProcess::start("dev", &mut command, is_ready, show) {
            Ok((child, _)) => Ok(Self { child, cluster, directory }),
            Err(error) => {
                let _ = std::fs::remove_dir_all(&directory);
                Err(error)
            }
        }
    }

    /// Stops the node and checks its exit status.
    fn stop(&mut self) -> Result<(), Failure> {
        let pid = self.child.id().to_string();
        let told = Command::new("kill").args(["-TERM", &pid]).status()?;
        if !told.success() {
            return Err("kvplane dev ended before it was stopped: see its output above".into());
        }
        let status = self.child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("kvplane dev ended with {status}").into()) }
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        self.child.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_without_the_trace_is_named_and_no_error() {
        let place = std::env::temp_dir().join(format!("kvplane-traces-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        let file = place.join(TRACE_FILE);
        let why = recorded(Some(place.clone())).unwrap_err().to_string();
        assert!(why.contains("$KVPLANE_TRACES") && why.contains(file.to_str().unwrap()), "{why}");
        let why = recorded(Some(place.join("nowhere"))).unwrap_err().to_string();
        assert!(why.contains("nowhere does not exist"), "{why}");
        std::fs::write(&file, "").unwrap();
        assert_eq!(recorded(Some(place.clone())), Ok(file.clone()));
        assert_eq!(recorded(Some(file.clone())), Ok(file));
        std::fs::remove_dir_all(&place).unwrap();
    }
}

//! Subcommands of `kvplane`: each turns its arguments into calls of the public crate.

/// Prints a line of a server. A line that cannot be written, as to a log on a full disk, is dropped and the server
/// continues; `println!` would panic.
macro_rules! announce {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($words)*);
    }};
}

mod collectives;
mod control;
mod ctl;
mod demo;
mod dev;
mod node;
mod objects;
mod p2p;
mod process;
mod replay;
mod roles;
mod sim;
mod size;
mod tebench;
mod topology;
mod which;

use clap::Subcommand;
use tebench::transfer_engine_bench;

/// Error of a command, as a sentence for the operator.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Error of a benchmark none of whose cases could run, with the reason. A caller must not take it for a passed run.
#[derive(Debug)]
pub(crate) struct NothingRun(pub(crate) String);

impl std::fmt::Display for NothingRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NothingRun {}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Run a control plane and one storage node in one process, on loopback: the quickest way to try kvplane.
    Dev(Box<dev::Dev>),
    /// Run the control plane: membership, the cluster map, the segment catalog, the Conductor.
    Control(control::Control),
    /// Run a storage node: pinned shards with memory for objects.
    Node(node::Node),
    /// Inspect and operate a cluster.
    Ctl(ctl::Ctl),
    /// Benchmark the transfer engine with the flags of Mooncake's tebench.
    Tebench(Box<tebench::Tebench>),
    /// Benchmark the transfer engine with the flags of Mooncake's transfer_engine_bench.
    #[command(name = "transfer_engine_bench")]
    TransferEngineBench(Box<transfer_engine_bench::TransferEngineBench>),
    /// Run, measure and verify collectives with the other ranks of a world.
    Collectives(Box<collectives::Collectives>),
    /// Replay a trace of requests against live nodes and verify every byte.
    Replay(replay::Replay),
    #[command(name = "replay-engine", hide = true)]
    ReplayEngine(replay::live::engine::Engine),
    /// Simulate caches without a cluster: hit rates by policy and size.
    Sim(sim::Sim),
    /// Distribute large files between machines over P2P.
    P2p(Box<p2p::P2p>),
    /// Show the machine's topology and the placement of shards on it.
    Topology(topology::Topology),
    /// Start a node, replay the conversation trace over shared memory and TCP, and write a report.
    Demo(demo::Demo),
    #[command(hide = true)]
    Reference(crate::reference::Reference),
}

impl Command {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self {
            Self::Dev(command) => command.run(),
            Self::Control(command) => command.run(),
            Self::Node(command) => command.run(),
            Self::Ctl(command) => command.run(),
            Self::Tebench(command) => command.run(),
            Self::TransferEngineBench(command) => command.run(),
            Self::Collectives(command) => command.run(),
            Self::Replay(command) => command.run(),
            Self::ReplayEngine(command) => command.run(),
            Self::Sim(command) => command.run(),
            Self::P2p(command) => command.run(),
            Self::Topology(command) => command.run(),
            Self::Demo(command) => command.run(),
            Self::Reference(command) => command.run(),
        }
    }
}

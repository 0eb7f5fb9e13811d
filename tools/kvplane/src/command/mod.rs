//! The subcommands: each turns its arguments into calls of the public crate.

/// Prints a line of a server's. A line that cannot be written, as to a log on a full disk, is lost, and the server goes
/// on: `println!` would end it.
macro_rules! announce {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($words)*);
    }};
}

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
mod transfer_engine_bench;
mod which;

use clap::Subcommand;

/// Why a command failed, as a sentence for people.
pub(crate) type Failure = Box<dyn std::error::Error>;

/// A benchmark ran none of its cases: why. Its caller must not take that for a good run.
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
    /// Control plane and one storage node in one process, on loopback: the way to try kvplane.
    Dev(dev::Dev),
    /// The control plane: membership, the cluster map, the segment catalog.
    Control(control::Control),
    /// A storage node: pinned shards with memory for objects.
    Node(node::Node),
    /// Look at and operate a cluster.
    Ctl(ctl::Ctl),
    /// Measure the transfer engine, in the manner of Mooncake's tebench.
    Tebench(Box<tebench::Tebench>),
    /// Measure the transfer engine with the flags of Mooncake's transfer_engine_bench.
    #[command(name = "transfer_engine_bench")]
    TransferEngineBench(Box<transfer_engine_bench::TransferEngineBench>),
    /// Replay a trace of requests against live nodes, and check every byte.
    Replay(replay::Replay),
    #[command(name = "replay-engine", hide = true)]
    ReplayEngine(replay::live::engine::Engine),
    /// What would be, without a cluster: hit rates of caches.
    Sim(sim::Sim),
    /// Share big files between machines, each of which sends them on.
    P2p(Box<p2p::P2p>),
    /// What this machine is, and where shards would sit.
    Topology(topology::Topology),
    /// Start a node, replay the conversation trace over shared memory and TCP, and leave a report.
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

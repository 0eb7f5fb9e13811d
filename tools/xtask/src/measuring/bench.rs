//! `cargo x bench`: prepare the machine with the benchmarks' rivals too, build release, hand over to `kvplane-bench`.
//!
//! With `--rig` that runs in a virtual machine with RDMA devices.

use std::process::Command;

use crate::process::{self, Failure};
use crate::rig;
use crate::setup::{self, packages::Group};
use crate::workspace::Workspace;

/// What the machine of `--rig` has. All its cores together have those of the host, so more would only get in each
/// other's way.
const MACHINE: [&str; 6] = ["--rxe", "2", "--cpus", "2", "--timeout", "900"];

/// Where the bench of the prefix index is built: it is no member of the workspace, as its rivals bring many crates.
const CONDUCTOR: [&str; 4] =
    ["--manifest-path", "benches/conductor/Cargo.toml", "--target-dir", "target/conductor-bench"];

/// The prefix index beside those of other projects; the first argument is a trace.
fn conductor_index(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    setup::run(&[Group::Build])?;
    // Not `--locked`: that lock file is its own, and nothing else notices when the dependencies of our crates change.
    let mut build = workspace.cargo(&["build", "--release"]);
    process::run(build.args(CONDUCTOR))?;
    let program = workspace.root.join("target/conductor-bench/release/kvplane-bench-conductor");
    Err(process::become_program(Command::new(program).args(arguments)))
}

/// Runs the benchmarks and does not return where they could be started.
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    if arguments.first().is_some_and(|word| word == "conductor-index") {
        return conductor_index(workspace, &arguments[1..]);
    }
    setup::run(&[Group::Build, Group::Bench])?;
    // The benchmarks start `kvplane` as a process of its own, so both are built.
    let build = ["build", "--release", "--package", "kvplane-tools", "--package", "kvplane-benches"];
    process::run(&mut workspace.cargo(&build))?;
    let program = workspace.release_binary("kvplane-bench");
    let inside = arguments.iter().any(|word| word == "--rig");
    let words = arguments.iter().filter(|word| *word != "--rig");
    let mut bench = if inside {
        rig::prepare(workspace)?;
        let mut machine = rig::script(workspace, &MACHINE);
        machine.arg("--").arg(program);
        machine
    } else {
        Command::new(program)
    };
    Err(process::become_program(bench.args(words)))
}

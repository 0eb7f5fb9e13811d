//! `cargo x bench`: prepares the machine with the benchmarks' rivals too, builds the release and runs `kvplane-bench`.
//!
//! With `--rig` the benchmarks run in a virtual machine with RDMA devices.

use std::process::Command;

use crate::process::{self, Failure};
use crate::rig;
use crate::setup::{self, packages::Group};
use crate::workspace::Workspace;

/// Options of the machine for `--rig`. All its cores together have the power of the host, so more cores would only slow
/// each other down.
const MACHINE: [&str; 6] = ["--rxe", "2", "--cpus", "2", "--timeout", "900"];

/// Location of the prefix index's benchmark, which is not a member of the workspace because its rivals need many
/// crates.
const CONDUCTOR: [&str; 4] =
    ["--manifest-path", "benches/conductor/Cargo.toml", "--target-dir", "target/conductor-bench"];

/// Runs the benchmark of the prefix index beside those of other projects; the first argument is a trace.
fn conductor_index(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    setup::run(&[Group::Build])?;
    // Without `--locked`: the benchmark has a lock file of its own, which would go stale with each change of
    // dependencies.
    let mut build = workspace.cargo(&["build", "--release"]);
    process::run(build.args(CONDUCTOR))?;
    let program = workspace.root.join("target/conductor-bench/release/kvplane-bench-conductor");
    Err(process::become_program(Command::new(program).args(arguments)))
}

/// Becomes the benchmark program; returns only if it cannot be started.
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    if arguments.first().is_some_and(|word| word == "conductor-index") {
        return conductor_index(workspace, &arguments[1..]);
    }
    setup::run(&[Group::Build, Group::Bench])?;
    // Both are built because the benchmarks start `kvplane` as a child process.
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

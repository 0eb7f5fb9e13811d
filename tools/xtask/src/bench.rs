//! `cargo x bench`: prepare the machine with the benchmarks' rivals too, build release, hand over to `kvplane-bench`.

use std::process::Command;

use crate::process::{self, Failure};
use crate::setup::{self, packages::Group};
use crate::workspace::Workspace;

/// Runs the benchmarks and does not return where they could be started.
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    setup::run(&[Group::Build, Group::Bench])?;
    // The benchmarks start `kvplane` as a process of its own, so both are built.
    let build = ["build", "--release", "--package", "kvplane-tools", "--package", "kvplane-benches"];
    process::run(&mut workspace.cargo(&build))?;
    let mut bench = Command::new(workspace.release_binary("kvplane-bench"));
    bench.args(arguments);
    Err(process::become_program(&mut bench))
}

//! `cargo x aarch64`: the tests of the crates without I/O for aarch64, on an emulated processor.

use crate::process::{self, Failure};
use crate::setup::targets::Target;
use crate::workspace::Workspace;

/// Crates without I/O whose tests run on the emulated processor.
const PURE: [&str; 4] = ["kvplane-proto", "kvplane-store", "kvplane-tier", "kvplane-cluster"];

/// Variables that shorten the tests: emulation takes about ten times as long.
const SHORT: [(&str, &str); 2] = [("PROPTEST_CASES", "16"), ("KVPLANE_SEEDS", "10")];

/// Runs the tests of the pure crates for aarch64 in QEMU's user emulation, those whose names contain one of `filters`
/// if there are any.
///
/// # Errors
/// If a package is missing, a build fails or a test fails.
pub fn run(workspace: &Workspace, filters: &[String]) -> Result<(), Failure> {
    Target::Aarch64.prepare()?;
    let packages = PURE.iter().flat_map(|package| ["--package", package]);
    let words = ["nextest", "run", "--target", Target::Aarch64.name(), "--no-fail-fast"].into_iter().chain(packages);
    let words: Vec<&str> = words.chain(filters.iter().map(String::as_str)).collect();
    let mut command = workspace.cargo(&words);
    command.envs(SHORT);
    process::run(&mut command)
}

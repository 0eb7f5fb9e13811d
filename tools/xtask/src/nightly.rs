//! Nightly checks: many seeds, kills, broken frames and planted bugs, which take hours; and the checks of dependencies,
//! of orders of accesses and of undefined behaviour, which a change need not wait for.

pub mod aarch64;
pub mod deny;
pub mod loom;
pub mod miri;
pub mod mutations;
pub mod seeds;

use crate::process::Failure;
use crate::workspace::Workspace;

/// Runs the nightly checks one after the other: dependencies, models of the queues, Miri, tests on an emulated aarch64,
/// seeds of all kinds with these arguments, kills, silences, bad networks and upgrades of real nodes, planted bugs. A
/// failure does not end the run.
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let seeds = [&["--nightly".to_string()], arguments].concat();
    let results = [
        ("deny", deny::run(workspace)),
        ("loom", loom::run(workspace)),
        ("miri", miri::run(workspace)),
        ("aarch64", aarch64::run(workspace, &[])),
        ("seeds", seeds::run(workspace, &seeds)),
        ("cluster", seeds::cluster(workspace, &[])),
        ("silence", seeds::silence(workspace, &[])),
        ("networks", seeds::networks(workspace, &[])),
        ("upgrades", seeds::upgrades(workspace, &[])),
        ("mutations", mutations::run(workspace, &[])),
    ];
    let failed: Vec<String> =
        results.into_iter().filter_map(|(name, result)| Some(format!("{name}: {}", result.err()?))).collect();
    if failed.is_empty() { Ok(()) } else { Err(Failure::new(failed.join("; "))) }
}

//! What takes hours, and is left to nights: seeds by the thousand, kills, broken frames, and planted bugs; and what a
//! change need not wait for: what we depend on.

pub mod deny;
pub mod mutations;
pub mod seeds;

use crate::process::Failure;
use crate::workspace::Workspace;

/// Runs what a night is for, one after the other: what we depend on, seeds of all kinds with these arguments, planted
/// bugs. All of them run, also behind one that fails.
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let seeds = [&["--nightly".to_string()], arguments].concat();
    let results = [
        ("deny", deny::run(workspace)),
        ("seeds", seeds::run(workspace, &seeds)),
        ("mutations", mutations::run(workspace, &[])),
    ];
    let failed: Vec<String> =
        results.into_iter().filter_map(|(name, result)| Some(format!("{name}: {}", result.err()?))).collect();
    if failed.is_empty() { Ok(()) } else { Err(Failure::new(failed.join("; "))) }
}

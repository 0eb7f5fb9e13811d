//! `cargo x loom`: runs the models of the queues between threads and processes.
//!
//! loom runs a model once for each order of accesses that the memory model allows. It replaces atomics and locks, so
//! the crate is built with `--cfg loom`, in a target directory of its own.

use crate::process::{self, Failure};
use crate::workspace::Workspace;

/// Words of the command; the last one is the beginning of the models' names.
const WORDS: [&str; 5] = ["test", "--package", "kvplane-sys", "--lib", "queues::models::"];

/// Runs the models.
pub fn run(workspace: &Workspace) -> Result<(), Failure> {
    let mut command = workspace.cargo(&WORDS);
    command.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", workspace.target().join("loom"));
    process::run(&mut command)
}

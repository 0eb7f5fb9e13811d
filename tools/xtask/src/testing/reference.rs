//! `cargo x reference`: writes docs/reference/ anew.
//!
//! The pages are made by the tests that hold them (`tools/kvplane/tests/end_to_end/reference.rs`), told by a variable
//! to write instead of to compare.

use crate::process::{self, Failure};
use crate::workspace::Workspace;

/// Writes the pages.
pub fn run(workspace: &Workspace) -> Result<(), Failure> {
    let mut command = workspace.cargo(&["test", "--package", "kvplane-tools", "--test", "end_to_end", "reference::"]);
    command.env("KVPLANE_WRITE_REFERENCE", "1");
    process::run(&mut command)
}

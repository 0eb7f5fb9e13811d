//! `cargo x reference`: writes docs/reference/ anew.
//!
//! The pages of flags and metrics are made by the tests that hold them
//! (`tools/kvplane/tests/end_to_end/operation/reference.rs`): a variable has them write instead of compare. The page of
//! errors follows from the sources ([`messages`]).

use crate::process::{self, Failure};
use crate::tidy::documents::messages;
use crate::tidy::sources::tree::Tree;
use crate::workspace::Workspace;

/// Writes the pages.
pub fn run(workspace: &Workspace) -> Result<(), Failure> {
    let tree = Tree::read(&workspace.root).map_err(|error| Failure::new(error.to_string()))?;
    let path = workspace.root.join(messages::PAGE);
    std::fs::write(&path, messages::page(&tree))
        .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
    let mut command = workspace.cargo(&["test", "--package", "kvplane-tools", "--test", "end_to_end", "reference::"]);
    command.env("KVPLANE_WRITE_REFERENCE", "1");
    process::run(&mut command)
}

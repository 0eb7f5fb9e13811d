//! `cargo x demo`: prepares the machine, builds the release and runs `kvplane demo`.
//!
//! The demo itself is part of the product; this command only ensures that it can start on a machine with nothing but
//! cargo.

use std::process::Command;

use crate::process::{self, Failure};
use crate::setup::{self, packages::Group};
use crate::workspace::{self, Workspace};

/// Becomes the demo; returns only if it cannot be started.
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    setup::run(&[Group::Build])?;
    process::run(&mut workspace.cargo(&["build", "--release", "--package", "kvplane-tools"]))?;
    Err(process::become_program(&mut command(workspace, arguments)))
}

fn command(workspace: &Workspace, arguments: &[String]) -> Command {
    let mut command = Command::new(workspace.release_binary("kvplane"));
    command.arg("demo");
    if !arguments.iter().any(|word| word == "--out" || word.starts_with("--out=")) {
        command.arg("--out").arg(workspace::relative(&workspace.target().join("demo")));
    }
    command.args(arguments);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(arguments: &[&str]) -> Vec<String> {
        let workspace = Workspace { root: "/somewhere/else".into() };
        let arguments: Vec<String> = arguments.iter().map(|&word| word.to_string()).collect();
        command(&workspace, &arguments).get_args().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn the_report_goes_to_the_target_directory_by_default() {
        let plain = words(&["--trace", "t.jsonl"]);
        assert_eq!([&plain[0], &plain[1]], ["demo", "--out"]);
        assert!(plain[2].ends_with("/demo"));
        assert_eq!(plain[3..], ["--trace", "t.jsonl"]);
        assert_eq!(words(&["--out", "here"]), ["demo", "--out", "here"]);
        assert_eq!(words(&["--out=here"]), ["demo", "--out=here"]);
    }
}

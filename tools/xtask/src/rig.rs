//! `cargo x rig`: runs a command, or the tests that need it, in a virtual machine with hardware that the host lacks.
//!
//! `tools/rig/rig.sh` does the work; this module finds it, prepares the machine on request, and passes its errors on.
//! docs/rig.md describes the machine.

pub mod binaries;
pub mod machines;
pub mod suite;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::process::{self, Failure};
use crate::setup::{self, packages::Group};
use crate::workspace::Workspace;

/// Exit status of the script if the machine could not be prepared or died.
pub const BROKEN: u8 = 125;
/// Exit status of the script if the time limit was exceeded.
pub const TIMEOUT: u8 = 124;

/// Returns the script with its first arguments.
#[must_use]
pub fn script(workspace: &Workspace, arguments: &[&str]) -> Command {
    let mut command = Command::new("bash");
    command.arg(workspace.root.join("tools/rig/rig.sh")).args(arguments);
    command
}

/// Becomes the script, in the current directory: output, signals and exit status are the command's. Returns only if
/// that fails, with the reason.
#[must_use]
pub fn run(workspace: &Workspace, arguments: &[String]) -> Failure {
    process::become_program(script(workspace, &[]).args(arguments))
}

/// Fetches QEMU and a kernel if `groups` contain the rig.
pub fn prepare_where_asked(workspace: &Workspace, groups: &[Group]) -> Result<(), Failure> {
    if groups.contains(&Group::Rig) { prepare(workspace) } else { Ok(()) }
}

/// Fetches QEMU and a kernel into the cache unless they are there; the failure's message is the reason alone.
pub fn prepare(workspace: &Workspace) -> Result<(), Failure> {
    refused_to_prepare(&mut script(workspace, &["--prep"]))
}

fn refused_to_prepare(command: &mut Command) -> Result<(), Failure> {
    eprintln!("+ {}", process::shown(command));
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| process::not_started(command, &error))?;
    let mut reason = None;
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            eprintln!("{line}");
            reason = line.strip_prefix("rig: ").map(str::to_string).or(reason);
        }
    }
    let status = child.wait().map_err(|error| Failure::new(format!("waiting for the preparation: {error}")))?;
    process::check(command, status).map_err(|failure| match reason {
        Some(message) => Failure { message, ..failure },
        None => failure,
    })
}

/// Runs the short suite of hardware tests; prints the reason if no machine can be prepared.
pub fn short_suite_where_possible(workspace: &Workspace) -> Result<(), Failure> {
    if let Err(failure) = prepare_with_tools(workspace) {
        eprintln!("rig: skipped: no virtual machine can be prepared here: {failure}");
        return Ok(());
    }
    suite::run(workspace, &suite::Request { short: true, ..suite::Request::default() })
}

/// Prepares the machine together with the tools that the script needs; fails at once without root.
pub fn prepare_with_tools(workspace: &Workspace) -> Result<(), Failure> {
    // Checked first: without root nothing has to be installed to know that the machine cannot run.
    if !setup::is_root() {
        return Err(Failure::new("needs root: the machine reads the whole of this host's root file system"));
    }
    setup::run(&[Group::Rig])?;
    prepare(workspace)
}

#[cfg(test)]
mod tests;

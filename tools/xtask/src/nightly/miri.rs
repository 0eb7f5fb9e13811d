//! `cargo x miri`: runs unit tests in Miri, an interpreter that finds undefined behaviour.
//!
//! The tests are those of code without I/O, which Miri cannot carry out, and of the queue between threads. Most crates
//! forbid `unsafe`, so for them it checks the crates that they use.

use std::process::{Command, Stdio};

use crate::process::{self, Failure};
use crate::workspace::Workspace;

/// Toolchain that may have Miri: it exists for no other.
const TOOLCHAIN: &str = "+nightly";

/// Packages, and the beginnings of the names of their tests; all unit tests if there are none.
const TESTS: [(&str, &[&str]); 6] = [
    ("kvplane-proto", &[]),
    ("kvplane-store", &["allocator::", "tail_pages::", "generational::", "index::"]),
    ("kvplane-cluster", &[]),
    ("kvplane-conductor", &[]),
    ("kvplane-group", &[]),
    ("kvplane-sys", &["queues::spsc::"]),
];

/// Cases of each property: Miri takes a thousand times as long as compiled code.
const CASES: &str = "4";

const NOT_INSTALLED: &str =
    "skipped: Miri is not installed; `rustup toolchain install nightly --component miri,rust-src` does it";

/// Runs the tests; without Miri, prints how to install it.
pub fn run(workspace: &Workspace) -> Result<(), Failure> {
    if !is_installed() {
        println!("{NOT_INSTALLED}");
        return Ok(());
    }
    for (package, names) in TESTS {
        let mut command = workspace.cargo(&words(package, names));
        // Properties keep the cases that failed in files.
        command.env("MIRIFLAGS", "-Zmiri-disable-isolation").env("PROPTEST_CASES", CASES);
        command.env("CARGO_TARGET_DIR", workspace.target().join("miri"));
        process::run(&mut command)?;
    }
    Ok(())
}

fn words<'a>(package: &'a str, names: &[&'a str]) -> Vec<&'a str> {
    [&[TOOLCHAIN, "miri", "test", "--package", package, "--lib", "--"], names].concat()
}

fn is_installed() -> bool {
    let mut command = Command::new("cargo");
    command.args([TOOLCHAIN, "miri", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_toolchain_comes_first_and_the_tests_last() {
        let all = ["+nightly", "miri", "test", "--package", "a", "--lib", "--"];
        assert_eq!(words("a", &[]), all);
        assert_eq!(words("a", &["b::", "c::"]), [&all[..], &["b::", "c::"]].concat());
    }
}

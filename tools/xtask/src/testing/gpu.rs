//! `cargo x test --gpu`: the suites of device memory over the drivers of this machine, and the rates of its devices.
//!
//! The suites are those that run over the drivers for tests everywhere else; `KVPLANE_GPU` in their environment gives
//! them the machine's own. What cannot run here is listed at the end, as in `cargo x test`; a machine without a driver
//! skips everything and fails nothing.

use std::process::{Command, Stdio};

use super::skips::{Filter, Runner};
use super::{print_skipped, run_filtered};
use crate::process::{self, Failure};
use crate::python;
use crate::workspace::Workspace;

/// Package of the program that lists devices and measures them.
const PROGRAM: &str = "kvplane-gpu";

/// Suite of device memory: a test program, and the name that its tests begin with.
struct Suite {
    package: &'static str,
    program: &'static str,
    prefix: &'static str,
}

const SUITES: [Suite; 5] = [
    Suite { package: "kvplane-sys", program: "suite", prefix: "device::" },
    Suite { package: "kvplane-transfer", program: "suite", prefix: "device_memory::" },
    Suite { package: "kvplane-transfer", program: "suite", prefix: "device_peers::" },
    Suite { package: "kvplane-tests", program: "device_objects", prefix: "" },
    Suite { package: "kvplane-tests", program: "device_gets", prefix: "" },
];

/// Tests over software RDMA devices, which can map memory of the drivers for tests alone.
const SOFT_DEVICES: &str = "device_memory::direct::";

/// Tests of device pools, each of which injects errors or delays.
const INJECTING: &str = "device_pool";

/// Python's tests of device pointers.
const PYTHON: [&str; 4] = ["--debug", "--gpu", "test_devices", "test_connectors"];

/// Returns true if the arguments of `cargo x test` ask for this.
///
/// # Errors
/// When they ask for something else, too.
pub fn is_asked(arguments: &[String]) -> Result<bool, Failure> {
    match arguments {
        [word] if word == "--gpu" => Ok(true),
        _ if arguments.iter().any(|word| word == "--gpu") => {
            Err(Failure::new("--gpu takes no other arguments: it runs the suites of device memory, and measures rates"))
        }
        _ => Ok(false),
    }
}

/// Runs the suites, and prints the rates.
pub fn run(workspace: &Workspace) -> Result<(), Failure> {
    let listed = output(program(workspace, &["cards"], &[]))?;
    let Cards { families, mut skipped } = Cards::of(&listed);
    eprint!("{listed}");
    if families.is_empty() {
        let all = "the suites of device memory, Python's tests of device pointers, and rates";
        skipped.push(format!("{all}: no driver of this machine has a device"));
        print_skipped(&skipped);
        return Ok(());
    }
    let mut result = Ok(());
    if families.iter().any(|family| family == "cuda") {
        let runner = Runner::find();
        for suite in &SUITES {
            let mut filter = Filter::new(runner);
            let mut command = super::tests(workspace, runner, &words(suite, runner));
            result = run_filtered(command.env("KVPLANE_GPU", "1"), &mut filter).and(result);
            skipped.append(&mut filter.skipped);
        }
        skipped.push(format!("{SOFT_DEVICES}: software RDMA devices cannot map memory of a machine's devices"));
        skipped.push(format!("{INJECTING}: its tests inject errors and delays, which only the drivers for tests can"));
        result = python::test(workspace, &PYTHON.map(str::to_owned)).and(result);
    } else {
        skipped.push("the suites of device memory: their first device is one of CUDA".to_string());
    }
    result = process::run(&mut program(workspace, &["rates"], &["--release"])).and(result);
    print_skipped(&skipped);
    result
}

/// Returns the words that choose a suite among the tests.
fn words(suite: &Suite, runner: Runner) -> Vec<String> {
    let Suite { package, program, prefix } = suite;
    let mut words = ["--package", package, "--test", program].map(str::to_owned).to_vec();
    words.extend((!prefix.is_empty()).then(|| (*prefix).to_owned()));
    words.extend(["--", "--skip", SOFT_DEVICES].map(str::to_owned));
    if runner == Runner::Cargo {
        // The driver is one to a process.
        words.push("--test-threads=1".to_owned());
    }
    words
}

fn program(workspace: &Workspace, words: &[&str], profile: &[&str]) -> Command {
    let mut command = workspace.cargo(&["run", "--quiet", "--package", PROGRAM]);
    command.args(profile).arg("--").args(words).env("KVPLANE_GPU", "1");
    command
}

fn output(mut command: Command) -> Result<String, Failure> {
    eprintln!("+ {}", process::shown(&command));
    let done = command.stderr(Stdio::inherit()).output().map_err(|error| process::not_started(&command, &error))?;
    process::check(&command, done.status)?;
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Devices that the program listed.
#[derive(Debug, PartialEq, Eq)]
struct Cards {
    /// Family of each device.
    families: Vec<String>,
    /// Reasons why families have none.
    skipped: Vec<String>,
}

impl Cards {
    fn of(listed: &str) -> Self {
        let family = |line: &str| Some(line.strip_prefix("card: ")?.split_once(':')?.0.to_owned());
        let reason = |line: &str| Some(line.strip_prefix("skipped: ")?.to_owned());
        Self {
            families: listed.lines().filter_map(family).collect(),
            skipped: listed.lines().filter_map(reason).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(line: &str) -> Result<bool, String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        is_asked(&words).map_err(|failure| failure.message)
    }

    #[test]
    fn the_flag_takes_no_other_arguments() {
        assert_eq!((asked("--gpu"), asked("device"), asked("")), (Ok(true), Ok(false), Ok(false)));
        assert!(asked("--gpu device").is_err_and(|message| message.contains("no other arguments")));
    }

    #[test]
    fn devices_and_reasons_are_read_from_the_program() {
        let cards = Cards::of("card: cuda:0: A card\ncard: cuda:1: A card: two\nskipped: hip: no library\n");
        assert_eq!(cards.families, ["cuda", "cuda"]);
        assert_eq!(cards.skipped, ["hip: no library"]);
    }

    #[test]
    fn suites_are_chosen_for_both_runners() {
        let shown = |runner| words(&SUITES[1], runner).join(" ");
        let chosen = "--package kvplane-transfer --test suite device_memory:: -- --skip device_memory::direct::";
        assert_eq!(shown(Runner::Nextest), chosen);
        assert_eq!(shown(Runner::Cargo), format!("{chosen} --test-threads=1"));
        assert!(!words(&SUITES[3], Runner::Nextest).contains(&String::new()));
    }
}

//! `cargo x test`: runs all tests and doc tests of the workspace, and lists skipped tests with their reasons.
//!
//! A test that cannot run on this machine passes and prints a line that begins with `skipped:`. The runners hide the
//! output of passing tests, so it goes through [`skips::Filter`], which picks those lines out. cargo-nextest is used if
//! it is installed, `cargo test` otherwise.

pub mod gpu;
pub mod load;
pub mod reference;
pub mod skips;

use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use crate::process::{self, Failure};
use crate::rig::suite;
use crate::setup::{self, packages::Group};
use crate::workspace::Workspace;
use load::{BusyThreads, Load};
use skips::{Filter, Runner};

/// Runs the tests; `arguments` go to the runner, and narrow the run, so doc tests are left out with them.
///
/// With `--busy LOOPS` or `--times COUNT`, runs busy loops beside the tests or repeats the tests: [`Load`].
///
/// With `--rig`, runs the tests that need hardware in virtual machines instead: [`suite::run`]. With `--gpu`, those of
/// device memory on the devices of this machine: [`gpu::run`].
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    run_sized(workspace, arguments, &[])
}

/// Runs the tests with these environment variables, which set the sizes of some tests.
pub fn run_sized(workspace: &Workspace, arguments: &[String], sizes: &[(&str, &str)]) -> Result<(), Failure> {
    setup::run(&[Group::Build, Group::Test])?;
    if let Some(request) = suite::Request::of(arguments)? {
        return suite::run(workspace, &request);
    }
    if gpu::is_asked(arguments)? {
        return gpu::run(workspace);
    }
    let runner = Runner::find();
    let (load, arguments) = Load::of(arguments)?;
    if load.times > 1 && runner != Runner::Nextest {
        return Err(Failure::new("--times needs cargo-nextest, which is not installed: https://nexte.st"));
    }
    if load.loops_per_core > 0 {
        // Built first: the busy loops are meant for the tests, and a compiler beside them takes several times as long.
        let scope = packages(&arguments);
        process::run(workspace.cargo(&["test", "--no-run", "--lib", "--bins", "--tests"]).args(scope))?;
    }
    let _turning = BusyThreads::start(load.loops_per_core);
    let mut filter = Filter::new(runner);
    let again = if load.times > 1 { vec!["--stress-count".to_owned(), load.times.to_string()] } else { Vec::new() };
    let mut command = tests(workspace, runner, &[again, arguments.clone()].concat());
    command.envs(sizes.iter().copied());
    let result = run_filtered(&mut command, &mut filter);
    let mut skipped = filter.skipped;
    if arguments.is_empty() {
        result?;
        process::run(&mut workspace.cargo(&["test", "--workspace", "--doc", "--quiet"]))?;
    } else {
        skipped.push("doc tests: arguments were given, which choose among the other tests".to_string());
        result?;
    }
    print_skipped(&skipped);
    Ok(())
}

/// Tests that run at a time for each core: tests of processes and deadlines wait for most of their time.
const TESTS_PER_CORE: usize = 3;

fn threads() -> String {
    (std::thread::available_parallelism().map_or(1, usize::from) * TESTS_PER_CORE).to_string()
}

/// Returns the words of `arguments`, before those for the test binaries, that choose packages; without any, the
/// workspace.
fn packages(arguments: &[String]) -> Vec<&str> {
    let (mut chosen, mut words) = (Vec::new(), arguments.iter().map(String::as_str).take_while(|word| *word != "--"));
    while let Some(word) = words.next() {
        match word {
            "-p" | "--package" => chosen.extend([word].into_iter().chain(words.next())),
            _ if word.starts_with("--package=") => chosen.push(word),
            _ => {}
        }
    }
    if chosen.is_empty() { vec!["--workspace"] } else { chosen }
}

fn tests(workspace: &Workspace, runner: Runner, arguments: &[String]) -> Command {
    let scope = if packages(arguments) == ["--workspace"] { Some("--workspace") } else { None };
    match runner {
        Runner::Nextest => {
            let mut command = workspace.cargo(&["nextest", "run", "--no-fail-fast", "--success-output", "final"]);
            if std::env::var_os("NEXTEST_TEST_THREADS").is_none() {
                command.env("NEXTEST_TEST_THREADS", threads());
            }
            command.args(scope).args(arguments);
            command
        }
        Runner::Cargo => {
            let mut command = workspace.cargo(&["test", "--no-fail-fast", "--lib", "--bins", "--tests"]);
            // Words after `--` are for the test binaries, as is the flag added here.
            let split = arguments.iter().position(|word| word == "--");
            let (cargo, binaries) = arguments.split_at(split.unwrap_or(arguments.len()));
            command.args(scope).args(cargo).arg("--").args(binaries.iter().skip(1)).arg("--show-output");
            command
        }
    }
}

/// Runs `command` with its output passed through `filter` line by line. Colours survive the pipe.
pub(crate) fn run_filtered(command: &mut Command, filter: &mut Filter) -> Result<(), Failure> {
    if std::io::stderr().is_terminal() && std::env::var_os("CARGO_TERM_COLOR").is_none() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    eprintln!("+ {}", process::shown(command));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| process::not_started(command, &error))?;
    let shared = Mutex::new(filter);
    std::thread::scope(|scope| {
        if let Some(stdout) = child.stdout.take() {
            scope.spawn(|| pass_on(stdout, &shared));
        }
        if let Some(stderr) = child.stderr.take() {
            scope.spawn(|| pass_on(stderr, &shared));
        }
    });
    let status = child.wait().map_err(|error| Failure::new(format!("waiting for the tests: {error}")))?;
    process::check(command, status)
}

fn pass_on(output: impl Read, filter: &Mutex<&mut Filter>) {
    let mut reader = BufReader::new(output);
    let mut line = Vec::new();
    // Read as bytes: a test may print anything, and an error here only ends the echo.
    while reader.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
        let text = String::from_utf8_lossy(&line);
        let plain = text.trim_end_matches('\n');
        let (keep, time) =
            filter.lock().map_or((false, None), |mut filter| (filter.keeps(plain), filter.time_of(plain)));
        match time {
            _ if !keep => {}
            Some(seconds) => eprintln!("{plain} ({seconds:.1} s)"),
            None => eprint!("{text}"),
        }
        line.clear();
    }
}

pub(crate) fn print_skipped(skipped: &[String]) {
    if skipped.is_empty() {
        eprintln!("test: nothing was skipped");
        return;
    }
    eprintln!("test: skipped on this machine:");
    for line in skipped {
        eprintln!("  {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(runner: Runner, arguments: &[&str]) -> String {
        let workspace = Workspace { root: "/".into() };
        let arguments: Vec<String> = arguments.iter().map(|&word| word.to_string()).collect();
        process::shown(&tests(&workspace, runner, &arguments))
    }

    #[test]
    fn arguments_reach_the_runner_and_the_test_binaries() {
        let nextest = shown(Runner::Nextest, &["slot", "--no-capture"]);
        assert!(nextest.ends_with("--no-fail-fast --success-output final --workspace slot --no-capture"), "{nextest}");
        let cargo = shown(Runner::Cargo, &["slot", "--", "--exact"]);
        assert!(cargo.ends_with("--tests --workspace slot -- --exact --show-output"), "{cargo}");
        assert!(shown(Runner::Cargo, &[]).ends_with("--workspace -- --show-output"));
    }

    #[test]
    fn a_package_named_replaces_the_workspace() {
        for arguments in [["-p", "kvplane-proto"], ["--package", "kvplane-proto"]] {
            assert!(!shown(Runner::Nextest, &arguments).contains("--workspace"));
        }
    }

    #[test]
    fn packages_are_chosen_by_all_spellings_and_not_behind_the_dashes() {
        let of = |words: &str| {
            let arguments: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
            packages(&arguments).join(" ")
        };
        assert_eq!(of("slot -p one --package two --package=three -- -p four"), "-p one --package two --package=three");
        assert_eq!(of("slot -- -p four"), "--workspace");
    }

    #[test]
    fn output_is_filtered_and_the_status_kept() {
        let mut filter = Filter::new(Runner::Cargo);
        let mut command = Command::new("sh");
        command.args(["-c", "echo 'skipped: no NUMA'; echo 'skipped: no huge pages' >&2; exit 4"]);
        let failure = run_filtered(&mut command, &mut filter).unwrap_err();
        assert_eq!(failure.status, 4);
        filter.skipped.sort();
        assert_eq!(filter.skipped, ["no NUMA", "no huge pages"]);
    }
}

//! `cargo x test --rig`: builds the test programs on the host, and runs those that need hardware in virtual machines.
//!
//! Each machine is started once and runs its programs one after another; the bytes on its drives are lost at its end. A
//! test recognizes the machine by `RIG=1` and similar variables, and elsewhere prints why it was skipped. Skips inside
//! a machine are listed at the end, as in `cargo x test`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use super::binaries::{self, Binary};
use super::machines::{self, Job, Machine};
use super::{BROKEN, TIMEOUT, script};
use crate::process::{self, Failure};
use crate::testing;
use crate::testing::skips::{Filter, Runner};
use crate::workspace::{self, Workspace};

/// Head of the script that runs the programs one after another and prints those that failed.
const HEAD: &str = include_str!("programs.sh");
/// Script that runs each test of a program in a process of its own.
const APART: &str = "tools/xtask/src/rig/apart.sh";

/// Parsed arguments.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Run only the machines of the short suite.
    pub short: bool,
    /// Run only these machines; all of them if it is empty.
    pub machines: Vec<String>,
    /// Arguments of the test programs: a filter, flags.
    pub words: Vec<String>,
}

impl Request {
    /// Parses the arguments of `cargo x test`; `None` without `--rig`.
    pub fn of(arguments: &[String]) -> Result<Option<Self>, Failure> {
        let ours = arguments.iter().take_while(|word| *word != "--");
        if !ours.clone().any(|word| word == "--rig") {
            return Ok(None);
        }
        let mut request = Self::default();
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--rig" | "--" => {}
                "--short" => request.short = true,
                "--machine" => {
                    let name = words.next().ok_or_else(|| unknown_machine("nothing"))?;
                    let known = machines::ALL.iter().any(|machine| machine.name == name);
                    request.machines.push(if known { name.clone() } else { return Err(unknown_machine(name)) });
                }
                _ => request.words.push(word.clone()),
            }
        }
        Ok(Some(request))
    }

    fn takes(&self, machine: &Machine) -> bool {
        let named = self.machines.iter().any(|name| name == machine.name);
        named || self.machines.is_empty() && (machine.short || !self.short)
    }
}

fn unknown_machine(name: &str) -> Failure {
    let known: Vec<&str> = machines::ALL.iter().map(|machine| machine.name).collect();
    Failure::new(format!("--machine: unknown machine {name}; known: {}", known.join(", ")))
}

/// Builds, then starts one machine after another. A failing machine does not end the run.
pub fn run(workspace: &Workspace, request: &Request) -> Result<(), Failure> {
    super::prepare(workspace)?;
    let chosen: Vec<&Machine> = machines::ALL.iter().filter(|machine| request.takes(machine)).collect();
    let built = build(workspace, &targets(&chosen))?;
    let mut filter = Filter::timed(Runner::Cargo);
    let mut failures = Vec::new();
    for machine in chosen {
        let began = Instant::now();
        let mut result = start(workspace, machine, &built, request, &mut filter);
        if result.as_ref().is_err_and(stood_still) {
            eprintln!("rig: machine {}: stood still or died; a second and last try", machine.name);
            result = start(workspace, machine, &built, request, &mut filter);
        }
        let seconds = began.elapsed().as_secs_f64();
        match result {
            Ok(()) => eprintln!("rig: machine {}: passed in {seconds:.1} s", machine.name),
            Err(failure) => {
                eprintln!("rig: machine {}: FAILED in {seconds:.1} s", machine.name);
                failures.push(format!("{}: {}", machine.name, explained(&failure, machine)));
            }
        }
    }
    testing::print_skipped(&filter.skipped);
    if failures.is_empty() { Ok(()) } else { Err(Failure::new(failures.join("\n"))) }
}

/// Returns true if the emulated machine itself did not come to an end. Programs that hang are ended inside it, and
/// count as failed tests.
const fn stood_still(failure: &Failure) -> bool {
    matches!(failure.status, TIMEOUT | BROKEN)
}

fn explained(failure: &Failure, machine: &Machine) -> String {
    match failure.status {
        TIMEOUT => format!("exceeded {} s twice, though programs that hang are ended in it", machine.limit_s),
        BROKEN => "twice the machine could not be started, or died; its last words are above".to_string(),
        1 => "tests failed, see above".to_string(),
        _ => failure.message.clone(),
    }
}

/// Returns the options that select the test targets of machines: all targets if one runs all of a package.
fn targets(machines: &[&Machine]) -> Vec<&'static str> {
    let mut options = Vec::new();
    for job in machines.iter().flat_map(|machine| machine.jobs) {
        match job.target {
            None => return vec!["--lib", "--bins", "--tests"],
            Some("lib") if !options.contains(&"--lib") => options.push("--lib"),
            Some(name) if name != "lib" && !options.contains(&name) => options.extend(["--test", name]),
            Some(_) => {}
        }
    }
    options
}

/// Builds the test programs of these targets and returns them. Packages of the whole workspace are selected, so that
/// features unify as they do for all tests, and a run after those builds nothing.
fn build(workspace: &Workspace, targets: &[&str]) -> Result<Vec<Binary>, Failure> {
    let mut command = workspace.cargo(&["test", "--no-run", "--workspace"]);
    command.args(targets).args(["--message-format", "json-render-diagnostics"]);
    eprintln!("+ {}", process::shown(&command));
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| process::not_started(&command, &error))?;
    process::check(&command, output.status)?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().filter_map(binaries::read).collect())
}

fn start(
    workspace: &Workspace,
    machine: &Machine,
    built: &[Binary],
    request: &Request,
    filter: &mut Filter,
) -> Result<(), Failure> {
    let text = programs(workspace, machine, built, &request.words)?;
    let path = write(workspace, machine.name, &text)?;
    let limit = machine.limit_s.to_string();
    let mut command = script(workspace, machine.options);
    command.args(["--timeout", &limit, "--share"]).arg(share(workspace)).arg("--").arg("bash").arg(&path);
    // The command starts in the workspace, below the shared directory.
    command.current_dir(&workspace.root).stdin(Stdio::null());
    testing::run_filtered(&mut command, filter)
}

/// Returns the directory that a machine may write to: the tree, or the common ancestor of the tree and a target
/// directory elsewhere.
fn share(workspace: &Workspace) -> PathBuf {
    let target = workspace.target();
    // The whole file system cannot be shared for writing; the machine can read it anyway.
    let holds = |directory: &&Path| target.starts_with(directory) && directory.parent().is_some();
    workspace.root.ancestors().find(holds).unwrap_or(&workspace.root).to_path_buf()
}

fn write(workspace: &Workspace, name: &str, text: &str) -> Result<PathBuf, Failure> {
    let directory = workspace.target().join("rig");
    let path = directory.join(format!("{name}.sh"));
    fs::create_dir_all(&directory)
        .and_then(|()| fs::write(&path, text))
        .map_err(|error| Failure::new(format!("{}: {error}", workspace::relative(&path).display())))?;
    Ok(path)
}

/// Returns the script of one machine. Words of the caller replace the names that its jobs filter by, but not their
/// flags.
fn programs(workspace: &Workspace, machine: &Machine, built: &[Binary], words: &[String]) -> Result<String, Failure> {
    let mut text = HEAD.to_string();
    for job in machine.jobs {
        let mut chosen: Vec<&Binary> = built.iter().filter(|binary| is_of(job, binary)).collect();
        chosen.sort_by(|a, b| a.target.cmp(&b.target));
        if chosen.is_empty() {
            return Err(Failure::new(format!("no test program {:?} of {} was built", job.target, job.package)));
        }
        for binary in chosen {
            let mut command = Command::new(if job.over_rdma { "over_rdma" } else { "run" });
            // A flag selects the tests of a job, and applies beside the caller's words too.
            let kept = job.filter.filter(|filter| words.is_empty() || filter.starts_with("--"));
            let filter = kept.map(|filter| format!(" {filter}")).unwrap_or_default();
            let name = format!("{} {}{filter}", binary.package, binary.target);
            command.arg(name).arg(program_limit_s(machine).to_string()).arg(&binary.directory);
            if job.apart {
                command.arg("bash").arg(workspace.root.join(APART)).arg(&binary.path).args(kept).args(words);
            } else {
                command.arg(&binary.path).args(kept).args(words);
                command.args(machine.alone.then_some("--test-threads=1")).arg("--show-output");
            }
            text += &process::shown(&command);
            text.push('\n');
        }
    }
    Ok(text + "exit $failed\n")
}

/// Returns the time limit of a program, which leaves time for the others if it hangs.
const fn program_limit_s(machine: &Machine) -> u32 {
    machine.limit_s * 2 / 5
}

fn is_of(job: &Job, binary: &Binary) -> bool {
    binary.package == job.package && job.target.is_none_or(|target| target == binary.target)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(line: &str) -> Result<Option<Request>, Failure> {
        Request::of(&line.split_whitespace().map(str::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn only_rig_arguments_start_a_machine() {
        assert_eq!(request("slot -- --rig").unwrap(), None);
        assert_eq!(request("--short").unwrap(), None);
        let found = request("--rig --short --machine nvme-tcp drives -- --exact").unwrap().unwrap();
        let words = ["drives", "--exact"].map(str::to_string).to_vec();
        assert_eq!(found, Request { short: true, machines: vec!["nvme-tcp".to_string()], words });
        for line in ["--rig --machine", "--rig --machine gpu"] {
            let message = request(line).unwrap_err().message;
            assert!(machines::ALL.iter().all(|one| message.contains(one.name)), "{message}");
        }
    }

    #[test]
    fn the_short_suite_is_short_and_a_name_chooses() {
        let taken = |line: &str| {
            let request = request(line).unwrap().unwrap();
            machines::ALL.iter().filter(|machine| request.takes(machine)).map(|one| one.name).collect::<Vec<_>>()
        };
        assert_eq!(taken("--rig").len(), machines::ALL.len());
        assert!(taken("--rig --short").len() < machines::ALL.len());
        assert_eq!(taken("--rig --short --machine whole"), ["whole"]);
    }

    #[test]
    fn only_the_targets_of_the_machines_are_built() {
        let of = |names: &[&str]| {
            let chosen: Vec<&Machine> = machines::ALL.iter().filter(|machine| names.contains(&machine.name)).collect();
            targets(&chosen).join(" ")
        };
        assert_eq!(of(&["nvme-tcp", "nvme-rdma"]), "--test rig");
        assert_eq!(of(&["disks", "nvme-tcp"]), "--lib --test end_to_end --test rig");
        assert_eq!(of(&["nvme-tcp", "whole"]), "--lib --bins --tests");
    }

    #[test]
    fn programs_run_in_their_packages_and_each_failure_counts() {
        let binary = |package: &str, target: &str| Binary {
            package: package.to_string(),
            target: target.to_string(),
            path: format!("/t/it's {target}").into(),
            directory: "/".into(),
        };
        let built = [binary("kvplane", "rig"), binary("kvplane-transfer", "suite")];
        let machine = machines::ALL.iter().find(|machine| machine.name == "nvme-tcp").unwrap();
        let workspace = Workspace::find().unwrap();
        let programs =
            |machine: &Machine, built: &[Binary], words: &[String]| super::programs(&workspace, machine, built, words);
        let text = programs(machine, &built, &[]).unwrap();
        assert!(text.contains(r"run 'kvplane rig drives::' 96 / '/t/it'\''s rig' drives:: --show-output"), "{text}");
        assert!(!text.contains("transfer"), "{text}");
        let named = programs(machine, &built, &["x".to_string()]).unwrap();
        assert!(named.contains(" x --show-output") && !named.contains("drives::"), "{named}");
        const JOBS: &[machines::Job] = &[machines::job("kvplane", Some("rig"), Some("--ignored"))];
        let large = Machine { jobs: JOBS, ..*machine };
        let named = programs(&large, &built, &["x".to_string()]).unwrap();
        assert!(named.contains(" --ignored x --show-output"), "{named}");
        assert!(programs(machine, &built[1..], &[]).unwrap_err().message.contains("rig"));
        const APART: &[machines::Job] = &[machines::Job { apart: true, ..JOBS[0] }];
        let apart = programs(&Machine { jobs: APART, ..*machine }, &built, &[]).unwrap();
        assert!(apart.contains("rig/apart.sh '/t/it'\\''s rig' --ignored\n"), "{apart}");
        let alone = programs(&Machine { alone: true, ..*machine }, &built, &[]).unwrap();
        assert!(alone.contains(" drives:: --test-threads=1 --show-output"), "{alone}");
        let script = HEAD.to_string() + "run a 60 / false\nrun 'b c' 60 / true\nexit $failed\n";
        let output = Command::new("bash").args(["-c", &script]).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "rig: a\nrig: FAILED with status 1: a\nrig: b c\n");
    }

    #[test]
    fn each_test_that_runs_apart_is_run_and_each_failure_counts() {
        use std::os::unix::fs::PermissionsExt as _;

        let program = std::env::temp_dir().join(format!("kvplane-rig-program-{}", std::process::id()));
        let lines = [
            "#!/bin/sh",
            r#"case "$*" in"#,
            r"a*--list*) printf 'a::b: test\na::c: test\n' ;;",
            r"*--list*) ;;",
            r#"*) echo "$@"; case $2 in *::b) exit 101 ;; esac ;;"#,
            "esac\n",
        ];
        fs::write(&program, lines.join("\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let script = Workspace::find().unwrap().root.join(APART);
        let run = |filter: &str| Command::new("bash").arg(&script).arg(&program).arg(filter).output().unwrap();
        let output = run("a");
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(said, "--exact a::b --show-output\n--exact a::c --show-output\n");
        assert_eq!(run("none").status.code(), Some(1));
        fs::remove_file(&program).unwrap();
    }

    #[test]
    fn a_program_that_hangs_is_ended_and_shown_and_the_rest_runs() {
        let script = HEAD.to_string() + "run a 1 / sh -c 'sleep 1000 & wait'\nrun b 60 / true\nexit $failed\n";
        // Background processes of the script end with it: they would hold the pipe open.
        let output = Command::new("bash").args(["-c", &script]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with("rig: a\nrig: not over after 1 s: a: "), "{said}");
        assert!(said.ends_with("rig: FAILED with status 137: a\nrig: b\n"), "{said}");
        for thread in [" sh: S", " sleep: S"] {
            assert!(said.contains(thread), "{said}");
        }
    }

    #[test]
    fn only_a_stalled_machine_is_retried() {
        for (status, again) in [(TIMEOUT, true), (BROKEN, true), (1, false), (2, false)] {
            assert_eq!(stood_still(&Failure { status, ..Failure::new("x") }), again, "{status}");
        }
    }
}

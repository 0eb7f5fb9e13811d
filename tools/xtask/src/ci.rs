//! `cargo x ci`: runs the checks that a change must pass, cheapest first, and prints the time of each step.
//!
//! All steps use the development profile, which is built once. The linkage check builds the shipped binary without its
//! optimisations; the release build itself takes ten minutes, and `.ci/run` leaves it to `cargo x demo`. The first
//! failing step ends the run, with its exit status.

use std::time::{Duration, Instant};

use crate::linkage;
use crate::measuring::peers;
use crate::process::{self, Failure};
use crate::python;
use crate::rig;
use crate::setup::{self, packages::Group};
use crate::testing;
use crate::tidy;
use crate::workspace::Workspace;

/// Sizes of the tests that take theirs from the environment: seeds of each kind of the simulation, kills of nodes with
/// SSDs, seconds of broken frames. They are as large as a CI run allows; `cargo x seeds --nightly`, `cargo x kills` and
/// `cargo x fuzz` run more, and a plain `cargo x test` less.
const SIZES: [(&str, &str); 6] = [
    ("KVPLANE_SEEDS", "100"),
    ("KVPLANE_TIER_SEEDS", "100"),
    ("KVPLANE_KILLS", "40"),
    ("KVPLANE_POWER_FAILURES", "18"),
    ("KVPLANE_FULL_KILLS", "10"),
    ("KVPLANE_FUZZ_SECONDS", "40"),
];

/// Step of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// rustfmt changes nothing.
    Fmt,
    /// Rules of the source tree: `cargo x tidy`.
    Tidy,
    /// clippy without a warning.
    Clippy,
    /// Unit tests: those beside the code. A part of the next step.
    Unit,
    /// Every test, in the sizes of [`SIZES`].
    Test,
    /// Release build of the shipped binary.
    Release,
    /// The shipped binary starts without any optional library.
    Linkage,
    /// kvplane and a stock Mooncake engine read and write each other's memory, where the stock engine can be installed.
    Interop,
    /// Tests of the Python packages against a live cluster, where there is a Python.
    Python,
    /// Few tests on hardware that the machine lacks, where virtual machines can be prepared.
    Rig,
}

impl Step {
    /// All steps, in order.
    pub const ALL: [Self; 10] = [
        Self::Fmt,
        Self::Tidy,
        Self::Clippy,
        Self::Unit,
        Self::Test,
        Self::Release,
        Self::Linkage,
        Self::Interop,
        Self::Python,
        Self::Rig,
    ];

    /// Steps of `cargo x quick`: what is to pass before each commit, in under ten minutes on two cores.
    pub const QUICK: [Self; 4] = [Self::Fmt, Self::Tidy, Self::Clippy, Self::Unit];

    /// Returns the name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fmt => "fmt",
            Self::Tidy => "tidy",
            Self::Clippy => "clippy",
            Self::Unit => "unit",
            Self::Test => "test",
            Self::Release => "release",
            Self::Linkage => "linkage",
            Self::Interop => "interop",
            Self::Python => "python",
            Self::Rig => "rig",
        }
    }

    /// Returns the step of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|step| step.name() == name)
    }

    fn run(self, workspace: &Workspace) -> Result<(), Failure> {
        let cargo = |arguments: &[&str]| process::run(&mut workspace.cargo(arguments));
        match self {
            Self::Fmt => cargo(&["fmt", "--all", "--", "--check"]),
            Self::Tidy => tidy::run(workspace),
            Self::Clippy => cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
            Self::Unit => testing::run(workspace, &["--lib", "--bins"].map(str::to_owned)),
            Self::Test => testing::run_sized(workspace, &[], &SIZES),
            Self::Release => cargo(&["build", "--release", "--package", "kvplane-tools"]),
            Self::Linkage => {
                cargo(&["build", "--profile", linkage::PROFILE, "--package", "kvplane-tools"])?;
                linkage::check(workspace)
            }
            Self::Interop => peers::interop(workspace, &["--debug".to_string()]),
            Self::Python => python::test(workspace, &["--debug".to_string()]),
            Self::Rig => rig::short_suite_where_possible(workspace),
        }
    }
}

/// Runs `steps`, or all that are no part of another if it is empty, in the order of [`Step::ALL`].
pub fn run(workspace: &Workspace, steps: &[Step]) -> Result<(), Failure> {
    setup::run(&[Group::Build])?;
    let chosen: Vec<Step> = Step::ALL.into_iter().filter(|step| is_chosen(*step, steps)).collect();
    let mut times = Vec::new();
    let mut result = Ok(());
    for &step in &chosen {
        eprintln!("ci: {}", step.name());
        let started = Instant::now();
        result = step.run(workspace);
        times.push((step, started.elapsed()));
        if result.is_err() {
            break;
        }
    }
    eprint!("{}", summary(&chosen, &times, result.is_ok()));
    result
}

fn is_chosen(step: Step, steps: &[Step]) -> bool {
    if steps.is_empty() { step != Step::Unit } else { steps.contains(&step) }
}

fn summary(chosen: &[Step], times: &[(Step, Duration)], passed: bool) -> String {
    let mut text = String::from("ci: summary\n");
    for (index, step) in chosen.iter().enumerate() {
        let outcome = match times.get(index) {
            None => "not run".to_string(),
            Some((_, time)) => {
                let failed = !passed && index + 1 == times.len();
                format!("{:>6.1} s{}", time.as_secs_f64(), if failed { "  FAILED" } else { "" })
            }
        };
        text += &format!("  {:<8} {outcome}\n", step.name());
    }
    let total: Duration = times.iter().map(|(_, time)| *time).sum();
    text + &format!("  {:<8} {:>6.1} s\n", "total", total.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_the_failed_step_and_those_not_run() {
        let times = [(Step::Fmt, Duration::from_secs(1)), (Step::Tidy, Duration::from_millis(500))];
        let text = summary(&Step::ALL, &times, false);
        assert!(text.contains("fmt         1.0 s\n"), "{text}");
        assert!(text.contains("tidy        0.5 s  FAILED\n"), "{text}");
        assert!(text.contains("clippy   not run\n"), "{text}");
        assert!(text.contains("total       1.5 s\n"), "{text}");
    }
}

//! Runner of scenarios; a run that failed is repeated to get its last events as text.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::world::check::{Rule, Violation, broken};
use crate::world::{Scenario, Statistics, World};

/// Number of events that a failure shows.
const LINES: usize = 60;

/// Outcome of a run without a violation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Hash of the history: equal for equal seeds.
    pub hash: u64,
    /// Number of events.
    pub events: u64,
    /// Counts of what happened.
    pub statistics: Statistics,
}

/// Run in which a rule was broken.
#[derive(Debug)]
pub struct Failure {
    /// Seed of the run.
    pub seed: u64,
    /// Broken rule.
    pub violation: Violation,
    /// Last events, oldest first; empty unless requested.
    pub lines: Vec<String>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for line in &self.lines {
            writeln!(f, "{line}")?;
        }
        write!(f, "seed {} broke {:?}: {}", self.seed, self.violation.rule, self.violation.what)
    }
}

/// Test that runs seeds of a kind.
#[derive(Clone, Copy, Debug)]
pub struct SeedTest {
    /// Name of its file.
    pub file: &'static str,
    /// Environment variable that sets the number of seeds.
    pub variable: &'static str,
}

impl SeedTest {
    /// Returns the command that runs one seed again.
    fn command(self, seed: u64) -> String {
        let Self { file, variable } = self;
        format!("KVPLANE_SEED={seed} {variable}=1 cargo test -p kvplane-tests --test {file} -- --nocapture")
    }
}

/// Returns a number from the environment; `default` if it is not set.
///
/// # Panics
/// Panics if the value is not a number.
#[must_use]
pub fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")),
        Err(_) => default,
    }
}

/// Runs the scenario of each seed, passes successful outcomes to `each`, and shows the last events of failures, with
/// the command of `test` that repeats them, until `most` have failed; returns the sum of the statistics, and the seeds
/// that failed.
///
/// # Panics
/// Panics if a seed fails once and not again.
pub fn run_seeds(
    test: SeedTest,
    seeds: impl IntoIterator<Item = u64>,
    most: usize,
    scenario: impl Fn(u64) -> Scenario,
    mut each: impl FnMut(u64, &Outcome),
) -> (Statistics, Vec<u64>) {
    let (mut total, mut failed) = (Statistics::default(), Vec::new());
    for seed in seeds {
        match run(scenario(seed)) {
            Ok(outcome) => {
                total.add(&outcome.statistics);
                each(seed, &outcome);
            }
            Err(_) => {
                // The run is repeated for its last events: it is the same every time.
                let failure = run_with_lines(scenario(seed)).expect_err("a seed fails every time or never");
                println!("{failure}\nagain: {}", test.command(seed));
                failed.push(seed);
            }
        }
        if failed.len() >= most {
            break;
        }
    }
    (total, failed)
}

/// Runs a scenario.
///
/// # Errors
/// Returns the first broken rule; an assertion in the code under test counts as one.
pub fn run(scenario: Scenario) -> Result<Outcome, Failure> {
    start(scenario, 0)
}

/// Runs a scenario and keeps its last events as text, which takes longer: `KVPLANE_LINES` of them, or 60.
///
/// # Errors
/// Like [`run`], with lines.
pub fn run_with_lines(scenario: Scenario) -> Result<Outcome, Failure> {
    let kept = std::env::var("KVPLANE_LINES").ok().and_then(|text| text.parse().ok());
    start(scenario, kept.unwrap_or(LINES))
}

fn start(scenario: Scenario, kept_lines: usize) -> Result<Outcome, Failure> {
    let seed = scenario.seed;
    let tier = scenario.tier.as_ref().filter(|_| kept_lines > 0).map(|tier| tier.to_string());
    let mut world = World::new(scenario, kept_lines);
    // After a panic the World is used only for its trace.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| world.live())) {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        world.violate(broken(Rule::Panic, text.unwrap_or_else(|| "a panic without text".to_owned())));
    }
    match world.violation.take() {
        Some(violation) => {
            let lines = tier.into_iter().chain(world.trace.lines()).collect();
            Err(Failure { seed, violation, lines })
        }
        None => Ok(Outcome { hash: world.trace.hash(), events: world.trace.events, statistics: world.statistics }),
    }
}

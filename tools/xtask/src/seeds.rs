//! `cargo x seeds`, `cargo x kills`, `cargo x cluster`, `cargo x silence` and `cargo x fuzz`: as many seeds of the
//! simulation, kills and silences of real nodes, and broken frames for them, as there is time for.

use std::time::Instant;

use crate::process::{self, Failure};
use crate::workspace::Workspace;

/// Seeds that are run when no number is given.
const SEEDS: &str = "1000";
/// Kills likewise.
const KILLS: &str = "200";
/// Kills of nodes of a cluster: each of them.
const CLUSTER_KILLS: &str = "5";
/// Nodes that fall silent in each way, likewise.
const SILENCE_ROUNDS: &str = "10";
/// Seconds of broken frames, likewise.
const FUZZ_SECONDS: &str = "3600";
/// From so many seeds on, building the simulation once more, optimised, pays.
const MANY: u64 = 2000;

/// The 100,000 of a night: in which test, which of its functions, the variable that says how many, and how many.
const NIGHT: [(&str, &str, &str, u64); 10] = [
    ("world", "seeds", "KVPLANE_SEEDS", 45_000),
    ("tiers", "seeds", "KVPLANE_TIER_SEEDS", 25_000),
    ("tiers", "absences", "KVPLANE_ABSENCE_SEEDS", 4_000),
    ("tiers", "returns", "KVPLANE_TIER_SEEDS", 2_000),
    ("tiers", "lost_writes", "KVPLANE_TIER_SEEDS", 2_000),
    (
        "tiers",
        "a_control_plane_that_loses_its_state_while_nodes_restart_loses_no_object",
        "KVPLANE_ABSENCE_SEEDS",
        2_000,
    ),
    ("replicas", "seeds", "KVPLANE_SEEDS", 4_000),
    ("replicas", "copies_that_are_wished_for_later", "KVPLANE_SEEDS", 3_000),
    ("replicas", "hot_objects", "KVPLANE_SEEDS", 3_000),
    ("replicas", "losses", "KVPLANE_LOSS_SEEDS", 10_000),
];

/// What to run.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    tier: bool,
    count: String,
    from: String,
}

impl Request {
    fn of(arguments: &[String]) -> Result<Self, Failure> {
        let mut request = Self { tier: false, count: SEEDS.to_string(), from: "0".to_string() };
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--tier" => request.tier = true,
                "--from" => request.from = number(words.next().map_or("", String::as_str))?,
                count => request.count = number(count)?,
            }
        }
        Ok(request)
    }
}

fn number(word: &str) -> Result<String, Failure> {
    match word.parse::<u64>() {
        Ok(number) => Ok(number.to_string()),
        Err(_) => Err(Failure::new(format!(
            "{word:?} is no number of seeds, kills or seconds: [--tier] [COUNT] [--from SEED]"
        ))),
    }
}

/// Runs seeds of the simulated world; a seed that fails is shown with the command that repeats it.
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    if let Some((_, rest)) = arguments.split_first().filter(|(word, _)| *word == "--nightly") {
        return night(workspace, &Request::of(rest)?.from);
    }
    let request = Request::of(arguments)?;
    let (test, name) = if request.tier { ("tiers", "KVPLANE_TIER_SEEDS") } else { ("world", "KVPLANE_SEEDS") };
    let many = request.count.parse().is_ok_and(|count: u64| count >= MANY);
    let profile: &[&str] = if many { &["--profile", "nightly"] } else { &[] };
    let package = ["test", "--package", "kvplane-tests", "--test", test];
    let words = [&package[..], profile, &["--", "seeds", "--exact", "--nocapture"]].concat();
    let mut command = workspace.cargo(&words);
    process::run(command.env(name, &request.count).env("KVPLANE_SEED", &request.from))
}

/// Runs [`NIGHT`], each from this seed on, and goes on after seeds that fail; says how long each took.
fn night(workspace: &Workspace, from: &str) -> Result<(), Failure> {
    let mut failed = Vec::new();
    for (test, name, variable, count) in NIGHT {
        let words = ["test", "--profile", "nightly", "--package", "kvplane-tests", "--test", test, "--"];
        let mut command = workspace.cargo(&words);
        command.args([name, "--exact", "--nocapture"]).env("KVPLANE_SEED", from).env(variable, count.to_string());
        let begun = Instant::now();
        let ran = process::run(&mut command);
        let outcome = if ran.is_ok() { "clean" } else { "FAILED" };
        println!("{test}::{name}: {count} seeds from {from}, {outcome}, {} s", begun.elapsed().as_secs());
        failed.extend(ran.is_err().then(|| format!("{test}::{name}")));
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!("seeds failed in {}: each is shown above", failed.join(", "))))
}

/// Kills a node over an SSD again and again, and reads everything back each time. With `--power` the SSD loses its
/// power each time too; with `--full` it is given more than it has room for.
pub fn kills(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let has = |flag: &str| arguments.iter().any(|word| word == flag);
    let mut counts = arguments.iter().filter(|word| !["--ssd", "--power", "--full"].contains(&word.as_str()));
    let count = counts.next().map_or(Ok(KILLS.to_string()), |word| number(word))?;
    let (test, name) = match (has("--power"), has("--full")) {
        (true, false) => ("ssd_kills::power_failures", "KVPLANE_POWER_FAILURES"),
        (false, true) => ("ssd_kills::full_devices", "KVPLANE_FULL_KILLS"),
        (false, false) => ("ssd_kills::kills", "KVPLANE_KILLS"),
        (true, true) => return Err(Failure::new("--power and --full are two different runs: name one")),
    };
    let words = ["test", "--package", "kvplane-tools", "--test", "end_to_end", "--", test, "--nocapture"];
    process::run(workspace.cargo(&words).env(name, count))
}

/// Kills nodes of a cluster under load, one after the other.
pub fn cluster(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let count = arguments.first().map_or(Ok(CLUSTER_KILLS.to_string()), |word| number(word))?;
    let words = ["test", "--package", "kvplane-tools", "--test", "end_to_end", "--", "cluster::", "--nocapture"];
    process::run(workspace.cargo(&words).env("KVPLANE_CLUSTER_KILLS", count))
}

/// Stops, kills and cuts off nodes of a cluster, so often each, and shows the slowest calls meanwhile.
pub fn silence(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let count = arguments.first().map_or(Ok(SILENCE_ROUNDS.to_string()), |word| number(word))?;
    let words = ["test", "--package", "kvplane-tools", "--test", "end_to_end", "--", "silence::", "--nocapture"];
    // One after the other: they measure.
    let words = [&words[..], &["--test-threads=1"]].concat();
    process::run(workspace.cargo(&words).env("KVPLANE_SILENCE_ROUNDS", count))
}

/// Sends broken frames to real processes for so many seconds.
pub fn fuzz(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let seconds = arguments.first().map_or(Ok(FUZZ_SECONDS.to_string()), |word| number(word))?;
    let words = ["test", "--package", "kvplane-tools", "--test", "end_to_end", "--", "fuzz::", "--nocapture"];
    process::run(workspace.cargo(&words).env("KVPLANE_FUZZ_SECONDS", seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_night_is_a_hundred_thousand() {
        assert_eq!(NIGHT.iter().map(|(.., count)| count).sum::<u64>(), 100_000);
    }

    #[test]
    fn words_become_a_request() {
        let parsed = |line: &str| Request::of(&line.split_whitespace().map(str::to_string).collect::<Vec<_>>());
        let expected = Request { tier: true, count: "10000".to_string(), from: "5".to_string() };
        assert_eq!(parsed("--tier 10000 --from 5").ok(), Some(expected));
        assert!(parsed("--tiers").is_err() && parsed("--from").is_err());
    }
}

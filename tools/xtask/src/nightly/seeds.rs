//! `cargo x seeds`, `cargo x kills`, `cargo x cluster`, `cargo x silence`, `cargo x networks` and `cargo x
//! fuzz`: run seeds of the simulation, kills, silences and bad networks of real nodes, and broken frames, in the
//! requested number.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use crate::process::{self, Failure};
use crate::workspace::Workspace;

/// Default number of seeds.
const SEEDS: &str = "1000";
/// Default number of kills.
const KILLS: &str = "200";
/// Default number of kills of each node of a cluster.
const CLUSTER_KILLS: &str = "5";
/// Default number of rounds of each kind of silence.
const SILENCE_ROUNDS: &str = "10";
/// Default amount of objects whose repair is measured, in MiB.
const REPAIRED_MIB: &str = "64";
/// Default number of rounds of each impairment of a network.
const NETWORK_ROUNDS: &str = "5";
/// Default duration of broken frames, in seconds.
const FUZZ_SECONDS: &str = "3600";
/// Number of seeds from which an optimised build of the simulation saves time.
const MANY: u64 = 2000;

/// Default number of seeds of a nightly run.
const NIGHT: u64 = 100_000;

/// Kind of simulation: its package, its test and the function in it, the variable with the number of its seeds, and its
/// share of a thousand nightly seeds.
struct Kind {
    package: &'static str,
    test: &'static str,
    name: &'static str,
    variable: &'static str,
    share: u64,
}

impl Kind {
    const fn new(test: &'static str, name: &'static str, variable: &'static str, share: u64) -> Self {
        Self { package: "kvplane-tests", test, name, variable, share }
    }

    /// Returns a kind that a crate simulates for itself.
    const fn of_crate(package: &'static str, name: &'static str, variable: &'static str, share: u64) -> Self {
        Self { package, test: "suite", name, variable, share }
    }
}

/// All kinds of simulation.
const KINDS: [Kind; 40] = [
    Kind::new("world", "seeds", "KVPLANE_SEEDS", 60),
    Kind::new("world", "clocks", "KVPLANE_SEEDS", 20),
    Kind::new("world", "missed_epochs", "KVPLANE_SEEDS", 20),
    Kind::new("tiers", "seeds", "KVPLANE_TIER_SEEDS", 115),
    Kind::new("tiers", "absences", "KVPLANE_ABSENCE_SEEDS", 40),
    Kind::new("tiers", "returns", "KVPLANE_TIER_SEEDS", 20),
    Kind::new("tiers", "joins", "KVPLANE_TIER_SEEDS", 20),
    Kind::new("tiers", "departures", "KVPLANE_TIER_SEEDS", 20),
    Kind::new("tiers", "lost_writes", "KVPLANE_TIER_SEEDS", 20),
    Kind::new("tiers", "power_failures", "KVPLANE_TIER_SEEDS", 20),
    Kind::new("tiers", "copies_are_made_again_when_all_nodes_died", "KVPLANE_TIER_SEEDS", 20),
    Kind::new(
        "tiers",
        "a_control_plane_that_loses_its_state_while_nodes_restart_loses_no_object",
        "KVPLANE_ABSENCE_SEEDS",
        20,
    ),
    Kind::new("replicas", "seeds", "KVPLANE_SEEDS", 25),
    Kind::new("replicas", "copies_that_are_wished_for_later", "KVPLANE_SEEDS", 15),
    Kind::new("replicas", "hot_objects", "KVPLANE_HOT_SEEDS", 15),
    Kind::new("replicas", "losses", "KVPLANE_LOSS_SEEDS", 45),
    Kind::new("replicas", "several_replicas", "KVPLANE_LOSS_SEEDS", 20),
    Kind::new("replicas", "hot_objects_with_several_replicas", "KVPLANE_HOT_SEEDS", 10),
    Kind::new("replicas", "losses_of_several_replicas", "KVPLANE_LOSS_SEEDS", 20),
    Kind::new("replicas", "silence", "KVPLANE_LOSS_SEEDS", 20),
    Kind::new("replicas", "flipped_bits", "KVPLANE_LOSS_SEEDS", 20),
    Kind::new("replicas", "damaged_records", "KVPLANE_LOSS_SEEDS", 20),
    Kind::new("replicas", "recorded_replicas", "KVPLANE_LOSS_SEEDS", 20),
    Kind::new("replicas", "a_control_plane_that_loses_its_state_loses_no_object", "KVPLANE_LOSS_SEEDS", 20),
    Kind::new("memory", "restarts", "KVPLANE_MEMORY_SEEDS", 20),
    Kind::new("memory", "upgrades", "KVPLANE_MEMORY_SEEDS", 20),
    Kind::new("memory", "upgrades_and_losses", "KVPLANE_MEMORY_SEEDS", 20),
    Kind::new("memory", "upgrades_of_replicas", "KVPLANE_MEMORY_SEEDS", 20),
    Kind::new("memory", "far_memory", "KVPLANE_MEMORY_SEEDS", 20),
    Kind::new("tiers", "quotas", "KVPLANE_TIER_SEEDS", 20),
    Kind::new("devices", "seeds", "KVPLANE_DEVICE_POOL_SEEDS", 40),
    Kind::new("devices", "losses", "KVPLANE_DEVICE_POOL_SEEDS", 20),
    Kind::new("device_objects", "seeds", "KVPLANE_DEVICE_SEEDS", 10),
    Kind::new("device_gets", "seeds", "KVPLANE_DEVICE_SEEDS", 5),
    Kind::of_crate("kvplane-group", "simulation::survivors_agree_whatever_fails", "KVPLANE_GROUP_SEEDS", 20),
    Kind::of_crate(
        "kvplane-group",
        "simulation::survivors_agree_if_failed_members_stay_active",
        "KVPLANE_GROUP_SEEDS",
        20,
    ),
    Kind::of_crate("kvplane-collective", "simulation::seeds", "KVPLANE_COLLECTIVE_SEEDS", 20),
    Kind::of_crate("kvplane-collective", "simulation::sweep::faults_at_frames", "KVPLANE_COLLECTIVE_CASES", 70),
    Kind::of_crate(
        "kvplane-shared",
        "world::no_object_that_was_removed_or_replaced_comes_back",
        "KVPLANE_SHARED_SEEDS",
        10,
    ),
    Kind::of_crate("kvplane-shared", "world::the_owner_of_a_slot_finds_what_was_uploaded", "KVPLANE_SHARED_SEEDS", 20),
];

/// Parsed arguments.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    tier: bool,
    count: Option<String>,
    from: String,
}

impl Request {
    fn of(arguments: &[String]) -> Result<Self, Failure> {
        let mut request = Self { tier: false, count: None, from: "0".to_string() };
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--tier" => request.tier = true,
                "--from" => request.from = number(words.next().map_or("", String::as_str))?,
                count => request.count = Some(number(count)?),
            }
        }
        Ok(request)
    }
}

fn number(word: &str) -> Result<String, Failure> {
    match word.parse::<u64>() {
        Ok(number) => Ok(number.to_string()),
        Err(_) => Err(Failure::new(format!(
            "{word:?} is not a number of seeds, kills or seconds: [--tier] [COUNT] [--from SEED]"
        ))),
    }
}

/// Runs seeds of the World; a failing seed is shown with the command that repeats it.
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    if let Some((_, rest)) = arguments.split_first().filter(|(word, _)| *word == "--nightly") {
        let request = Request::of(rest)?;
        let count = request.count.and_then(|count| count.parse().ok()).unwrap_or(NIGHT);
        return night(workspace, count, &request.from);
    }
    let request = Request::of(arguments)?;
    let (test, name) = if request.tier { ("tiers", "KVPLANE_TIER_SEEDS") } else { ("world", "KVPLANE_SEEDS") };
    let count = request.count.unwrap_or_else(|| SEEDS.to_string());
    let many = count.parse().is_ok_and(|count: u64| count >= MANY);
    let profile: &[&str] = if many { &["--profile", "nightly"] } else { &[] };
    // The development profile shares the build of all tests, which has the features of the whole workspace.
    let package: &[&str] = if many { &["--package", "kvplane-tests"] } else { &["--workspace"] };
    let words = [&["test"], package, &["--test", test], profile, &["--", "seeds", "--exact", "--nocapture"]].concat();
    let mut command = workspace.cargo(&words);
    process::run(command.env(name, count).env("KVPLANE_SEED", &request.from))
}

/// Runs `count` seeds of all kinds together, each kind from the same first seed; continues after failing seeds, and
/// prints the time of each kind.
fn night(workspace: &Workspace, count: u64, from: &str) -> Result<(), Failure> {
    let mut failed = Vec::new();
    for Kind { package, test, name, variable, share } in KINDS {
        let words = ["test", "--profile", "nightly", "--package", package, "--test", test, "--"];
        let mut command = workspace.cargo(&words);
        let count = (count * share / 1000).max(1);
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

/// Returns the words of `cargo test` for these tests of real processes. The whole workspace is selected, so that
/// features unify as they do for all tests, and nothing is built twice.
const fn end_to_end(name: &str) -> [&str; 7] {
    ["test", "--workspace", "--test", "end_to_end", "--", name, "--nocapture"]
}

/// Kills a node with an SSD repeatedly, and reads all objects back each time. With `--power` the SSD loses power each
/// time too; with `--full` it gets more data than it has space for.
pub fn kills(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let has = |flag: &str| arguments.iter().any(|word| word == flag);
    let mut counts = arguments.iter().filter(|word| !["--ssd", "--power", "--full"].contains(&word.as_str()));
    let count = counts.next().map_or(Ok(KILLS.to_string()), |word| number(word))?;
    let (test, name) = match (has("--power"), has("--full")) {
        (true, false) => ("ssd::kills::power_failures", "KVPLANE_POWER_FAILURES"),
        (false, true) => ("ssd::kills::full_devices", "KVPLANE_FULL_KILLS"),
        (false, false) => ("ssd::kills::kills", "KVPLANE_KILLS"),
        (true, true) => return Err(Failure::new("--power and --full are two different runs: name one")),
    };
    let words = end_to_end(test);
    process::run(workspace.cargo(&words).env(name, count))
}

/// Kills nodes of a cluster under load, one after the other.
pub fn cluster(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let count = arguments.first().map_or(Ok(CLUSTER_KILLS.to_string()), |word| number(word))?;
    let words = end_to_end("cluster::");
    process::run(workspace.cargo(&words).env("KVPLANE_CLUSTER_KILLS", count))
}

/// Stops, kills and disconnects nodes of a cluster, in both directions and in one, the given number of times each, and
/// shows how long calls took before, during and after.
pub fn silence(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let count = arguments.first().map_or(Ok(SILENCE_ROUNDS.to_string()), |word| number(word))?;
    let words = end_to_end("silence::");
    // Tests run one after the other because they measure.
    let words = [&words[..], &["outages::", "--test-threads=1"]].concat();
    process::run(workspace.cargo(&words).env("KVPLANE_SILENCE_ROUNDS", count))
}

/// Measures repairs of this many MiB of objects: after the loss of a node, with two and three replicas, and of damaged
/// records.
pub fn repairs(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let mib = arguments.first().map_or(Ok(REPAIRED_MIB.to_string()), |word| number(word))?;
    // Tests run one after the other because they measure.
    let words = [&end_to_end("damage::rates::")[..], &["--test-threads=1"]].concat();
    process::run(workspace.cargo(&words).env("KVPLANE_REPAIR_MIB", mib))
}

/// Runs a cluster on an emulated network that is impaired in each way the given number of times.
pub fn networks(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let count = arguments.first().map_or(Ok(NETWORK_ROUNDS.to_string()), |word| number(word))?;
    let words = end_to_end("networks::");
    process::run(workspace.cargo(&words).env("KVPLANE_NETWORK_ROUNDS", count))
}

/// Upgrades a node under load, the given number of times in a row, then three nodes with replicas of each other in
/// turns, and then with `--kills` kills in the middle; a node whose memory is in a directory, and one whose memory ends
/// with its processes. With `--revision`, every other upgrade is to the program of that revision of the sources, and
/// back. `--dev` takes development builds of both.
pub fn upgrades(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let counts = UpgradeCounts::of(arguments)?;
    let profile: &[&str] = if counts.is_dev { &[] } else { &["--release"] };
    // One after the other because they measure.
    let test = ["-p", "kvplane-tools", "--test", "end_to_end", "--", "--nocapture", "--test-threads=1"];
    let words = [&["test"], profile, &test[..]].concat();
    let under_load = [&words[..], &["upgrades_under_load"]].concat();
    let mut command = workspace.cargo(&under_load);
    command.env("KVPLANE_UPGRADES", counts.upgrades).env("KVPLANE_UPGRADE_OBJECTS", counts.objects);
    if let Some(revision) = &counts.revision {
        command.env("KVPLANE_OTHER_PROGRAM", program_of(workspace, revision, profile)?);
    }
    process::run(&mut command)?;
    let killed = [&words[..], &["a_kill_at_any_moment_of_an_upgrade"]].concat();
    process::run(workspace.cargo(&killed).env("KVPLANE_UPGRADE_KILLS", counts.kills))
}

/// Builds the program of a revision of the sources, in a work tree of its own; returns its path.
fn program_of(workspace: &Workspace, revision: &str, profile: &[&str]) -> Result<PathBuf, Failure> {
    let tree = workspace.target().join("revision");
    let mut git = Command::new("git");
    match tree.exists() {
        true => git.arg("-C").arg(&tree).args(["checkout", "--detach", revision]),
        // Git remembers a work tree whose directory was removed.
        false => {
            git.arg("-C").arg(&workspace.root).args(["worktree", "add", "--force", "--detach"]).arg(&tree).arg(revision)
        }
    };
    process::run(&mut git)?;
    let target = tree.join("target");
    let words = [&["build"], profile, &["-p", "kvplane-tools", "--bin", "kvplane", "--target-dir"]].concat();
    process::run(workspace.cargo(&words).arg(&target).current_dir(&tree))?;
    Ok(target.join(if profile.is_empty() { "debug" } else { "release" }).join("kvplane"))
}

/// Arguments of `cargo x upgrades`.
#[derive(Debug, PartialEq, Eq)]
struct UpgradeCounts {
    upgrades: String,
    kills: String,
    objects: String,
    revision: Option<String>,
    /// True for development builds.
    is_dev: bool,
}

impl UpgradeCounts {
    fn of(arguments: &[String]) -> Result<Self, Failure> {
        let [upgrades, kills, objects] = ["50", "50", "10000"].map(str::to_string);
        let mut counts = Self { upgrades, kills, objects, revision: None, is_dev: false };
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| Failure::new(format!("{word} takes a value")));
            match word.as_str() {
                "--kills" => counts.kills = number(value()?)?,
                "--objects" => counts.objects = number(value()?)?,
                "--revision" => counts.revision = Some(value()?.clone()),
                "--dev" => counts.is_dev = true,
                _ => counts.upgrades = number(word)?,
            }
        }
        Ok(counts)
    }
}

/// Sends broken frames to real processes for the given number of seconds.
pub fn fuzz(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let seconds = arguments.first().map_or(Ok(FUZZ_SECONDS.to_string()), |word| number(word))?;
    let words = end_to_end("fuzz::");
    process::run(workspace.cargo(&words).env("KVPLANE_FUZZ_SECONDS", seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_a_night_are_those_of_a_thousand() {
        assert_eq!(KINDS.iter().map(|kind| kind.share).sum::<u64>(), 1000);
    }

    #[test]
    fn every_test_that_takes_a_number_of_seeds_is_a_kind() {
        let tests = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/tests");
        for test in ["world", "tiers", "replicas", "memory", "devices", "device_objects", "device_gets"] {
            let file = std::fs::read_to_string(format!("{tests}/{test}.rs"));
            let file = file.or_else(|_| std::fs::read_to_string(format!("{tests}/{test}/main.rs")));
            let source = file.expect("a test of the simulation");
            for function in source.split("#[test]").skip(1) {
                let name = function.split_once("fn ").and_then(|(_, rest)| rest.split_once('('));
                let name = name.expect("a test has a name").0;
                let body = function.split_once("\n}").map_or(function, |(body, _)| body);
                let counts = ["_SEEDS\"", "run_all(", "run_some("].iter().any(|sign| body.contains(sign));
                let known = KINDS.iter().any(|kind| (kind.test, kind.name) == (test, name));
                assert_eq!(counts, known, "{test}::{name}");
            }
        }
    }

    #[test]
    fn words_become_counts_of_upgrades() {
        let parsed = |line: &str| UpgradeCounts::of(&line.split_whitespace().map(str::to_string).collect::<Vec<_>>());
        let counts = |upgrades: &str, kills: &str, objects: &str| UpgradeCounts {
            upgrades: upgrades.to_string(),
            kills: kills.to_string(),
            objects: objects.to_string(),
            revision: None,
            is_dev: false,
        };
        assert_eq!(parsed("").ok(), Some(counts("50", "50", "10000")));
        assert_eq!(parsed("7 --kills 3 --objects 5").ok(), Some(counts("7", "3", "5")));
        assert_eq!(parsed("--revision v0.1.0").ok().and_then(|counts| counts.revision).as_deref(), Some("v0.1.0"));
        assert!(parsed("7 --dev").is_ok_and(|counts| counts.is_dev));
        assert!(parsed("--kills").is_err() && parsed("many").is_err());
    }

    #[test]
    fn words_become_a_request() {
        let parsed = |line: &str| Request::of(&line.split_whitespace().map(str::to_string).collect::<Vec<_>>());
        let expected = Request { tier: true, count: Some("10000".to_string()), from: "5".to_string() };
        assert_eq!(parsed("--tier 10000 --from 5").ok(), Some(expected));
        assert!(parsed("--tiers").is_err() && parsed("--from").is_err());
    }
}

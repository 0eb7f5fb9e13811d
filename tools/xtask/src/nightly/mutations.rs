//! `cargo x mutations`: plants bugs in the product, one at a time, each of which the World must find.
//!
//! A mutation replaces a piece of a source file, in a copy of the tree under `target/mutations`; the tree itself stays
//! as it is. The copy is built, and its simulation runs up to [`SEEDS`] seeds. A mutation that no seed notices is a gap
//! in the checkers of the World, and fails the command. A build and up to two thousand seeds for each mutation take
//! hours: a nightly command. A test of every run ensures that every mutation still fits its file.

mod list;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::{self, Failure};
use crate::workspace::Workspace;
use list::{Host, MUTATIONS, Mutation};

/// Seeds within which a mutation must be found.
const SEEDS: &str = "2000";

/// Outcome of a mutation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    /// A seed broke a rule.
    Found,
    /// All seeds were clean.
    Survived,
    /// The mutated tree did not compile, so the mutation tests nothing.
    Broken,
}

impl Host {
    /// Returns the package, its test, the function in it, and the variable with the number of its seeds.
    const fn test(self) -> (&'static str, &'static str, &'static str, &'static str) {
        let (test, function, variable) = match self {
            Self::World => ("world", "seeds", "KVPLANE_SEEDS"),
            Self::MissedEpochs => ("world", "missed_epochs", "KVPLANE_SEEDS"),
            Self::Tiers => ("tiers", "seeds", "KVPLANE_TIER_SEEDS"),
            Self::LostWrites => ("tiers", "lost_writes", "KVPLANE_TIER_SEEDS"),
            Self::PowerFailures => ("tiers", "power_failures", "KVPLANE_TIER_SEEDS"),
            Self::Replicas => ("replicas", "seeds", "KVPLANE_SEEDS"),
            Self::HotObjects => ("replicas", "hot_objects", "KVPLANE_HOT_SEEDS"),
            Self::FlippedBits => ("replicas", "flipped_bits", "KVPLANE_LOSS_SEEDS"),
            Self::DamagedRecords => ("replicas", "damaged_records", "KVPLANE_LOSS_SEEDS"),
            Self::RecordedReplicas => ("replicas", "recorded_replicas", "KVPLANE_LOSS_SEEDS"),
            Self::Silence => ("replicas", "silence", "KVPLANE_LOSS_SEEDS"),
            Self::KeptMemory => ("memory", "restarts", "KVPLANE_MEMORY_SEEDS"),
            Self::Upgrades => ("memory", "upgrades", "KVPLANE_MEMORY_SEEDS"),
            Self::FarMemory => ("memory", "far_memory", "KVPLANE_MEMORY_SEEDS"),
            Self::Quotas => ("tiers", "quotas", "KVPLANE_TIER_SEEDS"),
            Self::Departures => ("tiers", "departures", "KVPLANE_TIER_SEEDS"),
            Self::CopiesAgain => ("tiers", "copies_are_made_again_when_all_nodes_died", "KVPLANE_TIER_SEEDS"),
            Self::Clocks => ("world", "clocks", "KVPLANE_SEEDS"),
            Self::LostStateWithDisks => (
                "tiers",
                "a_control_plane_that_loses_its_state_while_nodes_restart_loses_no_object",
                "KVPLANE_ABSENCE_SEEDS",
            ),
            Self::LostState => {
                ("replicas", "a_control_plane_that_loses_its_state_loses_no_object", "KVPLANE_LOSS_SEEDS")
            }
            Self::Collectives => {
                return ("kvplane-collective", "suite", "simulation::seeds", "KVPLANE_COLLECTIVE_SEEDS");
            }
            Self::SharedTier => {
                let function = "world::the_owner_of_a_slot_finds_what_was_uploaded";
                return ("kvplane-shared", "suite", function, "KVPLANE_SHARED_SEEDS");
            }
        };
        ("kvplane-tests", test, function, variable)
    }
}

impl Mutation {
    /// Returns the file's text with the bug in it.
    fn apply(&self, text: &str) -> Result<String, Failure> {
        let places = text.matches(self.find).count();
        if places != 1 {
            let Self { name, file, find, .. } = self;
            let what =
                format!("mutation {name}: {file} contains {find:?} {places} times, not once; update the mutation");
            return Err(Failure::new(what));
        }
        Ok(text.replacen(self.find, self.replace, 1))
    }
}

/// Runs all mutations, or those whose names contain one of `arguments`; prints a table.
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let chosen = |mutation: &&Mutation| {
        arguments.is_empty() || arguments.iter().any(|word| mutation.name.contains(word.as_str()))
    };
    let chosen: Vec<&Mutation> = MUTATIONS.iter().filter(chosen).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = MUTATIONS.iter().map(|mutation| mutation.name).collect();
        return Err(Failure::new(format!("no mutation has such a name; known: {}", names.join(", "))));
    }
    let tree = workspace.target().join("mutations");
    let copy = tree.join("tree");
    copy_sources(&workspace.root, &copy)?;
    let mut survivors = Vec::new();
    for mutation in chosen {
        let begun = Instant::now();
        let outcome = try_one(workspace, mutation, &copy, &tree.join("target"))?;
        print_outcome(mutation, outcome, begun.elapsed());
        survivors.extend((outcome != Outcome::Found).then_some(mutation.name));
    }
    if survivors.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!("no checker of the World noticed: {}", survivors.join(", "))))
}

fn print_outcome(mutation: &Mutation, outcome: Outcome, time: Duration) {
    let word = match outcome {
        Outcome::Found => "found",
        Outcome::Survived => "SURVIVED",
        Outcome::Broken => "DOES NOT COMPILE",
    };
    let (_, test, ..) = mutation.host.test();
    println!("{:<44} {:<9} {word}, {} s: {}", mutation.name, test, time.as_secs(), mutation.invariant);
}

fn try_one(workspace: &Workspace, mutation: &Mutation, copy: &Path, target: &Path) -> Result<Outcome, Failure> {
    // The tree itself may have changed since the copy was made.
    let original = read(&copy.join(mutation.file))?;
    let mutated = mutation.apply(&original)?;
    write(&copy.join(mutation.file), &mutated)?;
    let (package, test, function, variable) = mutation.host.test();
    let cargo = |last: &[&str]| {
        let words = ["test", "--profile", "nightly", "--package", package, "--test", test];
        let mut command = workspace.cargo(&[&words[..], last].concat());
        command.current_dir(copy).env("CARGO_TARGET_DIR", target).env(variable, SEEDS).env("KVPLANE_SEED", "0");
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let succeeds = |mut command: Command| {
        command.status().map(|status| status.success()).map_err(|error| process::not_started(&command, &error))
    };
    let outcome = if !succeeds(cargo(&["--no-run"]))? {
        Outcome::Broken
    } else if succeeds(cargo(&["--", function, "--exact"]))? {
        Outcome::Survived
    } else {
        Outcome::Found
    };
    write(&copy.join(mutation.file), &original)?;
    Ok(outcome)
}

/// Copies the files that git tracks, as they are in the work tree. Unchanged files keep their modification time, so
/// that they are not built again.
fn copy_sources(root: &Path, copy: &Path) -> Result<(), Failure> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output();
    let listed = listed.map_err(|error| Failure::new(format!("git ls-files: {error}")))?;
    for name in String::from_utf8_lossy(&listed.stdout).split_terminator('\0') {
        let (from, to) = (root.join(name), copy.join(name));
        // The file is tracked, but was removed since.
        let Ok(bytes) = fs::read(&from) else { continue };
        if fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        let parent = to.parent().map_or_else(|| copy.to_path_buf(), PathBuf::from);
        fs::create_dir_all(&parent).map_err(|error| Failure::new(format!("{}: {error}", parent.display())))?;
        fs::write(&to, bytes).map_err(|error| Failure::new(format!("{}: {error}", to.display())))?;
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutation_fits_its_file() {
        let workspace = Workspace::find().expect("this workspace");
        for mutation in MUTATIONS {
            let text = read(&workspace.root.join(mutation.file)).expect("the file of a mutation");
            let mutated = mutation.apply(&text).unwrap_or_else(|error| panic!("{error}"));
            assert_ne!(mutated, text, "{}", mutation.name);
        }
    }

    #[test]
    fn no_two_mutations_share_a_name() {
        let mut names: Vec<&str> = MUTATIONS.iter().map(|mutation| mutation.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), MUTATIONS.len());
    }
}

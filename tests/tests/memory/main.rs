//! Seeds of the World in which memory outlives processes: restarts in order, kills in the middle of an image, images
//! that are damaged or of others, and upgrades of running nodes; and in which DRAM is little and far memory is behind
//! it. `KVPLANE_MEMORY_SEEDS`, or `KVPLANE_SEEDS`, sets their
//! number (20), `KVPLANE_SEED` the first (0).

use kvplane_tests::world::{
    FarCounts, MemoryCounts, Mischief, Rule, Scenario, SeedTest, Statistics, number, run, run_seeds,
};

/// Runs seeds, all of which must pass. Returns what happened in them, and their number.
fn run_all(scenario: fn(u64) -> Scenario) -> (Statistics, u64) {
    let (first, count) = (number("KVPLANE_SEED", 0), number("KVPLANE_MEMORY_SEEDS", number("KVPLANE_SEEDS", 20)));
    let test = SeedTest { file: "memory", variable: "KVPLANE_MEMORY_SEEDS" };
    let (total, failed) = run_seeds(test, first..first + count, 5, scenario, |_, _| {});
    println!("{total}");
    assert!(failed.is_empty(), "seeds that failed: {failed:?}; each is shown above");
    (total, count)
}

/// Nodes restart in order, or are killed: objects are served again from complete images, and from nothing else.
#[test]
fn restarts() {
    let (total, count) = run_all(Scenario::of_kept_memory);
    let MemoryCounts { images, cut_off, discarded, spoilt, taken_back, .. } = total.memory;
    let happened = [images, cut_off, discarded, spoilt, taken_back].iter().all(|count| *count > 0);
    assert!(count < 20 || happened, "not everything was put to the test: {total}");
}

/// Running nodes hand over to successors, and either process, or both, are killed at any step.
#[test]
fn upgrades() {
    let (total, count) = run_all(Scenario::of_upgrades);
    let MemoryCounts { taken_back, upgrades, resumed, refused, killed, .. } = total.memory;
    let happened = [taken_back, upgrades, resumed, refused, killed].iter().all(|count| *count > 0);
    assert!(count < 20 || happened, "not everything was put to the test: {total}");
}

/// Nodes hand over, or die: what was acknowledged with two replicas is never missing, also where a node dies as soon as
/// another one, or itself, has handed over.
#[test]
fn upgrades_and_losses() {
    let (total, count) = run_all(Scenario::of_upgrades_and_losses);
    assert!(
        count < 20 || total.memory.upgrades > 0 && total.doubled > 0,
        "not everything was put to the test: {total}"
    );
}

/// Nodes hand over while objects with replicas are replaced and removed.
#[test]
fn upgrades_of_replicas() {
    let (total, count) = run_all(Scenario::of_upgrades_of_replicas);
    assert!(count < 20 || total.memory.upgrades > 0 && total.copies > 0, "not everything was put to the test: {total}");
}

/// Objects that DRAM has no room for move to far memory, and back when they are read; nodes die, disks fail, and bits
/// flip in both.
#[test]
fn far_memory() {
    let (total, count) = run_all(Scenario::of_far_memory);
    let FarCounts { demotions, promotions, hits, evictions, flips } = total.far;
    let happened = [demotions, promotions, hits, evictions, flips, total.doubled].iter().all(|count| *count > 0);
    assert!(count < 20 || happened, "not everything was put to the test: {total}");
}

/// Seeds that found a bug once: a node was taken for gone, because its former process's last message came late; a
/// running process did not go on to stop after its successor had been killed, and followed the control plane no more;
/// as many withheld extents as there may be reservations; and a process that was killed while it wrote its image, whose
/// pool a peer of it and the next process wrote to.
#[test]
fn seeds_that_failed_once() {
    for seed in [195, 749] {
        run(Scenario::of_kept_memory(seed)).unwrap_or_else(|failure| panic!("{failure}"));
    }
    for seed in [132, 991] {
        run(Scenario::of_upgrades(seed)).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 100..102 {
        let run = |of: fn(u64) -> Scenario| run(of(seed)).expect("a good seed");
        assert_eq!(run(Scenario::of_upgrades), run(Scenario::of_upgrades));
        assert_eq!(run(Scenario::of_far_memory), run(Scenario::of_far_memory));
    }
}

/// Runs seeds with a host's bug until a rule breaks; it must be one of `rules`.
fn caught(mischief: Mischief, rules: &[Rule], scenario: fn(u64, Mischief) -> Scenario) {
    for seed in 0..200 {
        if let Err(failure) = run(scenario(seed, mischief)) {
            let rule = failure.violation.rule;
            println!("{mischief:?}: by seed {seed}, {failure}");
            assert!(rules.contains(&rule), "{mischief:?} was found by {rule:?} instead of {rules:?}: {failure}");
            return;
        }
    }
    panic!("{mischief:?} was not found");
}

#[test]
fn memory_that_is_not_marked_as_in_use() {
    caught(Mischief::KeepImages, &[Rule::Kept], Scenario::of_kept_memory_with);
}

#[test]
fn an_object_that_moves_without_its_last_byte() {
    caught(Mischief::ShortCopies, &[Rule::Bytes], Scenario::of_far_memory_with);
}

#[test]
fn a_successor_that_serves_before_the_last_word() {
    caught(Mischief::ServeEarly, &[Rule::Kept], Scenario::of_upgrades_with);
}

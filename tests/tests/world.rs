//! Seeds of the World. `KVPLANE_SEEDS` sets their number (20), `KVPLANE_SEED` the first (0).

use kvplane_tests::world::{Scenario, SeedTest, number, run, run_seeds, run_with_lines};

const TEST: SeedTest = SeedTest { file: "world", variable: "KVPLANE_SEEDS" };

#[test]
fn seeds() {
    let (first, count) = (number("KVPLANE_SEED", 0), number("KVPLANE_SEEDS", 20));
    let mut events = 0;
    let (total, failed) = run_seeds(TEST, first..first + count, 10, Scenario::of_seed, |seed, outcome| {
        events += outcome.events;
        if (seed - first + 1).is_multiple_of(50) {
            println!("{} of {count} seeds, {events} events", seed - first + 1);
        }
    });
    println!("{events} events; {total}");
    assert!(failed.is_empty(), "seeds that failed: {failed:?}; each is shown above with the command that repeats it");
}

/// Clocks that differ and jump lock out no client.
#[test]
fn clocks() {
    let (first, count) = (number("KVPLANE_SEED", 0), number("KVPLANE_SEEDS", 20));
    let (total, failed) = run_seeds(TEST, first..first + count, 10, Scenario::of_clocks, |_, _| {});
    println!("{total}");
    assert!(failed.is_empty(), "seeds that failed: {failed:?}; each is shown above");
    assert!(count < 10 || total.hits > 0, "nothing was read: {total}");
}

/// Shards miss maps, while slots migrate away and back.
#[test]
fn missed_epochs() {
    let (first, count) = (number("KVPLANE_SEED", 0), number("KVPLANE_SEEDS", 20));
    let (total, failed) = run_seeds(TEST, first..first + count, 10, Scenario::of_missed_epochs, |_, _| {});
    println!("{total}");
    assert!(failed.is_empty(), "seeds that failed: {failed:?}; each is shown above");
    assert!(count < 10 || total.epochs > count, "no slot moved: {total}");
    assert!(count < 20 || total.missed > 0, "nobody missed anything that matters: {total}");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    let run = |seed| run(Scenario::of_seed(seed)).expect("a good seed");
    for seed in 100..104 {
        assert_eq!(run(seed), run(seed));
    }
    assert_ne!(run(100).hash, run(101).hash);
}

#[test]
fn keeping_lines_changes_nothing() {
    let scenario = || Scenario::of_seed(100);
    assert_eq!(run(scenario()).expect("a good seed"), run_with_lines(scenario()).expect("a good seed"));
}

//! Seeds of the simulated world. `KVPLANE_SEEDS` says how many (20), `KVPLANE_SEED` the first (0).

use kvplane_tests::world::{Scenario, Statistics, run, run_with_lines};

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")),
        Err(_) => default,
    }
}

#[test]
fn seeds() {
    let (first, count) = (number("KVPLANE_SEED", 0), number("KVPLANE_SEEDS", 20));
    let (mut events, mut total, mut failed) = (0, Statistics::default(), Vec::new());
    for seed in first..first + count {
        match run(Scenario::of_seed(seed)) {
            Ok(outcome) => {
                events += outcome.events;
                total.add(&outcome.statistics);
            }
            Err(_) => {
                // Repeated for its last events: a run is the same every time.
                let failure = run_with_lines(Scenario::of_seed(seed)).expect_err("a seed fails every time or never");
                println!("{failure}");
                failed.push(seed);
            }
        }
        if (seed - first + 1).is_multiple_of(50) {
            println!("{} of {count} seeds, {events} events", seed - first + 1);
        }
        if failed.len() >= 10 {
            break;
        }
    }
    println!("{events} events; {total}");
    assert!(failed.is_empty(), "seeds that failed: {failed:?}; each is shown above with the command that repeats it");
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

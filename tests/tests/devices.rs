//! Seeds of the World whose shards have device pools, and bugs that its checkers must find.
//! `KVPLANE_DEVICE_POOL_SEEDS` sets their number (12; 6 with losses), `KVPLANE_SEED` the first (0).

use kvplane_tests::world::{Mischief, Rule, Scenario, SeedTest, Statistics, number, run, run_seeds};

/// Runs as many seeds of a kind as requested; returns their number and statistics.
fn run_some(default: u64, of: fn(u64) -> Scenario) -> (u64, Statistics) {
    let count = number("KVPLANE_DEVICE_POOL_SEEDS", number("KVPLANE_SEEDS", default));
    let first = number("KVPLANE_SEED", 0);
    let test = SeedTest { file: "devices", variable: "KVPLANE_DEVICE_POOL_SEEDS" };
    let (total, failed) = run_seeds(test, first..first + count, 5, of, |_, _| {});
    println!("{count} seeds: {total}");
    assert!(failed.is_empty(), "seeds that failed: {failed:?}; each is shown above with the command that repeats it");
    (count, total)
}

#[test]
fn seeds() {
    let (count, total) = run_some(12, Scenario::of_devices);
    let device = total.device;
    let moved = device.promotions > count && device.demotions > count && device.recalls > 0 && device.gets > count;
    assert!(count < 12 || moved && device.lost > 0 && device.damaged > 0, "nothing was put to the test: {total}");
}

/// One node dies, devices are lost and damage objects: no object that was acknowledged with two replicas is missing,
/// unless a device had one of them.
#[test]
fn losses() {
    let (count, total) = run_some(6, Scenario::of_device_losses);
    let device = total.device;
    assert!(count < 6 || device.promotions > 0 && total.doubled > 0, "nothing was put to the test: {total}");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    let run = || run(Scenario::of_devices(100)).expect("a good seed");
    assert_eq!(run(), run());
}

/// Seeds that failed once: a removed object that came back as the replica that its owner had written, and a get of an
/// object that was in memory again when its device failed.
#[test]
fn seeds_that_failed_once() {
    run(Scenario::of_devices(1810)).unwrap_or_else(|failure| panic!("{failure}"));
    run(Scenario::of_device_losses(191)).unwrap_or_else(|failure| panic!("{failure}"));
}

/// Runs seeds with the bug until a rule breaks; it must be one of `rules`.
fn caught(mischief: Mischief, rules: &[Rule]) {
    for seed in 0..100 {
        let Err(failure) = run(Scenario::of_devices_with(seed, mischief)) else { continue };
        println!("{mischief:?}: after {seed} seeds, {failure}");
        assert!(rules.contains(&failure.violation.rule), "{mischief:?} was found, but not by {rules:?}: {failure}");
        return;
    }
    panic!("{mischief:?} was not found");
}

#[test]
fn a_move_that_is_reported_before_its_bytes_are_there() {
    caught(Mischief::EarlyMoves, &[Rule::Bytes, Rule::Ledger]);
}

#[test]
fn a_move_whose_last_bytes_are_copied_after_its_source_was_released() {
    caught(Mischief::LateMoves, &[Rule::Bytes]);
}

#[test]
fn bytes_of_the_device_whose_checksum_is_not_compared() {
    caught(Mischief::TrustDevice, &[Rule::Bytes]);
}

#[test]
fn a_move_that_leaves_the_tail_behind() {
    caught(Mischief::LoseTails, &[Rule::Bytes]);
}

#[test]
fn an_object_of_the_device_that_is_released_before_it_is_staged() {
    caught(Mischief::ReleaseStagedEarly, &[Rule::Bytes, Rule::Ledger]);
}

#[test]
fn a_move_that_is_never_reported() {
    caught(Mischief::ForgetMoves, &[Rule::Leak, Rule::Liveness]);
}

//! Seeds of the World in which slots have several owners, and bugs that its checkers must find. `KVPLANE_SEEDS` sets
//! their number (20), `KVPLANE_SEED` the first (0).

use kvplane_tests::world::{Mischief, Rule, Scenario, SeedTest, Statistics, number, run, run_seeds};

/// Runs seeds, all of which must pass; the variable sets their number. Returns what happened in them, and their number.
fn run_all(variable: &'static str, default: u64, scenario: fn(u64) -> Scenario) -> (Statistics, u64) {
    let (first, count) = (number("KVPLANE_SEED", 0), number(variable, default));
    let test = SeedTest { file: "replicas", variable };
    let (total, failed) = run_seeds(test, first..first + count, 5, scenario, |_, _| {});
    let Statistics { doubled, flips, repaired, .. } = total;
    println!("{total}; {doubled} objects with several owners, {flips} flipped bits, {repaired} repairs");
    assert!(failed.is_empty(), "seeds that failed: {failed:?}; each is shown above");
    (total, count)
}

#[test]
fn seeds() {
    let (total, count) = run_all("KVPLANE_SEEDS", 20, Scenario::of_replicas);
    assert!(count < 10 || total.copies > 0, "nothing was copied: {total}");
}

/// Replicas that are requested after the puts.
#[test]
fn copies_that_are_wished_for_later() {
    let (total, count) = run_all("KVPLANE_SEEDS", 20, Scenario::of_wishes);
    assert!(count < 10 || total.copies > 0, "nothing was copied: {total}");
    assert!(count < 10 || total.hot > 0, "nothing was hot: {total}");
    caught(Mischief::KeepCopies, &[Rule::Removed], Scenario::of_wishes_with);
}

/// Objects with many readers are read from both owners, and no replica is older than the acknowledged versions. The
/// many readers make these seeds slow, so their number is one of its own.
#[test]
fn hot_objects() {
    let (total, count) = run_all("KVPLANE_HOT_SEEDS", 20, Scenario::of_hot);
    assert!(count < 10 || total.chosen > total.hits / 50, "few were read from second owners: {total}");
}

/// One node dies, and no object acknowledged with two replicas is missing, then or later. These seeds are several times
/// as slow, so their number is one of its own.
#[test]
fn losses() {
    let (total, count) = run_all("KVPLANE_LOSS_SEEDS", 40, Scenario::of_losses);
    assert!(count < 10 || total.doubled > 0, "nothing had two owners: {total}");
}

/// Slots with three to five owners, and objects with two replicas up to more than there are owners.
#[test]
fn several_replicas() {
    let (total, count) = run_all("KVPLANE_LOSS_SEEDS", 20, Scenario::of_many_replicas);
    assert!(count < 10 || total.copies > 0, "nothing was copied: {total}");
    caught(Mischief::KeepCopies, &[Rule::Removed], Scenario::of_many_replicas_with);
}

/// Nodes die one after another, and no object acknowledged with several replicas is missing.
#[test]
fn losses_of_several_replicas() {
    let (total, count) = run_all("KVPLANE_LOSS_SEEDS", 40, Scenario::of_losses_of_many);
    assert!(count < 10 || total.doubled > 0, "nothing had several owners: {total}");
}

/// Objects with many readers are read from all owners, and no replica is older than the acknowledged versions.
#[test]
fn hot_objects_with_several_replicas() {
    let (total, count) = run_all("KVPLANE_HOT_SEEDS", 10, Scenario::of_hot_with_many);
    assert!(count < 10 || total.chosen > total.hits / 50, "few were read from replica owners: {total}");
}

/// One node falls silent in any way, connections become half-open, and objects with two owners are found soon.
#[test]
fn silence() {
    let (total, count) = run_all("KVPLANE_LOSS_SEEDS", 20, Scenario::of_silence);
    assert!(count < 10 || total.doubled > 0, "nothing had two owners: {total}");
}

/// Bits of objects flip in memory: no client gets a wrong byte, nothing is missing that has good bytes elsewhere, and
/// where memory is scrubbed, all of it is good in the end.
#[test]
fn flipped_bits() {
    let (total, count) = run_all("KVPLANE_LOSS_SEEDS", 20, Scenario::of_flipped_bits);
    assert!(count < 10 || total.repaired > 0, "nothing was repaired: {total}");
}

/// Replica owners record their replicas on disks: none is left of what is removed or replaced, and no restart brings
/// one back.
#[test]
fn recorded_replicas() {
    let (total, count) = run_all("KVPLANE_LOSS_SEEDS", 20, Scenario::of_recorded_replicas);
    assert!(count < 10 || total.copies > 0 && total.evictions > 0, "nothing was put to the test: {total}");
    assert!(count < 10 || total.ended_exports > 0, "no export has ended: {total}");
}

/// Bytes of records on disks are damaged: no client gets a wrong byte, nothing is missing of which another node has a
/// good record, and where disks are scrubbed, all records are good in the end.
#[test]
fn damaged_records() {
    let (total, count) = run_all("KVPLANE_LOSS_SEEDS", 20, Scenario::of_damaged_records);
    assert!(count < 10 || total.repaired > 0, "nothing was repaired: {total}");
}

#[test]
fn repairs_that_ask_nobody() {
    caught(Mischief::ForgetRepairs, &[Rule::Lost, Rule::Liveness], Scenario::of_damaged_records_with);
}

#[test]
fn a_client_that_never_hedges() {
    caught(Mischief::NeverHedge, &[Rule::Deadline], Scenario::of_silence_with);
}

/// The control plane loses its whole state while members stay alive, and none of their objects is missing because of
/// that.
#[test]
fn a_control_plane_that_loses_its_state_loses_no_object() {
    let (total, count) = run_all("KVPLANE_LOSS_SEEDS", 40, Scenario::of_lost_state);
    assert!(count < 10 || total.doubled > 0 && total.adoptions > 0, "nothing was adopted: {total}");
}

/// Seeds that found a bug once.
#[test]
fn seeds_that_failed_once() {
    // Slots that migrated on before their objects were imported; a node that died while they migrated to it.
    for seed in [103, 120, 149, 165, 166, 172, 181, 543, 7663] {
        run(Scenario::of_losses(seed).undisturbed()).unwrap_or_else(|failure| panic!("{failure}"));
    }
    // Slots that lost their replica owner, five times; one that was back with its former replica owner when the wait
    // for that ended. A late push to a replica owner, by an outdated map: it had another owner by then.
    for seed in [115, 147, 177, 235, 261, 32, 2922] {
        run(Scenario::of_hot(seed).undisturbed()).unwrap_or_else(|failure| panic!("{failure}"));
    }
    for seed in [1022, 1090, 1157, 1159, 1165, 1168, 1178, 1196, 1226, 1076] {
        run(Scenario::of_replicas(seed).undisturbed()).unwrap_or_else(|failure| panic!("{failure}"));
    }
    // A replication that was requested while an older version was in flight.
    run(Scenario::of_wishes(69).undisturbed()).unwrap_or_else(|failure| panic!("{failure}"));
    // A get evicted from memory what the next get of the same request, bound to a tenant, was about to read.
    run(Scenario::of_damaged_records(39)).unwrap_or_else(|failure| panic!("{failure}"));
    // A fault of the World: the record of an object came back whose removal was not answered.
    run(Scenario::of_recorded_replicas(777)).unwrap_or_else(|failure| panic!("{failure}"));
    // Faults of the World: a scrub that was ordered from a shard at rest, whose host did not look after it, and records
    // of slots that went to another owner, which drops them; and what the last puts and gets evict, whose replicas take
    // a walk through the SSD.
    for seed in [25, 120, 318, 1042, 1078] {
        run(Scenario::of_damaged_records(seed)).unwrap_or_else(|failure| panic!("{failure}"));
    }
    // An object that a get promoted, and that lacked a replica for as long as it stayed in memory.
    run(Scenario::of_damaged_records(981)).unwrap_or_else(|failure| panic!("{failure}"));
    // A fault of the World: a new owner that missed the map by which it gained a slot imports nothing of it.
    run(Scenario::of_hot_with_many(1051)).unwrap_or_else(|failure| panic!("{failure}"));
    // A new version at one replica owner, while another still had the former one; imports that were complete, and not
    // reported.
    for seed in [1007, 1181, 1226] {
        run(Scenario::of_hot_with_many(seed)).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

/// Runs seeds with the bug until a rule breaks; it must be one of `rules`.
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
fn a_replica_that_is_reported_dropped_and_kept() {
    caught(Mischief::KeepCopies, &[Rule::Removed], Scenario::of_replicas_with);
}

#[test]
fn a_copy_of_other_bytes() {
    caught(Mischief::SpoilCopies, &[Rule::Commit], Scenario::of_replicas_with);
}

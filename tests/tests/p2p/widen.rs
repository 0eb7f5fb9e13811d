//! Tests of fetching more shards of an object of which some are held already.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvplane::{GetOptions, Object, P2pStore, Ranks, Region};

use super::{Bed, SHARD, SIZES, byte, check, filled, get, publish, regions, store, total};

fn some(first: u32, count: u32) -> GetOptions<'static> {
    let deadline = Some(Duration::from_secs(60));
    GetOptions { shards: Some(vec![(first, count)]), deadline, ..GetOptions::default() }
}

fn have(store: &P2pStore) -> Vec<u32> {
    let mut have: Vec<u32> = store.describe("o", None).expect("there").members.iter().map(|row| row.have).collect();
    have.sort_unstable();
    have
}

#[test]
fn a_partial_replica_fetches_more_shards_while_it_serves() {
    let bed = Bed::start(0, 0);
    let [origin, some_first, reader] = ["a", "b", "c"].map(|host| store(&bed, host));
    origin.register("o", &filled(31), &publish()).expect("published");
    let object: Object = reader.find("o", None).expect("there");
    let memory = regions();
    let fetch = |options: &GetOptions<'_>| some_first.get_replica(&object, &memory, options);
    assert_eq!(fetch(&some(0, 10)).expect("ten shards"), 10 * SHARD as u64);
    assert_eq!(have(&reader), [10, 65]);
    assert_eq!(fetch(&some(5, 10)).expect("of which five are there"), 5 * SHARD as u64);
    assert_eq!(have(&reader), [15, 65]);
    assert_eq!(fetch(&some(0, 15)).expect("nothing is missing"), 0);
    // With `resume`, bytes that are right in memory already are not fetched.
    memory[0].copy_in(20 * SHARD, &(0..SHARD).map(|at| byte(31, 0, (20 * SHARD + at) as u64)).collect::<Vec<u8>>());
    let rest = GetOptions { resume: true, deadline: Some(Duration::from_secs(60)), ..GetOptions::default() };
    assert_eq!(fetch(&rest).expect("the rest"), total() - 16 * SHARD as u64);
    check(&memory, 31);
    assert_eq!(have(&reader), [65, 65]);
    // The member is a source of all of it, and one call ends that.
    origin.unregister("o", None).expect("nobody reads");
    let copy = regions();
    get(&reader, &object, &copy).expect("from who has fetched it");
    check(&copy, 31);
    some_first.delete_replica("o", None).expect("nobody reads");
    assert!(some_first.delete_replica("o", None).is_err());
}

/// Held shards stay and are served when the others are not available; and no more are requested then.
#[test]
fn held_shards_stay_when_the_others_are_unavailable() {
    let bed = Bed::start(0, 0);
    let [origin, holder, reader] = ["a", "b", "c"].map(|host| store(&bed, host));
    origin.register("o", &filled(32), &publish()).expect("published");
    let object = reader.find("o", None).expect("there");
    let memory = regions();
    holder.get_replica(&object, &memory, &some(0, 10)).expect("ten shards");
    origin.unregister("o", None).expect("nobody reads");
    let soon = GetOptions { deadline: Some(Duration::from_secs(4)), ..GetOptions::default() };
    let error = holder.get_replica(&object, &memory, &soon).expect_err("nobody has the rest").to_string();
    assert!(error.contains("55 of 65 shards are missing: deadline exceeded; 55 shards are held"), "{error}");
    let found = reader.describe("o", None).expect("there");
    let rows: Vec<(u32, u32)> = found.members.iter().map(|row| (row.have, row.need)).collect();
    assert_eq!(rows, [(10, 0)]);
    reader.get_replica(&object, &regions(), &some(0, 10)).expect("from who has ten");
    // A new origin is not contacted until a call needs it.
    origin.register("o", &filled(32), &publish()).expect("published");
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(have(&reader), [10, 10, 65]);
    get(&holder, &object, &memory).expect("the rest");
    check(&memory, 32);
}

#[test]
fn invalid_widening_is_refused() {
    let bed = Bed::start(0, 0);
    let [origin, holder] = ["a", "b"].map(|host| store(&bed, host));
    let whole = filled(33);
    origin.register("o", &whole, &publish()).expect("published");
    let object = holder.find("o", None).expect("there");
    let memory = regions();
    let stop = AtomicBool::new(false);
    holder.get_replica(&object, &memory, &some(0, 1)).expect("one shard");
    let refused = |store: &P2pStore, memory: &[std::sync::Arc<Region>], options: &GetOptions<'_>, words: &str| {
        let error = store.get_replica(&object, memory, options).expect_err("it cannot be").to_string();
        assert!(error.contains("held here already") && error.contains(words), "{error}");
    };
    refused(&holder, &regions(), &some(1, 1), "in other memory");
    let ranks = GetOptions { ranks: Some(Ranks::new(0, 1)), ..GetOptions::default() };
    refused(&holder, &memory, &ranks, "pass no rank");
    refused(&origin, &whole, &some(1, 1), "was registered");
    // Shards are fetched one at a time, and no source is given up meanwhile.
    let each = |_| {
        if !stop.swap(true, Ordering::Relaxed) {
            let error = holder.get_replica(&object, &memory, &some(2, 1)).expect_err("one at a time").to_string();
            assert!(error.contains("being fetched"), "{error}");
            assert!(holder.delete_replica("o", None).is_err(), "it is being fetched");
        }
    };
    let options = GetOptions { each: Some(&each), ..some(0, 10) };
    holder.get_replica(&object, &memory, &options).expect("nine shards");
    assert!(stop.load(Ordering::Relaxed));
    memory[0].read_with(0, 10 * SHARD, &mut |offset, part| {
        assert!(part.iter().zip(offset..).all(|(&found, at)| found == byte(33, 0, at)));
    });
    assert!(SIZES[0] > 10 * SHARD);
}

//! Tests of a job's ranks that fetch from each other by a schedule.

use std::time::Duration;

use kvplane::{GetOptions, Object, P2pStore, Ranks};

use super::{Bed, check, filled, publish, regions, store, total};

/// Fetches as a rank, and verifies every byte.
fn get(store: &P2pStore, object: &Object, ranks: &Ranks, seed: u64) {
    let memory = regions();
    let options =
        GetOptions { ranks: Some(ranks.clone()), deadline: Some(Duration::from_secs(600)), ..GetOptions::default() };
    assert_eq!(store.get_replica(object, &memory, &options).expect("fetched"), total());
    check(&memory, seed);
}

fn sent(store: &P2pStore) -> f64 {
    store.engine().snapshot().expect("its figures").service.read_bytes as f64 / total() as f64
}

#[test]
fn no_rank_sends_more_than_the_object() {
    let bed = Bed::start(0, 0);
    let origin = store(&bed, "origin");
    origin.register("o", &filled(1), &publish()).expect("published");
    let stores: Vec<P2pStore> = (0..5).map(|rank| store(&bed, &format!("r{rank}"))).collect();
    std::thread::scope(|scope| {
        for (rank, store) in stores.iter().enumerate() {
            scope.spawn(move || {
                let object = store.find("o", None).expect("there");
                // The patience is long, so that no rank is given up, however slow the machine is.
                let ranks = Ranks { patience: Duration::from_secs(60), ..Ranks::new(rank as u32, 5) };
                get(store, &object, &ranks, 1);
            });
        }
    });
    let found = origin.describe("o", None).expect("there");
    assert!(found.members.iter().all(|member| member.need == 0 && member.have == 65), "{found:?}");
    // Progress boards are read, too: 16 bytes at a time.
    assert!((1.0..1.05).contains(&sent(&origin)), "the origin sent {:.3} x the object", sent(&origin));
    for (rank, store) in stores.iter().enumerate() {
        assert!(sent(store) < 1.2, "rank {rank} sent {:.3} x the object", sent(store));
        store.delete_replica("o", Some(1)).expect("nobody reads");
    }
}

#[test]
fn shards_of_a_missing_rank_come_from_others() {
    let bed = Bed::start(0, 0);
    let origin = store(&bed, "origin");
    origin.register("o", &filled(2), &publish()).expect("published");
    let stores: Vec<P2pStore> = (0..4).map(|rank| store(&bed, &format!("r{rank}"))).collect();
    let patient = |rank| Ranks { patience: Duration::from_millis(200), ..Ranks::new(rank, 4) };
    std::thread::scope(|scope| {
        // Rank 1 is above ranks 0 and 2 in the tree of the even shards.
        for rank in [0, 2, 3] {
            let store = &stores[rank as usize];
            scope.spawn(move || get(store, &store.find("o", None).expect("there"), &patient(rank), 2));
        }
    });
    // The rank is late, and fetches from ranks that are complete.
    get(&stores[1], &stores[1].find("o", None).expect("there"), &patient(1), 2);
}

#[test]
fn a_source_with_wrong_bytes_is_excluded_and_named() {
    let bed = Bed::start(0, 0);
    let [bad, good, reader] = ["a", "b", "c"].map(|host| store(&bed, host));
    let memory = filled(3);
    bad.register("o", &memory, &publish()).expect("published");
    good.register("o", &filled(3), &publish()).expect("the same object");
    // Each of the two is assigned a half; all shards but the last of the first buffer are wrong, in their first bytes.
    for shard in 0..48 {
        memory[0].copy_in(shard * super::SHARD, &[super::byte(3, 0, (shard * super::SHARD) as u64) ^ 1]);
    }
    get(&reader, &reader.find("o", None).expect("there"), &Ranks::new(0, 1), 3);
    let found = reader.describe("o", None).expect("there");
    let excluded: Vec<&str> =
        found.members.iter().filter(|row| !row.excluded.is_empty()).map(|row| &*row.segment).collect();
    assert_eq!(excluded, [bad.name()]);
}

#[test]
fn invalid_ranks_are_refused() {
    let bed = Bed::start(0, 0);
    let [origin, reader, other] = ["a", "b", "c"].map(|host| store(&bed, host));
    origin.register("o", &filled(4), &publish()).expect("published");
    let object = reader.find("o", None).expect("there");
    let fails = |store: &P2pStore, ranks: Ranks, shards, words: &str| {
        let options = GetOptions { ranks: Some(ranks), shards, ..GetOptions::default() };
        let error = store.get_replica(&object, &regions(), &options).expect_err("it makes no sense").to_string();
        assert!(error.contains(words), "{error}");
    };
    fails(&reader, Ranks::new(4, 4), None, "rank 4 of 4");
    fails(&reader, Ranks::new(0, 0), None, "rank 0 of 0");
    fails(&reader, Ranks::new(0, 4), Some(vec![(0, 1)]), "all of an object");
    get(&reader, &object, &Ranks::new(0, 1), 4);
    fails(&other, Ranks::new(0, 2), None, "job \"\" has 1 ranks");
    // Nothing is held after that, and another job is independent.
    get(&other, &object, &Ranks { job: "other".to_owned(), ..Ranks::new(0, 1) }, 4);
}

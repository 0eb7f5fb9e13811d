//! Tests of waiting for a missing source: up to the deadline of the call.

use std::time::{Duration, Instant};

use kvplane::{GetOptions, P2pStore, ReadOptions, Region, reshard};

use super::{Bed, SHARD, SIZES, check, filled, publish, region, regions, store};

/// Creates a member that has the first shard only: the object is known, but no member has most of it.
fn receiver_of_one_shard(bed: &Bed, origin: &P2pStore) -> P2pStore {
    let little = store(bed, "little");
    let object = origin.find("o", None).expect("there");
    let some = GetOptions { shards: Some(vec![(0, 1)]), ..GetOptions::default() };
    little.get_replica(&object, &regions(), &some).expect("one shard");
    little
}

/// An origin is away for longer than a call without a deadline waits, and comes back.
#[test]
fn a_missing_origin_is_waited_for_until_the_deadline() {
    let bed = Bed::start(0, 0);
    let origin = store(&bed, "origin");
    origin.register("o", &filled(21), &publish()).expect("published");
    let _little = receiver_of_one_shard(&bed, &origin);
    let readers = ["patient", "hasty"].map(|host| store(&bed, host));
    let object = readers[0].find("o", None).expect("there");
    drop(origin);
    let began = Instant::now();
    std::thread::scope(|scope| {
        let patient = scope.spawn(|| {
            let memory = regions();
            let options = GetOptions { deadline: Some(Duration::from_secs(120)), ..GetOptions::default() };
            readers[0].get_replica(&object, &memory, &options).expect("who comes back is waited for");
            check(&memory, 21);
        });
        let error =
            readers[1].get_replica(&object, &regions(), &GetOptions::default()).expect_err("nowhere").to_string();
        assert!(error.contains("64 shards are held by no peer; no deadline was given"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
        let short = GetOptions { deadline: Some(Duration::from_secs(5)), ..GetOptions::default() };
        let error = readers[1].get_replica(&object, &regions(), &short).expect_err("nowhere").to_string();
        assert!(error.contains("deadline exceeded; 64 shards are held by no peer"), "{error}");
        let again = store(&bed, "origin");
        again.register("o", &filled(21), &publish()).expect("published again");
        patient.join().expect("fetched");
    });
}

fn read(reader: &P2pStore, object: &kvplane::Object, deadline: Option<u64>) -> Result<std::sync::Arc<Region>, String> {
    let into = region(SIZES[0]);
    let all = reshard::Copy { source_offset: 0, target_offset: 0, bytes: SIZES[0] as u64 };
    let options = ReadOptions { deadline: deadline.map(Duration::from_secs), each: None };
    reader.read_ranges(object, 0, &[all], &into, &options).map_err(|error| error.to_string())?;
    Ok(into)
}

/// Ranges are read from a member that comes back, but not from one that has published other bytes under the same name
/// and version, which an empty catalog assigns again.
#[test]
fn ranges_wait_for_the_same_object() {
    let bed = Bed::start(0, 0);
    let reader = store(&bed, "reader");
    for same in [true, false] {
        let origin = store(&bed, "origin");
        origin.register("o", &filled(22), &publish()).expect("published");
        let object = reader.find("o", None).expect("there");
        drop(origin);
        let error = read(&reader, &object, None).expect_err("nobody has it");
        assert!(error.contains("no peer holds all of it any more; no deadline was given"), "{error}");
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| read(&reader, &object, Some(120)));
            // The wait is longer than an object without members stays in the catalog.
            let until = Instant::now() + Duration::from_secs(60);
            while reader.find("o", Some(object.version)).is_ok() {
                assert!(Instant::now() < until, "it is known still");
                std::thread::sleep(Duration::from_millis(100));
            }
            let origin = store(&bed, "origin");
            let seed = if same { 22 } else { 23 };
            assert_eq!(origin.register("o", &filled(seed), &publish()).expect("published"), object.version);
            let result = reading.join().expect("it ends");
            match same {
                true => {
                    let into = result.expect("read");
                    into.read_with(0, SHARD, &mut |offset, part| {
                        assert!(part.iter().zip(offset..).all(|(&found, at)| found == super::byte(22, 0, at)));
                    });
                }
                false => assert!(result.expect_err("another one").contains("look it up again")),
            }
        });
        // The next object gets the same version number.
        let until = Instant::now() + Duration::from_secs(60);
        while reader.find("o", Some(object.version)).is_ok() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

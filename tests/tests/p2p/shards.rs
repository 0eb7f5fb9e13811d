//! Test of the number of an object's shards.

use std::sync::Arc;

use kvplane::{PublishOptions, Region};

use super::{Bed, byte, check, get, region, store};

#[test]
fn the_default_shard_size_follows_the_object() {
    let bed = Bed::start(0, 0);
    let (origin, receiver) = (store(&bed, "a"), store(&bed, "b"));
    for (name, bytes, shards) in [("small", 100_000, 2), ("larger", 32 << 20, 256), ("odd", (20 << 20) + 1, 321)] {
        origin.register(name, &[region(bytes)], &PublishOptions::default()).expect("published");
        let object = receiver.find(name, None).expect("there");
        assert_eq!(object.layout.shards(), shards, "{name}: {} B a shard", object.layout.shard_bytes());
        assert_eq!(get(&receiver, &object, &[region(bytes)]).expect("fetched"), bytes as u64);
    }
}

/// Number of shards of a checkpoint of a terabyte, of 64 MiB each: in one buffer, because a store registers 1,024 of
/// them.
#[test]
fn an_object_has_more_shards_than_a_store_has_buffers() {
    const SHARDS: usize = 16_384;
    let bed = Bed::start(0, 0);
    let (origin, receiver) = (store(&bed, "a"), store(&bed, "b"));
    let memory = [region(SHARDS * 256)];
    memory[0].fill_with(0, memory[0].bytes(), &mut |offset, part| {
        part.iter_mut().zip(offset..).for_each(|(out, at)| *out = byte(11, 0, at));
    });
    let small = PublishOptions { shard_bytes: Some(256), ..PublishOptions::default() };
    origin.register("o", &memory, &small).expect("published");
    let object = receiver.find("o", None).expect("there");
    assert_eq!(object.layout.shards() as usize, SHARDS);
    let copy = [region(SHARDS * 256)];
    assert_eq!(get(&receiver, &object, &copy).expect("fetched"), SHARDS as u64 * 256);
    check(&copy, 11);
    let many: Vec<Arc<Region>> = vec![Arc::clone(&memory[0]); 1_025];
    let error = origin.register("many", &many, &small).expect_err("too many").to_string();
    assert!(
        error.contains("1025 buffers: a store registers at most 1024") && error.contains("in one piece"),
        "{error}"
    );
}

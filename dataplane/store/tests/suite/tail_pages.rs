//! Tests of the tails of objects that fill their units: they share pages, under any sequence of operations.

use std::collections::BTreeMap;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{ReservationId, Version};
use kvplane_store::{Extent, Reserve, ReserveError, Store, StoreConfig};
use proptest::prelude::*;

const UNIT: u64 = 4096;

fn store(pool_bytes: u64) -> Store {
    let config = StoreConfig { unit_bytes: UNIT, ..StoreConfig::for_pool(pool_bytes) };
    Store::new(config, Version(1)).expect("a valid configuration")
}

fn wanted(key: u64, bytes: u64, tail_bytes: u32) -> Reserve {
    Reserve { tail_bytes, has_tail: tail_bytes > 0, ..Reserve::plain(Digest(key.into()), bytes) }
}

fn put(store: &mut Store, key: u64, bytes: u64, tail_bytes: u32) -> Result<(), ReserveError> {
    let (reservation, _) = store.reserve_for(&wanted(key, bytes, tail_bytes))?;
    store.commit(reservation, key).expect("nobody else puts it");
    Ok(())
}

#[test]
fn objects_of_a_unit_take_a_unit_each_and_their_keys_a_part_of_a_page() {
    let mut store = store(1024 * UNIT);
    // A head of 24 bytes and a key of 60.
    (0..960).for_each(|key| put(&mut store, key, UNIT, 84).expect("there is room"));
    let stats = store.stats();
    assert_eq!((stats.objects, stats.evictions), (960, 0));
    // 42 slots of 96 bytes in a page.
    assert_eq!(stats.tail_page_bytes, 960u64.div_ceil(42) * UNIT);
    assert_eq!(stats.used_bytes, 960 * UNIT + stats.tail_page_bytes);
    store.check();
    (0..960u64).for_each(|key| assert!(store.remove(Digest(key.into()))));
    assert_eq!(store.stats().used_bytes, 0, "pages go with the last tail in them");
    store.check();
}

#[test]
fn a_tail_stays_with_its_object_where_there_is_room_or_it_is_long() {
    let mut store = store(64 * UNIT);
    put(&mut store, 1, 4000, 84).expect("there is room");
    put(&mut store, 2, UNIT, 4000).expect("there is room");
    assert_eq!(store.stats().tail_page_bytes, 0);
    assert_eq!(store.stats().used_bytes, 3 * UNIT);
    let view = store.peek(Digest(2)).expect("it is there");
    assert_eq!(view.tail_at, view.extent.offset + UNIT);
}

#[test]
fn pages_are_cleared_for_a_large_object_with_the_objects_of_their_tails() {
    let mut store = store(64 * UNIT);
    (0..1000).for_each(|key| put(&mut store, key, UNIT, 84).expect("old ones go"));
    assert!(store.stats().objects >= 61, "{:?}", store.stats());
    put(&mut store, 5000, 16 * UNIT, 84).expect("objects and pages in the way go");
    store.check();
    // Neither an object that is being read may be evicted, nor the page of its tail.
    let held: Vec<u64> = (0..1000).filter(|key| store.exists(Digest((*key).into()))).collect();
    let (pin, view) = store.get(Digest(held[0].into())).expect("it is there");
    for key in 6000..6100 {
        put(&mut store, key, 8 * UNIT, 84).expect("there is room");
        assert_eq!(store.held(pin), Some(view));
        store.check();
    }
}

#[derive(Clone, Debug)]
enum Op {
    Put { key: u64, units: u64, slack: u64, tail_bytes: u32 },
    Commit(usize),
    Abort(usize),
    Remove { key: u64 },
    Pin { key: u64 },
    Unpin(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..60u64, prop_oneof![5 => Just(1u64), 2 => 2..5u64, 1 => 5..12u64], prop_oneof![Just(0u64), 1..300u64],
              prop_oneof![24..120u32, 24..700u32]).prop_map(|(key, units, slack, tail_bytes)| {
            Op::Put { key, units, slack, tail_bytes }
        }),
        8 => any::<usize>().prop_map(Op::Commit),
        1 => any::<usize>().prop_map(Op::Abort),
        2 => (0..60u64).prop_map(|key| Op::Remove { key }),
        2 => (0..60u64).prop_map(|key| Op::Pin { key }),
        2 => any::<usize>().prop_map(Op::Unpin),
    ]
}

/// Checks that no two extents in use, of bytes and tails, overlap.
fn check(store: &Store, puts: &[(ReservationId, Extent, u32)], tails: &BTreeMap<Digest, u32>) {
    store.check();
    let mut lent: Vec<(u64, u64)> = Vec::new();
    for (reservation, extent, tail_bytes) in puts {
        let tail_at = store.reserved(*reservation).map(|entry| store.pool().tail_at(entry)).expect("it is held");
        lent.extend([(extent.offset, extent.bytes), (tail_at, u64::from(*tail_bytes))]);
    }
    for (digest, tail_bytes) in tails {
        if let Some(view) = store.peek(*digest) {
            lent.extend([(view.extent.offset, view.extent.bytes), (view.tail_at, u64::from(*tail_bytes))]);
        }
    }
    lent.sort_unstable();
    let mut end = 0;
    for (at, bytes) in lent {
        assert!(at >= end, "what lies at {at} begins before {end}, where the former ends");
        end = at + bytes;
    }
    assert!(end <= store.config().pool_bytes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn tails_overlap_no_other_extent(ops in prop::collection::vec(op(), 1..300)) {
        let mut store = store(48 * UNIT);
        let (mut puts, mut tails, mut pins) = (Vec::new(), BTreeMap::new(), Vec::new());
        for op in ops {
            match op {
                Op::Put { key, units, slack, tail_bytes } => {
                    let wanted = Reserve { replace: true, ..wanted(key, units * UNIT - slack, tail_bytes) };
                    if let Ok((reservation, extent)) = store.reserve_for(&wanted) {
                        prop_assert!(extent.offset.is_multiple_of(UNIT));
                        puts.push((reservation, extent, tail_bytes, wanted.digest));
                    }
                }
                Op::Commit(pick) if !puts.is_empty() => {
                    let (reservation, _, tail_bytes, digest) = puts.swap_remove(pick % puts.len());
                    store.commit(reservation, 0).expect("it is held");
                    tails.insert(digest, tail_bytes);
                }
                Op::Abort(pick) if !puts.is_empty() => {
                    store.abort(puts.swap_remove(pick % puts.len()).0).expect("it is held");
                }
                Op::Remove { key } => drop(store.remove(Digest(key.into()))),
                Op::Pin { key } => pins.extend(store.get(Digest(key.into())).ok().map(|(pin, _)| pin)),
                Op::Unpin(pick) if !pins.is_empty() => {
                    store.unpin(pins.swap_remove(pick % pins.len())).expect("it is held");
                }
                Op::Commit(_) | Op::Abort(_) | Op::Unpin(_) => {}
            }
            let lent: Vec<_> = puts.iter().map(|put| (put.0, put.1, put.2)).collect();
            check(&store, &lent, &tails);
        }
        pins.into_iter().for_each(|pin| store.unpin(pin).expect("it is held"));
        puts.into_iter().for_each(|put| store.abort(put.0).expect("it is held"));
        store.remove_all();
        store.check();
        prop_assert_eq!(store.stats().used_bytes, 0);
    }
}

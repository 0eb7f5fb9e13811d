//! Retentions, and soft pins that are set after the puts of their objects.

use std::collections::BTreeMap;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::tenants::TenantLease;
use kvplane_store::eviction::Eviction;
use kvplane_store::{Keep, ObjectPins, PinError, Reserve, Store, StoreConfig};
use proptest::prelude::*;

const GRANULE: u64 = 256;
const POOL: u64 = 40;

fn digest(key: u8) -> Digest {
    Digest(u128::from(key) + 1)
}

/// Returns a store of 40 granules, of which ten may be hard pinned.
fn store(eviction: Eviction) -> Store {
    let config = StoreConfig { eviction, hard_pin_percent: 25, ..StoreConfig::for_pool(POOL * GRANULE) };
    Store::new(config, Version(1)).expect("it is valid")
}

fn put_as(store: &mut Store, key: u8, keep: Keep) -> bool {
    let Ok((reservation, _)) = store.reserve_for(&Reserve { keep, ..Reserve::plain(digest(key), GRANULE) }) else {
        return false;
    };
    store.commit(reservation, 0).expect("nobody else puts it");
    true
}

fn put(store: &mut Store, key: u8) -> bool {
    put_as(store, key, Keep::default())
}

/// Puts more objects than the pool has room for, under the keys from 100 on.
fn flood(store: &mut Store) {
    (100..200).for_each(|key| {
        store.remove(digest(key));
        assert!(put(store, key), "{key}");
    });
    store.check();
}

fn there(store: &Store, keys: impl IntoIterator<Item = u8>) -> Vec<bool> {
    keys.into_iter().map(|key| store.exists(digest(key))).collect()
}

/// Nothing is retained any more, so nobody is refused because of what was.
#[test]
fn retentions_that_have_ended_do_not_count_for_the_limit_of_hard_pins() {
    const OBJECTS: usize = 3_000;
    let object = |key: usize| Digest(key as u128 + 1_000);
    let hard = Keep { hard_pin: true, ..Keep::default() };
    for hard_put in [false, true] {
        let config = StoreConfig { hard_pin_percent: 75, max_objects: 4_096, ..StoreConfig::for_pool(4_000 * GRANULE) };
        let mut store = Store::new(config, Version(1)).expect("it is valid");
        for key in 0..OBJECTS + 500 {
            let (reservation, _) = store.reserve_for(&Reserve::plain(object(key), GRANULE)).expect("there is room");
            store.commit(reservation, 0).expect("nobody else puts it");
        }
        for key in 0..OBJECTS {
            ObjectPins::from(&mut store).retain(object(key), 7, 100).expect("within the limit");
        }
        let refused = ObjectPins::from(&mut store).retain(object(OBJECTS), 8, 100);
        assert!(matches!(refused, Err(PinError::PinLimit { of_tenant: false, .. })), "{refused:?}");
        // One step ends those of 1,024 objects, and 1,524 others fit only once more have ended.
        store.tick(100);
        if hard_put {
            let large = Reserve { keep: hard, ..Reserve::plain(object(OBJECTS + 500), 3_000 * GRANULE) };
            store.reserve_for(&large).expect("nothing is retained any more");
        } else {
            for key in (0..1_024).chain(OBJECTS..OBJECTS + 500) {
                ObjectPins::from(&mut store).retain(object(key), 8, 100).expect("within the limit");
            }
        }
        store.check();
    }
}

/// A put of that moment would otherwise pay for all of them.
#[test]
fn many_retentions_that_end_together_end_in_steps() {
    const OBJECTS: usize = 3_000;
    let config = StoreConfig { hard_pin_percent: 90, max_objects: 4_096, ..StoreConfig::for_pool(4_000 * GRANULE) };
    let mut store = Store::new(config, Version(1)).expect("it is valid");
    let object = |key: usize| Digest(key as u128 + 1_000);
    let retained = |store: &Store| store.stats().kept.retained;
    for key in 0..OBJECTS {
        let (reservation, _) = store.reserve_for(&Reserve::plain(object(key), GRANULE)).expect("there is room");
        store.commit(reservation, 0).expect("nobody else puts it");
        ObjectPins::from(&mut store).retain(object(key), 7 + key as u64 % 2, 100).expect("within the limit");
    }
    store.tick(99);
    assert_eq!(retained(&store), OBJECTS as u64);
    store.tick(100);
    assert_eq!(retained(&store), OBJECTS as u64 - 1_024);
    // Those whose turn has not come hold no memory back from an object that needs it,
    let large = Reserve::plain(object(OBJECTS), 3_500 * GRANULE);
    let (reservation, _) = store.reserve_for(&large).expect("nothing is retained any more");
    store.commit(reservation, 0).expect("nobody else puts it");
    store.check();
    // and their retention has ended.
    assert_eq!(ObjectPins::from(&mut store).renew(0, 8, 500), 0);
    assert_eq!(ObjectPins::from(&mut store).release(0, 7), 0);
    assert_eq!(retained(&store), 0);
    store.check();
}

#[test]
fn retained_objects_outlast_a_flood_until_the_last_retention_ends() {
    let mut store = store(Eviction::Lru);
    store.tick(5);
    (0..4).for_each(|key| assert!(put(&mut store, key)));
    let mut pins = ObjectPins::from(&mut store);
    assert_eq!([0, 1].map(|key| pins.retain(digest(key), 7, 100)), [Ok(()); 2]);
    // Two sessions have the object 1 in common.
    assert_eq!(pins.retain(digest(1), 8, 200), Ok(()));
    assert_eq!(pins.retain(digest(99), 8, 200), Err(PinError::NotFound));
    assert_eq!(store.stats().kept.retained, 2);
    flood(&mut store);
    assert_eq!(there(&store, 0..4), [true, true, false, false]);
    store.tick(104);
    flood(&mut store);
    assert_eq!(there(&store, 0..2), [true, true]);
    store.tick(105);
    assert_eq!((store.stats().kept.retained, store.stats().kept.hard_bytes), (1, GRANULE));
    flood(&mut store);
    assert_eq!(there(&store, 0..2), [false, true]);
    // A shorter time shortens nothing; a longer one counts for all of the retention.
    assert_eq!(
        (
            ObjectPins::from(&mut store).renew(0, 8, 1),
            ObjectPins::from(&mut store).renew(0, 8, 500),
            ObjectPins::from(&mut store).renew(0, 7, 9)
        ),
        (1, 1, 0)
    );
    store.tick(600);
    flood(&mut store);
    assert_eq!(there(&store, 1..2), [true]);
    assert_eq!((ObjectPins::from(&mut store).release(0, 8), ObjectPins::from(&mut store).release(0, 8)), (1, 0));
    flood(&mut store);
    assert_eq!((there(&store, 1..2), store.stats().kept.retained), (vec![false], 0));
}

#[test]
fn retentions_are_bounded_like_hard_pins_and_per_tenant() {
    let mut store = store(Eviction::SegmentedLru);
    store.tenants_mut().set(&[TenantLease { number: 1, dram_bytes: Some(16 * GRANULE), weight: 1 }]);
    let account = store.tenants().account_of(1).expect("it was set");
    (0..6).for_each(|key| assert!(put_as(&mut store, key, Keep { account, ..Keep::default() })));
    let mut pins = ObjectPins::from(&mut store);
    (0..4).for_each(|key| assert_eq!(pins.retain(digest(key), 1, 100), Ok(())));
    let limit_bytes = 4 * GRANULE;
    let full = PinError::PinLimit { pinned_bytes: limit_bytes, limit_bytes, of_tenant: true };
    assert_eq!(pins.retain(digest(4), 1, 100), Err(full));
    assert!(full.to_string().contains("the tenant's hard pins, of at most 1024"), "{full}");
    // What is retained already costs nothing more; other tenants have limits of their own.
    assert_eq!(pins.retain(digest(3), 2, 100), Ok(()));
    assert_eq!(pins.release(0, 1), 0, "another tenant's retention of the same number");
    assert_eq!((pins.release(account, 1), pins.retain(digest(4), 1, 100)), (4, Ok(())));
    store.check();
    (20..26).for_each(|key| assert!(put(&mut store, key)));
    let mut pins = ObjectPins::from(&mut store);
    let taken = (20..26).map(|key| pins.retain(digest(key), 1, 100)).filter(Result::is_ok).count();
    assert_eq!(taken, 6);
    store.check();
}

#[test]
fn groups_are_retained_and_soft_pins_are_set_later_and_come_back() {
    let mut store = store(Eviction::Lru);
    (0..3).for_each(|key| assert!(put_as(&mut store, key, Keep { group: 9, ..Keep::default() })));
    assert!(put(&mut store, 3) && put(&mut store, 4));
    assert_eq!(ObjectPins::from(&mut store).retain_group(0, 9, 50), Ok(3));
    let mut pins = ObjectPins::from(&mut store);
    assert_eq!([3, 4].map(|key| pins.pin_softly(digest(key), 1_000)), [Ok(()); 2]);
    assert_eq!((pins.pin_softly(digest(4), 0), pins.pin_softly(digest(9), 1)), (Ok(()), Err(PinError::NotFound)));
    // A retention of a softly pinned object: the soft pin goes on after it.
    assert_eq!(pins.retain(digest(3), 1, 50), Ok(()));
    assert_eq!((store.stats().kept.soft, store.stats().kept.retained), (0, 4));
    flood(&mut store);
    assert_eq!(there(&store, 0..5), [true, true, true, true, false]);
    store.tick(60);
    assert_eq!((store.stats().kept.soft, store.stats().kept.retained), (1, 0));
    flood(&mut store);
    assert_eq!(there(&store, 0..4), [false, false, false, true]);
    store.tick(1_000);
    flood(&mut store);
    assert_eq!(there(&store, 3..4), [false]);
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Put(u8, u64, u64),
    Get(u8),
    Unpin(usize),
    Remove(u8),
    Retain(u8, u64, u64),
    Group(u64, u64),
    Soft(u8, u64),
    Release(u64),
    Pass(u64),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (key, number, ns) = (0..60_u8, 1..4_u64, 0..40_u64);
    let op = prop_oneof![
        6 => (key.clone(), 0..3_u64, prop_oneof![Just(0), ns.clone()])
            .prop_map(|(key, group, ns)| Op::Put(key, group, ns)),
        2 => key.clone().prop_map(Op::Get),
        2 => any::<usize>().prop_map(Op::Unpin),
        1 => key.clone().prop_map(Op::Remove),
        3 => (key.clone(), number.clone(), 1..40_u64).prop_map(|(key, number, ns)| Op::Retain(key, number, ns)),
        1 => (1..3_u64, 1..40_u64).prop_map(|(group, ns)| Op::Group(group, ns)),
        1 => (key, ns.clone()).prop_map(|(key, ns)| Op::Soft(key, ns)),
        1 => number.prop_map(Op::Release),
        2 => ns.prop_map(Op::Pass),
    ];
    prop::collection::vec(op, 1..200)
}

proptest! {
    /// Property: a retained object exists until the last of its retentions ends, unless it is removed.
    #[test]
    fn a_retained_object_is_never_evicted(eviction in prop_oneof![
        Just(Eviction::Lru), Just(Eviction::SegmentedLru), Just(Eviction::S3Fifo)
    ], ops in ops()) {
        let mut store = store(eviction);
        let (mut now_ns, mut pins) = (0, Vec::new());
        // Ends of retentions, and their objects.
        let mut model: BTreeMap<u64, (u64, Vec<u8>)> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Put(key, group, soft_pin_ns) => {
                    put_as(&mut store, key, Keep { group, soft_pin_ns, ..Keep::default() });
                }
                Op::Get(key) => pins.extend(store.get(digest(key)).ok().map(|(pin, _)| pin)),
                Op::Unpin(at) if !pins.is_empty() => store.unpin(pins.swap_remove(at % pins.len())).unwrap(),
                Op::Unpin(_) => {}
                Op::Remove(key) => {
                    store.remove(digest(key));
                    model.values_mut().for_each(|(_, keys)| keys.retain(|known| *known != key));
                    model.retain(|_, (_, keys)| !keys.is_empty());
                }
                Op::Retain(key, number, ns) => {
                    if ObjectPins::from(&mut store).retain(digest(key), number, ns).is_ok() {
                        let (until_ns, keys) = model.entry(number).or_default();
                        *until_ns = (*until_ns).max(now_ns + ns);
                        keys.push(key);
                    }
                }
                Op::Group(group, ns) => {
                    let _ = ObjectPins::from(&mut store).retain_group(0, group, ns);
                    let _ = ObjectPins::from(&mut store).release(0, group);
                    model.remove(&group);
                }
                Op::Soft(key, ns) => { let _ = ObjectPins::from(&mut store).pin_softly(digest(key), ns); }
                Op::Release(number) => {
                    ObjectPins::from(&mut store).release(0, number);
                    model.remove(&number);
                }
                Op::Pass(ns) => {
                    now_ns += ns;
                    store.tick(now_ns);
                    model.retain(|_, (until_ns, _)| *until_ns > now_ns);
                }
            }
            store.check();
            for key in model.values().flat_map(|(_, keys)| keys) {
                prop_assert!(store.exists(digest(*key)), "{} after {:?}", key, op);
            }
            let mut kept: Vec<u8> = model.values().flat_map(|(_, keys)| keys.clone()).collect();
            kept.sort_unstable();
            kept.dedup();
            prop_assert_eq!(store.stats().kept.retained, kept.len() as u64);
        }
        pins.into_iter().for_each(|pin| store.unpin(pin).unwrap());
        store.check();
    }
}

//! Tests of the store against a shadow model, under random operations with pins and puts in flight; and against itself
//! with the reference twin as its eviction policy.

use crate::shadow;
use crate::support;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_store::entry::Entry;
use kvplane_store::eviction::{Eviction, EvictionPolicy};
use kvplane_store::{CommitError, GetError, Reserve, ReserveError, Store, StoreConfig, TAIL_BYTES_MOST};
use proptest::prelude::*;
use shadow::{Op, Shadow};
use support::{ReferenceLru, ReferenceS3Fifo, ReferenceSegmentedLru};

const KIB: u64 = 1024;

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![4 => Just(2048u64), 3 => 1..3000u64, 1 => 3000..20_000u64];
    let tail = prop_oneof![Just(0), 1..60u32, 0..TAIL_BYTES_MOST];
    let digest = || 0..14u8;
    prop_oneof![
        8 => (digest(), size, tail, prop::bool::weighted(0.3))
            .prop_map(|(key, bytes, tail_bytes, replace)| Op::Reserve { key, bytes, tail_bytes, replace }),
        8 => any::<usize>().prop_map(Op::Commit),
        6 => digest().prop_map(|key| Op::Get { key }),
        5 => any::<usize>().prop_map(Op::Unpin),
        1 => any::<usize>().prop_map(Op::Expire),
        3 => any::<usize>().prop_map(Op::Abort),
        2 => digest().prop_map(|key| Op::Remove { key }),
        1 => Just(Op::Stale),
        1 => prop::bool::weighted(0.1).prop_map(|all| if all { Op::RemoveAll } else { Op::Stale }),
    ]
}

fn config(eviction: Eviction) -> StoreConfig {
    StoreConfig {
        eviction,
        high_watermark_percent: 100,
        low_watermark_percent: 100,
        pool_bytes: 20 * KIB,
        unit_bytes: 256,
        device_pool_bytes: 0,
        far_pool_bytes: 0,
        max_objects: 12,
        max_object_bytes: 18 * KIB,
        protected_percent: 40,
        hard_pin_percent: 25,
        soft_pin_max_ms: 0,
        max_pins: 6,
        max_reservations: 4,
        hash_seed: 3,
    }
}

/// Returns all results of the store, after checking it against the shadow at every step.
fn run<P: EvictionPolicy>(store: Store<P>, ops: &[Op]) -> Vec<String> {
    let mut shadow = Shadow::new(store);
    ops.iter().map(|op| shadow.apply(op)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn agrees_with_the_shadow_and_with_itself_over_the_reference_policy(
        ops in prop::collection::vec(op(), 1..250),
        eviction in prop::sample::select(&Eviction::ALL[..]),
    ) {
        let fast = run(Store::new(config(eviction), Version(100)).unwrap(), &ops);
        let granules = 20 * KIB / 256;
        let twin = match eviction {
            Eviction::SegmentedLru => over(eviction, ReferenceSegmentedLru::new(granules, 40), &ops),
            Eviction::S3Fifo => over(eviction, ReferenceS3Fifo::new(), &ops),
            Eviction::Lru => over(eviction, ReferenceLru::default(), &ops),
        };
        prop_assert_eq!(fast, twin);
    }
}

fn over(eviction: Eviction, policy: impl EvictionPolicy, ops: &[Op]) -> Vec<String> {
    run(Store::with_policy(config(eviction), Version(100), policy).unwrap(), ops)
}

fn put(store: &mut Store, key: u128, bytes: u64) -> Version {
    let (reservation, _) = store.reserve(Digest(key), bytes).expect("there is room");
    store.commit(reservation, 0).expect("nobody else puts it")
}

fn small(pool_bytes: u64) -> Store {
    Store::new(StoreConfig::for_pool(pool_bytes), Version(1)).unwrap()
}

#[test]
fn a_put_is_seen_when_committed_and_the_first_commit_wins() {
    let mut store = small(1 << 20);
    let (first, _) = store.reserve(Digest(1), 100).unwrap();
    let (second, _) = store.reserve(Digest(1), 200).unwrap();
    assert!(!store.exists(Digest(1)));
    assert_eq!(store.get(Digest(1)), Err(GetError::NotFound));
    assert_eq!(store.commit(second, 77), Ok(Version(1)));
    assert_eq!(store.commit(first, 66), Err(CommitError::Exists));
    assert_eq!(store.commit(first, 66), Err(CommitError::Stale));
    assert_eq!(store.objects().get(Digest(1)).map(Entry::bytes), Some(200));
    let (_, view) = store.get(Digest(1)).unwrap();
    assert_eq!((view.version, view.checksum, view.extent.bytes), (Version(1), 77, 200));
    assert_eq!(store.stats().used_bytes, 256, "the loser's bytes are free");
    store.check();
}

#[test]
fn an_expired_put_keeps_its_bytes_from_others_until_it_is_aborted() {
    let mut store = small(4096);
    let (reservation, _) = store.reserve(Digest(1), 4096).unwrap();
    store.expire(reservation);
    assert_eq!(store.stats().quarantined_bytes, 4096);
    assert_eq!(store.commit(reservation, 0), Err(CommitError::Expired));
    assert_eq!(
        store.reserve(Digest(2), 256),
        Err(ReserveError::NoSpace { requested_bytes: 256, free_bytes: 0, pinned_bytes: 0, reserved_bytes: 4096 })
    );
    store.abort(reservation).unwrap();
    assert!(store.abort(reservation).is_err());
    assert!(store.reserve(Digest(2), 4096).is_ok());
    store.check();
}

#[test]
fn a_removed_object_is_invisible_at_once_and_freed_with_its_last_pin() {
    let mut store = small(1 << 20);
    put(&mut store, 1, 4096);
    let (one, view) = store.get(Digest(1)).unwrap();
    let (two, _) = store.get(Digest(1)).unwrap();
    assert!(store.remove(Digest(1)));
    assert!(!store.remove(Digest(1)));
    assert!(!store.exists(Digest(1)));
    let (again, extent) = store.reserve(Digest(1), 4096).unwrap();
    assert_ne!(extent, view.extent, "the old bytes are still being read");
    assert!(store.commit(again, 0).unwrap() > view.version);
    store.unpin(one).unwrap();
    assert_eq!(store.stats().doomed_bytes, 4096);
    store.unpin(two).unwrap();
    assert!(store.unpin(two).is_err());
    assert_eq!((store.stats().doomed_bytes, store.stats().used_bytes), (0, 4096));
    assert_eq!(store.stats().handles.stale_ids, 1);
    store.check();
}

#[test]
fn a_store_of_equal_objects_holds_as_many_as_fit_and_evicts_one_for_one() {
    let mut store = small(64 * 4096);
    for key in 0..64 {
        put(&mut store, key, 4096);
    }
    assert_eq!((store.stats().evictions, store.stats().free_bytes), (0, 0));
    for key in 64..200 {
        put(&mut store, key, 4096);
        assert_eq!(store.stats().objects, 64);
    }
    assert!(!store.exists(Digest(135)) && store.exists(Digest(136)), "the oldest went");
    store.check();
}

#[test]
fn a_large_object_among_small_ones_does_not_empty_the_pool() {
    let config = StoreConfig { max_objects: 5000, protected_percent: 50, ..StoreConfig::for_pool(4096 * KIB) };
    let mut store = Store::new(config, Version(1)).unwrap();
    for key in 0..4096 {
        put(&mut store, key, KIB);
    }
    // Accesses in an order that scatters neighbours all over the recency order.
    for n in 0..4096u128 {
        let (pin, _) = store.get(Digest(n * 1223 % 4096)).unwrap();
        store.unpin(pin).unwrap();
    }
    // The start of the pool is the most recently used.
    for n in 0..256 {
        let (pin, _) = store.get(Digest(n)).unwrap();
        store.unpin(pin).unwrap();
    }
    put(&mut store, 10_000, 64 * KIB);
    assert!((0..256).all(|n| store.exists(Digest(n))), "the neighbours of an old object went");
    let evicted = store.stats().evicted_bytes;
    assert!(evicted <= (2 + 1) * 64 * KIB + KIB, "{evicted} bytes went for 64 KiB");
    store.check();
}

#[test]
fn a_request_that_pins_make_impossible_evicts_nothing() {
    let mut store = small(64 * KIB);
    for key in 0..16 {
        put(&mut store, key, 4096);
    }
    let pins: Vec<_> = (0..13).map(|key| store.get(Digest(key)).unwrap().0).collect();
    let refused = store.reserve(Digest(99), 16 * KIB);
    assert!(matches!(refused, Err(ReserveError::NoSpace { pinned_bytes: 53_248, .. })), "{refused:?}");
    assert_eq!(store.stats().evictions, 0);
    pins.into_iter().for_each(|pin| store.unpin(pin).unwrap());
    assert!(store.reserve(Digest(99), 16 * KIB).is_ok());
}

#[test]
fn each_limit_is_refused_with_its_number() {
    let config = StoreConfig { max_objects: 3, max_pins: 2, max_reservations: 2, ..StoreConfig::for_pool(1 << 20) };
    let mut store = Store::new(config, Version(1)).unwrap();
    assert_eq!(store.reserve(Digest(1), 0), Err(ReserveError::Empty));
    let too_large = ReserveError::TooLarge { bytes: (1 << 20) + 1, limit_bytes: 1 << 20 };
    assert_eq!(store.reserve(Digest(1), (1 << 20) + 1), Err(too_large));
    put(&mut store, 1, 1);
    assert_eq!(store.reserve(Digest(1), 1), Err(ReserveError::Exists));
    store.get(Digest(1)).unwrap();
    store.get(Digest(1)).unwrap();
    assert_eq!(store.get(Digest(1)), Err(GetError::TooManyPins { limit: 2 }));
    store.reserve(Digest(2), 1).unwrap();
    store.reserve(Digest(3), 1).unwrap();
    assert_eq!(store.reserve(Digest(4), 1), Err(ReserveError::TooManyReservations { limit: 2 }));
    assert!(StoreConfig { max_pins: 0, ..store.config().clone() }.validate().is_err());
}

#[test]
fn the_object_limit_evicts_and_refuses_when_all_are_in_use() {
    let config = StoreConfig { max_objects: 2, ..StoreConfig::for_pool(1 << 20) };
    let mut store = Store::new(config, Version(1)).unwrap();
    for key in 0..3 {
        put(&mut store, key, 1);
    }
    assert!(!store.exists(Digest(0)), "the oldest made room");
    store.get(Digest(1)).unwrap();
    store.get(Digest(2)).unwrap();
    assert_eq!(store.reserve(Digest(3), 1), Err(ReserveError::TooManyObjects { limit: 2 }));
    assert_eq!(store.remove_all(), 2);
    assert_eq!(store.stats().objects, 0);
    store.check();
}

#[test]
fn a_refused_put_of_an_existing_object_keeps_it() {
    let mut store = small(4 * 4096);
    for key in 0..4 {
        put(&mut store, key, 4096);
    }
    assert_eq!(store.reserve(Digest(0), 4096), Err(ReserveError::Exists));
    put(&mut store, 4, 4096);
    assert!(store.exists(Digest(0)) && !store.exists(Digest(1)), "somebody wanted object 0");
}

#[test]
fn beyond_its_high_watermark_a_pool_drains_to_the_low_one() {
    let marks =
        StoreConfig { high_watermark_percent: 75, low_watermark_percent: 50, ..StoreConfig::for_pool(100 * 256) };
    let mut store = Store::new(marks, Version(1)).unwrap();
    let used = |store: &Store| store.stats().used_bytes / 256;
    for key in 0..75 {
        put(&mut store, key, 256);
    }
    assert_eq!((used(&store), store.stats().evictions), (75, 0));
    // Each put now evicts four until half of the pool is free, and none after that.
    let after: Vec<u64> = (75..90).map(|key| (put(&mut store, key, 256), used(&store)).1).collect();
    assert_eq!(after, [72, 69, 66, 63, 60, 57, 54, 51, 50, 51, 52, 53, 54, 55, 56]);
    assert!(!store.exists(Digest(0)) && store.exists(Digest(89)), "the oldest went");
    store.check();
}

#[test]
fn a_replacement_takes_effect_at_its_commit_and_readers_of_the_former_finish() {
    let mut store = small(1 << 20);
    let former = put(&mut store, 1, 300);
    let (pin, view) = store.get(Digest(1)).unwrap();
    let wanted = Reserve { replace: true, ..Reserve::plain(Digest(1), 5000) };
    let (newer, _) = store.reserve_for(&wanted).expect("there is room");
    assert_eq!(store.objects().get(Digest(1)).map(Entry::bytes), Some(300), "nothing changes before");
    let version = store.commit(newer, 7).expect("it may replace");
    assert!(version > former);
    assert_eq!(
        (store.objects().get(Digest(1)).map(Entry::bytes), store.stats().objects, store.stats().replacements),
        (Some(5000), 1, 1)
    );
    assert_eq!(store.held(pin), Some(view), "its reader reads on");
    assert!(!store.pinned(pin).is_some_and(Entry::is_live));
    store.unpin(pin).expect("it is held");
    // A replacement that fails leaves the object as it is.
    let (failed, _) = store.reserve_for(&wanted).expect("there is room");
    store.abort(failed).expect("it is held");
    assert_eq!(store.get(Digest(1)).unwrap().1.version, version);
    // Without an existing object it is a plain put.
    let (first, _) = store.reserve_for(&Reserve { digest: Digest(2), ..wanted }).expect("there is room");
    store.commit(first, 7).expect("nobody else puts it");
    store.check();
}

#[test]
fn an_empty_store_holds_nothing_and_refuses_every_put() {
    let mut store = Store::empty();
    let digest = Digest::from_bytes([7; 16]);
    assert!(!store.config().has_pool());
    assert!(matches!(store.reserve(digest, 1), Err(ReserveError::TooLarge { bytes: 1, limit_bytes: 0 })));
    assert_eq!(store.reserve(digest, 0), Err(ReserveError::Empty));
    assert!(store.get(digest).is_err() && !store.exists(digest) && store.peek(digest).is_none());
    assert_eq!((store.hold(digest), store.remove(digest), store.remove_all()), (None, false, 0));
    assert_eq!(store.objects().walk(0, 10), (Vec::new(), None));
    assert_eq!(store.between(0, u64::MAX).count(), 0);
    store.tick(1 << 40);
    let stats = store.stats();
    assert_eq!((stats.objects, stats.pool_bytes, stats.free_bytes), (0, 0, 0));
    store.check();
}

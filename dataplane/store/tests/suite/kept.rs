//! Tests of objects that outlive their store: another one takes them back at their places, whatever happened before,
//! and lends none whose bytes have changed.

use std::sync::{Arc, Mutex};

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::message::ObjectPriority;
use kvplane_store::eviction::Eviction;
use kvplane_store::image::{ImageContents, ImageHeader, ImageOrigin, MemoryIdentity};
use kvplane_store::{
    Extent, Keep, KeptObjects, ObjectView, PoolSums, Replica, Reserve, Store, StoreConfig, TakeBackError,
    former_objects,
};
use proptest::prelude::*;

/// Pool in which the checksum of a range is what was put at its beginning.
#[derive(Debug, Default)]
struct Sums(Mutex<std::collections::BTreeMap<u64, u64>>);

impl PoolSums for Sums {
    fn checksum(&self, offset: u64, _: u64) -> u64 {
        self.0.lock().expect("no panic").get(&offset).copied().unwrap_or(0)
    }
}

fn config(unit_bytes: u64, eviction: Eviction) -> StoreConfig {
    StoreConfig { unit_bytes, eviction, max_objects: 128, ..StoreConfig::for_pool(64 * 4096) }
}

fn store(config: &StoreConfig, first_version: u64) -> Store {
    Store::new(config.clone(), Version(first_version)).expect("a valid configuration")
}

#[derive(Clone, Debug)]
enum Op {
    Put { key: u64, bytes: u64, tail_bytes: u32, keep: Keep, replica: Replica, head: bool },
    Get(u64),
    Remove(u64),
    Retain(u64),
}

fn ops() -> impl Strategy<Value = Op> {
    let bytes = prop_oneof![1..=9000u64, Just(4096), Just(8192)];
    let keep = (0..3u32, 0..3u64, prop_oneof![Just(0), Just(1_000_000u64)], prop::bool::weighted(0.1), -2..=2i64);
    let keep = keep.prop_map(|(_, group, soft_pin_ns, hard_pin, priority)| Keep {
        account: 0,
        group,
        soft_pin_ns,
        hard_pin,
        priority: ObjectPriority::new(priority).expect("it is in range"),
    });
    let replica = prop_oneof![3 => Just(Replica::None), 1 => Just(Replica::First), 1 => Just(Replica::Second)];
    let put = (0..40u64, bytes, prop_oneof![Just(0u32), 1..=600u32], keep, replica, any::<bool>());
    prop_oneof![
        6 => put.prop_map(|(key, bytes, tail_bytes, keep, replica, head)| {
            Op::Put { key, bytes, tail_bytes, keep, replica, head }
        }),
        3 => (0..40u64).prop_map(Op::Get),
        1 => (0..40u64).prop_map(Op::Remove),
        1 => (0..40u64).prop_map(Op::Retain),
    ]
}

fn run(store: &mut Store, sums: &Sums, ops: &[Op]) {
    for op in ops {
        match *op {
            Op::Put { key, bytes, tail_bytes, keep, replica, head } => {
                let wanted = Reserve {
                    tail_bytes,
                    has_tail: tail_bytes > 0,
                    keep,
                    replica,
                    head,
                    replace: true,
                    ..Reserve::plain(Digest(key.into()), bytes)
                };
                if let Ok((reservation, extent)) = store.reserve_for(&wanted) {
                    sums.0.lock().expect("no panic").insert(extent.offset, key + 1);
                    store.commit(reservation, key + 1).expect("nobody else puts it");
                }
            }
            Op::Get(key) => {
                if let Ok((pin, _)) = store.get(Digest(key.into())) {
                    store.unpin(pin).expect("it is held");
                }
            }
            Op::Remove(key) => _ = store.remove(Digest(key.into())),
            Op::Retain(key) => {
                let mut pins = kvplane_store::ObjectPins::from(&mut *store);
                let _ = pins.retain(Digest(key.into()), key % 3, 5_000);
            }
        }
    }
}

/// Encodes contents, and decodes them again.
fn through_bytes(contents: &ImageContents) -> ImageContents {
    let mut bytes = Vec::new();
    let checksum = contents.encode(|piece| bytes.extend_from_slice(piece));
    let identity = MemoryIdentity {
        uuid: 1,
        cluster: String::new(),
        node: kvplane_proto::ids::NodeId(1),
        shard: kvplane_proto::ids::ShardId(0),
        shards: 1,
        pool_bytes: 0,
        unit_bytes: 0,
    };
    let header = ImageHeader::of(identity, ImageOrigin::default(), contents, checksum);
    header.decode_contents(&bytes).expect("they are whole")
}

/// Returns what readers see of an object.
fn seen(view: ObjectView) -> (Extent, Version, u64, u32, bool, u64, bool, [bool; 2], ObjectPriority) {
    let ObjectView { extent, version, checksum, tenant, has_tail, tail_at, is_head, replica, priority, .. } = view;
    let tail_at = if has_tail { tail_at } else { 0 };
    let roles = [replica.is_owed_a_copy(), replica == Replica::Second];
    (extent, version, checksum, tenant, has_tail, tail_at, is_head, roles, priority)
}

proptest! {
    /// Objects, places, tails and pins are as they were; and what follows works as after any other history.
    #[test]
    fn another_store_takes_objects_back(
        unit in prop_oneof![Just(256u64), Just(4096)],
        eviction in prop_oneof![Just(Eviction::SegmentedLru), Just(Eviction::S3Fifo), Just(Eviction::Lru)],
        before in prop::collection::vec(ops(), 0..120),
        after in prop::collection::vec(ops(), 0..60),
    ) {
        let (config, sums) = (config(unit, eviction), Arc::new(Sums::default()));
        let mut first = store(&config, 1);
        run(&mut first, &sums, &before);
        let is_kept = |digest: Digest, _: Replica| digest.0 % 7 != 3;
        let contents = through_bytes(&KeptObjects::from(&mut first).collect(is_kept, true));
        prop_assert!(contents.withheld.is_empty(), "nothing is pinned or reserved");
        let mut second = store(&config, 1 << 40);
        let reader: Arc<dyn PoolSums> = Arc::clone(&sums) as _;
        KeptObjects::from(&mut second).take_back(&contents, &reader).expect("an empty store");
        second.check();
        let mut kept = 0;
        for key in 0..40u128 {
            let before = first.peek(Digest(key)).filter(|view| is_kept(Digest(key), view.replica));
            let after = second.peek(Digest(key));
            prop_assert_eq!(before.map(seen), after.map(seen), "{}", key);
            kept += u64::from(after.is_some());
        }
        let stats = second.stats();
        prop_assert_eq!((stats.objects, former_objects(&second).objects), (kept, kept));
        prop_assert_eq!(stats.kept.retained, 0, "retentions are soft pins now");
        for object in &contents.objects {
            let (pin, _) = second.get(object.digest).expect("its bytes are whole");
            second.unpin(pin).expect("it is held");
        }
        let former = former_objects(&second);
        prop_assert_eq!((former.checked, former.damaged), (kept, 0));
        run(&mut second, &sums, &after);
        second.check();
        second.remove_all();
        prop_assert_eq!(second.stats().used_bytes, 0);
        second.check();
    }

    /// An image that passes its checksum may have any contents: nothing panics, and the store is whole.
    #[test]
    fn places_that_contradict_each_other_are_refused(
        before in prop::collection::vec(ops(), 1..40),
        at in any::<prop::sample::Index>(),
        changes in (any::<u8>(), any::<u64>(), any::<u64>()),
        unit in prop_oneof![Just(256u64), Just(4096)],
    ) {
        let (config, sums) = (config(unit, Eviction::SegmentedLru), Arc::new(Sums::default()));
        let mut first = store(&config, 1);
        run(&mut first, &sums, &before);
        let mut contents = KeptObjects::from(&mut first).collect(|_, _| true, true);
        if contents.objects.is_empty() {
            return Ok(());
        }
        let object = at.get(&contents.objects);
        let (digest, mut changed) = (object.digest, *object);
        let (which, number, other) = changes;
        match which % 6 {
            0 => changed.extent = Extent { offset: number, bytes: other },
            1 => changed.extent.offset = number % (64 * 4096) / unit * unit,
            2 => changed.extent.bytes = number % 70_000,
            3 => changed.extra_granules = number as u8,
            4 => changed.tail.page_class = Some(number as u8),
            _ => (changed.tail.page_class, changed.tail.offset) = (Some(number as u8 % 8), other % (64 * 4096)),
        }
        contents.objects.iter_mut().filter(|object| object.digest == digest).for_each(|object| *object = changed);
        let mut second = store(&config, 1 << 40);
        let reader: Arc<dyn PoolSums> = sums;
        let _ = KeptObjects::from(&mut second).take_back(&contents, &reader);
        second.check();
        second.remove_all();
        second.check();
    }
}

fn put(store: &mut Store, sums: &Sums, key: u64, bytes: u64) {
    let keep = Keep::default();
    run(store, sums, &[Op::Put { key, bytes, tail_bytes: 0, keep, replica: Replica::None, head: false }]);
}

#[test]
fn an_object_whose_bytes_have_changed_is_removed_before_it_is_lent() {
    let (config, sums) = (config(256, Eviction::SegmentedLru), Arc::new(Sums::default()));
    let mut first = store(&config, 1);
    (1..=3).for_each(|key| put(&mut first, &sums, key, 1000));
    let contents = KeptObjects::from(&mut first).collect(|_, _| true, false);
    let damaged = first.peek(Digest(2)).expect("it is there").extent.offset;
    sums.0.lock().expect("no panic").insert(damaged, 77);
    let mut second = store(&config, 100);
    let reader: Arc<dyn PoolSums> = Arc::clone(&sums) as _;
    KeptObjects::from(&mut second).take_back(&contents, &reader).expect("an empty store");
    assert!(second.exists(Digest(2)), "its bytes were not read yet");
    assert!(second.get(Digest(2)).is_err() && !second.exists(Digest(2)));
    let (pin, _) = second.hold(Digest(1)).expect("it is whole");
    second.unpin(pin).expect("it is held");
    let former = former_objects(&second);
    assert_eq!((former.objects, former.bytes, former.checked, former.damaged), (3, 3000, 1, 1));
    // Its digest is free for a new object, which is not compared again.
    put(&mut second, &sums, 2, 500);
    sums.0.lock().expect("no panic").clear();
    assert!(second.get(Digest(2)).is_ok() && second.get(Digest(1)).is_ok());
    assert!(second.get(Digest(3)).is_err());
    second.check();
}

#[test]
fn extents_that_another_process_may_still_access_are_not_used() {
    let (config, sums) = (config(256, Eviction::SegmentedLru), Arc::new(Sums::default()));
    let mut first = store(&config, 1);
    (1..=3).for_each(|key| put(&mut first, &sums, key, 1000));
    first.get(Digest(1)).expect("it is there");
    let removed = first.get(Digest(2)).expect("it is there").1.extent;
    first.remove(Digest(2));
    let (_, reserved) = first.reserve(Digest(4), 700).expect("there is room");
    let contents = KeptObjects::from(&mut first).collect(|_, _| true, true);
    let withheld: Vec<(u64, u64)> = contents.withheld.iter().map(|extent| (extent.offset, extent.bytes)).collect();
    assert_eq!(withheld, [(removed.offset, 1024), (reserved.offset, 768)]);
    let (mut second, reader) = (store(&config, 100), Arc::clone(&sums) as Arc<dyn PoolSums>);
    KeptObjects::from(&mut second).take_back(&contents, &reader).expect("an empty store");
    second.check();
    let lent = second.peek(Digest(1)).expect("it is there").extent;
    second.remove(Digest(1));
    (10..200).for_each(|key| put(&mut second, &sums, key, 1000));
    for key in 10..200u128 {
        let Some(view) = second.peek(Digest(key)) else { continue };
        for extent in [removed, reserved, lent] {
            let apart = view.extent.offset >= extent.offset + extent.bytes
                || extent.offset >= view.extent.offset + view.extent.bytes;
            assert!(apart, "{view:?} is in {extent:?}");
        }
    }
    let again = KeptObjects::from(&mut second).collect(|_, _| true, false);
    assert!(again.withheld.is_empty(), "the caller knows what is withheld for good");
    second.check();
}

#[test]
fn extents_that_another_process_may_still_access_take_no_place_of_a_put_or_get() {
    let (config, sums) = (config(256, Eviction::SegmentedLru), Arc::new(Sums::default()));
    let mut first = store(&config, 1);
    (1..=3).for_each(|key| put(&mut first, &sums, key, 1000));
    (1..=2).for_each(|key| _ = first.get(Digest(key)).expect("it is there"));
    (10..14).for_each(|key| _ = first.reserve(Digest(key), 700).expect("there is room"));
    let contents = KeptObjects::from(&mut first).collect(|_, _| true, true);
    assert_eq!(contents.withheld.len(), 4);
    let few = StoreConfig { max_pins: 1, max_reservations: 1, ..config };
    let (mut second, reader) = (store(&few, 100), Arc::clone(&sums) as Arc<dyn PoolSums>);
    KeptObjects::from(&mut second).take_back(&contents, &reader).expect("an empty store");
    assert_eq!((second.stats().pins, second.stats().reservations, second.stats().objects), (0, 0, 3));
    assert_eq!(second.stats().quarantined_bytes, 4 * 768);
    second.get(Digest(3)).expect("a pin is left");
    put(&mut second, &sums, 20, 1000);
    second.check();
}

#[test]
fn objects_are_taken_back_by_an_empty_store_of_a_later_incarnation_only() {
    let (config, sums) = (config(256, Eviction::SegmentedLru), Arc::new(Sums::default()));
    let mut first = store(&config, 50);
    (1..=9).for_each(|key| put(&mut first, &sums, key, 1000));
    let contents = KeptObjects::from(&mut first).collect(|_, _| true, false);
    let reader: Arc<dyn PoolSums> = Arc::clone(&sums) as _;
    let taken = |store: &mut Store| KeptObjects::from(store).take_back(&contents, &reader);
    assert_eq!(taken(&mut store(&config, 50)), Err(TakeBackError::Versions));
    let mut used = store(&config, 100);
    put(&mut used, &sums, 99, 10);
    assert_eq!(taken(&mut used), Err(TakeBackError::NotEmpty));
    // A smaller limit keeps those that were accessed last.
    let mut small = store(&StoreConfig { max_objects: 4, ..config.clone() }, 100);
    taken(&mut small).expect("an empty store");
    assert_eq!((0..10u128).filter(|key| small.exists(Digest(*key))).collect::<Vec<_>>(), [6, 7, 8, 9]);
    small.check();
    let smaller = StoreConfig::for_pool(4096);
    assert_eq!(taken(&mut store(&smaller, 100)), Err(TakeBackError::Places));
}

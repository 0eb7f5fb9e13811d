//! Tests of the far pool: objects are put, read, replaced, removed and evicted at random in a store whose pool has a
//! part in far memory; every byte that a reader may see is compared, wherever it is.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use kvplane_proto::ids::{PinId, ReservationId, Version};
use kvplane_proto::message::ObjectPriority;
use kvplane_proto::tenants::TenantLease;
use kvplane_store::eviction::Eviction;
use kvplane_store::{
    FarPoolStats, Keep, ObjectPins, ObjectView, PoolCopies, Reserve, Store, StoreConfig, far_pool_stats, open_far_pool,
};
use proptest::prelude::*;

use crate::support::objects::{Contents, digest, pattern};

const KIB: u64 = 1024;
const POOL_BYTES: u64 = 24 * KIB;
const FAR_BYTES: u64 = 32 * KIB;
const KEYS: u8 = 24;

/// Bytes of the pool, near and far.
#[derive(Debug)]
struct Memory(Mutex<Vec<u8>>);

impl Memory {
    fn write(&self, at: u64, bytes: &[u8]) {
        self.0.lock().unwrap()[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn has(&self, at: u64, bytes: &[u8]) -> bool {
        self.0.lock().unwrap()[at as usize..][..bytes.len()] == *bytes
    }
}

impl PoolCopies for Memory {
    fn copy(&self, from: u64, to: u64, bytes: u64) {
        assert!(from + bytes <= to || to + bytes <= from, "{bytes} B from {from} to {to}");
        self.0.lock().unwrap().copy_within(from as usize..(from + bytes) as usize, to as usize);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Put { key: u8, bytes: u64, tail_bytes: u32, replace: bool, tenant: u32, keep: KeepKind },
    Commit(usize),
    Abort(usize),
    Get { key: u8 },
    Unpin(usize),
    Remove { key: u8 },
    Retain { key: u8, number: u64 },
    Release { number: u64 },
    PinSoftly { key: u8 },
    SetPriority { key: u8, priority: i64 },
    Tick,
}

#[derive(Clone, Copy, Debug)]
enum KeepKind {
    Plain,
    Soft,
    Hard,
    Group(u64),
    Priority(i64),
}

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![4 => Just(2048u64), 3 => 1..3000u64, 1 => 3000..9000u64];
    let tail = prop_oneof![Just(0), 1..60u32, 0..2000u32];
    let key = || 0..KEYS;
    let keep = prop_oneof![
        10 => Just(KeepKind::Plain),
        1 => Just(KeepKind::Soft),
        1 => Just(KeepKind::Hard),
        3 => (1..3u64).prop_map(KeepKind::Group),
        1 => (-2..3i64).prop_map(KeepKind::Priority),
    ];
    prop_oneof![
        12 => (key(), size, tail, prop::bool::weighted(0.3), 0..3u32, keep).prop_map(
            |(key, bytes, tail_bytes, replace, tenant, keep)| Op::Put { key, bytes, tail_bytes, replace, tenant, keep }
        ),
        12 => any::<usize>().prop_map(Op::Commit),
        1 => any::<usize>().prop_map(Op::Abort),
        9 => key().prop_map(|key| Op::Get { key }),
        8 => any::<usize>().prop_map(Op::Unpin),
        2 => key().prop_map(|key| Op::Remove { key }),
        1 => (key(), 1..3u64).prop_map(|(key, number)| Op::Retain { key, number }),
        1 => (1..3u64).prop_map(|number| Op::Release { number }),
        1 => key().prop_map(|key| Op::PinSoftly { key }),
        1 => (key(), -2..3i64).prop_map(|(key, priority)| Op::SetPriority { key, priority }),
        1 => Just(Op::Tick),
    ]
}

struct Put {
    key: u8,
    reservation: ReservationId,
    made: Contents,
}

/// Store with the bytes of its pool, and what they are expected to be.
struct Rig {
    store: Store,
    memory: Arc<Memory>,
    /// Versions that were committed, by number.
    versions: BTreeMap<u64, Contents>,
    /// Version that was committed last under each key, unless it was removed since.
    last: BTreeMap<u8, u64>,
    puts: Vec<Put>,
    pins: Vec<(PinId, ObjectView)>,
    seed: u64,
    now_ns: u64,
}

impl Rig {
    fn new(eviction: Eviction, unit_bytes: u64) -> Self {
        let config = StoreConfig {
            max_objects: 20,
            max_object_bytes: 9 * KIB,
            protected_percent: 40,
            max_pins: 12,
            max_reservations: 8,
            eviction,
            unit_bytes,
            ..StoreConfig::for_pool(POOL_BYTES)
        };
        Self::with(StoreConfig { far_pool_bytes: FAR_BYTES, ..config })
    }

    fn with(config: StoreConfig) -> Self {
        let memory = Arc::new(Memory(Mutex::new(vec![0; config.host_bytes() as usize])));
        let mut store = Store::new(config, Version(100)).expect("valid limits");
        open_far_pool(&mut store, Arc::clone(&memory) as Arc<dyn PoolCopies>);
        let leases = [TenantLease { number: 1, dram_bytes: Some(12 * KIB), weight: 1 }];
        store.tenants_mut().set(&leases);
        let (versions, last) = (BTreeMap::new(), BTreeMap::new());
        Self { store, memory, versions, last, puts: Vec::new(), pins: Vec::new(), seed: 0, now_ns: 0 }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Put { key, bytes, tail_bytes, replace, tenant, keep } => {
                let account = self.store.tenants_mut().account_of_unconfigured(tenant);
                let plain = Keep { account, ..Keep::default() };
                let keep = match keep {
                    KeepKind::Plain => plain,
                    KeepKind::Soft => Keep { soft_pin_ns: 50, ..plain },
                    KeepKind::Hard => Keep { hard_pin: true, ..plain },
                    KeepKind::Group(group) => Keep { group, ..plain },
                    KeepKind::Priority(priority) => Keep { priority: ObjectPriority::new(priority).unwrap(), ..plain },
                };
                let plain = Reserve::plain(digest(key), bytes);
                self.put(key, &Reserve { tail_bytes, has_tail: tail_bytes > 0, replace, keep, ..plain });
            }
            Op::Commit(pick) if !self.puts.is_empty() => {
                let Put { key, reservation, made } = self.puts.swap_remove(pick % self.puts.len());
                if let Ok(version) = self.store.commit(reservation, made.seed) {
                    self.versions.insert(version.0, made);
                    self.last.insert(key, version.0);
                }
            }
            Op::Abort(pick) if !self.puts.is_empty() => {
                let put = self.puts.swap_remove(pick % self.puts.len());
                self.store.abort(put.reservation).expect("a reservation that is held");
            }
            Op::Get { key } => self.get(key),
            Op::Unpin(pick) if !self.pins.is_empty() => {
                let (pin, _) = self.pins.swap_remove(pick % self.pins.len());
                self.store.unpin(pin).expect("a pin that is held");
            }
            Op::Remove { key } => {
                self.store.remove(digest(key));
                self.last.remove(&key);
            }
            Op::Retain { key, number } => {
                let _ = ObjectPins::from(&mut self.store).retain(digest(key), number, 70);
            }
            Op::Release { number } => {
                ObjectPins::from(&mut self.store).release(0, number);
            }
            Op::PinSoftly { key } => {
                let _ = ObjectPins::from(&mut self.store).pin_softly(digest(key), 60);
            }
            Op::SetPriority { key, priority } => {
                let priority = ObjectPriority::new(priority).unwrap();
                let _ = ObjectPins::from(&mut self.store).set_priority(digest(key), priority);
            }
            Op::Tick => {
                self.now_ns += 40;
                self.store.tick(self.now_ns);
            }
            Op::Commit(_) | Op::Abort(_) | Op::Unpin(_) => {}
        }
        self.check();
    }

    fn put(&mut self, key: u8, wanted: &Reserve) {
        let Ok((reservation, extent)) = self.store.reserve_for(wanted) else { return };
        assert!(extent.offset + extent.bytes <= POOL_BYTES, "objects are put in DRAM");
        self.seed += 1;
        let made = Contents { seed: self.seed, tail_bytes: wanted.tail_bytes };
        self.memory.write(extent.offset, &pattern(made.seed, extent.bytes));
        let entry = self.store.reserved(reservation).expect("it was just made");
        let (at, room) = (self.store.pool().tail_at(entry), self.store.pool().tail_room(entry));
        assert!(room >= wanted.tail_bytes.into(), "{room} for a tail of {}", wanted.tail_bytes);
        self.memory.write(at, &pattern(!made.seed, wanted.tail_bytes.into()));
        self.puts.push(Put { key, reservation, made });
    }

    /// Reads an object, which is as it was before: where it is may have changed.
    fn get(&mut self, key: u8) {
        let before = self.store.peek(digest(key));
        let Ok((pin, view)) = self.store.get(digest(key)) else { return };
        let facts = |view: &ObjectView| (view.version, view.checksum, view.tenant, view.has_tail, view.priority);
        assert_eq!(before.as_ref().map(facts), Some(facts(&view)));
        // Never anything but the last write.
        assert_eq!(Some(&view.version.0), self.last.get(&key));
        self.pins.push((pin, view));
    }

    /// Compares every byte that a reader may see, now that memory has moved under all of them.
    fn check(&self) {
        self.store.check();
        for key in 0..KEYS {
            if let Some(view) = self.store.peek(digest(key)) {
                assert_eq!(Some(&view.version.0), self.last.get(&key));
                self.compare(&view, true);
            }
        }
        // A removed object's tail is not read any more. Lent extents stay where they are.
        for (pin, view) in &self.pins {
            assert_eq!(self.store.held(*pin).map(|held| held.extent), Some(view.extent));
            self.compare(view, false);
        }
    }

    fn compare(&self, view: &ObjectView, with_tail: bool) {
        let made = self.versions[&view.version.0];
        assert_eq!(view.is_far, view.extent.offset >= POOL_BYTES, "{view:?}");
        assert!(self.memory.has(view.extent.offset, &pattern(made.seed, view.extent.bytes)), "{view:?}");
        assert_eq!(view.checksum, made.seed);
        if with_tail && view.has_tail {
            let tail = pattern(!made.seed, made.tail_bytes.into());
            assert!(self.memory.has(view.tail_at, &tail), "the tail of {view:?}");
        }
    }

    fn far(&self) -> FarPoolStats {
        far_pool_stats(&self.store)
    }

    /// Ends everything, and checks that all memory is free again.
    fn end(mut self) {
        for (pin, _) in std::mem::take(&mut self.pins) {
            self.store.unpin(pin).expect("a pin that is held");
        }
        for put in std::mem::take(&mut self.puts) {
            self.store.abort(put.reservation).expect("a reservation that is held");
        }
        self.store.remove_all();
        self.last.clear();
        self.check();
        let (stats, far) = (self.store.stats(), self.far());
        assert_eq!((stats.used_bytes, far.used_bytes, far.objects), (0, 0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn readers_see_the_bytes_that_were_put_in_whatever_memory_they_are(
        ops in prop::collection::vec(op(), 1..300),
        eviction in prop::sample::select(&Eviction::ALL[..]),
        unit_bytes in prop::sample::select(&[256, 512, 1024][..]),
    ) {
        let mut rig = Rig::new(eviction, unit_bytes);
        ops.iter().for_each(|op| rig.apply(op));
        rig.end();
    }
}

/// Store with room for four of these tests' objects in DRAM, and for `far` in far memory.
fn small(eviction: Eviction, far: u64) -> Rig {
    let config = StoreConfig { eviction, max_objects: 32, protected_percent: 40, ..StoreConfig::for_pool(POOL_BYTES) };
    Rig::with(StoreConfig { max_object_bytes: 8 * KIB, far_pool_bytes: far * OBJECT_SPACE, ..config })
}

/// Bytes of the objects of these tests, and the space that one takes with its tail.
const OBJECT_BYTES: u64 = 5888;
const OBJECT_SPACE: u64 = 6 * KIB;

fn put(rig: &mut Rig, key: u8, keep: Keep) {
    let plain = Reserve::plain(digest(key), OBJECT_BYTES);
    rig.put(key, &Reserve { tail_bytes: 60, has_tail: true, keep, ..plain });
    rig.apply(&Op::Commit(0));
}

fn get(rig: &mut Rig, key: u8) {
    rig.apply(&Op::Get { key });
    rig.apply(&Op::Unpin(0));
}

/// Returns the keys of the objects in DRAM, and of those in far memory.
fn places(rig: &Rig) -> (Vec<u8>, Vec<u8>) {
    let present = (0..KEYS).filter(|key| rig.store.exists(digest(*key)));
    present.partition(|key| !rig.store.peek(digest(*key)).expect("it exists").is_far)
}

#[test]
fn eviction_demotes_and_drops_the_coldest_of_far_memory_only() {
    let mut rig = small(Eviction::SegmentedLru, 3);
    (1..=7).for_each(|key| put(&mut rig, key, Keep::default()));
    assert_eq!(places(&rig), (vec![4, 5, 6, 7], vec![1, 2, 3]));
    assert_eq!(rig.store.stats().evictions, 0);
    (8..=9).for_each(|key| put(&mut rig, key, Keep::default()));
    assert_eq!(places(&rig), (vec![6, 7, 8, 9], vec![3, 4, 5]));
    let far = rig.far();
    assert_eq!(
        (far.demotions, far.demoted_bytes, far.evictions, far.evicted_bytes),
        (5, 5 * OBJECT_BYTES, 2, 2 * OBJECT_BYTES)
    );
    assert_eq!((far.objects, far.used_bytes, far.pool_bytes), (3, 3 * OBJECT_SPACE, 3 * OBJECT_SPACE));
    assert_eq!(rig.store.stats().evictions, 2);
    rig.end();
}

#[test]
fn the_second_get_from_far_memory_promotes() {
    for eviction in [Eviction::SegmentedLru, Eviction::S3Fifo] {
        let mut rig = small(eviction, 3);
        (1..=5).for_each(|key| put(&mut rig, key, Keep::default()));
        let (_, far) = places(&rig);
        let [key] = far[..] else { panic!("{far:?}") };
        get(&mut rig, key);
        assert_eq!(places(&rig).1, [key], "{eviction}: it is served from where it is");
        get(&mut rig, key);
        let (near, far) = places(&rig);
        assert!(near.contains(&key) && far.len() == 1, "{eviction}: it has changed places with the coldest");
        let stats = rig.far();
        assert_eq!((stats.hits, stats.promotions, stats.promoted_bytes), (2, 1, OBJECT_BYTES));
        assert_eq!(rig.store.stats().evictions, 0);
        rig.end();
    }
}

#[test]
fn plain_lru_promotes_at_each_get() {
    let mut rig = small(Eviction::Lru, 3);
    (1..=5).for_each(|key| put(&mut rig, key, Keep::default()));
    get(&mut rig, 1);
    assert_eq!(places(&rig), (vec![1, 3, 4, 5], vec![2]));
    rig.end();
}

#[test]
fn an_object_that_others_read_stays_where_they_read_it() {
    let mut rig = small(Eviction::Lru, 1);
    (1..=4).for_each(|key| put(&mut rig, key, Keep::default()));
    rig.apply(&Op::Get { key: 1 });
    put(&mut rig, 5, Keep::default());
    assert_eq!(places(&rig).1, [2], "the one that is read is not demoted");
    rig.store.unpin(rig.pins.pop().expect("a pin").0).expect("it is held");
    // A background read of an object in far memory.
    let held = rig.store.hold(digest(2)).expect("it is there");
    rig.pins.push(held);
    get(&mut rig, 2);
    assert_eq!(rig.far().promotions, 0);
    rig.end();
}

#[test]
fn promotions_wait_when_their_allowance_is_used_up() {
    let mut rig = small(Eviction::Lru, 3);
    (1..=5).for_each(|key| put(&mut rig, key, Keep::default()));
    // Each get of the coldest moves it, and the next one takes its place in far memory.
    let mut gets = 0u64;
    while rig.far().promotions == gets {
        let coldest = places(&rig).1[0];
        rig.store.get(digest(coldest)).map(|(pin, _)| rig.store.unpin(pin)).expect("it is there").expect("it is held");
        gets += 1;
    }
    assert!(gets * OBJECT_BYTES > 64 << 20, "{gets} gets promoted so many bytes at once");
    let promoted = rig.far().promotions;
    get(&mut rig, 1);
    get(&mut rig, 2);
    assert_eq!(rig.far().promotions, promoted);
    rig.store.tick(1_000_000_000);
    let coldest = places(&rig).1[0];
    get(&mut rig, coldest);
    assert_eq!(rig.far().promotions, promoted + 1);
    rig.end();
}

#[test]
fn places_do_not_grow_however_often_an_object_moves() {
    for unit_bytes in [256, 2048] {
        let config = StoreConfig { eviction: Eviction::Lru, unit_bytes, ..StoreConfig::for_pool(POOL_BYTES) };
        let mut rig = Rig::with(StoreConfig { far_pool_bytes: FAR_BYTES, ..config });
        (1..=6).for_each(|key| put(&mut rig, key, Keep::default()));
        let before = (rig.store.stats().used_bytes, rig.far().used_bytes);
        for round in 0..20 {
            let coldest = places(&rig).1[0];
            get(&mut rig, coldest);
            let now = (rig.store.stats().used_bytes, rig.far().used_bytes);
            assert!(now.0 <= POOL_BYTES && now.1 <= before.1 + 2 * unit_bytes, "{round}: {now:?} after {before:?}");
        }
        assert_eq!(rig.store.stats().evictions, 0);
        rig.end();
    }
}

#[test]
fn a_full_table_drops_the_coldest_of_far_memory() {
    let mut rig = small(Eviction::SegmentedLru, 28);
    // As many as there are entries: the next one needs another's.
    for key in 0..32 {
        let plain = Reserve::plain(digest(key), 3000);
        rig.put(key, &plain);
        rig.apply(&Op::Commit(0));
    }
    assert_eq!(rig.store.stats().objects, 32);
    assert!(rig.far().objects > 20);
    rig.put(40, &Reserve::plain(digest(40), 3000));
    rig.apply(&Op::Commit(0));
    assert!(!rig.store.exists(digest(0)) && rig.store.exists(digest(1)));
    assert_eq!((rig.store.stats().objects, rig.far().evictions), (32, 1));
    rig.last.clear();
    rig.store.remove_all();
    rig.end();
}

#[test]
fn a_tenant_at_its_lease_loses_its_own_objects_of_far_memory_first() {
    let mut rig = small(Eviction::SegmentedLru, 8);
    let account = rig.store.tenants().account_of(1).expect("it is configured");
    let keep = Keep { account, ..Keep::default() };
    // Its lease is two objects. The other tenant's are read, so that its own one is demoted.
    put(&mut rig, 1, keep);
    (2..=4).for_each(|key| put(&mut rig, key, Keep::default()));
    (2..=4).for_each(|key| rig.apply(&Op::Get { key }));
    put(&mut rig, 5, Keep::default());
    (2..=4).for_each(|_| rig.apply(&Op::Unpin(0)));
    put(&mut rig, 6, keep);
    let (_, far) = places(&rig);
    assert!(far.len() == 2 && far[0] == 1, "{far:?}");
    put(&mut rig, 7, keep);
    assert!(!rig.store.exists(digest(1)), "its coldest");
    assert_eq!((rig.store.stats().evictions, rig.far().evictions), (1, 1));
    rig.end();
}

#[test]
fn a_group_moves_together() {
    let mut rig = small(Eviction::SegmentedLru, 3);
    let keep = Keep { group: 7, ..Keep::default() };
    for (key, keep) in [(1, keep), (2, Keep::default()), (3, keep), (4, Keep::default()), (5, Keep::default())] {
        put(&mut rig, key, keep);
    }
    assert_eq!(places(&rig), (vec![2, 4, 5], vec![1, 3]));
    (6..=8).for_each(|key| put(&mut rig, key, Keep::default()));
    let (_, far) = places(&rig);
    assert!(!far.contains(&1) && !far.contains(&3), "{far:?}: and is dropped together");
    rig.end();
}

#[test]
fn pinned_objects_keep_their_rank_in_far_memory() {
    let mut rig = small(Eviction::SegmentedLru, 2);
    (1..=6).for_each(|key| put(&mut rig, key, Keep::default()));
    assert_eq!(places(&rig).1, [1, 2]);
    ObjectPins::from(&mut rig.store).retain(digest(1), 3, 1000).expect("within the limits");
    put(&mut rig, 7, Keep::default());
    assert_eq!(places(&rig).1, [1, 3], "the retained one stays");
    ObjectPins::from(&mut rig.store).release(0, 3);
    ObjectPins::from(&mut rig.store).pin_softly(digest(3), 1000).expect("it is there");
    put(&mut rig, 8, Keep::default());
    assert_eq!(places(&rig).1, [3, 4], "so does the softly pinned one, while there is another");
    rig.end();
}

#[test]
fn a_store_without_an_open_far_pool_evicts_from_dram() {
    let config = StoreConfig { far_pool_bytes: FAR_BYTES, ..StoreConfig::for_pool(POOL_BYTES) };
    let mut store = Store::new(config, Version(1)).expect("valid limits");
    for key in 0..20 {
        let (reservation, _) = store.reserve(digest(key), 4 * KIB).expect("there is room");
        store.commit(reservation, 0).expect("it is new");
    }
    let stats = store.stats();
    let far = far_pool_stats(&store);
    assert_eq!((stats.evictions, far.objects, far.demotions), (14, 0, 0));
}

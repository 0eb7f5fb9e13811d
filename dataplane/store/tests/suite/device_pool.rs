//! Tests of the device pool: objects move between two pools of real bytes at random, while others are put, read,
//! replaced and removed, and every byte that a reader may see is compared.

use std::collections::BTreeMap;

use kvplane_proto::ids::{PinId, ReservationId, Version};
use kvplane_proto::tenants::TenantLease;
use kvplane_store::eviction::Eviction;
use kvplane_store::{Keep, NoMove, ObjectView, PoolMove, Reserve, Store, StoreConfig};
use proptest::prelude::*;

use crate::support::objects::{Contents, digest, pattern};

const KIB: u64 = 1024;
const POOL_BYTES: u64 = 24 * KIB;
const DEVICE_BYTES: u64 = 16 * KIB;

#[derive(Clone, Debug)]
enum Op {
    Put {
        key: u8,
        bytes: u64,
        tail_bytes: u32,
        replace: bool,
        tenant: u32,
    },
    Commit(usize),
    Get {
        key: u8,
    },
    Unpin(usize),
    Remove {
        key: u8,
    },
    Promote {
        key: u8,
    },
    Demote {
        key: u8,
    },
    DemoteVictim,
    /// Copies the bytes of a move and finishes it.
    Finish(usize),
    Cancel(usize),
    LoseDevice,
}

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![4 => Just(2048u64), 3 => 1..3000u64, 1 => 3000..9000u64];
    let tail = prop_oneof![Just(0), 1..60u32, 0..2000u32];
    let key = || 0..12u8;
    prop_oneof![
        9 => (key(), size, tail, prop::bool::weighted(0.3), 0..3u32).prop_map(
            |(key, bytes, tail_bytes, replace, tenant)| Op::Put { key, bytes, tail_bytes, replace, tenant }
        ),
        9 => any::<usize>().prop_map(Op::Commit),
        6 => key().prop_map(|key| Op::Get { key }),
        5 => any::<usize>().prop_map(Op::Unpin),
        2 => key().prop_map(|key| Op::Remove { key }),
        6 => key().prop_map(|key| Op::Promote { key }),
        3 => key().prop_map(|key| Op::Demote { key }),
        2 => Just(Op::DemoteVictim),
        9 => any::<usize>().prop_map(Op::Finish),
        2 => any::<usize>().prop_map(Op::Cancel),
        1 => prop::bool::weighted(0.05).prop_map(|is_lost| if is_lost { Op::LoseDevice } else { Op::DemoteVictim }),
    ]
}

struct Put {
    reservation: ReservationId,
    made: Contents,
}

/// Store with the bytes of both pools, and what they are expected to be.
struct Rig {
    store: Store,
    pool: Vec<u8>,
    device: Vec<u8>,
    /// Versions that were committed, by number.
    versions: BTreeMap<u64, Contents>,
    puts: Vec<Put>,
    pins: Vec<(PinId, ObjectView)>,
    moves: Vec<PoolMove>,
    seed: u64,
    is_lost: bool,
}

impl Rig {
    fn new(eviction: Eviction) -> Self {
        let config = StoreConfig {
            eviction,
            device_pool_bytes: DEVICE_BYTES,
            max_objects: 20,
            max_object_bytes: 9 * KIB,
            protected_percent: 40,
            max_pins: 12,
            max_reservations: 8,
            ..StoreConfig::for_pool(POOL_BYTES)
        };
        let mut store = Store::new(config, Version(100)).expect("valid limits");
        let leases = [TenantLease { number: 1, dram_bytes: Some(12 * KIB), weight: 1 }];
        store.tenants_mut().set(&leases);
        Self {
            store,
            pool: vec![0; POOL_BYTES as usize],
            device: vec![0; DEVICE_BYTES as usize],
            versions: BTreeMap::new(),
            puts: Vec::new(),
            pins: Vec::new(),
            moves: Vec::new(),
            seed: 0,
            is_lost: false,
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Put { key, bytes, tail_bytes, replace, tenant } => {
                let account = self.store.tenants_mut().account_of_unconfigured(tenant);
                let plain = Reserve::plain(digest(key), bytes);
                let keep = Keep { account, ..plain.keep };
                self.put(&Reserve { tail_bytes, has_tail: tail_bytes > 0, replace, keep, ..plain });
            }
            Op::Commit(pick) if !self.puts.is_empty() => {
                let Put { reservation, made } = self.puts.swap_remove(pick % self.puts.len());
                if let Ok(version) = self.store.commit(reservation, made.seed) {
                    self.versions.insert(version.0, made);
                }
            }
            Op::Get { key } => {
                if let Ok((pin, view)) = self.store.get(digest(key)) {
                    self.pins.push((pin, view));
                }
            }
            Op::Unpin(pick) if !self.pins.is_empty() => {
                let (pin, _) = self.pins.swap_remove(pick % self.pins.len());
                self.store.unpin(pin).expect("a pin that is held");
            }
            Op::Remove { key } => {
                self.store.remove(digest(key));
            }
            Op::Promote { key } => self.begin(|store| store.moves().promote(digest(key))),
            Op::Demote { key } => self.begin(|store| store.moves().demote(digest(key))),
            Op::DemoteVictim => {
                if let Some(victim) = self.store.moves().victim() {
                    self.begin(|store| store.moves().demote(victim));
                }
            }
            Op::Finish(pick) if !self.moves.is_empty() => {
                let one = self.moves.swap_remove(pick % self.moves.len());
                self.finish(&one);
            }
            Op::Cancel(pick) if !self.moves.is_empty() => {
                let one = self.moves.swap_remove(pick % self.moves.len());
                self.store.moves().cancel(&one);
            }
            Op::LoseDevice => {
                self.is_lost = true;
                self.store.moves().lose_device();
                let moves = std::mem::take(&mut self.moves);
                moves.iter().for_each(|one| self.store.moves().abandon(one));
                self.device.fill(0xee);
            }
            Op::Commit(_) | Op::Unpin(_) | Op::Finish(_) | Op::Cancel(_) => {}
        }
        self.check();
    }

    fn put(&mut self, wanted: &Reserve) {
        let Ok((reservation, extent)) = self.store.reserve_for(wanted) else { return };
        self.seed += 1;
        let made = Contents { seed: self.seed, tail_bytes: wanted.tail_bytes };
        let at = extent.offset as usize;
        self.pool[at..at + extent.bytes as usize].copy_from_slice(&pattern(made.seed, extent.bytes));
        let entry = self.store.reserved(reservation).expect("it was just made");
        let (at, room) = (self.store.pool().tail_at(entry) as usize, self.store.pool().tail_room(entry));
        assert!(room >= wanted.tail_bytes.into(), "{room} for a tail of {}", wanted.tail_bytes);
        let tail = pattern(!made.seed, wanted.tail_bytes.into());
        self.pool[at..at + tail.len()].copy_from_slice(&tail);
        self.puts.push(Put { reservation, made });
    }

    fn begin(&mut self, begin: impl FnOnce(&mut Store) -> Result<PoolMove, NoMove>) {
        if let Ok(one) = begin(&mut self.store) {
            assert!(!self.is_lost, "nothing moves to or from a device that is lost");
            self.moves.push(one);
        }
    }

    fn finish(&mut self, one: &PoolMove) {
        let (from, to) = if one.is_promotion { (&self.pool, &mut self.device) } else { (&self.device, &mut self.pool) };
        let (at, end) = (one.from as usize, (one.from + one.bytes) as usize);
        to[one.to as usize..(one.to + one.bytes) as usize].copy_from_slice(&from[at..end]);
        if let Some(tail) = one.tail {
            let (at, end) = (tail.from as usize, (tail.from + tail.bytes) as usize);
            self.pool.copy_within(at..end, tail.to as usize);
        }
        let before = self.store.peek(one.digest);
        if self.store.moves().finish(one) {
            let (before, after) = (before.expect("it is visible"), self.store.peek(one.digest).expect("it stays so"));
            assert_eq!(after.is_on_device, one.is_promotion, "it is where it moved to");
            let facts = |view: &ObjectView| (view.version, view.checksum, view.tenant, view.has_tail, view.replica);
            assert_eq!(facts(&before), facts(&after), "and is otherwise the same object");
        }
    }

    /// Compares every byte that a reader may see.
    fn check(&self) {
        self.store.check();
        let visible = (0..12).filter_map(|key| self.store.peek(digest(key)));
        visible.for_each(|view| self.compare(&view, true));
        // A removed object's tail is not read any more.
        self.pins.iter().for_each(|(_, view)| self.compare(view, false));
    }

    fn compare(&self, view: &ObjectView, with_tail: bool) {
        if view.is_on_device && self.is_lost {
            return;
        }
        let made = self.versions[&view.version.0];
        let memory = if view.is_on_device { &self.device } else { &self.pool };
        let at = view.extent.offset as usize;
        assert!(memory[at..at + view.extent.bytes as usize] == pattern(made.seed, view.extent.bytes), "{view:?}");
        assert_eq!(view.checksum, made.seed);
        if with_tail && view.has_tail {
            let at = view.tail_at as usize;
            let tail = &self.pool[at..at + made.tail_bytes as usize];
            assert!(*tail == pattern(!made.seed, made.tail_bytes.into()), "the tail of {view:?}");
        }
    }

    /// Ends everything, and checks that all memory is free again but what a lost device may still write to.
    fn end(mut self) {
        for one in std::mem::take(&mut self.moves) {
            self.finish(&one);
        }
        for (pin, _) in std::mem::take(&mut self.pins) {
            self.store.unpin(pin).expect("a pin that is held");
        }
        for put in std::mem::take(&mut self.puts) {
            let _ = self.store.abort(put.reservation);
        }
        self.store.remove_all();
        self.check();
        let stats = self.store.stats();
        assert_eq!((stats.used_bytes, stats.device.used_bytes), (stats.quarantined_bytes, 0));
        assert!(self.is_lost || stats.quarantined_bytes == 0, "{stats:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn readers_see_the_bytes_that_were_put_wherever_they_move(
        ops in prop::collection::vec(op(), 1..300),
        eviction in prop::sample::select(&[Eviction::SegmentedLru, Eviction::S3Fifo][..]),
    ) {
        let mut rig = Rig::new(eviction);
        ops.iter().for_each(|op| rig.apply(op));
        rig.end();
    }
}

/// Puts an object and accesses it this often.
fn put(rig: &mut Rig, key: u8, bytes: u64, accesses: usize) {
    rig.put(&Reserve { tail_bytes: 60, has_tail: true, ..Reserve::plain(digest(key), bytes) });
    rig.apply(&Op::Commit(0));
    for _ in 0..accesses {
        rig.apply(&Op::Get { key });
        rig.apply(&Op::Unpin(0));
    }
}

/// Moves an object and finishes the move.
fn relocate(rig: &mut Rig, op: &Op) {
    rig.apply(op);
    assert_eq!(rig.moves.len(), 1, "it moves");
    rig.apply(&Op::Finish(0));
}

#[test]
fn only_objects_that_were_accessed_again_are_hot() {
    let mut rig = Rig::new(Eviction::SegmentedLru);
    put(&mut rig, 1, 4096, 0);
    put(&mut rig, 2, 4096, 1);
    assert!(!rig.store.is_hot(digest(1)) && rig.store.is_hot(digest(2)) && !rig.store.is_hot(digest(3)));
    relocate(&mut rig, &Op::Promote { key: 2 });
    assert!(!rig.store.is_hot(digest(2)), "it is in the device pool already");
    assert_eq!(rig.store.moves().promote(digest(2)), Err(NoMove::NotThere));
    assert_eq!(rig.store.moves().demote(digest(1)), Err(NoMove::NotThere));
    rig.end();
}

#[test]
fn a_promotion_frees_memory_for_others_and_the_coldest_leaves_the_device_pool_first() {
    let mut rig = Rig::new(Eviction::SegmentedLru);
    for key in 1..=3 {
        put(&mut rig, key, 5000, 1);
        relocate(&mut rig, &Op::Promote { key });
    }
    // The tails stay in memory, and nothing else.
    assert_eq!((rig.store.stats().used_bytes, rig.store.stats().device.objects), (3 * 256, 3));
    put(&mut rig, 4, 5000, 1);
    assert_eq!(rig.store.moves().promote(digest(4)), Err(NoMove::NoRoom));
    // The first and the third are accessed again.
    for key in [1, 3] {
        rig.apply(&Op::Get { key });
        rig.apply(&Op::Unpin(0));
    }
    assert_eq!(rig.store.moves().victim(), Some(digest(2)));
    relocate(&mut rig, &Op::DemoteVictim);
    relocate(&mut rig, &Op::Promote { key: 4 });
    let places: Vec<bool> = (1..=4).map(|key| rig.store.peek(digest(key)).unwrap().is_on_device).collect();
    assert_eq!(places, [true, false, true, true]);
    assert_eq!(rig.store.stats().evictions, 0);
    rig.end();
}

#[test]
fn places_do_not_grow_however_often_an_object_moves() {
    let mut rig = Rig::new(Eviction::SegmentedLru);
    put(&mut rig, 1, 5000, 1);
    let before = rig.store.stats();
    for _ in 0..10 {
        relocate(&mut rig, &Op::Promote { key: 1 });
        relocate(&mut rig, &Op::Demote { key: 1 });
    }
    assert_eq!(rig.store.stats().used_bytes, before.used_bytes);
    rig.end();
}

#[test]
fn an_object_that_was_replaced_during_its_move_stays_replaced() {
    let mut rig = Rig::new(Eviction::SegmentedLru);
    put(&mut rig, 1, 5000, 1);
    rig.apply(&Op::Promote { key: 1 });
    rig.put(&Reserve { replace: true, ..Reserve::plain(digest(1), 3000) });
    rig.apply(&Op::Commit(0));
    rig.apply(&Op::Finish(0));
    let view = rig.store.peek(digest(1)).expect("the new version");
    assert_eq!((view.extent.bytes, view.is_on_device), (3000, false));
    assert_eq!(rig.store.stats().device.used_bytes, 0);
    rig.end();
}

#[test]
fn objects_that_more_than_the_policy_keeps_stay_in_memory() {
    let mut rig = Rig::new(Eviction::SegmentedLru);
    let plain = Reserve::plain(digest(1), 5000);
    for keep in [
        Keep { hard_pin: true, ..plain.keep },
        Keep { soft_pin_ns: 1 << 40, ..plain.keep },
        Keep { group: 7, ..plain.keep },
    ] {
        rig.put(&Reserve { keep, replace: true, ..plain });
        rig.apply(&Op::Commit(0));
        rig.apply(&Op::Get { key: 1 });
        assert_eq!((rig.store.is_hot(digest(1)), rig.store.moves().promote(digest(1))), (false, Err(NoMove::NotThere)));
        rig.apply(&Op::Unpin(0));
    }
    rig.end();
}

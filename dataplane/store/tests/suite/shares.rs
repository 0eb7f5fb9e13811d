//! Tests of tenants with a part of the pool, under every policy: the policy's limits are relative to that part.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{PinId, Version};
use kvplane_proto::tenants::TenantLease;
use kvplane_store::eviction::Eviction;
use kvplane_store::{Keep, Reserve, ReserveError, Store, StoreConfig};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
/// Size of an object in most of these tests.
const OBJECT: u64 = 1_000_000;

/// Store with some tenants, and the objects that each has put.
struct SharedStore {
    store: Store,
    accounts: Vec<u16>,
}

impl SharedStore {
    /// Creates a pool with tenants from 1 on, each with that lease or none.
    fn new(config: StoreConfig, leases: &[Option<u64>]) -> Self {
        let mut store = Store::new(config, Version(1)).expect("it is valid");
        let numbers = 1..=leases.len() as u32;
        let told: Vec<_> = numbers
            .clone()
            .zip(leases)
            .map(|(number, lease)| TenantLease { number, dram_bytes: *lease, weight: 1 })
            .collect();
        store.tenants_mut().set(&told);
        let accounts = numbers.map(|number| store.tenants().account_of(number).expect("it was told")).collect();
        Self { store, accounts }
    }

    fn put(&mut self, tenant: usize, key: u64, bytes: u64) -> Result<(), ReserveError> {
        let keep = Keep { account: self.accounts[tenant], ..Keep::default() };
        let (reservation, _) =
            self.store.reserve_for(&Reserve { keep, ..Reserve::plain(digest(tenant, key), bytes) })?;
        self.store.commit(reservation, 0).expect("nobody else puts it");
        Ok(())
    }

    fn read(&mut self, tenant: usize, key: u64) {
        let pin = self.pin(tenant, key);
        self.store.unpin(pin).expect("it is held");
    }

    fn pin(&mut self, tenant: usize, key: u64) -> PinId {
        self.store.get(digest(tenant, key)).expect("it is there").0
    }

    fn there(&self, tenant: usize, keys: core::ops::Range<u64>) -> usize {
        keys.filter(|key| self.store.exists(digest(tenant, *key))).count()
    }
}

fn digest(tenant: usize, key: u64) -> Digest {
    Digest(((tenant as u128) << 64) | (u128::from(key) + 1))
}

fn pool(eviction: Eviction, mib: u64) -> StoreConfig {
    StoreConfig { eviction, ..StoreConfig::for_pool(mib * MIB) }
}

#[test]
fn a_tenant_with_a_small_lease_keeps_new_objects_after_reading_all_former_ones() {
    for eviction in Eviction::ALL {
        let mut shared = SharedStore::new(pool(eviction, 256), &[Some(32 * MIB)]);
        for key in 0..31 {
            shared.put(0, key, OBJECT).expect("there is room");
            shared.read(0, key);
        }
        for key in 1000..1060 {
            shared.put(0, key, OBJECT).expect("it makes room among its own");
        }
        let kept = shared.there(0, 1000..1060);
        assert!(kept >= 25, "{eviction}: {kept} of 60 new objects are there");
        shared.store.check();
    }
}

#[test]
fn a_tenant_with_a_small_lease_keeps_new_objects_while_some_former_ones_are_pinned() {
    for eviction in Eviction::ALL {
        let mut shared = SharedStore::new(pool(eviction, 256), &[Some(32 * MIB)]);
        (0..31).for_each(|key| shared.put(0, key, OBJECT).expect("there is room"));
        let pins: Vec<_> = (0..31).step_by(4).map(|key| shared.pin(0, key)).collect();
        (0..31).for_each(|key| shared.read(0, key));
        for key in 1000..1060 {
            shared.put(0, key, OBJECT).expect("it makes room among its own");
        }
        let kept = shared.there(0, 1000..1060);
        assert!(kept >= 18, "{eviction}: {kept} of 60 new objects are there beside {} held ones", pins.len());
        assert_eq!((0..31).step_by(4).filter(|key| shared.there(0, *key..key + 1) == 1).count(), pins.len());
        // The objects that were pinned longest are evicted first now.
        pins.into_iter().for_each(|pin| shared.store.unpin(pin).expect("it is held"));
        for key in 2000..2060 {
            shared.put(0, key, OBJECT).expect("it makes room among its own");
        }
        let kept = shared.there(0, 2000..2060);
        assert!(kept >= 25, "{eviction}: {kept} of 60 newer objects are there");
        shared.store.check();
    }
}

#[test]
fn tenants_without_leases_keep_new_objects_in_their_share_of_the_pool() {
    for eviction in Eviction::ALL {
        let mut shared = SharedStore::new(pool(eviction, 64), &[None; 8]);
        for key in 0..7 {
            for tenant in 0..8 {
                shared.put(tenant, key, OBJECT).expect("there is room");
                shared.read(tenant, key);
            }
        }
        for key in 1000..1016 {
            (0..8).for_each(|tenant| shared.put(tenant, key, OBJECT).expect("there is room to be made"));
        }
        for tenant in 0..8 {
            let kept = shared.there(tenant, 1000..1016);
            assert!(kept >= 5, "{eviction}: tenant {tenant} has {kept} of 16 new objects");
        }
        shared.store.check();
    }
}

#[test]
fn a_store_that_runs_out_of_entries_before_memory_keeps_new_objects() {
    for eviction in Eviction::ALL {
        let config = StoreConfig { max_objects: 100, ..pool(eviction, 64) };
        let mut shared = SharedStore::new(config, &[None]);
        for key in 0..100 {
            shared.put(0, key, 4096).expect("there is room");
            shared.read(0, key);
        }
        (1000..1200).for_each(|key| shared.put(0, key, 4096).expect("there is room to be made"));
        let kept = shared.there(0, 1000..1200);
        assert!(kept >= 75, "{eviction}: {kept} of 200 new objects are there");
        shared.store.check();
    }
}

#[test]
fn many_tiny_objects_of_one_tenant_cost_no_other_tenant_its_entries() {
    for eviction in Eviction::ALL {
        let config = StoreConfig { max_objects: 1024, ..pool(eviction, 64) };
        let mut shared = SharedStore::new(config, &[None, None]);
        (0..20).for_each(|key| shared.put(0, key, OBJECT).expect("there is room"));
        (0..5000).for_each(|key| shared.put(1, key, 256).expect("it makes room among its own"));
        assert_eq!(shared.there(0, 0..20), 20, "{eviction}: others took what is within its share");
        assert!(shared.there(1, 0..5000) >= 500, "{eviction}: the tenant has its share of the entries");
        shared.store.check();
    }
}

#[test]
fn hard_pins_are_limited_to_a_share_of_a_tenants_lease() {
    let mut shared = SharedStore::new(pool(Eviction::SegmentedLru, 256), &[Some(32 * MIB), None]);
    let pinned = |shared: &mut SharedStore, tenant: usize, key| {
        let keep = Keep { account: shared.accounts[tenant], hard_pin: true, ..Keep::default() };
        let wanted = Reserve { keep, ..Reserve::plain(digest(tenant, key), MIB) };
        let reserved = shared.store.reserve_for(&wanted);
        reserved.map(|(reservation, _)| shared.store.commit(reservation, 0).expect("nobody else puts it"))
    };
    let refused: Vec<_> = (0..40).filter_map(|key| pinned(&mut shared, 0, key).err()).collect();
    assert_eq!(refused.len(), 32);
    let limit = ReserveError::PinLimit { pinned_bytes: 8 * MIB, limit_bytes: 8 * MIB, of_tenant: true };
    assert_eq!(refused[0], limit);
    assert!(limit.to_string().contains("8388608 bytes of the tenant are hard pinned"), "{limit}");
    let lease = shared.store.tenants().uses().into_iter().find(|tenant| tenant.number == 1).expect("it was told");
    assert_eq!(lease.refused, 32, "who divides the quota hears of it");
    (1000..1060).for_each(|key| shared.put(0, key, MIB).expect("it makes room among its own"));
    // Other tenants can hard pin the rest of the pool's limit.
    assert_eq!((0..100).filter(|key| pinned(&mut shared, 1, *key).is_ok()).count(), 64 - 8);
    shared.store.check();
}

#[test]
fn an_object_longer_than_a_tenants_lease_is_refused_for_that_and_evicts_nothing() {
    let mut shared = SharedStore::new(pool(Eviction::SegmentedLru, 64), &[Some(4 * MIB)]);
    (0..3).for_each(|key| shared.put(0, key, OBJECT).expect("there is room"));
    let error = shared.put(0, 9, 5 * MIB).expect_err("it is longer than the lease");
    assert_eq!(error, ReserveError::Quota { bytes: 5 * MIB, lease_bytes: 4 * MIB, held_bytes: 0 });
    let said = error.to_string();
    assert!(said.contains("5242880 bytes exceeds the 4194304 bytes of its tenant's quota"), "{said}");
    assert_eq!(shared.there(0, 0..3), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For any lease, sizes and accesses: of the latest objects, half a lease's worth is kept.
    #[test]
    fn the_latest_objects_are_kept_for_any_lease(
        eviction in prop::sample::select(&[Eviction::SegmentedLru, Eviction::Lru][..]),
        lease_mib in 2..64u64,
        bytes in 20_000..200_000u64,
        reads in 0..4usize,
        old_share in 1..4u64,
    ) {
        let mut shared = SharedStore::new(pool(eviction, 128), &[Some(lease_mib * MIB)]);
        let fit = lease_mib * MIB / bytes.next_multiple_of(256);
        for key in 0..fit * old_share / 2 {
            shared.put(0, key, bytes).expect("there is room");
            (0..reads).for_each(|_| shared.read(0, key));
        }
        for key in 10_000..10_000 + 2 * fit {
            shared.put(0, key, bytes).expect("it makes room among its own");
        }
        let last = 10_000 + 2 * fit - fit / 2..10_000 + 2 * fit;
        prop_assert_eq!(shared.there(0, last.clone()) as u64, last.end - last.start);
        shared.store.check();
    }
}

/// The object is stored already, and charged at its source: if it were refused, it would be lost.
#[test]
fn imports_are_accepted_beyond_lease_and_pin_limits() {
    let config = StoreConfig { hard_pin_percent: 10, ..pool(Eviction::default(), 16) };
    let mut tenants = SharedStore::new(config, &[Some(0)]);
    let keep = Keep { account: tenants.accounts[0], hard_pin: true, ..Keep::default() };
    for key in 0..8 {
        let plain = Reserve { keep, ..Reserve::plain(digest(0, key), MIB) };
        assert!(tenants.store.reserve_for(&plain).is_err(), "a put of the tenant");
        let (reservation, _) = tenants.store.reserve_for(&Reserve { moves: true, ..plain }).expect("the pool has room");
        tenants.store.commit(reservation, 0).expect("nobody else puts it");
    }
    assert_eq!(tenants.there(0, 0..8), 8);
    assert!(!tenants.store.tenants().pins_allow(tenants.store.pool().granules_of(1)));
}

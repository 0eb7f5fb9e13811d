//! Tests of limits of tenants: whose records are evicted, which ones, and what reclaim keeps.

use std::collections::BTreeSet;

use kvplane_proto::digest::Digest;
use kvplane_tier::{Ack, PutError, TenantLimit, TierConfig, TierUse};
use proptest::prelude::*;

use crate::support::model::Promise;
use crate::support::world::World;
use crate::support::{small, tenant_of};

/// Returns the `number`th digest of a tenant.
fn digest(tenant: u32, number: u64) -> Digest {
    let of = |salt: u64| Digest::of(&salt.to_le_bytes(), &number.to_le_bytes());
    (0..).map(of).find(|digest| tenant_of(digest.to_string().as_bytes()) == tenant).expect("one of some")
}

fn limit(number: u32, bytes: u64) -> TenantLimit {
    TenantLimit { number, bytes }
}

fn use_of(world: &mut World, number: u32) -> TierUse {
    world.tier.tenants().uses().into_iter().find(|one| one.number == number).unwrap_or_default()
}

/// Returns a device with room for some hundred records.
fn world() -> World {
    let mut world = World::new(TierConfig { segments: 16, max_records: 4000, ..small(512) }, 1);
    world.until_recovered();
    world.settle();
    world
}

/// Puts an object, retrying while that is useful.
fn put(world: &mut World, digest: Digest, bytes: u32, pinned: bool) -> Result<(), PutError> {
    for _ in 0..10_000 {
        match world.put(digest, bytes, pinned, Ack::Buffered) {
            Ok(_) => {
                world.settle();
                return Ok(());
            }
            Err(PutError::Full | PutError::Busy) => world.settle(),
            Err(error) => return Err(error),
        }
    }
    panic!("a put is refused time and again: {:?}", world.tier.stats());
}

fn there(world: &World, tenant: u32, numbers: core::ops::Range<u64>) -> Vec<u64> {
    numbers.filter(|number| world.tier.locate(digest(tenant, *number)).is_some()).collect()
}

#[test]
fn a_tenant_above_its_limit_loses_its_own_oldest_records() {
    let mut world = world();
    world.tier.tenants().set_limits(&[limit(1, 100_000), limit(2, 50_000)]);
    for number in 0..100 {
        for tenant in 0..3 {
            put(&mut world, digest(tenant, number), 5000, false).expect("it fits");
        }
    }
    world.tier.check();
    assert_eq!(there(&world, 0, 0..100).len(), 100, "the tenant without a limit has lost none");
    for (tenant, limit_bytes) in [(1, 100_000), (2, 50_000)] {
        let of = use_of(&mut world, tenant);
        let newest = there(&world, tenant, 0..100);
        assert_eq!((of.limit_bytes, of.refused), (Some(limit_bytes), 0));
        assert!(of.used_bytes <= limit_bytes && of.used_bytes > limit_bytes - 12_000, "{of:?}");
        assert_eq!(newest, (100 - newest.len() as u64..100).collect::<Vec<_>>(), "the oldest went first");
        assert_eq!(of.evicted_bytes, of.used_bytes / newest.len() as u64 * (100 - newest.len() as u64));
    }
}

#[test]
fn evicted_records_stay_away_after_a_restart_and_lower_limits_evict_at_once() {
    let mut world = world();
    world.tier.tenants().set_limits(&[limit(1, 100_000)]);
    (0..50).for_each(|number| put(&mut world, digest(1, number), 5000, false).expect("it fits"));
    let before = (use_of(&mut world, 1).used_bytes, there(&world, 1, 0..50));
    world.restart(false);
    world.until_recovered();
    world.settle();
    world.verify(Promise::Buffered, true).expect("what was stored is there");
    assert_eq!(
        (use_of(&mut world, 1).used_bytes, there(&world, 1, 0..50)),
        before,
        "footers and scans name the tenant"
    );
    world.tier.tenants().set_limits(&[limit(1, 30_000)]);
    world.settle();
    let of = use_of(&mut world, 1);
    assert!(of.used_bytes <= 30_000 && of.used_bytes > 24_000, "{of:?}");
    assert_eq!(there(&world, 1, 0..50), before.1[before.1.len() - there(&world, 1, 0..50).len()..], "the newest stay");
    world.tier.tenants().set_limits(&[]);
    assert_eq!(use_of(&mut world, 1).limit_bytes, None);
    (50..100).for_each(|number| put(&mut world, digest(1, number), 5000, false).expect("there is no limit"));
    assert_eq!(there(&world, 1, 50..100).len(), 50);
    world.tier.check();
}

#[test]
fn records_that_cannot_have_room_are_refused() {
    let mut world = world();
    world.tier.tenants().set_limits(&[limit(1, 20_000), limit(2, 0)]);
    let refused = put(&mut world, digest(1, 0), 30_000, false);
    assert!(matches!(refused, Err(PutError::Quota { limit_bytes: 20_000, .. })), "{refused:?}");
    assert!(matches!(put(&mut world, digest(2, 0), 1, false), Err(PutError::Quota { limit_bytes: 0, .. })));
    for number in 1..4 {
        put(&mut world, digest(1, number), 5000, true).expect("it fits");
    }
    let refused = put(&mut world, digest(1, 4), 5000, false);
    assert!(matches!(refused, Err(PutError::Quota { .. })), "pinned records stay: {refused:?}");
    assert_eq!((use_of(&mut world, 1).refused, use_of(&mut world, 2).refused), (2, 1));
    assert!(world.tier.set_pinned(digest(1, 2), false));
    put(&mut world, digest(1, 4), 5000, false).expect("one may go now");
    assert_eq!(there(&world, 1, 0..5), [1, 3, 4]);
    put(&mut world, digest(3, 0), 90_000, false).expect("others have no limit");
    world.tier.check();
}

#[test]
fn a_replacement_takes_the_place_of_what_it_replaces() {
    let mut world = world();
    let record = {
        put(&mut world, digest(1, 0), 5000, false).expect("it fits");
        use_of(&mut world, 1).used_bytes
    };
    world.tier.tenants().set_limits(&[limit(1, 4 * record)]);
    for number in (0..4).chain([1, 3, 3, 1]) {
        put(&mut world, digest(1, number), 5000, false).expect("it fits");
    }
    assert_eq!((there(&world, 1, 0..4), use_of(&mut world, 1).evicted_bytes), (vec![0, 1, 2, 3], 0));
    put(&mut world, digest(1, 4), 5000, false).expect("the oldest makes room");
    assert_eq!((there(&world, 1, 0..5), use_of(&mut world, 1).evicted_bytes), (vec![1, 2, 3, 4], record));
    world.tier.check();
}

#[test]
fn reclaim_keeps_what_a_tenant_has_within_its_limit() {
    let mut world = world();
    let capacity = world.tier.tenants().capacity_bytes();
    world.tier.tenants().set_limits(&[limit(1, capacity / 4)]);
    let kept = capacity / 4 / 6000;
    for number in 0..kept {
        put(&mut world, digest(1, number), 5000, false).expect("it fits");
        put(&mut world, digest(3, number), 5000, false).expect("it fits");
    }
    // Another tenant writes the device over, five times.
    (0..5 * capacity / 6000).for_each(|number| put(&mut world, digest(0, number), 5000, false).expect("it fits"));
    let stats = world.tier.stats();
    assert!(stats.reclaims > 40 && stats.evicted > 0, "{stats:?}");
    assert_eq!(there(&world, 1, 0..kept).len() as u64, kept, "none of them was read, and none went");
    world.tier.tenants().set_limits(&[]);
    (0..3 * capacity / 6000).for_each(|number| put(&mut world, digest(3, number), 5000, false).expect("it fits"));
    assert!((there(&world, 1, 0..kept).len() as u64) < kept, "without a limit the oldest go, whoever has them");
    world.tier.check();
}

#[test]
fn limits_above_the_device_are_scaled_down_and_reclaim_goes_on() {
    let mut world = world();
    let capacity = world.tier.tenants().capacity_bytes();
    world.tier.tenants().set_limits(&[limit(0, 3 * capacity), limit(1, 3 * capacity)]);
    for number in 0..4 * capacity / 12_000 {
        put(&mut world, digest(0, number), 5000, false).expect("it fits");
        put(&mut world, digest(1, number), 5000, false).expect("it fits");
    }
    let stats = world.tier.stats();
    assert!(stats.written_bytes < 3 * stats.put_bytes, "records are not rewritten time and again: {stats:?}");
    world.tier.check();
}

/// Step of a random run.
#[derive(Clone, Debug)]
enum Step {
    Put { tenant: u32, number: u64, bytes: u32, pinned: bool },
    Remove { tenant: u32, number: u64 },
    Unpin { tenant: u32, number: u64 },
    Limits(Vec<Option<u64>>),
    Restart { power: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let of = (0..4u32, 0..40u64);
    prop_oneof![
        20 => (of.clone(), 1..20_000u32, prop::bool::weighted(0.1))
            .prop_map(|((tenant, number), bytes, pinned)| Step::Put { tenant, number, bytes, pinned }),
        3 => of.clone().prop_map(|(tenant, number)| Step::Remove { tenant, number }),
        2 => of.prop_map(|(tenant, number)| Step::Unpin { tenant, number }),
        2 => prop::collection::vec(prop::option::of(0..200_000u64), 4).prop_map(Step::Limits),
        1 => any::<bool>().prop_map(|power| Step::Restart { power }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn no_tenant_has_more_than_its_limit_and_no_removed_object_comes_back(
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut world = World::new(TierConfig { segments: 12, max_records: 400, ..small(512) }, 3);
        world.until_recovered();
        world.settle();
        let (mut limits, mut pinned): (Vec<TenantLimit>, BTreeSet<Digest>) = (Vec::new(), BTreeSet::new());
        for step in steps {
            match step {
                Step::Put { tenant, number, bytes, pinned: is_pinned } => {
                    let taken = put(&mut world, digest(tenant, number), bytes, is_pinned);
                    prop_assert!(matches!(taken, Ok(()) | Err(PutError::Quota { .. })), "{:?}", taken);
                    if taken.is_ok() && is_pinned {
                        pinned.insert(digest(tenant, number));
                    }
                }
                Step::Remove { tenant, number } => drop(world.remove(digest(tenant, number), Ack::Durable)),
                Step::Unpin { tenant, number } => {
                    world.tier.set_pinned(digest(tenant, number), false);
                }
                Step::Limits(of) => {
                    let of = of.into_iter().enumerate();
                    limits = of.filter_map(|(number, bytes)| Some(limit(number as u32, bytes?))).collect();
                    world.tier.tenants().set_limits(&limits);
                }
                Step::Restart { power } => {
                    world.settle();
                    world.restart(power);
                    world.until_recovered();
                    world.settle();
                    prop_assert_eq!(world.verify(Promise::Durable, true), Ok(()));
                    world.tier.tenants().set_limits(&limits);
                }
            }
            world.settle();
            world.tier.check();
            for one in &limits {
                let of = use_of(&mut world, one.number);
                let may_exceed = pinned.iter().any(|digest| tenant_of(digest.to_string().as_bytes()) == one.number);
                prop_assert!(of.used_bytes <= one.bytes || may_exceed, "{:?} of {:?}", of, one);
            }
        }
    }
}

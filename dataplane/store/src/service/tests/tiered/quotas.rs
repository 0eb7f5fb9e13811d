//! Tests of tenants' quotas of SSD bytes, and of their weights while the device cannot keep up.

use kvplane_proto::digest::tenant_number;
use kvplane_proto::message::{ObjectName, PutAck, PutOptions};
use kvplane_proto::tenants::TenantSsdLease;
use kvplane_proto::{Digest, Status};
use kvplane_tier::TierUse;

use super::world::{PEER, World};
use crate::service::{TierPolicy, WritePolicy};

const BYTES: usize = 5000;

fn policy() -> TierPolicy {
    TierPolicy { write: WritePolicy::Through, ack: PutAck::Memory, backlog_percent: 100, ..TierPolicy::default() }
}

fn lease(tenant: &str, ssd_bytes: Option<u64>, weight: u32) -> TenantSsdLease {
    TenantSsdLease { number: tenant_number(tenant.as_bytes()), ssd_bytes, weight }
}

fn put(world: &mut World, tenant: &str, key: u64, ack: Option<PutAck>) -> Status {
    let key = key.to_le_bytes();
    let name = ObjectName { tenant: tenant.as_bytes(), key: &key };
    let options = PutOptions { ack, ..PutOptions::default() };
    world.put_named(PEER, (&name, Digest(0)), &[7; BYTES], &options)
}

fn on_ssd(world: &World, tenant: &str, keys: core::ops::Range<u64>) -> Vec<u64> {
    let digest = |key: u64| Digest::of(tenant.as_bytes(), &key.to_le_bytes());
    keys.filter(|key| world.service.objects.local.on_ssd(digest(*key)).is_some()).collect()
}

fn use_of(world: &mut World, tenant: &str) -> TierUse {
    let number = tenant_number(tenant.as_bytes());
    let usage = world.service.control().ssd_usage().expect("recovery is over");
    assert!(usage.bytes > 0);
    usage.tenants.into_iter().find(|one| one.number == number).unwrap_or_default()
}

#[test]
fn a_tenant_over_its_quota_loses_its_own_oldest_records() {
    let mut world = World::new(1400, policy());
    world.service.control().set_ssd_tenants(&[lease("acme", Some(30_000), 1)]);
    for key in 0..20 {
        assert_eq!(put(&mut world, "acme", key, None), Status::Ok);
        assert_eq!(put(&mut world, "other", key, Some(PutAck::Durable)), Status::Ok);
    }
    assert_eq!(on_ssd(&world, "other", 0..20).len(), 20, "it has no quota, and lost none");
    let (acme, kept) = (use_of(&mut world, "acme"), on_ssd(&world, "acme", 0..20));
    assert!(acme.used_bytes <= 30_000 && acme.used_bytes > 24_000, "{acme:?}");
    assert_eq!(kept, (20 - kept.len() as u64..20).collect::<Vec<_>>(), "the oldest went first");
    assert_eq!((acme.limit_bytes, acme.refused, use_of(&mut world, "other").limit_bytes), (Some(30_000), 0, None));
    // What was evicted does not come back with a restart, and tenants are known again.
    world.restart();
    world.settle();
    assert_eq!(on_ssd(&world, "acme", 0..20), kept);
    assert_eq!(
        (use_of(&mut world, "acme").used_bytes, use_of(&mut world, "acme").limit_bytes),
        (acme.used_bytes, None)
    );
    world.service.control().set_ssd_tenants(&[lease("acme", Some(12_000), 1)]);
    world.settle();
    assert!(use_of(&mut world, "acme").used_bytes <= 12_000, "a lower quota holds at once");
    assert_eq!(on_ssd(&world, "other", 0..20).len(), 20);
}

#[test]
fn a_put_that_cannot_have_its_durability_is_refused_and_others_stay_in_memory() {
    let mut world = World::new(1401, policy());
    world.service.control().set_ssd_tenants(&[lease("acme", Some(BYTES as u64), 1), lease("none", Some(0), 1)]);
    for tenant in ["acme", "none"] {
        for ack in [PutAck::Buffered, PutAck::Durable] {
            assert_eq!(put(&mut world, tenant, 1, Some(ack)), Status::QuotaExceeded, "{tenant}");
        }
        assert_eq!(put(&mut world, tenant, 1, None), Status::Ok, "memory is enough for it");
        assert!(on_ssd(&world, tenant, 1..2).is_empty());
        // It exists, and waits for the SSD in vain: the client gets to know within a few attempts.
        let told: Vec<Status> = (0..3).map(|_| put(&mut world, tenant, 1, Some(PutAck::Durable))).collect();
        assert!(told.contains(&Status::QuotaExceeded), "{told:?}");
        assert!(use_of(&mut world, tenant).refused >= 3);
    }
    let counters = world.service.inspect().tier().expect("a tier").snapshot().counters;
    assert!(counters.writes_over_quota >= 6 && counters.writes_failed == 0, "{counters:?}");
    assert_eq!(put(&mut world, "other", 1, Some(PutAck::Durable)), Status::Ok);
}

#[test]
fn a_burst_of_one_tenant_does_not_hold_up_the_writes_of_another() {
    for weight in [1, 3] {
        let mut world = World::new(1402, policy());
        world.service.control().set_ssd_tenants(&[lease("light", None, weight)]);
        world.stopped = true;
        (0..24).for_each(|key| assert_eq!(put(&mut world, "burst", key, None), Status::Ok));
        (0..6).for_each(|key| assert_eq!(put(&mut world, "light", key, None), Status::Ok));
        world.stopped = false;
        while on_ssd(&world, "light", 0..6).len() < 6 {
            assert!(world.step(), "they are written");
        }
        let written = on_ssd(&world, "burst", 0..24).len();
        assert!(written < 24, "the light tenant does not wait for all of the burst");
        world.settle();
        assert_eq!(on_ssd(&world, "burst", 0..24).len(), 24);
    }
}

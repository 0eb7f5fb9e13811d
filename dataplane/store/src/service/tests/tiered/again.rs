//! Tests of writes that requests wait for, of retries of failed writes, and of prefetched objects that were not read in
//! time.

use kvplane_proto::message::{Operation, PutAck, PutOptions};
use kvplane_proto::tenants::TenantLease;
use kvplane_proto::{FrameFlags, Status};

use super::super::rig::{digest, digests};
use super::world::{KEYS, World};
use crate::service::{TierCounters, TierPolicy, WritePolicy};

const SECOND_NS: u64 = 1_000_000_000;

fn counters(world: &World) -> TierCounters {
    world.service.inspect().tier().expect("a tier").snapshot().counters
}

fn put(world: &mut World, ack: Option<PutAck>) -> Status {
    world.put_with(3, &PutOptions { ack, ..PutOptions::default() });
    world.settle();
    world.last_put
}

fn policy(write: WritePolicy) -> TierPolicy {
    TierPolicy { write, ack: PutAck::Memory, prefetch_percent: 40, ..TierPolicy::default() }
}

#[test]
fn a_delayed_write_is_started_by_a_put_with_a_stronger_level() {
    for ack in [PutAck::Buffered, PutAck::Durable] {
        let mut world = World::new(1100, policy(WritePolicy::Back { within_ns: 3600 * SECOND_NS }));
        assert_eq!(put(&mut world, None), Status::Ok);
        assert!(world.service.objects.local.on_ssd(digest(3)).is_none(), "it has an hour");
        assert_eq!(put(&mut world, Some(ack)), Status::Busy);
        assert_eq!(put(&mut world, Some(ack)), Status::Exists);
        assert!(world.service.objects.local.on_ssd(digest(3)).is_some());
        world.end();
    }
}

#[test]
fn delayed_writes_are_started_when_the_backlog_has_no_room() {
    let back = WritePolicy::Back { within_ns: 3600 * SECOND_NS };
    let mut world = World::new(1101, TierPolicy { backlog_percent: 40, ..policy(back) });
    for key in 0..3 {
        // The earlier objects are written, as their hour is over.
        world.now_ns += 3601 * SECOND_NS;
        world.settle();
        world.put_with(key, &PutOptions::default());
        world.settle();
        assert_eq!(world.last_put, Status::Ok);
    }
    // The backlog has 40,000 bytes, less than half of its limit; 70,001 more would exceed it.
    assert!(world.service.objects.local.on_ssd(digest(2)).is_none(), "it has an hour");
    world.put_with(3, &PutOptions::default());
    world.settle();
    let first = world.last_put;
    assert!(world.service.objects.local.on_ssd(digest(2)).is_some(), "it made room");
    assert_eq!(first, Status::Busy);
    assert_eq!(counters(&world).writes_failed, 0);
    world.end();
}

/// The same applies to a tenant whose quota is full, but not if the put exceeds the quota.
#[test]
fn a_put_of_a_tenant_whose_quota_is_in_the_backlog_is_busy() {
    let back = WritePolicy::Back { within_ns: 3600 * SECOND_NS };
    for (number, expected) in [(7, Status::Busy), (8, Status::QuotaExceeded)] {
        let mut world = World::new(1102, TierPolicy { backlog_percent: 100, ..policy(back) });
        let lease = |number, dram_bytes| TenantLease { number, dram_bytes: Some(dram_bytes), weight: 1 };
        world.service.control().set_tenants(&[lease(7, 80_000), lease(8, 4096)], false);
        let options = |tenant| PutOptions { tenant, ..PutOptions::default() };
        // The backlog of another tenant does not count.
        world.put_with(0, &options(7));
        world.settle();
        assert_eq!(world.last_put, Status::Ok);
        let refused = (1..KEYS as u8).find(|key| {
            world.put_with(*key, &options(number));
            world.hear();
            world.last_put != Status::Ok
        });
        let key = refused.expect("its share holds them all");
        assert_eq!(world.last_put, expected);
        world.settle();
        world.put_with(key, &options(number));
        world.settle();
        assert_eq!(world.last_put, if expected == Status::Busy { Status::Ok } else { expected });
        world.end();
    }
}

#[test]
fn failed_writes_are_retried_until_the_device_recovers() {
    for write in [WritePolicy::Through, WritePolicy::Back { within_ns: 1 }] {
        let mut world = World::new(1200, policy(write));
        world.failing_writes = 2;
        assert_eq!(put(&mut world, None), Status::Ok);
        for tries in 1..=2 {
            assert_eq!((counters(&world).writes_retried, world.service.objects.local.on_ssd(digest(3))), (tries, None));
            let due_ns = world.service.poll_timeout().expect("it is tried again");
            assert!(due_ns > world.now_ns + SECOND_NS / 2, "not at once");
            world.now_ns += 5 * SECOND_NS;
            world.settle();
        }
        assert_eq!((counters(&world).writes_failed, world.failing_writes), (0, 0));
        assert!(world.service.objects.local.on_ssd(digest(3)).is_some());
        world.end();
    }
}

#[test]
fn a_put_during_a_retry_pause_fails_at_once() {
    for ack in [PutAck::Buffered, PutAck::Durable] {
        let mut world = World::new(1250, policy(WritePolicy::Through));
        world.failing_writes = 2;
        assert_eq!(put(&mut world, None), Status::Ok);
        for _ in 0..2 {
            assert_eq!(put(&mut world, Some(ack)), Status::NoSpace);
            let version = world.service.store().peek(digest(3)).expect("in memory").version;
            assert_eq!(world.service.objects.local.kept(digest(3), version), Status::Ok, "as it was answered");
            world.now_ns += 5 * SECOND_NS;
            world.settle();
        }
        assert_eq!(put(&mut world, Some(ack)), Status::Exists);
        assert!(world.service.objects.local.on_ssd(digest(3)).is_some());
        world.end();
    }
}

#[test]
fn an_object_in_memory_alone_is_written_for_a_put_that_waits_for_the_ssd() {
    for ack in [PutAck::Buffered, PutAck::Durable] {
        let selective = policy(WritePolicy::Selective { times: 9 });
        let mut world = World::new(1260, TierPolicy { backlog_percent: 90, ..selective });
        assert_eq!(put(&mut world, None), Status::Ok);
        assert!(world.service.objects.local.on_ssd(digest(3)).is_none(), "one access is too few for selective");
        assert_eq!(put(&mut world, None), Status::Exists);
        world.failing_writes = 1;
        assert_eq!(put(&mut world, Some(ack)), Status::Busy);
        assert_eq!(put(&mut world, Some(ack)), Status::NoSpace);
        world.now_ns += 2 * SECOND_NS;
        world.settle();
        assert_eq!(put(&mut world, Some(ack)), Status::Exists);
        assert!(world.service.objects.local.on_ssd(digest(3)).is_some());
        world.end();
    }
}

#[test]
fn retries_on_a_failing_device_are_limited() {
    let mut world = World::on(8 * super::DEVICE_BYTES, 1300, policy(WritePolicy::Through));
    world.failing_writes = u32::MAX;
    assert_eq!(put(&mut world, None), Status::Ok);
    for _ in 0..10 {
        world.now_ns += 100 * SECOND_NS;
        world.settle();
    }
    let snapshot = world.service.inspect().tier().expect("a tier").snapshot();
    assert_eq!((snapshot.counters.writes_retried, snapshot.counters.writes_failed, snapshot.backlog), (4, 1, 0));
    assert_eq!(snapshot.degraded, None);
    // The object is still in memory, and is written when it is read and the device works again.
    world.failing_writes = 0;
    world.get(3);
    world.settle();
    assert!(world.service.objects.local.on_ssd(digest(3)).is_some());
    world.end();
}

#[test]
fn a_late_prefetch_is_charged_until_its_read_ends_and_then_dropped() {
    let buffered = TierPolicy { ack: PutAck::Buffered, ..policy(WritePolicy::Through) };
    for wanted in [false, true] {
        let mut world = World::new(1400, buffered);
        assert_eq!(put(&mut world, None), Status::Ok);
        world.restart();
        world.settle();
        world.stopped = true;
        world.ask(Operation::Exists, FrameFlags::PREFETCH, &digests([3]));
        world.step();
        world.now_ns += 20 * SECOND_NS;
        world.step();
        let before = counters(&world);
        assert_eq!((before.prefetches, before.prefetches_expired), (1, 0), "it is being read");
        if wanted {
            world.get(3);
        }
        world.stopped = false;
        world.settle();
        let after = counters(&world);
        let stays = u64::from(wanted);
        assert_eq!((after.prefetches_expired, after.promotions), (1 - stays, stays));
        assert_eq!(world.service.store().exists(digest(3)), wanted);
        world.end();
    }
}

/// Small objects take whole units of the pool, and so of its part for prefetched objects.
#[test]
fn prefetched_objects_are_charged_in_units_of_the_pool() {
    let buffered = TierPolicy { ack: PutAck::Buffered, ..policy(WritePolicy::Through) };
    let mut world = World::new(1500, TierPolicy { prefetch_percent: 10, ..buffered });
    for key in 0..KEYS as u8 {
        // The last of five puts has 700 bytes.
        for _ in 0..5 {
            world.put_with(key, &PutOptions { replace: true, ..PutOptions::default() });
            world.settle();
            assert_eq!(world.last_put, Status::Ok);
        }
    }
    world.restart();
    world.settle();
    for key in 0..KEYS as u8 {
        world.ask(Operation::Exists, FrameFlags::PREFETCH, &digests([key]));
    }
    world.settle();
    // A tenth of 256 KiB has room for six units of 4096 bytes.
    assert_eq!((counters(&world).prefetches, counters(&world).prefetch_refusals), (6, 6));
    world.end();
}

//! Tests of the backlog: an object acknowledged from memory is queued for the SSD, or its put waits; so are imported
//! objects.

use kvplane_proto::Status;
use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, Version};
use kvplane_proto::map::{Claim, ClusterMap, Former, Member, ShardAddress, SlotOwners};
use kvplane_proto::message::{Item, KeyItem, ListReply, PutAck, PutOptions};

use super::super::rig::{digest, identity};
use super::world::{May, World, bytes_of};
use crate::service::{Fetch, FetchDone, TierPolicy, Want, WritePolicy};

/// Puts objects, with the device stopped, until one is refused; returns the keys of those acknowledged.
fn put_until_busy(world: &mut World, keys: impl Iterator<Item = u8>) -> Vec<u8> {
    let mut acknowledged = Vec::new();
    for key in keys {
        world.may.entry(key).or_insert_with(|| May::from([None]));
        // By default a stripe head would wait for the device.
        world.put_with(key, &PutOptions { ack: Some(PutAck::Memory), ..PutOptions::default() });
        world.settle();
        match world.last_put {
            Status::Ok => acknowledged.push(key),
            status => {
                assert_eq!(status, Status::Busy, "backpressure");
                return acknowledged;
            }
        }
    }
    panic!("{} puts were acknowledged while nothing was written", acknowledged.len());
}

fn skipped(world: &World) -> u64 {
    world.service.inspect().tier().expect("a tier").snapshot().counters.writes_skipped
}

#[test]
fn puts_wait_when_the_backlog_is_full_and_acknowledged_objects_are_written() {
    for (write, backlog_percent) in [
        (WritePolicy::Through, 10),
        (WritePolicy::Through, 25),
        (WritePolicy::Through, 100),
        (WritePolicy::Back { within_ns: 1 }, 25),
    ] {
        let policy = TierPolicy { write, ack: PutAck::Memory, backlog_percent, ..TierPolicy::default() };
        let mut world = World::new(1300, policy);
        for _ in 0..3 {
            world.stopped = true;
            let keys = put_until_busy(&mut world, 0..12);
            assert!(!keys.is_empty());
            world.stopped = false;
            world.settle();
            for key in keys {
                assert!(world.service.objects.local.on_ssd(digest(key)).is_some(), "key {key} under {policy:?}");
                world.remove(key);
            }
            world.settle();
        }
        assert_eq!(skipped(&world), 0);
        world.end();
    }
}

/// The put came first, and there is nothing left to write.
#[test]
fn a_put_that_is_removed_before_it_is_written_succeeds() {
    let mut world = World::new(1320, TierPolicy { ack: PutAck::Buffered, ..TierPolicy::default() });
    world.stopped = true;
    for key in 0..4 {
        world.put_with(key, &PutOptions::default());
        world.remove(key);
    }
    world.stopped = false;
    for _ in 0..10 {
        world.settle();
        assert_eq!(world.last_put, Status::Ok);
    }
    (0..4).for_each(|key| assert!(world.service.objects.local.on_ssd(digest(key)).is_none()));
    world.end();
}

pub(super) const OTHER: NodeId = NodeId(8);

pub(super) fn member(node: NodeId, incarnation: Incarnation, weight: u32) -> Member {
    Member {
        node,
        incarnation,
        weight,
        failure_domain: String::new(),
        host: String::new(),
        shards: vec![ShardAddress { tcp: ([127, 0, 0, 1], 7000 + node.0 as u16).into(), shm: None }; 3],
    }
}

/// Makes all slots of this shard imports from another node; returns keys in them.
pub(super) fn with_a_former_owner(world: &mut World) -> Vec<u8> {
    let us = identity();
    let members = |ours, others| vec![member(us.node, us.incarnation, ours), member(OTHER, Incarnation(1), others)];
    let before = ClusterMap { epoch: Epoch(world.epoch + 1), replicas: 1, members: members(0, 1), former: None };
    let before = SlotOwners::of(&before);
    world.service.follow(world.state, &before);
    world.settle();
    let claims = vec![Claim { node: OTHER, incarnation: Incarnation(1), weight: 1, shards: 3 }];
    let since = Epoch(world.epoch + 2);
    let began = vec![(us.node, us.incarnation)];
    let former = Former { since, from: before.since, claims, began, restarts: None };
    let now = ClusterMap { epoch: since, replicas: 1, members: members(1, 0), former: Some(former) };
    let now = SlotOwners::of(&now);
    world.service.follow(world.state, &now);
    world.settle();
    let ours =
        |key: &u8| now.owner(digest(*key).slot()).is_some_and(|owner| (owner.node, owner.shard) == (us.node, us.shard));
    (0..=255).filter(ours).collect()
}

pub(super) fn page_of(key: u8, bytes: u64) -> FetchDone {
    let mut page = Vec::new();
    ListReply { walk: 0, next: 0, items: 1 }.encode(&mut page);
    let item = KeyItem::plain(digest(key), Version(1), bytes, KeyItem::IN_MEMORY);
    item.encode(&mut page);
    FetchDone::Page(page)
}

pub(super) fn empty_page() -> FetchDone {
    let mut page = Vec::new();
    ListReply { walk: 0, next: 0, items: 0 }.encode(&mut page);
    FetchDone::Page(page)
}

/// Answers for a former owner that has one object, until there are no more requests; returns true if the object was
/// fetched.
fn serve(world: &mut World, key: u8, bytes: &[u8]) -> bool {
    let mut came = false;
    loop {
        let fetches: Vec<Fetch> = std::iter::from_fn(|| world.service.poll_fetch(world.now_ns)).collect();
        if fetches.is_empty() {
            return came;
        }
        for Fetch { token, want, .. } in fetches {
            let done = match want {
                Want::List(_, from) if from.changes => empty_page(),
                Want::List(..) => page_of(key, bytes.len() as u64),
                Want::Object(object, extent) => {
                    assert_eq!(object, digest(key));
                    world.memory.pool[extent.offset as usize..][..bytes.len()].copy_from_slice(bytes);
                    came = true;
                    FetchDone::Object(bytes.len() as u64, payload_checksum(bytes))
                }
                Want::Drop(digests) => {
                    let kept = world.service.objects.local.on_ssd(digest(key)).is_some();
                    assert!(kept || !digests.contains(&digest(key)), "it is dropped before the SSD here has it");
                    FetchDone::Dropped
                }
                Want::EndExports(..) => FetchDone::Dropped,
                other => panic!("{other:?} was not due"),
            };
            world.service.fetched(token, done, world.now_ns);
        }
    }
}

/// First with a full backlog, then with a pool full of objects that wait for the SSD.
#[test]
fn an_import_waits_at_its_source_until_the_backlog_has_room() {
    for backlog_percent in [25, 100] {
        let policy = TierPolicy { backlog_percent, ..TierPolicy::default() };
        let mut world = World::new(1310, policy);
        let keys = with_a_former_owner(&mut world);
        let bytes = bytes_of(3);
        world.stopped = true;
        let acknowledged = put_until_busy(&mut world, keys[1..].iter().copied());
        assert!(!serve(&mut world, keys[0], &bytes), "with {backlog_percent} % of backlog");
        world.stopped = false;
        let mut came = false;
        for _ in 0..100 {
            world.settle();
            world.now_ns += 100_000_000;
            came |= serve(&mut world, keys[0], &bytes);
        }
        assert!(came, "with {backlog_percent} % of backlog");
        for key in acknowledged.iter().chain(&keys[..1]) {
            assert!(world.service.objects.local.on_ssd(digest(*key)).is_some(), "key {key}");
        }
        assert_eq!(skipped(&world), 0);
        world.end();
    }
}

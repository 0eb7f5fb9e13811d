//! Tests of exports with an SSD: they end with the report of the new owner, and replicas are recorded then.

use std::collections::BTreeSet;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, Incarnation, Slot, Version};
use kvplane_proto::map::{Claim, ClusterMap, Former, SlotOwners};
use kvplane_proto::message::{Hello, Kind, Operation, PutOptions, VersionItem};
use kvplane_proto::{FrameFlags, Status};

use super::super::rig::{body_of, digest, hello, identity};
use super::backlog::{OTHER, empty_page, member, page_of, with_a_former_owner};
use super::damaged::{FETCHING, take_replica};
use super::world::{World, bytes_of};
use crate::service::{FetchDone, Path, PutAck, TierPolicy, Want};

/// Reports that everything of a slot was imported, by the map of `complete`; returns the answer, and whether an export
/// has ended.
fn report(world: &mut World, slot: Slot, complete: Epoch) -> (Status, bool) {
    let request = world.next_request();
    let body = body_of([VersionItem { digest: slot.first_digest(), version: Version(complete.0) }]);
    let mut header = Header::request(Kind::Request(Operation::Remove), request).with_body(&body, 1);
    header.flags = FrameFlags::NONE.with(FrameFlags::OF_VERSION, true);
    header.argument = world.service.inspect().served_epoch().0;
    world.expect(request);
    world.service.request(FETCHING, &header, &body, world.now_ns);
    world.hear();
    let answer = world.take_answered().expect("it was answered");
    (answer.status, answer.body.first().is_some_and(|bits| bits & 1 != 0))
}

#[test]
fn a_former_owner_records_replicas_once_everything_was_imported() {
    for seed in 2100..2104 {
        let mut world = World::new(seed, TierPolicy { ack: PutAck::Durable, ..TierPolicy::default() });
        let us = identity();
        let members = |others| vec![member(us.node, us.incarnation, 1), member(OTHER, Incarnation(1), others)];
        let former = ClusterMap { epoch: Epoch(world.epoch + 1), replicas: 2, members: members(0), former: None };
        let former = SlotOwners::of(&former);
        let since = Epoch(world.epoch + 2);
        let claims = vec![Claim { node: us.node, incarnation: us.incarnation, weight: 1, shards: 3 }];
        let began = vec![(us.node, us.incarnation), (OTHER, Incarnation(1))];
        let before = Former { since, from: former.since, claims, began, restarts: None };
        let now = SlotOwners::of(&ClusterMap { epoch: since, replicas: 2, members: members(1), former: Some(before) });
        world.service.follow(world.state, &former);
        world.settle();
        let node_of = |owners: &SlotOwners, key: u8| owners.owner(digest(key).slot()).map(|it| (it.node, it.shard));
        let moves = |key: &u8| {
            let theirs = node_of(&now, *key).is_some_and(|(node, _)| node == OTHER);
            node_of(&former, *key) == Some((us.node, us.shard)) && theirs
        };
        let key = (0..200).find(moves).expect("a key that migrates");
        let (object, slot) = (digest(key), digest(key).slot());
        world.may.entry(key).or_default();
        world.put_with(key, &PutOptions::default());
        world.settle();
        world.service.follow(world.state, &now);
        world.settle();
        world.join_with(FETCHING, Path::Stream, &Hello { fetches: true, ..hello() });
        world.hear();
        for _ in 0..400 {
            world.step();
        }
        let is_closed = |world: &World| world.service.inspect().replica_slots_unrecorded() > 0;
        let has_object = |world: &World| {
            (world.service.store().exists(object), world.service.inspect().ssd_record(object).is_some())
        };
        assert!(world.service.inspect().exports(slot) && is_closed(&world));
        assert_eq!(report(&mut world, slot, Epoch(since.0 - 1)), (Status::WrongOwner, false), "of an import before");
        assert_eq!((has_object(&world), world.service.inspect().exports(slot)), ((true, true), true));
        assert_eq!(report(&mut world, slot, since), (Status::Ok, true));
        assert_eq!(has_object(&world), (false, false), "at once");
        assert_eq!(report(&mut world, slot, since), (Status::Ok, false));
        for _ in 0..400 {
            world.step();
        }
        let bytes = bytes_of(4);
        take_replica(&mut world, key, &bytes, since.0);
        for _ in 0..400 {
            world.step();
        }
        assert!(world.service.inspect().replica_record(object).is_some());
        // One that comes once more, and a drop of what was imported, leave the replica.
        assert_eq!(report(&mut world, slot, since), (Status::Ok, false));
        assert!(world.service.store().exists(object) && world.service.inspect().replica_record(object).is_some());
        world.end();
    }
}

#[test]
fn an_import_is_reported_until_it_is_answered_unless_an_object_does_not_fit() {
    let mut world = World::new(2110, TierPolicy::default());
    let keys = with_a_former_owner(&mut world);
    let slot = digest(keys[0]).slot();
    let keeper = world.service.inspect().source_of(slot).expect("a former owner");
    let (mut sources, mut epochs) = (BTreeSet::new(), Vec::new());
    for _ in 0..200 {
        world.settle();
        world.now_ns += 100_000_000;
        while let Some(fetch) = world.service.poll_fetch(world.now_ns) {
            let done = match fetch.want {
                Want::List(_, from) if from.changes => empty_page(),
                Want::List(..) => page_of(keys[0], 1 << 40),
                Want::EndExports(slots, epoch) => {
                    assert!(fetch.source.node == OTHER && fetch.source != keeper, "an object stays there");
                    assert!(!slots.is_empty() && slots.len() <= 4 && !slots.contains(&slot));
                    sources.insert(fetch.source);
                    epochs.push(epoch);
                    if epochs.len() < 3 { FetchDone::Failed(Status::Unreachable) } else { FetchDone::Dropped }
                }
                other => panic!("{other:?} was not due"),
            };
            world.service.fetched(fetch.token, done, world.now_ns);
        }
    }
    assert_eq!(epochs, vec![world.service.inspect().served_epoch(); sources.len() + 2]);
    assert_eq!(world.service.inspect().unreported().count(), 0);
    world.end();
}

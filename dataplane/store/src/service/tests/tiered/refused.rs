//! Tests of replacements that the SSD cannot record: the former object stays as it was.

use kvplane_proto::message::{GetItem, Operation, PutAck, PutOptions};
use kvplane_proto::{FrameFlags, Status};

use super::super::rig::digest;
use super::world::{PEER, World, bytes_of};
use crate::service::{TierPolicy, WritePolicy};

fn get(world: &mut World, key: u8) -> (Status, Option<Vec<u8>>) {
    let item = |request| GetItem { digest: digest(key), request, capacity_bytes: u64::MAX };
    let answer = world.answer((PEER, Operation::Get, FrameFlags::HEADS), item);
    (answer.status, answer.bytes)
}

/// Applies from the first failing write on, while the device was taken to be healthy.
#[test]
fn a_replacement_that_the_device_cannot_record_is_refused_and_the_former_object_stays() {
    for (write, ack) in [
        (WritePolicy::Through, PutAck::Memory),
        (WritePolicy::Through, PutAck::Buffered),
        (WritePolicy::Through, PutAck::Durable),
        (WritePolicy::Selective { times: 1 }, PutAck::Memory),
        (WritePolicy::Back { within_ns: 1 }, PutAck::Memory),
    ] {
        let policy = TierPolicy { write, ack, ..TierPolicy::default() };
        let mut world = World::new(1400, policy);
        // The number of each put is its key plus one.
        for key in 0..4 {
            world.put_with(key, &PutOptions::default());
            world.settle();
            assert!(world.service.objects.local.on_ssd(digest(key)).is_some(), "{policy:?}");
        }
        world.read_only = true;
        for round in 0..40 {
            let key = round % 4;
            world.put_with(key, &PutOptions { replace: true, ..PutOptions::default() });
            world.settle();
            assert_eq!(world.last_put, Status::NoSpace, "round {round} with {policy:?}");
            let former = bytes_of(u64::from(key) + 1);
            assert_eq!(get(&mut world, key), (Status::Ok, Some(former)), "round {round} with {policy:?}");
        }
        world.read_only = false;
        world.restart();
        for key in 0..4 {
            assert_eq!(get(&mut world, key), (Status::Ok, Some(bytes_of(u64::from(key) + 1))), "key {key}");
        }
        world.end();
    }
}

/// The records of the device cannot be read any more either: only memory has the former object then.
#[test]
fn a_refused_replacement_leaves_the_object_in_memory() {
    let mut world = World::new(1410, TierPolicy::default());
    for key in 0..2 {
        world.put_with(key, &PutOptions::default());
        world.settle();
    }
    let replace = PutOptions { replace: true, ..PutOptions::default() };
    (world.read_only, world.unreadable) = (true, 0..u64::MAX);
    for _ in 0..40 {
        world.put_with(1, &replace);
        world.settle();
    }
    assert!(world.service.inspect().tier().expect("a tier").snapshot().degraded.is_some(), "it takes no writes");
    world.put_with(0, &replace);
    world.settle();
    assert_eq!(world.last_put, Status::NoSpace);
    assert_eq!(get(&mut world, 0), (Status::Ok, Some(bytes_of(1))));
}

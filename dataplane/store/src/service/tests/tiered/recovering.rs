//! Tests of puts and gets during recovery, and of more gets than the device takes at a time.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::message::{GetItem, Hello, KeyPage, Kind, ListItem, Operation, PutAck, PutOptions};
use kvplane_proto::{FrameFlags, Status};

use super::super::rig::{body_of, digest, hello};
use super::world::{KEYS, PEER, READS, ReceivedAnswer, World, bytes_of};
use crate::service::{Path, PeerKey, TierPolicy, WritePolicy};

fn get(world: &mut World, key: u8) -> Option<Vec<u8>> {
    let answer = world.answer((PEER, Operation::Get, FrameFlags::HEADS), |request| GetItem {
        digest: digest(key),
        request,
        capacity_bytes: u64::MAX,
    });
    match answer.status {
        Status::Ok => answer.bytes,
        status => {
            assert_eq!(status, Status::NotFound, "object {key}");
            None
        }
    }
}

/// A put that finds no object may replace one on the device that recovery has not found yet. The old object does not
/// come back when memory has lost the new one.
#[test]
fn a_record_replaced_before_recovery_found_it_does_not_come_back() {
    let mut misses = 0;
    for seed in 0..8 {
        let write = WritePolicy::Selective { times: 9 };
        let mut world = World::new(1100 + seed, TierPolicy { write, ack: PutAck::Memory, ..TierPolicy::default() });
        for key in 0..KEYS as u8 {
            world.put_with(key, &PutOptions { ack: Some(PutAck::Durable), ..PutOptions::default() });
            world.settle();
        }
        world.restart_in_haste();
        for key in 0..KEYS as u8 {
            world.put_with(key, &PutOptions::default());
            world.hear();
        }
        world.settle();
        // Memory loses objects that were not written to the device.
        world.restart();
        for key in 0..KEYS as u8 {
            let got = get(&mut world, key);
            let may = world.may[&key].clone();
            match got {
                Some(got) => assert!(
                    may.iter().flatten().any(|put| bytes_of(*put) == got),
                    "object {key} of seed {seed} is none of {may:?}"
                ),
                None => misses += 1,
            }
        }
        world.end();
    }
    assert!(misses > 0, "all were found before they were put anew");
}

/// If a list had only the objects recovered so far, a removal of all listed objects would leave the others.
#[test]
fn a_list_is_busy_until_recovery_is_complete() {
    let mut world = World::new(1300, TierPolicy { ack: PutAck::Durable, ..TierPolicy::default() });
    for key in 0..KEYS as u8 {
        world.put_with(key, &PutOptions { replace: true, ..PutOptions::default() });
        world.settle();
    }
    let whole = |flags| move |_: RequestId| ListItem { digest: digest(0), walk: 0, from: 0, flags };
    world.restart_in_haste();
    assert_eq!(world.answer((PEER, Operation::List, FrameFlags::NONE), whole(0)).status, Status::Busy);
    // The helper waits until the device is idle.
    let listed = |answer: ReceivedAnswer| {
        assert_eq!(answer.status, Status::Ok);
        KeyPage::decode(&answer.body).expect("a page").keys().count() as u64
    };
    assert_eq!(listed(world.answer((PEER, Operation::List, FrameFlags::NONE), whole(0))), KEYS);
    // A new owner that imports would take the list to be complete.
    world.restart_in_haste();
    let importer = PeerKey { index: 1, generation: 1 };
    world.join_with(importer, Path::Stream, &Hello { fetches: true, ..hello() });
    assert_eq!(
        world.answer((importer, Operation::List, FrameFlags::NONE), whole(ListItem::NAMES)).status,
        Status::Busy
    );
    let left = listed(world.answer((importer, Operation::List, FrameFlags::NONE), whole(ListItem::NAMES)));
    assert_eq!(left, 0, "no slot has left");
    // A single object exists or not, as for a get.
    world.restart_in_haste();
    assert!(listed(world.answer((PEER, Operation::List, FrameFlags::NONE), whole(ListItem::ONE))) <= 1);
    world.end();
}

/// Returns a world with small objects, for all of which memory has room at the same time, on the device only.
fn on_the_device() -> World {
    let mut world = World::new(1200, TierPolicy { ack: PutAck::Durable, promote_times: 15, ..TierPolicy::default() });
    for key in 0..KEYS as u8 {
        while !world.may[&key].iter().all(|put| put.is_some_and(|put| put % 5 < 2)) {
            world.put_with(key, &PutOptions { replace: true, ..PutOptions::default() });
            world.settle();
        }
    }
    world.restart();
    world
}

fn ask_for_all(world: &mut World, peer: PeerKey) {
    for key in 0..KEYS as u8 {
        let request = world.next_request();
        let item = GetItem { digest: digest(key), request, capacity_bytes: u64::MAX };
        let body = body_of([item]);
        let mut header = Header::request(Kind::Request(Operation::Get), request).with_body(&body, 1);
        header.flags |= FrameFlags::HEADS;
        world.service.request(peer, &header, &body, world.now_ns);
    }
}

/// More gets than the device takes at a time wait for their turn: none is answered as busy.
#[test]
fn more_gets_than_the_device_takes_at_a_time_wait_for_their_turn() {
    let mut world = on_the_device();
    ask_for_all(&mut world, PEER);
    // An object that is removed and one whose slot is lost while their gets wait are not found, and delay no other get.
    world.remove(KEYS as u8 - 1);
    world.lost_slots.insert(KEYS as u8 - 2);
    world.own();
    world.settle();
    let counters = world.service.inspect().tier().expect("a tier").snapshot().counters;
    assert_eq!((counters.hits, counters.reads_queued), (KEYS - 2, KEYS - u64::from(READS)), "of {READS} at a time");
    world.end();
}

#[test]
fn queued_reads_of_gone_peers_are_dropped() {
    let mut world = on_the_device();
    let other = PeerKey { index: 1, generation: 1 };
    world.join(other, Path::Stream);
    world.hear();
    ask_for_all(&mut world, other);
    world.service.peer_gone(other, world.now_ns);
    world.settle();
    let counters = world.service.inspect().tier().expect("a tier").snapshot().counters;
    assert_eq!((counters.reads, counters.reads_queued), (u64::from(READS), KEYS - u64::from(READS)));
    world.end();
}

/// A degraded device takes no tombstones either, so that its record of an object has to be known before the object is
/// put.
#[test]
fn puts_wait_for_the_recovery_of_a_degraded_device() {
    let mut world = on_the_device();
    world.read_only = true;
    world.restart_in_haste();
    for key in 0..KEYS as u8 {
        world.put_with(key, &PutOptions { ack: Some(PutAck::Memory), ..PutOptions::default() });
        world.hear();
        assert!(matches!(world.last_put, Status::Busy | Status::Exists), "object {key}: {:?}", world.last_put);
    }
    world.settle();
    world.end();
}

//! Tests of damaged records of objects that another owner of their slot has, and of the records of replicas.

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{GetItem, Hello, Item, KeyItem, Kind, ListReply, Operation, PutItem, PutOptions};
use kvplane_proto::{Digest, FrameFlags, Status};

use super::super::rig::{body_of, digest, digests, hello};
use super::copies::{copied, first_owner, put};
use super::world::{ReceivedAnswer, World, bytes_of};
use crate::service::{Fetch, FetchDone, MemoryExtent, Path, PayloadTo, PeerKey, RecordRepairCounters, Want};

/// Connection of the other node.
pub(super) const FETCHING: PeerKey = PeerKey { index: 1, generation: 1 };

/// Returns the description of an object by another node.
fn page_of(digest: Digest, bytes: u64) -> Vec<u8> {
    let flags = KeyItem::replica_flags(2);
    let item = KeyItem::plain(digest, kvplane_proto::ids::Version(77), bytes, flags);
    let mut page = Vec::new();
    ListReply { walk: 1, next: 0, items: 1 }.encode(&mut page);
    item.encode(&mut page);
    page
}

fn records(world: &World) -> RecordRepairCounters {
    world.service.inspect().repairs().records
}

fn fetch(world: &mut World) -> Fetch {
    for _ in 0..200 {
        if let Some(fetch) = world.service.poll_fetch(world.now_ns) {
            return fetch;
        }
        world.step();
    }
    panic!("nobody is asked");
}

/// Returns an owner with an object that its SSD and the replica owner have, and memory has not; its key and bytes.
fn owner(seed: u64) -> (World, u8, Vec<u8>) {
    let (mut world, _, keys) = first_owner(seed, 1);
    put(&mut world, keys[0], 2);
    assert_eq!(copied(&mut world, 50).len(), 1);
    world.forget(&[digest(keys[0])]);
    copied(&mut world, 50);
    assert_eq!(world.service.inspect().copy_counters().dropped, 0, "the replica of an evicted object stays");
    (world, keys[0], bytes_of(1))
}

/// Answers the requests of a repair with these bytes.
fn repair(world: &mut World, key: u8, bytes: &[u8]) {
    let described = fetch(world);
    assert_eq!(described.want, Want::DescribeCopy(digest(key)));
    let page = page_of(digest(key), bytes.len() as u64);
    world.service.fetched(described.token, FetchDone::Page(page), world.now_ns);
    world.hear();
    let Fetch { token, source, want } = fetch(world);
    let Want::Repair(_, MemoryExtent { offset, .. }) = want else { panic!("{want:?}") };
    assert_eq!(source, described.source);
    world.memory.pool[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    let done = FetchDone::Object(bytes.len() as u64, payload_checksum(bytes));
    world.service.fetched(token, done, world.now_ns);
}

#[test]
fn a_get_waits_for_the_repair_of_a_damaged_record_which_is_written_again() {
    for seed in 2000..2004 {
        let (mut world, key, bytes) = owner(seed);
        world.spoil_record(&bytes);
        world.get(key);
        for _ in 0..50 {
            world.step();
        }
        assert_eq!((world.got, records(&world).damaged, records(&world).outstanding), (0, 1, 1));
        assert_eq!(world.service.inspect().ssd_bytes(digest(key)), Some(bytes.len() as u64), "it exists all the while");
        repair(&mut world, key, &bytes);
        world.settle();
        assert_eq!(world.got, 1);
        let counters = RecordRepairCounters { damaged: 1, repaired: 1, lost: 0, outstanding: 0 };
        assert_eq!(records(&world), counters);
        // From the new record.
        world.forget(&[digest(key)]);
        world.get(key);
        world.settle();
        assert_eq!((world.got, records(&world)), (2, counters));
        assert_eq!(world.service.inspect().copy_counters().dropped, 0);
        world.end();
    }
}

#[test]
fn an_object_that_nobody_has_is_a_miss_and_its_replicas_are_removed() {
    let (mut world, key, bytes) = owner(2010);
    world.spoil_record(&bytes);
    world.now_may(key, None);
    world.get(key);
    let described = fetch(&mut world);
    world.service.fetched(described.token, FetchDone::Failed(Status::NotFound), world.now_ns);
    copied(&mut world, 50);
    world.settle();
    assert_eq!((records(&world).lost, records(&world).outstanding), (1, 0));
    assert_eq!(world.service.inspect().copy_counters().dropped, 1);
    assert_eq!(world.service.inspect().ssd_bytes(digest(key)), None);
    world.end();
}

#[test]
fn a_damaged_record_of_an_object_that_no_other_node_has_is_a_miss_and_counted_as_lost() {
    let (mut world, _, keys) = first_owner(2012, 1);
    put(&mut world, keys[0], 1);
    world.settle();
    world.forget(&[digest(keys[0])]);
    world.settle();
    world.spoil_record(&bytes_of(1));
    world.now_may(keys[0], None);
    world.get(keys[0]);
    world.settle();
    assert_eq!(records(&world), RecordRepairCounters { damaged: 1, repaired: 0, lost: 1, outstanding: 0 });
    assert_eq!(world.service.inspect().ssd_bytes(digest(keys[0])), None);
    world.end();
}

#[test]
fn a_removal_ends_the_repair_and_removes_the_replica_of_an_evicted_object() {
    let (mut world, key, bytes) = owner(2011);
    world.spoil_record(&bytes);
    world.get(key);
    let described = fetch(&mut world);
    world.remove(key);
    let mut dropped = 0;
    for _ in 0..50 {
        world.step();
        while let Some(fetch) = world.service.poll_fetch(world.now_ns) {
            let Want::DropCopies(digests) = fetch.want else { panic!("{fetch:?}") };
            dropped += digests.len();
            world.service.fetched(fetch.token, FetchDone::CopiesDropped(vec![true]), world.now_ns);
        }
    }
    world.settle();
    assert_eq!((dropped, world.service.inspect().ssd_bytes(digest(key))), (1, None));
    let page = page_of(digest(key), bytes.len() as u64);
    world.service.fetched(described.token, FetchDone::Page(page), world.now_ns);
    assert!(world.service.poll_fetch(world.now_ns).is_none());
    assert_eq!((records(&world).lost, records(&world).outstanding), (0, 0));
    world.end();
}

/// Sends a request of the other node, by the newest map, and returns the answer.
fn of_other(world: &mut World, operation: Operation, flags: FrameFlags, body: &[u8]) -> ReceivedAnswer {
    let request = world.next_request();
    let mut header = Header::request(Kind::Request(operation), request).with_body(body, 1);
    (header.argument, header.flags) = (5, flags);
    world.expect(request);
    world.service.request(FETCHING, &header, body, world.now_ns);
    world.settle();
    world.take_answered().expect("it was answered")
}

/// Has the other node, by the map of this epoch, write a replica of an object here; returns its checksum.
pub(super) fn take_replica(world: &mut World, key: u8, bytes: &[u8], epoch: u64) -> u64 {
    let item =
        PutItem::plain(digest(key), bytes.len() as u64).with_options(&PutOptions { replicas: 2, ..Default::default() });
    let body = body_of([item]);
    let (request, sum) = (world.next_request(), payload_checksum(bytes));
    let header = Header::request(Kind::Request(Operation::Put), request).with_body(&body, 1);
    let mut header = header.with_payload(bytes.len() as u64, Some(sum));
    (header.argument, header.flags) = (epoch, header.flags | FrameFlags::REPLICATE);
    world.expect(request);
    let PayloadTo::Extent(extent) = world.service.request(FETCHING, &header, &body, world.now_ns) else {
        panic!("the replica is taken")
    };
    world.hear();
    world.memory.pool[extent.offset as usize..][..bytes.len()].copy_from_slice(bytes);
    world.service.payload_done(FETCHING, Some(sum), world.now_ns);
    sum
}

#[test]
fn a_replica_is_recorded_read_from_there_and_removed() {
    let (mut world, owners, _) = first_owner(2020, 1);
    world.join_with(FETCHING, Path::Stream, &Hello { fetches: true, ..hello() });
    world.hear();
    let is_theirs = |key: &u8| world.service.inspect().second_since(digest(*key).slot()).is_some();
    let key = (0..200).find(is_theirs).expect("this shard is a replica owner");
    let (bytes, object) = (bytes_of(1), digest(key));
    let sum = take_replica(&mut world, key, &bytes, 5);
    // The slot is opened once the note without it is durable, and nothing else of it is on the SSD.
    for _ in 0..400 {
        world.step();
    }
    assert_eq!(world.take_answered().expect("an answer").status, Status::Ok);
    assert!(world.service.inspect().replica_record(object).is_some_and(|record| record.checksum == sum));
    assert_eq!(world.service.inspect().ssd_bytes(object), None, "it is no object of this shard");
    world.service.objects.local.shard.store.drop_copy(object);
    let ask = |world: &mut World| {
        let item = GetItem { digest: object, request: world.next_request(), capacity_bytes: u64::MAX };
        world.expect(item.request);
        let body = body_of([item]);
        let mut header = Header::request(Kind::Request(Operation::Get), item.request).with_body(&body, 1);
        (header.argument, header.flags) = (5, FrameFlags::READ_REPLICA);
        world.service.request(FETCHING, &header, &body, world.now_ns);
    };
    let get = |world: &mut World| {
        ask(world);
        world.settle();
        world.take_answered().expect("it was answered")
    };
    assert_eq!(get(&mut world).bytes.as_ref(), Some(&bytes), "the owner repairs its copy");
    assert!(!world.service.store().exists(object), "the record is enough");
    // It is damaged here, and the owner has it.
    world.spoil_record(&bytes);
    ask(&mut world);
    for _ in 0..50 {
        world.step();
    }
    assert!(world.take_answered().is_none(), "it waits for the repair");
    ask(&mut world);
    world.step();
    let refused = world.take_answered().expect("a repair does not wait for one that has begun");
    assert_eq!(refused.status, Status::NotFound);
    repair(&mut world, key, &bytes);
    world.settle();
    assert_eq!(world.take_answered().expect("it was answered").bytes.as_ref(), Some(&bytes));
    assert_eq!(records(&world), RecordRepairCounters { damaged: 1, repaired: 1, lost: 0, outstanding: 0 });
    world.service.objects.local.shard.store.drop_copy(object);
    assert_eq!(get(&mut world).bytes.as_ref(), Some(&bytes));
    let removed = of_other(&mut world, Operation::Remove, FrameFlags::REPLICATE, &digests([key]));
    assert_eq!((removed.status, removed.body.first().copied()), (Status::Ok, Some(1)));
    assert!(world.service.inspect().replica_record(object).is_none());
    assert_eq!(get(&mut world).status, Status::NotFound);
    // A restart makes all replica records void.
    world.restart_among(&owners);
    assert!(world.service.inspect().ssd_record(object).is_none());
    world.end();
}

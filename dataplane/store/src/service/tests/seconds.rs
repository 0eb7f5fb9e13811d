//! Tests of an owner whose replica owners do not answer, or of which it has several, with a scripted host.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{Claim, ClusterMap, Former, Member, ReplicaSet, ShardAddress, ShardKey, SlotOwners};
use kvplane_proto::message::{GetItem, Hello, Kind, Operation, PutItem, PutOptions, SizeReply};
use kvplane_proto::{Digest, FrameFlags, Limits, Status};

use super::rig::{Answer, CHECKSUM, Rig, body_of, digest, digests, hello, identity};
use crate::service::{Fetch, FetchDone, Path, PeerKey, ReplicaProgress, Want};

const PUTS: u8 = 60;
/// Backoff after one failure, with the delay that rounds add.
const PAUSE_NS: u64 = 50_000_000;

/// Returns the owners of this shard's node and another one, each the replica owner of the other's slots.
pub(super) fn owners(epoch: u64) -> SlotOwners {
    owners_of(epoch, 2)
}

/// Returns the owners of this shard's node and further nodes.
fn owners_of(epoch: u64, nodes: u64) -> SlotOwners {
    SlotOwners::of(&map_of(epoch, nodes))
}

fn map_of(epoch: u64, nodes: u64) -> ClusterMap {
    let us = identity();
    let member = |node: NodeId, incarnation| Member {
        node,
        incarnation,
        weight: 1,
        failure_domain: String::new(),
        host: String::new(),
        shards: vec![ShardAddress { tcp: ([127, 0, 0, 1], 7000 + node.0 as u16).into(), shm: None }; 3],
    };
    let others = (1..nodes).map(|other| member(NodeId(us.node.0 + other), Incarnation(1)));
    let members = core::iter::once(member(us.node, us.incarnation)).chain(others).collect();
    ClusterMap { epoch: Epoch(epoch), replicas: 2, members, former: None }
}

/// Puts objects that are to be replicated; returns the number of those in this shard's slots.
fn put_all(rig: &mut Rig, peer: PeerKey, from: u8) -> usize {
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    let mut taken = 0;
    for key in from..from + PUTS {
        rig.offer(peer, Operation::Put, &body_of([PutItem::plain(digest(key), 64).with_options(&options)]), 64);
        rig.service.payload_done(peer, Some(CHECKSUM), rig.now_ns);
        let refused = rig.drain().iter().any(|said| format!("{said:?}").contains("WrongOwner"));
        taken += usize::from(!refused);
    }
    taken
}

fn copies(rig: &mut Rig) -> Vec<Fetch> {
    std::iter::from_fn(|| rig.service.poll_fetch(rig.now_ns)).filter(|fetch| is_copy(&fetch.want)).collect()
}

const fn is_copy(want: &Want) -> bool {
    matches!(want, Want::Copy { .. })
}

#[test]
fn replicas_that_fail_together_count_as_one_failure() {
    let mut rig = Rig::new();
    rig.service.follow(1, &owners(6));
    let peer = rig.join(Path::Stream);
    let taken = put_all(&mut rig, peer, 0);
    let on_their_way = copies(&mut rig);
    assert!(taken >= 4 && on_their_way.len() == taken, "{taken} objects, {} copies", on_their_way.len());
    // Their connection ends, as it does when owners change: all of them fail at the same time.
    for Fetch { token, .. } in on_their_way {
        rig.service.fetched(token, FetchDone::Failed(Status::Unreachable), rig.now_ns);
    }
    assert!(put_all(&mut rig, peer, PUTS) > 0);
    assert!(copies(&mut rig).is_empty(), "it is left alone for a while");
    rig.pass(PAUSE_NS);
    let taken = put_all(&mut rig, peer, 2 * PUTS);
    let copied = copies(&mut rig).len();
    assert!(copied >= taken, "{copied} copies of {taken}: some wait longer, as many ended at once");
}

#[test]
fn a_new_map_ends_the_backoff_of_a_replica_owner() {
    let mut rig = Rig::new();
    rig.service.follow(1, &owners(6));
    let peer = rig.join(Path::Stream);
    put_all(&mut rig, peer, 0);
    // Five failures in a row, each after the backoff of the one before.
    for _ in 0..5 {
        let asked: Vec<Fetch> = std::iter::from_fn(|| rig.service.poll_fetch(rig.now_ns)).collect();
        for Fetch { token, .. } in asked {
            rig.service.fetched(token, FetchDone::Failed(Status::Unreachable), rig.now_ns);
        }
        rig.pass(1_000_000_000);
    }
    while let Some(Fetch { token, .. }) = rig.service.poll_fetch(rig.now_ns) {
        rig.service.fetched(token, FetchDone::Failed(Status::Unreachable), rig.now_ns);
    }
    put_all(&mut rig, peer, PUTS);
    assert!(copies(&mut rig).is_empty(), "its pause is long by now");
    let mut other = owners(7);
    other.epoch = Epoch(7);
    rig.service.follow(1, &other);
    put_all(&mut rig, peer, 2 * PUTS);
    assert!(!copies(&mut rig).is_empty(), "what it did by the map before says nothing");
}

/// Gets an object as a client that accepts leases, by the map of this epoch; returns true if a lease was granted.
fn told(rig: &mut Rig, peer: PeerKey, key: u8, epoch: u64) -> bool {
    let item = GetItem { digest: digest(key), request: rig.next_request(), capacity_bytes: u64::MAX };
    let body = body_of([item]);
    let mut header = Header::request(Kind::Request(Operation::Get), rig.next_request()).with_body(&body, 1);
    (header.argument, header.flags) = (epoch, FrameFlags::REPLICA_LEASE);
    rig.service.request(peer, &header, &body, rig.now_ns);
    let answer = rig.answer();
    assert_eq!(answer.status(), Status::Ok);
    let (_, hold) = answer.payload.expect("the object's bytes");
    rig.service.sent(hold);
    answer.header.flags.has(FrameFlags::REPLICATED)
}

/// Puts an object of this shard that has a replica, and whose replica owner by the map of epoch 6 differs from that by
/// the map of epoch 7, of `nodes` nodes.
fn copied(rig: &mut Rig, peer: PeerKey, nodes: u64) -> u8 {
    let (before, after) = (owners(6), owners_of(7, nodes));
    let ours = |owners: &SlotOwners, key: u8| {
        owners
            .owner(digest(key).slot())
            .is_some_and(|owner| (owner.node, owner.shard) == (identity().node, identity().shard))
    };
    let key = (0..=255).find(|key| {
        let slot = digest(*key).slot();
        ours(&before, *key) && ours(&after, *key) && before.replica_owners(slot) != after.replica_owners(slot)
    });
    let key = key.expect("a slot that is as the test wants it");
    rig.service.follow(1, &before);
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    rig.offer(peer, Operation::Put, &body_of([PutItem::plain(digest(key), 64).with_options(&options)]), 64);
    rig.service.payload_done(peer, Some(CHECKSUM), rig.now_ns);
    assert_eq!(rig.answer().status(), Status::Ok);
    assert!(!told(rig, peer, key, 6), "nobody has a copy yet");
    let [Fetch { token, .. }] = copies(rig)[..] else { panic!("one object is to be copied") };
    assert!(!told(rig, peer, key, 6), "it is on its way");
    rig.service.fetched(token, FetchDone::Copied, rig.now_ns);
    key
}

#[test]
fn replica_lease_of_a_former_replica_owner_is_waited_out() {
    // Another shard is the replica owner, or none is.
    for nodes in [3, 1] {
        let mut rig = Rig::new();
        let peer = rig.join(Path::Stream);
        let key = copied(&mut rig, peer, nodes);
        assert!(!told(&mut rig, peer, key, 5), "by that map another may be the second owner");
        assert!(told(&mut rig, peer, key, 6));
        let told_ns = rig.now_ns;
        rig.pass(1_000_000);
        rig.service.follow(1, &owners_of(7, nodes));
        rig.pass(1_000_000);
        rig.ask(peer, Operation::Remove, &digests([key]), 1);
        rig.assert_quiet();
        rig.pass(told_ns + Limits::COPY_LAPSE_NS - 1 - rig.now_ns);
        rig.assert_quiet();
        rig.pass(1);
        assert_eq!(rig.answer().bits(), [true], "nobody reads the copy any more");
        assert_eq!(rig.service.inspect().copy_counters().outstanding, 0);
    }
}

#[test]
fn no_wait_without_a_lease() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let key = copied(&mut rig, peer, 3);
    rig.service.follow(1, &owners_of(7, 3));
    rig.ask(peer, Operation::Remove, &digests([key]), 1);
    assert_eq!(rig.answer().bits(), [true]);
    // Nor if the lease was granted so long ago that it has expired.
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let key = copied(&mut rig, peer, 3);
    assert!(told(&mut rig, peer, key, 6));
    rig.pass(Limits::COPY_LAPSE_NS);
    rig.service.follow(1, &owners_of(7, 3));
    rig.ask(peer, Operation::Remove, &digests([key]), 1);
    assert_eq!(rig.answer().bits(), [true]);
}

#[test]
fn a_replacement_is_replicated_though_its_former_version_was_in_flight() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    rig.service.follow(1, &owners(6));
    let ours = |owners: &SlotOwners, key: u8| owners.owner(digest(key).slot()).map(|owner| (owner.node, owner.shard));
    let key = (0..=255).find(|key| ours(&owners(6), *key) == Some((identity().node, identity().shard)));
    let key = key.expect("a slot of this shard");
    let put = |rig: &mut Rig, options: PutOptions| {
        rig.offer(peer, Operation::Put, &body_of([PutItem::plain(digest(key), 64).with_options(&options)]), 64);
        rig.service.payload_done(peer, Some(CHECKSUM), rig.now_ns);
    };
    put(&mut rig, PutOptions { replicas: 2, ..PutOptions::default() });
    assert_eq!(rig.answer().status(), Status::Ok);
    let [Fetch { token: first, .. }] = copies(&mut rig)[..] else { panic!("one object is to be copied") };
    put(&mut rig, PutOptions { replace: true, ..PutOptions::default() });
    assert_eq!(rig.service.control().want_copy(digest(key), rig.now_ns), ReplicaProgress::Coming);
    rig.service.fetched(first, FetchDone::Copied, rig.now_ns);
    let Some(Fetch { token, want: Want::DropCopies(_), .. }) = rig.service.poll_fetch(rig.now_ns) else {
        panic!("the copy of what was replaced is to go")
    };
    rig.service.fetched(token, FetchDone::CopiesDropped(vec![true]), rig.now_ns);
    assert_eq!(rig.answer().status(), Status::Ok);
    rig.pass(PAUSE_NS);
    assert_eq!(copies(&mut rig).len(), 1, "the replacement gets the copy that it was promised");
}

/// Answers the requests to drop the replicas of these objects.
fn drop_copies(rig: &mut Rig, keys: &[u8], gone: bool) {
    let Some(Fetch { token, want: Want::DropCopies(dropped), .. }) = rig.service.poll_fetch(rig.now_ns) else {
        panic!("copies are to be dropped")
    };
    assert_eq!(dropped, keys.iter().map(|key| digest(*key)).collect::<Vec<_>>());
    rig.service.fetched(token, FetchDone::CopiesDropped(vec![gone; keys.len()]), rig.now_ns);
}

#[test]
fn removed_replica_is_created_again_only_on_a_new_request() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let key = copied(&mut rig, peer, 3);
    assert!(told(&mut rig, peer, key, 6));
    rig.ask(peer, Operation::RemoveCopy, &digests([key]), 1);
    rig.assert_quiet();
    drop_copies(&mut rig, &[key], true);
    assert_eq!(rig.answer().bits(), [true]);
    assert!(!told(&mut rig, peer, key, 6), "the object is there, and has no copy");
    // Neither the walk nor time makes a replica again.
    for _ in 0..20 {
        rig.pass(1_000_000_000);
        assert!(copies(&mut rig).is_empty());
    }
    rig.ask(peer, Operation::RemoveCopy, &digests([key]), 1);
    assert_eq!(rig.answer().bits(), [false], "there was none any more");
    assert_eq!(rig.service.inspect().copy_counters().outstanding, 0);
    // A new request for a replica makes one.
    assert_eq!(rig.service.control().want_copy(digest(key), rig.now_ns), ReplicaProgress::Coming);
    assert_eq!(copies(&mut rig).len(), 1);
}

#[test]
fn a_replica_in_flight_is_removed_after_it_was_written_and_replies_time_out() {
    let mut rig = Rig::new();
    rig.service.follow(1, &owners(6));
    let peer = rig.join(Path::Stream);
    let ours = |key: u8| owners(6).owner(digest(key).slot()).map(|owner| (owner.node, owner.shard));
    let mut keys = (0..=255).filter(|key| ours(*key) == Some((identity().node, identity().shard)));
    let (key, other) = (keys.next().expect("a slot"), keys.next().expect("another"));
    let put = |rig: &mut Rig, key: u8, replicas| {
        let options = PutOptions { replicas, ..PutOptions::default() };
        rig.offer(peer, Operation::Put, &body_of([PutItem::plain(digest(key), 64).with_options(&options)]), 64);
        rig.service.payload_done(peer, Some(CHECKSUM), rig.now_ns);
        assert_eq!(rig.answer().status(), Status::Ok);
    };
    put(&mut rig, key, 2);
    put(&mut rig, other, 1);
    let [Fetch { token, .. }] = copies(&mut rig)[..] else { panic!("one object is to be copied") };
    rig.ask(peer, Operation::RemoveCopy, &digests([key, other]), 2);
    assert!(rig.service.poll_fetch(rig.now_ns).is_none(), "it is on its way");
    rig.service.fetched(token, FetchDone::Copied, rig.now_ns);
    rig.assert_quiet();
    // The replica owner does not answer: the client is answered as busy, and retries until it does.
    drop_copies(&mut rig, &[key], false);
    rig.pass(1_000_000_000);
    let answer = rig.answer();
    assert_eq!((answer.header.kind, answer.status()), (Kind::Reply(Operation::RemoveCopy), Status::Busy));
    rig.ask(peer, Operation::RemoveCopy, &digests([key, other]), 2);
    drop_copies(&mut rig, &[key], true);
    assert_eq!(rig.answer().bits(), [true, false]);
    assert!(rig.exists(peer, key) && rig.exists(peer, other));
}

/// Returns keys of the other node, for which this shard is the replica owner.
pub(super) fn keys_of_the_other_node() -> impl Iterator<Item = u8> {
    let owners = owners(6);
    let theirs = |key: &u8| owners.owner(digest(*key).slot()).is_some_and(|owner| owner.node != identity().node);
    let ours = |key: &u8| {
        let mut others = owners.replica_owners(digest(*key).slot()).iter();
        others.any(|owner| (owner.node, owner.shard) == (identity().node, identity().shard))
    };
    let keys: Vec<u8> = (0..=255).filter(|key| theirs(key) && ours(key)).collect();
    keys.into_iter()
}

/// Returns the status of a request with this operation and these flags for an object of the other node, for which this
/// shard is the replica owner.
fn status_of(rig: &mut Rig, peer: PeerKey, operation: Operation, flags: FrameFlags) -> Status {
    let key = keys_of_the_other_node().next().expect("a slot that is as the test wants it");
    let body = match operation {
        Operation::Get => {
            body_of([GetItem { digest: digest(key), request: rig.next_request(), capacity_bytes: u64::MAX }])
        }
        _ => digests([key]),
    };
    let mut header = Header::request(Kind::Request(operation), rig.next_request()).with_body(&body, 1);
    (header.argument, header.flags) = (6, flags);
    rig.service.request(peer, &header, &body, rig.now_ns);
    rig.answer().status()
}

#[test]
fn a_replica_owner_serves_reads_of_replicas_and_refuses_changes() {
    let mut rig = Rig::new();
    rig.service.follow(1, &owners(6));
    let peer = rig.join(Path::Stream);
    assert_eq!(status_of(&mut rig, peer, Operation::Get, FrameFlags::NONE), Status::WrongOwner);
    assert_eq!(status_of(&mut rig, peer, Operation::Get, FrameFlags::READ_REPLICA), Status::NotFound);
    // The status of a query is that of the frame; whether there is a replica is in its items.
    for operation in [Operation::Size, Operation::Exists] {
        assert_eq!(status_of(&mut rig, peer, operation, FrameFlags::READ_REPLICA), Status::Ok, "{operation:?}");
        assert_eq!(status_of(&mut rig, peer, operation, FrameFlags::NONE), Status::WrongOwner, "{operation:?}");
    }
    assert_eq!(status_of(&mut rig, peer, Operation::Remove, FrameFlags::READ_REPLICA), Status::WrongOwner);
}

#[test]
fn a_replica_owner_answers_queries_from_the_replicas_that_it_has() {
    let mut rig = Rig::new();
    rig.service.follow(1, &owners(6));
    let mut keys = keys_of_the_other_node();
    let (here, gone) = (keys.next().expect("a slot"), keys.next().expect("another slot"));
    let owner = rig.connect(Path::Stream);
    rig.ask(owner, Operation::Hello, &Hello { fetches: true, ..hello() }.encode(), 1);
    assert_eq!(rig.answer().status(), Status::Ok);
    let item = body_of([PutItem::plain(digest(here), 64)]);
    let header = Header::request(Kind::Request(Operation::Put), rig.next_request());
    let mut header = header.with_body(&item, 1).with_payload(64, Some(CHECKSUM));
    (header.argument, header.flags) = (6, header.flags.with(FrameFlags::REPLICATE, true));
    rig.service.request(owner, &header, &item, rig.now_ns);
    rig.done(owner);
    assert_eq!(rig.answer().status(), Status::Ok);
    let client = rig.join(Path::Stream);
    let mut asked = |operation: Operation| {
        let body = digests([here, gone]);
        let mut header = Header::request(Kind::Request(operation), rig.next_request()).with_body(&body, 2);
        (header.argument, header.flags) = (6, FrameFlags::READ_REPLICA);
        rig.service.request(client, &header, &body, rig.now_ns);
        rig.answer()
    };
    assert_eq!(asked(Operation::Exists).bits(), [true, false]);
    let sizes: Vec<SizeReply> = asked(Operation::Size).items();
    assert_eq!([sizes[0].status, sizes[1].status], [Status::Ok, Status::NotFound]);
    assert_eq!(sizes[0].bytes, 64);
}

/// Returns the answer to a request of a peer that fetches, by the map of epoch 7.
fn fetched(rig: &mut Rig, peer: PeerKey, operation: Operation, body: &[u8]) -> Answer {
    let mut header = Header::request(Kind::Request(operation), rig.next_request()).with_body(body, 1);
    header.argument = 7;
    rig.service.request(peer, &header, body, rig.now_ns);
    rig.answer()
}

/// A new owner that removes an object while its replica is on its way to the former owner does not get it back.
#[test]
fn a_new_owner_does_not_import_the_replica_that_it_wrote() {
    let mut rig = Rig::new();
    let (before, mut map) = (map_of(6, 1), map_of(7, 2));
    let Member { node, incarnation, weight, .. } = before.members[0];
    let claims = vec![Claim { node, incarnation, weight, shards: 3 }];
    let began = map.members.iter().map(|member| (member.node, member.incarnation)).collect();
    map.former = Some(Former { since: Epoch(7), from: Epoch(6), claims, began, restarts: None });
    let after = SlotOwners::of(&map);
    rig.service.follow(1, &SlotOwners::of(&before));
    let client = rig.join(Path::Stream);
    let moves = |key: &u8| {
        let slot = digest(*key).slot();
        let is_ours = |owner: ShardKey| (owner.node, owner.shard) == (identity().node, identity().shard);
        let was_ours = rig.service.inspect().serves(slot);
        was_ours
            && after.owner(slot).is_some_and(|owner| owner.node != identity().node)
            && after.replica_owners(slot).iter().copied().any(is_ours)
    };
    let key = (0..=255).find(moves).expect("a slot that is as the test wants it");
    rig.put(client, key, 64);
    rig.service.follow(1, &after);
    let importer = rig.connect(Path::Stream);
    rig.ask(importer, Operation::Hello, &Hello { fetches: true, ..hello() }.encode(), 1);
    assert_eq!(rig.answer().status(), Status::Ok);
    let wanted = |rig: &mut Rig| {
        body_of([GetItem { digest: digest(key), request: rig.next_request(), capacity_bytes: u64::MAX }])
    };
    let body = wanted(&mut rig);
    let Answer { payload, .. } = fetched(&mut rig, importer, Operation::Get, &body);
    rig.service.sent(payload.expect("the object's bytes").1);
    assert!(fetched(&mut rig, importer, Operation::Remove, &digests([key])).bits()[0], "the new owner has it");
    // Its replica comes, and the new owner does not have the object any more.
    let item = body_of([PutItem::plain(digest(key), 64)]);
    let header = Header::request(Kind::Request(Operation::Put), rig.next_request());
    let mut header = header.with_body(&item, 1).with_payload(64, Some(CHECKSUM));
    (header.argument, header.flags) = (7, header.flags.with(FrameFlags::REPLICATE, true));
    rig.service.request(importer, &header, &item, rig.now_ns);
    rig.done(importer);
    assert_eq!(rig.answer().status(), Status::Ok);
    let body = wanted(&mut rig);
    assert_eq!(fetched(&mut rig, importer, Operation::Get, &body).status(), Status::NotFound);
    let sizes: Vec<SizeReply> = fetched(&mut rig, importer, Operation::Size, &digests([key])).items();
    assert_eq!(sizes[0].status, Status::NotFound);
}

/// Returns the owners by a map of the nodes of these numbers, in a failure domain each; 0 is this shard's node.
fn owners_among(epoch: u64, nodes: &[u64], replicas: u8) -> SlotOwners {
    let mut map = map_of(epoch, 9);
    map.members.retain(|member| nodes.contains(&(member.node.0 - identity().node.0)));
    map.members.iter_mut().for_each(|member| member.failure_domain = member.node.to_string());
    map.replicas = replicas;
    SlotOwners::of(&map)
}

/// Returns a key of this shard by each of these maps, and its replica owners by the first of them.
fn key_of_all(maps: &[&SlotOwners]) -> (u8, Vec<ShardKey>) {
    let is_ours = |owner: ShardKey| (owner.node, owner.shard) == (identity().node, identity().shard);
    let of_all = |key: &u8| maps.iter().all(|owners| owners.owner(digest(*key).slot()).is_some_and(is_ours));
    let key = (0..=255).find(of_all).expect("a slot of this shard");
    (key, maps[0].replica_owners(digest(key).slot()).to_vec())
}

/// Puts an object that replaces another, as a client that knows of several replica owners.
fn put_several(rig: &mut Rig, peer: PeerKey, key: u8, replicas: u8, wait_replicas: u8) {
    let options = PutOptions { replicas, wait_replicas, replace: true, ..PutOptions::default() };
    let body = body_of([PutItem::plain(digest(key), 64).with_options(&options)]);
    let header = Header::request(Kind::Request(Operation::Put), rig.next_request());
    let mut header = header.with_body(&body, 1).with_payload(64, Some(CHECKSUM));
    header.argument = 6;
    header.flags = header.flags.with(FrameFlags::REPLICA_OWNERS, true);
    rig.service.request(peer, &header, &body, rig.now_ns);
    assert_eq!(rig.tails().len(), usize::from(replicas > 2), "the tail says how many replicas, if more than two");
    rig.service.payload_done(peer, Some(CHECKSUM), rig.now_ns);
}

/// Returns the replica owners that the answer names.
fn named(rig: &mut Rig) -> ReplicaSet {
    let answer = rig.answer();
    assert_eq!(answer.status(), Status::Ok);
    answer.header.flags.replicas()
}

#[test]
fn a_put_waits_for_as_many_replicas_as_it_says() {
    for (replicas, waits, sent, awaited) in [(2, 2, 1, 1), (3, 2, 2, 1), (3, 3, 2, 2), (8, 8, 3, 3), (4, 0, 3, 0)] {
        let mut rig = Rig::new();
        let owners = owners_among(6, &[0, 1, 2, 3], 4);
        rig.service.follow(1, &owners);
        let peer = rig.join(Path::Stream);
        let (key, others) = key_of_all(&[&owners]);
        put_several(&mut rig, peer, key, replicas, waits);
        if awaited == 0 {
            assert_eq!(named(&mut rig), ReplicaSet::NONE);
        }
        let pushes = copies(&mut rig);
        let to: Vec<ShardKey> = pushes.iter().map(|push| push.source).collect();
        assert_eq!(to, others[..sent], "{replicas} replicas: at the first replica owners, all at once");
        // The last one answers first.
        for (done, push) in (1..).zip(pushes.iter().rev()) {
            rig.assert_quiet();
            rig.service.fetched(push.token, FetchDone::Copied, rig.now_ns);
            if done == awaited {
                assert_eq!(named(&mut rig), ReplicaSet::of(|number| number < sent && number + done >= sent));
            }
        }
        rig.assert_quiet();
        assert!(copies(&mut rig).is_empty());
    }
}

#[test]
fn a_refused_replica_goes_to_the_next_replica_owner_and_the_answer_names_the_others() {
    let mut rig = Rig::new();
    let owners = owners_among(6, &[0, 1, 2, 3], 4);
    rig.service.follow(1, &owners);
    let peer = rig.join(Path::Stream);
    let (key, others) = key_of_all(&[&owners]);
    put_several(&mut rig, peer, key, 3, 3);
    let pushes = copies(&mut rig);
    rig.service.fetched(pushes[0].token, FetchDone::Failed(Status::NoSpace), rig.now_ns);
    rig.service.fetched(pushes[1].token, FetchDone::Copied, rig.now_ns);
    rig.assert_quiet();
    let again = copies(&mut rig);
    assert_eq!(again.iter().map(|push| push.source).collect::<Vec<_>>(), [others[2]]);
    rig.service.fetched(again[0].token, FetchDone::Failed(Status::Unreachable), rig.now_ns);
    assert!(copies(&mut rig).is_empty(), "each was tried");
    assert_eq!(named(&mut rig), ReplicaSet::NONE.with(1), "what cannot be had is said at once");
    // With a single node there is nothing to wait for.
    let alone = owners_among(7, &[0], 4);
    rig.service.follow(1, &alone);
    let key = key_of_all(&[&alone]).0;
    put_several(&mut rig, peer, key, 3, 3);
    assert_eq!(named(&mut rig), ReplicaSet::NONE);
}

#[test]
fn a_replica_owner_that_refuses_gets_the_replica_again_only_after_the_pause_of_the_walk() {
    let mut rig = Rig::new();
    let owners = owners_among(6, &[0, 1, 2], 3);
    rig.service.follow(1, &owners);
    let peer = rig.join(Path::Stream);
    let (key, others) = key_of_all(&[&owners]);
    // The walk that begins with the map ends before the put.
    for _ in 0..4 {
        assert_eq!(rig.service.poll_fetch(rig.now_ns), None);
        rig.pass(1_000_000_000);
    }
    put_several(&mut rig, peer, key, 3, 0);
    rig.answer();
    let refuse = |rig: &mut Rig, fetch: &Fetch| {
        rig.service.fetched(fetch.token, FetchDone::Failed(Status::NoSpace), rig.now_ns);
    };
    // Each refusal arrives before the next request is sent.
    let mut sent_to = Vec::new();
    while let Some(fetch) = rig.service.poll_fetch(rig.now_ns) {
        refuse(&mut rig, &fetch);
        sent_to.push(fetch.source);
        assert!(sent_to.len() < 8, "it is sent again at once: {sent_to:?}");
    }
    assert_eq!(sent_to, others[..2]);
    rig.pass(1_000_000_000);
    let again = rig.service.poll_fetch(rig.now_ns).expect("the walk has found it");
    assert!(is_copy(&again.want) && again.source == others[0]);
}

#[test]
fn a_replacement_waits_until_every_replica_owner_has_dropped_the_former_version() {
    let mut rig = Rig::new();
    let owners = owners_among(6, &[0, 1, 2], 3);
    rig.service.follow(1, &owners);
    let peer = rig.join(Path::Stream);
    let (key, others) = key_of_all(&[&owners]);
    put_several(&mut rig, peer, key, 3, 0);
    rig.answer();
    let pushes = copies(&mut rig);
    assert_eq!(pushes.len(), 2);
    pushes.iter().for_each(|push| rig.service.fetched(push.token, FetchDone::Copied, rig.now_ns));
    put_several(&mut rig, peer, key, 3, 0);
    let asked: Vec<Fetch> = std::iter::from_fn(|| rig.service.poll_fetch(rig.now_ns)).collect();
    let is_drop = |fetch: &Fetch| matches!(&fetch.want, Want::DropCopies(dropped) if *dropped == [digest(key)]);
    assert!(asked.len() == 2 && asked.iter().all(is_drop), "{asked:?}");
    rig.service.fetched(asked[1].token, FetchDone::CopiesDropped(vec![true]), rig.now_ns);
    rig.assert_quiet();
    // A client that reads the new version at one replica owner is not to find the former one at another.
    assert!(copies(&mut rig).is_empty(), "the former version is not gone everywhere");
    rig.service.fetched(asked[0].token, FetchDone::CopiesDropped(vec![true]), rig.now_ns);
    assert_eq!(rig.answer().status(), Status::Ok);
    assert_eq!(copies(&mut rig).iter().map(|push| push.source).collect::<Vec<_>>(), others);
}

/// A put that waits for a replica gets one when the former version is gone, though a replica owner was in backoff.
#[test]
fn a_replacement_is_replicated_when_a_replica_owner_in_backoff_has_dropped_the_former_version() {
    let mut rig = Rig::new();
    let owners = owners_among(6, &[0, 1, 2], 3);
    rig.service.follow(1, &owners);
    let peer = rig.join(Path::Stream);
    let (key, others) = key_of_all(&[&owners]);
    put_several(&mut rig, peer, key, 3, 0);
    rig.answer();
    copies(&mut rig).iter().for_each(|push| rig.service.fetched(push.token, FetchDone::Copied, rig.now_ns));
    put_several(&mut rig, peer, key, 3, 2);
    let mut asked: Vec<Fetch> = std::iter::from_fn(|| rig.service.poll_fetch(rig.now_ns)).collect();
    let silent = asked.remove(0);
    rig.service.fetched(silent.token, FetchDone::Failed(Status::Unreachable), rig.now_ns);
    rig.service.fetched(asked[0].token, FetchDone::CopiesDropped(vec![true]), rig.now_ns);
    assert!(rig.service.poll_fetch(rig.now_ns).is_none(), "the other replica owner is in backoff");
    rig.pass(40_000_000);
    let again = rig.service.poll_fetch(rig.now_ns).expect("its backoff is over");
    assert!(again.source == silent.source && !is_copy(&again.want), "{again:?}");
    rig.service.fetched(again.token, FetchDone::CopiesDropped(vec![true]), rig.now_ns);
    rig.assert_quiet();
    let pushes = copies(&mut rig);
    assert_eq!(pushes.iter().map(|push| push.source).collect::<Vec<_>>(), others, "without a walk before");
    rig.service.fetched(pushes[1].token, FetchDone::Copied, rig.now_ns);
    assert_eq!(named(&mut rig), ReplicaSet::NONE.with(1));
}

#[test]
fn replicas_stay_at_the_replica_owners_that_remain_and_what_has_none_is_repaired_first() {
    let mut rig = Rig::new();
    let before = owners_among(6, &[0, 1, 2, 3, 4], 3);
    rig.service.follow(1, &before);
    let peer = rig.join(Path::Stream);
    // The first replica owner of the object leaves.
    let (_, others) = key_of_all(&[&before]);
    let left = others[0].node.0 - identity().node.0;
    let nodes: Vec<u64> = (0..5).filter(|node| *node != left).collect();
    let after = owners_among(7, &nodes, 3);
    let (key, others) = key_of_all(&[&before, &after]);
    let other = (0..=255).rev().find(|other| {
        let slot = digest(*other).slot();
        let is_ours = |owner: ShardKey| (owner.node, owner.shard) == (identity().node, identity().shard);
        *other != key && [&before, &after].iter().all(|owners| owners.owner(slot).is_some_and(is_ours))
    });
    let other = other.expect("another slot of this shard");
    put_several(&mut rig, peer, key, 3, 0);
    rig.answer();
    let pushes = copies(&mut rig);
    pushes.iter().for_each(|push| rig.service.fetched(push.token, FetchDone::Copied, rig.now_ns));
    // Nobody has taken the other object when the map comes.
    put_several(&mut rig, peer, other, 3, 0);
    rig.answer();
    let pushes = copies(&mut rig);
    pushes.iter().for_each(|push| rig.service.fetched(push.token, FetchDone::Failed(Status::NoSpace), rig.now_ns));
    rig.service.follow(1, &after);
    rig.pass(1_000_000_000);
    let mut repaired: Vec<Digest> = Vec::new();
    for _ in 0..50 {
        while let Some(fetch) = rig.service.poll_fetch(rig.now_ns) {
            rig.service.fetched(fetch.token, FetchDone::Copied, rig.now_ns);
            if let Want::Copy { digest: of, .. } = fetch.want {
                assert!(of != digest(key) || !others.contains(&fetch.source), "it has a replica there");
                repaired.push(of);
            }
        }
        rig.pass(10_000_000);
    }
    let lacked = after.replica_owners(digest(key).slot()).iter().filter(|owner| !others.contains(owner)).count();
    let mut expected = vec![digest(other), digest(other)];
    expected.extend(vec![digest(key); lacked]);
    assert_eq!(repaired, expected);
    assert!(!rig.service.inspect().lacks_replicas(digest(key)) && !rig.service.inspect().lacks_replicas(digest(other)));
}

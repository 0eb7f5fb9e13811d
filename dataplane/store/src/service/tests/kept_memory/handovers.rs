//! Tests of replicas over a handover: the successor of an owner knows which replica owners have replicas, the successor
//! of a replica owner has them, and the other side treats it as it treated its predecessor.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, Version};
use kvplane_proto::map::{Claim, ClusterMap, Former, Member, ReplicaSet, ShardAddress, ShardKey, SlotOwners};
use kvplane_proto::message::{Hello, Kind, Operation, PutItem, PutOptions};
use kvplane_proto::{Digest, FrameFlags, Status};

use super::{Pool, STATE};
use crate::image::ImageError;
use crate::service::tests::rig::{CHECKSUM, POOL_BYTES, Rig, body_of, config, digest, digests, hello, identity};
use crate::service::{Discard, Fetch, FetchDone, FormerImage, Identity, Path, PeerKey, Service, Want};
use crate::{Replica, Store};

const OTHER: NodeId = NodeId(8);
const KEYS: core::ops::Range<u8> = 0..40;

const fn first() -> Incarnation {
    Incarnation::line_from(1 << 20)
}

fn second() -> Incarnation {
    first().successor().expect("the line goes on")
}

/// Returns the incarnation of a process that continues none.
const fn fresh() -> Incarnation {
    Incarnation::line_from(2 << 20)
}

/// Returns the owners by a map of this epoch: this shard's node and another one are the replica owners of each other,
/// and have been since epoch 5.
fn owners(epoch: u64, mine: Incarnation, theirs: Incarnation) -> SlotOwners {
    let member = |node: NodeId, incarnation| Member {
        node,
        incarnation,
        weight: 1,
        failure_domain: node.to_string(),
        host: String::new(),
        shards: vec![ShardAddress { tcp: ([127, 0, 0, 1], 7000 + node.0 as u16).into(), shm: None }; 3],
    };
    let members = vec![member(identity().node, mine), member(OTHER, theirs)];
    let former = Former { since: Epoch(5), from: Epoch(5), ..Former::default() };
    SlotOwners::of(&ClusterMap { epoch: Epoch(epoch), replicas: 2, members, former: Some(former) })
}

/// Returns a service in an incarnation, with what its former process has left.
fn begin(incarnation: Incarnation, first_version: u64, found: Result<Option<FormerImage>, Discard>) -> Rig {
    let mut rig = Rig::new();
    let store = Store::new(config(POOL_BYTES), Version(first_version)).expect("the test's limits are valid");
    rig.service = Service::new(Identity { incarnation, ..identity() }, store);
    rig.service.control().keep_memory(found, Arc::new(Pool));
    rig
}

fn end(rig: &mut Rig) -> FormerImage {
    rig.service.control().image_memory(&Pool, false).expect("memory is kept")
}

fn join(rig: &mut Rig, incarnation: Incarnation, fetches: bool) -> PeerKey {
    let peer = rig.connect(Path::Stream);
    rig.ask(peer, Operation::Hello, &Hello { incarnation, fetches, ..hello() }.encode(), 1);
    assert_eq!(rig.answer().status(), Status::Ok);
    peer
}

fn is_mine(owner: ShardKey) -> bool {
    (owner.node, owner.shard) == (identity().node, identity().shard)
}

/// Puts the keys of this shard's slots, to be replicated; returns them.
fn put_all(rig: &mut Rig, owners: &SlotOwners) -> Vec<u8> {
    let peer = join(rig, first(), false);
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    let keys: Vec<u8> = KEYS.filter(|key| owners.owner(digest(*key).slot()).is_some_and(is_mine)).collect();
    for key in &keys {
        rig.offer(peer, Operation::Put, &body_of([PutItem::plain(digest(*key), 64).with_options(&options)]), 64);
        rig.done(peer);
        assert_eq!(rig.answer().status(), Status::Ok);
    }
    keys
}

fn polled(rig: &mut Rig) -> Vec<Fetch> {
    std::iter::from_fn(|| rig.service.poll_fetch(rig.now_ns)).collect()
}

fn copied(fetches: &[Fetch]) -> BTreeSet<Digest> {
    let of = |fetch: &Fetch| if let Want::Copy { digest, .. } = &fetch.want { Some(*digest) } else { None };
    fetches.iter().filter_map(of).collect()
}

fn dropped(fetches: &[Fetch]) -> BTreeSet<Digest> {
    let of = |fetch: &Fetch| if let Want::DropCopies(digests) = &fetch.want { digests.clone() } else { Vec::new() };
    fetches.iter().flat_map(of).collect()
}

fn settle(rig: &mut Rig, fetches: Vec<Fetch>) {
    for Fetch { token, want, .. } in fetches {
        let done = match want {
            Want::Copy { .. } => FetchDone::Copied,
            Want::DropCopies(digests) => FetchDone::CopiesDropped(vec![true; digests.len()]),
            _ => FetchDone::Failed(Status::Unreachable),
        };
        rig.service.fetched(token, done, rig.now_ns);
    }
}

/// Puts objects of which all but the last have their replica, whose own is being sent; returns the image, and the keys.
fn replicated() -> (FormerImage, Vec<u8>) {
    let mut rig = begin(first(), 1, Ok(None));
    let owners = owners(5, first(), fresh());
    rig.service.follow(STATE, &owners);
    let keys = put_all(&mut rig, &owners);
    let mut fetches = polled(&mut rig);
    assert!(keys.len() > 3 && copied(&fetches).len() == keys.len());
    fetches.retain(|fetch| copied(core::slice::from_ref(fetch)) != BTreeSet::from([digest(keys[keys.len() - 1])]));
    settle(&mut rig, fetches);
    (end(&mut rig), keys)
}

#[test]
fn a_successor_knows_the_replicas_of_its_objects() {
    let (found, keys) = replicated();
    let (last, others) = keys.split_last().expect("keys");
    let object =
        |key: u8| found.contents.objects.iter().find(|object| object.digest == digest(key)).expect("it is kept");
    assert!(others.iter().all(|key| object(*key).at == ReplicaSet::FIRST));
    assert_eq!(found.contents.outstanding.len(), 1);
    let mut rig = begin(second(), 1, Ok(Some(found)));
    rig.service.follow(STATE, &owners(6, second(), fresh()));
    rig.pass(1);
    assert_eq!(rig.service.inspect().kept().expect("decided").objects, keys.len() as u64, "versions go on");
    let fetches = polled(&mut rig);
    assert_eq!((copied(&fetches).len(), dropped(&fetches)), (0, [digest(*last)].into()));
    settle(&mut rig, fetches);
    let fetches = polled(&mut rig);
    assert_eq!((copied(&fetches), dropped(&fetches).len()), ([digest(*last)].into(), 0));
    settle(&mut rig, fetches);
    // A removal is acknowledged when the replica owner has removed its replica.
    let peer = join(&mut rig, second(), false);
    rig.ask(peer, Operation::Remove, &digests([others[0]]), 1);
    rig.assert_quiet();
    let fetches = polled(&mut rig);
    assert_eq!(dropped(&fetches), [digest(others[0])].into());
    settle(&mut rig, fetches);
    assert_eq!(rig.answer().bits(), [true]);
}

#[test]
fn a_process_that_continues_none_replicates_anew() {
    let (found, keys) = replicated();
    let mut rig = begin(Incarnation::line_from(3 << 20), 1000, Ok(Some(found)));
    rig.service.follow(STATE, &owners(6, Incarnation::line_from(3 << 20), fresh()));
    rig.pass(1);
    let fetches = polled(&mut rig);
    assert_eq!((copied(&fetches).len(), dropped(&fetches).len()), (keys.len(), 0));
}

#[test]
fn a_successor_replicates_anew_where_the_replica_owner_has_restarted() {
    let (found, keys) = replicated();
    let mut rig = begin(second(), 1, Ok(Some(found)));
    rig.service.follow(STATE, &owners(7, second(), Incarnation::line_from(3 << 20)));
    rig.pass(1_000_000_000);
    let fetches = polled(&mut rig);
    assert_eq!((copied(&fetches).len(), dropped(&fetches).len()), (keys.len(), 0));
}

#[test]
fn a_successor_without_an_image_has_all_replicas_removed_first() {
    let mut rig = begin(second(), 1000, Err(Discard::Image(ImageError::InUse)));
    let owners = owners(6, second(), fresh());
    rig.service.follow(STATE, &owners);
    let peer = join(&mut rig, second(), false);
    let key = KEYS.clone().find(|key| owners.owner(digest(*key).slot()).is_some_and(is_mine)).expect("a key");
    rig.offer(peer, Operation::Put, &body_of([PutItem::plain(digest(key), 64)]), 64);
    rig.done(peer);
    rig.assert_quiet();
    while rig.service.inspect().copy_counters().outstanding > 0 {
        let fetches = polled(&mut rig);
        assert!(!dropped(&fetches).is_empty());
        settle(&mut rig, fetches);
    }
    assert_eq!(rig.answer().status(), Status::Ok);
}

#[test]
fn replicas_at_the_successor_of_a_replica_owner_are_its_predecessors() {
    let mut rig = begin(first(), 1, Ok(None));
    rig.service.follow(STATE, &owners(5, first(), first()));
    let keys = put_all(&mut rig, &owners(5, first(), first()));
    let fetches = polled(&mut rig);
    let in_flight = copied(&fetches[..1]);
    settle(&mut rig, fetches.into_iter().skip(1).collect());
    rig.service.follow(STATE, &owners(6, first(), second()));
    rig.pass(1);
    // What was being sent may be there, or not.
    let fetches = polled(&mut rig);
    assert_eq!((copied(&fetches).len(), dropped(&fetches)), (0, in_flight.clone()));
    assert!(fetches.iter().all(|fetch| fetch.source.incarnation == second()));
    settle(&mut rig, fetches);
    let fetches = polled(&mut rig);
    assert_eq!(copied(&fetches), in_flight);
    settle(&mut rig, fetches);
    // One that restarts has none.
    rig.service.follow(STATE, &owners(7, first(), fresh()));
    rig.pass(1_000_000_000);
    assert_eq!(copied(&polled(&mut rig)).len(), keys.len());
}

/// Writes a replica as the other node, by the map of this epoch; returns the status.
fn write_replica(rig: &mut Rig, owner: PeerKey, key: u8, epoch: u64) -> Status {
    let item = body_of([PutItem::plain(digest(key), 64)]);
    let header = Header::request(Kind::Request(Operation::Put), rig.next_request());
    let mut header = header.with_body(&item, 1).with_payload(64, Some(CHECKSUM));
    (header.argument, header.flags) = (epoch, header.flags.with(FrameFlags::REPLICATE, true));
    rig.service.request(owner, &header, &item, rig.now_ns);
    rig.done(owner);
    rig.answer().status()
}

/// Returns a service that has a replica of an object of the other node, and the object's key.
fn with_replica() -> (Rig, u8) {
    let owners = owners(5, first(), first());
    let is_theirs = |key: &u8| {
        let slot = digest(*key).slot();
        !owners.owner(slot).is_some_and(is_mine) && owners.replica_owners(slot).iter().copied().any(is_mine)
    };
    let key = KEYS.clone().find(is_theirs).expect("a key");
    let mut rig = begin(first(), 1, Ok(None));
    rig.service.follow(STATE, &owners);
    let owner = join(&mut rig, first(), true);
    assert_eq!(write_replica(&mut rig, owner, key, 5), Status::Ok);
    (rig, key)
}

/// The owner hands over and dies, and this shard receives the map of its death only.
#[test]
fn an_inheritance_includes_replicas_of_an_unknown_successor() {
    let (mut rig, key) = with_replica();
    let before = owners(6, first(), second());
    let alone = Member {
        node: identity().node,
        incarnation: first(),
        weight: 1,
        failure_domain: String::new(),
        host: String::new(),
        shards: vec![ShardAddress { tcp: ([127, 0, 0, 1], 7000).into(), shm: None }; 3],
    };
    let claim = |node, incarnation| Claim { node, incarnation, weight: 1, shards: 3 };
    let former = Former {
        since: Epoch(7),
        from: Epoch(5),
        claims: vec![claim(identity().node, first()), claim(OTHER, second())],
        began: vec![(identity().node, first())],
        restarts: None,
    };
    let map = ClusterMap { epoch: Epoch(7), replicas: 2, members: vec![alone], former: Some(former) };
    let after = SlotOwners::of(&map);
    let slot = digest(key).slot();
    assert_eq!(after.past(slot), before.owner(slot));
    assert!(after.owner(slot).is_some_and(is_mine));
    rig.service.follow(STATE, &after);
    let view = rig.store().peek(digest(key)).expect("it is inherited");
    assert_eq!(view.replica, Replica::First);
}

fn has_replica(rig: &Rig, key: u8) -> bool {
    rig.store().peek(digest(key)).is_some_and(|view| view.replica == Replica::Second)
}

#[test]
fn a_replica_owner_keeps_the_replicas_of_an_owner_that_hands_over() {
    let (mut rig, key) = with_replica();
    let late = join(&mut rig, first(), true);
    rig.service.follow(STATE, &owners(6, first(), second()));
    let _ = rig.drain();
    assert!(has_replica(&rig, key));
    // What the predecessor has sent is refused, if it comes so late.
    assert_eq!(write_replica(&mut rig, late, key, 5), Status::WrongOwner);
    let owner = join(&mut rig, first(), true);
    assert_eq!(write_replica(&mut rig, owner, key, 6), Status::Ok);
    rig.service.follow(STATE, &owners(7, first(), fresh()));
    assert!(!has_replica(&rig, key), "the owner has restarted");
    rig.store().check();
}

#[test]
fn a_successor_has_the_replicas_of_owners_that_have_not_restarted() {
    for (mine, theirs, is_kept) in [
        (second(), first(), true),
        (second(), second(), true),
        (second(), fresh(), false),
        (Incarnation::line_from(3 << 20), first(), false),
    ] {
        let (mut rig, key) = with_replica();
        let found = end(&mut rig);
        let mut rig = begin(mine, 1000, Ok(Some(found)));
        rig.service.follow(STATE, &owners(7, mine, theirs));
        assert_eq!(has_replica(&rig, key), is_kept, "{mine:?} of {theirs:?}");
        rig.store().check();
    }
}

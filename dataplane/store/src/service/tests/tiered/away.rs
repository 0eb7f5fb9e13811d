//! Tests of a shard that was away with its SSD: other owners had its slots meanwhile, and report what they changed, or
//! do not.

use kvplane_proto::Digest;
use kvplane_proto::Status;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, Version};
use kvplane_proto::map::{Claim, ClusterMap, Former, Member, ShardAddress, SlotOwners};
use kvplane_proto::message::{Item, KeyItem, ListReply, PutOptions};

use super::super::rig::{digest, identity};
use super::world::{KEYS, May, World};
use crate::service::Tiering;
use crate::service::{FetchDone, PutAck, TierPolicy, VoidCause, Want};

/// Members: this node and another, with incarnations and weights.
type Members = [(u64, u64, u32); 2];

const ALONE: Members = [(7, 3, 1), (8, 1, 0)];
const AWAY: Members = [(7, 3, 0), (8, 1, 1)];

fn members(of: Members) -> Vec<Member> {
    let address = ShardAddress { tcp: ([127, 0, 0, 1], 7000).into(), shm: None };
    let member = |(node, incarnation, weight)| Member {
        node: NodeId(node),
        incarnation: Incarnation(incarnation),
        weight,
        failure_domain: String::new(),
        host: String::new(),
        shards: vec![address.clone(); 3],
    };
    of.into_iter().map(member).collect()
}

/// Returns the owners by the last of these layouts, each with the epoch in which it began, at this epoch.
fn owners(layouts: &[(u64, Members)], epoch: u64) -> SlotOwners {
    let (since, now) = *layouts.last().expect("a layout");
    let before = layouts.len().checked_sub(2).map(|at| layouts[at]);
    let owning = |of: Members| members(of).into_iter().filter(|member| member.weight > 0);
    let claim =
        |member: Member| Claim { node: member.node, incarnation: member.incarnation, weight: member.weight, shards: 3 };
    let former = Former {
        since: Epoch(since),
        from: Epoch(before.map_or(since, |(from, _)| from)),
        claims: before.map_or(Vec::new(), |(_, of)| owning(of).map(claim).collect()),
        began: owning(now).map(|member| (member.node, member.incarnation)).collect(),
        restarts: None,
    };
    SlotOwners::of(&ClusterMap { epoch: Epoch(epoch), replicas: 1, members: members(now), former: Some(former) })
}

fn policy() -> TierPolicy {
    TierPolicy { ack: PutAck::Durable, ..TierPolicy::default() }
}

/// Returns a shard that is alone, with an object under each of its keys, and these keys.
fn filled(seed: u64) -> (World, Vec<u8>) {
    let mut world = World::new(seed, policy());
    world.steady = 5;
    let alone = owners(&[(5, ALONE)], 5);
    world.restart_among(&alone);
    let owner = |key: &u8| alone.owner(digest(*key).slot()).map(|owner| owner.shard);
    let keys: Vec<u8> = (0..KEYS as u8).filter(|key| owner(key) == Some(identity().shard)).collect();
    assert!(keys.len() > 3, "{keys:?}");
    for key in &keys {
        world.put_with(*key, &PutOptions::default());
        world.settle();
    }
    (world, keys)
}

/// Expects no objects under these keys any more.
fn gone(world: &mut World, keys: &[u8]) {
    for key in keys {
        world.may.insert(*key, May::from([None]));
    }
}

/// Checks that the object under each key is one of the expected ones.
fn check(world: &mut World, keys: &[u8]) {
    for key in keys {
        world.get(*key);
        world.hear();
        tell(world, &ChangeReply { since: None, changed: &[] });
        world.settle();
    }
}

/// Changes that the other node reports: the epoch since which it knows all of them, and the changed keys.
struct ChangeReply<'a> {
    since: Option<u64>,
    changed: &'a [u8],
}

/// Answers the requests to the other node; returns the number of pages of changes requested.
fn tell(world: &mut World, told: &ChangeReply<'_>) -> usize {
    let mut pages = 0;
    while let Some(fetch) = world.service.poll_fetch(world.now_ns) {
        assert_eq!(fetch.source.node, NodeId(8));
        let done = match fetch.want {
            Want::List(_, from) if from.changes => {
                pages += 1;
                FetchDone::Page(page(told))
            }
            Want::List(..) => {
                let mut page = Vec::new();
                ListReply { walk: 1, next: 0, items: 0 }.encode(&mut page);
                FetchDone::Page(page)
            }
            Want::Drop(_) | Want::EndExports(..) => FetchDone::Dropped,
            _ => FetchDone::Failed(Status::NotFound),
        };
        world.service.fetched(fetch.token, done, world.now_ns);
    }
    pages
}

fn page(told: &ChangeReply<'_>) -> Vec<u8> {
    let plain = |digest| KeyItem::plain(digest, Version(0), 0, 0);
    let mut items = Vec::new();
    for slot in 0..KEYS as u8 {
        let header = plain(Digest(u128::from(slot) << 114));
        let shard = u64::from(identity().shard.0);
        let absence = told.since.map(|since| KeyItem { version: Version(since), bytes: 7, group: shard, ..header });
        items.extend(absence);
        items.extend(told.changed.contains(&slot).then(|| plain(digest(slot))));
    }
    let mut page = Vec::new();
    ListReply { walk: 1, next: 0, items: items.len() as u64 }.encode(&mut page);
    items.iter().for_each(|item| item.encode(&mut page));
    page
}

#[test]
fn unchanged_objects_are_valid_when_their_slots_are_back() {
    for seed in 0..6 {
        let (mut world, keys) = filled(1000 + seed);
        let back = owners(&[(5, ALONE), (6, AWAY), (7, ALONE)], 7);
        world.restart_among(&back);
        let (changed, same) = keys.split_at(2);
        assert!(tell(&mut world, &ChangeReply { since: Some(5), changed }) > 0);
        world.settle();
        gone(&mut world, changed);
        check(&mut world, &keys);
        let counters = world.service.inspect().tier().expect("a tier").snapshot().counters;
        assert!(
            counters.slots_compared > 0 && counters.slots_voided > 0,
            "of most slots nothing was told: {counters:?}"
        );
        assert_eq!(
            (counters.doubts_removed, world.service.tier_mut().and_then(Tiering::poll_voided)),
            (changed.len() as u64, None)
        );
        assert_eq!(
            world.service.tier_mut().and_then(Tiering::poll_slots_voided),
            Some(counters.slots_voided),
            "said once"
        );
        assert_eq!(world.service.tier_mut().and_then(Tiering::poll_slots_voided), None);
        // The result is durable: no shard is asked again after further restarts.
        world.restart_among(&back);
        check(&mut world, &keys);
        assert!(!world.may[&same[0]].contains(&None));
        world.end();
    }
}

#[test]
fn unchanged_objects_are_valid_after_an_incarnation_was_declared_dead() {
    for seed in 0..4 {
        let (mut world, keys) = filled(1100 + seed);
        world.begin_incarnation_among(&owners(&[(5, ALONE), (6, AWAY)], 6));
        assert!(world.service.store().stats().objects == 0, "memory is dropped");
        world.begin_incarnation_among(&owners(&[(5, ALONE), (6, AWAY), (7, ALONE)], 7));
        let (changed, _) = keys.split_at(2);
        tell(&mut world, &ChangeReply { since: Some(6), changed });
        world.settle();
        gone(&mut world, changed);
        check(&mut world, &keys);
        world.end();
    }
}

#[test]
fn a_shard_without_slots_keeps_its_slots_in_doubt() {
    for starts in 1..4 {
        let (mut world, keys) = filled(1200 + starts);
        for epoch in 0..starts {
            world.restart_among(&owners(&[(5, ALONE), (6, AWAY)], 6 + epoch));
            assert_eq!(world.service.tier_mut().and_then(Tiering::poll_voided), None);
        }
        let at = 10 + starts;
        world.service.follow(1, &owners(&[(5, ALONE), (6, AWAY), (at, ALONE)], at));
        world.settle();
        let reconciling = |world: &World| world.service.inspect().tier().expect("a tier").snapshot().reconciling_slots;
        assert!(reconciling(&world) > 0, "no shard has reported changes yet");
        let (changed, _) = keys.split_at(1);
        tell(&mut world, &ChangeReply { since: Some(6), changed });
        world.settle();
        assert_eq!(reconciling(&world), 0);
        gone(&mut world, changed);
        check(&mut world, &keys);
        world.end();
    }
}

#[test]
fn records_without_known_changes_are_void() {
    for (seed, since) in [None, Some(7), Some(60)].into_iter().enumerate() {
        let (mut world, keys) = filled(1300 + seed as u64);
        world.restart_among(&owners(&[(5, ALONE), (6, AWAY), (7, ALONE)], 7));
        tell(&mut world, &ChangeReply { since, changed: &[] });
        world.settle();
        gone(&mut world, &keys);
        check(&mut world, &keys);
        world.end();
    }
}

#[test]
fn records_without_a_reachable_former_owner_are_void() {
    let (mut world, keys) = filled(1400);
    // The other node had the slots in an incarnation that has ended.
    let other: Members = [(7, 3, 1), (8, 2, 0)];
    world.restart_among(&owners(&[(5, ALONE), (6, AWAY), (7, other)], 7));
    gone(&mut world, &keys);
    check(&mut world, &keys);
    assert!(matches!(world.service.tier_mut().and_then(Tiering::poll_voided), Some(VoidCause::Moved { .. })));
    assert_eq!(tell(&mut world, &ChangeReply { since: Some(1), changed: &[] }), 0);
    world.end();
}

#[test]
fn slots_that_stayed_at_this_shard_are_valid() {
    let (mut world, keys) = filled(1500);
    // The weights changed, but no slot of this node did.
    let more: Members = [(7, 3, 2), (8, 1, 0)];
    world.restart_among(&owners(&[(5, ALONE), (6, more)], 6));
    check(&mut world, &keys);
    assert!(keys.iter().all(|key| !world.may[key].contains(&None)));
    world.end();
}

#[test]
fn puts_during_reconciliation_are_the_newest() {
    for seed in 0..4 {
        let (mut world, keys) = filled(1600 + seed);
        let back = owners(&[(5, ALONE), (6, AWAY), (7, ALONE)], 7);
        world.restart_among(&back);
        let (changed, same) = keys.split_at(2);
        // Hidden so far: to clients the objects do not exist.
        for key in [changed[0], same[0]] {
            world.may.get_mut(&key).expect("a key").insert(None);
            world.last_put = Status::Ok;
            world.put_with(key, &PutOptions::default());
            world.hear();
            while world.last_put == Status::Busy {
                world.settle();
                world.put_with(key, &PutOptions::default());
                world.hear();
            }
        }
        world.remove(same[1]);
        for _ in 0..seed * 5 {
            world.step();
        }
        tell(&mut world, &ChangeReply { since: Some(5), changed });
        world.settle();
        gone(&mut world, &changed[1..]);
        check(&mut world, &keys);
        for key in [changed[0], same[0]] {
            assert!(world.may[&key].len() == 1 && !world.may[&key].contains(&None), "{:?}", world.may[&key]);
        }
        world.restart_among(&back);
        check(&mut world, &keys);
        world.end();
    }
}

/// A restart during reconciliation may lose the other objects; no changed object comes back, and no object put since is
/// lost.
#[test]
fn a_restart_during_reconciliation_brings_no_changed_object_back() {
    for seed in 0..24 {
        let (mut world, keys) = filled(1700 + seed);
        let back = owners(&[(5, ALONE), (6, AWAY), (7, ALONE)], 7);
        world.restart_among(&back);
        let (changed, same) = keys.split_at(2);
        world.may.get_mut(&same[0]).expect("a key").insert(None);
        world.put_with(same[0], &PutOptions { replace: true, ..PutOptions::default() });
        if seed % 2 == 0 {
            world.settle();
        }
        tell(&mut world, &ChangeReply { since: Some(5), changed });
        for _ in 0..seed {
            world.step();
        }
        gone(&mut world, changed);
        for key in &same[1..] {
            world.may.get_mut(key).expect("a key").insert(None);
        }
        world.restart_among(&back);
        tell(&mut world, &ChangeReply { since: None, changed: &[] });
        world.settle();
        check(&mut world, &keys);
        world.end();
    }
}

#[test]
fn a_first_map_of_the_former_incarnation_loses_no_object() {
    for seed in 0..4 {
        let (mut world, keys) = filled(1900 + seed);
        let before: Members = [(7, 2, 1), (8, 1, 0)];
        world.restart_among(&owners(&[(5, before)], 5));
        assert!(
            !keys.iter().any(|key| world.service.inspect().serves(digest(*key).slot())),
            "its slots are that incarnation's"
        );
        world.service.follow(1, &owners(&[(5, ALONE)], 6));
        world.settle();
        check(&mut world, &keys);
        assert_eq!(world.service.tier_mut().and_then(Tiering::poll_voided), None);
        world.end();
    }
}

/// Returns a shard to which a map gave its slots back, and that does not serve them yet because the ownership note is
/// not durable.
fn given_back(seed: u64) -> (World, Vec<u8>) {
    let (mut world, keys) = filled(seed);
    let before: Members = [(7, 2, 1), (8, 1, 0)];
    world.restart_among(&owners(&[(5, before)], 5));
    world.service.follow(1, &owners(&[(5, ALONE)], 6));
    assert!(!keys.iter().any(|key| world.service.inspect().serves(digest(*key).slot())), "nothing is written down");
    (world, keys)
}

#[test]
fn slots_lost_before_they_are_served_are_exported_and_return_empty() {
    for seed in 0..4 {
        let (mut world, keys) = given_back(2000 + seed);
        world.service.follow(1, &owners(&[(5, ALONE), (7, AWAY)], 7));
        assert!(
            keys.iter().all(|key| world.service.inspect().exports(digest(*key).slot())),
            "the new owner may ask for them"
        );
        world.settle();
        world.service.follow(1, &owners(&[(5, ALONE), (7, AWAY), (8, ALONE)], 8));
        world.settle();
        // The other node has removed all objects.
        tell(&mut world, &ChangeReply { since: Some(7), changed: &keys });
        world.settle();
        gone(&mut world, &keys);
        check(&mut world, &keys);
        world.end();
    }
}

#[test]
fn slots_of_an_incarnation_that_ends_before_they_are_served_are_reconciled_again() {
    for seed in 0..4 {
        let (mut world, keys) = given_back(2100 + seed);
        world.begin_incarnation_among(&owners(&[(5, ALONE), (7, AWAY)], 7));
        world.begin_incarnation_among(&owners(&[(5, ALONE), (7, AWAY), (8, ALONE)], 8));
        let (changed, same) = keys.split_at(2);
        tell(&mut world, &ChangeReply { since: Some(6), changed });
        world.settle();
        gone(&mut world, changed);
        check(&mut world, &keys);
        assert!(same.iter().all(|key| !world.may[key].contains(&None)));
        world.end();
    }
}

#[test]
fn slots_with_missed_maps_before_they_are_served_are_reconciled_again() {
    for seed in 0..4 {
        let (mut world, keys) = given_back(2200 + seed);
        // Other owners had the slots in between.
        world.service.follow(1, &owners(&[(7, AWAY), (9, ALONE)], 9));
        world.settle();
        let (changed, _) = keys.split_at(2);
        tell(&mut world, &ChangeReply { since: Some(6), changed });
        world.settle();
        gone(&mut world, changed);
        check(&mut world, &keys);
        world.end();
    }
}

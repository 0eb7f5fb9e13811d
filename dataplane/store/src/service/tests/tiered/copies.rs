//! Tests of replicas of objects that only the SSD has: made again by the next incarnation, if their puts requested
//! them.

use std::collections::BTreeSet;

use kvplane_proto::Status;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{ClusterMap, Member, ShardAddress, SlotOwners};
use kvplane_proto::message::{Operation, PutOptions};
use kvplane_proto::{Digest, FrameFlags};

use super::super::rig::{digest, digests, identity};
use super::world::World;
use crate::service::{FetchDone, PutAck, ReplicaProgress, TierPolicy, Want};

/// Returns two nodes, each of which is the replica owner of the other's slots.
fn owners() -> SlotOwners {
    let address = ShardAddress { tcp: ([127, 0, 0, 1], 7000).into(), shm: None };
    let member = |(node, incarnation)| Member {
        node: NodeId(node),
        incarnation: Incarnation(incarnation),
        weight: 1,
        failure_domain: String::new(),
        host: String::new(),
        shards: vec![address.clone(); 3],
    };
    let members = [(7, 3), (8, 1)].into_iter().map(member).collect();
    SlotOwners::of(&ClusterMap { epoch: Epoch(5), replicas: 2, members, former: None })
}

/// Advances the time, and answers the requests to the other node; returns the replicas that it got.
pub(super) fn copied(world: &mut World, ms: usize) -> BTreeSet<Digest> {
    let mut copied = BTreeSet::new();
    for _ in 0..ms {
        world.step();
        while let Some(fetch) = world.service.poll_fetch(world.now_ns) {
            let done = match fetch.want {
                Want::Copy { digest, .. } => {
                    copied.insert(digest);
                    FetchDone::Copied
                }
                Want::DropCopies(digests) => FetchDone::CopiesDropped(vec![true; digests.len()]),
                _ => FetchDone::Failed(Status::NotFound),
            };
            world.service.fetched(fetch.token, done, world.now_ns);
        }
    }
    copied
}

/// Returns a node with a replica owner, and keys of which the node is the owner.
pub(super) fn first_owner(seed: u64, keys: usize) -> (World, SlotOwners, Vec<u8>) {
    let policy = TierPolicy { ack: PutAck::Durable, ..TierPolicy::default() };
    let mut world = World::new(seed, policy);
    world.steady = 5;
    let owners = owners();
    world.restart_among(&owners);
    let mine = |key: &u8| {
        let owner = owners.owner(digest(*key).slot());
        owner.is_some_and(|owner| (owner.node, owner.shard) == (NodeId(7), identity().shard))
    };
    let keys = (0..200).filter(mine).take(keys).collect();
    (world, owners, keys)
}

pub(super) fn put(world: &mut World, key: u8, replicas: u8) {
    world.may.entry(key).or_default();
    world.put_with(key, &PutOptions { replicas, ..PutOptions::default() });
    world.settle();
}

#[test]
fn a_requested_replica_is_made_again_by_the_next_incarnation_and_a_removed_one_is_not() {
    for seed in 0..6 {
        let (mut world, owners, keys) = first_owner(1900 + seed, 4);
        let wished: BTreeSet<Digest> = keys[..3].iter().map(|key| digest(*key)).collect();
        keys.iter().for_each(|key| put(&mut world, *key, 0));
        let wish = |world: &mut World, digest| world.service.control().want_copy(digest, world.now_ns);
        // Repeatedly, like a client that waits for the replica.
        for _ in 0..50 {
            for digest in &wished {
                let _ = wish(&mut world, *digest);
            }
            copied(&mut world, 1);
        }
        assert!(wished.iter().all(|digest| matches!(wish(&mut world, *digest), ReplicaProgress::There { .. })));
        let writes = world.service.inspect().tier().expect("a tier").snapshot().counters.writes;
        assert_eq!(writes, 4 + 3, "each was written once more");
        world.restart_among(&owners);
        assert_eq!(copied(&mut world, 3_000), wished, "of what only the SSD has");
        // Replication is given up: the record is updated too.
        world.ask(Operation::RemoveCopy, FrameFlags::NONE, &digests([keys[0]]));
        world.settle();
        copied(&mut world, 50);
        world.restart_among(&owners);
        let left: BTreeSet<Digest> = keys[1..3].iter().map(|key| digest(*key)).collect();
        assert_eq!(copied(&mut world, 3_000), left);
        world.end();
    }
}

#[test]
fn the_replica_of_a_put_is_made_again_by_the_next_incarnation() {
    for seed in 0..6 {
        let (mut world, owners, keys) = first_owner(1800 + seed, 4);
        let (promised, plain) = keys.split_at(3);
        for key in &keys {
            put(&mut world, *key, if promised.contains(key) { 2 } else { 0 });
        }
        let wanted: BTreeSet<Digest> = promised.iter().map(|key| digest(*key)).collect();
        assert_eq!(copied(&mut world, 50), wanted, "and not {plain:?}");
        // Memory is lost, and the replica owner's replicas of this incarnation are void.
        world.restart_among(&owners);
        assert_eq!(copied(&mut world, 3_000), wanted, "of what only the SSD has");
        assert!(copied(&mut world, 3_000).is_empty(), "each once");
        let counters = world.service.inspect().copy_counters();
        assert_eq!((counters.made, counters.outstanding), (3, 0));
        world.end();
    }
}

/// Memory has no free room, so an object that a get reads is kept for the get alone. The walk through the SSD then
/// passes over it.
#[test]
fn an_object_that_a_get_promotes_is_replicated_if_it_lacks_a_replica() {
    for seed in 0..6 {
        let (mut world, _, keys) = first_owner(2000 + seed, 60);
        let lacking = digest(keys[0]);
        assert!(copied(&mut world, 2_000).is_empty(), "the walks after the start have ended");
        put(&mut world, keys[0], 2);
        let fetch = world.service.poll_fetch(world.now_ns).expect("its replica");
        world.service.fetched(fetch.token, FetchDone::Failed(Status::NoSpace), world.now_ns);
        let refused_ns = world.now_ns;
        let is_full = |world: &World| {
            let store = world.service.store();
            store.stats().free_bytes <= store.config().pool_bytes / 8 && !store.exists(lacking)
        };
        let mut others = keys[1..].iter();
        while !is_full(&world) {
            put(&mut world, *others.next().expect("memory is full after fewer objects"), 0);
        }
        assert!(world.now_ns < refused_ns + 500_000_000, "the walk through memory begins later");
        assert!(copied(&mut world, 700).is_empty());
        world.get(keys[0]);
        world.settle();
        assert!(world.service.store().exists(lacking));
        assert_eq!(copied(&mut world, 3_000), BTreeSet::from([lacking]));
        world.end();
    }
}

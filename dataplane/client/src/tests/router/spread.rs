//! Gets of objects that several owners have: the choice between them, and fallback when a replica is missing.

use std::collections::BTreeMap;

use kvplane_proto::flags::FrameFlags;
use kvplane_proto::ids::{Epoch, NodeId};
use kvplane_proto::limits::Limits;
use kvplane_proto::map::{ClusterMap, OwnerTable, ReplicaSet};
use kvplane_proto::message::{DigestItem, Operation};
use kvplane_proto::status::Status;

use crate::SourcePeers;
use crate::tests::rig::{
    ClientOutput, Object, Rig, SECOND_NS, digest, local, map, push_name, shared_config, stream_config,
};
use crate::types::LaneId;
use crate::{Config, PutBook, Request, SubmitOptions};

const BYTES: u64 = 100_000;
const MS: u64 = 1_000_000;

fn two_owners(epoch: u64) -> ClusterMap {
    ClusterMap { replicas: 2, ..map(epoch, 2, 1) }
}

/// Creates a client in a cluster of two nodes that have every object, as the owner's version reports.
fn rig(config: Config) -> Rig {
    let mut rig = Rig::new(config, 2);
    rig.client.set_map(two_owners(2), 1);
    rig.now_ns = MS;
    rig.objects.insert(digest(0), Object::replicated(BYTES, 7));
    rig
}

/// Gets the object so many times, `at_once` of them together, every `MS`. Returns the number of gets by node.
fn gets(rig: &mut Rig, count: u64, at_once: u64) -> BTreeMap<NodeId, u64> {
    let mut asked = BTreeMap::new();
    for _ in 0..count {
        rig.now_ns += MS;
        let requests: Vec<Request> =
            (0..at_once).map(|at| Request::Get(digest(0), local(0, at * BYTES, BYTES))).collect();
        let batch = rig.submit(&requests);
        loop {
            let frames = rig.frames();
            if frames.is_empty() {
                break;
            }
            for sent in frames {
                if matches!(sent.operation(), Operation::Get | Operation::Lookup) {
                    assert!(sent.header.flags.has(FrameFlags::REPLICA_LEASE));
                    *asked.entry(rig.addresses[&sent.lane].node).or_default() += u64::from(sent.header.items);
                }
                rig.answers(&sent).iter().for_each(|reply| rig.deliver(reply));
            }
        }
        for result in rig.finish(batch) {
            assert_eq!(result, (Status::Ok, BYTES, 7), "the version is the owner's");
        }
    }
    asked
}

/// Returns the owner of the object.
fn first(rig: &mut Rig) -> NodeId {
    let asked = gets(rig, 1, 1);
    *asked.keys().next().expect("an owner was used")
}

#[test]
fn gets_are_spread_over_owner_and_replica_owner() {
    for config in [stream_config(), shared_config()] {
        let mut rig = rig(config);
        let asked = gets(&mut rig, 100, 4);
        assert_eq!(asked.len(), 2, "{asked:?}");
        assert!(asked.values().all(|asked| *asked > 100), "{asked:?}");
        assert_eq!(rig.client.counters().second_asked, 0);
        assert!(rig.client.counters().second_chosen > 100);
        rig.assert_empty();
    }
}

/// A client in a cluster of so many nodes and owners of each slot; the object has two replicas.
fn rig_of_many(config: Config, nodes: u64) -> Rig {
    let mut rig = Rig::new(config, nodes);
    rig.client.set_map(ClusterMap { replicas: nodes as u8, ..map(2, nodes, 1) }, 1);
    rig.now_ns = MS;
    let replicas = ReplicaSet::NONE.with(1).with(2);
    rig.objects.insert(digest(0), Object { replicas, ..Object::new(BYTES, 7) });
    rig
}

#[test]
fn gets_are_spread_over_all_owners_that_have_the_object() {
    for config in [stream_config(), shared_config()] {
        let mut rig = rig_of_many(config, 4);
        let owners = OwnerTable::compute(rig.client.router.placement.map().expect("a map"));
        let numbers: Vec<u64> =
            owners.owners(digest(0).slot()).iter().map(|owner| u64::from(owner.member) + 1).collect();
        let asked = gets(&mut rig, 100, 4);
        let of = |position: usize| asked.get(&NodeId(numbers[position])).copied().unwrap_or(0);
        assert!(of(1) == 0 && [0, 2, 3].into_iter().all(|position| of(position) > 60), "{asked:?} of {numbers:?}");
        rig.assert_empty();
    }
}

/// The owner and the first replica owner cannot be reached, and the second has no replica.
#[test]
fn a_get_fails_over_to_each_replica_owner_in_turn() {
    let mut rig = rig_of_many(stream_config(), 4);
    let owners = OwnerTable::compute(rig.client.router.placement.map().expect("a map"));
    let position_of = |rig: &Rig, lane: &LaneId| {
        let node = rig.addresses[lane].node;
        owners.owners(digest(0).slot()).iter().position(|owner| u64::from(owner.member) + 1 == node.0)
    };
    let batch = rig.submit(&[Request::Get(digest(0), local(0, 0, BYTES))]);
    let mut asked = Vec::new();
    for _ in 0..20 {
        for sent in rig.frames() {
            let position = position_of(&rig, &sent.lane).expect("an owner");
            if sent.operation() == Operation::Get {
                asked.push(position);
                assert_eq!(sent.header.flags.has(FrameFlags::READ_REPLICA), position > 0);
            }
            match position {
                0 | 1 => rig.lose(sent.lane),
                position => {
                    let object = (position == 2).then(|| rig.objects.remove(&digest(0))).flatten();
                    rig.answers(&sent).iter().for_each(|reply| rig.deliver(reply));
                    if let Some(object) = object {
                        rig.objects.insert(digest(0), object);
                    }
                }
            }
        }
        rig.now_ns += MS;
        rig.client.handle_timeout(rig.now_ns);
    }
    assert_eq!(asked.last(), Some(&3), "{asked:?}");
    assert!(asked.contains(&2) && asked.is_sorted(), "{asked:?}");
    let result = rig.client.batches().results(batch)[0];
    assert_eq!(
        (result.status, result.from_replica, result.replica_owners),
        (Status::Ok, true, ReplicaSet::NONE.with(2))
    );
    rig.finish(batch);
}

#[test]
fn gets_are_not_spread_without_a_lease_or_when_disabled() {
    let mut rig = rig(stream_config());
    rig.objects.insert(digest(0), Object::new(BYTES, 7));
    assert_eq!(gets(&mut rig, 50, 2).len(), 1);
    // Replicas have versions of their own, so gets of ranges are never spread.
    rig.objects.insert(digest(0), Object::replicated(BYTES, 7));
    gets(&mut rig, 2, 1);
    let chosen = rig.client.counters().second_chosen;
    for _ in 0..20 {
        let batch = rig.submit(&[Request::GetRange(digest(0), 5, local(0, 0, 10))]);
        rig.run();
        assert_eq!(rig.finish(batch), [(Status::Ok, 10, 7)]);
    }
    assert_eq!(rig.client.counters().second_chosen, chosen);
    let mut plain = self::rig(Config { spread: false, ..stream_config() });
    let batch = plain.submit(&[Request::Get(digest(0), local(0, 0, BYTES))]);
    plain.run();
    plain.finish(batch);
    assert_eq!(plain.client.counters().second_chosen, 0);
}

#[test]
fn a_get_reports_the_number_of_replicas() {
    for config in [stream_config(), shared_config()] {
        for (object, replicas) in [(Object::replicated(BYTES, 7), 2), (Object::new(BYTES, 7), 1)] {
            let mut rig = rig(config.clone());
            rig.objects.insert(digest(0), object);
            let whole = Request::Get(digest(0), local(0, 0, BYTES));
            for request in [whole, Request::GetRange(digest(0), 0, local(0, BYTES, 1))] {
                let batch = rig.submit(&[request]);
                rig.run();
                let result = rig.client.batches().results(batch)[0];
                assert_eq!(
                    (result.status, result.version.0, result.replicas),
                    (Status::Ok, 7, replicas),
                    "{request:?}"
                );
                rig.finish(batch);
            }
            let batch = rig.submit(&[Request::Size(digest(0))]);
            rig.run();
            assert_eq!(rig.client.batches().results(batch)[0].replicas, 0, "a length says nothing of owners");
            rig.finish(batch);
        }
    }
}

#[test]
fn a_lease_expires_and_ends_with_the_map() {
    let mut rig = rig(stream_config());
    let home = first(&mut rig);
    // No get reaches the owner meanwhile, so no lease is renewed.
    for _ in 0..20 {
        rig.now_ns += Limits::COPY_LEASE_NS;
        assert_eq!(first(&mut rig), home);
        rig.now_ns += MS;
        rig.client.set_map(two_owners(rig.client.epoch().0 + 1), rig.now_ns);
        assert_eq!(first(&mut rig), home);
    }
}

/// The shard may be the owner or a replica owner.
#[test]
fn a_get_of_damaged_bytes_goes_to_the_same_shard_with_a_report() {
    let mut rig = rig(stream_config());
    let home = first(&mut rig);
    let mut damaged = [0, 0];
    for _ in 0..60 {
        rig.now_ns += MS;
        let batch = rig.submit(&[Request::Get(digest(0), local(0, 0, BYTES))]);
        let sent = rig.frames().remove(0);
        let node = rig.addresses[&sent.lane].node;
        damaged[usize::from(node == home)] += 1;
        assert!(!sent.header.flags.has(FrameFlags::SUM_REPLIES));
        let mut reply = rig.answers(&sent).remove(0);
        reply.sum += 1;
        rig.deliver(&reply);
        let again = rig.frames().remove(0);
        assert_eq!((rig.addresses[&again.lane].node, again.operation()), (node, Operation::Get));
        assert!(again.header.flags.has(FrameFlags::SUM_REPLIES));
        assert_eq!(again.header.flags.has(FrameFlags::READ_REPLICA), node != home);
        rig.answers(&again).iter().for_each(|reply| rig.deliver(reply));
        assert!(rig.frames().is_empty());
        assert_eq!(rig.finish(batch), [(Status::Ok, BYTES, 7)]);
    }
    assert!(damaged.iter().all(|count| *count > 5), "{damaged:?}");
    rig.assert_empty();
}

/// The replica owner has evicted its replica: the owner serves the get, and for a while it alone is used.
#[test]
fn an_evicted_replica_costs_one_round_trip() {
    let mut rig = rig(stream_config());
    let home = first(&mut rig);
    let mut missed = 0;
    for _ in 0..200 {
        rig.now_ns += MS;
        let batch = rig.submit(&[Request::Get(digest(0), local(0, 0, BYTES))]);
        loop {
            let frames = rig.frames();
            if frames.is_empty() {
                break;
            }
            for sent in frames {
                let second = rig.addresses[&sent.lane].node != home;
                let object = second.then(|| rig.objects.remove(&digest(0))).flatten();
                assert_eq!(sent.header.flags.has(FrameFlags::READ_REPLICA), second, "from its replica");
                missed += u64::from(second);
                rig.answers(&sent).iter().for_each(|reply| rig.deliver(reply));
                if let Some(object) = object {
                    rig.objects.insert(digest(0), object);
                }
            }
        }
        assert_eq!(rig.finish(batch), [(Status::Ok, BYTES, 7)]);
    }
    assert_eq!(missed, 1, "in less than a second");
    rig.assert_empty();
}

/// An unreachable replica owner is not used, and its gets go to the owner.
#[test]
fn a_dead_replica_owner_costs_one_attempt() {
    let mut rig = rig(stream_config());
    let home = first(&mut rig);
    for _ in 0..50 {
        rig.now_ns += MS;
        let batch = rig.submit(&[Request::Get(digest(0), local(0, 0, BYTES))]);
        for sent in rig.frames() {
            match rig.addresses[&sent.lane].node == home {
                true => rig.answers(&sent).iter().for_each(|reply| rig.deliver(reply)),
                false => rig.lose(sent.lane),
            }
        }
        rig.run_until(rig.now_ns + 5_000 * MS);
        assert_eq!(rig.finish(batch), [(Status::Ok, BYTES, 7)]);
    }
    assert!(rig.client.counters().second_chosen > 0);
}

#[test]
fn only_gets_request_replica_leases() {
    let mut rig = rig(stream_config());
    first(&mut rig);
    let batch = rig.submit(&[Request::Exists(digest(0))]);
    for sent in rig.frames() {
        assert_eq!(sent.header.flags, FrameFlags::NONE);
        assert_eq!(sent.items::<DigestItem>().len(), 1);
        rig.answers(&sent).iter().for_each(|reply| rig.deliver(reply));
    }
    rig.run();
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
}

/// Requests of an importer or an owner wait for their connection while the owners change.
#[test]
fn copies_go_by_the_map_by_which_they_were_to_be_made() {
    for config in [stream_config(), shared_config()] {
        let mut rig = Rig::new(Config { fetches: true, ..config }, 1);
        let second = rig.segment_peer(false);
        let every = || SourcePeers::each(|_| Some(second));
        let peers = |epoch| SourcePeers { epoch, sources: every() };
        rig.client.set_sources(peers(Epoch(5)), rig.now_ns);
        let of = |request| vec![request];
        let batches = [
            of(Request::PutCopy(digest(1), local(0, 0, 10), 0, second)),
            of(Request::DropCopy(digest(2), second)),
            of(Request::Remove(digest(3))),
            of(Request::Size(digest(4))),
        ];
        let mut book = PutBook::new();
        push_name(&mut book, 1, 10);
        let until = SubmitOptions::until(rig.now_ns + SECOND_NS);
        for requests in &batches {
            rig.client.submit_puts(requests, &book, &until, rig.now_ns).expect("a valid batch");
        }
        rig.client.set_sources(peers(Epoch(6)), rig.now_ns);
        let mut arguments = Vec::new();
        loop {
            let frames = rig.frames();
            if frames.is_empty() {
                break;
            }
            for sent in frames {
                arguments.push((sent.operation(), (sent.header.argument, sent.header.flags)));
                rig.act(ClientOutput::Frame(sent));
            }
        }
        let puts = [Operation::Put, Operation::Reserve];
        arguments.retain(|(operation, _)| !matches!(operation, Operation::Hello | Operation::Commit));
        let by =
            |operation| arguments.iter().filter(|(one, _)| *one == operation).map(|(_, by)| *by).collect::<Vec<_>>();
        let routing = |epoch, flag| (epoch, flag);
        let replicates = |(epoch, flags): (u64, FrameFlags)| routing(epoch, flags.has(FrameFlags::REPLICATE));
        let routed = |operation| by(operation).into_iter().map(replicates).collect::<Vec<_>>();
        assert_eq!(puts.map(routed).concat(), [routing(5, true)]);
        assert_eq!(routed(Operation::Remove), [routing(5, true), routing(5, false)]);
        assert_eq!(routed(Operation::Size), [routing(6, false)], "by the newest map");
    }
}

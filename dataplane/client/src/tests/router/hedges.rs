//! Hedging: when gets of a silent owner are sent to the replica owner, and when they are not.

use kvplane_proto::ids::{BatchId, NodeId};
use kvplane_proto::map::ClusterMap;
use kvplane_proto::message::Operation;
use kvplane_proto::status::Status;

use crate::tests::rig::{Object, Rig, SECOND_NS, digest, local, map, stream_config};
use crate::{Config, Request};

const MS: u64 = 1_000_000;
const BYTES: u64 = 1_000;

/// Creates a client in a cluster of two nodes that have object 0, with this bound of the hedging delay.
fn rig(hedge_ns: u64) -> Rig {
    let mut rig = Rig::new(Config { hedge_ns, lanes: 1, spread: false, ..stream_config() }, 2);
    rig.client.set_map(ClusterMap { replicas: 2, ..map(2, 2, 1) }, 1);
    rig.now_ns = MS;
    rig.objects.insert(digest(0), Object::replicated(BYTES, 7));
    rig
}

fn submit(rig: &mut Rig) -> BatchId {
    rig.submit(&[Request::Get(digest(0), local(0, 0, BYTES))])
}

/// Returns true if a get without a reply from its owner was hedged to the replica owner within this time.
fn asked_second(rig: &mut Rig, after_ns: u64) -> bool {
    let batch = submit(rig);
    let silent = rig.frames();
    assert_eq!(silent.len(), 1);
    let home: NodeId = rig.addresses[&silent[0].lane].node;
    rig.now_ns += after_ns;
    rig.client.handle_timeout(rig.now_ns);
    let frames = rig.frames();
    let second = frames.iter().any(|sent| rig.addresses[&sent.lane].node != home);
    for sent in frames.iter().chain(&silent) {
        rig.answers(sent).iter().for_each(|reply| rig.deliver(reply));
    }
    rig.run();
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    second
}

/// Runs gets that take so long each.
fn took(rig: &mut Rig, gets: u64, each_ns: u64) {
    for _ in 0..gets {
        let batch = submit(rig);
        let frames = rig.frames();
        rig.now_ns += each_ns;
        for sent in frames {
            rig.answers(&sent).iter().for_each(|reply| rig.deliver(reply));
        }
        rig.run();
        assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    }
}

/// A hedged get confirms that the replica owner has the object, and says nothing about the owner.
#[test]
fn gets_from_the_replica_owner_do_not_confirm_the_owner() {
    let mut rig = rig(100 * MS);
    for hedged in [false, true] {
        let batch = submit(&mut rig);
        let silent = rig.frames();
        if hedged {
            rig.now_ns += 100 * MS;
            rig.client.handle_timeout(rig.now_ns);
        }
        let frames = if hedged { rig.frames() } else { silent };
        frames.iter().for_each(|sent| rig.answers(sent).iter().for_each(|reply| rig.deliver(reply)));
        rig.run();
        let result = rig.client.batches().results(batch)[0];
        assert_eq!((result.from_replica, result.replicas), (hedged, if hedged { 1 } else { 2 }));
        rig.finish(batch);
    }
}

#[test]
fn a_silent_owner_is_hedged_after_its_99th_percentile() {
    let mut rig = rig(100 * MS);
    took(&mut rig, 100, MS);
    assert!(!asked_second(&mut rig, 49 * MS), "half of the setting at least");
    assert!(asked_second(&mut rig, 51 * MS));
    // One in twenty takes 80 ms, which is more than one in a hundred, so the delay grows, but not beyond the setting.
    for _ in 0..100 {
        took(&mut rig, 19, MS);
        took(&mut rig, 1, 80 * MS);
    }
    assert!(!asked_second(&mut rig, 70 * MS), "its slowest hundredth takes longer");
    for _ in 0..100 {
        took(&mut rig, 10, 150 * MS);
    }
    assert!(!asked_second(&mut rig, 95 * MS));
    assert!(asked_second(&mut rig, 101 * MS), "and it is left at the setting");
    rig.assert_empty();
}

#[test]
fn an_owner_that_answers_other_requests_is_not_hedged() {
    let mut rig = rig(100 * MS);
    rig.objects.insert(digest(1), Object::new(BYTES, 7));
    let batch = submit(&mut rig);
    let slow = rig.frames();
    let home = rig.addresses[&slow[0].lane].node;
    let others: Vec<u64> = (1..200)
        .filter(|&key| {
            let other = rig.submit(&[Request::Exists(digest(key))]);
            let frames = rig.frames();
            let same = frames.iter().all(|sent| rig.addresses[&sent.lane].node == home);
            for sent in frames {
                rig.answers(&sent).iter().for_each(|reply| rig.deliver(reply));
            }
            rig.run();
            rig.finish(other);
            same
        })
        .collect();
    assert!(!others.is_empty());
    // Another request is answered on the same connection every 20 ms.
    for turn in 0..50 {
        rig.now_ns += 20 * MS;
        let other = rig.submit(&[Request::Exists(digest(others[turn % others.len()]))]);
        for sent in rig.frames() {
            assert_eq!(sent.operation(), Operation::Exists, "turn {turn}");
            rig.answers(&sent).iter().for_each(|reply| rig.deliver(reply));
        }
        rig.run();
        rig.finish(other);
        rig.client.handle_timeout(rig.now_ns);
        assert!(rig.frames().is_empty(), "turn {turn}");
    }
    for sent in slow {
        rig.answers(&sent).iter().for_each(|reply| rig.deliver(reply));
    }
    rig.run();
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    assert_eq!(rig.client.counters().second_asked, 0);
    rig.assert_empty();
}

/// An owner that answers each get, but after the hedging delay: the number of added requests is bounded.
#[test]
fn hedges_of_a_slow_owner_are_bounded_by_the_budget() {
    let mut rig = rig(100 * MS);
    let gets = 2_000;
    let twice = (0..gets).filter(|_| asked_second(&mut rig, 120 * MS)).count();
    assert!((64..=64 + gets / 25).contains(&twice), "{twice} of {gets}");
    // A dead owner, which never answers those gets, does not use up the budget.
    rig.now_ns += SECOND_NS;
    took(&mut rig, 4_000, MS);
    for _ in 0..200 {
        let batch = submit(&mut rig);
        assert_eq!(rig.frames().len(), 1);
        rig.now_ns += 101 * MS;
        rig.client.handle_timeout(rig.now_ns);
        rig.run();
        assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    }
}

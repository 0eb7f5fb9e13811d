//! Hedging: when gets of a silent owner are sent to the replica owner, and when they are not.

use kvplane_proto::ids::{BatchId, Incarnation, NodeId};
use kvplane_proto::map::ClusterMap;
use kvplane_proto::message::Operation;
use kvplane_proto::status::Status;

use crate::tests::rig::{Object, Rig, SECOND_NS, SentFrame, digest, local, map, stream_config};
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

/// Returns the node that each of the client's new frames went to, and the frames.
fn asked(rig: &mut Rig) -> (Vec<NodeId>, Vec<SentFrame>) {
    let frames = rig.frames();
    (frames.iter().map(|sent| rig.addresses[&sent.lane].node).collect(), frames)
}

/// Delivers the replies to these frames, and not to those that follow from them.
fn reply(rig: &mut Rig, frames: &[SentFrame]) {
    for sent in frames {
        rig.answers(sent).iter().for_each(|reply| rig.deliver(reply));
    }
}

fn answer(rig: &mut Rig, frames: &[SentFrame]) {
    reply(rig, frames);
    rig.run();
}

/// Submits a get whose owner does not reply, and has it hedged. Returns the owner, its frames, and the replica owner.
fn hedged(rig: &mut Rig) -> (NodeId, Vec<SentFrame>, NodeId) {
    let batch = submit(rig);
    let (home, silent) = asked(rig);
    rig.now_ns += 100 * MS;
    rig.client.handle_timeout(rig.now_ns);
    let (other, frames) = asked(rig);
    assert_eq!((home.len(), other.len()), (1, 1));
    answer(rig, &frames);
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    (home[0], silent, other[0])
}

#[test]
fn a_suspect_owner_is_avoided_until_it_is_heard() {
    let mut rig = rig(100 * MS);
    took(&mut rig, 3, MS);
    rig.now_ns += SECOND_NS;
    let (home, silent, other) = hedged(&mut rig);
    assert_ne!(home, other);
    // Every later get goes to the replica owner at once, however long the owner owes its reply.
    for _ in 0..20 {
        rig.now_ns += 100 * MS;
        let batch = submit(&mut rig);
        let (nodes, frames) = asked(&mut rig);
        assert_eq!(nodes, [other]);
        answer(&mut rig, &frames);
        let result = rig.client.batches().results(batch)[0];
        assert!(result.from_replica && result.status == Status::Ok);
        rig.finish(batch);
    }
    assert_eq!(rig.client.counters().second_asked, 21);
    answer(&mut rig, &silent);
    let batch = submit(&mut rig);
    let (nodes, frames) = asked(&mut rig);
    assert_eq!(nodes, [home], "its late reply was a sign of life");
    answer(&mut rig, &frames);
    rig.finish(batch);
    rig.assert_empty();
}

/// Without its replica, a suspect owner is asked after all; and where the replica owner does not reply either, the get
/// goes to the owner.
#[test]
fn gets_that_avoid_a_suspect_owner_go_back_to_it() {
    let mut rig = rig(100 * MS);
    took(&mut rig, 3, MS);
    rig.now_ns += SECOND_NS;
    let (home, silent, other) = hedged(&mut rig);
    let batch = submit(&mut rig);
    let (nodes, missing) = asked(&mut rig);
    assert_eq!(nodes, [other]);
    let object = rig.objects.remove(&digest(0)).expect("it is there");
    reply(&mut rig, &missing);
    let (nodes, at_home) = asked(&mut rig);
    assert_eq!(nodes, [home], "the replica owner has evicted it");
    rig.objects.insert(digest(0), object);
    answer(&mut rig, &at_home);
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    // That reply was a sign of life; it falls silent again.
    answer(&mut rig, &silent);
    rig.now_ns += SECOND_NS;
    let (home, _, other) = hedged(&mut rig);
    let batch = submit(&mut rig);
    assert_eq!(asked(&mut rig).0, [other]);
    rig.now_ns += 100 * MS;
    rig.client.handle_timeout(rig.now_ns);
    let (nodes, frames) = asked(&mut rig);
    assert_eq!(nodes, [home], "both are silent");
    answer(&mut rig, &frames);
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
}

/// A client whose gets are hedged one after the other, so that none waits for the owner for long, still finds that the
/// owner is silent.
#[test]
fn hedged_gets_do_not_hide_the_silence_of_a_node() {
    let mut rig = rig(100 * MS);
    took(&mut rig, 3, MS);
    let (home, silent, _) = hedged(&mut rig);
    for _ in 0..6 {
        let batch = submit(&mut rig);
        rig.now_ns += 50 * MS;
        let (_, frames) = asked(&mut rig);
        answer(&mut rig, &frames);
        rig.finish(batch);
    }
    rig.client.handle_timeout(rig.now_ns);
    let found: Vec<_> = rig.client.metrics().silent_nodes(250 * MS).collect();
    assert_eq!(found, [(home, Incarnation(1))]);
    answer(&mut rig, &silent);
    assert_eq!(rig.client.metrics().silent_nodes(250 * MS).count(), 0);
}

/// Requests with short deadlines end before their node is silent for long, and their connections with them.
#[test]
fn short_deadlines_do_not_hide_the_silence_of_a_node() {
    let mut rig = rig(100 * MS);
    took(&mut rig, 3, MS);
    let (home, _, _) = hedged(&mut rig);
    for lane in rig.addresses.iter().filter(|(_, at)| at.node == home).map(|(lane, _)| *lane).collect::<Vec<_>>() {
        rig.client.lane_gone(lane, rig.now_ns);
    }
    let found = |rig: &Rig| rig.client.metrics().silent_nodes(250 * MS).map(|(node, _)| node).collect::<Vec<_>>();
    assert!(found(&rig).is_empty());
    rig.now_ns += 250 * MS;
    rig.client.handle_timeout(rig.now_ns);
    assert_eq!(found(&rig), [home]);
}

#[test]
fn queries_of_a_silent_owner_are_hedged() {
    for ask in [Request::Exists(digest(0)), Request::Size(digest(0))] {
        let mut rig = rig(100 * MS);
        let batch = rig.submit(&[ask, Request::Exists(digest(0))]);
        let (home, silent) = asked(&mut rig);
        rig.now_ns += 100 * MS;
        rig.client.handle_timeout(rig.now_ns);
        let (other, frames) = asked(&mut rig);
        assert!(other.iter().all(|node| *node != home[0]), "{ask:?}");
        answer(&mut rig, &frames);
        let results = rig.client.batches().results(batch).to_vec();
        assert!(results.iter().all(|result| result.status == Status::Ok && result.from_replica), "{results:?}");
        assert_eq!(results[0].bytes, if ask == Request::Exists(digest(0)) { 0 } else { BYTES });
        rig.finish(batch);
        // The late replies are dropped.
        answer(&mut rig, &silent);
        rig.assert_empty();
    }
}

/// The replicas of many objects may be at several nodes: a query of all ends, and its caller asks for each.
#[test]
fn a_query_of_many_objects_ends_when_its_owner_is_silent() {
    let mut rig = rig(100 * MS);
    let batch = rig.client.submit_asks(&[digest(0)], 10 * SECOND_NS, rig.now_ns).expect("good");
    let (_, silent) = asked(&mut rig);
    rig.now_ns += 99 * MS;
    rig.client.handle_timeout(rig.now_ns);
    assert!(rig.client.batches().is_complete(batch), "{:?}", rig.client.batches().unanswered(batch));
    assert_eq!(rig.client.batches().unanswered(batch), [(0, Status::Unreachable)]);
    // The owner is suspect now: the next query is not sent at all.
    let next = rig.client.submit_asks(&[digest(0)], 10 * SECOND_NS, rig.now_ns).expect("good");
    assert_eq!(rig.client.batches().unanswered(next), [(0, Status::Unreachable)]);
    assert!(rig.client.batches().is_complete(next) && rig.frames().is_empty());
    rig.client.release(next);
    answer(&mut rig, &silent);
    rig.client.release(batch);
    rig.assert_empty();
}

//! Absence and return of nodes with devices: the owners of their slots meanwhile, and the layout in the map.

use crate::support;

use kvplane_cluster::{ClusterConfig, Input, MemberState};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use support::{Driver, MS, config};

fn attach(driver: &mut Driver, node: u64, incarnation: u64) {
    let input = Input::AttachDevices { node: NodeId(node), incarnation: Incarnation(incarnation), devices: 7 };
    driver.handle(input).expect("its devices are recorded");
}

fn restart(driver: &mut Driver, node: u64, incarnation: u64) {
    let input = Input::Restart { node: NodeId(node), incarnation: Incarnation(incarnation) };
    driver.handle(input).expect("it may restart");
}

#[test]
fn a_restart_in_order_of_a_node_with_devices_moves_no_slot() {
    let mut driver = Driver::new(config());
    for node in 1..=3 {
        attach(&mut driver, node, 5);
        driver.admit(node, 5);
    }
    let since = driver.cluster.layout_since();
    // The nodes restart one after the other, at once.
    for node in 1..=3 {
        restart(&mut driver, node, 5);
        driver.sleep(250 * MS);
        attach(&mut driver, node, 6);
        driver.admit(node, 6);
        (1..=3).for_each(|other| drop(driver.beat(other, if other > node { 5 } else { 6 })));
    }
    assert_eq!(driver.in_map(), [(1, 6), (2, 6), (3, 6)]);
    assert_eq!((driver.cluster.layout_since(), driver.cluster.counters().restarts), (since, 3));
    // A restart from another place is accepted too: the former incarnation sends nothing any more.
    restart(&mut driver, 3, 6);
    attach(&mut driver, 3, 7);
    driver.join(support::member(3, 7, 7900)).expect("the restart is accepted at once");
}

/// The last message of an incarnation arrives after the next one has attached the devices.
#[test]
fn a_restart_that_is_announced_late_moves_no_slot() {
    let mut driver = Driver::new(config());
    for node in 1..=3 {
        attach(&mut driver, node, 5);
        driver.admit(node, 5);
    }
    let since = driver.cluster.layout_since();
    attach(&mut driver, 1, 6);
    restart(&mut driver, 1, 5);
    driver.admit(1, 6);
    assert_eq!((driver.in_map(), driver.cluster.layout_since()), (vec![(1, 6), (2, 5), (3, 5)], since));
}

#[test]
fn a_start_that_was_refused_is_no_last_member() {
    let mut driver = Driver::new(config());
    let known = |driver: &Driver| {
        let known = driver.cluster.last_incarnations(NodeId(1));
        [known.any.0, known.member.0]
    };
    assert_eq!(known(&driver), [0, 0]);
    attach(&mut driver, 1, 5);
    assert_eq!(known(&driver), [5, 0]);
    driver.admit(1, 5);
    // It was killed, and starts elsewhere while it still counts as live.
    attach(&mut driver, 1, 6);
    driver.join(support::member(1, 6, 7900)).expect_err("the former incarnation is live");
    assert_eq!(known(&driver), [6, 5]);
    attach(&mut driver, 1, 7);
    driver.sleep(1000 * MS);
    driver.join(support::member(1, 7, 7900)).expect("the former incarnation is dead");
    assert_eq!(known(&driver), [7, 7]);
}

#[test]
fn restarting_member_is_dead_at_the_deadline() {
    let mut driver = Driver::new(config());
    attach(&mut driver, 1, 5);
    (1..=2).for_each(|node| driver.admit(node, 5));
    driver.sleep(90 * MS);
    restart(&mut driver, 1, 5);
    for _ in 0..5 {
        driver.sleep(100 * MS);
        driver.beat(2, 5).expect("a live member");
        driver.handle(Input::Refused { node: NodeId(1), incarnation: Incarnation(5) }).expect("a live member");
    }
    assert_eq!(driver.in_map(), [(1, 5), (2, 5)]);
    driver.sleep(99 * MS);
    driver.beat(2, 5).expect("a live member");
    driver.sleep(2 * MS);
    assert_eq!((driver.in_map(), driver.state(1)), (vec![(2, 5)], Some(MemberState::Dead)));
}

/// Returns a cluster of three nodes with devices, whose slots have this many owners.
fn three(replicas: u8) -> Driver {
    let mut driver = Driver::new(ClusterConfig { replicas, ..config() });
    for node in 1..=3 {
        attach(&mut driver, node, 5);
        driver.admit(node, 5);
    }
    driver
}

fn refuse(driver: &mut Driver, node: u64) {
    let input = Input::Refused { node: NodeId(node), incarnation: Incarnation(5) };
    driver.handle(input).expect("a live member");
}

#[test]
fn members_that_die_together_are_expelled_by_one_map() {
    let mut driver = three(2);
    let since = driver.cluster.layout_since();
    driver.sleep(201 * MS);
    refuse(&mut driver, 2);
    refuse(&mut driver, 3);
    assert_eq!(driver.in_map().len(), 3, "node 1 is silent too: it may be dead, or be heard the next moment");
    driver.sleep(50 * MS);
    refuse(&mut driver, 1);
    assert_eq!((driver.in_map(), driver.lost.len()), (vec![], 3));
    assert_eq!(driver.cluster.layout_since(), since, "slots passed to no dead node");

    // One node lives: it gets the slots of both dead ones, by one map.
    let mut driver = three(2);
    let epoch = driver.published.epoch;
    driver.sleep(201 * MS);
    refuse(&mut driver, 2);
    refuse(&mut driver, 3);
    driver.beat(1, 5).expect("a live member");
    assert_eq!((driver.in_map(), driver.published.epoch), (vec![(1, 5)], Epoch(epoch.0 + 1)));
    // So does the next incarnation of a node that had died with them.
    let mut driver = three(2);
    driver.sleep(201 * MS);
    (1..=2).for_each(|node| refuse(&mut driver, node));
    attach(&mut driver, 3, 6);
    driver.admit(3, 6);
    assert_eq!((driver.in_map(), driver.lost.as_slice()), (vec![(3, 6)], &[(1, 5), (2, 5)][..]));
}

#[test]
fn members_with_different_last_heartbeats_are_expelled_together() {
    let mut driver = three(2);
    let since = driver.cluster.layout_since();
    // All nodes die at one moment, each up to an interval after its last heartbeat.
    for node in [2, 3, 1] {
        driver.sleep(45 * MS);
        driver.beat(node, 5).expect("a live member");
    }
    for node in [2, 3, 1] {
        driver.sleep(61 * MS);
        refuse(&mut driver, node);
    }
    driver.sleep(20 * MS);
    (1..=3).for_each(|node| drop(driver.handle(Input::Refused { node: NodeId(node), incarnation: Incarnation(5) })));
    assert_eq!((driver.in_map(), driver.cluster.layout_since()), (vec![], since), "{:?}", driver.lost);
    assert_eq!(driver.published.epoch.0 - since.0, 1, "one map");
}

#[test]
fn lasting_silence_expels_members_together() {
    for replicas in [1, 2] {
        let mut driver = three(replicas);
        let since = driver.cluster.layout_since();
        // The last signs of life are spread over more than a heartbeat interval.
        for node in 1..=3 {
            driver.sleep(90 * MS);
            (node..=3).for_each(|node| drop(driver.beat(node, 5).expect("a live member")));
        }
        driver.sleep(599 * MS);
        assert_eq!(driver.in_map().len(), 3, "the first two wait for the last");
        driver.sleep(2 * MS);
        assert_eq!((driver.in_map(), driver.cluster.layout_since()), (vec![], since));
    }
}

#[test]
fn dead_member_waits_a_bounded_time_for_a_silent_one() {
    // Its ports were the evidence: the wait is two more heartbeat intervals.
    let mut driver = three(2);
    driver.sleep(100 * MS);
    driver.beat(1, 5).expect("a live member");
    driver.sleep(101 * MS);
    refuse(&mut driver, 2);
    let beat = |driver: &mut Driver, ms: u64| {
        driver.sleep(ms * MS);
        driver.beat(1, 5).expect("a live member");
    };
    beat(&mut driver, 90);
    beat(&mut driver, 90);
    assert_eq!(driver.in_map().len(), 3);
    beat(&mut driver, 20);
    assert_eq!((driver.in_map(), driver.lost.as_slice()), (vec![(1, 5), (3, 5)], &[(2, 5)][..]));
    // Silence was the evidence: the wait for a node that fell silent later lasts until that one's deadline.
    let mut driver = three(1);
    for silent_for in 0..12 {
        driver.sleep(100 * MS);
        let alive = if silent_for < 4 { 1..=2 } else { 1..=1 };
        alive.for_each(|node| drop(driver.beat(node, 5).expect("a live member")));
        let waits = silent_for < 9;
        assert_eq!(driver.in_map().len(), if waits { 3 } else { 1 }, "{silent_for}");
    }
}

#[test]
fn dead_member_waits_for_members_unheard_since_a_restart_of_the_control_plane() {
    // A heartbeat that was in flight when all nodes died is the last sign of life of one of them.
    let restart = || {
        let mut driver = three(2).restart();
        driver.sleep(100 * MS);
        driver.beat(2, 5).expect("it was a live member");
        driver
    };
    let mut driver = restart();
    let since = driver.cluster.layout_since();
    for _ in 0..14 {
        driver.sleep(100 * MS);
        assert_eq!(driver.in_map().len(), 3, "{}: the grace of 1 and 3 lasts", driver.now_ns);
    }
    driver.sleep(101 * MS);
    assert_eq!((driver.in_map(), driver.cluster.layout_since()), (vec![], since), "slots passed to no node");
    assert_eq!(driver.cluster.counters().late_calls, 0);

    // The wait ends once the other nodes are heard from.
    let mut driver = restart();
    for after in 1..=6 {
        driver.sleep(100 * MS);
        [1, 3].into_iter().for_each(|node| drop(driver.beat(node, 5).expect("a live member")));
        assert_eq!(driver.in_map().len(), if after < 6 { 3 } else { 2 }, "{after}");
    }
}

#[test]
fn members_without_devices_are_expelled_at_once_unless_others_are_late() {
    let start = |beating: &[u64]| {
        let mut driver = Driver::new(ClusterConfig { replicas: 2, ..config() });
        (1..=3).for_each(|node| driver.admit(node, 5));
        driver.sleep(60 * MS);
        beating.iter().for_each(|node| drop(driver.beat(*node, 5).expect("it is a member")));
        driver.sleep(51 * MS);
        refuse(&mut driver, 2);
        driver
    };
    assert_eq!(start(&[1, 3]).in_map(), [(1, 5), (3, 5)]);
    // One that is late may be dead, too: then one map expels both.
    let mut driver = start(&[1]);
    assert_eq!(driver.in_map().len(), 3);
    refuse(&mut driver, 3);
    assert_eq!(driver.in_map(), [(1, 5)]);
    assert_eq!(driver.lost.as_slice(), [(2, 5), (3, 5)]);
    // Or it lives, or nothing is heard of it for a while.
    let mut driver = start(&[1]);
    driver.beat(3, 5).expect("it is a member");
    assert_eq!(driver.in_map(), [(1, 5), (3, 5)]);
    let mut driver = start(&[1]);
    driver.sleep(190 * MS);
    assert_eq!(driver.in_map(), [(1, 5), (3, 5)]);
}

#[test]
fn restart_of_a_member_without_devices_or_drained_is_a_departure() {
    let mut driver = Driver::new(config());
    (1..=2).for_each(|node| driver.admit(node, 5));
    attach(&mut driver, 3, 5);
    driver.admit(3, 5);
    driver.handle(Input::Drain { node: NodeId(3), incarnation: None }).expect("other nodes own slots too");
    restart(&mut driver, 1, 5);
    restart(&mut driver, 3, 5);
    assert_eq!(driver.in_map(), [(2, 5)]);
    assert_eq!((driver.cluster.counters().restarts, driver.cluster.counters().leaves), (0, 2));
}

#[test]
fn slots_stay_with_their_last_owners_while_there_are_none() {
    let mut driver = Driver::new(config());
    (1..=2).for_each(|node| driver.admit(node, 5));
    let since = driver.cluster.layout_since();
    driver.sleep(2000 * MS);
    assert_eq!((driver.in_map(), driver.cluster.layout_since()), (vec![], since), "no node was given slots");
    driver.admit(2, 6);
    let former = driver.published.former.clone().expect("there was a layout before");
    let owners: Vec<(NodeId, Incarnation)> =
        former.claims.iter().map(|claim| (claim.node, claim.incarnation)).collect();
    assert_eq!(owners, [(NodeId(1), Incarnation(5)), (NodeId(2), Incarnation(5))]);
    assert_eq!((former.from, former.since), (since, Epoch(driver.published.epoch.0)));
    assert_eq!(former.began, [(NodeId(2), Incarnation(6))]);
}

fn owners(driver: &Driver) -> Vec<u64> {
    driver.published.members.iter().filter(|member| member.weight > 0).map(|member| member.node.0).collect()
}

/// Each of these incarnations sends a heartbeat, and reports the newest map as settled, also one that begins a liveness
/// probe.
fn settle(driver: &mut Driver, incarnations: &[(u64, u64)]) {
    for (node, incarnation) in incarnations.iter().chain(incarnations) {
        driver.beat(*node, *incarnation).expect("it is a member");
        let (node, incarnation) = (NodeId(*node), Incarnation(*incarnation));
        let epoch = driver.published.epoch;
        driver.handle(Input::Settled { node, incarnation, epoch }).expect("it is a member");
    }
}

/// Returns a cluster in which nodes 1 and 2 live and node 3 is dead, all with devices. Moves wait at most five seconds.
fn three_without_3() -> Driver {
    let mut driver = Driver::new(ClusterConfig { replicas: 1, settle_most_ns: 5000 * MS, ..config() });
    for node in 1..=3 {
        attach(&mut driver, node, 5);
        driver.admit(node, 5);
        let all: Vec<(u64, u64)> = (1..=node).map(|node| (node, 5)).collect();
        settle(&mut driver, &all);
    }
    assert_eq!(owners(&driver), [1, 2, 3]);
    while owners(&driver).len() == 3 {
        driver.sleep(100 * MS);
        settle(&mut driver, &[(1, 5), (2, 5)]);
    }
    driver
}

/// Objects on node 3's devices are reconciled only in the slots that node 3 gets back.
#[test]
fn newcomer_gets_no_share_before_absent_nodes_have_theirs_again() {
    let mut driver = three_without_3();
    driver.admit(4, 1);
    settle(&mut driver, &[(1, 5), (2, 5), (4, 1)]);
    assert_eq!(owners(&driver), [1, 2], "node 3 may return");
    driver.sleep(100 * MS);
    attach(&mut driver, 3, 6);
    let report = |driver: &mut Driver, epoch| {
        let input = Input::Settled { node: NodeId(3), incarnation: Incarnation(6), epoch };
        driver.handle(input).expect("it is a member")
    };
    driver.join(support::member(3, 6, 7000)).expect("it may return");
    report(&mut driver, Epoch(0));
    driver.beat(3, 6).expect("it is a member");
    settle(&mut driver, &[(1, 5), (2, 5), (4, 1)]);
    assert_eq!(owners(&driver), [1, 2], "it may be dead again");
    let epoch = driver.published.epoch;
    report(&mut driver, epoch);
    assert_eq!(owners(&driver), [1, 2, 3], "its migrations are not complete");
    settle(&mut driver, &[(1, 5), (2, 5), (3, 6), (4, 1)]);
    assert_eq!(owners(&driver), [1, 2, 3, 4]);
}

#[test]
fn newcomer_waits_a_bounded_time_for_absent_nodes_and_not_for_removed_ones() {
    let mut driver = three_without_3();
    driver.admit(4, 1);
    let all = [(1, 5), (2, 5), (4, 1)];
    for _ in 0..60 {
        settle(&mut driver, &all);
        driver.sleep(100 * MS);
    }
    settle(&mut driver, &all);
    assert_eq!(owners(&driver), [1, 2, 4]);

    let mut driver = three_without_3();
    driver.admit(4, 1);
    settle(&mut driver, &all);
    assert_eq!(owners(&driver), [1, 2]);
    driver.handle(Input::Leave { node: NodeId(3), incarnation: Incarnation(5) }).expect("an operator may remove it");
    settle(&mut driver, &all);
    assert_eq!(owners(&driver), [1, 2, 4]);
}

/// Nodes that died return regardless of other absent nodes: only they have the objects on their devices.
#[test]
fn absent_nodes_do_not_wait_for_each_other() {
    let mut driver = three_without_3();
    while !owners(&driver).is_empty() {
        driver.sleep(100 * MS);
        let _ = driver.handle(Input::Tick);
    }
    driver.admit(4, 1);
    assert_eq!(owners(&driver), [4], "no other node can serve");
    settle(&mut driver, &[(4, 1)]);
    attach(&mut driver, 3, 6);
    driver.admit(3, 6);
    settle(&mut driver, &[(4, 1), (3, 6)]);
    assert_eq!(owners(&driver), [3, 4], "1 and 2 are still absent");
}

//! Changes of owners that wait until the migrations of the previous change are complete.

use crate::support;

use kvplane_cluster::{ClusterConfig, ENDS_INTERVALS, Input, MemberState, Moves, Rejection, Reply};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use support::{Driver, MS, config, member};

/// Returns settings with a wait for moves of at most five seconds.
fn patient() -> ClusterConfig {
    ClusterConfig { settle_most_ns: 5000 * MS, ..config() }
}

fn settled(driver: &mut Driver, node: u64, epoch: u64) -> Result<Reply, Rejection> {
    driver.handle(Input::Settled { node: NodeId(node), incarnation: Incarnation(1), epoch: Epoch(epoch) })
}

/// Joins as a node does that reports finished migrations.
fn admit(driver: &mut Driver, node: u64) {
    driver.join(member(node, 1, 7000)).unwrap();
    settled(driver, node, 0).unwrap();
    driver.beat(node, 1).unwrap();
}

fn owners(driver: &Driver) -> Vec<u64> {
    driver.published.members.iter().filter(|member| member.weight > 0).map(|member| member.node.0).collect()
}

/// Reports that these nodes follow the newest map, and have fetched everything that migrated to them by it.
fn follow(driver: &mut Driver, nodes: &[u64]) {
    let epoch = driver.published.epoch.0;
    for node in nodes {
        settled(driver, *node, epoch).unwrap();
    }
}

/// Reports that all members follow the newest map, and have fetched everything that migrated to them by it.
fn all_settled(driver: &mut Driver) {
    let members: Vec<u64> = driver.in_map().into_iter().map(|(node, _)| node).collect();
    follow(driver, &members);
}

fn drain(driver: &mut Driver, node: u64) {
    driver.handle(Input::Drain { node: NodeId(node), incarnation: None }).unwrap();
}

/// Returns a cluster whose nodes 1 and 2 own everything, and node 2 has not fetched its whole share yet.
fn two(config: ClusterConfig) -> Driver {
    let mut driver = Driver::new(config);
    admit(&mut driver, 1);
    assert_eq!(owners(&driver), [1], "the first joins wait for no migration");
    settled(&mut driver, 1, 1).unwrap();
    admit(&mut driver, 2);
    assert_eq!(owners(&driver), [1], "it is unknown which takers live");
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [1, 2], "all migrations are complete");
    driver
}

#[test]
fn joins_wait_for_migrations_and_share_one_change() {
    let mut driver = two(patient());
    admit(&mut driver, 3);
    admit(&mut driver, 4);
    assert_eq!((driver.in_map().len(), owners(&driver)), (4, vec![1, 2]), "they are in the map, and own nothing");
    let epoch = driver.published.epoch.0;
    settled(&mut driver, 1, epoch).unwrap();
    assert_eq!(owners(&driver), [1, 2], "one of two has settled");
    let moved = driver.cluster.layout_since().0;
    settled(&mut driver, 2, moved).unwrap();
    assert_eq!(driver.published.epoch.0, epoch + 1, "a report of the map since which nothing moved suffices");
    follow(&mut driver, &[1, 3, 4]);
    assert_eq!(owners(&driver), [1, 2], "node 2 may have died since");
    follow(&mut driver, &[2]);
    assert_eq!((owners(&driver), driver.published.epoch.0), (vec![1, 2, 3, 4], epoch + 2));
}

#[test]
fn waits_are_bounded_and_skip_members_that_do_not_report() {
    let mut driver = two(patient());
    admit(&mut driver, 3);
    for _ in 0..49 {
        driver.sleep(100 * MS);
        (1..=3).for_each(|node| drop(driver.beat(node, 1).unwrap()));
    }
    driver.sleep(100 * MS);
    (1..=3).for_each(|node| drop(driver.beat(node, 1).unwrap()));
    assert_eq!(owners(&driver), [1, 2]);
    // After five seconds, heartbeats prove that members with unfinished migrations live; the others must follow a map.
    let mut waits = false;
    for _ in 0..50 {
        waits |= owners(&driver) == [1, 2];
        driver.sleep(100 * MS);
        (1..=3).for_each(|node| drop(driver.beat(node, 1).unwrap()));
    }
    assert_eq!((waits, owners(&driver)), (true, vec![1, 2, 3]), "after ten, heartbeats do");
    let mut driver = two(patient());
    admit(&mut driver, 3);
    for _ in 0..50 {
        driver.sleep(100 * MS);
        (1..=3).for_each(|node| drop(driver.beat(node, 1).unwrap()));
    }
    follow(&mut driver, &[3]);
    assert_eq!(owners(&driver), [1, 2, 3]);
    let mut driver = Driver::new(patient());
    (1..=3).for_each(|node| driver.admit(node, 1));
    assert_eq!(owners(&driver), [1, 2, 3], "incarnations of an earlier version");
}

#[test]
fn drain_waits_and_the_last_owner_stays_until_another_joins() {
    let mut driver = two(patient());
    drain(&mut driver, 1);
    assert_eq!(owners(&driver), [1, 2]);
    all_settled(&mut driver);
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [2]);
    let mut driver = Driver::new(patient());
    admit(&mut driver, 1);
    driver.join(member(2, 1, 7000)).unwrap();
    settled(&mut driver, 2, 0).unwrap();
    drain(&mut driver, 1);
    settled(&mut driver, 1, 1).unwrap();
    assert_eq!(owners(&driver), [1], "the other is not in the map yet");
    driver.beat(2, 1).unwrap();
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [2]);
}

#[test]
fn deaths_departures_and_restarts_do_not_wait() {
    let mut driver = two(patient());
    admit(&mut driver, 3);
    driver.handle(Input::Leave { node: NodeId(1), incarnation: Incarnation(1) }).unwrap();
    assert_eq!(owners(&driver), [2], "it left at once");
    driver.join(member(2, 2, 7000)).unwrap();
    assert_eq!(
        (driver.in_map(), owners(&driver)),
        (vec![(2, 2), (3, 1)], vec![2]),
        "its next incarnation has its slots"
    );
    for _ in 0..6 {
        driver.sleep(100 * MS);
        driver.beat(3, 1).unwrap();
    }
    assert_eq!(owners(&driver), [3], "no migration is left to wait for");
}

#[test]
fn restarted_control_plane_keeps_waiting_members() {
    let mut driver = two(patient());
    admit(&mut driver, 3);
    let mut driver = driver.restart();
    assert_eq!(owners(&driver), [1, 2]);
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [1, 2], "it is unknown after a start which takers live");
    (1..=3).for_each(|node| drop(driver.beat(node, 1).unwrap()));
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [1, 2, 3]);
    let mut driver = driver.restart();
    (1..=3).for_each(|node| drop(driver.beat(node, 1).unwrap()));
    admit(&mut driver, 4);
    assert_eq!(owners(&driver), [1, 2, 3], "it is unknown after a start which owners have settled");
    all_settled(&mut driver);
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [1, 2, 3, 4]);
}

/// Returns a cluster whose three nodes own everything, and have fetched their shares.
fn three() -> Driver {
    let mut driver = two(patient());
    all_settled(&mut driver);
    admit(&mut driver, 3);
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [1, 2, 3]);
    all_settled(&mut driver);
    driver
}

/// Sends heartbeats and settled reports of all nodes except node 3, this many times.
fn without_3(driver: &mut Driver, heartbeats: u64) {
    for _ in 0..heartbeats {
        driver.sleep(100 * MS);
        (1..=2).for_each(|node| drop(driver.beat(node, 1).unwrap()));
        follow(driver, &[1, 2]);
    }
}

#[test]
fn a_drain_gives_nothing_to_a_node_that_may_be_dead() {
    // The node was killed just after a heartbeat: no other one has been missed yet.
    let mut driver = three();
    driver.sleep(50 * MS);
    drain(&mut driver, 1);
    // Heartbeats that were sent before the drain may be processed after it.
    (1..=3).for_each(|node| drop(driver.beat(node, 1).unwrap()));
    without_3(&mut driver, 4);
    assert_eq!(owners(&driver), [1, 2, 3], "node 3 may be dead");
    let before = driver.published.former.clone().unwrap();
    without_3(&mut driver, 5);
    assert_eq!(owners(&driver), [2], "it was, and is expelled");
    assert!(driver.published.former.clone().unwrap().from.0 > before.from.0, "its heirs had its slots first");
    // The node was only slow.
    let mut driver = three();
    driver.sleep(50 * MS);
    drain(&mut driver, 1);
    without_3(&mut driver, 2);
    assert_eq!(owners(&driver), [1, 2, 3]);
    driver.beat(3, 1).unwrap();
    follow(&mut driver, &[3]);
    assert_eq!(owners(&driver), [2, 3]);
    // It was so slow that node 2 may have died after its answer: all nodes answer again.
    let mut driver = three();
    drain(&mut driver, 1);
    follow(&mut driver, &[1, 2]);
    for _ in 0..3 {
        driver.sleep(100 * MS);
        (1..=3).for_each(|node| drop(driver.beat(node, 1).unwrap()));
    }
    follow(&mut driver, &[3]);
    assert_eq!(owners(&driver), [1, 2, 3]);
    follow(&mut driver, &[3]);
    assert_eq!(owners(&driver), [1, 2, 3], "node 2 has not answered");
    follow(&mut driver, &[2]);
    assert_eq!(owners(&driver), [2, 3]);
}

#[test]
fn a_drain_waits_for_a_node_that_restarts() {
    let mut driver = three();
    let devices = Input::AttachDevices { node: NodeId(3), incarnation: Incarnation(1), devices: 5 };
    driver.handle(devices).unwrap();
    driver.handle(Input::Restart { node: NodeId(3), incarnation: Incarnation(1) }).unwrap();
    drain(&mut driver, 1);
    without_3(&mut driver, 4);
    assert_eq!(owners(&driver), [1, 2, 3], "it has yet to return");
    driver.join(member(3, 2, 7000)).unwrap();
    // First it fetches its own share, and then it answers.
    for owned in [&[1, 2, 3][..], &[2, 3]] {
        let epoch = driver.published.epoch;
        follow(&mut driver, &[1, 2]);
        driver.handle(Input::Settled { node: NodeId(3), incarnation: Incarnation(2), epoch }).unwrap();
        assert_eq!(owners(&driver), owned, "its next incarnation takes its part of what is drained");
    }
}

/// All nodes are drained and end at once, in any order: a node without an heir stays the owner of its slots.
#[test]
fn drained_nodes_that_all_restart_keep_their_slots() {
    let mut driver = three();
    for node in 1..=3 {
        let devices = Input::AttachDevices { node: NodeId(node), incarnation: Incarnation(1), devices: node.into() };
        driver.handle(devices).unwrap();
    }
    let ask = |driver: &mut Driver, node| {
        driver.handle(Input::Drain { node: NodeId(node), incarnation: Some(Incarnation(1)) })
    };
    let restart = |driver: &mut Driver, node| {
        driver.handle(Input::Restart { node: NodeId(node), incarnation: Incarnation(1) }).unwrap()
    };
    driver.sleep(50 * MS);
    (1..=2).for_each(|node| drop(ask(&mut driver, node).unwrap()));
    assert!(matches!(ask(&mut driver, 3), Err(Rejection::LastOwner { .. })));
    for node in [3, 1, 2] {
        restart(&mut driver, node);
        for other in 1..=2 {
            assert!(matches!(ask(&mut driver, other), Err(Rejection::LastOwner { .. })), "no node takes its slots");
        }
        assert_eq!(owners(&driver), [1, 2, 3]);
    }
    for node in [3, 1, 2] {
        driver.join(member(node, 2, 7000)).unwrap();
        driver.beat(node, 2).unwrap();
        assert_eq!(owners(&driver), [1, 2, 3], "its slots had no new owner");
    }
    let states: Vec<_> = driver.cluster.members().map(|view| view.state).collect();
    assert!(states.iter().all(|state| *state != MemberState::Draining), "{states:?}");
}

#[test]
fn join_waits_for_heartbeats_of_the_others() {
    let mut driver = three();
    driver.sleep(50 * MS);
    admit(&mut driver, 4);
    assert_eq!(owners(&driver), [1, 2, 3]);
    without_3(&mut driver, 1);
    assert_eq!(owners(&driver), [1, 2, 3]);
    follow(&mut driver, &[4]);
    assert_eq!(owners(&driver), [1, 2, 3]);
    follow(&mut driver, &[3]);
    assert_eq!(owners(&driver), [1, 2, 3, 4]);
}

#[test]
fn only_live_members_can_report_settled() {
    let mut driver = two(patient());
    assert!(matches!(settled(&mut driver, 9, 1), Err(Rejection::Unknown { .. })));
    driver.handle(Input::Leave { node: NodeId(1), incarnation: Incarnation(1) }).unwrap();
    assert!(matches!(settled(&mut driver, 1, 1), Err(Rejection::Ended { .. })));
}

#[test]
fn undrain_restores_the_share_after_the_migrations() {
    let mut driver = two(patient());
    all_settled(&mut driver);
    drain(&mut driver, 2);
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [1]);
    let undrain = |driver: &mut Driver, incarnation: u64| {
        driver.handle(Input::Undrain { node: NodeId(2), incarnation: Some(Incarnation(incarnation)) })
    };
    assert!(undrain(&mut driver, 9).is_err(), "an unknown incarnation");
    undrain(&mut driver, 1).unwrap();
    assert_eq!(owners(&driver), [1], "node 1 has not settled");
    all_settled(&mut driver);
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [1, 2]);
    let epoch = driver.published.epoch;
    undrain(&mut driver, 1).unwrap();
    assert_eq!(driver.published.epoch, epoch, "it was not drained any more");
    let unknown = driver.handle(Input::Undrain { node: NodeId(7), incarnation: None });
    assert!(matches!(unknown, Err(Rejection::Unknown { .. })));
}

/// First incarnation of a line, which hands its memory over.
const LINE: u64 = 1 << 20;

/// Joins an incarnation of node 2, and reports as an agent does until its first heartbeat.
fn replace_2(driver: &mut Driver, incarnation: u64) {
    driver.join(member(2, incarnation, 7000)).unwrap();
    settle_2(driver, incarnation, 0);
    driver.beat(2, incarnation).unwrap();
}

fn settle_2(driver: &mut Driver, incarnation: u64, epoch: u64) {
    let incarnation = Incarnation(incarnation);
    driver.handle(Input::Settled { node: NodeId(2), incarnation, epoch: Epoch(epoch) }).unwrap();
}

fn is_draining_2(driver: &mut Driver, incarnation: u64) -> bool {
    match driver.handle(Input::PrepareLeave { node: NodeId(2), incarnation: Incarnation(incarnation) }) {
        Ok(Reply::Moves(moves)) => moves.draining,
        other => panic!("{other:?}"),
    }
}

/// Returns a cluster of two owners, the second of which is the first of a line.
fn two_with_a_line() -> Driver {
    let mut driver = two(patient());
    replace_2(&mut driver, LINE);
    let epoch = driver.published.epoch.0;
    settled(&mut driver, 1, epoch).unwrap();
    settle_2(&mut driver, LINE, epoch);
    assert_eq!(owners(&driver), [1, 2]);
    driver
}

#[test]
fn a_drained_node_stays_drained_over_a_handover_until_it_restarts() {
    let mut driver = two_with_a_line();
    drain(&mut driver, 2);
    let epoch = driver.published.epoch.0;
    settled(&mut driver, 1, epoch).unwrap();
    settle_2(&mut driver, LINE, epoch);
    assert_eq!(owners(&driver), [1]);
    for handovers in 1..4 {
        let since = driver.cluster.map().former.as_ref().map(|former| former.since);
        replace_2(&mut driver, LINE + handovers);
        assert!(is_draining_2(&mut driver, LINE + handovers));
        assert_eq!(driver.in_map(), [(1, 1), (2, LINE + handovers)]);
        assert_eq!(driver.cluster.map().former.as_ref().map(|former| former.since), since, "no slot moves");
        driver = driver.restart();
        assert_eq!((owners(&driver), driver.state(2)), (vec![1], Some(MemberState::Draining)), "it is durable");
    }
    // Another line is a restart, which ends the drain.
    replace_2(&mut driver, 2 * LINE);
    assert_eq!(driver.state(2), Some(MemberState::Active));
}

#[test]
fn a_node_hands_over_while_its_drain_waits_and_gives_its_slots_away_afterwards() {
    let mut driver = two_with_a_line();
    drain(&mut driver, 2);
    assert_eq!(owners(&driver), [1, 2], "it is unknown which takers live");
    assert!(is_draining_2(&mut driver, LINE));
    replace_2(&mut driver, LINE + 1);
    assert_eq!(owners(&driver), [1, 2], "the successor may not have its slots back yet");
    let follow = |driver: &mut Driver| {
        let epoch = driver.published.epoch.0;
        settled(driver, 1, epoch).unwrap();
        settle_2(driver, LINE + 1, epoch);
    };
    (0..2).for_each(|_| follow(&mut driver));
    assert_eq!((owners(&driver), driver.state(2)), (vec![1], Some(MemberState::Draining)));
    driver.handle(Input::Undrain { node: NodeId(2), incarnation: None }).unwrap();
    (0..2).for_each(|_| follow(&mut driver));
    assert_eq!((owners(&driver), driver.state(2)), (vec![1, 2], Some(MemberState::Active)));
}

#[test]
fn undrain_is_durable() {
    let mut driver = two(patient());
    all_settled(&mut driver);
    drain(&mut driver, 2);
    driver.handle(Input::Undrain { node: NodeId(2), incarnation: None }).unwrap();
    let driver = driver.restart();
    let states: Vec<_> = driver.cluster.members().map(|view| view.state).collect();
    assert!(states.iter().all(|state| *state != MemberState::Draining), "{states:?}");
}

/// Sends a heartbeat of each of these nodes every 100 ms, without settled reports.
fn beats(driver: &mut Driver, nodes: &[u64], times: u64) {
    for _ in 0..times {
        driver.sleep(100 * MS);
        nodes.iter().for_each(|node| drop(driver.beat(*node, 1).unwrap()));
    }
}

#[test]
fn incarnation_without_a_heartbeat_is_not_proven_alive() {
    let mut driver = three();
    for _ in 0..60 {
        beats(&mut driver, &[1, 2, 3], 1);
        all_settled(&mut driver);
    }
    // No migration is in progress or waited for any more.
    driver.join(member(3, 2, 7000)).unwrap();
    drain(&mut driver, 1);
    follow(&mut driver, &[1, 2]);
    assert_eq!(owners(&driver), [1, 2, 3], "its process may have ended again");
    let epoch = driver.published.epoch;
    driver.handle(Input::Settled { node: NodeId(3), incarnation: Incarnation(2), epoch }).unwrap();
    assert_eq!(owners(&driver), [2, 3]);
}

#[test]
fn a_probe_ends_when_no_member_is_left_to_own_slots() {
    let mut driver = two(patient());
    all_settled(&mut driver);
    drain(&mut driver, 1);
    for _ in 0..60 {
        beats(&mut driver, &[1], 1);
        follow(&mut driver, &[1]);
    }
    assert_eq!(owners(&driver), [1], "node 2 is dead");
    admit(&mut driver, 3);
    assert_eq!(owners(&driver), [1], "another probe");
    follow(&mut driver, &[3]);
    assert_eq!(owners(&driver), [3]);
}

#[test]
fn after_the_longest_wait_only_recent_heartbeats_count() {
    let mut driver = three();
    drain(&mut driver, 1);
    follow(&mut driver, &[1, 3]);
    beats(&mut driver, &[1, 2, 3], 46);
    beats(&mut driver, &[1, 2], 4);
    driver.sleep(MS);
    driver.handle(Input::Tick).unwrap();
    assert_eq!(owners(&driver), [1, 2, 3], "node 3 is silent");
    beats(&mut driver, &[1, 2], 3);
    assert_eq!(owners(&driver), [2], "it was dead");
}

#[test]
fn stopped_control_plane_restarts_the_probe() {
    let mut driver = three();
    drain(&mut driver, 1);
    follow(&mut driver, &[1, 2]);
    // Heartbeats wait unread, for longer than the wait for answers.
    driver.now_ns += 6000 * MS;
    driver.handle(Input::Tick).unwrap();
    assert_eq!(owners(&driver), [1, 2, 3], "it is unknown which nodes died meanwhile");
    follow(&mut driver, &[1, 2]);
    assert_eq!(owners(&driver), [1, 2, 3]);
    follow(&mut driver, &[3]);
    assert_eq!(owners(&driver), [2, 3]);
}

#[test]
fn member_with_refused_ports_gets_no_slots() {
    let mut driver = Driver::new(ClusterConfig { replicas: 2, ..patient() });
    for node in 1..=3 {
        let devices = Input::AttachDevices { node: NodeId(node), incarnation: Incarnation(1), devices: 7 };
        driver.handle(devices).unwrap();
        admit(&mut driver, node);
        (0..3).for_each(|_| all_settled(&mut driver));
    }
    assert_eq!(owners(&driver), [1, 2, 3]);
    drain(&mut driver, 1);
    follow(&mut driver, &[3]);
    driver.sleep(100 * MS);
    driver.beat(1, 1).unwrap();
    driver.sleep(60 * MS);
    driver.handle(Input::Refused { node: NodeId(3), incarnation: Incarnation(1) }).unwrap();
    assert_eq!(driver.in_map().len(), 3, "node 2 may have died with it");
    follow(&mut driver, &[2]);
    assert_eq!(owners(&driver), [1, 2, 3]);
    (1..=2).for_each(|node| drop(driver.beat(node, 1).unwrap()));
    assert_eq!(driver.in_map().len(), 2);
}

#[test]
fn members_that_need_long_to_answer_delay_a_change_by_a_few_rounds() {
    let mut driver = three();
    drain(&mut driver, 1);
    for round in 0..2 {
        assert_eq!(owners(&driver), [1, 2, 3], "round {round}");
        beats(&mut driver, &[1, 2, 3], 5);
        all_settled(&mut driver);
    }
    assert_eq!(owners(&driver), [2, 3]);
}

/// Announces that a node is about to end; returns the number of other unsettled owners, and true if the node itself is.
fn ends(driver: &mut Driver, node: u64) -> (u32, bool) {
    match driver.handle(Input::PrepareLeave { node: NodeId(node), incarnation: Incarnation(1) }) {
        Ok(Reply::Moves(Moves { unsettled, behind, .. })) => (unsettled, behind),
        other => panic!("{other:?}"),
    }
}

#[test]
fn slots_of_a_node_that_is_about_to_end_do_not_move() {
    let mut driver = two(patient());
    all_settled(&mut driver);
    assert_eq!(ends(&mut driver, 2), (0, false));
    // A node that is to give its slots away, and one that is to get some.
    assert!(
        driver.handle(Input::Drain { node: NodeId(1), incarnation: None }).is_err(),
        "no node is left to take them"
    );
    admit(&mut driver, 3);
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [1, 2], "node 2 would lose slots that no node fetches");
    // It repeats the announcement while it waits, and the announcement expires after the last one.
    for _ in 0..10 {
        driver.sleep(config().heartbeat_interval_ns);
        (1..=3).for_each(|node| drop(driver.beat(node, 1)));
        assert_eq!(ends(&mut driver, 2), (0, false));
        all_settled(&mut driver);
        assert_eq!(owners(&driver), [1, 2]);
    }
    driver.sleep(ENDS_INTERVALS * config().heartbeat_interval_ns);
    (1..=3).for_each(|node| drop(driver.beat(node, 1)));
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [1, 2, 3], "it did not end");
}

#[test]
fn a_node_that_is_about_to_end_learns_that_slots_have_moved_to_it() {
    let mut driver = two(patient());
    all_settled(&mut driver);
    drain(&mut driver, 1);
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [2], "all of them have followed the probe");
    assert_eq!(ends(&mut driver, 2), (0, true), "it has not received the map with its new slots");
    assert_eq!(ends(&mut driver, 1), (1, true));
    let epoch = driver.published.epoch.0;
    settled(&mut driver, 1, epoch).unwrap();
    assert_eq!(ends(&mut driver, 1), (1, false));
    settled(&mut driver, 2, epoch).unwrap();
    assert_eq!(ends(&mut driver, 2), (0, false));
    assert_eq!(ends(&mut driver, 1), (0, false));
}

#[test]
fn a_drained_node_that_is_about_to_end_loses_no_slots_any_more() {
    let mut driver = two(patient());
    all_settled(&mut driver);
    drain(&mut driver, 1);
    assert_eq!(ends(&mut driver, 1), (0, false));
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [1, 2], "slots that it gave away now would be lost with it");
    // If it continues after all, a new probe decides.
    driver.sleep(ENDS_INTERVALS * config().heartbeat_interval_ns);
    (1..=2).for_each(|node| drop(driver.beat(node, 1)));
    all_settled(&mut driver);
    assert_eq!(owners(&driver), [2]);
}

#[test]
fn wait_for_an_end_times_out() {
    let interval_ns = config().heartbeat_interval_ns;
    let mut driver = two(patient());
    all_settled(&mut driver);
    drain(&mut driver, 1);
    ends(&mut driver, 2);
    all_settled(&mut driver);
    driver.sleep(interval_ns);
    (1..=2).for_each(|node| drop(driver.beat(node, 1)));
    ends(&mut driver, 2);
    let held = driver.published.epoch;
    driver.sleep(ENDS_INTERVALS * interval_ns);
    assert!(driver.published.epoch > held, "another probe has begun");
}

#[test]
fn an_answer_after_a_wait_for_an_end_is_measured_from_a_new_probe() {
    let interval_ns = config().heartbeat_interval_ns;
    let mut driver = two(patient());
    all_settled(&mut driver);
    drain(&mut driver, 1);
    let beats = |driver: &mut Driver, node_ends: bool| {
        driver.sleep(interval_ns);
        (1..=2).for_each(|node| drop(driver.beat(node, 1)));
        if node_ends {
            ends(driver, 2);
        }
    };
    for _ in 0..10 {
        beats(&mut driver, true);
        all_settled(&mut driver);
    }
    for _ in 0..ENDS_INTERVALS {
        beats(&mut driver, false);
    }
    let probe = driver.published.epoch;
    for _ in 0..5 {
        beats(&mut driver, false);
    }
    assert_eq!(driver.published.epoch, probe, "no member has answered");
    settled(&mut driver, 2, probe.0).unwrap();
    assert_eq!(owners(&driver), [1, 2], "too late for the probe, however long the one before had waited");
    follow(&mut driver, &[2]);
    assert_eq!(owners(&driver), [2]);
}

//! Silent members: the evidence for their deaths.

use crate::support;

use kvplane_cluster::{ClusterConfig, Input};
use kvplane_proto::ids::{Incarnation, NodeId};
use support::{Driver, MS, config};

fn refused(driver: &mut Driver, node: u64) {
    let (node, incarnation) = (NodeId(node), Incarnation(5));
    driver.handle(Input::Refused { node, incarnation }).unwrap();
}

#[test]
fn a_silent_member_whose_ports_refuse_is_dead_where_slots_have_two_owners() {
    let mut driver = Driver::new(ClusterConfig { replicas: 2, ..config() });
    (1..=2).for_each(|node| driver.admit(node, 5));
    driver.handle(Input::AttachDevices { node: NodeId(3), incarnation: Incarnation(5), devices: 7 }).unwrap();
    driver.admit(3, 5);
    driver.sleep(50 * MS);
    refused(&mut driver, 1);
    assert_eq!(driver.in_map().len(), 3, "it sent a heartbeat recently");
    driver.sleep(61 * MS);
    driver.beat(2, 5).unwrap();
    (1..=3).for_each(|node| refused(&mut driver, node));
    assert_eq!(driver.in_map().len(), 3, "3 has a device, and may be dead as 1 is");
    // Records on a device count only if its node returns before its slots pass to other owners: it has two intervals
    // for that.
    driver.sleep(100 * MS);
    driver.beat(2, 5).unwrap();
    refused(&mut driver, 3);
    assert_eq!((driver.in_map(), driver.lost.as_slice()), (vec![(2, 5)], &[(1, 5), (3, 5)][..]), "by one map");
    let mut driver = Driver::new(config());
    (1..=2).for_each(|node| driver.admit(node, 5));
    driver.sleep(200 * MS);
    refused(&mut driver, 1);
    assert_eq!(driver.in_map().len(), 2, "no member has its slots");
}

/// A restarted control plane gives every member a grace, except those that died meanwhile.
#[test]
fn a_member_that_died_while_the_control_plane_was_away_is_lost_when_its_ports_refuse() {
    for replicas in [1, 2] {
        let mut driver = Driver::new(ClusterConfig { replicas, ..config() });
        (1..=2).for_each(|node| driver.admit(node, 5));
        driver.handle(Input::AttachDevices { node: NodeId(3), incarnation: Incarnation(5), devices: 7 }).unwrap();
        driver.admit(3, 5);
        let mut driver = driver.restart();
        driver.sleep(150 * MS);
        driver.beat(2, 5).unwrap();
        (1..=3).for_each(|node| refused(&mut driver, node));
        assert_eq!(driver.in_map().len(), 3, "they may not have reconnected yet");
        driver.sleep(51 * MS);
        (2..=3).for_each(|node| refused(&mut driver, node));
        assert_eq!(driver.in_map().len(), 3, "2 sent a heartbeat, and the device of 3 is worth the grace");
        refused(&mut driver, 1);
        assert_eq!((driver.in_map(), driver.lost.as_slice()), (vec![(2, 5), (3, 5)], &[(1, 5)][..]));
    }
}

fn unanswered(driver: &mut Driver, node: u64) {
    let (node, incarnation) = (NodeId(node), Incarnation(5));
    driver.handle(Input::Unanswered { node, incarnation }).unwrap();
}

#[test]
fn unanswering_member_is_lost_after_two_intervals_while_others_are_heard() {
    let start = || {
        let mut driver = Driver::new(ClusterConfig { replicas: 2, ..config() });
        driver.handle(Input::AttachDevices { node: NodeId(3), incarnation: Incarnation(5), devices: 7 }).unwrap();
        (1..=3).for_each(|node| driver.admit(node, 5));
        driver
    };
    for silent in [1, 3] {
        let mut driver = start();
        driver.sleep(150 * MS);
        (1..=3).filter(|node| *node != silent).for_each(|node| drop(driver.beat(node, 5).unwrap()));
        unanswered(&mut driver, silent);
        assert_eq!(driver.in_map().len(), 3, "one heartbeat was missed: it may be slow");
        driver.sleep(51 * MS);
        unanswered(&mut driver, 2);
        assert_eq!(driver.in_map().len(), 3, "2 sent a heartbeat");
        unanswered(&mut driver, silent);
        assert_eq!((driver.in_map().len(), driver.lost.as_slice()), (2, &[(silent, 5)][..]));
    }
    // A control plane that receives no heartbeats may itself be cut off.
    let mut driver = start();
    driver.sleep(201 * MS);
    (1..=3).for_each(|node| unanswered(&mut driver, node));
    assert_eq!(driver.in_map().len(), 3);
    driver.beat(1, 5).unwrap();
    unanswered(&mut driver, 2);
    assert_eq!(driver.in_map().len(), 3, "half of the others send heartbeats, and 3 may be dead, too");
    driver.sleep(100 * MS);
    assert_eq!(driver.in_map().len(), 2, "the wait for 3 is over");
    // Without a replica owner, no other node can take over.
    let mut driver = Driver::new(config());
    (1..=2).for_each(|node| driver.admit(node, 5));
    driver.sleep(150 * MS);
    driver.beat(2, 5).unwrap();
    driver.sleep(100 * MS);
    unanswered(&mut driver, 1);
    assert_eq!(driver.in_map().len(), 2);
}

/// Peers may report members that the control plane cannot probe; a report counts only if they send no heartbeats
/// either.
#[test]
fn reported_member_is_lost_after_two_intervals_if_its_ports_cannot_be_probed() {
    let told = |driver: &mut Driver, node: u64, first_hand: bool| {
        let (node, incarnation) = (NodeId(node), Incarnation(5));
        let input =
            if first_hand { Input::Answered { node, incarnation } } else { Input::Reported { node, incarnation } };
        driver.handle(input).unwrap();
    };
    let start = |replicas| {
        let mut driver = Driver::new(ClusterConfig { replicas, ..config() });
        (1..=3).for_each(|node| driver.admit(node, 5));
        told(&mut driver, 3, true);
        driver
    };
    let mut driver = start(2);
    driver.sleep(150 * MS);
    (1..=3).for_each(|node| told(&mut driver, node, false));
    (2..=3).for_each(|node| drop(driver.beat(node, 5).unwrap()));
    assert_eq!(driver.in_map().len(), 3, "one heartbeat was missed: it may be slow");
    driver.sleep(51 * MS);
    driver.beat(2, 5).unwrap();
    assert_eq!((driver.in_map(), driver.lost.as_slice()), (vec![(2, 5), (3, 5)], &[(1, 5)][..]));
    // A member that sends heartbeats is not lost despite reports, nor is one whose ports answer, although it is slow.
    driver.sleep(300 * MS);
    driver.beat(2, 5).unwrap();
    (2..=3).for_each(|node| told(&mut driver, node, false));
    assert_eq!(driver.in_map().len(), 2);
    // Old reports do not count, nor do reports while no heartbeats arrive at all, or no node could take over.
    let mut driver = start(2);
    told(&mut driver, 1, false);
    driver.sleep(250 * MS);
    driver.beat(2, 5).unwrap();
    assert_eq!(driver.in_map().len(), 3);
    driver.sleep(250 * MS);
    told(&mut driver, 1, false);
    assert_eq!(driver.in_map().len(), 3);
    let mut driver = start(1);
    driver.sleep(250 * MS);
    (2..=3).for_each(|node| drop(driver.beat(node, 5).unwrap()));
    told(&mut driver, 1, false);
    assert_eq!(driver.in_map().len(), 3);
}

/// Where packets to a member are lost, but not those from it, one more heartbeat arrives after its ports fell silent.
#[test]
fn member_whose_ports_are_silent_for_longer_is_lost_after_a_missed_heartbeat() {
    let answered = |driver: &mut Driver, node: u64| {
        let (node, incarnation) = (NodeId(node), Incarnation(5));
        driver.handle(Input::Answered { node, incarnation }).unwrap();
    };
    let start = || {
        let mut driver = Driver::new(ClusterConfig { replicas: 2, ..config() });
        (1..=3).for_each(|node| driver.admit(node, 5));
        (1..=3).for_each(|node| answered(&mut driver, node));
        driver
    };
    // The ports of 1 are silent from here on, and those of 2 but for a moment.
    let mut driver = start();
    for turn in 0..3 {
        (1..=2).for_each(|node| unanswered(&mut driver, node));
        if turn == 2 {
            answered(&mut driver, 2);
        }
        (if turn == 0 { 1 } else { 2 }..=3).for_each(|node| drop(driver.beat(node, 5).unwrap()));
        driver.sleep(38 * MS);
    }
    (2..=3).for_each(|node| drop(driver.beat(node, 5).unwrap()));
    assert_eq!(driver.in_map().len(), 3);
    unanswered(&mut driver, 1);
    assert_eq!((driver.in_map().len(), driver.lost.as_slice()), (2, &[(1, 5)][..]), "its heartbeat is late by 4 ms");
    driver.sleep(115 * MS);
    driver.beat(3, 5).unwrap();
    unanswered(&mut driver, 2);
    assert_eq!(driver.in_map().len(), 2, "its ports have answered since, and it has missed one heartbeat only");
    driver.sleep(42 * MS);
    driver.beat(3, 5).unwrap();
    unanswered(&mut driver, 2);
    assert_eq!(driver.in_map().len(), 2, "157 ms of missing heartbeats, and 42 ms of ports");
    driver.sleep(2 * MS);
    unanswered(&mut driver, 2);
    assert_eq!(driver.in_map(), [(3, 5)]);
}

/// Ports that a client finds silent are probed before the heartbeats are late.
#[test]
fn reported_members_whose_ports_have_answered_are_to_be_probed() {
    let mut driver = Driver::new(ClusterConfig { replicas: 2, ..config() });
    (1..=3).for_each(|node| driver.admit(node, 5));
    let reported_silent = |driver: &Driver| -> Vec<u64> {
        driver.cluster.reported_silent(driver.now_ns).map(|member| member.node.0).collect()
    };
    let (node, incarnation) = (NodeId(1), Incarnation(5));
    driver.handle(Input::Reported { node, incarnation }).unwrap();
    assert!(reported_silent(&driver).is_empty(), "its ports cannot be reached");
    driver.handle(Input::Answered { node, incarnation }).unwrap();
    assert_eq!(reported_silent(&driver), [1]);
    driver.sleep(201 * MS);
    assert!(reported_silent(&driver).is_empty(), "the report is old");
    assert_eq!(driver.in_map().len(), 3);
}

//! Nodes that go and come back with their devices: whose the slots are meanwhile, and what the map tells of that.

mod support;

use kvplane_cluster::{Input, MemberState};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use support::{Driver, MS, config};

fn attach(driver: &mut Driver, node: u64, incarnation: u64) {
    let input = Input::AttachDevices { node: NodeId(node), incarnation: Incarnation(incarnation), devices: 7 };
    driver.handle(input).expect("its devices are taken note of");
}

fn restart(driver: &mut Driver, node: u64, incarnation: u64) {
    let input = Input::Restart { node: NodeId(node), incarnation: Incarnation(incarnation) };
    driver.handle(input).expect("it may go");
}

#[test]
fn a_restart_in_order_of_a_node_with_devices_moves_no_slot() {
    let mut driver = Driver::new(config());
    for node in 1..=3 {
        attach(&mut driver, node, 5);
        driver.admit(node, 5);
    }
    let since = driver.cluster.layout_since();
    // One after the other, at once.
    for node in 1..=3 {
        restart(&mut driver, node, 5);
        driver.sleep(250 * MS);
        attach(&mut driver, node, 6);
        driver.admit(node, 6);
        (1..=3).for_each(|other| drop(driver.beat(other, if other > node { 5 } else { 6 })));
    }
    assert_eq!(driver.in_map(), [(1, 6), (2, 6), (3, 6)]);
    assert_eq!((driver.cluster.layout_since(), driver.cluster.counters().restarts), (since, 3));
    // From another place too: nothing is heard of the life before any more.
    restart(&mut driver, 3, 6);
    attach(&mut driver, 3, 7);
    driver.join(support::member(3, 7, 7900)).expect("it is taken at once");
}

#[test]
fn whose_next_life_does_not_come_is_dead_at_the_deadline() {
    let mut driver = Driver::new(config());
    attach(&mut driver, 1, 5);
    (1..=2).for_each(|node| driver.admit(node, 5));
    driver.sleep(90 * MS);
    restart(&mut driver, 1, 5);
    for _ in 0..5 {
        driver.sleep(100 * MS);
        driver.beat(2, 5).expect("it is alive");
        driver.handle(Input::Refused { node: NodeId(1), incarnation: Incarnation(5) }).expect("a live member");
    }
    assert_eq!(driver.in_map(), [(1, 5), (2, 5)]);
    driver.sleep(99 * MS);
    driver.beat(2, 5).expect("it is alive");
    driver.sleep(2 * MS);
    assert_eq!((driver.in_map(), driver.state(1)), (vec![(2, 5)], Some(MemberState::Dead)));
}

#[test]
fn who_has_no_devices_or_is_drained_leaves_at_once() {
    let mut driver = Driver::new(config());
    (1..=2).for_each(|node| driver.admit(node, 5));
    attach(&mut driver, 3, 5);
    driver.admit(3, 5);
    driver.handle(Input::Drain { node: NodeId(3), incarnation: None }).expect("others own slots too");
    restart(&mut driver, 1, 5);
    restart(&mut driver, 3, 5);
    assert_eq!(driver.in_map(), [(2, 5)]);
    assert_eq!((driver.cluster.counters().restarts, driver.cluster.counters().leaves), (0, 2));
}

#[test]
fn slots_are_their_last_owners_while_there_are_none() {
    let mut driver = Driver::new(config());
    (1..=2).for_each(|node| driver.admit(node, 5));
    let since = driver.cluster.layout_since();
    driver.sleep(2000 * MS);
    assert_eq!((driver.in_map(), driver.cluster.layout_since()), (vec![], since), "nobody was given anything");
    driver.admit(2, 6);
    let former = driver.published.former.clone().expect("there was a layout before");
    let owners: Vec<(NodeId, Incarnation)> =
        former.claims.iter().map(|claim| (claim.node, claim.incarnation)).collect();
    assert_eq!(owners, [(NodeId(1), Incarnation(5)), (NodeId(2), Incarnation(5))]);
    assert_eq!((former.from, former.since), (since, Epoch(driver.published.epoch.0)));
    assert_eq!(former.began, [(NodeId(2), Incarnation(6))]);
}

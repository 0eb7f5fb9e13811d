//! Absences of nodes with SSDs: stopped and restarted one after the other, and away for so long that others take over
//! their slots.

use std::collections::BTreeSet;

use kvplane::{Client, PutOptions};

use crate::ssd::objects as ssd;
use crate::support::{Process, Way, Workplace, health, text, wait_until};

const KEYS: usize = 240;

fn name(key: usize) -> String {
    format!("object-{key}")
}

fn value(key: usize, round: usize) -> Vec<u8> {
    format!("{round}-{key} ").repeat(2000).into_bytes()
}

fn node(place: &Workplace, number: u64) -> Process {
    node_with(place, number, &[])
}

fn node_with(place: &Workplace, number: u64, more: &[&str]) -> Process {
    node_of(place, number, "64M", more)
}

fn node_of(place: &Workplace, number: u64, ssd_bytes: &str, more: &[&str]) -> Process {
    let ssd = format!("{}:{ssd_bytes}", text(&place.path(&format!("ssd-{number}"))));
    let words = ["--pool", "32M", "--shards", "2", "--metrics-port", "0", "--ssd", &ssd, "--ssd-ack", "buffered"];
    place.node(number, &[&words, more].concat())
}

/// Returns the object under a key, once a node answers.
fn found(client: &mut Client, key: usize) -> Option<Vec<u8>> {
    wait_until(|| client.get(name(key).as_bytes()).ok()).expect("an answer")
}

/// Starts a cluster of three nodes with an object under each key, with this number of replicas.
fn cluster(place: &Workplace, replicas: u8) -> (Process, Vec<Process>, Client) {
    let (state, owners) = (place.path("state"), replicas.to_string());
    let control = Process::start(place.command(&["control", "--state", text(&state), "--replicas", &owners]));
    control.wait_for("metrics on");
    let nodes: Vec<Process> = (1..=3).map(|number| node(place, number)).collect();
    settled(&control, 3);
    let mut client = place.client(Way::Tcp);
    for key in 0..KEYS {
        let several = replicas > 1;
        let replicas = if several { 2 } else { 0 };
        let options = PutOptions { replicas, wait_replicas: replicas, replace: several, ..PutOptions::default() };
        let mut put = || client.replicas().put(name(key).as_bytes(), &value(key, 0), &options).ok();
        wait_until(|| put().filter(|(_, there)| !several || *there == 2)).expect("it is taken");
    }
    (control, nodes, client)
}

/// Waits until this number of nodes are members.
fn settled(control: &Process, members: u64) {
    let here = wait_until(|| (health(control.http())["members"] == members).then_some(()));
    assert_eq!(here, Some(()), "{}", health(control.http()));
}

/// Asserts that every object exists as first put. An object that is not recovered or fetched yet is a miss.
fn assert_all(client: &mut Client, why: &str) {
    for key in 0..KEYS {
        let there = wait_until(|| found(client, key).filter(|bytes| *bytes == value(key, 0)));
        assert!(there.is_some(), "object {key} {why}");
    }
}

#[test]
fn nodes_that_are_stopped_and_started_one_after_the_other_lose_nothing() {
    let place = Workplace::new("rolling");
    let (_control, mut nodes, mut client) = cluster(&place, 1);
    for number in [2, 1, 3] {
        assert!(nodes[number - 1].stop().success());
        nodes[number - 1] = node(&place, number as u64);
    }
    assert_all(&mut client, "was acknowledged");
}

/// A new owner that has a copy in memory already writes it before the drained node frees the object on its SSD.
#[test]
fn objects_on_the_ssd_of_a_drained_node_move_to_ssds_of_others() {
    let place = Workplace::new("heirs");
    let (_control, mut nodes, mut client) = cluster(&place, 2);
    place.run(&["ctl", "drain", "1", "--wait", "60"]).well();
    assert_all(&mut client, "has two copies");
    Process::kill_all(&mut nodes);
    nodes.truncate(1);
    nodes.extend((2..=3).map(|number| node(&place, number)));
    assert_all(&mut client, "was on the SSDs of the others");
}

/// Objects of several stripes exceed the memory of the nodes that import them: some wait for memory there.
#[test]
fn long_objects_of_a_drained_node_migrate_one_after_the_other() {
    let place = Workplace::new("long-moves");
    let control = Process::start(place.command(&["control", "--state", text(&place.path("state"))]));
    control.wait_for("metrics on");
    let _nodes: Vec<Process> = (1..=3).map(|number| node_of(&place, number, "256M", &[])).collect();
    settled(&control, 3);
    let mut client = place.client(Way::Tcp);
    let long = |key: usize| format!("{key:02} ").repeat(1_400_000);
    for key in 0..16 {
        wait_until(|| client.put(name(key).as_bytes(), long(key).as_bytes()).ok()).expect("it is taken");
    }
    let said = place.run(&["ctl", "drain", "1", "--wait", "60"]).text();
    assert!(said.contains("node 1 is drained: it has no objects left"), "{said}");
    for key in 0..16 {
        let there = wait_until(|| found(&mut client, key).filter(|bytes| bytes == long(key).as_bytes()));
        assert!(there.is_some(), "object {key}");
    }
}

/// No node is left to take over the slots.
#[test]
fn nodes_that_are_all_drained_and_stopped_at_once_lose_nothing() {
    let place = Workplace::new("drain-all");
    let (_control, mut nodes, mut client) = cluster(&place, 1);
    for number in 1..=3 {
        assert!(nodes[number - 1].stop().success());
        nodes[number - 1] = node_with(&place, number as u64, &["--drain", "60"]);
    }
    nodes.iter().for_each(|node| node.signal("TERM"));
    nodes.iter_mut().for_each(|node| assert!(node.ended().success()));
    let _again: Vec<Process> = (1..=3).map(|number| node(&place, number)).collect();
    assert_all(&mut client, "was acknowledged");
}

/// Objects that a node has yet to fetch from a stopping one would be lost.
#[test]
fn a_stopping_node_waits_until_others_have_fetched_their_slots() {
    let place = Workplace::new("finish");
    let (_control, mut nodes, mut client) = cluster(&place, 1);
    // The transfer of its quarter takes half a second.
    let _new = place.node(4, &["--pool", "32M", "--shards", "2", "--migration-rate", "2M"]);
    assert!(nodes[0].stop().success());
    nodes[0] = node(&place, 1);
    assert_all(&mut client, "was acknowledged");
}

/// The drain's slots go to living nodes: one that restarts, or was killed, gets its part when it is back.
#[test]
fn a_drain_beside_a_node_that_restarts_loses_nothing() {
    for in_order in [true, false] {
        let place = Workplace::new("drain-restart");
        let (_control, mut nodes, mut client) = cluster(&place, 1);
        if in_order {
            assert!(nodes[2].stop().success());
        } else {
            nodes[2].kill();
        }
        place.run(&["ctl", "drain", "1"]).well();
        nodes[2] = node(&place, 3);
        assert_all(&mut client, &format!("was acknowledged; stopped in order: {in_order}"));
    }
}

#[test]
fn a_returning_node_serves_objects_that_did_not_change() {
    let place = Workplace::new("away");
    let (control, mut nodes, mut client) = cluster(&place, 1);
    nodes[1].kill();
    settled(&control, 2);
    let removed = |key: &usize| key.is_multiple_of(5);
    let replaced = |key: &usize| key % 5 == 1;
    for key in (0..KEYS).filter(removed) {
        wait_until(|| client.remove(name(key).as_bytes()).ok()).expect("somebody answers");
    }
    let options = PutOptions { replace: true, ..PutOptions::default() };
    for key in (0..KEYS).filter(replaced) {
        let put = || client.put_with(name(key).as_bytes(), &value(key, 1), &options).ok();
        wait_until(put).expect("it is taken");
    }
    let gone = (0..KEYS).filter(|key| key % 5 > 1 && found(&mut client, *key).is_none()).count();
    assert!(gone > 0, "the node that was killed had some of them");
    nodes[1] = node(&place, 2);
    settled(&control, 3);
    for key in (0..KEYS).filter(|key| !removed(key)) {
        let round = usize::from(replaced(&key));
        let back = wait_until(|| found(&mut client, key).filter(|bytes| *bytes == value(key, round)));
        assert!(back.is_some(), "object {key} of round {round} is there again");
    }
    let back: Vec<usize> = (0..KEYS).filter(removed).filter(|key| found(&mut client, *key).is_some()).collect();
    assert_eq!(back, [0; 0], "what was removed stays so");
}

/// The list retries at the killed node until another one owns its slots. The nodes that it listed before own some of
/// these, too.
#[test]
fn a_list_during_a_node_death_has_all_objects_of_the_others() {
    // One of them is listed last.
    for number in 1..=3 {
        let place = Workplace::new("list-death");
        let control =
            Process::start(place.command(&["control", "--state", text(&place.path("state")), "--replicas", "2"]));
        control.wait_for("metrics on");
        let start = |number| place.node(number, &["--pool", "32M", "--shards", "1"]);
        let mut nodes: Vec<Process> = (1..=3).map(start).collect();
        settled(&control, 3);
        let mut client = place.client(Way::Tcp);
        let options = PutOptions { replicas: 2, wait_replicas: 2, replace: true, ..PutOptions::default() };
        for key in 0..KEYS {
            // The first puts may use the map of before, with fewer owners.
            let mut put = || client.replicas().put(name(key).as_bytes(), &value(key, 0), &options).ok();
            wait_until(|| put().filter(|(_, copies)| *copies == 2)).expect("it is taken twice");
        }
        nodes[number - 1].kill();
        let listed = place.run(&["ctl", "keys"]).text();
        let listed: BTreeSet<&str> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
        let missing: Vec<String> = (0..KEYS).map(name).filter(|name| !listed.contains(name.as_str())).collect();
        assert_eq!(missing, [""; 0], "node {number} was killed");
    }
}

#[test]
fn replicas_are_restored_after_all_nodes_were_killed() {
    // The nodes come back at once, or after the control plane has expelled all of them.
    for given_up in [false, true] {
        let place = Workplace::new("copies-again");
        let (control, mut nodes, mut client) = cluster(&place, 2);
        Process::kill_all(&mut nodes);
        if given_up {
            settled(&control, 0);
        }
        nodes = (1..=3).map(|number| node(&place, number)).collect();
        let made = |nodes: &[Process]| -> f64 {
            nodes.iter().map(|node| ssd::counted(node, "kvplane_shard_replicas_made_total")).sum()
        };
        let all = wait_until(|| (made(&nodes) >= KEYS as f64).then_some(()));
        assert_eq!(all, Some(()), "{} copies; given up: {given_up}", made(&nodes));
        nodes[1].kill();
        assert_all(&mut client, &format!("had a copy; given up: {given_up}"));
    }
}

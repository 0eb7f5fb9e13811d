//! Tests of SSDs of several nodes: objects removed while another node had the slots do not come back, and damage at one
//! node is served by none.

use kvplane::Client;

use crate::ssd::objects as ssd;
use crate::support::{Process, Way, Workplace, health, text, wait_until};

const KEYS: usize = 60;

fn name(key: usize) -> String {
    format!("object-{key}")
}

/// Starts a node on the SSD.
fn with_ssd(place: &Workplace) -> Process {
    let ssd = format!("{}:64M", text(&place.path("ssd")));
    place.node(7, &["--pool", "16M", "--shards", "1", "--ssd", &ssd, "--ssd-ack", "durable"])
}

fn there(client: &mut Client, key: usize) -> bool {
    let got = wait_until(|| client.get(name(key).as_bytes()).ok()).expect("an answer");
    got.is_some_and(|bytes| {
        assert_eq!(bytes, name(key).repeat(50).into_bytes(), "object {key}");
        true
    })
}

#[test]
fn objects_removed_at_another_owner_do_not_come_back_and_others_are_kept() {
    let place = Workplace::new("ssd-slots");
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state)]));
    control.wait_for("metrics on");
    let members = |count: u64| wait_until(|| (health(control.http())["members"] == count).then_some(()));
    let mut node = with_ssd(&place);
    assert_eq!(members(1), Some(()));
    let mut client = place.client(Way::Tcp);
    for key in 0..KEYS {
        client.put(name(key).as_bytes(), name(key).repeat(50).as_bytes()).unwrap();
    }
    // The node is killed and restarted: no other node had its slots, so all objects exist.
    node.kill();
    let mut node = with_ssd(&place);
    for key in 0..KEYS {
        // An object that is not recovered yet is a miss.
        let found = wait_until(|| there(&mut client, key).then_some(()));
        assert_eq!(found, Some(()), "object {key} was durable");
    }
    // The node leaves, its slots go to another node, and half of the objects are removed there.
    assert!(node.stop().success());
    let _other = Process::start(place.command(&["node", "--pool", "8M", "--node-id", "8", "--shards", "1"]));
    assert_eq!(members(1), Some(()));
    for key in 0..KEYS / 2 {
        wait_until(|| client.remove(name(key).as_bytes()).ok()).expect("the other node answers");
    }
    // Both are members again: some slots are back.
    let _node = with_ssd(&place);
    assert_eq!(members(2), Some(()));
    let back = (0..KEYS / 2).filter(|key| there(&mut client, *key)).count();
    assert_eq!(back, 0, "objects that were removed are back");
}

/// Starts a node with an SSD and little memory.
fn small_node(place: &Workplace, number: &str) -> Process {
    let ssd = format!("{}:64M", text(&place.path(number)));
    let words = ["--node-id", number, "--ssd", &ssd, "--ssd-ack", "durable", "--ssd-promote", "15", "--ssd-scrub", "0"];
    let shape = ["node", "--pool", "8M", "--shards", "1", "--metrics-port", "0"];
    let node = Process::start(place.command(&[&shape[..], &words].concat()));
    node.wait_for(&format!("node {number} with"));
    node
}

/// There is one replica of an object, so damage at its node makes it a miss; a new put restores it.
#[test]
fn damage_at_one_node_of_two_is_a_miss_there_only() {
    let place = Workplace::new("one-of-two");
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state)]));
    control.wait_for("metrics on");
    let nodes = ["7", "8"].map(|number| small_node(&place, number));
    let both = wait_until(|| (health(control.http())["members"] == 2).then_some(()));
    assert_eq!(both, Some(()));
    let mut clients = Way::BOTH.map(|way| place.client(way));
    for key in 0..128 {
        let mut put = || clients[0].put(ssd::name(key).as_bytes(), &ssd::value(key)).ok();
        assert_eq!(wait_until(&mut put).map(drop), Some(()), "object {key}");
    }
    ssd::flip(&place.path("7"));
    for client in &mut clients {
        let there = (0..128).filter(|key| ssd::is_there(client, *key)).count();
        assert!((1..128).contains(&there), "{there} of 128 are there");
    }
    let damaged = nodes.each_ref().map(|node| ssd::counted(node, "kvplane_tier_damaged_total"));
    assert!(damaged[0] >= 1.0 && damaged[1] == 0.0, "{damaged:?}");
    for key in 0..128 {
        let [put, get] = &mut clients;
        if !ssd::is_there(put, key) {
            put.put(ssd::name(key).as_bytes(), &ssd::value(key)).unwrap();
        }
        assert!(ssd::is_there(get, key), "object {key}");
    }
}

/// A node that is started without its SSD, or with another one, may remove and replace objects on it.
#[test]
fn objects_removed_in_an_incarnation_without_the_ssd_do_not_come_back() {
    let place = Workplace::new("ssd-without");
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state)]));
    control.wait_for("metrics on");
    let (first, other) = (format!("{}:64M", text(&place.path("a"))), format!("{}:64M", text(&place.path("b"))));
    let start = |ssd: Option<&str>| {
        let ssd: Vec<&str> = ssd.map_or_else(Vec::new, |ssd| vec!["--ssd", ssd, "--ssd-ack", "durable"]);
        place.node(7, &[&["--pool", "16M", "--shards", "1", "--metrics-port", "0"][..], &ssd].concat())
    };
    let mut client = place.client(Way::Tcp);
    let get =
        |client: &mut Client, key: usize| wait_until(|| client.get(name(key).as_bytes()).ok()).expect("an answer");
    let mut done = 0;
    for between in [None, Some(&*other)] {
        let mut node = start(Some(&first));
        let keys = done..done + 20;
        done += 20;
        for key in keys.clone() {
            wait_until(|| client.put(name(key).as_bytes(), b"one").ok()).expect("it is put");
        }
        assert!(node.stop().success());
        // The same SSD is used twice more, once after a kill: all objects exist.
        let mut node = start(Some(&first));
        node.kill();
        let mut node = start(Some(&first));
        for key in keys.clone() {
            let found = wait_until(|| (get(&mut client, key).as_deref() == Some(b"one")).then_some(()));
            assert_eq!(found, Some(()), "object {key} was durable");
        }
        assert_eq!(ssd::counted(&node, "kvplane_tier_voided"), 0.0);
        assert!(node.stop().success());
        // Without the SSD, half of the objects are removed and the rest replaced.
        let mut node = start(between);
        for key in keys.clone() {
            wait_until(|| client.upsert(name(key).as_bytes(), b"two").ok()).expect("it is replaced");
            if key % 2 == 0 {
                assert_eq!(wait_until(|| client.remove(name(key).as_bytes()).ok()), Some(true), "object {key}");
            }
        }
        assert!(node.stop().success());
        let mut node = start(Some(&first));
        for key in keys {
            assert_eq!(get(&mut client, key), None, "object {key} is what it was, with {between:?} between");
        }
        // The log explains the missing hits.
        node.wait_for("the node ran without it");
        assert_eq!(ssd::counted(&node, "kvplane_tier_voided"), 1.0);
        assert!(node.stop().success());
    }
}

/// Length of a value that leaves no space for its key behind it.
const WHOLE: usize = 64 << 10;

fn whole(key: usize) -> Vec<u8> {
    (0..WHOLE).map(|at| (at ^ at >> 8 ^ (key * 37)) as u8).collect()
}

/// With an SSD, the keys of objects whose length is a multiple of 4,096 bytes are in pages of their own.
#[test]
fn objects_of_whole_blocks_keep_their_names_in_events_and_when_they_move() {
    let place = Workplace::new("ssd-names");
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state)]));
    control.wait_for("metrics on");
    let start = |number: u64| {
        let ssd = format!("{}:256M", text(&place.path(&format!("ssd-{number}"))));
        let words = ["--pool", "8M", "--shards", "1", "--migration-rate", "0", "--ssd", &ssd];
        place.node(number, &words)
    };
    let mut nodes = [start(1), start(2)];
    let both = wait_until(|| (health(control.http())["members"] == 2).then_some(()));
    assert_eq!(both, Some(()));
    let mut config = place.client_config(Way::Tcp);
    config.tenant = "acme".to_owned();
    let mut client = Client::connect(&config).unwrap();
    // There are more objects than both pools hold: some lie at the ends of the pools, too.
    for key in 0..320 {
        let put = wait_until(|| client.put(name(key).as_bytes(), &whole(key)).ok());
        assert!(put.is_some(), "object {key}");
    }
    let watcher = Process::start(place.command(&["ctl", "events", "--json"]));
    let named = |process: &Process| {
        let said = process.said();
        (said.len(), said.iter().filter(|line| line.contains("object-")).count())
    };
    let told = wait_until(|| (named(&watcher).1 >= 100).then_some(()));
    assert_eq!(told, Some(()), "of {:?} events", named(&watcher));
    nodes.iter_mut().for_each(Process::assert_alive);
    // Half of the slots migrate to the other node, and their objects are fetched on access.
    let epoch = || health(control.http())["epoch"].as_u64();
    let before = epoch();
    place.run(&["ctl", "drain", "1"]).well();
    assert!(wait_until(|| (epoch() > before).then_some(())).is_some(), "the slots change hands");
    // Objects that were read by the map before, or evicted from memory before the SSD had them, are still at their
    // former owner, and lists miss them until they are read again.
    let complete = wait_until(|| {
        for key in 0..320 {
            let got = wait_until(|| client.get(name(key).as_bytes()).ok()).expect("an answer");
            assert!(got.expect("what moved is there") == whole(key), "object {key}");
        }
        let listed = place.run(&["ctl", "--tenant", "acme", "keys"]).text();
        (listed.lines().filter(|line| line.contains("object-")).count() == 320).then_some(())
    });
    assert_eq!(complete, Some(()), "each has its name and its tenant");
    nodes.iter_mut().for_each(Process::assert_alive);
}

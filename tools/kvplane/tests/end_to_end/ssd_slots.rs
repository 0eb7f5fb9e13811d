//! An SSD whose slots were another node's meanwhile: what was removed there does not come back from here.

use std::time::Duration;

use kvplane::Client;

use crate::support::{Process, Way, Workplace, health, text, wait_until};

const KEYS: usize = 60;

fn name(key: usize) -> String {
    format!("object-{key}")
}

/// A node on the SSD; the number of one that was killed is free when the control plane has missed it.
fn with_ssd(place: &Workplace) -> Process {
    let ssd = format!("{}:64M", text(&place.path("ssd")));
    let words = ["node", "--pool", "16M", "--node-id", "7", "--shards", "1", "--ssd", &ssd, "--ssd-ack", "durable"];
    loop {
        let mut node = Process::start(place.command(&words));
        let line = node.wait_for("node");
        if line.starts_with("node 7 with") {
            return node;
        }
        assert!(line.contains("node id 7 is in use"), "{line}");
        assert!(!node.ended().success());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn there(client: &mut Client, key: usize) -> bool {
    let got = wait_until(|| client.get(name(key).as_bytes()).ok()).expect("an answer");
    got.is_some_and(|bytes| {
        assert_eq!(bytes, name(key).repeat(50).into_bytes(), "object {key}");
        true
    })
}

#[test]
fn what_was_removed_elsewhere_does_not_come_back_and_what_nobody_else_had_is_kept() {
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
    // Killed and back: nobody else had its slots, so everything is there.
    node.kill();
    let mut node = with_ssd(&place);
    for key in 0..KEYS {
        // What is not recovered yet is a miss.
        let found = wait_until(|| there(&mut client, key).then_some(()));
        assert_eq!(found, Some(()), "object {key} was durable");
    }
    // It leaves, its slots are another's, and there half of the objects are removed.
    assert!(node.stop().success());
    let _other = Process::start(place.command(&["node", "--pool", "8M", "--node-id", "8", "--shards", "1"]));
    assert_eq!(members(1), Some(()));
    for key in 0..KEYS / 2 {
        wait_until(|| client.remove(name(key).as_bytes()).ok()).expect("the other node answers");
    }
    // Both are members again: some slots are back where they were.
    let _node = with_ssd(&place);
    assert_eq!(members(2), Some(()));
    let back = (0..KEYS / 2).filter(|key| there(&mut client, *key)).count();
    assert_eq!(back, 0, "objects that were removed are back");
}

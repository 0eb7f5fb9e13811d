//! Nodes come and go in order, and what was put stays where clients find it.

use std::time::{Duration, Instant};

use kvplane::Client;

use crate::support::{Process, Way, Workplace, health, text, wait_until};

/// Objects, and how long each is.
const OBJECTS: u64 = 2000;
const BYTES: usize = 6000;

fn value(key: u64) -> Vec<u8> {
    (0..BYTES as u64).map(|at| (key.wrapping_mul(0x9e37_79b9) ^ at ^ at >> 8) as u8).collect()
}

fn name(key: u64) -> String {
    format!("moved-{key}")
}

fn control(place: &Workplace) -> Process {
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state)]));
    control.wait_for("metrics on");
    control
}

fn node(place: &Workplace, number: u64) -> Process {
    let number = number.to_string();
    let arguments = ["node", "--pool", "64M", "--shards", "2", "--node-id", &number, "--drain", "60"];
    let node = Process::start(place.command(&arguments));
    node.wait_for("node ");
    node
}

fn members(control: &Process, count: u64) {
    let there = wait_until(|| (health(control.http())["members"] == count).then_some(()));
    assert_eq!(there, Some(()), "{count} members");
}

/// What gets found.
#[derive(Default)]
struct Found {
    asked: u64,
    hits: u64,
}

impl Found {
    /// Gets every object once.
    fn sweep(&mut self, client: &mut Client) -> u64 {
        let before = self.hits;
        for key in 0..OBJECTS {
            self.asked += 1;
            if let Some(bytes) = client.get(name(key).as_bytes()).expect("a get in time") {
                assert_eq!(bytes, value(key), "{}", name(key));
                self.hits += 1;
            }
        }
        self.hits - before
    }

    /// Sweeps until `done`, and at least for so long.
    fn sweep_until(&mut self, client: &mut Client, least: Duration, mut done: impl FnMut() -> bool) {
        let start = Instant::now();
        while start.elapsed() < least || !done() {
            self.sweep(client);
            assert!(start.elapsed() < Duration::from_secs(100), "it takes too long");
        }
    }

    fn rate(&self) -> f64 {
        self.hits as f64 / self.asked as f64
    }
}

#[test]
fn hits_stay_through_a_join_and_a_leave_in_order() {
    let place = Workplace::new("moves");
    let control = control(&place);
    let mut nodes: Vec<Process> = (1..=3).map(|number| node(&place, number)).collect();
    members(&control, 3);
    let mut client = place.client(Way::Tcp);
    let mut near = place.client(Way::Shm);
    for key in 0..OBJECTS {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
    let mut steady = Found::default();
    assert_eq!(steady.sweep(&mut client), OBJECTS);

    // One more: about a quarter of the slots moves to it.
    let mut joined = Found::default();
    let newcomer = node(&place, 4);
    members(&control, 4);
    joined.sweep_until(&mut near, Duration::from_secs(3), || true);
    assert!(client.size(name(7).as_bytes()).unwrap().is_some(), "the length of what moves is told");

    // What is removed or replaced meanwhile is not brought back.
    for key in 0..20 {
        assert!(client.remove(name(key).as_bytes()).unwrap(), "{}", name(key));
        assert_eq!(client.get(name(key).as_bytes()).unwrap(), None);
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }

    // Another leaves in order, and its objects are with the others when it is gone.
    let mut left = Found::default();
    nodes[0].signal("TERM");
    left.sweep_until(&mut client, Duration::from_secs(1), || health(control.http())["members"] == 3);
    let status = nodes[0].ended();
    assert!(status.success(), "{:?}", nodes[0].said());
    let said = nodes[0].said().join("\n");
    assert!(said.contains("drained: all objects are with other nodes"), "{said}");
    let mut after = Found::default();
    after.sweep(&mut client);
    println!(
        "hit rate: steady {:.4}, while a node joined {:.4} ({} gets), while one left {:.4} ({} gets), after {:.4}",
        steady.rate(),
        joined.rate(),
        joined.asked,
        left.rate(),
        left.asked,
        after.rate()
    );
    assert!(joined.rate() >= 0.98 && left.rate() >= 0.98 && after.rate() >= 0.98);
    drop(newcomer);
}

#[test]
fn a_node_that_is_drained_by_the_operator_has_nothing_left() {
    let place = Workplace::new("drained");
    let control = control(&place);
    let _nodes: Vec<Process> = (1..=2).map(|number| node(&place, number)).collect();
    members(&control, 2);
    let mut client = place.client(Way::Tcp);
    for key in 0..200 {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
    let said = place.run(&["ctl", "drain", "2", "--wait", "30"]).text();
    assert!(said.contains("node 2 is drained"), "{said}");
    let status = place.run(&["ctl", "status"]).text();
    assert!(status.lines().any(|line| line.contains(" 2  draining ")), "{status}");
    for key in 0..200 {
        assert_eq!(client.get(name(key).as_bytes()).unwrap().as_deref(), Some(&value(key)[..]), "{}", name(key));
    }
    place.run(&["ctl", "drain", "1"]).failed(1, &["the only one with a share"]);
    place.run(&["ctl", "drain", "9"]).failed(1, &["9"]);
}

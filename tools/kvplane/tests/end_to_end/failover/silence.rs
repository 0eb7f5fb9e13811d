//! Tests of a node that is silent or dead: the longest times of gets, puts and upserts until failover.
//!
//! A halted node, a dead host and a cut cable look the same: connections are not refused, and requests are not
//! answered. Every call must succeed. `cargo x silence` repeats the tests and shows the slowest call of each kind.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use kvplane::{Client, ClientConfig, Control, PutOptions, Remote};

use crate::failover::cluster::{Cluster, NODES, PLANE};
use crate::support::{Process, Way, Workplace, health, test_of, text, wait_until};

/// Number and length of the objects that two nodes have before.
const OBJECTS: u64 = 60;
const BYTES: usize = 6000;
/// Number of callers: half of them get, and a quarter each put and upsert.
const CALLERS: u64 = 8;
/// Time of the calls after the node is gone.
const CALLING: Duration = Duration::from_millis(2500);
/// Deadline of a call: less than the longest time that a silent node stays a member.
const DEADLINE: Duration = Duration::from_millis(4500);
/// Environment variable that makes this program the callers: the cluster and the identity.
const ROLE: &str = "KVPLANE_TEST_CALLERS";

/// Returns the number of rounds.
fn rounds() -> usize {
    std::env::var("KVPLANE_SILENCE_ROUNDS").map_or(1, |count| count.parse().expect("a number"))
}

fn value(key: u64, turn: u64) -> Vec<u8> {
    (0..BYTES as u64).map(|at| (key.wrapping_mul(0x9e37_79b9) ^ turn.wrapping_mul(77) ^ at ^ at >> 8) as u8).collect()
}

fn name(key: u64) -> String {
    format!("twice-{key}")
}

/// Longest time of each kind of call, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Slowest {
    get: u128,
    put: u128,
    upsert: u128,
}

impl Slowest {
    fn or(self, other: Self) -> Self {
        let Self { get, put, upsert } = self;
        Self { get: get.max(other.get), put: put.max(other.put), upsert: upsert.max(other.upsert) }
    }
}

fn timed<T>(slowest_ms: &mut u128, call: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let outcome = call();
    *slowest_ms = begun.elapsed().as_millis().max(*slowest_ms);
    outcome
}

/// Puts the objects with two replicas: the first puts may come before the nodes know each other.
fn fill(config: &ClientConfig) {
    let mut client = Client::connect(config).unwrap();
    let twice = PutOptions { replicas: 2, replace: true, ..PutOptions::default() };
    for key in 0..OBJECTS {
        let done = wait_until(|| {
            let (_, replicas) = client.replicas().put(name(key).as_bytes(), &value(key, 0), &twice).expect("a put");
            (replicas == 2).then_some(())
        });
        assert_eq!(done, Some(()), "{} has two copies", name(key));
    }
}

/// Runs clients that are connected to all nodes while `gone` happens, and after it.
fn call(config: &ClientConfig, gone: impl FnOnce()) -> Slowest {
    let ready = Barrier::new(CALLERS as usize + 1);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS)
            .map(|number| {
                let ready = &ready;
                scope.spawn(move || caller(config, number, ready))
            })
            .collect();
        ready.wait();
        gone();
        let all = callers.into_iter().map(|caller| caller.join().expect("every call is answered"));
        all.fold(Slowest::default(), Slowest::or)
    })
}

fn caller(config: &ClientConfig, number: u64, ready: &Barrier) -> Slowest {
    let (mut client, mut slowest) = (Client::connect(config).unwrap(), Slowest::default());
    for key in 0..OBJECTS {
        assert!(client.get(name(key).as_bytes()).expect("a get").is_some());
    }
    ready.wait();
    let begun = Instant::now();
    let twice = PutOptions { replicas: 2, ..PutOptions::default() };
    for turn in 1.. {
        if begun.elapsed() >= CALLING {
            break;
        }
        // Upserts use objects of their own: a recently acknowledged object may have no replica yet.
        let (of, key) = (number % 4, (number / 4 + turn * 2) % (OBJECTS / 2));
        match of {
            0 | 1 => {
                let got = timed(&mut slowest.get, || client.get(name(key).as_bytes()));
                assert!(got.expect("a get").is_some(), "{key} had two copies");
            }
            2 => {
                let new = format!("new-{number}-{turn}");
                timed(&mut slowest.put, || client.put_with(new.as_bytes(), &value(key, turn), &twice))
                    .unwrap_or_else(|error| panic!("put of {new}: {error}"));
            }
            _ => {
                let (key, options) = (name(OBJECTS / 2 + key), PutOptions { replace: true, ..twice });
                timed(&mut slowest.upsert, || client.put_with(key.as_bytes(), &value(turn, turn), &options))
                    .unwrap_or_else(|error| panic!("upsert of {key}: {error}"));
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    slowest
}

fn show(what: &str, all: &[Slowest]) {
    let worst = all.iter().copied().fold(Slowest::default(), Slowest::or);
    println!("{what}: slowest get {} ms, put {} ms, upsert {} ms", worst.get, worst.put, worst.upsert);
    if all.len() > 1 {
        let each = |of: fn(&Slowest) -> u128| all.iter().map(of).map(|ms| ms.to_string()).collect::<Vec<_>>().join(" ");
        println!("  gets {}; puts {}; upserts {}", each(|one| one.get), each(|one| one.put), each(|one| one.upsert));
    }
}

/// Sends this signal to one of three nodes, with an SSD or without.
fn signalled(ssd: bool, signal: &str, round: usize) -> Slowest {
    let place = Workplace::new("silence");
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state), "--replicas", "2"]));
    control.wait_for("metrics on");
    let start = |number: u64| {
        let device = format!("{}:64M", text(&place.path(&format!("ssd-{number}"))));
        let with = ["--pool", "64M", "--shards", "1", "--ssd", &device];
        place.node(number, if ssd { &with } else { &with[..4] })
    };
    let nodes: Vec<Process> = (1..=3).map(start).collect();
    let members = |count: u64| {
        let there = wait_until(|| (health(control.http())["members"] == count).then_some(()));
        assert_eq!(there, Some(()), "{count} members");
    };
    members(3);
    let config = ClientConfig { deadline: DEADLINE, ..place.client_config(Way::Tcp) };
    fill(&config);
    let victim = &nodes[round % nodes.len()];
    let slowest = call(&config, || victim.signal(signal));
    members(2);
    if signal == "STOP" {
        victim.signal("CONT");
    }
    slowest
}

/// Calls do not wait until a node's heartbeats are missed for 6 s: their deadlines are shorter.
#[test]
fn a_halted_or_killed_node_is_failed_over_before_its_heartbeats_time_out() {
    for (what, ssd, signal) in [
        ("stopped", false, "STOP"),
        ("stopped, with an SSD", true, "STOP"),
        ("killed", false, "KILL"),
        ("killed, with an SSD", true, "KILL"),
    ] {
        let all: Vec<Slowest> = (0..rounds()).map(|round| signalled(ssd, signal, round)).collect();
        show(what, &all);
    }
}

/// Entry point of the callers beside a control plane in its namespace, not a test. Without the role they do nothing.
#[test]
fn callers() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let Some((cluster, identity)) = role.split_once(' ') else { panic!("{role:?} is no role") };
    let addresses = vec![format!("{PLANE}:7400").parse().unwrap()];
    let control = Control::Remote(Remote { cluster: cluster.to_owned(), addresses, identity: identity.into() });
    let config = ClientConfig { control, shared_memory: false, deadline: DEADLINE, ..ClientConfig::local(cluster) };
    fill(&config);
    let Slowest { get, put, upsert } = call(&config, || println!("calling"));
    println!("slowest {get} {put} {upsert}");
}

#[test]
fn a_disconnected_node_is_failed_over_before_its_heartbeats_time_out() {
    let mut all = Vec::new();
    for round in 0..rounds() {
        let Some(cluster) = Cluster::start() else { return };
        let victim = 1 + round as u64 % NODES;
        let mut callers = cluster.beside(&test_of(module_path!(), "callers"), ROLE, "");
        callers.wait_for("calling");
        cluster.cut(victim);
        let said = callers.wait_for("slowest ");
        let words: Vec<u128> = said.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [get, put, upsert] = words[..] else { panic!("{said:?}") };
        assert!(callers.ended().success(), "{:?}", callers.said());
        all.push(Slowest { get, put, upsert });
    }
    show(&format!("cut off, one of {NODES}"), &all);
}

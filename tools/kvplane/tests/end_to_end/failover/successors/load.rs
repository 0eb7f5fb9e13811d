//! Upgrades in a row under load, of one node and of nodes that have replicas of each other: nothing that was
//! acknowledged is lost, no byte is wrong, and no operation fails.
//!
//! `KVPLANE_UPGRADES` sets their number, `KVPLANE_UPGRADE_OBJECTS` the objects that are there besides, and
//! `KVPLANE_OTHER_PROGRAM` the program of another version, to which every other upgrade leads, and back, and whose
//! clients put and get, too.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvplane::{Client, ClientConfig, PutOptions};

use super::kept_memory::{COUNTERS, Memory, control, value};
use super::upgrades::{Successor, latest};
use crate::support::{Outcome, Process, Way, Workplace, finish, health, text, wait_until};

/// Keys of each client.
const KEYS: usize = 200;
/// Longer than any upgrade takes on a busy machine.
const DEADLINE: Duration = Duration::from_secs(100);

fn number(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |text| text.parse().expect("a number"))
}

/// Returns the program of another version, if there is one.
fn other_program() -> Option<String> {
    std::env::var("KVPLANE_OTHER_PROGRAM").ok()
}

/// Returns the program that an upgrade leads to: the other one and this one in turns, or the node's own.
fn program_of(round: usize, other: Option<&str>) -> Option<&str> {
    if round.is_multiple_of(2) { other } else { Some(env!("CARGO_BIN_EXE_kvplane")) }
}

fn key(client: usize, at: usize) -> String {
    format!("client-{client}-{at}")
}

/// One operation of a client: its kind, its end, and the time that it took.
#[derive(Clone, Copy)]
struct TimedCall {
    is_put: bool,
    ended: Instant,
    took: Duration,
}

/// Prints how long operations took that were in flight while the node was upgraded, and before.
fn print_latencies(times: &[TimedCall], upgrades: &[(Instant, Instant)]) {
    for is_put in [true, false] {
        let of = |during: bool| {
            let overlaps = |time: &&TimedCall| {
                let begun = time.ended - time.took;
                upgrades.iter().any(|(from, to)| begun <= *to && time.ended >= *from) == during
            };
            let mut all: Vec<Duration> =
                times.iter().filter(|time| time.is_put == is_put).filter(overlaps).map(|time| time.took).collect();
            all.sort_unstable();
            let at =
                |part: f64| all.get((all.len() as f64 * part) as usize).or(all.last()).map_or(0, Duration::as_micros);
            format!(
                "p50 {} µs, p99 {} µs, p99.9 {} µs, most {} µs of {}",
                at(0.5),
                at(0.99),
                at(0.999),
                at(1.0),
                all.len()
            )
        };
        let kind = if is_put { "puts" } else { "gets" };
        println!("{kind} between upgrades: {}; during: {}", of(false), of(true));
        // The slowest of each upgrade is the pause as clients see it.
        let slowest = |(from, to): &(Instant, Instant)| {
            let overlaps = |time: &&TimedCall| time.ended - time.took <= *to && time.ended >= *from;
            let calls = times.iter().filter(|time| time.is_put == is_put).filter(overlaps);
            calls.map(|time| time.took.as_millis()).max().unwrap_or(0)
        };
        let mut slowest: Vec<u128> = upgrades.iter().map(slowest).collect();
        slowest.sort_unstable();
        let over = slowest.iter().filter(|ms| **ms > 200).count();
        println!(
            "slowest of the {kind} of each upgrade: median {} ms, most {} ms, over 200 ms in {over} of {} upgrades",
            slowest[slowest.len() / 2],
            slowest[slowest.len() - 1],
            slowest.len()
        );
    }
}

/// Clients of two programs, each of which gets what the other has put.
struct OtherClients<'a> {
    place: &'a Workplace,
    other: &'a str,
}

impl OtherClients<'_> {
    fn run(&self, program: &str, arguments: &[&str], input: &[u8]) -> Outcome {
        let mut command = Command::new(program);
        command.args(arguments).args(["--cluster", &self.place.cluster, "--runtime-directory"]);
        command.arg(self.place.runtime());
        finish(command, input)
    }

    /// Puts an object by the one program, and gets it by the other, in both directions.
    fn exchange(&self, round: usize) {
        let own = env!("CARGO_BIN_EXE_kvplane");
        for (from, to, direction) in [(own, self.other, "there"), (self.other, own, "back")] {
            let (key, bytes) = (format!("{direction}-{round}"), value(round + 3));
            self.run(from, &["ctl", "put", &key, "-"], &bytes).well();
            assert!(self.run(to, &["ctl", "get", &key], &[]).well() == bytes, "{key}");
            // What was put before this upgrade is there.
            if let Some(before) = round.checked_sub(1) {
                let key = format!("{direction}-{before}");
                assert!(self.run(from, &["ctl", "get", &key], &[]).well() == value(before + 3), "{key}");
            }
        }
    }
}

/// Latest version of a key: the number that its bytes follow from, and the replicas that the put was acknowledged with.
/// Version 0 is no object.
#[derive(Clone, Copy, Default)]
struct Version {
    number: usize,
    replicas: u8,
}

impl Version {
    fn bytes(self) -> Option<Vec<u8>> {
        (self.number > 0).then(|| value(self.number))
    }
}

/// Four clients, two over TCP and two over shared memory, that put, replace, remove and get, and compare every byte.
struct Load<'a> {
    place: &'a Workplace,
    /// Replicas of each object, which puts wait for.
    replicas: u8,
    stop: AtomicBool,
    puts: AtomicU64,
    times: Mutex<Vec<TimedCall>>,
    /// Versions of all keys of each client that has ended.
    versions: Mutex<Vec<(usize, Vec<Version>)>>,
}

impl<'a> Load<'a> {
    const fn new(place: &'a Workplace, replicas: u8) -> Self {
        Self {
            place,
            replicas,
            stop: AtomicBool::new(false),
            puts: AtomicU64::new(0),
            times: Mutex::new(Vec::new()),
            versions: Mutex::new(Vec::new()),
        }
    }

    fn client(&self, way: Way) -> Client {
        Client::connect(&ClientConfig { deadline: DEADLINE, ..self.place.client_config(way) }).unwrap()
    }

    /// Runs all clients while `work` does, and ends them then.
    fn beside(&self, work: impl FnOnce()) {
        std::thread::scope(|scope| {
            for (number, way) in [Way::Shm, Way::Tcp, Way::Shm, Way::Tcp].into_iter().enumerate() {
                scope.spawn(move || self.put_and_get(number, way));
            }
            work();
            self.stop.store(true, Ordering::Relaxed);
        });
    }

    /// Waits until the clients have put some more objects.
    #[track_caller]
    fn wait_for_puts(&self, first: &Process) {
        let before = self.puts.load(Ordering::Relaxed);
        let worked = wait_until(|| (self.puts.load(Ordering::Relaxed) > before + 200).then_some(()));
        assert_eq!(worked, Some(()), "clients do not go on after an upgrade: {:?}", first.said());
    }

    fn put_and_get(&self, number: usize, way: Way) {
        let mut client = self.client(way);
        let (mut versions, mut taken) = (vec![Version::default(); KEYS], Vec::new());
        let mut step = 0usize;
        while !self.stop.load(Ordering::Relaxed) {
            step += 1;
            let at = step * 7919 % KEYS;
            let begun = Instant::now();
            if step.is_multiple_of(13) && versions[at].number > 0 {
                client.remove(key(number, at).as_bytes()).unwrap();
                versions[at] = Version::default();
            } else {
                versions[at] = self.put(&mut client, &key(number, at), step);
            }
            taken.push(TimedCall { is_put: true, ended: Instant::now(), took: begun.elapsed() });
            self.puts.fetch_add(1, Ordering::Relaxed);
            let at = step * 104_729 % KEYS;
            let begun = Instant::now();
            let bytes = client.get(key(number, at).as_bytes()).unwrap();
            taken.push(TimedCall { is_put: false, ended: Instant::now(), took: begun.elapsed() });
            assert!(bytes == versions[at].bytes(), "{} by {way:?}", key(number, at));
        }
        for (at, version) in versions.iter().enumerate() {
            let bytes = client.get(key(number, at).as_bytes()).unwrap();
            assert!(bytes == version.bytes(), "{} at the end", key(number, at));
        }
        self.times.lock().unwrap_or_else(PoisonError::into_inner).extend(taken);
        self.versions.lock().unwrap_or_else(PoisonError::into_inner).push((number, versions));
    }

    fn put(&self, client: &mut Client, key: &str, number: usize) -> Version {
        if self.replicas < 2 {
            client.upsert(key.as_bytes(), &value(number)).unwrap();
            return Version { number, replicas: 1 };
        }
        let options = PutOptions {
            replicas: self.replicas,
            wait_replicas: self.replicas,
            replace: true,
            ..PutOptions::default()
        };
        let (_, replicas) = client.replicas().put(key.as_bytes(), &value(number), &options).unwrap();
        Version { number, replicas }
    }
}

/// Upgrades of nodes, and how long each took.
#[derive(Default)]
struct Upgrades {
    spans: Vec<(Instant, Instant)>,
    /// Pauses of the nodes, in milliseconds.
    pauses: Vec<u64>,
    /// The last successor of each node.
    running: Vec<(String, Successor)>,
}

impl Upgrades {
    /// Upgrades a node, to this program or its own. Nothing may be dropped.
    #[track_caller]
    fn upgrade(&mut self, place: &Workplace, node: &str, program: Option<&str>) {
        let program = program.map_or(Vec::new(), |program| vec!["--program", program]);
        let begun = Instant::now();
        let said = place.run(&[&["ctl", "upgrade", node][..], &program].concat()).text();
        self.spans.push((begun, Instant::now()));
        assert!(!said.contains("dropped") && !said.contains("empty"), "{said}");
        let pause = said.split("a pause of ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
        self.pauses.push(pause.parse().unwrap());
        let successor = Successor::of(&said);
        self.running.retain(|(other, _)| other != node);
        self.running.push((node.into(), successor));
    }

    fn print(&mut self, objects: u64, load: &Load<'_>) {
        self.pauses.sort_unstable();
        println!(
            "{} upgrades with {objects} objects: {} puts; service paused median {} ms, most {} ms",
            self.pauses.len(),
            load.puts.load(Ordering::Relaxed),
            self.pauses[self.pauses.len() / 2],
            self.pauses[self.pauses.len() - 1],
        );
        print_latencies(&load.times.lock().unwrap(), &self.spans);
    }
}

#[test]
fn upgrades_under_load_lose_nothing() {
    let place = Workplace::new("upgrade-load");
    nothing_is_lost_under_load(&place, &Memory::new(&place));
}

#[test]
fn upgrades_under_load_of_memory_that_ends_with_its_processes_lose_nothing() {
    nothing_is_lost_under_load(&Workplace::new("upgrade-load-memfds"), &Memory::of_processes());
}

fn nothing_is_lost_under_load(place: &Workplace, memory: &Memory) {
    let (rounds, more) = (number("KVPLANE_UPGRADES", 3), number("KVPLANE_UPGRADE_OBJECTS", 0));
    let _control = control(place);
    let larger = [&["--pool", "512M", "--shards", "1", "--metrics-port", "0"], &memory.flags()[..]].concat();
    let first = place.node(7, &larger);
    first.wait_for(COUNTERS);
    let mut idle = place.client(Way::Tcp);
    for at in 0..more {
        idle.put(format!("idle-{at}").as_bytes(), &value(at % 7)).unwrap();
    }
    let (load, mut upgrades) = (Load::new(place, 1), Upgrades::default());
    load.beside(|| {
        let other = other_program();
        for round in 0..rounds {
            load.wait_for_puts(&first);
            upgrades.upgrade(place, "7", program_of(round, other.as_deref()));
            if let Some(other) = &other {
                OtherClients { place, other }.exchange(round);
            }
        }
    });
    let there = (0..more).filter(|at| idle.get(format!("idle-{at}").as_bytes()).unwrap() == Some(value(at % 7)));
    assert_eq!(there.count(), more);
    assert_eq!(latest(&first, "kvplane_kept_memory_damaged_total"), 0);
    upgrades.print(latest(&first, "kvplane_shard_objects"), &load);
}

/// Three nodes whose objects have two replicas are upgraded in turns, and a successor is killed right after it took
/// over: what had two replicas is there.
#[test]
fn upgrades_under_load_of_nodes_with_replicas_lose_nothing() {
    let place = Workplace::new("upgrade-load-replicas");
    let state = place.path("state");
    let plane = Process::start(place.command(&["control", "--state", text(&state), "--replicas", "2"]));
    plane.wait_for("metrics on");
    let names = ["7", "8", "9"];
    let nodes = names.map(|name| {
        let flags = ["--pool", "256M", "--shards", "1", "--metrics-port", "0", "--failure-domain", name];
        let node = place.node(name.parse().unwrap(), &flags);
        node.wait_for(COUNTERS);
        node
    });
    assert_eq!(wait_until(|| (health(plane.http())["members"] == 3).then_some(())), Some(()));
    let (load, mut upgrades) = (Load::new(&place, 2), Upgrades::default());
    let mut client = load.client(Way::Tcp);
    // The first puts may come before the nodes know each other.
    for at in 0..KEYS {
        let made = || (load.put(&mut client, &format!("probe-{at}"), at + 1).replicas == 2).then_some(());
        wait_until(made).expect("two replicas");
    }
    load.beside(|| {
        let other = other_program();
        for (round, (name, node)) in (0..number("KVPLANE_UPGRADES", 3)).zip(names.iter().zip(&nodes).cycle()) {
            load.wait_for_puts(node);
            upgrades.upgrade(&place, name, program_of(round, other.as_deref()));
        }
    });
    let objects = || nodes.iter().map(|node| latest(node, "kvplane_shard_objects")).sum();
    upgrades.print(objects(), &load);
    upgrades.upgrade(&place, names[0], None);
    drop(upgrades.running.pop());
    let versions = load.versions.lock().unwrap();
    let (mut twice, mut once) = (0, 0);
    for (number, versions) in &*versions {
        for (at, version) in versions.iter().enumerate() {
            let bytes = client.get(key(*number, at).as_bytes()).unwrap();
            let is_lost = bytes.is_none() && version.replicas == 1;
            assert!(bytes == version.bytes() || is_lost, "{} with {} replicas", key(*number, at), version.replicas);
            *(if version.replicas == 2 { &mut twice } else { &mut once }) += 1;
        }
    }
    println!("a successor was killed: {twice} objects with two replicas are there; {once} had one, or were removed");
    assert!(twice > 2 * once, "puts wait for the second replica");
    let lost = (0..KEYS).find(|at| client.get(format!("probe-{at}").as_bytes()).unwrap() != Some(value(at + 1)));
    assert_eq!(lost, None, "an object with two replicas");
}

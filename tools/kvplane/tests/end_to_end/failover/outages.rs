//! Five nodes, each in a network namespace of its own, one of which falls silent under load in every way that there is:
//! killed, frozen for a while, cut off, or with packets lost in one direction only. Objects have two or three replicas.
//! No byte is wrong, nothing older than what was acknowledged is read, no object that several nodes had is lost, and
//! every operation is answered.
//!
//! The load is this test program, started again beside the control plane. It knows the owners of its keys, so that the
//! operations on keys of the silent node (its owner or replica owner) are shown apart from those on others' keys.
//! `cargo x silence` runs all outages and shows how long the operations took before, during and after each: times are
//! figures, and no test asserts them. A machine without namespaces skips the test.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvplane::{Buffer, Client, ClientConfig, Control, ObjectRange, PutOptions, Region, RegionOptions, Remote};
use kvplane_proto::rng::Rng;

use crate::failover::cluster::{Cluster, NODES, PLANE, owners_of, unix_ms};
use crate::support::{Process, test_of, wait_until};

/// Objects that have all replicas before the outage, the objects that each writer changes, and their length.
pub(crate) const KEPT: u64 = 400;
const CHANGED: u64 = 40;
const BYTES: usize = 8192;
/// Callers: readers, and writers.
const READERS: u64 = 3;
const WRITERS: u64 = 3;
/// Deadline of an operation: less than the time for which a member may be silent without other evidence.
const DEADLINE: Duration = Duration::from_millis(4500);
/// Time from the beginning of an outage within which it is found.
const FOUND: Duration = Duration::from_millis(2000);
/// Environment variable that makes this program the load: the cluster, the identity, the round, its milliseconds, the
/// replicas of each object, and what becomes of operations that fail.
pub(crate) const ROLE: &str = "KVPLANE_TEST_OUTAGE_LOAD";

/// A way to fall silent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outage {
    /// The process is killed.
    Killed,
    /// The process is frozen, and continues.
    Frozen,
    /// The link is cut: nothing arrives in either direction, and nothing is reset.
    Cut,
    /// Packets from the node are lost, and packets to it arrive.
    LosesSent,
    /// Packets to the node are lost, and packets from it arrive.
    LosesReceived,
}

const ALL: [Outage; 5] = [Outage::Killed, Outage::Frozen, Outage::Cut, Outage::LosesSent, Outage::LosesReceived];

/// Times of a round.
#[derive(Clone, Copy)]
struct Times {
    before: Duration,
    outage: Duration,
    after: Duration,
}

impl Times {
    fn whole(self) -> Duration {
        self.before + self.outage + self.after
    }
}

impl Outage {
    fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::Frozen => "frozen",
            Self::Cut => "cut off",
            Self::LosesSent => "what it sends is lost",
            Self::LosesReceived => "what is sent to it is lost",
        }
    }

    fn begin(self, cluster: &mut Cluster, victim: u64) {
        match self {
            Self::Killed => cluster.kill(victim),
            Self::Frozen => cluster.signal(victim, "STOP"),
            Self::Cut => cluster.cut(victim),
            Self::LosesSent => cluster.lose_sent(victim),
            Self::LosesReceived => cluster.lose_received(victim),
        }
    }

    fn end(self, cluster: &mut Cluster, victim: u64) {
        match self {
            Self::Killed => cluster.restart(victim),
            Self::Frozen => cluster.signal(victim, "CONT"),
            Self::Cut => cluster.mend(victim),
            Self::LosesSent | Self::LosesReceived => cluster.find_all(),
        }
    }
}

/// Operation of the load: its kind, beginning, duration and outcome, and the owners of its key.
pub(crate) struct Operation {
    kind: String,
    began_ms: u64,
    pub(crate) took_us: u64,
    pub(crate) well: bool,
    owners: Vec<u64>,
}

/// State of the objects that are changed: for each the turn that was acknowledged last, and the one begun last.
struct Changes {
    acked: Vec<AtomicU64>,
    begun: Vec<AtomicU64>,
}

impl Changes {
    fn new() -> Self {
        let all = || (0..WRITERS * CHANGED).map(|_| AtomicU64::new(0)).collect();
        Self { acked: all(), begun: all() }
    }
}

fn kept(number: u64) -> String {
    format!("kept-{number}")
}

fn changed(number: u64) -> String {
    format!("changed-{number}")
}

/// Returns an object's bytes: the turn of its put, and bytes that follow from name and turn.
fn value(name: &str, turn: u64) -> Vec<u8> {
    let seed = kvplane_proto::Digest::of(b"", name.as_bytes()).0 as u64 ^ turn.wrapping_mul(0x9e37_79b9);
    let body = (8..BYTES as u64).map(|at| (seed.wrapping_mul(at | 1) >> 32 ^ at) as u8);
    turn.to_le_bytes().into_iter().chain(body).collect()
}

/// Returns the turn of the put whose bytes these are. They must be those of one put.
fn turn_of(name: &str, bytes: &[u8]) -> u64 {
    let turn = bytes.first_chunk().map_or(u64::MAX, |turn| u64::from_le_bytes(*turn));
    assert!(bytes == value(name, turn), "{name} has other bytes than those of its put {turn}");
    turn
}

fn several(replicas: u8, replace: bool) -> PutOptions {
    PutOptions { replicas, replace, ..PutOptions::default() }
}

/// Settings that all callers of a load have in common.
struct Load {
    config: ClientConfig,
    round: u64,
    replicas: u8,
    may_fail: bool,
}

/// A caller with a client of its own, which records its operations.
struct Caller {
    client: Client,
    rng: Rng,
    replicas: u8,
    /// False if every operation has to succeed.
    may_fail: bool,
    out: Vec<String>,
}

impl Caller {
    fn new(load: &Load, number: u64) -> Self {
        let client = Client::connect(&load.config).unwrap();
        let rng = Rng::new(load.round * 64 + number, "outages");
        Self { client, rng, replicas: load.replicas, may_fail: load.may_fail, out: Vec::new() }
    }

    /// Makes a call, and records it. Returns its result; nothing if it failed and may.
    fn timed<T>(
        &mut self,
        kind: &str,
        name: &str,
        call: impl FnOnce(&mut Client) -> Result<T, kvplane::Error>,
    ) -> Option<T> {
        let owners = owners_of(&mut self.client, name);
        let (began_ms, begun) = (unix_ms(), Instant::now());
        let outcome = call(&mut self.client);
        let took_us = begun.elapsed().as_micros();
        let owners: Vec<String> = owners.iter().map(u64::to_string).collect();
        self.out.push(format!("op {kind} {began_ms} {took_us} {} {}", outcome.is_ok(), owners.join(" ")));
        match outcome {
            Ok(result) => Some(result),
            Err(_) if self.may_fail => None,
            Err(error) => panic!("{kind} of {name}, owners {owners:?}, after {took_us} us: {error}"),
        }
    }

    /// Reads an object that stays as it is.
    fn read_kept(&mut self, part: &Buffer) {
        let name = kept(self.rng.below(KEPT));
        let (key, wanted) = (name.as_bytes(), value(&name, 0));
        match self.rng.below(9) {
            0..=3 => {
                let Some(got) = self.timed("get", &name, |client| client.get(key)) else { return };
                assert!(got.unwrap_or_else(|| panic!("{name} is lost")) == wanted, "{name} has other bytes");
            }
            4 => {
                let offset = self.rng.below(BYTES as u64 - 512);
                let range = ObjectRange { key, offset, into: part.slice(0, 512) };
                let got = self.timed("range", &name, |client| client.ranges().get(&[range])?.remove(0));
                let Some(got) = got else { return };
                assert!(got.is_some(), "{name} is lost");
                let mut bytes = [0; 512];
                part.region().copy_out(0, &mut bytes);
                assert!(bytes[..] == wanted[offset as usize..][..512], "{name} has other bytes at {offset}");
            }
            5 => {
                let read = self.timed("session", &name, |client| {
                    let Some(mut session) = client.ranges().open_session(key)? else { return Ok(false) };
                    let range = ObjectRange { key, offset: 0, into: part.slice(0, 512) };
                    client.ranges().read_session(&mut session, &[range])
                });
                assert_ne!(read, Some(false), "{name} is lost");
            }
            6 => {
                let found = self.timed("exists", &name, |client| client.exists(key));
                assert_ne!(found, Some(false), "{name} is lost");
            }
            7 => {
                let found = self.timed("exist", &name, |client| client.batch_exists(&[key]));
                assert!(found.is_none_or(|found| found == [true]), "{name} is lost");
            }
            _ => {
                let bytes = self.timed("size", &name, |client| client.size(key));
                assert!(bytes.is_none_or(|bytes| bytes == Some(BYTES as u64)), "{name} is lost");
            }
        }
    }

    /// Reads an object that a writer changes: what was acknowledged before, or newer.
    fn read_changed(&mut self, changes: &Changes) {
        let number = self.rng.below(WRITERS * CHANGED);
        let (name, acked) = (changed(number), changes.acked[number as usize].load(Ordering::SeqCst));
        let Some(got) = self.timed("get", &name, |client| client.get(name.as_bytes())) else { return };
        let turn = turn_of(&name, &got.unwrap_or_else(|| panic!("{name} is lost")));
        let begun = changes.begun[number as usize].load(Ordering::SeqCst);
        assert!((acked..=begun).contains(&turn), "{name}: put {turn} was read, {acked} was acknowledged before");
    }

    /// Changes an object of this writer.
    fn change(&mut self, writer: u64, changes: &Changes, turn: u64) {
        let number = writer * CHANGED + turn % CHANGED;
        let name = changed(number);
        changes.begun[number as usize].store(turn, Ordering::SeqCst);
        let options = several(self.replicas, true);
        let put = self.timed("upsert", &name, |client| client.put_with(name.as_bytes(), &value(&name, turn), &options));
        if put.is_some() {
            changes.acked[number as usize].store(turn, Ordering::SeqCst);
        }
    }

    /// Puts a new object; returns its name if several nodes have it.
    fn put_new(&mut self, writer: u64, round: u64, turn: u64) -> Option<String> {
        let name = format!("new-{round}-{writer}-{turn}");
        let options = several(self.replicas, false);
        let (_, replicas) =
            self.timed("put", &name, |client| client.replicas().put(name.as_bytes(), &value(&name, turn), &options))?;
        (replicas >= 2).then_some(name)
    }
}

/// Puts objects until each has all its replicas.
fn fill(client: &mut Client, wanted: u8, names: impl Iterator<Item = String>) {
    for name in names {
        let done = wait_until(|| {
            let (_, replicas) =
                client.replicas().put(name.as_bytes(), &value(&name, 0), &several(wanted, true)).ok()?;
            (replicas == wanted).then_some(())
        });
        assert_eq!(done, Some(()), "{name} has {wanted} replicas");
    }
}

/// Returns the function of this program that is the load.
pub(crate) fn load() -> String {
    test_of(module_path!(), "outage_load")
}

/// Entry point of the load, not a test: without the role it does nothing.
#[test]
fn outage_load() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let [cluster, identity, round, lasts_ms, replicas, failures] = words[..] else { panic!("{role:?} is no role") };
    let lasts = Duration::from_millis(lasts_ms.parse().unwrap());
    let addresses = vec![format!("{PLANE}:7400").parse().unwrap()];
    let control = Control::Remote(Remote { cluster: cluster.to_owned(), addresses, identity: identity.into() });
    let config = ClientConfig { control, shared_memory: false, deadline: DEADLINE, ..ClientConfig::local(cluster) };
    let (round, replicas, may_fail) = (round.parse().unwrap(), replicas.parse().unwrap(), failures == "tolerated");
    let load = Load { config, round, replicas, may_fail };
    let mut client = Client::connect(&load.config).unwrap();
    fill(&mut client, replicas, (0..KEPT).map(kept).chain((0..WRITERS * CHANGED).map(changed)));
    println!("loads");
    let (begun, changes) = (Instant::now(), Changes::new());
    let goes_on = || begun.elapsed() < lasts;
    let (mut out, mut doubled) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|number| {
                let (load, changes) = (&load, &changes);
                scope.spawn(move || {
                    let mut caller = Caller::new(load, number);
                    let part = caller.client.register(Region::allocate(&RegionOptions::new("part", 4096)).unwrap());
                    while goes_on() {
                        if caller.rng.chance(0.2) {
                            caller.read_changed(changes);
                        } else {
                            caller.read_kept(&part);
                        }
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    caller.out
                })
            })
            .collect();
        let writers: Vec<_> = (0..WRITERS)
            .map(|number| {
                let (load, changes) = (&load, &changes);
                scope.spawn(move || {
                    let (mut caller, mut doubled) = (Caller::new(load, READERS + number), Vec::new());
                    for turn in 1.. {
                        if !goes_on() {
                            break;
                        }
                        caller.change(number, changes, turn);
                        doubled.extend(caller.put_new(number, round, turn).map(|name| (name, turn)));
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    (caller.out, doubled)
                })
            })
            .collect();
        out.extend(readers.into_iter().flat_map(|reader| reader.join().expect("a reader")));
        for writer in writers {
            let (lines, names) = writer.join().expect("a writer");
            out.extend(lines);
            doubled.extend(names);
        }
    });
    // Everything that several nodes had exists.
    for (name, turn) in (0..KEPT).map(|number| (kept(number), 0)).chain(doubled) {
        let got = wait_until(|| client.get(name.as_bytes()).ok()).expect("the network is whole again");
        let got = got.unwrap_or_else(|| panic!("{name} had several replicas and is lost"));
        assert_eq!(turn_of(&name, &got), turn, "{name}");
    }
    std::io::stdout().lock().write_all((out.join("\n") + "\nlisted\n").as_bytes()).unwrap();
}

pub(crate) fn told(load: &Process) -> Vec<Operation> {
    load.wait_for("listed");
    let parse = |line: String| {
        let mut words = line.strip_prefix("op ")?.split(' ');
        let (kind, began_ms, took_us) =
            (words.next()?.to_owned(), words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let well = words.next()? == "true";
        Some(Operation { kind, began_ms, took_us, well, owners: words.filter_map(|word| word.parse().ok()).collect() })
    };
    load.said().into_iter().filter_map(parse).collect()
}

/// Formats median, 99th percentile and maximum of durations, in milliseconds.
pub(crate) fn spread(mut took_us: Vec<u64>) -> String {
    took_us.sort_unstable();
    let Some(most) = took_us.last() else { return "none".to_owned() };
    let at = |part: usize| took_us[(took_us.len() * part / 100).min(took_us.len() - 1)];
    let ms = |us: u64| us as f64 / 1000.0;
    format!("{} x {:.1} / {:.1} / {:.0}", took_us.len(), ms(at(50)), ms(at(99)), ms(*most))
}

/// Shows the times of a round: of operations on keys of the victim, and on others' keys, by kind.
fn show(what: &str, all: &[Operation], victim: u64, (began_ms, ended_ms): (u64, u64)) {
    println!("{what}: operations x median / 99th percentile / maximum in ms");
    let mut rows: BTreeMap<(bool, &str), [Vec<u64>; 4]> = BTreeMap::new();
    let found_ms = began_ms + FOUND.as_millis() as u64;
    for one in all {
        let phase = match one.began_ms {
            at if at < began_ms => 0,
            at if at < found_ms => 1,
            at if at < ended_ms => 2,
            _ => 3,
        };
        // An operation that began just before the outage may wait for it.
        let waits = phase == 0 && one.began_ms + one.took_us / 1000 > began_ms;
        let phase = if waits { 1 } else { phase };
        rows.entry((one.owners.contains(&victim), &one.kind)).or_default()[phase].push(one.took_us);
    }
    let worst = |own: bool| {
        let all = rows.iter().filter(|((of, _), _)| *of == own).flat_map(|(_, phases)| phases[1..].iter().flatten());
        all.max().map_or(0, |us| us / 1000)
    };
    for ((own, kind), phases) in &rows {
        let [before, found, rest, after] = phases.clone().map(spread);
        let whose = if *own { "its keys" } else { "others'" };
        println!("  {whose:9} {kind:8} before {before}; first {FOUND:?} {found}; then {rest}; after {after}");
    }
    println!("  slowest since: {} ms on others' keys, {} ms on its keys", worst(false), worst(true));
}

fn run(replicas: u8, outages: &[Outage], rounds: usize, times: impl Fn(Outage) -> Times) {
    let Some(mut cluster) = Cluster::start_with(replicas) else { return };
    let mut round = 0;
    for turn in 0..rounds {
        for outage in outages {
            let (victim, times) = (1 + (round + turn as u64) % NODES, times(*outage));
            let role = format!(" {round} {} {replicas} none", times.whole().as_millis());
            let mut load = cluster.beside(&load(), ROLE, &role);
            load.wait_for("loads");
            std::thread::sleep(times.before);
            let began_ms = unix_ms();
            outage.begin(&mut cluster, victim);
            std::thread::sleep(times.outage);
            outage.end(&mut cluster, victim);
            let ended_ms = unix_ms();
            let all = told(&load);
            assert!(load.ended().success(), "{:?}", load.said());
            show(
                &format!("{replicas} replicas, node {victim} of {NODES}, {}", outage.name()),
                &all,
                victim,
                (began_ms, ended_ms),
            );
            assert!(all.len() > 500, "only {} operations", all.len());
            cluster.whole(KEPT * (u64::from(replicas) - 1));
            round += 1;
        }
    }
}

/// Runs outages with this number of replicas, and shows the times if they are measured.
fn run_all(replicas: u8, in_ci: &[Outage]) {
    let secs = Duration::from_secs;
    match std::env::var("KVPLANE_SILENCE_ROUNDS").map(|count| count.parse().expect("a number")) {
        Ok(rounds) => run(replicas, &ALL, rounds, |outage| {
            let outage = secs(if outage == Outage::Frozen { 20 } else { 6 });
            Times { before: secs(4), outage, after: secs(4) }
        }),
        Err(_) => {
            let times = Times { before: secs(1), outage: secs(3), after: secs(1) };
            run(replicas, in_ci, 1, |_| times);
        }
    }
}

/// Both ways of one-way loss, of which no other test knows; `cargo x silence` runs all outages, and freezes for 20 s.
#[test]
fn any_node_may_fall_silent_under_load() {
    run_all(2, &[Outage::LosesSent, Outage::LosesReceived]);
}

#[test]
fn any_node_may_fall_silent_where_objects_have_three_replicas() {
    run_all(3, &[Outage::Killed, Outage::Cut]);
}

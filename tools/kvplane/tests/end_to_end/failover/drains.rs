//! Drains at full speed: writers go on, a new owner imports slowly, both sides have SSDs, and the control plane is
//! killed and restarted in the middle. Nothing that was acknowledged is lost, replaced objects do not get their former
//! bytes back, and removed ones stay removed; then, too, when all nodes that are left are killed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use kvplane::{Client, PutOptions};
use kvplane_proto::rng::Rng;

use crate::support::{Process, Way, Workplace, health, text, wait_until};

/// Objects that stay as they are, and objects of each writer.
const KEPT: u64 = 300;
const CHANGED: u64 = 150;
const WRITERS: u64 = 3;
/// Version of the objects that stay as they are.
const KEPT_VERSION: u64 = 1;

/// Returns the bytes of an object, of 1 to 40 KiB.
fn value(name: &str, version: u64) -> Vec<u8> {
    let seed = kvplane_proto::Digest::of(b"", name.as_bytes()).0 as u64 ^ version.wrapping_mul(0x9e37_79b9);
    let length = 1024 + (seed >> 20) % 39_936;
    version
        .to_le_bytes()
        .into_iter()
        .chain((8..length).map(|at| (seed.wrapping_mul(at | 1) >> 32 ^ at) as u8))
        .collect()
}

fn kept(number: u64) -> String {
    format!("kept-{number}")
}

/// Object as its writer knows it: the versions that a get may have; 0 stands for no object. There are several after a
/// call that failed, which may have taken effect.
type Versions = Vec<u64>;

/// Puts, replaces and removes objects of its own until it has to stop; returns what it may find.
fn write(mut client: Client, writer: u64, has_ended: &AtomicBool) -> BTreeMap<String, Versions> {
    let mut rng = Rng::new(writer, "drains");
    let mut objects: BTreeMap<String, Versions> = BTreeMap::new();
    let replace = PutOptions { replace: true, ..PutOptions::default() };
    for version in 1.. {
        if has_ended.load(Ordering::SeqCst) {
            break;
        }
        let name = format!("changed-{writer}-{}", rng.below(CHANGED));
        let versions = objects.entry(name.clone()).or_insert_with(|| vec![0]);
        let removes = rng.chance(0.2);
        let done = match removes {
            true => client.remove(name.as_bytes()).is_ok(),
            false => client.put_with(name.as_bytes(), &value(&name, version), &replace).is_ok(),
        };
        if done {
            versions.clear();
        }
        versions.push(if removes { 0 } else { version });
        let read = format!("changed-{writer}-{}", rng.below(CHANGED));
        await_one_of(&mut client, &read, objects.get(&read).map_or(&[0], Vec::as_slice));
    }
    objects
}

/// Returns the version of an object; 0 if there is none. Its bytes must be those of one put.
#[track_caller]
fn version_of(client: &mut Client, name: &str) -> u64 {
    let got = wait_until(|| client.get(name.as_bytes()).ok()).expect("an answer");
    got.map_or(0, |bytes| {
        let version = bytes.first_chunk().map_or(u64::MAX, |version| u64::from_le_bytes(*version));
        assert!(bytes == value(name, version), "{name} has other bytes than those of its version {version}");
        version
    })
}

/// Asserts that gets find one of these versions: at once, or, while slots migrate, after misses. What a former owner
/// still has that does not answer in time, or does not know the new map yet, is a miss meanwhile.
#[track_caller]
fn await_one_of(client: &mut Client, name: &str, versions: &[u64]) {
    let found = wait_until(|| match version_of(client, name) {
        0 if !versions.contains(&0) => None,
        found => Some(found),
    });
    let found = found.unwrap_or_else(|| panic!("{name} is lost; it had one of {versions:?}"));
    assert!(versions.contains(&found), "{name} has version {found}, none of {versions:?}");
}

/// Asserts that a get finds one of these versions.
#[track_caller]
fn check(client: &mut Client, name: &str, versions: &[u64]) {
    let found = version_of(client, name);
    assert!(versions.contains(&found), "{name} has version {found}, none of {versions:?}");
}

fn control(place: &Workplace) -> Process {
    let control = Process::start(place.command(&["control", "--state", text(&place.path("state"))]));
    control.wait_for("metrics on");
    control
}

fn node(place: &Workplace, number: u64, more: &[&str]) -> Process {
    let ssd = format!("{}:128M", text(&place.path(&format!("ssd-{number}"))));
    let words = ["--pool", "32M", "--shards", "2", "--metrics-port", "0", "--ssd", &ssd, "--ssd-ack", "buffered"];
    place.node(number, &[&words, more].concat())
}

fn settled(control: &Process, members: u64) {
    let here = wait_until(|| (health(control.http())["members"] == members).then_some(()));
    assert_eq!(here, Some(()), "{}", health(control.http()));
}

#[test]
fn a_drain_under_load_with_a_slow_owner_and_a_restart_of_the_control_plane_loses_nothing() {
    let place = Workplace::new("drains");
    let first = control(&place);
    // What the second node gets takes it seconds, and the third one a moment.
    let mut nodes = vec![node(&place, 1, &[]), node(&place, 2, &["--migration-rate", "512K"]), node(&place, 3, &[])];
    settled(&first, 3);
    let mut client = place.client(Way::Tcp);
    for number in 0..KEPT {
        let name = kept(number);
        wait_until(|| client.put(name.as_bytes(), &value(&name, KEPT_VERSION)).ok()).expect("it is taken");
    }
    let has_ended = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let client = place.client(if writer == 0 { Way::Shm } else { Way::Tcp });
                let has_ended = &has_ended;
                scope.spawn(move || write(client, writer, has_ended))
            })
            .collect();
        let reader = scope.spawn(|| {
            let (mut client, mut rng) = (place.client(Way::Tcp), Rng::new(9, "drains"));
            while !has_ended.load(Ordering::SeqCst) {
                await_one_of(&mut client, &kept(rng.below(KEPT)), &[KEPT_VERSION]);
            }
        });
        place.run(&["ctl", "drain", "1"]).well();
        drop(first);
        let second = control(&place);
        settled(&second, 3);
        let said = place.run(&["ctl", "drain", "1", "--wait", "100"]).text();
        assert!(said.contains("node 1 is drained: it has no objects left"), "{said}");
        assert!(nodes.remove(0).stop().success());
        has_ended.store(true, Ordering::SeqCst);
        reader.join().expect("a reader");
        let written: Vec<_> = writers.into_iter().map(|writer| writer.join().expect("a writer")).collect();
        (second, written)
    });
    let (second, written) = written;
    let assert_all = |client: &mut Client| {
        (0..KEPT).for_each(|number| check(client, &kept(number), &[KEPT_VERSION]));
        written.iter().flatten().for_each(|(name, versions)| check(client, name, versions));
    };
    assert_all(&mut client);
    Process::kill_all(&mut nodes);
    let _again = [node(&place, 2, &[]), node(&place, 3, &[])];
    settled(&second, 2);
    // An object that is not recovered yet is a miss.
    written.iter().flatten().for_each(|(name, versions)| await_one_of(&mut client, name, versions));
    (0..KEPT).for_each(|number| await_one_of(&mut client, &kept(number), &[KEPT_VERSION]));
    assert_all(&mut client);
    let puts: usize = written.iter().map(BTreeMap::len).sum();
    assert!(puts as u64 > CHANGED, "only {puts} objects were written");
}

//! Tests of a node with an SSD that is killed repeatedly under a mixed load: puts, replacements, removals, gets. Each
//! object has one writer, which remembers the promises; verification knows the versions that may be seen.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvplane::{Client, Put};
use kvplane_proto::rng::Rng;
use kvplane_tools::pattern;

use crate::ssd::disks::Disk;
use crate::ssd::objects::{Bed, counted, name, recovered, size_of};
use crate::support::{Process, Way, Workplace, text, wait_until};

/// Number of kills of one device: reclaim must not begin, because nothing is promised of objects that it evicts. A
/// restart costs up to two segments of 4 MiB, of 31.
const ROUNDS: u64 = 6;
/// Bytes that all writers of a round may put, for the same reason.
const ROUND_BYTES: usize = 8 << 20;

/// Length of more than half of a segment.
const LONG_BYTES: usize = (2 << 20) + 4099;

/// Time after the kill for which writers retry calls.
const WRITER_DEADLINE: Duration = Duration::from_millis(1500);

/// Promise of a bed about an object that was put.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Promise {
    /// The object exists until it is removed.
    Stays,
    /// The object may be missing at any time; but a replaced or removed version never comes back.
    MayGo,
}

/// Kills of one device that is full.
const FULL_ROUNDS: u64 = 10;
/// Bytes that the writers of such a round may put.
const FULL_ROUND_BYTES: usize = 256 << 20;

/// Object as its writer knows it. Version 0 means that it does not exist.
struct Object {
    newest: u64,
    may_be: BTreeSet<u64>,
    promise: Promise,
}

/// Writer with its objects.
struct Writer {
    objects: BTreeMap<u64, Object>,
    next: u64,
    replaced: u64,
    promise: Promise,
}

/// Remaining budget of a round.
struct Round {
    rng: Rng,
    left: usize,
}

fn seed_of(key: u64, version: u64) -> u64 {
    key << 16 | version
}

/// Returns the length of a version. One in twelve is longer than a record may be, and so in stripes.
fn bytes_of(key: u64, version: u64) -> usize {
    if (key + 5 * version) % 12 == 11 { LONG_BYTES } else { size_of(key + 3 * version) }
}

fn value_of(key: u64, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; bytes_of(key, version)];
    pattern::fill(seed_of(key, version), 0, &mut bytes);
    bytes
}

/// Returns the version of an object's bytes. Short ones may be alike: then one that may be seen.
fn version_of(key: u64, object: &Object, bytes: Option<&[u8]>) -> u64 {
    let Some(bytes) = bytes else { return 0 };
    let is = |version: &u64| {
        bytes_of(key, *version) == bytes.len() && pattern::check(seed_of(key, *version), 0, bytes).is_ok()
    };
    let expected = object.may_be.iter().copied().filter(|version| *version > 0);
    let version = expected.chain(1..=object.newest).find(is);
    version.unwrap_or_else(|| {
        panic!("{} bytes of object {key} are of none of its {} versions", bytes.len(), object.newest)
    })
}

impl Object {
    /// Reads an object: the version that is seen is its version from now on.
    fn read(&mut self, client: &mut Client, key: u64) -> Result<(), kvplane::Error> {
        let got = client.get(name(key).as_bytes())?;
        let version = version_of(key, self, got.as_deref());
        assert!(self.may_be.contains(&version), "object {key} is of version {version}, not one of {:?}", self.may_be);
        // A missing object may be found later: a reclaimed record is back if the crash came before it was overwritten.
        if self.promise == Promise::Stays || version > 0 {
            self.is_now(version);
        }
        Ok(())
    }

    fn is_now(&mut self, version: u64) {
        self.may_be = BTreeSet::from([version]);
        self.may_be.extend((self.promise == Promise::MayGo).then_some(0));
    }

    fn put(&mut self, client: &mut Client, key: u64) -> Result<(), kvplane::Error> {
        let is_new = self.may_be.len() == 1 && self.may_be.contains(&0);
        self.newest += 1;
        let (version, key_name) = (self.newest, name(key));
        // A replaced version is evicted first.
        self.may_be.extend([0, version]);
        if is_new && key.is_multiple_of(2) {
            let put = client.put(key_name.as_bytes(), &value_of(key, version))?;
            assert!(matches!(put, Put::Stored(_)), "object {key} was not there");
        } else {
            client.upsert(key_name.as_bytes(), &value_of(key, version))?;
        }
        self.is_now(version);
        Ok(())
    }

    fn remove(&mut self, client: &mut Client, key: u64) -> Result<(), kvplane::Error> {
        self.may_be.insert(0);
        client.remove(name(key).as_bytes())?;
        self.is_now(0);
        Ok(())
    }
}

impl Writer {
    fn work(&mut self, mut client: Client, mut round: Round, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) && self.step(&mut client, &mut round).is_ok() {}
    }

    fn step(&mut self, client: &mut Client, round: &mut Round) -> Result<(), kvplane::Error> {
        let (known, rng) = (self.objects.len() as u64, &mut round.rng);
        let key = if known == 0 || rng.below(5) < 2 {
            self.next += 1;
            self.next
        } else {
            *self.objects.keys().nth(rng.below(known) as usize).expect("as many as were counted")
        };
        let act = rng.below(8);
        let bytes = bytes_of(key, self.objects.get(&key).map_or(1, |object| object.newest + 1));
        let has_room = round.left >= bytes;
        let none = Object { newest: 0, may_be: BTreeSet::from([0]), promise: self.promise };
        let object = self.objects.entry(key).or_insert(none);
        if act == 0 || !has_room && act < 6 {
            return object.read(client, key);
        }
        if act < 3 || !has_room {
            object.remove(client, key)?;
        }
        if act > 1 && has_room {
            round.left -= bytes;
            self.replaced += u64::from(object.may_be.iter().any(|version| *version > 0));
            object.put(client, key)?;
        }
        Ok(())
    }
}

/// Stops the writers, also after a failure.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn count_of(variable: &str) -> u64 {
    std::env::var(variable).map_or(6, |count| count.parse().expect("a number"))
}

/// `KVPLANE_KILLS` sets the number of kills; by default a few.
#[test]
fn kills_under_load_lose_nothing_that_was_promised() {
    let kills = count_of("KVPLANE_KILLS");
    // The device is renewed now and then, before reclaim evicts the oldest objects.
    for first in (0..kills).step_by(ROUNDS as usize) {
        let bed = Bed::new("kills", &["--ssd-ack", "buffered"]);
        kill_again_and_again(&bed, first..kills.min(first + ROUNDS), 2, |_| {});
    }
}

/// The device is full and memory small: the kills meet reclaim, writes on eviction, and objects that are not written at
/// all. `KVPLANE_FULL_KILLS` sets their number.
#[test]
fn full_devices_that_are_killed_bring_back_no_replaced_or_removed_object() {
    let kills = count_of("KVPLANE_FULL_KILLS");
    let ways: [&[&str]; 3] =
        [&["--ssd-ack", "buffered"], &["--ssd-write", "back"], &["--ssd-write", "selective", "--ssd-ack", "durable"]];
    for (first, way) in (0..kills).step_by(FULL_ROUNDS as usize).zip(ways.into_iter().cycle()) {
        let bed = Bed::new("full", way);
        let rounds = first..kills.min(first + FULL_ROUNDS);
        let is_whole = rounds.end - rounds.start == FULL_ROUNDS;
        let reclaimed = kill_full(&bed, rounds);
        println!("{way:?}: {reclaimed} objects were reclaimed");
        assert!(!is_whole || reclaimed > 0, "the device was never full");
    }
}

/// Like the kills above, with a power failure each time: of the unflushed writes, some are lost, some torn, some done.
#[test]
fn power_failures_under_load_lose_no_durable_object() {
    let kills = count_of("KVPLANE_POWER_FAILURES");
    let mut unflushed = 0;
    for first in (0..kills).step_by(ROUNDS as usize) {
        let place = Workplace::new("power");
        let Some(disk) = Disk::new(&place.directory, 128 << 20) else { return };
        let bed = Bed::over(place, text(&disk.path()), &["--ssd-ack", "durable"]);
        kill_again_and_again(&bed, first..kills.min(first + ROUNDS), 6, |round| {
            unflushed += disk.cut(&mut Rng::new(round, "power"));
        });
        assert!(disk.flushes() > 0);
    }
    println!("{unflushed} writes had not been flushed");
    assert!(unflushed > 0);
}

/// Kills a node that got more data than it has space for; returns the number of reclaimed objects.
fn kill_full(bed: &Bed, rounds: Range<u64>) -> u64 {
    let mut all = writers(2, Promise::MayGo);
    let mut reclaimed = 0;
    for round in rounds.start..=rounds.end {
        let mut dev = verified(bed, &mut all);
        if round == rounds.end {
            dev.kill();
            break;
        }
        under_load(bed, &mut all, (round, FULL_ROUND_BYTES), || {
            let full = wait_until(|| (counted(&dev, "kvplane_tier_writes_total") >= 150.0).then_some(()));
            std::thread::sleep(Duration::from_millis(7 * (round % 6)));
            reclaimed += counted(&dev, "kvplane_tier_reclaimed_total") as u64;
            dev.kill();
            assert!(full.is_some(), "not enough is written");
        });
    }
    let (kept, replaced) = counts(&all);
    assert!(kept >= 10 && replaced >= 5, "{kept} objects were put, {replaced} replaced");
    reclaimed
}

/// Kills a node under load, calls `then`, and reads all objects of the rounds back.
fn kill_again_and_again(bed: &Bed, rounds: Range<u64>, count: usize, mut then: impl FnMut(u64)) {
    let mut all = writers(count, Promise::Stays);
    // The last start only reads.
    for round in rounds.start..=rounds.end {
        let mut dev = verified(bed, &mut all);
        if round == rounds.end {
            dev.kill();
            break;
        }
        under_load(bed, &mut all, (round, ROUND_BYTES), || {
            // The load runs until there is something to lose, and a little longer.
            let some = wait_until(|| (counted(&dev, "kvplane_tier_writes_total") >= 20.0).then_some(()));
            let reclaimed = counted(&dev, "kvplane_tier_reclaimed_total");
            std::thread::sleep(Duration::from_millis(7 * (round % 6)));
            dev.kill();
            assert!(some.is_some(), "nothing is written");
            assert_eq!(reclaimed, 0.0, "the device is too small for what is put here");
        });
        then(round);
    }
    let (kept, replaced) = counts(&all);
    println!("{kept} objects are there, {replaced} replacements");
    assert!(kept >= 10 && replaced >= 5, "{kept} objects were promised, {replaced} replaced");
}

fn writers(count: usize, promise: Promise) -> Vec<Writer> {
    let next = |writer: usize| writer as u64 * 1_000_000;
    (0..count).map(|at| Writer { objects: BTreeMap::new(), next: next(at), replaced: 0, promise }).collect()
}

/// Returns the number of objects that exist or may exist, and the number of replacements.
fn counts(all: &[Writer]) -> (usize, u64) {
    let is_there = |one: &&Object| match one.promise {
        Promise::Stays => !one.may_be.contains(&0),
        Promise::MayGo => one.may_be.len() > 1,
    };
    let objects = all.iter().flat_map(|writer| writer.objects.values());
    (objects.filter(is_there).count(), all.iter().map(|writer| writer.replaced).sum())
}

/// Starts a node, waits for its recovery, and reads every object.
fn verified(bed: &Bed, all: &mut [Writer]) -> Process {
    let dev = bed.start();
    recovered(&dev);
    for (writer, way) in all.iter_mut().zip(Way::BOTH.into_iter().cycle()) {
        let mut client = bed.client(way);
        for (key, object) in &mut writer.objects {
            object.read(&mut client, *key).unwrap_or_else(|error| panic!("object {key}: {error}"));
        }
    }
    dev
}

/// Runs all writers, with at most this number of bytes in the round, until `end` has killed the node.
fn under_load(bed: &Bed, all: &mut [Writer], (round, bytes): (u64, usize), end: impl FnOnce()) {
    let writers = all.len();
    // Clients are connected before the kill.
    let ways = Way::BOTH.into_iter().cycle().take(writers);
    let clients: Vec<Client> = ways.map(|way| bed.client_within(way, WRITER_DEADLINE)).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stopped = StopOnDrop(&stop);
        for (at, (writer, client)) in all.iter_mut().zip(clients).enumerate() {
            let rng = Rng::new(round << 8 | at as u64, "kills");
            // Half of the budget is for the first writer, so that it can put long objects.
            let left = if at == 0 { bytes / 2 } else { bytes / 2 / (writers - 1) };
            let (round, stop) = (Round { rng, left }, &stop);
            scope.spawn(move || writer.work(client, round, stop));
        }
        end();
    });
}

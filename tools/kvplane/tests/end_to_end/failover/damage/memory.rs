//! Tests of damage: bits flip in memory under running nodes, and clients get right bytes while nodes repair it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use kvplane::{Client, PutOptions};

use crate::support::{Process, Way, Workplace, health, http_get, text, wait_until};

/// Number and length of the objects.
const OBJECTS: u64 = 120;
const BYTES: usize = 6000;
/// Bytes by which an object is recognised, and unit at whose multiples objects begin in a pool.
const BEGIN: usize = 16;
const UNIT: usize = 64;
/// Beginning of the line that names the address of a node's metrics.
const COUNTERS: &str = "counters of the shards on http://";

fn value(key: u64) -> Vec<u8> {
    let mut state = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..BYTES).map(|_| byte()).collect()
}

fn name(key: u64) -> String {
    format!("whole-{key}")
}

/// Directory of a node's memory, which is removed with the test.
struct Memory(PathBuf);

impl Memory {
    fn new(place: &Workplace, number: u64) -> Self {
        let name = place.directory.file_name().unwrap().to_string_lossy().into_owned();
        Self(PathBuf::from("/dev/shm").join(format!("{name}-{number}")))
    }

    fn pool(&self) -> File {
        File::options().read(true).write(true).open(self.0.join("shard-0.pool")).unwrap()
    }

    /// Returns the offsets of the objects that memory has as they were put.
    fn objects(&self) -> BTreeMap<u64, u64> {
        let pool = self.pool();
        let mut bytes = vec![0; pool.metadata().unwrap().len() as usize];
        pool.read_exact_at(&mut bytes, 0).unwrap();
        let values: Vec<Vec<u8>> = (0..OBJECTS).map(value).collect();
        let begins: BTreeMap<&[u8], u64> = (0..).zip(&values).map(|(key, value)| (&value[..BEGIN], key)).collect();
        // Objects begin at whole units of the pool.
        let places = (0..bytes.len() - BYTES).step_by(UNIT);
        let at = |place: usize| Some((*begins.get(&bytes[place..place + BEGIN])?, place));
        let found = places.filter_map(at).filter(|(key, place)| bytes[*place..].starts_with(&values[*key as usize]));
        found.map(|(key, place)| (key, place as u64)).collect()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn sum(nodes: &[Process], name: &str) -> u64 {
    let of = |node: &Process| -> u64 {
        let metrics = http_get(node.address(COUNTERS), "/metrics").1;
        let lines = metrics.lines().filter(|line| line.starts_with(&format!("{name}{{")));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    };
    nodes.iter().map(of).sum()
}

fn assert_right(client: &mut Client) {
    for key in 0..OBJECTS {
        let got = client.get(name(key).as_bytes()).unwrap();
        assert!(got.is_some_and(|bytes| bytes == value(key)), "{} is as it was put", name(key));
    }
}

/// A bit of one of the two copies of each object flips: every get is right, over both transports, and in the end both
/// copies are whole again, those that nobody reads too.
#[test]
fn flipped_bits_in_memory_are_repaired_from_replicas() {
    let place = Workplace::new("damage");
    let state = place.path("state");
    // On a busy machine, nodes are late; none is to lose its memory for that.
    let patient = ["--unanswered-ms", "100000", "--suspect-ms", "60000", "--dead-ms", "120000"];
    let control = [&["control", "--state", text(&state), "--replicas", "2"], &patient[..]].concat();
    let control = Process::start(place.command(&control));
    control.wait_for("metrics on");
    let memories: Vec<Memory> = (1..=3).map(|number| Memory::new(&place, number)).collect();
    let nodes: Vec<Process> = (1..)
        .zip(&memories)
        .map(|(number, memory)| {
            let kept = ["--pool", "32M", "--shards", "1", "--metrics-port", "0", "--keep-memory", text(&memory.0)];
            let node = place.node(number, &[&kept[..], &["--memory-scrub", "1G"]].concat());
            node.wait_for(COUNTERS);
            node
        })
        .collect();
    assert!(wait_until(|| (health(control.http())["members"] == 3).then_some(())).is_some());
    let mut clients = Way::BOTH.map(|way| place.client(way));
    let twice = PutOptions { replicas: 2, wait_replicas: 2, replace: true, ..PutOptions::default() };
    let mut put = |key: &str, value: &[u8]| clients[0].replicas().put(key.as_bytes(), value, &twice).unwrap().1;
    // Once the nodes know each other, no object moves any more, and memory has each of the others twice.
    let settled = wait_until(|| (0..200).all(|at| put(&format!("first-{at}"), b"first") == 2).then_some(()));
    assert!(settled.is_some(), "objects have two replicas");
    for key in 0..OBJECTS {
        assert_eq!(put(&name(key), &value(key)), 2, "{}", name(key));
    }
    assert_eq!(sum(&nodes, "kvplane_shard_damaged_total"), 0);
    let objects: Vec<BTreeMap<u64, u64>> = memories.iter().map(Memory::objects).collect();
    for key in 0..OBJECTS {
        let copies = memories.iter().zip(&objects).filter_map(|(memory, objects)| Some((memory, *objects.get(&key)?)));
        let copies: Vec<(&Memory, u64)> = copies.collect();
        assert_eq!(copies.len(), 2, "{}", name(key));
        let (memory, at) = copies[key as usize % 2];
        let (byte, bit) = (key * 37 % BYTES as u64, key % 8);
        let flipped = value(key)[byte as usize] ^ 1 << bit;
        memory.pool().write_all_at(&[flipped], at + byte).unwrap();
    }
    clients.iter_mut().for_each(assert_right);
    let whole = wait_until(|| {
        clients.iter_mut().for_each(assert_right);
        (sum(&nodes, "kvplane_shard_repaired_total") == OBJECTS).then_some(())
    });
    let counts = ["kvplane_shard_damaged_total", "kvplane_shard_repaired_total", "kvplane_shard_damage_lost_total"];
    assert!(whole.is_some(), "{:?}", counts.map(|name| sum(&nodes, name)));
    assert_eq!(counts.map(|name| sum(&nodes, name)), [OBJECTS, OBJECTS, 0]);
    assert_eq!(sum(&nodes, "kvplane_shard_repairs_outstanding"), 0);
    let objects: Vec<BTreeMap<u64, u64>> = memories.iter().map(Memory::objects).collect();
    for key in 0..OBJECTS {
        let copies = objects.iter().filter(|objects| objects.contains_key(&key)).count();
        assert_eq!(copies, 2, "both copies of {} are whole", name(key));
    }
    nodes[0].wait_for("objects in memory were damaged since the start");
}

//! Bits that flip in memory under running nodes.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use kvplane::PutOptions;

use super::{BYTES, COUNTERS, OBJECTS, PATIENT, assert_right, name, places_of, sum, value};
use crate::support::{Process, Way, Workplace, health, text, wait_until};

/// Unit at whose multiples objects begin in a pool.
const UNIT: usize = 64;

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
        places_of(&self.pool(), UNIT)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A bit of one of the two copies of each object flips: every get is right, over both transports, and in the end both
/// copies are whole again, those that nobody reads too.
#[test]
fn flipped_bits_in_memory_are_repaired_from_replicas() {
    let place = Workplace::new("damage");
    let state = place.path("state");
    let control = [&["control", "--state", text(&state), "--replicas", "2"], &PATIENT[..]].concat();
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

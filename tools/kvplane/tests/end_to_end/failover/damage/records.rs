//! Bits that flip on the SSDs of running nodes, in records of objects that no memory has.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use kvplane::PutOptions;

use super::{BYTES, COUNTERS, OBJECTS, PATIENT, assert_right, name, places_of, sum, value};
use crate::support::{Process, Way, Workplace, health, text, wait_until};

/// Unit at whose multiples payloads of this length begin in a record: those that fill no blocks are packed.
const UNIT: usize = 1;
/// Objects that fill memory, and their length.
const FILLERS: u64 = 80;
const FILLER_BYTES: usize = 256 << 10;

fn records(path: &PathBuf) -> BTreeMap<u64, u64> {
    places_of(&File::open(path).unwrap(), UNIT)
}

/// A bit of one of the two records of each object flips, while no memory has the object: every get is right, over both
/// transports, and after a scrub there are two whole records of each again.
#[test]
fn flipped_bits_on_ssds_are_repaired_from_replicas() {
    let place = Workplace::new("records");
    let state = place.path("state");
    let control = [&["control", "--state", text(&state), "--replicas", "2"], &PATIENT[..]].concat();
    let control = Process::start(place.command(&control));
    control.wait_for("metrics on");
    let ssds: Vec<PathBuf> = (1..=3).map(|number| place.path(&format!("ssd-{number}"))).collect();
    let nodes: Vec<Process> = (1..)
        .zip(&ssds)
        .map(|(number, path)| {
            let ssd = format!("{}:64M", text(path));
            let more = ["--pool", "8M", "--shards", "1", "--metrics-port", "0", "--ssd", &ssd, "--ssd-scrub", "0"];
            let node = place.node(number, &[&more[..], &["--memory-scrub", "0", "--ssd-promote", "15"]].concat());
            node.wait_for(COUNTERS);
            node
        })
        .collect();
    assert!(wait_until(|| (health(control.http())["members"] == 3).then_some(())).is_some());
    let mut clients = Way::BOTH.map(|way| place.client(way));
    let twice = PutOptions { replicas: 2, wait_replicas: 2, replace: true, ..PutOptions::default() };
    let mut put = |key: &str, value: &[u8]| clients[0].replicas().put(key.as_bytes(), value, &twice).unwrap().1;
    let settled = wait_until(|| (0..200).all(|at| put(&format!("first-{at}"), b"first") == 2).then_some(()));
    assert!(settled.is_some(), "objects have two replicas");
    for key in 0..OBJECTS {
        assert_eq!(put(&name(key), &value(key)), 2, "{}", name(key));
    }
    let found = || -> Vec<BTreeMap<u64, u64>> { ssds.iter().map(records).collect() };
    let twice_there = |found: &[BTreeMap<u64, u64>]| {
        (0..OBJECTS).all(|key| found.iter().filter(|records| records.contains_key(&key)).count() == 2)
    };
    let recorded = wait_until(|| Some(found()).filter(|found| twice_there(found))).expect("both owners record all");
    // Memory is filled with other objects.
    let filler = vec![7; FILLER_BYTES];
    for key in 0..FILLERS {
        clients[0].put(format!("filler-{key}").as_bytes(), &filler).unwrap();
    }
    for key in 0..OBJECTS {
        let copies = ssds.iter().zip(&recorded).filter_map(|(path, records)| Some((path, *records.get(&key)?)));
        let copies: Vec<(&PathBuf, u64)> = copies.collect();
        let (path, at) = copies[key as usize % 2];
        let (byte, bit) = (key * 37 % BYTES as u64, key % 8);
        let flipped = value(key)[byte as usize] ^ 1 << bit;
        let file = File::options().write(true).open(path).unwrap();
        file.write_all_at(&[flipped], at + byte).unwrap();
        file.sync_all().unwrap();
    }
    clients.iter_mut().for_each(assert_right);
    // Damaged records that nobody has read: the command tells of them.
    place.run(&["ctl", "tier", "verify"]).failed(1, &["records were damaged"]);
    let whole = wait_until(|| {
        clients.iter_mut().for_each(assert_right);
        twice_there(&found()).then_some(())
    });
    let counts = [
        "kvplane_tier_records_damaged_total",
        "kvplane_tier_records_repaired_total",
        "kvplane_tier_rewritten_total",
        "kvplane_tier_records_lost_total",
    ]
    .map(|name| sum(&nodes, name));
    assert!(whole.is_some(), "{counts:?}");
    assert_eq!((counts[0], counts[1] + counts[2], counts[3]), (OBJECTS, OBJECTS, 0));
    nodes[0].wait_for("records on the SSD were damaged since the start");
}

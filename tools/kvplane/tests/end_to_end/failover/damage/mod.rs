//! Tests of damage: bits flip in memory and on SSDs under running nodes, and clients get right bytes while nodes repair
//! it; and the rates of repairs.

mod memory;
mod rates;
mod records;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use kvplane::Client;

use crate::support::{Process, http_get};

/// Number and length of the objects.
const OBJECTS: u64 = 120;
const BYTES: usize = 6000;
/// Bytes by which an object is recognised.
const BEGIN: usize = 16;
/// Beginning of the line that names the address of a node's metrics.
const COUNTERS: &str = "counters of the shards on http://";
/// Settings of a control plane: on a busy machine nodes are late, and none is to lose its memory for that.
const PATIENT: [&str; 6] = ["--unanswered-ms", "100000", "--suspect-ms", "60000", "--dead-ms", "120000"];

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

/// Returns the offsets of the objects that a file has as they were put, at multiples of a unit; the last, where it has
/// one several times.
fn places_of(file: &File, unit: usize) -> BTreeMap<u64, u64> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let values: Vec<Vec<u8>> = (0..OBJECTS).map(value).collect();
    let begins: BTreeMap<&[u8], u64> = (0..).zip(&values).map(|(key, value)| (&value[..BEGIN], key)).collect();
    let places = (0..bytes.len() - BYTES).step_by(unit);
    let at = |place: usize| Some((*begins.get(&bytes[place..place + BEGIN])?, place));
    let found = places.filter_map(at).filter(|(key, place)| bytes[*place..].starts_with(&values[*key as usize]));
    found.map(|(key, place)| (key, place as u64)).collect()
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

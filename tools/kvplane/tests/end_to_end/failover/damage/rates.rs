//! Rates of repairs: how long it takes until all objects have all their replicas again after the loss of a node, and
//! until damage is repaired. `KVPLANE_REPAIR_MIB` sets how much is stored (8).

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use kvplane::PutOptions;

use super::{BEGIN, COUNTERS, sum};
use crate::support::{Process, Way, Workplace, health, text, wait_until};

const OBJECT_BYTES: usize = 256 << 10;
/// Bytes at whose multiples records begin on an SSD.
const RECORD_UNIT: usize = 64;

/// Amount of objects in MiB.
fn mib() -> u64 {
    std::env::var("KVPLANE_REPAIR_MIB").ok().map_or(8, |mib| mib.parse().expect("a number of MiB"))
}

fn name(key: u64) -> String {
    format!("object-{key}")
}

fn value(key: u64) -> Vec<u8> {
    (0..OBJECT_BYTES as u64 / 8)
        .flat_map(|at| (key << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect()
}

fn show(what: &str, bytes: u64, took: Duration) {
    let rate = bytes as f64 / took.as_secs_f64() / 1e9;
    println!("{what}: {} MiB in {:.3} s, {rate:.3} GB/s", bytes >> 20, took.as_secs_f64());
}

/// Cluster of four nodes in which every object has so many replicas.
struct Cluster {
    place: Workplace,
    control: Process,
    nodes: Vec<Process>,
    objects: u64,
}

impl Cluster {
    fn new(name: &str, replicas: u8, objects: u64, more: &dyn Fn(&Workplace, u64) -> Vec<String>) -> Self {
        let place = Workplace::new(name);
        let state = place.path("state");
        let control = ["control", "--state", text(&state), "--replicas", &replicas.to_string()];
        let control = Process::start(place.command(&control));
        control.wait_for("metrics on");
        let pool = format!("{}M", 16 + 4 * mib());
        let nodes = (1..=4).map(|number| {
            let more = more(&place, number);
            let more = more.iter().map(String::as_str);
            let domain = number.to_string();
            let settings = ["--pool", &pool, "--shards", "1", "--failure-domain", &domain, "--metrics-port", "0"];
            let settings = settings.into_iter().chain(more);
            let node = place.node(number, &settings.collect::<Vec<_>>());
            node.wait_for(COUNTERS);
            node
        });
        let nodes: Vec<Process> = nodes.collect();
        assert!(wait_until(|| (health(control.http())["members"] == 4).then_some(())).is_some());
        let mut client = place.client(Way::BOTH[0]);
        let options = PutOptions { replicas, wait_replicas: replicas, replace: true, ..PutOptions::default() };
        let mut put = |key: &str, value: &[u8]| client.replicas().put(key.as_bytes(), value, &options).unwrap().1;
        let settled = wait_until(|| (0..100).all(|at| put(&format!("first-{at}"), b"first") == replicas).then_some(()));
        assert!(settled.is_some(), "objects have {replicas} replicas");
        for key in 0..objects {
            assert_eq!(put(&self::name(key), &value(key)), replicas, "{key}");
        }
        Self { place, control, nodes, objects }
    }

    fn assert_right(&self) {
        let mut client = self.place.client(Way::BOTH[0]);
        for key in 0..self.objects {
            assert!(client.get(name(key).as_bytes()).unwrap().is_some_and(|bytes| bytes == value(key)), "{key}");
        }
    }
}

fn objects() -> u64 {
    (mib() << 20) / OBJECT_BYTES as u64
}

/// A node is killed: the time until it is expelled, and from then on until every object has all its replicas.
#[test]
fn full_copies_after_the_loss_of_a_node() {
    for replicas in [2, 3] {
        let mut cluster = Cluster::new(&format!("loss-{replicas}"), replicas, objects(), &|_, _| Vec::new());
        let wanted = (cluster.objects + 100) * u64::from(replicas - 1);
        assert_eq!(sum(&cluster.nodes, "kvplane_shard_objects_replicated"), wanted, "replicas of all");
        let start = Instant::now();
        cluster.nodes.remove(0).kill();
        let sent = |nodes: &[Process]| sum(nodes, "kvplane_shard_replicated_bytes_total");
        let before = sent(&cluster.nodes);
        let expelled = wait_until(|| (health(cluster.control.http())["members"] == 3).then_some(start.elapsed()));
        let expelled = expelled.expect("the dead node is expelled");
        let full = || sum(&cluster.nodes, "kvplane_shard_objects_replicated") == wanted;
        let full = wait_until(|| full().then_some(start.elapsed())).expect("all replicas are made again");
        let bytes = sent(&cluster.nodes) - before;
        println!("{replicas} replicas: expelled after {:.3} s", expelled.as_secs_f64());
        show(&format!("{replicas} replicas: full copies after the loss of one of four nodes"), bytes, full - expelled);
        println!("{replicas} replicas: full copies {:.3} s after the kill", full.as_secs_f64());
        cluster.assert_right();
    }
}

/// A byte of every object is damaged on one SSD: the time until a scrub has repaired all.
#[test]
fn scrub_of_damaged_records() {
    let ssd = |place: &Workplace, number: u64| place.path(&format!("ssd-{number}"));
    let more = move |place: &Workplace, number: u64| {
        let size = format!("{}:{}M", text(&ssd(place, number)), 64 + 8 * mib());
        ["--ssd", &size, "--ssd-scrub", "0", "--memory-scrub", "0"].map(str::to_owned).to_vec()
    };
    let cluster = Cluster::new("damage-rates", 2, objects(), &more);
    // The records of one node: payloads of this length begin at units of the log.
    let file = File::options().read(true).write(true).open(ssd(&cluster.place, 1)).unwrap();
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    let places = wait_until(|| {
        file.read_exact_at(&mut bytes, 0).unwrap();
        let begins: BTreeSet<Vec<u8>> = (0..cluster.objects).map(|key| value(key)[..BEGIN].to_vec()).collect();
        let blocks = (0..bytes.len() - OBJECT_BYTES).step_by(RECORD_UNIT);
        let places: Vec<usize> = blocks.filter(|at| begins.contains(&bytes[*at..*at + BEGIN])).collect();
        // Of each object two of four nodes have a record.
        (places.len() as u64 * 3 > cluster.objects).then_some(places)
    });
    let places = places.expect("records on the first node");
    for at in &places {
        file.write_all_at(&[!bytes[*at]], *at as u64).unwrap();
    }
    file.sync_all().unwrap();
    let start = Instant::now();
    cluster.place.run(&["ctl", "tier", "verify", "--rate", "4G"]).failed(1, &["records were damaged"]);
    let good = || {
        let counters = ["kvplane_tier_records_repaired_total", "kvplane_tier_rewritten_total"];
        counters.map(|name| sum(&cluster.nodes, name)).iter().sum::<u64>() >= places.len() as u64
    };
    let took = wait_until(|| good().then_some(start.elapsed())).expect("all records are good again");
    show("damaged records: found by an ordered scrub and written again", (places.len() * OBJECT_BYTES) as u64, took);
    cluster.assert_right();
}

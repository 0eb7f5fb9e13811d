//! Tests of far memory through real processes: what DRAM has no room for moves there, is read from there over every
//! transport, and comes back. NUMA node 0 serves as far memory, which every machine has.

use kvplane::Client;

use crate::support::{Process, Way, Workplace, finish, http_get, wait_until};

const BYTES: usize = 64 << 10;

/// Objects that 16 MiB and 32 MiB of memory hold together, and far more than the former.
const OBJECTS: usize = 640;

fn value(at: usize) -> Vec<u8> {
    (0..BYTES).map(|byte| (byte / 3 + at * 11) as u8).collect()
}

fn put(client: &mut Client, at: usize) {
    client.put(format!("key-{at}").as_bytes(), &value(at)).unwrap_or_else(|error| panic!("put of {at}: {error}"));
}

/// Returns true if an object is there, with its bytes.
fn is_there(client: &mut Client, at: usize) -> bool {
    let found = client.get(format!("key-{at}").as_bytes()).unwrap_or_else(|error| panic!("get of {at}: {error}"));
    assert!(found.as_ref().is_none_or(|found| *found == value(at)), "other bytes under key {at}");
    found.is_some()
}

/// Returns a metric of the only shard.
fn metric(dev: &Process, name: &str) -> u64 {
    let (_, text) = http_get(dev.address("counters of the shards on http://"), "/metrics");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}{{shard=\"0\"}} ")));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().expect("a number")
}

#[test]
fn objects_beyond_dram_are_served_from_far_memory_and_come_back() {
    for way in Way::BOTH {
        let place = Workplace::new("far");
        let settings = ["--shards", "1", "--pool-tier", "numa:0:32M", "--metrics-port", "0"];
        let dev = place.dev("16M", &settings);
        assert!(dev.said().iter().any(|line| line.contains("shard 0: 32 MiB of far memory on NUMA node 0")));
        let client = &mut place.client(way);
        (0..OBJECTS).for_each(|at| put(client, at));
        assert!((0..OBJECTS).all(|at| is_there(client, at)), "{way:?}: nothing is evicted while there is far memory");
        let (demotions, hits) =
            (metric(&dev, "kvplane_far_pool_demotions_total"), metric(&dev, "kvplane_far_pool_hits_total"));
        assert!(demotions as usize > OBJECTS / 2 && hits as usize > OBJECTS / 2, "{demotions} moved, {hits} hits");
        assert_eq!(metric(&dev, "kvplane_shard_evictions_total"), 0);
        // The second get promotes.
        (0..3).for_each(|_| assert!(is_there(client, 0)));
        assert!(metric(&dev, "kvplane_far_pool_promotions_total") > 0);
        let shown = wait_until(|| {
            let text = place.run(&["ctl", "shards"]).text();
            text.contains("far memory: ").then_some(text)
        });
        assert!(shown.expect("the shard reports it").contains("of 32 MiB used"));
        // Beyond both: the coldest go, and what is left is whole.
        (OBJECTS..2 * OBJECTS).for_each(|at| put(client, at));
        let left = (0..2 * OBJECTS).filter(|at| is_there(client, *at)).count();
        assert!((OBJECTS..2 * OBJECTS).contains(&left), "{left} objects are left");
        assert!(metric(&dev, "kvplane_far_pool_evictions_total") > 0);
        assert_eq!(client.keys().remove_all(false).expect("all are removed"), left as u64);
        assert_eq!(metric(&dev, "kvplane_far_pool_used_bytes"), 0);
    }
}

/// Far memory is between DRAM and SSD: what it evicts is still on the SSD.
#[test]
fn objects_beyond_far_memory_are_on_the_ssd() {
    let place = Workplace::new("far-ssd");
    let ssd = format!("{}:128M", place.path("ssd").display());
    let dev = place.dev("16M", &["--shards", "1", "--pool-tier", "numa:0:16M", "--ssd", &ssd, "--metrics-port", "0"]);
    let client = &mut place.client(Way::Tcp);
    (0..OBJECTS).for_each(|at| put(client, at));
    // The latest first: those are in memory, and the earlier ones on the SSD only.
    assert!((0..OBJECTS).rev().all(|at| is_there(client, at)));
    let metric = |name| metric(&dev, name);
    assert!(metric("kvplane_far_pool_hits_total") > 0 && metric("kvplane_far_pool_evictions_total") > 0);
    assert!(metric("kvplane_tier_hits_total") > 0);
}

#[test]
fn far_memory_that_cannot_be_is_refused() {
    let place = Workplace::new("far-refused");
    for (tier, words) in [
        ("cxl", ["names no far memory", "cxl:SIZE"]),
        ("numa:1G", ["names no far memory", "numa:NODE:SIZE"]),
        ("dax:/dev/dax0.0:1G", ["not mapped directly", "daxctl reconfigure-device"]),
    ] {
        finish(place.bare(&["node", "--pool-tier", tier]), &[]).failed(2, &words);
    }
    let refused = |more: &[&str], words: &[&str]| {
        place.run(&[&["dev", "--pool", "16M", "--shards", "1"], more].concat()).failed(1, words);
    };
    refused(&["--pool-tier", "numa:77:16M"], &["no NUMA node 77, only 0"]);
    refused(&["--pool-tier", "numa:0:1000T"], &["of far memory: NUMA node 0 has"]);
    refused(&["--pool-tier", "numa:0:4096"], &["4096 bytes of far memory: 1048576 are needed"]);
    let kept = place.path("kept");
    let keep = ["--pool-tier", "numa:0:16M", "--node-id", "7", "--keep-memory", kept.to_str().expect("text")];
    refused(&keep, &["far memory and memory that is kept exclude each other"]);
}

//! What the binary makes of a machine with several nodes. Runs in the rig (docs/rig.md), and elsewhere says that it was
//! skipped.

use std::fs;

use kvplane::Client;

use crate::support::{Process, Way, Workplace};

/// Whether the machine has several NUMA nodes.
fn several_nodes() -> bool {
    let inside = std::env::var("RIG").is_ok_and(|value| value == "1");
    let count = std::env::var("RIG_NUMA").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    if inside && count > 1 {
        return true;
    }
    println!("skipped: this machine has not several NUMA nodes; `cargo x test --rig` runs it in one that does");
    false
}

/// The node of each shard's thread by its core, and the node of its pool by the kernel's count of pages.
fn placement(dev: &Process, shards: usize) -> Vec<(u32, u32)> {
    let of_process = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", dev.id())).unwrap();
    let threads = fs::read_dir(format!("/proc/{}/task", dev.id())).unwrap().flatten();
    let status: Vec<String> = threads.map(|one| fs::read_to_string(one.path().join("status")).unwrap()).collect();
    let maps = of_process("numa_maps");
    (0..shards)
        .map(|shard| {
            let name = format!("Name:\tkvp-shard-{shard}\n");
            let thread = status.iter().find(|text| text.starts_with(&name)).expect("the shard has a thread");
            let core = thread.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
            let pool = format!("kvplane-pool-{shard}");
            let line = maps.lines().find(|line| line.contains(&pool)).expect("the shard has a pool");
            let counts: Vec<&str> =
                line.split(' ').filter(|word| word.starts_with('N') && word.contains('=')).collect();
            assert_eq!(counts.len(), 1, "pages of {pool} are on several nodes: {line}");
            let pool = counts[0].split('=').next().unwrap()[1..].parse().unwrap();
            (node_of(core.parse().expect("a shard is pinned to one core")), pool)
        })
        .collect()
}

fn node_of(core: usize) -> u32 {
    let entries = fs::read_dir(format!("/sys/devices/system/cpu/cpu{core}")).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter_map(|name| name.strip_prefix("node")?.parse().ok()).next().expect("a core has a node")
}

#[test]
fn shards_run_beside_their_pools_on_every_node() {
    if !several_nodes() {
        return;
    }
    let place = Workplace::new("nodes");
    let dev = place.dev("64M", &["--shards", "2", "--pacing", "park"]);
    let placement = placement(&dev, 2);
    for (shard, (thread, pool)) in placement.iter().enumerate() {
        assert_eq!(thread, pool, "shard {shard} runs on node {thread}, and its pool is on node {pool}");
    }
    assert_ne!(placement[0].0, placement[1].0, "two shards on two nodes: {:?}", dev.said());
    for way in Way::BOTH {
        let mut client: Client = place.client(way);
        for number in 0..200u32 {
            let key = format!("{}-{number}", way.name());
            let value: Vec<u8> = (0..10_000u32).map(|at| (at.wrapping_mul(31) ^ number) as u8).collect();
            client.put(key.as_bytes(), &value).unwrap();
            assert_eq!(client.get(key.as_bytes()).unwrap().as_deref(), Some(&value[..]), "{key}");
        }
    }
}

#[test]
fn topology_draws_the_machine() {
    if !several_nodes() {
        return;
    }
    let place = Workplace::new("map");
    let run = |arguments: &[&str]| crate::support::finish(place.bare(arguments), &[]).text();
    let text = run(&["topology"]);
    print!("{text}");
    assert!(text.contains("NUMA") || text.contains("node"), "{text}");
    let drawn: serde_json::Value = serde_json::from_str(&run(&["topology", "--json"])).unwrap();
    assert!(drawn.is_object(), "{drawn}");
}

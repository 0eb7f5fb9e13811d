//! Tests of the binary on a machine with several NUMA nodes. They run in the rig (docs/rig.md), and elsewhere report
//! that they were skipped.

use std::fs;
use std::path::PathBuf;

use kvplane::Client;

use crate::ssd::disks::wipe;
use crate::ssd::objects::{Bed, counted, is_there, name, recovered, value};
use crate::support::{Process, Way, Workplace, http_get};

/// Returns true if the machine has several NUMA nodes.
fn several_nodes() -> bool {
    let inside = std::env::var("RIG").is_ok_and(|value| value == "1");
    let count = std::env::var("RIG_NUMA").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    if inside && count > 1 {
        return true;
    }
    println!("skipped: this machine has not several NUMA nodes; `cargo x test --rig` runs it in one that does");
    false
}

/// Returns the NUMA node of each shard's thread by its core, and that of its pool by the kernel's count of pages.
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
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let (drives, devices) = (count("RIG_NVME"), count("RIG_RXE"));
    // With memory of its own, CXL is a node without CPUs.
    let nodes = count("RIG_NUMA") + usize::from(count("RIG_CXL") > 0);
    assert!(lines[0].starts_with(&format!("{nodes} NUMA nodes, 4 physical cores, 4 CPUs")), "{text}");
    assert!(lines[1].ends_with("housekeeping on CPU 0"), "{text}");
    // Each device is listed under its node, in the alternating order of the rig.
    let place = |name: &str| {
        let at = lines.iter().position(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
        let node = lines[..at].iter().rev().find_map(|line| line.strip_prefix("node ")).expect("a node above");
        node.split([':', ' ']).next().unwrap().to_owned()
    };
    for drive in 0..drives {
        let controller = format!("/sys/class/nvme/nvme{drive}/device/numa_node");
        let node = fs::read_to_string(controller).unwrap().trim().to_owned();
        assert_eq!(place(&format!("disk nvme{drive}n1:")), node, "{text}");
    }
    let on_pci = fs::exists("/sys/class/net/nic0/device").unwrap();
    for device in 0..devices {
        // The ends of virtual cables have no NUMA node, and are not shown as near.
        let node = if on_pci { (device % 2).to_string() } else { "unknown".to_owned() };
        assert_eq!(place(&format!("rdma rxe{device}: port 1 active")), node, "{text}");
        assert_eq!(place(&format!("nic nic{device}:")), node, "{text}");
    }
    if on_pci {
        // The matrix is the one that an engineer would write by hand: the NICs of the node first, the others behind.
        let row = |line: &str| lines.iter().any(|one| one.split_ascii_whitespace().eq(line.split(' ')));
        assert!(devices == 4 && row("cpu:0 1 node 2 d21 1 node 2 d21"), "{text}");
        assert!(row("cpu:1 2 d21 1 node 2 d21 1 node"), "{text}");
        let matrix: serde_json::Value = serde_json::from_str(&run(&["topology", "--format", "mooncake"])).unwrap();
        let wanted = serde_json::json!({
            "cpu:0": [["rxe0", "rxe2"], ["rxe1", "rxe3"]], "cpu:1": [["rxe1", "rxe3"], ["rxe0", "rxe2"]],
        });
        assert_eq!(matrix, wanted);
    }
    let drawn: serde_json::Value = serde_json::from_str(&run(&["topology", "--json"])).unwrap();
    assert_eq!(drawn["machine"]["cores"].as_array().map(Vec::len), Some(4), "{drawn}");
}

/// Objects that DRAM has no room for are in CXL memory, and are served from there. The emulator interprets each access
/// to it, so there are few.
#[test]
fn cxl_memory_holds_what_dram_has_no_room_for() {
    if count("RIG_CXL") == 0 {
        println!("skipped: this machine has no CXL memory; `cargo x test --rig` runs it in one that does");
        return;
    }
    let place = Workplace::new("cxl");
    let dev = place.dev("2M", &["--shards", "1", "--pacing", "park", "--pool-tier", "cxl:1M", "--metrics-port", "0"]);
    // Behind the nodes with cores.
    let node = count("RIG_NUMA").max(1);
    let said = dev.wait_for("of far memory on NUMA node");
    assert!(said.ends_with(&format!("node {node}")), "{said}");
    let maps = fs::read_to_string(format!("/proc/{}/numa_maps", dev.id())).unwrap();
    let of_pool: Vec<&str> = maps.lines().filter(|line| line.contains("kvplane-pool-0")).collect();
    let pages = format!(" N{node}=");
    assert!(of_pool.len() == 2 && of_pool.iter().any(|line| line.contains(&pages)), "{of_pool:?}");
    let value = |number: usize| (0..16_000).map(|at: usize| (at.wrapping_mul(31) ^ number) as u8).collect::<Vec<u8>>();
    for way in Way::BOTH {
        let mut client: Client = place.client(way);
        for number in 0..160 {
            client.put(format!("{}-{number}", way.name()).as_bytes(), &value(number)).unwrap();
        }
        for number in 0..160 {
            let found = client.get(format!("{}-{number}", way.name()).as_bytes()).unwrap();
            assert!(found == Some(value(number)), "{} {number}", way.name());
        }
        assert!(client.keys().remove_all(false).unwrap() >= 160);
    }
    let (_, text) = http_get(dev.address("counters of the shards on http://"), "/metrics");
    let hits = text.lines().find(|line| line.starts_with("kvplane_far_pool_hits_total")).expect("it is counted");
    assert!(!hits.ends_with(" 0"), "{hits}");
    drop(dev);
    if count("RIG_RXE") == 0 {
        return;
    }
    // RDMA devices register the pool, and the kernel takes what is movable to other memory for that.
    bring_online(node, "online_movable");
    let refused = place.run(&["dev", "--pool", "2M", "--shards", "1", "--pool-tier", "cxl:1M"]);
    bring_online(node, "online_kernel");
    refused.failed(1, &[&format!("far memory went from NUMA node {node} to"), "--no-movable"]);
}

/// Takes the memory of a NUMA node offline, and online again in this way.
fn bring_online(node: usize, way: &str) {
    let entries = fs::read_dir(format!("/sys/devices/system/node/node{node}")).unwrap().flatten();
    let is_block = |entry: &fs::DirEntry| {
        entry.file_name().to_string_lossy().strip_prefix("memory").is_some_and(|number| number.parse::<u32>().is_ok())
    };
    // Their links in the directory of the node go away with its last memory: the blocks themselves stay.
    let file = |block: fs::DirEntry| fs::canonicalize(block.path()).unwrap().join("state");
    let files: Vec<PathBuf> = entries.filter(is_block).map(file).collect();
    for state in ["offline", way] {
        for file in &files {
            fs::write(file, state).unwrap_or_else(|error| panic!("{state} to {}: {error}", file.display()));
        }
    }
}

/// Returns the number of a kind of devices of the machine, by the rig's variable.
fn count(variable: &str) -> usize {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Each I/O path to the drive finds the bytes that the others wrote.
#[test]
fn objects_on_a_drive_are_there_whichever_way_is_taken() {
    if count("RIG_NVME") == 0 {
        println!("skipped: this machine has no NVMe drive; `cargo x test --rig` runs it in one that does");
        return;
    }
    wipe("/dev/rig/d1");
    let mut bed = Bed::over(Workplace::new("drive"), "/dev/rig/d1", &["--ssd-ack", "durable", "--ssd-promote", "15"]);
    let mut next = 0;
    for (way, says) in [
        ("passthrough", "NVMe commands by /dev/ng"),
        ("uring", "io_uring, direct I/O, completions by interrupt"),
        ("auto", "NVMe commands by /dev/ng"),
        ("iopoll", "io_uring, direct I/O, completions polled"),
    ] {
        bed = Bed::over(bed.place, "/dev/rig/d1", &["--ssd-ack", "durable", "--ssd-promote", "15", "--ssd-io", way]);
        let mut dev = bed.start();
        recovered(&dev);
        println!("{}", dev.wait_for(says));
        for way in Way::BOTH {
            let mut client = bed.client(way);
            assert!((0..next).all(|key| is_there(&mut client, key)), "{way:?}");
            for key in next..next + 8 {
                client.put(name(key).as_bytes(), &value(key)).unwrap();
            }
            next += 8;
        }
        let commands = counted(&dev, "kvplane_tier_device_commands_total");
        assert_eq!(commands > 0.0, says.contains("commands"), "{commands} commands");
        assert_eq!(counted(&dev, "kvplane_tier_device_commands_failed_total"), 0.0);
        dev.kill();
    }
}

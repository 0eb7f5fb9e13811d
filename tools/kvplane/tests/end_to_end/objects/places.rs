//! Tests of preferred nodes: objects go to the nodes that their callers prefer.

use kvplane::{Client, ClientConfig, Near, NodeId};

use crate::support::{Process, Way, Workplace, health, http_get, text, wait_until};

const OBJECTS: usize = 12;
const BYTES: usize = 1 << 20;

/// Returns the bytes in use of a node's memory, as reported.
fn used(dev: &Process, node: u64) -> u64 {
    let (_, body) = http_get(dev.http(), "/debug/shards");
    let shown: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    let nodes = shown["nodes"].as_array().expect("nodes");
    let shards = nodes.iter().filter(|one| one["node"] == node).flat_map(|node| node["shards"].as_array().unwrap());
    shards.map(|shard| shard["pool"]["used_bytes"].as_u64().expect("a number")).sum()
}

fn value(key: usize) -> Vec<u8> {
    (0..BYTES).map(|at| (key.wrapping_mul(0x9e37_79b9) ^ at ^ at >> 8) as u8).collect()
}

#[test]
fn objects_are_placed_on_preferred_nodes_or_together() {
    let place = Workplace::new("places");
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state)]));
    control.wait_for("metrics on");
    let _nodes: Vec<Process> = (1..=3).map(|number| place.node(number, &["--pool", "64M", "--shards", "1"])).collect();
    let there = wait_until(|| (health(control.http())["members"] == 3).then_some(()));
    assert_eq!(there, Some(()), "3 members");
    let config: ClientConfig = place.client_config(Way::Tcp);
    let mut client = Client::connect(&config).unwrap();
    let all = OBJECTS * BYTES;
    // An unknown node is ignored; the owner of the key's slot needs no head.
    client.placement().prefer(Near { nodes: vec![NodeId(99), NodeId(2)], together: false });
    for key in 0..OBJECTS {
        client.put(format!("near-{key}").as_bytes(), &value(key)).unwrap();
    }
    let near = wait_until(|| (used(&control, 2) >= all as u64).then_some(()));
    assert_eq!(near, Some(()), "all of it is on node 2, which has {}", used(&control, 2));
    assert!(used(&control, 1) + used(&control, 3) < BYTES as u64, "only heads are elsewhere");
    let mut other = Client::connect(&config).unwrap();
    for key in 0..OBJECTS {
        let name = format!("near-{key}");
        assert_eq!(other.size(name.as_bytes()).unwrap(), Some(BYTES as u64), "{name}");
        assert_eq!(other.get(name.as_bytes()).unwrap(), Some(value(key)), "{name}");
    }
    assert_eq!(client.put(b"near-0", &value(7)).unwrap(), kvplane::Put::Exists);
    assert_eq!(other.get(b"near-0").unwrap(), Some(value(0)), "it was left as it was");
    client.upsert(b"near-0", &value(7)).unwrap();
    assert_eq!(other.get(b"near-0").unwrap(), Some(value(7)));
    for key in 0..OBJECTS {
        assert!(other.remove(format!("near-{key}").as_bytes()).unwrap(), "near-{key}");
    }
    let empty = wait_until(|| ((1..=3).map(|node| used(&control, node)).sum::<u64>() == 0).then_some(()));
    assert_eq!(empty, Some(()), "nothing is left behind");
    // Without preferred nodes, a batch is placed with its first key.
    client.placement().prefer(Near { nodes: Vec::new(), together: true });
    let names: Vec<String> = (0..OBJECTS).map(|key| format!("together-{key}")).collect();
    let values: Vec<Vec<u8>> = (0..OBJECTS).map(value).collect();
    let region = kvplane::Region::allocate(&kvplane::RegionOptions::new("places", all)).unwrap();
    values.iter().enumerate().for_each(|(at, value)| region.copy_in(at * BYTES, value));
    let buffer = client.register(region);
    let items: Vec<(&[u8], kvplane::Slice)> =
        names.iter().enumerate().map(|(at, name)| (name.as_bytes(), buffer.slice(at * BYTES, BYTES))).collect();
    for put in client.batch_put_from(&items).unwrap() {
        assert!(matches!(put, Ok(kvplane::Put::Stored(_))), "{put:?}");
    }
    let together = wait_until(|| (1..=3).find(|node| used(&control, *node) >= all as u64));
    assert!(together.is_some(), "one node has all of it");
    for (name, value) in names.iter().zip(&values) {
        assert_eq!(other.get(name.as_bytes()).unwrap().as_ref(), Some(value), "{name}");
    }
}

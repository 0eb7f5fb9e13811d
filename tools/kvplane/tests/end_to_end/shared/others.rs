//! The shared tier together with several replicas of an object, and with memory that outlives its process.

use std::path::PathBuf;

use kvplane::PutOptions;

use super::{Bed, KEYS, Store, check_all, counted, fill, name, put, value, version_of, wait_for_count};
use crate::support::{Process, text, wait_until};

#[test]
fn an_object_with_three_replicas_is_uploaded_by_its_owner_only() {
    let bed = Bed::with_replicas("shared-replicas", "3", Store::directory);
    let mut nodes: Vec<Process> =
        (1..=3).map(|number| bed.node(number, &["--failure-domain", &number.to_string()])).collect();
    bed.wait_for_members(3);
    bed.wait_for_manifests(3);
    let all = |nodes: &[Process], family: &str| -> f64 { nodes.iter().map(|node| counted(node, family)).sum() };
    let settled = wait_until(|| (all(&nodes, "kvplane_shared_slots") >= 16_384.0).then_some(()));
    assert!(settled.is_some(), "{:?}", nodes[0].said());
    let mut client = bed.client();
    let options = PutOptions { replicas: 3, wait_replicas: 3, replace: true, ..PutOptions::default() };
    for key in 0..KEYS {
        // The first puts may come before the nodes know each other.
        let done = wait_until(|| {
            let (_, replicas) = client.replicas().put(name(key).as_bytes(), &value(key, 0), &options).ok()?;
            (replicas == 3).then_some(())
        });
        assert!(done.is_some(), "object {key} has three replicas");
    }
    let objects = |nodes: &[Process]| all(nodes, "kvplane_shared_objects") as usize;
    let there = wait_until(|| (objects(&nodes) >= KEYS).then_some(()));
    assert!(there.is_some(), "{:?}", nodes[0].said());
    assert_eq!(objects(&nodes), KEYS, "each object in the index of one node");
    // A removal at the owner counts for those who take over.
    for key in (0..KEYS).step_by(2) {
        let removed = wait_until(|| client.remove(name(key).as_bytes()).ok());
        assert!(removed.is_some(), "removal of object {key}");
    }
    assert_eq!(objects(&nodes), KEYS / 2);
    let versions: Vec<_> = (0..KEYS).map(|key| (key % 2 == 1).then_some(0)).collect();
    for left in [&[2, 3][..], &[3]] {
        nodes.remove(0).kill();
        bed.wait_for_members(left.len() as u64);
        check_all(&mut client, &versions, &nodes[0]);
        bed.wait_until_recorded(left);
    }
}

/// Directory in memory, which is removed with the test.
struct Memory(PathBuf);

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_node_that_keeps_its_memory_and_uploads_loses_nothing_in_any_restart() {
    let bed = Bed::new("shared-kept", Store::directory);
    let memory = Memory(PathBuf::from("/dev/shm").join(bed.place.directory.file_name().expect("a name")));
    let keep = ["--keep-memory", text(&memory.0)];
    let (mut node, mut client) = bed.one_node(&keep);
    let mut versions = fill(&mut client, &[&node]);
    let kept = "kvplane_kept_memory_objects";
    for turn in 0..2 {
        assert!(node.stop().success(), "{:?}", node.said());
        node = bed.node(1, &keep);
        // While memory is there and the index of the tier is not yet: replacements and removals count at once.
        let key = 2 + turn;
        put(&mut client, key, 3);
        versions[key] = Some(3);
        let removed = wait_until(|| client.remove(name(key + 6).as_bytes()).ok());
        assert!(removed.is_some(), "removal of object {}", key + 6);
        versions[key + 6] = None;
        check_all(&mut client, &versions, &node);
        assert!(counted(&node, kept) >= KEYS as f64 / 2.0, "{:?}", node.said());
        wait_for_count(&[&node], "kvplane_shared_slots", 16_384.0);
    }
    // What only the tier has is the same: a killed node leaves no image. Its first starts may be refused, as it still
    // counts as live: these have owned nothing.
    wait_for_count(&[&node], "kvplane_shared_objects", versions.iter().flatten().count() as f64);
    bed.wait_until_recorded(&[1]);
    node.kill();
    let mut node = bed.node(1, &keep);
    node.wait_for("the former process was killed, or crashed");
    check_all(&mut client, &versions, &node);
    assert!(counted(&node, "kvplane_shared_reads_total") > 0.0);
    // And once more in order, with objects in memory that were read from the tier.
    assert!(node.stop().success());
    let node = bed.node(1, &keep);
    check_all(&mut client, &versions, &node);
    assert!(counted(&node, kept) > 0.0);
    (0..KEYS).for_each(|key| assert_eq!(version_of(&mut client, key), versions[key], "object {key}"));
}

//! Stores that deny, throttle, return other bytes, are full or read-only, or whose clock jumps: the node goes on, and
//! no wrong byte is read.

use std::time::Duration;

use kvplane::Client;
use kvplane_fake_s3::{FakeS3, Trouble};

use super::{Bed, KEYS, Store, check_all, counted, fill, name, put, value, version_of, wait_for_count};
use crate::ssd::disks::{run, skipped};
use crate::support::{Process, Workplace, text, wait_until};

/// Objects of which memory has no room for all, behind those of the other tests.
const MANY: core::ops::Range<usize> = 100..500;

/// Puts a new object and gets it, whatever the store does.
fn goes_on(client: &mut Client, key: usize) {
    client.put(name(key).as_bytes(), &value(key, 0)).expect("a put while the store fails");
    assert_eq!(version_of(client, key), Some(0));
}

fn wait_until_it_works(node: &Process) {
    let works = wait_until(|| (counted(node, "kvplane_shared_failing") == 0.0).then_some(()));
    assert!(works.is_some(), "the store works again: {:?}", node.said());
}

#[test]
fn a_node_goes_on_whatever_its_bucket_does() {
    let service = FakeS3::start();
    service.set_trouble(Trouble::Deny);
    let bed = Bed::new("shared-trouble", |_| Store::Bucket(service));
    let node = bed.node(1, &[]);
    bed.wait_for_members(1);
    let service = bed.service();
    let mut client = bed.client();
    goes_on(&mut client, 0);
    wait_for_count(&[&node], "kvplane_shared_denied_total", 1.0);
    wait_for_count(&[&node], "kvplane_shared_failing", 1.0);
    node.wait_for("access is denied");
    service.set_trouble(Trouble::Throttle);
    goes_on(&mut client, 1);
    wait_for_count(&[&node], "kvplane_shared_throttled_total", 1.0);
    service.set_trouble(Trouble::None);
    bed.wait_for_manifests(1);
    goes_on(&mut client, 2);
    wait_for_count(&[&node], "kvplane_shared_uploads_total", 1.0);
    // Objects that memory has no room for are read from the bucket.
    MANY.for_each(|key| put(&mut client, key, 0));
    wait_for_count(&[&node], "kvplane_shared_objects", 300.0);
    MANY.filter(|key| key % 2 == 0).for_each(|key| assert!(version_of(&mut client, key).is_none_or(|it| it == 0)));
    assert!(counted(&node, "kvplane_shared_reads_total") > 0.0, "{:?}", node.said());
    // Other bytes are misses, and are counted.
    service.set_trouble(Trouble::Corrupt);
    let missed = MANY.filter(|key| version_of(&mut client, *key).is_none()).count();
    assert!(missed > 0 && counted(&node, "kvplane_shared_damaged_total") > 0.0, "{missed} missed");
    service.set_trouble(Trouble::DenyWrites);
    goes_on(&mut client, 3);
    // A removal that cannot be recorded is refused, and a later one works.
    let kept = MANY.map(name).find(|key| client.remove(key.as_bytes()).is_err());
    let kept = kept.expect("an object of the bucket, whose removal could be undone");
    service.set_trouble(Trouble::None);
    let removed = wait_until(|| client.remove(kept.as_bytes()).ok());
    assert!(removed.is_some(), "{:?}", node.said());
    assert_eq!(client.get(kept.as_bytes()).expect("an answer"), None);
}

#[test]
fn a_takeover_from_a_bucket_with_other_bytes_finds_nothing() {
    let bed = Bed::new("shared-other", |_| Store::Bucket(FakeS3::start()));
    let (mut node, mut client) = bed.one_node(&[]);
    fill(&mut client, &[&node]);
    bed.wait_until_recorded(&[1]);
    node.kill();
    bed.service().set_trouble(Trouble::Corrupt);
    let node = bed.node(1, &[]);
    wait_for_count(&[&node], "kvplane_shared_slots_void_total", 1.0);
    assert!(counted(&node, "kvplane_shared_damaged_total") > 0.0, "{:?}", node.said());
    bed.service().set_trouble(Trouble::None);
    (0..KEYS).for_each(|key| assert_eq!(version_of(&mut client, key), None, "object {key}"));
    // What is put again is uploaded, and the next incarnation finds it.
    let versions = fill(&mut client, &[&node]);
    bed.wait_until_recorded(&[1]);
    drop(node);
    let node = bed.node(1, &[]);
    check_all(&mut client, &versions, &node);
}

#[test]
fn a_clock_of_the_store_that_jumps_costs_misses_only() {
    let bed = Bed::new("shared-clock", |_| Store::Bucket(FakeS3::start()));
    let lifetime = ["--shared-lifetime", "1"];
    let (mut node, mut client) = bed.one_node(&lifetime);
    fill(&mut client, &[&node]);
    node.kill();
    // A day later, all lifetimes are over.
    bed.service().set_clock_ahead(Duration::from_secs(86_400));
    let mut node = bed.node(1, &lifetime);
    let gone = wait_until(|| (0..KEYS).all(|key| version_of(&mut client, key).is_none()).then_some(()));
    assert!(gone.is_some(), "{:?}", node.said());
    let versions = fill(&mut client, &[&node]);
    bed.wait_until_recorded(&[1]);
    node.kill();
    // Back again: what was written then is of the future, and lives on.
    bed.service().set_clock_ahead(Duration::ZERO);
    let node = bed.node(1, &lifetime);
    check_all(&mut client, &versions, &node);
    fill(&mut client, &[&node]);
}

/// Small file system in memory; unmounted on drop.
struct SmallDisk(String);

impl SmallDisk {
    fn mount(place: &Workplace) -> Option<Self> {
        let at = text(&place.path("shared")).to_owned();
        std::fs::create_dir_all(&at).expect("a directory");
        match run("mount", &["-t", "tmpfs", "-o", "size=256k", "tmpfs", &at]) {
            Ok(_) => Some(Self(at)),
            Err(why) => skipped("a file system that is full and read-only", &why),
        }
    }

    fn remount(&self, options: &str) {
        // Busy while a file is being written.
        let done = wait_until(|| run("mount", &["-o", &format!("remount,{options}"), &self.0]).ok());
        assert!(done.is_some(), "{} with {options}", self.0);
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = run("umount", &["--lazy", &self.0]);
    }
}

#[test]
fn a_node_goes_on_while_its_file_system_is_full_or_read_only() {
    let bed = Bed::new("shared-full", Store::directory);
    let Some(disk) = SmallDisk::mount(&bed.place) else { return };
    let (mut node, mut client) = bed.one_node(&[]);
    let all = 0..KEYS;
    all.clone().for_each(|key| put(&mut client, key, 0));
    node.wait_for("there is no space left");
    wait_for_count(&[&node], "kvplane_shared_failing", 1.0);
    all.clone().for_each(|key| assert_eq!(version_of(&mut client, key), Some(0)));
    goes_on(&mut client, KEYS);
    disk.remount("size=64m");
    wait_until_it_works(&node);
    all.clone().for_each(|key| put(&mut client, key, 1));
    wait_for_count(&[&node], "kvplane_shared_objects", (KEYS + 1) as f64);
    disk.remount("ro");
    put(&mut client, KEYS + 1, 0);
    node.wait_for("it is read-only");
    goes_on(&mut client, KEYS + 2);
    let removal = client.remove(name(0).as_bytes());
    assert!(removal.is_err(), "a removal that the next owner would undo: {removal:?}");
    disk.remount("rw");
    wait_until_it_works(&node);
    let removed = wait_until(|| client.remove(name(0).as_bytes()).ok());
    assert!(removed.is_some(), "{:?}", node.said());
    node.kill();
    let node = bed.node(1, &[]);
    let versions: Vec<_> = all.map(|key| (key > 0).then_some(1)).collect();
    check_all(&mut client, &versions, &node);
}

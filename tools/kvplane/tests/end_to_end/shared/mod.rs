//! Tests of the shared tier: nodes that die, and others that serve what these have uploaded, over a directory and over
//! an S3 service that denies, throttles and corrupts.

use std::process::Command;

use kvplane::{Client, PutOptions};
use kvplane_fake_s3::{FakeS3, Trouble};

use crate::operation::counted::sum;
use crate::support::{Process, Way, Workplace, health, http_get, text, wait_until};

/// Flags of the tier that make it upload everything at once.
const AT_ONCE: [&str; 4] = ["--shared-upload", "all", "--shared-flush-ms", "20"];
const KEYS: usize = 48;

fn name(key: usize) -> String {
    format!("object-{key}")
}

fn value(key: usize, version: usize) -> Vec<u8> {
    format!("{key}.{version},").repeat(700 + key * 50).into_bytes()
}

/// Store of a test, and the environment of the processes that use it.
enum Store {
    Directory(String),
    Bucket(FakeS3),
}

impl Store {
    fn place(&self) -> &str {
        match self {
            Self::Directory(path) => path,
            Self::Bucket(_) => "s3://bucket/some/prefix",
        }
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Directory(_) => Vec::new(),
            Self::Bucket(service) => service.environment(),
        }
    }

    /// Returns the number of objects of the store whose names have this part.
    fn count(&self, part: &str) -> usize {
        match self {
            Self::Bucket(service) => service.objects().iter().filter(|(name, _)| name.contains(part)).count(),
            Self::Directory(path) => {
                let found = Command::new("find").args([path, "-type", "f", "-name", &format!("{part}*")]).output();
                String::from_utf8_lossy(&found.expect("find runs").stdout).lines().count()
            }
        }
    }
}

struct Bed {
    place: Workplace,
    store: Store,
    control: Process,
}

impl Bed {
    fn new(name: &str, store: impl FnOnce(&Workplace) -> Store) -> Self {
        let place = Workplace::new(name);
        let store = store(&place);
        let control = Process::start(place.command(&["control", "--state", text(&place.path("state"))]));
        control.wait_for("metrics on");
        Self { place, store, control }
    }

    fn node(&self, number: u64, more: &[&str]) -> Process {
        let number = number.to_string();
        let tier = ["--shared-tier", self.store.place()];
        let own = ["node", "--node-id", &number, "--pool", "16M", "--shards", "1", "--metrics-port", "0"];
        let wait = ["--wait-control", "60"];
        let mut command = self.place.command(&[&own[..], &wait, &tier, &AT_ONCE, more].concat());
        command.envs(self.store.environment());
        let node = Process::start(command);
        node.wait_for(&format!("node {number} with"));
        node
    }

    fn wait_for_members(&self, count: u64) {
        let there = wait_until(|| (health(self.control.http())["members"] == count).then_some(()));
        assert!(there.is_some(), "{count} members: {:?}", self.control.said());
    }

    /// Waits until each of so many shards has a manifest in the store.
    fn wait_for_manifests(&self, count: usize) {
        let there = wait_until(|| (self.store.count("manifest-") >= count).then_some(()));
        assert!(there.is_some(), "{count} manifests, not {}", self.store.count("manifest-"));
    }

    fn client(&self) -> Client {
        self.place.client(Way::Tcp)
    }
}

fn counted(node: &Process, family: &str) -> f64 {
    let address = node.address("counters of the shards on http://");
    sum(&http_get(address, "/metrics").1, family, "shard")
}

fn wait_for_count(nodes: &[&Process], family: &str, least: f64) {
    let all = || nodes.iter().map(|node| counted(node, family)).sum::<f64>();
    let there = wait_until(|| (all() >= least).then_some(()));
    assert!(there.is_some(), "{family} is {}, not {least}: {:?}", all(), nodes.last().map(|node| node.said()));
}

fn put(client: &mut Client, key: usize, version: usize) {
    let options = PutOptions { replace: true, ..PutOptions::default() };
    let done = wait_until(|| client.put_with(name(key).as_bytes(), &value(key, version), &options).ok());
    assert!(done.is_some(), "put of object {key}");
}

/// Returns the version of an object that a get returns, and asserts that it is whole.
fn version_of(client: &mut Client, key: usize) -> Option<usize> {
    let got = wait_until(|| client.get(name(key).as_bytes()).ok()).expect("an answer")?;
    let version = (0..3).find(|version| got == value(key, *version));
    assert!(version.is_some(), "wrong bytes of object {key}");
    version
}

/// Puts objects, replaces some and removes some. Returns the version of each that is left.
fn fill(client: &mut Client, nodes: &[&Process]) -> Vec<Option<usize>> {
    let mut versions: Vec<Option<usize>> = vec![Some(0); KEYS];
    (0..KEYS).for_each(|key| put(client, key, 0));
    wait_for_count(nodes, "kvplane_shared_uploads_total", KEYS as f64);
    for key in (0..KEYS).step_by(6) {
        put(client, key, 1);
        versions[key] = Some(1);
        let removed = wait_until(|| client.remove(name(key + 1).as_bytes()).ok());
        assert!(removed.is_some(), "removal of object {}", key + 1);
        versions[key + 1] = None;
    }
    wait_for_count(nodes, "kvplane_shared_uploads_total", (KEYS + KEYS / 6) as f64);
    versions
}

fn check_all(client: &mut Client, versions: &[Option<usize>], who: &Process) {
    for (key, version) in versions.iter().enumerate().filter(|(_, version)| version.is_some()) {
        let found = wait_until(|| version_of(client, key).filter(|found| Some(*found) == *version));
        assert!(found.is_some(), "object {key} of version {version:?} is a miss: {:?}", who.said());
    }
    for (key, version) in versions.iter().enumerate() {
        assert_eq!(version_of(client, key), *version, "object {key}");
    }
}

fn another_owner_serves(bed: &Bed) {
    let mut dead = bed.node(1, &[]);
    let other = bed.node(2, &[]);
    bed.wait_for_members(2);
    bed.wait_for_manifests(2);
    wait_for_count(&[&dead, &other], "kvplane_shared_slots", 16_384.0);
    let mut client = bed.client();
    let versions = fill(&mut client, &[&dead, &other]);
    dead.kill();
    bed.wait_for_members(1);
    check_all(&mut client, &versions, &other);
    assert!(counted(&other, "kvplane_shared_taken_over_total") > 0.0, "{:?}", other.said());
    // What is removed at the new owner does not come back with the dead one.
    for (key, version) in versions.iter().enumerate().take(KEYS / 2).filter(|(_, version)| version.is_some()) {
        let removed = wait_until(|| client.remove(name(key).as_bytes()).ok());
        assert!(removed.is_some(), "removal of object {key} of version {version:?}");
    }
    let _back = bed.node(1, &[]);
    bed.wait_for_members(2);
    for key in 0..KEYS {
        let found = version_of(&mut client, key);
        assert!(found.is_none() || key >= KEYS / 2 && found == versions[key], "object {key} is back: {found:?}");
    }
}

#[test]
fn another_owner_serves_from_a_directory_what_a_dead_one_uploaded() {
    let bed = Bed::new("shared-dir", |place| Store::Directory(text(&place.path("shared")).to_owned()));
    another_owner_serves(&bed);
}

#[test]
fn another_owner_serves_from_a_bucket_what_a_dead_one_uploaded() {
    let bed = Bed::new("shared-s3", |_| Store::Bucket(FakeS3::start()));
    another_owner_serves(&bed);
    assert!(bed.store.count("pack-") > 0);
}

#[test]
fn a_restarted_node_finds_what_it_had_uploaded() {
    let bed = Bed::new("shared-restart", |place| Store::Directory(text(&place.path("shared")).to_owned()));
    let mut node = bed.node(1, &[]);
    bed.wait_for_members(1);
    bed.wait_for_manifests(1);
    let mut client = bed.client();
    let versions = fill(&mut client, &[&node]);
    node.kill();
    let mut node = bed.node(1, &[]);
    check_all(&mut client, &versions, &node);
    // In order, too, and with what was put just before.
    put(&mut client, 1, 2);
    assert!(node.stop().success());
    let node = bed.node(1, &[]);
    let mut versions = versions;
    versions[1] = Some(2);
    check_all(&mut client, &versions, &node);
    // After a removal of everything nothing comes back.
    let removed = wait_until(|| client.keys().remove_all(true).ok());
    assert!(removed.is_some(), "a removal of everything: {:?}", node.said());
    drop(node);
    let _node = bed.node(1, &[]);
    for key in 0..KEYS {
        assert_eq!(version_of(&mut client, key), None, "object {key}");
    }
}

#[test]
fn a_node_goes_on_whatever_its_bucket_does() {
    let service = FakeS3::start();
    service.set_trouble(Trouble::Deny);
    let bed = Bed::new("shared-trouble", |_| Store::Bucket(service));
    let node = bed.node(1, &[]);
    bed.wait_for_members(1);
    let Store::Bucket(service) = &bed.store else { panic!("a bucket") };
    let mut client = bed.client();
    let works = |client: &mut Client, key: usize| {
        client.put(name(key).as_bytes(), &value(key, 0)).expect("a put while the bucket fails");
        assert_eq!(version_of(client, key), Some(0));
    };
    works(&mut client, 0);
    wait_for_count(&[&node], "kvplane_shared_denied_total", 1.0);
    wait_for_count(&[&node], "kvplane_shared_failing", 1.0);
    node.wait_for("access is denied");
    service.set_trouble(Trouble::Throttle);
    works(&mut client, 1);
    wait_for_count(&[&node], "kvplane_shared_throttled_total", 1.0);
    service.set_trouble(Trouble::None);
    bed.wait_for_manifests(1);
    works(&mut client, 2);
    wait_for_count(&[&node], "kvplane_shared_uploads_total", 1.0);
    // Objects that memory has no room for are read from the bucket.
    let fill_from = 100;
    for key in fill_from..fill_from + 400 {
        put(&mut client, key, 0);
    }
    wait_for_count(&[&node], "kvplane_shared_objects", 300.0);
    assert_eq!(version_of(&mut client, 2), Some(0), "{:?}", node.said());
    assert!(counted(&node, "kvplane_shared_reads_total") > 0.0);
    // Other bytes are misses, and are counted.
    service.set_trouble(Trouble::Corrupt);
    let missed = (fill_from..fill_from + 40).filter(|key| version_of(&mut client, *key).is_none()).count();
    assert!(missed > 0 && counted(&node, "kvplane_shared_damaged_total") > 0.0, "{missed} missed");
    service.set_trouble(Trouble::DenyWrites);
    works(&mut client, 3);
    // A removal that cannot be recorded is refused, and a later one works.
    let mut is_refused = |key: &usize| client.remove(name(*key).as_bytes()).is_err();
    let kept = (fill_from + 200..fill_from + 400).find(|key| is_refused(key));
    let kept = name(kept.expect("an object of the bucket, whose removal could be undone"));
    service.set_trouble(Trouble::None);
    let removed = wait_until(|| client.remove(kept.as_bytes()).ok());
    assert!(removed.is_some(), "{:?}", node.said());
    assert_eq!(client.get(kept.as_bytes()).expect("an answer"), None);
}

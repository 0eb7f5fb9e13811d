//! Tests of the shared tier: nodes that die, and others that serve what these have uploaded, over a directory and over
//! an S3 service.

mod others;
mod trouble;

use std::process::Command;

use kvplane::{Client, PutOptions};
use kvplane_fake_s3::FakeS3;

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
    /// Creates an empty directory.
    fn directory(place: &Workplace) -> Self {
        let path = place.path("shared");
        std::fs::create_dir_all(&path).expect("a directory");
        Self::Directory(text(&path).to_owned())
    }

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

    /// Returns the names of the objects of the store whose last parts begin with this.
    fn names(&self, part: &str) -> Vec<String> {
        match self {
            Self::Bucket(service) => {
                let names = service.objects().into_iter().map(|(name, _)| name);
                names.filter(|name| name.contains(&format!("/{part}"))).collect()
            }
            Self::Directory(path) => {
                let found = Command::new("find").args([path, "-type", "f", "-name", &format!("{part}*")]).output();
                String::from_utf8_lossy(&found.expect("find runs").stdout).lines().map(str::to_owned).collect()
            }
        }
    }

    /// Returns the number of slots that the newest manifest of a node's newest incarnation names as owned
    /// (docs/shared-tier-format.md).
    fn recorded_slots(&self, node: u64) -> u32 {
        let stream = format!("/{node:016x}-0000-");
        let names = self.names("");
        let rest_of = |name: &String| Some(name.split_once(&stream)?.1.to_owned());
        let incarnation = names.iter().filter_map(|name| Some(rest_of(name)?.split_once('/')?.0.to_owned())).max();
        let manifests = format!("{}/manifest-", incarnation.unwrap_or_default());
        let of_it = names.iter().filter_map(|name| Some((rest_of(name)?, name)));
        let newest = of_it.filter(|(rest, _)| rest.starts_with(&manifests)).max();
        // It may have been replaced meanwhile.
        let manifest = newest.and_then(|(_, name)| match self {
            Self::Bucket(service) => service.bytes(name).map(|bytes| bytes.to_vec()),
            Self::Directory(_) => std::fs::read(name).ok(),
        });
        manifest.iter().flatten().skip(64).take(16_384 / 8).map(|byte| byte.count_ones()).sum()
    }
}

struct Bed {
    place: Workplace,
    store: Store,
    control: Process,
}

impl Bed {
    fn new(name: &str, store: impl FnOnce(&Workplace) -> Store) -> Self {
        Self::with_replicas(name, "1", store)
    }

    fn with_replicas(name: &str, replicas: &str, store: impl FnOnce(&Workplace) -> Store) -> Self {
        let place = Workplace::new(name);
        let store = store(&place);
        let state = place.path("state");
        let arguments = ["control", "--state", text(&state), "--replicas", replicas];
        let control = Process::start(place.command(&arguments));
        control.wait_for("metrics on");
        Self { place, store, control }
    }

    fn node(&self, number: u64, more: &[&str]) -> Process {
        let tier = ["--shared-tier", self.store.place()];
        let own = ["--pool", "16M", "--shards", "1", "--metrics-port", "0"];
        self.place.node_in(number, &[&own[..], &tier, &AT_ONCE, more].concat(), &self.store.environment())
    }

    /// Starts the only node of the cluster, with more arguments. Returns it once its manifests are written, and a
    /// client.
    fn one_node(&self, more: &[&str]) -> (Process, Client) {
        let node = self.node(1, more);
        self.wait_for_members(1);
        self.wait_for_manifests(1);
        (node, self.client())
    }

    fn wait_for_members(&self, count: u64) {
        let there = wait_until(|| (health(self.control.http())["members"] == count).then_some(()));
        assert!(there.is_some(), "{count} members: {:?}", self.control.said());
    }

    /// Waits until each of so many shards has a manifest in the store.
    fn wait_for_manifests(&self, count: usize) {
        let there = wait_until(|| (self.store.names("manifest-").len() >= count).then_some(()));
        assert!(there.is_some(), "{count} manifests, not {:?}", self.store.names("manifest-"));
    }

    /// Waits until the manifests of these nodes' present incarnations, in the store, name all slots: from then on, what
    /// the tier has outlives any of the nodes.
    fn wait_until_recorded(&self, nodes: &[u64]) {
        let slots = || nodes.iter().map(|node| self.store.recorded_slots(*node)).sum::<u32>();
        let there = wait_until(|| (slots() == 16_384).then_some(()));
        assert!(there.is_some(), "{} slots of nodes {nodes:?} are recorded", slots());
    }

    /// Returns the S3 service that is the store.
    fn service(&self) -> &FakeS3 {
        match &self.store {
            Store::Bucket(service) => service,
            Store::Directory(path) => panic!("{path} is no bucket"),
        }
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
    let version = (0..4).find(|version| got == value(key, *version));
    assert!(version.is_some(), "wrong bytes of object {key}");
    version
}

/// Puts objects, replaces some and removes some, and waits until the tier has what is left. Returns the version of
/// each.
fn fill(client: &mut Client, nodes: &[&Process]) -> Vec<Option<usize>> {
    let mut versions: Vec<Option<usize>> = vec![Some(0); KEYS];
    (0..KEYS).for_each(|key| put(client, key, 0));
    wait_for_count(nodes, "kvplane_shared_uploads_total", KEYS as f64);
    for (key, version) in versions.iter_mut().enumerate() {
        if key % 6 == 0 {
            put(client, key, 1);
            *version = Some(1);
        } else if key % 6 == 1 {
            let removed = wait_until(|| client.remove(name(key).as_bytes()).ok());
            assert!(removed.is_some(), "removal of object {key}");
            *version = None;
        }
    }
    wait_for_count(nodes, "kvplane_shared_objects", versions.iter().flatten().count() as f64);
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
    for (key, version) in versions.iter().enumerate() {
        let found = version_of(&mut client, key);
        assert!(found.is_none() || key >= KEYS / 2 && found == *version, "object {key} is back: {found:?}");
    }
}

#[test]
fn another_owner_serves_from_a_directory_what_a_dead_one_uploaded() {
    let bed = Bed::new("shared-dir", Store::directory);
    another_owner_serves(&bed);
}

#[test]
fn another_owner_serves_from_a_bucket_what_a_dead_one_uploaded() {
    let bed = Bed::new("shared-s3", |_| Store::Bucket(FakeS3::start()));
    another_owner_serves(&bed);
    assert!(!bed.store.names("pack-").is_empty());
}

#[test]
fn a_restarted_node_finds_what_it_had_uploaded() {
    let bed = Bed::new("shared-restart", Store::directory);
    let (mut node, mut client) = bed.one_node(&[]);
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

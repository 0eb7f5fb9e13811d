//! Tests of `kill -9` of a client in the middle of a put and of a get, over both transports: its handles are released,
//! and no other client sees an error or a wrong byte.
//!
//! The victim is this test binary, started again in a role of its own. To die in the middle for certain, it is stopped
//! first (SIGSTOP): if the node then keeps holding its reservation or its pins, the victim must be in the middle, and
//! is killed there; over RDMA, where devices continue its transfers, it is killed at once. Others are killed at random
//! moments. The node is in this process, so that its memory can be inspected.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use kvplane::rpc::RuntimeDirectory;
use kvplane::{Buffer, Client, Node, NodeConfig, RdmaUse, Region, RegionOptions};
use kvplane_proto::rng::Rng;
use kvplane_server::{ControlConfig, ControlHandle, ControlServer};
use kvplane_tools::pattern;

use crate::network::{End, instead_of_tcp, over_rdma};
use crate::support::{Process, Way, Workplace, test_of, wait_until};

/// Length far above the socket buffers, so that a stopped victim leaves its transfer unfinished.
const LARGE_BYTES: usize = 16 << 20;
const SMALL_BYTES: usize = 64 << 10;
const POOL_BYTES: u64 = 64 << 20;
/// Promised time from the death of a client to the release of all its handles.
const COMES_BACK: Duration = Duration::from_secs(1);
/// Environment variable that makes this binary a victim: `put` or `get`, and the location.
const ROLE: &str = "KVPLANE_TEST_ROLE";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Deed {
    Put,
    Get,
}

impl Deed {
    const fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
        }
    }
}

/// Entry point of the victim, not a test: it puts or gets until it is killed. Without the role it does nothing.
#[test]
fn victim() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let [deed, way, cluster, directory] = words[..] else { panic!("{role:?} is no role") };
    let way = if way == "shm" { Way::Shm } else { Way::Tcp };
    // The test's own workplace, entered by name: dropping it would remove the directory of the others.
    let place = std::mem::ManuallyDrop::new(Workplace { directory: directory.into(), cluster: cluster.to_owned() });
    let mut client = place.client(way);
    let memory = client.register(Region::allocate(&RegionOptions::new("victim", LARGE_BYTES)).unwrap());
    let whole = memory.slice(0, LARGE_BYTES);
    // The victim ends with its parent: an end of its input is the parent's death.
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    client.put_from(b"to-get", whole).unwrap();
    println!("under way");
    let key = format!("put-by-{}", std::process::id());
    loop {
        if deed == "put" {
            client.put_from(key.as_bytes(), whole).unwrap();
            client.remove(key.as_bytes()).unwrap();
        } else if client.get_into(b"to-get", whole).unwrap().is_none() {
            client.put_from(b"to-get", whole).unwrap();
        }
    }
}

/// Control plane and node in this process.
struct Cluster {
    node: Node,
    _control: ControlHandle,
    place: Workplace,
}

impl Cluster {
    fn start(name: &str) -> Self {
        let place = Workplace::new(name);
        let mut config = ControlConfig::new(name);
        config.publish = Some(RuntimeDirectory::at(place.runtime()));
        let control = ControlServer::start(config).unwrap();
        let node = Node::start(&NodeConfig {
            control: place.control(),
            shards: Some(1),
            runtime_directory: Some(place.runtime()),
            rdma: instead_of_tcp(End::Serves, RdmaUse::Auto),
            ..NodeConfig::local(name, POOL_BYTES)
        });
        Self { node: node.unwrap(), _control: control, place }
    }

    /// Returns the bytes pinned, and the bytes of puts in flight or expired.
    fn held(&self) -> (u64, u64) {
        let stats = self.node.snapshots().unwrap()[0].store.unwrap();
        (stats.pinned_bytes, stats.reserved_bytes + stats.quarantined_bytes)
    }

    /// Returns true if an operation of a victim is half done.
    fn in_the_middle(&self, deed: Deed) -> bool {
        let (pinned, reserved) = self.held();
        let bytes = if deed == Deed::Put { reserved } else { pinned };
        bytes >= LARGE_BYTES as u64
    }

    fn victim(&self, deed: Deed, way: Way) -> Process {
        let directory = self.place.directory.display();
        let role = format!("{} {} {} {directory}", deed.name(), way.name(), self.place.cluster);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test_of(module_path!(), "victim").as_str(), "--exact", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, role).stdin(Stdio::piped());
        let victim = Process::start(command);
        victim.wait_for("under way");
        victim
    }

    /// Stops the victim in the middle of its operation.
    fn catch(&self, victim: &mut Process, deed: Deed) {
        let caught = wait_until(|| {
            victim.assert_alive();
            if !self.in_the_middle(deed) {
                return None;
            }
            victim.signal("STOP");
            // Transfers in flight at the stop are done by then.
            std::thread::sleep(Duration::from_millis(20));
            if self.in_the_middle(deed) {
                return Some(());
            }
            victim.signal("CONT");
            None
        });
        assert!(caught.is_some(), "no victim was ever in the middle of a {deed:?}");
    }

    /// Waits until nothing is held, with all others quiet; returns the time that took.
    fn comes_back(&self, others: &Others) -> Duration {
        let _quiet = others.gate.write().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        let back = wait_until(|| (self.held() == (0, 0)).then_some(()));
        assert!(back.is_some(), "still held: {:?}", self.held());
        start.elapsed()
    }
}

/// Clients that work all the time, over both transports.
struct Others {
    gate: Arc<RwLock<()>>,
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Others {
    fn start(place: &Workplace) -> Self {
        let (gate, stop) = (Arc::new(RwLock::new(())), Arc::new(AtomicBool::new(false)));
        let rounds = Arc::new(AtomicU64::new(0));
        let threads = Way::BOTH.map(|way| {
            let config = place.client_config(way);
            let (gate, stop, rounds) = (Arc::clone(&gate), Arc::clone(&stop), Arc::clone(&rounds));
            std::thread::spawn(move || {
                let mut client = Client::connect(&config).unwrap();
                let memory = client.register(Region::allocate(&RegionOptions::new("other", SMALL_BYTES)).unwrap());
                let mut round = 0;
                while !stop.load(Ordering::Relaxed) {
                    let _turn = gate.read().unwrap_or_else(PoisonError::into_inner);
                    round_trip(&mut client, &memory, &format!("{way:?}-{}", round % 64), round);
                    round += 1;
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        Self { gate, stop, rounds, threads: threads.into() }
    }

    /// Waits until each of them has certainly begun and ended an operation.
    fn go_on(&self) {
        let before = self.rounds.load(Ordering::Relaxed);
        let went_on = wait_until(|| {
            let failed = self.threads.iter().any(std::thread::JoinHandle::is_finished);
            (failed || self.rounds.load(Ordering::Relaxed) > before + 8).then_some(failed)
        });
        assert_eq!(went_on, Some(false), "the others do not go on");
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("the others see no error and no wrong byte");
        }
    }
}

/// Puts a value, gets it and verifies every byte. It may have been evicted meanwhile, but not be another.
fn round_trip(client: &mut Client, memory: &Buffer, key: &str, seed: u64) {
    let (region, whole) = (memory.region(), memory.slice(0, SMALL_BYTES));
    client.remove(key.as_bytes()).unwrap();
    region.fill_with(0, SMALL_BYTES, &mut |offset, part| pattern::fill(seed, offset, part));
    client.put_from(key.as_bytes(), whole).unwrap();
    region.fill_with(0, SMALL_BYTES, &mut |offset, part| pattern::fill(!seed, offset, part));
    if let Some(got) = client.get_into(key.as_bytes(), whole).unwrap() {
        assert_eq!(got.bytes, SMALL_BYTES as u64);
        region.read_with(0, SMALL_BYTES, &mut |offset, part| pattern::check(seed, offset, part).unwrap());
    }
}

fn a_killed_client_leaves_nothing(way: Way) {
    let cluster = Cluster::start(&format!("kill-{}", way.name()));
    let others = Others::start(&cluster.place);
    let mut rng = Rng::new(7, way.name());
    let mut longest = Duration::ZERO;
    for deed in [Deed::Put, Deed::Get] {
        for round in 0..8 {
            let mut victim = cluster.victim(deed, way);
            if round < 4 && way == Way::Tcp && over_rdma() {
                // Devices continue transfers of a stopped client: it is killed at once.
                cluster.catch(&mut victim, deed);
            } else if round < 4 {
                // On a loaded machine the kernel may still complete the transfer of a stopped client: the test retries
                // then.
                let held = (0..10).any(|_| {
                    cluster.catch(&mut victim, deed);
                    others.go_on();
                    let held = cluster.in_the_middle(deed);
                    if !held {
                        victim.signal("CONT");
                    }
                    held
                });
                assert!(held, "no stopped client held what it held");
            } else {
                std::thread::sleep(Duration::from_micros(rng.below(40_000)));
            }
            victim.kill();
            longest = longest.max(cluster.comes_back(&others));
        }
    }
    others.go_on();
    others.end();
    println!("{way:?}: after a kill all came back within {longest:?}");
    assert!(longest < COMES_BACK, "{longest:?}");
}

#[test]
fn a_client_killed_over_shared_memory_leaves_nothing() {
    a_killed_client_leaves_nothing(Way::Shm);
}

#[test]
fn a_client_killed_over_tcp_leaves_nothing() {
    a_killed_client_leaves_nothing(Way::Tcp);
}

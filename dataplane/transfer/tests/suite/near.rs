//! NUMA affinity of memory and devices, at both ends: software devices on a machine of two nodes that a directory
//! describes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvplane_soft_verbs::{Loopback, SoftPort};
use kvplane_topology::{Machine, Sysfs};
use kvplane_transfer::{
    NodeCounts, Opcode, RailSnapshot, RdmaConfig, RdmaUse, Region, RegisterOptions, SegmentHandle, SubmitOptions,
    TaskState, TransferEngine, TransferEngineConfig, TransferRequest, Transport,
};

use crate::rig::{PATIENCE, Way, check, fill, region};

const BYTES: usize = 4 << 20;

/// Machine of two nodes; devices 0 and 2 of the fabric are on node 0, 1 and 3 on node 1.
fn machine() -> Arc<Machine> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let root = std::env::temp_dir().join(format!("kvplane-near-{}-{number}", std::process::id()));
    let file = |path: String, text: String| {
        let path: PathBuf = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    file("devices/system/cpu/online".into(), "0-1\n".into());
    file("devices/system/node/online".into(), "0-1\n".into());
    for node in 0..2 {
        let distances = if node == 0 { "10 21\n" } else { "21 10\n" };
        file(format!("devices/system/node/node{node}/cpulist"), format!("{node}\n"));
        file(format!("devices/system/node/node{node}/distance"), distances.into());
        file(format!("devices/system/cpu/cpu{node}/topology/core_cpus_list"), format!("{node}\n"));
        file(format!("devices/system/cpu/cpu{node}/topology/physical_package_id"), format!("{node}\n"));
    }
    for device in 0..4 {
        let directory = format!("class/infiniband/loop{device}");
        let hardware = format!("devices/pci0000:00/0000:00:0{}.0", device + 1);
        file(format!("{hardware}/numa_node"), format!("{}\n", device % 2));
        fs::create_dir_all(root.join(&directory)).unwrap();
        symlink(root.join(&hardware), root.join(&directory).join("device")).unwrap();
        file(format!("{directory}/ports/1/state"), "4: ACTIVE\n".into());
        file(format!("{directory}/ports/1/rate"), "100 Gb/sec (4X EDR)\n".into());
        file(format!("{directory}/ports/1/link_layer"), "Ethernet\n".into());
    }
    let machine = Sysfs::at(&root, root.join("self")).read().unwrap();
    fs::remove_dir_all(&root).unwrap();
    assert_eq!(machine.rdma_devices.iter().map(|one| one.numa_node).collect::<Vec<_>>(), [0, 1, 0, 1].map(Some));
    Arc::new(machine)
}

fn config(fabric: &Loopback, devices: [&str; 2], matrix: Option<&str>) -> TransferEngineConfig {
    let rdma = RdmaConfig {
        devices: devices.map(str::to_owned).to_vec(),
        matrix: matrix.map(str::to_owned),
        verbs: Some(fabric.verbs()),
        machine: Some(machine()),
        ..RdmaConfig::of(RdmaUse::Require)
    };
    TransferEngineConfig { rdma, ..Way::Rdma.config() }
}

/// Engine with a buffer on each node.
struct Host {
    engine: TransferEngine,
    memory: [Arc<Region>; 2],
}

impl Host {
    fn new(config: TransferEngineConfig) -> Self {
        let engine = TransferEngine::start(config).unwrap();
        let memory = [0, 1].map(|node| {
            let region = region(BYTES);
            let options = RegisterOptions { location: format!("cpu:{node}"), ..RegisterOptions::default() };
            engine.register(Arc::clone(&region), &options).unwrap();
            region
        });
        Self { engine, memory }
    }

    /// Writes from memory on one node to the peer's on another, and reads it back.
    fn round_trip(&self, peer: &Self, handle: SegmentHandle, (ours, theirs): (usize, usize), seed: u64) {
        fill(&self.memory[ours], 0, BYTES, seed);
        for opcode in [Opcode::Write, Opcode::Read] {
            let request = TransferRequest {
                opcode,
                source: self.memory[ours].address(),
                target: handle,
                target_offset: peer.memory[theirs].address(),
                length: BYTES as u64,
            };
            let batch = self.engine.submit(&[request], &SubmitOptions::default()).unwrap();
            assert_eq!(batch.wait().state, TaskState::Completed, "{:?}", batch.problem());
            if opcode == Opcode::Write {
                check(&peer.memory[theirs], 0, BYTES, seed);
                fill(&self.memory[ours], 0, BYTES, !seed);
            }
        }
        check(&self.memory[ours], 0, BYTES, seed);
    }

    /// Returns the counts of its devices: locally, and at the peer.
    fn counts(&self) -> (NodeCounts, NodeCounts) {
        let (mut own, mut peer) = (NodeCounts::default(), NodeCounts::default());
        for rail in self.rails() {
            own.add(&rail.own_node);
            peer.add(&rail.peer_node);
        }
        (own, peer)
    }

    fn rails(&self) -> Vec<RailSnapshot> {
        let rails = self.engine.metrics().rails.into_iter();
        rails.filter(|rail| rail.transport == Transport::Rdma && rail.operations > 0).collect()
    }
}

fn two(fabric: &Loopback) -> (Host, Host, SegmentHandle) {
    let host = |devices| Host::new(config(fabric, devices, None));
    let (a, b) = (host(["loop0", "loop1"]), host(["loop2", "loop3"]));
    let handle = a.engine.open_segment(b.engine.name()).unwrap();
    (a, b, handle)
}

#[test]
fn every_slice_uses_the_devices_of_its_nodes() {
    let fabric = Loopback::new(&[SoftPort::default(); 4]);
    let (a, b, handle) = two(&fabric);
    // Opening the segment moved a few bytes without a known location.
    let opened = a.counts();
    for (round, nodes) in [(0, 0), (0, 1), (1, 0), (1, 1)].into_iter().enumerate() {
        a.round_trip(&b, handle, nodes, round as u64);
    }
    let (own, peer) = a.counts();
    let slices = own.same;
    assert!(slices >= 4 * 2 * (BYTES as u64 / (64 << 10)));
    assert_eq!((own.other, peer.other, peer.same), (0, 0, slices), "{own:?} {peer:?}");
    assert_eq!((own.unknown, peer.unknown), (opened.0.unknown, opened.1.unknown));
    let text = a.engine.metrics_text();
    let line = |end: &str, node: &str| {
        let labels = format!("transport=\"rdma\",rail=\"loop1\",end=\"{end}\",node=\"{node}\"}}");
        let found = text.lines().find(|line| line.contains("slices_by_node") && line.contains(&labels));
        found.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap()
    };
    assert!(line("own", "same") > 0.0 && line("peer", "same") > 0.0, "{text}");
    assert!(line("own", "other") == 0.0 && line("peer", "other") == 0.0, "{text}");
    let explained = a.engine.explain(b.engine.name()).unwrap();
    let across =
        explained.rails.iter().find(|one| (one.own.as_str(), one.peer.as_str()) == ("cpu:1", "cpu:0")).unwrap();
    let first = &across.rails[0];
    assert_eq!((first.own.as_str(), first.peer.as_str(), first.rank), ("loop1", "loop2", 1));
    assert!(first.reason.contains("on node 1") && first.reason.contains("there on the memory's node"), "{across}");
    assert_eq!(fabric.violations(), 0);
}

#[test]
fn the_other_node_s_device_stands_in_while_the_near_one_is_down() {
    let fabric = Loopback::new(&[SoftPort::default(); 4]);
    let (a, b, handle) = two(&fabric);
    a.round_trip(&b, handle, (0, 0), 1);
    assert_eq!(a.counts().0.other, 0);
    fabric.set_port(0, false);
    a.round_trip(&b, handle, (0, 0), 2);
    let away = a.counts().0;
    assert!(away.other > 0, "{away:?}");
    fabric.set_port(0, true);
    let until = Instant::now() + PATIENCE;
    loop {
        let before = a.counts().0;
        a.round_trip(&b, handle, (0, 0), 3);
        let after = a.counts().0;
        if after.other == before.other {
            assert!(after.same > before.same);
            return;
        }
        assert!(Instant::now() < until, "still away: {after:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_given_matrix_decides_and_a_malformed_one_is_rejected() {
    let fabric = Loopback::new(&[SoftPort::default(); 4]);
    let crossed = r#"{"cpu:0":[["loop1"],["loop0"]],"cpu:1":[["loop0"],["loop1"]]}"#;
    let a = Host::new(config(&fabric, ["loop0", "loop1"], Some(crossed)));
    let b = Host::new(config(&fabric, ["loop2", "loop3"], None));
    let handle = a.engine.open_segment(b.engine.name()).unwrap();
    a.round_trip(&b, handle, (0, 0), 1);
    let (own, peer) = a.counts();
    assert!(own.same == 0 && own.other > 0, "{own:?}");
    assert!(peer.other == 0 && peer.same == own.other, "the peer's own stays: {peer:?}");
    for (matrix, words) in [
        (r#"{"cpu:0":[["loop9"],[]]}"#, &["loop9", "lacks", "loop0, loop1"][..]),
        (r#"{"cpu:7":[["loop0"],[]]}"#, &["cpu:7", "cpu:0, cpu:1"]),
        ("{", &["not JSON"]),
        ("/nowhere/rails.json", &["cannot read", "/nowhere/rails.json"]),
    ] {
        let error = TransferEngine::start(config(&fabric, ["loop0", "loop1"], Some(matrix))).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

//! NUMA affinity of memory, shards and NICs: transfers between memories of one node use the NICs of that node.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvplane::{
    Health, NodeCounts, Opcode, RdmaConfig, RdmaUse, Region, RegisterOptions, SegmentHandle, SubmitOptions, TaskState,
    TransferEngine, TransferEngineConfig, TransferRequest, Transport,
};

use crate::bed::{alone, config, has, region};
use crate::sysfs::cores_of;

const BYTES: usize = 8 << 20;
/// Attempts of a request whose near device failed meanwhile: emulated NICs lose packets under load.
const TRIES: usize = 10;

/// Returns the node of the NIC under an RDMA device; `None` if the machine does not report it.
fn node_of(device: usize) -> Option<u32> {
    // A soft-RoCE device has no location of its own; its NIC has.
    let path = format!("/sys/class/net/nic{device}/device/numa_node");
    std::fs::read_to_string(Path::new(&path)).ok()?.trim().parse().ok()
}

/// Engine that serves from a core of node 0, with one region on each node and one device of each.
struct Host {
    engine: TransferEngine,
    regions: Vec<Arc<Region>>,
    devices: Vec<String>,
}

impl Host {
    fn start(first_device: usize, nodes: usize) -> Self {
        let listen: SocketAddr = format!("10.77.0.{}:0", first_device + 1).parse().unwrap();
        let devices: Vec<String> = (first_device..first_device + nodes).map(|number| format!("rxe{number}")).collect();
        let rdma = RdmaConfig { devices: devices.clone(), ..RdmaConfig::of(RdmaUse::Require) };
        let ways = TransferEngineConfig { rdma, tcp: false, shared_memory: false, core: cores_of(0).pop(), ..config() };
        let engine = TransferEngine::start(TransferEngineConfig { listen, open_to_network: true, ..ways }).unwrap();
        let regions: Vec<_> = (0..nodes).map(|node| region(BYTES, Some(node as u32))).collect();
        for region in &regions {
            engine.register(Arc::clone(region), &RegisterOptions::default()).unwrap();
        }
        Self { engine, regions, devices }
    }

    /// Returns the slices by whether their memory and the device are on one node: locally, and at the peer.
    fn slices(&self) -> (NodeCounts, NodeCounts) {
        let (mut own, mut peer) = (NodeCounts::default(), NodeCounts::default());
        for rail in self.engine.metrics().rails.iter().filter(|rail| rail.transport == Transport::Rdma) {
            own.add(&rail.own_node);
            peer.add(&rail.peer_node);
        }
        (own, peer)
    }

    /// Returns the health of a device, and its number of failures so far.
    fn health(&self, device: &str) -> (Health, u64) {
        let rails = self.engine.metrics().rails;
        let rail = rails.iter().find(|rail| rail.device.as_deref() == Some(device));
        rail.map_or((Health::Healthy, 0), |rail| (rail.health, rail.retries + rail.failovers + rail.pauses))
    }

    /// Transfers a whole region to or from one of a peer; returns the bytes that each device carried.
    fn move_region(&self, opcode: Opcode, node: usize, target: (SegmentHandle, u64)) -> BTreeMap<String, u64> {
        let before = self.moved();
        let source = self.regions[node].address();
        let (target, target_offset) = target;
        let request = TransferRequest { opcode, source, target, target_offset, length: BYTES as u64 };
        let batch = self.engine.submit(&[request], &SubmitOptions::default()).unwrap();
        assert_eq!(batch.wait().state, TaskState::Completed, "{:?}", batch.problem());
        self.moved().into_iter().map(|(name, bytes)| (name.clone(), bytes - before[&name])).collect()
    }

    /// Returns the bytes that each of its devices carried so far.
    fn moved(&self) -> BTreeMap<String, u64> {
        let rails = self.engine.metrics().rails.into_iter().filter(|rail| rail.transport == Transport::Rdma);
        let mut moved: BTreeMap<_, _> = self.devices.iter().map(|name| (name.clone(), 0)).collect();
        rails.for_each(|rail| *moved.entry(rail.device.expect("its name")).or_default() += rail.bytes);
        moved
    }
}

#[test]
fn transfers_within_a_node_use_its_nics() {
    let _turn = alone();
    let (Some(nodes), Some(count)) = (has("RIG_NUMA", "NUMA nodes"), has("RIG_RXE", "RDMA devices")) else { return };
    if nodes < 2 || count < 2 * nodes || (0..count).any(|device| node_of(device).is_none()) {
        println!("skipped: this machine has not two RDMA devices on NICs of each node");
        return;
    }
    for device in 0..count {
        assert_eq!(node_of(device), Some((device % nodes) as u32), "the rig deals NICs out to nodes in turns");
    }
    let (a, b) = (Host::start(0, nodes), Host::start(nodes, nodes));
    let peer = a.engine.open_segment(b.engine.name()).unwrap();
    let (mut own, mut peers) = (NodeCounts::default(), NodeCounts::default());
    let pairs = (0..nodes).flat_map(|ours| (0..nodes).map(move |theirs| (ours, theirs)));
    for (node, theirs) in pairs {
        for opcode in [Opcode::Write, Opcode::Read] {
            let near = &a.devices[node];
            let mut healthy = false;
            for _ in 0..TRIES {
                let (counts, health) = (a.slices(), a.health(near));
                let moved = a.move_region(opcode, node, (peer, b.regions[theirs].address()));
                let after = a.health(near);
                let what = format!("node {node} and {theirs} there, {opcode:?} of {} MiB: {moved:?}", BYTES >> 20);
                println!("{what}; {near} was {health:?} and is {after:?}");
                if health == after && health.0 == Health::Healthy {
                    assert_eq!(moved[near], BYTES as u64, "all of it by the NIC of node {node}: {what}");
                    let now = a.slices();
                    own.add(&since(&now.0, &counts.0));
                    peers.add(&since(&now.1, &counts.1));
                    healthy = true;
                    break;
                }
                std::thread::sleep(Duration::from_millis(200));
            }
            assert!(healthy, "{near} was not healthy during any of {TRIES} requests");
        }
    }
    println!("slices by the node of their memory and of the device: ours {own:?}, the peer's {peers:?}");
    assert!(own.same > 0 && own.same == peers.same, "{own:?}, {peers:?}");
    assert_eq!((own.other, peers.other, own.unknown, peers.unknown), (0, 0, 0, 0), "{own:?}, {peers:?}");
}

/// Returns the difference of two counts.
const fn since(now: &NodeCounts, before: &NodeCounts) -> NodeCounts {
    NodeCounts { same: now.same - before.same, other: now.other - before.other, unknown: now.unknown - before.unknown }
}

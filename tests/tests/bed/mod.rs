//! Test bed: a control plane and nodes in this process, and settings of their clients.

#![allow(dead_code, reason = "several test programs share this file, and each uses a part")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kvplane::rpc::RuntimeDirectory;
use kvplane::{ClientConfig, Control, HugePages, Node, NodeConfig, NodeId, RdmaConfig, RdmaUse};
use kvplane_server::{ConductorConfig, ControlConfig, ControlHandle, ControlServer};

#[path = "../../../dataplane/transfer/tests/suite/network/mod.rs"]
mod network;

use network::{End, instead_of_tcp, over_rdma};

static BEDS: AtomicU32 = AtomicU32::new(0);

pub(crate) struct Bed {
    pub(crate) nodes: Vec<Node>,
    pub(crate) control: Option<ControlHandle>,
    directory: PathBuf,
}

impl Bed {
    pub(crate) fn start(nodes: u64, pool_bytes: u64) -> Self {
        Self::start_with(nodes, pool_bytes, |_| {})
    }

    /// Starts with changed settings of the control plane.
    pub(crate) fn start_with(nodes: u64, pool_bytes: u64, set: impl FnOnce(&mut ControlConfig)) -> Self {
        let number = BEDS.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("kvplane-agent-{}-{number}", std::process::id()));
        let mut config = ControlConfig::new("test");
        config.publish = Some(RuntimeDirectory::at(&directory));
        config.conductor = Some(ConductorConfig::default());
        set(&mut config);
        let control = ControlServer::start(config).expect("a control plane on loopback");
        let mut bed = Self { nodes: Vec::new(), control: Some(control), directory };
        for node in 1..=nodes {
            let node = Node::start(&bed.node_config(node, pool_bytes)).expect("a node on loopback");
            bed.nodes.push(node);
        }
        bed.rest();
        bed
    }

    /// Waits until no slot migrates: during a migration, removals of objects that never existed are answered as done.
    fn rest(&self) {
        let until = Instant::now() + Duration::from_secs(20);
        let settled = |node: &Node| node.snapshots().expect("shards answer").iter().all(|shard| shard.moves.settled);
        while !self.nodes.iter().all(settled) {
            assert!(Instant::now() < until, "slots move for ever");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Replaces the control plane by a new one without its state.
    pub(crate) fn restart_control(&mut self) {
        drop(self.control.take());
        let mut config = ControlConfig::new("test");
        config.publish = Some(RuntimeDirectory::at(&self.directory));
        self.control = Some(ControlServer::start(config).expect("a control plane on loopback"));
    }

    pub(crate) fn control_name(&self) -> Control {
        Control::Local { cluster: "test".to_owned(), runtime_directory: Some(self.directory.clone()) }
    }

    pub(crate) fn node_config(&self, node: u64, pool_bytes: u64) -> NodeConfig {
        NodeConfig {
            control: self.control_name(),
            node: Some(NodeId(node)),
            runtime_directory: Some(self.directory.clone()),
            shards: Some(1),
            huge: HugePages::Never,
            rdma: instead_of_tcp(End::Serves, RdmaUse::Auto),
            ..NodeConfig::local("test", pool_bytes)
        }
    }

    pub(crate) fn client_config(&self, shared_memory: bool) -> ClientConfig {
        let never = RdmaConfig::of(RdmaUse::Never);
        ClientConfig {
            control: self.control_name(),
            shared_memory,
            tcp: !shared_memory && !over_rdma(),
            rdma: if shared_memory { never } else { instead_of_tcp(End::Asks, RdmaUse::Require) },
            ..ClientConfig::local("test")
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.nodes.clear();
        drop(self.control.take());
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

pub(crate) fn value(number: u32, bytes: usize) -> Vec<u8> {
    (0..bytes as u32).map(|at| (number.wrapping_mul(31) ^ at.wrapping_mul(7)) as u8).collect()
}

//! Test bed of benchmarks: a control plane and a node in this process, and engines.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use kvplane::rpc::RuntimeDirectory;
use kvplane::{ClientConfig, Control, Node, NodeConfig, Pacing, TransferEngineConfig};
use kvplane_engine::{HostConfig, Listen, Shard, ShardConfig, ShardHandle};
use kvplane_proto::Version;
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_server::{ControlConfig, ControlHandle, ControlServer};
use kvplane_store::service::Identity;

use crate::Failure;

pub(crate) const CLUSTER: &str = "bench";

/// Directory that is removed on drop.
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new() -> Result<Self, Failure> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvplane-bench-{}-{number}", std::process::id()));
        Ok(Self(path))
    }

    pub(crate) fn text(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Control plane and node. The node leaves first.
pub(crate) struct Bed {
    pub(crate) node: Node,
    _control: ControlHandle,
    pub(crate) directory: Directory,
}

impl Bed {
    pub(crate) fn start(pool_bytes: u64, pacing: &str) -> Result<Self, Failure> {
        Self::start_with(pool_bytes, pacing, |config, _| config)
    }

    /// Starts a node whose memory may hold this number of objects.
    pub(crate) fn with_objects(pool_bytes: u64, max_objects: Option<u64>, pacing: &str) -> Result<Self, Failure> {
        Self::start_with(pool_bytes, pacing, |config, _| NodeConfig { max_objects, ..config })
    }

    /// Starts with changed settings; the directory is removed with the bed.
    pub(crate) fn start_with(
        pool_bytes: u64,
        pacing: &str,
        change: impl FnOnce(NodeConfig, &Path) -> NodeConfig,
    ) -> Result<Self, Failure> {
        let directory = Directory::new()?;
        let mut config = ControlConfig::new(CLUSTER);
        config.publish = Some(RuntimeDirectory::at(&directory.0));
        let control = ControlServer::start(config)?;
        let settings = NodeConfig {
            control: control_of(&directory.0),
            runtime_directory: Some(directory.0.clone()),
            pacing: Some(pacing_of(pacing)?),
            ..NodeConfig::local(CLUSTER, pool_bytes)
        };
        let node = Node::start(&change(settings, &directory.0))?;
        Ok(Self { node, _control: control, directory })
    }
}

/// Starts another node of a bed's cluster, which leaves on drop.
pub(crate) fn another_node(directory: &Path, pool_bytes: u64) -> Result<Node, Failure> {
    Ok(Node::start(&NodeConfig {
        control: control_of(directory),
        runtime_directory: Some(directory.to_owned()),
        ..NodeConfig::local(CLUSTER, pool_bytes)
    })?)
}

fn control_of(directory: &Path) -> Control {
    Control::Local { cluster: CLUSTER.to_owned(), runtime_directory: Some(directory.to_owned()) }
}

pub(crate) fn pacing_of(word: &str) -> Result<Pacing, Failure> {
    match word {
        "spin" => Ok(Pacing::Spin),
        "adaptive" => Ok(Pacing::default()),
        // Spins while a request is in flight, even a long one, and parks otherwise.
        "patient" => Ok(Pacing::Adaptive { window_ns: 5_000_000 }),
        "park" => Ok(Pacing::Park),
        _ => Err(format!("unknown pacing {word:?}").into()),
    }
}

pub(crate) fn client_config(way: &str, pacing: &str, directory: &str) -> Result<ClientConfig, Failure> {
    Ok(ClientConfig {
        control: control_of(Path::new(directory)),
        shared_memory: way == "shm",
        tcp: way == "tcp",
        pacing: pacing_of(pacing)?,
        ..ClientConfig::local(CLUSTER)
    })
}

pub(crate) fn engine_config(way: &str, pacing: &str, directory: &str) -> Result<TransferEngineConfig, Failure> {
    Ok(TransferEngineConfig {
        shared_memory: way == "shm",
        tcp: way != "shm",
        checksum: way != "tcp-unchecked",
        pacing: pacing_of(pacing)?,
        runtime_directory: Some(PathBuf::from(directory)),
        ..TransferEngineConfig::default()
    })
}

/// Starts a shard without objects, for benchmarks of segments below the public crate.
pub(crate) fn shard(pacing: Pacing, listen: Listen) -> Result<ShardHandle, Failure> {
    let identity = Identity {
        cluster: CLUSTER.to_owned(),
        node: NodeId(0),
        incarnation: Incarnation(1),
        shard: ShardId(0),
        segment_name: String::new(),
    };
    Ok(Shard::start(ShardConfig {
        identity,
        core: None,
        pacing,
        listen,
        pool: None,
        store: None,
        first_version: Version(1),
        host: HostConfig::default(),
    })?)
}

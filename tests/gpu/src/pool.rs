//! Rates between device memory and the pool of a node on this host.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use kvplane::device::DeviceMemory;
use kvplane::rpc::RuntimeDirectory;
use kvplane::{Client, ClientConfig, DeviceBuffer, Node, NodeConfig, Put};
use kvplane_fake_devices::Control;
use kvplane_server::{ControlConfig, ControlHandle, ControlServer};

use crate::Error;
use crate::rates::{Rate, check, median};

/// Name of the cluster.
const CLUSTER: &str = "gpu";

/// Cluster of one node in this process.
pub(crate) struct Pool {
    node: Option<Node>,
    control: Option<ControlHandle>,
    directory: PathBuf,
}

impl Pool {
    /// Starts a control plane and a node with a pool of this size.
    pub(crate) fn start(bytes: u64) -> Result<Self, Error> {
        let directory = std::env::temp_dir().join(format!("kvplane-gpu-{}", std::process::id()));
        let mut config = ControlConfig::new(CLUSTER);
        config.publish = Some(RuntimeDirectory::at(&directory));
        let mut pool = Self { node: None, control: Some(ControlServer::start(config)?), directory };
        pool.node = Some(Node::start(&NodeConfig {
            control: pool.control_name(),
            runtime_directory: Some(pool.directory.clone()),
            shards: Some(1),
            ..NodeConfig::local(CLUSTER, bytes)
        })?);
        Ok(pool)
    }

    fn control_name(&self) -> kvplane::Control {
        kvplane::Control::Local { cluster: CLUSTER.to_owned(), runtime_directory: Some(self.directory.clone()) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        drop(self.node.take());
        drop(self.control.take());
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Client of a node with memory of a device.
pub(crate) struct PoolClient {
    client: Client,
    memory: DeviceBuffer,
    control: Control,
}

impl PoolClient {
    /// Connects over shared memory, and registers device memory.
    pub(crate) fn new(pool: &Pool, memory: Arc<DeviceMemory>, control: Control) -> Result<Self, Error> {
        let config = ClientConfig { control: pool.control_name(), ..ClientConfig::local(CLUSTER) };
        let mut client = Client::connect(&config)?;
        let memory = client.register_device(memory)?;
        Ok(Self { client, memory, control })
    }

    /// Measures puts from device memory and gets into it. Compares the bytes of each.
    pub(crate) fn measure(&mut self, bytes: u64) -> Result<[Rate; 2], Error> {
        let address = self.memory.memory().address();
        let put = median(bytes, |round| {
            let key = format!("{bytes}-{round}");
            self.control.write(address, &Control::pattern(round, bytes));
            let began = Instant::now();
            let put = self.client.put_from(key.as_bytes(), self.memory.slice(0, bytes))?;
            let took = began.elapsed();
            if !matches!(put, Put::Stored(_)) {
                return Err(format!("{key} was not stored: {put:?}").into());
            }
            let stored = self.client.get(key.as_bytes())?.ok_or("the object is gone")?;
            check(&stored, round, "a put")?;
            if round > 0 {
                self.client.remove(key.as_bytes())?;
            }
            Ok(took)
        })?;
        let key = format!("{bytes}-0");
        let get = median(bytes, |round| {
            self.control.write(address, &Control::pattern(round + 1, bytes));
            let began = Instant::now();
            self.client.get_into(key.as_bytes(), self.memory.slice(0, bytes))?.ok_or("the object is gone")?;
            let took = began.elapsed();
            check(&self.control.read(address, bytes), 0, "a get")?;
            Ok(took)
        })?;
        self.client.remove(key.as_bytes())?;
        Ok([put, get])
    }
}

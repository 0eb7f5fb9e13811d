//! Node with one shard and a shared tier, and a client on the same host.

use std::ops::Range;
use std::time::{Duration, Instant};

use kvplane::rpc::RuntimeDirectory;
use kvplane::{
    BatchOutcome, Buffer, Client, ClientConfig, Control, Node, NodeConfig, NodeId, PutOptions, Region, RegionOptions,
    SharedTierConfig, Slice, StorePlace, UploadPolicy,
};
use kvplane_engine::SharedStats;
use kvplane_server::{ControlConfig, ControlHandle, ControlServer};

use crate::Failure;
use crate::bed::{CLUSTER, Directory};

/// Objects in flight: as many as a shard reads at once.
const DEPTH: usize = 32;
const PATIENCE: Duration = Duration::from_secs(120);
const DEADLINE: Duration = Duration::from_secs(30);

/// Key and its range of memory.
type Item = ([u8; 8], Slice);

/// Control plane, node and client.
pub(crate) struct NodeBed {
    client: Client,
    memory: Memory,
    node: Option<Node>,
    settings: NodeConfig,
    _control: ControlHandle,
    _directory: Directory,
}

/// Memory of the objects in flight.
struct Memory {
    region: std::sync::Arc<Region>,
    buffer: Buffer,
    object_bytes: usize,
}

impl Memory {
    fn slice(&self, place: usize) -> Slice {
        self.buffer.slice(place * self.object_bytes, self.object_bytes)
    }
}

impl NodeBed {
    /// Starts a node that uploads every object of this length to the place.
    pub(crate) fn start(place: &StorePlace, pool_bytes: u64, object_bytes: usize) -> Result<Self, Failure> {
        let directory = Directory::new()?;
        let mut config = ControlConfig::new(CLUSTER);
        config.publish = Some(RuntimeDirectory::at(&directory.0));
        let control_server = ControlServer::start(config)?;
        let runtime_directory = Some(directory.0.clone());
        let control = Control::Local { cluster: CLUSTER.to_owned(), runtime_directory: runtime_directory.clone() };
        let shared = SharedTierConfig {
            upload: UploadPolicy::All,
            flush: Duration::from_millis(10),
            ..SharedTierConfig::at(place.clone())
        };
        let settings = NodeConfig {
            control: control.clone(),
            node: Some(NodeId(1)),
            shards: Some(1),
            runtime_directory,
            shared: Some(shared),
            ..NodeConfig::local(CLUSTER, pool_bytes)
        };
        let node = Node::start(&settings)?;
        let config = ClientConfig { control, deadline: DEADLINE, ..ClientConfig::local(CLUSTER) };
        let mut client = Client::connect(&config)?;
        let region = Region::allocate(&RegionOptions::new("bench-client", DEPTH * object_bytes))?;
        let buffer = client.register(std::sync::Arc::clone(&region));
        let memory = Memory { region, buffer, object_bytes };
        let node = Some(node);
        let bed = Self { client, memory, node, settings, _control: control_server, _directory: directory };
        bed.wait_for(|stats| stats.slots_valid > 0)?;
        Ok(bed)
    }

    /// Starts the node again with another pool, which is empty.
    pub(crate) fn restart_empty(&mut self, pool_bytes: u64) -> Result<(), Failure> {
        self.node = None;
        self.settings = NodeConfig { pool_bytes, ..self.settings.clone() };
        self.node = Some(Node::start(&self.settings)?);
        self.wait_for(|stats| stats.slots_valid > 0 && stats.objects > 0)
    }

    fn stats(&self) -> Result<SharedStats, Failure> {
        let shards = self.node.as_ref().ok_or("no node")?.snapshots()?;
        Ok(shards.into_iter().find_map(|shard| shard.shared).ok_or("no shared tier")?)
    }

    fn wait_for(&self, is_there: impl Fn(&SharedStats) -> bool) -> Result<(), Failure> {
        let until = Instant::now() + PATIENCE;
        loop {
            let stats = self.stats()?;
            if is_there(&stats) {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(format!("the shared tier: {stats:?}").into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Puts objects, and waits until the store has them; returns GB/s.
    pub(crate) fn upload(&mut self, keys: Range<u64>) -> Result<f64, Failure> {
        let bytes = (keys.end - keys.start) * self.memory.object_bytes as u64;
        let goal = self.stats()?.uploaded_bytes + bytes;
        let start = Instant::now();
        self.run(keys, true)?;
        self.wait_for(|stats| stats.uploaded_bytes >= goal)?;
        Ok(bytes as f64 / 1e9 / start.elapsed().as_secs_f64())
    }

    /// Gets objects that are in the store and not in memory; returns GB/s.
    pub(crate) fn download(&mut self, keys: Range<u64>) -> Result<f64, Failure> {
        let bytes = (keys.end - keys.start) * self.memory.object_bytes as u64;
        let goal = self.stats()?.read_bytes + bytes;
        let start = Instant::now();
        self.run(keys, false)?;
        let rate = bytes as f64 / 1e9 / start.elapsed().as_secs_f64();
        let read = self.stats()?.read_bytes;
        if read < goal { Err(format!("{} bytes were in memory", goal - read).into()) } else { Ok(rate) }
    }

    /// Puts or gets objects, several in flight.
    fn run(&mut self, mut keys: Range<u64>, puts: bool) -> Result<(), Failure> {
        let mut open = Vec::new();
        for place in 0..DEPTH {
            if let Some(key) = keys.next() {
                open.push(self.begin(key, place, puts)?);
            }
        }
        while let Some((done, outcome)) = self.client.batches().next_finished()? {
            let at = open.iter().position(|(batch, _)| *batch == done).ok_or("an unknown batch")?;
            let (_, place) = open.swap_remove(at);
            check(&outcome)?;
            if let Some(key) = keys.next() {
                open.push(self.begin(key, place, puts)?);
            }
        }
        Ok(())
    }

    fn begin(&mut self, key: u64, place: usize, puts: bool) -> Result<(kvplane::Open, usize), Failure> {
        let items: [Item; 1] = [(key.to_le_bytes(), self.memory.slice(place))];
        let mut batches = self.client.batches();
        let open = if puts {
            self.memory.region.copy_in(place * self.memory.object_bytes, &key.to_le_bytes());
            batches.start_puts(&items, &PutOptions::default())?
        } else {
            batches.start_gets(&items)?
        };
        Ok((open, place))
    }
}

/// Returns an error unless every object was put, or found.
fn check(outcome: &BatchOutcome) -> Result<(), Failure> {
    match outcome {
        BatchOutcome::Puts(puts) => {
            for put in puts {
                put.as_ref().map_err(ToString::to_string)?;
            }
        }
        BatchOutcome::Gets(gets) => {
            for got in gets {
                got.as_ref().map_err(ToString::to_string)?.ok_or("an object is missing")?;
            }
        }
    }
    Ok(())
}

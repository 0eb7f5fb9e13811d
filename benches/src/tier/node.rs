//! Node with one shard and an SSD, and a client on the same host: performance as seen by a caller.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvplane::rpc::RuntimeDirectory;
use kvplane::{
    BatchOutcome, Buffer, Client, ClientConfig, Control, Node, NodeConfig, Open, Put, PutAck, PutOptions, Slice,
    SsdConfig, TierPolicy,
};
use kvplane_proto::ids::NodeId;
use kvplane_proto::rng::Rng;
use kvplane_server::{ControlConfig, ControlHandle, ControlServer};
use kvplane_sys::cpu;

use super::alone::region;
use super::figures::Figures;
use crate::Failure;
use crate::bed::Directory;

const CLUSTER: &str = "bench";
const POOL_BYTES: u64 = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(120);
/// Number of batches in flight, each with its share of the depth. The next is submitted when one completes, so that the
/// queue stays as deep as fio's.
const BATCHES: usize = 128;

/// Key and its range of memory.
type Item = ([u8; 8], Slice);

/// Node on a file. Its memory keeps no object that is read from the SSD.
pub(crate) struct NodeBed {
    client: Client,
    buffer: Buffer,
    memory: usize,
    node: Node,
    _control: ControlHandle,
    _directory: Directory,
}

impl NodeBed {
    /// Starts a node, with the SSD or without, and waits for its recovery.
    pub(crate) fn start(ssd: Option<(&Path, u64)>, ack: PutAck, memory: usize) -> Result<Self, Failure> {
        static BEDS: AtomicU64 = AtomicU64::new(0);
        let mut directory = Directory::new()?;
        directory.0.as_mut_os_string().push(format!("-{}", BEDS.fetch_add(1, Ordering::Relaxed)));
        let mut config = ControlConfig::new(CLUSTER);
        config.publish = Some(RuntimeDirectory::at(&directory.0));
        // Objects on the SSD are valid only for a control plane that knows that no other node had their slots
        // meanwhile.
        config.state_directory = ssd.map(|(path, _)| path.with_extension("control"));
        let control_server = ControlServer::start(config)?;
        let runtime_directory = Some(directory.0.clone());
        let control = Control::Local { cluster: CLUSTER.to_owned(), runtime_directory: runtime_directory.clone() };
        let node = Node::start(&NodeConfig {
            control: control.clone(),
            node: Some(NodeId(1)),
            shards: Some(1),
            runtime_directory,
            ssds: ssd.iter().map(|(path, bytes)| SsdConfig { path: path.to_path_buf(), bytes: Some(*bytes) }).collect(),
            ssd_object_bytes: 4096,
            tier: TierPolicy { ack, promote_times: u8::MAX, ..TierPolicy::default() },
            ..NodeConfig::local(CLUSTER, POOL_BYTES)
        })?;
        let until = Instant::now() + PATIENCE;
        while node.snapshots()?.iter().filter_map(|shard| shard.tier).any(|tier| !tier.is_recovered) {
            if Instant::now() > until {
                return Err("recovery does not end".into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let config = ClientConfig { control, deadline: Duration::from_secs(30), ..ClientConfig::local(CLUSTER) };
        let mut client = Client::connect(&config)?;
        let buffer = client.register(region("bench-client", memory)?);
        Ok(Self { client, buffer, memory, node, _control: control_server, _directory: directory })
    }

    pub(crate) fn node(&self) -> &Node {
        &self.node
    }

    /// Puts objects with these numbers.
    pub(crate) fn fill(&mut self, keys: core::ops::Range<u64>, bytes: u32) -> Result<(), Failure> {
        let batch = (self.memory / place_bytes(bytes)).min(64) as u64;
        let mut next = keys.start;
        while next < keys.end {
            let end = keys.end.min(next + batch);
            self.put(next..end, bytes)?;
            next = end;
        }
        Ok(())
    }

    /// Puts objects for this time, `depth` in flight.
    pub(crate) fn put_for(
        &mut self,
        time: Duration,
        depth: usize,
        bytes: u32,
        first_key: &mut u64,
    ) -> Result<Figures, Failure> {
        self.measure(time, depth, bytes, |bed, items: &mut Vec<Item>, left: &[usize]| {
            // Refused objects are put again, all others are new.
            for at in (0..items.len()).filter(|at| !left.contains(at)) {
                *first_key += 1;
                items[at].0 = (*first_key - 1).to_le_bytes();
            }
            bed.client.batches().start_puts(items, &PutOptions::default())
        })
    }

    /// Gets random objects for this time, `depth` in flight.
    pub(crate) fn get_for(
        &mut self,
        time: Duration,
        depth: usize,
        bytes: u32,
        keys: core::ops::Range<u64>,
        rng: &mut Rng,
    ) -> Result<Figures, Failure> {
        self.measure(time, depth, bytes, |bed, items: &mut Vec<Item>, _: &[usize]| {
            for (key, _) in items.iter_mut() {
                *key = (keys.start + rng.below(keys.end - keys.start)).to_le_bytes();
            }
            bed.client.batches().start_gets(items)
        })
    }

    fn put(&mut self, keys: core::ops::Range<u64>, bytes: u32) -> Result<(), Failure> {
        let each = place_bytes(bytes);
        let mut waiting: Vec<u64> = keys.collect();
        let until = Instant::now() + PATIENCE;
        while !waiting.is_empty() {
            let names: Vec<[u8; 8]> = waiting.iter().map(|key| key.to_le_bytes()).collect();
            let items: Vec<_> =
                names.iter().zip(0..).map(|(key, at)| (key, self.buffer.slice(at * each, bytes as usize))).collect();
            let outcomes = self.client.batch_put_from(&items)?;
            let refused = |(key, outcome): (u64, Result<Put, kvplane::Error>)| match outcome {
                Ok(_) => None,
                Err(error) => Some((key, error)),
            };
            let left: Vec<_> = waiting.iter().copied().zip(outcomes).filter_map(refused).collect();
            if let Some((key, error)) = left.first().filter(|_| Instant::now() > until) {
                return Err(format!("object {key}: {error}").into());
            }
            waiting = left.into_iter().map(|(key, _)| key).collect();
        }
        Ok(())
    }

    /// Submits batches for this time, keeping `depth` objects in flight.
    fn measure(
        &mut self,
        time: Duration,
        depth: usize,
        bytes: u32,
        mut start: impl FnMut(&mut Self, &mut Vec<Item>, &[usize]) -> Result<Open, kvplane::Error>,
    ) -> Result<Figures, Failure> {
        let each = depth / depth.min(BATCHES);
        let (since, cpu_ns, mut samples) = (Instant::now(), cpu::process_cpu_ns(), Vec::new());
        let mut open = Vec::new();
        for first in (0..depth).step_by(each) {
            let place = |at| self.buffer.slice(at * place_bytes(bytes), bytes as usize);
            let mut items: Vec<Item> = (first..first + each).map(|at| ([0; 8], place(at))).collect();
            open.push((start(self, &mut items, &[])?, Instant::now(), items));
        }
        while let Some((done, finished)) = self.client.batches().next_finished()? {
            let at = open.iter().position(|(batch, ..)| *batch == done).ok_or("an unknown batch")?;
            let (_, started, mut items) = open.swap_remove(at);
            let refused = refused(&finished)?;
            let done = each - refused.len();
            samples.extend(std::iter::repeat_n(started.elapsed().as_nanos() as u64, done));
            if since.elapsed() < time {
                open.push((start(self, &mut items, &refused)?, Instant::now(), items));
            }
        }
        Ok(Figures::of(samples, bytes.into(), since.elapsed(), cpu::process_cpu_ns() - cpu_ns))
    }
}

/// Returns the puts that were refused for lack of memory. Any other failure ends the benchmark.
fn refused(finished: &BatchOutcome) -> Result<Vec<usize>, Failure> {
    match finished {
        BatchOutcome::Gets(outcomes) => {
            for outcome in outcomes {
                outcome.as_ref().map_err(ToString::to_string)?.ok_or("an object is missing")?;
            }
            Ok(Vec::new())
        }
        BatchOutcome::Puts(outcomes) => {
            let refused = outcomes.iter().enumerate().filter(|(_, outcome)| outcome.is_err());
            Ok(refused.map(|(at, _)| at).collect())
        }
    }
}

const fn place_bytes(bytes: u32) -> usize {
    (bytes as usize).next_multiple_of(4096)
}

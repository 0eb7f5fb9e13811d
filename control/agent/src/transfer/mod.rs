//! The transfer engine: memory registered here is read and written by peers, and theirs by us.
//!
//! [`TransferEngine`] serves by a shard thread of its own, parked when idle, and asks on the calling threads: any
//! number of them may use it at the same time. Requests name memory by address, ours and theirs. A segment is named by
//! the address of its engine (`127.0.0.1:15000`): peer to peer, without a control plane. Peers on the same host
//! map each other's shareable memory and copy by themselves.
//!
//! ```no_run
//! use std::time::Duration;
//! use kvplane::{
//!     Opcode, Region, RegionOptions, RegisterOptions, SubmitOptions, TaskState, TransferEngine, TransferEngineConfig,
//!     TransferRequest,
//! };
//!
//! let engine = TransferEngine::start(TransferEngineConfig::default())?;
//! let memory = Region::allocate(&RegionOptions::new("blocks", 1 << 20))?;
//! engine.register(memory.clone(), &RegisterOptions::default())?;
//! let peer = engine.open_segment("127.0.0.1:15000")?;
//! let theirs = engine.segment_info(peer)?.buffers[0].address;
//! let read = TransferRequest {
//!     opcode: Opcode::Read,
//!     source: memory.address(),
//!     target: peer,
//!     target_offset: theirs,
//!     length: 65_536,
//! };
//! let batch = engine.submit(&[read], &SubmitOptions::default())?;
//! assert_eq!(batch.wait().state, TaskState::Completed);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod batch;
mod config;
mod driver;
mod memory;
mod open;
mod register;
mod request;
mod segment;
mod session;
mod submit;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use kvplane_engine::{HostConfig, Initiator, Listen, Pacing, Shard, ShardConfig, ShardHandle, ShardSnapshot};
use kvplane_proto::Version;
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_store::service::Identity;

pub use batch::{Batch, BatchStatus, Completed, TaskState, TaskStatus};
pub use config::TransferEngineConfig;
pub use memory::RegisterOptions;
pub use request::{Opcode, Range, Ranges, ScatterRequest, SubmitOptions, TransferRequest};
pub use segment::{BufferInfo, SegmentHandle, SegmentInfo};
pub use session::{Segment, Session, Transfer};

use crate::error::Error;
use crate::link::seed;
use config::{directory_of, socket_path};
use driver::Driver;
use memory::Memory;
use segment::Segments;

/// Registers memory, and moves bytes between it and the memory of others. Any thread may use it.
///
/// Dropping it withdraws what is in flight, waits until nothing touches its memory any more, and stops serving.
pub struct TransferEngine {
    config: TransferEngineConfig,
    shard: ShardHandle,
    directory: PathBuf,
    memory: Memory,
    /// Held while the set of buffers changes, which takes several steps.
    registering: Mutex<()>,
    segments: Segments,
    drivers: Vec<Arc<Driver>>,
    threads: Vec<JoinHandle<()>>,
    batches: AtomicU64,
}

impl core::fmt::Debug for TransferEngine {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("TransferEngine").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl TransferEngine {
    /// Starts serving.
    ///
    /// # Errors
    /// When the port is taken or the kernel refuses: says which and what to do.
    pub fn start(config: TransferEngineConfig) -> Result<Self, Error> {
        config.check()?;
        let directory = directory_of(&config)?;
        let unique = seed()?;
        let shard = Shard::start(ShardConfig {
            identity: Identity {
                cluster: config.cluster.clone(),
                node: NodeId(unique.max(1)),
                incarnation: Incarnation(1),
                shard: ShardId(0),
                segment_name: String::new(),
            },
            core: config.core,
            pacing: config.pacing,
            listen: Listen { tcp: config.listen, shm: None },
            pool: None,
            store: None,
            first_version: Version(1),
            host: HostConfig::default(),
        });
        // The socket is named by the port, which only the bound listener knows.
        let shard = shard?;
        if config.shared_memory {
            shard.listen_shm(socket_path(&directory, shard.address()))?;
        }
        let mut engine = Self {
            config,
            shard,
            directory,
            memory: Memory::default(),
            registering: Mutex::new(()),
            segments: Segments::default(),
            drivers: Vec::new(),
            threads: Vec::new(),
            batches: AtomicU64::new(0),
        };
        for number in 0..engine.config.initiators {
            let client = config::client(&engine.config, true)?;
            let initiator = Initiator::new(client, &HostConfig::default(), engine.config.pacing)?;
            let driver = Driver::new(initiator, engine.config.batches)?;
            engine.threads.push(driver.start_progress(number)?);
            engine.drivers.push(driver);
        }
        Ok(engine)
    }

    /// The name by which peers open its segment.
    #[must_use]
    pub fn name(&self) -> String {
        self.shard.address().to_string()
    }

    /// A way to ask peers, for one thread.
    ///
    /// # Errors
    /// When the kernel gives no ring.
    pub fn session(&self) -> Result<Session, Error> {
        self.session_with(self.config.pacing)
    }

    /// The same, waiting for answers in another way than the serving thread waits for requests.
    ///
    /// # Errors
    /// When the kernel gives no ring.
    pub fn session_with(&self, pacing: Pacing) -> Result<Session, Error> {
        let config = TransferEngineConfig { pacing, ..self.config.clone() };
        Session::new(&config, self.directory.clone())
    }

    /// What the serving thread tells about itself.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn snapshot(&self) -> Result<ShardSnapshot, Error> {
        Ok(self.shard.snapshot()?)
    }

    /// The initiator of this thread.
    fn driver(&self) -> &Arc<Driver> {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static NUMBER: usize = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        &self.drivers[NUMBER.with(|&number| number) % self.drivers.len()]
    }

    fn next_batch(&self) -> u64 {
        self.batches.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl Drop for TransferEngine {
    fn drop(&mut self) {
        self.drivers.iter().for_each(|driver| driver.stop());
        for thread in self.threads.drain(..) {
            // A panic there was printed when it happened.
            let _ = thread.join();
        }
    }
}

//! Transfer engine: peers read and write memory registered here, and this process reads and writes theirs.
//!
//! [`TransferEngine`] serves peers on a shard thread of its own, parked when idle, and sends requests on the calling
//! threads: any number of them may use it at the same time. Requests name memory by address, local and remote. A
//! segment is named by the address of its engine (`127.0.0.1:15000`): peer to peer, without a control plane. Peers on
//! the same host map each other's shareable memory and copy directly. A file of this host is a segment, too, named
//! `file:///path`: its addresses are offsets in the file.
//!
//! ```no_run
//! use std::time::Duration;
//! use kvplane_transfer::{
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

#![forbid(unsafe_code)]

mod batch;
mod config;
mod directory;
mod driver;
pub mod error;
mod explain;
mod files;
mod memory;
mod metrics;
pub mod rails;
mod segment;
mod session;
mod size;
mod submit;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use kvplane_engine::{HostConfig, Initiator, Listen, Shard, ShardConfig, ShardHandle};
use kvplane_mooncake::{Native, NativeRails};
use kvplane_proto::Version;
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_store::service::Identity;
use kvplane_sys::random::random_u64;
use kvplane_ticket::{Challenges, Credential, TicketKey};

pub use batch::request::{Opcode, Range, Ranges, ScatterRequest, SubmitOptions, TransferRequest};
pub use batch::{Batch, BatchCompletion, BatchStatus, TaskState, TaskStatus};
pub use config::TransferEngineConfig;
pub use directory::own_address::OwnAddress;
pub use error::Error;
pub use explain::{Explanation, TransportChoice, Use};
pub use files::FileInfo;
pub use memory::RegisterOptions;
pub use metrics::{Metrics, PathChange, RailSnapshot, SlowTransfer};
pub use rails::rdma::{RdmaConfig, RdmaUse};
pub use rails::{MemoryRails, RankedRail};
pub use segment::{BufferInfo, SegmentHandle, SegmentInfo};
pub use session::{Segment, Session, Transfer};
pub use size::parse_bytes;

pub use kvplane_client::sched::{Health, Priority};
pub use kvplane_client::{Intent, NodeCounts, RailCounts, Transport};
pub use kvplane_engine::{
    Buffer, HugePages, Pacing, PageKind, Region, RegionError, RegionOptions, ShardSnapshot, Slice, ZeroCopy,
    ZeroCopyCounters, ZeroCopyOptions, cpu,
};
pub use kvplane_mooncake::{Environment, Notice};
pub use kvplane_proto::Status;
pub use kvplane_sys::{interrupt, verbs};

use config::{directory_of, socket_path};
use directory::Directory;
use directory::courier::Courier;
use driver::Driver;
use files::Files;
use memory::Memory;
use metrics::Exposition;
use segment::Segments;

/// Transfer engine: registers memory, and moves bytes between it and the memory of peers. Any thread may use it.
///
/// Dropping it cancels transfers in flight, waits until nothing accesses their memory any more, and stops serving.
pub struct TransferEngine {
    config: TransferEngineConfig,
    shard: Arc<ShardHandle>,
    directory: Arc<Directory>,
    courier: Arc<Courier>,
    memory: Memory,
    /// Held while the set of buffers changes, which takes several steps.
    registering: Mutex<()>,
    segments: Segments,
    files: Files,
    drivers: Vec<Arc<Driver>>,
    threads: Vec<JoinHandle<()>>,
    batches: AtomicU64,
    /// State that a metrics scrape keeps for the next one.
    exposition: Mutex<Exposition>,
}

impl core::fmt::Debug for TransferEngine {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("TransferEngine").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// Returns the rails to announce: the devices that the serving thread has opened.
fn told_rails(host: &HostConfig, shard: &ShardHandle) -> Result<Option<NativeRails>, Error> {
    let Some(devices) = &host.rdma else { return Ok(None) };
    let names: Vec<String> = shard.snapshot()?.rdma.into_iter().map(|device| device.name).collect();
    Ok(rails::near::told(&devices.near, &names))
}

impl TransferEngine {
    /// Starts an engine.
    ///
    /// # Errors
    /// When the port is taken or the kernel refuses a resource; the error names it and the next step.
    pub fn start(config: TransferEngineConfig) -> Result<Self, Error> {
        Self::start_with(config, None)
    }

    /// Starts an engine that serves only peers which prove a ticket, on any address: without a handshake port, and
    /// without one for stock engines, because their protocols have no tickets. No peer is admitted before
    /// [`Self::learn_keys`].
    ///
    /// # Errors
    /// Errors of [`Self::start`].
    pub fn start_guarded(config: TransferEngineConfig, challenges: Challenges) -> Result<Self, Error> {
        let config = TransferEngineConfig { stock_peers: false, native: true, ..config };
        Self::start_with(config, Some(challenges))
    }

    fn start_with(mut config: TransferEngineConfig, tickets: Option<Challenges>) -> Result<Self, Error> {
        let guarded = tickets.is_some();
        config.check(guarded)?;
        config.rdma.heed(&config.environment);
        let listening = if guarded { None } else { Some(directory::listen(&config)?) };
        let sockets = directory_of(&config)?;
        let unique = random_u64()?.max(1);
        let host = config::host(&config)?;
        let shard = Shard::start(ShardConfig {
            identity: Identity {
                cluster: config.cluster.clone(),
                node: NodeId(unique),
                incarnation: Incarnation(1),
                shard: ShardId(0),
                segment_name: String::new(),
            },
            core: config.core,
            pacing: config.pacing,
            listen: Listen {
                tcp: SocketAddr::new(config.listen.ip(), config.data_port),
                shm: None,
                mooncake: config.stock_peers.then(|| SocketAddr::new(config.listen.ip(), config.stock_data_port)),
            },
            pool: None,
            store: None,
            first_version: Version(1),
            host: HostConfig { tickets, ..host.clone() },
        });
        // The name of the socket contains the port, which is known once the listener is bound.
        let shard = shard?;
        let socket = config.shared_memory.then(|| socket_path(&sockets, shard.address()));
        if let Some(socket) = &socket {
            shard.listen_shm(socket.clone())?;
        }
        let native = Native {
            tcp: Some(SocketAddr::new(config.announced(), shard.address().port())),
            shm: socket.map(|socket| socket.display().to_string()).unwrap_or_default(),
            host: cpu::boot_id().unwrap_or_default(),
            pid: std::process::id(),
            incarnation: unique,
            regions: Vec::new(),
            rails: told_rails(&host, &shard)?,
            other: serde_json::Map::new(),
        };
        let near = host.rdma.as_ref().map(|devices| Arc::clone(&devices.near)).unwrap_or_default();
        let shard = Arc::new(shard);
        let rdma = host.rdma.is_some();
        let directory = Arc::new(Directory::start(&config, listening, native, shard.mooncake(), near, rdma)?);
        let courier = Arc::new(Courier::new(Arc::clone(&directory)));
        let mut engine = Self {
            config,
            shard,
            directory,
            courier,
            memory: Memory::default(),
            registering: Mutex::new(()),
            segments: Segments::default(),
            files: Files::default(),
            drivers: Vec::new(),
            threads: Vec::new(),
            batches: AtomicU64::new(0),
            exposition: Mutex::default(),
        };
        engine.start_initiators(&host)?;
        Ok(engine)
    }

    fn start_initiators(&mut self, host: &HostConfig) -> Result<(), Error> {
        let departures = self.segments.read().peers.departures().clone();
        for number in 0..self.config.initiators {
            let client = config::client(&self.config, true)?;
            let host = HostConfig { stock: Some((self.directory.stock(), number as u64)), ..host.clone() };
            let initiator = Initiator::new(client, &host, self.config.pacing)?;
            let driver = Driver::new(initiator, &self.config, departures.clone())?;
            self.threads.push(driver.start_progress(number)?);
            self.drivers.push(driver);
        }
        Ok(())
    }

    /// Passes on the keys that verify tickets, the control plane's ticket time in seconds that they came with, and this
    /// engine's own ticket.
    ///
    /// # Errors
    /// When the serving thread does not accept them.
    pub fn learn_keys(&self, keys: Vec<TicketKey>, seconds: u64, credential: &Arc<Credential>) -> Result<(), Error> {
        self.shard.learn_keys(keys, seconds)?;
        self.drivers.iter().for_each(|driver| driver.set_credential(credential));
        // Wakes connections that wait for a newer ticket.
        self.settle();
        Ok(())
    }

    /// Returns the name by which peers open its segment: peer to peer, the address of its handshake daemon, `ip:port`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.directory.name()
    }

    /// Returns the address of its handshake daemon.
    #[must_use]
    pub fn local_address(&self) -> SocketAddr {
        self.directory.address()
    }

    /// Removes the engine from the metadata store, if it is in one, so that no new peer finds it. Known peers are not
    /// affected. Happens automatically when the engine is dropped.
    pub fn withdraw(&self) {
        self.directory.withdraw();
    }

    /// Creates a session, the fast path of a single thread.
    ///
    /// # Errors
    /// When the kernel refuses an io_uring.
    pub fn session(&self) -> Result<Session, Error> {
        self.session_with(self.config.pacing)
    }

    /// Like [`Self::session`], with a strategy of waiting that differs from the serving thread's.
    ///
    /// # Errors
    /// When the kernel refuses an io_uring.
    pub fn session_with(&self, pacing: Pacing) -> Result<Session, Error> {
        let config = TransferEngineConfig { pacing, ..self.config.clone() };
        Session::new(&config, Arc::clone(&self.directory))
    }

    /// Returns a snapshot of the serving thread.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn snapshot(&self) -> Result<ShardSnapshot, Error> {
        Ok(self.shard.snapshot()?)
    }

    /// Returns the initiator of the calling thread.
    fn driver(&self) -> &Arc<Driver> {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static NUMBER: usize = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        &self.drivers[NUMBER.with(|&number| number) % self.drivers.len()]
    }

    fn submitted(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }

    fn next_batch(&self) -> u64 {
        self.batches.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl Drop for TransferEngine {
    fn drop(&mut self) {
        self.drivers.iter().for_each(|driver| driver.stop());
        for thread in self.threads.drain(..) {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
        // Stopped explicitly, not by the drop of the last handle: a handshake may hold one for a moment.
        self.shard.stop();
    }
}

/// Locks a mutex, ignoring poison: the data under the locks of this crate is consistent at every point.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

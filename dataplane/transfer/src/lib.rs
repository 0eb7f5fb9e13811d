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
mod buffers;
mod config;
mod directory;
mod driver;
mod engine;
pub mod error;
mod memory;
mod metrics;
pub mod rails;
mod segment;
mod segments;
mod session;
mod size;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use batch::request::{NoticeTargets, Opcode, Range, Ranges, ScatterRequest, SubmitOptions, TransferRequest};
pub use batch::{Batch, BatchCompletion, BatchStatus, TaskState, TaskStatus};
pub use config::TransferEngineConfig;
pub use directory::Directory;
pub use directory::own_address::OwnAddress;
pub use engine::TransferEngine;
pub use engine::explain::{Explanation, TransportChoice, Use};
pub use error::Error;
pub use memory::RegisterOptions;
pub use metrics::{Metrics, PathChange, RailSnapshot, SlowTransfer};
pub use rails::rdma::{DevicesError, RdmaConfig, RdmaUse};
pub use rails::{MemoryRails, RankedRail};
pub use segment::{BufferInfo, FileInfo, SegmentHandle, SegmentInfo};
pub use segments::Segments;
pub use session::{Segment, Session, Transfer};
pub use size::{ParseBytesError, parse_bytes};

pub use kvplane_client::sched::{Health, Priority};
pub use kvplane_client::{Intent, NodeCounts, RailCounts, Transport};
pub use kvplane_engine::{
    Buffer, DeviceRegistration, HugePages, ObstacleKind, Pacing, PageKind, Region, RegionError, RegionOptions,
    RegistrationObstacle, RegistrationPath, ShardSnapshot, Slice, ZeroCopy, ZeroCopyCounters, ZeroCopyOptions, cpu,
};
pub use kvplane_mooncake::{Environment, Notice};
pub use kvplane_proto::Status;
pub use kvplane_sys::device::{Backing, DeviceMemory, StreamHandle};
pub use kvplane_sys::{interrupt, verbs};

/// Locks a mutex, ignoring poison: the data under the locks of this crate is consistent at every point.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

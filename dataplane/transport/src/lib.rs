//! Drivers that move bytes between a host and its peers.
//!
//! A driver knows frames and payloads, not what they mean: the host asks the pure core. All drivers of a host share its
//! poller, and run on whichever thread has the host.
//!
//! * [`tcp`]: frames over TCP, several connections to a peer.
//! * [`fault`]: the same, with faults by a seeded plan.
//! * [`file`]: files as segments, over io_uring.
//! * [`nvme`]: the SSD under a shard's tier, over io_uring.
//! * [`mooncake`]: the protocol of stock Mooncake engines, both sides.
//! * [`rdma`]: the same over verbs, with payloads and segments moved by the device.
//! * [`shm`]: the same host: frames over rings in shared memory, payloads copied by whoever wants them.

#![forbid(unsafe_code)]

pub mod fault;
pub mod file;
pub mod mooncake;
pub mod nvme;
pub mod rdma;
pub mod shm;
mod table;
pub mod tcp;
pub mod token;
mod turns;
pub mod types;

pub use fault::{Fault, FaultCounters, FaultPlan};
pub use file::{FileTransfer, Files};
pub use nvme::{IoChoice, Nvme, NvmeCounters, Part, Ssd, TierMemory};
pub use rdma::{
    CopyCompletion, CopyCompletions, FOREIGN_QUEUE_PAIRS, ForeignBuffer, ForeignDevice, ForeignHalf, ForeignPeer, Rdma,
    RdmaCopy, RdmaCounters, RdmaError, RdmaOptions,
};
pub use shm::Shm;
pub use tcp::{StrangerLimits, Tcp, ZeroCopy, ZeroCopyCounters, ZeroCopyOptions};
pub use token::{Source, Token};
pub use types::{CloseCause, ConnectionId, Event, Input, OutgoingPayload, Pieces, Target};

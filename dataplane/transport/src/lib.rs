//! Transport drivers: move bytes between a host and its peers.
//!
//! A driver handles frames and payloads without interpreting them: the host passes them to the sans-I/O core. All
//! drivers of a host share its poller, and run on whichever thread runs the host.
//!
//! * [`tcp`]: frames over TCP, several connections to a peer.
//! * [`fault`]: the TCP driver with fault injection by a seeded plan.
//! * [`file`]: files as segments, over io_uring.
//! * [`nvme`]: the SSD under a shard's tier, over io_uring.
//! * [`mooncake`]: the protocol of stock Mooncake engines, client and server side.
//! * [`rdma`]: frames over verbs; payloads and segments are moved by the NIC.
//! * [`shm`]: peers on the same machine: frames over rings in shared memory; the receiving side copies the payloads.
//! * [`sockets`]: removal of Unix sockets of dead processes.

#![forbid(unsafe_code)]

pub mod fault;
pub mod file;
pub mod mooncake;
pub mod nvme;
pub mod rdma;
pub mod shm;
pub mod sockets;
mod table;
pub mod tcp;
pub mod token;
mod turns;
pub mod types;

pub use fault::{Fault, FaultCounters, FaultPlan};
pub use file::{FileTransfer, Files};
pub use nvme::{IoChoice, Nvme, NvmeCounters, Part, Ssd, TierMemory};
pub use rdma::{
    CopyCompletion, CopyCompletions, DeviceRegistration, FOREIGN_QUEUE_PAIRS, ForeignBuffer, ForeignDevice,
    ForeignHalf, ForeignPeer, ObstacleKind, Rdma, RdmaCopy, RdmaCounters, RdmaError, RdmaOptions, RegistrationObstacle,
    RegistrationPath,
};
pub use shm::Shm;
pub use tcp::{Tcp, UnauthenticatedLimits, ZeroCopy, ZeroCopyCounters, ZeroCopyOptions, limit_unacknowledged};
pub use token::{Source, Token};
pub use types::{CloseCause, ConnectionId, Event, Input, OutgoingPayload, Pieces, Target};

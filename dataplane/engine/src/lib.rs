//! The host of the dataplane: it runs the pure cores on real rings, sockets and memory.
//!
//! * [`host`]: drivers with a service, or with a client, and the rounds that feed them.
//! * [`shard`]: a pinned thread that runs a host for a node, reached by a mailbox.
//! * [`initiator`]: a host that its caller's thread drives, for clients.
//! * [`pacing`]: when to spin and when to park.

#![forbid(unsafe_code)]

pub mod host;
pub mod initiator;
pub mod pacing;
pub mod shard;

pub use host::{
    ClientHost, DeviceSnapshot, FetchConfig, Handshake, HostConfig, HostFiles, NearDevices, PART_LEAST_BYTES,
    PlaceName, RdmaDevices, ServedSegments, ShardHost, StockAnswer, StockEngines, TierDevice, TierNotice, TierSetup,
    node_of_region,
};
pub use initiator::Initiator;
pub use pacing::Pacing;
pub use shard::{
    Listen, ObjectPlaces, PlacedName, Shard, ShardConfig, ShardError, ShardHandle, ShardSnapshot, StockKeys,
};

pub use kvplane_store::events::{Change, EventPage, Medium, StoreEvent};
pub use kvplane_store::eviction::Eviction;
pub use kvplane_store::service::{
    Admission, CopyCounters, FetchLimits, MoveCounters, OperationTimes, PutAck, ReplicaProgress, SLOW_AFTER_NS,
    SLOW_KEPT, ServiceTimes, SlowOperation, SnapshotPage, TenantOperation, TenantTimes, TierCounters, TierOrder,
    TierPolicy, TierSnapshot, VoidCause, Whose, WritePolicy,
};
pub use kvplane_sys::verbs::Gid;
pub use kvplane_sys::{
    CrossError, DirectFile, Doorbell, FileOptions, HugePages, IoBuf, PageKind, Region, RegionError, RegionOptions, cpu,
};
pub use kvplane_tier::{
    Identity as TierIdentity, OBJECT_BYTES as TIER_OBJECT_BYTES, Priority as TierPriority, Reason as TierReason,
    RecoveryReport, ScrubReport, ScrubState, TierStats, format::FORMAT_VERSION as TIER_FORMAT,
};
pub use kvplane_transport::nvme::{IoChoice, Latency, NvmeCounters, Part, Ssd};
pub use kvplane_transport::shm::{Probe, probe};
pub use kvplane_transport::{
    FOREIGN_QUEUE_PAIRS, FaultCounters, FaultPlan, ForeignBuffer, ForeignDevice, ForeignHalf, ForeignPeer, ZeroCopy,
    ZeroCopyCounters, ZeroCopyOptions,
};

//! Engine of the dataplane: hosts run the pure cores on real rings, sockets and memory.
//!
//! * [`host`]: drivers with a service, or with a client, and the rounds that feed them.
//! * [`shard`]: a pinned thread that runs a host for a node, reached by a mailbox.
//! * [`initiator`]: a host that its caller's thread drives, for clients.
//! * [`buffers`]: registered memory of an initiator, and ranges of it.
//! * [`pacing`]: the choice between spinning and parking.
//! * [`machine`]: discovery of the machine that the process runs on, from sysfs and hwloc.
//! * [`prometheus`]: text format of metrics.
//! * `piece_list`: pieces of memory as if they were contiguous.
//! * `staging`: pinned memory that the bytes of devices pass through.

#![forbid(unsafe_code)]

pub mod buffers;
pub mod host;
pub mod initiator;
pub mod machine;
pub mod pacing;
mod piece_list;
pub mod prometheus;
pub mod shard;
mod staging;

pub use buffers::{Buffer, DeviceBuffer, FIRST_BUFFER, Slice};
pub use host::{
    ClientHost, DevicePoolConfig, DeviceSnapshot, FetchConfig, Handshake, HandshakeError, HostConfig, HostFiles,
    KeptFiles, KeptMemoryConfig, MappedMemory, MappedMemoryError, NearDevices, PART_LEAST_BYTES, PeerMemoryCounters,
    PlaceName, PoolReadCounters, RdmaDevices, ServedSegments, ShardHost, SharedSetup, StockAnswer, StockEngines,
    TierDevice, TierNotice, TierOpenError, TierSetup, image_bytes_most, node_of_region,
};
pub use initiator::{Initiator, PiecesError};
pub use machine::{discover_machine, scheduler_affinity};
pub use pacing::Pacing;
pub use shard::{
    HandedShard, KeptMemoryError, Listen, ObjectPlaces, PlacedName, Shard, ShardConfig, ShardEnd, ShardError,
    ShardHandle, ShardListeners, ShardSnapshot, ShardStartError, ShardTenants, StockKeys, settle_shared_tier,
    unit_bytes,
};

pub use staging::{MemoryRange, StagingCounters};

pub use kvplane_shared::config::PACK_BYTES as SHARED_PACK_BYTES;
pub use kvplane_shared::port::{Store as SharedStore, StorePort};
pub use kvplane_shared::{SharedConfig, SharedStats, UploadPolicy};
pub use kvplane_store::events::EventPage;
pub use kvplane_store::eviction::Eviction;
pub use kvplane_store::image::FORMAT as IMAGE_FORMAT;
pub use kvplane_store::service::{
    Admission, CopyCounters, Discard, FetchLimits, KeptReport, MoveCounters, OperationTimes, PutAck, RepairCounters,
    ReplicaProgress, SLOW_AFTER_NS, SLOW_KEPT, ServiceTimes, SlowOperation, SnapshotPage, TenantOperation, TenantTimes,
    TierCounters, TierOrder, TierPolicy, TierSnapshot, TimedTenant, VoidCause, WritePolicy,
};
pub use kvplane_sys::verbs::Gid;
pub use kvplane_sys::{
    CrossError, DirectFile, Doorbell, FarPart, FileOptions, HugePages, IoBuf, PageKind, Region, RegionError,
    RegionOptions, cpu,
};
pub use kvplane_tier::{
    Identity as TierIdentity, OBJECT_BYTES as TIER_OBJECT_BYTES, Priority as TierPriority, Reason as TierReason,
    RecoveryReport, ScrubReport, ScrubState, TierStats, TierUse, format::FORMAT_VERSION as TIER_FORMAT,
};
pub use kvplane_transport::nvme::{IoChoice, NvmeCounters, Part, Ssd};
pub use kvplane_transport::rdma::device_memory;
pub use kvplane_transport::shm::{Probe, probe};
pub use kvplane_transport::{
    DeviceRegistration, FOREIGN_QUEUE_PAIRS, FaultCounters, FaultPlan, ForeignBuffer, ForeignDevice, ForeignHalf,
    ForeignPeer, ObstacleKind, RegistrationObstacle, RegistrationPath, ZeroCopy, ZeroCopyCounters, ZeroCopyOptions,
};

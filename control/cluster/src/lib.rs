//! Sans-IO core of the control plane: cluster membership, the cluster map that follows from it, and the segment
//! catalog.
//!
//! [`Cluster`] takes events ([`Input`]) with their time, returns a [`Reply`] or a [`Rejection`], and emits the work of
//! its driver ([`Output`]): persist records, publish a map, report a lost member. It opens no file, reads no clock and
//! sends nothing; the control process and the simulator host the same code.
//!
//! Two invariants carry the rest. **Records before maps**: a change is durable before it is published, so that a
//! control plane that was killed restarts with no lower epoch and no fewer members than it ever published.
//! **Incarnations, not names**: a node is identified by id and incarnation; messages of an older incarnation are
//! counted and ignored.
//!
//! Out of scope: leader election, object placement (owners follow from the map), and the recovery of a member that is
//! alive but unhealthy.

#![forbid(unsafe_code)]

mod adoption;
mod catalog;
mod cluster;
mod config;
mod departure;
pub mod handover;
mod membership;
mod message;
pub mod p2p;
mod quotas;
mod record;
mod rejection;
pub mod reshard;
mod state;
mod tasks;
mod tenants;

pub use adoption::Offer;
pub use catalog::{ClientId, MAX_SEGMENT_NAME_BYTES, Segment, SegmentKind, SegmentOwner};
pub use cluster::{Cluster, StartError};
pub use config::{ClusterConfig, ConfigError, Limits};
pub use departure::{FIRST_ANSWER_NS, Moves, MovesLeft, MovesWait};
pub use kvplane_proto::events::ReplicaProgress;
pub use membership::ENDS_INTERVALS;
pub use message::{Change, Counters, Input, LastIncarnations, Load, MAX_VERSION_BYTES, MemberView, Output, Reply};
pub use quotas::{Quotas, ShardIncarnation, TenantFigures, TenantQuota};
pub use record::conductor::{
    CapabilitiesRecord, ClassRecord, ConductorKey, ConductorRecord, EventsRecord, InstanceDuty, InstanceRecord,
    MAX_CONDUCTOR_TEXT_BYTES, MasterRecord, PlacementRecord, SeedRecord, StageRecord, WeightRecord,
};
pub use record::worlds::{MAX_WORLD_NAME_BYTES, WorldGroup, WorldGroupKey, WorldKey, WorldRecord};
pub use record::{Devices, Header, Layout, MAX_CLUSTER_NAME_BYTES, MemberRecord, Record, RecordError, RecordKey};
pub use rejection::Rejection;
pub use state::{MemberEvent, MemberState};
pub use tasks::{Task, TaskLimits, TaskRefusal, TaskState, Tasks};
pub use tenants::{MAX_TENANT_NAME_BYTES, MAX_TENANT_WEIGHT, MAX_TENANTS, Tenant, TenantChange, TenantSsd};

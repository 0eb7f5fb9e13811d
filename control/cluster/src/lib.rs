//! The control plane's pure core: who is a member of the cluster, what map follows from that, and which segments exist.
//!
//! [`Cluster`] is told what happened ([`Input`]) and when, answers ([`Reply`] or [`Rejection`]), and says what must
//! be done ([`Output`]): persist records, publish a map, tell others that a member is lost. It opens no file, reads
//! no clock and sends nothing; the control process and the simulator host the same code.
//!
//! Two rules carry the rest. **Records before maps**: a change is durable before anyone hears of it, so that a control
//! plane that was killed comes back with an epoch no lower and members no fewer than it ever told. **Incarnations, not
//! names**: a node is known by id and incarnation; whatever an older incarnation says is a counted no-op.
//!
//! What it does not do: elect a leader, place objects (owners follow from the map), or decide what a member that is
//! alive but ill should do.

#![forbid(unsafe_code)]

mod adoption;
mod catalog;
mod cluster;
mod config;
mod departure;
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
pub use departure::{FIRST_ANSWER_NS, MovesLeft, MovesNews, MovesWait};
pub use membership::ENDS_INTERVALS;
pub use message::{Change, Counters, Input, Load, MAX_VERSION_BYTES, MemberView, Output, Reply};
pub use quotas::{Quotas, ShardIncarnation, ShardLease, ShardUse};
pub use record::conductor::{
    ConductorKey, ConductorRecord, EventsRecord, InstanceDuty, InstanceRecord, MAX_CONDUCTOR_TEXT_BYTES, MasterRecord,
    PlacementRecord, SeedRecord,
};
pub use record::{Devices, Header, Layout, MAX_CLUSTER_NAME_BYTES, MemberRecord, Record, RecordError, RecordKey};
pub use rejection::Rejection;
pub use state::{MemberEvent, MemberState};
pub use tasks::{CopyProgress, Task, TaskLimits, TaskRefusal, TaskState, Tasks};
pub use tenants::{MAX_TENANT_NAME_BYTES, MAX_TENANT_WEIGHT, MAX_TENANTS, Tenant};

//! Control plane process: services, state store and HTTP.
//!
//! * [`ControlServer`], [`ControlHandle`]: start and stop a control plane on a thread of its own.
//! * [`ControlConfig`], [`StartError`]: settings, and errors of starting.
//! * [`MetadataLimits`]: limits of the metadata server for Mooncake's engines.
//! * `control`: serves the calls with the components of a control plane.
//! * `cluster`: hosts the pure `kvplane-cluster`; `store`: its durable state, in a file or in etcd; `nodes`: reports of
//!   nodes, and orders to them.
//! * `conductor`: hosts the pure `kvplane-conductor`, if enabled.
//! * `p2p`: hosts the P2P store's catalog; `tasks`: hosts replication tasks.
//! * `worlds`: hosts the pure `kvplane-group`.
//! * `http`: pages, metrics, and paths of Mooncake's tools, with their authentication; `events`: ZeroMQ.
//!
//! This crate makes no decisions itself and is on no data path: while it is down, puts and gets continue with the last
//! map.

#![forbid(unsafe_code)]

mod cluster;
mod conductor;
mod config;
mod control;
mod counts;
mod credentials;
mod events;
mod http;
mod nodes;
mod p2p;
mod server;
mod store;
mod tasks;
mod tickets;
mod worlds;

pub use conductor::{ConductorRestoreError, SnapshotConfig};
pub use config::{ControlConfig, StartError};
pub use http::access::{HttpToken, HttpTokenError};
pub use http::admin::shard_json;
pub use http::metadata::MetadataLimits;
pub use http::objects::{Objects, ObjectsAccess, ObjectsError, Pin, PinOutcome, PinResult};
pub use kvplane_conductor::conductor::ConductorConfig;
pub use kvplane_group::WorldConfig;
pub use server::{ControlHandle, ControlServer, EndError, Role, STATE_FILE};
pub use store::StoreError;
pub use store::etcd::{EtcdChangeError, EtcdConfig, EtcdConfigError};
pub use tickets::TicketConfig;
pub use worlds::{WorldRestoreError, WorldsConfig};

//! Control plane process: services, state store and HTTP.
//!
//! * [`ControlServer`], [`ControlHandle`]: start and stop a control plane on a thread of its own.
//! * [`ControlConfig`], [`StartError`]: settings, and errors of starting.
//! * [`MetadataLimits`]: limits of the metadata server for Mooncake's engines.
//! * `conductor`: hosts the pure `kvplane-conductor`, if enabled.
//! * `p2p`: hosts the P2P store's catalog; `tasks`: carries out replication tasks.
//! * `control`: drives the pure `kvplane-cluster` and serves calls; `store`, `etcd`: the durable cluster state; `http`,
//!   `admin`, `counts`: pages and metrics, `access`: their authentication; `shards`, `tiers`, `follow`: nodes' reports
//!   and orders.
//!
//! This crate makes no decisions itself and is on no data path: while it is down, puts and gets continue with the last
//! map.

#![forbid(unsafe_code)]

mod conductor;
mod config;
mod control;
mod credentials;
mod events;
mod http;
mod nodes;
mod p2p;
mod server;
mod store;
mod tickets;

pub use conductor::policy_named;
pub use config::{ControlConfig, StartError};
pub use http::access::HttpToken;
pub use http::admin::shard_json;
pub use http::metadata::MetadataLimits;
pub use http::objects::{Objects, ObjectsAccess};
pub use kvplane_conductor::conductor::ConductorConfig;
pub use server::{ControlHandle, ControlServer, EndError, Role, STATE_FILE};
pub use store::StoreError;
pub use store::etcd::{EtcdConfig, EtcdConfigError};
pub use tickets::TicketConfig;

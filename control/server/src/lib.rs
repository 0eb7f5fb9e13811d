//! The control process: services, state store, HTTP.
//!
//! * [`ControlServer`], [`ControlHandle`]: start and stop one on a thread of its own.
//! * [`ControlConfig`], [`StartError`]: settings, and what can be wrong with them.
//! * [`MetadataLimits`]: what it keeps as a metadata server of Mooncake's engines.
//! * `conductor`: hosts the pure `kvplane-conductor`, where that is switched on.
//! * `p2p`: hosts the P2P store's catalog; `tasks`: has objects copied.
//! * `control`: drives the pure `kvplane-cluster` and answers calls; `store`, `etcd`: its memory; `http`, `admin`,
//!   `counts`: what it shows, and `access` to whom; `shards`, `tiers`, `follow`: what nodes report and are told.
//!
//! It decides nothing itself and is on nobody's data path: with it down, puts and gets go on with the last map.

#![forbid(unsafe_code)]

mod access;
mod admin;
mod conductor;
mod config;
mod connections;
mod control;
mod counts;
mod credentials;
mod etcd;
mod follow;
mod http;
mod knock;
mod kv_events;
mod metadata;
mod mooncake_metrics;
mod msgpack;
mod objects;
mod p2p;
mod reports;
mod server;
mod shards;
mod status;
mod store;
mod tasks;
mod tenants;
mod tickets;
mod tiers;
mod zmtp;
mod zmtp_peer;

pub use access::HttpToken;
pub use admin::shard_json;
pub use conductor::policy_named;
pub use config::{ControlConfig, StartError};
pub use etcd::{EtcdConfig, EtcdConfigError};
pub use kvplane_conductor::conductor::ConductorConfig;
pub use metadata::MetadataLimits;
pub use objects::{Objects, ObjectsAccess};
pub use server::{ControlHandle, ControlServer, EndError, Role, STATE_FILE};
pub use store::StoreError;
pub use tickets::TicketConfig;

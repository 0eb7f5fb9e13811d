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

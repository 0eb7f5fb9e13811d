//! The control process: services, state store, HTTP.
//!
//! * [`ControlServer`], [`ControlHandle`]: start and stop one on a thread of its own.
//! * [`ControlConfig`], [`StartError`]: settings, and what can be wrong with them.
//! * [`MetadataLimits`]: what it keeps as a metadata server of Mooncake's engines.
//! * `control`: drives the pure `kvplane-cluster` and answers calls; `store`: its memory; `http`, `counts`: what it
//!   shows.
//!
//! It decides nothing itself and is on nobody's data path: with it down, puts and gets go on with the last map.

mod config;
mod control;
mod counts;
mod http;
mod metadata;
mod server;
mod store;
mod tiers;

pub use config::{ControlConfig, StartError};
pub use metadata::MetadataLimits;
pub use server::{ControlHandle, ControlServer, EndError, STATE_FILE};
pub use store::StoreError;

//! Settings of a shard.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use kvplane_proto::Version;
use kvplane_store::StoreConfig;
use kvplane_store::service::Identity;
use kvplane_sys::RegionOptions;

use super::listeners::ShardListeners;
use crate::host::HostConfig;
use crate::pacing::Pacing;

/// Addresses on which a shard listens.
#[derive(Clone, Debug)]
pub struct Listen {
    /// Data port; port 0 picks one.
    pub tcp: SocketAddr,
    /// Path of the Unix socket for peers on this host.
    pub shm: Option<PathBuf>,
    /// Data port for stock Mooncake engines, which do not authenticate; port 0 picks one.
    pub mooncake: Option<SocketAddr>,
    /// Listeners at `tcp` and `shm` that a former process handed over; without them, the shard listens anew.
    pub handed: Option<Arc<ShardListeners>>,
}

/// Settings of a shard.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Debug)]
pub struct ShardConfig {
    pub identity: Identity,
    /// Core to pin its thread to.
    pub core: Option<usize>,
    pub pacing: Pacing,
    pub listen: Listen,
    /// Memory of its store and how to allocate it; `None` for a shard that serves segments only. Its far part is the
    /// store's far pool.
    pub pool: Option<RegionOptions>,
    /// Limits of its store; `pool_bytes` follows the memory.
    pub store: Option<StoreConfig>,
    /// First version that its store assigns: above all of its former incarnations.
    pub first_version: Version,
    pub host: HostConfig,
}

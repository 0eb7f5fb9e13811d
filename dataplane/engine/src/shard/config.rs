//! Settings of a shard.

use std::net::SocketAddr;
use std::path::PathBuf;

use kvplane_proto::Version;
use kvplane_store::StoreConfig;
use kvplane_store::service::Identity;
use kvplane_sys::RegionOptions;

use crate::host::HostConfig;
use crate::pacing::Pacing;

/// Where a shard listens.
#[derive(Clone, Debug)]
pub struct Listen {
    /// Its data port; port 0 picks one.
    pub tcp: SocketAddr,
    /// Path of its Unix socket.
    pub shm: Option<PathBuf>,
    /// Data port for stock Mooncake engines, which bring no authentication; port 0 picks one.
    pub mooncake: Option<SocketAddr>,
}

/// Settings of a shard.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Who it is.
    pub identity: Identity,
    /// Core to pin its thread to.
    pub core: Option<usize>,
    /// How it waits.
    pub pacing: Pacing,
    /// Where it listens.
    pub listen: Listen,
    /// The memory of its store and how to get it; `None` for a shard that serves segments only.
    pub pool: Option<RegionOptions>,
    /// Limits of its store; `pool_bytes` follows the memory.
    pub store: Option<StoreConfig>,
    /// First version that its store gives: above all of its former incarnations.
    pub first_version: Version,
    /// The host's settings.
    pub host: HostConfig,
}

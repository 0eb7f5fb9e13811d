//! A shard: a pinned thread that runs a host, and the mailbox by which others reach it.
//!
//! Everything that the thread owns is made on it, so that its memory is local to it. Others send commands through a
//! bounded ring; a full ring is `Busy`, never a wait. The thread spins or parks by its [`Pacing`] and ends when its
//! handle is dropped.

mod command;
mod error;
mod follow;
mod handle;
mod leaving;
mod listeners;
mod snapshot;
mod stock;
mod tables;
mod thread;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::sync_channel;

use kvplane_proto::Version;
use kvplane_store::StoreConfig;
use kvplane_store::service::Identity;
use kvplane_sys::{Doorbell, RegionOptions, spsc};

use crate::host::HostConfig;
use crate::pacing::Pacing;
pub use error::ShardError;
pub use follow::{ObjectPlaces, PlacedName};
pub use handle::ShardHandle;
pub use snapshot::ShardSnapshot;
pub use stock::StockKeys;

/// Commands that may wait for a shard.
const MAILBOX_ENTRIES: usize = 256;

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

/// What starts shards.
pub struct Shard;

impl Shard {
    /// Starts a shard and waits until it listens.
    ///
    /// # Errors
    /// When the port is taken, the memory cannot be had, or the kernel refuses: says which and what to do.
    pub fn start(config: ShardConfig) -> Result<ShardHandle, ShardError> {
        let doorbell = Doorbell::new().map_err(|error| ShardError::Start(error.to_string()))?;
        let (producer, consumer) = spsc::channel(MAILBOX_ENTRIES);
        let (started, wait) = sync_channel(1);
        let name = format!("kvp-shard-{}", config.identity.shard.0);
        let (bell, shm) = (doorbell.clone(), config.listen.shm.clone());
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || thread::run(config, consumer, bell, &started))
            .map_err(|error| ShardError::Start(error.to_string()))?;
        match wait.recv() {
            Ok(Ok(facts)) => Ok(ShardHandle::new(producer, doorbell, thread, facts, shm)),
            Ok(Err(why)) => Err(ShardError::Start(why)),
            Err(_) => Err(ShardError::Start("its thread ended before it listened".to_owned())),
        }
    }
}

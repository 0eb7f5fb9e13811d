//! Shard: a pinned thread that runs a host, and the mailbox for commands to it.
//!
//! All memory of the thread is allocated on it, so that it is local to its core. Other threads send commands through a
//! bounded ring; a full ring is `Busy`, never a wait. The thread spins or parks by its [`Pacing`](crate::Pacing) and
//! ends when its handle is dropped.

mod command;
mod config;
mod error;
mod follow;
mod handle;
mod kept;
mod leaving;
mod limits;
mod listeners;
mod snapshot;
mod stock;
mod tables;
mod tenants;
mod thread;

use std::sync::mpsc::sync_channel;

use kvplane_sys::{Doorbell, spsc};

pub use config::{Listen, ShardConfig};
pub use error::{ShardEnd, ShardError, ShardStartError};
pub use follow::{ObjectPlaces, PlacedName};
pub use handle::{HandedShard, ShardHandle, settle_shared_tier};
pub use kept::KeptMemoryError;
use limits::MAILBOX_ENTRIES;
pub use listeners::ShardListeners;
pub use snapshot::ShardSnapshot;
pub use stock::StockKeys;
pub use tables::unit_bytes;
pub use tenants::ShardTenants;

/// Starter of shards.
pub struct Shard;

impl Shard {
    /// Starts a shard and waits until it listens.
    ///
    /// # Errors
    /// If the port is taken, the memory cannot be allocated, or the kernel refuses a resource: the text names it and
    /// the next step.
    pub fn start(config: ShardConfig) -> Result<ShardHandle, ShardError> {
        let doorbell = Doorbell::new().map_err(ShardStartError::Resource)?;
        let (producer, consumer) = spsc::channel(MAILBOX_ENTRIES);
        let (started, wait) = sync_channel(1);
        let name = format!("kvp-shard-{}", config.identity.shard.0);
        let (bell, shm) = (doorbell.clone(), config.listen.shm.clone());
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || thread::run(config, consumer, bell, &started))
            .map_err(ShardStartError::Resource)?;
        let facts = wait.recv().unwrap_or(Err(ShardStartError::Ended))?;
        Ok(ShardHandle::new(producer, doorbell, thread, facts, shm))
    }
}

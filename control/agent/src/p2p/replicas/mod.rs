//! Replicas that this process holds: their memory is registered, and the catalog knows them.

mod keeper;
mod table;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvplane_sys::interrupt;
use kvplane_transfer::TransferEngine;

use super::catalog::Catalog;
use super::error::P2pError;
use super::guard::Guard;
use super::memory::Memory;
use super::replica::Replica;
use crate::error::Error;

pub(super) use keeper::Keeper;

use table::Table;

/// Interval at which a leaving replica checks whether its readers are done.
const LOOK: Duration = Duration::from_millis(20);

/// Replicas of this process.
///
/// Dropping them stops serving without waiting for readers: these fetch the missing shards from other peers.
pub(super) struct Replicas {
    catalog: Arc<Catalog>,
    memory: Arc<Memory>,
    table: Table,
    keeper: Arc<Keeper>,
    thread: Option<JoinHandle<()>>,
}

impl Replicas {
    /// Starts without replicas. A thread renews those to come, and the tickets of the engine.
    ///
    /// # Errors
    /// When the link to the control plane has ended, or the thread does not start.
    pub(super) fn start(
        catalog: &Arc<Catalog>,
        memory: &Arc<Memory>,
        engine: &Arc<TransferEngine>,
        guard: Guard,
    ) -> Result<Self, Error> {
        let keeper = Arc::new(Keeper::start(Arc::clone(catalog))?);
        let (keeping, engine) = (Arc::clone(&keeper), Arc::clone(engine));
        let builder = std::thread::Builder::new().name("kvplane-p2p".to_owned());
        let thread = Some(builder.spawn(move || keeping.run(&engine, guard))?);
        let (catalog, memory) = (Arc::clone(catalog), Arc::clone(memory));
        Ok(Self { catalog, memory, table: Table::default(), keeper, thread })
    }

    /// Returns the keeper, which announces replicas again.
    pub(super) fn keeper(&self) -> &Keeper {
        &self.keeper
    }

    /// Returns the replica of that name; of the newest version held here if none is given.
    ///
    /// # Errors
    /// When the object is not held here.
    pub(super) fn get(&self, name: &str, version: Option<u64>) -> Result<Arc<Replica>, Error> {
        let found = self.table.newest(name, version);
        Ok(found.ok_or_else(|| P2pError::NotHeld { name: name.to_owned() })?)
    }

    /// Returns the replica of a version of an object, if it is held here.
    pub(super) fn find(&self, name: &str, version: u64) -> Option<Arc<Replica>> {
        self.table.newest(name, Some(version))
    }

    /// Registers the memory and announces the replica.
    ///
    /// # Errors
    /// When the version is held here already, the memory overlaps other registered memory, or the control plane does
    /// not answer; nothing is registered then.
    pub(super) fn announce(&self, replica: Replica) -> Result<Arc<Replica>, Error> {
        let replica = Arc::new(replica);
        let announcement = self.table.begin(replica.key()).ok_or_else(|| {
            let (name, version) = replica.key();
            P2pError::HeldAlready { name: name.to_owned(), version }
        })?;
        self.memory.take(&replica.memory(), !replica.origin)?;
        if let Err(error) = self.keeper.hold(&replica) {
            self.memory.give_back(&replica.memory())?;
            return Err(error);
        }
        announcement.insert(&replica);
        Ok(replica)
    }

    /// Stops serving an object, in its newest version held here if none is given; waits up to `patience` for its
    /// readers, and unregisters its memory.
    ///
    /// # Errors
    /// When the object is not held here or being fetched, or its memory is still in use; the call can be repeated then.
    pub(super) fn retire(&self, name: &str, version: Option<u64>, patience: Duration) -> Result<(), Error> {
        let replica = self.get(name, version)?;
        let Some(_alone) = replica.try_busy() else {
            return Err(P2pError::BeingFetched { name: name.to_owned() }.into());
        };
        self.table.remove(&replica);
        self.release(&replica, patience).inspect_err(|_| self.table.insert(&replica))
    }

    /// Stops serving a replica that the caller fetches, without waiting for readers.
    ///
    /// # Errors
    /// When its memory is still in use.
    pub(super) fn abandon(&self, replica: &Replica) -> Result<(), Error> {
        self.table.remove(replica);
        self.release(replica, Duration::ZERO)
    }

    /// Releases the replica, waits up to `patience` for its readers, and unregisters its memory.
    fn release(&self, replica: &Replica, patience: Duration) -> Result<(), Error> {
        // A concurrent announcement gets a new member number, which has to be released, too.
        replica.leave();
        let until = Instant::now() + patience;
        loop {
            let wait = Instant::now() < until;
            match self.catalog.release(replica.member(), wait) {
                Ok(readers) if readers > 0 && wait && interrupt::sleep(LOOK) => {}
                Err(error) if error.is_unanswered() && wait && interrupt::sleep(LOOK) => {}
                // No more peers are sent here. The engine cuts off the remaining readers.
                _ => break,
            }
        }
        self.keeper.forget(replica.member());
        self.memory.give_back(&replica.memory())
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        self.keeper.stop();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
        for replica in self.table.take() {
            // Remaining readers are cut off when the engine is dropped.
            let _ = self.release(&replica, Duration::ZERO);
        }
    }
}

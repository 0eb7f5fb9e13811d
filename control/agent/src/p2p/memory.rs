//! Memory of replicas, registered with the transfer engine once, however many objects use it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use kvplane_engine::Region;
use kvplane_transfer::{RegisterOptions, TransferEngine};

use super::error::P2pError;
use crate::error::Error;

/// Memory that is registered with an engine.
pub(super) struct Memory {
    engine: Arc<TransferEngine>,
    /// Registered regions by address: length and number of users.
    users: Mutex<BTreeMap<u64, (usize, usize)>>,
}

impl Memory {
    /// Creates the memory of an engine; nothing is registered yet.
    pub(super) const fn new(engine: Arc<TransferEngine>) -> Self {
        Self { engine, users: Mutex::new(BTreeMap::new()) }
    }

    /// Runs an operation that reads into memory, which is registered meanwhile.
    ///
    /// # Errors
    /// When the memory cannot be written or is in use, and errors of the operation.
    pub(super) fn with_registered<T>(
        &self,
        region: &Arc<Region>,
        act: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        if !region.writable() {
            return Err(P2pError::ReadOnlyMemory { address: region.address() }.into());
        }
        let regions = std::slice::from_ref(region);
        self.take(regions, true)?;
        let result = act();
        self.give_back(regions)?;
        result
    }

    /// Registers the regions that are not registered yet; all of them, or none. Memory that is about to be `written`
    /// must not be in use already, because peers read it.
    pub(super) fn take(&self, regions: &[Arc<Region>], written: bool) -> Result<(), Error> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = |region: &Arc<Region>| {
            !written && users.get(&region.address()).is_some_and(|&(bytes, _)| bytes == region.bytes())
        };
        let fresh: Vec<Arc<Region>> = regions.iter().filter(|region| !is_known(region)).cloned().collect();
        // Peers may read, not write.
        let options = RegisterOptions { writable: false, ..RegisterOptions::default() };
        if !fresh.is_empty() {
            self.engine.register_batch(&fresh, &options)?;
        }
        for region in regions {
            users.entry(region.address()).or_insert((region.bytes(), 0)).1 += 1;
        }
        Ok(())
    }

    /// Unregisters the regions without further users; returns when no peer accesses them any more.
    pub(super) fn give_back(&self, regions: &[Arc<Region>]) -> Result<(), Error> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let mut unused = Vec::new();
        for address in regions.iter().map(|region| region.address()) {
            let Some((_, count)) = users.get_mut(&address) else { continue };
            *count -= 1;
            if *count == 0 {
                users.remove(&address);
                unused.push(address);
            }
        }
        let result = if unused.is_empty() { Ok(()) } else { self.engine.unregister_batch(&unused) };
        if result.is_err() {
            // The call can be repeated.
            for region in regions.iter().filter(|region| unused.contains(&region.address())) {
                users.insert(region.address(), (region.bytes(), 1));
            }
        }
        Ok(result?)
    }
}

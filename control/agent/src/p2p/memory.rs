//! Memory of replicas, registered with the transfer engine once, however many objects use it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use kvplane_engine::Region;
use kvplane_transfer::{RegisterOptions, TransferEngine};

use crate::error::Error;

/// Registered regions by address: length and number of users.
#[derive(Default)]
pub(super) struct Memory {
    users: Mutex<BTreeMap<u64, (usize, usize)>>,
}

impl Memory {
    /// Registers the regions that are not registered yet; all of them, or none. Memory that is about to be `written`
    /// must not be in use already, because peers read it.
    pub(super) fn take(&self, engine: &TransferEngine, regions: &[Arc<Region>], written: bool) -> Result<(), Error> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = |region: &Arc<Region>| {
            !written && users.get(&region.address()).is_some_and(|&(bytes, _)| bytes == region.bytes())
        };
        let fresh: Vec<Arc<Region>> = regions.iter().filter(|region| !is_known(region)).cloned().collect();
        // Peers may read, not write.
        let options = RegisterOptions { writable: false, ..RegisterOptions::default() };
        if !fresh.is_empty() {
            engine.register_batch(&fresh, &options)?;
        }
        for region in regions {
            users.entry(region.address()).or_insert((region.bytes(), 0)).1 += 1;
        }
        Ok(())
    }

    /// Unregisters the regions without further users; returns when no peer accesses them any more.
    pub(super) fn give_back(&self, engine: &TransferEngine, regions: &[Arc<Region>]) -> Result<(), Error> {
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
        let result = if unused.is_empty() { Ok(()) } else { engine.unregister_batch(&unused) };
        if result.is_err() {
            // The call can be repeated.
            for region in regions.iter().filter(|region| unused.contains(&region.address())) {
                users.insert(region.address(), (region.bytes(), 1));
            }
        }
        Ok(result?)
    }
}

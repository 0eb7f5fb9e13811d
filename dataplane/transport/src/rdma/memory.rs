//! The memory that a device may use: each region is registered once, when it is first needed.
//!
//! A registration holds its region, and is held by every request on it; so memory is never unmapped or deregistered
//! under a request. What cannot be registered is remembered as such: its bytes go through buffers that are.

use std::collections::HashMap;
use std::sync::Arc;

use kvplane_sys::verbs::{Access, MemoryRegion, Piece, ProtectionDomain};
use kvplane_sys::{IoBuf, Region};

/// The registered memory of one device.
pub(super) struct MemoryTable {
    domain: ProtectionDomain,
    /// By the region's place in memory, which the registration keeps alive; none where it was refused.
    regions: HashMap<usize, (Arc<Region>, Option<MemoryRegion>)>,
    /// Regions that may be registered; others go through bounce buffers.
    most: usize,
    /// Why memory was refused last.
    problem: Option<String>,
}

fn name(region: &Arc<Region>) -> usize {
    Arc::as_ptr(region).addr()
}

/// Rights for our own requests and for peers that are told the key.
pub(super) fn access(region: &Region, writable: bool) -> Access {
    let local_write = region.writable();
    Access { local_write, remote_write: local_write && writable, ..Access::REMOTE }
}

impl MemoryTable {
    pub(super) fn new(domain: &ProtectionDomain, most: u32) -> Self {
        Self { domain: domain.clone(), regions: HashMap::new(), most: most as usize, problem: None }
    }

    /// Registers a region, if it is not. Whether it is usable by the device.
    pub(super) fn ensure(&mut self, region: &Arc<Region>) -> bool {
        if let Some((_, memory)) = self.regions.get(&name(region)) {
            return memory.is_some();
        }
        if self.regions.len() >= self.most {
            return false;
        }
        let registered = self.domain.register(&IoBuf::whole(Arc::clone(region)), access(region, true));
        let memory = registered.map_err(|error| self.problem = Some(error.to_string())).ok();
        let usable = memory.is_some();
        self.regions.insert(name(region), (Arc::clone(region), memory));
        usable
    }

    /// The registration of a region that was ensured.
    pub(super) fn get(&self, region: &Arc<Region>) -> Option<&MemoryRegion> {
        self.regions.get(&name(region))?.1.as_ref()
    }

    /// A part of memory for a request: the first `bytes` of a buffer whose region was ensured.
    pub(super) fn piece(&self, buffer: &IoBuf, bytes: u32) -> Option<Piece<'_>> {
        self.get(buffer.region())?.piece(buffer.offset(), bytes)
    }

    /// Lets go of a region. Requests on it keep its registration until they are over.
    pub(super) fn forget(&mut self, region: &Arc<Region>) {
        self.regions.remove(&name(region));
    }

    /// Why memory was refused, once.
    pub(super) const fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }
}

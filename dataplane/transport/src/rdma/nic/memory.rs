//! The memory that a device may use: each region is registered once, when it is first needed.
//!
//! A registration holds its region, and is held by every request on it; so memory is never unmapped or deregistered
//! under a request. What cannot be registered is remembered as such: its bytes go through buffers that are.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use kvplane_sys::verbs::{Access, MemoryRegion, Piece, ProtectionDomain};
use kvplane_sys::{IoBuf, Region};

use crate::rdma::mixing::MixedMap;

/// The registered memory of one device.
pub(in crate::rdma) struct MemoryTable {
    domain: ProtectionDomain,
    /// By the region's place in memory, which the registration keeps alive; none where it was refused.
    regions: MixedMap<usize, (Arc<Region>, Option<MemoryRegion>)>,
    /// The one that was looked up last: most requests in a row are of one region.
    last: Option<(usize, MemoryRegion)>,
    /// Regions that may be registered; others go through bounce buffers.
    most: usize,
    /// Why memory was refused last.
    problem: Option<String>,
}

fn name(region: &Arc<Region>) -> usize {
    Arc::as_ptr(region).addr()
}

/// Rights for our own requests and for peers that have the key.
pub(in crate::rdma) fn access(region: &Region, writable: bool) -> Access {
    let local_write = region.writable();
    Access { local_write, remote_write: local_write && writable, ..Access::REMOTE }
}

impl MemoryTable {
    pub(in crate::rdma) fn new(domain: &ProtectionDomain, most: u32) -> Self {
        Self { domain: domain.clone(), regions: MixedMap::default(), last: None, most: most as usize, problem: None }
    }

    /// Registers a region, if it is not. Whether it is usable by the device.
    pub(in crate::rdma) fn ensure(&mut self, region: &Arc<Region>) -> bool {
        self.find(region).is_some()
    }

    /// The registration of a region, made now if there is none; none when it is not usable by the device.
    #[inline]
    pub(in crate::rdma) fn find(&mut self, region: &Arc<Region>) -> Option<&MemoryRegion> {
        if self.last.as_ref().is_none_or(|(last, _)| *last != name(region)) {
            let memory = self.look_up(region)?.clone();
            self.last = Some((name(region), memory));
        }
        self.last.as_ref().map(|(_, memory)| memory)
    }

    fn look_up(&mut self, region: &Arc<Region>) -> Option<&MemoryRegion> {
        let registered = self.regions.len();
        match self.regions.entry(name(region)) {
            Entry::Occupied(entry) => entry.into_mut().1.as_ref(),
            Entry::Vacant(_) if registered >= self.most => None,
            Entry::Vacant(entry) => {
                let registered = self.domain.register(&IoBuf::whole(Arc::clone(region)), access(region, true));
                let memory = registered.map_err(|error| self.problem = Some(error.to_string())).ok();
                entry.insert((Arc::clone(region), memory)).1.as_ref()
            }
        }
    }

    /// The registration of a region that was ensured.
    pub(in crate::rdma) fn get(&self, region: &Arc<Region>) -> Option<&MemoryRegion> {
        self.regions.get(&name(region))?.1.as_ref()
    }

    /// A part of memory for a request: the first `bytes` of a buffer whose region was ensured.
    pub(in crate::rdma) fn piece(&self, buffer: &IoBuf, bytes: u32) -> Option<Piece<'_>> {
        self.get(buffer.region())?.piece(buffer.offset(), bytes)
    }

    /// Lets go of a region. Requests on it keep its registration until they are over.
    pub(in crate::rdma) fn forget(&mut self, region: &Arc<Region>) {
        self.last = None;
        self.regions.remove(&name(region));
    }

    /// Why memory was refused, once.
    pub(in crate::rdma) const fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }
}

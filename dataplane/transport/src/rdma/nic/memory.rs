//! Memory registrations of a device: each region is registered once, at its first use; memory of other devices before
//! it.
//!
//! A registration holds its memory, and every request on it holds the registration; so memory is never unmapped or
//! deregistered under a request. A region that cannot be registered is remembered as such: its bytes pass through
//! bounce buffers.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use kvplane_sys::device::{Backing, DeviceMemory};
use kvplane_sys::verbs::{Access, MemoryRegion, Piece, ProtectionDomain};
use kvplane_sys::{IoBuf, Region};

use super::device_memory::{DeviceRegions, ExportedMemory, ObstacleKind, PieceSizes, RegistrationObstacle};
use crate::rdma::mixing::MixedMap;

/// Registered memory of one device.
pub(in crate::rdma) struct MemoryTable {
    domain: ProtectionDomain,
    /// Registrations by the address of the region, which the entry keeps alive; `None` if it was refused.
    regions: MixedMap<usize, (Arc<Region>, Option<MemoryRegion>)>,
    /// Registrations of device memory by its address in this process, which the entry keeps alive.
    devices: MixedMap<usize, (Arc<DeviceMemory>, DeviceRegions)>,
    /// Last lookup: consecutive requests mostly use the same region.
    last: Option<(usize, MemoryRegion)>,
    /// Limit of registered regions; others go through bounce buffers.
    most: usize,
    /// Reason of the last refused registration.
    problem: Option<String>,
}

fn name(region: &Arc<Region>) -> usize {
    Arc::as_ptr(region).addr()
}

/// Returns the access rights for our requests and for peers that have the key.
pub(in crate::rdma) fn access(region: &Region, writable: bool) -> Access {
    let local_write = region.writable();
    Access { local_write, remote_write: local_write && writable, ..Access::REMOTE }
}

impl MemoryTable {
    pub(in crate::rdma) fn new(domain: &ProtectionDomain, most: u32) -> Self {
        Self {
            domain: domain.clone(),
            regions: MixedMap::default(),
            devices: MixedMap::default(),
            last: None,
            most: most as usize,
            problem: None,
        }
    }

    /// Registers a region if it is not registered yet. Returns true if the device can use it.
    pub(in crate::rdma) fn ensure(&mut self, region: &Arc<Region>) -> bool {
        self.find(region).is_some()
    }

    /// Returns the registration of a region, registering it if necessary; `None` if the device cannot use it.
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

    /// Registers device memory for our own requests, unless it is registered. Returns true if the device can use it.
    pub(in crate::rdma) fn ensure_device(&mut self, exported: &ExportedMemory, sizes: &mut PieceSizes) -> bool {
        let (memory, registered) = (exported.memory(), self.regions.len() + self.devices.len());
        let (domain, most) = (&self.domain, self.most);
        let (_, regions) = self.devices.entry(Arc::as_ptr(memory).addr()).or_insert_with(|| {
            let limit =
                || RegistrationObstacle::new(ObstacleKind::Limit, format_args!("{most} regions are registered"));
            let regions = match registered < most {
                true => DeviceRegions::register(exported, domain, sizes, Access::LOCAL),
                false => DeviceRegions::refused(limit()),
            };
            (Arc::clone(memory), regions)
        });
        regions.is_registered()
    }

    /// Returns the registration of memory as a whole, registering a region if necessary; `None` if the device cannot
    /// use the memory, or it is registered in pieces.
    #[inline]
    pub(in crate::rdma) fn find_whole(&mut self, memory: &Backing) -> Option<&MemoryRegion> {
        match memory {
            Backing::Host(region) => self.find(region),
            Backing::Device(memory) => self.regions_of(memory)?.whole(),
        }
    }

    /// Returns the registration that covers the byte at this offset of memory, registering a region if necessary.
    pub(in crate::rdma) fn find_at(&mut self, memory: &Backing, offset: u64) -> Option<&MemoryRegion> {
        match memory {
            Backing::Host(region) => self.find(region),
            Backing::Device(memory) => self.regions_of(memory)?.at(memory.address() + offset),
        }
    }

    fn regions_of(&self, memory: &Arc<DeviceMemory>) -> Option<&DeviceRegions> {
        self.devices.get(&Arc::as_ptr(memory).addr()).map(|(_, regions)| regions)
    }

    /// Returns the device memory, with its registrations.
    pub(in crate::rdma) fn devices(&self) -> impl Iterator<Item = (&Arc<DeviceMemory>, &DeviceRegions)> {
        self.devices.values().map(|(memory, regions)| (memory, regions))
    }

    /// Releases the registration of device memory. Requests in flight keep it until they complete.
    pub(in crate::rdma) fn forget_device(&mut self, memory: &Arc<DeviceMemory>) {
        self.devices.remove(&Arc::as_ptr(memory).addr());
    }

    /// Returns the registration of a region for which [`Self::ensure`] was called.
    pub(in crate::rdma) fn get(&self, region: &Arc<Region>) -> Option<&MemoryRegion> {
        self.regions.get(&name(region))?.1.as_ref()
    }

    /// Returns the memory of a request: the first `bytes` of a buffer whose region is registered.
    pub(in crate::rdma) fn piece(&self, buffer: &IoBuf, bytes: u32) -> Option<Piece<'_>> {
        self.get(buffer.region())?.piece(buffer.offset(), bytes)
    }

    /// Releases the registration of a region. Requests in flight keep it until they complete.
    pub(in crate::rdma) fn forget(&mut self, region: &Arc<Region>) {
        self.last = None;
        self.regions.remove(&name(region));
    }

    /// Returns and clears the reason of the last refused registration.
    pub(in crate::rdma) const fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }
}

//! Memory by name: what callers transfer from and into, and what peers may use.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvplane_proto::SegmentId;
use kvplane_sys::{IoBuf, Region};
use kvplane_transport::shm::Extent;
use kvplane_transport::{ConnectionId, Target};

use super::Host;
use super::parts::Buffers;
use super::roles::Link;

/// Memory of registered segments, by their positions.
#[derive(Default)]
pub(super) struct SegmentRegions(Vec<Option<(u32, Arc<Region>)>>);

impl SegmentRegions {
    /// The memory of a segment; nothing for a stale id.
    pub(super) fn get(&self, segment: SegmentId) -> Option<&Arc<Region>> {
        let (generation, region) = self.0.get(segment.index as usize)?.as_ref()?;
        (*generation == segment.generation).then_some(region)
    }

    fn set(&mut self, segment: SegmentId, region: Arc<Region>) {
        let index = segment.index as usize;
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        self.0[index] = Some((segment.generation, region));
    }

    /// Takes the memory of a segment out; nothing for a stale id, whose position may be a successor's.
    pub(super) fn take(&mut self, segment: SegmentId) -> Option<Arc<Region>> {
        let entry = self.0.get_mut(segment.index as usize)?;
        entry.take_if(|(generation, _)| *generation == segment.generation).map(|(_, region)| region)
    }

    pub(super) fn regions(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.0.iter().flatten().map(|(_, region)| region)
    }
}

/// The memory that a host has names for.
pub(super) struct Regions {
    /// Behind the service's store.
    pub(super) pool: Option<Arc<Region>>,
    /// Of segments that peers use, and of those that this process copies from and to by itself.
    pub(super) segments: SegmentRegions,
    /// The caller's.
    pub(super) buffers: Buffers,
    /// Segments of other processes, mapped here.
    pub(super) mapped: BTreeMap<(ConnectionId, SegmentId), Arc<Region>>,
}

impl Regions {
    pub(super) fn new(pool: Option<Arc<Region>>) -> Self {
        Self { pool, segments: SegmentRegions::default(), buffers: Buffers::default(), mapped: BTreeMap::new() }
    }
}

impl Host {
    /// Gives caller's memory a name for requests. Where it is, is asked of the kernel.
    pub fn add_buffer(&mut self, region: Arc<Region>) -> u32 {
        let index = self.regions.buffers.vacant();
        // Now, so that the first transfer need not wait for it.
        self.rdma_work.driver.register(&region);
        self.set_place(index, &region, None);
        self.regions.buffers.set(index, region);
        index
    }

    /// Gives caller's memory this name for requests, in place of what had it. No open batch may use that. `location` is
    /// where the memory is (`cpu:0`); `*` asks the kernel.
    pub fn set_buffer(&mut self, buffer: u32, region: Arc<Region>, location: &str) {
        self.rdma_work.driver.register(&region);
        self.set_place(buffer, &region, Some(location));
        if let Some(former) = self.regions.buffers.set(buffer, region) {
            self.forget_rdma(&former);
        }
    }

    /// Registering has brought its pages into memory, if there is a device.
    fn set_place(&mut self, buffer: u32, region: &Arc<Region>, location: Option<&str>) {
        let place = self.place_of(region, location);
        if let Some(client) = &mut self.client {
            client.set_buffer_place(buffer, place);
        }
    }

    /// Forgets caller's memory. No open batch may use it.
    pub fn remove_buffer(&mut self, buffer: u32) {
        if let Some(region) = self.regions.buffers.remove(buffer) {
            self.file_work.forget(&region);
            self.forget_rdma(&region);
        }
    }

    /// Memory that peers may use under this id.
    pub fn add_segment(&mut self, segment: SegmentId, region: Arc<Region>) {
        // A host without a service has its segments to itself.
        let info = self.service.as_ref().and_then(|service| service.inspect().segments().info(segment));
        if let Some(info) = info.filter(|info| info.remote_accessible) {
            let bytes = info.bytes.min(region.bytes() as u64);
            let writable = info.writable && region.writable();
            self.shm.publish(segment, &Extent { address: region.address(), bytes, writable });
            self.rdma_work.driver.publish(segment, &region, bytes, writable);
        }
        self.regions.segments.set(segment, region);
    }

    /// Forgets memory that was only for this process's own requests. A stale id is ignored.
    pub fn remove_segment(&mut self, segment: SegmentId) {
        self.regions.segments.take(segment);
    }

    /// The target of a peer's payload, unless its memory was freed without being unregistered: then the payload is
    /// thrown away and the peer told. Touching it would end the process.
    pub(super) fn target_there(&mut self, link: Link, target: Target) -> Target {
        let there = match &target {
            Target::Discard => true,
            Target::Memory { buffer, .. } => buffer.is_mapped(),
            Target::Scatter { buffers, .. } => IoBuf::all_mapped(buffers),
        };
        if there {
            return target;
        }
        if let Some(service) = &mut self.service {
            service.refuse_payload(link.peer());
        }
        Target::Discard
    }

    /// The memory of a segment; `None` for a stale id.
    pub(super) fn segment(&self, segment: SegmentId) -> Option<&Arc<Region>> {
        self.regions.segments.get(segment)
    }
}

#[cfg(test)]
mod tests {
    use kvplane_sys::RegionOptions;

    use super::*;

    #[test]
    fn a_segment_of_a_former_generation_has_no_memory() {
        let region = Region::allocate(&RegionOptions::new("segment", 4096)).expect("memory");
        let mut segments = SegmentRegions::default();
        let [old, new] = [1, 2].map(|generation| SegmentId { index: 3, generation });
        segments.set(new, Arc::clone(&region));
        assert!(segments.get(new).is_some() && segments.get(old).is_none());
        assert!(segments.take(old).is_none() && segments.get(new).is_some());
        assert!(segments.take(new).is_some() && segments.regions().count() == 0);
    }
}

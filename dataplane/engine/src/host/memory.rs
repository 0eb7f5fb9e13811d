//! Memory by name: what callers transfer from and into, and what peers may use.

use std::sync::Arc;

use kvplane_proto::SegmentId;
use kvplane_sys::{IoBuf, Region};
use kvplane_transport::Target;
use kvplane_transport::shm::Extent;

use super::Host;
use super::roles::Link;

impl Host {
    /// Gives caller's memory a name for requests. Where it is, is asked of the kernel.
    pub fn add_buffer(&mut self, region: Arc<Region>) -> u32 {
        let index = self.buffers.vacant();
        // Now, so that the first transfer need not wait for it.
        self.rdma_work.driver.register(&region);
        self.set_place(index, &region, None);
        self.buffers.set(index, region);
        index
    }

    /// Gives caller's memory this name for requests, in place of what had it. No open batch may use that. `location` is
    /// where the memory is (`cpu:0`); `*` asks the kernel.
    pub fn set_buffer(&mut self, buffer: u32, region: Arc<Region>, location: &str) {
        self.rdma_work.driver.register(&region);
        self.set_place(buffer, &region, Some(location));
        if let Some(former) = self.buffers.set(buffer, region) {
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
        if let Some(region) = self.buffers.remove(buffer) {
            self.file_work.forget(&region);
            self.forget_rdma(&region);
        }
    }

    /// Memory that peers may use under this id.
    pub fn add_segment(&mut self, segment: SegmentId, region: Arc<Region>) {
        let index = segment.index as usize;
        if self.segments.len() <= index {
            self.segments.resize(index + 1, None);
        }
        // A host without a service has its segments to itself.
        let info = self.service.as_ref().and_then(|service| service.segments().info(segment));
        if let Some(info) = info.filter(|info| info.remote_accessible) {
            let bytes = info.bytes.min(region.bytes() as u64);
            let writable = info.writable && region.writable();
            self.shm.publish(segment, &Extent { address: region.address(), bytes, writable });
            self.rdma_work.driver.publish(segment, &region, bytes, writable);
        }
        self.segments[index] = Some((segment.generation, region));
    }

    /// Forgets memory that was only for this process's own requests. A stale id is ignored.
    pub fn remove_segment(&mut self, segment: SegmentId) {
        if let Some(entry) = self.segments.get_mut(segment.index as usize) {
            entry.take_if(|(generation, _)| *generation == segment.generation);
        }
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
        let (generation, region) = self.segments.get(segment.index as usize)?.as_ref()?;
        (*generation == segment.generation).then_some(region)
    }
}

//! Handles of segments of device memory for peers on this host, which then copy without this process.

use std::collections::HashMap;

use kvplane_proto::SegmentId;
use kvplane_sys::device::{DeviceMemory, SharedAllocation};
use kvplane_transport::shm::SegmentOffer;

/// Handles of segments that peers have requested.
#[derive(Default)]
pub(super) struct SharedDevices {
    /// `None` for a segment whose memory cannot be shared.
    shared: HashMap<SegmentId, Option<SharedAllocation>>,
}

impl SharedDevices {
    /// Returns the offer to a peer for a segment with this memory, for which it has mapped the allocation `known`;
    /// `None` if the memory cannot be shared, or was freed without being unregistered.
    pub(super) fn offer(&mut self, segment: SegmentId, memory: &DeviceMemory, known: u64) -> Option<SegmentOffer<'_>> {
        // Each request is a check: a peer uses no mapping of memory that was freed before it asked.
        memory.check().ok()?;
        let shared = self.shared.entry(segment).or_insert_with(|| memory.share().ok()).as_ref()?;
        let is_known = known != 0 && known == shared.buffer_id;
        Some(if is_known { SegmentOffer::Known } else { SegmentOffer::Device(shared) })
    }

    /// Removes a segment.
    pub(super) fn remove(&mut self, segment: SegmentId) {
        self.shared.remove(&segment);
    }
}

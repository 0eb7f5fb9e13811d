//! Access of stock Mooncake engines to registered memory over TCP.
//!
//! Their requests name addresses; the service checks each against the registered segments and counts the use, so
//! unregistering waits for stock engines as for any other peer.

use std::sync::Arc;

use kvplane_proto::SegmentId;
use kvplane_store::service::Service;
use kvplane_sys::IoBuf;
use kvplane_transport::mooncake::Ranges;
use kvplane_transport::mooncake::wire::Request;

use crate::host::segments::SegmentRegions;

/// Memory that the server for stock engines may access.
pub(super) struct RegisteredRanges<'a> {
    pub(super) service: &'a mut Service,
    pub(super) segments: &'a SegmentRegions,
}

impl Ranges for RegisteredRanges<'_> {
    fn acquire(&mut self, request: &Request) -> Option<(IoBuf, u64)> {
        let acquired = self.service.segments_mut().acquire_by_address(request.address, request.bytes, request.write);
        let (segment, place) = acquired.ok()?;
        let region = self.segments.get(segment);
        // Memory that is mapped read-only cannot be received into, even if it was registered as writable.
        let Some(region) = region.filter(|region| !request.write || region.writable()) else {
            self.service.release_by_address(segment);
            return None;
        };
        let buffer = IoBuf::new(Arc::clone(region), place.offset as usize, place.bytes as usize);
        // The memory was freed without being unregistered: touching it would kill the process.
        if !buffer.is_mapped() {
            self.service.release_by_address(segment);
            return None;
        }
        Some((buffer, segment.to_bits()))
    }

    fn release(&mut self, hold: u64) {
        self.service.release_by_address(SegmentId::from_bits(hold));
    }
}

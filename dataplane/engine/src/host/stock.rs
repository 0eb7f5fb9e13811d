//! Stock Mooncake engines: those that ask us, and those that we ask.
//!
//! Who asks names addresses; the service checks each against what is registered and counts the use, so unregistering
//! waits for stock engines as for any other peer. Whom we ask looks to the client like any other lane.

use std::sync::Arc;

use kvplane_proto::SegmentId;
use kvplane_store::service::Service;
use kvplane_sys::IoBuf;
use kvplane_transport::mooncake::Ranges;
use kvplane_transport::mooncake::wire::Request;
use kvplane_transport::{Event, Input};

use super::memory::SegmentRegions;
use super::roles::Link;
use super::{FRAMES_PER_ROUND, Host};

/// What the server of stock engines may reach.
struct RegisteredRanges<'a> {
    service: Option<&'a mut Service>,
    segments: &'a SegmentRegions,
}

impl Ranges for RegisteredRanges<'_> {
    fn acquire(&mut self, request: &Request) -> Option<(IoBuf, u64)> {
        let service = self.service.as_mut()?;
        let acquired = service.segments_mut().acquire_by_address(request.address, request.bytes, request.write);
        let (segment, place) = acquired.ok()?;
        let region = self.segments.get(segment);
        // Memory that is mapped read-only cannot be received into, whatever was said when it was registered.
        let Some(region) = region.filter(|region| !request.write || region.writable()) else {
            service.release_by_address(segment);
            return None;
        };
        let buffer = IoBuf::new(Arc::clone(region), place.offset as usize, place.bytes as usize);
        // Freed without being unregistered: touching it would end the process.
        if !buffer.is_mapped() {
            service.release_by_address(segment);
            return None;
        }
        Some((buffer, segment.to_bits()))
    }

    fn release(&mut self, hold: u64) {
        if let Some(service) = &mut self.service {
            service.release_by_address(SegmentId::from_bits(hold));
        }
    }
}

impl Host {
    pub(super) fn serve_stock(&mut self, now_ns: u64) -> bool {
        let mut ranges = RegisteredRanges { service: self.service.as_mut(), segments: &self.regions.segments };
        self.stock_server.drive(&self.poller, &mut ranges, now_ns)
    }

    /// Closes the connections that still use a segment whose unregistering takes too long.
    pub fn evict_users(&mut self, segment: SegmentId) {
        if let Some(service) = &mut self.service {
            service.evict_users(segment);
        }
        let mut ranges = RegisteredRanges { service: self.service.as_mut(), segments: &self.regions.segments };
        self.stock_server.close_users(&self.poller, &mut ranges, segment.to_bits());
    }

    pub(super) fn take_stock_lanes(&mut self) -> bool {
        let mut progress = false;
        for _ in 0..self.stock_lanes.ready_len() {
            let Some(id) = self.stock_lanes.next_ready() else { break };
            let mut frames = 0;
            loop {
                if frames == FRAMES_PER_ROUND {
                    self.stock_lanes.ready_again(id);
                    break;
                }
                let mut scratch = core::mem::take(&mut self.scratch);
                let input = self.stock_lanes.input(&self.poller, id, &mut scratch);
                let now_ns = if matches!(input, Input::Wait) { self.rounds.now_ns() } else { self.arrival_ns() };
                // The request's memory is back before its answer is looked at.
                self.take_stock_events(now_ns);
                let more = self.take_input(Link::Mooncake(id), &input, &scratch, now_ns);
                self.scratch = scratch;
                if !more {
                    break;
                }
                progress = true;
                frames += 1;
            }
        }
        progress
    }

    pub(super) fn take_stock_events(&mut self, now_ns: u64) -> bool {
        let mut progress = false;
        while let Some(event) = self.stock_lanes.poll_event() {
            progress = true;
            match event {
                Event::Accepted(_) => unreachable!("lanes accept nobody"),
                event => self.event(event, Link::Mooncake, now_ns),
            }
        }
        progress
    }
}

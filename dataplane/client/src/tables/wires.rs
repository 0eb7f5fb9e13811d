//! Requests in flight, and the slices that wait for their replies.

use kvplane_proto::ids::RequestId;
use kvplane_proto::message::Operation;

use super::slice::NOWHERE;
use super::table::Table;
use crate::types::LaneId;

/// A request in flight, and the slices that wait for its reply.
pub(crate) struct Wire {
    pub(crate) lane: LaneId,
    pub(crate) operation: Operation,
    /// Positions of the slices; [`NOWHERE`] for a slice that has left the request.
    pub(crate) slices: Vec<u32>,
}

impl Wire {
    /// Placeholder of a free position.
    const VACANT: Self = Self::new(LaneId { index: 0, generation: 0 }, Operation::Hello);

    const fn new(lane: LaneId, operation: Operation) -> Self {
        Self { lane, operation, slices: Vec::new() }
    }
}

/// Requests in flight.
pub(crate) struct Wires {
    table: Table<Wire>,
}

impl Wires {
    pub(crate) const fn new() -> Self {
        Self { table: Table::new() }
    }

    /// Registers a new request on a lane.
    pub(crate) fn open(&mut self, lane: LaneId, operation: Operation) -> RequestId {
        let mut wire = self.table.recycled().unwrap_or_else(|| Wire::new(lane, operation));
        wire.lane = lane;
        wire.operation = operation;
        wire.slices.clear();
        let (index, generation) = self.table.insert(wire);
        RequestId { index, generation }
    }

    /// Adds a slice to those that wait for the reply to a request.
    pub(crate) fn join(&mut self, request: RequestId, slice: u32) {
        self.table.at(request.index).slices.push(slice);
    }

    /// Removes a slice from those that wait for the reply to a request; its position among them stays.
    pub(crate) fn leave(&mut self, request: RequestId, slice: u32) {
        let slices = &mut self.table.at(request.index).slices;
        slices.iter_mut().filter(|other| **other == slice).for_each(|other| *other = NOWHERE);
    }

    pub(crate) fn get(&self, request: RequestId) -> Option<&Wire> {
        self.table.get(request.index, request.generation)
    }

    /// Returns the request at a position that the client's tables state to be live.
    pub(crate) fn at(&mut self, index: u32) -> &mut Wire {
        self.table.at(index)
    }

    /// Closes an answered request: the caller advances its slices and then returns it with [`Self::give_back`].
    pub(crate) fn close(&mut self, request: RequestId) -> Wire {
        self.table.remove(request.index, Wire::VACANT)
    }

    /// Keeps the allocations of a closed request for the next one.
    pub(crate) fn give_back(&mut self, wire: Wire) {
        self.table.recycle(wire);
    }

    /// Closes a request that will not be answered any more, if it is in flight.
    pub(crate) fn free(&mut self, request: RequestId) {
        if self.get(request).is_some() {
            let freed = self.close(request);
            self.give_back(freed);
        }
    }

    #[cfg(test)]
    pub(crate) const fn len(&self) -> usize {
        self.table.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANE: LaneId = LaneId { index: 3, generation: 7 };

    #[test]
    fn a_slice_that_leaves_its_request_keeps_its_place() {
        let mut wires = Wires::new();
        let request = wires.open(LANE, Operation::Lookup);
        for slice in [5, 6, 7] {
            wires.join(request, slice);
        }
        wires.leave(request, 6);
        let wire = wires.close(request);
        assert_eq!((wire.lane, wire.operation, &wire.slices[..]), (LANE, Operation::Lookup, &[5, NOWHERE, 7][..]));
        assert!(wires.get(request).is_none(), "its answer is stale from now on");
    }

    #[test]
    fn a_request_is_freed_once() {
        let mut wires = Wires::new();
        let first = wires.open(LANE, Operation::Get);
        wires.free(first);
        wires.free(first);
        let second = wires.open(LANE, Operation::Size);
        assert_eq!((second.index, wires.len()), (first.index, 1));
        assert!(wires.get(first).is_none() && wires.get(second).is_some_and(|wire| wire.slices.is_empty()));
    }
}

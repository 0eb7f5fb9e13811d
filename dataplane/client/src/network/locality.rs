//! Locality: distance of our devices from our memory, and the place of each of the host's buffers.

use std::collections::HashSet;

use crate::types::{Near, Place, RailDevices, Request};

/// Places of memory, at our end and at the peer's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Places {
    pub(crate) ours: Place,
    pub(crate) theirs: Place,
}

/// NUMA locality of a transfer at both ends: true if memory and the device that moves it are on one node, `None` if
/// unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SameNode {
    pub(crate) own: Option<bool>,
    pub(crate) peer: Option<bool>,
}

/// The host's buffers of device memory.
#[derive(Default)]
pub(crate) struct DeviceBuffers(HashSet<u32>);

impl DeviceBuffers {
    /// Adds or removes a buffer.
    pub(crate) fn set(&mut self, buffer: u32, is_device: bool) {
        if is_device {
            self.0.insert(buffer);
        } else {
            self.0.remove(&buffer);
        }
    }

    /// Returns true if the memory of a request is that of a device.
    #[inline]
    pub(crate) fn has(&self, request: &Request) -> bool {
        !self.0.is_empty() && request.local().is_some_and(|local| self.0.contains(&local.buffer))
    }
}

/// Locality of our memory and devices.
#[derive(Default)]
pub(crate) struct Locality {
    near: Near,
    buffers: Vec<Place>,
}

impl Locality {
    /// Sets the distances of our devices from our memory.
    pub(crate) fn set_near(&mut self, near: Near) {
        self.near = near;
    }

    /// Returns the distances of our devices from our memory.
    pub(crate) const fn near(&self) -> &Near {
        &self.near
    }

    /// Sets the place of a buffer.
    pub(crate) fn set_place(&mut self, buffer: u32, place: Place) {
        let index = buffer as usize;
        if index >= self.buffers.len() {
            if place == Place::UNKNOWN {
                return;
            }
            self.buffers.resize(index + 1, Place::UNKNOWN);
        }
        self.buffers[index] = place;
    }

    /// Returns the place of a buffer.
    #[inline]
    pub(crate) fn place_of(&self, buffer: u32) -> Place {
        self.buffers.get(buffer as usize).copied().unwrap_or_default()
    }

    /// Returns the places of a request's memory.
    #[inline]
    pub(crate) fn places_of(&self, request: &Request) -> Places {
        let ours = request.local().map_or(Place::UNKNOWN, |local| self.place_of(local.buffer));
        let theirs = match request {
            Request::Read(target, _) | Request::Write(target, _) => target.place,
            _ => Place::UNKNOWN,
        };
        Places { ours, theirs }
    }

    /// Compares the NUMA nodes of memory at these places with those of a pair of devices; `peer` is the peer's table.
    #[inline]
    pub(crate) fn nodes_of(&self, devices: RailDevices, peer: &Near, places: Places) -> SameNode {
        SameNode {
            own: self.near.of(devices.own, places.ours).same_node,
            peer: peer.of(devices.peer, places.theirs).same_node,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_at_its_latest_place() {
        let mut locality = Locality::default();
        locality.set_place(9, Place::UNKNOWN);
        locality.set_place(2, Place(3));
        assert_eq!([0, 2, 9].map(|buffer| locality.place_of(buffer)), [Place::UNKNOWN, Place(3), Place::UNKNOWN]);
        locality.set_place(2, Place::UNKNOWN);
        assert_eq!(locality.place_of(2), Place::UNKNOWN);
    }
}

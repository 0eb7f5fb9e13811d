//! How near our devices are to our memory, and where each buffer of the host's is.

use crate::types::{Near, Place, RailDevices, Request};

/// Where memory is, at our end and at a peer's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Places {
    pub(crate) ours: Place,
    pub(crate) theirs: Place,
}

/// Whether memory and the device that moves it are on one NUMA node, at our end and at the peer's; none where that is
/// not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SameNode {
    pub(crate) own: Option<bool>,
    pub(crate) peer: Option<bool>,
}

/// What is known of our memory and of our devices.
#[derive(Default)]
pub(crate) struct Locality {
    near: Near,
    buffers: Vec<Place>,
}

impl Locality {
    /// Our devices are this near to our memory.
    pub(crate) fn set_near(&mut self, near: Near) {
        self.near = near;
    }

    /// How near our devices are to our memory.
    pub(crate) const fn near(&self) -> &Near {
        &self.near
    }

    /// A buffer is at this place.
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

    /// Where a buffer is.
    #[inline]
    pub(crate) fn place_of(&self, buffer: u32) -> Place {
        self.buffers.get(buffer as usize).copied().unwrap_or_default()
    }

    /// Where the memory of a request is.
    pub(crate) fn places_of(&self, request: &Request) -> Places {
        let ours = request.local().map_or(Place::UNKNOWN, |local| self.place_of(local.buffer));
        let theirs = match request {
            Request::Read(target, _) | Request::Write(target, _) => target.place,
            _ => Place::UNKNOWN,
        };
        Places { ours, theirs }
    }

    /// Whether memory at these places and a pair of devices are on one node each; `peer` tells of the peer's.
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
    fn a_buffer_is_where_it_was_last_said_to_be() {
        let mut locality = Locality::default();
        locality.set_place(9, Place::UNKNOWN);
        locality.set_place(2, Place(3));
        assert_eq!([0, 2, 9].map(|buffer| locality.place_of(buffer)), [Place::UNKNOWN, Place(3), Place::UNKNOWN]);
        locality.set_place(2, Place::UNKNOWN);
        assert_eq!(locality.place_of(2), Place::UNKNOWN);
    }
}

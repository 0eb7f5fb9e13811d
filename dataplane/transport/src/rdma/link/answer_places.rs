//! Memory offered for the payloads of answers: by us to the peer, and by the peer to us.

use std::collections::HashMap;

use kvplane_proto::{Limits, RequestId};
use kvplane_sys::IoBuf;

use crate::rdma::nic::Nic;
use crate::rdma::wire::{EAGER_BYTES, OFFERS, RemoteRange, SOURCES};
use crate::types::Pieces;

/// Offered memory of both sides of a link that has not been used yet.
#[derive(Default)]
pub(in crate::rdma) struct AnswerPlaces {
    /// Memory that the peer offers for its answers.
    wanted: HashMap<RequestId, Vec<RemoteRange>>,
    /// Memory that we offer for our answers.
    offered: HashMap<RequestId, Pieces>,
    /// Offers for the next frame.
    offering: Vec<RemoteRange>,
}

impl AnswerPlaces {
    /// Offers memory for the answer to a request, with the next frame. Does nothing where a direct write has no
    /// benefit.
    pub(in crate::rdma) fn offer(&mut self, request: RequestId, pieces: Pieces, nic: &mut Nic) {
        let buffers = pieces.as_slice();
        let short = pieces.bytes() <= EAGER_BYTES || self.offering.len() + buffers.len() > OFFERS;
        let usable = |buffer: &IoBuf| buffer.region().writable() && nic.memory.ensure(buffer.region());
        if short || buffers.len() > SOURCES || !buffers.iter().all(usable) {
            return;
        }
        for buffer in buffers.iter().filter(|buffer| !buffer.is_empty()) {
            let Some(memory) = nic.memory.get(buffer.region()) else { continue };
            let address = buffer.region().address() + buffer.offset() as u64;
            let (bytes, key) = (buffer.bytes() as u64, memory.remote_key());
            self.offering.push(RemoteRange { request, address, bytes, key });
        }
        self.offered.insert(request, pieces);
    }

    /// Takes the offers for the next frame.
    pub(in crate::rdma) fn take_offers(&mut self) -> Vec<RemoteRange> {
        core::mem::take(&mut self.offering)
    }

    /// Takes the memory that was offered for an answer that has arrived.
    pub(super) fn take_offered(&mut self, request: RequestId) -> Option<Pieces> {
        self.offered.remove(&request)
    }

    /// Stores the peer's offers. Returns false if they are for more requests than the peer may have in flight.
    pub(super) fn learn(&mut self, places: Vec<RemoteRange>) -> bool {
        for place in places {
            self.wanted.entry(place.request).or_default().push(place);
        }
        self.wanted.len() <= Limits::REQUESTS_PER_CONNECTION
    }

    /// Returns the memory that the peer offers for the answer to a request.
    pub(super) fn wanted(&self, request: RequestId) -> Option<&[RemoteRange]> {
        self.wanted.get(&request).map(Vec::as_slice)
    }

    /// Drops the peer's offers for a request, which is answered.
    pub(super) fn forget_wanted(&mut self, request: RequestId) {
        self.wanted.remove(&request);
    }

    /// Returns true if no offer of the peer is unused.
    pub(super) fn wants_nothing(&self) -> bool {
        self.wanted.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_belong_to_requests_and_are_bounded() {
        let request = |index| RequestId { index, generation: 1 };
        let place = |index, address| RemoteRange { request: request(index), address, bytes: 64, key: 1 };
        let mut places = AnswerPlaces::default();
        assert!(places.wants_nothing() && places.learn(vec![place(1, 0), place(2, 64), place(1, 128)]));
        assert_eq!(places.wanted(request(1)), Some(&[place(1, 0), place(1, 128)][..]));
        places.forget_wanted(request(1));
        assert_eq!((places.wanted(request(1)), places.wanted(request(2)).map(<[_]>::len)), (None, Some(1)));
        let many = |count: usize| (0..count as u32).map(|index| place(index + 10, 0)).collect();
        assert!(places.learn(many(Limits::REQUESTS_PER_CONNECTION - 1)));
        assert!(!places.learn(vec![place(5, 0)]), "more than it may ask for");
    }
}

//! Memory for the payloads of answers: where we want ours, and where the peer wants its own.

use std::collections::HashMap;

use kvplane_proto::{Limits, RequestId};
use kvplane_sys::IoBuf;

use crate::rdma::nic::Nic;
use crate::rdma::wire::{EAGER_BYTES, OFFERS, Place, SOURCES};
use crate::types::Pieces;

/// The places that the two sides of a link have offered each other and that were not used yet.
#[derive(Default)]
pub(in crate::rdma) struct AnswerPlaces {
    /// Where the peer wants answers.
    wanted: HashMap<RequestId, Vec<Place>>,
    /// Where we want answers.
    offered: HashMap<RequestId, Pieces>,
    /// What the next frame offers.
    offering: Vec<Place>,
}

impl AnswerPlaces {
    /// Offers memory for the answer to a request, with the next frame; not where that is of no use.
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
            self.offering.push(Place { request, address, bytes, key });
        }
        self.offered.insert(request, pieces);
    }

    /// What the next frame offers.
    pub(in crate::rdma) fn take_offers(&mut self) -> Vec<Place> {
        core::mem::take(&mut self.offering)
    }

    /// The answer to a request is here: the memory that was offered for it.
    pub(super) fn take_offered(&mut self, request: RequestId) -> Option<Pieces> {
        self.offered.remove(&request)
    }

    /// The peer wants answers there. Whether these are no more than it may ask for.
    pub(super) fn learn(&mut self, places: Vec<Place>) -> bool {
        for place in places {
            self.wanted.entry(place.request).or_default().push(place);
        }
        self.wanted.len() <= Limits::REQUESTS_PER_CONNECTION
    }

    /// Where the peer wants the answer to a request.
    pub(super) fn wanted(&self, request: RequestId) -> Option<&[Place]> {
        self.wanted.get(&request).map(Vec::as_slice)
    }

    /// A request is answered.
    pub(super) fn forget_wanted(&mut self, request: RequestId) {
        self.wanted.remove(&request);
    }

    /// Whether the peer has offered nothing that was not used.
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
        let place = |index, address| Place { request: request(index), address, bytes: 64, key: 1 };
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

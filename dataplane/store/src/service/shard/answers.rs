//! Answers on their way to peers: frames that wait to be polled, what they carry, and how long each took.
//!
//! Bodies and lists of places lie one behind the other in buffers that are emptied when everything was polled, so that
//! no answer allocates. Names that belong to tails of objects lie among the bodies until the host has written them.

use core::ops::Range;
use std::collections::VecDeque;

use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{RequestId, ReservationId};
use kvplane_proto::message::{Item, Items, Kind, Operation, decode_items};

use super::timing::{Outputs, ServiceTimer};
use crate::service::types::{CloseReason, Output, PeerKey, Place};

/// Answers of a shard to its peers, until its host has polled them.
pub(in crate::service) struct Answers {
    pub(in crate::service) outputs: Outputs,
    pub(in crate::service) timed: ServiceTimer,
    bytes: Vec<u8>,
    /// Places of payloads that lie in several.
    places: Vec<Place>,
    /// Tails that the host has not written yet, each with the reservation that holds its room.
    tails: VecDeque<(ReservationId, Range<usize>)>,
}

impl Answers {
    pub(in crate::service) fn new() -> Self {
        Self {
            outputs: Outputs::default(),
            timed: ServiceTimer::new(),
            bytes: Vec::new(),
            places: Vec::new(),
            tails: VecDeque::new(),
        }
    }

    /// Answers without a body.
    pub(in crate::service) fn status(
        &mut self,
        peer: PeerKey,
        operation: Operation,
        request: RequestId,
        status: Status,
        argument: u64,
    ) {
        self.send(peer, Header::reply(Kind::Reply(operation), request, status).with_argument(argument));
    }

    /// Answers a request of this header without a body.
    pub(in crate::service) fn answer(&mut self, peer: PeerKey, operation: Operation, header: &Header, status: Status) {
        self.status(peer, operation, header.request, status, 0);
    }

    /// Answers with this header alone.
    pub(in crate::service) fn send(&mut self, peer: PeerKey, header: Header) {
        self.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload: None });
    }

    /// Answers `Ok` with a body of so many items, which `encode` appends to what it is given.
    pub(in crate::service) fn items(
        &mut self,
        peer: PeerKey,
        operation: Operation,
        request: RequestId,
        items: usize,
        encode: impl FnOnce(&mut Vec<u8>),
    ) {
        self.body(peer, Header::reply(Kind::Reply(operation), request, Status::Ok), items, encode);
    }

    /// As [`Self::items`], with these.
    pub(in crate::service) fn records<T: Item>(
        &mut self,
        peer: PeerKey,
        operation: Operation,
        request: RequestId,
        records: &[T],
    ) {
        self.items(peer, operation, request, records.len(), |body| records.iter().for_each(|one| one.encode(body)));
    }

    /// As [`Self::items`], with this header.
    pub(in crate::service) fn body(
        &mut self,
        peer: PeerKey,
        header: Header,
        items: usize,
        encode: impl FnOnce(&mut Vec<u8>),
    ) {
        let start = self.bytes.len();
        encode(&mut self.bytes);
        let body = start..self.bytes.len();
        let header = header.with_body(&self.bytes[body.clone()], items);
        self.outputs.push_back(Output::Frame { peer, header, body, payload: None });
    }

    /// Lists the places of a payload: `list` appends them, or changes its mind. Those are gone then.
    pub(in crate::service) fn list_places<T, E>(
        &mut self,
        list: impl FnOnce(&mut Vec<Place>) -> Result<T, E>,
    ) -> Result<(T, Range<usize>), E> {
        let start = self.places.len();
        let listed = list(&mut self.places);
        if listed.is_err() {
            self.places.truncate(start);
        }
        listed.map(|listed| (listed, start..self.places.len()))
    }

    /// Has the host write the tail of the object that a reservation is for, which `encode` appends.
    pub(in crate::service) fn write_tail(&mut self, reservation: ReservationId, encode: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len();
        encode(&mut self.bytes);
        self.tails.push_back((reservation, start..self.bytes.len()));
    }

    /// The next tail that is due.
    pub(in crate::service) fn next_tail(&mut self) -> Option<(ReservationId, Range<usize>)> {
        self.tails.pop_front()
    }

    /// Panics while a tail is due: its room could be freed, and given to another object, before the tail is written.
    pub(in crate::service) fn assert_tails_written(&self) {
        assert!(self.tails.is_empty(), "{} tails are due that the host has not written", self.tails.len());
    }

    /// The next output, which is counted; without one, bodies and places are empty again.
    #[inline]
    pub(in crate::service) fn poll(&mut self, now_ns: u64) -> Option<Output> {
        let output = self.outputs.take(&mut self.timed, now_ns);
        if output.is_none() {
            self.bytes.clear();
            self.places.clear();
        }
        output
    }

    pub(in crate::service) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.bytes[range]
    }

    pub(in crate::service) fn places(&self, range: Range<usize>) -> &[Place] {
        &self.places[range]
    }
}

/// The items of a body, or the end of the connection.
pub(in crate::service) fn items_of<'a, T: Item>(header: &Header, body: &'a [u8]) -> Result<Items<'a, T>, CloseReason> {
    decode_items(body, header.items).ok_or(CloseReason::Malformed("a body of wrong length"))
}

//! Outgoing replies: frames that wait to be polled, their bodies and extents, and their times.
//!
//! Bodies and lists of extents are appended to buffers that are cleared when everything was polled, so that no reply
//! allocates. Tails of objects lie among the bodies until the host has written them.

use core::ops::Range;
use std::collections::VecDeque;

use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{RequestId, ReservationId};
use kvplane_proto::message::{Item, Items, Kind, Operation, decode_items};

use super::timing::{Outputs, ServiceTimer};
use crate::service::types::{CloseReason, MemoryExtent, Output, PeerKey};

/// Replies of a shard to its peers, until its host has polled them.
pub(in crate::service) struct Answers {
    pub(in crate::service) outputs: Outputs,
    pub(in crate::service) timed: ServiceTimer,
    bytes: Vec<u8>,
    /// Extents of scattered payloads.
    extents: Vec<MemoryExtent>,
    /// Tails that the host has not written yet, each with the reservation that holds its memory.
    tails: VecDeque<(ReservationId, Range<usize>)>,
}

impl Answers {
    pub(in crate::service) fn new() -> Self {
        Self {
            outputs: Outputs::default(),
            timed: ServiceTimer::new(),
            bytes: Vec::new(),
            extents: Vec::new(),
            tails: VecDeque::new(),
        }
    }

    /// Sends a reply without a body.
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

    /// Sends a reply without a body to the request of this header.
    pub(in crate::service) fn answer(&mut self, peer: PeerKey, operation: Operation, header: &Header, status: Status) {
        self.status(peer, operation, header.request, status, 0);
    }

    /// Sends a reply that is this header alone.
    pub(in crate::service) fn send(&mut self, peer: PeerKey, header: Header) {
        self.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload: None });
    }

    /// Answers `Ok` with a body of this many items, which `encode` appends to its argument.
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

    /// Like [`Self::items`], with the records given.
    pub(in crate::service) fn records<T: Item>(
        &mut self,
        peer: PeerKey,
        operation: Operation,
        request: RequestId,
        records: &[T],
    ) {
        self.items(peer, operation, request, records.len(), |body| records.iter().for_each(|one| one.encode(body)));
    }

    /// Like [`Self::items`], with the header given.
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

    /// Lists the extents of a payload: `list` appends them. If it fails, the extents that it appended are removed.
    pub(in crate::service) fn list_extents<T, E>(
        &mut self,
        list: impl FnOnce(&mut Vec<MemoryExtent>) -> Result<T, E>,
    ) -> Result<(T, Range<usize>), E> {
        let start = self.extents.len();
        let listed = list(&mut self.extents);
        if listed.is_err() {
            self.extents.truncate(start);
        }
        listed.map(|listed| (listed, start..self.extents.len()))
    }

    /// Enqueues the tail of a reservation's object for the host to write; `encode` appends it.
    pub(in crate::service) fn write_tail(&mut self, reservation: ReservationId, encode: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len();
        encode(&mut self.bytes);
        self.tails.push_back((reservation, start..self.bytes.len()));
    }

    /// Returns the next tail to be written.
    pub(in crate::service) fn next_tail(&mut self) -> Option<(ReservationId, Range<usize>)> {
        self.tails.pop_front()
    }

    /// Panics while a tail is pending: its memory could be freed, and reused for another object, before the tail is
    /// written.
    pub(in crate::service) fn assert_tails_written(&self) {
        assert!(self.tails.is_empty(), "{} pending tails were not written by the host", self.tails.len());
    }

    /// Returns the next output and counts it; if there is none, clears bodies and extents.
    #[inline]
    pub(in crate::service) fn poll(&mut self, now_ns: u64) -> Option<Output> {
        let output = self.outputs.take(&mut self.timed, now_ns);
        if output.is_none() {
            self.bytes.clear();
            self.extents.clear();
        }
        output
    }

    pub(in crate::service) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.bytes[range]
    }

    pub(in crate::service) fn extents(&self, range: Range<usize>) -> &[MemoryExtent] {
        &self.extents[range]
    }
}

/// Decodes the items of a body; a malformed one closes the connection.
pub(in crate::service) fn items_of<'a, T: Item>(header: &Header, body: &'a [u8]) -> Result<Items<'a, T>, CloseReason> {
    decode_items(body, header.items).ok_or(CloseReason::Malformed("a body of the wrong length"))
}

//! Answers that are known at once, and the items of a request.

use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::message::{Item, Items, Kind, Operation, decode_items};

use super::Service;
use super::types::{CloseReason, Output, PeerKey};

impl Service {
    /// The body's items, or the end of the connection.
    pub(super) fn items<'a, T: Item>(header: &Header, body: &'a [u8]) -> Result<Items<'a, T>, CloseReason> {
        decode_items(body, header.items).ok_or(CloseReason::Malformed("a body of wrong length"))
    }

    pub(super) fn answer(&mut self, peer: PeerKey, operation: Operation, header: &Header, status: Status) {
        self.answer_id(peer, operation, header.request, status, 0);
    }

    /// Answers with a failure; the map's epoch says which of two maps is older.
    pub(super) fn refuse(&mut self, peer: PeerKey, operation: Operation, request: RequestId, status: Status) {
        let argument = if status == Status::WrongOwner { self.epoch.0 } else { 0 };
        self.answer_id(peer, operation, request, status, argument);
    }

    pub(super) fn answer_id(
        &mut self,
        peer: PeerKey,
        operation: Operation,
        request: RequestId,
        status: Status,
        argument: u64,
    ) {
        let header = Header::reply(Kind::Reply(operation), request, status).with_argument(argument);
        self.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload: None });
    }

    /// Answers with a body of items that starts at `start` of the arena.
    pub(super) fn answer_items(
        &mut self,
        peer: PeerKey,
        operation: Operation,
        header: &Header,
        start: usize,
        items: usize,
    ) {
        let body = start..self.bytes.len();
        let header = Header::reply(Kind::Reply(operation), header.request, Status::Ok)
            .with_body(&self.bytes[body.clone()], items);
        self.outputs.push_back(Output::Frame { peer, header, body, payload: None });
    }
}

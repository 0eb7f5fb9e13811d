//! Objects that are written in ranges: how they are begun, filled, sealed and given up, and how what is there of them
//! is read.
//!
//! Over shared memory a range is filled as an object is put: room is asked for, the host copies, the copy is committed.
//! So a fill is under way on one lane until it is answered, and what becomes of that lane becomes of it.
//!
//! A draft's number means something to the shard that gave it, in the incarnation in which it did. To any other it may
//! name another draft of this client. So what is said of a draft is sent to that incarnation of that shard, or to
//! nobody.

use kvplane_proto::flags::FrameFlags;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{FillItem, IdItem, Item, Kind, Operation, PutItem, RangeItem};

use super::Client;
use super::types::{Local, Request};

/// Which incarnation of which shard a peer of the client is: no two that one client ever knew have the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub struct PeerIncarnation(pub u32);

// Each slice has a request, and there are many.
const _: () = assert!(size_of::<Request>() <= 64);

impl Request {
    /// The incarnation of the owner that alone may be asked this, if only one may.
    pub(super) const fn incarnation(&self) -> Option<PeerIncarnation> {
        match *self {
            Self::Fill(_, incarnation, ..) | Self::Seal(_, incarnation, _) | Self::Discard(_, incarnation, _) => {
                Some(incarnation)
            }
            _ => None,
        }
    }
}

impl Client {
    /// Sends requests from the head of a lane's queue as one frame with one answer: those of which `record` makes an
    /// item.
    fn send_records(&mut self, lane: u32, mut header: Header, record: impl Fn(&Request, &mut Vec<u8>) -> bool) {
        let id = self.lanes[lane as usize].id(lane);
        let Kind::Request(operation) = header.kind else { return };
        header.request = self.open_wire(id, operation);
        let (start, mut count) = (self.outbox.mark(), 0);
        while count < Limits::ITEMS_PER_FRAME && self.window_open(lane) {
            let Some(next) = self.next_queued(lane) else { break };
            let request = self.slices.at(next.index).request;
            if !record(&request, self.outbox.writer()) {
                break;
            }
            if count == 0 {
                header.deadline_us = self.deadline_us(next.index);
            }
            self.take_queued(lane, next.index);
            self.join_wire(header.request, next.index);
            count += 1;
        }
        let body = self.outbox.since(start);
        self.send(id, header, body, count, &[]);
    }

    /// Names drafts.
    pub(super) fn send_ids(&mut self, lane: u32, wanted: Operation) {
        let header = Header::request(Kind::Request(wanted), RequestId::default());
        self.send_records(lane, header, |request, out| match (wanted, request) {
            (Operation::Seal, Request::Seal(_, _, draft)) | (Operation::Discard, Request::Discard(_, _, draft)) => {
                IdItem { id: *draft }.encode(out);
                true
            }
            _ => false,
        });
    }

    /// Asks for room for ranges of drafts.
    pub(super) fn send_fills(&mut self, lane: u32) {
        let header = Header::request(Kind::Request(Operation::Fill), RequestId::default());
        self.send_records(lane, header, |request, out| {
            let Request::Fill(_, _, draft, offset, local) = *request else { return false };
            FillItem { draft, offset, bytes: local.bytes }.encode(out);
            true
        });
    }

    /// Asks where ranges of objects are, whether those are complete or not.
    pub(super) fn send_peeks(&mut self, lane: u32) {
        let mut header = Header::request(Kind::Request(Operation::Peek), RequestId::default());
        header.flags |= FrameFlags::UNCOMMITTED;
        self.send_records(lane, header, |request, out| {
            let Request::PeekRange(digest, offset, local) = *request else { return false };
            RangeItem { digest, request: RequestId::default(), offset, bytes: local.bytes }.encode(out);
            true
        });
    }

    /// Sends a range of a draft over a stream.
    pub(super) fn send_fill(&mut self, lane: u32, slice: u32, draft: u64, offset: u64, local: Local) {
        let mut body = self.outbox.take_names();
        FillItem { draft, offset, bytes: local.bytes }.encode(&mut body);
        self.send_payload(lane, slice, Operation::Fill, local, true, &body);
        self.outbox.give_names(body);
    }

    /// Begins drafts: those at the head of the queue that may pause equally long.
    pub(super) fn send_begin(&mut self, lane: u32) {
        let id = self.lanes[lane as usize].id(lane);
        let request = self.open_wire(id, Operation::Begin);
        let mut header = Header::request(Kind::Request(Operation::Begin), request);
        let (start, mut count, mut idle_ms) = (self.outbox.mark(), 0, 0);
        let mut names = self.outbox.take_names();
        while count < Limits::ITEMS_PER_FRAME && self.window_open(lane) {
            let Some(next) = self.next_queued(lane) else { break };
            let slice = self.slices.peek(next.index);
            let Request::Begin(digest, bytes, wanted_ms, number) = slice.request else { break };
            if count > 0 && wanted_ms != idle_ms {
                break;
            }
            let (item, name) = self.batches.peek(slice.batch.index).puts.get(number);
            if (count + 1) * PutItem::BYTES + names.len() + name.len() > Limits::BODY_BYTES {
                break;
            }
            idle_ms = wanted_ms;
            names.extend_from_slice(name);
            PutItem { digest, bytes, ..item }.encode(self.outbox.writer());
            self.take_queued(lane, next.index);
            self.join_wire(request, next.index);
            count += 1;
        }
        header.deadline_us = idle_ms.min(Limits::DRAFT_IDLE_MOST_MS).saturating_mul(1000);
        self.outbox.writer().extend_from_slice(&names);
        self.outbox.give_names(names);
        let body = self.outbox.since(start);
        self.send(id, header, body, count, &[]);
    }
}

const _: () = assert!(Limits::DRAFT_IDLE_MOST_MS as u64 * 1000 <= u32::MAX as u64);

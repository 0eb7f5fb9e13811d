//! Frames about objects: existence queries, gets, puts, removals and put sessions.
//!
//! The names and options of a batch's puts are in the batch's [`PutBook`](crate::PutBook).
//!
//! Over shared memory a range of a put session is filled like a put: it is reserved, the host copies, and the copy is
//! committed. So a fill stays on one lane until it is answered, and shares the fate of that lane.
//!
//! The number of a put session is valid for the shard that assigned it, in that incarnation. For any other shard it may
//! be the number of another put session of this client. So requests on a put session are sent to that incarnation of
//! that shard or not at all.

use kvplane_proto::digest::Digest;
use kvplane_proto::flags::FrameFlags;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, RequestId, Version};
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{
    DigestItem, FillItem, GetItem, IdItem, Item, Kind, Operation, PageQuery, PutItem, RangeItem, ReadItem, RetainItem,
    VersionItem,
};

use super::Sender;
use crate::types::{Local, Path, Request};

const _: () = assert!(Limits::PUT_SESSION_IDLE_MOST_MS as u64 * 1000 <= u32::MAX as u64);

impl Sender<'_> {
    /// Sends requests by digest from the head of the queue as one frame with one reply.
    pub(super) fn send_digests(&mut self, lane: u32, operation: Operation) {
        let id = self.lane(lane).id(lane);
        let request_id = self.open_wire(id, operation);
        let mut header = Header::request(Kind::Request(operation), request_id);
        let (start, mut count, leases) =
            (self.outbox().mark(), 0, self.placement.replica_flags(operation, self.traffic.network.host.config.spread));
        let mut most = header.most_items();
        while count < most && self.window_open(lane) {
            let Some(next) = self.next_queued(lane) else { break };
            let request = self.traffic.slices.at(next.index).request;
            let Some(digest) = digest_for(operation, &request) else { break };
            let (epoch, routing) = self.routing_of(next.index);
            let wanted = (epoch.0, routing | flags_of(&request) | leases);
            if count > 0 && wanted != (header.argument, header.flags) {
                break;
            }
            (header.argument, header.flags) = wanted;
            match request {
                Request::RemoveHeadOf(_, Version(number)) | Request::EndExport(_, Epoch(number), _) => {
                    most = most.min(Limits::BODY_BYTES / VersionItem::BYTES);
                    VersionItem { digest, version: Version(number) }.encode(self.outbox().writer());
                }
                Request::Retain(item) => item.encode(self.outbox().writer()),
                _ => DigestItem { digest }.encode(self.outbox().writer()),
            }
            if count == 0 {
                header.deadline_us = self.deadline_us(next.index);
            }
            self.take_queued(lane, next.index);
            self.join_wire(request_id, next.index);
            count += 1;
        }
        let body = self.outbox().since(start);
        self.send(id, header, body, count, &[]);
    }

    /// Sends requests from the head of the queue as one frame, with one reply and payload for each, under its own id.
    pub(super) fn send_each(&mut self, lane: u32, operation: Operation) {
        let id = self.lane(lane).id(lane);
        let start = self.outbox().mark();
        let mut header = Header::request(Kind::Request(operation), RequestId::default());
        let (mut count, leases) = (0, self.placement.replica_flags(operation, self.traffic.network.host.config.spread));
        // A foreign protocol supports one range per request.
        let foreign = self.lane(lane).path == Path::Mooncake;
        let most = if foreign { 1 } else { Limits::ITEMS_PER_FRAME };
        while count < most && self.window_open(lane) {
            let Some(next) = self.next_queued(lane) else { break };
            let asked = self.traffic.slices.at(next.index).request;
            let fits = match asked {
                Request::Get(..) | Request::GetHead(..) | Request::GetCopy(..) => operation == Operation::Get,
                Request::GetRange(..) | Request::PeekRange(..) => operation == Operation::GetRange,
                Request::Read(..) => operation == Operation::Read,
                _ => false,
            };
            let (epoch, routing) = self.routing_of(next.index);
            let wanted = (epoch.0, routing | flags_of(&asked) | leases);
            let differs = count > 0 && wanted != (header.argument, header.flags);
            if !fits || !foreign && self.may_gather(next.index) || differs {
                break;
            }
            (header.argument, header.flags) = wanted;
            let request = self.open_wire(id, operation);
            self.take_queued(lane, next.index);
            self.join_wire(request, next.index);
            match asked {
                Request::Get(digest, local) | Request::GetHead(digest, local) | Request::GetCopy(digest, local, _) => {
                    GetItem { digest, request, capacity_bytes: local.bytes }.encode(self.outbox().writer());
                }
                Request::Read(target, local) => {
                    ReadItem { request, segment: target.segment, offset: target.offset, bytes: local.bytes }
                        .encode(self.outbox().writer());
                }
                Request::GetRange(digest, offset, local) | Request::PeekRange(digest, offset, local) => {
                    RangeItem { digest, request, offset, bytes: local.bytes }.encode(self.outbox().writer());
                }
                _ => unreachable!("only gets and reads have a reply each"),
            }
            if count == 0 {
                header.deadline_us = self.deadline_us(next.index);
            }
            count += 1;
        }
        if operation == Operation::Read && self.sums_segments(lane) {
            header.flags |= FrameFlags::SUM_REPLIES;
        }
        let body = self.outbox().since(start);
        self.send(id, header, body, count, &[]);
    }
    pub(super) fn send_list(&mut self, lane: u32, slice: u32, digest: Digest, from: PageQuery) {
        let id = self.lane(lane).id(lane);
        let request = self.open_wire(id, Operation::List);
        let mut header = Header::request(Kind::Request(Operation::List), request);
        if matches!(self.traffic.slices.peek(slice).request, Request::ListCopy(..)) {
            let (epoch, routing) = self.routing_of(slice);
            (header.argument, header.flags) = (epoch.0, routing);
        }
        header.deadline_us = self.deadline_us(slice);
        let body = self.outbox().append(|out| from.item(digest).encode(out));
        self.take_queued(lane, slice);
        self.join_wire(request, slice);
        self.send(id, header, body, 1, &[]);
    }
    pub(super) fn send_open(&mut self, lane: u32, slice: u32) {
        let id = self.lane(lane).id(lane);
        let request = self.open_wire(id, Operation::OpenSegment);
        let mut header = Header::request(Kind::Request(Operation::OpenSegment), request);
        header.deadline_us = self.deadline_us(slice);
        self.take_queued(lane, slice);
        self.join_wire(request, slice);
        let none = self.outbox().append(|_| {});
        self.send(id, header, none, 0, &[]);
    }

    /// Sends one query of many objects. Its slice is the first in its lane's queue.
    pub(super) fn send_asked(&mut self, lane: u32, slice: u32, from: u32, count: u32) {
        let id = self.lane(lane).id(lane);
        let request = self.open_wire(id, Operation::Exists);
        let mut header = Header::request(Kind::Request(Operation::Exists), request);
        header.deadline_us = self.deadline_us(slice);
        let batch = self.traffic.slices.at(slice).batch;
        let start = self.outbox().mark();
        let list = self.traffic.batches.peek(batch.index).existence.part(from, count);
        self.traffic.network.host.outbox.writer().extend_from_slice(list);
        let body = self.outbox().since(start);
        self.take_queued(lane, slice);
        self.join_wire(request, slice);
        self.send(id, header, body, count as usize, &[]);
    }

    /// Returns the record, memory and name of a put.
    fn put_of(&self, slice: u32) -> Option<(PutItem, Local, &[u8])> {
        let slice = self.traffic.slices.peek(slice);
        match slice.request {
            Request::Put(digest, local) => Some((PutItem::plain(digest, local.bytes), local, &[])),
            Request::PutAs(digest, local, number) | Request::PutCopy(digest, local, number, _) => {
                let (item, name) = self.traffic.batches.peek(slice.batch.index).puts.get(number);
                Some((PutItem { digest, bytes: local.bytes, ..item }, local, name))
            }
            _ => None,
        }
    }

    /// Sends a put with its payload.
    pub(super) fn send_put(&mut self, lane: u32, slice: u32) {
        let mut body = self.outbox().take_names();
        let Some((item, local, name)) = self.put_of(slice) else { return };
        item.encode(&mut body);
        body.extend_from_slice(name);
        self.send_payload(lane, slice, Operation::Put, local, true, &body);
        self.outbox().give_names(body);
    }

    /// Reserves memory for the puts at the head of a shared lane's queue, in one frame with one reply.
    pub(super) fn send_reserve(&mut self, lane: u32) {
        let id = self.lane(lane).id(lane);
        let request = self.open_wire(id, Operation::Reserve);
        let mut header = Header::request(Kind::Request(Operation::Reserve), request);
        let (start, mut count) = (self.outbox().mark(), 0);
        let mut names = self.outbox().take_names();
        while count < Limits::ITEMS_PER_FRAME && self.window_open(lane) {
            let Some(next) = self.next_queued(lane) else { break };
            let (epoch, routing) = self.routing_of(next.index);
            if count > 0 && (epoch.0, routing) != (header.argument, header.flags) {
                break;
            }
            (header.argument, header.flags) = (epoch.0, routing);
            let Some((item, _, name)) = self.put_of(next.index) else { break };
            if (count + 1) * PutItem::BYTES + names.len() + name.len() > Limits::BODY_BYTES {
                break;
            }
            names.extend_from_slice(name);
            item.encode(self.outbox().writer());
            if count == 0 {
                header.deadline_us = self.deadline_us(next.index);
            }
            self.take_queued(lane, next.index);
            self.join_wire(request, next.index);
            count += 1;
        }
        self.outbox().writer().extend_from_slice(&names);
        self.outbox().give_names(names);
        let body = self.outbox().since(start);
        self.send(id, header, body, count, &[]);
    }

    /// Sends requests from the head of a lane's queue as one frame with one reply: those that `record` encodes as an
    /// item.
    fn send_records(&mut self, lane: u32, mut header: Header, record: impl Fn(&Request, &mut Vec<u8>) -> bool) {
        let id = self.lane(lane).id(lane);
        let Kind::Request(operation) = header.kind else { return };
        header.request = self.open_wire(id, operation);
        header.flags |= self.placement.replica_flags(operation, false);
        let (start, mut count) = (self.outbox().mark(), 0);
        while count < Limits::ITEMS_PER_FRAME && self.window_open(lane) {
            let Some(next) = self.next_queued(lane) else { break };
            let request = self.traffic.slices.at(next.index).request;
            if !record(&request, self.outbox().writer()) {
                break;
            }
            if count == 0 {
                header.deadline_us = self.deadline_us(next.index);
            }
            self.take_queued(lane, next.index);
            self.join_wire(header.request, next.index);
            count += 1;
        }
        let body = self.outbox().since(start);
        self.send(id, header, body, count, &[]);
    }

    /// Commits or aborts put sessions.
    pub(super) fn send_ids(&mut self, lane: u32, wanted: Operation) {
        let header = Header::request(Kind::Request(wanted), RequestId::default());
        self.send_records(lane, header, |request, out| match (wanted, request) {
            (Operation::Seal, Request::Seal(_, _, session)) | (Operation::Discard, Request::Discard(_, _, session)) => {
                IdItem { id: *session }.encode(out);
                true
            }
            _ => false,
        });
    }

    /// Reserves ranges of put sessions.
    pub(super) fn send_fills(&mut self, lane: u32) {
        let header = Header::request(Kind::Request(Operation::Fill), RequestId::default());
        self.send_records(lane, header, |request, out| {
            let Request::Fill(_, _, session, offset, local) = *request else { return false };
            FillItem { session, offset, bytes: local.bytes }.encode(out);
            true
        });
    }

    /// Looks up ranges of objects, committed or not.
    pub(super) fn send_peeks(&mut self, lane: u32) {
        let mut header = Header::request(Kind::Request(Operation::Peek), RequestId::default());
        header.flags |= FrameFlags::UNCOMMITTED;
        self.send_records(lane, header, |request, out| {
            let Request::PeekRange(digest, offset, local) = *request else { return false };
            RangeItem { digest, request: RequestId::default(), offset, bytes: local.bytes }.encode(out);
            true
        });
    }

    /// Sends a range of a put session over a stream.
    pub(super) fn send_fill(&mut self, lane: u32, slice: u32, session: u64, offset: u64, local: Local) {
        let mut body = self.outbox().take_names();
        FillItem { session, offset, bytes: local.bytes }.encode(&mut body);
        self.send_payload(lane, slice, Operation::Fill, local, true, &body);
        self.outbox().give_names(body);
    }

    /// Begins put sessions: those at the head of the queue with the same idle timeout.
    pub(super) fn send_begin(&mut self, lane: u32) {
        let id = self.lane(lane).id(lane);
        let request = self.open_wire(id, Operation::Begin);
        let mut header = Header::request(Kind::Request(Operation::Begin), request);
        let (start, mut count, mut idle_ms) = (self.outbox().mark(), 0, 0);
        let mut names = self.outbox().take_names();
        while count < Limits::ITEMS_PER_FRAME && self.window_open(lane) {
            let Some(next) = self.next_queued(lane) else { break };
            let slice = self.traffic.slices.peek(next.index);
            let Request::Begin(digest, bytes, wanted_ms, number) = slice.request else { break };
            if count > 0 && wanted_ms != idle_ms {
                break;
            }
            let (item, name) = self.traffic.batches.peek(slice.batch.index).puts.get(number);
            if (count + 1) * PutItem::BYTES + names.len() + name.len() > Limits::BODY_BYTES {
                break;
            }
            idle_ms = wanted_ms;
            names.extend_from_slice(name);
            PutItem { digest, bytes, ..item }.encode(self.outbox().writer());
            self.take_queued(lane, next.index);
            self.join_wire(request, next.index);
            count += 1;
        }
        header.deadline_us = idle_ms.min(Limits::PUT_SESSION_IDLE_MOST_MS).saturating_mul(1000);
        self.outbox().writer().extend_from_slice(&names);
        self.outbox().give_names(names);
        let body = self.outbox().since(start);
        self.send(id, header, body, count, &[]);
    }
}

/// Returns the digest of a request, if this operation serves it.
const fn digest_for(operation: Operation, request: &Request) -> Option<Digest> {
    match (operation, request) {
        (Operation::Exists, Request::Exists(digest) | Request::Prefetch(digest))
        | (Operation::Size, Request::Size(digest))
        | (Operation::Remove, Request::Remove(digest) | Request::RemoveHead(digest) | Request::DropCopy(digest, _))
        | (Operation::Remove, Request::RemoveHeadOf(digest, _))
        | (Operation::RemoveCopy, Request::RemoveCopy(digest))
        | (Operation::Retain, Request::Retain(RetainItem { digest, .. }))
        | (Operation::Lookup, Request::Get(digest, _) | Request::GetRange(digest, ..))
        | (Operation::Lookup, Request::GetHead(digest, _) | Request::GetCopy(digest, ..)) => Some(*digest),
        (Operation::Remove, Request::EndExport(slot, ..)) => Some(slot.first_digest()),
        _ => None,
    }
}

/// Returns the flags of a frame with this request.
const fn flags_of(request: &Request) -> FrameFlags {
    match request {
        Request::Prefetch(_) => FrameFlags::PREFETCH,
        Request::GetHead(..) | Request::GetCopy(..) | Request::RemoveHead(_) => FrameFlags::HEADS,
        Request::RemoveHeadOf(..) => FrameFlags::HEADS.with(FrameFlags::OF_VERSION, true),
        Request::EndExport(..) => FrameFlags::NONE.with(FrameFlags::OF_VERSION, true),
        Request::PeekRange(..) => FrameFlags::UNCOMMITTED,
        _ => FrameFlags::NONE,
    }
}

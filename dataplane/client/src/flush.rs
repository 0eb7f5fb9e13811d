//! Queued slices become frames: as many as the lane's window allows, batched by operation.

use kvplane_proto::digest::Digest;
use kvplane_proto::flags::FrameFlags;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{
    CommitItem, DigestItem, GetItem, IdItem, Item, Kind, Operation, PageQuery, RangeItem, ReadItem, VersionItem,
    WriteItem, encode_items,
};

use super::Client;
use super::lane::{Endpoint, EndpointEvent};
use super::path::{Path, Via};
use super::table::{NOWHERE, SliceEvent, Wire, request_id, slice_id};
use super::types::{DeviceCopy, LaneId, Local, Output, Request, SliceId};

impl Client {
    /// The host has connected a lane: greet the peer.
    pub fn connected(&mut self, lane: LaneId, now_ns: u64) {
        self.now_ns = now_ns;
        if self.current(lane).is_none() || !self.step_lane(lane.index, EndpointEvent::Connected) {
            return;
        }
        if !self.lanes[lane.index as usize].path.is_greeted() {
            self.welcomed(lane.index);
            return;
        }
        let hello = self.hello_of(lane.index);
        let body = self.outbox.append(|out| out.extend_from_slice(&hello));
        let header = Header::request(Kind::Request(Operation::Hello), RequestId::default());
        self.send(lane, header, body, 1, &[]);
    }

    /// The host knows whether the kernel copies between us and the peer of this connection; until it says so, it does
    /// not.
    pub fn cma_allowed(&mut self, lane: LaneId, allowed: bool) {
        if let Some(entry) = self.current(lane) {
            entry.connection.cma = allowed;
        }
    }

    pub(super) fn flush_dirty(&mut self) {
        self.dispatch_dirty();
        // Each lane once: what stays over the window is marked again by the next answer.
        for _ in 0..self.dirty.len() {
            let Some(lane) = self.dirty.pop_front() else { return };
            self.lanes[lane as usize].dirty = false;
            self.flush(lane);
        }
    }

    fn flush(&mut self, lane: u32) {
        let entry = &mut self.lanes[lane as usize];
        match entry.state {
            Endpoint::Ready => {
                let open = self.tell_fences(lane);
                self.flush_held(lane);
                while open && self.flush_one(lane) {}
            }
            Endpoint::Idle | Endpoint::Connecting | Endpoint::Greeting | Endpoint::Resetting => {}
        }
    }

    /// Asks the host for a connection, now or when its last failure is long enough ago. False in the latter case.
    pub(super) fn connect(&mut self, lane: u32) -> bool {
        let entry = &mut self.lanes[lane as usize];
        if let Some(at_ns) = entry.waits_until(self.now_ns) {
            if entry.alarm_ns != Some(at_ns) {
                self.set_alarm(lane, Some(at_ns));
            }
            return false;
        }
        self.step_lane(lane, EndpointEvent::Connect);
        let entry = &self.lanes[lane as usize];
        let (id, path, peer) = (entry.id(lane), entry.path, entry.peer);
        let rail = &self.rails[entry.rail as usize];
        let mut address = self.peers[peer.0 as usize].address.clone();
        if let Some(own) = &rail.address {
            address.tcp = own.tcp;
        }
        // By then it must be connected and welcomed; a peer that says nothing does not hold the lane for good, and a
        // dead rail beside one that works is not waited for as long. Where none works the peer may just be slow, and
        // giving all of them up early would charge what waits for it.
        let group = &self.peers[peer.0 as usize].groups[usize::from(rail.group)];
        let others = group.rails.iter().any(|&rail| self.is_up(rail));
        let hello_ns = if others { entry.rail_hello_ns() } else { Limits::HELLO_NS };
        self.set_alarm(lane, Some(self.now_ns.saturating_add(hello_ns)));
        self.outbox.push(Output::Connect { lane: id, address, path });
        true
    }

    /// Releases, aborts and commits: they free the peer's memory and go first.
    fn flush_held(&mut self, lane: u32) {
        let id = self.lanes[lane as usize].id(lane);
        loop {
            let entry = &mut self.lanes[lane as usize];
            let take = |len: usize| len.saturating_sub(Limits::ITEMS_PER_FRAME);
            let (operation, ids): (_, Vec<u64>) = if !entry.connection.owed.releases.is_empty() {
                let from = take(entry.connection.owed.releases.len());
                (Operation::Release, entry.connection.owed.releases.drain(from..).map(|id| id.to_bits()).collect())
            } else if !entry.connection.owed.aborts.is_empty() {
                let from = take(entry.connection.owed.aborts.len());
                (Operation::Abort, entry.connection.owed.aborts.drain(from..).map(|id| id.to_bits()).collect())
            } else {
                break;
            };
            let count = ids.len();
            let body = self.outbox.append(|out| encode_items(ids.into_iter().map(|id| IdItem { id }), out));
            self.send(id, Header::request(Kind::Request(operation), RequestId::default()), body, count, &[]);
        }
        while !self.lanes[lane as usize].connection.owed.commits.is_empty() {
            let entry = &mut self.lanes[lane as usize];
            let from = entry.connection.owed.commits.len().saturating_sub(Limits::ITEMS_PER_FRAME);
            let commits: Vec<(u32, CommitItem)> = entry.connection.owed.commits.drain(from..).collect();
            let body = self.outbox.append(|out| encode_items(commits.iter().map(|commit| commit.1), out));
            let request = self.open_wire(id, Operation::Commit);
            for &(slice, _) in &commits {
                self.join_wire(request, slice);
            }
            let header = Header::request(Kind::Request(Operation::Commit), request);
            self.send(id, header, body, commits.len(), &[]);
        }
    }

    /// Sends one frame's worth from the head of the queue; false when there is nothing that may be sent.
    fn flush_one(&mut self, lane: u32) -> bool {
        let Some(first) = self.next_queued(lane) else { return false };
        if !self.window_open(lane) {
            return false;
        }
        let path = self.lanes[lane as usize].path;
        let copy = if path == Path::Rdma { self.copies_of(lane).next() } else { None };
        if let Some(DeviceCopy { slice, segment, offset, local, write }) = copy {
            let id = self.lanes[lane as usize].id(lane);
            self.outbox.push(Output::CopySegment { lane: id, slice, via: Via::Rdma, segment, offset, local, write });
            // The host may take those behind it by itself; what it leaves is the next output.
            self.mark_dirty(lane);
            return false;
        }
        let request = self.slices.at(first.index).request;
        match (path, request) {
            (Path::Stream | Path::Rdma, Request::Read(..) | Request::Write(..)) if self.may_gather(first.index) => {
                self.send_many(lane, matches!(request, Request::Write(..)));
            }
            (_, Request::Exists(_) | Request::Prefetch(_)) => self.send_digests(lane, Operation::Exists),
            (_, Request::Asks(_, from, count)) => self.send_asked(lane, first.index, from, count),
            (_, Request::Size(_)) => self.send_digests(lane, Operation::Size),
            (_, Request::Remove(_) | Request::RemoveHead(_) | Request::RemoveHeadOf(..) | Request::DropCopy(_)) => {
                self.send_digests(lane, Operation::Remove);
            }
            (_, Request::RemoveCopy(_)) => self.send_digests(lane, Operation::RemoveCopy),
            (_, Request::OpenSegment(_)) => self.send_open(lane, first.index),
            (_, Request::List(digest, from)) => self.send_list(lane, first.index, digest, from),
            (Path::Shared, Request::Get(..) | Request::GetRange(..) | Request::GetHead(..)) => {
                self.send_digests(lane, Operation::Lookup);
            }
            (Path::Shared, Request::Put(_, local) | Request::PutAs(_, local, _) | Request::PutCopy(_, local, _))
                if !self.goes_along(first, local) =>
            {
                self.send_reserve(lane);
            }
            (_, Request::Begin(..)) => self.send_begin(lane),
            (Path::Shared, Request::Fill(..)) => self.send_fills(lane),
            (_, Request::Fill(_, _, draft, offset, local)) => self.send_fill(lane, first.index, draft, offset, local),
            (_, Request::Seal(..)) => self.send_ids(lane, Operation::Seal),
            (_, Request::Discard(..)) => self.send_ids(lane, Operation::Discard),
            (Path::Shared, Request::PeekRange(..)) => self.send_peeks(lane),
            (_, Request::Get(..) | Request::GetHead(..)) => self.send_each(lane, Operation::Get),
            (_, Request::GetRange(..) | Request::PeekRange(..)) => self.send_each(lane, Operation::GetRange),
            (_, Request::Put(..) | Request::PutAs(..) | Request::PutCopy(..)) => self.send_put(lane, first.index),
            (Path::Stream | Path::Rdma | Path::Mooncake, Request::Read(..)) => self.send_each(lane, Operation::Read),
            (Path::Stream | Path::Rdma | Path::Mooncake, Request::Write(target, local)) => {
                self.send_write(lane, first.index, target, local);
            }
            (Path::Shared | Path::Local | Path::MooncakeRdma | Path::File, Request::Read(target, local)) => {
                self.copy_segment(lane, first, target, local, false);
            }
            (Path::Shared | Path::Local | Path::MooncakeRdma | Path::File, Request::Write(target, local)) => {
                self.copy_segment(lane, first, target, local, true);
            }
        }
        true
    }

    /// Sends bytes for a segment in a frame of their own.
    fn send_write(&mut self, lane: u32, index: u32, target: super::SegmentTarget, local: Local) {
        let item = WriteItem { segment: target.segment, offset: target.offset };
        let checksum = self.sums_segments(lane);
        let mut body = self.outbox.take_names();
        item.encode(&mut body);
        self.send_payload(lane, index, Operation::Write, local, checksum, &body);
        self.outbox.give_names(body);
    }

    /// Whether the payload of a put over shared memory goes along with its frame: several of a batch share a trip for
    /// their places and one to commit; a small one alone needs none but its own.
    fn goes_along(&mut self, put: SliceId, local: Local) -> bool {
        local.bytes <= Limits::PAYLOAD_ALONG_BYTES && self.slices.at(put.index).link.after == NOWHERE
    }

    /// The oldest slice of a lane that was not sent.
    pub(super) fn next_queued(&self, lane: u32) -> Option<SliceId> {
        let next = self.lanes[lane as usize].list.next;
        (next != NOWHERE).then(|| slice_id(next, self.slices.generation(next)))
    }

    pub(super) fn window_open(&self, lane: u32) -> bool {
        self.lanes[lane as usize].has_room(&self.config)
    }

    /// Whether payloads of segments carry a checksum on this lane.
    pub(super) fn sums_segments(&self, lane: u32) -> bool {
        self.config.checksum_segments && self.lanes[lane as usize].path != Path::Mooncake
    }

    /// One frame, one answer, many slices.
    fn send_digests(&mut self, lane: u32, operation: Operation) {
        let id = self.lanes[lane as usize].id(lane);
        let request_id = self.open_wire(id, operation);
        let mut header = Header::request(Kind::Request(operation), request_id);
        let (start, mut count, leases) = (self.outbox.mark(), 0, self.lease_flags(operation));
        let mut most = header.most_items();
        while count < most && self.window_open(lane) {
            let Some(next) = self.next_queued(lane) else { break };
            let request = self.slices.at(next.index).request;
            let Some(digest) = digest_for(operation, &request) else { break };
            let (epoch, routing) = self.routing_of(next.index);
            let wanted = (epoch.0, routing | flags_of(&request) | leases);
            if count > 0 && wanted != (header.argument, header.flags) {
                break;
            }
            (header.argument, header.flags) = wanted;
            match request {
                Request::RemoveHeadOf(_, version) => {
                    most = most.min(Limits::BODY_BYTES / VersionItem::BYTES);
                    VersionItem { digest, version }.encode(self.outbox.writer());
                }
                _ => DigestItem { digest }.encode(self.outbox.writer()),
            }
            if count == 0 {
                header.deadline_us = self.deadline_us(next.index);
            }
            self.take_queued(lane, next.index);
            self.join_wire(request_id, next.index);
            count += 1;
        }
        let body = self.outbox.since(start);
        self.send(id, header, body, count, &[]);
    }

    /// One frame, one answer for each slice, under its own id, with its payload.
    fn send_each(&mut self, lane: u32, operation: Operation) {
        let id = self.lanes[lane as usize].id(lane);
        let start = self.outbox.mark();
        let mut header = Header::request(Kind::Request(operation), RequestId::default());
        let (mut count, leases) = (0, self.lease_flags(operation));
        // A foreign protocol knows one range for each request.
        let foreign = self.lanes[lane as usize].path == Path::Mooncake;
        let most = if foreign { 1 } else { Limits::ITEMS_PER_FRAME };
        while count < most && self.window_open(lane) {
            let Some(next) = self.next_queued(lane) else { break };
            let asked = self.slices.at(next.index).request;
            let fits = match asked {
                Request::Get(..) | Request::GetHead(..) => operation == Operation::Get,
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
                Request::Get(digest, local) | Request::GetHead(digest, local) => {
                    GetItem { digest, request, capacity_bytes: local.bytes }.encode(self.outbox.writer());
                }
                Request::Read(target, local) => {
                    ReadItem { request, segment: target.segment, offset: target.offset, bytes: local.bytes }
                        .encode(self.outbox.writer());
                }
                Request::GetRange(digest, offset, local) | Request::PeekRange(digest, offset, local) => {
                    RangeItem { digest, request, offset, bytes: local.bytes }.encode(self.outbox.writer());
                }
                _ => unreachable!("only gets and reads are answered one by one"),
            }
            if count == 0 {
                header.deadline_us = self.deadline_us(next.index);
            }
            count += 1;
        }
        if operation == Operation::Read && self.sums_segments(lane) {
            header.flags |= FrameFlags::SUM_REPLIES;
        }
        let body = self.outbox.since(start);
        self.send(id, header, body, count, &[]);
    }

    fn send_list(&mut self, lane: u32, slice: u32, digest: Digest, from: PageQuery) {
        let id = self.lanes[lane as usize].id(lane);
        let request = self.open_wire(id, Operation::List);
        let mut header = Header::request(Kind::Request(Operation::List), request);
        header.deadline_us = self.deadline_us(slice);
        let body = self.outbox.append(|out| from.item(digest).encode(out));
        self.take_queued(lane, slice);
        self.join_wire(request, slice);
        self.send(id, header, body, 1, &[]);
    }

    fn send_open(&mut self, lane: u32, slice: u32) {
        let id = self.lanes[lane as usize].id(lane);
        let request = self.open_wire(id, Operation::OpenSegment);
        let mut header = Header::request(Kind::Request(Operation::OpenSegment), request);
        header.deadline_us = self.deadline_us(slice);
        self.take_queued(lane, slice);
        self.join_wire(request, slice);
        let none = self.outbox.since(self.outbox.mark());
        self.send(id, header, none, 0, &[]);
    }

    pub(super) fn send_payload(
        &mut self,
        lane: u32,
        slice: u32,
        operation: Operation,
        local: Local,
        checksum: bool,
        body: &[u8],
    ) {
        let id = self.lanes[lane as usize].id(lane);
        let body = self.outbox.append(|out| out.extend_from_slice(body));
        let request = self.open_wire(id, operation);
        let mut header =
            Header::request(Kind::Request(operation), request).with_payload(local.bytes, checksum.then_some(0));
        let (epoch, routing) = self.routing_of(slice);
        (header.argument, header.flags) = (epoch.0, header.flags | routing);
        header.deadline_us = self.deadline_us(slice);
        self.take_queued(lane, slice);
        self.join_wire(request, slice);
        self.send(id, header, body, 1, &[local]);
    }

    /// Lets the host move a range, in the way that is open; where none is any more, the slice finds another lane.
    fn copy_segment(&mut self, lane: u32, id: SliceId, target: super::SegmentTarget, local: Local, write: bool) {
        let entry = &mut self.lanes[lane as usize];
        let via = match entry.path {
            Path::Shared => entry.way(&self.config, target.segment, target.shareable),
            Path::MooncakeRdma => Some(Via::Rdma),
            _ => Some(Via::Own),
        };
        let Some(via) = via else {
            self.leave_lane(id.index);
            self.route(id);
            return;
        };
        self.leave_queue(lane, id.index);
        let slice = self.slices.at(id.index);
        slice.step(SliceEvent::Place);
        slice.answer.bytes = local.bytes;
        slice.via = via;
        let path = self.lanes[lane as usize].path;
        let lane = self.lanes[lane as usize].id(lane);
        let (segment, offset) = (target.segment, target.offset);
        self.outbox.push(match path {
            Path::File => Output::FileTransfer { lane, slice: id, file: segment, offset, local, write },
            _ => Output::CopySegment { lane, slice: id, via, segment, offset, local, write },
        });
    }

    /// The oldest slice that was not sent takes its part of the window.
    fn leave_queue(&mut self, lane: u32, slice: u32) {
        let now_ns = self.now_ns;
        let slice = self.slices.at(slice);
        slice.sent_ns = now_ns;
        slice.link.sent_bytes = slice.weight_bytes();
        self.lanes[lane as usize].sends(slice);
    }

    pub(super) fn take_queued(&mut self, lane: u32, slice: u32) {
        self.leave_queue(lane, slice);
        self.slices.at(slice).step(SliceEvent::Send);
    }

    pub(super) fn join_wire(&mut self, request: RequestId, slice: u32) {
        self.wires.at(request.index).slices.push(slice);
        self.slices.at(slice).wire = request;
    }

    pub(super) fn open_wire(&mut self, lane: LaneId, operation: Operation) -> RequestId {
        let mut wire = self.wires.recycled().unwrap_or_else(|| Wire::new(lane, operation));
        wire.lane = lane;
        wire.operation = operation;
        wire.slices.clear();
        self.lanes[lane.index as usize].load.outstanding += 1;
        request_id(self.wires.insert(wire))
    }

    pub(super) fn deadline_us(&mut self, slice: u32) -> u32 {
        let batch = self.slices.at(slice).batch;
        let left_ns = self.batches.at(batch.index).deadline_ns.saturating_sub(self.now_ns);
        u32::try_from(left_ns / 1000).unwrap_or(u32::MAX).max(1)
    }

    pub(super) fn send(
        &mut self,
        lane: LaneId,
        header: Header,
        body: core::ops::Range<usize>,
        items: usize,
        payload: &[Local],
    ) {
        let epoch = if header.argument == 0 { self.epoch().0 } else { header.argument };
        self.outbox.send(lane, header.with_argument(epoch), body, items, payload);
    }
}

/// The digest of a request that this operation serves.
const fn digest_for(operation: Operation, request: &Request) -> Option<Digest> {
    match (operation, request) {
        (Operation::Exists, Request::Exists(digest) | Request::Prefetch(digest))
        | (Operation::Size, Request::Size(digest))
        | (Operation::Remove, Request::Remove(digest) | Request::RemoveHead(digest) | Request::DropCopy(digest))
        | (Operation::Remove, Request::RemoveHeadOf(digest, _))
        | (Operation::RemoveCopy, Request::RemoveCopy(digest))
        | (Operation::Lookup, Request::Get(digest, _) | Request::GetRange(digest, ..))
        | (Operation::Lookup, Request::GetHead(digest, _)) => Some(*digest),
        _ => None,
    }
}

/// The flags of a frame that asks this.
const fn flags_of(request: &Request) -> FrameFlags {
    match request {
        Request::Prefetch(_) => FrameFlags::PREFETCH,
        Request::GetHead(..) | Request::RemoveHead(_) => FrameFlags::HEADS,
        Request::RemoveHeadOf(..) => FrameFlags::HEADS.with(FrameFlags::OF_VERSION, true),
        Request::PeekRange(..) => FrameFlags::UNCOMMITTED,
        _ => FrameFlags::NONE,
    }
}

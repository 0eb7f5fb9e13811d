//! Sender: writes frames from queued slices, as many as the lane's window allows, batched by operation.
//!
//! This module has the parts common to all frames and decides which frame is next; the modules below write the frames
//! of objects and of ranges of segments.

mod objects;
mod ranges;

use core::ops::Range;

use kvplane_proto::flags::FrameFlags;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, RequestId};
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{CommitItem, IdItem, Kind, Operation, PageQuery, encode_items};

pub(crate) use ranges::push_merged;

use crate::network::Lane;
use crate::outbox::Outbox;
use crate::placement::Placement;
use crate::tables::{NOWHERE, Resend, SliceEvent, slice_id};
use crate::traffic::Traffic;
use crate::types::{DeviceCopy, LaneId, Local, Output, Path, Request, SegmentTarget, SliceId, Via};

/// Writer of the frames of lanes, by the epoch of the map in use.
pub(crate) struct Sender<'a> {
    pub(crate) traffic: &'a mut Traffic,
    pub(crate) placement: &'a Placement,
}

/// Outcome of flushing the head of a lane's queue.
pub(crate) enum FlushOutcome {
    /// The slice was sent, perhaps with others.
    Sent,
    /// The window is full or the queue is empty.
    Nothing,
    /// This slice cannot use this lane any more: it has to be rerouted.
    Unservable(SliceId),
    /// The slice is of device memory, and its segment is closed for the RDMA devices of the lane.
    Closed(SliceId),
}

impl Sender<'_> {
    const fn outbox(&mut self) -> &mut Outbox {
        &mut self.traffic.network.host.outbox
    }

    fn lane(&self, lane: u32) -> &Lane {
        &self.traffic.network.lanes[lane]
    }

    fn lane_mut(&mut self, lane: u32) -> &mut Lane {
        &mut self.traffic.network.lanes[lane]
    }

    /// Sends the peer's pending fences, if this lane has something to send and has not sent them. Returns true if
    /// requests may follow without waiting for the acknowledgement.
    pub(crate) fn tell_fences(&mut self, lane: u32) -> bool {
        let entry = self.lane(lane);
        let fences = &self.traffic.network.peers[entry.peer.0].fences;
        if !entry.path.is_greeted() || fences.is_empty() {
            return true;
        }
        let (count, answered) = (fences.count(), fences.answered());
        let (in_order, idle) =
            (entry.path.writes_in_order(), entry.list.queued == 0 && entry.connection.settlements.commits.is_empty());
        let may_follow = in_order && fences.len() <= Limits::FENCED;
        let mut fenced = if idle { count } else { entry.connection.fenced };
        while fenced < count {
            let told = fenced.max(answered);
            fenced = count.min(told + Limits::ITEMS_PER_FRAME as u64);
            self.send_fence(lane, (told - answered) as usize..(fenced - answered) as usize, fenced);
        }
        may_follow
    }

    /// The request id is the count of fences up to the last one in the frame, so that the reply states which are
    /// acknowledged.
    fn send_fence(&mut self, lane: u32, which: Range<usize>, until: u64) {
        let entry = self.lane_mut(lane);
        entry.connection.fenced = until;
        let (id, peer) = (entry.id(lane), entry.peer.0);
        let (start, items) = (self.outbox().mark(), which.len());
        let fences = &self.traffic.network.peers[peer].fences;
        encode_items(fences.range(which).map(|id| IdItem { id }), self.traffic.network.host.outbox.writer());
        let body = self.outbox().since(start);
        self.traffic.books.counters.fences += 1;
        let header = Header::request(Kind::Request(Operation::Fence), RequestId::from_bits(until));
        self.send(id, header, body, items, &[]);
    }

    /// Sends releases, aborts and commits first, as they free the peer's memory.
    pub(crate) fn flush_held(&mut self, lane: u32) {
        let id = self.lane(lane).id(lane);
        loop {
            let settlements = &mut self.lane_mut(lane).connection.settlements;
            let take = |len: usize| len.saturating_sub(Limits::ITEMS_PER_FRAME);
            let (operation, ids): (_, Vec<u64>) = if !settlements.releases.is_empty() {
                let from = take(settlements.releases.len());
                (Operation::Release, settlements.releases.drain(from..).map(|id| id.to_bits()).collect())
            } else if !settlements.aborts.is_empty() {
                let from = take(settlements.aborts.len());
                (Operation::Abort, settlements.aborts.drain(from..).map(|id| id.to_bits()).collect())
            } else {
                break;
            };
            let count = ids.len();
            let body = self.outbox().append(|out| encode_items(ids.into_iter().map(|id| IdItem { id }), out));
            self.send(id, Header::request(Kind::Request(operation), RequestId::default()), body, count, &[]);
        }
        while !self.lane(lane).connection.settlements.commits.is_empty() {
            let settlements = &mut self.lane_mut(lane).connection.settlements;
            let from = settlements.commits.len().saturating_sub(Limits::ITEMS_PER_FRAME);
            let commits: Vec<(u32, CommitItem)> = settlements.commits.drain(from..).collect();
            let body = self.outbox().append(|out| encode_items(commits.iter().map(|commit| commit.1), out));
            let request = self.open_wire(id, Operation::Commit);
            for &(slice, _) in &commits {
                self.join_wire(request, slice);
            }
            let mut header = Header::request(Kind::Request(Operation::Commit), request);
            header.flags |= self.placement.replica_flags(Operation::Commit, false);
            self.send(id, header, body, commits.len(), &[]);
        }
    }

    /// Sends one frame from the head of the queue.
    pub(crate) fn flush_one(&mut self, lane: u32) -> FlushOutcome {
        let Some(first) = self.next_queued(lane) else { return FlushOutcome::Nothing };
        if !self.window_open(lane) {
            return FlushOutcome::Nothing;
        }
        let path = self.lane(lane).path;
        let copy = if path == Path::Rdma { self.traffic.copies_of(lane).next() } else { None };
        if let Some(DeviceCopy { slice, segment, offset, local, write }) = copy {
            let id = self.lane(lane).id(lane);
            self.outbox().push(Output::CopySegment { lane: id, slice, via: Via::Rdma, segment, offset, local, write });
            // The host may take the copies that follow at once with [`crate::Client::copies`]; otherwise each becomes
            // an output of its own.
            self.traffic.network.lanes.mark_dirty(lane);
            return FlushOutcome::Nothing;
        }
        let request = self.traffic.slices.at(first.index).request;
        if path == Path::Rdma && self.traffic.network.device_buffers.has(&request) {
            return FlushOutcome::Closed(first);
        }
        match (path, request) {
            (Path::Stream | Path::Rdma, Request::Read(..) | Request::Write(..)) if self.may_gather(first.index) => {
                self.send_many(lane, matches!(request, Request::Write(..)));
            }
            (_, Request::Exists(_) | Request::Prefetch(_)) => self.send_digests(lane, Operation::Exists),
            (_, Request::Asks(_, from, count)) => self.send_asked(lane, first.index, from, count),
            (_, Request::Size(_)) => self.send_digests(lane, Operation::Size),
            (_, Request::Remove(_) | Request::RemoveHead(_) | Request::RemoveHeadOf(..))
            | (_, Request::DropCopy(..) | Request::EndExport(..)) => self.send_digests(lane, Operation::Remove),
            (_, Request::RemoveCopy(_)) => self.send_digests(lane, Operation::RemoveCopy),
            (_, Request::Retain(_)) => self.send_digests(lane, Operation::Retain),
            (_, Request::OpenSegment(_)) => self.send_open(lane, first.index),
            (_, Request::List(digest, from)) => self.send_list(lane, first.index, digest, from),
            (_, Request::ListCopy(digest, _)) => {
                let one = PageQuery { names: true, one: true, ..PageQuery::default() };
                self.send_list(lane, first.index, digest, one);
            }
            (Path::Shared, Request::Get(..) | Request::GetRange(..) | Request::GetHead(..) | Request::GetCopy(..)) => {
                self.send_digests(lane, Operation::Lookup);
            }
            (Path::Shared, Request::Put(_, local) | Request::PutAs(_, local, _) | Request::PutCopy(_, local, ..))
                if !self.goes_along(first, local) =>
            {
                self.send_reserve(lane);
            }
            (_, Request::Begin(..)) => self.send_begin(lane),
            (Path::Shared, Request::Fill(..)) => self.send_fills(lane),
            (_, Request::Fill(_, _, session, offset, local)) => {
                self.send_fill(lane, first.index, session, offset, local);
            }
            (_, Request::Seal(..)) => self.send_ids(lane, Operation::Seal),
            (_, Request::Discard(..)) => self.send_ids(lane, Operation::Discard),
            (Path::Shared, Request::PeekRange(..)) => self.send_peeks(lane),
            (_, Request::Get(..) | Request::GetHead(..) | Request::GetCopy(..)) => self.send_each(lane, Operation::Get),
            (_, Request::GetRange(..) | Request::PeekRange(..)) => self.send_each(lane, Operation::GetRange),
            (_, Request::Put(..) | Request::PutAs(..) | Request::PutCopy(..)) => self.send_put(lane, first.index),
            (Path::Stream | Path::Rdma | Path::Mooncake, Request::Read(..)) => self.send_each(lane, Operation::Read),
            (Path::Stream | Path::Rdma | Path::Mooncake, Request::Write(target, local)) => {
                self.send_write(lane, first.index, target, local);
            }
            (Path::Shared | Path::Local | Path::MooncakeRdma | Path::File, Request::Read(target, local)) => {
                return self.copy_segment(lane, first, target, local, false);
            }
            (Path::Shared | Path::Local | Path::MooncakeRdma | Path::File, Request::Write(target, local)) => {
                return self.copy_segment(lane, first, target, local, true);
            }
        }
        FlushOutcome::Sent
    }

    /// Returns true if the payload of a put over shared memory is sent inside its frame. Several puts of a batch share
    /// one round trip to reserve and one to commit; a small put that is alone saves these.
    fn goes_along(&mut self, put: SliceId, local: Local) -> bool {
        local.bytes <= Limits::PAYLOAD_ALONG_BYTES && self.traffic.slices.at(put.index).link.after == NOWHERE
    }

    /// Returns the oldest slice of a lane that was not sent.
    fn next_queued(&self, lane: u32) -> Option<SliceId> {
        let next = self.lane(lane).list.next;
        (next != NOWHERE).then(|| slice_id(next, self.traffic.slices.generation(next)))
    }

    /// Returns true if another request may be in flight on a lane.
    fn window_open(&self, lane: u32) -> bool {
        self.lane(lane).has_room(&self.traffic.network.host.config)
    }

    /// Requests the host to copy a range, by a way that is open; if none is left, the slice needs another lane.
    fn copy_segment(
        &mut self,
        lane: u32,
        id: SliceId,
        target: SegmentTarget,
        local: Local,
        write: bool,
    ) -> FlushOutcome {
        let entry = self.lane(lane);
        let via = match entry.path {
            Path::Shared => entry.way(&self.traffic.network.host.config, target.segment, target.shareable),
            Path::MooncakeRdma => Some(Via::Rdma),
            _ => Some(Via::Own),
        };
        let Some(via) = via else { return FlushOutcome::Unservable(id) };
        self.leave_queue(lane, id.index);
        let slice = self.traffic.slices.at(id.index);
        slice.step(SliceEvent::Place);
        slice.answer.bytes = local.bytes;
        slice.way.via = via;
        let path = self.lane(lane).path;
        let lane = self.lane(lane).id(lane);
        let (segment, offset) = (target.segment, target.offset);
        self.outbox().push(match path {
            Path::File => Output::FileTransfer { lane, slice: id, file: segment, offset, local, write },
            _ => Output::CopySegment { lane, slice: id, via, segment, offset, local, write },
        });
        FlushOutcome::Sent
    }

    /// Removes the oldest queued slice from the queue, and charges it to the window.
    fn leave_queue(&mut self, lane: u32, slice: u32) {
        let now_ns = self.traffic.network.host.now_ns;
        let slice = self.traffic.slices.at(slice);
        slice.sent_ns = now_ns;
        slice.link.sent_bytes = slice.weight_bytes();
        self.traffic.network.lanes[lane].sends(slice);
    }

    /// Removes the oldest queued slice from the queue to be sent in a frame.
    fn take_queued(&mut self, lane: u32, slice: u32) {
        self.leave_queue(lane, slice);
        self.traffic.slices.at(slice).step(SliceEvent::Send);
    }

    /// Adds a slice to those that wait for the reply to a request.
    fn join_wire(&mut self, request: RequestId, slice: u32) {
        self.traffic.wires.join(request, slice);
        self.traffic.slices.at(slice).wire = request;
    }

    /// Registers a new request in flight on a lane.
    fn open_wire(&mut self, lane: LaneId, operation: Operation) -> RequestId {
        self.traffic.network.lanes[lane.index].load.outstanding += 1;
        self.traffic.wires.open(lane, operation)
    }

    /// Returns the epoch by which a slice's request is routed, and the replica flags of its frame.
    fn routing_of(&self, slice: u32) -> (Epoch, FrameFlags) {
        let slice = self.traffic.slices.peek(slice);
        let (epoch, flags) = self.placement.routing_of(slice, || self.traffic.batches.peek(slice.batch.index).epoch);
        // The shard compares the bytes with their checksum before it sends them again.
        (epoch, flags.with(FrameFlags::SUM_REPLIES, slice.way.resend == Resend::ReportsDamage))
    }

    /// Returns true if payloads of segments carry a checksum on this lane.
    fn sums_segments(&self, lane: u32) -> bool {
        self.lane(lane).sums_segments(&self.traffic.network.host.config)
    }

    /// Returns the remaining time of a slice, for the header.
    fn deadline_us(&self, slice: u32) -> u32 {
        let batch = self.traffic.batches.peek(self.traffic.slices.peek(slice).batch.index);
        let left_ns = batch.deadline_ns.saturating_sub(self.traffic.network.host.now_ns);
        u32::try_from(left_ns / 1000).unwrap_or(u32::MAX).max(1)
    }

    /// Sends a slice with its payload in a frame of its own.
    fn send_payload(&mut self, lane: u32, slice: u32, operation: Operation, local: Local, checksum: bool, body: &[u8]) {
        let id = self.lane(lane).id(lane);
        let body = self.outbox().append(|out| out.extend_from_slice(body));
        let request = self.open_wire(id, operation);
        let stated = checksum.then(|| self.traffic.stated_checksum(slice));
        let mut header = Header::request(Kind::Request(operation), request).with_payload(local.bytes, stated);
        let (epoch, routing) = self.routing_of(slice);
        let replicas = self.placement.replica_flags(operation, false);
        (header.argument, header.flags) = (epoch.0, header.flags | routing | replicas);
        header.deadline_us = self.deadline_us(slice);
        self.take_queued(lane, slice);
        self.join_wire(request, slice);
        self.send(id, header, body, 1, &[local]);
    }

    /// Sends a frame.
    fn send(&mut self, lane: LaneId, header: Header, body: Range<usize>, items: usize, payload: &[Local]) {
        let epoch = if header.argument == 0 { self.placement.epoch().0 } else { header.argument };
        self.outbox().send(lane, header.with_argument(epoch), body, items, payload);
    }

    /// Sends a frame without a payload, whose reply completes no slice.
    pub(crate) fn send_alone(&mut self, lane: LaneId, header: Header, body: &[u8]) {
        let body = self.outbox().append(|out| out.extend_from_slice(body));
        self.send(lane, header, body, 1, &[]);
    }
}

//! Replies: matches each to its in-flight request, or counts it as stale, and advances its slices.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::map::ReplicaSet;
use kvplane_proto::message::{
    Bitmap, CommitReply, KeyPage, Kind, LookupReply, Operation, ReserveReply, RetainReply, SegmentDescriptor,
    SizeReply, Welcome, decode_items,
};
use kvplane_proto::status::Status;

use super::{ProtocolViolation, Router};
use crate::network::{Cause, Endpoint, Refusal, check_peer};
use crate::tables::{HeldHandle, NOWHERE, Resend, SliceEvent, readable, slice_id};
use crate::types::{LaneId, Local, Output, Path, PayloadTo, Request};

impl Router {
    pub(crate) fn accept(
        &mut self,
        lane: LaneId,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, ProtocolViolation> {
        let Kind::Reply(operation) = header.kind else { return Err(ProtocolViolation) };
        if matches!(operation, Operation::Hello | Operation::Prove) {
            self.welcome(lane, operation, header, body)?;
            return Ok(PayloadTo::Discard);
        }
        if operation == Operation::Fence {
            self.traffic
                .network
                .fence_answered(lane.index, header.status, header.request.to_bits())
                .ok_or(ProtocolViolation)?;
            return Ok(PayloadTo::Discard);
        }
        let wire = self.traffic.wires.get(header.request);
        let Some(wire) = wire.filter(|wire| wire.lane == lane) else {
            self.traffic.books.counters.stale_frames += 1;
            return Ok(PayloadTo::Discard);
        };
        if wire.operation != operation {
            return Err(ProtocolViolation);
        }
        if operation == Operation::ReadMany && header.status == Status::Ok {
            return self.traffic.on_many_payload(header).ok_or(ProtocolViolation);
        }
        let wire = self.traffic.close_wire(header.request);
        let left = wire.slices.iter().filter(|slice| **slice == NOWHERE).count();
        if left > 0 {
            self.traffic.network.lanes[lane.index].connection.forget_detached(header.request);
            self.replicas.left_early(left);
        }
        // Besides hedged gets, slices leave their wire only with the loss of its lane, which removes the wire too.
        let outcome = match operation {
            Operation::Get | Operation::GetRange | Operation::Read => self.on_payload(wire.slices[0], header),
            Operation::Fill if self.traffic.network.lanes[lane.index].path == Path::Shared => {
                self.on_group(lane.index, &wire.slices, header, body).map(|()| PayloadTo::Discard)
            }
            Operation::Put | Operation::Write | Operation::Fill => {
                self.traffic.slices.at(wire.slices[0]).take_answer(header);
                self.settle(wire.slices[0], header.status);
                Ok(PayloadTo::Discard)
            }
            Operation::ReadMany | Operation::WriteMany => {
                self.on_many_settled(&wire.slices, header).map(|()| PayloadTo::Discard).ok_or(ProtocolViolation)
            }
            _ => self.on_group(lane.index, &wire.slices, header, body).map(|()| PayloadTo::Discard),
        };
        // After an error the wire is gone, and its slices are found by their lane when that is gone.
        self.traffic.wires.give_back(wire);
        outcome
    }

    fn welcome(
        &mut self,
        lane: LaneId,
        operation: Operation,
        header: &Header,
        body: &[u8],
    ) -> Result<(), ProtocolViolation> {
        let entry = &self.traffic.network.lanes[lane.index];
        match (entry.state, operation, header.status) {
            (Endpoint::Greeting, Operation::Hello, Status::Prove) => {
                match self.traffic.network.challenged(lane.index, body) {
                    Ok((header, proof)) => self.sender().send_alone(lane, header, &proof),
                    Err(refusal) => return self.not_the_peer(lane.index, &refusal),
                }
                return Ok(());
            }
            (Endpoint::Greeting, _, Status::Ok) => {}
            (Endpoint::Greeting, _, status) => return self.not_the_peer(lane.index, &Refusal::by_peer(status)),
            // A renewed ticket was proven; if the shard does not accept it, it closes the connection.
            (Endpoint::Ready, Operation::Prove, _) if entry.connection.challenged.is_some() => return Ok(()),
            _ => return Err(ProtocolViolation),
        }
        let welcome = match self.traffic.network.checked_welcome(lane.index, operation, body) {
            Ok(welcome) => Welcome::decode(welcome).map_err(|_| ProtocolViolation)?,
            Err(refusal) => return self.not_the_peer(lane.index, &refusal),
        };
        let entry = &self.traffic.network.lanes[lane.index];
        match check_peer(&self.traffic.network.peers[entry.peer.0].address, &welcome) {
            Ok(()) => self.traffic.network.welcomed(lane.index),
            Err(refusal) => return self.not_the_peer(lane.index, &refusal),
        }
        Ok(())
    }

    /// Handles a process at the peer's address that is not the peer, or refuses the connection. On a path within this
    /// host this does not apply to the peer as a whole: in another namespace another process may have its address. Then
    /// the peer's other path decides.
    fn not_the_peer(&mut self, lane: u32, refusal: &Refusal) -> Result<(), ProtocolViolation> {
        if self.traffic.network.lanes[lane].path == Path::Shared && self.traffic.network.close_path(lane, &refusal.why)
        {
            self.traffic.reset_lane(lane, Cause::Withdrawn);
            return Ok(());
        }
        self.traffic.network.lanes[lane].connection.refusal = Some(refusal.status);
        Err(ProtocolViolation)
    }

    /// Handles the reply with an object or a range: its payload follows.
    fn on_payload(&mut self, index: u32, header: &Header) -> Result<PayloadTo, ProtocolViolation> {
        if index == NOWHERE {
            return Ok(PayloadTo::Discard);
        }
        let id = slice_id(index, self.traffic.slices.generation(index));
        let slice = self.traffic.slices.at(index);
        let Some(local) = slice.request.local() else { return Err(ProtocolViolation) };
        if header.status != Status::Ok {
            if header.status == Status::BufferTooSmall {
                slice.answer.bytes = header.argument;
            }
            self.settle(index, header.status);
            return Ok(PayloadTo::Discard);
        }
        let of_segment = matches!(slice.request, Request::Read(..));
        let whole_range = of_segment || matches!(slice.request, Request::GetRange(..) | Request::PeekRange(..));
        let bytes = header.payload_bytes;
        if bytes == 0 || bytes > local.bytes || (whole_range && bytes != local.bytes) {
            return Err(ProtocolViolation);
        }
        let lane = slice.link.lane;
        let unchecked =
            of_segment && !self.traffic.network.lanes[lane].sums_segments(&self.traffic.network.host.config);
        if header.checksum().is_none() && !unchecked {
            return Err(ProtocolViolation);
        }
        if !of_segment {
            self.note_replicas(index, header.flags.replicas());
        }
        let slice = self.traffic.slices.at(index);
        slice.answer.bytes = bytes;
        slice.answer.version = header.argument;
        slice.answer.expected_checksum = header.checksum();
        slice.step(SliceEvent::Payload);
        Ok(PayloadTo::Local { local: Local { bytes, ..local }, slice: id })
    }

    /// Completes a slice with a final outcome; retries it after a transient one.
    pub(crate) fn settle(&mut self, index: u32, status: Status) {
        if self.back_to_owner(index, status) {
            return;
        }
        let passing = matches!(status, Status::WrongOwner | Status::Busy | Status::Corrupt);
        if passing || matches!(status, Status::NoKey | Status::TicketEnded | Status::TlsFailed) {
            self.retry(index, status);
        } else {
            self.traffic.leave_lane(index);
            self.complete(index, status);
        }
    }

    /// Handles the outcome of moving a slice's bytes.
    pub(crate) fn copy_outcome(&mut self, index: u32, result: Result<(), Status>) {
        match result {
            Ok(()) => {
                self.traffic.leave_lane(index);
                self.complete(index, Status::Ok);
            }
            Err(Status::Corrupt) => {
                self.traffic.books.counters.corrupt += 1;
                self.retry(index, Status::Corrupt);
            }
            Err(status) => self.settle(index, status),
        }
    }

    /// Closes the way that was tried for a segment, and sends the slice over the next way. That is no failed attempt:
    /// on each connection a way of a segment is closed once, and there may be more connections than attempts.
    pub(crate) fn way_closed(&mut self, lane: u32, index: u32) {
        let slice = self.traffic.slices.at(index);
        let via = slice.way.via;
        let (Request::Read(target, _) | Request::Write(target, _)) = slice.request else {
            self.settle(index, Status::Unsupported);
            return;
        };
        let entry = &mut self.traffic.network.lanes[lane];
        if matches!(entry.path, Path::Shared | Path::Rdma) {
            entry.close_way(target.segment, via);
            self.send_again(index, None);
        } else {
            self.settle(index, Status::Unsupported);
        }
    }

    /// Records the report of a shard that has served an object: the replica owners that have it too. Only reports of
    /// the owner count.
    fn note_replicas(&mut self, index: u32, replicas: ReplicaSet) {
        let slice = self.traffic.slices.at(index);
        let of_first = !slice.is_of_replica() && !self.placement.is_of_sources();
        slice.answer.replicas = if of_first { replicas } else { ReplicaSet::NONE };
        if let (true, true, Some(digest)) =
            (of_first, self.traffic.network.host.config.spread, readable(&slice.request))
        {
            let sent_ns = slice.sent_ns;
            self.replicas.told(digest, replicas, sent_ns, self.traffic.network.host.now_ns);
        }
    }

    /// Handles the received payload of gathered reads.
    pub(crate) fn many_done(&mut self, request: RequestId, good: bool) {
        let wire = self.traffic.close_wire(request);
        self.traffic.books.counters.corrupt += u64::from(!good);
        for &index in &wire.slices {
            self.settle(index, if good { Status::Ok } else { Status::Corrupt });
        }
        self.traffic.wires.give_back(wire);
    }

    /// Handles the reply to gathered writes, or the refusal of gathered ranges. Returns `None` if it violates the
    /// protocol.
    fn on_many_settled(&mut self, slices: &[u32], header: &Header) -> Option<()> {
        let of_a_range =
            matches!(header.status, Status::Stale | Status::Unauthorized | Status::OutOfRange | Status::BadRequest);
        if of_a_range {
            let bad = usize::try_from(header.argument).ok().filter(|&bad| bad < slices.len())?;
            for (position, &index) in slices.iter().enumerate() {
                if position == bad {
                    self.settle(index, header.status);
                } else {
                    self.traffic.slices.at(index).way.resend = Resend::Alone;
                    self.send_again(index, None);
                }
            }
            return Some(());
        }
        for &index in slices {
            let slice = self.traffic.slices.at(index);
            if header.status == Status::Ok {
                slice.answer.bytes = slice.weight_bytes();
            }
            self.settle(index, header.status);
        }
        Some(())
    }

    fn on_group(&mut self, lane: u32, slices: &[u32], header: &Header, body: &[u8]) -> Result<(), ProtocolViolation> {
        let Kind::Reply(operation) = header.kind else { return Err(ProtocolViolation) };
        if header.status != Status::Ok {
            if operation == Operation::Commit {
                // The state of the reservations is unknown, so they can be neither committed again nor aborted.
                return Err(ProtocolViolation);
            }
            for &slice in slices.iter().filter(|slice| **slice != NOWHERE) {
                self.settle(slice, header.status);
            }
            return Ok(());
        }
        // A hedged request that has left its frame is `NOWHERE`. Of a query of many objects nothing is left then, and
        // the reply has more items than slices.
        if slices == [NOWHERE] && header.items > 1 {
            return Ok(());
        }
        if slices[0] != NOWHERE && matches!(self.traffic.slices.peek(slices[0]).request, Request::Asks(..)) {
            self.traffic.existence_answered(slices[0], header, body).ok_or(ProtocolViolation)?;
            self.settle(slices[0], Status::Ok);
            return Ok(());
        }
        if header.items as usize != slices.len() {
            return Err(ProtocolViolation);
        }
        match operation {
            Operation::Remove | Operation::RemoveCopy | Operation::Exists | Operation::Discard => {
                let (there, heads) = Bitmap::decode_two(body, header.items).ok_or(ProtocolViolation)?;
                for (position, &slice) in slices.iter().enumerate().filter(|(_, slice)| **slice != NOWHERE) {
                    let striped = heads.as_ref().is_some_and(|heads| heads.get(position));
                    let status = if there.get(position) { Status::Ok } else { Status::NotFound };
                    self.settle(slice, if striped { Status::Striped } else { status });
                }
            }
            Operation::Size => {
                let items = decode_items::<SizeReply>(body, header.items).ok_or(ProtocolViolation)?;
                for (&slice, item) in slices.iter().zip(items).filter(|(slice, _)| **slice != NOWHERE) {
                    self.traffic.slices.at(slice).answer.bytes = item.bytes;
                    self.settle(slice, item.status);
                }
            }
            Operation::Retain => {
                let items = decode_items::<RetainReply>(body, header.items).ok_or(ProtocolViolation)?;
                for (&slice, item) in slices.iter().zip(items) {
                    self.traffic.slices.at(slice).answer.bytes = item.objects;
                    self.settle(slice, item.status);
                }
            }
            Operation::OpenSegment => {
                SegmentDescriptor::decode(body).map_err(|_| ProtocolViolation)?;
                let batch = self.traffic.slices.at(slices[0]).batch;
                self.traffic.batches.describe(batch, body.to_vec());
                self.settle(slices[0], Status::Ok);
            }
            Operation::List => {
                KeyPage::decode(body).ok_or(ProtocolViolation)?;
                let batch = self.traffic.slices.at(slices[0]).batch;
                self.traffic.batches.describe(batch, body.to_vec());
                self.settle(slices[0], Status::Ok);
            }
            Operation::Lookup | Operation::Peek => {
                let items = decode_items::<LookupReply>(body, header.items).ok_or(ProtocolViolation)?;
                for (&slice, item) in slices.iter().zip(items) {
                    match slice {
                        NOWHERE if item.status == Status::Ok => {
                            self.traffic.network.lanes[lane].connection.settlements.releases.push(item.pin);
                        }
                        NOWHERE => {}
                        slice => self.on_lookup(slice, &item)?,
                    }
                }
            }
            _ => return self.on_places(operation, slices, header, body),
        }
        Ok(())
    }

    /// Handles replies about reservations and put sessions, and about the objects committed from them.
    fn on_places(
        &mut self,
        operation: Operation,
        slices: &[u32],
        header: &Header,
        body: &[u8],
    ) -> Result<(), ProtocolViolation> {
        match operation {
            Operation::Begin => {
                let items = decode_items::<ReserveReply>(body, header.items).ok_or(ProtocolViolation)?;
                for (&slice, item) in slices.iter().zip(items) {
                    self.traffic.slices.at(slice).answer.version = item.reservation.to_bits();
                    self.settle(slice, item.status);
                }
            }
            Operation::Seal => {
                for (&slice, item) in
                    slices.iter().zip(decode_items::<CommitReply>(body, header.items).ok_or(ProtocolViolation)?)
                {
                    let entry = self.traffic.slices.at(slice);
                    (entry.answer.version, entry.answer.replicas) = (item.version.0, item.flags.replicas());
                    self.settle(slice, item.status);
                }
            }
            Operation::Reserve | Operation::Fill => {
                let items = decode_items::<ReserveReply>(body, header.items).ok_or(ProtocolViolation)?;
                for (&slice, item) in slices.iter().zip(items) {
                    if let Some(status) = self.traffic.reserved(slice, &item) {
                        self.settle(slice, status);
                    }
                }
            }
            Operation::Commit => {
                for (&slice, item) in
                    slices.iter().zip(decode_items::<CommitReply>(body, header.items).ok_or(ProtocolViolation)?)
                {
                    let entry = self.traffic.slices.at(slice);
                    entry.answer.held = HeldHandle::Nothing;
                    entry.answer.bytes = entry.weight_bytes();
                    (entry.answer.version, entry.answer.replicas) = (item.version.0, item.flags.replicas());
                    self.settle(slice, item.status);
                }
            }
            _ => return Err(ProtocolViolation),
        }
        Ok(())
    }

    fn on_lookup(&mut self, index: u32, item: &LookupReply) -> Result<(), ProtocolViolation> {
        let id = slice_id(index, self.traffic.slices.generation(index));
        let slice = self.traffic.slices.at(index);
        let (lane, request) = (slice.link.lane, slice.request);
        if item.status != Status::Ok {
            self.settle(index, item.status);
            return Ok(());
        }
        if item.bytes == 0 {
            return Err(ProtocolViolation);
        }
        self.note_replicas(index, item.flags.replicas());
        let slice = self.traffic.slices.at(index);
        slice.answer.version = item.version.0;
        let (offset, local, checksum) = match request {
            Request::Get(_, local) | Request::GetHead(_, local) | Request::GetCopy(_, local, _)
                if item.bytes <= local.bytes =>
            {
                (item.offset, Local { bytes: item.bytes, ..local }, Some(item.checksum))
            }
            Request::GetRange(_, offset, local) | Request::PeekRange(_, offset, local)
                if offset + local.bytes <= item.bytes =>
            {
                (item.offset.saturating_add(offset), local, None)
            }
            _ => {
                let range = matches!(request, Request::GetRange(..) | Request::PeekRange(..));
                slice.answer.bytes = if range { 0 } else { item.bytes };
                self.traffic.network.lanes[lane].connection.settlements.releases.push(item.pin);
                self.traffic.network.lanes.mark_dirty(lane);
                self.settle(index, if range { Status::OutOfRange } else { Status::BufferTooSmall });
                return Ok(());
            }
        };
        slice.answer.bytes = local.bytes;
        slice.answer.held = HeldHandle::Pin(item.pin);
        slice.step(SliceEvent::Place);
        let lane = self.traffic.network.lanes[lane].id(lane);
        self.traffic.network.host.outbox.push(Output::CopyOut { lane, slice: id, offset, local, checksum });
        Ok(())
    }
}

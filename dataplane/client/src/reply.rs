//! Answers come in: each is matched to its open request or counted as stale, and moves its slices on.

use kvplane_proto::flags::FrameFlags;
use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::{Incarnation, NodeId, RequestId};
use kvplane_proto::message::{
    Bitmap, CommitItem, CommitReply, KeyPage, Kind, LookupReply, Operation, ReserveReply, SegmentDescriptor, SizeReply,
    Welcome, decode_items,
};
use kvplane_proto::status::Status;

use super::Client;
use super::lane::{Cause, Endpoint};
use super::path::Path;
use super::table::{HeldHandle, NOWHERE, SliceEvent, SliceState, Wire, slice_id};
use super::types::{LaneId, Local, Output, PayloadTo, Request, SliceId};

/// A frame that no honest peer sends.
struct ProtocolViolation;

impl Client {
    /// A frame arrived on a lane. The host reads its payload, if any, to where the answer says.
    pub fn frame(&mut self, lane: LaneId, header: &Header, body: &[u8], now_ns: u64) -> PayloadTo {
        self.now_ns = now_ns;
        // What still arrives on a lane that is being reset is not looked at: its slices are found when it is gone.
        if self.current(lane).is_none_or(|entry| entry.state == Endpoint::Resetting) {
            self.counters.stale_frames += 1;
            return PayloadTo::Discard;
        }
        match self.accept(lane, header, body) {
            Ok(payload) => payload,
            Err(ProtocolViolation) => {
                self.reset_lane(lane.index, Cause::Peer);
                PayloadTo::Discard
            }
        }
    }

    fn accept(&mut self, lane: LaneId, header: &Header, body: &[u8]) -> Result<PayloadTo, ProtocolViolation> {
        let Kind::Reply(operation) = header.kind else { return Err(ProtocolViolation) };
        if matches!(operation, Operation::Hello | Operation::Prove) {
            self.welcome(lane, operation, header, body)?;
            return Ok(PayloadTo::Discard);
        }
        if operation == Operation::Fence {
            self.fence_answered(lane, header).ok_or(ProtocolViolation)?;
            return Ok(PayloadTo::Discard);
        }
        let wire = self.wires.get(header.request.index, header.request.generation);
        let Some(wire) = wire.filter(|wire| wire.lane == lane) else {
            self.counters.stale_frames += 1;
            return Ok(PayloadTo::Discard);
        };
        if wire.operation != operation {
            return Err(ProtocolViolation);
        }
        if operation == Operation::ReadMany && header.status == Status::Ok {
            return self.on_many_payload(header).ok_or(ProtocolViolation);
        }
        let wire = self.close_wire(header.request);
        let left = wire.slices.iter().filter(|slice| **slice == NOWHERE).count();
        if left > 0 {
            self.forget_detached(lane.index, header.request);
            self.left_early(left);
        }
        // Only gets leave their wire otherwise than by the loss of its lane, which removes the wire too.
        let outcome = match operation {
            Operation::Get | Operation::GetRange | Operation::Read => self.on_payload(wire.slices[0], header),
            Operation::Fill if self.lanes[lane.index as usize].path == Path::Shared => {
                self.on_group((lane.index, operation), &wire.slices, header, body).map(|()| PayloadTo::Discard)
            }
            Operation::Put | Operation::Write | Operation::Fill => {
                self.on_single(wire.slices[0], header);
                Ok(PayloadTo::Discard)
            }
            Operation::ReadMany | Operation::WriteMany => {
                self.on_many_settled(&wire.slices, header).map(|()| PayloadTo::Discard).ok_or(ProtocolViolation)
            }
            _ => self.on_group((lane.index, operation), &wire.slices, header, body).map(|()| PayloadTo::Discard),
        };
        // After an error the wire is gone, and the slices are found by their lane when it is.
        self.wires.recycle(wire);
        outcome
    }

    /// The request has its answer: its slices are the caller's to move on.
    pub(super) fn close_wire(&mut self, request: RequestId) -> Wire {
        let wire = self.wires.remove(request.index, Wire::VACANT);
        self.lanes[wire.lane.index as usize].load.outstanding -= 1;
        self.mark_dirty(wire.lane.index);
        wire
    }

    fn welcome(
        &mut self,
        lane: LaneId,
        operation: Operation,
        header: &Header,
        body: &[u8],
    ) -> Result<(), ProtocolViolation> {
        let entry = &self.lanes[lane.index as usize];
        match (entry.state, operation, header.status) {
            (Endpoint::Greeting, Operation::Hello, Status::Prove) => {
                let (header, body) = match self.challenged(lane.index, body) {
                    Ok(proof) => proof,
                    Err((status, why)) => return self.not_the_peer(lane.index, status, &why),
                };
                let body = self.outbox.append(|out| out.extend_from_slice(&body));
                self.send(lane, header, body, 1, &[]);
                return Ok(());
            }
            (Endpoint::Greeting, _, Status::Ok) => {}
            (Endpoint::Greeting, _, status) => {
                let why = format!("who listens there refuses us: {status}");
                return self.not_the_peer(lane.index, status, &why);
            }
            // A newer ticket was shown; where it is not taken, the connection's end says so.
            (Endpoint::Ready, Operation::Prove, _) if entry.connection.challenged.is_some() => return Ok(()),
            _ => return Err(ProtocolViolation),
        }
        let welcome = match self.checked_welcome(lane.index, operation, body) {
            Ok(welcome) => Welcome::decode(welcome).map_err(|_| ProtocolViolation)?,
            Err((status, why)) => return self.not_the_peer(lane.index, status, &why),
        };
        let entry = &self.lanes[lane.index as usize];
        let wanted = &self.peers[entry.peer.0 as usize].address;
        let other = wanted.node != NodeId(0) && (wanted.node, wanted.shard) != (welcome.node, welcome.shard)
            || wanted.incarnation != Incarnation(0) && wanted.incarnation != welcome.incarnation;
        if welcome.version != VERSION || other {
            let why = format!("who listens there is another than the peer: {:?}, not {:?}", welcome.node, wanted.node);
            return self.not_the_peer(lane.index, if other { Status::WrongOwner } else { Status::Incompatible }, &why);
        }
        self.welcomed(lane.index);
        Ok(())
    }

    /// Who answers a greeting is not who was asked for, or refuses. A path of this host alone does not say that of the
    /// peer: another namespace may have another process at its address. Then the peer's other path decides.
    fn not_the_peer(&mut self, lane: u32, status: Status, why: &str) -> Result<(), ProtocolViolation> {
        if self.lanes[lane as usize].path == Path::Shared && self.close_path(lane, why) {
            self.reset_lane(lane, Cause::Withdrawn);
            return Ok(());
        }
        self.lanes[lane as usize].connection.refusal = Some(status);
        Err(ProtocolViolation)
    }

    /// An object or a range: its payload follows.
    fn on_payload(&mut self, index: u32, header: &Header) -> Result<PayloadTo, ProtocolViolation> {
        if index == NOWHERE {
            return Ok(PayloadTo::Discard);
        }
        let id = slice_id(index, self.slices.generation(index));
        let slice = self.slices.at(index);
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
        let unchecked = of_segment && !self.sums_segments(lane);
        if header.checksum().is_none() && !unchecked {
            return Err(ProtocolViolation);
        }
        if !of_segment {
            self.note_replicated(index, header.flags.has(FrameFlags::REPLICATED));
        }
        let slice = self.slices.at(index);
        slice.answer.bytes = bytes;
        slice.answer.version = header.argument;
        slice.answer.expected_checksum = header.checksum();
        slice.step(SliceEvent::Payload);
        Ok(PayloadTo::Local { local: Local { bytes, ..local }, slice: id })
    }

    /// The payload of a frame is in the caller's memory; `checksum` is what its bytes sum to, where it was computed.
    pub fn payload_done(&mut self, slice: SliceId, checksum: Option<u64>, now_ns: u64) {
        self.now_ns = now_ns;
        let Some(entry) = self.slices.get(slice.index, slice.generation) else { return };
        if entry.state != SliceState::Receiving {
            return;
        }
        let good = entry.answer.expected_checksum.is_none() || entry.answer.expected_checksum == checksum;
        let wire = entry.wire;
        if self.wires.get(wire.index, wire.generation).is_some() {
            self.many_done(wire, good);
            return;
        }
        self.finish_copy(slice.index, good);
    }

    fn finish_copy(&mut self, index: u32, good: bool) {
        if good {
            self.leave_lane(index);
            self.complete(index, Status::Ok);
        } else {
            self.counters.corrupt += 1;
            self.retry(index, Status::Corrupt);
        }
    }

    fn on_single(&mut self, index: u32, header: &Header) {
        let slice = self.slices.at(index);
        if header.status == Status::Ok {
            slice.answer.bytes = slice.weight_bytes();
            slice.answer.version = header.argument;
            slice.answer.is_replicated = header.flags.has(FrameFlags::REPLICATED);
        }
        self.settle(index, header.status);
    }

    /// Final outcomes complete a slice; passing ones send it again.
    pub(super) fn settle(&mut self, index: u32, status: Status) {
        if self.back_to_first(index, status) {
            return;
        }
        let passing = matches!(status, Status::WrongOwner | Status::Busy | Status::Corrupt);
        if passing || matches!(status, Status::NoKey | Status::TicketEnded | Status::TlsFailed) {
            self.retry(index, status);
        } else {
            self.leave_lane(index);
            self.complete(index, status);
        }
    }

    /// From where on, and how many objects of its batch a request asks for, if it does that.
    fn asked_of(&self, slice: u32) -> Option<(u32, u32)> {
        // A get that left its request for the second owner is nowhere; such a question never is.
        match self.slices.peek((slice != NOWHERE).then_some(slice)?).request {
            Request::Asks(_, from, count) => Some((from, count)),
            _ => None,
        }
    }

    fn on_group(
        &mut self,
        (lane, operation): (u32, Operation),
        slices: &[u32],
        header: &Header,
        body: &[u8],
    ) -> Result<(), ProtocolViolation> {
        if header.status != Status::Ok {
            if operation == Operation::Commit {
                // What became of the reservations is not said, so they can be neither committed again nor aborted.
                return Err(ProtocolViolation);
            }
            for &slice in slices.iter().filter(|slice| **slice != NOWHERE) {
                self.settle(slice, header.status);
            }
            return Ok(());
        }
        if let Some(asked) = self.asked_of(slices[0]) {
            return self.on_asked(slices[0], asked, header, body).ok_or(ProtocolViolation);
        }
        if header.items as usize != slices.len() {
            return Err(ProtocolViolation);
        }
        match operation {
            Operation::Remove | Operation::RemoveCopy | Operation::Exists | Operation::Discard => {
                let (there, heads) = Bitmap::decode_two(body, header.items).ok_or(ProtocolViolation)?;
                for (position, &slice) in slices.iter().enumerate() {
                    let striped = heads.as_ref().is_some_and(|heads| heads.get(position));
                    let status = if there.get(position) { Status::Ok } else { Status::NotFound };
                    self.settle(slice, if striped { Status::Striped } else { status });
                }
            }
            Operation::Size => {
                for (&slice, item) in
                    slices.iter().zip(decode_items::<SizeReply>(body, header.items).ok_or(ProtocolViolation)?)
                {
                    self.slices.at(slice).answer.bytes = item.bytes;
                    self.settle(slice, item.status);
                }
            }
            Operation::OpenSegment => {
                SegmentDescriptor::decode(body).map_err(|_| ProtocolViolation)?;
                let batch = self.slices.at(slices[0]).batch;
                self.descriptions.insert(batch, body.to_vec());
                self.settle(slices[0], Status::Ok);
            }
            Operation::List => {
                KeyPage::decode(body).ok_or(ProtocolViolation)?;
                let batch = self.slices.at(slices[0]).batch;
                self.descriptions.insert(batch, body.to_vec());
                self.settle(slices[0], Status::Ok);
            }
            Operation::Lookup | Operation::Peek => {
                let items = decode_items::<LookupReply>(body, header.items).ok_or(ProtocolViolation)?;
                for (&slice, item) in slices.iter().zip(items) {
                    match slice {
                        NOWHERE if item.status == Status::Ok => {
                            self.lanes[lane as usize].connection.owed.releases.push(item.pin)
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

    /// Answers about room for objects, and about objects that are made of it.
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
                    self.slices.at(slice).answer.version = item.reservation.to_bits();
                    self.settle(slice, item.status);
                }
            }
            Operation::Seal => {
                for (&slice, item) in
                    slices.iter().zip(decode_items::<CommitReply>(body, header.items).ok_or(ProtocolViolation)?)
                {
                    let entry = self.slices.at(slice);
                    (entry.answer.version, entry.answer.is_replicated) = (item.version.0, item.flags.is_replicated());
                    self.settle(slice, item.status);
                }
            }
            Operation::Reserve | Operation::Fill => {
                let items = decode_items::<ReserveReply>(body, header.items).ok_or(ProtocolViolation)?;
                slices.iter().zip(items).for_each(|(&slice, item)| self.on_reserve(slice, &item));
            }
            Operation::Commit => {
                for (&slice, item) in
                    slices.iter().zip(decode_items::<CommitReply>(body, header.items).ok_or(ProtocolViolation)?)
                {
                    let entry = self.slices.at(slice);
                    entry.answer.held = HeldHandle::Nothing;
                    entry.answer.bytes = entry.weight_bytes();
                    (entry.answer.version, entry.answer.is_replicated) = (item.version.0, item.flags.is_replicated());
                    self.settle(slice, item.status);
                }
            }
            _ => return Err(ProtocolViolation),
        }
        Ok(())
    }

    fn on_lookup(&mut self, index: u32, item: &LookupReply) -> Result<(), ProtocolViolation> {
        let id = slice_id(index, self.slices.generation(index));
        let slice = self.slices.at(index);
        let (lane, request) = (slice.link.lane, slice.request);
        if item.status != Status::Ok {
            self.settle(index, item.status);
            return Ok(());
        }
        if item.bytes == 0 {
            return Err(ProtocolViolation);
        }
        self.note_replicated(index, item.flags.is_replicated());
        let slice = self.slices.at(index);
        slice.answer.version = item.version.0;
        let (offset, local, checksum) = match request {
            Request::Get(_, local) | Request::GetHead(_, local) if item.bytes <= local.bytes => {
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
                self.lanes[lane as usize].connection.owed.releases.push(item.pin);
                self.mark_dirty(lane);
                self.settle(index, if range { Status::OutOfRange } else { Status::BufferTooSmall });
                return Ok(());
            }
        };
        slice.answer.bytes = local.bytes;
        slice.answer.held = HeldHandle::Pin(item.pin);
        slice.step(SliceEvent::Place);
        let lane = self.lanes[lane as usize].id(lane);
        self.outbox.push(Output::CopyOut { lane, slice: id, offset, local, checksum });
        Ok(())
    }

    fn on_reserve(&mut self, index: u32, item: &ReserveReply) {
        let id = slice_id(index, self.slices.generation(index));
        let slice = self.slices.at(index);
        if item.status != Status::Ok {
            self.settle(index, item.status);
            return;
        }
        let local = slice.request.source().expect("a reservation is asked for puts and fills only");
        slice.answer.held = HeldHandle::Reservation(item.reservation);
        slice.step(SliceEvent::Place);
        let lane = self.lanes[slice.link.lane as usize].id(slice.link.lane);
        self.outbox.push(Output::CopyIn { lane, slice: id, offset: item.offset, local });
    }

    /// The host finished a copy or a transfer of a file: `Ok` and the checksum of the bytes where the slice was a put,
    /// or why it could not be done. `Unsupported` for a segment of the shared path says that this way is closed.
    pub fn copied(&mut self, lane: LaneId, slice: SliceId, result: Result<u64, Status>, now_ns: u64) {
        self.now_ns = now_ns;
        let live = self.current(lane).is_some();
        let Some(entry) = self.slices.get_mut(slice.index, slice.generation) else { return };
        if !live || entry.link.lane != lane.index || entry.state != SliceState::Copying {
            return;
        }
        let (held, expected) = (entry.answer.held, entry.answer.expected_checksum);
        debug_assert!(expected.is_none(), "shared copies are checked by the host");
        self.mark_dirty(lane.index);
        match (held, result) {
            (HeldHandle::Reservation(reservation), Ok(checksum)) => {
                let entry = self.slices.at(slice.index);
                entry.step(SliceEvent::Copied);
                let commit = CommitItem { reservation, checksum };
                self.lanes[lane.index as usize].connection.owed.commits.push((slice.index, commit));
            }
            (HeldHandle::Reservation(reservation), Err(status)) => {
                self.lanes[lane.index as usize].connection.owed.aborts.push(reservation);
                self.settle(slice.index, status);
            }
            (HeldHandle::Pin(pin), result) => {
                self.lanes[lane.index as usize].connection.owed.releases.push(pin);
                self.copy_outcome(slice.index, result.map(|_| ()));
            }
            (HeldHandle::Nothing, Err(Status::Unsupported)) => self.way_closed(lane.index, slice.index),
            (HeldHandle::Nothing, result) => self.copy_outcome(slice.index, result.map(|_| ())),
        }
    }

    /// A segment cannot be moved in the way that was tried: the next is, as another attempt.
    fn way_closed(&mut self, lane: u32, index: u32) {
        let slice = self.slices.at(index);
        let via = slice.via;
        let (Request::Read(target, _) | Request::Write(target, _)) = slice.request else {
            self.settle(index, Status::Unsupported);
            return;
        };
        let entry = &mut self.lanes[lane as usize];
        if matches!(entry.path, Path::Shared | Path::Rdma) {
            entry.close_way(target.segment, via);
            self.retry(index, Status::Unsupported);
        } else {
            self.settle(index, Status::Unsupported);
        }
    }

    fn copy_outcome(&mut self, index: u32, result: Result<(), Status>) {
        match result {
            Ok(()) => self.finish_copy(index, true),
            Err(Status::Corrupt) => self.finish_copy(index, false),
            Err(status) => self.settle(index, status),
        }
    }
}

//! Many small ranges in one frame: queued reads, or writes, that follow each other on a lane travel together, and one
//! answer completes them all.
//!
//! A frame of its own for a few KiB costs more than to move them: a header, an answer, and two looks at the tables on
//! either side. Ranges of up to [`super::Config::gather_range_bytes`] share one. The frame is all or nothing: the peer
//! refuses it as a whole and names the first bad range, which then fails by itself, while its neighbours are sent once
//! more, each alone. So a bad range costs its neighbours one round trip and nothing else, however many are bad.
//!
//! Other lanes need none of this: over shared memory a range is copied without a frame.

use kvplane_proto::flags::FrameFlags;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{Item, Kind, Operation, ReadItem, RunPacker, WriteItem};
use kvplane_proto::status::Status;

use super::Client;
use super::table::{SliceEvent, SliceState, slice_id};
use super::types::{Local, PayloadTo, Request, SegmentTarget, SliceId};

/// The range that a request reads or writes.
const fn range_of(request: &Request, write: bool) -> Option<(SegmentTarget, Local)> {
    match *request {
        Request::Read(target, local) if !write => Some((target, local)),
        Request::Write(target, local) if write => Some((target, local)),
        _ => None,
    }
}

impl Client {
    /// Whether a slice may travel with its neighbours.
    pub(super) fn may_gather(&self, index: u32) -> bool {
        let slice = self.slices.peek(index);
        let (Request::Read(_, local) | Request::Write(_, local)) = slice.request else { return false };
        !slice.tries.alone && local.bytes <= self.config.gather_range_bytes.min(Limits::GATHER_BYTES)
    }

    /// Sends the reads, or writes, at the head of the queue in one frame: as many as may be. The first one may.
    pub(super) fn send_many(&mut self, lane: u32, write: bool) {
        let id = self.lanes[lane as usize].id(lane);
        let (alone, many) =
            if write { (Operation::Write, Operation::WriteMany) } else { (Operation::Read, Operation::ReadMany) };
        let limit_bytes = self.config.slice_bytes.max(self.config.gather_range_bytes).min(Limits::GATHER_BYTES);
        let request = self.open_wire(id, many);
        let (start, mut runs, mut bytes, mut deadline_us) = (self.outbox.mark(), RunPacker::new(), 0, 0);
        let mut pieces = self.outbox.take_pieces();
        while runs.ranges() < Limits::RANGES_PER_FRAME && self.window_open(lane) {
            let Some(next) = self.next_queued(lane).filter(|next| self.may_gather(next.index)) else { break };
            let Some((target, local)) = range_of(&self.slices.peek(next.index).request, write) else { break };
            if bytes + local.bytes > limit_bytes {
                break;
            }
            if bytes == 0 {
                deadline_us = self.deadline_us(next.index);
            }
            bytes += local.bytes;
            runs.push(target.segment, target.offset, local.bytes as u32, self.outbox.writer());
            push_merged(&mut pieces, local);
            self.take_queued(lane, next.index);
            self.join_wire(request, next.index);
        }
        let (operation, mut items) =
            if runs.ranges() == 1 { (alone, 1) } else { (many, runs.finish(self.outbox.writer())) };
        if operation == alone {
            items = self.unpack(request, operation);
        }
        let named = if operation == Operation::Read { RequestId::default() } else { request };
        let mut header = Header::request(Kind::Request(operation), named);
        header.deadline_us = deadline_us;
        if write {
            header = header.with_payload(bytes, self.config.checksum_segments.then_some(0));
        } else {
            pieces.clear();
            header.flags = header.flags.with(FrameFlags::SUM_REPLIES, self.config.checksum_segments);
        }
        let body = self.outbox.since(start);
        self.send(id, header, body, items, &pieces);
        self.outbox.give_pieces(pieces);
    }

    /// There is only one range: it goes as such. Nothing of a run has been written yet.
    fn unpack(&mut self, request: RequestId, operation: Operation) -> usize {
        let wire = self.wires.at(request.index);
        wire.operation = operation;
        match self.slices.peek(wire.slices[0]).request {
            Request::Read(target, local) => {
                ReadItem { request, segment: target.segment, offset: target.offset, bytes: local.bytes }
                    .encode(self.outbox.writer());
            }
            Request::Write(target, _) => {
                WriteItem { segment: target.segment, offset: target.offset }.encode(self.outbox.writer());
            }
            _ => unreachable!("only reads and writes are gathered"),
        }
        1
    }

    /// Where the payload of gathered reads goes, in order: ranges of the caller's memory, neighbours as one. To be
    /// asked for at once after the [`PayloadTo::Scatter`] that named the slice.
    pub fn scatter(&mut self, slice: SliceId) -> &[Local] {
        let mut pieces = self.outbox.take_pieces();
        let wire = self.slices.get(slice.index, slice.generation).map(|slice| slice.wire);
        if let Some(wire) = wire.and_then(|wire| self.wires.get(wire.index, wire.generation)) {
            for &index in &wire.slices {
                if let Request::Read(_, local) = self.slices.peek(index).request {
                    push_merged(&mut pieces, local);
                }
            }
        }
        self.outbox.give_pieces(pieces)
    }

    /// The payload of gathered reads follows. `None` when no honest peer sends that.
    ///
    /// The request stays open until the payload is there, because it says for whom the payload is.
    pub(super) fn on_many_payload(&mut self, header: &Header) -> Option<PayloadTo> {
        let unchecked = header.checksum().is_none();
        if unchecked && self.config.checksum_segments {
            return None;
        }
        let wire = self.wires.at(header.request.index);
        let slices = &mut self.slices;
        // A second answer comes to slices that receive already.
        let asked = wire.slices.iter().all(|&index| slices.at(index).state == SliceState::Asked);
        let bytes: u64 = wire.slices.iter().map(|&index| slices.at(index).weight_bytes()).sum();
        if !asked || header.payload_bytes != bytes {
            return None;
        }
        for &index in &wire.slices {
            let slice = slices.at(index);
            slice.answer.bytes = slice.weight_bytes();
            slice.step(SliceEvent::Payload);
        }
        let first = wire.slices[0];
        slices.at(first).answer.expected_checksum = header.checksum();
        Some(PayloadTo::Scatter { slice: slice_id(first, slices.generation(first)) })
    }

    /// The payload of gathered reads is in the caller's memory.
    pub(super) fn many_done(&mut self, request: RequestId, good: bool) {
        let wire = self.close_wire(request);
        self.counters.corrupt += u64::from(!good);
        for &index in &wire.slices {
            self.settle(index, if good { Status::Ok } else { Status::Corrupt });
        }
        self.wires.recycle(wire);
    }

    /// Gathered writes are done, or gathered ranges were refused. `None` when no honest peer says that.
    pub(super) fn on_many_settled(&mut self, slices: &[u32], header: &Header) -> Option<()> {
        let of_a_range =
            matches!(header.status, Status::Stale | Status::Unauthorized | Status::OutOfRange | Status::BadRequest);
        if of_a_range {
            let bad = usize::try_from(header.argument).ok().filter(|&bad| bad < slices.len())?;
            for (position, &index) in slices.iter().enumerate() {
                if position == bad {
                    self.settle(index, header.status);
                } else {
                    self.slices.at(index).tries.alone = true;
                    self.send_again(index, None);
                }
            }
            return Some(());
        }
        for &index in slices {
            let slice = self.slices.at(index);
            if header.status == Status::Ok {
                slice.answer.bytes = slice.weight_bytes();
            }
            self.settle(index, header.status);
        }
        Some(())
    }
}

/// Appends a range, to the last one where it continues that.
fn push_merged(pieces: &mut Vec<Local>, local: Local) {
    match pieces.last_mut() {
        Some(last) if last.buffer == local.buffer && last.offset + last.bytes == local.offset => {
            last.bytes += local.bytes;
        }
        _ => pieces.push(local),
    }
}

//! Gathering: consecutive reads, or writes, of small ranges on a lane share one frame, and one reply completes them
//! all.
//!
//! For a few KiB, a frame of its own costs more than the transfer itself: a header, a reply, and two table lookups at
//! either end. Ranges of up to [`crate::Config::gather_range_bytes`] share one frame. The frame is all or nothing: the
//! peer refuses it as a whole and names the first bad range. That range fails, while each of the others is retried in a
//! frame of its own. So bad ranges cost the others one round trip and nothing else, however many they are.
//!
//! Other lanes need no gathering: over shared memory a range is copied without a frame.

use kvplane_proto::flags::FrameFlags;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{Item, Kind, Operation, ReadItem, RunPacker, WriteItem};

use super::Sender;
use crate::tables::Resend;
use crate::types::{Local, Request, SegmentTarget};

/// Returns the range that a request reads or writes.
const fn range_of(request: &Request, write: bool) -> Option<(SegmentTarget, Local)> {
    match *request {
        Request::Read(target, local) if !write => Some((target, local)),
        Request::Write(target, local) if write => Some((target, local)),
        _ => None,
    }
}

impl Sender<'_> {
    /// Returns true if a slice may be gathered.
    pub(super) fn may_gather(&self, index: u32) -> bool {
        let slice = self.traffic.slices.peek(index);
        let (Request::Read(_, local) | Request::Write(_, local)) = slice.request else { return false };
        slice.way.resend != Resend::Alone
            && local.bytes <= self.traffic.network.host.config.gather_range_bytes.min(Limits::GATHER_BYTES)
    }

    /// Sends as many of the reads, or writes, at the head of the queue in one frame as possible. The first one may be
    /// gathered.
    pub(super) fn send_many(&mut self, lane: u32, write: bool) {
        let id = self.lane(lane).id(lane);
        let (alone, many) =
            if write { (Operation::Write, Operation::WriteMany) } else { (Operation::Read, Operation::ReadMany) };
        let limit_bytes = self
            .traffic
            .network
            .host
            .config
            .slice_bytes
            .max(self.traffic.network.host.config.gather_range_bytes)
            .min(Limits::GATHER_BYTES);
        let request = self.open_wire(id, many);
        let (start, mut runs, mut bytes, mut deadline_us) = (self.outbox().mark(), RunPacker::new(), 0, 0);
        let mut pieces = self.outbox().take_pieces();
        while runs.ranges() < Limits::RANGES_PER_FRAME && self.window_open(lane) {
            let Some(next) = self.next_queued(lane).filter(|next| self.may_gather(next.index)) else { break };
            let Some((target, local)) = range_of(&self.traffic.slices.peek(next.index).request, write) else { break };
            if bytes + local.bytes > limit_bytes {
                break;
            }
            if bytes == 0 {
                deadline_us = self.deadline_us(next.index);
            }
            bytes += local.bytes;
            runs.push(target.segment, target.offset, local.bytes as u32, self.outbox().writer());
            push_merged(&mut pieces, local);
            self.take_queued(lane, next.index);
            self.join_wire(request, next.index);
        }
        let (operation, mut items) =
            if runs.ranges() == 1 { (alone, 1) } else { (many, runs.finish(self.outbox().writer())) };
        if operation == alone {
            items = self.unpack(request, operation);
        }
        let named = if operation == Operation::Read { RequestId::default() } else { request };
        let mut header = Header::request(Kind::Request(operation), named);
        header.deadline_us = deadline_us;
        if write {
            header = header.with_payload(bytes, self.traffic.network.host.config.checksum_segments.then_some(0));
        } else {
            pieces.clear();
            header.flags =
                header.flags.with(FrameFlags::SUM_REPLIES, self.traffic.network.host.config.checksum_segments);
        }
        let body = self.outbox().since(start);
        self.send(id, header, body, items, &pieces);
        self.outbox().give_pieces(pieces);
    }

    /// Rewrites a frame of a single range as a plain read or write. Its run has not been encoded yet.
    fn unpack(&mut self, request: RequestId, operation: Operation) -> usize {
        let wire = self.traffic.wires.at(request.index);
        wire.operation = operation;
        match self.traffic.slices.peek(wire.slices[0]).request {
            Request::Read(target, local) => {
                ReadItem { request, segment: target.segment, offset: target.offset, bytes: local.bytes }
                    .encode(self.outbox().writer());
            }
            Request::Write(target, _) => {
                WriteItem { segment: target.segment, offset: target.offset }.encode(self.outbox().writer());
            }
            _ => unreachable!("only reads and writes are gathered"),
        }
        1
    }

    /// Writes a range of a segment in a frame of its own.
    pub(super) fn send_write(&mut self, lane: u32, index: u32, target: SegmentTarget, local: Local) {
        let item = WriteItem { segment: target.segment, offset: target.offset };
        let checksum = self.sums_segments(lane);
        let mut body = self.outbox().take_names();
        item.encode(&mut body);
        self.send_payload(lane, index, Operation::Write, local, checksum, &body);
        self.outbox().give_names(body);
    }
}

/// Appends a range, merged with the last one if it continues that.
pub(crate) fn push_merged(pieces: &mut Vec<Local>, local: Local) {
    match pieces.last_mut() {
        Some(last) if last.buffer == local.buffer && last.offset + last.bytes == local.offset => {
            last.bytes += local.bytes;
        }
        _ => pieces.push(local),
    }
}

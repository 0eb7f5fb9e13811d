//! Requests for segments: the ranges that each of them reads or writes.

use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation, ReadItem, RunItem, WriteItem};
use kvplane_proto::{FrameFlags, Status};

use super::Segments;
use super::gathered::{Refusal, list_ranges, runs_of};
use crate::service::shard::answers::{Answers, items_of};
use crate::service::shard::sessions::PendingPayload;
use crate::service::types::{CloseReason, Extents, Output, PayloadTo, PeerKey};

/// Destination of a write's payload, and the state to complete it when it was received.
pub(in crate::service) struct Write {
    pub(in crate::service) pending: PendingPayload,
    pub(in crate::service) to: PayloadTo,
}

impl Segments {
    /// Describes the segments to a peer that opens them by their name, or by an empty name: peer-to-peer use without a
    /// catalog.
    pub(in crate::service) fn open(&self, answers: &mut Answers, peer: PeerKey, header: &Header, body: &[u8]) {
        if !body.is_empty() && body != self.name.as_bytes() {
            answers.answer(peer, Operation::OpenSegment, header, Status::NotFound);
            return;
        }
        let descriptor = self.descriptor().encode();
        answers.items(peer, Operation::OpenSegment, header.request, 1, |body| body.extend_from_slice(&descriptor));
    }

    /// Answers each range of a read with a frame.
    pub(in crate::service) fn read(
        &mut self,
        answers: &mut Answers,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let checksum = header.flags.has(FrameFlags::SUM_REPLIES).then_some(0);
        for item in items_of::<ReadItem>(header, body)? {
            match self.acquire(item.segment, item.offset, item.bytes, false) {
                Ok(extent) => {
                    self.read_bytes += extent.bytes;
                    let header = Header::reply(Kind::Reply(Operation::Read), item.request, Status::Ok)
                        .with_payload(extent.bytes, checksum);
                    let payload = Some((Extents::One(extent), self.reads.start(peer, item.segment)));
                    answers.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload });
                }
                Err(status) => answers.status(peer, Operation::Read, item.request, status, 0),
            }
        }
        Ok(())
    }

    /// Begins a write and returns the destination of its payload.
    pub(in crate::service) fn write(&mut self, header: &Header, body: &[u8]) -> Result<Write, CloseReason> {
        let mut items = items_of::<WriteItem>(header, body)?;
        let (Some(item), None) = (items.next(), items.next()) else {
            return Err(CloseReason::Malformed("a write that is not of exactly one range"));
        };
        let request = header.request;
        Ok(match self.acquire(item.segment, item.offset, header.payload_bytes, true) {
            Ok(extent) => {
                self.write_bytes += extent.bytes;
                let pending = PendingPayload::Write { request, segment: item.segment, expected: header.checksum() };
                Write { pending, to: PayloadTo::Extent(extent) }
            }
            Err(status) => {
                let pending = PendingPayload::Refused { request, operation: Operation::Write, status, argument: 0 };
                Write { pending, to: PayloadTo::Discard }
            }
        })
    }

    /// Answers all ranges of a gathered read with one frame.
    pub(in crate::service) fn read_many(
        &mut self,
        answers: &mut Answers,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let runs = runs_of(header, body)?;
        let mut used = self.reads.list();
        let usable = |segment| self.usable_bytes(segment, false);
        let listed = answers.list_extents(|extents| list_ranges(runs, usable, extents, &mut used));
        let (bytes, extents) = match listed {
            Ok(listed) => listed,
            Err(Refusal { status, good }) => {
                self.reads.recycle(used);
                answers.status(peer, Operation::ReadMany, header.request, status, good);
                return Ok(());
            }
        };
        self.count_users(&used);
        self.read_bytes += bytes;
        let checksum = header.flags.has(FrameFlags::SUM_REPLIES).then_some(0);
        let header =
            Header::reply(Kind::Reply(Operation::ReadMany), header.request, Status::Ok).with_payload(bytes, checksum);
        let payload = Some((Extents::Many(extents), self.reads.start_gathered(peer, used)));
        answers.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload });
        Ok(())
    }

    /// Begins a gathered write; `answers` keeps its extents for the host.
    pub(in crate::service) fn write_many(
        &mut self,
        answers: &mut Answers,
        header: &Header,
        body: &[u8],
    ) -> Result<Write, CloseReason> {
        let runs = runs_of(header, body)?;
        let bytes_of = |run: RunItem| u64::from(run.ranges) * u64::from(run.bytes);
        if header.payload_bytes != runs.clone().map(bytes_of).sum::<u64>() {
            return Err(CloseReason::Malformed("a payload whose length differs from that of its ranges"));
        }
        let request = header.request;
        let mut used = self.reads.list();
        let usable = |segment| self.usable_bytes(segment, true);
        let listed = answers.list_extents(|extents| list_ranges(runs, usable, extents, &mut used));
        Ok(match listed {
            Ok((bytes, extents)) => {
                self.count_users(&used);
                self.write_bytes += bytes;
                let pending = PendingPayload::WriteMany { request, segments: used, expected: header.checksum() };
                Write { pending, to: PayloadTo::Extents(extents) }
            }
            Err(Refusal { status, good }) => {
                self.reads.recycle(used);
                let pending =
                    PendingPayload::Refused { request, operation: Operation::WriteMany, status, argument: good };
                Write { pending, to: PayloadTo::Discard }
            }
        })
    }

    /// Answers a write whose payload was received; `checksum` is the checksum of its bytes. Returns false if it differs
    /// from the one that the peer stated.
    pub(in crate::service) fn finish_write(
        &mut self,
        answers: &mut Answers,
        peer: PeerKey,
        pending: PendingPayload,
        checksum: Option<u64>,
    ) -> bool {
        let is_good = pending.is_good_write(checksum);
        self.answer_write(answers, peer, pending, if is_good { Status::Ok } else { Status::Corrupt });
        is_good
    }

    /// Ends a write and answers it with this status. Does nothing for other payloads.
    pub(in crate::service) fn answer_write(
        &mut self,
        answers: &mut Answers,
        peer: PeerKey,
        pending: PendingPayload,
        status: Status,
    ) {
        let (operation, request) = match pending {
            PendingPayload::Write { request, .. } => (Operation::Write, request),
            PendingPayload::WriteMany { request, .. } => (Operation::WriteMany, request),
            PendingPayload::Refused { .. } | PendingPayload::Put { .. } | PendingPayload::Fill { .. } => return,
        };
        self.end_write(pending, &mut answers.outputs);
        answers.status(peer, operation, request, status, 0);
    }

    /// Refuses a write with this status: it is answered when its payload was received.
    pub(in crate::service) fn refuse_write(
        &mut self,
        answers: &mut Answers,
        pending: PendingPayload,
        status: Status,
    ) -> PendingPayload {
        let (request, operation) = match &pending {
            PendingPayload::Write { request, .. } => (*request, Operation::Write),
            PendingPayload::WriteMany { request, .. } => (*request, Operation::WriteMany),
            PendingPayload::Refused { .. } | PendingPayload::Put { .. } | PendingPayload::Fill { .. } => {
                return pending;
            }
        };
        self.end_write(pending, &mut answers.outputs);
        PendingPayload::Refused { request, operation, status, argument: 0 }
    }
}

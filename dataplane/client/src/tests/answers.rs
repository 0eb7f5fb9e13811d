//! Replies of an honest peer.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{RequestId, SegmentId};
use kvplane_proto::message::{Kind, Operation, ReadItem, RegionDescriptor, RunItem, SegmentDescriptor, WriteItem};
use kvplane_proto::status::Status;

use super::rig::{Reply, SEGMENT_BYTES, SentFrame};
use crate::LaneId;

/// Returns the reply to a put or a write.
pub(super) fn single(sent: &SentFrame, status: Status, version: u64) -> Reply {
    let header = Header::reply(Kind::Reply(sent.operation()), sent.header.request, status).with_argument(version);
    Reply { lane: sent.lane, header, body: Vec::new(), sum: 0 }
}

/// Returns a reply to one request id, without body or payload.
pub(super) fn bare(lane: LaneId, operation: Operation, request: RequestId, status: Status) -> Reply {
    Reply { lane, header: Header::reply(Kind::Reply(operation), request, status), body: Vec::new(), sum: 0 }
}

/// Returns the reply to gathered reads or writes.
pub(super) fn many(sent: &SentFrame) -> Reply {
    let kind = Kind::Reply(sent.operation());
    let (mut before, mut bytes) = (0, 0);
    for run in sent.items::<RunItem>() {
        if let Some(bad) = bad_range(&run) {
            let header = Header::reply(kind, sent.header.request, Status::OutOfRange).with_argument(before + bad);
            return Reply { lane: sent.lane, header, body: Vec::new(), sum: 0 };
        }
        before += u64::from(run.ranges);
        bytes += u64::from(run.ranges) * u64::from(run.bytes);
    }
    let mut header = Header::reply(kind, sent.header.request, Status::Ok);
    if sent.operation() == Operation::ReadMany {
        header = header.with_payload(bytes, Some(9));
    } else {
        assert_eq!(bytes, sent.header.payload_bytes);
    }
    Reply { lane: sent.lane, header, body: Vec::new(), sum: 9 }
}

pub(super) fn bad_range(run: &RunItem) -> Option<u64> {
    run.first_outside(SEGMENT_BYTES).map(u64::from)
}

pub(super) fn check_range(item: &WriteItem, sent: &SentFrame) -> Status {
    let inside = item.offset + sent.header.payload_bytes <= SEGMENT_BYTES;
    if inside { Status::Ok } else { Status::OutOfRange }
}

pub(super) fn read(lane: LaneId, item: &ReadItem) -> Reply {
    if item.offset + item.bytes > SEGMENT_BYTES {
        return bare(lane, Operation::Read, item.request, Status::OutOfRange);
    }
    let header =
        Header::reply(Kind::Reply(Operation::Read), item.request, Status::Ok).with_payload(item.bytes, Some(9));
    Reply { lane, header, body: Vec::new(), sum: 9 }
}

pub(super) fn descriptor() -> SegmentDescriptor {
    let segment = SegmentId { index: 1, generation: 1 };
    let region = RegionDescriptor { segment, address: 1 << 40, bytes: SEGMENT_BYTES, shareable: true, writable: true };
    SegmentDescriptor { name: "there".into(), regions: vec![region] }
}
